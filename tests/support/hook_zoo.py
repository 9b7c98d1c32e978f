"""Small modules with the state_dict hooks and overrides of public code: one factory each, in `ZOO`.

A factory takes no arguments and builds on the default device, so that each model can be built on
meta or a real device.
"""

from __future__ import annotations

import copy
import functools
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

ZOO: dict[str, Callable[[], nn.Module]] = {}


def pattern(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ZOO[build.__name__] = build
    return build


def saving(
    make: Callable[[], nn.Module], load: Callable[..., None] | None = None
) -> Callable[[Any], Any]:
    """Add a pattern: the module that `make` builds, with the decorated function and `load` as its
    hooks.
    """

    def decorate(save: Callable[..., None]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model = make()
            model._register_state_dict_hook(save)
            if load is not None:
                model._register_load_state_dict_pre_hook(load)
            return model

        build.__name__ = save.__name__
        return pattern(build)

    return decorate


class Block(nn.Module):
    """Two layers, one inside a container called `layer`: what most hooks here rename."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


def renamed(sd: dict, prefix: str, old: str, new: str) -> None:
    for key in list(sd):
        if key.startswith(prefix + old):
            sd[prefix + new + key[len(prefix + old) :]] = sd.pop(key)


# Plain modules, without hooks


@pattern
def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


@pattern
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))


@pattern
def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pattern
def shared_module() -> nn.Module:
    inner = nn.Linear(3, 3)
    return nn.ModuleDict({"a": inner, "b": nn.Sequential(inner), "c": nn.Linear(3, 3)})


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.register_buffer("none", None)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


@pattern
def buffers() -> nn.Module:
    return nn.Sequential(Buffers(), Buffers())


@pattern
def expanded_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("ids", torch.zeros(1, 3).expand(4, 3))
    return model


@pattern
def overlapping_buffers() -> nn.Module:
    model = nn.Module()
    whole = torch.randn(4, 6)
    model.register_buffer("whole", whole)
    model.register_buffer("left", whole[:, :3])
    model.register_buffer("row", whole[1])
    return model


@pattern
def flat_parameter_views() -> nn.Module:
    model = nn.Module()
    flat = torch.randn(10)
    model.a = nn.Parameter(flat[:4].view(2, 2))
    model.b = nn.Parameter(flat[4:])
    return model


@pattern
def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


@pattern
def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 4))


@pattern
def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))


@pattern
def zero_elements() -> nn.Module:
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.register_buffer("none_yet", torch.empty(0))
    return model


@pattern
def names_like_wrappers() -> nn.Module:
    return nn.ModuleDict(
        {
            "module": nn.Linear(2, 2),
            "_orig_mod": Block(),
            "layer": nn.ModuleDict({"layer": Block()}),
        }
    )


# Renaming


class StripLayer(Block):
    """torchtune's fusion layer: the wrapped layer's keys appear without the wrapper's segment."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(StripLayer._save)
        self._register_load_state_dict_pre_hook(self._restore, with_module=True)

    def _save(self, sd: dict, prefix: str, *args: object) -> None:
        for key in list(sd):
            if key.startswith(prefix + "layer."):
                sd[prefix + key[len(prefix + "layer.") :]] = sd.pop(key)

    def _restore(self, module: nn.Module, sd: dict, prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):
            if prefix + name in sd:
                sd[prefix + "layer." + name] = sd.pop(prefix + name)


@pattern
def strip_layer() -> nn.Module:
    return StripLayer()


@pattern
def strip_layer_nested() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep": StripLayer(), "other": Block()}))


@pattern
def strip_without_loading_half() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(lambda m, sd, prefix, meta: renamed(sd, prefix, "layer.", ""))
    return model


@saving(
    lambda: nn.ModuleDict(
        {"layer": nn.ModuleDict({"layer": nn.Linear(2, 2), "x": nn.Linear(2, 2)})}
    )
)
def strip_every_occurrence(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """``key.replace("layer.", "")`` also strips the user's own `layer` further down."""
    for key in list(sd):
        sd[key.replace("layer.", "")] = sd.pop(key)


@pattern
def public_post_hook() -> nn.Module:
    model = Block()

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        renamed(sd, prefix, "norm.", "ln.")

    def restore(module: nn.Module, sd: dict, prefix: str, *args: object) -> None:
        renamed(sd, prefix, "ln.", "norm.")

    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(restore)
    return model


def _add_prefix(module: nn.Module, sd: dict, prefix: str, meta: dict, added: str) -> None:
    renamed(sd, prefix, "", added)


@pattern
def partial_hook() -> nn.Module:
    model = nn.Linear(2, 3)
    model._register_state_dict_hook(functools.partial(_add_prefix, added="inner."))
    return nn.Sequential(model)


class Renamer:
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __call__(self, module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        renamed(sd, prefix, self.old, self.new)


@pattern
def callable_object_hook() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(Renamer("norm.", "LayerNorm."))
    return model


@pattern
def new_dict_from_root_hook() -> nn.Module:
    model = nn.Sequential(Block())
    model._register_state_dict_hook(
        lambda m, sd, p, meta: OrderedDict((f"model.{k}", v) for k, v in sd.items())
    )
    return model


@pattern
def new_dict_from_child_hook() -> nn.Module:
    """torch uses the return value of a root's hook only, and ignores a child's."""
    child = Block()
    child._register_state_dict_hook(lambda m, sd, p, meta: {f"lost.{k}": v for k, v in sd.items()})
    return nn.Sequential(child)


@pattern
def two_hooks_in_a_row() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(Renamer("layer.", "a."))
    model._register_state_dict_hook(Renamer("a.", "b."))
    return model


@pattern
def hooks_in_parent_and_child() -> nn.Module:
    child = StripLayer()
    parent = nn.ModuleDict({"child": child, "proj": nn.Linear(4, 4)})
    parent._register_state_dict_hook(Renamer("child.", "kid."))
    return nn.Sequential(parent)


@pattern
def absolute_keys() -> nn.Module:
    child = nn.Linear(2, 2)

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        sd["shared.weight"] = sd.pop(prefix + "weight")

    child._register_state_dict_hook(save)
    return nn.Sequential(nn.Linear(2, 2), child)


@pattern
def swaps_two_names() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def swap(sd: dict, prefix: str) -> None:
        for name in ("weight", "bias"):
            a, b = prefix + "a." + name, prefix + "b." + name
            sd[a], sd[b] = sd[b], sd[a]

    model._register_state_dict_hook(lambda m, sd, p, meta: swap(sd, p))
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: swap(sd, p))
    return model


@saving(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "lora": nn.Linear(2, 2)}))
def conditional_on_sibling(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    if prefix + "lora.weight" in sd:
        renamed(sd, prefix, "a.", "base.")


# Dropping and adding


@pattern
def drops_a_key() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(
        lambda m, sd, p, meta: [sd.pop(k) for k in list(sd) if "norm" in k] and None
    )
    return model


@pattern
def drops_and_ignores_missing() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(
        lambda m, sd, p, meta: [sd.pop(k) for k in list(sd) if "norm" in k] and None
    )
    model.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())
    return model


@pattern
def adds_a_constant() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "version": torch.tensor([3.0, 1.0])})
    )
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: sd.pop(p + "version", None) and None)
    return model


