"""Call variants in names: ``foo@1.w`` is ``foo.w`` where `torch.export.unflatten` made it so. Needs no torch.

A user's own module may be called ``foo@1``, so a name alone is never enough: a segment loses its ``@N`` only where the
base name is known, and the caller has the evidence that both are one tensor (storage, bytes, or a model's names).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.plan import Dropped, Output
from ckpttool.evaluate.compare import same_values

_CALL = re.compile(r"(.+)@([1-9]\d*)")
_MOST_CALLS = 8  # a name with more segments that look like variants is not searched through


def split(segment: str) -> tuple[str, int]:
    """A segment's base and its call's number: ``foo@2`` -> (``foo``, 2), ``foo`` -> (``foo``, 0)."""
    found = _CALL.fullmatch(segment)
    return (found[1], int(found[2])) if found else (segment, 0)


def base_names(fqn: str) -> Iterator[str]:
    """Every name that `fqn` may be a call variant of, those with the most ``@N`` taken off first."""
    if "@" not in fqn:
        return
    parts = fqn.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if split(part)[1]][:_MOST_CALLS]
    for count in range(len(places), 0, -1):
        for taken in combinations(places, count):
            yield ".".join(split(part)[0] if i in taken else part for i, part in enumerate(parts))


def base_name(fqn: str, known: Collection[str]) -> str | None:
    """The name among `known` that `fqn` may be a call variant of, None where there is none."""
    return next((name for name in base_names(fqn) if name in known), None)


def aliases(section: Section) -> dict[str, str]:
    """Key -> first key of the same tensor: shared storage, and call variants that have the bytes of their base."""
    found = section.aliases()
    variants = [entry.key for entry in section.tensors if "@" in entry.key and entry.key not in found]
    have = {entry.key: entry for entry in section.tensors} if variants else {}
    for key in variants:
        base = base_name(key, have)
        if base is not None and same_values(have[key], have[base]):
            found[key] = found.get(base, base)
    return found


def settle(
    variants: Mapping[str, str], names: Mapping[str, str], section: Section
) -> tuple[list[Dropped], list[Problem]]:
    """What becomes of keys that are call variants of names that have their own key: dropped, or a problem.

    `variants` and `names` are those of a `Match`: key -> name.
    """
    have, keys = section.by_key(), {name: key for key, name in names.items()}
    dropped, problems = [], []
    for key, name in variants.items():
        base = keys[name]
        if same_values(have[key], have[base]):
            dropped.append(Dropped(section.path, key, f"a call variant of {base}"))
        else:
            problems.append(Problem(f"a call variant of {base} with another value", key))
    return dropped, problems


def collapse(
    outputs: Sequence[Output], first: Mapping[str, str], section: Section
) -> tuple[list[Output], list[Dropped], list[Problem]]:
    """`outputs` without the call variants of others among them; a variant that has another value is a problem.

    `first`: FQN -> first FQN of the same tensor, which is the model's word that two names are one.
    """
    by_key = {output.key: output for output in outputs}
    bases = {key: base for key in by_key if (base := _base_of_same(key, by_key, first)) is not None}
    kept = [output for output in outputs if output.key not in bases]
    dropped, problems = [], []
    for key, base in bases.items():
        if not _same(by_key[key].source, by_key[base].source, section):
            problems.append(Problem(f"a call variant of {base} with another value", key))
        elif isinstance(source := by_key[key].source, Ref) and source != by_key[base].source:
            dropped.append(Dropped(section.path, source.key, f"a call variant of {base}"))
    return kept, dropped, problems


def expand(outputs: Sequence[Output], first: Mapping[str, str]) -> list[Output]:
    """`outputs` with every call variant that the model has beside its base; `first` as for `collapse`."""
    by_key = {output.key: output for output in outputs}
    added: defaultdict[str, list[Output]] = defaultdict(list)
    for name in first:
        base = _base_of_same(name, by_key, first) if name not in by_key else None
        if base is not None:
            added[base].append(replace(by_key[base], key=name))
    return [one for output in outputs for one in (output, *added[output.key])]


def _base_of_same(name: str, known: Collection[str], first: Mapping[str, str]) -> str | None:
    base = base_name(name, known)
    return base if base is not None and first.get(base, base) == first.get(name, name) else None


def _same(one: Expression, other: Expression, section: Section) -> bool:
    have = section.by_key()
    if isinstance(one, Ref) and isinstance(other, Ref):
        return same_values(have[one.key], have[other.key])
    return one == other
