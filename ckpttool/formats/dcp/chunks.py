"""The bytes of a tensor that was saved in chunks: found in their files when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckpttool import dtypes
from ckpttool.checkpoint import Checkpoint, Lazy, Part, Span
from ckpttool.errors import CkptError
from ckpttool.evaluate.boxes import Box, assembled
from ckpttool.evaluate.compare import elements
from ckpttool.formats.containers.zip_archive import read_archive
from ckpttool.formats.dcp.items import Chunk, Place, TensorItem
from ckpttool.formats.torch import zip_file as torch_zip
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
