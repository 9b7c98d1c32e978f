"""Sharded checkpoints in the layout of Hugging Face: an index and shards."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import (
    AnyEntry,
    Checkpoint,
    ExtraEntry,
    Section,
    TensorEntry,
    Unreached,
)
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.tables import by_key
from ckpttool.core.text import Note, plural, shell, some
from ckpttool.core.values import dataclass, many_objects
from ckpttool.formats import safetensors, torch_zip, torchao
from ckpttool.formats.folders import shards_of, stem_of_shards
from ckpttool.formats.hf_index import read_index
from ckpttool.formats.registry import format_named, recognize
from ckpttool.io.files import is_file, look_ahead
from ckpttool.io.paths import is_inside, is_url, parent, safe_path
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import Edited, Files, Piece, Pieces

SAFETENSORS, BIN = "sharded", "sharded_bin"  # names in the table of formats
DEFAULT_SIZE = 5 * 10**9  # bytes; the default of transformers up to version 4

_KINDS = {"safetensors": SAFETENSORS, "torch_zip": BIN}
_LAYOUT = {
    SAFETENSORS: ("model", ".safetensors", safetensors.layout),
    BIN: ("pytorch_model", ".bin", torch_zip.layout),
}
_AHEAD = 64  # shards whose headers are fetched concurrently
# Estimates in bytes: a header's entry without its name and offsets, the rest of a header, the
# shortest header that is worth a request, and the header of another format.
_AN_ENTRY, _METADATA, _HEAD, _UNKNOWN = 60, 64, 4096, 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The container of this format: the name of the index, its text and value, and each shard's
    index by name. `is_stale`: the index is missing, or does not say of each key which shard has it.
    """

    name: str
    text: str
    index: Mapping[str, Any]
    shards: Mapping[str, Checkpoint]
    is_stale: bool = False


# Plan


class Item(NamedTuple):
    """A tensor to place: its size in bytes, and its group, which must be in one shard."""

    key: str
    nbytes: int
    group: Hashable


def plan_shards(items: Iterable[Item], limit: int) -> list[list[str]]:
    """Return the keys of each shard: filled in order, up to `limit` bytes each. A larger tensor
    gets its own shard.

    The items of one group count once and stay together. `huggingface_hub` makes the same plan.
    """
    shards: list[list[str]] = []
    open_shard: list[str] = []
    used = 0
    shard_of: dict[Hashable, list[str]] = {}
    for key, nbytes, group in items:
        if group in shard_of:
            shard_of[group].append(key)
        elif nbytes > limit:
            shards.append([key])
            shard_of[group] = shards[-1]
        else:
            if used + nbytes > limit:
                shards.append(open_shard)
                open_shard, used = [], 0
            open_shard.append(key)
            used += nbytes
            shard_of[group] = open_shard
    return [*shards, open_shard] if open_shard or not shards else shards


def shard_names(stem: str, ending: str, count: int) -> list[str]:
    """Return ``model-00001-of-00003.safetensors`` and so on, for `stem` ``model`` and `ending`
    ``.safetensors``.
    """
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


# Reading


@many_objects()
def read(path: str) -> Checkpoint:
    """Read the checkpoint whose ``*.index.json`` is at `path`: one section, with its keys in the
    index's order.

    As for transformers, the index says which files are read, and the files say which tensors there
    are; without an index, the files are those with its name. Notes say where the two disagree.
    Raises `CkptError`, with every problem, if a shard is missing or cannot be read.
    """
    folder = parent(path)
    has_index = is_file(path)
    text, index = read_index(path) if has_index else ("", {})
    names = sorted({*index["weight_map"].values()} if has_index else shards_of(path))
    shards, problems = _read_shards(folder, names, _heads(index, names))
    if problems:
        raise CkptError(
            f"{path} and its shards disagree",
            hint="download or copy all files again; or name the shards one by one",
            problems=problems,
        )
    section, home, again = _merged(shards, index.get("weight_map"))
    if has_index:
        notes = _disagreements(index["weight_map"], home, again)
    else:
        index = {"metadata": {}, "weight_map": home}
        notes = [Note(no_index(folder), "no-index"), *_disagreements(home, home, again)]
    unreached: list[Unreached] = []
    for name, shard in shards.items():
        unreached += [storage.of(name) for storage in shard.unreached]
    return Checkpoint(
        path,
        _KINDS[next(iter(shards.values())).format],
        len(text.encode()) + sum(shard.nbytes for shard in shards.values()),
        (section,),
        metadata=_common([shard.metadata for shard in shards.values()]),
        container=Shards(name_of(path), text, index, shards, is_stale=bool(notes)),
        notes=(*notes, *_size_notes(index, section), *torchao.remark(section.tensors)),
        unreached=tuple(unreached),
    )


