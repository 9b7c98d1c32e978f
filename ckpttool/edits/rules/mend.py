"""What mends a diff by inferred rules: the rules, the commands that carry them out, what they leave undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.rules.suggest import Suggestion, suggest
from ckpttool.io.paths import is_url, name
from ckpttool.naming.inference.values import Pair
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.printed import free, operand, outputs
from ckpttool.queries.diff.elsewhere import Rotary, rotary
from ckpttool.queries.diff.result import Diff
from ckpttool.queries.diff.suggestions import known
from ckpttool.words import plural, shell, some

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
            return replace(diff, fix=_with_file(mine, theirs, values))
        rules, patterns = few
        options = [("--rule", text) for text in rules] + [("--drop", text) for text in patterns]
        return replace(diff, fix=(_remap(mine, *chain.from_iterable(options)),))


def needs_file(diff: Diff) -> bool:
    """Whether the commands carry the rules out by way of a file."""
    return any("--suggest" in line for line in diff.fix)


def by_file(diff: Diff, rules: str) -> Diff:
    """The diff with the command that carries its rules out, which were written to the file `rules`."""
    return replace(diff, fix=(_remap(diff.left, "--rules", rules),))


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


def _with_file(left: str, right: str, values: bool) -> tuple[str, ...]:
    whole = split(left)[0].rstrip("/")
    path = name(whole) if is_url(whole) else whole
    rules = free(path.removesuffix(Path(path).suffix), "rules", ".toml")
    compared = ["--values"] if values else []
    return (
        shell("ckpttool", "diff", left, right, *compared, "--suggest", rules),
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
