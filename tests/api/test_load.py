"""`load`, with an uninterrupted run of torch as the oracle."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import ckpttool
from ckpttool.live import load as live_load
from ckpttool.live import put as live_put
from ckpttool.tracing.optimizer_copy import like
from command import main
from drawn_models import MODELS, build
from places import SUPPORT
from torch_version import needs_torch


class Net(nn.Module):
    """A model with a tied weight, a buffer, a hook that renames keys, and extra state."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.norm, self.body = (
            nn.Linear(4, 3, bias=False),
            nn.BatchNorm1d(4),
            nn.Linear(3, 4),
        )
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.emb.weight
        self.steps = 0
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.body(self.emb(x))))

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}body.")]:
        state[key.replace("body.", "trunk.")] = state.pop(key)


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}trunk.")]:
        state[key.replace("trunk.", "body.")] = state.pop(key)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def adamw_in_groups(
    model: nn.Module, order: Callable[[list[Any]], list[Any]] = list, groups: int = 1
) -> torch.optim.AdamW:
    parameters = order(list(model.parameters()))
    return torch.optim.AdamW(
        [{"params": parameters[at::groups], "lr": 0.1 / (at + 1)} for at in range(groups)]
    )


def with_prefix(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return OrderedDict((f"{prefix}{key}", value) for key, value in state.items())


def save_as(layout: str, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> str:
    weights, state = model.state_dict(), optimizer.state_dict()
    if layout == "plain":
        torch.save({"model": weights, "optimizer": state, "epoch": 3}, path / "run.pt")
    elif layout == "wrapped":
        torch.save(
            {"model": with_prefix(weights, "module._orig_mod."), "optimizer": state},
            path / "run.pt",
        )
    elif layout == "lightning":
        state = {
            "state_dict": with_prefix(weights, "net."),
            "optimizer_states": [state],
            "lr_schedulers": [],
        }
        torch.save({**state, "pytorch-lightning_version": "2.5.0", "loops": {}}, path / "run.pt")
    elif layout == "named":
        state = get_optimizer_state_dict(model, optimizer)
        torch.save({"model": weights, "optimizer": state}, path / "run.pt")
    else:
        state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path / "run.pt")
    return str(path / "run.pt")


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "wrapped"),
    [
        *((layout, "plain") for layout in ("plain", "wrapped", "lightning", "named", "dcp")),
        *(("wrapped", wrapped) for wrapped in ("compiled", "parallel", "both")),
        *((layout, "both") for layout in ("named", "dcp")),
    ],
)
def test_a_resumed_run_matches_an_uninterrupted_run(
    layout: str, wrapped: str, tmp_path: Path
) -> None:
    old = Net(0)
    optimizer = adamw_in_groups(old, groups=2)
    steps(old, optimizer, 0, 3)
    old.steps = 3
    path = save_as(layout, old, optimizer, tmp_path)
    steps(old, optimizer, 3, 2)

    new = Net()
    live, resumed = WRAPPED[wrapped](new), adamw_in_groups(new, groups=2)
    loaded = ckpttool.load(path, live, resumed)
    assert loaded.optimizer is not None
    assert loaded.tensors == 9
    assert (loaded.fix is None) == (layout in ("plain", "named", "dcp"))
    assert new.steps == 3
    assert new.head.weight is new.emb.weight
    steps(new, resumed, 3, 2)
    for name, value in old.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, new.state_dict()[name]), name


@pytest.mark.parametrize("layout", ["plain", "wrapped", "lightning"])
@pytest.mark.parametrize("change", ["groups", "order"])
def test_an_optimizer_without_names_may_have_other_groups_or_another_order(
    layout: str, change: str, tmp_path: Path
) -> None:
    old, new = Net(0), Net()
    optimizer = adamw_in_groups(old, groups=1)
    steps(old, optimizer, 0, 2)
    path = save_as(layout, old, optimizer, tmp_path)
    resumed = adamw_in_groups(new, groups=2)
    if change == "order":
        resumed = adamw_in_groups(new, order=lambda params: params[::-1])
    ckpttool.load(path, new, resumed)
    for before, after in zip(old.parameters(), new.parameters()):
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, resumed.state[after][key])


def test_an_optimizer_with_names_may_have_another_order(tmp_path: Path) -> None:
    old = Net(0)
    optimizer = adamw_in_groups(old)
    steps(old, optimizer, 0, 2)
    path = save_as("named", old, optimizer, tmp_path)
    new = Net()
    resumed = adamw_in_groups(new, order=lambda params: params[::-1])
    ckpttool.load(path, new, resumed)
    for before, after in zip(old.parameters(), new.parameters()):
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, resumed.state[after][key])


