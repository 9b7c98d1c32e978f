"""Random models with two definitions each, which register the same layers in different orders, and
their optimizers.

``old_7``, ``new_7`` and ``make_7`` are the old definition, the new one, and the optimizer of seed
7.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CLASSES = ("AdamW", "Adam", "SGD with momentum", "SGD")


@dataclass(frozen=True)
class Spec:
    """The choices for a seed. `old` and `new` are the layers in registration order."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    widths: dict[str, tuple[int, int]]
    without_bias: frozenset[str]
    frozen: frozenset[str]
    tied: tuple[str, str] | None
    kind: str
    groups: str
    with_names: bool
    trainable: bool
    form: str
    with_model: bool


def spec(seed: int) -> Spec:
    """Draw a spec; the same seed gives the same spec."""
    draw = random.Random(seed)
    layers = [f"layer{letter}" for letter in "abcde"[: draw.randint(2, 5)]]
    new = draw.sample(layers, len(layers))
    widths = {name: draw.choice([(4, 4), (4, 4), (3, 4), (4, 3)]) for name in layers}
    same_shape = [(a, b) for a in layers for b in layers if a < b and widths[a] == widths[b]]
    return Spec(
        old=tuple(layers),
        new=tuple(new),
        widths=widths,
        without_bias=frozenset(name for name in layers if draw.random() < 0.3),
        frozen=frozenset(draw.sample(layers, 1)) if draw.random() < 0.3 else frozenset(),
        tied=draw.choice(same_shape) if same_shape and draw.random() < 0.3 else None,
        kind=draw.choice(CLASSES),
        groups=draw.choice(["one", "one", "by dimension", "by layer"]),
        with_names=draw.random() < 0.4,
        trainable=draw.random() < 0.5,
        form=draw.choice(["id", "id", "id", "fqn", "flat"]),
        with_model=draw.random() < 0.8,
    )


class Net(nn.Module):
    """Linear layers, registered in the order of `layers`."""

    def __init__(self, chosen: Spec, layers: tuple[str, ...]) -> None:
        super().__init__()
        for name in layers:
            self.add_module(
                name, nn.Linear(*chosen.widths[name], bias=name not in chosen.without_bias)
            )
        if chosen.tied is not None:
            first, second = sorted(chosen.tied, key=layers.index)
            getattr(self, second).weight = getattr(self, first).weight
        for name in chosen.frozen:
            getattr(self, name).requires_grad_(False)


def optimizer(chosen: Spec, model: nn.Module) -> torch.optim.Optimizer:
    """Create the spec's optimizer; param groups depend on each parameter's properties, not on its
    position.
    """
    own = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad or not chosen.trainable
    ]
    slow = {
        "one": lambda name, p: False,
        "by dimension": lambda name, p: p.dim() < 2,
        "by layer": lambda name, p: _layer(chosen, name) == min(chosen.old),
    }[chosen.groups]
    parts = [[(n, p) for n, p in own if not slow(n, p)], [(n, p) for n, p in own if slow(n, p)]]
    params = [part if chosen.with_names else [p for _, p in part] for part in parts if part]
    groups: list[dict[str, Any]] = [{"params": part} for part in params]
    if len(groups) > 1:
        groups[1]["weight_decay"] = 0.25
    if chosen.kind.startswith("SGD"):
        return torch.optim.SGD(groups, 0.01, momentum=0.9 if "momentum" in chosen.kind else 0.0)
    return getattr(torch.optim, chosen.kind)(groups, 0.01)


def _layer(chosen: Spec, name: str) -> str:
    """Return the layer of a parameter; for a tied weight, the alphabetically first one."""
    layer = name.partition(".")[0]
    return (
        min(chosen.tied)
        if chosen.tied and layer in chosen.tied and name.endswith("weight")
        else layer
    )


def __getattr__(name: str) -> Callable[..., Any]:
    kind, _, seed = name.partition("_")
    if kind not in ("old", "new", "make") or not seed.isdigit():
        raise AttributeError(name)
    chosen = spec(int(seed))
    if kind == "make":
        return lambda model: optimizer(chosen, model)
    return lambda: Net(chosen, chosen.old if kind == "old" else chosen.new)
