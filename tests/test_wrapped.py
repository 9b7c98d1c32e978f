"""Real wrappers over two ranks, alone and nested: canonical names, remaps there and back, training resumed in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.cli.app import main
from ckpttool.naming.wrappers.chain import canonical_keys
from optimizer_support import same
from wrapped_ranks import BLOCKS, CHAINS, PLAIN, TRAINED, Net, Wrapped, filename, net, tensors

FORMS = CHAINS + BLOCKS

# Where torch's own get_model_state_dict leaves a wrapper's segment in its names, and why.
TORCH_LEAVES = {
    "dp": "module",  # it knows DistributedDataParallel only
    "dp(compile)": "module",
    "averaged": "module",
    "averaged(ddp)": "module",
    "ddp(averaged)": "module",
    "compile(averaged)": "module",
    # It looks for a compiled module on the wrapper around it, which passes attributes on (torchtitan#2622).
    "ac(compile)": "_orig_mod",
    "fsdp(compile)": "_orig_mod",
    "block: ac(compile)": "_orig_mod",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_canonical_names_of_a_live_model(wrapped: Wrapped, form: str) -> None:
    assert tensors(wrapped.names[form]["canonical"]) == sorted(PLAIN)


@pytest.mark.parametrize("form", FORMS)
def test_the_canonical_names_of_a_file(wrapped: Wrapped, form: str) -> None:
    assert tensors(canonical_keys(wrapped.names[form]["keys"]).values()) == sorted(PLAIN)


@pytest.mark.parametrize("form", FORMS)
def test_torch_says_the_same_except_where_it_leaves_a_segment(wrapped: Wrapped, form: str) -> None:
    theirs = wrapped.names[form]["torch"]
    left = {part for name in theirs for part in name.split(".")} & {"module", "_orig_mod"}
    assert left == {TORCH_LEAVES[form]} if form in TORCH_LEAVES else tensors(theirs) == sorted(PLAIN)


@pytest.mark.parametrize("form", FORMS)
def test_the_plain_checkpoint_remapped_is_the_wrapped_models_own(wrapped: Wrapped, form: str) -> None:
    written = torch.load(wrapped.folder / "loads" / f"{filename(form)}.pt")
    assert sorted(written) == sorted(wrapped.names[form]["keys"])
    assert wrapped.failures[form] == ""


@pytest.mark.parametrize("form", FORMS)
def test_back_to_the_plain_checkpoint(wrapped: Wrapped, form: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    source = wrapped.folder / f"{filename(form)}.pt"
    assert main(["remap", str(source), "--to", "serialized", "-o", str(out)]) == 0
    Net().load_state_dict(torch.load(out))
    assert same(dict(torch.load(out)), dict(net(0).state_dict()))


@pytest.mark.parametrize("new", TRAINED)
@pytest.mark.parametrize("old", TRAINED)
def test_training_resumes_bit_for_bit(wrapped: Wrapped, old: str, new: str) -> None:
    result = torch.load(wrapped.folder / "results" / f"{old} to {new}.pt")
    for name in {old, new}:
        finished = torch.load(wrapped.folder / f"finished-{name}.pt")
        assert same(dict(result["model"]), dict(finished["model"]))
        assert same(moments(result), moments(finished))
    assert not same(dict(result["model"]), dict(net(0).state_dict()))


def moments(result: dict[str, Any]) -> dict[str, Any]:
    return result["optimizer"]["state"]


def test_torchtitan_2622_compiled_inside_of_an_activation_checkpoint(wrapped: Wrapped, tmp_path: Path) -> None:
    """Saved from a training model with ac(compile(block)), not found by an inference model without either."""
    outer, inner = wrapped.names["block: ac(compile)"], wrapped.names["block: compile(ac)"]
    assert outer["torch"] != inner["torch"]
    assert tensors(outer["canonical"]) == tensors(inner["canonical"]) == sorted(PLAIN)
    source, out = tmp_path / "train.pt", tmp_path / "out.pt"
    state = torch.load(wrapped.folder / f"{filename('block: ac(compile)')}.pt")
    torch.save({key: state[key] for key in outer["torch"]}, source)
    assert main(["remap", str(source), "--to", "serialized", "-o", str(out)]) == 0
    Net().load_state_dict(torch.load(out))
