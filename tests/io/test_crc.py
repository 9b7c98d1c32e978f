"""Both CRC-32 implementations compute the same values as zlib."""

from __future__ import annotations

import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.io.pieces import fastest_crc32 as fastest


@pytest.fixture(params=["installed", "zlib only"])
def _implementation(request, monkeypatch):
    if request.param == "zlib only":
        monkeypatch.setitem(sys.modules, "isal", None)
    elif "isal" not in fastest().__module__:
        pytest.skip("isal has no wheel for this processor")
    fastest.cache_clear()
    yield
    fastest.cache_clear()


@pytest.mark.usefixtures("_implementation")
def test_checksum_of_chunks_equals_zlib_crc32():
    @given(st.binary(max_size=300), st.integers(1, 100))
    def check(data, size):
        value = 0
        for at in range(0, len(data), size):
            value = fastest()(memoryview(bytearray(data))[at : at + size], value)
        assert value == zlib.crc32(data)

    check()
