"""Run the long tests of this tree and write date, commit and figures into
docs/maintainers/testing.md.

python .ci/evidence.py [RUN ...]     (`make evidence ONLY='faults pairs'`; all runs if none is
named)
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "maintainers" / "testing.md"
COLUMNS = ("run", "command", "cases", "failures", "skipped", "date", "commit", "time", "processor")
SHOWN = 10  # failures that are listed by name

# Each command runs as the page shows it. Tests report in junit XML, other programs as JSON lines
# (EVIDENCE_RESULTS).
RUNS = {
    "tests": "make test",
    "pairs": "CKPTTOOL_PAIRS=10000 make test ARGS='tests/tracing/test_strict_load.py --dist load'",
    "resumes": "CKPTTOOL_PAIRS=2500 make test ARGS='tests/tracing/test_strict_resume.py --dist"
    " load'",
    "commands": "CKPTTOOL_COMMANDS=2000 make test ARGS='tests/fixes/test_printed_commands.py"
    " --dist load'",
    "fixes": "CKPTTOOL_FIXES=2000 make test ARGS='tests/fixes/test_nothing_is_lost.py --dist load'",
    "draws": 'CKPTTOOL_SEEDS=300 make test ARGS="$(echo $(git grep -l CKPTTOOL_SEEDS'
    " 'tests/*/test_*')) --dist load\"",
    "faults": "make faults",
    "suites": "make suites VENV=.venv-suites",
    "models": "make models VENV=.venv-models",
    "wild": "make wild",
    "floor": "make floor",
    "torch": "make test TORCH=2.15.0",
    "mutants-1": "make mutants N=60 SEED=35 ONLY=ckpttool ARGS='--jobs 2'",
    "mutants-2": "make mutants N=60 SEED=36 ONLY=ckpttool ARGS='--jobs 2'",
    "fuzz": "make fuzz TIME=1800 ARGS='--inputs 1000000 --jobs 2'",
}


class Outcome(NamedTuple):
    """One test, or one part of another program's run: the names of failures, reasons for skipped
    cases, and figures.
    """

    part: str
    failures: list[str]
    skipped: dict[str, int]
    figures: dict[str, float]


# Read results


def of_junit(path: Path) -> Iterator[Outcome]:
    """Yield the outcome of each test. A test may record its `part`, its number of `cases`, and
    figures.
    """
    for case in ElementTree.parse(path).iter("testcase"):
        told = {row.attrib["name"]: row.attrib["value"] for row in case.iter("property")}
        name = case.attrib["name"]
        module = case.attrib["classname"] or name  # of a module that was skipped
        part = told.pop("part", None) or module.rpartition("test_")[2].replace("_", " ")
        cases = int(told.pop("cases", 1))
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        reasons = (
            {} if skipped is None else {skipped.attrib.get("message", "").partition(":")[0]: cases}
        )
        figures: dict[str, float] = {
            "cases": 0 if reasons else cases,
            **{key: json.loads(told[key]) for key in told},
        }
        yield Outcome(part, [f"{module}::{name}"] if failed else [], reasons, figures)


def of_lines(path: Path) -> Iterator[Outcome]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        yield Outcome(row.pop("part"), row.pop("failures"), {}, row)


def together(outcomes: list[Outcome]) -> dict[str, str]:
    """Return the columns of these outcomes: whole numbers are added up, and the largest of others
    is taken.
    """
    figures: dict[str, float] = {}
    for name, figure in (row for one in outcomes for row in one.figures.items()):
        old = figures.get(name, 0)
        figures[name] = old + figure if isinstance(figure, int) else max(old, figure)
    failures = [f"`{name}`" for one in outcomes for name in one.failures]
    reasons: Counter[str] = Counter()
    for one in outcomes:
        reasons.update(one.skipped)
    return {
        "cases": f"{figures.pop('cases', 0):,}",
        "failures": listed(len(failures), failures),
        "skipped": listed(
            reasons.total(), [f"{count:,} {reason}" for reason, count in reasons.most_common()]
        ),
        **{name: f"{figure:,}" for name, figure in figures.items()},
    }


def listed(count: int, items: list[str]) -> str:
    more = [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    text = ", ".join([*items[:SHOWN], *more]).replace("|", "/").replace("\n", " ")
    return f"{count:,}: {text}" if items else "0"


# Run


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def changed() -> list[str]:
    """Files that differ from the commit, except the page that is written here."""
    listed = git("status", "--porcelain").splitlines()
    return [line for line in listed if not line.endswith(str(PAGE.relative_to(ROOT)))]


def head() -> str:
    """The last commit that changed more than pages, so that the runs of one tree have one
    commit.
    """
    return git("log", "-1", "--format=%h", "--abbrev=8", "--", ".", ":!docs", ":!*.md")


def used() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run(name: str) -> bool:
    """Run the command and write its rows; return whether nothing failed."""
    commit, day = head(), time.strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory() as folder:
        junit, lines = Path(folder, "junit.xml"), Path(folder, "lines.json")
        env = os.environ | {
            "PYTEST_ADDOPTS": f"--junitxml={junit} -o junit_family=xunit1",
            "EVIDENCE_RESULTS": str(lines),
        }
        start, before = time.monotonic(), used()
        status = subprocess.run(RUNS[name], shell=True, cwd=ROOT, env=env).returncode
        minutes, spent = (time.monotonic() - start) / 60, (used() - before) / 60
        read = [(of_junit, junit), (of_lines, lines)]
        outcomes = [outcome for reader, path in read if path.exists() for outcome in reader(path)]
    if changed() or head() != commit:
        sys.exit(f"{name}: the tree changed during the run; nothing is written")
    failed = any(outcome.failures for outcome in outcomes)
    if status and not failed:
        outcomes.append(Outcome("", [f"exit status {status}"], {}, {}))
    total = together(outcomes)
    row = {
        "run": name,
        "command": f"`{RUNS[name]}`",
        "cases": total["cases"],
        "failures": total["failures"].partition(":")[0],
        "skipped": total["skipped"].partition(":")[0],
        "date": day,
        "commit": commit,
        "time": f"{minutes:.0f} min",
        "processor": f"{spent:.0f} min",
    }
    rows = sorted([*other_rows(name), row], key=lambda row: [*RUNS].index(row["run"]))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    below = sorted([*other_failures(name), *lines_of(name, failures)])
    write("", "\n".join([table(COLUMNS, rows), *below, ""] if below else [table(COLUMNS, rows)]))
    if block(name).search(PAGE.read_text(encoding="utf-8")):
        write(name, by_part(outcomes))
    return not failed and not status


# Write


def by_part(outcomes: list[Outcome]) -> str:
    """A row for each part, and one for all."""
    names = list(dict.fromkeys(outcome.part for outcome in outcomes))
    rows = [{"": name, **together([one for one in outcomes if one.part == name])} for name in names]
    rows.append({"": f"**{len(names)} together**", **together(outcomes)})
    columns = [name for name in rows[-1] if name != "skipped" or rows[-1][name] != "0"]
    return table(columns, [{column: row.get(column, "") for column in columns} for row in rows])


def table(columns: Iterable[str], rows: Iterable[dict[str, str]]) -> str:
    lines = [
        [*columns],
        ["---" for _ in columns],
        *([row[name] for name in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


def block(name: str) -> re.Pattern[str]:
    mark = f"evidence {name}".strip()
    return re.compile(rf"(?<=<!-- {mark} -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def other_rows(name: str) -> list[dict[str, str]]:
    """The rows of the page for other runs; a run that was never run has a row without figures."""
    found = block("").search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no marks"
    lines = [line for line in found[0].splitlines() if line.startswith("|")]
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "))) for line in lines[2:]]
    never = {column: "never" if column == "date" else "-" for column in COLUMNS}
    known = {row["run"]: row for row in rows}
    return [
        known.get(run, never | {"run": run, "command": f"`{RUNS[run]}`"})
        for run in RUNS
        if run != name
    ]


def lines_of(name: str, failures: list[str]) -> list[str]:
    """Return a line for each failure of a run, for the list below the table."""
    shown = [f"- {name}: `{' '.join(failure.split())}`" for failure in failures[:SHOWN]]
    more = len(failures) - SHOWN
    return [*shown, f"- {name}: and {more} more"] if more > 0 else shown


def other_failures(name: str) -> list[str]:
    """Return the lines of the list below the table that are about other runs."""
    found = block("").search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no marks"
    lines = [line for line in found[0].splitlines() if line.startswith("- ")]
    return [line for line in lines if not line.startswith(f"- {name}: ")]


def write(name: str, text: str) -> None:
    PAGE.write_text(
        block(name).sub(lambda _: text, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8"
    )


if __name__ == "__main__":
    if unknown := [name for name in sys.argv[1:] if name not in RUNS]:
        sys.exit(f"no such run: {', '.join(unknown)}; the runs are {', '.join(RUNS)}")
    if found := changed():
        sys.exit(
            "commit or remove these files first, so that the figures belong to a commit:\n"
            + "\n".join(found)
        )
    # all of them, also after a failure
    sys.exit(int(False in [run(name) for name in sys.argv[1:] or RUNS]))
