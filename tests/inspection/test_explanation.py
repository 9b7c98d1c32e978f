"""`explain` resolves every form of a name to its tensor, checked against the traced names."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Names, explain
from command import Run
from expressions import reads
from hook_zoo import ZOO


@pytest.mark.parametrize("model", ZOO)
def test_every_name_resolves_to_its_tensors(model: str) -> None:
    names = ckpttool.trace(ZOO[model])
    first = {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in names.runtime}
    by_key = {
        s.key: {first[fqn] for fqn in reads(s.source)}
        for s in names.serialized
        if s.source is not None
    }
    every = {t.fqn for t in names.runtime} | {t.canonical for t in names.runtime} | set(by_key)
    for name in every:
        expected = {first[t.fqn] for t in names.runtime if name in (t.fqn, t.canonical)}
        expected |= by_key.get(name, set())
        if not expected:
            with pytest.raises(CkptError, match="has no tensor"):
                explain(name, names)
            continue
        found = explain(name, names)
        assert {first[fqn] for fqn in (found.tensor.fqn, *found.also)} == expected
        assert name not in first or found.tensor.fqn == name
        assert {first[fqn] for fqn in found.aliases} <= {first[found.tensor.fqn]}
        assert found.tensor.fqn not in found.aliases
    for tensor in set(first.values()):
        aliases = [explain(fqn, names) for fqn in first if first[fqn] == tensor]
        assert {key for found in aliases for key in found.serialized} == {
            key for key in by_key if tensor in by_key[key]
        }
        assert all(found.serialized for found in aliases) or not any(
            found.serialized for found in aliases
        )


class Fused(nn.Module):
    """Saves `q` and `k` fused under two keys, swaps the keys of `a` and `b`, and adds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in {"q": 2, "k": 2, "a": 3, "b": 4}.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))
        self.register_buffer("steps", torch.zeros(1))
        self._register_state_dict_hook(self._save)

    @staticmethod
    def _save(module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        state["qk"] = state["copy"] = torch.cat([state.pop("q"), state.pop("k")])
        state["a"], state["b"] = state["b"], state["a"]
        state["added"] = torch.ones(1)


FUSED = {
    "q": (["qk", "copy"], [], 0),
    "qk": (["qk", "copy"], ["k"], 0),
    "a": ("b", ["b"], 2),
    "b": ("a", ["a"], 3),
    "steps": ("steps", [], None),
}


@pytest.mark.parametrize("name", FUSED)
def test_other_tensors_with_the_name_are_listed(name: str, run: Run) -> None:
    command = ("explain", name, "--model", f"{__file__}:Fused")
    done = run(*command, "--format", "json")
    assert (done.data["serialized"], done.data["also"], done.data["optimizer_id"]) == FUSED[name]
    assert done.data["optimizer_group"] == (None if name == "steps" else 0)
    assert done.data["forms"].get("serialized") == (
        FUSED[name][0] if isinstance(FUSED[name][0], str) else None
    )
    assert ("also a name of" in run(*command).out) == bool(FUSED[name][1])


def test_an_unknown_name_is_an_error_that_lists_similar_names() -> None:
    names = ckpttool.trace(Fused)
    list_all = "list them: ckpttool trace Fused --all"
    for name, hint in ("step", "similar names: steps"), ("added", list_all), ("xyz", list_all):
        with pytest.raises(CkptError, match=f"has no tensor '{name}'") as refused:
            explain(name, names)
        assert refused.value.hint == hint


class Deep(nn.Module):
    """Has submodules with the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 2)}))
        self.model = nn.Linear(2, 2)


@cache
def deep() -> Names:
    return ckpttool.trace(Deep)


def wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    """Return a model, and the same model in one or more wrappers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    plain: nn.Module = Deep()
    inner = plain
    if how == "blocks":
        outer = Deep()
        for name, value in plain.state_dict().items():
            assert name in outer.state_dict(), value.shape
        outer.trunk[0] = checkpoint_wrapper(torch.compile(plain.trunk[0]))  # type: ignore[arg-type]
        outer.trunk[1], outer.model = plain.trunk[1], plain.model  # type: ignore[assignment]
        return plain, outer
    for word in how.split():
        if word == "compile":
            inner = torch.compile(inner)  # type: ignore[assignment]
        elif word == "dp":
            inner = nn.DataParallel(inner)
        elif word == "ac":
            inner = checkpoint_wrapper(inner)
        elif word == "averaged":
            averaged = AveragedModel(inner)
            plain, inner = averaged.module, averaged
    return plain, inner


@pytest.mark.parametrize(
    "how", ["compile", "dp", "ac", "averaged", "compile dp", "ac compile dp", "ac dp", "blocks"]
)
def test_wrapped_names_are_resolved(how: str) -> None:
    """Every FQN of a real wrapper, and its optimizer key, resolves to the tensor of the plain
    model.
    """
    plain, outer = wrapped(how)
    inner = plain._orig_mod if hasattr(plain, "_orig_mod") else plain
    own = {
        id(tensor): name for name, tensor in (*plain.named_parameters(), *inner.named_parameters())
    }
    expected = {
        name: own[id(tensor)] for name, tensor in outer.named_parameters() if id(tensor) in own
    }
    assert len(expected) == 6
    for name, fqn in expected.items():
        for form in ("{}", "state.{}.exp_avg", "optimizer.state.{}.step"):
            assert explain(form.format(name), deep()).tensor.fqn == fqn, name


@pytest.mark.parametrize(
    "segment",
    [
        "module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_fpw_module",
        "base_model",
        "model",
        "base_layer",
        "original_module",
    ],
)
def test_the_segment_of_a_wrapper_is_ignored(segment: str) -> None:
    names = deep()
    for tensor in names.runtime:
        parts = tensor.fqn.split(".")
        for at in range(len(parts)):
            name = ".".join((*parts[:at], segment, *parts[at:]))
            if name not in {other.fqn for other in names.runtime}:
                found = explain(name, names)
                assert tensor.fqn in (found.tensor.fqn, *found.also), name


def test_call_numbers_and_ids_are_resolved_and_unknown_names_refused() -> None:
    names = deep()
    assert explain("trunk.0@1.weight", names).tensor.fqn == "trunk.0.weight"
    assert explain("state.1.exp_avg", names).tensor.fqn == "trunk.0.bias"
    for name in ("module._orig_mod.nothing", "state.99.exp_avg", "module", "other.trunk.0.weight"):
        with pytest.raises(CkptError, match="has no tensor"):
            explain(name, names)
