"""Words in names: the part of a layer and the kind of tensor that they mean."""

from __future__ import annotations

from collections.abc import (
    Mapping,
)
from functools import lru_cache

from ckpttool.core.tables import owners
from ckpttool.naming.templates import Template

# Part -> segments, in lower case, that mean it and nothing else, in any context.
CERTAIN: dict[str, tuple[str, ...]] = {
    "query": (
        "q",
        "wq",
        "q_proj",
        "query",
        "q_lin",
        "to_q",
        "query_proj",
        "query_layer",
        "q_proj_weight",
    ),
    "key": ("k", "wk", "k_proj", "key", "k_lin", "to_k", "key_proj", "key_layer", "k_proj_weight"),
    "value": (
        "v",
        "wv",
        "v_proj",
        "value",
        "v_lin",
        "to_v",
        "value_proj",
        "value_layer",
        "v_proj_weight",
    ),
    "token embedding": (
        "tok_embeddings",
        "embed_tokens",
        "wte",
        "word_embeddings",
        "token_embedding",
        "tokens_embed",
    ),
    "position embedding": (
        "wpe",
        "position_embeddings",
        "positions_embed",
        "position_embedding",
        "pos_embed",
    ),
}
# Parts whose words have other meanings elsewhere (`w1` of two and of three matrices): believed only
# if each tensor of one shape has one, and no two have the same.
RELATIVE: dict[str, tuple[str, ...]] = {
    "attention output": ("o", "wo", "o_proj", "out_proj", "output_proj", "out_lin"),
    "gate": ("gate_proj", "w1", "gate", "wi_0"),
    "up": ("up_proj", "w3", "up", "wi_1"),
    "down": ("down_proj", "w2", "down"),
    "attention's norm": (
        *(
            "input_layernorm",
            "attention_norm",
            "attn_norm",
            "sa_norm",
            "ln_1",
            "norm1",
            "layernorm_before",
        ),
        *("self_attn_layer_norm", "sa_layer_norm", "attn_ln"),
    ),
    "feed-forward's norm": (
        *("post_attention_layernorm", "ffn_norm", "mlp_norm", "ln_2", "norm2", "layernorm_after"),
        *("final_layer_norm", "output_layer_norm", "mlp_ln"),
    ),
}
HEAD = "head"  # outside of all layers; the first of two segments says it (`output.weight`)
_HEAD_WORDS = frozenset({"lm_head", "output", "head", "embed_out"})
# An attention to another sequence: its query is not the query of the layer's other attention.
_CROSS = frozenset(
    {"cross_attn", "encoder_attn", "multihead_attn", "crossattention", "encdecattention", "attn2"}
)
# Parts that layers keep in one tensor, in their usual order.
_ATTENTION = (("query", "key", "value"), ("key", "value"))
_OF_CROSS = "cross-attention's "
_CROSS_ATTENTION = (
    (f"{_OF_CROSS}query", f"{_OF_CROSS}key", f"{_OF_CROSS}value"),
    (f"{_OF_CROSS}key", f"{_OF_CROSS}value"),
)
FUSED = (*_ATTENTION, ("gate", "up"), *_CROSS_ATTENTION)
_FUSED_WORDS = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "to_kv", "gate_up")
# Last word of a tensor's name -> its kind. A scale is not taken for a bias, whatever their shapes.
_KINDS = {
    **dict.fromkeys(("weight", "scale", "gamma", "kernel"), "weight"),
    **dict.fromkeys(("bias", "beta"), "bias"),
    "mean": "mean",
    "var": "variance",
    "variance": "variance",
    "tracked": "count",
    "averaged": "count",
}
KINDS = frozenset({"", *_KINDS.values()})
_CERTAIN = owners(CERTAIN)
_PARTS = owners(RELATIVE) | _CERTAIN
_cached = lru_cache(maxsize=1 << 16)  # each step asks about each group


@_cached
def kind_of(path: Template) -> str:
    """Return ``weight``, ``bias``, ...; empty if the name does not say."""
    return _KINDS.get(path[-1].lower().rpartition("_")[2], "")


@_cached
def certain_part(path: Template) -> str:
    """Return ``query``, ``key``, ... if a segment names it, else an empty text."""
    return _innermost(path, _CERTAIN)


@_cached
def part_of(path: Template) -> str:
    """Return the part, also if only a word of `RELATIVE` names it, else an empty text."""
    if len(path) == 2 and path[0].lower() in _HEAD_WORDS:
        return HEAD
    return _innermost(path, _PARTS)


def _innermost(path: Template, table: Mapping[str, str]) -> str:
    words = [segment.lower() for segment in path]
    for word in reversed(words):
        if word in table:
            part = table[word]
            return part if _CROSS.isdisjoint(words) else f"{_OF_CROSS}{part}"
    return ""


def is_fused(path: Template) -> bool:
    name = ".".join(path).lower()
    return any(word in name for word in _FUSED_WORDS)


def inserted(left: Template, right: Template) -> str:
    """Return the one segment that only the longer of two names has; empty if they differ by
    more.
    """
    short, long = sorted((left, right), key=len)
    if len(long) - len(short) != 1:
        return ""
    for depth, segment in enumerate(long):
        if long[:depth] + long[depth + 1 :] == short:
            return segment
    return ""
