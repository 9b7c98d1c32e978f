"""What an exported program says of its own tensors: parameter or buffer, persistent, trainable, in which order.

Read from the graph's signature in ``models/M.json``; the graph itself is not interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpttool.checkpoint import Checkpoint, TensorEntry
from ckpttool.formats.pt2.program import Payload, Program, damaged, read_json
from ckpttool.json_schema import TEXT, ListOf, ObjectOf

_KINDS = {"parameter": "parameter", "buffer": "buffer", "tensor_constant": "constant"}
_INPUT = ObjectOf({}, {kind: ObjectOf({f"{kind}_name": TEXT}) for kind in _KINDS})
_MODEL = ObjectOf(
    {"torch_version": TEXT, "graph_module": ObjectOf({"signature": ObjectOf({"input_specs": ListOf(_INPUT)})})}
)
_RANKS = {kind: rank for rank, kind in enumerate(_KINDS.values())}


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A tensor of the program by its FQN. `kind` is ``parameter``, ``buffer`` or ``constant`` (lifted out of the code).

    `shape` counts elements; `alias_of` is the first FQN of the same tensor, None where this one is the first.
    """

    fqn: str
    kind: str
    persistent: bool
    trainable: bool
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class Signature:
    """`torch` is the version that exported the program; parameters come first, then buffers, then constants."""

    torch: str
    inputs: tuple[ProgramInput, ...]


def signature(checkpoint: Checkpoint) -> Signature:
    """Every parameter, buffer and constant of the program that `pt2.read` has read, in the order of the graph's inputs.

    Raises `CkptError` where the file's graph has no signature that can be read.
    """
    program = checkpoint.container
    if not isinstance(program, Program):
        raise TypeError("not a program: its container is missing")
    model = read_json(program.archive, program.model, _MODEL, "torch.export.save")
    if not all(model["graph_module"]["signature"]["input_specs"]):
        raise damaged(checkpoint.source, f"{program.model} is not as torch.export.save writes it: an input of no kind")
    return Signature(model["torch_version"], _inputs(checkpoint, _graph_inputs(model)))


def _graph_inputs(model: Any) -> dict[str, str]:
    """FQN -> kind of each tensor that the graph takes from the program, in its order."""
    found: dict[str, str] = {}
    for spec in model["graph_module"]["signature"]["input_specs"]:
        for kind in spec.keys() & _KINDS.keys():
            found[spec[kind][f"{kind}_name"]] = _KINDS[kind]
    return found


def _inputs(checkpoint: Checkpoint, graph: dict[str, str]) -> tuple[ProgramInput, ...]:
    entries = [(entry, section.path == "") for section in checkpoint.sections for entry in section.tensors]
    kinds = {entry.key: graph.get(entry.key) or _kind(entry, persistent) for entry, persistent in entries}
    order = {fqn: position for position, fqn in enumerate(graph)}
    entries.sort(key=lambda item: (_RANKS[kinds[item[0].key]], order.get(item[0].key, len(order))))
    first: dict[object, str] = {}
    found: list[ProgramInput] = []
    for entry, persistent in entries:
        fqn, kind, payload = entry.key, kinds[entry.key], entry.payload
        trainable = kind == "parameter" and isinstance(payload, Payload) and payload.requires_grad
        root = first.setdefault(entry.identity, fqn)
        alias_of = None if root == fqn else root
        found.append(ProgramInput(fqn, kind, persistent, trainable, entry.dtype, entry.shape, alias_of))
    return tuple(found)


def _kind(entry: TensorEntry, persistent: bool) -> str:
    """The kind of a tensor that the graph does not take: one of a module that is never called, or a tied name."""
    if isinstance(entry.payload, Payload) and entry.payload.is_param:
        return "parameter"
    return "buffer" if persistent else "constant"
