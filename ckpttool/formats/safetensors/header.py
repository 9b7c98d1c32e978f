"""The header of a safetensors file: read, checked completely, and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpttool.core.checkpoint import Span, Storage, TensorEntry, contiguous_stride, own_storages
from ckpttool.core.dtypes import BY_SAFETENSORS, itemsize
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass, many_objects
from ckpttool.formats import strict_json
from ckpttool.io.files import opened
from ckpttool.io.ranges import read_span

_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_TENSOR = re.compile(
    r'"([^"\\\x00-\x1f]*)": ?'
    rf'(\{{"dtype": ?"[A-Z0-9_]+", ?"shape": ?\[(?:{_SIZE}(?:, ?{_SIZE})*)?\]), ?'
    rf'"data_offsets": ?\[({_SIZE}), ?({_SIZE})\]\}}(, ?|\}}[ \t\n\r]*\Z)'
)
# A member of the outermost object, however it is written: its name, and an object without objects in it.
_MEMBER = re.compile(
    r'("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(?:null|\{[^"{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}]*)*\})\s*[,}]\s*'
)

# The values that all tensors of one dtype and shape have in common: dtype, shape, stride, bytes.
Alike = tuple[str, tuple[int, ...], tuple[int, ...], int]


def plain_tensors(
    text: str, at: int, data: Span, alike: Callable[[str], Alike | None]
) -> dict[str, TensorEntry] | None:
    """Return the tensors of the header `text` from character `at` on, by name; None if it must be read strictly.

    `data` are the bytes after the header. `alike` reads the text of a dtype and shape
    (``{"dtype":"F32","shape":[2]}``), and returns None if these are not a plain dtype and a size.
    """
    known: dict[str, Alike | None] = {}
    found: dict[str, TensorEntry] = {}
    start, path, in_order, reach, count = data.offset, data.path, True, 0, 0
    last = ""
    for match in _TENSOR.finditer(text, at):
        if match.start() != at:
            return None
        at = match.end()
        key, described, begins, ends, last = match.groups()
        if described not in known:
            known[described] = alike(described + "}")
        likeness = known[described]
        begin, end = int(begins), int(ends)
        if likeness is None or end - begin != likeness[3]:
            return None
        dtype, shape, stride, length = likeness
        found[key] = TensorEntry(key, dtype, shape, stride, 0, Storage(Span(path, start + begin, length)))
        count += 1
        in_order = in_order and begin == reach
        reach = end
    if at != len(text) or not last.startswith("}") or len(found) != count:
        return None
    in_order = in_order and reach == data.length
    return found if in_order or _is_covered(found.values(), data) else None


def _is_covered(tensors: Iterable[TensorEntry], data: Span) -> bool:
    """Return whether the tensors, in some order, cover `data` without gaps and overlaps."""
    reach = data.offset
    for offset, length in sorted((span.offset, span.length) for entry in tensors if (span := entry.span)):
        if offset != reach:
            return False
        reach += length
    return reach == data.offset + data.length


def quoted_names(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each tensor's quoted name in the text of a header that was read, in the header's order."""
    quoted = strict_json.quoted(METADATA)
    for match in _MEMBER.finditer(text, text.index("{") + 1):
        name = match[1]
        if name != quoted and ("\\" not in name or strict_json.loads(name) != METADATA):
            yield match.span(1)


METADATA = "__metadata__"
MAX_HEADER = 100_000_000  # bytes; the reference reader's limit
PACKED = "packed"  # layout of tensors whose elements are smaller than a byte

