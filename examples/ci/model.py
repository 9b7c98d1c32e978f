"""The model of this repository, and its optimizer."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build() -> Classifier:
    return Classifier()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
