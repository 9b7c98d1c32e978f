"""New weights in exported programs: torch loads the result, and its outputs equal the newly trained
model's.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpttool
from ckpttool import CkptError
from command import Run
from hook_zoo import FusedQKV, StripLayer
from torch_version import needs_torch

torch.set_num_threads(1)
State = dict[str, torch.Tensor]


class Deployed(nn.Module):
    """It has a renaming hook, a splitting hook, a tied head, integer and non-persistent buffers,
    and a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = StripLayer()
        self.attention = FusedQKV()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block.norm(self.block.layer(self.embed(tokens))) * self.scale
        q, k, v = self.attention.qkv(x).chunk(3, -1)
        return self.head(self.norm(q + k * v)) + torch.tensor([0.5])


TOKENS = (torch.arange(6),)


def build() -> nn.Module:
    return Deployed().eval()


def trained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for tensor in [*model.parameters(), model.norm.running_mean]:
            tensor.normal_()
    return model


MODEL = f"{Path(__file__)}:build"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "deployed.pt2"
    torch.export.save(torch.export.export(trained(0), TOKENS), path)
    assert torch.equal(outputs(path), trained(0)(*TOKENS))
    return path


@cache
def weight_count(path: Path) -> int:
    return len(torch.export.load(path).state_dict)


def outputs(path: str | Path) -> torch.Tensor:
    found: torch.Tensor = torch.export.load(path).module()(*TOKENS)
    return found


@pytest.fixture
def answer(run: Run) -> Callable[..., tuple[int, Any, str]]:
    """Run one command; return its exit status, the JSON object that it prints, and its stderr."""

    def answer(*args: object) -> tuple[int, Any, str]:
        done = run(*args, "--format", "json")
        return done.status, done.data, done.err

    return answer


def runtime(model: nn.Module) -> State:
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {k: v.detach() for k, v in state.items() if k != "scale"}


NEW: dict[str, Callable[[nn.Module], State]] = {
    "serialized": lambda model: model.state_dict(),
    "a plain dict": lambda model: dict(model.state_dict()),
    "runtime": runtime,
    "DDP": lambda model: {f"module.{k}": v for k, v in model.state_dict().items()},
    "half compiled": lambda model: {
        (f"block._orig_mod.{k[6:]}" if k.startswith("block.") else k): v
        for k, v in model.state_dict().items()
    },
    "tied once": lambda model: {k: v for k, v in model.state_dict().items() if k != "head.weight"},
    "tied by its second name": lambda model: {
        k: v for k, v in model.state_dict().items() if k != "embed.weight"
    },
    "strided": lambda model: {
        k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in model.state_dict().items()
    },
}


@pytest.mark.parametrize(
    ("form", "ending"), [*((form, "pt") for form in NEW), ("DDP", "safetensors")]
)
def test_swapped_program_equals_the_trained_model(
    tmp_path: Path, program: Path, answer: Any, form: str, ending: str
) -> None:
    model, new, out = trained(1), tmp_path / f"new.{ending}", tmp_path / "out.pt2"
    state = NEW[form](model)
    if ending == "pt":
        torch.save(state, new)
    else:
        save_file({k: v.clone().contiguous() for k, v in state.items()}, new)
    before = program.read_bytes()
    status, done, err = answer(
        "swap-weights", program, new, "-o", out, "--model", MODEL, "--verify"
    )
    assert status == 0, err
    assert done["swapped"] == weight_count(program)
    assert torch.equal(outputs(out), model(*TOKENS))
    assert not torch.equal(trained(0)(*TOKENS), model(*TOKENS))
    assert program.read_bytes() == before

    status, diff, err = answer("diff", new, out, "--model", MODEL, "--values")
    assert (status, diff["identical"]) == (0, True), err
    status, diff, _ = answer("diff", new, program, "--model", MODEL, "--values")
    assert (status, diff["identical"]) == (1, False)


