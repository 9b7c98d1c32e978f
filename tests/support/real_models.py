"""Third-party models, built small from configs. Each is a MODEL operand:
`tests/real_models.py:llama`.

`inputs` gives the arguments for their forward and export.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama(tie_word_embeddings: bool = False) -> nn.Module:
    """A decoder with a buffer (`inv_freq`) that is not saved."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, tie_word_embeddings=tie_word_embeddings
        )
    )


def tied_llama() -> nn.Module:
    """Its head and token embedding are tied; `save_pretrained` saves the tensor once, `torch.save`
    twice.
    """
    return llama(tie_word_embeddings=True)


def llama_70b() -> nn.Module:
    """Llama 3's 70 billion parameters. Only for the meta device."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
    )


def t5() -> nn.Module:
    """An encoder and a decoder; one tensor has four names."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def bert() -> nn.Module:
    """Two tied tensors, one of them a bias, and integer buffers that are not saved."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def mixtral() -> nn.Module:
    """A mixture of experts: one tensor for all experts in the model, one per expert in
    `save_pretrained` files.
    """
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
        )
    )


def wav2vec2() -> nn.Module:
    """A convolution with a weight-norm parametrization; one parameter is always created on the
    CPU.
    """
    config = transformers.Wav2Vec2Config(  # type: ignore[call-arg]
        **{name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )
    return transformers.Wav2Vec2Model(config)


def lora() -> PeftModel:
    """The Llama with low-rank adapters, whose names contain `base_model.model` and `base_layer`."""
    return get_peft_model(
        llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


ALL = ("llama", "tied_llama", "t5", "bert", "mixtral", "wav2vec2", "lora")


def build(name: str, seed: int) -> nn.Module:
    """Build the model `name` in eval mode with random weights that depend only on `seed`."""
    torch.manual_seed(seed)
    model: nn.Module = globals()[name]()
    with torch.no_grad():
        # including parameters that a constructor sets to zero or one
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def inputs(name: str) -> dict[str, Any]:
    """Return keyword arguments for the forward and export of the model `name`."""
    ids = torch.arange(12).reshape(2, 6)
    if name == "wav2vec2":
        return {"input_values": torch.linspace(-1, 1, 400).sin().unsqueeze(0)}
    if name == "bert":
        return {"input_ids": ids}
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids + 1, "use_cache": False}
    return {"input_ids": ids, "use_cache": False}


def export(model: nn.Module, name: str) -> torch.export.ExportedProgram:
    return torch.export.export(model, (), inputs(name), strict=False)


def first_output(model: nn.Module, name: str) -> torch.Tensor:
    """Return the logits (hidden states if there is no head) of the model or an exported program's
    module.
    """
    with torch.no_grad():
        return next(iter(model(**inputs(name)).values()))
