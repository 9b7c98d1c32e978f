"""Fault injection: run a command in forked processes with one fault each, and check the files that
it leaves.

Run it as a program (``python fault_driver.py``); it does not import torch.
"""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from command import main
from fault_injector import MODES, Injector

ROOT = Path(__file__).resolve().parents[2]
Snapshot = dict[str, tuple[int, bytes]]
TEMPORARY = (".ckpttool.tmp", ".ckpttool.edit")


@dataclass(frozen=True)
class Scenario:
    """Run `argv` in a copy of `template`. `journal`: the state may be mixed until the next command
    has run.

    `once`: the command cannot be repeated. `apart`: there are several independent outputs. `again`
    are options that let the command run on a finished output: ``--force``.
    """

    template: str
    argv: list[str]
    cwd: str = "."
    look: str = ""
    journal: bool = False
    once: bool = False
    apart: bool = False
    again: tuple[str, ...] = ("--force",)


def snapshot(folder: Path) -> Snapshot:
    """Return mode and bytes of every file except temporary files and undo journals."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        own = path.relative_to(folder)
        is_kept = own.name.endswith((".ckpttool.undo", ".ckpttool.old"))
        if not is_kept and not any(part.endswith(TEMPORARY) for part in own.parts):
            is_file = path.is_file() and not path.is_symlink()
            found[str(own)] = (path.lstat().st_mode, path.read_bytes() if is_file else b"")
    return found


def litter(folder: Path) -> list[str]:
    """Return the temporary files that were left."""
    return [
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(TEMPORARY)
    ]


def run(
    work: Path, argv: list[str], cwd: str, injector: Injector | None
) -> tuple[int, str, list[str]]:
    """Run a command line in a forked process; return its exit status (negative: signal), stderr and
    calls.
    """
    log, calls = work.parent / "stderr", work.parent / "calls"
    child = os.fork()
    if child == 0:
        try:
            os.chdir(work / cwd)
            for number, path in ((1, os.devnull), (2, str(log))):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            if injector is not None:
                injector.install()
            status = main(argv)
            if injector is not None and injector.at < 0:
                calls.write_text("\n".join(injector.calls))
            os._exit(status)
        finally:
            os._exit(99)
    _, ended = os.waitpid(child, 0)
    seen = (
        calls.read_text().split("\n")
        if injector is not None and injector.at < 0 and calls.exists()
        else []
    )
    return os.waitstatus_to_exitcode(ended), log.read_text(), seen


class Judge:
    """Run the scenario repeatedly and collect problems."""

    def __init__(self, scenario: Scenario, scratch: Path) -> None:
        self.scenario, self.scratch = scenario, scratch
        self.work = scratch / "work"
        self.problems: list[str] = []
        self.points: Counter[str] = Counter()
        self.slowest = 0.0
        self._warm_up()
        self.old = self._fresh()
        status, said, self.calls = run(self.work, scenario.argv, scenario.cwd, Injector())
        assert status == 0, said
        self.new = snapshot(self.work)
        assert self.new != self.old
        assert not litter(self.work)

    def _warm_up(self) -> None:
        """Run the command in this process, so that forked processes find everything imported."""
        self._fresh()
        before = os.getcwd()
        os.chdir(self.work / self.scenario.cwd)
        with redirect_stdout(io.StringIO()):
            main(self.scenario.argv)
        os.chdir(before)
        gc.freeze()

    def _fresh(self) -> Snapshot:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.scenario.template, self.work, symlinks=True)
        return snapshot(self.work)

    def point(self, mode: str, at: int) -> None:
        """Run once with one fault, and check the result."""
        self._fresh()
        self.points[mode] += 1
        start = time.monotonic()
        status, said, _ = run(self.work, self.scenario.argv, self.scenario.cwd, Injector(mode, at))
        self.slowest = max(self.slowest, time.monotonic() - start)
        where = f"{mode} at {at} ({self.calls[at]}): "

        def expect(true: bool, what: str) -> None:
            if not true:
                self.problems.append(where + what + f" [status {status}: {said.strip()[:300]}]")

        expect("internal error" not in said and "Traceback" not in said, "an internal error")
        now = snapshot(self.work)
        if mode.startswith("KILL"):
            expect(status == -9, "not killed")
        else:
            expect(status in (0, 2, 128 + 15, 128 + 2, 128 + 1), "unexpected exit status")
            expect(status != 0 or now == self.new, "succeeded, but incomplete")
            expect(self._claims_are_true(said, now), "reported as unchanged, but changed")
            if mode != "all EIO":
                expect(
                    status != 0 or not litter(self.work) or self.calls[at] in _CLEANING,
                    "succeeded, but left temporary files",
                )
        if self.scenario.journal and now not in (self.old, self.new):
            expect(
                mode.startswith("KILL") or mode == "all EIO",
                "mixed state, but the process was not killed",
            )
            status, said, _ = run(self.work, ["undo", self.scenario.look], self.scenario.cwd, None)
            expect(status == 0, f"undo failed: {said.strip()[:300]}")
            now = snapshot(self.work)
        expect(
            self._is_consistent(now), f"neither old nor new: {_difference(now, self.old, self.new)}"
        )
        again = [] if now == self.old else list(self.scenario.again)
        status, said, _ = run(self.work, [*self.scenario.argv, *again], self.scenario.cwd, None)
        # the command may finish the journal first, and then have nothing left to do
        expect(status in (0, 1, 2), f"does not run again: {said.strip()}")
        expect(snapshot(self.work) == self.new, "repeated, but incomplete")
        expect(not litter(self.work), f"temporary files left: {litter(self.work)}")

    def _is_consistent(self, now: Snapshot) -> bool:
        """Return whether all files are old or all are new; independent outputs are checked one by
        one.
        """
        if not self.scenario.apart:
            return now in (self.old, self.new)
        names = {*now, *self.old, *self.new}
        return all(now.get(name) in (self.old.get(name), self.new.get(name)) for name in names)

    def _claims_are_true(self, said: str, now: Snapshot) -> bool:
        """Return whether a file that is reported as unchanged is unchanged."""
        if "is as it was" not in said or now == self.old:
            return True
        name = said.removeprefix("error: ").partition(":")[0]
        return self.scenario.apart and now.get(name) == self.old.get(name)


_CLEANING = ("unlink", "rmdir", "remove")


def _difference(now: Snapshot, *others: Snapshot) -> str:
    return " / ".join(
        str([n for n in {**now, **other} if now.get(n) != other.get(n)]) for other in others
    )


def drive(
    scenario: Scenario, scratch: Path, points: int | None, choose: Callable[[int, int], int]
) -> Judge:
    """Run `points` faults of each mode, spread over the calls; with None, one at each call."""
    judge = Judge(scenario, scratch)
    for row, mode in enumerate(MODES):
        numbers = [
            i
            for i, call in enumerate(judge.calls)
            if mode not in ("short", "KILL within") or call == "write"
        ]
        if points is not None and len(numbers) > points:
            step = len(numbers) / points
            numbers = [numbers[choose(int(i * step), row) % len(numbers)] for i in range(points)]
        for at in dict.fromkeys(numbers):
            judge.point(mode, at)
    return judge


_LEFT_OUT = ("ckpttool.__", "ckpttool.tracing", "ckpttool.live", "ckpttool.evaluate.torch_eval")


def preload() -> None:
    """Import modules once that each forked process would otherwise import."""
    for path in sorted((ROOT / "ckpttool").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(_LEFT_OUT):
            import_module(name)


def _main() -> None:
    """Read scenarios by name, and print a line for each result."""
    request: dict[str, Any] = json.loads(sys.stdin.read())
    preload()
    for name, words in sorted(request["scenarios"].items()):
        scenario = Scenario(**words)
        judge = drive(
            scenario, Path(request["scratch"]), request["points"], lambda at, row: at + row
        )
        seen = {
            "name": name,
            "problems": judge.problems,
            "points": judge.points,
            "calls": judge.calls,
            "slowest": judge.slowest,
        }
        print(
            f"{name}: {judge.points.total()} points", *judge.problems, sep="\n  ", file=sys.stderr
        )
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    _main()
