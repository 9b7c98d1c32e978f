"""What a tensor's values are like, streamed: smallest, largest, mean, zeros, NaN, infinities, and a hash of the bytes.

numpy reads what it has a dtype for, torch the rest; neither is imported before a tensor needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checkpoint import TensorEntry
from ckpttool.dtypes import itemsize
from ckpttool.evaluate.compare import elements

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Read = Callable[[bytes], Array]

_BY_NUMPY = frozenset(
    {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"}
)
_BY_TORCH = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"})


@dataclass(frozen=True, slots=True)
class Statistics:
    """`minimum`, `maximum` and `mean` are of the finite values, None where there are none; all numbers but `sha256`,
    which is of the elements in row-major order, are None where the dtype's values are no real numbers.
    """

    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    zeros: int | None
    nan: int | None
    inf: int | None
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """As in the contract."""
        found = asdict(self)
        return {"min": found.pop("minimum"), "max": found.pop("maximum"), **found}


def statistics(entry: TensorEntry) -> Statistics | None:
    """Those of a dense tensor, read in chunks; None for another layout. Raises `CkptError` where it cannot be read."""
    if entry.storage is None:
        return None
    read, digest, sums = _reader(entry.dtype), hashlib.sha256(), _Sums()
    for chunk in _whole_elements(elements(entry), itemsize(entry.dtype)):
        digest.update(chunk)
        if read is not None:
            sums.add(read(chunk))
    if read is None:
        return Statistics(None, None, None, None, None, None, digest.hexdigest())
    mean = sums.total / sums.finite if sums.finite else None
    return Statistics(sums.least, sums.most, mean, sums.zeros, sums.nan, sums.inf, digest.hexdigest())


class _Sums:
    """What is known of the chunks so far."""

    def __init__(self) -> None:
        self.least: float | int | None = None
        self.most: float | int | None = None
        self.total = 0.0
        self.finite = self.zeros = self.nan = self.inf = 0

    def add(self, values: Array) -> None:
        """One more chunk."""
        import numpy as np

        self.zeros += values.size - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                nan = int(np.isnan(values).sum())
                self.nan += nan
                self.inf += values.size - int(finite.sum()) - nan
                values = values[finite]
        if values.size:
            least, most = values.min().item(), values.max().item()
            self.least = least if self.least is None else min(self.least, least)
            self.most = most if self.most is None else max(self.most, most)
            self.total += float(values.sum(dtype=np.float64))
            self.finite += values.size


def _whole_elements(chunks: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """The bytes, in chunks of whole elements of `size` bytes."""
    rest = b""
    for chunk in chunks:
        data = rest + bytes(chunk)
        end = len(data) - len(data) % size
        rest = data[end:]
        if end:
            yield data[:end]


def _reader(dtype: str) -> Read | None:
    """What makes numbers of bytes; None for a dtype whose values are no real numbers."""
    if dtype == "bfloat16":
        return _bfloat16
    if dtype in _BY_NUMPY:
        return partial(_by_numpy, "uint8" if dtype == "bool" else dtype)
    return partial(_by_torch, dtype) if dtype in _BY_TORCH else None


def _by_numpy(dtype: str, data: bytes) -> Array:
    import numpy as np

    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _bfloat16(data: bytes) -> Array:
    """The upper halves of float32."""
    import numpy as np

    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _by_torch(dtype: str, data: bytes) -> Array:
    import numpy as np

    from ckpttool.evaluate import with_torch

    return np.frombuffer(with_torch.to_float32(data, dtype), np.float32)
