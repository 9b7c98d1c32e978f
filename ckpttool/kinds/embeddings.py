"""Learned tokens (textual inversion): a few vectors for a text encoder, without the encoder."""

from __future__ import annotations

from ckpttool.core.checkpoint import Kind, Section
from ckpttool.core.text import plural

NAME = "textual-inversion"
# of the web UI for Stable Diffusion, and of SDXL's two encoders; diffusers' key is the token itself
_KEYS = frozenset({"emb_params", "clip_l", "clip_g"})


def _is_token(key: str) -> bool:
    return key.startswith("<") and key.endswith(">")


def recognize(section: Section) -> Kind | None:
    keys = section.keys
    are_tokens = bool(keys) and all(map(_is_token, keys))
    if not are_tokens and not (keys and _KEYS.issuperset(keys)):
        return None
    vectors = 0
    for entry in section.tensors:
        if len(entry.shape) not in (1, 2):
            return None
        vectors = max(vectors, entry.shape[0] if len(entry.shape) == 2 else 1)
    text = (
        f"is a learned token of {plural(vectors, 'vector')} for a text encoder (textual"
        " inversion): load_textual_inversion(FILE) of a pipeline of diffusers loads it"
    )
    return Kind(NAME, section.path, text)
