"""Small models of other libraries, if installed: transformers, timm, torchvision, diffusers,
torchtune.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

MOST = 32_000_000  # parameters; a larger model is built on the meta device
_MISSING = re.compile("operator torchvision::(\\w+) does not exist")
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
_SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "decoder_hidden_size"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"),
        48,
    ),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
}
_LAYERS = dict.fromkeys(
    (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "encoder_layers",
        "decoder_layers",
        "depth",
    ),
    2,
)
_HEADS = (
    *(
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "IMAGE_CLASSIFICATION",
    ),
    *(
        "OBJECT_DETECTION",
        "SEMANTIC_SEGMENTATION",
        "AUDIO_CLASSIFICATION",
        "CTC",
        "MASKED_LM",
        "PRETRAINING",
    ),
    *("TIME_SERIES_PREDICTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION"),
)


class CannotBuild(Exception):
    """The library cannot build the model this small, or needs other packages."""


def _has_torchvision() -> bool:
    """Import torchvision. With a CPU-only torch, PyPI wheels lack their operators: declare them
    without code.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    while True:
        try:
            import torchvision  # noqa: F401

            return True
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None:
                return False
            _OPERATORS.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]


_has_torchvision()  # transformers and diffusers look for it


Build = Callable[[], nn.Module]
Find = Callable[[], Build]


def zoos() -> dict[str, Callable[[], dict[str, Find]]]:
    """Return the installed libraries, each with model names and functions that find a builder.

    A find function raises `CannotBuild` if there is no builder. A library that cannot be imported
    has one unnamed case.
    """
    zoos = {
        "transformers": _transformers,
        "timm": _timm,
        "torchvision": _torchvision,
        "diffusers": _diffusers,
        "torchtune": _torchtune,
        "peft": _peft,
    }
    return {
        name: partial(_imported, zoo)
        for name, zoo in zoos.items()
        if importlib.util.find_spec(name) is not None
    }


def _imported(zoo: Callable[[], dict[str, Find]]) -> dict[str, Find]:
    try:
        return zoo()
    except ImportError as error:
        return {"": partial(_first, [partial(_raise, error)])}


def _raise(error: Exception) -> nn.Module:
    raise error


def _transformers() -> dict[str, Find]:
    from transformers.models.auto import configuration_auto

    return {kind: partial(_transformer, kind) for kind in configuration_auto.CONFIG_MAPPING_NAMES}


def _transformer(kind: str) -> Build:
    from transformers.models.auto import configuration_auto, modeling_auto

    cls = configuration_auto.CONFIG_MAPPING[kind]
    for head in (*(f"MODEL_FOR_{word}_MAPPING" for word in _HEADS), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, head, {})
        if cls in mapping:
            break
    else:
        raise CannotBuild("is only part of other models")
    try:
        models = mapping[cls]
    except ValueError as error:  # the table names a missing class
        raise CannotBuild(f"is not built from these sizes: {error}") from error
    model = models[0] if isinstance(models, tuple) else models

    def build(sizes: dict[str, int]) -> Any:
        return model(_shrunk(cls(), sizes))

    return _first(partial(build, sizes) for sizes in (_SIZES | _LAYERS, _LAYERS, {}))


def _shrunk(config: Any, sizes: dict[str, int]) -> Any:
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        if "num_hidden_layers" in sizes and isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[: sizes["num_hidden_layers"]])
    for name in vars(config).keys() & sizes.keys():
        if type(vars(config)[name]) is int:
            setattr(config, name, min(sizes[name], vars(config)[name]))
    for name in getattr(config, "sub_configs", None) or ():
        if hasattr(getattr(config, name, None), "to_dict"):
            _shrunk(getattr(config, name), sizes)
    return config


def _timm() -> dict[str, Find]:
    """Find one model for every module of timm, preferably one whose name says that it is small."""
    import timm

    words = (
        "test",
        "atto",
        "pico",
        "femto",
        "nano",
        "micro",
        "mini",
        "xxs",
        "xs",
        "tiny",
        "small",
        "s",
    )
    found: dict[str, Find] = {}
    for module in timm.list_modules():

        def size_rank(name: str) -> int:
            parts = re.split("[_0-9]", name)
            return min((words.index(part) for part in parts if part in words), default=len(words))

        names = sorted(timm.list_models(module=module), key=size_rank)
        found[module] = partial(_first, [partial(timm.create_model, name) for name in names[:4]])
    return found


def _torchvision() -> dict[str, Find]:
    from torchvision import models

    def find(name: str) -> Build:
        options = (
            {"weights_backbone": None}
            if "weights_backbone" in _parameters(models.get_model_builder(name))
            else {}
        )
        return _first([partial(models.get_model, name, weights=None, **options)])

    return {name: partial(find, name) for name in models.list_models()}


