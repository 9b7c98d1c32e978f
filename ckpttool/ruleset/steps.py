"""The steps of a rules file, and the plan that they make of a state dict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

from ckpttool.core.checkpoint import ExtraEntry, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Ref, refs
from ckpttool.core.limits import limits
from ckpttool.core.plan import Dropped, Output, Plan, module_renames
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural, shape_text, some
from ckpttool.core.values import dataclass
from ckpttool.ruleset import tensor_ops
from ckpttool.ruleset.dequantize import Block, dequantized, is_without_scale, weights_of
from ckpttool.ruleset.patterns import (
    VARIABLE,
    PatternSet,
    Rule,
    RuleList,
    parse,
    rule_list,
    similar_pattern,
    without_wildcards,
)
from ckpttool.ruleset.tensor_ops import (
    DENSE,
    REFUSED,
    NamedShape,
    TensorSpec,
    Value,
    holds,
    refusal,
)

_FEW = 3  # keys that a hint names

State = dict[str, Value]
Named = list[tuple[str, Value]]
# as str(int) writes it: other spellings would not come back
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_MOST_NAMED = 8  # missing parts in a message

_rule = lru_cache(maxsize=1 << 16)(parse)


class RuleError(CkptError):
    """A rule that contradicts itself or cannot be reversed; the caller names its place."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="")


