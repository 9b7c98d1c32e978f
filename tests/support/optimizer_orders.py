"""Random models, each in two definitions that register the same layers in different orders, and optimizers of them.

``old_7``, ``new_7`` and ``make_7`` are the old definition, the new one, and the optimizer of seed 7.
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
    """What a seed decides. `old` and `new` are the layers in the order of registration."""

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
    """The same for the same seed."""
    draw = random.Random(seed)
    layers = [f"layer{letter}" for letter in "abcde"[: draw.randint(2, 5)]]
    new = draw.sample(layers, len(layers))
    widths = {name: draw.choice([(4, 4), (4, 4), (3, 4), (4, 3)]) for name in layers}
    alike = [(a, b) for a in layers for b in layers if a < b and widths[a] == widths[b]]
    return Spec(
        old=tuple(layers),
        new=tuple(new),
        widths=widths,
        without_bias=frozenset(name for name in layers if draw.random() < 0.3),
        frozen=frozenset(draw.sample(layers, 1)) if draw.random() < 0.3 else frozenset(),
        tied=draw.choice(alike) if alike and draw.random() < 0.3 else None,
        kind=draw.choice(CLASSES),
        groups=draw.choice(["one", "one", "by dimension", "by layer"]),
        with_names=draw.random() < 0.4,
        trainable=draw.random() < 0.5,
        form=draw.choice(["id", "id", "id", "fqn", "flat"]),
        with_model=draw.random() < 0.8,
    )


class Net(nn.Module):
    """Linear layers, registered in the order of `layers`."""

    def __init__(self, wanted: Spec, layers: tuple[str, ...]) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(*wanted.widths[name], bias=name not in wanted.without_bias))
        if wanted.tied is not None:
            first, second = sorted(wanted.tied, key=layers.index)
            getattr(self, second).weight = getattr(self, first).weight
        for name in wanted.frozen:
            getattr(self, name).requires_grad_(False)


def optimizer(wanted: Spec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the spec; groups are made by what a parameter is, not by where it stands."""
    own = [(name, p) for name, p in model.named_parameters() if p.requires_grad or not wanted.trainable]
    slow = {
        "one": lambda name, p: False,
        "by dimension": lambda name, p: p.dim() < 2,
        "by layer": lambda name, p: _layer(wanted, name) == min(wanted.old),
    }[wanted.groups]
    parts = [[(n, p) for n, p in own if not slow(n, p)], [(n, p) for n, p in own if slow(n, p)]]
    params = [part if wanted.with_names else [p for _, p in part] for part in parts if part]
    groups: list[dict[str, Any]] = [{"params": part} for part in params]
    if len(groups) > 1:
        groups[1]["weight_decay"] = 0.25
    if wanted.kind.startswith("SGD"):
        return torch.optim.SGD(groups, 0.01, momentum=0.9 if "momentum" in wanted.kind else 0.0)
    return getattr(torch.optim, wanted.kind)(groups, 0.01)


def _layer(wanted: Spec, name: str) -> str:
    """The layer of a parameter; of a tied weight the first by its name, in whichever order they are registered."""
    layer = name.partition(".")[0]
    return min(wanted.tied) if wanted.tied and layer in wanted.tied and name.endswith("weight") else layer


def __getattr__(name: str) -> Callable[..., Any]:
    kind, _, seed = name.partition("_")
    if kind not in ("old", "new", "make") or not seed.isdigit():
        raise AttributeError(name)
    wanted = spec(int(seed))
    if kind == "make":
        return lambda model: optimizer(wanted, model)
    return lambda: Net(wanted, wanted.old if kind == "old" else wanted.new)
