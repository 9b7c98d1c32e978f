"""``make mutants N=100``: change the code in one place at a time, in a copy of the repository, and
run the tests.

Mutants are drawn at random from cosmic-ray's operators. Each is run against the tests of its
package (tests/ mirrors ckpttool/) that reach its line, the quickest first. Survivors are printed
with their line. List an equivalent mutant in equivalent.toml, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import parso  # before cosmic_ray, which otherwise finds it partially imported
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

import results
from copies import ROOT, copy_repository, environment

HERE = Path(__file__).parent
MIN_KILLED = 0.95  # share of the mutants
_MAX_SECONDS = 120.0  # of tests for each mutant, unless --seconds is given
_ARGUMENTS_NEEDED = ("VariableReplacer", "VariableInserter")
_IDENTITY = {"Is", "IsNot"}
_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


@dataclass(frozen=True)
class Mutant:
    """The module at `path` with a changed text; `was` and `now` are the line that differs."""

    path: str
    line: int
    was: str
    now: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was}  →  {self.now}"


@dataclass(frozen=True)
class Reach:
    """Seconds of each passing test and of the setup of each file, and which of them reach each line
    of each module.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, Sequence[str]]]

    def tests(self, mutant: Mutant, longest: float = _MAX_SECONDS) -> list[str]:
        """Return the tests that reach the mutant's line or, for a line outside of functions, its
        module.

        Only the quickest are returned: `longest` seconds, including the setup of their files. If
        only other processes reach the line, no test is known to reach it, and all tests are
        candidates.
        """
        lines = self.lines.get(mutant.path, {})
        inside = mutant.line in _lines_of_functions((ROOT / mutant.path).read_text())
        reached = (
            lines.get(mutant.line, ())
            if inside
            else [test for tests in lines.values() for test in tests]
        )
        names = {name for name in reached if name}
        tests = [test for test in self.seconds if "::" in test]
        reaching = [test for test in tests if test in names or _file(test) in names]
        chosen: list[str] = []
        total, set_up = 0.0, set[str]()
        for test in sorted(reaching or tests, key=lambda test: self.seconds[test]):
            setup = 0.0 if _file(test) in set_up else self.seconds[_file(test)]
            if not chosen or total + setup + self.seconds[test] <= longest:
                chosen.append(test)
                total += setup + self.seconds[test]
                set_up.add(_file(test))
        # one after another, so that each is set up once
        files = list(dict.fromkeys(map(_file, chosen)))
        return sorted(chosen, key=lambda test: files.index(_file(test)))


def _file(test: str) -> str:
    return test.partition("::")[0]


# Mutants


def random_mutants(modules: Sequence[str], seed: int) -> Iterator[Mutant]:
    """Yield mutants without end: draw a module by its size, a place in it, and a change of that
    place.
    """
    chance, known = random.Random(seed), set(_equivalent())
    sizes = [len((ROOT / module).read_bytes()) for module in modules]
    while True:
        [module] = chance.choices(modules, sizes)
        places = _places(module)
        if places:
            operator, occurrence = chance.choice(places[chance.choice(sorted(places))])
            mutant = _mutant(module, operator, occurrence)
            if mutant is not None and (mutant.path, mutant.was, mutant.now) not in known:
                yield mutant


def _equivalent() -> Iterator[tuple[str, str, str]]:
    for row in import_module(_TOML).loads((HERE / "equivalent.toml").read_text())["mutant"]:
        assert row["why"]
        yield row["path"], row["was"], row["now"]


@cache
def _operators() -> dict[str, Any]:
    names = [name for name in operator_names() if not name.endswith(_ARGUMENTS_NEEDED)]
    # replacing `is` with `==` rarely changes the behavior
    mixed = [
        name
        for name in names
        if "Comparison" in name and len(_IDENTITY.intersection(name.split("_"))) == 1
    ]
    return {name: get_operator(name)() for name in names if name not in mixed}