def _read_shards(
    folder: str, names: Sequence[str], heads: Mapping[str, int]
) -> tuple[dict[str, Checkpoint], list[Problem]]:
    """Read the shards, and list the problems with them; `heads` are the bytes to fetch ahead."""
    problems: list[Problem] = []
    shards: dict[str, Checkpoint] = {}
    for number, name in enumerate(names):
        if number % _AHEAD == 0:
            ahead = {}
            for later in names[number : number + _AHEAD]:
                path = safe_path(folder, later)
                if path is not None:
                    ahead[path] = heads[later]
            look_ahead(ahead)
        shard = _read_shard(folder, name)
        if isinstance(shard, Checkpoint):
            shards[name] = shard
        else:
            problems += shard
    if len({shard.format for shard in shards.values()}) > 1:
        for name, shard in shards.items():
            title = format_named(shard.format).title
            problems.append(Problem(f"is in another format than other shards: {title}", name))
    return shards, problems


class _Merged(NamedTuple):
    """The section of all shards. `home` is the shard that each key is read from; if several shards
    have a key, the last one. `again` is an earlier one.
    """

    section: Section
    home: dict[str, str]
    again: dict[str, str]


def _merged(shards: Mapping[str, Checkpoint], weight_map: Mapping[str, str] | None) -> _Merged:
    """Put the shards together, with their entries in the order of the index, if there is one."""
    entries: dict[str, AnyEntry] = {}
    home: dict[str, str] = {}
    again: dict[str, str] = {}
    modules: dict[str, object] | None = None
    for name, shard in shards.items():
        section = shard.sections[0]
        keys = section.keys
        if not entries.keys().isdisjoint(keys):
            for key in keys:
                if key in home:
                    again[key] = home[key]
        entries.update(zip(keys, section.entries))
        home.update(dict.fromkeys(keys, name))
        if section.modules is not None:
            modules = {**(modules or {}), **section.modules}
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    for key in dict.fromkeys((*(weight_map or ()), *entries)):  # the index may not list all
        entry = entries.get(key)
        if isinstance(entry, TensorEntry):
            tensors.append(entry)
        elif entry is not None:
            extras.append(entry)
    section = Section("", "state_dict", tuple(tensors), tuple(extras), modules)
    return _Merged(section, home, again)


def no_index(folder: str) -> str:
    """Return the text of a note on shards that have no index."""
    command = shell("ckpttool", "convert", folder, "-o", "OUT/")
    return (
        f"{folder} holds shards without their index, which from_pretrained does not read:"
        f" `{command}` writes one"
    )


def _disagreements(
    weight_map: Mapping[str, str], home: Mapping[str, str], again: Mapping[str, str]
) -> list[Note]:
    """Return notes on keys of the index that no shard has, and the other way round."""
    if home == weight_map and not again:
        return []
    phantoms = [key for key in weight_map if key not in home]
    unlisted = []
    elsewhere = []
    for key, name in home.items():
        if key not in weight_map:
            unlisted.append(f"{key} ({name})")
        elif key not in again and weight_map[key] != name:
            elsewhere.append(f"{key} ({name}, not {weight_map[key]})")
    twice = [f"{key} (read from {home[key]}, not {name})" for key, name in again.items()]
    notes = []
    for what, keys in (
        ("in the index, and in no shard", phantoms),
        ("in a shard, and not in the index", unlisted),
        ("in another shard than the index says", elsewhere),
        ("in several shards", twice),
    ):
        if keys:
            text = f"{plural(len(keys), 'key')} {what}: {some(keys)}"
            notes.append(Note(text, "shard-index"))
    return notes


