"""safetensors: an 8-byte length, a JSON header, the tensors' bytes. Reader and writer, without torch or safetensors.

The reader makes all checks of the reference reader and is stricter in five ways: the header begins with ``{`` (the
format's own rule), no name stands twice anywhere in it, an entry is an object, its dtype a string, and fields that the
format does not know hold no lists or objects.

The writer has two ways. Where only names changed, the header is the source's own text with the names in it replaced,
and the data is one span; a rename and its inverse give back the same bytes as long as the source's header has a length
that is a multiple of 8, ends in no blanks but spaces, and spells the names without needless escapes (the reference
writer's files do). Everything else is laid out afresh, as the reference writer does it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.checkpoint import Checkpoint, Composite, Lazy, Section, Span, Storage, TensorEntry, contiguous_stride
from ckpttool.dtypes import BY_NAME, BY_SAFETENSORS
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.formats.containers import json_text
from ckpttool.formats.containers.many_objects import many_objects
from ckpttool.formats.safetensors import members
from ckpttool.formats.safetensors.overlap import overlapping
from ckpttool.io.files import opened
from ckpttool.io.pieces import BLOCK, LEAST, Edited, Piece

FORMAT = "safetensors"
METADATA = "__metadata__"
MAX_HEADER = 100_000_000  # bytes; the reference reader's limit
PACKED = "packed"  # layout of tensors whose elements are smaller than a byte

_U64_MAX = 2**64 - 1
_FIELDS = {"dtype", "shape", "data_offsets"}
_PAIRS_IN_A_BYTE = "F4"  # counts single elements, where torch's float4_e2m1fn_x2 counts bytes of two
_SUB_BYTE = {"F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6)}
# The reference writer's order, by ascending alignment; the data is laid out from the last to the first.
_ORDER = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ
    I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64
""".split()  # noqa: SIM905 - one line of the reference a line here
_BITS = {code: row.itemsize * 8 for code, row in BY_SAFETENSORS.items()} | {
    c: bits for c, (_, bits) in _SUB_BYTE.items()
}
_RANK = {code: rank for rank, code in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Payload of a tensor whose elements are smaller than a byte: dtype code and shape in the header, its bytes."""

    code: str
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header as it stands in the file, without the blanks at its end; `Checkpoint.container` of this format.

    `length` is its length in bytes with them, `data` are all bytes after it; `tensors` are in the header's order.
    """

    text: str
    length: int
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    data: Span

    def names(self) -> Iterator[tuple[int, int]]:
        """The places of the tensors' quoted names in `text`, in the order of `tensors`."""
        return members.names(self.text, METADATA)


# Reading


def read(path: str) -> Checkpoint:
    """The index of the file: one section, its tensors in the header's order. Reads the header, no tensor.

    Raises `CkptError` for what is no valid safetensors file; `problems` lists every tensor that is described wrongly.
    """
    text, length, nbytes = _read_header(path)
    data = Span(path, 8 + length, nbytes - 8 - length)
    with many_objects():
        metadata, tensors = _as_usual(text, data) or _strictly(text, data)
    header = Header(text.rstrip(" \t\n\r"), length, metadata, tensors, data)
    section = Section("", "state_dict", tensors)
    return Checkpoint(path, FORMAT, nbytes, (section,), metadata=metadata, container=header)


_Content = tuple[dict[str, str], tuple[TensorEntry, ...]]  # the metadata, and the tensors in the header's order


def _as_usual(text: str, data: Span) -> _Content | None:
    """What the header describes, where it is spelled as writers spell it; None where it has to be read strictly."""
    metadata, at = members.first(text, METADATA)
    if not _is_metadata(metadata) or (at and not text.startswith(",", at)):
        return None
    tensors = members.tensors(text, at + 1, data, _alike)
    return None if tensors is None or METADATA in {tensor.key for tensor in tensors} else (metadata, tensors)


def _strictly(text: str, data: Span) -> _Content:
    """The same of any header. Raises `CkptError` with all that is wrong with it."""
    try:
        infos = json_text.loads(text)
    except ValueError as error:
        raise _invalid(data.path, f"its header is not valid JSON: {error}") from error
    metadata = infos.pop(METADATA, {})
    if metadata is None:
        metadata = {}
    if not _is_metadata(metadata):
        raise _invalid(data.path, f"{METADATA} holds something else than strings under names")
    _check(data.path, infos, data.length)
    return metadata, tuple(_entry(data.path, data.offset, name, info) for name, info in infos.items())


def _alike(described: str) -> members.Alike | None:
    """What all tensors of one dtype and shape have in common; None where the header has to be read strictly."""
    info = json_text.loads(described)
    code, shape = info["dtype"], tuple(info["shape"])
    bits = _bits(shape, _BITS.get(code, _U64_MAX + 1))
    if code not in BY_SAFETENSORS or code in _SUB_BYTE or bits is None:
        return None
    return BY_SAFETENSORS[code].name, shape, contiguous_stride(shape), bits // 8


def _read_header(path: str) -> tuple[str, int, int]:
    """The header's text, its length in bytes, and the size of the file in bytes."""
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
    if len(raw) < length or not raw.startswith(b"{"):
        raise _invalid(path, "its header does not begin with '{'")
    try:
        return raw.decode(), length, nbytes
    except UnicodeDecodeError as error:
        raise _invalid(path, f"its header is not UTF-8: {error.reason} at byte {error.start}") from error


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _check(path: str, infos: Mapping[str, Any], data_length: int) -> None:
    """Every check of the reference reader: each entry by itself, then that the entries cover the data without gaps."""
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
    """What is wrong with one tensor's entry of the header, by itself."""
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
    """Size in bits, or None where a product on the way overflows 64 bits, also if a later size is 0."""
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


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _entry(path: str, data_start: int, key: str, info: Mapping[str, Any]) -> TensorEntry:
    code, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    span = Span(path, data_start + begin, end - begin)
    if code in _SUB_BYTE:
        halves = code == _PAIRS_IN_A_BYTE and shape and shape[-1] % 2 == 0
        if not halves:
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


# Writing


def layout(checkpoint: Checkpoint) -> list[Piece]:
    """The file that holds the checkpoint, as pieces.

    Raises `Refused`, with every problem, where the format cannot hold it.
    """
    found = problems(checkpoint)
    if found:
        raise Refused(
            "safetensors cannot hold this checkpoint",
            hint="write a torch file (OUT ending in .pt), or drop these entries with --drop PATTERN",
            problems=found,
        )
    tensors = checkpoint.sections[0].tensors
    header = checkpoint.container
    if isinstance(header, Header) and checkpoint.metadata == header.metadata:
        renamed = _rename(header, tensors)
        if renamed is not None:
            raw = _encoded(renamed)
            return [_header(raw, _length(header, raw)), *_with_bytes([Piece(header.data)])]
    return _layout_afresh(tensors, checkpoint.metadata)


def layout_in_place(checkpoint: Checkpoint) -> Edited | None:
    """The file with all data where it lies in the one that was read, or moved by whole blocks if the header needs room.

    None where more than names and metadata changed.
    """
    header = checkpoint.container
    if not isinstance(header, Header) or problems(checkpoint):
        return None
    text = _rename(header, checkpoint.sections[0].tensors)
    if text is None:
        return None
    if checkpoint.metadata != header.metadata:
        metadata = {METADATA: dict(checkpoint.metadata)} if checkpoint.metadata else {}
        infos = {name: info for name, info in json_text.loads(text).items() if name != METADATA}
        text = json_text.dumps(metadata | infos)
    raw = _encoded(text)
    more = max(0, len(raw) - header.length)
    pieces = [_header(raw, header.length + -(-more // BLOCK) * BLOCK), *_with_bytes([Piece(header.data)])]
    return Edited(pieces, header.text.encode(), raw)


def problems(checkpoint: Checkpoint) -> list[Problem]:
    """Everything in the checkpoint that a file has no place for: sections, extras, dtypes, layouts, shared bytes."""
    if not checkpoint.sections:
        return [Problem("holds no state dict", checkpoint.source)]
    if len(checkpoint.sections) > 1 or checkpoint.sections[0].path:
        return [Problem("only one state dict, at the root, fits into a file", s.path) for s in checkpoint.sections]
    section = checkpoint.sections[0]
    found = [Problem("not a tensor", extra.key) for extra in section.extras]
    found += [Problem(problem, entry.key) for entry in section.tensors if (problem := tensor_problem(entry))]
    found += [Problem("the name stands twice", key) for key in _repeated(entry.key for entry in section.tensors)]
    found += [Problem(f"shares its bytes with {other}", key) for key, other in overlapping(section.tensors).items()]
    return found


def tensor_problem(entry: TensorEntry) -> str | None:
    """Why the format cannot hold this tensor, or None where it can."""
    if entry.key == METADATA:
        return "the name is taken by the format"
    if isinstance(entry.payload, Packed):
        return None
    if entry.storage is None or entry.layout != "strided":
        lost = f": {entry.payload.lost(entry)} would be lost" if isinstance(entry.payload, Composite) else ""
        return f"a {entry.layout} tensor has no place in the format{lost}"
    if entry.dtype not in BY_NAME or BY_NAME[entry.dtype].safetensors is None:
        return f"the format has no dtype {entry.dtype}"
    if entry.dtype == "float4_e2m1fn_x2" and not entry.shape:
        return f"the format has no {entry.dtype} without dimensions"
    if not entry.is_contiguous:
        return f"a view of shape {list(entry.shape)} and stride {list(entry.stride)}, not contiguous"
    if isinstance(entry.storage.data, Lazy) and (entry.offset or entry.nbytes != entry.storage.nbytes):
        return "a part of a storage that is still to be computed"
    return None


def _rename(header: Header, tensors: Sequence[TensorEntry]) -> str | None:
    """The source's header with new names, or None where more than the names changed."""
    by_bytes = {id(_bytes_of(entry)): entry for entry in tensors}
    if len(tensors) != len(header.tensors) or len(by_bytes) != len(tensors):
        return None
    parts: list[str] = []
    at = 0
    for (start, end), old in zip(header.names(), header.tensors):
        new = by_bytes.get(id(_bytes_of(old)))
        if new is None or (new is not old and new.geometry != old.geometry):
            return None
        if new.key != old.key:
            parts += [header.text[at:start], json_text.quoted(new.key)]
            at = end
    return "".join([*parts, header.text[at:]])


def _bytes_of(entry: TensorEntry) -> object:
    return entry.payload if entry.storage is None else entry.storage


def _length(header: Header, raw: bytes) -> int:
    """How long the header `raw` of a file is to be whose data is that of `header`: with as much room as that had.

    Large data keeps its place within a block, so that files can share it; room is then a number of whole blocks. Both
    ways a rename and its inverse give the same length.
    """
    needed, had = _aligned(len(raw)), _aligned(len(header.text.encode()))
    spare = max(0, header.length - had)
    if header.data.length < LEAST or header.length % 8:
        return needed + spare // 8 * 8
    least = needed + spare // BLOCK * BLOCK
    return least + (header.length - least) % BLOCK


def _aligned(length: int) -> int:
    return -(-length // 8) * 8


def _layout_afresh(tensors: Sequence[TensorEntry], metadata: Any) -> list[Piece]:
    coded = [(*_code_and_shape(entry), entry) for entry in tensors]
    coded.sort(key=lambda item: (-_RANK[item[0]], item[2].key))
    infos: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for code, shape, entry in coded:
        begin, end = end, end + entry.nbytes
        infos[entry.key] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    raw = _encoded(json_text.dumps(infos))
    return [_header(raw, _aligned(len(raw))), *_with_bytes(_data(entry) for _, _, entry in coded)]


def _code_and_shape(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    if isinstance(entry.payload, Packed):
        return entry.payload.code, entry.payload.shape
    code = BY_NAME[entry.dtype].safetensors or ""
    return code, (*entry.shape[:-1], entry.shape[-1] * 2) if code == _PAIRS_IN_A_BYTE else entry.shape


def _data(entry: TensorEntry) -> Piece:
    if isinstance(entry.payload, Packed):
        return Piece(entry.payload.span)
    if entry.span is not None:
        return Piece(entry.span)
    assert entry.storage is not None  # tensor_problem has seen to it
    return Piece(entry.storage.data)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise Refused(f"a name holds {bad!r}, which is no text", hint="rename it with --rule 'FROM => TO'") from error


def _header(raw: bytes, length: int) -> Piece:
    """The file's first bytes: the header, with blanks behind it up to `length` bytes."""
    if length > MAX_HEADER:
        raise Refused(
            f"the header would be {length} bytes long, safetensors allows {MAX_HEADER}",
            hint="write a torch file (OUT ending in .pt)",
        )
    return Piece(struct.pack("<Q", length) + raw.ljust(length))


def _with_bytes(data: Iterable[Piece]) -> list[Piece]:
    return [piece for piece in data if piece.nbytes]