@pytest.mark.parametrize("form", ["serialized", "runtime", "DDP", "tied once"])
def test_diff_finds_each_weight_that_a_swapped_program_does_not_have(
    tmp_path: Path, program: Path, answer: Any, form: str
) -> None:
    state, new, out = NEW[form](trained(1)), tmp_path / "new.pt", tmp_path / "out.pt2"
    torch.save(state, new)
    assert answer("swap-weights", program, new, "-o", out, "--model", MODEL)[0] == 0
    for key, value in state.items():
        torch.save({**state, key: value + 1}, tmp_path / "other.pt")
        status, diff, _ = answer("diff", tmp_path / "other.pt", out, "--model", MODEL, "--values")
        assert status == 1, key
        assert any(
            key in entry["left"] for entry in diff["entries"] if entry["status"] == "value"
        ), key


def test_model_is_not_needed_for_keys_of_the_program(
    tmp_path: Path, program: Path, answer: Any
) -> None:
    model = trained(1)
    torch.save(runtime(model), tmp_path / "new.pt")
    assert answer("swap-weights", program, tmp_path / "new.pt", "-o", tmp_path / "out.pt2")[0] == 0
    assert torch.equal(outputs(tmp_path / "out.pt2"), model(*TOKENS))


def changed(**changes: torch.Tensor | None) -> State:
    state = dict(trained(1).state_dict())
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del state[key]
        else:
            state[key] = value
    return state