def holds_unused_bytes(checkpoint: Checkpoint) -> bool:
    """Return whether a copy gets another index: the present one is missing, or does not fit the
    shards. A key that is in several shards is in one shard of the copy.
    """
    container = checkpoint.container
    return isinstance(container, Shards) and container.is_stale


def _heads(index: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Estimate the size of each shard's header from the index: rarely fewer bytes than it really
    has.

    One of safetensors has
    ``"KEY":{"dtype":"BF16","shape":[4096,4096],"data_offsets":[4294967296,4328521728]},``.
    """
    total = index.get("metadata", {}).get("total_size")
    digits = 10
    if isinstance(total, int):
        digits = min(digits, (total // len(names)).bit_length() * 3 // 10 + 1)
    heads = dict.fromkeys(names, _METADATA)
    for key, name in index.get("weight_map", {}).items():
        heads[name] += len(key) + _AN_ENTRY + 2 * digits
    for name, nbytes in heads.items():
        heads[name] = max(_HEAD, nbytes) if name.endswith(".safetensors") else _UNKNOWN
    return heads


def _is_state_dict(shard: Checkpoint) -> bool:
    """Return whether the shard holds one state dict, and nothing around it."""
    if len(shard.sections) != 1:
        return False
    section = shard.sections[0]
    return not section.path and section.kind == "state_dict"


def _read_shard(folder: str, name: str) -> Checkpoint | list[Problem]:
    path = safe_path(folder, name)
    if path is None:
        return [Problem(_why_unsafe(folder, name), name or '""')]
    if not is_file(path):
        return [Problem("the shard is missing", name)]
    try:
        kind = recognize(path).format
        shard = kind.read(path) if kind.name in _KINDS else None
    except CkptError as error:
        if not error.problems:
            return [Problem(error.message.removeprefix(f"{path}: "), name)]
        return [Problem(problem.problem, f"{name}: {problem.key}") for problem in error.problems]
    if shard is None:
        return [Problem(f"is in a format that shards cannot have: {kind.title}", name)]
    if not _is_state_dict(shard):
        return [Problem("does not hold one state dict", name)]
    return shard


def _why_unsafe(folder: str, name: str) -> str:
    """Return what is wrong with a name for which `safe_path` has no path."""
    is_link = is_inside(name) and not is_url(folder)
    if is_link or name.startswith("/") or ".." in name.split("/"):
        return "the index leads out of its folder"
    return "is not the plain name of a file in the folder of the index"


def _size_notes(index: Mapping[str, Any], section: Section) -> tuple[str, ...]:
    """Return a note about a wrong ``total_size``. No reader needs it, and many published indexes
    have it wrong.
    """
    total = index.get("metadata", {}).get("total_size")
    if total is None or total == section.nbytes:
        return ()
    size = _total_size(section)
    if total == size:
        return ()
    return (f"the index says total_size {total!r:.40}, the tensors are {size} bytes",)


def _total_size(section: Section) -> int:
    """Return the bytes of the tensors. Tensors with several names count once."""
    if section.has_own_storages():
        return sum(entry.nbytes for entry in section.tensors)
    sizes = {entry.identity: entry.nbytes for entry in section.tensors}
    return sum(sizes.values())


def _common(metadatas: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the items that have one value in all shards that have them."""
    values: dict[str, set[str]] = {}
    for metadata in metadatas:
        for name, value in metadata.items():
            values.setdefault(name, set()).add(value)
    common: dict[str, str] = {}
    for name, different in values.items():
        if len(different) == 1:
            (common[name],) = different
    return common


# Writing


def check_holds(checkpoint: Checkpoint, kind: str) -> bool:
    """Raise `Refused` as `layout_files` does. False if only `layout_files` tells."""
    return kind == SAFETENSORS and safetensors.check_holds(checkpoint)


def layout_files(
    checkpoint: Checkpoint, kind: str, name: str = "", max_shard_size: int | None = None
) -> Files:
    """Return the files of the sharded checkpoint, shards first and the index last.

    `kind` is `SAFETENSORS` or `BIN`. Tensors stay in their shards, which get new numbers if one has
    none left. They are sharded again with `max_shard_size` (bytes), and if they come from no
    shards. One shard that is new gets an index only if `name` asks for one. Raises `Refused` for
    entries that the shards' format cannot hold.
    """
    checkpoint, source = _with_new_names(checkpoint)
    stem, ending, layout = _LAYOUT[kind]
    if source is not None and max_shard_size is None:
        shards = _kept(checkpoint, source)
        if len(shards) < len(source.shards):
            stem = stem_of_shards(source.shards)
            shards = _numbered_again(shards, stem, ending, bool(name)) if stem else shards
    else:
        stem = name.partition(f"{ending}.index")[0] or stem
        shards = _sharded_again(
            checkpoint, stem, ending, max_shard_size or DEFAULT_SIZE, bool(name)
        )
    files: dict[str, Pieces] = {shard: layout(content) for shard, content in shards.items()}
    if list(shards) == [stem + ending]:
        return files
    index_name = name or (source.name if source is not None else f"{stem}{ending}.index.json")
    files[index_name] = [Piece(_index(checkpoint, shards, source))]
    return files


def layout_in_place(checkpoint: Checkpoint) -> Mapping[str, Edited] | None:
    """Return the files with all data in its present position; None if one of them has to be
    rewritten.
    """
    checkpoint, source = _with_new_names(checkpoint)
    if source is None:
        return None
    shards = _kept(checkpoint, source)
    if shards.keys() != source.shards.keys():
        return None
    files: dict[str, Edited] = {}
    for name, content in shards.items():
        edited = format_named(content.format).layout_in_place(content, name)
        if edited is None:
            return None
        files |= edited
    index = _index(checkpoint, shards, source)
    return {**files, source.name: Edited([Piece(index)], source.text.encode(), index)}


def _with_new_names(checkpoint: Checkpoint) -> tuple[Checkpoint, Shards | None]:
    """Return the checkpoint and its container, with torchao's metadata under the tensors' new
    names.

    The parts of a tensor of torchao may be in several shards.
    """
    source = checkpoint.container if isinstance(checkpoint.container, Shards) else None
    names = torchao.new_names(checkpoint)
    if names is not None and source is not None:
        shards = {}
        for name, shard in source.shards.items():
            shards[name] = replace(shard, metadata=torchao.renamed(shard.metadata, names))
        source = replace(source, shards=shards)
    return torchao.settled(checkpoint), source


def _kept(checkpoint: Checkpoint, source: Shards) -> dict[str, Checkpoint]:
    """Return the shards with their entries in the order of each shard, which may differ from the
    index's. A computed entry is where a tensor that it is computed from was; without one it follows
    the entry before it.
    """
    places: dict[int, tuple[str, int]] = {}
    for name, shard in source.shards.items():
        for number, entry in enumerate(shard.sections[0].tensors):
            places.setdefault(safetensors.identity(entry), (name, number))
    placed: dict[str, list[tuple[int, TensorEntry]]] = {name: [] for name in source.shards}
    name, number = next(iter(placed)), 0
    section = checkpoint.sections[0]
    for entry in section.tensors:
        name, number = _place(entry, places) or (name, number)
        placed[name].append((number, entry))
    common = _common([shard.metadata for shard in source.shards.values()])
    kept: dict[str, Checkpoint] = {}
    for name, rows in placed.items():
        if not rows:
            continue
        rows.sort(key=itemgetter(0))
        shard = _shard(source.shards[name], (entry for _, entry in rows), section.modules)
        metadata = _metadata_of(shard.metadata, common, checkpoint.metadata)
        kept[name] = replace(shard, metadata=metadata)
    return kept


def _metadata_of(
    shard: Mapping[str, str], common: Mapping[str, str], new: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata of a shard if `new` replaces what the shards have in `common`."""
    metadata = {}
    for name, value in shard.items():
        if name not in common:
            metadata[name] = value
        elif name in new:
            metadata[name] = new[name]
    added = {name: value for name, value in new.items() if name not in common}
    return metadata | added


def _place(entry: TensorEntry, places: Mapping[int, tuple[str, int]]) -> tuple[str, int] | None:
    """Return the shard and the number that `places` has for the entry, or for its origin."""
    storage = entry.storage
    if storage is None:
        return places.get(safetensors.identity(entry))
    while id(storage) not in places:
        if storage.origin is None:
            return None
        storage = storage.origin
    return places[id(storage)]


def _shard(
    checkpoint: Checkpoint, entries: Iterable[TensorEntry], modules: Mapping[str, object] | None
) -> Checkpoint:
    section = replace(checkpoint.sections[0], tensors=tuple(entries), extras=(), modules=modules)
    return replace(checkpoint, sections=(section,))


def _names(stem: str, ending: str, count: int, indexed: bool) -> list[str]:
    """Return the names of so many shards; one that no index names has no number."""
    return shard_names(stem, ending, count) if count > 1 or indexed else [stem + ending]


def _numbered_again(
    shards: Mapping[str, Checkpoint], stem: str, ending: str, indexed: bool
) -> dict[str, Checkpoint]:
    return dict(zip(_names(stem, ending, len(shards), indexed), shards.values()))


def _sharded_again(
    checkpoint: Checkpoint, stem: str, ending: str, limit: int, indexed: bool
) -> dict[str, Checkpoint]:
    entries = by_key(checkpoint.sections[0].tensors)
    plan = plan_shards(_items(checkpoint, entries), limit)
    names = _names(stem, ending, len(plan), indexed)
    complete = replace(checkpoint, container=None)
    if ending == ".safetensors":
        # transformers assumes another framework if __metadata__ has no format
        complete = replace(complete, metadata={"format": "pt", **checkpoint.metadata})
    modules = checkpoint.sections[0].modules
    shards = {}
    for name, keys in zip(names, plan):
        shards[name] = _shard(complete, (entries[key] for key in keys), modules)
    return shards


def _items(checkpoint: Checkpoint, by_key: Mapping[str, TensorEntry]) -> list[Item]:
    """Return the tensors to place; the parts of a quantized weight go with the weight."""
    groups: dict[str, list[str]] = {}
    for keys in chain.from_iterable(kind.together for kind in checkpoint.kinds):
        parts = [key for key in keys if key in by_key]
        groups.update(dict.fromkeys(parts, parts))
    items: list[Item] = []
    for key, entry in by_key.items():
        parts = groups.get(key, [key])
        if key != parts[0]:
            continue
        # the first one has the size of all of them, the others are placed next to it
        nbytes = sum(by_key[part].nbytes for part in parts)
        items.append(Item(key, nbytes, safetensors.identity(entry)))
        items += [Item(part, 0, safetensors.identity(entry)) for part in parts[1:]]
    return items


def _index(
    checkpoint: Checkpoint, shards: Mapping[str, Checkpoint], source: Shards | None
) -> bytes:
    """Return the text of the index in the style of the source's. Its other items are kept."""
    section = checkpoint.sections[0]
    shard_of: dict[str, str] = {}
    for shard, content in shards.items():
        shard_of.update(dict.fromkeys(content.sections[0].keys, shard))
    weight_map = {key: shard_of[key] for key in section.keys}
    in_order = dict(sorted(weight_map.items()))
    total_size = _total_size(section)
    if source is None or not source.text:  # as transformers writes it
        index: dict[str, Any] = {"metadata": {"total_size": total_size}, "weight_map": in_order}
        return (json.dumps(index, indent=2) + "\n").encode()
    metadata = dict(source.index.get("metadata", {}))
    if _is_size_before(total_size, source):
        metadata.setdefault("total_size", total_size)
    else:
        metadata.pop("total_parameters", None)
        metadata["total_size"] = total_size
    keys = list(source.index["weight_map"])
    if keys == sorted(keys):
        weight_map = in_order
    # `metadata` comes first if it is new
    index = {} if "metadata" in source.index else {"metadata": metadata}
    index |= {**source.index, "metadata": metadata, "weight_map": weight_map}
    begin = re.match(r"\{\n( +)", source.text)
    indent = len(begin[1]) if begin is not None else None
    text = json.dumps(index, indent=indent, ensure_ascii=source.text.isascii())
    if source.text.endswith("\n"):
        text += "\n"
    return text.encode()


def _is_size_before(total_size: int, source: Shards) -> bool:
    """Return whether the index of the source says this size, or no size, and is right."""
    before = [shard.sections[0] for shard in source.shards.values()]
    if total_size != sum(map(_total_size, before)):
        return False
    told = source.index.get("metadata", {}).get("total_size")
    return told in (None, total_size) or told == sum(section.nbytes for section in before)
