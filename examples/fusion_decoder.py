"""A small decoder that looks at an image while it writes, and whose checkpoints do not have the
names of its modules.

A pretrained language model learns to see by *fusion*: every few blocks, a cross-attention layer is
put in front of a block, and a few new tokens are added to the embedding. Both are wrappers, so both
add a segment to the FQN of every tensor that they wrap. State dict hooks take that segment out
again, so that the checkpoint of the language model can still be loaded:

    runtime name                              serialized key (what is saved)
    layers.3.layer.sa_norm.scale       <-->   layers.3.sa_norm.scale
    tok_embeddings.embedding.weight    <-->   tok_embeddings.weight

`torch.export` runs no hooks: an exported program keeps the runtime names (pytorch#137609). So a
state dict that this very model saved does not load into its own exported program.
`examples/demo.py` shows that, and fixes it.

Three more things make the names of a real model interesting, and are here too: the output head
shares the weight of the token embedding, the rotary embedding's table is a buffer that is not
saved, and the image encoder is frozen, so that the optimizer's ids do not count it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, NEW_TOKENS = 96, 8  # the pretrained vocabulary, and the tokens that fusion adds to it
TOKENS, PATCHES, PATCH_DIM = 16, 4, 12  # length of a text, patches of an image, numbers in a patch


# --- the pretrained language model
# --------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, eps=1e-6)


class Attention(nn.Module):
    """Multi-head attention of `x` [batch, tokens, dim] to itself, or to the `context` [batch,
    patches, dim].
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.output_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            self._split(self.q_proj(x)),
            self._split(self.k_proj(source)),
            self._split(self.v_proj(source)),
        )
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=context is None)
        return self.output_proj(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, tokens, head dim]


class FeedForward(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)
        self.w3 = nn.Linear(dim, 4 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One block of the language model. It takes the image's embedding and makes no use of it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.sa_norm = RMSNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = FeedForward(dim)

    def forward(self, x: Tensor, rope: Tensor, image: Tensor) -> Tensor:
        x = x + self.attn(self.sa_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


def rope_table(tokens: int, head_dim: int) -> Tensor:
    """The rotary embedding's cosines and sines, [2, tokens, head_dim / 2]."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(tokens), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns `x` [batch, heads, tokens, head dim] by the angles of the `rope_table`."""
    cos, sin = rope[0, : x.shape[2]], rope[1, : x.shape[2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# --- fusion
# ------------------------------------------------------------------------------------------


class Fusion(nn.Module):
    """Wraps a pretrained module in the attribute `wrapped`, and keeps that attribute's name out of
    the state dict.
    """

    wrapped: str

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(hide_wrapped)
        self.register_load_state_dict_pre_hook(restore_wrapped)


def hide_wrapped(
    module: Fusion, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Saving: ``layers.3.layer.attn…`` becomes ``layers.3.attn…``."""
    hidden = f"{prefix}{module.wrapped}."
    for key in [key for key in state_dict if key.startswith(hidden)]:
        state_dict[prefix + key[len(hidden) :]] = state_dict.pop(key)


def restore_wrapped(module: Fusion, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loading: ``layers.3.attn…`` becomes ``layers.3.layer.attn…`` again; other names stay."""
    others = tuple(
        f"{prefix}{name}." for name, _ in module.named_children() if name != module.wrapped
    )
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(others)]:
        state_dict[f"{prefix}{module.wrapped}.{key[len(prefix) :]}"] = state_dict.pop(key)


class CrossAttention(nn.Module):
    """Lets the text look at the image. The gate starts at zero: at first the language model is what
    it was.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ca_norm = RMSNorm(dim)
        self.attn = Attention(dim, heads)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return x + self.gate.tanh() * self.attn(self.ca_norm(x), context=image)


class FusionLayer(Fusion):
    """A block of the language model with cross-attention in front of it."""

    wrapped = "layer"

    def __init__(self, layer: Block, fusion_layer: CrossAttention) -> None:
        super().__init__()
        self.layer = layer
        self.fusion_layer = fusion_layer

    def forward(self, x: Tensor, rope: Tensor, image: Tensor) -> Tensor:
        return self.layer(self.fusion_layer(x, image), rope, image)


class FusionEmbedding(Fusion):
    """A pretrained token embedding, and an embedding of new tokens, numbered after the pretrained
    ones.
    """

    wrapped = "embedding"

    def __init__(self, vocab: int, new_tokens: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.fusion_embedding = nn.Embedding(new_tokens, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        vocab = self.embedding.num_embeddings
        known = self.embedding(tokens.clamp(max=vocab - 1))
        new = self.fusion_embedding((tokens - vocab).clamp(min=0))
        return torch.where((tokens < vocab).unsqueeze(-1), known, new)


class ImageEncoder(nn.Module):
    """Stands for a pretrained image encoder: [batch, patches, patch dim] to [batch, patches, dim].
    Frozen.
    """

    def __init__(self, patch_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(patch_dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.requires_grad_(False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(F.gelu(self.proj(patches)))


class FusionDecoder(nn.Module):
    """Tokens [batch, tokens] and patches [batch, patches, patch dim] to logits [batch, tokens,
    vocab].
    """

    rope: Tensor

    def __init__(self, layers: int, fusion_interval: int, dim: int, heads: int) -> None:
        super().__init__()
        self.encoder = ImageEncoder(PATCH_DIM, dim)
        self.tok_embeddings = FusionEmbedding(VOCAB, NEW_TOKENS, dim)
        self.layers = nn.ModuleList()
        for number in range(1, layers + 1):
            block = Block(dim, heads)
            fused = number % fusion_interval == 0
            self.layers.append(FusionLayer(block, CrossAttention(dim, heads)) if fused else block)
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)
        self.output.weight = self.tok_embeddings.embedding.weight
        self.register_buffer("rope", rope_table(TOKENS, dim // heads), persistent=False)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        image = self.encoder(patches)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rope, image)
        return self.output(self.norm(x))


# --- what a training script needs
# ---------------------------------------------------------------------------------


def build(
    layers: int = 8, fusion_interval: int = 4, dim: int = 64, heads: int = 4, seed: int = 0
) -> FusionDecoder:
    """The model, with the same weights for the same `seed`. Under ``torch.device("meta")`` it costs
    no memory.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FusionDecoder(layers, fusion_interval, dim, heads)
        nn.init.normal_(model.output.weight, std=0.02)
    return model


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over what is trained: matrices decay, norms and gates do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


def example_inputs(batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [batch, TOKENS] and patches [batch, PATCHES, PATCH_DIM] to export with, to train on,
    or to compare with.

    The text begins with a new token and then counts from a number that only the image tells.
    """
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(batch, PATCHES, PATCH_DIM, generator=generator)
    start = patches[:, 0].argmax(dim=-1, keepdim=True)
    tokens = start + torch.arange(TOKENS)
    tokens[:, 0] = VOCAB
    return tokens, patches


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> float:
    """Trains on one batch for each number in `steps`; returns the last loss."""
    model.train()
    loss = torch.zeros(())
    for step in steps:
        tokens, patches = example_inputs(batch=16, seed=1000 + step)
        logits = model(tokens[:, :-1], patches)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
    model.eval()
    return loss.item()
