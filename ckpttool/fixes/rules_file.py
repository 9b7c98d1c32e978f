"""Suggest the rules file that brings one checkpoint's names and shapes to another's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Union

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import refs
from ckpttool.core.text import plural, shell, some, visible
from ckpttool.core.values import dataclass
from ckpttool.diffing.names import known
from ckpttool.diffing.result import Diff
from ckpttool.diffing.sections import Rotary, rotary
from ckpttool.io.paths import is_url, name
from ckpttool.naming.pairing.values import Pair
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.output import free, operand, outputs
from ckpttool.rules.infer_rules import numbered, patterns, renames
from ckpttool.rules.parse import steps_of
from ckpttool.rules.patterns import InTurn, parse
from ckpttool.rules.steps import plan_of

Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]

_NO_ORDERS: Mapping[str, Rotary] = {}
_HEAD = """\
# Rules that `ckpttool diff --suggest` inferred: they give the left side the names and shapes of the right side.
# The comment on each rule is its evidence. Names and shapes do not show whether the values fit: check them.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """One rule of the file: its fields, and what speaks for it."""

    fields: Mapping[str, object]
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`tables` are the rules, `plain` the renames where there is nothing else. `remaining` are keys of the right that
    they do not make, `dropped` second names of the left that they leave out, `left_over` keys that stay as they are.
    """

    tables: tuple[Table, ...]
    remaining: tuple[str, ...]
    dropped: tuple[str, ...]
    left_over: tuple[str, ...]

    @property
    def plain(self) -> tuple[str, ...] | None:
        """The renames, where the rules only rename and drop; None where they do more."""
        return self._texts("rename") if all({"rename", "drop"} & set(table.fields) for table in self.tables) else None

    @property
    def drops(self) -> tuple[str, ...]:
        """The patterns of what is left out."""
        return self._texts("drop")

    def _texts(self, operation: str) -> tuple[str, ...]:
        lists = (table.fields.get(operation) for table in self.tables)
        return tuple(text for texts in lists if isinstance(texts, list) for text in texts)

    def text(self) -> str:
        """The file, as TOML."""
        note = f"# Not made, since no tensor of the left side is known to be it: {visible(', '.join(self.remaining))}\n"
        return _HEAD + (note if self.remaining else "") + "".join(map(_toml, self.tables))


def suggest(
    pairs: Sequence[Pair],
    same: Mapping[str, str],
    left: Section,
    right: Section,
    orders: Mapping[str, Rotary] = _NO_ORDERS,
) -> Suggestion | None:
    """The rules of `pairs`, which were inferred, and of `same`: keys of the left -> keys of the right, known by name.

    `orders`: keys of the left whose rows the right has in another order. None where there is nothing to rewrite, or no
    rules express it.
    """
    with suppress(CkptError):  # names that a rule cannot say
        found = _found(pairs, same, left, right, orders)
        expected = {pair.right[0]: pair.left for pair in pairs if len(pair.right) == 1}
        expected |= {key: pair.left for pair in pairs if len(pair.right) > 1 for key in pair.right}
        expected |= {new: (old,) for old, new in same.items()} | {key: (key,) for key in found.left_over}
        return found if found.tables and _makes(found, left) == expected else None
    return None


def _found(
    pairs: Sequence[Pair],
    same: Mapping[str, str],
    left: Section,
    right: Section,
    orders: Mapping[str, Rotary],
) -> Suggestion:
    """The rules, before they are tried."""
    have, want = left.by_key(), right.by_key()
    named = {**same, **{p.left[0]: p.right[0] for p in pairs if len(p.left) == len(p.right) == 1}}
    fused = [pair for pair in pairs if len(pair.left) != len(pair.right)]
    used = {key for pair in pairs for key in pair.left} | same.keys()
    made = {key for pair in pairs for key in pair.right} | set(same.values())
    aliases = right.aliases()
    remaining = tuple(key for key in want if key not in made and key not in aliases)
    spare = [key for key in have if key not in used]
    first = left.aliases()
    held = {first.get(key, key) for key in used}
    dropped = [] if remaining else [key for key in spare if first.get(key, key) in held]  # only second names
    kept = [key for key in spare if key not in dropped]
    turned = {way: [pair for pair in pairs if pair.transposed == way] for way in ("left", "right")}
    tables = [
        *_dropping(dropped, have),
        *_transposing([key for pair in turned["left"] for key in pair.left], have),
        *_ordering(orders, have),
        *_fusing(fused, have, want),
        *_renaming(named, [*kept, *(key for pair in fused for key in pair.right)], pairs),
        *_transposing([key for pair in turned["right"] for key in pair.right], want),
    ]
    return Suggestion(tuple(tables), remaining, tuple(dropped), tuple(kept))


def _makes(suggestion: Suggestion, left: Section) -> dict[str, tuple[str, ...]]:
    """What the rules, read back, make of the left's tensors: key -> keys that it is made of."""
    plan = plan_of(steps_of(suggestion.text(), "the suggested rules"), left)
    return {output.key: tuple(refs(output.source)) for output in plan.outputs}