def _diffusers() -> dict[str, Find]:
    import diffusers

    with_weights = {
        name: cls
        for name in dir(diffusers)
        if isinstance(cls := getattr(diffusers, name, None), type)
        and issubclass(cls, diffusers.ModelMixin)
    }
    return {
        name: partial(_first_by_defaults, cls)
        for name, cls in with_weights.items()
        if cls is not diffusers.ModelMixin
    }


def _first_by_defaults(cls: Any) -> Build:
    defaults = {
        name: one.default for name, one in _parameters(cls).items() if type(one.default) is int
    }

    def build(sizes: dict[str, int]) -> nn.Module:
        return cls(
            **{
                name: min(sizes[name], default)
                for name, default in defaults.items()
                if name in sizes
            }
        )

    heads = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "caption_channels": 32,
        "cross_attention_dim": 32,
    }
    return _first(partial(build, sizes) for sizes in (_LAYERS | heads, _LAYERS, {}))


_TUNE: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "head_dim": 8,
    "max_seq_len": 32,
    "intermediate_dim": 48,
    "hidden_dim": 48,
    "num_classes": 4,
    "patch_size": 8,
    "tile_size": 32,
    "lora_attn_modules": ["q_proj", "v_proj"],
    "lora_modules": ["q_proj", "v_proj"],
    "fusion_interval": 2,
    "num_special_tokens": 8,
    "encoder_max_seq_len": 16,
    "decoder_embed_dim": 32,
    "clip_embed_dim": 32,
    "clip_hidden_states": [0],
    "num_hidden_inputs": 1,
    "num_layers_projection": 1,
    "num_hidden_layers": 2,
    "cls_output_dim": 8,
    "encoder_lora": True,
    "fusion_lora": True,
    "norm_eps": 1e-5,
    "rel_pos_num_buckets": 8,
    "rel_pos_max_dist": 16,
    "ffn_dim": 48,
    "attn_dropout": 0.0,
    "rope_base": 10_000,
    "sliding_window_size": 8,
    "hidden_layer_dim": 48,
    "final_logit_softcapping": 1.0,
    "hidden_capping_value": 1.0,
    "dim": 32,
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "decoder_lora": True,
}


def _torchtune() -> dict[str, Find]:
    from torchtune import models

    builders: dict[str, Find] = {}
    for found in pkgutil.iter_modules(models.__path__):
        if not found.ispkg:
            continue
        path = f"torchtune.models.{found.name}._component_builders"
        if importlib.util.find_spec(path) is None:
            continue
        module = importlib.import_module(path)
        for name, function in vars(module).items():
            if (
                inspect.isfunction(function)
                and function.__module__ == module.__name__
                and name[0] != "_"
            ):
                builders[f"{found.name}.{name}"] = partial(_first_by_table, function)
    return builders


def _peft() -> dict[str, Find]:
    """Find every kind of adapter, on a small Llama."""
    import peft

    return {
        kind.value: partial(_adapted, config)
        for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }


_ADAPTER: dict[str, Any] = {
    "target_modules": ["q_proj", "v_proj"],
    "feedforward_modules": [],
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": 4,
    "num_tasks": 2,
    "adapter_len": 4,
    "adapter_layers": 2,
    "total_step": 10,
    "inference_mode": False,
}


def _adapted(config: Any) -> Build:
    import peft
    import transformers

    sizes: Any = {
        "hidden_size": 256,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    base = transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes)
    options = {name: value for name, value in _ADAPTER.items() if name in _parameters(config)}
    return _first(
        [lambda: peft.get_peft_model(transformers.LlamaForCausalLM(base), config(**options))]
    )


def _first_by_table(function: Any) -> Build:
    required = [name for name, one in _parameters(function).items() if one.default is one.empty]
    unknown = [name for name in required if name not in _TUNE]
    if unknown:
        raise CannotBuild(
            f"takes arguments that are not in the table of sizes: {', '.join(unknown)}"
        )
    return _first([lambda: function(**{name: _TUNE[name] for name in required})])


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


def _first(builders: Iterable[Build]) -> Build:
    """Return the first function that builds a small enough model; if all are too large, the first
    on the meta device.

    Raise `CannotBuild` with the first reason if none does.
    """
    reasons, large = [], []
    for build in builders:
        try:
            on_meta = builds_on_meta(build)
            model = _on_meta(build) if on_meta else build()
            size = sum(parameter.numel() for parameter in model.parameters())
            if size <= MOST:
                return build
            if on_meta:
                large.append(partial(_on_meta, build))
            else:
                reasons.append(
                    f"is too large, and its constructor needs values: {size:,} parameters"
                )
        except Exception as error:  # third-party code
            reason = (
                "needs another package"
                if isinstance(error, ImportError)
                else ("is not built from these sizes")
            )
            reasons.append(
                f"{reason}: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
            )
    if large:
        return large[0]
    raise CannotBuild(reasons[0])


def builds_on_meta(build: Build) -> bool:
    try:
        _on_meta(build)
    except (NotImplementedError, RuntimeError):  # it computes with values
        return False
    return True


def _on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()
