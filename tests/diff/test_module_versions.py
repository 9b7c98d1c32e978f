"""Module versions (`_metadata`) of two files: they are a difference if and only if torch loads the
two differently.
"""

from __future__ import annotations

import copy
import shlex
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from command import Run, fixes_in, notes_in

Build = Callable[[], nn.Module]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def batch_norm_alone() -> nn.Module:
    return nn.BatchNorm2d(4)


def without_statistics() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)
    )


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))


def quantized() -> nn.Module:
    return _quiet(
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    )


def static() -> nn.Module:
    def build() -> nn.Module:
        parts = (torch.ao.quantization.QuantStub(), nn.Conv1d(4, 4, 1), nn.Linear(4, 4))
        model: Any = nn.Sequential(*parts).eval()
        model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
        prepared = torch.ao.quantization.prepare(model)
        prepared(torch.arange(16.0).reshape(1, 4, 4))
        return torch.ao.quantization.convert(prepared)

    return _quiet(build)


def observed() -> nn.Module:
    def build() -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(4, 4)).eval()
        model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
        prepared = torch.ao.quantization.prepare(model)
        prepared(torch.arange(16.0).reshape(4, 4))
        return prepared

    return _quiet(build)


def trained_quantized() -> nn.Module:
    def build() -> nn.Module:
        model: Any = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).train()
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        fused = torch.ao.quantization.fuse_modules_qat(model, [["0", "1"]])
        return torch.ao.quantization.prepare_qat(fused)

    return _quiet(build)


def _quiet(build: Build) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return build()


OWN = (
    *(plain, batch_norm, batch_norm_alone, without_statistics, instance_norm, spectral_norm),
    *(quantized, static, observed, trained_quantized),
)
OBSERVED = (observed, trained_quantized)  # names do not tell their observers apart
# Without these names, older versions load and newer ones may not.
LEFT_OUT = ("", "num_batches_tracked", "weight_v", "eps")


def saved(build: Build, left_out: str) -> dict[str, OrderedDict[str, Any]]:
    """Return the state dict of the model with its own versions, without versions, and with
    others.
    """
    state: Any = _quiet(build).state_dict()
    for key in [key for key in state if left_out and key.endswith(left_out)]:
        del state[key]
    states: dict[str, Any] = {"own": state, "none": OrderedDict(state)}
    for number in (1, 2):
        states[str(number)] = copy.deepcopy(state)
        for payload in states[str(number)]._metadata.values():
            payload["version"] = min(number, payload["version"])
            payload.pop("spectral_norm", None)
    return states