# The rules


def _dropping(keys: Sequence[str], have: Iterable[str]) -> Iterator[Table]:
    if keys:
        gone = set(keys)
        texts = patterns(keys, [key for key in have if key not in gone])
        yield Table({"drop": list(texts)}, ("second names of tensors that are kept; the right has no such names",))


def _transposing(keys: Sequence[str], names: Iterable[str]) -> Iterator[Table]:
    if keys:
        meant = set(keys)
        texts = patterns(keys, [key for key in names if key not in meant])
        yield Table(
            {"transpose": list(texts)}, ("stored transposed on one side, as shapes of weights and biases show",)
        )


def _ordering(orders: Mapping[str, Rotary], have: Iterable[str]) -> Iterator[Table]:
    """One rule for all layers, and for queries and keys alike: the number of heads is not said."""
    have = list(have)
    for order in dict.fromkeys(orders.values()):
        meant = [key for key in have if orders.get(key) == order]
        texts = patterns(meant, [key for key in have if orders.get(key) != order])
        yield Table(
            {"permute": list(texts), "rows": list(order.rows), "dims": [0, 2, 1]},
            (f"rows in the other order of rotary embeddings, heads of {order.size}, as the values show",),
        )


def _fusing(pairs: Sequence[Pair], have: Entries, want: Entries) -> Iterator[Table]:
    """Splits and joins, layers in one rule, and a weight and its bias where their names end alike."""
    rules: dict[_Fusion, list[Pair]] = {}
    for pair in pairs:
        whole, parts = _ends(pair)
        names = _open_ended(numbered((*whole, *parts)))
        rules.setdefault(_Fusion(len(pair.left) == 1, names, _sizes(pair, have, want)), []).append(pair)
    for rule, own in rules.items():
        first, rest = rule.names[0], list(rule.names[1:])
        fields: dict[str, object] = {"split": first, "into": rest} if rule.splits else {"join": rest, "into": first}
        sizes = {} if rule.sizes is None else {"sizes": list(rule.sizes)}
        yield Table({**fields, **sizes}, tuple(dict.fromkeys(pair.evidence for pair in own)))


class _Fusion(NamedTuple):
    """What several pairs have in common: one rule splits or joins them all. `names`: the whole's, then the parts'."""

    splits: bool
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None


def _ends(pair: Pair) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The whole, and its parts."""
    return (pair.left, pair.right) if len(pair.left) == 1 else (pair.right, pair.left)


def _open_ended(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with ``{p}`` for what all of them end in, ``weight`` or ``bias``."""
    ends = {name.rpartition(".")[2] for name in names}
    if len(ends) > 1 or not ends <= {"weight", "bias"}:
        return names
    return tuple(f"{name.rpartition('.')[0]}.{{p}}" for name in names)


def _sizes(pair: Pair, have: Entries, want: Entries) -> tuple[int, ...] | None:
    """The parts' sizes along dimension 0 as they are joined; None where they are equal."""
    entries, side = (want, "right") if len(pair.left) == 1 else (have, "left")
    shapes = [entry.shape for key in _ends(pair)[1] if isinstance(entry := entries[key], TensorEntry)]
    sizes = tuple(shape[-1] if pair.transposed == side else shape[0] for shape in shapes)
    return None if len(set(sizes)) == 1 else sizes


