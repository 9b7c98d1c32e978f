"""The steps of a rules file, and the plan that they make of a state dict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple, Union

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Ref, refs
from ckpttool.core.limits import limits
from ckpttool.core.plan import Dropped, Output, Plan, module_renames
from ckpttool.core.text import plural, some
from ckpttool.core.values import dataclass
from ckpttool.rules import tensor_ops
from ckpttool.rules.patterns import VARIABLE, InTurn, Naming, Rule, parse
from ckpttool.rules.tensor_ops import DENSE, REFUSED, Shown, Value, holds, refusal


class Part(NamedTuple):
    """Which part of which whole a key is; `text` is the pattern that names it."""

    number: int
    whole: str
    text: str


# The names of parts and of their whole are `Listed` or `Numbered`. `patterns` are the parts' names as they were
# written, `number` is how many there are (None where only a tensor tells it), `part` says which one a key is (None for
# none), `key` is that of a part (None where the whole is none that has parts).


@dataclass(frozen=True, slots=True)
class Listed:
    """Every part has its own name."""

    patterns: tuple[str, ...]
    to_part: tuple[Rule, ...]
    to_whole: tuple[Rule, ...]

    @property
    def number(self) -> int:
        """How many are listed."""
        return len(self.patterns)

    def part(self, key: str) -> Part | None:
        """The first of the list that the key is."""
        for number, rule in enumerate(self.to_whole):
            whole = rule.apply(key)
            if whole is not None:
                return Part(number, whole, self.patterns[number])
        return None

    def key(self, whole: str, number: int) -> str | None:
        """The name of that place in the list."""
        return self.to_part[number].apply(whole)


@dataclass(frozen=True, slots=True)
class Numbered:
    """One name for all parts: its variable `counter`, which the whole's name lacks, counts them from 0 on."""

    name: str
    whole: str
    counter: str
    to_whole: Rule
    to_number: Rule
    number: int | None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def part(self, key: str) -> Part | None:
        """The part of the number that stands in the key; what is no number is no part."""
        number = self.to_number.apply(key) or ""
        return Part(int(number), str(self.to_whole.apply(key)), self.name) if _NUMBER.fullmatch(number) else None

    def key(self, whole: str, number: int) -> str | None:
        """The name with the number in the place of its variable."""
        return _numbered(self.whole, self.name, self.counter, number).apply(whole)


_NUMBER = re.compile(r"0|[1-9]\d{0,8}")  # as str(int) writes it: other spellings would not come back