@pattern
def adds_a_number() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(lambda m, sd, p, meta: sd.update({p + "version": 7}))
    return model


@pattern
def asks_for_the_device() -> nn.Module:
    model = nn.Linear(2, 2)

    def on_cpu() -> bool:
        weight = model.weight
        return (
            weight.is_cpu and weight.device.type == "cpu" and weight.type() == "torch.FloatTensor"
        )

    def save(module: nn.Module, state: dict[str, Any], prefix: str, meta: object) -> None:
        if on_cpu():
            state[prefix + "kernel"] = state.pop(prefix + "weight")

    def load(state: dict[str, Any], prefix: str, *rest: object) -> None:
        if on_cpu():
            state[prefix + "weight"] = state.pop(prefix + "kernel")

    model._register_state_dict_hook(save)
    model._register_load_state_dict_pre_hook(load)
    return model


@pattern
def adds_an_alias() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "kernel": sd[p + "weight"]})
    )
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: sd.pop(p + "kernel"))
    return model


@saving(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
def two_to_one_key(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """Two tensors are saved under one key: the first is silently lost."""
    for key in list(sd):
        sd["x." + key.split(".")[-1]] = sd.pop(key)


# Computing


class FusedQKV(nn.Module):
    """Hold q, k and v in one weight, but save them separately."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self._register_state_dict_hook(FusedQKV._split)
        self._register_load_state_dict_pre_hook(self._join)

    def _split(self, sd: dict, prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):
            parts = sd.pop(f"{prefix}qkv.{name}").chunk(3, dim=0)
            sd.update({f"{prefix}{letter}.{name}": part for letter, part in zip("qkv", parts)})

    def _join(self, sd: dict, prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):
            keys = [f"{prefix}{letter}.{name}" for letter in "qkv"]
            if all(key in sd for key in keys):
                sd[f"{prefix}qkv.{name}"] = torch.cat([sd.pop(key) for key in keys])


@pattern
def fused_qkv() -> nn.Module:
    return nn.Sequential(FusedQKV(), nn.Linear(4, 2))


@pattern
def fused_twice() -> nn.Module:
    """A module at two paths; a hook computes the keys of both."""
    fused = FusedQKV()
    return nn.Sequential(fused, nn.Linear(4, 4), fused)


def _load_saves_a_tie_once(sd: dict, prefix: str, *args: object) -> None:
    sd[prefix + "head.weight"] = sd[prefix + "embed.weight"]


@saving(lambda: tied(), _load_saves_a_tie_once)
def saves_a_tie_once(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    del sd[prefix + "head.weight"]


def _load_split_by_slices(sd: dict, prefix: str, *args: object) -> None:
    sd[prefix + "weight"] = torch.cat([sd.pop(prefix + "gate"), sd.pop(prefix + "up")], dim=0)


@saving(lambda: nn.Linear(3, 6), _load_split_by_slices)
def split_by_slices(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    whole = sd.pop(prefix + "weight")
    sd[prefix + "gate"], sd[prefix + "up"] = whole[:2], whole[2:]


@pattern
def packs_four_bits() -> nn.Module:
    """Pack two numbers into one byte, like quantized weights; values above 15 are lost."""
    model = nn.Linear(2, 2)
    model.register_buffer("codes", torch.randint(0, 32, (3, 8), dtype=torch.int32))

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        codes = sd.pop(prefix + "codes")
        sd[prefix + "packed"] = (codes[:, 0::2] & 15 | (codes[:, 1::2] << 4)).to(torch.uint8)

    def restore(sd: dict, prefix: str, *args: object) -> None:
        packed = sd.pop(prefix + "packed").to(torch.int32)
        sd[prefix + "codes"] = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)

    model._register_state_dict_hook(save)
    model._register_load_state_dict_pre_hook(restore)
    return model


@pattern
def saves_complex_numbers_in_parts() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.polar(torch.ones(3, 4), torch.randn(3, 4)))

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        angles = sd.pop(prefix + "angles")
        sd[prefix + "cos"], sd[prefix + "sin"] = angles.real.clone(), angles.imag.clone()

    def restore(sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "angles"] = torch.complex(sd.pop(prefix + "cos"), sd.pop(prefix + "sin"))

    model._register_state_dict_hook(save)
    model._register_load_state_dict_pre_hook(restore)
    return model


def _load_joins_experts(sd: dict, prefix: str, *args: object) -> None:
    for i, part in enumerate(sd.pop(prefix + "stacked").unbind(0)):
        sd[f"{prefix}experts.{i}.weight"] = part


@saving(
    lambda: nn.ModuleDict(
        {"experts": nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(3))}
    ),
    _load_joins_experts,
)
def joins_experts(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """Save the experts stacked into one tensor; load them by unbinding."""
    sd[prefix + "stacked"] = torch.stack([sd.pop(f"{prefix}experts.{i}.weight") for i in range(3)])


@pattern
def transposes() -> nn.Module:
    model = nn.Linear(3, 4)

    def turn(sd: dict, prefix: str) -> None:
        sd[prefix + "weight"] = sd[prefix + "weight"].t()

    model._register_state_dict_hook(lambda m, sd, p, meta: turn(sd, p))
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: turn(sd, p))
    return model


@pattern
def transposes_contiguous() -> nn.Module:
    model = nn.Linear(3, 4)

    def turn(sd: dict, prefix: str) -> None:
        sd[prefix + "weight"] = sd[prefix + "weight"].transpose(0, 1).contiguous()

    model._register_state_dict_hook(lambda m, sd, p, meta: turn(sd, p))
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: turn(sd, p))
    return model


def _load_permutes_rotary(sd: dict, prefix: str, *args: object) -> None:
    weight = sd[prefix + "weight"]
    sd[prefix + "weight"] = weight.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)


@saving(lambda: nn.Linear(4, 8, bias=False), _load_permutes_rotary)
def permutes_rotary(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """Meta's and Hugging Face's layouts of rotary heads: view, transpose, reshape."""
    weight = sd[prefix + "weight"]
    sd[prefix + "weight"] = weight.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)


@pattern
def casts_to_half() -> nn.Module:
    model = nn.Linear(2, 3)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({k: v.half() for k, v in sd.items()})
    )
    return model


@pattern
def casts_up() -> nn.Module:
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({k: v.float() for k, v in sd.items()})
    )
    return model


@pattern
def clones_and_moves() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({k: v.clone().cpu() for k, v in sd.items()})
    )
    return model


@pattern
def pads_vocabulary() -> nn.Module:
    model = nn.Embedding(5, 3)

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        weight = sd[prefix + "weight"]
        sd[prefix + "weight"] = torch.cat([weight, torch.zeros(3, 3)])

    model._register_state_dict_hook(save)
    model._register_load_state_dict_pre_hook(
        lambda sd, p, *a: sd.update({p + "weight": sd[p + "weight"][:5]})
    )
    return model


@pattern
def scales() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.full((2, 1), 2.0))
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "weight": sd[p + "weight"] * sd.pop(p + "scale") + 1})
    )
    return model


@saving(
    lambda: nn.ModuleDict(
        {
            "base": nn.Linear(4, 4),
            "a": nn.Linear(4, 2, bias=False),
            "b": nn.Linear(2, 4, bias=False),
        }
    )
)
def merges_lora(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    delta = sd.pop(prefix + "b.weight") @ sd.pop(prefix + "a.weight")
    sd[prefix + "base.weight"] = sd[prefix + "base.weight"] + 0.5 * delta


@pattern
def reorders_by_index() -> nn.Module:
    model = nn.Linear(3, 4)
    order = [2, 0, 3, 1]
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "weight": sd[p + "weight"][order]})
    )
    return model


@saving(lambda: nn.Linear(3, 4))
def averages_heads(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    sd[prefix + "mean"] = sd[prefix + "weight"].view(2, 2, 3).mean(1)
    values, _ = sd[prefix + "weight"].max(dim=0)
    sd[prefix + "top"] = values


@pattern
def complex_numbers() -> nn.Module:
    model = nn.Module()
    model.freqs = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        value = sd.pop(prefix + "freqs")
        sd[prefix + "conj"] = value.conj()
        sd[prefix + "pairs"] = torch.view_as_real(value)

    model._register_state_dict_hook(save)
    return model


@pattern
def bits_of_floats() -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "weight": sd[p + "weight"].view(torch.int32)})
    )
    return model


# In place


@pattern
def scales_in_place() -> nn.Module:
    """The hook scales the live weights, so that both the saved tensors and the model change."""
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd[p + "weight"].mul_(2) and None if False else _mul(sd, p)
    )
    return model


def _mul(sd: dict, prefix: str) -> None:
    sd[prefix + "weight"].mul_(2).add_(1)


@pattern
def scales_a_clone_in_place() -> nn.Module:
    model = nn.Linear(2, 2)

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        weight = sd[prefix + "weight"].clone()
        weight[0].zero_()
        weight[:, 1] *= 3
        sd[prefix + "weight"] = weight

    model._register_state_dict_hook(save)
    return model


def _load_writes_slices(sd: dict, prefix: str, *args: object) -> None:
    sd[prefix + "a.weight"], sd[prefix + "b.weight"] = sd.pop(prefix + "ab").split([2, 4])


@saving(
    lambda: nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 4, bias=False)}),
    _load_writes_slices,
)
def writes_slices(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    a, b = sd.pop(prefix + "a.weight"), sd.pop(prefix + "b.weight")
    whole = torch.empty(6, 3, dtype=a.dtype, device=a.device)
    whole[:2] = a
    whole[2:].copy_(b)
    sd[prefix + "ab"] = whole


@saving(lambda: nn.Linear(3, 2, bias=False))
def writes_through_a_transpose(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    turned = sd[prefix + "weight"].t().clone(memory_format=torch.preserve_format)
    turned[1:] += 1
    sd[prefix + "weight"] = turned
    sd[prefix + "row"] = turned[2]


@saving(lambda: nn.Linear(3, 4, bias=False))
def view_is_changed_through_base(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    whole = sd[prefix + "weight"].clone()
    sd[prefix + "part"] = whole[1:3, :2]
    whole.mul_(2)
    whole[2] = 0


@pattern
def masks_in_place() -> nn.Module:
    model = nn.Linear(3, 4, bias=False)
    model.register_buffer("mask", torch.ones(4, 3, dtype=torch.bool).tril())

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        sd[prefix + "weight"] = sd[prefix + "weight"].clone().masked_fill_(sd[prefix + "mask"], 0.5)

    model._register_state_dict_hook(save)
    return model


@saving(lambda: nn.Linear(3, 3))
def writes_out(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    out = torch.empty_like(sd[prefix + "weight"])
    torch.add(sd[prefix + "weight"], sd[prefix + "bias"], alpha=2, out=out)
    sd[prefix + "sum"] = out


@saving(lambda: nn.Linear(3, 2, bias=False))
def reshapes_in_place(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    sd[prefix + "weight"] = sd[prefix + "weight"].detach().t_().unsqueeze_(0)


@saving(lambda: Block())
def foreach_in_place(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    copies = [value.clone() for value in sd.values()]
    torch._foreach_mul_(copies, 3.0)
    sd.update(zip(list(sd), copies))


def _load_interleaves(sd: dict, prefix: str, *args: object) -> None:
    whole = sd.pop(prefix + "both")
    sd[prefix + "even.weight"], sd[prefix + "odd.weight"] = whole[::2], whole[1::2]


@saving(
    lambda: nn.ModuleDict(
        {"even": nn.Linear(3, 2, bias=False), "odd": nn.Linear(3, 2, bias=False)}
    ),
    _load_interleaves,
)
def interleaves(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    whole = torch.empty(4, 3)
    whole[::2], whole[1::2] = sd.pop(prefix + "even.weight"), sd.pop(prefix + "odd.weight")
    sd[prefix + "both"] = whole


# Bypassing the dispatcher


@pattern
def wraps_in_parameter() -> nn.Module:
    model = Block()
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update(
            {k: nn.Parameter(v.data, requires_grad=False) for k, v in sd.items()}
        )
    )
    return model


class PreHookFuses(nn.Module):
    """A pre-hook replaces the parameter before saving."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.register_state_dict_pre_hook(PreHookFuses._fuse)

    def _fuse(self, prefix: str, keep_vars: bool) -> None:
        self.a = nn.Parameter(self.a.detach() + self.b.detach())


@pattern
def pre_hook_swaps_parameter() -> nn.Module:
    return nn.Sequential(PreHookFuses())


class PreHookData(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_pre_hook(
            lambda m, prefix, keep: setattr(m.weight, "data", m.weight.data.t())
        )


@pattern
def pre_hook_swaps_data() -> nn.Module:
    return PreHookData()


@pattern
def dedupes_by_address() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        seen: set[int] = set()
        for key in list(sd):
            if sd[key].data_ptr() in seen:
                del sd[key]
            else:
                seen.add(sd[key].data_ptr())

    model._register_state_dict_hook(save)
    return model


# Overrides


class OverridesStateDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return {f"net.{k}": v for k, v in self.inner.state_dict(*args, **kwargs).items()}

    def load_state_dict(
        self, state_dict: dict, strict: bool = True, assign: bool = False
    ) -> object:
        inner = {k.removeprefix("net."): v for k, v in state_dict.items()}
        return self.inner.load_state_dict(inner, strict=strict)


@pattern
def overrides_state_dict() -> nn.Module:
    return OverridesStateDict()


class OverridesSave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = destination.pop(prefix + "weight").flatten()

    def _load_from_state_dict(self, sd: dict, prefix: str, *args: object) -> None:
        if prefix + "packed" in sd:
            sd[prefix + "weight"] = sd.pop(prefix + "packed").view(2, 3)
        super()._load_from_state_dict(sd, prefix, *args)


@pattern
def overrides_save_to_state_dict() -> nn.Module:
    return nn.Sequential(OverridesSave(), nn.Linear(2, 2))


class Versioned(nn.Module):
    """Load old files (without a version) under another name."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def _load_from_state_dict(
        self, sd: dict, prefix: str, local_metadata: dict, *args: object
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            sd[prefix + "scale"] = sd.pop(prefix + "gamma")
        super()._load_from_state_dict(sd, prefix, local_metadata, *args)


@pattern
def loads_only_with_metadata() -> nn.Module:
    return nn.Sequential(Versioned(), nn.Linear(2, 2))


class ExtraState(nn.Linear):
    def __init__(self, state: object) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        if isinstance(state, dict) and state["format"] != 3:
            raise ValueError(f"unknown format {state['format']}")
        self.state = state


@pattern
def extra_state() -> nn.Module:
    return nn.Sequential(ExtraState({"format": 3}), nn.Linear(2, 2))


@pattern
def extra_state_tensor() -> nn.Module:
    return nn.Sequential(ExtraState(torch.zeros(3, dtype=torch.uint8)))


@pattern
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


@pattern
def patched_instance_method() -> nn.Module:
    """alpaca-lora replaces the bound method on the instance."""
    model = Block()
    original = model.state_dict
    vars(model)["state_dict"] = lambda *a, **k: {
        n: v for n, v in original(*a, **k).items() if "layer" in n
    }
    return model


@pattern
def patched_instance_renames() -> nn.Module:
    model = Block()
    original = model.state_dict
    vars(model)["state_dict"] = lambda *a, **k: {f"n.{n}": v for n, v in original(*a, **k).items()}
    return model


# Reading values


@saving(lambda: nn.Linear(2, 2))
def asserts_on_values(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    assert bool(torch.isfinite(sd[prefix + "weight"]).all())
    renamed(sd, prefix, "weight", "kernel")


@saving(lambda: nn.Linear(2, 2))
def divides_by_item(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    sd[prefix + "weight"] = sd[prefix + "weight"] / sd[prefix + "weight"].abs().max().item()


@saving(lambda: nn.Linear(2, 2))
def goes_through_numpy(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy() * 2)


@pattern
def shares_memory_with_numpy() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({k: torch.from_numpy(v.numpy()) for k, v in sd.items()})
    )
    return model


@pattern
def constructor_leaves_cpu_tensors() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("freqs", torch.from_numpy(torch.arange(3, device="cpu").numpy()).float())
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "freqs": sd[p + "freqs"] * 2})
    )
    return model


# Awkward code


@saving(lambda: nn.Linear(2, 2))
def catches_the_error_of_reading(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """On meta the read fails, and the hook takes the fallback path."""
    try:
        float(sd[prefix + "weight"].sum())
        renamed(sd, prefix, "weight", "kernel")
    except (RuntimeError, NotImplementedError):
        renamed(sd, prefix, "weight", "fallback")


class LoadsBySlices(nn.Module):
    """Load by copying into slices of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))
        self.columns = nn.Parameter(torch.randn(2, 4))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "a"], destination[prefix + "b"] = self.weight.detach().split([2, 4])
        destination[prefix + "left"], destination[prefix + "right"] = self.columns.detach().chunk(
            2, dim=1
        )

    def _load_from_state_dict(self, sd: dict, prefix: str, *args: object) -> None:
        with torch.no_grad():
            self.weight[2:].copy_(sd[prefix + "b"])
            self.weight[:2] = sd[prefix + "a"]
            self.columns[:, :2] = sd[prefix + "left"]
            self.columns.data[:, 2:] = sd[prefix + "right"]


