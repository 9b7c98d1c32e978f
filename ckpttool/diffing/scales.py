"""Compare the values of quantized weights through their scales, if the two sides have them in
different schemes, or only one has them quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.pairs import Values
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.diffing.sides import BothSides
from ckpttool.evaluate.apply import entry_of
from ckpttool.kinds.quantized import QuantizedWeight, quantized_weights
from ckpttool.ruleset.dequantize import dequantized
from ckpttool.ruleset.steps import first_state

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
        left_dtypes = _dtypes(self.sides.left.section)
        right_dtypes = _dtypes(self.sides.right.section)
        for entry in entries:
            left, right = _of(self.left, entry.left), _of(self.right, entry.right)
            if left is None and right is None:
                result.append(entry)
            elif entry.status == "unexpected" and left is not None:
                result += [only_left(key) for key in left.keys]
            elif entry.status == "missing" and right is not None:
                result += [only_right(key) for key in right.keys]
            else:
                left_scheme = _scheme(left, left_dtypes, entry.left)
                right_scheme = _scheme(right, right_dtypes, entry.right)
                entry = _of_pair(entry, left_scheme, right_scheme)
                left_keys = entry.left if left is None else left.keys
                right_keys = entry.right if right is None else right.keys
                result.append(replace(entry, left=left_keys, right=right_keys))
        return tuple(result)


def through_scales(sides: BothSides, values: Values | None) -> Scaled:
    """Return the two state dicts as their values are compared: weights whose schemes differ by what
    their numbers and scales are together. Other schemes stay as they are.
    """
    if values is None:
        return Scaled(sides)
    left, right = sides.left.section, sides.right.section
    left_weights, right_weights = _by_plain_key(left), _by_plain_key(right)
    left_only = _unlike(left_weights, right_weights)
    right_only = _unlike(right_weights, left_weights)
    if not left_only and not right_only:
        return Scaled(sides)
    left_section, left_plain = _plain(left, left_only, right)
    right_section, right_plain = _plain(right, right_only, left)
    return Scaled(sides.with_sections(left_section, right_section), left_plain, right_plain)


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
    entries, state = section.by_key(), first_state(section)
    usual_dtype = _dtype_of_matrices(other)
    dtypes = {entry.key: entry.dtype for entry in other.tensors if entry.dtype in _FLOATS}
    plain: dict[str, TensorEntry] = {}  # by the key of the numbers
    parts: set[str] = set()
    replaced = {}
    for key, weight in weights.items():
        try:
            value = dequantized(weight, state, dtypes.get(key, usual_dtype), None)
            plain[weight.weight] = entry_of(key, value.source, entries)
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
    return replace(section, tensors=tuple(tensors), extras=extras), replaced


def _dtype_of_matrices(section: Section) -> str:
    """Return the floating-point dtype of all matrices of a section; float32 if there are several,
    or none.
    """
    dtypes = {entry.dtype for entry in section.tensors if len(entry.shape) > 1}
    dtypes.intersection_update(_FLOATS)
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _of(weights: Weights, keys: tuple[str, ...]) -> QuantizedWeight | None:
    return weights.get(keys[0]) if len(keys) == 1 else None


def _scheme(
    weight: QuantizedWeight | None, dtypes: Mapping[str, str], keys: tuple[str, ...]
) -> str:
    """Return the scheme of a weight, or the dtype of one that is not quantized."""
    if weight is not None:
        return weight.scheme
    if not keys:
        return "another kind"
    return dtypes.get(keys[0], "another kind")


def _dtypes(section: Section) -> dict[str, str]:
    return {entry.key: entry.dtype for entry in section.tensors}


def _of_pair(entry: Entry, left_scheme: str, right_scheme: str) -> Entry:
    """Return the entry of a weight that both sides have, in different schemes."""
    is_same = entry.status in ("same", "dtype", "renamed")
    if not is_same and entry.status != "value":  # the values were not compared
        return entry
    code = Code.SCALED if is_same else Code.SCALED_VALUE
    cause = Cause(code, (left_scheme, right_scheme))
    if entry.status != "dtype":
        cause = cause.and_also(entry.cause)
    return replace(entry, status="dtype" if is_same else "value", cause=cause)
