"""Suggest the rules file that brings one checkpoint's names and shapes to another's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Union

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import refs
from ckpttool.core.text import Note, plural, shell, some, visible
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import FIELDS
from ckpttool.diffing.moved import Rotary, rotary
from ckpttool.diffing.renames import same_tensors
from ckpttool.diffing.result import Entry
from ckpttool.formats.registry import MEMORY
from ckpttool.io.paths import is_url, name
from ckpttool.naming.evidence import Inference, Pair
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.output import command, free, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.ruleset.infer_rules import numbered, patterns, renames
from ckpttool.ruleset.parse import steps_of
from ckpttool.ruleset.patterns import InTurn, parse
from ckpttool.ruleset.steps import state_of

Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]

_HEAD = """\
# Rules that `ckpttool diff --suggest` inferred: they give the left side the names and shapes of the right side.
# The comment on each rule is its evidence. Names and shapes do not show whether the values fit: check them.
"""  # noqa: E501
_FEW = 3  # rules that are shown as options; more of them go into a file


@dataclass(frozen=True, slots=True)
class Table:
    """One rule of the file: its fields, and the evidence for it."""

    fields: Mapping[str, Any]
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules. `remaining` are keys of the right that they do not write, `left_over` keys of the
    left that stay.

    `undone` are notes on what they do not change.
    """

    tables: tuple[Table, ...]
    remaining: tuple[str, ...]
    left_over: tuple[str, ...]
    undone: tuple[str, ...] = ()

    @property
    def few(self) -> RemapOptions | None:
        """The rules as options of a remap, if they only rename and drop, and are few; else they
        need a file.
        """
        fields = [table.fields for table in self.tables]
        renames = tuple(text for own in fields for text in own.get("rename", ()))
        drops = tuple(text for own in fields for text in own.get("drop", ()))
        if len(renames) > _FEW or not all("rename" in own or "drop" in own for own in fields):
            return None
        return RemapOptions(rule=renames, drop=drops or None)

    def text(self) -> str:
        """Return the file, as TOML."""
        note = ""
        if self.remaining:
            keys = visible(", ".join(self.remaining))
            note = f"# Not written, because no tensor of the left side is known to be it: {keys}\n"
        return _HEAD + note + "".join(map(_toml, self.tables))


def suggest(
    pairs: Sequence[Pair],
    same: Mapping[str, str],
    left: Section,
    right: Section,
    orders: Mapping[str, Rotary] | None = None,
) -> Rules | None:
    """Return the rules of inferred `pairs`, and of `same`: keys of the left -> keys of the right,
    known by name.

    `orders`: keys of the left whose rows the right has in another order. None if there is nothing
    to rewrite, or no rules can express it.
    """
    orders = orders or {}
    have, want = left.by_key(), right.by_key()
    used = {key for pair in pairs for key in pair.left} | same.keys()
    written = {key for pair in pairs for key in pair.right} | set(same.values())
    aliases = right.aliases()
    remaining = tuple(key for key in want if key not in written and key not in aliases)
    spare = [key for key in have if key not in used]
    first = left.aliases()
    held = {first.get(key, key) for key in used}
    # second names only
    dropped = [] if remaining else [key for key in spare if first.get(key, key) in held]
    kept = [key for key in spare if key not in dropped]
    named = {**same, **{p.left[0]: p.right[0] for p in pairs if len(p.left) == len(p.right) == 1}}
    fused = [pair for pair in pairs if len(pair.left) != len(pair.right)]

    with suppress(CkptError):  # names that a rule cannot express
        evidence = "second names of tensors that are kept; the right does not have these names"
        tables = [*_of_patterns("drop", dropped, have, evidence)]
        for side, keys in (("left", have), ("right", want)):
            transposed = [
                key for pair in pairs if pair.transposed == side for key in getattr(pair, side)
            ]
            evidence = "stored transposed on one side, as the shapes of weights and biases show"
            transposing = _of_patterns("transpose", transposed, keys, evidence)
            if side == "left":
                tables += [*transposing, *_reordering(orders, have), *_fusing(fused, have, want)]
                tables += _renaming(
                    named, [*kept, *(key for pair in fused for key in pair.right)], pairs
                )
            else:
                tables += transposing
        rules = Rules(tuple(tables), remaining, tuple(kept))
        if tables:  # read the rules back and try them
            state, _ = state_of(steps_of(rules.text(), "the suggested rules"), left)
            expected = {pair.right[0]: pair.left for pair in pairs if len(pair.right) == 1}
            expected |= {
                key: pair.left for pair in pairs if len(pair.right) > 1 for key in pair.right
            }
            expected |= {new: (old,) for old, new in same.items()} | {key: (key,) for key in kept}
            sources = (
                (expected.get(key), tuple(refs(value.source))) for key, value in state.items()
            )
            if len(state) == len(expected) and all(one == other for one, other in sources):
                return rules
    return None


