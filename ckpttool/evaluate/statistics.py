"""What a tensor's values are like, streamed: smallest, largest, mean, zeros, NaN, infinities, and a hash of the bytes.

numpy is imported when a tensor needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checkpoint import TensorEntry
from ckpttool.dtypes import itemsize
from ckpttool.evaluate.compare import elements
from ckpttool.evaluate.with_numpy import reader, whole_elements
from ckpttool.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


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


def statistics(entry: TensorEntry) -> Statistics:
    """Those of a dense tensor, read in chunks. Raises `CkptError` where it cannot be read."""
    import hashlib  # loads OpenSSL

    read, digest, sums = reader(entry.dtype), hashlib.sha256(), _Sums()
    for chunk in whole_elements(elements(entry), itemsize(entry.dtype)):
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
