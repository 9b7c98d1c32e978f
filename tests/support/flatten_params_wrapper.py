"""FlattenParamsWrapper as documented in torch 1.11; later releases removed the class.

It holds the module as ``_fpw_module`` and its parameters as one ``flat_param``. A hook after
``state_dict()`` removes the segment from the keys, and a hook before loading adds it, except for
``flat_param*``, which is one level up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _replace_prefix(state_dict: dict[str, Any], old: str, new: str) -> None:
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _replace_prefix(state_dict, f"{prefix}_fpw_module.", prefix)


def _before_loading(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _replace_prefix(state_dict, prefix, f"{prefix}_fpw_module.")
    _replace_prefix(state_dict, f"{prefix}_fpw_module.flat_param", f"{prefix}flat_param")


class FlattenParamsWrapper(nn.Module):
    """`hooks`: hide ``_fpw_module`` in the keys of the state dict, which is the default."""

    def __init__(self, module: nn.Module, hooks: bool = True) -> None:
        super().__init__()
        self._fpw_module = module
        found: dict[nn.Parameter, None] = {}
        for owner in list(module.modules()):
            if not isinstance(owner, FlattenParamsWrapper):
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    found[parameter] = None
                    delattr(owner, name)
        self.flat_param = nn.Parameter(
            torch.cat([parameter.detach().flatten() for parameter in found])
        )
        if hooks:
            self._register_state_dict_hook(_after_saving)
            self._register_load_state_dict_pre_hook(_before_loading)


def flattened(model: nn.Module, inner: type[nn.Module], hooks: bool = True) -> nn.Module:
    """Wrap every module of class `inner`, then `model` itself."""
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, inner):
                setattr(module, child_name, FlattenParamsWrapper(child, hooks))
    return FlattenParamsWrapper(model, hooks)