def values_after(operand: str, load: Callable[[nn.Module], object]) -> dict[str, Any]:
    """Return the parameters and buffers of a new instance after `load`."""
    model = build(operand, 2)
    load(model)
    return {
        name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefix", ["", "module."])
def test_values_are_those_of_load_state_dict_or_the_file_is_refused(
    prefix: str, tmp_path: Path
) -> None:
    """Models are everything that the properties of strict loading draw from (a tenth, or all if all
    are wanted).
    """
    names = sorted(MODELS)[:: 1 if os.environ.get("CKPTTOOL_SUITES") == "all" else 10]
    names += [
        f"loading_zoo:{name}"
        for name in ("exchanges_on_loading", "doubles_on_loading", "resets_a_buffer")
    ]
    loaded = []
    for operand in names:
        state = build(operand, 1).state_dict()
        # a file cannot have two views of one storage with other dtypes
        with contextlib.suppress(RuntimeError):
            torch.save(state, tmp_path / "run.pt")
            file = torch.load(tmp_path / "run.pt", weights_only=False)
            wrapped = OrderedDict((prefix + key, value) for key, value in state.items())
            torch.save({"model": wrapped} if prefix else state, tmp_path / "run.pt")
            try:
                actual = values_after(
                    operand, lambda model: ckpttool.load(tmp_path / "run.pt", model)
                )
            except ckpttool.CkptError:
                continue
            with contextlib.suppress(RuntimeError):  # of keys that the model's own loading rejects
                expected = values_after(
                    operand, partial(nn.Module.load_state_dict, state_dict=file)
                )
                loaded.append(operand)
                torch.testing.assert_close(
                    actual, expected, rtol=0, atol=0, equal_nan=True, msg=operand
                )
    assert len(loaded) > len(names) / 4


@pytest.mark.filterwarnings("ignore")
def without_counter(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if "num_batches" not in key}


def as_vectors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the scalars as torch 0.3 wrote them."""
    return {key: value.reshape(1) if not value.dim() else value for key, value in state.items()}


class Forgiving(nn.Linear):
    """It ignores a key of an earlier version."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_load_state_dict_post_hook(forgive)


def forgive(module: nn.Module, keys: Any) -> None:
    keys.unexpected_keys.clear()


def with_old_key(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "old": torch.ones(1)}


OTHER_KEYS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Any]]]] = {
    "no counter": (lambda: nn.BatchNorm1d(3), without_counter),
    "no counter inside": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        without_counter,
    ),
    "scalars": (lambda: nn.BatchNorm1d(3), as_vectors),
    "average": (lambda: AveragedModel(nn.BatchNorm1d(3)), as_vectors),
    "one more": (Forgiving, with_old_key),
}


@pytest.mark.parametrize("case", OTHER_KEYS)
def test_what_torch_loads_though_keys_or_shapes_differ_is_loaded(case: str, tmp_path: Path) -> None:
    build, change = OTHER_KEYS[case]
    torch.manual_seed(1)
    saved = build()
    with torch.no_grad():
        for tensor in saved.state_dict().values():
            tensor += 1
    torch.save(change(dict(saved.state_dict())), tmp_path / "old.pt")
    expected, model = build(), build()
    expected.load_state_dict(torch.load(tmp_path / "old.pt"))
    assert ckpttool.diff(tmp_path / "old.pt", model=build).identical
    ckpttool.load(tmp_path / "old.pt", model)
    for key, value in expected.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_formats_without_an_optimizer_are_loaded(tmp_path: Path) -> None:
    old = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    save_file(with_prefix(old.state_dict(), "module."), tmp_path / "one.safetensors")
    ckpttool.remap(dict(old.state_dict()), f"{tmp_path}/shards/", rule="{x*} => _orig_mod.{x*}")
    torch.jit.script(old).save(tmp_path / "script.pt")
    program = torch.export.export(old.eval(), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "program.pt2")
    for name in ("one.safetensors", "shards", "script.pt", "program.pt2"):
        new = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        ckpttool.load(tmp_path / name, new)
        assert all(
            torch.equal(new.state_dict()[key], value) for key, value in old.state_dict().items()
        ), name


