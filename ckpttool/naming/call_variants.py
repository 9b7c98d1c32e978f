"""Call variants in names: ``foo@1.w`` is ``foo.w`` if `torch.export.unflatten` made it. Needs no torch.

A user's own module may be called ``foo@1``, so a name alone is never enough: a segment loses its ``@N`` only if the
base name is known, and the caller knows that both are one tensor (by storage, bytes, or a model's names).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Ref
from ckpttool.core.plan import Dropped, Output
from ckpttool.evaluate.compare import same_values

_CALL = re.compile(r"(.+)@([1-9]\d*)")
_MOST_CALLS = 8  # segments of a name that are tried; others keep their ``@N``


def split(segment: str) -> tuple[str, int]:
    """Return a segment's base and the number of its call: ``foo@2`` -> (``foo``, 2), ``foo`` -> (``foo``, 0)."""
    match = _CALL.fullmatch(segment)
    return (match[1], int(match[2])) if match else (segment, 0)


def base_names(fqn: str) -> Iterator[str]:
    """Yield every name that `fqn` may be a call variant of, names without any ``@N`` first."""
    if "@" not in fqn:
        return
    parts = fqn.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if split(part)[1]][:_MOST_CALLS]
    for count in range(len(places), 0, -1):
        for taken in combinations(places, count):
            yield ".".join(split(part)[0] if i in taken else part for i, part in enumerate(parts))


def base_name(fqn: str, known: Collection[str]) -> str | None:
    """Return the name among `known` that `fqn` may be a call variant of, or None."""
    return next((name for name in base_names(fqn) if name in known), None)


def aliases(section: Section) -> dict[str, str]:
    """Return key -> first key of the same tensor: shared storage, and call variants with the bytes of their base."""
    found = section.aliases()
    variants = [entry.key for entry in section.tensors if "@" in entry.key and entry.key not in found]
    entries = {entry.key: entry for entry in section.tensors} if variants else {}
    for key in variants:
        base = base_name(key, entries)
        if base is not None and same_values(entries[key], entries[base]):
            found[key] = found.get(base, base)
    return found


def settle(
    variants: Mapping[str, str], names: Mapping[str, str], section: Section
) -> tuple[list[Dropped], list[Problem]]:
    """Drop the keys that are call variants of a name with its own key, or return a problem if their values differ.

    `variants` and `names` come from a `Match`: key -> name.
    """
    entries, keys = section.by_key(), {name: key for key, name in names.items()}
    dropped, problems = [], []
    for key, name in variants.items():
        base = keys[name]
        if same_values(entries[key], entries[base]):
            dropped.append(Dropped(section.path, key, f"a call variant of {base}"))
        else:
            problems.append(Problem(f"a call variant of {base} with another value", key))
    return dropped, problems


def collapse(
    outputs: Sequence[Output], first: Mapping[str, str], section: Section
) -> tuple[list[Output], list[Dropped], list[Problem]]:
    """Return `outputs` without call variants of others among them; a variant with another value is a problem.

    `first`: FQN -> first FQN of the same tensor; so the model confirms that two names are one.
    """
    by_key = {output.key: output for output in outputs}
    bases = {key: base for key in by_key if (base := _confirmed_base(key, by_key, first)) is not None}
    entries = section.by_key()
    dropped, problems = [], []
    for key, base in bases.items():
        one, other = by_key[key].source, by_key[base].source
        if isinstance(one, Ref) and isinstance(other, Ref):
            is_same = same_values(entries[one.key], entries[other.key])
        else:
            is_same = one == other
        if not is_same:
            problems.append(Problem(f"a call variant of {base} with another value", key))
        elif isinstance(one, Ref) and one != other:
            dropped.append(Dropped(section.path, one.key, f"a call variant of {base}"))
    return [output for output in outputs if output.key not in bases], dropped, problems


def expand(outputs: Sequence[Output], first: Mapping[str, str]) -> list[Output]:
    """Return `outputs` with every call variant that the model has, next to its base; `first` as for `collapse`."""
    by_key = {output.key: output for output in outputs}
    added: defaultdict[str, list[Output]] = defaultdict(list)
    for name in first:
        base = _confirmed_base(name, by_key, first) if name not in by_key else None
        if base is not None:
            added[base].append(replace(by_key[base], key=name))
    return [one for output in outputs for one in (output, *added[output.key])]


def _confirmed_base(name: str, known: Collection[str], first: Mapping[str, str]) -> str | None:
    base = base_name(name, known)
    return base if base is not None and first.get(base, base) == first.get(name, name) else None
