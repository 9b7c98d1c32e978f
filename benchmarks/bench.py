"""Time whole processes of ckpttool in one run against `cp`, `cp` with fsync, and what a user would
run instead.

    make bench [SIZE=1] [RUNS=3] [CASES=rename]

Prints two Markdown tables, and puts them into README.md with ``--write``. A ratio is the median of
the ratios of neighboring runs, with the minimum and maximum. CPU is user and system time; memory is
the maximum resident set that the operating system counted. Each output is checked before its time
counts.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import data
from cases import ENVIRONMENT, Case, cases, shell

ROOT = Path(__file__).resolve().parent.parent
WRITING = """\
| work | against `cp` | against `cp` and fsync | against other ways | time | CPU | memory | theirs |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
READING = """\
| work | against | ratio | time | CPU | memory | theirs |
| --- | --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True)
class Run:
    """One whole process."""

    seconds: float
    cpu: float
    mib: float


def run(command: list[str], folder: Path, status: int = 0) -> Run:
    """Run the process; end the benchmark if it exits with another status.

    The last output is removed first: its memory is free, and the new output takes it again, for all
    commands alike.
    """
    for left in folder.glob("out*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    os.sync()  # data of earlier runs
    start = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, to, os.devnull, os.O_WRONLY, 0) for to in (1, 2)]
    pid = os.posix_spawn(command[0], command, ENVIRONMENT, file_actions=quiet)
    _, ended, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(ended) != status:
        sys.exit(f"failed: {shlex.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def cache(case: Case, folder: Path) -> None:
    """Read the files that the case needs into the page cache, and evict the others."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb", buffering=0) as file:
            if (
                any(str(name) in case.words for name in (path, path.parent) if name != folder)
                or path == case.copied
            ):
                while file.read(1 << 20):
                    pass
            elif hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check(case: Case, folder: Path) -> None:
    """Run the command once, which compiles its bytecode, and check the output in another
    process.
    """
    run(case.ours, folder, case.status)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if case.check() else 1)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"wrong: {shlex.join(case.ours)}")


def measure(case: Case, folder: Path, runs: int) -> str:
    """Return a row of the table."""
    check(case, folder)
    cache(case, folder)
    commands = {"ours": case.ours, "instead": case.instead}
    pairs = [("ours", "instead")]
    if case.copied is not None:
        copy = f"cp {case.copied} {folder / 'out.copy'}"
        commands |= {"no fsync": [*case.ours, "--no-fsync"], "cp": shell(copy)}
        commands["cp and fsync"] = shell(f"{copy} && sync {folder / 'out.copy'}")
        pairs = [("no fsync", "cp"), ("ours", "cp and fsync"), ("no fsync", "instead")]
    order = (
        ["cp", "no fsync", "instead", "ours", "cp and fsync"]
        if case.copied
        else ["instead", "ours"]
    )
    done: dict[str, list[Run]] = {name: [] for name in order}
    # forth and back: what a run leaves to the next one, such as memory, is left to all
    for number in range(runs):
        for name in order[:: -1 if number % 2 else 1]:
            done[name].append(run(commands[name], folder, case.status))
    ratios = [_ratio(done[ours], done[theirs]) for ours, theirs in pairs]
    ratios[-1] = f"{case.name}: {ratios[-1]}" if case.copied else f"{case.name} | {ratios[-1]}"
    ours = done["ours"]
    used = [
        f"{median(one.seconds for one in ours):.2f} s",
        f"{median(one.cpu for one in ours):.2f} s",
    ]
    memory = [f"{max(one.mib for one in own):.0f} MiB" for own in (ours, done["instead"])]
    return f"| {' | '.join([case.work, *ratios, *used, *memory])} |"


def _ratio(ours: list[Run], theirs: list[Run]) -> str:
    ratios = sorted(one.seconds / other.seconds for one, other in zip(ours, theirs))
    return f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def setting(folder: Path) -> str:
    """Return the commit, the machine and the versions."""
    commit = _said("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "no commit"
    model = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if sys.platform == "linux"
        else None
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    disk = _said("findmnt", "-n", "-o", "FSTYPE", "-T", str(folder)) or "unknown file system"
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    machine = (
        f"{os.cpu_count()} CPUs ({model[1] if model else platform.machine()}), {memory:.0f}"
        f" GiB, {disk}, {system}"
    )
    return (
        f"commit {commit}; {machine}; Python {platform.python_version()}, torch {version('torch')}"
    )


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=1.0, help="GiB of the model's file")
    parser.add_argument("--runs", type=int, default=3, help="of each command")
    parser.add_argument("--cases", default="", help="a regular expression: only matching work")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    args = parser.parse_args()
    chosen = [case for case in cases(args.folder, args.size) if re.search(args.cases, case.work)]
    data.make(args.folder, args.size, " ".join(case.words for case in chosen))
    said = f"{datetime.date.today()}: {args.size:g} GiB in {data.TENSORS} tensors, page cache warm"
    lines = [f"{said}; {args.runs} runs of each; {setting(args.folder)}."]
    print(lines[0], flush=True)
    for title, is_writing in ((WRITING, True), (READING, False)):
        rows = (
            measure(case, args.folder, args.runs)
            for case in chosen
            if (case.copied is not None) is is_writing
        )
        for row in itertools.chain(["", title], rows):
            print(row, flush=True)
            lines.append(row)
    if args.write:
        page = Path(__file__).with_name("README.md")
        block = "<!-- table -->\n" + "\n".join(lines) + "\n<!-- /table -->"
        page.write_text(
            re.sub(
                r"<!-- table -->.*<!-- /table -->",
                lambda _: block,
                page.read_text(),
                flags=re.DOTALL,
            )
        )


if __name__ == "__main__":
    main()
