"""Different layouts of the same networks: models of transformers, and small copies of other
projects' modules.

Only names and shapes matter, so nothing is computed. `PAIRS` are conversions that users need.
"""

from __future__ import annotations

import warnings

import torch
import transformers
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

import real_models
from real_models import SIZES

WIDTH, HIDDEN, VOCAB, HEADS, LAYERS = 32, 48, 64, 4, 2


class Holder(nn.Module):
    """Modules, parameters and buffers under these names."""

    def __init__(self, **children: nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def layers(block: type[nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(block() for _ in range(LAYERS))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


# Llama


class _MetaBlock(nn.Module):
    """Four heads, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.attention = Holder(
            wq=linear(WIDTH, WIDTH),
            wk=linear(WIDTH, half),
            wv=linear(WIDTH, half),
            wo=linear(WIDTH, WIDTH),
        )
        self.feed_forward = Holder(
            w1=linear(WIDTH, HIDDEN), w2=linear(HIDDEN, WIDTH), w3=linear(WIDTH, HIDDEN)
        )
        self.attention_norm, self.ffn_norm = (
            Holder(weight=empty(WIDTH)),
            Holder(weight=empty(WIDTH)),
        )


def meta_llama() -> nn.Module:
    """Meta's published layout."""
    return Holder(
        tok_embeddings=nn.Embedding(VOCAB, WIDTH),
        layers=layers(_MetaBlock),
        norm=Holder(weight=empty(WIDTH)),
        output=linear(WIDTH, VOCAB),
    )


class _TuneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.attn = Holder(
            q_proj=linear(WIDTH, WIDTH),
            k_proj=linear(WIDTH, half),
            v_proj=linear(WIDTH, half),
            output_proj=linear(WIDTH, WIDTH),
        )
        self.mlp = Holder(
            w1=linear(WIDTH, HIDDEN), w2=linear(HIDDEN, WIDTH), w3=linear(WIDTH, HIDDEN)
        )
        self.sa_norm, self.mlp_norm = Holder(scale=empty(WIDTH)), Holder(scale=empty(WIDTH))


def tune_llama() -> nn.Module:
    """The layout of torchtune's `TransformerDecoder`."""
    return Holder(
        tok_embeddings=nn.Embedding(VOCAB, WIDTH),
        layers=layers(_TuneBlock),
        norm=Holder(scale=empty(WIDTH)),
        output=linear(WIDTH, VOCAB),
    )


def phi3() -> nn.Module:
    """Llama with query, key and value in one tensor, gate and up in another."""
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0)
    )


# GPT-2


def gpt2() -> nn.Module:
    """Its linear layers are `Conv1D`, transposed."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2Model(config)


class _NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Holder(c_attn=nn.Linear(WIDTH, 3 * WIDTH), c_proj=nn.Linear(WIDTH, WIDTH))
        self.mlp = Holder(c_fc=nn.Linear(WIDTH, 4 * WIDTH), c_proj=nn.Linear(4 * WIDTH, WIDTH))


def nano_gpt() -> nn.Module:
    """nanoGPT's layout, saved from a compiled model, with `nn.Linear`."""
    decoder = Holder(
        wte=nn.Embedding(VOCAB, WIDTH),
        wpe=nn.Embedding(16, WIDTH),
        h=layers(_NanoBlock),
        ln_f=nn.LayerNorm(WIDTH),
    )
    return Holder(_orig_mod=Holder(transformer=decoder))


class _SplitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Holder(**{name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})
        self.ff = Holder(up=nn.Linear(WIDTH, 4 * WIDTH), down=nn.Linear(4 * WIDTH, WIDTH))


def split_gpt() -> nn.Module:
    """GPT-2 with `nn.Linear`, and separate tensors for query, key and value."""
    return Holder(
        tok=nn.Embedding(VOCAB, WIDTH),
        pos=nn.Embedding(16, WIDTH),
        blocks=layers(_SplitBlock),
        norm=nn.LayerNorm(WIDTH),
    )


# Encoders


def torch_encoder() -> nn.Module:
    """`nn.MultiheadAttention` has query, key and value in one tensor."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN)
    return Holder(encoder=nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False))


def bert_encoder() -> nn.Module:
    return Holder(encoder=bert_model().encoder)


def bert_model() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)


class _VitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Holder(qkv=nn.Linear(WIDTH, 3 * WIDTH), proj=nn.Linear(WIDTH, WIDTH))
        self.mlp = Holder(fc1=nn.Linear(WIDTH, HIDDEN), fc2=nn.Linear(HIDDEN, WIDTH))


def timm_vit() -> nn.Module:
    """The layout of timm's `VisionTransformer`."""
    return Holder(
        cls_token=empty(1, 1, WIDTH),
        pos_embed=empty(1, 17, WIDTH),
        patch_embed=Holder(proj=nn.Conv2d(3, WIDTH, 4, 4)),
        blocks=layers(_VitBlock),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, 2),
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=HIDDEN,
            image_size=16,
            patch_size=4,
        )
    )


