"""safetensors: an 8-byte length, a JSON header, the tensors' bytes. Reader and writer, without
torch or safetensors.

If only names changed, the new header is the source's own text with the names replaced, and the data
is one span. A rename and its inverse give back the same bytes if the length of the source's header
is a multiple of 8, it is padded with spaces only, and its names have no needless escapes (as in
files of the reference writer). Everything else is laid out as the reference writer does it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

from ckpttool.containers import strict_json
from ckpttool.core.checkpoint import (
    Checkpoint,
    Lazy,
    Payload,
    Section,
    Span,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import BY_NAME, BY_SAFETENSORS, itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.strides import Shape, contiguous_stride
from ckpttool.core.tables import positions
from ckpttool.core.text import Note
from ckpttool.core.values import dataclass, many_objects
from ckpttool.formats import torchao
from ckpttool.io.files import opened
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import BLOCK, LEAST, Edited, Piece, read_span

METADATA = "__metadata__"
BLANKS = b" \t\n\r"  # a header may be padded with them on both sides
MAX_HEADER = 100_000_000  # bytes; the reference reader's limit
PACKED = "packed"  # layout of tensors whose elements are smaller than a byte

# Bytes of a header at most: for a character of a name, and for the rest of a tensor's entry.
_MOST_ESCAPED, _MOST_OF_ENTRY = 6, 200
_U64_MAX = 2**64 - 1
_FIELDS = {"dtype", "shape", "data_offsets"}
PAIRS_IN_A_BYTE = "F4"  # counts single elements; torch's float4_e2m1fn_x2 counts bytes of two
_SUB_BYTE = {
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6),
}
_BITS = {code: row.itemsize * 8 for code, row in BY_SAFETENSORS.items()} | {
    c: bits for c, (_, bits) in _SUB_BYTE.items()
}

_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_TENSOR = re.compile(
    r'"([^"\\\x00-\x1f]*)": ?'
    rf'(\{{"dtype": ?"[A-Z0-9_]+", ?"shape": ?\[(?:{_SIZE}(?:, ?{_SIZE})*)?\]), ?'
    rf'"data_offsets": ?\[({_SIZE}), ?({_SIZE})\]\}}(, ?|\}}[ \t\n\r]*\Z)'
)
# A member of the outermost object, however it is written: its name, and an object without objects
# in it.
_MEMBER = re.compile(
    r'("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(?:null|\{[^"{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}]*)*\})\s*[,}]\s*'
)


@dataclass(frozen=True, slots=True, eq=False)
class PackedElements:
    """Payload of a tensor whose elements are smaller than a byte: dtype code and shape in the
    header, its bytes.
    """

    code: str
    shape: Shape
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of a file; `Checkpoint.container` of this format.

    `place` is its text without the padding, `data` are all bytes after it; `tensors` are in the
    header's order.
    """

    place: Span
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    data: Span

    @property
    def length(self) -> int:
        return self.data.offset - 8

    def read(self) -> str:
        """Return its text, which is not kept: it may be long, and only a rename needs it."""
        return read_span(self.place).decode()


