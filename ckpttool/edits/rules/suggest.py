"""The rules file that brings the left checkpoint's names and shapes to the right one's, as far as pairs are known.

Written by `diff --suggest`, read by `remap --rules`; what is written has been tried on the left's index. See
docs/suggested-rules.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Union

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.edits.rules.file import steps_of
from ckpttool.edits.rules.generalise import numbered, patterns, renames
from ckpttool.edits.rules.patterns import InTurn, parse
from ckpttool.edits.rules.steps import plan_of
from ckpttool.errors import CkptError
from ckpttool.expression import refs
from ckpttool.naming.inference.values import Pair
from ckpttool.queries.diff.elsewhere import Rotary
from ckpttool.values import dataclass
from ckpttool.words import plural, visible

Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]

_NO_ORDERS: Mapping[str, Rotary] = {}
_HEAD = """\
# What `ckpttool diff LEFT RIGHT --suggest` found: rules that make LEFT's names and shapes those of RIGHT.
# Beside each rule stands what speaks for it. Whether the values fit too, names and shapes cannot tell.
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
        note = f"# Not made, since no tensor of LEFT is known to be it: {visible(', '.join(self.remaining))}\n"
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