def test_an_averaged_model_is_loaded_with_its_counter(tmp_path: Path) -> None:
    old: Any = AveragedModel(nn.Linear(2, 2))
    new: Any = AveragedModel(nn.Linear(2, 2))
    old.update_parameters(nn.Linear(2, 2))
    ckpttool.load({"module." + key: value for key, value in old.state_dict().items()}, new)
    assert new.n_averaged == 1
    assert torch.equal(new.module.weight, old.module.weight)
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.load(nn.Linear(2, 2).state_dict(), new)
    assert [problem.key for problem in refused.value.problems] == ["n_averaged"]


def test_activation_checkpoint_segments_in_the_model_are_ignored(tmp_path: Path) -> None:
    old = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.save(old.state_dict(), tmp_path / "plain.pt")
    new = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 3))
    ckpttool.load(tmp_path / "plain.pt", new)
    assert all(map(torch.equal, new.parameters(), old.parameters()))


def invalid_file(name: str) -> tuple[dict[str, Any], str]:
    model = Net(0)
    optimizer = adamw_in_groups(model)
    steps(model, optimizer, 0, 1)
    file = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    weights, state = file["model"], file["optimizer"]
    if name == "shape":
        weights["trunk.weight"] = torch.ones(4, 4)
        return file, "trunk.weight"
    if name == "missing":
        del weights["norm.bias"]
        return file, "norm.bias"
    if name == "unexpected":
        weights["more"] = torch.ones(1)
        return file, "more"
    if name == "dtype":
        weights["trunk.bias"] = weights["trunk.bias"].double()
        return file, "trunk.bias"
    if name == "tied":
        weights["head.weight"] = torch.ones(3, 4)
        return file, "emb.weight"
    if name == "groups":
        state["param_groups"].append({**state["param_groups"][0], "params": [9]})
    elif name == "moments":
        state["state"][0]["exp_avg"] = torch.ones(7)
    elif name == "object":
        weights["_extra_state"] = Path("a pickled object")
    elif name == "disk":
        weights["_extra_state"] = {"steps": 7}
    return file, ""


@pytest.mark.parametrize(
    "name",
    ["shape", "missing", "unexpected", "dtype", "tied", "groups", "moments", "object", "disk"],
)
def test_an_error_does_not_change_model_or_optimizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, key = invalid_file(name)
    torch.save(file, tmp_path / "run.pt")
    new = Net()
    optimizer = adamw_in_groups(new)
    steps(new, optimizer, 0, 1)
    if name == "disk":

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the disk failed")

        monkeypatch.setattr("ckpttool.live.put.swap_weights", fail)
    before = copy.deepcopy((new.state_dict(), optimizer.state_dict()))
    with pytest.raises((ckpttool.CkptError, RuntimeError)) as error:
        ckpttool.load(tmp_path / "run.pt", new, optimizer)
    if key:
        assert isinstance(error.value, ckpttool.Refused)
        assert key in [problem.key for problem in error.value.problems]
    assert repr(before) == repr((new.state_dict(), optimizer.state_dict()))


def test_other_dtypes_are_loaded_only_with_cast(tmp_path: Path) -> None:
    old, new = nn.Linear(3, 2).to(torch.bfloat16), nn.Linear(3, 2)
    torch.save(old.state_dict(), tmp_path / "half.pt")
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.load(tmp_path / "half.pt", new)
    assert refused.value.hint.startswith("cast=True converts the dtypes")
    ckpttool.load(tmp_path / "half.pt", new, cast=True)
    assert torch.equal(new.weight, old.weight.float())


