"""Inputs from inputs: what a fuzzer does where nothing tells it which branch it took."""

from __future__ import annotations

import random
import struct
import zipfile
from collections.abc import Sequence
from io import BytesIO

_LONGEST = 1 << 16
_ZIP = b"PK\3\4"


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds, changed in one place or several; of an archive rather what is in it than its own bytes."""
    seed = chance.choice(seeds)
    if seed.startswith(_ZIP) and chance.random() < 0.8:
        return _in_archive(seed, words, chance)
    return _changed(seed, seeds, words, chance)


def _changed(data: bytes, seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(found, seeds, words, chance)
    return bytes(found[: max(_LONGEST, len(data))])


def _in_archive(seed: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(seed)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        small = [info.filename for info in old.infolist() if info.file_size < _LONGEST]
        picked = chance.choice(small)
        others = [old.read(chance.choice(small))]
        for name in names:
            data = old.read(name)
            if name == picked:
                data = _changed(data, others, words, chance)
            if name != picked or chance.random() < 0.98:
                new.writestr(name, data)
    return out.getvalue()


def _bit(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice((0, 1, 10, 32, 46, 127, 128, 255, chance.randrange(256)))


def _number(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    size = chance.choice((2, 4, 8))
    value = chance.choice((0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, chance.randrange(1 << 12)))
    at = chance.randrange(len(data) + 1)
    data[at : at + size] = value.to_bytes(8, "little")[:size] if value < 1 << 64 else struct.pack("<q", -1)[:size]


def _cut(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randrange(len(data) + 1)
    del data[start : start + chance.choice((1, 2, 8, len(data)))]


def _repeat(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randrange(len(data) + 1)
    piece = data[start : start + chance.choice((1, 4, 32, 256))]
    data[start:start] = piece * chance.choice((1, 2, 50))


def _word(data: bytearray, _: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> None:
    if words:
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.choice((0, 0, 1, 4))] = chance.choice(words)


def _splice(data: bytearray, seeds: Sequence[bytes], _: Sequence[bytes], chance: random.Random) -> None:
    other = chance.choice(seeds)
    start = chance.randrange(len(other) + 1)
    at = chance.randrange(len(data) + 1)
    data[at : at + chance.choice((0, 8, 64))] = other[start : start + chance.choice((8, 64, 512))]


_CHANGES = (_bit, _byte, _number, _cut, _repeat, _word, _word, _splice)
