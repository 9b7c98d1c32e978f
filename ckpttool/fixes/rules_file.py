"""Suggest the rules file that brings one checkpoint's names and shapes to another's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Entries, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import refs
from ckpttool.core.strides import Shape
from ckpttool.core.tables import selected
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
from ckpttool.ruleset.steps import state_of

_HEAD = """\
# Rules that `ckpttool diff --suggest` inferred: they give the left side the names and shapes of the right side.
# The comment on each rule is its evidence. Names and shapes do not show whether the values fit: check them.
"""  # noqa: E501
_FEW = 3  # rules that are shown as options; more of them go into a file


@dataclass(frozen=True, slots=True)
class RuleTable:
    """One rule of the file: its fields, and the evidence for it."""

    fields: Mapping[str, Any]
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules. `remaining` are keys of the right that they do not write, `left_over` keys of the
    left that stay.

    `undone` are notes on what they do not change.
    """

    tables: tuple[RuleTable, ...]
    remaining: tuple[str, ...]
    left_over: tuple[str, ...]
    undone: tuple[str, ...] = ()

    @property
    def few(self) -> RemapOptions | None:
        """The rules as options of a remap, if they only rename and drop, and are few; else they
        need a file.
        """
        renames: list[str] = []
        drops: list[str] = []
        for table in self.tables:
            if "rename" not in table.fields and "drop" not in table.fields:
                return None
            renames += table.fields.get("rename", ())
            drops += table.fields.get("drop", ())
        if len(renames) > _FEW:
            return None
        return RemapOptions(rule=tuple(renames), drop=tuple(drops) or None)

    def text(self) -> str:
        """Return the file, as TOML."""
        note = ""
        if self.remaining:
            keys = visible(some(self.remaining))  # a line of too many keys is not read back
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
    left_entries, right_entries = left.by_key(), right.by_key()
    named = dict(same)
    fused = []
    new_names: list[str] = []  # of fused tensors
    used, written = set(same), set(same.values())
    for pair in pairs:
        used.update(pair.left)
        written.update(pair.right)
        if len(pair.left) == len(pair.right) == 1:
            named[pair.left[0]] = pair.right[0]
        elif len(pair.left) != len(pair.right):
            fused.append(pair)
            new_names += pair.right
    written.update(right.aliases())
    remaining = tuple(key for key in right_entries if key not in written)
    dropped = [] if remaining else _second_names(left, used)
    used.update(dropped)
    kept = [key for key in left_entries if key not in used]

    with suppress(CkptError):  # names that a rule cannot express
        evidence = "second names of tensors that are kept; the right does not have these names"
        tables = [*_of_patterns("drop", dropped, left_entries, evidence)]
        tables += _transposing(pairs, "left", left_entries)
        tables += _reordering(orders or {}, left_entries)
        tables += _fusing(fused, left_entries, right_entries)
        tables += _renaming(named, [*kept, *new_names], pairs)
        tables += _transposing(pairs, "right", right_entries)
        rules = Rules(tuple(tables), remaining, tuple(kept))
        if tables and _are_right(rules, pairs, same, left):
            return rules
    return None


def _second_names(section: Section, used: Collection[str]) -> list[str]:
    """Return the keys that are not used, and are second names of tensors that are."""
    first = section.aliases()
    if not first:
        return []
    held = {first.get(key, key) for key in used}
    return [key for key in section.by_key() if key not in used and first.get(key, key) in held]


def _are_right(rules: Rules, pairs: Sequence[Pair], same: Mapping[str, str], left: Section) -> bool:
    """Read the rules back and try them: return whether each key is made of the expected ones."""
    state, _ = state_of(steps_of(rules.text(), "the suggested rules"), left)
    expected: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        expected.update(dict.fromkeys(pair.right, pair.left))
    for old, new in same.items():
        expected[new] = (old,)
    for key in rules.left_over:
        expected[key] = (key,)
    return {key: tuple(refs(value.source)) for key, value in state.items()} == expected


def _transposing(pairs: Sequence[Pair], side: str, names: Iterable[str]) -> Iterator[RuleTable]:
    """Yield the rule for tensors that are stored transposed on this side."""
    keys: list[str] = []
    for pair in pairs:
        if pair.transposed == side:
            keys += pair.left if side == "left" else pair.right
    evidence = "stored transposed on one side, as the shapes of weights and biases show"
    return _of_patterns("transpose", keys, names, evidence)


