"""The example model has the documented properties: hooks, tied weights, frozen parts,
deterministic, free on meta.
"""

from __future__ import annotations

import pytest
import torch

import fusion_decoder as example


def test_hooks_hide_only_the_wrappers() -> None:
    model = example.build()
    hidden = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(
        model.state_dict()
    )
    assert len(hidden) == 19
    assert {name.replace(".layer.", ".").replace(".embedding.", ".") for name in hidden} < set(
        model.state_dict()
    )
    assert "layers.3.sa_norm.scale" in model.state_dict()
    assert "layers.3.fusion_layer.gate" in model.state_dict()
    assert "tok_embeddings.fusion_embedding.weight" in model.state_dict()
    assert "rope" not in model.state_dict()


def test_it_loads_its_own_state_dict_but_not_runtime_names() -> None:
    saved, model = example.build(seed=1), example.build(seed=2)
    model.load_state_dict(saved.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters()))
    assert model.output.weight is model.tok_embeddings.embedding.weight
    with pytest.raises(RuntimeError, match=r"layers\.3\.layer\.layer"):
        model.load_state_dict(dict(saved.named_parameters(remove_duplicate=False)), strict=True)


def test_same_seed_gives_same_weights_and_keeps_the_global_rng_state() -> None:
    before = torch.get_rng_state()
    one, same, other = (example.build(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["tok_embeddings.weight"], other["tok_embeddings.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_meta_build_allocates_nothing() -> None:
    with torch.device("meta"):
        model = example.build()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_optimizer_has_trainable_parameters_in_two_groups() -> None:
    model = example.build()
    decay, no_decay = example.optimizer(model).param_groups
    optimized = {id(p) for p in decay["params"] + no_decay["params"]}
    assert optimized == {id(p) for p in model.parameters() if p.requires_grad}
    assert not any(p.requires_grad for p in model.encoder.parameters())
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)


def test_training_reduces_the_loss() -> None:
    model = example.build()
    optimizer = example.optimizer(model)
    first = example.train(model, optimizer, range(1))
    assert example.train(model, optimizer, range(1, 20)) < first / 2
