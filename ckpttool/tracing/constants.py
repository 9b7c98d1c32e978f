"""The values that a model gives to tensors outside of its state dict: buffers that are not saved, plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ckpttool.core.checkpoint import Lazy, Storage, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError
from ckpttool.core.keys import dotted
from ckpttool.evaluate.torch_eval import to_bytes
from ckpttool.naming.wrappers import strip
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.experiment import same
from ckpttool.tracing.runtime import check_memory, dtype_name, layout_of, size_of, wrapper_paths

_MOST = 1 << 30  # bytes; a larger model is built for real only if the user asks for it


def values_of_constants(model: LoadedModel, names: Iterable[str]) -> dict[str, TensorEntry | str]:
    """Return the value of each tensor, by its name without wrappers, or the reason why it is not known.

    The model is built twice: what differs then is random, and has no value to compare with.
    """
    names = list(names)
    try:
        need = size_of(model)
        if need > _MOST and not model.materialize:
            return dict.fromkeys(names, f"the model takes {need >> 20} MiB: --materialize builds it")
        check_memory(model, 0, "the model's constants were not computed")
        first, second = (_tensors(model.build(True, seed)) for seed in (0, 1))
    except CkptError as error:
        return dict.fromkeys(names, error.message)
    return {name: _known(first.get(name), second.get(name)) for name in names}


def _known(one: torch.Tensor | None, other: torch.Tensor | None) -> TensorEntry | str:
    if one is None or other is None:
        return "not an attribute of the model, but a tensor in its code"
    if layout_of(one) != "strided":
        return "it is not a dense tensor"
    if not same(one, other):
        return "the model gives it a random value"
    value = one.detach().cpu().contiguous()
    nbytes = value.numel() * value.element_size()
    storage = Storage(Lazy(nbytes, lambda: [to_bytes(value)], reads=0))
    return in_row_major("", dtype_name(value.dtype), tuple(value.shape), storage)


def _tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    paths, found = wrapper_paths(model), dict[str, torch.Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(strip(dotted(path, name), paths), value)
    return found