def test_a_fix_that_is_only_a_guess_is_refused_with_the_command(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(3, 2), "a.bias": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.load(tmp_path / "other.pt", nn.Sequential(OrderedDict(b=nn.Linear(2, 3))))
    assert "guess" in refused.value.message
    assert "ckpttool remap" in refused.value.hint


def test_an_optimizer_file_is_loaded_without_weights(tmp_path: Path) -> None:
    """The Trainer and accelerate save optimizer.pt next to the weights."""
    old, new = nn.Linear(4, 3), nn.Linear(4, 3)
    first, second = torch.optim.AdamW(old.parameters(), lr=0.3), torch.optim.AdamW(new.parameters())
    steps(old, first, 0, 2)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    loaded = ckpttool.load(tmp_path / "optimizer.pt", new, second)
    assert (loaded.section, loaded.tensors) == (None, 0)
    assert second.param_groups[0]["lr"] == 0.3
    assert torch.equal(second.state[new.weight]["exp_avg"], first.state[old.weight]["exp_avg"])


class StateInConstructor(torch.optim.Optimizer):
    """Creates its state in the constructor, as Adagrad did until torch 2.6."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": torch.ones_like(parameter), "recent": [0.0]}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["recent"][0] += 1.0
                    state["sum"].add_(parameter.grad.square())
                    parameter.data.sub_(
                        group["lr"] * parameter.grad / state["sum"].sqrt() / state["recent"][0]
                    )


@pytest.mark.parametrize("layout", ["plain", "named", "wrapped"])
@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_that_creates_its_state_in_the_constructor_is_loaded(
    layout: str, stepped: bool, tmp_path: Path
) -> None:
    old, new = Net(0), Net()
    first, second = StateInConstructor(old.parameters()), StateInConstructor(new.parameters())
    steps(old, first, 0, 2)
    path = save_as(layout, old, first, tmp_path)
    steps(old, first, 2, 2)
    if stepped:
        steps(new, second, 5, 1)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ckpttool.CkptError):
        ckpttool.load(path, Net(), second)
    assert str(second.state_dict()) == str(before)
    ckpttool.load(path, new, second)
    steps(new, second, 2, 2)
    for (name, value), actual in zip(old.named_parameters(), new.parameters()):
        assert torch.equal(value, actual), name


def test_loading_does_not_run_the_schedule_or_hooks_of_the_optimizer(tmp_path: Path) -> None:
    old, new = nn.Linear(4, 3), nn.Linear(4, 3)
    first, second = (
        torch.optim.SGD(old.parameters(), lr=0.3, momentum=0.9),
        torch.optim.SGD(new.parameters(), lr=0.1),
    )
    steps(old, first, 0, 2)
    torch.save({"model": old.state_dict(), "optimizer": first.state_dict()}, tmp_path / "run.pt")
    calls: list[int] = []
    second.register_step_post_hook(lambda *_: calls.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)
    ckpttool.load(tmp_path / "run.pt", new, second)
    assert not calls
    assert schedule.last_epoch == 0
    assert second.param_groups[0]["momentum"] == 0.9


class CountAllocations(TorchDispatchMode):
    """Count the bytes of dense tensors that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and not func.is_view:
            self.nbytes += result.numel() * result.element_size()
        return result


def test_weights_of_a_local_file_are_not_copied_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = nn.Linear(1000, 1000), nn.Linear(1000, 1000)
    save_file(old.state_dict(), tmp_path / "big.safetensors")
    allocated, put = CountAllocations(), live_put.put

    def count_put(*args: Any) -> int:
        with allocated:
            return put(*args)

    monkeypatch.setattr(live_load, "put", count_put)
    ckpttool.load(tmp_path / "big.safetensors", new)
    assert torch.equal(new.weight, old.weight)
    assert allocated.nbytes < 1_000_000  # the weight is 4,000,000 bytes


def test_check_names_can_be_used_in_a_unit_test(tmp_path: Path) -> None:
    path = str(tmp_path / "names.json")
    with pytest.raises(ckpttool.CkptError, match="does not exist") as missing:
        ckpttool.check_names(Net(), path)
    exec(missing.value.hint.partition(" writes it")[0], {"ckpttool": ckpttool, "model": Net()})
    ckpttool.check_names(Net(), path)
    changed = Net()
    changed.extra = nn.Linear(2, 2)
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.check_names(changed, path)
    assert sorted(problem.key for problem in refused.value.problems) == [
        "extra.bias",
        "extra.weight",
    ]
    ckpttool.save_names(changed, path)
    ckpttool.check_names(changed, path)


def test_check_names_accepts_what_is_ignored(tmp_path: Path) -> None:
    path, allow = str(tmp_path / "names.json"), tmp_path / "allow.txt"
    ckpttool.save_names(Net(), path)
    changed = Net()
    changed.extra = nn.Linear(2, 2)
    allow.write_text("missing extra.* # a new layer\n")
    ckpttool.check_names(changed, path, ignore_file=str(allow))
    ckpttool.check_names(changed, path, ignore=["missing extra.* # new"])
    with pytest.raises(ckpttool.Refused, match="1 name ") as refused:
        ckpttool.check_names(changed, path, ignore="missing extra.weight # new")
    assert [problem.key for problem in refused.value.problems] == ["extra.bias"]


def test_a_diff_is_neither_true_nor_false() -> None:
    same = ckpttool.diff(Net().state_dict(), Net().state_dict())
    with pytest.raises(ckpttool.CkptError, match="neither true nor false"):
        bool(same)
    assert same.passes


def test_save_names_writes_the_same_file_as_trace(tmp_path: Path) -> None:
    (tmp_path / "accents.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.ModuleDict({'größe': nn.Linear(2,"
        " 3)})\n"
    )
    ckpttool.save_names(f"{tmp_path}/accents.py:build", str(tmp_path / "python.json"))
    assert main(["trace", f"{tmp_path}/accents.py:build", "-o", f"{tmp_path}/command.json"]) == 0
    assert (tmp_path / "python.json").read_bytes() == (tmp_path / "command.json").read_bytes()


def test_a_copy_of_an_optimizer_for_a_model_on_meta_has_real_counters() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    on_meta = nn.Linear(3, 2, device="meta")
    twin = like(optimizer, net)(on_meta)
    state = twin.state[on_meta.weight]
    assert {name: value.is_meta for name, value in state.items()} == {
        "step": False,
        "exp_avg": True,
        "exp_avg_sq": True,
    }


def test_state_of_a_sharded_parameter_is_sharded(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / "run.pt")
        sharded = nn.Linear(2, 2)
        mesh = init_device_mesh("cpu", (1,))
        sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh, [Shard(0)]))
        new = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        ckpttool.load(str(tmp_path / "run.pt"), sharded, new, definition=partial(nn.Linear, 2, 2))
        buffers = [
            new.state[parameter]["momentum_buffer"] for parameter in (sharded.weight, sharded.bias)
        ]
        assert [type(buffer) for buffer in buffers] == [DTensor, torch.Tensor]
        assert torch.equal(
            buffers[0].full_tensor(), saved["optimizer"]["state"][0]["momentum_buffer"]
        )
    finally:
        dist.destroy_process_group()