def _renaming(named: Mapping[str, str], kept: Sequence[str], pairs: Sequence[Pair]) -> Iterator[Table]:
    wanted = {old: new for old, new in named.items() if old != new}
    if not wanted:
        return
    stay = [*kept, *(old for old, new in named.items() if old == new)]
    texts = renames(wanted, stay)
    evidence = {pair.left[0]: pair.evidence for pair in pairs}
    yield Table({"rename": list(texts)}, tuple(_why_renamed(texts, wanted, evidence)))


def _why_renamed(texts: Sequence[str], wanted: Mapping[str, str], evidence: Mapping[str, str]) -> Iterator[str]:
    """What speaks for each rename, in the order of the rules, of which the first that matches a key renames it."""
    found: dict[str, dict[str, None]] = {text: {} for text in texts}
    rules = InTurn([parse(text) for text in texts])
    for key in wanted:
        rule, _ = rules.first(key)
        if rule is not None:
            found[rule.text][evidence.get(key, "only wrappers' segments differ")] = None
    for whys in map(list, found.values()):  # none for a key that reads like a pattern: what is written is tried
        yield "".join(whys[:1]) + (f"; {plural(len(whys) - 1, 'other reason')}" if len(whys) > 1 else "")


# The file


def _toml(table: Table) -> str:
    """One rule; renames have their reason at the end of each line, other rules above them."""
    lines = ["", "[[rule]]"]
    renames = table.fields.get("rename")
    if isinstance(renames, list):
        lines += [
            "rename = [",
            *(f"    {_value(text)},  # {visible(why)}" for text, why in zip(renames, table.why)),
            "]",
        ]
        return "\n".join(lines) + "\n"
    lines[1:1] = [f"# {visible(why)}" for why in table.why]
    return "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in table.fields.items())]) + "\n"


def _value(value: object) -> str:
    """A string or a list, as TOML; JSON's escapes are TOML's too, but that it has none for all that is not shown."""
    if isinstance(value, list):
        own = [_value(one) for one in value]
        short = f"[{', '.join(own)}]"
        return short if len(short) < 100 else "[\n" + "".join(f"    {one},\n" for one in own) + "]"
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))


PART = "the command mends a part"
OF_RULES = "the suggested rules "  # how what they leave undone is told
INFERRED = (
    "the rules are inferred from names and shapes: whether the values are meant for these names, they do not tell"
)
_FEW = 3  # rules that are shown as options; more of them go into a file


