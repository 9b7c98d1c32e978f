"""Shards of a model on the ranks: of any shape, under serialized keys or runtime names, or in flat parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run
from flatten_params_wrapper import FlattenParamsWrapper, flattened
from fsdp_run import Block, Net
from places import SUPPORT

MODEL = ["--model", f"{SUPPORT / 'fsdp_run.py'}:Net"]


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


SAVED = {"a": "seen", "b": "c", "seen": "b"}  # the keys of `Shifted`, by runtime names


class Shifted(nn.Module):
    """A model with a state_dict key that is the name of another tensor, here of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.arange(6.0).reshape(2, 3)), nn.Parameter(torch.arange(4.0) + 10)
        self.register_buffer("seen", torch.zeros(2))
        self.register_state_dict_post_hook(lambda module, state, prefix, _: _renamed(state, prefix, SAVED))
        names = {key: name for name, key in SAVED.items()}
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: _renamed(state, prefix, names))


def _renamed(state: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    values = {prefix + new: state.pop(prefix + old) for old, new in names.items()}
    state.update(values)


SHIFTED = ["--model", f"{__file__}:Shifted"]


def save_shifted(folder: Path, runtime: bool, *changes: dict[str, torch.Tensor]) -> Path:
    """Save the state dicts of two ranks with `use_orig_params`, under runtime names or serialized keys."""
    model = Shifted()
    names = dict(zip(SAVED, SAVED)) if runtime else SAVED
    for rank, change in enumerate(changes):
        slices = {
            names[name]: value.detach().flatten().chunk(2)[rank].clone() for name, value in model.named_parameters()
        }
        torch.save({**slices, names["seen"]: torch.full((2,), rank), **change}, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("to", ["runtime", "serialized"])
def test_slices_with_runtime_names_or_serialized_keys(run: Run, tmp_path: Path, runtime: bool, to: str) -> None:
    done = run("remap", save_shifted(tmp_path, runtime, {}, {}), *SHIFTED, "--to", to, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    buffer = "seen" if runtime else "b"
    assert f"{buffer} differs between the ranks: rank 0's is used" in done.err
    model = Shifted()
    expected = model.state_dict() if to == "serialized" else {"a": model.a, "b": model.b, "seen": model.seen}
    assert same(torch.load(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize(("runtime", "key"), [(False, "c"), (True, "b")])
def test_full_parameter_that_differs_between_ranks_is_refused(
    run: Run, tmp_path: Path, runtime: bool, key: str
) -> None:
    files = save_shifted(tmp_path, runtime, *({key: torch.full((4,), float(rank))} for rank in (0, 1)))
    done = run("remap", files, *SHIFTED, "-o", tmp_path / "out.pt", "--format", "json")
    assert (done.status, [p["key"] for p in done.data["problems"]]) == (2, [key])


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        ([torch.zeros(1, 3), torch.zeros(1, 3)], 6),  # rows, or columns of another shape: the ranks do not tell
        ([torch.zeros(3), torch.zeros(4)], 7),
        ([torch.zeros(3), torch.zeros(2)], 5),
        ([torch.zeros(3), torch.zeros(3).half()], 6),
        ([torch.zeros(3), None], 3),
    ],
)
def test_parts_that_do_not_join_to_the_parameter_are_refused(
    run: Run, tmp_path: Path, parts: list[torch.Tensor | None], held: int
) -> None:
    files = save_shifted(tmp_path, True, *({} if part is None else {"a": part} for part in parts))
    if parts[1] is None:
        rest = torch.load(tmp_path / "rank_1.pt")
        del rest["a"]
        torch.save(rest, tmp_path / "rank_1.pt")
    done = run("remap", files, *SHIFTED, "-o", tmp_path / "out.pt", "--format", "json")
    problems = [(p["problem"], p["key"]) for p in done.data["problems"]]
    assert (done.status, problems) == (1, [(f"the ranks hold {held} elements of it, and the model's is [2, 3]", "a")])
    assert not (tmp_path / "out.pt").exists()


def test_slice_may_be_a_strided_view(run: Run, tmp_path: Path) -> None:
    halves = [{"a": torch.arange(6.0).repeat_interleave(2)[6 * rank : 6 * rank + 6][::2]} for rank in (0, 1)]
    files = save_shifted(tmp_path, True, *halves)
    assert run("remap", files, *SHIFTED, "--to", "runtime", "-o", tmp_path / "out.pt").status == 0
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"], Shifted().a)


# Flat parameters


def flat_net(inner: type[nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the state of the model, and of the same model with `inner` and the root flattened."""
    model = Net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, flattened(model, inner, True).state_dict()


def strided_net() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    expected, saved = flat_net(Block)
    return expected, {k: v.repeat_interleave(2)[::2] if k == "flat_param" else v for k, v in saved.items()}


def net_with_flat_layers() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = Net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model.layers = nn.ModuleList(FlattenParamsWrapper(layer) for layer in model.layers)
    return expected, model.state_dict()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        # FSDP makes no flat parameter for a unit without direct parameters
        (lambda: flat_net(Block), ["--from", "fsdp-flat(units=['layers', 'layers.*'])"]),
        (net_with_flat_layers, ["--from", "fsdp-flat(units='layers.*')"]),  # parameters of the root keep their names
        (strided_net, []),
    ],
)
def test_flat_parameters_are_split(run: Run, tmp_path: Path, make: Any, options: list[str]) -> None:
    expected, saved = make()
    torch.save(saved, tmp_path / "flat.pt")
    done = run("remap", tmp_path / "flat.pt", *MODEL, *options, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert same(torch.load(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("ignored", [(), ("b",)])
def test_ignored_parameters_have_runtime_names_or_serialized_keys(
    run: Run, tmp_path: Path, runtime: bool, ignored: tuple[str, ...]
) -> None:
    """FSDP does not flatten ignored parameters."""
    model = Shifted()
    expected = {"a": model.a.detach(), "b": model.b.detach(), "seen": torch.tensor([3.0, 4])}
    flat = torch.cat([expected[name].flatten() for name in "ab" if name not in ignored])
    rest = {name if runtime else SAVED[name]: expected[name] for name in (*ignored, "seen")}
    torch.save({"flat_param": flat, **rest}, tmp_path / "flat.pt")
    done = run("remap", tmp_path / "flat.pt", *SHIFTED, "--to", "runtime", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert same(torch.load(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize(
    ("change", "message", "key"),
    [
        ({"flat_param": torch.zeros(7, 4)}, "is not one-dimensional", "flat_param"),
        ({"_flat_param": torch.zeros(28)}, "flat_param is of the same module", "_flat_param"),
        ({"other.flat_param": torch.zeros(2)}, "the model has no module other with parameters", "other.flat_param"),
    ],
)
def test_flat_parameter_that_is_not_a_unit_is_refused(
    run: Run, tmp_path: Path, change: dict[str, torch.Tensor], message: str, key: str
) -> None:
    torch.save({**flat_net(Block)[1], **change}, tmp_path / "flat.pt")
    done = run("remap", tmp_path / "flat.pt", *MODEL, "-o", tmp_path / "out.pt", "--format", "json")
    [problem] = done.data["problems"]
    assert (done.status, problem["key"]) == (1, key)
    assert message in problem["problem"]


def test_flat_parameter_is_renamed_by_a_rule_without_a_model(run: Run, tmp_path: Path) -> None:
    """A rule does not depend on the parameters inside."""
    torch.save({"flat_param": torch.arange(3.0)}, tmp_path / "flat.pt")
    done = run("remap", tmp_path / "flat.pt", "--rule", "{x*} => net.{x*}", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert same(torch.load(tmp_path / "out.pt"), {"net.flat_param": torch.arange(3.0)})


def test_module_version_key_that_is_not_a_string_is_kept(run: Run, tmp_path: Path) -> None:
    state = Net().state_dict()
    state._metadata[7] = {"version": 1}  # type: ignore[attr-defined]
    for rank in (0, 1):
        torch.save(state, tmp_path / f"rank_{rank}.pt")
    assert run("remap", tmp_path / "rank_*.pt", *MODEL, "-o", tmp_path / "out.pt").status == 0
    assert torch.load(tmp_path / "out.pt")._metadata == state._metadata  # type: ignore[attr-defined]
