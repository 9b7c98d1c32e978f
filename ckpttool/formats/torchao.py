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
from ckpttool.core.checkpoint import Checkpoint, Payload, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.values import dataclass

_NAMES, _PARTS, _CLASS = "tensor_names", "_tensor_data_names", "_type"
_APART = (
    "rename all parts of a tensor alike, or drop all of them; the last segment of their keys"
    " is _TENSOR_PART"
)


@dataclass(frozen=True, slots=True)
class Part(Payload):
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
    """Return the tensors of a file, with a `Part` for each that its metadata lists."""
    known = _parts(metadata)
    if not known:
        return tensors
    return tuple(
        replace(e, payload=known[e.key]) if e.key in known and e.payload is None else e
        for e in tensors
    )


def _parts(metadata: Mapping[str, str]) -> dict[str, Part]:
    found: dict[str, Part] = {}
    for name in _listed(metadata):
        described = _json(metadata.get(name, ""))
        if not isinstance(described, dict):
            continue
        kind, parts = str(described.get(_CLASS)), described.get(_PARTS, [])
        module, _, last = name.rpartition(".")
        if not parts:
            found[name] = Part(name, kind, None, 1)
        elif isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            found.update(
                (f"{module}._{last}_{part}", Part(name, kind, part, len(parts), metadata[name]))
                for part in parts
            )
    return found


def _listed(metadata: Mapping[str, str]) -> list[str]:
    names = _json(metadata.get(_NAMES, ""))
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _json(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError:
        return None


def remark(tensors: Iterable[TensorEntry]) -> tuple[str, ...]:
    found: dict[Part, list[str]] = {}
    for entry in tensors:
        if isinstance(entry.payload, Part) and entry.payload.part is not None:
            found.setdefault(replace(entry.payload, part=""), []).append(entry.key)
    if not found:
        return ()
    kinds = Counter(part.kind for part in found)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    part, keys = next(iter(found.items()))
    return (f"tensors of torchao in parts ({counted}): {part.name} is {', '.join(keys)}",)


def settled(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the current names of its tensors in the metadata, and without
    `Part`s.

    Raises `Refused`, all problems at once, if torchao would no longer find the parts of a tensor.
    """
    names = new_names(checkpoint)
    if names is None:
        return checkpoint
    sections = []
    for section in checkpoint.sections:
        tensors = (
            replace(e, payload=None) if isinstance(e.payload, Part) else e for e in section.tensors
        )
        sections.append(replace(section, tensors=tuple(tensors)))
    return replace(
        checkpoint, sections=tuple(sections), metadata=renamed(checkpoint.metadata, names)
    )


def new_names(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return the current name for each name that torchao's metadata lists; None if there are none.

    Raises `Refused` as `settled` does.
    """
    found: dict[str, dict[str, Part]] = {}
    for section in checkpoint.sections:
        for entry in section.tensors:
            if isinstance(entry.payload, Part):
                found.setdefault(entry.payload.name, {})[entry.key] = entry.payload
    problems, names = [], {}
    for name, parts in found.items():
        called = {_called(key, part.part) for key, part in parts.items()}
        whole = len(parts) == next(iter(parts.values())).parts
        if whole and len(called) == 1 and None not in called:
            names[name] = str(called.pop())
        else:
            reason = (
                "torchao would not find its parts together"
                if whole
                else "not all of its parts are there as they were"
            )
            problems.append(Problem(f"{reason}: {', '.join(parts)}", name))
    if problems:
        raise Refused("tensors of torchao would come apart", hint=_APART, problems=problems)
    return names or None


def _called(key: str, part: str | None) -> str | None:
    if part is None:
        return key
    module, _, last = key.rpartition(".")
    own = last.removeprefix("_").removesuffix(f"_{part}")
    return f"{module}.{own}" if module and own and last == f"_{own}_{part}" else None


def renamed(metadata: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with the new names, without tensors that have none."""
    listed = _listed(metadata)
    kept = {name: text for name, text in metadata.items() if name in names or name not in listed}
    made = {names.get(name, name) if name in listed else name: text for name, text in kept.items()}
    return {**made, _NAMES: json.dumps([names[name] for name in listed if name in names])}


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
    such tensors.
    """
    if not any(name.startswith("torchao.") for name in checkpoint.globals):
        return ""
    source = quote(checkpoint.source.partition("::")[0])
    return f'; with torchao: python -c "{_TAKEN_APART}" {source} OUT.safetensors'


def joined(source: str) -> str:
    """Return the command by which torchao converts a safetensors file to a torch file."""
    return f'python -c "{_JOINED}" {quote(source)} OUT.pt'


def come_apart(checkpoint: Checkpoint) -> list[Problem]:
    """List the tensors in parts, for a format that has no place for their metadata."""
    tensors = (entry for section in checkpoint.sections for entry in section.tensors)
    found = {
        entry.payload.name: entry.payload for entry in tensors if isinstance(entry.payload, Part)
    }
    return [
        Problem(f"a {own.kind} in {own.parts} parts", name)
        for name, own in found.items()
        if own.part is not None
    ]
