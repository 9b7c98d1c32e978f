"""Rules files (TOML): parse, check completely, and reverse."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpttool.core.checkpoint import Section, TensorEntry, in_row_major
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.limits import limits
from ckpttool.core.schema import TEXT, TEXTS, list_of, record, row, titled
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.io.files import opened
from ckpttool.rules import tensor_ops as named
from ckpttool.rules.patterns import Rule, matches, parse
from ckpttool.rules.steps import (
    Constant,
    Convert,
    Drop,
    Join,
    Parts,
    Rename,
    Split,
    Step,
    Where,
    listed,
    numbered,
    state_of,
)
from ckpttool.rules.tensor_ops import Cast, Permute, Reshape, Shown, Transpose, condition, shown, tensor_text

LIST = "list"  # in the place of a set's name, where no checkpoint is named
_FOLDER = Path(__file__).parent / "presets"
_SIZES_LINE = re.compile(r"Sizes: ([\w, ]+)")


@dataclass(frozen=True, slots=True)
class Ready:
    """A set: its name, what it leads from and to, and the sizes that have to be named for it."""

    name: str
    about: str
    sizes: tuple[str, ...]


SETS = titled("ckpttool.rules/1", row({"sets": list_of(record(Ready, {"name": TEXT, "about": TEXT, "sizes": TEXTS}))}))


def sets() -> list[str]:
    """The names of the sets."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def ready() -> list[Ready]:
    """The sets, each as the comment at the head of its file has it."""
    return [_described(name) for name in sets()]


def located(path: str) -> str:
    """The path of a set where `path` is the name of one and no file. Raises `CkptError` for other names."""
    if Path(path).exists() or not re.fullmatch(r"[\w-]+", path):
        return path
    if path not in sets():
        raise CkptError(f"{path}: no such file, and no set of rules", hint="ckpttool remap --rules list names the sets")
    return str(_FOLDER / f"{path}.toml")


def _described(name: str) -> Ready:
    head = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n\n")[0]
    said = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    sizes = _SIZES_LINE.search(said)
    return Ready(name, said.partition(" Sizes: ")[0], tuple(sizes[1].strip().split(", ")) if sizes else ())


Fields = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]  # the words for what a value has to be, and whether it is that


@dataclass(frozen=True, slots=True)
class _Operation:
    """How one kind of rule is written: the kinds of its own value and of its other fields, and the step it makes."""

    kind: Kind
    build: Callable[[Where, Any, Fields], Step]
    needs: Mapping[str, Kind] = field(default_factory=dict)
    may: Mapping[str, Kind] = field(default_factory=dict)


def faults(table: Any) -> list[str]:
    """What is wrong with the fields of one rule."""
    if not isinstance(table, dict):
        return ["not a table"]
    operations = [name for name in table if name in _OPERATIONS]
    if len(operations) != 1:
        return [
            f"has to be one of {', '.join(_OPERATIONS)}" + (f", not {' and '.join(operations)}" if operations else "")
        ]
    name = operations[0]
    operation = _OPERATIONS[name]
    known = {name: operation.kind, **operation.needs, **operation.may, **_OF_ALL}
    found = [f"{name} takes no {other!r}" for other in table if other not in known]
    found += [f"{name} needs {other!r}" for other in operation.needs if other not in table]
    found += [f"{key!r} is not {known[key][0]}" for key in table if key in known and not known[key][1](table[key])]
    return found


def operation_of(table: Fields) -> str:
    """The name of what the rule does."""
    return next(name for name in table if name in _OPERATIONS)


def step_of(table: Fields, place: str, sizes: Mapping[str, int]) -> Step:
    """The step of a rule without `faults`; `sizes` are the values of names. Raises `CkptError` where it is none."""
    name = operation_of(table)
    when, unless = (tuple(map(condition, _list(table.get(field, [])))) for field in ("when", "unless"))
    where = Where(f"{place} ({name})", table.get("optional", False), when, unless)
    return _OPERATIONS[name].build(where, table[name], {key: _settled(table, key, sizes) for key in table})


def size_names(table: Fields) -> set[str]:
    """The named sizes that the rule is made of."""
    return {name for key in _SIZED if key in table for size in _list(table[key]) for name in named.size_names(size)}


def _settled(table: Fields, key: str, sizes: Mapping[str, int]) -> Any:
    """The value of a field with named sizes as numbers; those that a reshape finds in its tensor keep their names."""
    if key not in _SIZED:
        return table[key]
    found = [named.resolve_size(size, sizes) for size in _list(table[key])]
    for before, size in zip(_list(table[key]), found):
        if isinstance(size, str) and "reshape" not in table:
            name = min(named.size_names(size))
            raise CkptError(f"{{{name}}} has no value: --size {name}=N gives it one", hint="")
        if isinstance(size, int) and size < 1 and before != size:
            raise CkptError(f"{before} is {size}: no size", hint="")
    return found if isinstance(table[key], list) else found[0]


