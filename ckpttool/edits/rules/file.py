"""Rules in a TOML file: read and checked whole, and reversed, as the steps of `steps.py`. See docs/rules.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ckpttool.edits.rules.changes import Reshape
from ckpttool.edits.rules.examples import Example, failures, faults_of
from ckpttool.edits.rules.fields import Fields, faults, size_names, step_of
from ckpttool.edits.rules.patterns import Rule, parse
from ckpttool.edits.rules.ready import located
from ckpttool.edits.rules.steps import Constant, Convert, Drop, Join, Rename, Split, Step, Where
from ckpttool.errors import CkptError, Problem
from ckpttool.io.files import opened
from ckpttool.limits import limits
from ckpttool.words import plural

_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # imported where a file is read
Sizes = Mapping[str, int]


def read(
    path: str, *, reverse: bool = False, rules: Sequence[Rule] = (), sizes: Sizes | None = None
) -> tuple[Step, ...]:
    """The steps of the file at `path`, the last one first and each reversed with `reverse`.

    `rules` are those of the command line, in the same direction: they come after the file, so before it in reverse.
    `sizes` are named sizes, before those of the file. Raises `CkptError`, all problems at once, where the file is none,
    an example in it is not what the rules make, or a rule has no reverse.
    """
    steps = _steps(_text(_read(path), path), path, sizes or {}, reverse)
    own: tuple[Step, ...] = (Rename(Where("--rule"), tuple(rules)),) if rules else ()
    return (*own, *steps) if reverse else (*steps, *own)


def steps_of(text: str, path: str) -> tuple[Step, ...]:
    """The steps of a file's text; `path` is what errors call it. Raises `CkptError` as `read` does."""
    return _steps(text, path, {}, reverse=False)


def _read(path: str) -> bytes:
    """At most one byte more than a file of rules may have; of the file, or else of the package's set of that name."""
    with opened(located(path), pipes=True) as file:
        return file.read(limits().rules_bytes + 1)


def _text(data: bytes, path: str) -> str:
    try:
        if len(data) > limits().rules_bytes:
            raise ValueError(f"it is too long: {limits().named('rules_bytes')}")
        return data.decode("utf-8-sig")
    except ValueError as error:
        raise _no_toml(path, error) from None


def _content(text: str, path: str) -> Mapping[str, Any]:
    try:
        _check_dots(text)
        content: dict[str, Any] = import_module(_TOML).loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_toml(path, error) from None
    return content


def _no_toml(path: str, error: Exception) -> CkptError:
    return CkptError(f"{path} is not TOML: {error}", hint="a rule begins with [[rule]]; see docs/rules.md")


def _check_dots(text: str) -> None:
    """Raises ValueError for dotted names that are too long: reading them takes time of the order of their cube."""
    for number, line in enumerate(_STRINGS.sub("", text).splitlines(), 1):
        if line.count(".") > limits().rules_dots:
            raise ValueError(f"too many dots at line {number}: {limits().named('rules_dots')}")


_STRINGS = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")


def _steps(text: str, path: str, given: Sizes, reverse: bool) -> tuple[Step, ...]:
    content = _content(text, path)
    tables, examples, own = content.get("rule"), content.get("example", []), content.get("sizes", {})
    others = [name for name in content if name not in ("rule", "sizes", "example")]
    if others or not isinstance(tables, list) or not tables or not isinstance(examples, list):
        raise CkptError(
            f"{path} is no list of rules{': ' if others else ''}{', '.join(others)}",
            hint="each rule is a table that begins with [[rule]]; beside them stand [sizes] and [[example]] only",
        )
    places, shown = _places(text, "rule", tables), _places(text, "example", examples)
    wrong = _sizes_faults(own)
    known = {**({} if wrong else own), **given}
    wrong += [Problem(fault, place) for place, one in zip(shown, examples) for fault in faults_of(one)]
    steps = _built(tables, places, known, path, wrong)
    problems: list[Problem] = []
    for place, table in zip(shown, examples):
        example = Example.of(table)
        tried = _built(tables, places, {**known, **example.sizes}, path)
        problems += [Problem(problem, place) for problem in failures(example, tried)]
        if reverse:
            back = failures(example.reversed(), _reversed(tried, path))
            problems += [Problem(f"in reverse: {problem}", place) for problem in back]
    if problems:
        raise _mistakes(path, problems)
    _check_known(given, own, tables)
    return _reversed(steps, path) if reverse else steps