@pattern
def loads_by_slices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"deep": LoadsBySlices()}))


@pattern
def loads_a_part_only() -> nn.Module:
    model = nn.Linear(3, 4, bias=False)

    def restore(sd: dict, prefix: str, *args: object) -> None:
        with torch.no_grad():
            model.weight[:2].copy_(sd[prefix + "weight"][:2])
        sd[prefix + "weight"] = model.weight

    model._register_load_state_dict_pre_hook(restore)
    return model


class CopiesItself(nn.Module):
    """Save a deep copy after changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OverridesStateDict()

    def state_dict(self, *args: object, **kwargs: object) -> dict:
        other = copy.deepcopy(self.inner)
        with torch.no_grad():
            other.inner.layer.weight.mul_(2)
        return other.state_dict(*args, **kwargs)


@pattern
def copies_itself() -> nn.Module:
    return CopiesItself()


@saving(lambda: nn.Linear(2, 2))
def works_in_a_long_loop(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    weight = sd[prefix + "weight"].clone()
    for step in range(260):
        weight[step % 2] *= 1.5 if step % 4 else 0.5
    sd[prefix + "weight"] = weight
    bias = sd[prefix + "bias"]
    for _ in range(20):
        bias = (bias + bias) * 0.5
    sd[prefix + "bias"] = bias


class OldListing(nn.Linear):
    """Override named_parameters with the signature from before torch 2.0."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> object:
        return super().named_parameters(prefix, recurse)