class Suggested:
    """The rules that the pairs of a diff suggest: looked for when one asks, and once."""

    def __init__(self, diff: Diff, left: Checkpoint, right: Checkpoint) -> None:
        self._diff, self._left, self._right = diff, left, right

    @cached_property
    def _by_names(self) -> Suggestion | None:
        return _suggestion(self._diff, self._left, self._right)

    def renames(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The rules and the patterns that they drop, where these are few and say all of it; none without rules."""
        found = self._by_names
        return _few(found) if found is not None and found.plain else None

    def told(self, values: bool = False) -> Diff:
        """The diff with the rules, the commands that carry them out, and what they leave undone.

        `values`: it compared values.
        """
        diff, left, right = self._diff, self._left, self._right
        orders = _orders(diff, left, right) if values else {}
        found = _suggestion(diff, left, right, orders) if orders else self._by_names
        if found is None:
            return diff
        undone = _undone(found, _other_dtypes(diff, left, right, orders))
        diff = replace(diff, rules=found.text(), notes=(*diff.notes, *undone))
        if "pt2" in (left.format, right.format):
            return diff
        few, mine, theirs = _few(found), *(operand(side.source, side.format) for side in (left, right))
        if few is None:
            return replace(diff, fix=_with_file(mine, (theirs, *(["--values"] if values else []))))
        rules, patterns = few
        options = [("--rule", text) for text in rules] + [("--drop", text) for text in patterns]
        return replace(diff, fix=(_remap(mine, *chain.from_iterable(options)),))


def needs_file(diff: Diff) -> bool:
    """Whether the commands carry the rules out by way of a file."""
    return any("--suggest" in line for line in diff.fix)


def by_file(diff: Diff, rules: str) -> Diff:
    """The diff with the command that carries its rules out, which were written to the file `rules`."""
    return replace(diff, fix=(_remap(diff.left, "--rules", rules),))


def through_file(diff: Diff, left: str, *right: str) -> Diff:
    """Return the diff with the commands that write its rules to a file and carry them out."""
    return replace(diff, fix=_with_file(left, right))


def _remap(left: str, *options: str) -> str:
    return shell("ckpttool", "remap", left, *options, "-o", next(outputs(left, "renamed")))


def _suggestion(
    diff: Diff, left: Checkpoint, right: Checkpoint, orders: Mapping[str, Rotary] | None = None
) -> Suggestion | None:
    if diff.inferred is None:
        return None
    same = _same(diff, diff.inferred.pairs)
    return suggest(diff.inferred.pairs, same, model_section(left), model_section(right), orders or {})


def _pairs(diff: Diff) -> tuple[Pair, ...]:
    return () if diff.inferred is None else diff.inferred.pairs


def _same(diff: Diff, pairs: Sequence[Pair]) -> dict[str, str]:
    """Keys of the left -> keys of the right, known by name."""
    same = known(diff.entries)
    for pair in pairs:
        for key in pair.left:
            same.pop(key, None)
    return same


def _orders(diff: Diff, left: Checkpoint, right: Checkpoint) -> dict[str, Rotary]:
    """Keys of the left whose rows the right has in the other order of rotary embeddings. Reads the values."""
    have, want = model_section(left).by_key(), model_section(right).by_key()
    differing = {entry.left[0] for entry in diff.entries if entry.status == "value"}
    named = {old: new for old, new in _same(diff, _pairs(diff)).items() if old in differing}
    named |= {pair.left[0]: pair.right[0] for pair in _pairs(diff)}
    pairs = {old: (have[old], want[new]) for old, new in named.items() if old in have and new in want}
    found = {old: rotary(*pair) for old, pair in pairs.items()}
    return {old: order for old, order in found.items() if order is not None}


def _few(found: Suggestion) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The renames and the patterns that are dropped, where these say all of it and are few; else they need a file."""
    return None if found.plain is None or len(found.plain) > _FEW else (found.plain, found.drops)


def _with_file(left: str, right: Sequence[str]) -> tuple[str, ...]:
    whole = split(left)[0].rstrip("/")
    path = name(whole) if is_url(whole) else whole
    rules = free(path.removesuffix(Path(path).suffix), "rules", ".toml")
    return (
        shell("ckpttool", "diff", left, *right, "--suggest", rules),
        _remap(left, "--rules", rules),
    )


def _other_dtypes(diff: Diff, left: Checkpoint, right: Checkpoint, orders: Mapping[str, Rotary]) -> bool:
    """Whether names, and orders of rows, are not all in which the two differ."""
    have, want = model_section(left).by_key(), model_section(right).by_key()
    pairs = () if diff.inferred is None else diff.inferred.pairs
    both = ([*((have, key) for key in pair.left), *((want, key) for key in pair.right)] for pair in pairs)
    dtypes = [{getattr(side[key], "dtype", "") for side, key in own} for own in both]
    others = (entry for entry in diff.entries if entry.status in ("dtype", "value"))
    return any(len(own) > 1 for own in dtypes) or any(
        entry.left[:1] not in {(key,) for key in orders} for entry in others
    )


def _undone(found: Suggestion, dtypes: bool) -> list[str]:
    notes = [f"{OF_RULES}leave dtypes and values as they are, and some differ"] if dtypes else []
    if found.remaining:
        keys = some(found.remaining)
        notes.append(f"{OF_RULES}do not make {plural(len(found.remaining), 'key')} of the right: {keys}")
    if found.left_over:
        keys = some(found.left_over)
        notes.append(f"{OF_RULES}leave {plural(len(found.left_over), 'key')} of the left as they are: {keys}")
    return [PART, *notes] if notes else []
