"""Whether PEFT loads an adapter onto a model, found by running PEFT."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import CkptError
from ckpttool.core.strides import Shape
from ckpttool.core.text import first_line
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.instances import CodeFailed, dtype_name, on_meta_or_real
from ckpttool.tracing.memory import Token, token
from ckpttool.tracing.safe_state_dict import stored
from ckpttool.tracing.user_code import attempt, failed_on_meta

_ADAPTER = "default"  # PEFT's name of the only adapter


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The answer of PEFT. `ok`: it loads the adapter, and no adapter key is missing or unexpected.

    `error` is what PEFT raises. `saved` are the keys that PEFT writes for such an adapter on this
    model, with dtype and shape; it is empty if PEFT cannot put one on the model. `unloaded` are
    the saved keys without a value in the adapter, whether PEFT calls them missing or not.
    """

    ok: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    error: str
    saved: Mapping[str, tuple[str, Shape]]
    unloaded: tuple[str, ...] = ()


def is_peft_model(model: LoadedModel) -> bool:
    """Return whether the definition is a model that has an adapter of PEFT already."""
    return any(cls.__module__ == "peft.peft_model" for cls in model.kind.__mro__)


def load_adapter(
    model: LoadedModel, section: Section, config: Mapping[str, Any] | None
) -> AdapterLoad:
    """Load the section into ``get_peft_model(model, config)``, on meta if the model can be built
    there.

    Without a config the model must be a `PeftModel`. Raise `CkptError` if PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise CkptError(
            f"whether {model.operand} takes the adapter is PEFT's answer, and PEFT is not"
            " installed",
            hint="pip install peft",
        )
    return on_meta_or_real(model, partial(_load, model, section, config))


def _load(
    model: LoadedModel, section: Section, config: Mapping[str, Any] | None, real: bool
) -> AdapterLoad:
    """Raise `CodeFailed` if PEFT needs values, and `real` is False."""
    instance = model.build(real)
    device = nullcontext() if real else torch.device("meta")
    with device:
        adapted = attempt(partial(_with_adapter, instance, config))
        if isinstance(adapted, Exception):
            _check_values(adapted, real)
            return AdapterLoad(False, (), (), first_line(adapted), {})
        tensors = attempt(partial(_saved_tensors, *adapted))
        if isinstance(tensors, Exception):
            tensors = {}
        saved = {key: (dtype_name(t.dtype), tuple(t.shape)) for key, t in tensors.items()}
        state = stored(section, real).state
        answer = attempt(partial(_loaded, *adapted, dict(state), tensors))
    if isinstance(answer, Exception):
        _check_values(answer, real)
        return AdapterLoad(False, (), (), _text_of(answer), saved)
    missing, unexpected, unloaded = answer
    return AdapterLoad(not missing and not unexpected, missing, unexpected, "", saved, unloaded)


def _check_values(error: Exception, real: bool) -> None:
    if not real and failed_on_meta(error):
        raise CodeFailed(
            f"PEFT cannot put the adapter on a model without values: {first_line(error)}",
            hint="--materialize builds the model for real",
        )


def _text_of(error: Exception) -> str:
    if isinstance(error, KeyError):  # of a module that is saved completely
        return f"no key {error}"
    return first_line(error)


def _with_adapter(model: nn.Module, config: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return the model with an adapter, and the adapter's name."""
    import peft

    if isinstance(model, peft.PeftModel):
        return model, model.active_adapter
    settings = dict(config or {})
    # the other ways compute the first values from the weights, and the adapter replaces these
    if isinstance(settings.get("init_lora_weights"), str):
        settings["init_lora_weights"] = True
    peft_config = peft.PeftConfig.from_peft_type(**settings)
    return peft.get_peft_model(model, peft_config, adapter_name=_ADAPTER), _ADAPTER


def _saved_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    state: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, adapter_name=name, save_embedding_layers=False
    )
    return state


def _loaded(
    model: Any, name: str, state: dict[str, Any], saved: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Return the adapter's missing keys and the unexpected keys, as ``PeftModel.from_pretrained``
    finds them, and the keys of `saved` that get no value.
    """
    from peft import set_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    result: Any = set_peft_model_state_dict(model, state, adapter_name=name)
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(model.peft_config[name].peft_type, "")
    tensors = dict(model.named_parameters(remove_duplicate=False))
    absent = set(result.missing_keys)
    # some methods have one tensor that all modules share, and save it once
    loaded = {id(tensor) for key, tensor in tensors.items() if key not in absent}
    missing = []
    for key in result.missing_keys:
        if prefix in key and name in key and id(tensors.get(key)) not in loaded:
            missing.append(key)
    unexpected = list(result.unexpected_keys)
    if model.peft_config[name].is_prompt_learning:
        # the strict load of the prompt comes after the load that returned `result`
        unexpected = [key for key in unexpected if key not in saved]
        unloaded = [key for key in saved if key not in state]
    else:
        unloaded = _unloaded(model, absent, saved, state)
    return tuple(missing), tuple(unexpected), tuple(unloaded)


def _unloaded(
    model: Any, absent: Collection[str], saved: Mapping[str, torch.Tensor], state: Collection[str]
) -> list[str]:
    """Return the keys of `saved` that get no value, if the model's keys `absent` do not.

    PEFT saves some tensors that are not in the state dict of the model, under their own names.
    """
    loaded: set[Token] = set()
    not_loaded: set[Token] = set()
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            (not_loaded if key in absent else loaded).add(token(value))
    unloaded = []
    for key, tensor in saved.items():
        place = token(tensor)
        is_loaded = place in loaded or (place not in not_loaded and key in state)
        if not is_loaded:
            unloaded.append(key)
    return unloaded
