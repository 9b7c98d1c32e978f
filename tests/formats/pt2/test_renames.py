"""Renamed programs: torch loads, calls and unflattens them, or the names are refused."""

from __future__ import annotations

import os
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Checkpoint, Refused, open_checkpoint
from command import Run
from files import change_archive, write
from places import DATA
from torch_version import needs_torch

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch 2.9 has a new layout of programs"
)
SEEDS = range(int(os.environ.get("CKPTTOOL_SEEDS", "6")))
EXAMPLE = torch.linspace(-1, 1, 6).reshape(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("mask", torch.rand(3), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.lin(x) * self.mask


class Model(nn.Module):
    """Tied, shared, unused and mutated tensors, constants, and nested graphs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Block(), nn.Sequential(Block(), nn.ReLU())
        self.again = self.a
        self.w, self.unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
        self.tied = self.a.lin.weight
        self.plain = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.b(self.a(x))) * self.w + self.plain + self.tied.sum()
        return torch.cond(x.sum() > 0, lambda x: x + self.w, lambda x: x - self.w, (x,))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("renames") / "model.pt2"
    with warnings.catch_warnings():  # torch warns when it traces `torch.cond`
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Model(), (EXAMPLE,)), path)
    return path


def renamed_by(checkpoint: Checkpoint, new: dict[str, str]) -> Checkpoint:
    sections = (
        replace(
            section,
            tensors=tuple(entry.under(new.get(entry.key, entry.key)) for entry in section.tensors),
        )
        for section in checkpoint.sections
    )
    return replace(checkpoint, sections=tuple(sections))


def random_names(keys: list[str], seed: int) -> dict[str, str]:
    """Draw new names for some of the keys: new, similar to existing ones, or invalid for a
    module.
    """
    draw = random.Random(seed)
    parts = ["x", "lin", "weight", "b", "0", "a", "w", "é y"]
    if seed % 2:
        parts += [
            "again",
            "forward",
            "training",
            "_parameters",
            "true_graph_0",
            "",
            "1",
            "__dict__",
        ]
    some = draw.sample(keys, draw.randint(1, len(keys)))
    new = {key: ".".join(draw.choices(parts, k=draw.randint(1, 4))) for key in some}
    kinds = draw.choice((dict.fromkeys(some, "m."), {}, dict(zip(some, [*some[1:], some[0]]))))
    return {key: f"m.{key}" if kinds.get(key) == "m." else kinds.get(key, new[key]) for key in some}


def check(path: str, old: Path, new: dict[str, str]) -> None:
    """Check with torch that the program equals the old one under the new names."""
    before, after = torch.export.load(old), torch.export.load(path)
    assert list(after.state_dict) == [new.get(key, key) for key in before.state_dict]
    assert {*after.constants} == {new.get(key, key) for key in before.constants}
    expected = before.module()(EXAMPLE)
    module = after.module()
    module.load_state_dict({new.get(key, key): value for key, value in before.state_dict.items()})
    assert torch.equal(module(EXAMPLE), expected)
    assert torch.equal(torch.export.unflatten(after)(EXAMPLE), expected)
    assert {tensor.fqn for tensor in ckpttool.trace(path).runtime} == {
        new.get(tensor.fqn, tensor.fqn) for tensor in ckpttool.trace(str(old)).runtime
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_random_renames_match_torch_or_are_refused(
    program: Path, seed: int, tmp_path: Path
) -> None:
    source = open_checkpoint(str(program))
    new = random_names([key for section in source.sections for key in section.by_key()], seed)
    refusal = None
    try:
        out = write(renamed_by(source, new), tmp_path / "renamed.pt2")
    except Refused as error:
        refusal = error
    if refusal is not None:
        assert "cannot have these names" in refusal.message
        assert {problem.key for problem in refusal.problems} <= {*new.values()}
        return
    check(out, program, new)


def is_from_torch(name: str) -> bool:
    """Return False for attributes that other packages, such as transformers, add to `nn.Module`."""
    return getattr(getattr(nn.Module, name, None), "__module__", "torch").startswith("torch")


def test_names_of_all_attributes_of_torch_modules_are_refused(
    program: Path, tmp_path: Path
) -> None:
    loaded = torch.export.load(program)
    modules = (loaded.module(), torch.export.unflatten(loaded), torch.fx.symbolic_trace(nn.ReLU()))
    attributes = {name for module in modules for name in dir(module)}
    names = {name for name in attributes if not name.startswith("__") and is_from_torch(name)}
    submodules = {name for key in loaded.state_dict for name in key.split(".")}
    source = open_checkpoint(str(program))
    keys = [entry.key for entry in source.sections[0].tensors]
    for name in names - submodules - {"again", "plain"}:
        with pytest.raises(Refused, match="cannot have these names") as caught:
            write(renamed_by(source, {keys[0]: f"x.{name}.y"}), tmp_path / "out.pt2")
        assert str(caught.value.problems[0]).startswith("not a name that a module of torch")


@pytest.mark.parametrize("version", ["2.9.1", "2.8.0", "2.7.1"])
def test_a_rename_and_its_inverse_restore_the_program(
    version: str, tmp_path: Path, run: Run
) -> None:
    needs_torch(version, "loading its programs")
    path, x = DATA / f"tagger-torch-{version}.pt2", torch.arange(5)
    expected = torch.export.load(path).module()(x)
    renamed, back = tmp_path / "renamed.pt2", tmp_path / "back.pt2"
    assert run("remap", path, "--rule", "mix.{i}.{x} => z.{i}.{x}", "-o", renamed).status == 0
    program = torch.export.load(renamed)
    assert "z.0.weight" in program.state_dict
    assert torch.equal(program.module()(x), expected)
    assert run("remap", renamed, "--rule", "z.{i}.{x} => mix.{i}.{x}", "-o", back).status == 0
    assert run("diff", back, path, "--values").status == 0


def test_names_that_no_module_can_have_are_refused(tmp_path: Path, run: Run) -> None:
    path = DATA / "tagger-torch-2.9.1.pt2"
    rules = ("scale => mix.0", "shift => training", "norm.bias => embed.weight.bias")
    status, _, err = run(
        "remap",
        path,
        *(word for rule in rules for word in ("--rule", rule)),
        "-o",
        tmp_path / "o.pt2",
    )
    assert status == 1
    assert re.findall(r"  (.*) @ (.*)", err) == [
        ("the program has a tensor or a module of that name", "mix.0"),
        ("embed.weight is a tensor, and has nothing below it", "embed.weight.bias"),
        ("not a name that a module of torch can have: training", "training"),
    ]
    assert not (tmp_path / "o.pt2").exists()


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("x..y", "not a name that a module of torch can have: an empty part"),
        ("", "the program has a tensor or a module of that name"),
        ("x.", "not a name that a module of torch can have: an empty part"),
        ("x.forward.y", "not a name that a module of torch can have: forward"),
        ("x.__slots__", "not a name that a module of torch can have: __slots__"),
        ("x.true_graph_0", "not a name that a module of torch can have: true_graph_0"),
        ("plain", "the program has a tensor or a module of that name"),
        ("b", "the program has a tensor or a module of that name"),
        ("b.1", "the program has a tensor or a module of that name"),  # has no tensors
        ("unused.x", "unused is a tensor, and has nothing below it"),
        ("a.lin.weight.x.y", "a.lin.weight is a tensor, and has nothing below it"),
        ("__x", "not a name that a module of torch can have: __x"),
        ("_x", None),
        ("b.1.x", None),
        ("forward_", None),
    ],
)
def test_a_name_that_conflicts_is_refused(
    program: Path, tmp_path: Path, new: str, problem: str | None
) -> None:
    renamed = renamed_by(open_checkpoint(str(program)), {"w": new})
    if problem is None:
        check(write(renamed, tmp_path / "out.pt2"), program, {"w": new})
        return
    with pytest.raises(Refused) as caught:
        write(renamed, tmp_path / "out.pt2")
    assert [str(found) for found in caught.value.problems] == [f"{problem} @ {new}"]


def test_an_unknown_kind_in_the_signature_prevents_renames(program: Path, tmp_path: Path) -> None:
    """Its names cannot be changed, but its values can."""
    changed = change_archive(
        program,
        lambda _, data: data.replace(b'"tensor_constant"', b'"another_constant"'),
        tmp_path / "new.pt2",
    )
    source = open_checkpoint(changed)
    out = write(source, tmp_path / "out.pt2")
    assert Path(out).read_bytes() == Path(changed).read_bytes()
    with pytest.raises(Refused) as caught:
        write(renamed_by(source, {"w": "v"}), out)
    assert [problem.key for problem in caught.value.problems] == ["another_constant"]


def test_swapped_names_keep_the_outputs(program: Path, tmp_path: Path, run: Run) -> None:
    rules = ("--rule", "a.{x*} => b.0.{x*}", "--rule", "b.0.{x*} => a.{x*}")
    out = tmp_path / "out.pt2"
    assert run("remap", program, *rules, "-o", out)[0] == 0
    old, new = torch.export.load(program), torch.export.load(out)
    assert torch.equal(new.module()(EXAMPLE), old.module()(EXAMPLE))
    assert torch.equal(new.state_dict["a.lin.weight"], old.state_dict["b.0.lin.weight"])


class Hooked(nn.Linear):
    """Saves twice its weight, and its bias under another name."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._back)

    @staticmethod
    def _out(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
    ) -> None:
        state[f"{prefix}bias.kept"] = state.pop(f"{prefix}bias")
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _back(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: object
    ) -> None:
        state[f"{prefix}bias"] = state.pop(f"{prefix}bias.kept")
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class Named(Hooked):
    """Only saves its bias under another name."""

    @staticmethod
    def _out(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
    ) -> None:
        state[f"{prefix}offset"] = state.pop(f"{prefix}bias")

    @staticmethod
    def _back(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: object
    ) -> None:
        state[f"{prefix}bias"] = state.pop(f"{prefix}offset")


def test_a_program_is_renamed_to_serialized_keys(tmp_path: Path, run: Run) -> None:
    program, weights, out = tmp_path / "p.pt2", tmp_path / "w.pt", tmp_path / "o.pt2"
    torch.export.save(torch.export.export(Named(), (EXAMPLE,)), program)
    new = Named()
    torch.save(new.state_dict(), weights)
    model = ("--model", f"{__file__}:Named")
    renamed = tmp_path / "renamed.pt2"
    assert run("remap", program, *model, "--to", "serialized", "-o", renamed)[0] == 0
    module = torch.export.load(renamed).module()
    module.load_state_dict(torch.load(weights))
    assert torch.equal(module(EXAMPLE), new(EXAMPLE))
    status, _, err = run("swap-weights", renamed, weights, *model, "-o", out)
    assert (status, "leave --model out" in err) == (1, True)
    assert run("swap-weights", renamed, weights, "-o", out)[0] == 0
    assert torch.equal(torch.export.load(out).module()(EXAMPLE), new(EXAMPLE))


def test_a_remap_that_computes_values_is_refused(tmp_path: Path, run: Run) -> None:
    torch.export.save(torch.export.export(Hooked(), (EXAMPLE,)), tmp_path / "p.pt2")
    words = ("--model", f"{__file__}:Hooked", "--from", "runtime", "--to", "serialized")
    status, _, err = run("remap", tmp_path / "p.pt2", *words, "-o", tmp_path / "o.pt2")
    assert status == 1
    assert (
        "computed by a remap, which gives a program other names and no other values: swap-weights"
        " does @ weight" in err
    )


def test_a_rename_of_several_programs_is_refused(tmp_path: Path, run: Run) -> None:
    from torch.export.pt2_archive._package import package_pt2

    program = torch.export.export(nn.Linear(3, 3), (EXAMPLE,))
    package_pt2(str(tmp_path / "two.pt2"), exported_programs={"first": program, "second": program})
    status, _, err = run(
        "remap", tmp_path / "two.pt2", "--rule", "weight => w", "-o", tmp_path / "out.pt2"
    )
    assert (status, "of several programs, which keep their names" in err) == (1, True)
