"""Say why keys differ: parts of computed parameters, quantized weights, copies of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ckpttool.containers.rank_shards import (
    is_of_ranks,
    ranks_agree,
)
from ckpttool.core.checkpoint import Section
from ckpttool.core.tables import present
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.pairs import Values
from ckpttool.diffing.result import Entry
from ckpttool.kinds.quantized import BY_TORCH, parts_by_torch, quantized_weights

# Parameters that torch.nn.utils computes from parts


_PARAMETRIZED = "parametrizations"
# Suffixes of the parts that always exist, and of optional ones; and what computes the parameter
# from them.
_SUFFIXES = (
    (("_g", "_v"), (), "weight norm"),
    (("_orig", "_mask"), (), "pruning"),
    (("_orig", "_u"), ("_v",), "spectral norm"),
)
_ENDS = tuple(needed[0] for needed, _, _ in _SUFFIXES)


def parts(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """Map the keys that are parts of a parameter to its name, and to what computes it from them."""
    parameters = {}
    for key in keys:
        if _PARAMETRIZED not in key and not key.endswith(_ENDS):
            continue
        segments = key.split(".")
        if _PARAMETRIZED in segments[:-2]:
            at = segments.index(_PARAMETRIZED)
            parameter = ".".join((*segments[:at], segments[at + 1]))
            parameters[key] = parameter, "a parametrization"
        for needed, optional, how in _SUFFIXES:
            name = key.removesuffix(needed[0])
            if name == key or not all(name + suffix in keys for suffix in needed):
                continue
            for suffix in (*needed, *optional):
                if name + suffix in keys:
                    parameters[name + suffix] = name, how
    return parameters


def explain_computed(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries; parts and parameters without a counterpart say that one is computed from
    the other.
    """
    unexpected, missing = _only(entries, "unexpected"), _only(entries, "missing")
    codes: dict[str, Cause] = {}  # by the only key of an entry
    for side, other in ((unexpected, missing), (missing, unexpected)):
        for part, (name, how) in parts(side).items():
            if name in other:
                codes[part] = Cause(Code.PART, (how,))
                codes[name] = Cause(Code.COMPUTED_FROM, (how,))
    if not codes:
        return tuple(entries)
    explained = []
    for entry in entries:
        if entry.status in ("unexpected", "missing"):
            key = (entry.left or entry.right)[0]
            entry = replace(entry, cause=codes.get(key, entry.cause))
        explained.append(entry)
    return tuple(explained)


def explain_quantized(
    entries: Sequence[Entry],
    left: Section,
    right: Section | None = None,
    values: Values | None = None,
) -> tuple[Entry, ...]:
    """Return the entries, with a cause for parts of quantized weights that differ: no cast and no
    rename converts these.

    A weight that only one side has quantized has other values there, whatever its dtype is. If
    `values` are compared, say that these were not.
    """
    keys = _keys_of_uneven_modules(entries)
    left_schemes = _schemes(left, keys)
    right_schemes = {} if right is None else _schemes(right, keys)
    if not left_schemes and not right_schemes:
        return tuple(entries)
    explained = []
    for entry in entries:
        schemes = [left_schemes.get(key) for key in entry.left]
        schemes += [right_schemes.get(key) for key in entry.right]
        if entry.status == "missing":  # the weight under the name that it has if not quantized
            schemes += [left_schemes.get(key) for key in entry.right]
        elif entry.status == "unexpected":
            schemes += [right_schemes.get(key) for key in entry.left]
        explained.append(_of_quantized(entry, schemes, reads_values=values is not None))
    return tuple(explained)


def _keys_of_uneven_modules(entries: Sequence[Entry]) -> list[str]:
    """Return all keys of the modules that have a key on one side only."""
    modules: set[str] = set()
    for entry in entries:
        if entry.status in ("missing", "unexpected"):
            modules.update(key.rpartition(".")[0] for key in (*entry.left, *entry.right))
    keys = []
    for entry in entries:
        for key in (*entry.left, *entry.right):
            if key.rpartition(".")[0] in modules:
                keys.append(key)
    return keys


def _of_quantized(entry: Entry, schemes: Sequence[str | None], *, reads_values: bool) -> Entry:
    """Return the entry, with its cause if a key is quantized; `schemes` has the scheme of each."""
    titles = present(schemes)
    if not titles or entry.cause is None or entry.has(Code.SCALED, Code.SCALED_VALUE):
        return entry
    cause = Cause(Code.QUANTIZED, (titles[0],))
    if entry.status == "value" and len(set(schemes)) > 1:
        cause = cause.and_also(Cause(Code.UNREAD))  # these numbers are not values
        return Entry("value", entry.left, entry.right, cause)
    if entry.status not in ("dtype", "shape", "missing", "unexpected"):
        return entry
    cause = cause.and_also(entry.cause)
    if entry.status != "dtype" or None not in schemes:
        return replace(entry, cause=cause)
    if reads_values:
        cause = cause.and_also(Cause(Code.UNREAD))
    return replace(entry, status="value", cause=cause)


def _schemes(section: Section, keys: Iterable[str]) -> dict[str, str]:
    """Map each key of a quantized weight to the title of its scheme. `keys` may be parts of weights
    that torch packs, which only their module shows.
    """
    schemes: dict[str, str] = {}
    for weight in quantized_weights(section):
        for key in (*weight.keys, weight.plain):
            schemes.setdefault(key, weight.scheme)
    for key in parts_by_torch(section, keys):
        schemes.setdefault(key, BY_TORCH)
    return schemes


def with_copies_of_ranks(entries: Iterable[Entry], section: Section) -> tuple[Entry, ...]:
    """Return the entries of a section that is loaded; a tensor of which the ranks hold different
    copies is not the same. Reads the copies.
    """
    differing: set[tuple[str, ...]] = set()
    for tensor in section.tensors:
        if is_of_ranks(tensor) and not ranks_agree(tensor):
            differing.add((tensor.key,))
    if not differing:
        return tuple(entries)
    checked = []
    for entry in entries:
        if entry.status == "same" and entry.left in differing:
            entry = Entry("value", entry.left, entry.right, Cause(Code.RANK_VALUE))
        checked.append(entry)
    return tuple(checked)


def unpairable(entries: Sequence[Entry]) -> tuple[set[str], set[str]]:
    """Return the keys of each side that cannot be renamed keys of the other: parts, if the other
    side has none.
    """
    unexpected, missing = _only(entries, "unexpected"), _only(entries, "missing")
    computed: set[str] = set()
    for key, entry in chain(unexpected.items(), missing.items()):
        if entry.has(Code.PART, Code.COMPUTED_FROM):
            computed.add(key)
    left_parts, right_parts = set(parts(unexpected)), set(parts(missing))
    if left_parts and right_parts:
        return computed, computed
    return computed | left_parts, computed | right_parts


def _only(entries: Iterable[Entry], status: str) -> dict[str, Entry]:
    by_key = {}
    for entry in entries:
        if entry.status == status:
            first, *_ = entry.left or entry.right
            by_key[first] = entry
    return by_key