@lru_cache(maxsize=1 << 16)
def _numbered(whole: str, name: str, counter: str, number: int) -> Rule:
    return parse(f"{whole} => {name.replace(f'{{{counter}}}', str(number))}")


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor and its parts along `dim`: end to end, of these `sizes` or of equal size, or `stacked`."""

    whole: str
    names: Listed | Numbered
    dim: int
    sizes: tuple[int, ...] | None = None
    stacked: bool = False

    def keys(self, whole: str, number: int) -> list[str]:
        """The names of this many parts of the tensor of that name, which is one that has parts."""
        return [str(self.names.key(whole, place)) for place in range(number)]

    def missing(self, whole: str, found: Collection[int]) -> Iterator[str]:
        """The names of the parts that are not among the numbers `found`, as far as these go or there have to be."""
        number = self.names.number or max(found) + 1
        return (str(self.names.key(whole, place)) for place in range(number) if place not in found)


def listed(whole: str, names: Sequence[str]) -> Listed:
    """The parts of a list, both ways. Raises `CkptError` where a name of one side could not be told from the other."""
    _no_arrows((whole, *names))
    if len(set(names)) < len(names):
        raise CkptError("two parts have the same name", hint="")
    texts = [f"{whole} => {name}" for name in names]
    return Listed(tuple(names), tuple(map(parse, texts)), tuple(parse(text, reverse=True) for text in texts))


def numbered(whole: str, name: str, number: int | None) -> Numbered:
    """The parts that one name with a variable stands for. Raises `CkptError` where no variable could count them."""
    _no_arrows((whole, name))
    own = {found for found in VARIABLE.findall(name) if found not in VARIABLE.findall(whole)}
    if len(own) != 1 or any(star for _, star in own):
        have = " and ".join(sorted(f"{{{found}{star}}}" for found, star in own)) or "none"
        raise CkptError(
            f"{name!r} needs one variable that {whole!r} lacks, as {{e}}, to count the parts: {have}", hint=""
        )
    ((counter, _),) = own
    _numbered(whole, name, counter, 0)
    back = parse(f"{name} => {whole}")
    return Numbered(name, whole, counter, back, parse(f"{name} => {{{counter}}}"), number)


def _no_arrows(texts: Sequence[str]) -> None:
    for text in texts:
        if "=>" in text:
            raise CkptError(f"{text!r} is not a name: => belongs into a rename", hint="")


State = dict[str, Value]
Named = list[tuple[str, Value]]
_MOST_NAMED = 8  # parts that are missing


@dataclass(slots=True)
class Made:
    """What a step makes of a state. `used` are the step's patterns that matched something."""

    values: Named = field(default_factory=list)
    dropped: list[Value] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a rule in its file, and where it is carried out: an `optional` one may apply to no key, and all do
    only `when` these tensors are there, `unless` those are.
    """

    text: str
    optional: bool = False
    when: tuple[Shown, ...] = ()
    unless: tuple[Shown, ...] = ()

    def __str__(self) -> str:
        """The place."""
        return self.text


@dataclass(frozen=True)
class Rename:
    """The first of the rules that matches a key renames it; all keys at once, so that names can be swapped."""

    where: Where
    rules: tuple[Rule, ...]

    @cached_property
    def in_turn(self) -> InTurn:
        """The rules, ready to be tried."""
        return InTurn(self.rules)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The rules as they were written: each has to apply to some key."""
        return tuple(rule.text for rule in self.rules)

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        rule, name = self.in_turn.first(key)
        if rule is not None:
            made.used.add(rule.text)
        return [(name or key, value)]


@dataclass(frozen=True)
class _ByPatterns:
    where: Where
    patterns: tuple[str, ...]

    @cached_property
    def naming(self) -> Naming:
        """The patterns, ready to be tried."""
        return Naming(self.patterns)


@dataclass(frozen=True)
class Convert(_ByPatterns):
    """Every tensor that a pattern names is changed, under the same key."""

    change: tensor_ops.Change

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        hits = self.naming.hits(key)
        if not hits or not self.change.concerns(value):
            return [(key, value)]
        made.used.update(hits)
        return [(key, value if value.layout == REFUSED else self.change.make(_dense(value)))]


class Drop(_ByPatterns):
    """Every entry that a pattern names is left out."""

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        hits = self.naming.hits(key)
        made.used.update(hits)
        made.dropped += [value] if hits else []
        return [] if hits else [(key, value)]


