"""Writes the goldens of one small model with the torch that runs it: ``python make_files.py
OUTDIR``.

The names of the files in this folder have the version of torch at their end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn


class Tagger(nn.Module):
    """Tied output weights, buffers of both kinds, a frozen parameter, a block that is called
    twice.
    """

    def __init__(self, vocab: int = 12, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.scale = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.register_buffer("shift", torch.arange(dim, dtype=torch.float32))
        self.register_buffer("table", torch.eye(dim) * 0.5, persistent=False)
        self.norm = nn.BatchNorm1d(dim)
        self.out = nn.Linear(dim, vocab)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(tokens))
        x = self.mix(x + self.shift) * self.scale
        return self.out(self.norm(x @ self.table))


def main(out: Path) -> None:
    """The program before training; weights and outputs after it; a checkpoint with its optimizer; a
    traced script.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    model, tokens = Tagger().eval(), torch.arange(5)
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (tokens,)), str(out / "tagger.pt2"))
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.norm.running_mean.add_(0.25)
        torch.save(model(tokens), out / "outputs.pt")
    torch.save(model.state_dict(), out / "weights.pt")
    torch.save(model.state_dict(), out / "legacy.pt", _use_new_zipfile_serialization=False)
    optimizer = torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad])
    model(tokens).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1},
        out / "training.pt",
    )
    torch.jit.save(torch.jit.trace(model.eval(), (tokens,)), str(out / "script.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
