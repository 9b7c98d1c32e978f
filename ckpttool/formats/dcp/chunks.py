"""The bytes of tensors saved in chunks, in `.distcp` and safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint, Lazy, Part, Span, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import some
from ckpttool.evaluate.chunks import Box, assembled
from ckpttool.evaluate.compare import elements, same_values
from ckpttool.formats import strict_json
from ckpttool.formats.dcp.metadata import BoxOf, BytesItem, Chunk, Metadata, Place, TensorItem, cover_problem
from ckpttool.formats.safetensors import single as safetensors
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.zip_read import read_archive
from ckpttool.io.files import look_ahead, opened
from ckpttool.io.paths import join


def tensor_data(folder: str, key: str, item: TensorItem) -> Lazy:
    """The bytes of the tensor in row-major order. Producing them raises `CkptError` where a chunk is not what
    ``.metadata`` says of it."""
    return Lazy(item.nbytes, lambda: _produce(folder, key, item))


def _produce(folder: str, key: str, item: TensorItem) -> Iterator[Part]:
    chunks = [chunk for chunk in item.chunks if prod(chunk.sizes)]
    boxes = [Box(chunk.offsets, chunk.sizes, _located(folder, key, item.dtype, chunk)) for chunk in chunks]
    return assembled(item.shape, dtypes.itemsize(item.dtype), boxes)


# Finding a chunk in its file


def saved(folder: str, place: Place) -> Checkpoint:
    """The index of what torch.save wrote at `place`."""
    path = join(folder, place.name)
    return torch_zip.read_from(read_archive(path, place.offset, place.length), path)


def _located(folder: str, key: str, dtype: str, chunk: Chunk) -> Span | bytes:
    """Where the chunk's elements lie in row-major order; the bytes themselves where they have another order."""
    path = join(folder, chunk.place.name)
    if chunk.place.raw:
        return Span(path, chunk.place.offset, chunk.place.length)
    found = [entry for section in saved(folder, chunk.place).sections for entry in section.tensors]
    entry = found[0] if len(found) == 1 else None
    if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.sizes) or entry.storage is None:
        have = "no tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CkptError(
            f"{path}: {have} where .metadata says that a chunk of {key} lies ({dtype} {list(chunk.sizes)})",
            hint="the folder holds files of two checkpoints, or is damaged: copy it again",
        )
    if entry.span is not None:
        return entry.span
    return b"".join(map(bytes, elements(entry)))


_INFO = "DCP_SHARDING_INFO"
_HEAD = 9  # bytes that tell a safetensors file: the length of its header, and how that begins
_OBJECTS = 1 << 17  # bytes that are fetched with these, where objects are there
_AHEAD = 64  # files of which they are fetched side by side


def located(folder: str, metadata: Metadata) -> Metadata:
    """`metadata` with the places of those chunks that lie in safetensors files: ``.metadata`` does not know them."""
    files: dict[str, dict[str, TensorEntry] | None] = {}
    heads = _heads(metadata)
    for number, name in enumerate(heads):
        if number % _AHEAD == 0:
            look_ahead({join(folder, own): heads[own] for own in islice(heads, number, number + _AHEAD)})
        files[name] = _tensors(join(folder, name))
    items = dict(metadata.items)
    for key, item in metadata.items.items():
        if isinstance(item, TensorItem) and any(files[chunk.place.name] is not None for chunk in item.chunks):
            chunks = tuple(_moved(folder, key, item, chunk, files[chunk.place.name]) for chunk in item.chunks)
            items[key] = replace(item, chunks=chunks)
    return replace(metadata, items=items)


def _heads(metadata: Metadata) -> dict[str, int]:
    """The data files that hold tensors, with the bytes of each to begin with: objects stand before its tensors."""
    tensors = [item for item in metadata.items.values() if isinstance(item, TensorItem)]
    heads = dict.fromkeys((chunk.place.name for item in tensors for chunk in item.chunks), _HEAD)
    for place in (item.place for item in metadata.items.values() if isinstance(item, BytesItem)):
        if place.name in heads and (end := place.offset + place.length) <= _OBJECTS:
            heads[place.name] = max(heads[place.name], end)
    return heads