_U64_MAX = 2**64 - 1
_FIELDS = {"dtype", "shape", "data_offsets"}
PAIRS_IN_A_BYTE = "F4"  # counts single elements, where torch's float4_e2m1fn_x2 counts bytes of two
_SUB_BYTE = {"F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6)}
_BITS = {code: row.itemsize * 8 for code, row in BY_SAFETENSORS.items()} | {
    c: bits for c, (_, bits) in _SUB_BYTE.items()
}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Payload of a tensor whose elements are smaller than a byte: dtype code and shape in the header, its bytes."""

    code: str
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of a file; `Checkpoint.container` of this format.

    `place` is its text without the padding, `data` are all bytes after it; `tensors` are in the header's order.
    """

    place: Span
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    data: Span

    @property
    def length(self) -> int:
        """Its length in bytes, with the padding."""
        return self.data.offset - self.place.offset

    def read(self) -> str:
        """Return its text, which is not kept: that of many tensors is long, and only a rename needs it."""
        return read_span(self.place).decode()


def read_header(path: str) -> Header:
    """Return the header of the file. Raises `CkptError` if the file is not valid; `problems` lists every tensor that is
    described wrongly.
    """
    text, place, data = _read_text(path)
    with many_objects():
        metadata, tensors = _as_usual(text, data) or _strictly(text, data)
    return Header(place, metadata, tensors, data)


_Content = tuple[dict[str, str], tuple[TensorEntry, ...]]  # the metadata, and the tensors in the header's order


def _as_usual(text: str, data: Span) -> _Content | None:
    """Read a header that is spelled as writers spell it; return None for any other, which must be read strictly."""
    start, at = f'{{"{METADATA}":', 0
    metadata: Any = {}
    if text.startswith(start):
        try:
            metadata, at = strict_json.value_at(text, len(start))
        except ValueError:
            return None
    if not _is_metadata(metadata) or (at and not text.startswith(",", at)):
        return None
    tensors = plain_tensors(text, at + 1, data, _alike)
    return None if tensors is None or METADATA in tensors else (metadata, tuple(tensors.values()))


def _strictly(text: str, data: Span) -> _Content:
    """Read any header. Raises `CkptError` with everything that is wrong with it."""
    try:
        infos = strict_json.loads(text)
    except ValueError as error:
        raise _invalid(data.path, f"its header is not valid JSON: {error}") from error
    metadata = infos.pop(METADATA, {})
    if metadata is None:
        metadata = {}
    if not _is_metadata(metadata):
        raise _invalid(data.path, f"{METADATA} is not a dict of strings")
    _check(data.path, infos, data.length)
    return metadata, tuple(_entry(data.path, data.offset, name, info) for name, info in infos.items())


def _alike(described: str) -> Alike | None:
    """Return the values that all tensors of one dtype and shape have in common; None if they must be read strictly."""
    info = strict_json.loads(described)
    code, shape = info["dtype"], tuple(info["shape"])
    bits = _bits(shape, _BITS.get(code, _U64_MAX + 1))
    if code not in BY_SAFETENSORS or code in _SUB_BYTE or bits is None:
        return None
    return BY_SAFETENSORS[code].name, shape, contiguous_stride(shape), bits // 8


def _read_text(path: str) -> tuple[str, Span, Span]:
    """Return the header's text without padding, its place, and the bytes after it."""
    with opened(path) as file:
        nbytes = file.size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise _invalid(path, f"{nbytes} bytes are too few for a safetensors file")
        if length > MAX_HEADER:
            raise _invalid(path, f"its header claims {length} bytes, the format allows {MAX_HEADER}")
        if 8 + length > nbytes:
            raise _invalid(path, f"the file is truncated: the header alone needs {8 + length} bytes, it has {nbytes}")
        raw = file.read(length)
    if not raw.startswith(b"{"):
        raise _invalid(path, "its header does not begin with '{'")
    raw = raw.rstrip(b" \t\n\r")
    try:
        return raw.decode(), Span(path, 8, len(raw)), Span(path, 8 + length, nbytes - 8 - length)
    except UnicodeDecodeError as error:
        raise _invalid(path, f"its header is not UTF-8: {error.reason} at byte {error.start}") from error


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _check(path: str, infos: Mapping[str, Any], data_length: int) -> None:
    """Run every check of the reference reader: on each entry, then that the entries cover the data without gaps."""
    problems = [Problem(problem, name) for name, info in infos.items() if (problem := _problem(info))]
    end = 0
    if not problems:
        for (begin, next_end), name in sorted((info["data_offsets"], name) for name, info in infos.items()):
            if begin != end:
                problems.append(
                    Problem(f"its data begins at byte {begin}, the data before it ends at byte {end}", name)
                )
            end = next_end
    if problems:
        raise _invalid(path, "its header describes tensors wrongly", problems)
    if end > data_length:
        raise _invalid(path, f"the file is truncated: its tensors need {end} bytes, {data_length} are there")
    if end < data_length:
        raise _invalid(path, f"{data_length - end} bytes after the last tensor belong to none")


def _problem(info: Any) -> str | None:
    """Return the problem with one tensor's entry of the header, or None."""
    if not isinstance(info, dict) or not info.keys() >= _FIELDS:
        return "not an object with dtype, shape and data_offsets"
    code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        return f"unknown dtype {code!r:.40}"
    if not _are_sizes(shape):
        return "its shape is not a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return "its data_offsets are not a begin and an end"
    if len(info) > 3 and any(isinstance(value, (dict, list)) for name, value in info.items() if name not in _FIELDS):
        return "it has fields that the format does not know"
    bits = _bits(shape, _BITS[code])
    if bits is None:
        return "its size overflows"
    if bits != (offsets[1] - offsets[0]) * 8:
        return f"{code} of shape {shape} is {bits / 8:.15g} bytes, its data_offsets hold {offsets[1] - offsets[0]}"
    return None


def _bits(shape: Sequence[int], per_element: int) -> int | None:
    """Return the size in bits, or None if a product on the way overflows 64 bits, even if a later size is 0."""
    bits = 1
    for factor in (*shape, per_element):
        bits *= factor
        if bits > _U64_MAX:
            return None
    return bits


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= _U64_MAX)