# The kinds


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return type(value) is int  # a bool is none


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_size(value: Any, least: int) -> bool:
    return named.is_expression(value) if isinstance(value, str) else _is_number(value) and value >= least


def _are_sizes(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(_is_size(size, least) for size in value)


_TEXT: Kind = ("a string", _is_text)
_TEXTS: Kind = ("a string or a list of strings", lambda value: _is_text(value) or _are_texts(value))
_NUMBER: Kind = ("an integer", _is_number)
_FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
_FILL: Kind = (
    "a number, true or false",
    lambda value: isinstance(value, (bool, float)) or (_is_number(value) and -(2**63) <= value < 2**63),
)
_NAMES: Kind = (
    "a list of two strings or more, or one name with a variable that counts",
    lambda value: _is_text(value) or (_are_texts(value) and len(value) > 1),
)
_SIZE: Kind = ("a positive integer, or a named size", lambda value: _is_size(value, 1))
_SIZES: Kind = ("a list of positive integers", lambda value: _are_sizes(value, 1))
_TWO_DIMS: Kind = ("a list of two dimensions", lambda value: _are_numbers(value) and len(value) == 2)
_ORDER: Kind = (
    "each of the dimensions 0, 1, ... once",
    lambda value: _are_numbers(value) and sorted(value) == list(range(len(value))),
)
_SHAPE: Kind = ("a list of sizes, with one -1 at most", lambda value: _are_sizes(value, -1) and value.count(-1) <= 1)
_OWN_SHAPE: Kind = ("a list of sizes", lambda value: _are_sizes(value, 0))
_DTYPE: Kind = ("a dtype of torch, as in 'bfloat16'", lambda value: isinstance(value, str) and value in PLAIN)
_SOMEPLAIN: Kind = (
    "a dtype of torch, or a list of them",
    lambda value: all(isinstance(one, str) and one in PLAIN for one in _list(value)),
)


# The steps


def _rename(where: Where, texts: Any, _: Fields) -> Step:
    return Rename(where, tuple(map(parse, _list(texts))))


def _split(where: Where, whole: str, fields: Fields, *, stacked: bool = False) -> Step:
    return Split(where, _parts(whole, fields["into"], fields, stacked))


def _join(where: Where, names: Any, fields: Fields, *, stacked: bool = False) -> Step:
    return Join(where, _parts(fields["into"], names, fields, stacked))


def _parts(whole: str, names: Any, fields: Fields, stacked: bool) -> Parts:
    """Both directions of a split. Raises `CkptError` where it cannot be told into how many parts."""
    sizes, count = fields.get("sizes"), fields.get("parts")
    if isinstance(names, list):
        found = listed(whole, names)
        if sizes is not None and len(sizes) != len(names):
            raise CkptError(f"{len(sizes)} sizes for {len(names)} parts", hint="")
        if count is not None:
            raise CkptError("parts = counts what one name stands for, and these are listed", hint="")
        return Parts(whole, found, fields.get("dim", 0), None if sizes is None else tuple(sizes), stacked)
    if sizes is not None:
        raise CkptError("sizes are those of parts that are listed: numbered ones are equal", hint="")
    return Parts(whole, numbered(whole, names, count), fields.get("dim", 0), None, stacked)


def _transpose(where: Where, patterns: Any, fields: Fields) -> Step:
    first, second = fields.get("dims", (0, 1))
    return Convert(where, _patterns(patterns), Transpose((first, second)))


def _permute(where: Where, patterns: Any, fields: Fields) -> Step:
    dims, rows = fields["dims"], fields.get("rows")
    if rows is not None and len(rows) != len(dims):
        raise CkptError(f"{len(dims)} dims for {len(rows)} rows", hint="")
    return Convert(where, _patterns(patterns), Permute(tuple(dims), None if rows is None else tuple(rows)))


def _reshape(where: Where, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from_shape")
    return Convert(where, _patterns(patterns), Reshape(tuple(fields["shape"]), None if was is None else tuple(was)))


def _cast(where: Where, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from")
    return Convert(where, _patterns(patterns), Cast(fields["dtype"], None if was is None else _list(was)))


def _constant(where: Where, name: str, fields: Fields) -> Step:
    beside = fields.get("beside")
    rule = None if beside is None else parse(f"{beside} => {name}")
    if rule is None and ("{" in name or "=>" in name):
        raise CkptError(f"{name!r} is not a whole name: beside = says which tensors give its variables", hint="")
    shape = fields.get("shape")
    if rule is None and shape is None:
        raise CkptError("constant needs 'shape', or 'beside' for one that has it", hint="")
    return Constant(where, name, rule, fields["value"], fields.get("dtype"), None if shape is None else tuple(shape))


def _patterns(value: Any) -> tuple[str, ...]:
    """The patterns; each is tried, so that one that is no pattern is found before any checkpoint is looked at."""
    patterns = _list(value)
    for text in patterns:
        matches(text, "")
    return patterns


def _list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


_PARTS: Mapping[str, Kind] = {"dim": _NUMBER, "parts": _SIZE}
_OPERATIONS: Mapping[str, _Operation] = {
    "rename": _Operation(_TEXTS, _rename),
    "split": _Operation(_TEXT, _split, {"into": _NAMES}, {**_PARTS, "sizes": _SIZES}),
    "join": _Operation(_NAMES, _join, {"into": _TEXT}, {**_PARTS, "sizes": _SIZES}),
    "unstack": _Operation(_TEXT, partial(_split, stacked=True), {"into": _NAMES}, _PARTS),
    "stack": _Operation(_NAMES, partial(_join, stacked=True), {"into": _TEXT}, _PARTS),
    "transpose": _Operation(_TEXTS, _transpose, may={"dims": _TWO_DIMS}),
    "permute": _Operation(_TEXTS, _permute, {"dims": _ORDER}, {"rows": _SHAPE}),
    "reshape": _Operation(_TEXTS, _reshape, {"shape": _SHAPE}, {"from_shape": _SHAPE}),
    "cast": _Operation(_TEXTS, _cast, {"dtype": _DTYPE}, {"from": _SOMEPLAIN}),
    "constant": _Operation(_TEXT, _constant, {"value": _FILL}, {"dtype": _DTYPE, "shape": _OWN_SHAPE, "beside": _TEXT}),
    "drop": _Operation(_TEXTS, lambda where, patterns, _: Drop(where, _patterns(patterns))),
}
_OF_ALL: Mapping[str, Kind] = {"optional": _FLAG, "when": _TEXTS, "unless": _TEXTS}
_SIZED = ("sizes", "parts", "shape", "from_shape", "rows")


_FIELDS = {"before", "after", "sizes"}


@dataclass(frozen=True, slots=True)
class Example:
    """Tensors that the rules are given, what they make of them, and named sizes."""

    before: tuple[Shown, ...]
    after: tuple[Shown, ...]
    sizes: Mapping[str, int]

    @staticmethod
    def of(table: Mapping[str, Any]) -> Example:
        """The example of a table without faults."""
        before, after = (tuple(filter(None, map(shown, table[side]))) for side in ("before", "after"))
        return Example(before, after, table.get("sizes", {}))

    def reversed(self) -> Example:
        """The example of the way back."""
        return replace(self, before=self.after, after=self.before)


def faults_of(table: Any) -> list[str]:
    """What is wrong with one table ``[[example]]``."""
    if not isinstance(table, dict):
        return ["not a table"]
    found = [f"an example takes no {name!r}" for name in table if name not in _FIELDS]
    for side in ("before", "after"):
        texts = table.get(side)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            found.append(f"{side!r} is not a list of tensors, as in ['w [4, 2]']")
        else:
            found += [
                f"{text!r} in {side!r} is not a tensor, as in 'w [4, 2] bfloat16'" for text in texts if not _whole(text)
            ]
    sizes = table.get("sizes", {})
    if not isinstance(sizes, dict) or any(type(size) is not int or size < 1 for size in sizes.values()):
        found.append("'sizes' is not a table of positive integers")
    return found


def _whole(text: str) -> bool:
    one = shown(text)
    return one is not None and -1 not in (one.shape or ())


def failures(example: Example, steps: Sequence[Step]) -> list[str]:
    """In what the rules do not make of the example what it says, in words. A dtype that is not said may be any."""
    entries = tuple(_entry(one) for one in example.before)
    try:
        state, _ = state_of(steps, Section("", "state_dict", entries), whole=False)
    except Refused as error:
        return [str(problem) for problem in error.problems]
    wanted = {one.key: one for one in example.after}
    found = [f"the rules make no {key}" for key in wanted if key not in state]
    found += [f"the rules leave or make {key} too" for key in state if key not in wanted]
    found += [
        f"{key} is {tensor_text(state[key])}, not {tensor_text(_entry(one))}"
        for key, one in wanted.items()
        if key in state and not one.is_like(state[key])
    ]
    return found


def _entry(one: Shown) -> TensorEntry:
    shape = one.shape or ()
    return in_row_major(one.key, one.dtype or "float32", shape, None)


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
