"""The example model is what its documentation says: hooked, tied, partly frozen, deterministic, and free on meta."""

from __future__ import annotations

import pytest
import torch

import fusion_decoder as example


def test_hooks_hide_the_wrappers_and_nothing_else() -> None:
    model = example.build()
    hidden = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(model.state_dict())
    assert len(hidden) == 19
    assert {name.replace(".layer.", ".").replace(".embedding.", ".") for name in hidden} < set(model.state_dict())
    assert "layers.3.sa_norm.scale" in model.state_dict()
    assert "layers.3.fusion_layer.gate" in model.state_dict()
    assert "tok_embeddings.fusion_embedding.weight" in model.state_dict()
    assert "rope" not in model.state_dict()


def test_it_loads_what_it_saves_and_no_runtime_names() -> None:
    saved, model = example.build(seed=1), example.build(seed=2)
    model.load_state_dict(saved.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters()))
    with pytest.raises(RuntimeError, match=r"layers\.3\.layer\.layer"):
        model.load_state_dict(dict(saved.named_parameters(remove_duplicate=False)), strict=True)


def test_the_head_is_tied_also_after_loading() -> None:
    model = example.build()
    model.load_state_dict(example.build(seed=1).state_dict())
    assert model.output.weight is model.tok_embeddings.embedding.weight


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (example.build(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["tok_embeddings.weight"], other["tok_embeddings.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_it_costs_nothing_on_meta() -> None:
    with torch.device("meta"):
        model = example.build()
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_the_optimizer_takes_what_is_trained_in_two_groups() -> None:
    model = example.build()
    decay, no_decay = example.optimizer(model).param_groups
    taken = {id(p) for p in decay["params"] + no_decay["params"]}
    assert taken == {id(p) for p in model.parameters() if p.requires_grad}
    assert not any(p.requires_grad for p in model.encoder.parameters())
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)


def test_training_learns() -> None:
    model = example.build()
    optimizer = example.optimizer(model)
    first = example.train(model, optimizer, range(1))
    assert example.train(model, optimizer, range(1, 20)) < first / 2
