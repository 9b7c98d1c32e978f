"""Tensor subclasses of torchao in safetensors: each is saved in parts, and ``__metadata__`` lists
the parts.

``0.weight`` of the class ``Float8Tensor`` is ``0._weight_qdata`` and ``0._weight_scale``; the
metadata holds, as JSON, ``tensor_names``, and under each name the class, its attributes and its
``_tensor_data_names`` (torchao 0.14 to 0.18,
``torchao/prototype/safetensors/safetensors_support.py``). torchao looks for the parts by these
names, so if they are renamed the metadata is changed too, or the rename is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from shlex import quote
from typing import Any

from ckpttool.containers import strict_json
from ckpttool.core.checkpoint import Checkpoint, Payload, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.text import is_list_of_text
from ckpttool.core.values import dataclass
from ckpttool.io.files import is_dir

_NAMES, _PARTS, _CLASS = "tensor_names", "_tensor_data_names", "_type"
_APART = (
    "rename all parts of a tensor alike, or drop all of them; the last segment of their keys"
    " is _TENSOR_PART"
)


@dataclass(frozen=True, slots=True)
class SubclassPart(Payload):
    """The payload of a tensor that for torchao is the `part` of the tensor `name`, or `name`
    itself.

    `parts` is the number of its parts, `kind` its class, `meaning` its entry in the metadata.
    """

    name: str
    kind: str
    part: str | None
    parts: int
    meaning: str = ""


def marked(
    tensors: tuple[TensorEntry, ...], metadata: Mapping[str, str]
) -> tuple[TensorEntry, ...]:
    """Return the tensors of a file, with a `SubclassPart` for each that its metadata lists."""
    parts = _parts(metadata)
    if not parts:
        return tensors
    marked = []
    for entry in tensors:
        part = parts.get(entry.key)
        if part is not None and entry.payload is None:
            entry = replace(entry, payload=part)
        marked.append(entry)
    return tuple(marked)


def _parts(metadata: Mapping[str, str]) -> dict[str, SubclassPart]:
    """Return key -> the part that the metadata lists under it."""
    by_key: dict[str, SubclassPart] = {}
    for name in _listed(metadata):
        described = _json(metadata.get(name, ""))
        if not isinstance(described, dict):
            continue
        kind, parts = str(described.get(_CLASS)), described.get(_PARTS, [])
        if not parts:
            by_key[name] = SubclassPart(name, kind, None, 1)
        elif is_list_of_text(parts):
            module, _, last = name.rpartition(".")
            for part in parts:
                key = f"{module}._{last}_{part}"
                by_key[key] = SubclassPart(name, kind, part, len(parts), metadata[name])
    return by_key


def _listed(metadata: Mapping[str, str]) -> list[str]:
    names = _json(metadata.get(_NAMES, ""))
    return names if is_list_of_text(names) else []


def _json(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError:
        return None


def remark(tensors: Iterable[TensorEntry]) -> tuple[str, ...]:
    kinds: dict[str, str] = {}  # name of a tensor in parts -> its kind
    keys: dict[str, list[str]] = {}  # -> the keys of its parts
    for entry in tensors:
        part = entry.payload
        if isinstance(part, SubclassPart) and part.part is not None:
            kinds[part.name] = part.kind
            keys.setdefault(part.name, []).append(entry.key)
    if not kinds:
        return ()
    counts = Counter(kinds.values())
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    first = next(iter(keys))
    return (f"tensors of torchao in parts ({counted}): {first} is {', '.join(keys[first])}",)


def settled(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the current names of its tensors in the metadata, and without
    `SubclassPart`s.

    Raises `Refused`, all problems at once, if torchao would no longer find the parts of a tensor.
    """
    names = new_names(checkpoint)
    if names is None:
        return checkpoint
    sections = tuple(map(_without_parts, checkpoint.sections))
    return replace(checkpoint, sections=sections, metadata=renamed(checkpoint.metadata, names))


