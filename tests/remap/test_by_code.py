"""Values that only the model's own code can compute. Oracle: the model's load_state_dict and
state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpttool
from ckpttool import CkptError, Refused
from command import Run
from loading_zoo import Undeclared, packed
from opaque_zoo import ZOO, Listed, Net, Transposed, blended, noisy
from places import ROOT
from surroundings import free_memory
from zoo import randomized, runtime_values

torch.set_num_threads(1)
OPERAND = str(ROOT / "tests/support/opaque_zoo.py")
Tensors = Mapping[str, torch.Tensor]


def trained(name: str) -> nn.Module:
    return randomized(ZOO[name](), 77)


def saved(state: Tensors, path: Path) -> str:
    torch.save(dict(state), path)
    return str(path)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert set(found) <= set(expected)
    for key, value in found.items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", ZOO)
def test_runtime_values_equal_the_loaded_models(name: str, tmp_path: Path) -> None:
    state = trained(name).state_dict()
    done = ckpttool.remap(
        saved(state, tmp_path / "a.pt"),
        str(tmp_path / "b.pt"),
        model=ZOO[name],
        from_="serialized",
        to="runtime",
        verify=True,
    )
    model = ZOO[name]()
    model.load_state_dict(state, strict=True)
    found = torch.load(tmp_path / "b.pt")
    assert_equal(found, runtime_values(model))
    assert {key for _, keys in done.plan.by_code for key in keys} <= set(found)
    persistent = {name for name, _ in model.named_parameters()} | {
        k for k, _ in model.named_buffers() if k != "cache"
    }
    assert persistent <= set(found)


@pytest.mark.parametrize("name", ZOO)
def test_serialized_values_equal_the_models_state_dict(name: str, tmp_path: Path) -> None:
    model = trained(name)
    values = {fqn: value for fqn, value in runtime_values(model).items() if fqn != "cache"}
    source = saved(values, tmp_path / "a.pt")
    ckpttool.remap(
        source, str(tmp_path / "b.pt"), model=ZOO[name], from_="runtime", to="serialized"
    )
    found = torch.load(tmp_path / "b.pt")
    assert_equal(found, model.state_dict())
    ZOO[name]().load_state_dict(found, strict=True)


def test_tied_weight_with_one_name_in_the_file_is_loaded_under_both(tmp_path: Path) -> None:
    model = ZOO["quantized"]()
    state = trained("quantized").state_dict()
    model.load_state_dict(state, strict=True)
    source = saved(
        {key: value for key, value in state.items() if key != "head.weight"}, tmp_path / "a.pt"
    )
    ckpttool.remap(
        source, str(tmp_path / "b.pt"), model=ZOO["quantized"], from_="serialized", to="runtime"
    )
    assert_equal(torch.load(tmp_path / "b.pt"), runtime_values(model))


@pytest.mark.parametrize("name", ["transposed", "quantized"])
def test_serialized_values_in_the_dtype_of_the_file(name: str, tmp_path: Path) -> None:
    model = trained(name).double()
    source = saved(runtime_values(model), tmp_path / "a.pt")
    ckpttool.remap(
        source, str(tmp_path / "b.pt"), model=ZOO[name], from_="runtime", to="serialized"
    )
    assert_equal(torch.load(tmp_path / "b.pt"), model.state_dict())


class Twice(Transposed):
    """Two parameters share memory; the saved value comes from the second."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.fc.weight)
        self.twin = nn.Parameter(self.fc.weight.data)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[f"{kwargs.get('prefix', '')}fc.weight"] = torch.from_numpy(
            self.twin.detach().numpy().T.copy()
        )
        return state


