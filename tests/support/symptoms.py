"""The setups of docs/troubleshooting.md: each function creates the files of an entry, and raises
the quoted error.

All of them run in one folder, in the order of the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

MODULES = {
    "model.py": """
        from torch import nn

        def build():
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        def tied():
            model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
            model[1].weight = model[0].weight
            return model

        def swapped():
            return nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

        def straight():
            return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    """,
    "opt.py": """
        import torch

        def adamw(model):
            return torch.optim.AdamW(model.parameters())
    """,
    "hooked.py": """
        from torch import nn

        class Tokens(nn.Embedding):
            def __init__(self):
                super().__init__(8, 4)
                self.register_state_dict_post_hook(self.rename)
                self.register_load_state_dict_pre_hook(self.restore)

            @staticmethod
            def rename(module, state, prefix, metadata):
                state[f"{prefix}tokens"] = state.pop(f"{prefix}weight")

            @staticmethod
            def restore(module, state, prefix, *rest):
                state[f"{prefix}weight"] = state.pop(f"{prefix}tokens")

        def build():
            return nn.Sequential(Tokens(), nn.Linear(4, 2))
    """,
    "lifted.py": """
        import torch
        from torch import nn

        class Lifted(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.register_buffer("scale", torch.ones(4), persistent=False)

            def forward(self, x):
                return self.fc(x) * self.scale
    """,
    "twice.py": """
        from torch import nn

        class Gate(nn.Linear):
            def forward(self, x, double=False):
                y = super().forward(x)
                return y * 2 if double else y

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = Gate(4, 4)

            def forward(self, x):
                return self.gate(x) + self.gate(x, double=True)
    """,
}


def _module(name: str) -> Any:
    return __import__(name)


def _build() -> nn.Sequential:
    model: nn.Sequential = _module("model").build()
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _loads(name: str) -> None:
    _build().load_state_dict(torch.load(name))


def compiled() -> None:
    compiled: Any = torch.compile(_build())
    torch.save(compiled.state_dict(), "compiled.pt")
    _loads("compiled.pt")


def hooked() -> None:
    model = _module("hooked").build()
    torch.export.save(torch.export.export(model, (torch.tensor([1, 2]),)), "deployed.pt2")
    torch.save(model.state_dict(), "hooked.pt")
    torch.export.load("deployed.pt2").module().load_state_dict(torch.load("hooked.pt"))


def flat() -> None:
    for rank in (0, 1):
        torch.save({"_flat_param": torch.ones(15)}, f"rank_{rank}.pt")
    _loads("rank_0.pt")


def lifted() -> None:
    model = _module("lifted").Lifted()
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), "lifted.pt2")
    torch.save({**model.state_dict(), "scale": torch.full((4,), 3.0)}, "scaled.pt")
    torch.export.load("lifted.pt2").module().load_state_dict(torch.load("scaled.pt"))


def variants() -> None:
    model = _module("twice").Twice()
    unflattened = torch.export.unflatten(torch.export.export(model, (torch.ones(1, 4),)))
    torch.save(unflattened.state_dict(), "unflattened.pt")
    model.load_state_dict(torch.load("unflattened.pt"))


def absent() -> None:
    torch.save(
        {key: value for key, value in _build().state_dict().items() if key != "1.bias"}, "absent.pt"
    )
    _loads("absent.pt")


def other_head() -> None:
    torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).state_dict(), "other.pt")
    _loads("other.pt")


def placeholders() -> None:
    torch.save({key: torch.empty(0) for key in _build().state_dict()}, "pytorch_model.bin")
    _loads("pytorch_model.bin")


def groups() -> None:
    model = _build()
    split = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim < 2],
    ]
    torch.save(
        _trained(model, torch.optim.AdamW([{"params": params} for params in split])), "groups.pt"
    )
    _adamw(_build()).load_state_dict(torch.load("groups.pt")["optimizer"])


def frozen() -> None:
    model = _build()
    model[0].requires_grad_(False)
    torch.save(
        _trained(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)),
        "frozen.pt",
    )
    _adamw(_build()).load_state_dict(torch.load("frozen.pt")["optimizer"])


def other_class() -> None:
    model = _build()
    torch.save(_trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), "sgd.pt")
    optimizer = _adamw(model)
    optimizer.load_state_dict(torch.load("sgd.pt")["optimizer"])
    _trained(model, optimizer)


def order() -> None:
    swapped = _module("model").swapped()
    optimizer = _adamw(swapped)
    swapped["a"](swapped["b"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    torch.save({"model": swapped.state_dict(), "optimizer": optimizer.state_dict()}, "order.pt")
    _adamw(_module("model").straight()).load_state_dict(torch.load("order.pt")["optimizer"])


def named() -> None:
    model = _build()
    optimizer = _adamw(model)
    state = _trained(model, optimizer)
    torch.save({**state, "optimizer": get_optimizer_state_dict(model, optimizer)}, "named.pt")


def weights_only() -> None:
    torch.save({"state_dict": _build().state_dict(), "args": argparse.Namespace(lr=0.1)}, "args.pt")
    torch.load("args.pt")


def pointer() -> None:
    pointer = (
        "version https://git-lfs.github.com/spec/v1\noid sha256:"
        + "0" * 64
        + ("\nsize 268435456\n")
    )
    Path("pointer.safetensors").write_text(pointer)
    safe_open("pointer.safetensors", "pt")


def cut() -> None:
    Path("cut.pt").write_bytes(Path("compiled.pt").read_bytes()[:1500])
    torch.load("cut.pt")


def tied() -> None:
    torch.save(_module("model").tied().state_dict(), "tied.pt")
    save_file(torch.load("tied.pt"), "tied.safetensors")


def subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))
    torch.save({"module.w": two}, "subclass.pt")
    save_file({"module.w": two}, "subclass.safetensors")


def norms() -> None:
    other = {"attn_norm": "mlp_norm", "mlp_norm": "attn_norm"}
    right = {
        f"layers.{i}.{norm}.weight": torch.arange(4.0) + i + len(norm)
        for i in range(2)
        for norm in other
    }
    torch.save(right, "right.pt")
    wrong = {
        f"layers.{i}.{other[norm]}.weight": right[f"layers.{i}.{norm}.weight"]
        for i in range(2)
        for norm in other
    }
    torch.save(wrong, "wrong.pt")


def engine() -> None:
    state = _build().state_dict()
    trainer = {f"policy.{key}": value for key, value in state.items()} | {
        "value_head.weight": torch.ones(4)
    }
    torch.save(trainer, "trainer.pt")
    torch.save(state, "engine.pt")