@cache
def _places(module: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the places that can be changed in the module, each with its operators and their
    occurrence.
    """
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    nodes = list(ast_nodes(parso.parse((ROOT / module).read_text())))
    for name, operator in _operators().items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            found.setdefault(start, []).append((name, occurrence))
    return found


def _mutant(module: str, operator: str, occurrence: int) -> Mutant | None:
    """Return None if the result is not Python, or differs only in annotations and decorators."""
    old = (ROOT / module).read_text()
    new = mutate_code(old, _operators()[operator], occurrence)
    try:
        if new is None or _behaviour(new) == _behaviour(old):
            return None
    except SyntaxError:
        return None
    pairs = zip(old.splitlines(), new.splitlines())
    line, (was, now) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return Mutant(module, line, was.strip(), now.strip(), new)


def _behaviour(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if hasattr(node, field):
                setattr(node, field, None)
        if hasattr(node, "decorator_list"):
            node.decorator_list = []
    return ast.dump(tree)


@cache
def _lines_of_functions(text: str) -> frozenset[int]:
    bodies = [
        node.body
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
    ]
    spans = [(body[0], body[-1]) if isinstance(body, list) else (body, body) for body in bodies]
    return frozenset(
        line for a, b in spans for line in range(a.lineno, (b.end_lineno or b.lineno) + 1)
    )


# Tests


def matching_tests(packages: Sequence[str]) -> list[str]:
    """Return the test folders with the names of the packages, or the nearest parent."""
    found = []
    for package in packages:
        path = Path("tests", *Path(package).with_suffix("").parts[1:])
        while not (ROOT / path).is_dir():
            path = path.parent
        found.append(str(path))
    return sorted(set(found))


def reach(tests: Sequence[str], jobs: int) -> Reach:
    """Run the tests once, and cache which lines they reach in build/mutants until the package or a
    test changes.
    """
    digest = sha256("\0".join(tests).encode())
    for path in sorted([*(ROOT / "ckpttool").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        if HERE not in path.parents:
            digest.update(path.read_bytes())
    kept = ROOT / "build" / "mutants" / f"{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ckpttool-mutants-") as folder:
            kept.write_text(
                json.dumps(_measured(copy_repository(Path(folder).resolve()), tests, jobs))
            )
    seconds, names, lines = json.loads(kept.read_text())
    return Reach(
        seconds,
        {
            p: {int(n): [names[i] for i in row] for n, row in rows.items()}
            for p, rows in lines.items()
        },
    )


def _measured(copy: Path, tests: Sequence[str], jobs: int) -> list[object]:
    """Return seconds, names of tests, and for each line of each module the indices of the tests
    that reach it.
    """
    print(f"measuring which lines {' '.join(tests)} reach …", flush=True)
    files = sorted(
        str(path) for test in tests for path in [*(copy / test).rglob("test_*.py")] or [copy / test]
    )
    shares = [
        (copy / f"reached-{at}", copy / f"seconds-{at}.json", files[at::jobs]) for at in range(jobs)
    ]
    running = [
        subprocess.Popen(**_under_coverage(copy, *share), stdout=subprocess.DEVNULL)
        for share in shares
    ]
    for process in running:
        process.wait()
    numbers: dict[str, int] = {}
    lines: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    seconds: dict[str, float] = {}
    for data, passed, _ in shares:
        seconds |= json.loads(passed.read_text())
        measured = CoverageData(str(data))
        measured.read()
        for path in measured.measured_files():
            own = lines[str(Path(path).relative_to(copy))]
            for line, names in measured.contexts_by_lineno(path).items():
                own[line] += [numbers.setdefault(name, len(numbers)) for name in names]
    return [seconds, list(numbers), lines]


def _under_coverage(copy: Path, data: Path, passed: Path, files: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a process that runs the tests, and records lines and the tests that
    pass.
    """
    line = [
        "-m",
        "coverage",
        "run",
        "--rcfile=/dev/null",
        f"--data-file={data}",
        "--source=ckpttool",
        "-m",
        "pytest",
    ]
    return {
        "args": [sys.executable, *line, "-p", "reach", "-p", "no:cacheprovider", *files],
        "cwd": copy,
        "env": environment(copy, HERE) | {"CKPTTOOL_PASSED": str(passed)},
    }


def survives(mutant: Mutant, copy: Path, tests: Sequence[str]) -> bool:
    """Return True if all tests pass with the mutant; a timeout counts as killed."""
    path = copy / mutant.path
    before = path.read_text()
    try:
        path.write_text(mutant.text)
        return passes(copy, tests)
    finally:
        path.write_text(before)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # Python tells it from the next by size and second only


def preload() -> None:
    """Import packages that most tests need, so that forks share them, and nothing that is
    mutated.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in (
        "torch.export",
        "torch.distributed.checkpoint",
        "safetensors.torch",
        "pytest",
        "typer",
    ):
        import_module(name)


def passes(copy: Path, tests: Sequence[str]) -> bool:
    """Return True if all tests of the copy pass, in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run(copy, tests))
        finally:
            os._exit(2)
    return _status(child) == 0


def _run(copy: Path, tests: Sequence[str]) -> int:
    """Run the tests of the copy in this forked process."""
    import pytest

    os.setpgid(0, 0)
    os.chdir(copy)
    os.environ.update(environment(copy))
    sys.path[:0] = [str(copy)]
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def _status(child: int) -> int:
    """Return the exit status of the process; kill it if it takes too long."""
    end = time.monotonic() + 3 * _MAX_SECONDS + 60
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


def main(args: Sequence[str]) -> int:
    """Return 1 if fewer than `MIN_KILLED` of the mutants are killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", help="modules and packages, for example ckpttool/fixes"
    )
    parser.add_argument(
        "--tests", nargs="*", help="tests to run (default: the tests of the packages)"
    )
    parser.add_argument(
        "--seconds", type=float, default=_MAX_SECONDS, help="limit on the tests for each mutant"
    )
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(args)
    os.environ.pop("PYTEST_ADDOPTS", None)  # applies to this run only, not to the tests of a mutant
    only = options.only or ["ckpttool"]
    modules = [
        str(p.relative_to(ROOT))
        for o in only
        for p in sorted((ROOT / o).rglob("*.py")) or [ROOT / o]
    ]
    reached, mutants = (
        reach(options.tests or matching_tests(only), options.jobs),
        random_mutants(modules, options.seed),
    )
    chosen = list({str(mutant): mutant for mutant, _ in zip(mutants, range(options.n))}.values())
    preload()
    survivors: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="ckpttool-mutants-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy_repository(Path(folder).resolve() / str(number)))

        unchanged = Path(folder).resolve() / "0"
        assert passes(unchanged, reached.tests(chosen[0], options.seconds)), (
            "the tests fail without a mutant"
        )

        def attempt(mutant: Mutant) -> tuple[Mutant, bool, int]:
            copy, tests = copies.get(), reached.tests(mutant, options.seconds)
            try:
                return mutant, survives(mutant, copy, tests), len(tests)
            finally:
                copies.put(copy)

        for mutant, survived, tests in pool.map(attempt, chosen):
            survivors += [str(mutant)] if survived else []
            print(
                f"{'survived' if survived else 'killed':<9} {mutant}  [{tests} tests]", flush=True
            )
    results.add("", len(chosen), survivors)
    killed = len(chosen) - len(survivors)
    share = killed / max(1, len(chosen))
    print(f"{killed} of {len(chosen)} killed ({share:.0%}; required: {MIN_KILLED:.0%})")
    return int(share < MIN_KILLED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
