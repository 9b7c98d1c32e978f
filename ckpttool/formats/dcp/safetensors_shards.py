"""Safetensors files of torch.distributed.checkpoint (``HuggingFaceStorageWriter``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Span, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import some
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import strict_json
from ckpttool.formats.chunks import Chunk, cover_problem
from ckpttool.formats.dcp.metadata import BytesItem, Metadata, Place, TensorItem
from ckpttool.formats.safetensors import single as safetensors
from ckpttool.io.files import look_ahead, opened
from ckpttool.io.paths import join

_INFO = "DCP_SHARDING_INFO"
_HEAD = 9  # bytes that show a safetensors file: the length of its header, and the header's first character
_OBJECTS = 1 << 17  # bytes of objects to fetch together with the head
_AHEAD = 64  # files whose heads are fetched concurrently


def locate_chunks(folder: str, metadata: Metadata) -> Metadata:
    """Return `metadata` with the places of chunks in safetensors files, which ``.metadata`` does not give."""
    tensors = [item for item in metadata.items.values() if isinstance(item, TensorItem)]
    heads = dict.fromkeys((place.name for item in tensors for place in item.places), _HEAD)
    for item in metadata.items.values():
        if isinstance(item, BytesItem) and item.place.name in heads:  # objects precede the tensors of a file
            end = item.place.offset + item.place.length
            if end <= _OBJECTS:
                heads[item.place.name] = max(heads[item.place.name], end)
    names = list(heads)
    files: dict[str, dict[str, TensorEntry]] = {}  # the safetensors files among them
    for number, name in enumerate(names):
        if number % _AHEAD == 0:
            look_ahead({join(folder, one): heads[one] for one in names[number : number + _AHEAD]})
        path = join(folder, name)
        with opened(path) as file:
            head = file.read(_HEAD)
        if head[8:] == b"{":
            files[name] = {entry.key: entry for entry in safetensors.read(path).sections[0].tensors}
    items = dict(metadata.items)
    for key, item in metadata.items.items():
        if not isinstance(item, TensorItem) or not any(place.name in files for place in item.places):
            continue
        chunks = []
        for chunk, place in item.chunks:
            if place.name in files:
                entry = files[place.name].get(key)
                if entry is None or entry.span is None or (entry.dtype, entry.shape) != (item.dtype, chunk.sizes):
                    raise CkptError(
                        f"{join(folder, place.name)} has no chunk of {key} as .metadata describes it",
                        hint="the folder holds files of two checkpoints, or is damaged: copy it again",
                    )
                place = _place(place.name, entry.span)
            chunks.append((chunk, place))
        items[key] = replace(item, chunks=tuple(chunks))
    return replace(metadata, items=items)


def _place(name: str, span: Span) -> Place:
    return Place(name, span.offset, span.length, raw=True)


def read_shards(folder: str, names: Sequence[str]) -> tuple[Metadata, str]:
    """Assemble these safetensors files by the offsets in their ``__metadata__``; also return a note.

    Raises `CkptError`, all problems at once, if the chunks do not cover the tensors.
    """
    chunks: dict[str, dict[Chunk, TensorEntry]] = {}  # a chunk that several ranks saved is one chunk
    places: dict[str, dict[Chunk, Place]] = {}
    problems: list[Problem] = []
    for name in names:
        shard = safetensors.read(join(folder, name))
        offsets = _offsets(shard.metadata.get(_INFO, "{}"))
        for entry in shard.sections[0].tensors:
            at = offsets.get(entry.key)
            if at is None or len(at) != len(entry.shape) or entry.span is None:
                problems.append(Problem(f"{name} does not give the offsets of its chunk", entry.key))
                continue
            chunk = Chunk(at, entry.shape)
            first = chunks.setdefault(entry.key, {}).setdefault(chunk, entry)
            if not same_values(first, entry):
                problems.append(Problem(f"{name} has other values at {list(at)} than another rank's shard", entry.key))
            places.setdefault(entry.key, {})[chunk] = _place(name, entry.span)
    items = {}
    for key, entries in chunks.items():
        dtypes = sorted({entry.dtype for entry in entries.values()})
        if len(dtypes) > 1:
            problems.append(Problem(f"chunks of {' and '.join(dtypes)}", key))
        ends = [[at + size for at, size in zip(chunk.offsets, chunk.sizes)] for chunk in entries]
        shape = tuple(max(dim) for dim in zip(*ends))
        problem = cover_problem(shape, entries)
        problems += [] if problem is None else [Problem(problem, key)]
        items[key] = TensorItem(dtypes[0], shape, tuple(places[key].items()))
    if problems:
        raise CkptError(
            f"{folder}: its shards do not cover the tensors",
            hint="copy the shards of all ranks into one folder",
            problems=problems,
        )
    ranks = sorted({int(name.split("-")[1]) for name in names})
    missing = [str(rank) for rank in range(1, ranks[-1]) if rank not in ranks]
    gap = f", without {some(missing, 8)}" if missing else ""
    note = f"assembled from the shards up to rank {ranks[-1]}{gap}: no file says how many ranks there were"
    return Metadata(items, {key: (key,) for key in items}), note


def _offsets(text: str) -> dict[str, tuple[int, ...]]:
    try:
        info: Any = strict_json.loads(text)
    except ValueError:
        return {}
    offsets = {}
    for key, value in info.items() if isinstance(info, dict) else ():
        saved = value.get("saved_offsets") if isinstance(value, dict) else None
        if isinstance(saved, list) and all(type(offset) is int and 0 <= offset < 1 << 62 for offset in saved):
            offsets[key] = tuple(saved)
    return offsets