def _of_patterns(
    operation: str, keys: Sequence[str], names: Iterable[str], evidence: str
) -> Iterator[Table]:
    """Yield the rule for these keys, and for none of the other names."""
    if keys:
        chosen = set(keys)
        texts = patterns(keys, [key for key in names if key not in chosen])
        yield Table({operation: list(texts)}, (evidence,))


def _reordering(orders: Mapping[str, Rotary], have: Iterable[str]) -> Iterator[Table]:
    """Yield one rule for all layers, and for queries and keys: the number of heads is not part of
    it.
    """
    have = list(have)
    for order in dict.fromkeys(orders.values()):
        chosen = [key for key in have if orders.get(key) == order]
        evidence = (
            f"rows are in the other rotary-embedding order, heads of {order.size}, as the"
            " values show"
        )
        for table in _of_patterns("permute", chosen, have, evidence):
            yield replace(
                table, fields={**table.fields, "rows": list(order.rows), "dims": [0, 2, 1]}
            )


def _fusing(pairs: Sequence[Pair], have: Entries, want: Entries) -> Iterator[Table]:
    """Yield splits and joins, all layers in one rule, and weight and bias together if their names
    end alike.
    """
    rules: dict[_Fusion, list[Pair]] = {}
    for pair in pairs:
        splits = len(pair.left) == 1
        whole, parts = (pair.left, pair.right) if splits else (pair.right, pair.left)
        names = numbered((*whole, *parts))
        ends = {name.rpartition(".")[2] for name in names}
        if len(ends) == 1 and ends <= {"weight", "bias"}:
            names = tuple(f"{name.rpartition('.')[0]}.{{p}}" for name in names)
        entries, side = (want, "right") if splits else (have, "left")
        shapes = [entry.shape for key in parts if isinstance(entry := entries[key], TensorEntry)]
        sizes = tuple(shape[-1] if pair.transposed == side else shape[0] for shape in shapes)
        rules.setdefault(_Fusion(splits, names, sizes if len(set(sizes)) > 1 else None), []).append(
            pair
        )
    for rule, own in rules.items():
        whole_name, part_names = rule.names[0], list(rule.names[1:])
        fields: dict[str, object] = {"join": part_names, "into": whole_name}
        if rule.splits:
            fields = {"split": whole_name, "into": part_names}
        if rule.sizes is not None:
            fields["sizes"] = list(rule.sizes)
        yield Table(fields, tuple(dict.fromkeys(pair.evidence for pair in own)))


class _Fusion(NamedTuple):
    """One rule that splits or joins several pairs.

    `names` are the names of the whole and of its parts; `sizes` are the sizes of the parts along
    dimension 0, None if they are equal.
    """

    splits: bool
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None


def _renaming(
    named: Mapping[str, str], kept: Sequence[str], pairs: Sequence[Pair]
) -> Iterator[Table]:
    changed = {old: new for old, new in named.items() if old != new}
    if not changed:
        return
    texts = renames(changed, [*kept, *(old for old, new in named.items() if old == new)])
    evidence = dict.fromkeys(changed, "only the segments of wrappers differ")
    evidence |= {pair.left[0]: pair.evidence for pair in pairs if pair.left[0] in changed}
    reasons = {text: dict.fromkeys(evidence.values()) for text in texts}
    if len(set(evidence.values())) > 1:  # find the keys of each rule
        reasons = {text: {} for text in texts}
        rules = InTurn([parse(text) for text in texts])
        for key, why in evidence.items():
            rule, _ = rules.first(key)
            if rule is not None:
                reasons[rule.text][why] = None
    lines = []
    # none for a key that reads like a pattern: the file is tried
    for whys in map(list, reasons.values()):
        lines.append(
            "".join(whys[:1])
            + (f"; {plural(len(whys) - 1, 'other reason')}" if len(whys) > 1 else "")
        )
    yield Table({"rename": list(texts)}, tuple(lines))


