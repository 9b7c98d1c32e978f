"""A model with as many tensors as one of 256 experts in 58 layers has, and the keys of such a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

LAYERS, EXPERTS, SIDE = 58, 256, 8
SHARDS = 163


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, nn.Linear(SIDE, SIDE, bias=False))


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(SIDE, SIDE, bias=False))
        self.norm = nn.LayerNorm(SIDE)
        self.gate = nn.Linear(SIDE, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))


class Model(nn.Module):
    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, SIDE)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(layers))
        self.head = nn.Linear(SIDE, 16, bias=False)


def build() -> Model:
    return Model(LAYERS, EXPERTS)


def keys(prefix: str) -> Iterator[str]:
    """Yield the keys of a quantized checkpoint of such a model: each weight of an expert has a
    scale.
    """
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "norm", "gate"):
            yield f"{prefix}.{layer}.{name}.weight"
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{prefix}.{layer}.experts.{expert}.{name}.weight"
                yield f"{prefix}.{layer}.experts.{expert}.{name}.weight_scale_inv"
