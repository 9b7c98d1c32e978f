"""The names of an exported program: its FQNs, which are runtime and serialized names in one (pytorch#137609).

Read from the graph's signature in ``models/M.json``: parameter or buffer, persistent, trainable, in which order. Needs
neither torch nor the code that the program was exported from; the graph itself is not interpreted.
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint, TensorEntry
from ckpttool.expression import Ref
from ckpttool.formats.pt2.archive import read_program
from ckpttool.formats.pt2.graph import FIELDS, read_graph
from ckpttool.formats.pt2.program import Payload, Program
from ckpttool.names import LoadedTensor, Names, RuntimeTensor, SerializedKey

_KINDS = {"parameter": "parameter", "buffer": "buffer", "tensor_constant": "constant"}
_RANKS = {kind: rank for rank, kind in enumerate(_KINDS.values())}


def names(path: str, program: str | None = None) -> Names:
    """All names of the program's parameters and buffers; constants that were lifted out of its code have none.

    `program` is the one that is meant in a file of several. Raises `CkptError` where there is no such program, and
    where its graph has no signature that can be read.
    """
    checkpoint = read_program(path, program)
    assert isinstance(checkpoint.container, Program)
    model = read_graph(checkpoint.container)
    specs = model["graph_module"]["signature"]["input_specs"]
    graph = {spec[kind][FIELDS[kind]]: _KINDS[kind] for spec in specs for kind in spec.keys() & _KINDS.keys()}
    tensors = [tensor for tensor in _runtime(checkpoint, graph) if tensor.kind != "constant"]
    first = {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in tensors}
    return Names(
        model=path,
        torch=model["torch_version"],
        runtime=tuple(tensors),
        serialized=tuple(
            SerializedKey(entry.key, entry.dtype, entry.shape, Ref(first[entry.key]), None)
            for entry in checkpoint.section("").tensors
        ),
        load=tuple(LoadedTensor(t.fqn, Ref(t.fqn) if t.persistent else None) for t in tensors),
        not_serialized=tuple(t.fqn for t in tensors if not t.persistent),
    )


def _runtime(checkpoint: Checkpoint, graph: dict[str, str]) -> list[RuntimeTensor]:
    """Parameters, then buffers, then constants, each in the order of the graph's inputs; `graph`: FQN -> kind."""
    entries = [(entry, section.path == "") for section in checkpoint.sections for entry in section.tensors]
    kinds = {entry.key: _kind(entry, persistent, graph.get(entry.key)) for entry, persistent in entries}
    order = {fqn: position for position, fqn in enumerate(graph)}
    entries.sort(key=lambda item: (_RANKS[kinds[item[0].key]], order.get(item[0].key, len(order))))
    first: dict[object, str] = {}
    found: list[RuntimeTensor] = []
    for entry, persistent in entries:
        fqn, kind, payload = entry.key, kinds[entry.key], entry.payload
        trainable = kind == "parameter" and isinstance(payload, Payload) and payload.requires_grad
        root = first.setdefault(entry.identity, fqn)
        alias_of = None if root == fqn else root
        found.append(RuntimeTensor(fqn, fqn, kind, persistent, trainable, entry.dtype, entry.shape, alias_of))
    return found


def _kind(entry: TensorEntry, persistent: bool, taken: str | None) -> str:
    """As what the graph takes it, None where it does not: a tensor of a module that is never called, or a tied name."""
    if taken is not None and not (persistent and taken == "constant"):  # what is saved is no constant
        return taken
    if isinstance(entry.payload, Payload) and entry.payload.is_param:
        return "parameter"
    return "buffer" if persistent else "constant"
