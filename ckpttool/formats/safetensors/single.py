"""safetensors: an 8-byte length, a JSON header, the tensors' bytes. Reader and writer, without torch or safetensors.

If only names changed, the new header is the source's own text with the names replaced, and the data is one span. A
rename and its inverse give back the same bytes if the length of the source's header is a multiple of 8, it is padded
with spaces only, and its names have no needless escapes (as in files of the reference writer). Everything else is laid
out as the reference writer does it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Composite, Lazy, Section, TensorEntry
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import Problem, Refused
from ckpttool.formats import strict_json
from ckpttool.formats.safetensors import torchao
from ckpttool.formats.safetensors.header import (
    MAX_HEADER,
    METADATA,
    PAIRS_IN_A_BYTE,
    Header,
    Packed,
    overlapping,
    quoted_names,
    read_header,
)
from ckpttool.io.pieces import BLOCK, LEAST, Edited, Piece
from ckpttool.io.ranges import read_span

FORMAT = "safetensors"

# The reference writer's order, by ascending alignment; the data is laid out from the last to the first.
_ORDER = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ
    I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64
""".split()  # noqa: SIM905 - one line of the reference a line here
_RANK = {code: rank for rank, code in enumerate(_ORDER)}


# Reading


def read(path: str) -> Checkpoint:
    """Return the index of the file: one section, its tensors in the header's order. Reads the header only.

    Raises `CkptError` if the file is not valid; `problems` lists every tensor that is described wrongly.
    """
    header = read_header(path)
    tensors = torchao.marked(header.tensors, header.metadata)
    nbytes = header.data.offset + header.data.length
    return Checkpoint(
        path,
        FORMAT,
        nbytes,
        (Section("", "state_dict", tensors),),
        metadata=header.metadata,
        container=header,
        notes=torchao.remark(tensors),
    )


# Writing


def layout(checkpoint: Checkpoint) -> list[Piece]:
    """Return the file of the checkpoint. Raises `Refused`, with every problem, if the format cannot hold it."""
    unfit = problems(checkpoint)
    if unfit:
        raise Refused(
            "safetensors cannot hold this checkpoint",
            hint="write a torch file (OUT ending in .pt)" + torchao.way(checkpoint),
            problems=unfit,
        )
    checkpoint = torchao.settled(checkpoint)
    tensors = checkpoint.sections[0].tensors
    header = checkpoint.container
    if isinstance(header, Header) and checkpoint.metadata == header.metadata:
        raw = _rename(header, tensors)
        if raw is not None:
            return [_header(raw, _length(header, raw)), *([Piece(header.data)] if header.data.length else [])]
    return _layout_afresh(tensors, checkpoint.metadata)


def layout_in_place(checkpoint: Checkpoint) -> Edited | None:
    """Return the file with its data at the same place, or moved by whole blocks if the header needs room.

    None if more than names and metadata changed.
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
        infos = {name: info for name, info in strict_json.loads(raw.decode()).items() if name != METADATA}
        raw = _encoded(strict_json.dumps(metadata | infos))
    more = max(0, len(raw) - header.length)
    pieces = [
        _header(raw, header.length + -(-more // BLOCK) * BLOCK),
        *([Piece(header.data)] if header.data.length else []),
    ]
    return Edited(pieces, bytes(read_span(header.place)), raw)


def problems(checkpoint: Checkpoint) -> list[Problem]:
    """List everything that the format cannot hold: sections, extras, dtypes, layouts, shared bytes."""
    if not checkpoint.sections:
        return [Problem("holds no state dict", checkpoint.source)]
    if len(checkpoint.sections) > 1 or checkpoint.sections[0].path:
        return [Problem("only one state dict, at the root, fits into a file", s.path) for s in checkpoint.sections]
    section = checkpoint.sections[0]
    found = [Problem("not a tensor", extra.key) for extra in section.extras]
    found += [Problem(problem, entry.key) for entry in section.tensors if (problem := tensor_problem(entry))]
    found += [
        Problem("the name is there twice", key) for key, n in Counter(e.key for e in section.tensors).items() if n > 1
    ]
    found += [Problem(f"shares its bytes with {other}", key) for key, other in overlapping(section.tensors).items()]
    return found


def tensor_problem(entry: TensorEntry) -> str | None:
    """Return why the format cannot hold this tensor, or None."""
    if entry.key == METADATA:
        return "the name is taken by the format"
    if isinstance(entry.payload, Packed):
        return None
    if entry.storage is None:
        lost = f": {entry.payload.lost(entry)} would be lost" if isinstance(entry.payload, Composite) else ""
        return f"a {entry.layout} tensor has no place in the format{lost}"
    if BY_NAME[entry.dtype].safetensors is None:
        return f"the format has no dtype {entry.dtype}"
    if entry.dtype == "float4_e2m1fn_x2" and not entry.shape:
        return f"the format has no {entry.dtype} without dimensions"
    if not entry.is_contiguous:
        return f"a view of shape {list(entry.shape)} and stride {list(entry.stride)}, not contiguous"
    if isinstance(entry.storage.data, Lazy) and (entry.offset or entry.nbytes != entry.storage.nbytes):
        return "a part of a storage that is still to be computed"
    return None


def _rename(header: Header, tensors: Sequence[TensorEntry]) -> bytes | None:
    """Return the source's header with new names, or None if more than the names changed."""
    ordered = _in_order_of(header.tensors, tensors)
    if ordered is None:
        return None
    text, renamed, at = header.read(), BytesIO(), 0
    for (start, end), old, new in zip(quoted_names(text), header.tensors, ordered):
        if new.key != old.key:
            renamed.write(_encoded(text[at:start] + strict_json.quoted(new.key)))
            at = end
    renamed.write(text[at:].encode())
    return renamed.getvalue()