def test_sharded_models_are_loaded_on_two_ranks(tmp_path: Path) -> None:
    needs_torch("2.7", "fully_shard without a GPU")
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "load_ranks.py"), str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("same-*")) == ["same-0", "same-1"]


def test_a_sharded_model_with_activation_checkpoints_gets_its_optimizer(tmp_path: Path) -> None:
    needs_torch("2.7", "fully_shard without a GPU")
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def trained_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = build()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        trained_steps(net, optimizer)
        saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / "run.pt")
        trained_steps(net, optimizer)
        sharded: Any = build()
        sharded[1] = checkpoint_wrapper(sharded[1])
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        new = torch.optim.AdamW(sharded.parameters(), lr=0.1)
        wrong = partial(nn.Sequential, nn.Linear(2, 3))
        with pytest.raises(ckpttool.CkptError, match="without 2 parameters"):
            ckpttool.load(str(tmp_path / "run.pt") + "::optimizer", sharded, new, definition=wrong)
        ckpttool.load(str(tmp_path / "run.pt"), sharded, new, definition=build)
        trained_steps(sharded, new)
        for left, right in zip(net.parameters(), sharded.parameters()):
            assert torch.equal(left, right.full_tensor())
    finally:
        dist.destroy_process_group()


def test_a_lazy_model_with_lazy_buffers_is_loaded(tmp_path: Path) -> None:
    trained = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    trained(torch.rand(5, 3))
    torch.save(trained.state_dict(), tmp_path / "a.pt")
    live = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert ckpttool.load(str(tmp_path / "a.pt"), live).tensors == 7
    assert torch.equal(live.eval()(torch.ones(1, 3)), trained.eval()(torch.ones(1, 3)))


def test_the_call_that_a_refusal_prints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def training(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        return model, torch.optim.AdamW([*model.parameters()][:parameters])

    model, optimizer = training(4)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")
    model, optimizer = training(2)
    with pytest.raises(ckpttool.Refused, match="does not fit") as refused:
        ckpttool.load("train.pt", model, optimizer)
    call, _, _ = (refused.value.hint or "").partition("; ")
    written = eval(call, {"ckpttool": ckpttool, "model": model, "optimizer": optimizer})
    ckpttool.load(written.output, model, optimizer)
    assert len(optimizer.state) == 2


def test_the_result_says_which_file_of_a_folder_was_read(tmp_path: Path) -> None:
    """As `from_pretrained` does, the safetensors file is read."""
    model = nn.Linear(2, 2)
    state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert ckpttool.load(str(tmp_path), model).notes == ()
    torch.save({key: value + 1 for key, value in state.items()}, tmp_path / "pytorch_model.bin")
    loaded = ckpttool.load(str(tmp_path), model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert str(loaded).splitlines()[-1] == (
        "warning: model.safetensors is read, as from_pretrained does; not pytorch_model.bin"
    )
    (tmp_path / "config.json").unlink()
    with pytest.raises(ckpttool.CkptError, match="several checkpoints"):
        ckpttool.load(str(tmp_path), model)