class PartOf(NamedTuple):
    """The number of a part, the key of the whole, and the pattern that the part matches."""

    number: int
    whole: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor and its parts along `dim`: end to end, of these `sizes` or of equal size, or
    `stacked`.

    `names` are the names of the parts, or one name whose variable `counter`, which `whole` lacks,
    counts them from 0. `count` is how many there are; None if only a tensor tells.
    """

    whole: str
    names: tuple[str, ...]
    counter: str
    count: int | None
    dim: int
    sizes: Shape | None = None
    stacked: bool = False

    def part_key(self, whole: str, number: int) -> str | None:
        """Return the key of a part; None if `whole` is not a tensor that has parts."""
        if self.counter:
            name = self.names[0].replace(f"{{{self.counter}}}", str(number))
        else:
            name = self.names[number]
        return _rule(f"{self.whole} => {name}").apply(whole)

    def part_keys(self, whole: str, count: int) -> list[str]:
        """Return the keys of the parts of a tensor that has parts."""
        return [str(self.part_key(whole, number)) for number in range(count)]

    def whole_of(self, key: str) -> PartOf | None:
        """Return the whole of which the key is a part; None if it is not one."""
        if self.counter:
            return self._counted_part(key)
        for number, name in enumerate(self.names):
            whole = _rule(f"{self.whole} => {name}", reverse=True).apply(key)
            if whole is not None:
                return PartOf(number, whole, name)
        return None

    def _counted_part(self, key: str) -> PartOf | None:
        (name,) = self.names
        number = _rule(f"{name} => {{{self.counter}}}").apply(key)
        if number is None or not _NUMBER.fullmatch(number):
            return None
        whole = _rule(f"{name} => {self.whole}").apply(key)
        return None if whole is None else PartOf(int(number), whole, name)


def parts_of(
    whole: str,
    names: Sequence[str] | str,
    count: int | None,
    dim: int,
    sizes: Sequence[int] | None,
    stacked: bool,
) -> Parts:
    """Return the parts with these names, or with one name that counts. Raises `CkptError` if that
    is ambiguous.
    """
    for text in (whole, names) if isinstance(names, str) else (whole, *names):
        if "=>" in text:
            raise RuleError(f"{text!r} is not a name: => is for rename rules")
    if isinstance(names, str):
        if sizes is not None:
            raise RuleError("sizes = is for listed parts: numbered parts are of equal size")
        parts = Parts(whole, (names,), _counter(whole, names), count, dim, None, stacked)
        parts.part_key(whole, 0)
        _rule(f"{names} => {whole}")
        return parts
    if len(set(names)) < len(names):
        raise RuleError("two parts have the same name")
    for name in names:
        _rule(f"{whole} => {name}")
        _rule(f"{whole} => {name}", reverse=True)
    if sizes is not None and len(sizes) != len(names):
        raise RuleError(f"{len(sizes)} sizes for {len(names)} parts")
    if count is not None:
        raise RuleError("parts = counts numbered parts, and these are listed")
    part_sizes = None if sizes is None else tuple(sizes)
    return Parts(whole, tuple(names), "", len(names), dim, part_sizes, stacked)


def _counter(whole: str, name: str) -> str:
    """Return the variable that only the name of the parts has. Raises `CkptError` if there is none,
    or more than one.
    """
    counters = set(VARIABLE.findall(name)).difference(VARIABLE.findall(whole))
    if len(counters) == 1:
        ((counter, star),) = counters
        if not star:
            return str(counter)
    actual = " and ".join(sorted(f"{{{variable}{star}}}" for variable, star in counters)) or "none"
    raise RuleError(
        f"{name!r} needs one variable that {whole!r} lacks, as {{e}}, to count the parts: {actual}"
    )


# Steps


@dataclass(slots=True)
class StepResult:
    """The state after a step. `used` are the step's patterns that matched a key."""

    values: Named = field(default_factory=list)
    dropped: list[Value] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RulePlace:
    """The place of a rule in its file. An `optional` one may apply to no key. A rule applies only
    if the state has all tensors of `when`, and none of `unless`.
    """

    text: str
    optional: bool = False
    when: tuple[TensorSpec, ...] = ()
    unless: tuple[TensorSpec, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Step:
    """A rule of a file, which changes a state. All `patterns` must match some key, unless it is
    optional.
    """

    where: RulePlace
    patterns: tuple[str, ...]

    def apply_to(self, key: str, value: Value, result: StepResult) -> Named:
        """Return what an entry becomes, and note in `result` which patterns matched."""
        raise NotImplementedError

    def apply(self, state: State) -> StepResult:
        result = StepResult()
        for key, value in state.items():
            try:
                result.values += self.apply_to(key, value, result)
            except Refused as error:
                result.problems.append(Problem(error.message, key))
                result.values.append((key, replace(value, layout=REFUSED)))
        return result


@dataclass(frozen=True)
class Rename(Step):
    """Rename a key by the first rule that matches it; all keys at once, so that names can be
    swapped.
    """

    rules: tuple[Rule, ...]

    @cached_property
    def rule_list(self) -> RuleList:
        return rule_list(self.rules)

    def apply_to(self, key: str, value: Value, result: StepResult) -> Named:
        renamed = self.rule_list.rename(key)
        if renamed is None:
            return [(key, value)]
        result.used.add(renamed.rule.text)
        return [(renamed.name, value)]


def rename(where: RulePlace, rules: Sequence[Rule]) -> Rename:
    return Rename(where, tuple(rule.text for rule in rules), tuple(rules))


@dataclass(frozen=True)
class Convert(Step):
    """Change every tensor that a pattern matches, and if `dtypes` are given, that has one of these.

    Without a `change`, leave out every entry that a pattern matches.
    """

    change: Callable[[Value], Value] | None = None
    dtypes: tuple[str, ...] | None = None

    @cached_property
    def pattern_set(self) -> PatternSet:
        return PatternSet(self.patterns)

    def apply_to(self, key: str, value: Value, result: StepResult) -> Named:
        hits = self.pattern_set.hits(key)
        if not hits or (self.dtypes is not None and value.dtype not in self.dtypes):
            return [(key, value)]
        result.used.update(hits)
        if self.change is None:
            result.dropped.append(value)
            return []
        return [(key, value if value.layout == REFUSED else self.change(_dense(value)))]


@dataclass(frozen=True)
class Dequantize(Step):
    """Replace quantized weights, whose keys a pattern matches, and their scales by their values."""

    dtype: str
    block: Block | None

    def apply(self, state: State) -> StepResult:
        result, pattern_set = StepResult(), PatternSet(self.patterns)
        values: dict[str, tuple[str, Value]] = {}
        parts: set[str] = set()
        for weight in weights_of(state):
            hits = pattern_set.hits(weight.weight)
            if not hits:
                continue
            result.used.update(hits)
            parts.update(weight.others)
            result.dropped += [state[key] for key in weight.others]
            value = state[weight.weight]
            try:
                value = dequantized(weight, state, self.dtype, self.block)
            except Refused as error:
                result.problems.append(Problem(error.message, weight.weight))
            values[weight.weight] = weight.plain, value
        for key, value in state.items():
            if key in values:
                result.values.append(values[key])
                continue
            if is_without_scale(value) and pattern_set.hits(key) and key not in parts:
                result.problems.append(Problem("no scale belongs to it", key))
            if key not in parts:
                result.values.append((key, value))
        return result


def cast_floats(dtype: str) -> Convert:
    """Return the step that casts every floating-point tensor, as `Module.to` does."""
    where = RulePlace(f"--dtype {dtype}", optional=True)
    dtypes = tensor_ops.dtypes_like(dtype)
    return Convert(where, ("*",), lambda value: tensor_ops.cast(value, dtype), dtypes)


@dataclass(frozen=True)
class Check(Step):
    """Change nothing. A tensor without the shape that is expected of it is a problem.

    A size with a name is the same in all tensors; the first shape that has the name tells it.
    """

    shapes: tuple[NamedShape, ...]

    def apply(self, state: State) -> StepResult:
        result = StepResult(list(state.items()))
        # name of a size -> its value, and the tensor that has it; the first shape tells
        sizes: dict[str, tuple[int, str]] = {}
        for expected in self.shapes:
            pattern_set = PatternSet((expected.pattern,))
            for key, value in state.items():
                if not pattern_set.hits(key):
                    continue
                result.used.add(expected.pattern)
                text = _shape_problem(expected, key, value, sizes)
                if text:
                    result.problems.append(Problem(text, key))
        return result


def _shape_problem(
    expected: NamedShape, key: str, value: Value, sizes: dict[str, tuple[int, str]]
) -> str:
    """Return why the tensor does not have the shape, or an empty text. A name of a size that is not
    in `sizes` is added, with the size and the key.
    """
    shape = shape_text(value.shape)
    if len(value.shape) != len(expected.sizes):
        return f"{shape} instead of {plural(len(expected.sizes), 'dimension')}"
    for dim, (size, actual) in enumerate(zip(expected.sizes, value.shape)):
        if isinstance(size, int):
            if size not in (-1, actual):
                return f"{shape}: dimension {dim} is {actual} instead of {size}"
            continue
        number, origin = sizes.setdefault(size, (actual, key))
        if number != actual:
            return (
                f"{shape}: dimension {dim} is {actual}, and {number} in {origin}"
                " (is it a part of a tensor?)"
            )
    return ""


@dataclass(frozen=True)
class Constant(Step):
    """Add a tensor filled with one number: one for each tensor that `beside` matches, by default
    with its shape and dtype, or a single one.
    """

    name: str
    beside: Rule | None
    fill: float | bool
    dtype: str | None
    shape: Shape | None

    def apply_to(self, key: str, value: Value, result: StepResult) -> Named:
        name = None if self.beside is None else self.beside.apply(key)
        if name is None:
            return [(key, value)]
        result.used.update(self.patterns)
        return [(key, value), (name, self.value(_dense(value)))]

    def value(self, beside: Value | None = None) -> Value:
        shape, dtype = self.shape, self.dtype
        if beside is not None:
            shape = beside.shape if shape is None else shape
            dtype = dtype or beside.dtype
        return tensor_ops.constant(shape or (), dtype or "float32", self.fill)

    def apply(self, state: State) -> StepResult:
        result = super().apply(state)
        if self.beside is None:
            try:
                result.values.append((self.name, self.value()))
            except Refused as error:
                result.problems.append(Problem(error.message, self.name))
        return result


@dataclass(frozen=True)
class Split(Step):
    """Split a tensor into its parts."""

    parts: Parts

    def apply_to(self, key: str, value: Value, result: StepResult) -> Named:
        parts = self.parts
        if parts.part_key(key, 0) is None:
            return [(key, value)]
        result.used.add(parts.whole)
        if value.layout == REFUSED:
            return [(name, value) for name in parts.part_keys(key, parts.count or 1)]
        value = _dense(value)
        count = parts.count or value.shape[tensor_ops.dimension(parts.dim, value.shape)]
        if count > limits().made_parts:
            raise refusal(f"{count:,} parts; {limits().named('made_parts')}")
        if parts.stacked:
            values = tensor_ops.unstack(value, count, parts.dim)
        else:
            values = tensor_ops.split(value, count, parts.dim, parts.sizes)
        return list(zip(parts.part_keys(key, count), values))


@dataclass(frozen=True)
class Join(Step):
    """Join parts to one tensor, at the place of the first part."""

    parts: Parts

    def apply(self, state: State) -> StepResult:
        result = StepResult()
        wholes: dict[str, dict[int, str]] = {}  # key of the whole -> its parts by number
        whole_of: dict[str, str] = {}
        for key in state:
            try:
                part = self.parts.whole_of(key)
            except Refused as error:
                result.problems.append(Problem(error.message, key))
                continue
            if part is None:
                continue
            result.used.add(part.pattern)
            keys = wholes.setdefault(part.whole, {})
            if part.number in keys:
                problem = f"would be the same part of {part.whole} as {keys[part.number]}"
                result.problems.append(Problem(problem, key))
            keys[part.number] = key
            whole_of[key] = part.whole
        for key, value in state.items():
            if key not in whole_of:
                result.values.append((key, value))
                continue
            whole = whole_of[key]
            if whole not in wholes:  # its first part has brought it
                continue
            keys = wholes.pop(whole)
            try:
                value = self._joined(whole, keys, state)
            except Refused as error:
                result.problems.append(Problem(error.message, whole))
                value = replace(state[keys[min(keys)]], layout=REFUSED)
            result.values.append((whole, value))
        return result

    def _joined(self, whole: str, keys: Mapping[int, str], state: State) -> Value:
        parts = self.parts
        count = parts.count or max(keys) + 1
        self._check_complete(whole, keys, count)
        if len(keys) > count:
            raise refusal(f"has {len(keys)} parts, not {count}")
        values = [state[keys[number]] for number in sorted(keys)]
        if any(value.layout == REFUSED for value in values):
            return replace(values[0], layout=REFUSED)
        values = [_dense(value) for value in values]
        if parts.stacked:
            return tensor_ops.stack(values, parts.dim)
        return tensor_ops.join(values, parts.dim, parts.sizes)

    def _check_complete(self, whole: str, keys: Mapping[int, str], count: int) -> None:
        """Raise `Refused` for missing parts, and name a few of them."""
        numbers = (number for number in range(count) if number not in keys)
        missing = [
            str(self.parts.part_key(whole, number)) for number in islice(numbers, _MOST_NAMED)
        ]
        if not missing:
            return
        if next(numbers, None) is not None:
            missing.append("more")
        verb = "is" if len(missing) == 1 else "are"
        raise refusal(f"needs {' and '.join(missing)}, which {verb} not there")


def _dense(value: Value) -> Value:
    if value.layout != DENSE:
        raise refusal(f"not a dense tensor ({value.layout}): it can be renamed or dropped only")
    return value


def name_after(steps: Sequence[Step], name: str) -> str:
    """Return the name of a key without a tensor after the renames of all steps. Renames with a
    condition depend on tensors, and are left out.
    """
    for step in steps:
        if isinstance(step, Rename) and not (step.where.when or step.where.unless):
            renamed = step.rule_list.rename(name)
            name = name if renamed is None else renamed.name
    return name


# Plans


def plan_of(steps: Sequence[Step], section: Section) -> Plan:
    """Return the plan of the steps. Raises `Refused`, with all problems, if they do not fit the
    section.
    """
    path = section.path
    state, reasons = state_of(steps, section)
    outputs = tuple(Output(path, key, value.source) for key, value in state.items())
    used = refs(tuple(output.source for output in outputs)) if reasons else ()
    for key in used:
        reasons.pop(key, None)
    dropped = tuple(Dropped(path, key, reason) for key, reason in reasons.items())
    renamed: dict[str, str] = {}
    if section.modules:  # few formats keep them, and there may be many renames
        for key, value in state.items():
            if value.origin is not None and value.origin != key:
                renamed[value.origin] = key
    return Plan(outputs, dropped, module_renames(path, section.modules or (), renamed))


def state_of(
    steps: Sequence[Step], section: Section, *, whole: bool = True
) -> tuple[State, dict[str, str]]:
    """Apply the steps. Return the new state, and the keys that they drop with the rule that does.

    Raises `Refused` as `plan_of` does. With `whole` each pattern must match some key.
    """
    state = first_state(section)
    dropped: dict[str, str] = {}
    problems: list[Problem] = []
    keys: list[str] = []  # what the first rule that is wrong has seen
    for step in steps:
        if not holds(step.where.when, step.where.unless, state):
            continue
        result = step.apply(state)
        keys = keys if problems else list(state)
        # other problems may be the reason for a pattern without a key
        if whole and not step.where.optional and not problems and not result.problems:
            for text in step.patterns:
                if text not in result.used:
                    result.problems.append(Problem("applies to no key", text))
        state = dict(result.values)
        if len(state) < len(result.values):
            result.problems += _written_twice(result.values)
        for problem in result.problems:
            problems.append(Problem(f"{step.where}: {problem.problem}", problem.key))
        for value in result.dropped:
            dropped.update(dict.fromkeys(refs(value.source), str(step.where)))
    if problems:
        raise Refused(
            f"the rules do not fit the checkpoint: {plural(len(problems), 'problem')}",
            hint=_hint(problems, section.path, keys, steps),
            problems=problems,
        )
    return state, dropped


def _hint(
    problems: Sequence[Problem], path: str, keys: Sequence[str], steps: Sequence[Step]
) -> str:
    """Return how to write the first rule that is wrong in a known way. The section is at `path`;
    the rule has seen the `keys`.
    """
    for problem in problems:
        if path and problem.key.startswith(f"{path}."):
            return f"rules name keys without their section: leave out `{path}.`"
        meant = without_wildcards(problem.key) or similar_pattern(problem.key, keys)
        if meant:
            return meant
    hint = (
        f"the keys here begin with {some(keys[:_FEW])}; `ckpttool inspect CKPT` lists keys and"
        " shapes"
    )
    if len(steps) > 1:
        return f"{hint}, and a rule sees what the rules before it have made"
    if any(isinstance(step, Rename) and len(step.rules) > 1 for step in steps):
        return f"{hint}, and the first --rule that matches a key renames it"
    return hint


def first_state(section: Section) -> State:
    state: State = {}
    for key, entry in section.by_key().items():
        if isinstance(entry, ExtraEntry):
            state[key] = Value(Ref(key), "", (), key, "not a tensor")
        else:
            layout = entry.layout if entry.storage is None else DENSE
            state[key] = Value(Ref(key), entry.dtype, entry.shape, key, layout)
    return state


def _written_twice(values: Named) -> Iterator[Problem]:
    """Yield a problem for each key with several values."""
    by_key: dict[str, list[Expression]] = {}
    for key, value in values:
        by_key.setdefault(key, []).append(value.source)
    for key, sources in by_key.items():
        if len(sources) > 1:
            origins = list(dict.fromkeys(refs(tuple(sources))))
            origin = f", from {some(origins)}" if origins else ""
            yield Problem(f"written {len(sources)} times{origin}", key)