def _toml(table: Table) -> str:
    """Return one rule; renames have their evidence at the end of each line, other rules above
    them.
    """
    renames = table.fields.get("rename")
    if isinstance(renames, list):
        rows = [
            f"    {_value(text)},  # {visible(why)}" for text, why in zip(renames, table.evidence)
        ]
        return "\n".join(["", "[[rule]]", "rename = [", *rows, "]"]) + "\n"
    comments = [f"# {visible(why)}" for why in table.evidence]
    fields = (f"{name} = {_value(value)}" for name, value in table.fields.items())
    return "\n".join(["", *comments, "[[rule]]", *fields]) + "\n"


def _value(value: object) -> str:
    """Return a string or a list as TOML. TOML has JSON's escapes, but must escape everything
    unprintable.
    """
    if isinstance(value, list):
        items = [_value(one) for one in value]
        short = f"[{', '.join(items)}]"
        return (
            short if len(short) < 100 else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
        )
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False)
    )


def suggested(
    entries: Sequence[Entry],
    inferred: Inference | None,
    left: Checkpoint,
    right: Checkpoint,
    values: bool = False,
) -> Rules | None:
    """Return the rules for the likely renames of a diff, with notes on all other differences; None
    if there are none.

    With `values` the values are read: rows may be in the other rotary order.
    """
    if inferred is None:
        return None
    paired = {key for pair in inferred.pairs for key in pair.left}
    same = {old: new for old, new in same_tensors(entries).items() if old not in paired}
    mine, theirs = model_section(left), model_section(right)
    orders: dict[str, Rotary] = {}
    if values:
        have, want = mine.by_key(), theirs.by_key()
        differing = {key for entry in entries if entry.status == "value" for key in entry.left}
        named = {old: new for old, new in same.items() if old in differing}
        named |= {pair.left[0]: pair.right[0] for pair in inferred.pairs}
        pairs = {
            old: rotary(have[old], want[new])
            for old, new in named.items()
            if old in have and new in want
        }
        orders = {old: order for old, order in pairs.items() if order is not None}
    rules = suggest(inferred.pairs, same, mine, theirs, orders)
    if rules is None:
        return None
    undone = list[Note]()
    left_dtypes, right_dtypes = (
        {entry.key: entry.dtype for entry in side.tensors} for side in (mine, theirs)
    )
    dtypes = (
        {*map(left_dtypes.get, pair.left), *map(right_dtypes.get, pair.right)}
        for pair in inferred.pairs
    )
    differing_entries = (entry for entry in entries if entry.status in ("dtype", "value"))
    if any(len(one) > 1 for one in dtypes) or any(
        not e.left or e.left[0] not in orders for e in differing_entries
    ):
        text = "the suggested rules do not change dtypes and values, and some differ"
        undone.append(Note(text, "incomplete-rules"))
    for keys, verb, side in (
        (rules.remaining, "write", FIELDS[1]),
        (rules.left_over, "change", FIELDS[0]),
    ):
        if keys:
            words = f"the suggested rules do not {verb} {plural(len(keys), 'key')} of {side}: {{}}"
            undone.append(Note.about(words, "incomplete-rules", some(keys)))
    return replace(rules, undone=tuple(undone))


def renamed(left: str, options: RemapOptions) -> str:
    """Return the command that renames a checkpoint by rules."""
    return command("remap", (left,), replace(options, out=next(outputs(left, "renamed"))))


def with_file(left: str, *right: str, options: RemapOptions) -> tuple[str, str]:
    """Return the commands that write the rules to a file and apply them; `right` are the words of
    the other side.

    `options` are those of the remap.
    """
    whole = "checkpoint" if left == MEMORY.title else split(left)[0].rstrip("/")
    path = name(whole) if is_url(whole) else whole
    rules = free(path.removesuffix(Path(path).suffix), "rules", ".toml")
    if MEMORY.title not in (left, *right):
        return shell("ckpttool", "diff", left, *right, "--suggest", rules), by_file(
            left, rules, options
        )
    one = "ckpt" if left == MEMORY.title else repr(left)
    other = "right" if right[0] == MEMORY.title else repr(right[0])
    values = ", values=True" if "--values" in right else ""
    return (
        f"pathlib.Path({rules!r}).write_text(ckpttool.diff({one}, {other}{values}).rules)",
        by_file(left, rules, options),
    )


def by_file(left: str, rules: str, options: RemapOptions) -> str:
    """Return the command that applies the rules in the file `rules` to a checkpoint, with the other
    options.
    """
    return renamed(left, replace(options, rules=rules))