TIED = trained(2).embed.weight.detach()
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": (changed(norm__bias=None), ["missing weight @ norm.bias"]),
    "unexpected": (
        changed(lora__a=torch.ones(1)),
        ["unexpected: not a weight of the program @ lora.a"],
    ),
    "a shape": (
        changed(norm__bias=torch.ones(5)),
        ["shape [5], the program has [4] (from norm.bias) @ norm.bias"],
    ),
    "a dtype": (
        changed(norm__bias=torch.ones(4).half()),
        ["dtype float16, the program has float32"],
    ),
    "a part of a split": (changed(attention__k__weight=None), ["@ attention.qkv.weight"]),
    "tied and different": (changed(head__weight=TIED), ["tied to"]),
    "not a dense tensor": (
        changed(norm__bias=torch.ones(4).to_sparse()),
        ["norm.bias is not a dense tensor @ norm.bias"],
    ),
    "not a tensor": (
        {**changed(), "norm.bias": "a word"},
        ["norm.bias is not a dense tensor @ norm.bias"],
    ),
    "one of two tied": (
        changed(embed__weight=torch.ones(5, 4)),
        ["(from embed.weight) @ embed.weight"],
    ),
    "dtype and shape": (
        changed(norm__bias=torch.ones(4).half(), norm__weight=torch.ones(5)),
        ["which names and shapes differ: ckpttool diff "],
    ),
    "all at once": (
        changed(
            norm__bias=None, lora__a=torch.ones(1), norm__weight=torch.ones(5), head__weight=TIED
        ),
        ["missing weight @ norm.bias", "not a weight of the program", "shape [5]", "tied to"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mismatched_weights_are_refused_with_all_problems(
    tmp_path: Path, program: Path, answer: Any, name: str
) -> None:
    state, problems = REFUSED[name]
    torch.save(state, tmp_path / "new.pt")
    status, _, err = answer(
        "swap-weights", program, tmp_path / "new.pt", "-o", tmp_path / "out.pt2", "--model", MODEL
    )
    assert status == 1
    assert [problem for problem in problems if problem not in err] == []
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["new.pt"]


def test_cast_converts_dtypes(tmp_path: Path, program: Path, answer: Any) -> None:
    model = trained(1)
    torch.save(
        {k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()},
        tmp_path / "n.pt",
    )
    args = [
        "swap-weights",
        program,
        tmp_path / "n.pt",
        "-o",
        tmp_path / "out.pt2",
        "--model",
        MODEL,
    ]
    status, _, err = answer(*args)
    assert status == 1
    assert "--cast" in err
    assert answer(*args, "--cast")[0] == 0
    assert torch.equal(outputs(tmp_path / "out.pt2"), model(*TOKENS))


def test_hooks_are_reported_as_the_likely_cause_without_a_model(
    tmp_path: Path, program: Path, answer: Any
) -> None:
    torch.save(trained(1).state_dict(), tmp_path / "new.pt")
    status, _, err = answer(
        "swap-weights", program, tmp_path / "new.pt", "-o", tmp_path / "out.pt2"
    )
    assert status == 1
    assert "--model" in err
    assert "hooks" in err


def test_program_of_another_model_is_refused(tmp_path: Path, program: Path, answer: Any) -> None:
    other = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(other, tmp_path / "other.pt2")
    torch.save(trained(1).state_dict(), tmp_path / "new.pt")
    status, _, err = answer(
        "swap-weights",
        tmp_path / "other.pt2",
        tmp_path / "new.pt",
        "-o",
        tmp_path / "o",
        "--model",
        MODEL,
    )
    assert status == 1
    assert "another model" in err


def test_dry_run_writes_nothing(tmp_path: Path, program: Path, answer: Any) -> None:
    torch.save(trained(1).state_dict(), tmp_path / "new.pt")
    status, done, _ = answer(
        "swap-weights", program, tmp_path / "new.pt", "--model", MODEL, "--dry-run"
    )
    assert (status, done["output"]) == (0, "")
    assert os.listdir(tmp_path) == ["new.pt"]


class Doubled(nn.Module):
    """It uses a buffer that is computed on loading and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("doubled", torch.zeros(4, 4), persistent=False)
        self.register_load_state_dict_post_hook(self._double)
        self.load_state_dict(self.state_dict())

    @staticmethod
    def _double(module: Any, _: object) -> None:
        module.doubled.copy_(module.w.detach() * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.doubled


def test_constant_computed_on_loading_is_updated(tmp_path: Path, run: Run) -> None:
    program, weights, out = (str(tmp_path / name) for name in ("p.pt2", "w.pt", "o.pt2"))
    new = Doubled()
    torch.export.save(torch.export.export(Doubled(), (torch.ones(4, 4),)), program)
    torch.save(new.state_dict(), weights)
    words = ["swap-weights", program, weights, "--model", f"{__file__}:Doubled", "-o", out]
    refused = run(*words)
    assert refused.status == 1
    assert "doubled" in refused.err
    assert "--constants" in refused.err
    assert run(*words, "--constants").status == 0
    assert torch.equal(torch.export.load(out).module()(torch.eye(4)), new(torch.eye(4)))


class Views(nn.Module):
    """It has a buffer that is a row of a weight, two halves of one tensor, an empty buffer, and an
    aliased constant.
    """

    def __init__(self) -> None:
        super().__init__()
        whole, scale = torch.randn(4, 3), torch.randn(3)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.upper, self.lower = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        self.register_buffer("row", self.weight.data[1])
        self.register_buffer("none", torch.zeros(0, 2))
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("again", scale, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * self.scale @ self.weight.t()
            + (x * self.again + self.row) @ torch.cat([self.upper, self.lower]).t()
        )


INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "views.pt2"
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Views(), (INPUT,)), path)
    return path


def of_views() -> tuple[Views, State]:
    """Return another instance, and its state dict with a separate copy of every tensor."""
    torch.manual_seed(1)
    model = Views()
    return model, {key: value.clone() for key, value in model.state_dict().items()}


def test_shared_storage_is_preserved(views: Path, tmp_path: Path, run: Run) -> None:
    needs_torch("2.7", "a tied weight under both names in a program")
    model, state = of_views()
    out = tmp_path / "out.pt2"
    torch.save({**state, "again": model.get_buffer("scale").clone()}, tmp_path / "new.pt")
    done = run(
        "swap-weights", views, tmp_path / "new.pt", "-o", out, "--constants", "--format", "json"
    )
    assert (done.status, done.data["swapped"], done.data["constants"]) == (0, 7, [])
    swapped = torch.export.load(out)
    assert torch.equal(swapped.module()(INPUT), model(INPUT))
    held = swapped.state_dict
    assert held["row"].data_ptr() == held["weight"][1].data_ptr()
    assert held["lower"].untyped_storage().data_ptr() == held["upper"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row": torch.ones(3)},
            "weight shares memory with another weight that gets another value",
        ),
        ({"more": torch.ones(1)}, "unexpected: not a weight of the program @ more"),
        (
            {"scale": torch.ones(3), "again": torch.zeros(3)},
            "tied to scale, but its new value differs @ again",
        ),
        ({"scale": torch.ones(4)}, "shape [4], the program has [3] (from scale) @ scale"),
        ({"none": torch.zeros(2, 0)}, "shape [2, 0], the program has [0, 2] (from none) @ none"),
    ],
)
def test_values_that_contradict_the_program_are_refused(
    views: Path, tmp_path: Path, run: Run, changes: State, message: str
) -> None:
    if "scale" in changes:
        needs_torch("2.7", "a tied weight under both names in a program")
    torch.save({**of_views()[1], **changes}, tmp_path / "new.pt")
    words = ["swap-weights", views, tmp_path / "new.pt", "-o", tmp_path / "out.pt2"]
    done = run(*words, *(["--constants"] if "scale" in changes else []))
    assert (done.status, os.listdir(tmp_path)) == (1, ["new.pt"])
    assert message in done.err


def test_alias_of_a_weight_may_be_missing_from_the_program(
    views: Path, tmp_path: Path, run: Run
) -> None:
    """This holds only for the same tensor, not for a copy."""
    model, state = of_views()
    command = ["swap-weights", views, tmp_path / "new.pt", "-o", tmp_path / "out.pt2"]
    torch.save({**state, "tied": state["weight"].clone()}, tmp_path / "new.pt")
    assert "unexpected: not a weight of the program @ tied" in run(*command).err
    torch.save({**state, "tied": state["weight"]}, tmp_path / "new.pt")
    assert run(*command).status == 0
    assert torch.equal(torch.export.load(tmp_path / "out.pt2").state_dict["weight"], model.weight)


# Forms of keys


class Crossed(nn.Module):
    """Save two tensors of one shape under each other's names, so that keys do not show their
    form.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: self._crossed(state, prefix)
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: self._crossed(state, prefix)
        )

    @staticmethod
    def _crossed(state: dict[str, Any], prefix: str) -> None:
        state[f"{prefix}a"], state[f"{prefix}b"] = state[f"{prefix}b"], state[f"{prefix}a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


def exported(model: nn.Module, path: Path, x: torch.Tensor | None = None) -> Path:
    torch.export.save(torch.export.export(model, (torch.ones(3) if x is None else x,)), path)
    return path


@pytest.mark.parametrize(
    ("form", "crossed"), [(None, True), ("serialized", True), ("runtime", False)]
)
def test_form_of_the_keys_can_be_specified(
    tmp_path: Path, run: Run, form: str | None, crossed: bool
) -> None:
    state = {"a": torch.full((3,), 5.0), "b": torch.full((3,), 7.0)}
    torch.save(state, tmp_path / "new.pt")
    words = [
        exported(Crossed(), tmp_path / "p.pt2"),
        tmp_path / "new.pt",
        "--model",
        f"{__file__}:Crossed",
    ]
    done = run(
        "swap-weights",
        *words,
        *([] if form is None else ["--from", form]),
        "-o",
        tmp_path / "out.pt2",
    )
    assert done.status == 0, done.err
    model = Crossed()
    if crossed:
        model.load_state_dict(state)
    expected = (
        {name: value.detach() for name, value in model.named_parameters()} if crossed else state
    )
    found = torch.export.load(tmp_path / "out.pt2").state_dict
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Stated(nn.Linear):
    """Save entries that are not weights: a tensor as extra state, a constant, and a sum."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("filled", torch.zeros(3), persistent=False)
        self.register_state_dict_post_hook(self._saving)
        self.register_load_state_dict_pre_hook(self._loading)
        self.register_load_state_dict_post_hook(self._loaded)
        self.load_state_dict(self.state_dict())

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: object) -> None:
        pass

    @staticmethod
    def _saving(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}version"] = torch.ones(1)
        state[f"{prefix}sum"] = module.weight + module.bias

    @staticmethod
    def _loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state.pop(f"{prefix}version", None)
        state.pop(f"{prefix}sum", None)

    @staticmethod
    def _loaded(module: Any, _: object) -> None:
        module.filled.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.filled


@pytest.mark.parametrize("form", ["serialized", "runtime"])
def test_entries_that_are_not_weights_are_ignored_and_reported(
    tmp_path: Path, run: Run, form: str
) -> None:
    """A constant that loading does not compute from the file is unchanged."""
    model = Stated()
    state = dict(model.state_dict())
    ignored = ["_extra_state", "version", "sum"]
    if form == "runtime":
        del state["sum"]
        ignored.remove("sum")
    torch.save(state, tmp_path / "new.pt")
    words = [
        exported(Stated(), tmp_path / "p.pt2"),
        tmp_path / "new.pt",
        "--model",
        f"{__file__}:Stated",
    ]
    done = run(
        "swap-weights", *words, "--from", form, "-o", tmp_path / "out.pt2", "--format", "json"
    )
    assert done.status == 0, done.err
    assert (sorted(done.data["ignored"]), done.data["constants"]) == (sorted(ignored), ["filled"])
    assert torch.equal(
        torch.export.load(tmp_path / "out.pt2").module()(torch.ones(3)), model(torch.ones(3))
    )


# Operands and output


def test_a_file_is_not_swapped_in_place(tmp_path: Path, run: Run) -> None:
    program, new = exported(nn.Linear(3, 2), tmp_path / "p.pt2"), tmp_path / "new.pt"
    torch.save(nn.Linear(3, 2).state_dict(), new)
    before = program.read_bytes()
    assert run("swap-weights", program, new, "--in-place").status == 2
    with pytest.raises(CkptError, match="in_place is for objects in memory"):
        cast(Any, ckpttool).swap_weights(str(program), str(new), in_place=True)
    assert program.read_bytes() == before


def test_hint_for_operands_in_the_wrong_order(tmp_path: Path, run: Run) -> None:
    program, new = exported(nn.Linear(3, 2), tmp_path / "p.pt2"), tmp_path / "new.pt"
    torch.save(nn.Linear(3, 2).state_dict(), new)
    for words, out in (
        (["-o", tmp_path / "o.pt2"], tmp_path / "o.pt2"),
        (["--dry-run"], "OUT.pt2"),
    ):
        done = run("swap-weights", new, program, *words)
        assert done.status == 2
        assert (
            f"hint: the program comes first: ckpttool swap-weights {program} {new} -o {out}"
            in done.err
        )


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.x


class Wide(Narrow):
    """It has one more weight, saved under a name that no tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.ones(3))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update(z=state.pop("y"))
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, *_: state.update(y=state.pop("z"))
        )


