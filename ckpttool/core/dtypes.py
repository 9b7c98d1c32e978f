"""The table of dtypes: torch's name, bytes per element, and each format's name for it."""

from __future__ import annotations

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A row of the table. `name` is torch's without ``torch.``; None where a format has no word for
    the dtype.

    `safetensors` is the header's code, `storage` the pickled storage class in ``torch``, `pt2` the
    number in ``torch._export.serde.schema.ScalarType``.
    """

    name: str
    itemsize: int
    safetensors: str | None = None
    storage: str | None = None
    pt2: int | None = None


TABLE = (
    DType("float64", 8, "F64", "DoubleStorage", 8),
    DType("float32", 4, "F32", "FloatStorage", 7),
    DType("float16", 2, "F16", "HalfStorage", 6),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", 13),
    DType("int64", 8, "I64", "LongStorage", 5),
    DType("int32", 4, "I32", "IntStorage", 4),
    DType("int16", 2, "I16", "ShortStorage", 3),
    DType("int8", 1, "I8", "CharStorage", 2),
    DType("uint8", 1, "U8", "ByteStorage", 1),
    DType("uint16", 2, "U16", None, 28),
    DType("uint32", 4, "U32", None, 34),
    DType("uint64", 8, "U64", None, 35),
    DType("bool", 1, "BOOL", "BoolStorage", 12),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, 29),
    DType("float8_e5m2", 1, "F8_E5M2", None, 30),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None, 31),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None, 32),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None, 33),
    DType("float4_e2m1fn_x2", 1, "F4"),
    DType("complex32", 4, None, None, 9),
    DType("bcomplex32", 4),  # pairs of bfloat16, since torch 2.15
    DType("complex64", 8, "C64", "ComplexFloatStorage", 10),
    DType("complex128", 16, None, "ComplexDoubleStorage", 11),
    DType("qint8", 1, None, "QInt8Storage"),
    DType("quint8", 1, None, "QUInt8Storage"),
    DType("qint32", 4, None, "QInt32Storage"),
    DType("quint4x2", 1, None, "QUInt4x2Storage"),
    DType("quint2x4", 1, None, "QUInt2x4Storage"),
    *(DType(f"uint{bits}", 1) for bits in range(1, 8)),
    *(DType(f"int{bits}", 1) for bits in range(1, 8)),
    DType("bits8", 1),
    DType("bits16", 2),
    DType("bits1x8", 1),
    DType("bits2x4", 1),
    DType("bits4x2", 1),
)

BY_NAME = {row.name: row for row in TABLE}
BY_SAFETENSORS = {row.safetensors: row for row in TABLE if row.safetensors}
BY_STORAGE = {row.storage: row for row in TABLE if row.storage}
BY_PT2 = {row.pt2: row for row in TABLE if row.pt2 is not None}
# of tensors that have scales, by torch.ao.quantization
QUANTIZED = frozenset(row.name for row in TABLE if (row.storage or "").startswith("Q"))
# torch converts from and to these
PLAIN = frozenset(row.name for row in TABLE if row.pt2 is not None)


def itemsize(name: str) -> int:
    """Bytes of one element of the dtype. Raises `CkptError` for a name that the table does not
    know.
    """
    try:
        return BY_NAME[name].itemsize
    except KeyError:
        raise CkptError(
            f"unknown dtype {name!r}",
            hint="this file needs a newer ckpttool: pip install -U ckpttool",
        ) from None