def _tensors(path: str) -> dict[str, TensorEntry] | None:
    """The tensors of a safetensors file; None for any other file."""
    with opened(path) as file:
        head = file.read(_HEAD)
    if head[8:] != b"{":
        return None
    return {entry.key: entry for entry in safetensors.read(path).sections[0].tensors}


def _moved(folder: str, key: str, item: TensorItem, chunk: Chunk, tensors: Mapping[str, TensorEntry] | None) -> Chunk:
    if tensors is None:
        return chunk
    entry = tensors.get(key)
    if entry is None or entry.span is None or (entry.dtype, entry.shape) != (item.dtype, chunk.sizes):
        raise CkptError(
            f"{join(folder, chunk.place.name)} has no chunk of {key} as .metadata says",
            hint="the folder holds files of two checkpoints, or is damaged: copy it again",
        )
    return Chunk(chunk.offsets, chunk.sizes, _place(chunk.place.name, entry.span))


def _place(name: str, span: Span) -> Place:
    return Place(name, span.offset, span.length, raw=True)


def read_shards(folder: str, names: list[str]) -> Metadata:
    """The chunks of these safetensors files, put together by the offsets that each notes in its ``__metadata__``.

    Raises `CkptError`, all problems at once, where they do not make up whole tensors.
    """
    chunks: dict[str, dict[BoxOf, Chunk]] = {}
    copies: dict[tuple[str, BoxOf], TensorEntry] = {}  # what several ranks have is one chunk
    dtypes: dict[str, set[str]] = {}
    problems: list[Problem] = []
    for name in names:
        shard = safetensors.read(join(folder, name))
        offsets = _offsets(shard)
        for entry in shard.sections[0].tensors:
            at = offsets.get(entry.key)
            if at is None or len(at) != len(entry.shape) or entry.span is None:
                problems.append(Problem(f"{name} does not say where in the tensor it lies", entry.key))
                continue
            if not same_values(copies.setdefault((entry.key, (at, entry.shape)), entry), entry):
                problems.append(Problem(f"{name} has other values at {list(at)} than another rank's shard", entry.key))
            chunks.setdefault(entry.key, {})[at, entry.shape] = Chunk(at, entry.shape, _place(name, entry.span))
            dtypes.setdefault(entry.key, set()).add(entry.dtype)
    items = {key: _whole(min(dtypes[key]), list(parts.values())) for key, parts in chunks.items()}
    problems += [
        Problem(f"chunks of {' and '.join(sorted(found))}", key) for key, found in dtypes.items() if len(found) > 1
    ]
    problems += [
        Problem(problem, key)
        for key, item in items.items()
        if (problem := cover_problem(item.shape, [(chunk.offsets, chunk.sizes) for chunk in item.chunks]))
    ]
    if problems:
        raise CkptError(
            f"{folder}: its shards do not make up whole tensors",
            hint="copy the shards of all ranks into one folder",
            problems=problems,
        )
    return Metadata(items, {key: (key,) for key in items})


def ranks_remark(names: Sequence[str]) -> str:
    """Whose shards these files are, by their numbers: nothing in the files says how many there were."""
    ranks = sorted({int(name.split("-")[1]) for name in names})
    without = [str(rank) for rank in range(1, ranks[-1]) if rank not in ranks]
    gap = f", none of {some(without, 8)}" if without else ""
    return f"put together of shards up to that of rank {ranks[-1]}{gap}: no file says whether there were others"


def _offsets(shard: Checkpoint) -> dict[str, tuple[int, ...]]:
    try:
        info: Any = strict_json.loads(shard.metadata.get(_INFO, "{}"))
    except ValueError:
        return {}
    found = {}
    for key, value in info.items() if isinstance(info, dict) else ():
        offsets = value.get("saved_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets):
            found[key] = tuple(offsets)
    return found


def _whole(dtype: str, chunks: list[Chunk]) -> TensorItem:
    ends = [[at + size for at, size in zip(chunk.offsets, chunk.sizes)] for chunk in chunks]
    dims = min(len(end) for end in ends)
    return TensorItem(dtype, tuple(max(end[dim] for end in ends) for dim in range(dims)), tuple(chunks))
