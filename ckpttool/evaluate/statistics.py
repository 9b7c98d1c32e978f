"""Describe and hash the values of tensors, streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import ExtraEntry, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.values import dataclass
from ckpttool.evaluate import index_eval
from ckpttool.evaluate.compare import digest, elements
from ckpttool.evaluate.numpy_eval import reader, whole_elements

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


class Digests:
    """Hashes of the values over one section's keys, each read when it is first asked for."""

    def __init__(self, entries: Mapping[str, TensorEntry | ExtraEntry]) -> None:
        self._entries = entries
        self._known: dict[Expression, bytes | None] = {}

    def __call__(self, value: Expression) -> bytes | None:
        """The hash of the value's bytes in row-major order; None where it is no dense tensor."""
        if value not in self._known:
            entry = made(value, self._entries)
            self._known[value] = None if entry is None else digest(entry)
        return self._known[value]


def made(value: Expression, entries: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry | None:
    """The tensor that has the value, computed when it is read; None for a key that holds no dense tensor."""
    found = index_eval.entry_of("", value, entries)
    if found is None and not isinstance(value, Ref):
        from ckpttool.evaluate import torch_eval

        found = torch_eval.entry_of("", value, entries)
    return found