def _of_patterns(
    operation: str, keys: Sequence[str], names: Iterable[str], evidence: str
) -> Iterator[RuleTable]:
    """Yield the rule for these keys, and for none of the other names."""
    if keys:
        chosen = set(keys)
        texts = patterns(keys, [key for key in names if key not in chosen])
        yield RuleTable({operation: list(texts)}, (evidence,))


def _reordering(orders: Mapping[str, Rotary], names: Iterable[str]) -> Iterator[RuleTable]:
    """Yield one rule for all layers, and for queries and keys: the number of heads is not part of
    it.
    """
    names = list(names)
    for order in dict.fromkeys(orders.values()):
        keys = [key for key in names if orders.get(key) == order]
        evidence = (
            f"rows are in the other rotary-embedding order, heads of {order.size}, as the"
            " values show"
        )
        for table in _of_patterns("permute", keys, names, evidence):
            fields = {**table.fields, "rows": list(order.rows), "dims": [0, 2, 1]}
            yield replace(table, fields=fields)


def _fusing(pairs: Sequence[Pair], left: Entries, right: Entries) -> Iterator[RuleTable]:
    """Yield splits and joins, all layers in one rule, and weight and bias together if their names
    end alike.
    """
    rules: dict[_Fusion, list[str]] = {}  # with the evidence
    for pair in pairs:
        if len(pair.left) == 1:
            fusion = _fusion(True, pair.left, pair.right, right, pair.transposed == "right")
        else:
            fusion = _fusion(False, pair.right, pair.left, left, pair.transposed == "left")
        rules.setdefault(fusion, []).append(pair.evidence)
    for rule, evidence in rules.items():
        whole_name, part_names = rule.names[0], list(rule.names[1:])
        fields: dict[str, object] = {"join": part_names, "into": whole_name}
        if rule.splits:
            fields = {"split": whole_name, "into": part_names}
        if rule.sizes is not None:
            fields["sizes"] = list(rule.sizes)
        yield RuleTable(fields, tuple(dict.fromkeys(evidence)))


class _Fusion(NamedTuple):
    """One rule that splits or joins several pairs.

    `names` are the names of the whole and of its parts; `sizes` are the sizes of the parts along
    dimension 0, None if they are equal.
    """

    splits: bool
    names: tuple[str, ...]
    sizes: Shape | None


def _fusion(
    splits: bool, whole: tuple[str, ...], parts: tuple[str, ...], entries: Entries, transposed: bool
) -> _Fusion:
    """Return the rule for the whole and its parts, which have these `entries`."""
    names = numbered((*whole, *parts))
    ends = {name.rpartition(".")[2] for name in names}
    if len(ends) == 1 and ends <= {"weight", "bias"}:
        names = tuple(f"{name.rpartition('.')[0]}.{{p}}" for name in names)
    sizes = []
    for key in parts:
        entry = entries[key]
        if isinstance(entry, TensorEntry):
            sizes.append(entry.shape[-1 if transposed else 0])
    return _Fusion(splits, names, tuple(sizes) if len(set(sizes)) > 1 else None)


def _renaming(
    named: Mapping[str, str], kept: Sequence[str], pairs: Sequence[Pair]
) -> Iterator[RuleTable]:
    changed = {old: new for old, new in named.items() if old != new}
    if not changed:
        return
    kept = [*kept, *(old for old in named if old not in changed)]
    evidence = dict.fromkeys(changed, "only the segments of wrappers differ")
    for pair in pairs:
        if pair.left[0] in changed:
            evidence[pair.left[0]] = pair.evidence
    texts = []
    lines = []
    for text, keys in renames(changed, kept).items():
        # none for a key that reads like a pattern: the file is tried
        reasons = list(dict.fromkeys(evidence[key] for key in keys if key in evidence))
        line = reasons[0] if reasons else ""
        if len(reasons) > 1:
            line += f"; {plural(len(reasons) - 1, 'other reason')}"
        texts.append(text)
        lines.append(line)
    yield RuleTable({"rename": texts}, tuple(lines))