@pytest.mark.parametrize("key", ["z", "y"])
def test_weight_that_the_program_lacks_is_refused(tmp_path: Path, run: Run, key: str) -> None:
    torch.save({"x": torch.ones(3), key: torch.ones(3)}, tmp_path / "new.pt")
    words = [
        exported(Narrow(), tmp_path / "p.pt2"),
        tmp_path / "new.pt",
        "--model",
        f"{__file__}:Wide",
    ]
    done = run("swap-weights", *words, "-o", tmp_path / "out.pt2", "--format", "json")
    problems = [f"{one['problem']} @ {one['key']}" for one in done.data["problems"]]
    assert (done.status, problems) == (1, [f"unexpected: not a weight of the program @ {key}"])


def test_program_without_weights_is_refused(tmp_path: Path, run: Run) -> None:
    module = nn.Linear(3, 2).eval()
    frozen, new = tmp_path / "frozen.pt", tmp_path / "new.pt"
    torch.jit.freeze(torch.jit.trace(module, (torch.ones(1, 3),))).save(str(frozen))
    torch.save(module.state_dict(), new)
    done = run("swap-weights", frozen, new, "-o", tmp_path / "out.pt")
    assert done.status == 1
    assert "hint: the program has no weights: torch.jit.freeze()" in done.err
    assert "--drop" not in done.err


