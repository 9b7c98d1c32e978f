"""Small models of transformers; for most of them, save_pretrained uses different names than
state_dict().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
Make = Callable[[], nn.Module]


def _of(name: str, **options: Any) -> Make:
    """Return a factory for a class such as ``Mixtral ForCausalLM``, with the given config
    options.
    """
    stem, head = name.split()

    def make() -> nn.Module:
        return getattr(transformers, stem + head)(getattr(transformers, f"{stem}Config")(**options))

    return make


FEW: dict[str, Make] = {
    "experts": _of("Mixtral ForCausalLM", **TEXT, num_local_experts=4),
    "prefixes": _of("Llava ForConditionalGeneration", vision_config={**VISION, "model_type": "clip_vision_model"},
                    text_config={**TEXT, "model_type": "llama"}),
    "vision": _of("ViT ForImageClassification", **VISION),
    "tied": _of("Llama ForCausalLM", **TEXT, tie_word_embeddings=True),
}  # fmt: skip
MANY: dict[str, Make] = {
    "gpt2": _of("GPT2 LMHeadModel", vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=16),
    "bert": _of("Bert ForMaskedLM", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=4),
    "qwen3_moe": _of("Qwen3Moe ForCausalLM", **TEXT, **EXPERTS, head_dim=8),
    "qwen2_moe": _of("Qwen2Moe ForCausalLM", **TEXT, **EXPERTS, shared_expert_intermediate_size=16),
    "olmoe": _of("Olmoe ForCausalLM", **TEXT, num_experts=4, num_experts_per_tok=2),
    "granitemoe": _of("GraniteMoe ForCausalLM", **TEXT, num_local_experts=4),
    "jamba": _of("Jamba ForCausalLM", **TEXT, num_experts=4, use_mamba_kernels=False),
    "phimoe": _of("Phimoe ForCausalLM", **TEXT, num_local_experts=4),
    "minimax": _of("MiniMax ForCausalLM", **TEXT, num_local_experts=4),
    "gpt_oss": _of("GptOss ForCausalLM", **TEXT, num_local_experts=4, head_dim=8),
    "hunyuan": _of("HunYuanMoEV1 ForCausalLM", **TEXT, num_experts=4, moe_topk=2, head_dim=8),
    "lfm2_moe": _of("Lfm2Moe ForCausalLM", **TEXT, **EXPERTS, num_dense_layers=1,
                    layer_types=["conv", "full_attention"]),
    "glm4_moe": _of("Glm4Moe ForCausalLM", **TEXT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                    n_group=1, topk_group=1, head_dim=8, first_k_dense_replace=1),
    "ernie4_5_moe": _of("Ernie4_5_Moe ForCausalLM", **TEXT, moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
                        moe_layer_start_index=0),
    "deepseek_v3": _of("DeepseekV3 ForCausalLM", **{**TEXT, "num_key_value_heads": 4}, n_routed_experts=4,
                       num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1, q_lora_rank=8,
                       kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1),
    "qwen2_vl": _of("Qwen2VL ForConditionalGeneration", text_config=TEXT,
                    vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}),
    "llava_next": _of("LlavaNext ForConditionalGeneration", vision_config={**VISION, "model_type": "clip_vision_model"},
                      text_config={**TEXT, "model_type": "llama"}),
    "paligemma": _of("PaliGemma ForConditionalGeneration", hidden_size=32, projection_dim=32,
                     vision_config={**VISION, "model_type": "siglip_vision_model"},
                     text_config={**TEXT, "model_type": "gemma", "head_dim": 8}),
    "gemma3": _of("Gemma3 ForConditionalGeneration", text_config={**TEXT, "head_dim": 8}, vision_config=VISION,
                  mm_tokens_per_image=4),
    "vit": _of("ViT Model", **VISION),
    "dinov2": _of("Dinov2 Model", **{name: VISION[name] for name in VISION if name != "intermediate_size"}),
    "clip": _of("CLIP Model", text_config={**TEXT}, vision_config=VISION),
    "t5": _of("T5 ForConditionalGeneration", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
}  # fmt: skip


def build(name: str, seed: int = 1) -> nn.Module:
    """Build the model in eval mode with random weights that depend only on `seed`."""
    torch.manual_seed(seed)
    model = {**FEW, **MANY}[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()
