"""Times ckpttool as whole processes against other ways to the same end, in turns A B B A, in one run.

    make bench [SIZE=1] [RUNS=4] [CASES=rename]

Prints a Markdown table, and with ``--write`` puts it with its date into README.md. A ratio is the median of the ratios
of paired runs, with the least and the greatest of them; CPU is user and system time; memory is the largest resident set
of the process, as the operating system counted it. What each case writes is looked at before its time counts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import data
import growth
from cases import Case, cases

ROOT = Path(__file__).resolve().parent.parent
HEAD = (
    "| work | against | ratio: median (least-greatest) | time | CPU | memory |\n| --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Run:
    """One whole process."""

    seconds: float
    cpu: float
    rss_mib: float


def run(command: list[str], folder: Path, status: int = 0) -> Run:
    """One whole process, from start to exit. Ends the benchmark where it exits otherwise.

    The last output is removed right before: its memory is free, and taken again by the new one, the same for all.
    """
    os.sync()  # what the last run left to be written is not charged to this one
    for left in folder.glob("out*"):
        left.unlink()
    start = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, to, os.devnull, os.O_WRONLY, 0) for to in (1, 2)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, ended, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(ended) != status:
        sys.exit(f"failed: {shlex.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def cache(case: Case, folder: Path) -> None:
    """Of the folder's files those that the case reads are in the page cache, the others are not: there is room."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb", buffering=0) as file:
            if str(path) in case.words or (path.parent != folder and str(path.parent) in case.words):
                while file.read(1 << 20):
                    pass
            elif hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: Case, folder: Path, runs: int) -> str:
    """A row of the table. Ends the benchmark where what was written is not what it is to be."""
    run(case.theirs, folder, case.status), run(case.ours, folder, case.status)  # bytecode is compiled
    pid = os.fork()  # what the check loads is not inherited by those that are measured
    if pid == 0:
        os._exit(0 if case.check() else 1)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"wrong: {shlex.join(case.ours)}")
    cache(case, folder)
    pairs = []
    for at in range(runs):  # in turns A B B A: what a run leaves to the next one, such as memory, is left to both
        both = [case.ours, case.theirs]
        done = [run(command, folder, case.status) for command in (both if at % 2 == 0 else both[::-1])]
        pairs.append((done[at % 2], done[1 - at % 2]))
    ratios = sorted(ours.seconds / theirs.seconds for ours, theirs in pairs)
    seconds = statistics.median(ours.seconds for ours, _ in pairs)
    cpu = statistics.median(ours.cpu for ours, _ in pairs)
    rss = max(ours.rss_mib for ours, _ in pairs)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return f"| {case.work} | {case.against} | {ratio} | {seconds:.2f} s | {cpu:.2f} s | {rss:.0f} MiB |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=1.0, help="GiB of the model's file")
    parser.add_argument("--runs", type=int, default=4, help="an even number: each of a pair is the first as often")
    parser.add_argument("--cases", default="", help="a regular expression: only the work that it is found in")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="put the table into README.md, the growth into docs/")
    args = parser.parse_args()
    chosen = [case for case in cases(args.folder) if re.search(args.cases, case.work)]
    data.make(args.folder, args.size, " ".join(case.words for case in chosen))
    said = f"{datetime.date.today()}: {args.size:g} GiB in {data.TENSORS} tensors; {args.runs} runs of each, in turns."
    lines = [f"{said} Page cache warm.", "", *HEAD.split("\n")]
    print("\n".join(lines))
    for case in chosen:
        lines.append(measure(case, args.folder, args.runs))
        print(lines[-1], flush=True)
    if args.write:
        page = Path(__file__).with_name("README.md")
        block = "<!-- table -->\n" + "\n".join(lines) + "\n<!-- /table -->"
        page.write_text(re.sub(r"<!-- table -->.*<!-- /table -->", lambda _: block, page.read_text(), flags=re.DOTALL))
        (ROOT / "docs" / "growth.svg").write_text(growth.drawn(growth.measured(args.folder)))


if __name__ == "__main__":
    main()
