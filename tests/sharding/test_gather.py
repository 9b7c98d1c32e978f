"""Shards of a model on the ranks: of any shape, under serialized keys or runtime names, or in flat
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Done, Run
from flatten_params_wrapper import FlattenParamsWrapper, flattened
from fsdp_run import Block, Net
from places import SUPPORT

MODEL = ["--model", f"{SUPPORT / 'fsdp_run.py'}:Net"]


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


State = dict[str, Any]
SAVED = {"a": "seen", "b": "c", "seen": "b"}  # the keys of `Shifted`, by runtime names


class Shifted(nn.Module):
    """A model with a state_dict key that is the name of another tensor, here of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.arange(6.0).reshape(2, 3)),
            nn.Parameter(torch.arange(4.0) + 10),
        )
        self.register_buffer("seen", torch.zeros(2))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: _renamed(state, prefix, SAVED)
        )
        names = {key: name for name, key in SAVED.items()}
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: _renamed(state, prefix, names)
        )


def _renamed(state: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    values = {prefix + new: state.pop(prefix + old) for old, new in names.items()}
    state.update(values)


SHIFTED = ["--model", f"{__file__}:Shifted"]


def save_shifted(folder: Path, runtime: bool, *changes: dict[str, torch.Tensor]) -> Path:
    """Save the state dicts of two ranks with `use_orig_params`, under runtime names or serialized
    keys.
    """
    model = Shifted()
    names = dict(zip(SAVED, SAVED)) if runtime else SAVED
    for rank, change in enumerate(changes):
        slices = {
            names[name]: value.detach().flatten().chunk(2)[rank].clone()
            for name, value in model.named_parameters()
        }
        torch.save(
            {**slices, names["seen"]: torch.full((2,), rank), **change}, folder / f"rank_{rank}.pt"
        )
    return folder / "rank_*.pt"


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("to", ["runtime", "serialized"])
def test_slices_with_runtime_names_or_serialized_keys(
    run: Run, tmp_path: Path, runtime: bool, to: str
) -> None:
    done = run(
        "remap",
        save_shifted(tmp_path, runtime, {}, {}),
        *SHIFTED,
        "--to",
        to,
        "-o",
        tmp_path / "out.pt",
    )
    assert done.status == 0, done.err
    buffer = "seen" if runtime else "b"
    assert f"{buffer} differs between the ranks: rank 0's is used" in done.err
    model = Shifted()
    expected = (
        model.state_dict()
        if to == "serialized"
        else {"a": model.a, "b": model.b, "seen": model.seen}
    )
    assert same(torch.load(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize(("runtime", "key"), [(False, "c"), (True, "b")])
def test_full_parameter_that_differs_between_ranks_is_refused(
    run: Run, tmp_path: Path, runtime: bool, key: str
) -> None:
    files = save_shifted(
        tmp_path, runtime, *({key: torch.full((4,), float(rank))} for rank in (0, 1))
    )
    done = run("remap", files, *SHIFTED, "-o", tmp_path / "out.pt", "--format", "json")
    assert (done.status, [p["key"] for p in done.data["problems"]]) == (2, [key])


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        # rows that do not join along one dimension
        ([torch.zeros(1, 3), torch.zeros(2, 3)], 9),
        ([torch.zeros(1, 2), torch.zeros(1, 2)], 4),
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
    assert (done.status, problems) == (
        1,
        [(f"the ranks hold {held} elements, and the model's shape is [2, 3]", "a")],
    )
    assert not (tmp_path / "out.pt").exists()


def test_slice_may_be_a_strided_view(run: Run, tmp_path: Path) -> None:
    halves = [
        {"a": torch.arange(6.0).repeat_interleave(2)[6 * rank : 6 * rank + 6][::2]}
        for rank in (0, 1)
    ]
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
    return expected, {
        k: v.repeat_interleave(2)[::2] if k == "flat_param" else v for k, v in saved.items()
    }


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
        # parameters of the root keep their names
        (net_with_flat_layers, ["--from", "fsdp-flat(units='layers.*')"]),
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
    done = run(
        "remap", tmp_path / "flat.pt", *SHIFTED, "--to", "runtime", "-o", tmp_path / "out.pt"
    )
    assert done.status == 0, done.err
    assert same(torch.load(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize(
    ("change", "message", "key"),
    [
        ({"flat_param": torch.zeros(7, 4)}, "is not one-dimensional", "flat_param"),
        ({"_flat_param": torch.zeros(28)}, "flat_param is of the same module", "_flat_param"),
        (
            {"other.flat_param": torch.zeros(2)},
            "the model has no module other with parameters",
            "other.flat_param",
        ),
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
    done = run(
        "remap", tmp_path / "flat.pt", "--rule", "{x*} => net.{x*}", "-o", tmp_path / "out.pt"
    )
    assert done.status == 0, done.err
    assert same(torch.load(tmp_path / "out.pt"), {"net.flat_param": torch.arange(3.0)})


def test_module_version_key_that_is_not_a_string_is_kept(run: Run, tmp_path: Path) -> None:
    state = Net().state_dict()
    state._metadata[7] = {"version": 1}  # type: ignore[attr-defined]
    for rank in (0, 1):
        torch.save(state, tmp_path / f"rank_{rank}.pt")
    assert run("remap", tmp_path / "rank_*.pt", *MODEL, "-o", tmp_path / "out.pt").status == 0
    assert torch.load(tmp_path / "out.pt")._metadata == state._metadata  # type: ignore[attr-defined]


# Optimizers: state is matched to parameters, and state that cannot be unsharded is refused


class Nested(nn.Module):
    """A nested unit, and a scalar, which FSDP can be told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Linear(2, 3)


class Flat(nn.Module):
    """Like `Nested`, with tensors that can all be flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.inner = nn.Linear(2, 3)


NET, FLAT = ["--model", f"{__file__}:Nested"], ["--model", f"{__file__}:Flat"]
UNITS = ["flat_param", "inner.flat_param"]
CHUNKS = {"flat_param": 3, "inner.flat_param": 5}  # for two ranks, with padding


def problems_of(done: Done) -> list[tuple[str, str]]:
    return [(one["problem"], one["key"]) for one in done.data.get("problems", ())]


def save_flat(folder: Path, params: list[Any], state: list[State], **group: Any) -> Path:
    """Save flat parameters and an optimizer with `state` for the `params`."""
    optimizer = {
        "state": dict(zip(params, state)),
        "param_groups": [{"lr": 0.1, "params": params, **group}],
    }
    torch.save(
        {"model": flattened(Flat(), nn.Linear).state_dict(), "optimizer": optimizer},
        folder / "flat.pt",
    )
    return folder / "flat.pt"


OTHER = ("not a flat parameter, as others are", "scale")
UNKNOWN = ("the model section has no such flat parameter", "x.flat_param")


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    ("names", "problems"),
    [
        (UNITS, []),
        ([*UNITS, "scale"], [OTHER]),
        ([*UNITS, "x.flat_param", "scale"], [OTHER, UNKNOWN]),
    ],
)
def test_optimizer_parameters_that_are_not_units_are_refused(
    run: Run, tmp_path: Path, by_id: bool, names: list[str], problems: list[tuple[str, str]]
) -> None:
    params = list(range(len(names))) if by_id else names
    file = save_flat(
        tmp_path, params, [{}] * len(names), **({"param_names": names} if by_id else {})
    )
    done = run("remap", file, *FLAT, "-o", tmp_path / "out.pt", "--format", "json")
    assert (done.status, problems_of(done)) == (bool(problems), problems), done.err


def test_names_of_one_group_only_are_not_read(run: Run, tmp_path: Path) -> None:
    """Older code numbered the parameters of the second group; the sizes tell which is which."""
    numel = {key: value.numel() for key, value in flattened(Flat(), nn.Linear).state_dict().items()}
    state = [{"exp_avg": torch.arange(float(numel[name]))} for name in UNITS]
    file = save_flat(tmp_path, [0, 1], state)
    saved = torch.load(file)
    saved["optimizer"]["param_groups"] = [
        {"lr": 0.1, "params": [0], "param_names": [UNITS[0]]},
        {"lr": 0.2, "params": [1]},
    ]
    torch.save(saved, file)
    done = run("remap", file, *FLAT, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    written = torch.load(tmp_path / "out.pt")["optimizer"]
    first, second = written["param_groups"]
    assert (first["lr"], second["lr"]) == (0.1, 0.2)
    names = dict(
        zip([*first["params"], *second["params"]], ["scale", "inner.weight", "inner.bias"])
    )
    shapes = {name: parameter.shape for name, parameter in Flat().named_parameters()}
    assert {names[param]: row["exp_avg"].shape for param, row in written["state"].items()} == shapes


def test_optimizer_of_original_parameters_is_kept(run: Run, tmp_path: Path) -> None:
    """It was created before the model was wrapped, or unsharded already."""
    state = [{"exp_avg": torch.rand(parameter.shape)} for parameter in Flat().parameters()]
    names = [name for name, _ in Flat().named_parameters()]
    done = run("remap", save_flat(tmp_path, names, state), *FLAT, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    result = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert all(
        torch.equal(result[name]["exp_avg"], one["exp_avg"]) for name, one in zip(names, state)
    )


@pytest.mark.parametrize(("ids", "count"), [([0], "1 parameter"), ([0, 1, 2], "3 parameters")])
def test_wrong_number_of_ids_is_refused(
    run: Run, tmp_path: Path, ids: list[int], count: str
) -> None:
    done = run(
        "remap", save_flat(tmp_path, ids, [{} for _ in ids]), *FLAT, "-o", tmp_path / "out.pt"
    )
    assert done.status == 1
    assert (
        f"optimizer has {count}, and the model section 2 flat parameters: which is which?"
        in done.err
    )


def save_two_ranks(folder: Path, change: Any = lambda rank, state: None) -> Path:
    """Save flat parameters of two ranks, with `change` applied to the state of ``inner``."""
    saved = flattened(Flat(), nn.Linear).state_dict()
    for rank in (0, 1):
        state = {
            name: {"exp_avg": torch.arange(float(size)) + rank * size}
            for name, size in CHUNKS.items()
        }
        change(rank, state["inner.flat_param"])
        parts = {
            key: nn.functional.pad(value, (0, 2 * CHUNKS[key] - len(value))).chunk(2)[rank].clone()
            for key, value in saved.items()
        }
        optimizer = {"state": state, "param_groups": [{"params": UNITS}]}
        torch.save({"model": parts, "optimizer": optimizer}, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


def make_strided(rank: int, state: State) -> None:
    state["exp_avg"] = state["exp_avg"].repeat_interleave(2)[::2]


@pytest.mark.parametrize("change", [lambda rank, state: None, make_strided])
def test_chunks_are_joined_for_any_strides(run: Run, tmp_path: Path, change: Any) -> None:
    done = run("remap", save_two_ranks(tmp_path, change), *FLAT, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    result = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert torch.equal(result["scale"]["exp_avg"], torch.arange(5.0))
    assert torch.equal(result["inner.weight"]["exp_avg"], torch.arange(6.0).reshape(3, 2))
    assert torch.equal(result["inner.bias"]["exp_avg"], torch.arange(6.0, 9.0))


def only_rank_1(change: Any) -> Any:
    return lambda rank, state: change(state) if rank else None


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        (lambda state: state.pop("exp_avg"), "[5]"),
        (lambda state: state.update(exp_avg=torch.ones(4)), "[5], [4]"),
        (lambda state: state.update(exp_avg=torch.ones(6)), "[5], [6]"),
        (lambda state: state.update(exp_avg=torch.ones(5).double()), "[5], [5]"),
    ],
)
def test_chunks_with_wrong_sizes_are_refused(
    run: Run, tmp_path: Path, change: Any, shapes: str
) -> None:
    done = run(
        "remap",
        save_two_ranks(tmp_path, only_rank_1(change)),
        *FLAT,
        "-o",
        tmp_path / "out.pt",
        "--format",
        "json",
    )
    problem = f"is {shapes} on the ranks, inner.flat_param is [5] on each"
    assert (done.status, problems_of(done)) == (1, [(problem, "state.inner.flat_param.exp_avg")])
    assert not (tmp_path / "out.pt").exists()


# Slices, as with `use_orig_params`


GROUPS = [["inner.weight"], ["scale", "inner.bias"]]


def save_slices(folder: Path, names: bool, change: Any = lambda rank, state: None) -> Path:
    """Save half of every parameter but the scalar on two ranks, with `change` applied to the state
    of the weight.
    """
    flat = [name for group in GROUPS for name in group]
    whole = {
        name: torch.arange(1.0 + at, 1 + at + value.numel())
        for at, (name, value) in enumerate(Nested().named_parameters())
    }
    for rank in (0, 1):
        parts = {
            name: (value[0] if name == "scale" else value.tensor_split(2)[rank])
            for name, value in whole.items()
        }
        parts = {name: value.clone() for name, value in parts.items()}
        state: dict[Any, State] = {
            at: {"exp_avg": parts[name], "step": 2} for at, name in enumerate(flat)
        }
        change(rank, state[0])
        ids = [[flat.index(name) for name in group] for group in GROUPS]
        groups = [
            {"params": params} | ({"param_names": group} if names else {})
            for params, group in zip(ids, GROUPS)
        ]
        torch.save(
            {"model": parts, "optimizer": {"state": state, "param_groups": groups}},
            folder / f"rank_{rank}.pt",
        )
    return folder / "rank_*.pt"


@pytest.mark.parametrize("names", [False, True])
def test_slices_are_matched_by_name_or_by_size(run: Run, tmp_path: Path, names: bool) -> None:
    """The state includes a plain counter, and a scalar that is on every rank."""
    files = save_slices(tmp_path, names)
    done = run("remap", files, *NET, "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    result = torch.load(tmp_path / "out.pt")
    for name, value in result["model"].items():
        assert torch.equal(result["optimizer"]["state"][name]["exp_avg"], value), name
        assert result["optimizer"]["state"][name]["step"] == 2
        assert value.shape == Nested().get_parameter(name).shape


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            only_rank_1(lambda state: state.pop("exp_avg")),
            "the ranks hold 3 elements, and the parameter's shape is [3, 2]",
        ),
        (
            only_rank_1(lambda state: state.update(exp_avg=torch.ones(4))),
            "the ranks hold 7 elements, and the parameter's shape is [3, 2]",
        ),
        (
            lambda rank, state: state.update(exp_avg=torch.full((3, 2), rank)),
            "differs between the ranks",
        ),
    ],
)
def test_state_that_does_not_join_is_refused(
    run: Run, tmp_path: Path, change: Any, problem: str
) -> None:
    done = run(
        "remap",
        save_slices(tmp_path, True, change),
        *NET,
        "-o",
        tmp_path / "out.pt",
        "--format",
        "json",
    )
    assert (done.status, problems_of(done)) == (
        1 + problem.startswith("differs"),
        [(problem, "state.0.exp_avg")],
    )
    assert not (tmp_path / "out.pt").exists()


def test_sparse_state_is_kept(run: Run, tmp_path: Path) -> None:
    sparse = torch.eye(3, 2).to_sparse()
    files = save_slices(tmp_path, True, lambda rank, state: state.update(exp_avg=sparse))
    assert (
        run("remap", files, *NET, "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt").status == 0
    )
    result = torch.load(tmp_path / "out.pt")["optimizer"]["state"]["inner.weight"]["exp_avg"]
    assert torch.equal(result.to_dense(), torch.eye(3, 2))


def test_optimizer_without_state_is_kept(run: Run, tmp_path: Path) -> None:
    """Its groups are ambiguous, which does not matter without state."""
    save_slices(tmp_path, False)
    optimizer = torch.optim.SGD([{"params": [p]} for p in Nested().parameters()], lr=0.1)
    for path in tmp_path.glob("rank_*.pt"):
        torch.save({**torch.load(path), "optimizer": optimizer.state_dict()}, path)
    done = run("remap", tmp_path / "rank_*.pt", *NET, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    groups = torch.load(tmp_path / "out.pt")["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [[0], [1], [2]]