@pattern
def old_listing() -> nn.Module:
    return OldListing()


class Nested(nn.Module):
    """Return a plain dict with another dict inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def state_dict(self, *args: object, **kwargs: object) -> dict:
        return {"weight": self.net.weight.detach(), "config": {"bias": self.net.bias.detach()}}

    def load_state_dict(self, state_dict: dict, strict: bool = True, assign: bool = False) -> None:
        with torch.no_grad():
            self.net.weight.copy_(state_dict["weight"])
            self.net.bias.copy_(state_dict["config"]["bias"])


@pattern
def nested_dict() -> nn.Module:
    return Nested()


@pattern
def sparse_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    indices = torch.tensor([[0, 1], [1, 0]])
    model.register_buffer("adjacency", torch.sparse_coo_tensor(indices, torch.randn(2), (2, 2)))
    model._register_state_dict_hook(Renamer("adjacency", "graph"))
    return model


@pattern
def two_tensors_in_one() -> nn.Module:
    """A tensor subclass that wraps other tensors, like quantized weights."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 2), torch.randn(2, 2)))
    model._register_state_dict_hook(Renamer("weight", "kernel"))
    model._register_load_state_dict_pre_hook(lambda sd, p, *a: renamed(sd, p, "kernel", "weight"))
    return model


