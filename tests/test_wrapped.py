"""Real wrappers over two ranks, alone and nested: canonical names, remaps in both directions, and
resumed training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run, main
from optimizer_support import same
from wrapped_ranks import BLOCKS, CHAINS, PLAIN, TRAINED, Net, Wrapped, filename, net, tensors, wrap

FORMS = CHAINS + BLOCKS
EXPORTED = ("plain", "dp", "compile", "averaged", "compile(averaged)")
EXAMPLE = (torch.ones(1, 4),)


@pytest.mark.parametrize("form", FORMS)
def test_remap_back_to_the_plain_checkpoint(wrapped: Wrapped, form: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    source = wrapped.folder / f"{filename(form)}.pt"
    assert main(["remap", str(source), "--to", "serialized", "-o", str(out)]) == 0
    Net().load_state_dict(torch.load(out))
    assert same(dict(torch.load(out)), dict(net(0).state_dict()))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export programs with other weights, from the plain model and from wrappers that torch can
    export.
    """
    folder = tmp_path_factory.mktemp("programs")
    for form in EXPORTED:
        torch.export.save(torch.export.export(wrap(form, net(9)), EXAMPLE), folder / f"{form}.pt2")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_form_go_into_a_program_of_any_form(
    wrapped: Wrapped, programs: Path, form: str
) -> None:
    """No model is needed, because the names differ only by wrappers."""
    source, out = wrapped.folder / f"{filename(form)}.pt", programs / "out.pt2"
    for program in EXPORTED if form in EXPORTED else ("plain",):
        words = [
            "swap-weights",
            str(programs / f"{program}.pt2"),
            str(source),
            "-o",
            str(out),
            "--force",
            "--no-fsync",
        ]
        assert main(words) == 0
        assert torch.equal(torch.export.load(out).module()(*EXAMPLE), net(0)(*EXAMPLE)), program


def test_averaging_counter_is_copied_into_programs(
    wrapped: Wrapped, programs: Path, run: Run
) -> None:
    """The weights' counter replaces the program's, which is kept if the weights have none. `--from`
    accepts chains.
    """
    averaged, plain, out = (
        wrapped.folder / "averaged.pt",
        wrapped.folder / "plain.pt",
        programs / "out.pt2",
    )
    torch.save({**torch.load(averaged), "n_averaged": torch.tensor(7)}, programs / "seven.pt")
    words = ("swap-weights", programs / "averaged.pt2", "-o", out, "--force", "--format", "json")
    done = run(*words, programs / "seven.pt")
    assert (done.data["kept"], done.data["ignored"]) == ([], [])
    assert torch.export.load(out).state_dict["n_averaged"] == 7
    assert run(*words, plain).data["kept"] == ["n_averaged"]
    assert torch.export.load(out).state_dict["n_averaged"] == 0
    assert run(*words, programs / "seven.pt", "--from", "averaged").status == 0
    assert run(*words, plain, "--from", "averaged").status == 1
    assert run(*words, plain, "--from", "averagd").status == 2
    swapped = run(
        "swap-weights", programs / "plain.pt2", programs / "seven.pt", "-o", out, "--force"
    ).out
    assert "n_averaged" in swapped.rpartition("that programs do not have")[2]


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


def test_torchtitan_2622_compile_inside_an_activation_checkpoint(
    wrapped: Wrapped, tmp_path: Path
) -> None:
    """Keys are saved from a training model with ac(compile(block)); an inference model without
    wrappers lacks them.
    """
    outer, inner = wrapped.names["block: ac(compile)"], wrapped.names["block: compile(ac)"]
    assert outer["torch"] != inner["torch"]
    assert tensors(outer["canonical"]) == tensors(inner["canonical"]) == sorted(PLAIN)
    source, out = tmp_path / "train.pt", tmp_path / "out.pt"
    state = torch.load(wrapped.folder / f"{filename('block: ac(compile)')}.pt")
    torch.save({key: state[key] for key in outer["torch"]}, source)
    assert main(["remap", str(source), "--to", "serialized", "-o", str(out)]) == 0
    Net().load_state_dict(torch.load(out))