class Overlapping(Transposed):
    """A buffer shares part of the weight's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", self.fc.weight.detach()[:2], persistent=False)


class Packing(Transposed):
    """It saves a tensor that is not dense, or nothing."""

    kind: Any = staticmethod(lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        key = f"{kwargs.get('prefix', '')}fc.weight"
        state[key] = self.kind(state[key])
        return state


class Sparse(Packing):
    kind = staticmethod(torch.Tensor.to_sparse)


class Wrapping(Packing):
    kind = staticmethod(lambda value: TwoTensor(value, value))


class Choosing(Transposed):
    """It saves no key for a weight of zeros; saving and loading fail if the weight is not
    finite.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        key = f"{kwargs.get('prefix', '')}fc.weight"
        if not self.fc.weight.detach().numpy().any():
            del state[key]
        elif np.isnan(self.fc.weight.detach().numpy()).any():
            raise ValueError("not finite")
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if np.isnan(state_dict["fc.weight"].numpy()).any():
            raise ValueError("not finite")
        return super().load_state_dict(state_dict, strict, assign)


WEIGHT = torch.randn(4, 4)
REFUSED: dict[str, tuple[type[nn.Module], str, torch.Tensor, str]] = {
    "shared memory": (Twice, "runtime", WEIGHT.double(), "dtype @ fc.weight"),
    "overlapping memory": (Overlapping, "runtime", WEIGHT.double(), "dtype @ fc.weight"),
    "another shape": (Choosing, "runtime", WEIGHT[:3], "other @ fc.weight"),
    "object, saved": (Choosing, "runtime", packed(Undeclared), "other @ fc.weight"),
    "object, loaded": (Choosing, "serialized", packed(Undeclared), "other @ fc.weight"),
    "quantized": (Packing, "runtime", WEIGHT, "other @ fc.weight"),
    "sparse": (Sparse, "runtime", WEIGHT, "other @ fc.weight"),
    "subclass": (Wrapping, "runtime", WEIGHT, "other @ fc.weight"),
    "missing": (Choosing, "runtime", torch.zeros(4, 4), "other @ fc.weight"),
    "failing, saved": (Choosing, "runtime", WEIGHT / 0 * 0, "ValueError: not finite"),
    "failing, loaded": (Choosing, "serialized", WEIGHT / 0 * 0, "ValueError: not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_results_of_the_models_code_are_refused(name: str, tmp_path: Path) -> None:
    build, form, weight, why = REFUSED[name]
    source = saved({"fc.weight": weight, "fc.bias": torch.ones(4)}, tmp_path / "a.pt")
    to = {"runtime": "serialized", "serialized": "runtime"}[form]
    with pytest.raises(CkptError) as refused:
        ckpttool.remap(source, str(tmp_path / "b.pt"), model=build, from_=form, to=to)
    done = [f"{problem.kind} @ {problem.key}" for problem in refused.value.problems] or [
        refused.value.message
    ]
    assert any(why in one for one in done), done
    assert not (tmp_path / "b.pt").exists()


def test_from_one_model_to_another(tmp_path: Path) -> None:
    state = trained("quantized").state_dict()
    source = saved(state, tmp_path / "a.pt")
    ckpttool.remap(
        source, str(tmp_path / "b.pt"), model=ZOO["quantized"], to_model=listed, to="serialized"
    )
    first, second = ZOO["quantized"](), listed()
    first.load_state_dict(state)
    values = dict(first.named_parameters())
    with torch.no_grad():
        for key, value in second.named_parameters():
            value.copy_(values[key])
    assert_equal(torch.load(tmp_path / "b.pt"), second.state_dict())
    listed().load_state_dict(torch.load(tmp_path / "b.pt"), strict=True)


class ListedWithBias(Listed):
    """The tensors of `Quantized`, saved as lists."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(6))


def listed() -> nn.Module:
    return Net(ListedWithBias, ListedWithBias)


def test_plan_names_the_model_whose_code_it_needs(run: Run, tmp_path: Path) -> None:
    source = saved(trained("quantized").state_dict(), tmp_path / "a.pt")
    model = f"{OPERAND}:quantized"
    done = run(
        "remap", source, "--model", model, "--to", "runtime", "--dry-run", "--format", "json"
    )
    assert done.data["by_code"] == [
        {"way": "model.load", "model": model, "keys": ["layers.0.weight", "layers.1.weight"]}
    ]
    assert done.data["plan"]["runs"][0]["model"] == model


def test_each_section_is_computed_separately(run: Run, tmp_path: Path) -> None:
    weights, average = (
        trained("quantized").state_dict(),
        randomized(ZOO["quantized"](), 5).state_dict(),
    )
    torch.save(
        {"model": weights, "ema": {f"module.{key}": value for key, value in average.items()}},
        tmp_path / "a.pt",
    )
    words = (
        "--model",
        f"{OPERAND}:quantized",
        "--to",
        "runtime",
        "--sections",
        "model,ema",
        "--format",
        "json",
    )
    done = run("remap", tmp_path / "a.pt", *words, "-o", tmp_path / "b.pt")
    assert [found["keys"] for found in done.data["by_code"]] == [
        ["layers.0.weight", "layers.1.weight"]
    ] * 2
    found = torch.load(tmp_path / "b.pt")
    for path, state in ("model", weights), ("ema", average):
        model = ZOO["quantized"]()
        model.load_state_dict(state)
        assert_equal(
            {key.removeprefix("module."): value for key, value in found[path].items()},
            runtime_values(model),
        )


@pytest.mark.parametrize("build", [noisy, blended])
def test_nondeterministic_values_are_refused(build: type[nn.Module], tmp_path: Path) -> None:
    source = saved(build().state_dict(), tmp_path / "a.pt")
    with pytest.raises(Refused, match="does not give the same twice") as caught:
        ckpttool.remap(
            source, str(tmp_path / "b.pt"), model=build, to="runtime", from_="serialized"
        )
    assert [problem.key for problem in caught.value.problems] == ["layers.0.weight"]
    assert not (tmp_path / "b.pt").exists()


def test_too_little_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = trained("transposed").state_dict()
    source = saved(weights, tmp_path / "a.pt")
    nbytes = sum(weight.nbytes for weight in weights.values())
    free_memory(monkeypatch, 4 * nbytes)  # tracing needs 3 times the size of the model, loading 5
    with pytest.raises(
        CkptError,
        match=r"own load_state_dict\(\); .* takes .* MiB, and 0 MiB are"
        r" free",
    ):
        ckpttool.remap(
            source,
            str(tmp_path / "b.pt"),
            model=ZOO["transposed"],
            to="runtime",
            from_="serialized",
        )


def test_a_names_file_is_not_enough(run: Run, tmp_path: Path) -> None:
    source = saved(trained("quantized").state_dict(), tmp_path / "a.pt")
    names = tmp_path / "names.json"
    assert run("trace", f"{OPERAND}:quantized", "-o", names).status == 0
    done = run("remap", source, "--model", names, "--to", "runtime", "-o", tmp_path / "b.pt")
    assert done.status == 1
    assert "--model file.py:build" in done.err


def test_new_weights_of_a_program(run: Run, tmp_path: Path) -> None:
    model = trained("transposed")
    sample = torch.randn(2, 4)
    torch.export.save(
        torch.export.export(Forward(ZOO["transposed"]()), (sample,)), tmp_path / "p.pt2"
    )
    state = {f"net.{key}": value for key, value in model.state_dict().items()}
    source, operand = saved(state, tmp_path / "a.pt"), f"{__file__}:forward"
    done = run(
        "swap-weights",
        tmp_path / "p.pt2",
        source,
        "--model",
        operand,
        "-o",
        tmp_path / "q.pt2",
        "--verify",
    )
    assert done.status == 0, done.err
    tried = run(
        "swap-weights",
        tmp_path / "p.pt2",
        source,
        "--model",
        operand,
        "-o",
        tmp_path / "r.pt2",
        "--dry-run",
    )
    assert (tried.status, (tmp_path / "r.pt2").exists()) == (0, False)
    assert "dry run: nothing was written" in tried.out
    assert "\ncost " in tried.out
    expected = forward()
    expected.load_state_dict(state, strict=True)
    assert torch.equal(torch.export.load(tmp_path / "q.pt2").module()(sample), expected(sample))


class Forward(nn.Module):
    """The net as a part; its keys are coded here, since a part's own load_state_dict is not
    called.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def load_state_dict(self, state: Tensors, strict: bool = True, assign: bool = False) -> object:
        return self.net.load_state_dict(
            {key.removeprefix("net."): v for key, v in state.items()}, strict, assign
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.fc(x)


def forward() -> nn.Module:
    return Forward(ZOO["transposed"]())