def _in_order_of(source: Sequence[TensorEntry], tensors: Sequence[TensorEntry]) -> Sequence[TensorEntry] | None:
    """Return the tensors in the order of the same ones in `source`; None if they are not the same tensors."""

    def data_of(entry: TensorEntry) -> object:
        return entry.payload if entry.storage is None else entry.storage

    if len(tensors) != len(source):
        return None
    if not all(data_of(new) is data_of(old) for new, old in zip(tensors, source)):
        by_data = {id(data_of(entry)): entry for entry in tensors}
        tensors = [by_data[key] for key in (id(data_of(old)) for old in source) if key in by_data]
    same = all(new is old or new.geometry == old.geometry for new, old in zip(tensors, source))
    return tensors if len(tensors) == len(source) and same else None


def _length(header: Header, raw: bytes) -> int:
    """Return the length for the header `raw`, with as many spare bytes as `header` had, if the data stays the same.

    Large data keeps its place within a block, so that files can share it; the spare bytes are then whole blocks. Both
    ways a rename and its inverse give the same length.
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
    coded: list[tuple[str, Sequence[int], TensorEntry]] = []
    for entry in tensors:
        if isinstance(entry.payload, Packed):
            coded.append((entry.payload.code, entry.payload.shape, entry))
        else:
            code = BY_NAME[entry.dtype].safetensors or ""
            shape = (*entry.shape[:-1], entry.shape[-1] * 2) if code == PAIRS_IN_A_BYTE else entry.shape
            coded.append((code, shape, entry))
    coded.sort(key=lambda item: (-_RANK[item[0]], item[2].key))
    infos = [strict_json.dumps({METADATA: dict(metadata)})[1:-1]] if metadata else []
    end, pieces = 0, []
    for code, dims, entry in coded:  # text at once: a million dicts would take more memory than all else
        begin, end = end, end + entry.nbytes
        sizes, key = ",".join(map(str, dims)), strict_json.quoted(entry.key)
        infos.append(f'{key}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
        data = entry.payload.span if isinstance(entry.payload, Packed) else entry.span
        if data is None:
            assert entry.storage is not None  # `tensor_problem` checks it
            pieces.append(Piece(entry.storage.data))
        else:
            pieces.append(Piece(data))
    raw = _encoded(f"{{{','.join(infos)}}}")
    return [_header(raw, _aligned(len(raw))), *(piece for piece in pieces if piece.nbytes)]


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise Refused(f"a name holds {bad!r}, which is not text", hint="rename it with --rule 'FROM => TO'") from error


def _header(raw: bytes, length: int) -> Piece:
    """Return the file's first bytes: the header, padded with spaces to `length` bytes."""
    if length > MAX_HEADER:
        raise Refused(
            f"the header would be {length} bytes long, safetensors allows {MAX_HEADER}",
            hint="write a torch file (OUT ending in .pt)",
        )
    return Piece(b"".join((struct.pack("<Q", length), raw, b" " * (length - len(raw)))))
