"""Which tensor goes into which shard of a sharded checkpoint: pure planning over names and sizes."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ckpttool.errors import CkptError

DEFAULT_SIZE = 5 * 10**9  # bytes; what transformers took up to version 4

_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


class Item(NamedTuple):
    """One tensor to place: its size in bytes, and what it shares with the tensors that must lie in the same shard."""

    key: str
    nbytes: int
    group: Hashable


def plan_shards(items: Iterable[Item], limit: int) -> list[list[str]]:
    """The keys of each shard: filled in order, up to `limit` bytes each; a larger tensor gets a shard of its own.

    The items of one group count once and stay together. It is the plan of `huggingface_hub` for the same tensors.
    """
    shards: list[list[str]] = []
    open_shard: list[str] = []
    used = 0
    shard_of: dict[Hashable, list[str]] = {}
    for key, nbytes, group in items:
        if group in shard_of:
            shard_of[group].append(key)
        elif nbytes > limit:
            shards.append([key])
            shard_of[group] = shards[-1]
        else:
            if used + nbytes > limit:
                shards.append(open_shard)
                open_shard, used = [], 0
            open_shard.append(key)
            used += nbytes
            shard_of[group] = open_shard
    return [*shards, open_shard] if open_shard or not shards else shards


def shard_names(stem: str, ending: str, count: int) -> list[str]:
    """``model-00001-of-00003.safetensors`` and so on, for `stem` ``model`` and `ending` ``.safetensors``."""
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` (10^9), ``512MiB`` (2^20), ``1000``. Raises `CkptError` for what is no such size."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    units = {unit.upper(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].upper()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if not size:
        raise CkptError(f"{text!r} is not a size", hint="as in 5GB, 500MB, 2GiB or 1000000 (bytes)")
    return size