def _entry(path: str, data_start: int, key: str, info: Mapping[str, Any]) -> TensorEntry:
    code, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    span = Span(path, data_start + begin, end - begin)
    if code in _SUB_BYTE:
        if code != PAIRS_IN_A_BYTE or shape[-1] % 2:
            name = _SUB_BYTE[code][0]
            return TensorEntry(key, name, shape, (), 0, None, PACKED, span.length, Packed(code, shape, span))
        shape = (*shape[:-1], shape[-1] // 2)
    return TensorEntry(key, BY_SAFETENSORS[code].name, shape, contiguous_stride(shape), 0, Storage(span))


def _invalid(path: str, problem: str, problems: Sequence[Problem] = ()) -> CkptError:
    return CkptError(
        f"{path} is not a valid safetensors file: {problem}",
        hint="download or copy it again, or write it again with safetensors.torch.save_file",
        problems=problems,
    )


def overlapping(tensors: Iterable[TensorEntry]) -> dict[str, str]:
    """Return for each key an earlier key whose bytes it shares, completely or in part; empty if no two share bytes.

    Of many that share the same bytes not every pair is named. A view with gaps counts with all bytes from its first
    element to its last.
    """
    tensors = tuple(tensors)
    if own_storages(tensors):
        return {}
    by_storage: dict[int, list[tuple[int, int, tuple[int, str]]]] = {}
    for position, entry in enumerate(tensors):
        if entry.storage is not None and entry.numel:
            begin, end = (index * itemsize(entry.dtype) for index in (entry.offset, entry.end))
            by_storage.setdefault(id(entry.storage), []).append((begin, end, (position, entry.key)))
    found: list[tuple[int, str, str]] = []
    for group in by_storage.values():
        group.sort()
        _, reach, widest = group[0]
        for begin, end, current in group[1:]:
            if begin < reach:
                (_, first), (position, key) = sorted([widest, current])
                found.append((position, key, first))
            if end > reach:
                reach, widest = end, current
    return {key: other for _, key, other in sorted(found)}