class _ClipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = Holder(c_fc=nn.Linear(WIDTH, HIDDEN), c_proj=nn.Linear(HIDDEN, WIDTH))


def openai_clip() -> nn.Module:
    """The vision tower in OpenAI's published layout."""
    return Holder(
        visual=Holder(
            class_embedding=empty(WIDTH),
            positional_embedding=empty(17, WIDTH),
            conv1=nn.Conv2d(3, WIDTH, 4, 4, bias=False),
            ln_pre=nn.LayerNorm(WIDTH),
            transformer=Holder(resblocks=layers(_ClipBlock)),
            ln_post=nn.LayerNorm(WIDTH),
        )
    )


def clip() -> nn.Module:
    return transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=16,
            patch_size=4,
        )
    )


# Speech


def _attention() -> nn.Module:
    """Whisper's keys have no bias."""
    return Holder(
        query=nn.Linear(WIDTH, WIDTH),
        key=linear(WIDTH, WIDTH),
        value=nn.Linear(WIDTH, WIDTH),
        out=nn.Linear(WIDTH, WIDTH),
    )


class _Listen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.attn_ln = _attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.mlp_ln = nn.LayerNorm(WIDTH)


class _Speak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.attn_ln = _attention(), nn.LayerNorm(WIDTH)
        self.cross_attn, self.cross_attn_ln = _attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.mlp_ln = nn.LayerNorm(WIDTH)


def openai_whisper() -> nn.Module:
    encoder = Holder(
        positional_embedding=empty(16, WIDTH),
        conv1=nn.Conv1d(8, WIDTH, 3),
        conv2=nn.Conv1d(WIDTH, WIDTH, 3),
        blocks=layers(_Listen),
        ln_post=nn.LayerNorm(WIDTH),
    )
    decoder = Holder(
        positional_embedding=empty(12, WIDTH),
        token_embedding=nn.Embedding(VOCAB, WIDTH),
        blocks=layers(_Speak),
        ln=nn.LayerNorm(WIDTH),
    )
    return Holder(encoder=encoder, decoder=decoder)


def whisper() -> nn.Module:
    return transformers.WhisperModel(
        transformers.WhisperConfig(
            vocab_size=VOCAB,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=HIDDEN,
            decoder_ffn_dim=HIDDEN,
            max_source_positions=16,
            max_target_positions=12,
            num_mel_bins=8,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def wav2vec2() -> nn.Module:
    """Its weight norm is a parametrization."""
    return real_models.wav2vec2()


def old_wav2vec2() -> nn.Module:
    """wav2vec 2.0 with torch's old weight norm, from before parametrizations."""
    model = wav2vec2()
    for module in list(model.modules()):
        if isinstance(module, nn.Conv1d) and is_parametrized(module):
            remove_parametrizations(module, "weight")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(module, dim=2)
    return model


# Small ones


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def lightning() -> nn.Module:
    """A `LightningModule` that holds the network and a loss with weights."""
    return Holder(net=_net(), loss=Holder(weight=empty(2)))


def plain() -> nn.Module:
    return _net()


def named() -> nn.Module:
    """The network with names instead of numbers."""
    return Holder(fc1=nn.Linear(4, 8), fc2=nn.Linear(8, 2))


# Left, right, and their title in tests/rules/suggested.md.
PAIRS = {
    "Llama as Meta publishes it, to transformers": (meta_llama, real_models.llama),
    "Llama of torchtune, to transformers": (tune_llama, real_models.llama),
    "Phi-3, whose projections are fused, to Llama's layout": (phi3, real_models.llama),
    "GPT-2 of transformers, to modules with query, key and value apart": (gpt2, split_gpt),
    "ViT of timm, to transformers": (timm_vit, vit),
    "CLIP of OpenAI, to transformers": (openai_clip, clip),
    "BERT with a head, to the encoder alone": (real_models.bert, bert_model),
    "BERT's encoder, to torch.nn.TransformerEncoder": (bert_encoder, torch_encoder),
    "Whisper of OpenAI, to transformers": (openai_whisper, whisper),
    "wav2vec 2.0 with the old weight norm, to parametrizations": (old_wav2vec2, wav2vec2),
    "A LightningModule with a network and a loss, to the network": (lightning, plain),
    "Numbers, to names": (plain, named),
}
# The reverse directions and others: tested, but not printed.
MORE = [
    *((right, left) for left, right in PAIRS.values() if left not in (real_models.bert, lightning)),
    (meta_llama, tune_llama),
    (gpt2, nano_gpt),
    (nano_gpt, split_gpt),
]