@pattern
def unpacks_a_subclass() -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 2), torch.randn(2, 2)))

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        sd[prefix + "inner"] = sd.pop(prefix + "weight").a

    model._register_state_dict_hook(save)
    return model


@saving(lambda: nn.Linear(2, 2))
def copies_into_cpu_memory(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """Copy the values into a preallocated CPU buffer, as offloading does."""
    for key in list(sd):
        held = torch.empty(sd[key].shape, dtype=sd[key].dtype, device="cpu")
        held.copy_(sd[key], non_blocking=True)
        sd[key] = held
    sd[prefix + "weight"] += 1


@saving(lambda: Block())
def asks_where_tensors_are(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    if all(not value.is_meta for value in sd.values()):
        renamed(sd, prefix, "layer.", "")


@saving(lambda: nn.Linear(4, 6))
def in_inference_mode(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """In inference mode, composite operators reach the dispatcher without being decomposed."""
    with torch.inference_mode():
        weight = sd[prefix + "weight"].to(torch.float64).reshape(3, 8).contiguous()
        first, _, third = weight.chunk(3)
        sd[prefix + "parts"] = torch.stack(
            [third.t().t().flatten(), first.view(-1).narrow(0, 0, 8)]
        )
        sd[prefix + "bias"] = sd[prefix + "bias"].to("cpu").clone().unflatten(0, (2, 3)).T


@saving(lambda: nn.Linear(2, 2))
def goes_through_bytes(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    """Deep-copy through the file format, which no dispatch mode sees."""
    buffer = io.BytesIO()
    torch.save(sd[prefix + "weight"], buffer)
    buffer.seek(0)
    sd[prefix + "weight"] = torch.load(buffer) * 2


@saving(lambda: nn.Linear(2, 2))
def adds_random_numbers(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
    sd[prefix + "seed"] = torch.randn(3)
    sd[prefix + "noisy"] = sd[prefix + "weight"] + torch.randn(2, 2)


@pattern
def pre_hook_registers_a_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        renamed(sd, prefix, "weight", "kernel")

    def prepare(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        module[0]._register_state_dict_hook(save)

    model.register_state_dict_pre_hook(prepare)
    return model


@pattern
def hook_removes_itself() -> nn.Module:
    model = Block()

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        handle.remove()
        renamed(sd, prefix, "norm.", "ln.")

    handle = model._register_state_dict_hook(save)
    return nn.Sequential(model)


@pattern
def dedupes_by_storage() -> nn.Module:
    """safetensors and Hugging Face find shared tensors this way."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].bias = model["a"].bias

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        first: dict[tuple[int, int], str] = {}
        for key in list(sd):
            place = (sd[key].untyped_storage().data_ptr(), sd[key].storage_offset())
            if first.setdefault(place, key) != key:
                del sd[key]

    model._register_state_dict_hook(save)
    return model


@pattern
def drops_out() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update(
            {p + "weight": nn.functional.dropout(sd[p + "weight"], 0.5)}
        )
    )
    return model


@pattern
def takes_signs_of_a_constant() -> nn.Module:
    """The constant's elements compare equal but are not identical: 0.0 and -0.0."""
    model = nn.Linear(2, 12)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update(
            {p + "bias": torch.copysign(sd[p + "bias"], torch.tensor([0.0, -0.0] * 6))}
        )
    )
    return model
