"""The field's words: what a segment of a name says of the tensor's part in its layer, and of its kind."""

from __future__ import annotations

from functools import lru_cache

# Part -> whole segments, in lower case, that mean it and nothing else, whatever stands around them.
CERTAIN: dict[str, tuple[str, ...]] = {
    "query": ("q", "wq", "q_proj", "query", "q_lin", "to_q", "query_proj", "query_layer", "q_proj_weight"),
    "key": ("k", "wk", "k_proj", "key", "k_lin", "to_k", "key_proj", "key_layer", "k_proj_weight"),
    "value": ("v", "wv", "v_proj", "value", "v_lin", "to_v", "value_proj", "value_layer", "v_proj_weight"),
    "token embedding": ("tok_embeddings", "embed_tokens", "wte", "word_embeddings", "token_embedding", "tokens_embed"),
    "position embedding": ("wpe", "position_embeddings", "positions_embed", "position_embedding", "pos_embed"),
}
# Parts whose words mean other things elsewhere (`w1` of two and of three matrices): believed only where each tensor of
# one shape has one, and no two the same.
RELATIVE: dict[str, tuple[str, ...]] = {
    "attention output": ("o", "wo", "o_proj", "out_proj", "output_proj", "out_lin"),
    "gate": ("gate_proj", "w1", "gate", "wi_0"),
    "up": ("up_proj", "w3", "up", "wi_1"),
    "down": ("down_proj", "w2", "down"),
    "attention's norm": (
        *("input_layernorm", "attention_norm", "attn_norm", "sa_norm", "ln_1", "norm1", "layernorm_before"),
        *("self_attn_layer_norm", "sa_layer_norm", "attn_ln"),
    ),
    "feed-forward's norm": (
        *("post_attention_layernorm", "ffn_norm", "mlp_norm", "ln_2", "norm2", "layernorm_after"),
        *("final_layer_norm", "output_layer_norm", "mlp_ln"),
    ),
}
# What stands outside of all layers, by the first of two segments (`output.weight`).
HEAD = "head"
_OUTERMOST = frozenset({"lm_head", "output", "head", "embed_out"})
# An attention of this name attends to another sequence: its query is not that of the layer's other attention.
_CROSS = frozenset({"cross_attn", "encoder_attn", "multihead_attn", "crossattention", "encdecattention", "attn2"})
# Parts that layers keep in one tensor, in the order in which the field lays them end to end.
_ATTENTION = (("query", "key", "value"), ("key", "value"))
FUSED = (*_ATTENTION, ("gate", "up"), *(tuple(f"cross-attention's {name}" for name in names) for names in _ATTENTION))
FUSED_WORDS = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "to_kv", "gate_up")

# Kind -> last words of a tensor's own name. A scale is not taken for a bias, whatever their shapes.
KINDS: dict[str, tuple[str, ...]] = {
    "weight": ("weight", "scale", "gamma", "kernel"),
    "bias": ("bias", "beta"),
    "mean": ("mean",),
    "variance": ("var", "variance"),
    "count": ("tracked", "averaged"),
}

_CERTAIN = {word: part for part, words in CERTAIN.items() for word in words}
_PARTS = {word: part for part, words in RELATIVE.items() for word in words} | _CERTAIN
_KINDS = {word: kind for kind, words in KINDS.items() for word in words}


_kept = lru_cache(maxsize=1 << 16)  # a group's name is asked about at each step


@_kept
def kind(segments: tuple[str, ...]) -> str:
    """``weight``, ``bias``, ...; empty where the name does not say."""
    return _KINDS.get(segments[-1].lower().rpartition("_")[2], "")


@_kept
def certain_part(segments: tuple[str, ...]) -> str:
    """``query``, ``key``, ...; empty where no segment says so."""
    return _innermost(segments, _CERTAIN)


@_kept
def part(segments: tuple[str, ...]) -> str:
    """As `certain_part`, and by the words that other tensors of the layer have to bear out."""
    if len(segments) == 2 and segments[0].lower() in _OUTERMOST:
        return HEAD
    return _innermost(segments, _PARTS)


def is_fused(segments: tuple[str, ...]) -> bool:
    """Whether the name says that several parts are in one tensor."""
    return any(word in segment.lower() for segment in segments for word in FUSED_WORDS)


def _innermost(segments: tuple[str, ...], table: dict[str, str]) -> str:
    lower = [segment.lower() for segment in segments]
    found = next((table[word] for word in reversed(lower) if word in table), "")
    return f"cross-attention's {found}" if found and not _CROSS.isdisjoint(lower) else found
