"""Inputs from inputs: what a fuzzer does where nothing tells it which branch it took."""

from __future__ import annotations

import random
import struct
import zipfile
from collections.abc import Sequence
from functools import cache
from io import BytesIO

_LONGEST = 1 << 16
_SHORT = 200
_ZIP = b"PK\3\4"
_AT = 42  # where an entry of a directory says at which byte its member begins
_END = struct.Struct("<4s4xHHLLH")


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds, changed in one place or several; of an archive rather what is in it than its own bytes, and
    of a header's length rather what the header has become.

    A seed is drawn the less often the longer it is, so that none takes most of the time.
    """
    [seed] = chance.choices(seeds, [1 / (_SHORT + len(seed)) for seed in seeds])
    if seed.startswith(_ZIP) and chance.random() < 0.8:
        return _in_archive(seed, words, chance)
    if seed[8:9] == b"{" and chance.random() < 0.8:
        return _in_header(seed, words, chance)
    return changed(seed, seeds, words, chance)


def changed(data: bytes, seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """The bytes, changed in one place or several."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(found, seeds, words, chance)
    return bytes(found[: max(_LONGEST, len(data))])


def _in_archive(seed: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    members = _members(seed)
    small = [name for name, data in members.items() if len(data) < _LONGEST]
    picked = chance.choice(small)
    new = changed(members[picked], [members[chance.choice(small)]], words, chance)
    records = [_record(name, data) for name, data in members.items() if name != picked]
    if chance.random() < 0.98:
        records.insert(list(members).index(picked), _made_record(picked, new))
    return _archive(records)


def _in_header(seed: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    """Of a safetensors file: its length in 8 bytes, the header, data."""
    end = 8 + int.from_bytes(seed[:8], "little")
    header = changed(seed[8:end], [seed[8:end]], words, chance)
    return len(header).to_bytes(8, "little") + header + seed[end:]


@cache
def _members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(archive)) as file:
        return {name: file.read(name) for name in file.namelist()}


def _made_record(name: str, data: bytes) -> tuple[bytes, bytes]:
    """A member as it lies in an archive, and its entry in the directory (of an archive that begins with it)."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(zipfile.ZipInfo(name), data)
        start = file.start_dir
    return out.getvalue()[:start], out.getvalue()[start : -_END.size]


_record = cache(_made_record)  # most members are those of a seed


def _archive(records: Sequence[tuple[bytes, bytes]]) -> bytes:
    """What zipfile would make of the members, without its time for each."""
    parts, entries, at = [], [], 0
    for member, entry in records:
        parts.append(member)
        entries.append(entry[:_AT] + at.to_bytes(4, "little") + entry[_AT + 4 :])
        at += len(member)
    directory = b"".join(entries)
    end = _END.pack(b"PK\5\6", len(records), len(records), len(directory), at, 0)
    return b"".join([*parts, directory, end])


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
