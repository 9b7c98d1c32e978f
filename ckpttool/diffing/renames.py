"""Likely renames: pair the keys that a comparison leaves open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tables import inverse, positions
from ckpttool.diffing.causes import Code
from ckpttool.diffing.explain import unpairable
from ckpttool.diffing.result import Entry, outlines, statuses_of
from ckpttool.evaluate.apply import Digests
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import is_placeholder
from ckpttool.naming.evidence import Ambiguous, Inference, Outlined, Pair, SideTensors, Tensor
from ckpttool.naming.pairing import infer
from ckpttool.naming.wrappers import canonical_in
from ckpttool.operands.checkpoint import model_section

Paired = TypeVar("Paired", Pair, Ambiguous)


def same_tensors(entries: Iterable[Entry]) -> dict[str, str]:
    """Map keys of the left to keys of the right that name the same tensor, except if the shape
    differs.
    """
    pairs: dict[str, str] = {}
    for entry in entries:
        has_two_keys = len(entry.left) == len(entry.right) == 1
        if has_two_keys and (entry.status != "shape" or entry.has(Code.KIND)):
            pairs[entry.left[0]] = entry.right[0]
    return pairs


def suggestions(
    left: Checkpoint, right: Checkpoint, entries: Sequence[Entry], values: bool
) -> Inference:
    """Pair the keys that `entries` leave open; with `values` the tensors are read and compared too.

    Segments of wrappers are not evidence: the keys are paired without them.
    """
    if {"missing", "unexpected", "shape"}.isdisjoint(statuses_of(entries)):
        return Inference()
    left_parts, right_parts = unpairable(entries)
    second_names = _without_counterpart(left, right, entries)
    left_side = _OpenSide(left, second_names | left_parts)
    right_side = _OpenSide(right, second_names | right_parts)
    same = same_tensors(entries)
    inference = _infer(left_side, right_side, same, values)
    candidates = _second_names_in(inference.ambiguous, left, right)
    if candidates:
        left_side, right_side = left_side.without(candidates), right_side.without(candidates)
        inference = _infer(left_side, right_side, same, values)
    return _with_untied(inference, left_side, right_side, entries, values)


class _OpenSide(NamedTuple):
    """A checkpoint, and the keys of its model that are left out of the pairing."""

    checkpoint: Checkpoint
    left_out: Set[str]

    def without(self, keys: Set[str]) -> _OpenSide:
        return self._replace(left_out=self.left_out | keys)


def _with_untied(
    inference: Inference,
    left: _OpenSide,
    right: _OpenSide,
    entries: Sequence[Entry],
    values: bool,
) -> Inference:
    """Return the inference with pairs of second names of the left and keys of the right that still
    have no pair: the right may have separate tensors there.

    left: embed = head (tied), right: tok, out       embed -> tok, then head -> out
    """
    paired_left: set[str] = set()
    paired_right: set[str] = set()
    same = same_tensors(entries)
    for pair in inference.pairs:
        paired_left.update(pair.left)
        paired_right.update(pair.right)
        if len(pair.left) == len(pair.right) == 1 and not pair.transposed:
            same[pair.left[0]] = pair.right[0]
    second_names: set[str] = set()
    is_missing = False
    for entry in entries:
        if entry.status == "alias" and not paired_left.issuperset(entry.left):
            second_names.update(entry.left)
        elif entry.status == "missing" and not paired_right.issuperset(entry.right):
            is_missing = True
    if not second_names or not is_missing:
        return inference
    # keys of pairs that are not one tensor under two names: fused, split or transposed
    computed_left = paired_left.difference(same)
    computed_right = paired_right.difference(same.values())
    left_side = _OpenSide(left.checkpoint, (left.left_out - second_names) | computed_left)
    right_side = right.without(computed_right)
    pairs = list(inference.pairs)
    for pair in _infer(left_side, right_side, same, values).pairs:
        if second_names.issuperset(pair.left):
            pairs.append(pair)
            paired_left.update(pair.left)
            paired_right.update(pair.right)
    ambiguous = []
    for match in inference.ambiguous:
        if paired_left.isdisjoint(match.left) and paired_right.isdisjoint(match.right):
            ambiguous.append(match)
    place = positions(outlines(model_section(left.checkpoint)))
    pairs.sort(key=lambda pair: place[pair.left[0]])
    return Inference(tuple(pairs), tuple(ambiguous))


def _infer(
    left: _OpenSide,
    right: _OpenSide,
    same_keys: Mapping[str, str],
    values: bool,
) -> Inference:
    """Pair the open keys of two checkpoints, each without the keys that are left out."""
    left_names = _bare_side(*left, values)
    right_names = _bare_side(*right, values)
    same: dict[str, str] = {}
    for key, other in same_keys.items():
        same[left_names.bare.get(key, key)] = right_names.bare.get(other, other)
    inference = infer(left_names.side, right_names.side, same)
    if not left_names.has_wrappers and not right_names.has_wrappers:
        return inference
    keys = left_names.keys, right_names.keys
    pairs = [_with_keys(pair, *keys) for pair in inference.pairs]
    ambiguous = [_with_keys(pair, *keys) for pair in inference.ambiguous]
    return Inference(tuple(pairs), tuple(ambiguous))


def _without_counterpart(left: Checkpoint, right: Checkpoint, entries: Iterable[Entry]) -> set[str]:
    """Return the second names on one side, except of a tensor that has open second names on both
    sides: these may be renamed.
    """
    first, other_first = model_section(left).aliases(), model_section(right).aliases()
    left_names: dict[str, str] = {}  # second name -> first name
    right_names: dict[str, str] = {}
    for entry in entries:
        if entry.status == "alias":
            for key in entry.left:
                left_names[key] = first.get(key, key)
            for key in entry.right:
                right_names[key] = other_first.get(key, key)
    left_tensors, right_tensors = set(left_names.values()), set(right_names.values())
    on_both: set[str] = set()
    for key, other in same_tensors(entries).items():
        tensor, same_tensor = first.get(key, key), other_first.get(other, other)
        if tensor in left_tensors and same_tensor in right_tensors:
            on_both.update((tensor, same_tensor))
    names = [*left_names.items(), *right_names.items()]
    return {key for key, tensor in names if tensor not in on_both}


def _second_names_in(
    ambiguous: Iterable[Ambiguous], left: Checkpoint, right: Checkpoint
) -> set[str]:
    """Return the second names of tensors that are candidates under several names: these are one
    candidate.
    """
    first, other_first = model_section(left).aliases(), model_section(right).aliases()
    names: set[str] = set()
    for match in ambiguous:
        for keys, first_names in ((match.left, first), (match.right, other_first)):
            names.update(key for key in keys if first_names.get(key) in keys)
    return names


class _BareSide(NamedTuple):
    """A side of the pairing, whose tensors are called as without wrappers. `bare` are these names
    by key.
    """

    side: SideTensors
    bare: Mapping[str, str]

    @property
    def has_wrappers(self) -> bool:
        return any(key != name for key, name in self.bare.items())

    @property
    def keys(self) -> dict[str, str]:
        """The keys by the names without wrappers."""
        return inverse(self.bare)


def _bare_side(checkpoint: Checkpoint, left_out: Collection[str], values: bool) -> _BareSide:
    """Return the tensors of the model's section, without the keys that are `left_out`."""
    section = model_section(checkpoint)
    bare = canonical_in(section)
    if len(set(bare.values())) < len(bare):  # two keys differ in their wrappers only
        bare = {key: key for key in bare}
    tensors: list[Outlined] = []
    for entry in section.tensors:
        if entry.key in left_out or is_placeholder(entry):
            continue
        name = bare[entry.key]
        is_bare = name == entry.key
        tensors.append(entry if is_bare else Tensor(name, entry.dtype, entry.shape))
    digest = None
    if values:
        digest = Digests({bare[key]: entry for key, entry in section.by_key().items()}).of
    has_order = format_of(checkpoint).holds.order
    return _BareSide(SideTensors(tensors, has_order, digest), bare)


def _with_keys(pair: Paired, left_keys: Mapping[str, str], right_keys: Mapping[str, str]) -> Paired:
    left = tuple(left_keys[name] for name in pair.left)
    right = tuple(right_keys[name] for name in pair.right)
    return replace(pair, left=left, right=right)