@dataclass(frozen=True, slots=True)
class Constant:
    """A new tensor filled with one value: one beside each that `beside` leads from, of its shape and dtype where these
    are not said, or one by itself.
    """

    where: Where
    name: str
    beside: Rule | None
    fill: float | bool
    dtype: str | None
    shape: tuple[int, ...] | None

    @property
    def patterns(self) -> tuple[str, ...]:
        """What has to apply to some key: the name beside which it is to stand."""
        return () if self.beside is None else (self.beside.text.partition("=>")[0].strip(),)

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry: itself, and the constant beside it."""
        name = None if self.beside is None else self.beside.apply(key)
        if name is None:
            return [(key, value)]
        made.used.update(self.patterns)
        return [(key, value), (name, self.value(_dense(value)))]

    def value(self, beside: Value | None = None) -> Value:
        """The constant. Raises `Refused` where its dtype does not hold it."""
        shape = self.shape if beside is None or self.shape is not None else beside.shape
        dtype = self.dtype or (beside.dtype if beside is not None else "float32")
        return tensor_ops.constant(shape or (), dtype, self.fill)


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor becomes its parts."""

    where: Where
    parts: Parts

    @property
    def patterns(self) -> tuple[str, ...]:
        """What has to apply to some key: the name of the whole."""
        return (self.parts.whole,)

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        parts = self.parts
        if parts.names.key(key, 0) is None:
            return [(key, value)]
        made.used.add(parts.whole)
        if value.layout == REFUSED:
            return [(name, value) for name in parts.keys(key, parts.names.number or 1)]
        number = parts.names.number or _dense(value).shape[tensor_ops.dimension(parts.dim, value.shape)]
        if number > limits().made_parts:
            raise refusal(f"{number:,} parts; {limits().named('made_parts')}")
        if parts.stacked:
            values = tensor_ops.unstack(_dense(value), number, parts.dim)
        else:
            values = tensor_ops.split(_dense(value), number, parts.dim, parts.sizes)
        return list(zip(parts.keys(key, number), values))


@dataclass(frozen=True, slots=True)
class Join:
    """Parts become the tensor, at the place of the first of them."""

    where: Where
    parts: Parts

    @property
    def patterns(self) -> tuple[str, ...]:
        """What has to apply to some key: the name of each part."""
        return self.parts.names.patterns


Step = Union[Rename, Convert, Drop, Constant, Split, Join]


