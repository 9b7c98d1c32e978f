"""The names of ``from_pretrained``: what ``save_pretrained`` writes of a model of transformers, as a form of its own.

transformers (from version 5 on) keeps how these differ from ``state_dict()`` as data, and has both ways as functions: a
model whose ``state_dict`` and ``load_state_dict`` are these two is traced like any other. Nothing of it is imitated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.names import AS_A_PART, Hook, Names
from ckpttool.io.paths import is_url
from ckpttool.tracing.build_model import LoadedModel, user_code

_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers loads in threads, where no recorder sees it


def is_pretrained(model: LoadedModel) -> bool:
    """Whether it is a model of transformers, in a version that tells how its files' names differ."""
    if "transformers" not in sys.modules:
        return False
    instance = model.build()
    from transformers import PreTrainedModel

    return isinstance(instance, PreTrainedModel) and _conversions() is not None


def as_pretrained(model: LoadedModel) -> LoadedModel:
    """The definition whose ``state_dict()`` has the names that ``save_pretrained`` writes, and which loads these.

    Raises `CkptError` where it is no model of transformers 5.
    """
    if not is_pretrained(model):
        raise CkptError(
            f"{model.operand} has no names of from_pretrained: it is no model of transformers 5 or newer",
            hint="its own names are --to serialized; pip install -U transformers",
        )
    return replace(model, make=lambda real: _renamed(model.make(real)))


def by_transformers(names: Names) -> Names:
    """`names` of such a definition, with the function of transformers for the method above it; it is the root only."""
    revert = _conversions()[1]
    code = revert.__code__
    hook = Hook(revert.__name__, code.co_filename, code.co_firstlineno, "")
    serialized = tuple(replace(key, hook=None if key.hook is None else hook) for key in names.serialized)
    notes = tuple(note for note in names.notes if not note.startswith(AS_A_PART))
    return replace(names, serialized=serialized, notes=notes)


def of_folder(operand: str, arguments: Mapping[str, Any], materialize: bool) -> LoadedModel:
    """The model that ``hf:FOLDER`` names: built of its ``config.json`` by transformers' own code, never the folder's.

    Raises `CkptError` where transformers does not know it, or the weights are quantized.
    """
    folder = operand.partition(":")[2]
    if arguments:
        raise CkptError(f"{operand} is described by its config.json", hint="leave --model-kwargs out")
    if is_url(folder):
        raise CkptError(
            f"{folder} is a URL, and a model is built of a config.json on the disk",
            hint="download that file alone, and name its folder as hf:FOLDER; the weights are read where they are",
        )
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise CkptError(f"{folder or operand} holds no config.json", hint="hf:FOLDER names what save_pretrained wrote")
    try:
        import transformers
    except ImportError:
        raise CkptError(f"{operand} needs transformers", hint="pip install 'transformers>=5'") from None
    with user_code(f"{folder}/config.json describes no model that transformers builds"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise CkptError(f"{folder} holds quantized weights", hint="name the model's code: --model file.py:build")
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if kind is None:
        raise CkptError(
            f"transformers {transformers.__version__} has no {names[0]}", hint="pip install -U transformers"
        )
    return LoadedModel(operand, lambda real: _built(kind, config, real), materialize)


def _built(kind: Any, config: Any, real: bool) -> nn.Module:
    before = torch.get_default_dtype()
    wanted = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None)
    torch.set_default_dtype(wanted if isinstance(wanted, torch.dtype) else before)
    try:
        with torch.device("cpu" if real else "meta"):
            return kind.from_config(config) if kind.__name__ == "AutoModel" else kind(config)
    finally:
        torch.set_default_dtype(before)


def _conversions() -> Any:
    """The functions of transformers; None in a version that has not got them."""
    try:
        from transformers import conversion_mapping, core_model_loading, modeling_utils

        return (
            conversion_mapping.get_model_conversion_mapping,
            core_model_loading.revert_weight_conversion,
            core_model_loading.convert_and_load_state_dict_in_model,
            modeling_utils.LoadStateDictConfig,
            modeling_utils.remove_tied_weights_from_state_dict,
        )
    except (ImportError, AttributeError):
        return None


def _renamed(instance: nn.Module) -> nn.Module:
    """`instance`, with the two methods put before those of its class; transformers goes by the name of that."""
    kind = type(instance)
    instance.__class__ = type(kind.__name__, (_Pretrained, kind), {"__module__": kind.__module__})
    return instance


class _Pretrained:
    """What ``save_pretrained`` does to a state dict before it writes it, and ``from_pretrained`` after it was read."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The keys and tensors of the file; as a part of another module those of its own."""
        with _itself(self):
            state = self.state_dict(*args, **kwargs)
            if args or kwargs:
                return state
            _, revert, _, _, untied = _conversions()
            ignored = self._keys_to_ignore_on_save or ()
            kept = {key: value for key, value in state.items() if key not in ignored}
            return revert(self, untied(kept, self))

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the file's tensors into those that are there. With `strict`, raises as torch's own method does."""
        wanted = list(self.state_dict()) if strict else []
        with _itself(self):
            own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            info = _converted(self, state_dict)
            _take_over(self, own)
        errors = [] if not strict else _errors(info, [key for key in wanted if key not in state_dict])
        if errors:
            raise RuntimeError(f"Error(s) in loading state_dict for {type(self).__name__}:\n\t" + "\n\t".join(errors))


def _converted(model: Any, state: Mapping[str, Any]) -> Any:
    """Puts what is made of the file's tensors in the places of the model's; what transformers says of it."""
    conversions, _, load, config, _ = _conversions()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    asked = config(weight_mapping=conversions(model), device_map={"": str(device)}, dtype_plan={"*": None})
    with _in_this_thread():
        info, _ = load(model, dict(state), asked)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)
    return info


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """transformers without threads, progress bars and warnings."""
    from transformers.utils import logging

    before, level, bars = os.environ.get(_ASYNC), logging.get_verbosity(), logging.is_progress_bar_enabled()
    os.environ[_ASYNC] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        os.environ.pop(_ASYNC)
        if before is not None:
            os.environ[_ASYNC] = before


def _take_over(model: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
    """Copies the new tensors into the model's own, which go back to their places: as torch's loading does it."""
    with torch.no_grad():
        for name, tensor in own.items():
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            new = getattr(module, last)
            if new is not tensor:
                tensor.copy_(new)
    for module_path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for last in table:
                name = f"{module_path}.{last}" if module_path else last
                table[last] = own.get(name, table[last])


def _errors(info: Any, absent: list[str]) -> list[str]:
    """What stands against it, in the words of torch's own strict loading."""
    wrong = [
        f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, "
        f"the shape in current model is {own}."
        for name, shape, own in sorted(info.mismatched_keys)
    ]
    wrong += [f"{name}: {text}" for name, text in sorted(info.conversion_errors.items())]
    missing = absent if info.missing_keys or wrong else []
    lists = (("Missing", missing or sorted(info.missing_keys)), ("Unexpected", sorted(info.unexpected_keys)))
    said = [f"{word} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) for word, keys in lists if keys]
    return [*(f"{line}. " for line in said), *wrong]


@contextmanager
def _itself(model: Any) -> Iterator[None]:
    """The model as transformers made it, without what stands before its methods."""
    renamed = type(model)
    watched = {name: vars(model).pop(name) for name in ("state_dict", "load_state_dict") if name in vars(model)}
    model.__class__ = renamed.__mro__[2]
    try:
        yield
    finally:
        model.__class__ = renamed
        vars(model).update(watched)
