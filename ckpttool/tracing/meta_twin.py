"""Whether a model built on meta has the tensors that it has when it is built for real: some constructors ask first."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpttool.errors import CkptError
from ckpttool.keys import dotted
from ckpttool.tracing.load_model import LoadedModel
from ckpttool.tracing.runtime import check_memory, dtype_name, is_cheap, shape_of

_NOT_LOOKED = "on the meta device alone: whether its constructor makes other tensors for real was not looked at"
_UNLIKE = "built on the meta device its constructor makes other tensors than for real, and there is no memory for that"


def beside_real(model: LoadedModel) -> tuple[LoadedModel, tuple[str, ...]]:
    """`model`, to be built for real from now on where its meta twin has other tensors; what there is to be noted.

    A cheap model is built for real and compared; of any other the constructor runs with tensors that say that they are
    on the CPU, and have no memory.
    """
    if model.materialize:
        return model, ()
    try:
        twin = _listing(model.build(False))
        real = _listing(model.build(True) if is_cheap(model) else _fake(model))
    except CkptError:
        return model, (_NOT_LOOKED,)
    if twin == real:
        return model, ()
    try:
        check_memory(model, 0, _UNLIKE)
    except CkptError as error:
        return model, (error.message,)
    return replace(model, materialize=True), ()


def _fake(model: LoadedModel) -> nn.Module:
    """An instance whose tensors pass for real ones. Raises `CannotBuild` where its constructor sees through that."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        return model.build(True)


def _listing(model: nn.Module) -> list[tuple[object, ...]]:
    """Names, dtypes, shapes, and which tensors are one: what needs neither memory nor addresses."""
    first: dict[int, str] = {}
    found: list[tuple[object, ...]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                fqn = dotted(path, name)
                if tensor is not None:
                    hidden = kind == "buffer" and name in module._non_persistent_buffers_set
                    one = first.setdefault(id(tensor), fqn)
                    found.append((fqn, kind, hidden, one, dtype_name(tensor.dtype), shape_of(tensor)))
    return found
