"""Random mutations of inputs, for fuzzing without coverage feedback."""

from __future__ import annotations

import random
import struct
import zipfile
from collections.abc import Sequence
from functools import cache
from io import BytesIO

_MAX_LENGTH = 1 << 16
_SHORT = 200
_ZIP = b"PK\3\4"
_AT = 42  # position of the offset of the member in an entry of the directory
_END = struct.Struct("<4s4xHHLLH")


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of the seeds, changed in one or more places.

    For an archive this mostly changes the contents of a member, and for safetensors the header, and
    fixes offsets and lengths. Long seeds are drawn less often, so that none takes most of the time.
    """
    [seed] = chance.choices(seeds, [1 / (_SHORT + len(seed)) for seed in seeds])
    if seed.startswith(_ZIP) and chance.random() < 0.8:
        return _in_archive(seed, words, chance)
    if seed[8:9] == b"{" and chance.random() < 0.8:
        return _in_header(seed, words, chance)
    return changed(seed, seeds, words, chance)


def changed(
    data: bytes, seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random
) -> bytes:
    """Return the bytes, changed in one or more places."""
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(mutant, seeds, words, chance)
    return bytes(mutant[: max(_MAX_LENGTH, len(data))])


def _in_archive(seed: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    members = _members(seed)
    small = [name for name, data in members.items() if len(data) < _MAX_LENGTH]
    picked = chance.choice(small)
    new = changed(members[picked], [members[chance.choice(small)]], words, chance)
    records = [_record(name, data) for name, data in members.items() if name != picked]
    if chance.random() < 0.98:
        records.insert(list(members).index(picked), _new_record(picked, new))
    return _archive(records)


def _in_header(seed: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    """Change the header of a safetensors file, and write its new length in front of it."""
    end = 8 + int.from_bytes(seed[:8], "little")
    header = changed(seed[8:end], [seed[8:end]], words, chance)
    return len(header).to_bytes(8, "little") + header + seed[end:]


@cache
def _members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(archive)) as file:
        return {name: file.read(name) for name in file.namelist()}


def _new_record(name: str, data: bytes) -> tuple[bytes, bytes]:
    """Return a member as an archive stores it, and its directory entry (for the first member)."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(zipfile.ZipInfo(name), data)
        start = file.start_dir
    return out.getvalue()[:start], out.getvalue()[start : -_END.size]


_record = cache(_new_record)  # most members come from a seed unchanged


def _archive(records: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the archive that zipfile would write, but faster."""
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
        data[chance.randrange(len(data))] = chance.choice(
            (0, 1, 10, 32, 46, 127, 128, 255, chance.randrange(256))
        )


def _number(
    data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random
) -> None:
    size = chance.choice((2, 4, 8))
    value = chance.choice(
        (0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, chance.randrange(1 << 12))
    )
    at = chance.randrange(len(data) + 1)
    data[at : at + size] = (
        value.to_bytes(8, "little")[:size] if value < 1 << 64 else struct.pack("<q", -1)[:size]
    )


def _cut(data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randrange(len(data) + 1)
    del data[start : start + chance.choice((1, 2, 8, len(data)))]


def _repeat(
    data: bytearray, _: Sequence[bytes], __: Sequence[bytes], chance: random.Random
) -> None:
    start = chance.randrange(len(data) + 1)
    piece = data[start : start + chance.choice((1, 4, 32, 256))]
    data[start:start] = piece * chance.choice((1, 2, 50))


def _word(
    data: bytearray, _: Sequence[bytes], words: Sequence[bytes], chance: random.Random
) -> None:
    if words:
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.choice((0, 0, 1, 4))] = chance.choice(words)


def _splice(
    data: bytearray, seeds: Sequence[bytes], _: Sequence[bytes], chance: random.Random
) -> None:
    other = chance.choice(seeds)
    start = chance.randrange(len(other) + 1)
    at = chance.randrange(len(data) + 1)
    data[at : at + chance.choice((0, 8, 64))] = other[start : start + chance.choice((8, 64, 512))]


_CHANGES = (_bit, _byte, _number, _cut, _repeat, _word, _word, _splice)
