"""Parameters that one side holds, and the other computes from others: no rename makes one of the other.

The names are those that `torch.nn.utils` gives: `weight_norm`, `spectral_norm`, `prune` and `parametrize`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckpttool.queries.diff.result import Entry

# What a reason says of both, and how it is mended.
COMPUTED = "computed from"
MENDED = (
    "of parameters that one side computes from others",
    "no rename makes one of the other: load the file into a model built like the one that saved it, take off or put on "
    "there what computes them (torch.nn.utils), and save its state_dict()",
)

_PARAMETRIZED = "parametrizations"
# Suffixes of the parts that are always there, and of those that may be; and what computes the parameter from them.
_SUFFIXES = (
    (("_g", "_v"), (), "weight norm"),
    (("_orig", "_mask"), (), "pruning"),
    (("_orig", "_u"), ("_v",), "spectral norm"),
)
_ENDS = tuple(needed[0] for needed, _, _ in _SUFFIXES)


def parts(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """Keys that are parts of a parameter -> its name, and what computes it from them."""
    found = {}
    for key in keys:
        if _PARAMETRIZED not in key and not key.endswith(_ENDS):
            continue
        segments = key.split(".")
        if _PARAMETRIZED in segments[:-2]:
            at = segments.index(_PARAMETRIZED)
            found[key] = ".".join((*segments[:at], segments[at + 1])), "a parametrization"
        for needed, more, how in _SUFFIXES:
            name = key.removesuffix(needed[0])
            if name != key and all(name + suffix in keys for suffix in needed):
                found |= {name + suffix: (name, how) for suffix in (*needed, *more) if name + suffix in keys}
    return found


def explained(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries, and why the parts and the parameters among them have no partner."""
    left, right = _alone(entries, "unexpected"), _alone(entries, "missing")
    reasons = {**_reasons(parts(left), right), **_reasons(parts(right), left)}
    if not reasons:
        return tuple(entries)
    keys = [(*entry.left, *entry.right)[0] for entry in entries]
    open_ = left | right
    return tuple(
        replace(entry, reason=reasons[key]) if key in reasons and open_.get(key) is entry else entry
        for key, entry in zip(keys, entries)
    )


def unpairable(entries: Iterable[Entry]) -> tuple[set[str], set[str]]:
    """Keys of each side that are no other tensors under other names: parts, where the other side has none."""
    entries = tuple(entries)
    known = {key for entry in entries if COMPUTED in entry.reason for key in (*entry.left, *entry.right)}
    left, right = (set(parts(_alone(entries, status))) for status in ("unexpected", "missing"))
    return known | (left if not right else set()), known | (right if not left else set())


def _alone(entries: Iterable[Entry], status: str) -> dict[str, Entry]:
    return {(entry.left or entry.right)[0]: entry for entry in entries if entry.status == status}


def _reasons(parts_of: Mapping[str, tuple[str, str]], others: Collection[str]) -> dict[str, str]:
    """Key -> its reason, for parts of one side and the parameters of the other."""
    found = {}
    for part, (name, how) in parts_of.items():
        if name in others:
            found[part] = f"the other side holds what is {COMPUTED} it ({how})"
            found[name] = f"the other side holds what it is {COMPUTED} ({how})"
    return found
