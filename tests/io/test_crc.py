"""Either code for CRC-32 gives zip's."""

from __future__ import annotations

import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.io.pieces import fastest_crc32 as fastest


@pytest.fixture(params=["installed", "zlib alone"])
def _code(request, monkeypatch):
    if request.param == "zlib alone":
        monkeypatch.setitem(sys.modules, "isal", None)
    elif "isal" not in fastest().__module__:
        pytest.skip("isal has no wheel for this processor")
    fastest.cache_clear()
    yield
    fastest.cache_clear()


@pytest.mark.usefixtures("_code")
def test_the_checksum_is_that_of_zlib_however_the_bytes_are_cut():
    @settings(deadline=None)
    @given(st.binary(max_size=300), st.integers(1, 100))
    def checked(data, size):
        value = 0
        for at in range(0, len(data), size):
            value = fastest()(memoryview(bytearray(data))[at : at + size], value)
        assert value == zlib.crc32(data)

    checked()