def _places(text: str, name: str, tables: Sequence[object]) -> list[str]:
    """Where the tables stand: ``rule 2 at line 10``; without lines where their headers are not told from other text."""
    header = re.compile(rf"\s*\[\[\s*{name}\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    if len(lines) != len(tables):
        return [f"{name} {number}" for number in range(1, len(tables) + 1)]
    return [f"{name} {number} at line {line}" for number, line in enumerate(lines, 1)]


def _sizes_faults(own: Any) -> list[Problem]:
    if not isinstance(own, dict):
        return [Problem("not a table", "sizes")]
    return [
        Problem("not a positive integer", f"sizes.{name}")
        for name, size in own.items()
        if type(size) is not int or size < 1
    ]


def _check_known(given: Sizes, own: Sizes, tables: Sequence[Fields]) -> None:
    known = {*own, *(name for table in tables for name in size_names(table))}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise CkptError(
            f"the rules know no size {', '.join(unknown)}",
            hint=f"they know {', '.join(sorted(known))}" if known else "they know no named sizes",
        )


def _built(
    tables: Sequence[Fields], places: Sequence[str], sizes: Sizes, path: str, others: Sequence[Problem] = ()
) -> tuple[Step, ...]:
    """The steps of the rules. Raises `CkptError`, all problems at once and `others` with them."""
    steps: list[Step] = []
    problems: list[Problem] = []
    for place, table in zip(places, tables):
        wrong = faults(table)
        problems += [Problem(fault, place) for fault in wrong]
        try:
            steps += [] if wrong else [step_of(table, place, sizes)]
        except CkptError as error:
            problems.append(Problem(error.message, place))
    if problems or others:
        raise _mistakes(path, [*problems, *others])
    return tuple(steps)


def _mistakes(path: str, problems: Sequence[Problem]) -> CkptError:
    return CkptError(
        f"{path}: {plural(len(problems), 'mistake')} in the rules",
        hint="docs/rules.md says how each kind of rule is written",
        problems=problems,
    )


def _reversed(steps: Sequence[Step], path: str) -> tuple[Step, ...]:
    found: list[Step] = []
    problems: list[Problem] = []
    for step in reversed(steps):
        if isinstance(step, Drop) and step.where.optional:  # a file without what it names is as good
            continue
        try:
            found.append(_back(step))
        except CkptError as error:
            problems.append(Problem(error.message, str(step.where)))
    if problems:
        raise CkptError(
            f"{path} cannot be reversed: {plural(len(problems), 'rule')}",
            hint="take these rules out, or write a file with the way back",
            problems=problems[::-1],
        )
    return tuple(found)


def _back(step: Step) -> Step:
    """The step that undoes this one. Raises `CkptError` where there is none."""
    if step.where.when or step.where.unless:
        raise CkptError(f"{', '.join(step.patterns)}: the names of its conditions may be others by then", hint="")
    match step:
        case Rename(where, rules):
            return Rename(where, tuple(parse(rule.text, reverse=True) for rule in rules))
        case Split(where, parts):
            return Join(where, parts)
        case Join(where, parts):
            if parts.names.number is None and not parts.stacked:  # a split could not tell into how many
                raise CkptError(f"{parts.whole}: parts = N says into how many", hint="")
            return Split(where, parts)
        case Convert(where, patterns, change) if (back := change.reversed()) is not None:
            return Convert(where, patterns, back)
        case Convert(_, patterns, Reshape()):
            raise CkptError(f"{', '.join(patterns)}: from_shape = [...] says what shape it had", hint="")
    if isinstance(step, Constant):
        raise CkptError(f"{step.name}: drop it in a file with the way back", hint="")
    raise CkptError(f"{', '.join(step.patterns)}: what is lost does not come back", hint="")
