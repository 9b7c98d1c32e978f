"""Sharded checkpoints in the layout of Hugging Face: an index and shards."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits
from ckpttool.core.schema import OBJECT, TEXT, check, map_of, object_of
from ckpttool.core.values import dataclass
from ckpttool.formats import strict_json
from ckpttool.formats.detect import sniff
from ckpttool.formats.registry import FORMATS
from ckpttool.formats.safetensors import single as safetensors
from ckpttool.formats.safetensors import torchao
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.io.files import is_file, look_ahead, opened
from ckpttool.io.paths import name as name_of
from ckpttool.io.paths import parent, safe_path
from ckpttool.io.pieces import Edited, Files, Piece, Pieces

_INDEX = object_of({"weight_map": map_of(TEXT)}, {"metadata": OBJECT})
_AGAIN = "download or copy it again"


def read_index(path: str) -> tuple[str, dict[str, Any]]:
    """The index as text, and as the object it is: ``weight_map`` maps keys to names of shards.

    Raises `CkptError`, every problem at its JSON path, for what is no such index. What the names lead to is not looked
    at.
    """
    most = limits().json_bytes
    with opened(path) as file:
        raw = file.read(most + 1)
    try:
        if len(raw) > most:
            raise ValueError(f"it is longer: {limits().named('json_bytes')}")
        text = raw.decode()
        index = strict_json.loads(text)
    except ValueError as error:
        raise _no_index(path, str(error)) from error
    check(_INDEX, index, f"{path} is no index of a sharded checkpoint", _AGAIN)
    if not index["weight_map"]:
        raise _no_index(path, "it has no weight_map")
    return text, index


def _no_index(path: str, problem: str) -> CkptError:
    return CkptError(f"{path} is no index of a sharded checkpoint: {problem}", hint=_AGAIN)


DEFAULT_SIZE = 5 * 10**9  # bytes; what transformers took up to version 4

_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


class Item(NamedTuple):
    """One tensor to place: its size in bytes, and what it shares with the tensors that must lie in the same shard."""

    key: str
    nbytes: int
    group: Hashable


def plan_shards(items: Iterable[Item], limit: int) -> list[list[str]]:
    """The keys of each shard: filled in order, up to `limit` bytes each; a larger tensor gets a shard of its own.

    The items of one group count once and stay together. It is the plan of `huggingface_hub` for the same tensors.
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
    """``model-00001-of-00003.safetensors`` and so on, for `stem` ``model`` and `ending` ``.safetensors``."""
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` (10^9), ``512MiB`` (2^20), ``1000``. Raises `CkptError` for what is no such size."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    units = {unit.upper(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].upper()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if not size:
        raise CkptError(f"{text!r} is not a size", hint="as in 5GB, 500MB, 2GiB or 1000000 (bytes)")
    return size


SAFETENSORS, BIN = "sharded", "sharded_bin"  # names in the table of formats

_KINDS = {"safetensors": SAFETENSORS, "torch_zip": BIN}
_LAYOUT = {SAFETENSORS: ("model", ".safetensors", safetensors.layout), BIN: ("pytorch_model", ".bin", torch_zip.layout)}
_REPAIR = "download or copy all files again; or name the shards one by one"
_AHEAD = 64  # shards whose headers are fetched side by side
# Bytes: of an entry but for its name and its offsets, of what a header has besides, of the shortest and of other heads.
_AN_ENTRY, _METADATA, _HEAD, _UNKNOWN = 60, 64, 4096, 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The container of this format: the name of the index, its text and value, and each shard's own index by name."""

    name: str
    text: str
    index: Mapping[str, Any]
    shards: Mapping[str, Checkpoint]


# Reading


def read(path: str) -> Checkpoint:
    """The index of the checkpoint whose ``*.index.json`` is at `path`: one section, its keys in the index's order.

    Raises `CkptError`, with every disagreement between index and shards, where they do not fit.
    """
    text, index = read_index(path)
    weight_map: dict[str, str] = index["weight_map"]
    folder = parent(path)
    problems: list[Problem] = []
    shards: dict[str, Checkpoint] = {}
    names = list(dict.fromkeys(weight_map.values()))
    heads = _heads(index, names)
    for number, name in enumerate(names):
        if number % _AHEAD == 0:
            ahead = names[number : number + _AHEAD]
            look_ahead({place: heads[own] for own in ahead if (place := safe_path(folder, own))})
        found = _read_shard(folder, name)
        if isinstance(found, Checkpoint):
            shards[name] = found
        else:
            problems += found
    problems += _disagreements(weight_map, shards) + _kind_problems(shards)
    if problems:
        raise CkptError(f"{path} and its shards disagree", hint=_REPAIR, problems=problems)
    entries = {name: shard.sections[0].by_key() for name, shard in shards.items()}
    tensors = tuple(entry for key, name in weight_map.items() if isinstance(entry := entries[name][key], TensorEntry))
    extras = tuple(entry for key, name in weight_map.items() if isinstance(entry := entries[name][key], ExtraEntry))
    return Checkpoint(
        path,
        _KINDS[next(iter(shards.values())).format],
        len(text.encode()) + sum(shard.nbytes for shard in shards.values()),
        (Section("", "state_dict", tensors, extras, _modules(shards.values())),),
        metadata=_common([shard.metadata for shard in shards.values()]),
        container=Shards(name_of(path), text, index, shards),
        notes=(*_size_notes(index, tensors), *torchao.remark(tensors)),
        unreached=tuple(
            replace(found, path=f"{name}: {found.path}") for name, shard in shards.items() for found in shard.unreached
        ),
    )


def _heads(index: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """About how many bytes the header of each shard has, as far as the index tells: rarely fewer than it really has.

    One of safetensors has ``"KEY":{"dtype":"BF16","shape":[4096,4096],"data_offsets":[4294967296,4328521728]},``.
    """
    total = index.get("metadata", {}).get("total_size")
    digits = min(10, (total // len(names)).bit_length() * 3 // 10 + 1) if isinstance(total, int) else 10
    found = dict.fromkeys(names, _METADATA)
    for key, name in index["weight_map"].items():
        found[name] += len(key) + _AN_ENTRY + 2 * digits
    return {name: max(_HEAD, nbytes) if name.endswith(".safetensors") else _UNKNOWN for name, nbytes in found.items()}


def _read_shard(folder: str, name: str) -> Checkpoint | list[Problem]:
    """The index of one shard, or what makes it none."""
    path = safe_path(folder, name)
    if path is None:
        return [Problem("the index leads out of its folder", name)]
    if not is_file(path):
        return [Problem("the shard is missing", name)]
    try:
        kind = sniff(path)
        shard = FORMATS[kind].read(path) if kind in _KINDS else None
    except CkptError as error:
        return [Problem(problem.problem, f"{name}: {problem.key}") for problem in error.problems] or [
            Problem(error.message.removeprefix(f"{path}: "), name)
        ]
    if shard is None:
        return [Problem(f"is in a format that shards cannot have: {FORMATS[kind].title}", name)]
    if [(section.path, section.kind) for section in shard.sections] != [("", "state_dict")]:
        return [Problem("holds something else than one state dict", name)]
    return shard


def _disagreements(weight_map: Mapping[str, str], shards: Mapping[str, Checkpoint]) -> list[Problem]:
    """Keys that the index looks for in a shard that has them not, and keys of shards that the index does not know."""
    keys = {name: shard.sections[0].by_key() for name, shard in shards.items()}
    problems = [
        Problem(f"not in {name}, where the index looks for it", key)
        for key, name in weight_map.items()
        if name in keys and key not in keys[name]
    ]
    return problems + [
        Problem(f"in {name}, which the index does not know", key)
        for name, have in keys.items()
        for key in have
        if weight_map.get(key) != name
    ]


def _kind_problems(shards: Mapping[str, Checkpoint]) -> list[Problem]:
    kinds = dict.fromkeys(shard.format for shard in shards.values())
    if len(kinds) < 2:
        return []
    return [Problem(f"a {shard.format} file among others", name) for name, shard in shards.items()]


def _size_notes(index: Mapping[str, Any], tensors: Sequence[TensorEntry]) -> tuple[str, ...]:
    """What to say of a wrong ``total_size``. No reader needs it, and many published indexes have it wrong."""
    said = index.get("metadata", {}).get("total_size")
    if said is None or said in (_total_size(tensors), sum(entry.nbytes for entry in tensors)):
        return ()
    return (f"the index says total_size {said!r:.40}, the tensors are {_total_size(tensors)} bytes",)


def _total_size(tensors: Iterable[TensorEntry]) -> int:
    """Bytes of the tensors, each counted once whatever number of names it has."""
    return sum({entry.identity: entry.nbytes for entry in tensors}.values())


def _common(metadatas: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What the shards say of themselves without contradicting each other."""
    values: dict[str, set[str]] = {}
    for metadata in metadatas:
        for name, value in metadata.items():
            values.setdefault(name, set()).add(value)
    return {name: value.pop() for name, value in values.items() if len(value) == 1}


def _modules(shards: Iterable[Checkpoint]) -> dict[str, object] | None:
    """The versions of modules (``_metadata``) of all shards that have some; None where none has."""
    found = [shard.sections[0].modules for shard in shards if shard.sections[0].modules is not None]
    return {path: own for modules in found for path, own in modules.items()} if found else None


# Writing


def layout_files(checkpoint: Checkpoint, kind: str, name: str = "", max_shard_size: int | None = None) -> Files:
    """The files of the sharded checkpoint, shards first and the index last.

    `kind` is `SAFETENSORS` or `BIN`. Tensors stay in their shards, or with `max_shard_size` (bytes), or where they come
    from no shards, are sharded afresh; what then fits into one shard gets no index, unless one is asked for by `name`.
    Raises `Refused` for what the shards' format cannot hold.
    """
    source = checkpoint.container if isinstance(checkpoint.container, Shards) else None
    checkpoint, source = _settled(checkpoint, source)
    stem, ending, layout = _LAYOUT[kind]
    if source is not None and max_shard_size is None:
        shards = _kept(checkpoint, source)
    else:
        stem = name.partition(f"{ending}.index")[0] or stem
        shards = _afresh(checkpoint, stem, ending, max_shard_size or DEFAULT_SIZE, bool(name))
    files: dict[str, Pieces] = {shard: layout(content) for shard, content in shards.items()}
    if list(shards) == [stem + ending]:
        return files
    index_name = name or (source.name if source is not None else f"{stem}{ending}.index.json")
    files[index_name] = [Piece(_index_of(checkpoint, shards, source))]
    return files


def layout_in_place(checkpoint: Checkpoint) -> Mapping[str, Edited] | None:
    """The files with all data where it lies in those that were read; None where one of them has to be written anew."""
    source = checkpoint.container
    if isinstance(source, Shards):
        checkpoint, source = _settled(checkpoint, source)
    shards = _kept(checkpoint, source) if isinstance(source, Shards) else {}
    if not isinstance(source, Shards) or shards.keys() != source.shards.keys():
        return None
    files: dict[str, Edited] = {}
    for name, content in shards.items():
        own = FORMATS[content.format].layout_in_place(content, name)
        if own is None:
            return None
        files |= own
    index = _index_of(checkpoint, shards, source)
    return {**files, source.name: Edited([Piece(index)], source.text.encode(), index)}


def _settled(checkpoint: Checkpoint, source: Shards | None) -> tuple[Checkpoint, Shards | None]:
    """Both with the metadata in the names of now: the parts of a tensor of torchao may lie in several shards."""
    names = torchao.new_names(checkpoint)
    if names is not None and source is not None:
        shards = {n: replace(s, metadata=torchao.renamed(s.metadata, names)) for n, s in source.shards.items()}
        source = replace(source, shards=shards)
    return torchao.settled(checkpoint), source


def _index_of(checkpoint: Checkpoint, shards: Mapping[str, Checkpoint], source: Shards | None) -> bytes:
    weight_map = {key: shard for shard, content in shards.items() for key in content.sections[0].keys}
    ordered = {key: weight_map[key] for key in checkpoint.sections[0].keys}
    return _index(ordered, _total_size(checkpoint.sections[0].tensors), source)


def _kept(checkpoint: Checkpoint, source: Shards) -> dict[str, Checkpoint]:
    """The shards with the entries that lay in them; what was computed lies with the entry before it."""
    home = {_origin(entry): name for name, shard in source.shards.items() for entry in shard.sections[0].tensors}
    content: dict[str, list[TensorEntry]] = {name: [] for name in source.shards}
    name = next(iter(content))
    for entry in checkpoint.sections[0].tensors:
        name = home.get(_origin(entry), name)
        content[name].append(entry)
    common = _common([shard.metadata for shard in source.shards.values()])
    new = {key: value for key, value in checkpoint.metadata.items() if key not in common}
    gone, modules = common.keys() - checkpoint.metadata.keys(), checkpoint.sections[0].modules
    kept: dict[str, Checkpoint] = {}
    for name, entries in content.items():
        if entries:
            own = source.shards[name].metadata
            said = {key: checkpoint.metadata[key] if key in common else own[key] for key in own if key not in gone}
            kept[name] = replace(_shard(source.shards[name], entries, modules), metadata=said | new)
    return kept


def _origin(entry: TensorEntry) -> int:
    return id(entry.payload if entry.storage is None else entry.storage)


def _shard(whole: Checkpoint, entries: Iterable[TensorEntry], modules: Mapping[str, object] | None) -> Checkpoint:
    """`whole` with these entries only, as a file of its own."""
    return replace(whole, sections=(replace(whole.sections[0], tensors=tuple(entries), extras=(), modules=modules),))


def _afresh(checkpoint: Checkpoint, stem: str, ending: str, limit: int, indexed: bool) -> dict[str, Checkpoint]:
    have = {entry.key: entry for entry in checkpoint.sections[0].tensors}
    items = [Item(key, entry.nbytes, _origin(entry)) for key, entry in have.items()]
    plan = plan_shards(items, limit)
    names = shard_names(stem, ending, len(plan)) if len(plan) > 1 or indexed else [stem + ending]
    # transformers takes __metadata__ without a format for another framework's
    metadata = {"format": "pt", **checkpoint.metadata} if ending == ".safetensors" else checkpoint.metadata
    whole = replace(checkpoint, container=None, metadata=metadata)
    modules = checkpoint.sections[0].modules
    return {name: _shard(whole, (have[key] for key in keys), modules) for name, keys in zip(names, plan)}


def _index(weight_map: dict[str, str], total_size: int, source: Shards | None) -> bytes:
    """The text of the index, in the style of the source's; what it says beside sizes and places is kept."""
    old: Mapping[str, Any] = source.index if source is not None else {}
    metadata = dict(old.get("metadata", {}))
    if source is None or total_size != _total_size(_tensors(source)) or _size_notes(old, _tensors(source)):
        metadata.pop("total_parameters", None)
        metadata["total_size"] = total_size
    else:
        metadata.setdefault("total_size", total_size)
    before = list(old.get("weight_map", {}))
    if before == sorted(before):
        weight_map = dict(sorted(weight_map.items()))
    index = {**({} if "metadata" in old else {"metadata": metadata}), **old}
    index |= {"metadata": metadata, "weight_map": weight_map}
    return _spelled(index, source).encode()


def _tensors(source: Shards) -> list[TensorEntry]:
    return [entry for shard in source.shards.values() for entry in shard.sections[0].tensors]


_STYLES = [(indent, ascii, end) for indent in (2, 4, None) for ascii in (True, False) for end in ("\n", "")]


def _spelled(index: Mapping[str, Any], source: Shards | None) -> str:
    """`index` as JSON, spelled like the source's text; by default as transformers spells it."""
    if source is not None:
        for indent, ascii, end in _STYLES:
            if json.dumps(source.index, indent=indent, ensure_ascii=ascii) + end == source.text:
                return json.dumps(index, indent=indent, ensure_ascii=ascii) + end
    return json.dumps(index, indent=2) + "\n"
