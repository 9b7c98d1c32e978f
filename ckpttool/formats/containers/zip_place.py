"""Where torch's writer puts the data of a record, told without reading the record's own header.

Of a file in a store each header is a request. Where the data of a storage begins follows twice from the directory: from
its own place, since torch aligns data, and from the place of what follows. Where the two agree the header need not be
read before the data is.
"""

from __future__ import annotations

import re

ALIGNMENT = 64  # of every record's data; torch.utils.serialization.config.save.storage_alignment changes it
U32 = 0xFFFFFFFF

_LOCAL, _FIELD = 30, 4  # bytes of a local header, and of the tag and length of an extra field
# What reads no tensors does not read: of torch.save, TorchScript, and torch.export since 2.9.
_STORAGE = re.compile(rb"[^/]+/(?:data|constants|tensors)/\d+|(?:[^/]+/)?data/(?:weights|constants)/\w+_\d+")


def is_storage(raw_name: bytes) -> bool:
    """Whether a record of that name holds the data of tensors."""
    return _STORAGE.fullmatch(raw_name) is not None


def is_wide(start: int, size: int) -> bool:
    """True where torch's writer (miniz) uses zip64 fields and the longer data descriptor."""
    return start >= U32 or size >= U32


def data_of(raw_name: bytes, start: int, size: int, end: int) -> int | None:
    """Where the data of the stored record at `start` begins: `size` bytes long, with what follows at `end`.

    None where the two ways to tell do not agree.
    """
    wide = _FIELD + 16 * (size >= U32) + 8 * (start >= U32) if is_wide(start, size) else 0
    bare = start + _LOCAL + len(raw_name) + wide + _FIELD
    data = bare + -bare % ALIGNMENT
    return data if data + size + (24 if is_wide(start, size) else 16) == end else None