def loaded(build: Build, path: Path) -> list[tuple[str, str]] | None:
    """Return the values after torch has loaded the file, as text; None if it does not load."""
    model = _quiet(build)
    state = (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    try:
        _quiet(lambda: model.load_state_dict(state) and model)
    except Exception:
        return None
    return [(key, str(value)) for key, value in model.state_dict().items()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("build", OWN, ids=lambda build: build.__name__)
def test_versions_count_if_and_only_if_torch_loads_differently(
    build: Build, left_out: str, tmp_path: Path, run: Run
) -> None:
    results, sets = {}, saved(build, left_out)
    if left_out and not any(key.endswith(left_out) for key in _quiet(build).state_dict()):
        pytest.skip("it has no such key")
    for name, state in sets.items():
        torch.save(state, tmp_path / f"{name}.pt")
        results[name] = loaded(build, tmp_path / f"{name}.pt")
    for left, right in combinations(sets, 2):
        done = run("diff", tmp_path / f"{left}.pt", tmp_path / f"{right}.pt")
        if results[left] != results[right]:
            assert done.status == 1, (left, right, done)
        # if both fail, that may have another reason
        elif results[left] is not None and build not in OBSERVED:
            assert done.status == 0, (left, right, done)


class Custom(nn.Linear):
    """A module of a user, whose version may mean anything."""

    _version = 3


def custom() -> nn.Module:
    return nn.Sequential(Custom(4, 4), nn.BatchNorm1d(4))


def test_other_versions_of_a_module_that_only_its_code_knows_count(
    tmp_path: Path, run: Run
) -> None:
    for name, state in saved(custom, "").items():
        torch.save(state, tmp_path / f"{name}.pt")
    done = run("diff", tmp_path / "own.pt", tmp_path / "2.pt", "--format", "json")
    (note,) = notes_in(done.data)
    what = "the module versions differ (_metadata), and torch may load these keys differently"
    assert (done.status, note) == (1, f"{what}: 0 (version 3 and version 2)")
    done = run("diff", tmp_path / "own.pt", tmp_path / "none.pt")
    answer = f"differ: {tmp_path / 'none.pt'} lost its module versions"
    assert (done.status, answer in done.out.splitlines()[0]) == (1, True)
    assert run("diff", tmp_path / "own.pt", tmp_path / "none.pt", "--fail-on", "value").status == 1


@pytest.mark.parametrize(
    "build", [plain, batch_norm, instance_norm, custom], ids=lambda build: build.__name__
)
def test_conversion_to_a_format_without_versions_is_no_difference(
    build: Build, tmp_path: Path, run: Run
) -> None:
    state = build().state_dict()
    torch.save(state, tmp_path / "a.pt")
    save_file(dict(state), tmp_path / "a.safetensors")
    for pair in (("a.pt", "a.safetensors"), ("a.safetensors", "a.pt")):
        done = run("diff", *(tmp_path / name for name in pair), "--format", "json")
        named = [note for note in notes_in(done.data) if "module versions" in note]
        assert (done.status, len(named)) == (0, build is not plain)


def test_conversion_without_what_the_version_requires_is_a_difference(
    tmp_path: Path, run: Run
) -> None:
    state = saved(batch_norm, "num_batches_tracked")["own"]
    torch.save(state, tmp_path / "a.pt")
    save_file(dict(state), tmp_path / "a.safetensors")
    assert loaded(batch_norm, tmp_path / "a.pt") is None
    assert loaded(batch_norm, tmp_path / "a.safetensors") is not None
    assert run("diff", tmp_path / "a.pt", tmp_path / "a.safetensors").status == 1


def test_versions_of_wrapped_modules_are_compared(tmp_path: Path, run: Run) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    torch.save(Wrapper(batch_norm()).state_dict(), tmp_path / "wrapped.pt")
    torch.save(batch_norm().state_dict(), tmp_path / "plain.pt")
    done = run(
        "remap", tmp_path / "wrapped.pt", "--to", "serialized", "-o", tmp_path / "unwrapped.pt"
    )
    assert done.status == 0
    data = run("diff", tmp_path / "wrapped.pt", tmp_path / "plain.pt", "--format", "json").data
    assert not [note for note in notes_in(data) if "versions" in note]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("build", [quantized, static], ids=lambda build: build.__name__)
def test_lost_versions_are_named_and_written_back(build: Build, tmp_path: Path, run: Run) -> None:
    states = saved(build, "")
    torch.save(states["own"], tmp_path / "own.pt")
    torch.save(states["none"], tmp_path / "lost.pt")
    lost = tmp_path / "lost.pt"
    assert loaded(build, lost) is None
    for asked in (
        ("--model", f"{__file__}:{build.__name__}", "--materialize"),
        (tmp_path / "own.pt",),
    ):
        done = run("diff", lost, *asked, "--format", "json")
        assert (
            done.status,
            any("lost its module versions" in note for note in notes_in(done.data)),
        ) == (1, True)
        (fix,) = fixes_in(done.data)
        words = shlex.split(fix)[1:]
        assert run(*words, "--force").status == 0
        assert loaded(build, Path(words[words.index("-o") + 1])) == loaded(
            build, tmp_path / "own.pt"
        )


def test_missing_step_counter_of_a_norm_is_added(tmp_path: Path, run: Run) -> None:
    torch.save(
        {"model": saved(batch_norm, "num_batches_tracked")["own"], "epoch": 3}, tmp_path / "a.pt"
    )
    done = run("diff", tmp_path / "a.pt", "--model", f"{__file__}:batch_norm", "--format", "json")
    (fix,) = fixes_in(done.data)
    words = shlex.split(fix)[1:]
    done = run(*words)
    assert (done.status, "1 missing key set to 0" in done.out + done.err) == (0, True)
    result = torch.load(words[-1], weights_only=True)
    model = batch_norm()
    model.load_state_dict(result["model"])
    assert list(result["model"]) == list(model.state_dict())
    assert (result["epoch"], result["model"]["1.num_batches_tracked"]) == (3, torch.tensor(0))


def test_other_missing_keys_are_not_added(tmp_path: Path, run: Run) -> None:
    state = batch_norm().state_dict()
    for name in ("1.num_batches_tracked", "1.running_mean", "1.running_var"):
        del state[name]
    torch.save(state, tmp_path / "a.pt")
    done = run(
        "remap",
        tmp_path / "a.pt",
        "--model",
        f"{__file__}:batch_norm",
        "--to",
        "serialized",
        "-o",
        "out.pt",
    )
    assert (done.status, "1.running_mean" in done.err) == (1, True)