def test_hint_excludes_keys_added_by_training(
    program: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's module holds the model and the weights of its loss."""
    monkeypatch.chdir(tmp_path)
    model = trained(1)
    loss = {f"loss.net.{index}.weight": torch.ones(2) for index in range(5)}
    torch.save(
        {**{f"model.{key}": value for key, value in model.state_dict().items()}, **loss}, "train.pt"
    )
    done = run("swap-weights", program, "train.pt", "-o", "out.pt2", "--model", MODEL)
    assert done.status == 1
    assert "unexpected: not a weight of the program @ loss.net.{0-4}.weight" in done.err
    (hint,) = re.findall(
        "their effect on the model's output: ckpttool (.*)", " ".join(done.err.split())
    )
    assert run(*shlex.split(hint)).status == 0
    assert (
        run("swap-weights", program, "train.part.pt", "-o", "out.pt2", "--model", MODEL).status == 0
    )
    assert torch.equal(outputs("out.pt2"), model(*TOKENS))


def test_other_weights_of_the_model_in_the_file_are_named(
    program: Path, tmp_path: Path, run: Run
) -> None:
    model, averaged = trained(1), AveragedModel(trained(2))
    torch.save({"model": model.state_dict(), "ema": averaged.state_dict()}, tmp_path / "run.pt")
    words = ("swap-weights", program, tmp_path / "run.pt", "--model", MODEL)
    done = run(*words, "-o", tmp_path / "new.pt2")
    assert (
        f"the weights are those of model; {tmp_path / 'run.pt'}::ema holds the same model too"
        in done.err
    )
    assert torch.equal(outputs(tmp_path / "new.pt2"), model(*TOKENS))
    done = run(*words[:2], f"{words[2]}::ema", *words[3:], "-o", tmp_path / "ema.pt2")
    assert "holds the same model" not in done.err
    assert torch.equal(outputs(tmp_path / "ema.pt2"), averaged.module(*TOKENS))


class Renamed(nn.Module):
    """A model whose first layer has another name in a later version of the code."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, head = self.children()
        return head(first(x))


def before() -> nn.Module:
    return Renamed("encoder")


def after() -> nn.Module:
    return Renamed("backbone")


IN_BOTH = "the program and the weights have this name, the model has no such tensor"
UNKNOWN = "the model has no tensor of this name: is it another model?"
UNEXPECTED = "unexpected: not a weight of the program"


@pytest.mark.parametrize(
    ("new", "found", "hint"),
    [
        (before, {IN_BOTH: "encoder"}, "leave --model out"),
        (after, {UNKNOWN: "encoder", UNEXPECTED: "backbone"}, "ckpttool diff "),
    ],
)
def test_a_weight_is_not_both_unexpected_and_missing(
    tmp_path: Path,
    run: Run,
    new: Callable[[], nn.Module],
    found: dict[str, str],
    hint: str,
) -> None:
    program, weights = tmp_path / "old.pt2", tmp_path / "new.pt"
    torch.export.save(torch.export.export(before(), (torch.ones(1, 2),)), program)
    torch.save(new().state_dict(), weights)
    model = ("--model", f"{__file__}:after")
    done = run("swap-weights", program, weights, *model, "-o", tmp_path / "out.pt2")
    expected: set[str] = set()
    for text, module in found.items():
        expected.update(f"{text} @ {module}.{name}" for name in ("weight", "bias"))
    assert done.status == 1
    assert set(re.findall(r"^  (.*)$", done.err, re.MULTILINE)) == expected
    assert hint in done.err
