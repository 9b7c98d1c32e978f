"""Models and optimizers for the tests of optimizer state: one model, and later versions of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Two layers of the same shape, which differ only in order, between two of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(torch.tanh(self.embed(x)))))))


class Reordered(Net):
    """The same layers, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {
            name: self._modules[name] for name in ("second", "head", "first", "norm", "embed")
        }


class Grown(Net):
    """One more layer, before the others."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.extra = nn.Linear(2, 2)
        kept = Net()
        self._modules.update(kept._modules)


class Shrunk(Net):
    """One layer fewer."""

    def __init__(self) -> None:
        super().__init__()
        del self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.first(torch.tanh(self.embed(x))))))


class Renamed(Net):
    """Its first layer has another name."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {
            {"first": "body"}.get(name, name): module for name, module in self._modules.items()
        }


class Frozen(Net):
    """Its first layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.first.requires_grad_(False)


class Matrices(nn.Module):
    """Weights without biases, as Muon requires."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """Its second layer is tied to the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Split(nn.Module):
    """Three projections with separate weights; a state_dict hook saves them as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.register_state_dict_post_hook(_fuse)
        self.register_load_state_dict_pre_hook(_split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x) + self.v(x)


class Fused(nn.Module):
    """The same as one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k + v


def _fuse(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state[f"{prefix}qkv.weight"] = torch.cat(
        [state.pop(f"{prefix}{name}.weight") for name in "qkv"]
    )


def _split(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    if f"{prefix}qkv.weight" in state:
        for name, part in zip("qkv", state.pop(f"{prefix}qkv.weight").chunk(3)):
            state[f"{prefix}{name}.weight"] = part


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Two param groups, each in the model's order: matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], 0.01
    )


def by_layer(model: nn.Module) -> torch.optim.Optimizer:
    """The second layer has a low learning rate: its group has the same shapes as the first layer in
    the other group.
    """
    slow = list(model.second.parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in slow)]
    groups: list[dict[str, Any]] = [{"params": slow, "lr": 0.001}, {"params": rest}]
    return torch.optim.AdamW(groups, 0.01)


def backwards(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters())[::-1], 0.01)


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters())[::-1], 0.01)


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def halves(model: nn.Module) -> torch.optim.Optimizer:
    """One param group split into two with the same hyperparameters."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[3:]}, {"params": parameters[:3]}], 0.01)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Cannot take a step on the meta device."""
    return torch.optim.AdamW(list(model.parameters())[::-1], 0.01, fused=True)


def valued(model: nn.Module) -> torch.optim.Optimizer:
    """Cannot be created on the meta device."""
    return torch.optim.AdamW(
        [p for p in list(model.parameters())[::-1] if p.isfinite().all().item()], 0.01
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def in_order(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters()), 0.01)


def decayed_named(model: nn.Module) -> torch.optim.Optimizer:
    """Like `decayed`, with parameter names in the groups."""
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], 0.01
    )


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    """Load a state by its parameter names, in any order."""
    optimizer = in_order(model)

    def reorder(optimizer: torch.optim.Optimizer, state: dict) -> dict:
        (group,) = state["param_groups"]
        ids = dict(zip(group["param_names"], group["params"]))
        return {
            **state,
            "param_groups": [
                {**group, "params": [ids[name] for name, _ in model.named_parameters()]}
            ],
        }

    optimizer.register_load_state_dict_pre_hook(reorder)
    return optimizer


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01, amsgrad=True)


def fused_in_order(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), 0.01)


def radam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RAdam(model.parameters(), 0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), 0.01)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.5, centered=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), 0.01)


def adamax(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adamax(model.parameters(), 0.01)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), 0.01)


def lbfgs_named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(list(model.named_parameters()), 0.01)
