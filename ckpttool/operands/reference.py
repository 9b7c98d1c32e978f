"""Read an output with the libraries that will load it: an independent proof for ``--verify``.

safetensors reads safetensors files, `torch.load` with `weights_only` torch files,
torch.distributed.checkpoint its folders. ckpttool's own reader only lists the tensors to compare.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpttool.core.checkpoint import Checkpoint, Section, Span, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import dotted, first_line
from ckpttool.evaluate import torch_eval

_BATCH = 1 << 28  # bytes of tensors that are held at a time
# the dotted path of an entry, the entry, and what the library reads for it
Pair = tuple[str, TensorEntry, Any]


def compare(checkpoint: Checkpoint, path: str) -> tuple[str, int] | None:
    """Compare the local file or folder, whose index is `checkpoint`, with what its library reads.

    Return the library with its version, and the bytes of the tensors that it read. Return None if
    there is no such library for the format, or if it refuses the file (objects that `weights_only`
    does not allow). Raise `CkptError`, with every tensor that it reads differently or not at all.
    """
    read = {"safetensors": _safetensors, "torch_zip": _torch, "dcp": _dcp}.get(checkpoint.format)
    if read is None:
        return None
    nbytes, problems = 0, list[Problem]()
    library, pairs = read(checkpoint, path)
    for place, entry, value in pairs:
        problem = _problem(entry, value)
        if problem is None:
            nbytes += entry.nbytes
        else:
            problems.append(Problem(problem, place))
    if problems:
        raise CkptError(
            f"{library} reads {path} differently",
            hint="do not use it, and report this",
            problems=problems,
        )
    return (library, nbytes) if library else None


def _problem(entry: TensorEntry, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return "is not a tensor there"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != entry.dtype or tuple(value.shape) != entry.shape:
        return f"is {dtype} {list(value.shape)} there"
    if not torch_eval.same_bits(torch_eval.load(entry), value):
        return "has other bytes there"
    return None


def _dense(checkpoint: Checkpoint) -> Iterator[tuple[Section, TensorEntry]]:
    for section in checkpoint.sections:
        for entry in section.tensors:
            if entry.storage is not None:
                yield section, entry


def _safetensors(checkpoint: Checkpoint, path: str) -> tuple[str, Iterator[Pair]]:
    import safetensors

    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for _, entry in _dense(checkpoint):
        assert entry.storage is not None
        if isinstance(entry.storage.data, Span):
            by_file[entry.storage.data.path].append(entry)

    def pairs() -> Iterator[Pair]:
        for file, entries in by_file.items():
            with safetensors.safe_open(file, framework="pt") as opened:
                keys = set(opened.keys())
                for entry in entries:
                    value = opened.get_tensor(entry.key) if entry.key in keys else None
                    yield entry.key, entry, value

    return f"safetensors {safetensors.__version__}", pairs()


def _torch(checkpoint: Checkpoint, path: str) -> tuple[str, Iterator[Pair]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # an object that it does not allow, or a tensor that it cannot map
        return "", iter(())
    return f"torch {torch.__version__}", _pairs_in(content, checkpoint)


def _pairs_in(content: Any, checkpoint: Checkpoint) -> Iterator[Pair]:
    """Yield the tensors of the index with what is at their places in the loaded object."""
    tree: Any = getattr(checkpoint.container, "tree", None)
    for section in checkpoint.sections:
        steps = () if tree is None else tree.places[section.path].steps
        if any(kind != "item" for kind, _ in steps):
            continue  # a part of an object, which indexing does not reach
        inside = _at(content, [step for _, step in steps])
        for keys, entry in _leaves_of(section):
            yield dotted(section.path, entry.key), entry, _at(inside, keys)


Leaf = tuple[tuple[Any, ...], TensorEntry]  # the keys from the section to a tensor, and the tensor


def _leaves_of(section: Section) -> Iterator[Leaf]:
    if section.kind == "state_dict":
        for entry in section.tensors:
            if entry.storage is not None:
                yield (entry.key,), entry
    elif section.kind == "optimizer" and section.mapping is not None:
        yield from _leaves(section.mapping)


def _leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    if isinstance(value, TensorEntry):
        if value.storage is not None:
            yield way, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*way, key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, (*way, index))


def _at(value: Any, way: Sequence[Any]) -> Any:
    try:
        for key in way:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _dcp(checkpoint: Checkpoint, path: str) -> tuple[str, Iterator[Pair]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = str(Path(path).parent) if Path(path).name == ".metadata" else path
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = set()
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            tensors.add(name)

    def pairs() -> Iterator[Pair]:
        batch: dict[str, TensorEntry] = {}
        nbytes = 0
        for section, entry in _dense(checkpoint):
            name = dotted(section.path, entry.key)
            if name in tensors:
                batch[name] = entry
                nbytes += entry.nbytes
            if nbytes >= _BATCH:
                yield from _loaded(folder, batch)
                batch, nbytes = {}, 0
        yield from _loaded(folder, batch)

    return f"torch {torch.__version__}", pairs()


def _loaded(folder: str, batch: Mapping[str, TensorEntry]) -> Iterator[Pair]:
    import torch.distributed.checkpoint as dcp

    state = {}
    for name, entry in batch.items():
        state[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Not `dcp.load`: it has `no_dist`, without which all ranks must take part, only since
            # torch 2.7.
            dcp.load_state_dict(state, dcp.FileSystemReader(folder), no_dist=True)
    except Exception as error:
        message = f"torch {torch.__version__} cannot load {folder}: {first_line(error)}"
        raise CkptError(message, hint="do not use it, and report this") from error
    for name, entry in batch.items():
        yield name, entry, state[name]
