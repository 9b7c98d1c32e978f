"""Rules files (TOML): read, check completely, and reverse. `presets` holds the rules files of the
package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpttool.core.checkpoint import Section, TensorEntry, in_row_major
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.limits import limits
from ckpttool.core.options import call_of, expand_options
from ckpttool.core.schema import TEXT, TEXTS, list_of, record, row, titled
from ckpttool.core.tables import by_key
from ckpttool.core.text import is_list_of_text, plural
from ckpttool.core.values import dataclass
from ckpttool.io.files import opened
from ckpttool.ruleset.patterns import Rule, matches, parse
from ckpttool.ruleset.steps import (
    Check,
    Constant,
    Convert,
    Dequantize,
    Join,
    RuleError,
    RulePlace,
    Split,
    Step,
    parts_of,
    rename,
    state_of,
)
from ckpttool.ruleset.tensor_ops import (
    Size,
    Sizes,
    TensorSpec,
    Value,
    cast,
    check_size,
    dtypes_like,
    is_expression,
    lone_name,
    multiple_of,
    named_shape,
    narrow,
    pad,
    permute,
    reshape,
    resolve_size,
    shown,
    size_names,
    tensor_text,
    transpose,
)

Fields = Mapping[str, Any]

# Presets

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@dataclass(frozen=True, slots=True)
class Preset:
    """A rules file of the package: its name, from what to what it leads, the sizes that it needs,
    and its text.
    """

    name: str
    about: str
    sizes: tuple[str, ...]
    toml: str = field(repr=False)


_PRESET = record(Preset, {"name": TEXT, "about": TEXT, "sizes": TEXTS, "toml": TEXT})
SETS = titled("ckpttool.rules/1", row({"sets": list_of(_PRESET)}))


@expand_options()
def rules(name: str | None = None) -> tuple[Preset, ...]:
    """Return the preset rules, or the one with this name.

    Args:
        name: The name of a preset; None for all.

    Returns:
        The presets, each with its name, what it is for, and its TOML.

    Raises:
        CkptError: No preset has the name.

    Example::

        for preset in ckpttool.rules():
            print(preset.name, preset.about)
    """
    paths = sorted(_FOLDER.glob("*.toml"))
    presets = tuple(_read_preset(path) for path in paths if name in (None, path.stem))
    if not presets:
        raise CkptError(f"{name}: no preset has that name", hint="`ckpttool rules` lists them")
    return presets


def _read_preset(path: Path) -> Preset:
    toml = path.read_text(encoding="utf-8")
    head = toml.partition("\n\n")[0]
    text = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    about = text.partition(" Sizes: ")[0]
    sizes = re.search(r"Sizes: ([\w, ]+)", text)
    names = tuple(sizes[1].strip().split(", ")) if sizes else ()
    return Preset(path.stem, about, names, toml)


def examples_of(preset: Preset) -> list[tuple[list[str], list[str]]]:
    """Return the names before and after the preset, of each of its examples."""
    examples = []
    for example in _load_toml(preset.toml, preset.name)["example"]:
        before = [text.partition(" ")[0] for text in example["before"]]
        after = [text.partition(" ")[0] for text in example["after"]]
        examples.append((before, after))
    return examples


# Fields


@dataclass(frozen=True, slots=True)
class FieldKind:
    """The kind of a field: a phrase for errors, and a test."""

    text: str
    test: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return type(value) is int  # not a bool


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 1


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_size(value: Any, least: int = 1) -> bool:
    return is_expression(value) if isinstance(value, str) else _is_number(value) and value >= least


def _are_sizes(value: Any, least: int = 1) -> bool:
    return isinstance(value, list) and all(_is_size(size, least) for size in value)


_TEXT = FieldKind("a string", _is_text)
_TEXTS = FieldKind(
    "a string or a list of strings", lambda value: _is_text(value) or _are_texts(value)
)
_INTEGER = FieldKind("an integer", _is_number)
_FLAG = FieldKind("true or false", lambda value: isinstance(value, bool))
_FILL = FieldKind(
    "a number, true or false",
    lambda value: (
        isinstance(value, (bool, float)) or (_is_number(value) and -(2**63) <= value < 2**63)
    ),
)
_NAMES = FieldKind(
    "a list of two strings or more, or one name with a variable that counts",
    lambda value: _is_text(value) or (_are_texts(value) and len(value) > 1),
)
_START = FieldKind("an integer of 0 or more", lambda value: _is_number(value) and value >= 0)
_SIZE = FieldKind("a positive integer, or a named size", _is_size)
_SIZES = FieldKind("a list of positive integers", _are_sizes)
_TWO_DIMS = FieldKind(
    "a list of two dimensions", lambda value: _are_numbers(value) and len(value) == 2
)
_ORDER = FieldKind(
    "each of the dimensions 0, 1, ... once",
    lambda value: _are_numbers(value) and sorted(value) == list(range(len(value))),
)
_SHAPE = FieldKind(
    "a list of sizes, with one -1 at most",
    lambda value: _are_sizes(value, -1) and value.count(-1) <= 1,
)
_FULL_SHAPE = FieldKind("a list of sizes", lambda value: _are_sizes(value, 0))
_DTYPE = FieldKind(
    "a dtype of torch, as in 'bfloat16'", lambda value: isinstance(value, str) and value in PLAIN
)
_FLOAT = FieldKind(
    "bfloat16, float16 or float32", lambda value: value in ("bfloat16", "float16", "float32")
)
_BLOCK = FieldKind(
    "a list of two positive integers",
    lambda value: _are_numbers(value) and len(value) == 2 and min(value) >= 1,
)
_DTYPES = FieldKind(
    "a dtype of torch, or a list of them",
    lambda value: bool(_list(value)) and all(map(_DTYPE.test, _list(value))),
)
_SHAPES = FieldKind(
    "a list of tensors with sizes, as in ['layers.{i}.weight [{width}, -1]']",
    lambda value: _are_texts(value) and all(map(named_shape, value)),
)
# the fields with named sizes
_SIZED = ("sizes", "parts", "shape", "from_shape", "rows", "size", "multiple", "from_size")


def _list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


# Rules


@dataclass(frozen=True, slots=True)
class _Operation:
    """One kind of rule: the kinds of its value and other fields, its step, and the fields of the
    rule that undoes it.
    """

    kind: FieldKind
    build: Callable[[RulePlace, Any, Fields], Step]
    reverse: Callable[[Any, Fields], Fields]
    required: Mapping[str, FieldKind] = field(default_factory=dict)
    optional: Mapping[str, FieldKind] = field(default_factory=dict)


def _split_or_join(name: str, reverse_name: str) -> _Operation:
    is_split = name in ("split", "unstack")
    stacked = name in ("stack", "unstack")

    def build(where: RulePlace, value: Any, fields: Fields) -> Step:
        into = fields["into"]
        whole, names = (value, into) if is_split else (into, value)
        count, dim, sizes = fields.get("parts"), fields.get("dim", 0), fields.get("sizes")
        parts = parts_of(whole, names, count, dim, sizes, stacked)
        return Split(where, (whole,), parts) if is_split else Join(where, parts.names, parts)

    def reverse(value: Any, fields: Fields) -> Fields:
        if name == "join" and isinstance(value, str) and "parts" not in fields:
            raise RuleError(f"{fields['into']}: parts = N says into how many")
        return {**fields, reverse_name: fields["into"], "into": value}

    optional = {"dim": _INTEGER, "parts": _SIZE}
    if not stacked:
        optional["sizes"] = _SIZES
    if is_split:
        return _Operation(_TEXT, build, reverse, {"into": _NAMES}, optional)
    return _Operation(_NAMES, build, reverse, {"into": _TEXT}, optional)


def _permute(where: RulePlace, patterns: Any, fields: Fields) -> Step:
    dims, rows = fields["dims"], fields.get("rows")
    if rows is not None and len(rows) != len(dims):
        raise RuleError(f"{len(dims)} dims for {len(rows)} rows")
    return Convert(where, _patterns(patterns), lambda value: permute(value, dims, rows))


def _permute_reverse(patterns: Any, fields: Fields) -> Fields:
    dims = fields["dims"]
    inverse = [dims.index(dim) for dim in range(len(dims))]
    fields_of_reverse: dict[str, Any] = {"permute": patterns, "dims": inverse}
    if "rows" in fields:
        fields_of_reverse["rows"] = [fields["rows"][dim] for dim in dims]
    return fields_of_reverse


def _reshape(where: RulePlace, patterns: Any, fields: Fields) -> Step:
    shape, old = fields["shape"], fields.get("from_shape")
    bound = {lone_name(size) for size in old or ()}
    for size in (*shape, *(old or ())):
        unbound = size_names(size) - bound
        if unbound:
            name = min(unbound)
            file = f"'FILE({name}=32)'"
            raise RuleError(
                f"{{{name}}} has no value: name it in from_shape, or as in --rules {file}"
            )
    return Convert(where, _patterns(patterns), lambda value: reshape(value, shape, old))


def _reshape_reverse(patterns: Any, fields: Fields) -> Fields:
    if "from_shape" not in fields:
        raise RuleError(f"{_joined(patterns)}: from_shape = [...] says what shape it had")
    return {"reshape": patterns, "shape": fields["from_shape"], "from_shape": fields["shape"]}


def _cast(where: RulePlace, patterns: Any, fields: Fields) -> Step:
    dtype, old = fields["dtype"], fields.get("from")
    dtypes = dtypes_like(dtype) if old is None else _list(old)
    return Convert(where, _patterns(patterns), lambda value: cast(value, dtype), dtypes)


def _pad(where: RulePlace, patterns: Any, fields: Fields) -> Step:
    if ("size" in fields) == ("multiple" in fields):
        raise RuleError("pad needs either 'size' or 'multiple'")
    dim, fill = fields.get("dim", 0), fields.get("value", 0)
    factor, old = fields.get("multiple"), fields.get("from_size")

    def change(value: Value) -> Value:
        if old is not None:
            check_size(value, dim, old)
        size = fields["size"] if factor is None else multiple_of(factor, value, dim)
        return pad(value, dim, size, fill)

    return Convert(where, _patterns(patterns), change)


def _pad_reverse(patterns: Any, fields: Fields) -> Fields:
    if "from_size" not in fields:
        raise RuleError(f"{_joined(patterns)}: from_size = N says what size it had")
    return {"slice": patterns, "size": fields["from_size"], "dim": fields.get("dim", 0)}


def _slice(where: RulePlace, patterns: Any, fields: Fields) -> Step:
    dim, start, size = fields.get("dim", 0), fields.get("start", 0), fields["size"]
    return Convert(where, _patterns(patterns), lambda value: narrow(value, dim, start, size))


def _constant(where: RulePlace, name: str, fields: Fields) -> Step:
    beside, shape = fields.get("beside"), fields.get("shape")
    if shape is not None:
        shape = tuple(shape)
    rule = None
    if beside is not None:
        rule = parse(f"{beside} => {name}")
    elif "=>" in name:
        raise RuleError(f"{name!r} is not a name: => is for rename rules")
    elif "{" in name:
        raise RuleError(f"{name!r} has variables: pass 'beside' with the tensors that bind them")
    elif shape is None:
        raise RuleError("constant needs 'shape', or 'beside' for one that has it")
    patterns = () if beside is None else (beside,)
    return Constant(where, patterns, name, rule, fields["value"], fields.get("dtype"), shape)


def _check(where: RulePlace, texts: Any, _: Fields) -> Step:
    shapes = tuple(filter(None, map(named_shape, texts)))
    return Check(where, _patterns([shape.pattern for shape in shapes]), shapes)


def _no_reverse(
    patterns: Any, _: Fields, reason: str = "what is lost does not come back"
) -> Fields:
    raise RuleError(f"{_joined(patterns)}: {reason}")


def _joined(patterns: Any) -> str:
    return ", ".join(_list(patterns))


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _list(value)
    for text in patterns:
        matches(text, "")  # raises `CkptError` if it is not a pattern
    return patterns


_OPERATIONS: Mapping[str, _Operation] = {
    "rename": _Operation(
        _TEXTS,
        lambda where, texts, fields: rename(
            where, [parse(text, reverse="reverse" in fields) for text in _list(texts)]
        ),
        lambda texts, _: {"rename": texts, "reverse": True},
    ),
    "split": _split_or_join("split", "join"),
    "join": _split_or_join("join", "split"),
    "unstack": _split_or_join("unstack", "stack"),
    "stack": _split_or_join("stack", "unstack"),
    "transpose": _Operation(
        _TEXTS,
        lambda where, patterns, fields: Convert(
            where, _patterns(patterns), lambda value: transpose(value, fields.get("dims", (0, 1)))
        ),
        lambda patterns, fields: {"transpose": patterns, **fields},
        optional={"dims": _TWO_DIMS},
    ),
    "permute": _Operation(_TEXTS, _permute, _permute_reverse, {"dims": _ORDER}, {"rows": _SHAPE}),
    "reshape": _Operation(
        _TEXTS, _reshape, _reshape_reverse, {"shape": _SHAPE}, {"from_shape": _SHAPE}
    ),
    "pad": _Operation(
        _TEXTS,
        _pad,
        _pad_reverse,
        optional={
            "size": _SIZE,
            "multiple": _SIZE,
            "from_size": _SIZE,
            "dim": _INTEGER,
            "value": _FILL,
        },
    ),
    "slice": _Operation(
        _TEXTS, _slice, _no_reverse, {"size": _SIZE}, {"start": _START, "dim": _INTEGER}
    ),
    "dequantize": _Operation(
        _TEXTS,
        lambda where, patterns, fields: Dequantize(
            where, _patterns(patterns), fields["dtype"], fields.get("block")
        ),
        _no_reverse,
        {"dtype": _FLOAT},
        {"block": _BLOCK},
    ),
    "cast": _Operation(_TEXTS, _cast, _no_reverse, {"dtype": _DTYPE}, {"from": _DTYPES}),
    "constant": _Operation(
        _TEXT,
        _constant,
        partial(_no_reverse, reason="drop it in a file with the way back"),
        {"value": _FILL},
        {"dtype": _DTYPE, "shape": _FULL_SHAPE, "beside": _TEXT},
    ),
    "check": _Operation(_SHAPES, _check, lambda texts, fields: {"check": texts, **fields}),
    "drop": _Operation(
        _TEXTS, lambda where, patterns, _: Convert(where, _patterns(patterns)), _no_reverse
    ),
}
_OF_ALL: Mapping[str, FieldKind] = {"optional": _FLAG, "when": _TEXTS, "unless": _TEXTS}


def problems_of_rule(table: Any) -> list[str]:
    """Return what is wrong with the fields of a rule: missing and other ones, kinds of values."""
    if not isinstance(table, dict):
        return ["not a table"]
    names = [name for name in table if name in _OPERATIONS]
    if len(names) != 1:
        others = f", not {' and '.join(names)}" if names else ""
        return [f"has to be one of {', '.join(_OPERATIONS)}{others}"]
    (name,) = names
    operation = _OPERATIONS[name]
    kinds = {name: operation.kind, **operation.required, **operation.optional, **_OF_ALL}
    unknown = [key for key in table if key not in kinds]
    missing = [key for key in operation.required if key not in table]
    problems = [f"{name} takes no {key!r}" for key in unknown]
    problems += [f"{name} needs {key!r}" for key in missing]
    for key, value in table.items():
        kind = kinds.get(key)
        if kind is not None and not kind.test(value):
            problems.append(f"{key!r} is not {kind.text}")
    return problems


def step_of(table: Fields, place: str, sizes: Sizes, reverse: bool = False) -> Step:
    """Return the step of a rule without `problems_of_rule`, or in `reverse` the step that undoes
    it.

    Raises `CkptError` if the fields contradict each other, or if nothing undoes the rule.
    """
    name = _name_of(table)
    when, unless = _conditions(table, "when"), _conditions(table, "unless")
    where = RulePlace(f"{place} ({name})", table.get("optional", False), when, unless)
    if reverse:
        if when or unless:
            text = "the names of its conditions may be others by then"
            raise RuleError(f"{_joined(table[name])}: {text}")
        others = {key: table[key] for key in table if key not in (name, "optional")}
        table = _OPERATIONS[name].reverse(table[name], others)
        name = _name_of(table)
    fields = dict(table)
    for key in _SIZED:
        if key in table:
            # a reshape finds the values in its tensor
            values = _resolved(_list(table[key]), sizes, may_be_open=name == "reshape")
            fields[key] = values if isinstance(table[key], list) else values[0]
    return _OPERATIONS[name].build(where, table[name], fields)


def _name_of(table: Fields) -> str:
    return next(name for name in table if name in _OPERATIONS)


def _conditions(table: Fields, key: str) -> tuple[TensorSpec, ...]:
    return tuple(shown(text) or TensorSpec(text) for text in _list(table.get(key, [])))


def _resolved(texts: Sequence[Size], sizes: Sizes, may_be_open: bool) -> list[Size]:
    """Return the values of the sizes. Raises `CkptError` for names without a value, unless they may
    be open, and for values below 1.
    """
    values = []
    for text in texts:
        value = resolve_size(text, sizes)
        if isinstance(value, str) and not may_be_open:
            name = min(size_names(value))
            raise RuleError(f"{{{name}}} has no value: name it as in --rules 'FILE({name}=32)'")
        if isinstance(value, int) and value < 1 and text != value:
            raise RuleError(f"{text} is {value}: it must be at least 1")
        values.append(value)
    return values


# Examples


def _problems_of_example(table: Any) -> list[str]:
    if not isinstance(table, dict):
        return ["not a table"]
    fields = ("before", "after", "sizes")
    problems = [f"an example takes no {name!r}" for name in table if name not in fields]
    for side in ("before", "after"):
        tensors = table.get(side)
        if not is_list_of_text(tensors):
            problems.append(f"{side!r} is not a list of tensors, as in ['w [4, 2]']")
            continue
        for text in tensors:
            spec = shown(text)
            if spec is None or -1 in (spec.shape or ()):
                problems.append(f"{text!r} in {side!r} is not a tensor, as in 'w [4, 2] bfloat16'")
    sizes = table.get("sizes", {})
    if not isinstance(sizes, dict) or not all(map(_is_count, sizes.values())):
        problems.append("'sizes' is not a table of positive integers")
    return problems


def _problems_of_steps(
    before: Sequence[str], after: Sequence[str], steps: Sequence[Step]
) -> list[str]:
    """Return where the steps do not make `after` of `before`. A dtype that is not given may be
    any.
    """
    entries = tuple(map(_entry, filter(None, map(shown, before))))
    try:
        state, _ = state_of(steps, Section("", "state_dict", entries), whole=False)
    except Refused as error:
        return list(map(str, error.problems))
    expected = by_key(filter(None, map(shown, after)))
    missing = [key for key in expected if key not in state]
    others = [key for key in state if key not in expected]
    problems = [f"the rules make no {key}" for key in missing]
    problems += [f"the rules leave or make {key} too" for key in others]
    for key, spec in expected.items():
        value = state.get(key)
        if value is not None and not spec.is_like(value):
            problems.append(f"{key} is {tensor_text(value)}, not {tensor_text(_entry(spec))}")
    return problems


def _entry(spec: TensorSpec) -> TensorEntry:
    return in_row_major(spec.key, spec.dtype or "float32", spec.shape or (), None)


# Files

_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # imported when a file is read
_STRINGS = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")


def read_rules(
    operand: str, *, reverse: bool = False, rules: Sequence[Rule] = ()
) -> tuple[Step, ...]:
    """Return the steps of the file or preset that `operand` names; or `operand` is the text of a
    file, of several lines.

    With `reverse` the steps back. Arguments override the sizes of the file:
    ``llama-fused(heads=32)``. `rules` are from the command line, in the same direction: they come
    after the file, so before it in reverse. Raises `CkptError`, with all problems, if it is not a
    rules file, if an example in it fails, or if a rule cannot be reversed.
    """
    if "\n" in operand:
        steps = steps_of(operand, "the rules", {}, reverse)
    else:
        path = operand
        sizes: Sizes = {}
        if not Path(path).exists():
            path, sizes = call_of(path)
            wrong = [f"{name}={size!r}" for name, size in sizes.items() if not _is_count(size)]
            if wrong:
                raise CkptError(f"not a size: {', '.join(wrong)}", hint=f"as in '{path}(heads=32)'")
        steps = steps_of(_text_of(path), path, sizes, reverse)
    if not rules:
        return steps
    step = rename(RulePlace("--rule"), rules)
    return (step, *steps) if reverse else (*steps, step)


def _text_of(path: str) -> str:
    """Return the text of a rules file, or of the preset with that name."""
    located = path
    if not Path(path).exists() and re.fullmatch(r"[\w-]+", path):
        located = str(_FOLDER / f"{path}.toml")
        if not Path(located).exists():
            hint = "`ckpttool rules` lists the presets"
            raise CkptError(f"{path}: no such file, and no preset with that name", hint=hint)
    with opened(located, pipes=True) as file:
        data = file.read(limits().rules_bytes + 1)
    try:
        if len(data) > limits().rules_bytes:
            raise ValueError(f"it is too long: {limits().named('rules_bytes')}")
        return data.decode("utf-8-sig")
    except ValueError as error:
        raise _not_toml(path, error) from None


def steps_of(
    text: str, path: str, given: Sizes | None = None, reverse: bool = False
) -> tuple[Step, ...]:
    """Return the steps of a file's text; errors call it `path`. Raises `CkptError` as
    `read_rules` does.
    """
    content = _load_toml(text, path)
    tables, examples = _tables_of(content, path)
    places, example_places = _places(text, "rule", tables), _places(text, "example", examples)
    file_sizes, given = content.get("sizes", {}), given or {}
    others = _problems_of_sizes(file_sizes)
    sizes = dict(given) if others else {**file_sizes, **given}
    for place, example in zip(example_places, examples):
        others += [Problem(text, place) for text in _problems_of_example(example)]
    file = _RulesFile(path, tables, places)
    steps = file.steps(sizes, others)
    problems: list[Problem] = []
    for place, example in zip(example_places, examples):
        texts = file.problems_of(example, sizes, reverse)
        problems += [Problem(text, place) for text in texts]
    if problems:
        raise _error_with(problems, path)
    _check_given(given, {*file_sizes, *_used_sizes(tables)})
    return file.reversed_steps(sizes) if reverse else steps


def _tables_of(content: Mapping[str, Any], path: str) -> tuple[list[Any], list[Any]]:
    """Return the rules and the examples of a file."""
    tables, examples = content.get("rule"), content.get("example", [])
    others = [name for name in content if name not in ("rule", "sizes", "example")]
    if others or not isinstance(tables, list) or not tables or not isinstance(examples, list):
        raise CkptError(
            f"{path} is not a list of rules{': ' if others else ''}{', '.join(others)}",
            hint="each rule is a table that begins with [[rule]]; the file may also have [sizes]"
            " and [[example]]",
        )
    return tables, examples


def _check_given(given: Sizes, names: Collection[str]) -> None:
    """Raise `CkptError` if a size is given that the rules do not name."""
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = "the rules have no named sizes"
        if names:
            hint = f"the sizes of the rules: {', '.join(sorted(names))}"
        raise CkptError(f"unknown size {', '.join(unknown)}", hint=hint)


def _load_toml(text: str, path: str) -> dict[str, Any]:
    try:
        for number, line in enumerate(_STRINGS.sub("", text).splitlines(), 1):
            # the time to read dotted names grows with their cube
            if line.count(".") > limits().rules_dots:
                raise ValueError(f"too many dots at line {number}: {limits().named('rules_dots')}")
        content: dict[str, Any] = import_module(_TOML).loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_toml(path, error) from None
    return content


def _problems_of_sizes(sizes: Any) -> list[Problem]:
    if not isinstance(sizes, dict):
        return [Problem("not a table", "sizes")]
    wrong = [name for name, size in sizes.items() if not _is_count(size)]
    return [Problem("not a positive integer", f"sizes.{name}") for name in wrong]


def _used_sizes(tables: Sequence[Fields]) -> set[str]:
    """Return the names in all sizes of the rules."""
    names = set[str]()
    for table in tables:
        for key in _SIZED:
            for size in _list(table.get(key, [])):
                names |= size_names(size)
    return names


def _not_toml(path: str, error: Exception) -> CkptError:
    return CkptError(
        f"{path} is not TOML: {error}", hint="a rule begins with [[rule]]; see docs/rules.md"
    )


def _places(text: str, name: str, tables: Sequence[object]) -> list[str]:
    """Return a place for each table: ``rule 2 at line 10``; without lines if other text reads like
    their headers.
    """
    header = re.compile(rf"\s*\[\[\s*{name}\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    if len(lines) != len(tables):
        return [f"{name} {number}" for number in range(1, len(tables) + 1)]
    return [f"{name} {number} at line {line}" for number, line in enumerate(lines, 1)]


@dataclass(frozen=True, slots=True)
class _RulesFile:
    """The rules of a file, and a place for each of them in errors."""

    path: str
    tables: Sequence[Fields]
    places: Sequence[str]

    def steps(self, sizes: Sizes, others: Sequence[Problem] = ()) -> tuple[Step, ...]:
        """Return the steps of the rules. Raises `CkptError` with all problems, including
        `others`.
        """
        steps: list[Step] = []
        problems: list[Problem] = []
        for place, table in zip(self.places, self.tables):
            texts = problems_of_rule(table)
            if texts:
                problems += [Problem(text, place) for text in texts]
                continue
            try:
                steps.append(step_of(table, place, sizes))
            except CkptError as error:
                problems.append(Problem(error.message, place))
        if problems or others:
            raise _error_with([*problems, *others], self.path)
        return tuple(steps)

    def reversed_steps(self, sizes: Sizes) -> tuple[Step, ...]:
        """Return the steps back, the last rule's first. Raises `CkptError` with all rules that
        nothing undoes.
        """
        steps: list[Step] = []
        problems: list[Problem] = []
        for place, table in zip(self.places, self.tables):
            # a file without the dropped keys is as good
            if "drop" in table and table.get("optional"):
                continue
            try:
                steps.append(step_of(table, place, sizes, reverse=True))
            except CkptError as error:
                problems.append(Problem(error.message, f"{place} ({_name_of(table)})"))
        if problems:
            raise CkptError(
                f"{self.path} cannot be reversed: {plural(len(problems), 'rule')}",
                hint="remove these rules, or write a file with the way back",
                problems=problems,
            )
        return tuple(reversed(steps))

    def problems_of(self, example: Fields, sizes: Sizes, reverse: bool) -> list[str]:
        """Return where the rules do not make the example, with `reverse` in both directions."""
        before, after = example["before"], example["after"]
        sizes = {**sizes, **example.get("sizes", {})}
        problems = _problems_of_steps(before, after, self.steps(sizes))
        if reverse:
            texts = _problems_of_steps(after, before, self.reversed_steps(sizes))
            problems += [f"in reverse: {text}" for text in texts]
        return problems


def _error_with(problems: Sequence[Problem], path: str) -> CkptError:
    message = f"{path}: {plural(len(problems), 'mistake')} in the rules"
    return CkptError(
        message, hint="docs/rules.md says how each kind of rule is written", problems=problems
    )