class _TensorLayout(NamedTuple):
    """What all tensors of one dtype and shape have in common."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


def _read_layout(described: str) -> _TensorLayout | None:
    """Read a dtype and shape (``{"dtype":"F32","shape":[2]}``); None if they must be read
    strictly.
    """
    info = strict_json.loads(described)
    code, shape = info["dtype"], tuple(info["shape"])
    if code not in BY_SAFETENSORS or code in _SUB_BYTE:
        return None
    bits = _bits(shape, _BITS.get(code, _U64_MAX + 1))
    if bits is None:
        return None
    return _TensorLayout(BY_SAFETENSORS[code].name, shape, contiguous_stride(shape), bits // 8)


def _plain_tensors(text: str, at: int, data: Span) -> dict[str, TensorEntry] | None:
    """Return the tensors of the header `text` from character `at` on, by name; None if it must be
    read strictly.

    `data` are the bytes after the header.
    """
    # `"dtype":…,"shape":…` as it is written -> what it means: most tensors repeat one
    read_before: dict[str, _TensorLayout | None] = {}
    tensors: dict[str, TensorEntry] = {}
    start, path = data.offset, data.path
    in_order = True
    reach = count = 0
    last = ""
    for match in _TENSOR.finditer(text, at):
        if match.start() != at:
            return None
        at = match.end()
        key, described, begins, ends, last = match.groups()
        if described not in read_before:
            read_before[described] = _read_layout(described + "}")
        common = read_before[described]
        begin, end = int(begins), int(ends)
        if common is None or end - begin != common.nbytes:
            return None
        dtype, shape, stride, length = common
        storage = Storage(Span(path, start + begin, length))
        tensors[key] = TensorEntry(key, dtype, shape, stride, 0, storage)
        count += 1
        in_order = in_order and begin == reach
        reach = end
    if at != len(text) or not last.startswith("}") or len(tensors) != count:
        return None
    if in_order and reach == data.length:
        return tensors
    return tensors if _is_covered(tensors.values(), data) else None


def _is_covered(tensors: Iterable[TensorEntry], data: Span) -> bool:
    """Return whether the tensors, in some order, cover `data` without gaps and overlaps."""
    places = []
    for entry in tensors:
        span = entry.span
        if span is not None:
            places.append((span.offset, span.length))
    reach = data.offset
    for offset, length in sorted(places):
        if offset != reach:
            return False
        reach += length
    return reach == data.offset + data.length


def quoted_names(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each tensor's quoted name in the text of a header that was read, in
    the header's order.
    """
    quoted = strict_json.quoted(METADATA)
    for match in _MEMBER.finditer(text, text.index("{") + 1):
        name = match[1]
        if name != quoted and ("\\" not in name or strict_json.loads(name) != METADATA):
            yield match.span(1)


# the metadata, and the tensors in the header's order
_Content = tuple[dict[str, str], tuple[TensorEntry, ...]]


def _read_common_header(text: str, data: Span) -> _Content | None:
    """Read a header that is spelled as writers spell it; return None for any other, which must be
    read strictly.
    """
    start, at = f'{{"{METADATA}":', 0
    metadata: Any = {}
    if text.startswith(start):
        try:
            metadata, at = strict_json.value_at(text, len(start))
        except ValueError:
            return None
    if not _is_metadata(metadata) or (at and not text.startswith(",", at)):
        return None
    tensors = _plain_tensors(text, at + 1, data)
    return None if tensors is None or METADATA in tensors else (metadata, tuple(tensors.values()))


def _read_any_header(text: str, data: Span) -> _Content:
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
    return metadata, tuple(_entry(data, name, info) for name, info in infos.items())


