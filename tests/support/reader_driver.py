"""Run read-only commands on the remains of killed edits, in a process that fails if it writes below
the folder.

Run as a program (``python reader_driver.py``), it reads scenarios by name and prints a line of JSON
for each.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import ckpttool
from command import main
from fault_driver import preload, run
from fault_injector import Injector

# Audit events of calls that change a file or a folder; their first arguments are paths.
_CHANGES = (
    *("os.rename", "os.remove", "os.truncate", "os.link", "os.symlink", "os.mkdir", "os.rmdir"),
    *(
        "os.chmod",
        "os.chown",
        "os.utime",
        "os.setxattr",
        "os.removexattr",
        "shutil.rmtree",
        "shutil.move",
    ),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# in the names of temporary files
_RANDOM = r"\.[0-9a-f]{8}-[0-9a-f]{8}-[0-9-]+-[0-9a-f]{8}|\.[0-9a-f]{8}\."
_WROTE = 77  # exit status of a process that wrote
# Read-only commands for the checkpoint `{}`; `../out` and `../other.pt` are next to the folder.
COMMANDS = (
    "inspect {}",
    "inspect {} --stats",
    "diff {} ../other.pt",
    "diff ../other.pt {} --values",
    "diff --model ../names.json {}",
    "check {}",
    "remap {} --rule z.{{x}}=>y.{{x}} --in-place --dry-run",
    "remap {} --rule z.{{x}}=>y.{{x}} -o ../out.pt --dry-run",
    "remap ../other.pt --like {} -o ../out.pt --dry-run",
    "remap {} --rule z.{{x}}=>y.{{x}} -o ../out.pt",
    "swap-weights {} ../other.pt -o ../out.pt2 --dry-run",
    "trace ../names.json",
    "explain 0.weight --model ../names.json",
)
NO_CHECKPOINT = ("trace", "explain")  # they read a model only
LIBRARY: dict[str, Callable[[str], object]] = {
    "open_checkpoint": ckpttool.open_checkpoint,
    "inspect()": ckpttool.inspect,
    "diff()": lambda path: ckpttool.diff(path, path),
    "remap()": lambda path: ckpttool.remap(path),
}


def _forbid(folder: str, out: int) -> None:
    """End the process with a message if it changes anything below the folder from now on."""

    def below(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        place = os.path.realpath(os.fsdecode(path))
        return place == folder or place.startswith(folder + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & _WRITES and below(args[0])
        )
        if writes or (event in _CHANGES and any(map(below, args[:2]))):
            os.write(out, f"{json.dumps([_WROTE, f'{event} {args}'])}\n".encode())
            os._exit(_WROTE)

    sys.addaudithook(hook)


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        own = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (
            own.st_ino,
            own.st_mode,
            own.st_nlink,
            own.st_mtime_ns,
            own.st_ctime_ns,
            content,
        )
    return found


def _in_fork(work: Path, calls_by_name: dict[str, Callable[[], int]]) -> dict[str, tuple[int, str]]:
    """Make all calls in one forked process in the folder; return their status and stderr. A write
    ends the process.
    """
    log = work.parent / "said"
    child = os.fork()
    if child == 0:
        try:
            os.chdir(work)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            _forbid(os.path.realpath(work), out)
            for name, call in calls_by_name.items():
                os.write(out, f"{json.dumps(name)}\n".encode())
                with redirect_stderr(io.StringIO()) as said:
                    status = call()
                os.write(out, f"{json.dumps([status, said.getvalue()])}\n".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return dict(zip(lines[::2], lines[1::2]))


def _calls_by_name(ckpt: str) -> dict[str, Callable[[], int]]:
    """Return each command and function by name."""
    calls_by_name: dict[str, Callable[[], int]] = {}
    for text in COMMANDS:
        if ckpt.endswith(".pt2") or not text.startswith("swap-weights"):
            calls_by_name[text] = partial(main, text.format(ckpt).split())
    return calls_by_name | {
        name: partial(_of_library, call, ckpt) for name, call in LIBRARY.items()
    }


def _of_library(call: Callable[[str], object], path: str) -> int:
    try:
        call(path)
    except ckpttool.CkptError as error:
        print(error.message, error.hint, file=sys.stderr)
        return error.exit_status
    return 0


def _kind(work: Path, old: dict[str, bytes]) -> tuple[object, ...]:
    """Return a key that distinguishes kinds of leftovers."""
    names = []
    for path in sorted(work.rglob("*")):
        name = re.sub(_RANDOM, ".", str(path.relative_to(work)))
        names.append((name, path.is_file() and old.get(name) == path.read_bytes()))
    return tuple(names)


def drive(
    template: str, line: list[str], cwd: str, ckpt: str, scratch: Path, most: int | None
) -> dict[str, Any]:
    """Run every read-only command on at most `most` kinds of leftovers of the edit; return the
    problems.
    """
    work = scratch / "work"
    for name in ("other.pt", "names.json"):
        shutil.copy(Path(template) / name, scratch / name)

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(Path(template) / "work", work, symlinks=True)

    fresh()
    old = {
        str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()
    }
    status, said, calls = run(work, line, cwd, Injector())
    assert status == 0, said
    gc.freeze()
    points: dict[tuple[object, ...], int] = {}
    for at in range(0, len(calls), 1 if most is None else 2):
        fresh()
        run(work, line, cwd, Injector("KILL after", at))
        points.setdefault(_kind(work, old), at)
    chosen = [*points.values()]
    if most is not None and len(chosen) > most:
        chosen = [chosen[i * len(chosen) // most] for i in range(most)]
    calls_by_name = _calls_by_name(ckpt)
    fresh()
    os.chdir(work)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for call in calls_by_name.values():  # so that forked processes find everything imported
            call()
    os.chdir(template)
    problems, interrupted, runs = list[str](), 0, 0
    for at in chosen:
        fresh()
        run(work, line, cwd, Injector("KILL after", at))
        before = _state(work)
        saw: dict[str, bool] = {}
        for name, (status, said) in _in_fork(work, calls_by_name).items():
            runs += 1
            where = f"killed after {at} ({calls[at]}), {name}: "
            if status not in (0, 1, 2):
                problems.append(f"{where}status {status}: {said[-300:]}")
            if not name.startswith(NO_CHECKPOINT):
                found = "an interrupted edit was found" in said
                saw[name] = found
                if found and (status != 2 or f"ckpttool undo {ckpt}" not in said):
                    problems.append(f"{where}{status} {said}")
        if _state(work) != before:
            problems.append(f"killed after {at} ({calls[at]}): the folder changed")
        (scratch / "out.pt").unlink(missing_ok=True)
        if len({*saw.values()}) > 1:
            problems.append(
                f"killed after {at} ({calls[at]}): not seen by"
                f" {[name for name in saw if not saw[name]]}"
            )
        status, said, _ = run(work, ["undo", ckpt], ".", None)
        was_found = all(saw.values())
        interrupted += was_found
        if (status == 0) < was_found:
            problems.append(
                f"killed after {at} ({calls[at]}): the suggested command does not help: {said}"
            )
        now = {
            str(path.relative_to(work)): path.read_bytes()
            for path in work.rglob("*")
            if path.is_file()
        }
        if was_found and now != old:
            problems.append(
                f"killed after {at}: undone, but different from before:"
                f" {sorted(now.keys() ^ old.keys())}"
            )
    return {"problems": problems, "kinds": len(points), "interrupted": interrupted, "runs": runs}


def _main() -> None:
    request = json.loads(sys.stdin.read())
    preload()
    for name, words in request["scenarios"].items():
        scratch = Path(request["scratch"]) / re.sub(r"\W", "_", name)
        scratch.mkdir()
        found = drive(**words, scratch=scratch, most=request["most"])
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    _main()
