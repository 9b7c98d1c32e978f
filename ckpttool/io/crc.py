"""CRC-32 of what is streamed into zip records, by the fastest code that is installed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import cast

Crc32 = Callable[..., int]


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """As `zlib.crc32`: the checksum of these bytes behind those whose checksum is `value`."""
    return fastest()(data, value)


@cache
def fastest() -> Crc32:
    """ISA-L's where it is installed (``pip install 'ckpttool[fast]'``), as fast as memory is; or zlib's."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return cast(Crc32, isal_zlib.crc32)