def _read_text(path: str) -> tuple[str, Span, Span]:
    """Return the header's text without padding, its place, and the bytes after it."""
    with opened(path) as file:
        nbytes = file.size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise _invalid(path, f"{nbytes} bytes are too few for a safetensors file")
        if length > MAX_HEADER:
            raise _invalid(
                path, f"its header claims {length} bytes, the format allows {MAX_HEADER}"
            )
        if 8 + length > nbytes:
            raise _invalid(
                path,
                f"the file is truncated: the header alone needs {8 + length}"
                f" bytes, it has {nbytes}",
            )
        raw = file.read(length)
    begin = length - len(raw.lstrip(BLANKS))
    raw = raw.strip(BLANKS)
    if not raw.startswith(b"{"):
        raise _invalid(path, "its header does not begin with '{'")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _invalid(
            path, f"its header is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    data_start = 8 + length
    return text, Span(path, 8 + begin, len(raw)), Span(path, data_start, nbytes - data_start)


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _check(path: str, infos: Mapping[str, Any], data_length: int) -> None:
    """Run every check of the reference reader: on each entry, then that the entries cover the data
    without gaps.
    """
    problems = []
    for name, info in infos.items():
        problem = _problem(info)
        if problem is not None:
            problems.append(Problem(problem, name))
    end = 0
    if not problems:
        places = sorted((info["data_offsets"], name) for name, info in infos.items())
        for (begin, next_end), name in places:
            if begin != end:
                text = f"its data begins at byte {begin}, the data before it ends at byte {end}"
                problems.append(Problem(text, name))
            end = next_end
    if problems:
        raise _invalid(path, "its header describes tensors wrongly", problems)
    if end > data_length:
        raise _invalid(
            path, f"the file is truncated: its tensors need {end} bytes, {data_length} are there"
        )
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
    if any(isinstance(info[name], (dict, list)) for name in info.keys() - _FIELDS):
        return "it has fields that the format does not know"
    bits = _bits(shape, _BITS[code])
    if bits is None:
        return "its size overflows"
    if bits != (offsets[1] - offsets[0]) * 8:
        return (
            f"{code} of shape {shape} is {bits / 8:.15g} bytes, its data_offsets hold"
            f" {offsets[1] - offsets[0]}"
        )
    return None


def _bits(shape: Sequence[int], per_element: int) -> int | None:
    """Return the size in bits, or None if a product on the way overflows 64 bits, even if a later
    size is 0.
    """
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


def _entry(data: Span, key: str, info: Mapping[str, Any]) -> TensorEntry:
    """Return the tensor that the header describes; `data` are the bytes after the header."""
    code, shape = info["dtype"], tuple(info["shape"])
    begin, end = info["data_offsets"]
    span = Span(data.path, data.offset + begin, end - begin)
    if code == PAIRS_IN_A_BYTE and not shape[-1] % 2:
        shape = (*shape[:-1], shape[-1] // 2)
    elif code in _SUB_BYTE:
        name, _ = _SUB_BYTE[code]
        payload = PackedElements(code, shape, span)
        return TensorEntry(key, name, shape, (), 0, None, PACKED, span.length, payload)
    return in_row_major(key, BY_SAFETENSORS[code].name, shape, Storage(span))


def _invalid(path: str, problem: str, problems: Sequence[Problem] = ()) -> CkptError:
    return CkptError(
        f"{path} is not a valid safetensors file: {problem}",
        hint="download or copy it again, or write it again with safetensors.torch.save_file",
        problems=problems,
    )


def overlapping(tensors: Iterable[TensorEntry]) -> dict[str, str]:
    """Return for each key an earlier key whose bytes it shares, completely or in part; empty if no
    two share bytes.

    Of many that share the same bytes not every pair is named. A view with gaps counts with all
    bytes from its first element to its last.
    """
    tensors = tuple(tensors)
    # begin and end in bytes, and the position in the section
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for position, entry in enumerate(tensors):
        if entry.storage is not None and entry.numel:
            width = itemsize(entry.dtype)
            place = (entry.offset * width, entry.end * width, position)
            by_storage.setdefault(id(entry.storage), []).append(place)
    pairs: list[tuple[int, str]] = []  # the position of a tensor, and the key of an earlier one
    for places in by_storage.values():
        places.sort()
        _, reach, widest = places[0]
        for begin, end, position in places[1:]:
            if begin < reach:
                earlier, later = sorted((widest, position))
                pairs.append((later, tensors[earlier].key))
            if end > reach:
                reach, widest = end, position
    return {tensors[position].key: key for position, key in sorted(pairs)}


FORMAT = "safetensors"
# in the metadata of the files that ranks of torch.distributed.checkpoint write: the places of the
# chunks in the tensors
OFFSETS = "DCP_SHARDING_INFO"

# The reference writer's order, by ascending alignment; the data is laid out from the last to the
# first.
_ORDER = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ
    I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64
""".split()  # noqa: SIM905 - one line of the reference a line here
_RANK = positions(_ORDER)


# Reading


def read(path: str) -> Checkpoint:
    """Return the index of the file: one section, its tensors in the header's order. Reads the
    header only.

    Raises `CkptError` if the file is not valid; `problems` lists every tensor that is described
    wrongly.
    """
    text, place, data = _read_text(path)
    with many_objects():
        metadata, tensors = _read_common_header(text, data) or _read_any_header(text, data)
    header = Header(place, metadata, tensors, data)
    tensors = torchao.marked(tensors, metadata)
    return Checkpoint(
        path,
        FORMAT,
        data.offset + data.length,
        (Section("", "state_dict", tensors),),
        metadata=metadata,
        container=header,
        notes=(*torchao.remark(tensors), *_of_one_rank(path, metadata)),
    )


def _of_one_rank(path: str, metadata: Mapping[str, str]) -> Iterator[Note]:
    """Yield a note on a file of torch.distributed.checkpoint with chunks of tensors."""
    if OFFSETS in metadata:
        text = (
            f"{name_of(path)} holds one rank's chunks of the tensors, and they may be incomplete:"
            " name the folder of all ranks"
        )
        yield Note(text, "one-rank")


# Writing


def layout(checkpoint: Checkpoint) -> list[Piece]:
    """Return the file of the checkpoint. Raises `Refused`, with every problem, if the format cannot
    hold it.
    """
    checkpoint = _checked(checkpoint)
    tensors = checkpoint.sections[0].tensors
    header = checkpoint.container
    if isinstance(header, Header) and checkpoint.metadata == header.metadata:
        raw = _rename(header, tensors)
        if raw is not None:
            return _with_data(header, raw, _length(header, raw))
    return _layout_afresh(tensors, checkpoint.metadata)


def check_holds(checkpoint: Checkpoint, kind: str = FORMAT) -> bool:
    """Raise `Refused` as `layout` does. False if only `layout` tells: the header may be too
    long.
    """
    section = _checked(checkpoint).sections[0]
    text = "".join((*section.keys, *checkpoint.metadata, *checkpoint.metadata.values()))
    _encoded(text)
    return _MOST_ESCAPED * len(text) + _MOST_OF_ENTRY * len(section.tensors) < MAX_HEADER


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as it is laid out. Raises `Refused`, with every problem, if the format
    cannot hold it.
    """
    unfit = problems(checkpoint)
    if unfit:
        raise Refused(
            "safetensors cannot hold this checkpoint",
            hint="write a torch file (OUT ending in .pt)" + torchao.way(checkpoint),
            problems=unfit,
        )
    return torchao.settled(checkpoint)


def layout_in_place(checkpoint: Checkpoint) -> Edited | None:
    """Return the file with its data at the same place; None if more than names and metadata
    changed.

    Raises `Refused` if the new header does not fit into the place of the old one.
    """
    header = checkpoint.container
    if not isinstance(header, Header) or problems(checkpoint):
        return None
    checkpoint = torchao.settled(checkpoint)
    raw = _rename(header, checkpoint.sections[0].tensors)
    if raw is None:
        return None
    if checkpoint.metadata != header.metadata:
        metadata = {METADATA: dict(checkpoint.metadata)} if checkpoint.metadata else {}
        infos = strict_json.loads(raw.decode())
        infos.pop(METADATA, None)
        raw = _encoded(strict_json.dumps(metadata | infos))
    if len(raw) > header.length:
        raise Refused(
            f"{checkpoint.source} cannot be edited in place: its header has room for"
            f" {header.length:,} bytes, and the "
            f"new names need {len(raw):,}",
            hint="write another file: -o OUT",
        )
    return Edited(_with_data(header, raw, header.length), bytes(read_span(header.place)), raw)


def problems(checkpoint: Checkpoint) -> list[Problem]:
    """List everything that the format cannot hold: sections, extras, dtypes, layouts, shared
    bytes.
    """
    if not checkpoint.sections:
        return [Problem("holds no state dict", checkpoint.source)]
    if len(checkpoint.sections) > 1 or checkpoint.sections[0].path:
        text = "only one state dict, at the root, fits into a file"
        return [Problem(text, section.path) for section in checkpoint.sections]
    section = checkpoint.sections[0]
    unfit = [Problem("not a tensor", extra.key) for extra in section.extras]
    for entry in section.tensors:
        problem = tensor_problem(entry)
        if problem is not None:
            unfit.append(Problem(problem, entry.key))
    count = Counter(entry.key for entry in section.tensors)
    unfit += [Problem("the name is there twice", key) for key in count if count[key] > 1]
    if not section.has_own_storages():
        for key, other in overlapping(section.tensors).items():
            unfit.append(Problem(f"shares its bytes with {other}", key))
    return unfit


def tensor_problem(entry: TensorEntry) -> str | None:
    """Return why the format cannot hold this tensor, or None."""
    if entry.key == METADATA:
        return "the name is taken by the format"
    if isinstance(entry.payload, PackedElements):
        return None
    if entry.storage is None:
        problem = f"a {entry.layout} tensor has no place in the format"
        lost = entry.payload.lost(entry) if isinstance(entry.payload, Payload) else ""
        return f"{problem}: {lost} would be lost" if lost else problem
    if BY_NAME[entry.dtype].safetensors is None:
        return f"the format has no dtype {entry.dtype}"
    if entry.dtype == "float4_e2m1fn_x2" and not entry.shape:
        return f"the format has no {entry.dtype} without dimensions"
    if not entry.is_contiguous:
        return (
            f"a view of shape {list(entry.shape)} and stride {list(entry.stride)}, not contiguous"
        )
    if isinstance(entry.storage.data, Lazy) and (
        entry.offset or entry.nbytes != entry.storage.nbytes
    ):
        return "a part of a storage that is still to be computed"
    return None


def _rename(header: Header, tensors: Sequence[TensorEntry]) -> bytes | None:
    """Return the source's header with new names, or None if more than the names changed."""
    ordered = _in_order_of(header.tensors, tensors)
    if ordered is None:
        return None
    text = header.read()
    renamed = BytesIO()
    at = 0
    for (start, end), old, new in zip(quoted_names(text), header.tensors, ordered):
        if new.key != old.key:
            renamed.write(_encoded(text[at:start] + strict_json.quoted(new.key)))
            at = end
    renamed.write(text[at:].encode())
    return renamed.getvalue()


def _in_order_of(
    source: Sequence[TensorEntry], tensors: Sequence[TensorEntry]
) -> Sequence[TensorEntry] | None:
    """Return the tensors in the order of the same ones in `source`; None if they are not the same
    tensors.
    """
    if len(tensors) != len(source):
        return None
    data = list(map(identity, source))
    if list(map(identity, tensors)) != data:
        by_data = dict(zip(map(identity, tensors), tensors))
        if not by_data.keys() >= set(data):
            return None
        tensors = [by_data[key] for key in data]
    for new, old in zip(tensors, source):
        if new is not old and new.geometry != old.geometry:
            return None
    return tensors


def identity(entry: TensorEntry) -> int:
    """Return what is the same for two entries of the same data, whatever their names."""
    return id(entry.payload if entry.storage is None else entry.storage)


def _with_data(header: Header, raw: bytes, length: int) -> list[Piece]:
    return [piece for piece in (_header(raw, length), Piece(header.data)) if piece.nbytes]


def _length(header: Header, raw: bytes) -> int:
    """Return the length for the header `raw`, with as many spare bytes as `header` had, if the data
    stays the same.

    Large data keeps its place within a block, so that files can share it; the spare bytes are then
    whole blocks. A rename and its inverse restore the length.
    """
    needed, had = _aligned(len(raw)), _aligned(header.place.length)
    spare = max(0, header.length - had)
    if header.data.length < LEAST or header.length % 8:
        return needed + spare // 8 * 8
    least = needed + spare // BLOCK * BLOCK
    return least + (header.length - least) % BLOCK


def _aligned(length: int) -> int:
    return -(-length // 8) * 8


def _layout_afresh(tensors: Sequence[TensorEntry], metadata: Any) -> list[Piece]:
    """Return the header and the data as the reference writer lays them out."""
    coded = [(*_code_and_shape(entry), entry) for entry in tensors]
    coded.sort(key=lambda item: (-_RANK[item[0]], item[2].key))
    # text at once: a million dicts would take more memory than all else
    infos: list[str] = []
    if metadata:
        infos.append(strict_json.dumps({METADATA: dict(metadata)})[1:-1])
    pieces: list[Piece] = []
    end = 0
    for code, shape, entry in coded:
        begin, end = end, end + entry.nbytes
        sizes, key = ",".join(map(str, shape)), strict_json.quoted(entry.key)
        infos.append(f'{key}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
        if entry.nbytes:
            pieces.append(Piece(_data_of(entry)))
    members = ",".join(infos)
    raw = _encoded("{" + members + "}")
    return [_header(raw, _aligned(len(raw))), *pieces]


def _code_and_shape(entry: TensorEntry) -> tuple[str, Shape]:
    """Return the dtype code and the shape for the header."""
    if isinstance(entry.payload, PackedElements):
        return entry.payload.code, entry.payload.shape
    code = BY_NAME[entry.dtype].safetensors or ""
    if code == PAIRS_IN_A_BYTE:
        return code, (*entry.shape[:-1], entry.shape[-1] * 2)
    return code, entry.shape


def _data_of(entry: TensorEntry) -> Span | Lazy | bytes:
    if isinstance(entry.payload, PackedElements):
        return entry.payload.span
    span = entry.span
    if span is not None:
        return span
    assert entry.storage is not None  # `tensor_problem` checks it
    return entry.storage.data


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise Refused(
            f"a name holds {bad!r}, which is not text", hint="rename it with --rule 'FROM => TO'"
        ) from error


def _header(raw: bytes, length: int) -> Piece:
    """Return the file's first bytes: the header, padded with spaces to `length` bytes."""
    if length > MAX_HEADER:
        raise Refused(
            f"the header would be {length} bytes long, safetensors allows {MAX_HEADER}",
            hint="write a torch file (OUT ending in .pt)",
        )
    return Piece(b"".join((struct.pack("<Q", length), raw, b" " * (length - len(raw)))))
