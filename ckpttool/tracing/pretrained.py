"""The names of ``from_pretrained``: the keys that ``save_pretrained`` writes for a model of
transformers.

transformers (since version 5) keeps the difference to ``state_dict()`` as data, and has functions
for both ways: a model whose ``state_dict`` and ``load_state_dict`` are these functions is traced
like any other. Nothing is imitated.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.names import ON_PLACE, Hook, Names
from ckpttool.core.text import code_of
from ckpttool.io.paths import is_url
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.user_code import user_code

_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers loads in threads, which no recorder sees


def is_pretrained(model: LoadedModel) -> bool:
    """Return whether it is a model of transformers, in a version that has the conversion of
    names.
    """
    if "transformers" not in sys.modules:
        return False
    kind = model.kind
    # A model of transformers exists only if this module was imported; others must not need it.
    cls = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return cls is not None and issubclass(kind, cls) and _conversions() is not None


def as_pretrained(model: LoadedModel) -> LoadedModel:
    """Return the definition whose ``state_dict()`` has the names of ``save_pretrained``, and which
    loads these.

    Raises `CkptError` if it is not a model of transformers 5.
    """
    if not is_pretrained(model):
        raise CkptError(
            f"{model.operand} has no names of from_pretrained: it is not a model of transformers 5"
            " or newer",
            hint="its own names are --to serialized; pip install -U transformers",
        )

    def make(real: bool) -> nn.Module:
        instance = model.make(real)
        cls = type(instance)  # transformers uses its name
        instance.__class__ = type(cls.__name__, (_Pretrained, cls), {"__module__": cls.__module__})
        return instance

    return replace(model, make=make)


def by_transformers(names: Names) -> Names:
    """Return the names of such a definition, with the function of transformers as the hook; it is
    the root's only.
    """
    revert = _conversions()[1]
    code = revert.__code__
    hook = Hook(revert.__name__, code.co_filename, code.co_firstlineno, "")
    serialized = []
    for key in names.serialized:
        serialized.append(key if key.hook is None else replace(key, hook=hook))
    notes = tuple(note for note in names.notes if code_of(note) != ON_PLACE)
    return replace(names, serialized=tuple(serialized), notes=notes)


def of_folder(operand: str, arguments: Mapping[str, Any], materialize: bool) -> LoadedModel:
    """Return the model that ``hf:FOLDER`` names: built from its ``config.json`` by transformers'
    own code, never the folder's.

    Raises `CkptError` if transformers does not know it, or the weights are quantized.
    """
    folder = operand.partition(":")[2]
    if arguments:
        raise CkptError(
            f"{operand} is described by its config.json", hint="leave the arguments out"
        )
    if is_url(folder):
        raise CkptError(
            f"{folder} is a URL, and a model is built of a config.json on the disk",
            hint="download that file alone, and name its folder as hf:FOLDER; the weights are read"
            " where they are",
        )
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise CkptError(
            f"{folder or operand} holds no config.json",
            hint="hf:FOLDER names what save_pretrained wrote",
        )
    if importlib.util.find_spec("transformers") is None:
        raise CkptError(f"{operand} needs transformers", hint="pip install 'transformers>=5'")
    with user_code(f"transformers cannot build a model from {folder}/config.json"):
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        names = config.architectures or []
        cls = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if getattr(config, "quantization_config", None) is not None:
        raise CkptError(
            f"{folder} holds quantized weights", hint="name the model's code: --model file.py:build"
        )
    if cls is None:
        raise CkptError(
            f"transformers {transformers.__version__} has no {names[0]}",
            hint="pip install -U transformers",
        )

    def make(real: bool) -> nn.Module:
        before = torch.get_default_dtype()
        dtype = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None)
        torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
        try:
            with torch.device("cpu" if real else "meta"):
                instance: Any = cls(config) if names else cls.from_config(config)
                return instance
        finally:
            torch.set_default_dtype(before)

    return LoadedModel(operand, make, materialize)


def _conversions() -> Any:
    """Return the functions of transformers; None if this version does not have them."""
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


class _Pretrained:
    """Two methods that precede the model's: save as ``save_pretrained`` does, and load as
    ``from_pretrained`` does.
    """

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the keys and tensors of the file; as a part of another module its own."""
        with _itself(self):
            state = self.state_dict(*args, **kwargs)
            if args or kwargs:
                return state
            _, revert, _, _, untied = _conversions()
            ignored = self._keys_to_ignore_on_save or ()
            kept = {key: value for key, value in state.items() if key not in ignored}
            return revert(self, untied(kept, self))

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the file's tensors into the model's. With `strict`, raises as torch's own method
        does.
        """
        expected = list(self.state_dict()) if strict else []
        conversions, _, load, load_config, _ = _conversions()
        with _itself(self), _in_this_thread():
            tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            device = next((p.device for p in self.parameters()), torch.device("cpu"))
            config = load_config(
                weight_mapping=conversions(self),
                device_map={"": str(device)},
                dtype_plan={"*": None},
            )
            info, _ = load(self, dict(state_dict), config)
            self.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
            self._adjust_missing_and_unexpected_keys(info)
            _copy_back(self, tensors)
        if not strict:
            return
        errors = _errors(info, [key for key in expected if key not in state_dict])
        if errors:
            lines = [f"Error(s) in loading state_dict for {type(self).__name__}:", *errors]
            raise RuntimeError("\n\t".join(lines))


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Run transformers without threads, progress bars and warnings."""
    from transformers.utils import logging

    before, level, bars = (
        os.environ.get(_ASYNC),
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
    )
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


def _copy_back(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the new tensors into the model's `tensors`, and put these back, as torch's loading
    does.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            new = getattr(module, last)
            if new is not tensor:
                tensor.copy_(new)
    for module_path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for last in table:
                name = f"{module_path}.{last}" if module_path else last
                table[last] = tensors.get(name, table[last])


def _errors(info: Any, absent: list[str]) -> list[str]:
    """Return the errors of loading, in the words of torch's own strict loading."""
    wrong = []
    for name, file_shape, shape in sorted(info.mismatched_keys):
        wrong.append(
            f"size mismatch for {name}: copying a param with shape {file_shape} from checkpoint, "
            f"the shape in current model is {shape}."
        )
    wrong += [f"{name}: {text}" for name, text in sorted(info.conversion_errors.items())]
    missing = absent if info.missing_keys or wrong else []
    lines = []
    for word, keys in (
        ("Missing", missing or sorted(info.missing_keys)),
        ("Unexpected", sorted(info.unexpected_keys)),
    ):
        if keys:
            quoted = ", ".join(f'"{key}"' for key in keys)
            lines.append(f"{word} key(s) in state_dict: {quoted}. ")
    return lines + wrong


@contextmanager
def _itself(model: Any) -> Iterator[None]:
    """Give the model the class of transformers, without the two methods and what watches them."""
    renamed = type(model)
    watched = {
        name: vars(model).pop(name)
        for name in ("state_dict", "load_state_dict")
        if name in vars(model)
    }
    model.__class__ = renamed.__mro__[2]
    try:
        yield
    finally:
        model.__class__ = renamed
        vars(model).update(watched)
