"""Wrapper chains: recognises wrappers in a checkpoint's keys alone, and writes the names that a chain of them gives.

Evidence is weighed over the whole file. A wrapper holds nothing but the module it wraps, so its segment is the only way
on from where it stands; a segment that has siblings is a module of the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpttool.errors import CkptError
from ckpttool.expression import Op, Special
from ckpttool.naming.wrappers import SEGMENTS, strip

AMBIGUOUS = frozenset({"module"})  # users call their own modules so: believed at the root only, for all keys at once
COUNTER = "n_averaged"  # AveragedModel's buffer beside the module it wraps

# FORM's word -> the segments that it puts before every name. FSDP2 wraps in place and adds none.
WORDS: dict[str, str] = {
    "ddp": "module",
    "dp": "module",
    "compile": "_orig_mod",
    "ac": "_checkpoint_wrapped_module",
    "fsdp": "_fsdp_wrapped_module",
    "fsdp1": "_fsdp_wrapped_module",
    "fsdp2": "",
    "fully_shard": "",
    "fpw": "_fpw_module",
    "averaged": "module",
    "lightning": "model",
    "peft": "base_model.model",
}
_CHAIN = re.compile(r"([a-z_0-9]+)(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class Chain:
    """A parsed FORM such as ``ddp(compile)``: the words from the outside in."""

    words: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """What stands before every canonical name, with its last dot; empty where the chain adds nothing."""
        return "".join(WORDS[word] + "." for word in self.words if WORDS[word])

    @property
    def counts(self) -> bool:
        """Whether the outermost wrapper is an AveragedModel, which has a counter of its own."""
        return self.words[:1] == ("averaged",)


def parse(form: str) -> Chain:
    """``ddp(compile)`` -> the chain. Raises `CkptError` for words that name no wrapper."""
    words = []
    rest: str | None = form.replace(" ", "")
    while rest is not None:
        found = _CHAIN.fullmatch(rest)
        if found is None or found[1] not in WORDS:
            raise CkptError(
                f"no such form: {form}",
                hint=f"serialized, runtime, exported, or a chain of {', '.join(WORDS)}, as in 'ddp(compile)'",
            )
        words.append(found[1])
        rest = found[2]
    return Chain(tuple(words))


def recognise(keys: Iterable[str]) -> frozenset[str]:
    """The dotted paths at which a wrapper stands, as far as the keys alone show it: for `wrappers.strip`."""
    children = _children(keys)
    found: set[str] = set()
    at_root = [""]
    for path in at_root:  # grows while one wrapper stands in another
        below = children.get(path, set())
        only = below - {COUNTER} if path == "" else below
        if len(only) == 1 and next(iter(only)) in SEGMENTS:
            inner = _join(path, next(iter(only)))
            found.add(inner)
            at_root.append(inner)
    for path, below in children.items():
        if len(below) == 1 and next(iter(below)) in SEGMENTS - AMBIGUOUS:
            found.add(_join(path, next(iter(below))))
    return frozenset(found)


def segments(paths: Iterable[str]) -> list[str]:
    """The wrapper segments at these paths, each once, the outermost first."""
    ordered = sorted(paths, key=lambda path: (path.count("."), path))
    return list(dict.fromkeys(path.rpartition(".")[2] for path in ordered))


def canonical_keys(keys: Iterable[str]) -> dict[str, str]:
    """Key -> canonical name, by the evidence of the keys alone."""
    keys = list(keys)
    paths = recognise(keys)
    return {key: strip(key, paths) for key in keys}


def like(keys: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Key -> the name that `others` have for the same canonical name; a key that they do not have is left out."""
    theirs: Mapping[str, str] = {name: other for other, name in canonical_keys(others).items()}
    return {key: theirs[name] for key, name in canonical_keys(keys).items() if name in theirs}


def rewrap(canonical: Mapping[str, str], wanted: Chain) -> tuple[dict[str, str], list[str]]:
    """Key -> its name inside the chain, for keys with their canonical names; and the keys that have none there."""
    averaged = canonical.get(COUNTER) == COUNTER and any(key.startswith("module.") for key in canonical)
    names = {key: wanted.prefix + name for key, name in canonical.items()}
    if not averaged:
        return names, []
    names[COUNTER] = COUNTER
    return names, [] if wanted.counts else [COUNTER]


def counter(wanted: Chain, keys: Iterable[str]) -> dict[str, Op]:
    """AveragedModel's counter where the chain needs one and the checkpoint has none: it is the average of one model."""
    if not wanted.counts or COUNTER in keys:
        return {}
    return {COUNTER: Op("aten.full.default", ((), 1), (("dtype", Special("dtype", "int64")),))}


def _children(keys: Iterable[str]) -> dict[str, set[str]]:
    """Module path -> the segments that stand directly below it."""
    children: dict[str, set[str]] = {}
    for key in keys:
        path = ""
        for segment in key.split("."):
            below = children.setdefault(path, set())
            below.add(segment)
            path = _join(path, segment)
    return children


def _join(path: str, segment: str) -> str:
    return f"{path}.{segment}" if path else segment
