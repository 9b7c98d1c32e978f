"""Checkpoints of one network with the names of two projects: fixes suggested by `diff` are applied and loaded."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpttool.cli.app import main

WIDTH, HIDDEN, VOCAB = 4, 7, 10
STYLES = (
    {
        "query": "model.layers.{}.self_attn.q_proj",
        "key": "model.layers.{}.self_attn.k_proj",
        "value": "model.layers.{}.self_attn.v_proj",
        "out": "model.layers.{}.self_attn.o_proj",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
        "norm": "model.layers.{}.input_layernorm",
        "embedding": "model.embed_tokens",
        "head": "lm_head",
    },
    {
        "query": "layers.{}.attention.wq",
        "key": "layers.{}.attention.wk",
        "value": "layers.{}.attention.wv",
        "out": "layers.{}.attention.wo",
        "gate": "layers.{}.feed_forward.w1",
        "up": "layers.{}.feed_forward.w3",
        "down": "layers.{}.feed_forward.w2",
        "norm": "layers.{}.attention_norm",
        "embedding": "tok_embeddings",
        "head": "output",
    },
    {
        "query+key+value": "decoder.blocks.{}.attn.qkv_proj",
        "out": "decoder.blocks.{}.attn.o_proj",
        "gate+up": "decoder.blocks.{}.mlp.gate_up_proj",
        "down": "decoder.blocks.{}.mlp.down_proj",
        "norm": "decoder.blocks.{}.norm1",
        "embedding": "decoder.wte",
        "head": "lm_head",
    },
)
State = dict[str, torch.Tensor]


def network(layers: int) -> State:
    """Return role -> a tensor with unique values."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{name} {layer}": (WIDTH, WIDTH) for layer in range(layers) for name in ("query", "key", "value", "out")
    }
    shapes |= {f"{name} {layer}": (HIDDEN, WIDTH) for layer in range(layers) for name in ("gate", "up")}
    shapes |= {f"down {layer}": (WIDTH, HIDDEN) for layer in range(layers)}
    shapes |= {f"norm {layer}": (WIDTH,) for layer in range(layers)}
    shapes |= dict.fromkeys(("embedding", "head"), (VOCAB, WIDTH))
    return {role: torch.full(shape, float(place)) for place, (role, shape) in enumerate(shapes.items())}


def in_style(weights: State, style: dict[str, str], layers: list[int]) -> tuple[State, dict[str, set[str]]]:
    """Return the network with these layers in this style, and the roles of each key."""
    state: State = {}
    roles: dict[str, set[str]] = {}
    for parts, name in style.items():
        for layer in layers if "{}" in name else [-1]:
            key = f"{name.format(layer)}.weight"
            parts_of_key = [part if layer < 0 else f"{part} {layer}" for part in parts.split("+")]
            state[key], roles[key] = torch.cat([weights[one] for one in parts_of_key]), set(parts_of_key)
    return state, roles


def loader(state: State) -> nn.Module:
    """Return a model with these parameters, all zero."""
    model = nn.Module()
    for key, tensor in state.items():
        module = model
        *path, name = key.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))
    return model


@pytest.mark.parametrize("seed", [*range(24), 92, 122])  # the last two are ambiguous
def test_a_suggested_fix_loads_strictly_and_no_pair_is_wrong(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some checkpoints lack layers of the other side, so layer numbers are not enough."""
    rng = random.Random(seed)
    layers, styles = rng.randint(1, 4), rng.sample(STYLES, 2)
    weights = network(layers)
    kept_layers = range(layers) if seed % 2 else sorted(rng.sample(range(layers), rng.randint(1, layers)))
    left, left_roles = in_style(weights, styles[0], list(kept_layers))
    right, right_roles = in_style(weights, styles[1], list(range(layers)))
    paths = [str(tmp_path / f"{side}.safetensors") for side in ("left", "right")]
    for path, state in zip(paths, (left, right)):
        save_file(state, path)
    if rng.random() < 0.5:
        paths.reverse()
        (left, left_roles), (right, right_roles) = (right, right_roles), (left, left_roles)

    assert main(["diff", *paths, "--format", "json"]) == 1
    result = json.loads(capsys.readouterr().out)
    for pair in result["suggested"]:
        roles = [
            set().union(*(roles_of[key] for key in pair[side]))
            for side, roles_of in (("left", left_roles), ("right", right_roles))
        ]
        assert roles[0] == roles[1], pair
    if len(kept_layers) < layers:
        return
    for fix in result["fix"]:
        arguments = shlex.split(fix["command"])
        assert main(arguments[1:]) == (1 if arguments[1] == "diff" else 0)  # diff --suggest
    out = arguments[arguments.index("-o") + 1]
    model = loader(right)

    model.load_state_dict(load_file(out), strict=True)
    assert all(torch.equal(model.get_parameter(key), tensor) for key, tensor in right.items())


def test_a_tensor_that_could_be_fused_from_two_layers_is_not_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other side may also have a different tensor with the same name."""
    parts = {f"h.{layer}.attn.{part}.weight": torch.ones(2, 2) for layer in range(2) for part in ("q", "k", "v")}
    paths = [str(tmp_path / f"{side}.safetensors") for side in ("left", "right")]
    save_file({"weight": torch.ones(6, 2)}, paths[0])
    save_file({**parts, "weight": torch.ones(4)}, paths[1])
    for operands in (paths, paths[::-1]):
        assert main(["diff", *operands, "--format", "json"]) == 1
        assert json.loads(capsys.readouterr().out)["suggested"] == []