def _without_parts(section: Section) -> Section:
    tensors = []
    for entry in section.tensors:
        is_part = isinstance(entry.payload, SubclassPart)
        tensors.append(replace(entry, payload=None) if is_part else entry)
    return replace(section, tensors=tuple(tensors))


def new_names(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return the current name for each name that torchao's metadata lists; None if there are none.

    Raises `Refused` as `settled` does.
    """
    by_name: dict[str, dict[str, SubclassPart]] = {}
    for section in checkpoint.sections:
        for entry in section.tensors:
            if isinstance(entry.payload, SubclassPart):
                by_name.setdefault(entry.payload.name, {})[entry.key] = entry.payload
    problems, names = [], {}
    for name, parts in by_name.items():
        new_name, *others = {_name_of(key, part.part) for key, part in parts.items()}
        if len(parts) != next(iter(parts.values())).parts:
            reason = "not all of its parts are there as they were"
        elif others or new_name is None:
            reason = "torchao would not find its parts together"
        else:
            names[name] = new_name
            continue
        problems.append(Problem(f"{reason}: {', '.join(parts)}", name))
    if problems:
        raise Refused("tensors of torchao would come apart", hint=_APART, problems=problems)
    return names or None


def _name_of(key: str, part: str | None) -> str | None:
    """Return the tensor's name by the key of one of its parts: ``0.weight`` for
    ``0._weight_qdata``; None for a key that is not made so.
    """
    if part is None:
        return key
    module, _, last = key.rpartition(".")
    stem = last.removeprefix("_").removesuffix(f"_{part}")
    if not module or not stem or last != f"_{stem}_{part}":
        return None
    return f"{module}.{stem}"


def renamed(metadata: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with the new names, without tensors that have none."""
    listed = _listed(metadata)
    renamed: dict[str, str] = {}
    for name, text in metadata.items():
        if name not in listed:
            renamed[name] = text
        elif name in names:
            renamed[names[name]] = text
    renamed[_NAMES] = json.dumps([names[name] for name in listed if name in names])
    return renamed


_JOINED = (
    "import sys, torch; from safetensors import safe_open; "
    "from torchao.prototype.safetensors import safetensors_support as s; "
    "f = safe_open(sys.argv[1], 'pt'); tensors = {k: f.get_tensor(k) for k in f.keys()}; "
    "torch.save(s.unflatten_tensor_state_dict(tensors, f.metadata())[0], sys.argv[2])"
)
_TAKEN_APART = (
    "import sys, torch, torchao; from safetensors.torch import save_file; "
    "from torchao.prototype.safetensors import safetensors_support as s; "
    "tensors, metadata = s.flatten_tensor_state_dict(torch.load(sys.argv[1])); "
    "save_file(tensors, sys.argv[2], metadata)"
)


def way(checkpoint: Checkpoint) -> str:
    """Return the end of a hint: how torchao itself writes its tensors to safetensors; empty without
    such tensors, and for a folder, which torch.load does not read.
    """
    if is_dir(checkpoint.source.partition("::")[0]):
        return ""
    if not any(name.startswith("torchao.") for name in checkpoint.globals):
        return ""
    source = quote(checkpoint.source.partition("::")[0])
    return f'; with torchao: python -c "{_TAKEN_APART}" {source} OUT.safetensors'


def joined(source: str) -> str:
    """Return the command by which torchao converts a safetensors file to a torch file."""
    return f'python -c "{_JOINED}" {quote(source)} OUT.pt'


def come_apart(checkpoint: Checkpoint) -> list[Problem]:
    """List the tensors in parts, for a format that has no place for their metadata."""
    problems = {}
    for section in checkpoint.sections:
        for entry in section.tensors:
            part = entry.payload
            if isinstance(part, SubclassPart) and part.part is not None:
                problems[part.name] = Problem(f"a {part.kind} in {part.parts} parts", part.name)
    return list(problems.values())
