"""The names of an exported program: its FQNs, which are runtime and serialized names in one (pytorch#137609).

Needs neither torch nor the code that the program was exported from.
"""

from __future__ import annotations

from ckpttool.expression import Ref
from ckpttool.formats.pt2 import archive as pt2
from ckpttool.formats.pt2.signature import signature
from ckpttool.names import LoadedTensor, Names, RuntimeTensor, SerializedKey


def names(path: str, program: str | None = None) -> Names:
    """All names of the program's parameters and buffers; constants that were lifted out of its code have none.

    `program` is the one that is meant in a file of several. Raises `CkptError` where there is no such program.
    """
    checkpoint = pt2.read_program(path, program)
    found = signature(checkpoint)
    tensors = [tensor for tensor in found.inputs if tensor.kind != "constant"]
    first = {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in tensors}
    persistent = {tensor.fqn for tensor in tensors if tensor.persistent}
    return Names(
        model=path,
        torch=found.torch,
        runtime=tuple(
            RuntimeTensor(t.fqn, t.fqn, t.kind, t.persistent, t.trainable, t.dtype, t.shape, t.alias_of)
            for t in tensors
        ),
        serialized=tuple(
            SerializedKey(entry.key, entry.dtype, entry.shape, Ref(first[entry.key]), None)
            for entry in checkpoint.section("").tensors
        ),
        load=tuple(LoadedTensor(t.fqn, Ref(t.fqn) if t.fqn in persistent else None) for t in tensors),
        not_serialized=tuple(t.fqn for t in tensors if not t.persistent),
    )