@dataclass(frozen=True, slots=True)
class Renames:
    """What the unconditional renames make of a name, one after the other: for those who have names and no tensors."""

    steps: tuple[Step, ...]

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where no step renames it."""
        name = key
        for step in self.steps:
            if isinstance(step, Rename) and not (step.where.when or step.where.unless):  # no tensors tell these
                name = step.in_turn.first(name)[1] or name
        return None if name == key else name


def plan_of(steps: Sequence[Step], section: Section) -> Plan:
    """The plan of the steps. Raises `Refused`, all problems at once, where they do not fit the section."""
    return _plan(*state_of(steps, section), section)


def state_of(steps: Sequence[Step], section: Section, *, whole: bool = True) -> tuple[State, dict[str, str]]:
    """What the steps make of the section, and the keys that they drop with the rule that does.

    Raises `Refused` as `plan_of` does. A section that is not the `whole` one may lack what a rule applies to.
    """
    state = {key: _value(key, entry) for key, entry in section.by_key().items()}
    dropped: dict[str, str] = {}
    problems: list[Problem] = []
    for step in steps:
        if not holds(step.where.when, step.where.unless, state):
            continue
        made = _joined(step, state) if isinstance(step, Join) else _each(step, state)
        if whole and not step.where.optional and not problems and not made.problems:  # else that may be the reason
            made.problems += [Problem("applies to no key", text) for text in step.patterns if text not in made.used]
        counts = Counter(key for key, _ in made.values)
        made.problems += [
            Problem(f"written {count} times{_made_of(key, made.values)}", key)
            for key, count in counts.items()
            if count > 1
        ]
        problems += [Problem(f"{step.where}: {one.problem}", one.key) for one in made.problems]
        dropped.update((key, str(step.where)) for value in made.dropped for key in refs(value.source))
        state = dict(made.values)
    if problems:
        raise Refused(
            f"the rules do not fit the checkpoint: {plural(len(problems), 'problem')}",
            hint="`ckpttool inspect CKPT` lists keys and shapes; a rule sees what the rules before it have made",
            problems=problems,
        )
    return state, dropped


def _made_of(key: str, values: Named) -> str:
    sources = dict.fromkeys(ref for name, value in values if name == key for ref in refs(value.source))
    return f", from {some(list(sources))}" if sources else ""


def _plan(state: State, dropped: dict[str, str], section: Section) -> Plan:
    used = {key for value in state.values() for key in refs(value.source)} if dropped else set[str]()
    entries = state.items() if section.modules else ()  # few formats keep the modules, and their renames are many
    renamed = {value.origin: key for key, value in entries if value.origin is not None and value.origin != key}
    return Plan(
        tuple([Output(section.path, key, value.source) for key, value in state.items()]),
        tuple(Dropped(section.path, key, reason) for key, reason in dropped.items() if key not in used),
        module_renames(section.path, section.modules or (), renamed),
    )


def _each(step: Rename | Convert | Drop | Constant | Split, state: State) -> Made:
    """The step on one entry after the other."""
    made = Made()
    for key, value in state.items():
        try:
            made.values += step.one(key, value, made)
        except Refused as error:
            made.problems.append(Problem(error.message, key))
            made.values.append((key, replace(value, layout=REFUSED)))
    if isinstance(step, Constant) and step.beside is None:
        try:
            made.values.append((step.name, step.value()))
        except Refused as error:
            made.problems.append(Problem(error.message, step.name))
    return made


def _joined(step: Join, state: State) -> Made:
    """The step on groups of entries, those that are parts of the same whole."""
    made, groups, whole_of = Made(), dict[str, dict[int, str]](), dict[str, str]()
    for key in state:
        part = _part(step, key, made)
        if part is None:
            continue
        own = groups.setdefault(part.whole, {})
        if part.number in own:
            problem = f"would be the same part of {part.whole} as {own[part.number]}"
            made.problems.append(Problem(problem, key))
        own[part.number] = key
        whole_of[key] = part.whole
    for key, value in state.items():
        if key not in whole_of:
            made.values.append((key, value))
        elif whole_of[key] in groups:
            whole = whole_of[key]
            made.values.append((whole, _whole(step.parts, whole, groups.pop(whole), state, made)))
    return made


def _part(step: Join, key: str, made: Made) -> Part | None:
    try:
        part = step.parts.names.part(key)
    except Refused as error:
        made.problems.append(Problem(error.message, key))
        return None
    if part is not None:
        made.used.add(part.text)
    return part


def _whole(parts: Parts, whole: str, keys: dict[int, str], state: State, made: Made) -> Value:
    """The value of one whole; `keys` are those of its parts, by their numbers."""
    found = [state[keys[number]] for number in sorted(keys)]
    try:
        _complete(parts, whole, keys)
        if not any(value.layout == REFUSED for value in found):
            values = [_dense(value) for value in found]
            return (
                tensor_ops.stack(values, parts.dim)
                if parts.stacked
                else tensor_ops.join(values, parts.dim, parts.sizes)
            )
    except Refused as error:
        made.problems.append(Problem(error.message, whole))
    return replace(found[0], layout=REFUSED)


def _complete(parts: Parts, whole: str, keys: Mapping[int, str]) -> None:
    """Raises `Refused` where parts are missing, or there are more than there should be."""
    missing = list(islice(parts.missing(whole, keys), _MOST_NAMED + 1))
    if missing:
        more = ["more"] if len(missing) > _MOST_NAMED else []
        said = " and ".join([*missing[:_MOST_NAMED], *more])
        raise refusal(f"needs {said}, which {'is' if len(missing) == 1 else 'are'} not there")
    number = parts.names.number
    if number is not None and len(keys) > number:
        raise refusal(f"has {len(keys)} parts, not {number}")


def _dense(value: Value) -> Value:
    if value.layout != DENSE:
        raise refusal(f"not a dense tensor ({value.layout}): it can be renamed or dropped only")
    return value


def _value(key: str, entry: TensorEntry | ExtraEntry) -> Value:
    if isinstance(entry, ExtraEntry):
        return Value(Ref(key), "", (), key, "not a tensor")
    layout = entry.layout if entry.storage is None else DENSE
    return Value(Ref(key), entry.dtype, entry.shape, key, layout)
