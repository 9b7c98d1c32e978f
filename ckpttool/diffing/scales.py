"""Compare the values of quantized weights through their scales, if the two sides have them in
different schemes, or only one has them quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Ref
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.others import BothSides
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.diffing.sections import Values
from ckpttool.evaluate.apply import entry_of
from ckpttool.kinds.quantized import QuantizedWeight, quantized_weights
from ckpttool.ruleset.dequantize import dequantized
from ckpttool.ruleset.tensor_ops import DENSE, Value, refusal

Weights = Mapping[str, QuantizedWeight]  # by the key that they have if they are not quantized

_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Scaled:
    """Two state dicts in which one tensor, under its plain key, is there instead of the parts of
    each weight in `left` and `right`.
    """

    sides: BothSides
    left: Weights = field(default_factory=dict)
    right: Weights = field(default_factory=dict)

    def with_parts(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the entries about the keys that the files have, with the schemes."""
        if not self.left and not self.right:
            return tuple(entries)
        result: list[Entry] = []
        for entry in entries:
            left, right = _of(self.left, entry.left), _of(self.right, entry.right)
            if left is None and right is None:
                result.append(entry)
            elif entry.status == "unexpected" and left is not None:
                result += [only_left(key) for key in left.keys]
            elif entry.status == "missing" and right is not None:
                result += [only_right(key) for key in right.keys]
            else:
                result.append(self._of_pair(entry, left, right))
        return tuple(result)

    def _of_pair(
        self, entry: Entry, left: QuantizedWeight | None, right: QuantizedWeight | None
    ) -> Entry:
        """Return the entry of a weight that both sides have, in different schemes."""
        is_same = entry.status in ("same", "dtype", "renamed")
        schemes = (
            _scheme(left, self.sides.left_section, entry.left),
            _scheme(right, self.sides.right_section, entry.right),
        )
        cause = Cause(Code.SCALED if is_same else Code.SCALED_VALUE, schemes)
        if entry.cause is not None and entry.status != "dtype":
            cause = cause.and_also(entry.cause)
        return replace(
            entry,
            status="dtype" if is_same else entry.status,
            left=entry.left if left is None else left.keys,
            right=entry.right if right is None else right.keys,
            cause=cause,
        )


def through_scales(sides: BothSides, values: Values | None) -> Scaled:
    """Return the two state dicts as their values are compared: weights whose schemes differ by what
    their numbers and scales are together. Other schemes stay as they are.
    """
    if values is None:
        return Scaled(sides)
    left, right = _by_plain_key(sides.left_section), _by_plain_key(sides.right_section)
    left_only, right_only = _unlike(left, right), _unlike(right, left)
    if not left_only and not right_only:
        return Scaled(sides)
    left_section, left_plain = _plain(sides.left_section, left_only, sides.right_section)
    right_section, right_plain = _plain(sides.right_section, right_only, sides.left_section)
    sides = replace(sides, left_section=left_section, right_section=right_section)
    return Scaled(sides, left_plain, right_plain)


def _by_plain_key(section: Section) -> Weights:
    return {weight.plain: weight for weight in quantized_weights(section)}


def _unlike(weights: Weights, others: Weights) -> Weights:
    """Return the weights that the other side has not, or in another scheme. If it has none under
    their names, it may have them under others: then the schemes of all of its weights count.
    """
    other_schemes = {weight.scheme for weight in others.values()}
    unlike = {}
    for key, weight in weights.items():
        schemes = {others[key].scheme} if key in others else other_schemes
        if weight.scheme not in schemes:
            unlike[key] = weight
    return unlike


def _plain(section: Section, weights: Weights, other: Section) -> tuple[Section, Weights]:
    """Return the section with the values of the weights instead of their parts, and the weights of
    which the scheme is known.
    """
    entries, other_entries = section.by_key(), other.by_key()
    plain: dict[str, TensorEntry] = {}  # by the key of the numbers
    parts: set[str] = set()
    replaced = {}
    for key, weight in weights.items():
        dtype = _dtype_of(other_entries.get(key), other)
        try:
            plain[weight.weight] = _values(weight, key, section, dtype)
        except Refused:
            continue  # a scheme that only its library knows
        replaced[key] = weight
        parts.update(weight.keys)
    tensors = []
    for entry in section.tensors:
        if entry.key in plain:
            tensors.append(plain[entry.key])
        elif entry.key not in parts:
            tensors.append(entry)
    extras = tuple(extra for extra in section.extras if extra.key not in parts)
    assert entries.keys() >= parts
    return replace(section, tensors=tuple(tensors), extras=extras), replaced


def _values(weight: QuantizedWeight, key: str, section: Section, dtype: str) -> TensorEntry:
    """Return a tensor with the values of the weight. Raise `Refused` if its scheme is not known."""
    entries = section.by_key()
    state = {}
    for part in weight.keys:
        entry = entries[part]
        if not isinstance(entry, TensorEntry):
            raise refusal(f"{part} is not a tensor")
        layout = DENSE if entry.storage is not None else entry.layout
        state[part] = Value(Ref(part), entry.dtype, entry.shape, part, layout)
    return entry_of(key, dequantized(weight, state, dtype, None).source, entries)


def _dtype_of(counterpart: object, other: Section) -> str:
    """Return the dtype in which the values are compared: the other side's, if it has one."""
    if isinstance(counterpart, TensorEntry) and counterpart.dtype in _FLOATS:
        return counterpart.dtype
    dtypes = {entry.dtype for entry in other.tensors if len(entry.shape) > 1}
    dtypes.intersection_update(_FLOATS)
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _of(weights: Weights, keys: tuple[str, ...]) -> QuantizedWeight | None:
    return weights.get(keys[0]) if len(keys) == 1 else None


def _scheme(weight: QuantizedWeight | None, section: Section, keys: tuple[str, ...]) -> str:
    """Return the scheme of a weight, or the dtype of one that is not quantized."""
    if weight is not None:
        return weight.scheme
    entry = section.by_key().get(keys[0]) if keys else None
    return entry.dtype if isinstance(entry, TensorEntry) else "another kind"