def _toml(table: RuleTable) -> str:
    """Return one rule; renames have their evidence at the end of each line, other rules above
    them.
    """
    comments = [f"# {visible(reason)}" for reason in table.evidence]
    renames = table.fields.get("rename")
    if isinstance(renames, list):
        lines = ["", "[[rule]]", "rename = ["]
        for text, comment in zip(renames, comments):
            lines.append(f"    {_value(text)},  {comment}")
        lines.append("]")
    else:
        lines = ["", *comments, "[[rule]]"]
        for name, value in table.fields.items():
            lines.append(f"{name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Return a string or a list as TOML. TOML has JSON's escapes, but must escape everything
    unprintable.
    """
    if isinstance(value, list):
        items = list(map(_value, value))
        short = f"[{', '.join(items)}]"
        if len(short) < 100:
            return short
        lines = [f"    {item}," for item in items]
        return "\n".join(["[", *lines, "]"])
    text = json.dumps(value, ensure_ascii=False)
    return "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return char if char.isprintable() else f"\\U{ord(char):08x}"


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
    same = same_tensors(entries)
    for key in chain(*(pair.left for pair in inferred.pairs)):
        same.pop(key, None)
    left_section, right_section = model_section(left), model_section(right)
    orders = {}
    if values:
        orders = _orders(entries, inferred, same, left_section, right_section)
    rules = suggest(inferred.pairs, same, left_section, right_section, orders)
    if rules is None:
        return None
    undone = list[Note]()
    other_dtypes = _have_other_dtypes(inferred.pairs, left_section, right_section)
    if other_dtypes or _have_other_values(entries, orders):
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


def _orders(
    entries: Sequence[Entry],
    inferred: Inference,
    same: Mapping[str, str],
    left: Section,
    right: Section,
) -> dict[str, Rotary]:
    """Return the keys of the left whose rows the right has in the other rotary order. Reads their
    values.
    """
    names: dict[str, str] = {}
    for entry in entries:
        if entry.status == "value":
            names.update(selected(same, entry.left))
    for pair in inferred.pairs:
        names[pair.left[0]] = pair.right[0]
    left_entries, right_entries = left.by_key(), right.by_key()
    orders = {}
    for old, new in names.items():
        if old in left_entries and new in right_entries:
            order = rotary(left_entries[old], right_entries[new])
            if order is not None:
                orders[old] = order
    return orders


def _have_other_values(entries: Iterable[Entry], orders: Mapping[str, Rotary]) -> bool:
    """Return True if a dtype differs, or values that are not the same rows in another order."""
    for entry in entries:
        is_reordered = bool(entry.left) and entry.left[0] in orders
        if entry.status in ("dtype", "value") and not is_reordered:
            return True
    return False


def _have_other_dtypes(pairs: Sequence[Pair], left: Section, right: Section) -> bool:
    """Return True if the tensors of a pair have several dtypes."""
    left_dtypes = {entry.key: entry.dtype for entry in left.tensors}
    right_dtypes = {entry.key: entry.dtype for entry in right.tensors}
    for pair in pairs:
        dtypes = {*map(left_dtypes.get, pair.left), *map(right_dtypes.get, pair.right)}
        if len(dtypes) > 1:
            return True
    return False


def renamed(left: str, options: RemapOptions) -> str:
    """Return the command that renames a checkpoint by rules."""
    return command("remap", (left,), replace(options, out=next(outputs(left, "renamed"))))


def with_file(left: str, *right: str, options: RemapOptions) -> tuple[str, str]:
    """Return the commands that write the rules to a file and apply them; `right` are the words of
    the other side.

    `options` are the options of the remap.
    """
    path = "checkpoint"
    if left != MEMORY.title:
        path = split(left)[0].rstrip("/")
    if is_url(path):
        path = name(path)
    rules = free(path.removesuffix(Path(path).suffix), "rules", ".toml")
    apply_rules = by_file(left, rules, options)
    if MEMORY.title not in (left, *right):
        return shell("ckpttool", "diff", left, *right, "--suggest", rules), apply_rules
    sides = "ckpt" if left == MEMORY.title else repr(left)
    sides += ", right" if right[0] == MEMORY.title else f", {right[0]!r}"
    if "--values" in right:
        sides += ", values=True"
    return f"pathlib.Path({rules!r}).write_text(ckpttool.diff({sides}).rules)", apply_rules


def by_file(left: str, rules: str, options: RemapOptions) -> str:
    """Return the command that applies the rules in the file `rules` to a checkpoint, with the other
    options.
    """
    return renamed(left, replace(options, rules=rules))
