"""Call variants (``foo@1``) of programs unflattened by torch: in live modules, in files, and in
names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused, live
from command import Run
from names_files import names_file, ref, runtime, serialized
from places import SUPPORT
from unflattened import Called, Gate, Nested, Shared, Twice, example, exported, made, program

# Live modules

NAN = float("nan")

GATES = {
    Twice: ("gate", ("gate", "gate@1")),
    Nested: ("block.gate", ("block.gate", "block.gate@1", "block@1.gate", "block@1.gate@1")),
    Shared: ("one", ("one", "one@1", "two", "two@1")),
    Called: ("gate", ("gate",)),  # the others are behind a dispatcher and have no FQN
}


@pytest.mark.parametrize("kind", list(GATES))
def test_all_variants_are_found_from_each_of_them(kind: type[nn.Module]) -> None:
    module, (fqn, all_names) = program(kind), GATES[kind]
    assert sorted(live.variants(module, fqn)) == sorted(all_names)
    for spelling in all_names:
        assert sorted(live.variants(module, spelling)) == sorted(all_names)
    assert sorted(live.variants(module, f"{fqn}.proj")) == sorted(
        f"{name}.proj" for name in all_names
    )
    for result in live.variants(module, fqn):
        assert module.get_submodule(result) is not None


def test_shared_false_returns_one_path_of_a_shared_submodule() -> None:
    module = program(Shared)
    assert live.variants(module, "two", shared=False) == ("two", "two@1")
    assert live.variants(program(Twice), "head") == ("head",)


class Plain(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("kind", [Twice, Nested, Shared])
def test_a_new_module_replaces_every_call(kind: type[nn.Module]) -> None:
    module, model, (fqn, all_names) = program(kind), made(kind), GATES[kind]
    changed = live.swap_module(module, all_names[-1], Plain(3.0))
    assert sorted(changed) == sorted(all_names)

    def forward(x: torch.Tensor, double: bool = False) -> torch.Tensor:
        return x * 3.0

    model.get_submodule(fqn).forward = forward
    assert torch.equal(module(example()), model(example()))
    assert sorted(live.variants(module, fqn)) == sorted(all_names)
    assert not [key for key in module.state_dict() if "proj" in key]


def test_a_new_module_behind_a_preserved_signature_is_called_as_in_the_model() -> None:
    module, model = program(Called), made(Called)
    new = made(Gate)
    with torch.no_grad():
        new.proj.weight.fill_(0.25)
    assert live.swap_module(module, "gate", new) == ("gate",)
    model.gate = new
    assert torch.equal(module(example()), model(example()))


def test_variants_behind_a_dispatcher_are_also_changed() -> None:
    module, model, new = program(Called), made(Called), nn.Linear(4, 4)
    assert live.swap_module(module, "gate.proj", new) == ("gate.proj",)
    model.get_submodule("gate").proj = new
    assert torch.equal(module(example()), model(example()))
    with pytest.raises(Refused) as refused:
        live.swap_module(module, "gate.proj", Pair())
    assert {problem.key for problem in refused.value.problems} == {"proj"}


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_a_module_with_the_wrong_signature_is_refused() -> None:
    module, model = program(Nested), made(Nested)
    with pytest.raises(Refused) as refused:
        live.swap_module(module, "block.gate", Pair())
    problem_keys = {"block.gate", "block.gate@1", "block@1.gate@1"}  # no graph calls block@1.gate
    assert {problem.key for problem in refused.value.problems} == problem_keys
    assert all(
        "missing a required argument: 'y'" in problem.problem for problem in refused.value.problems
    )
    assert torch.equal(module(example()), model(example()))


@pytest.mark.parametrize("kind", list(GATES))
@pytest.mark.parametrize("name", ["proj.weight", "shift", "scale"])
def test_an_attribute_changes_in_every_variant(kind: type[nn.Module], name: str) -> None:
    module, model, (fqn, all_names) = program(kind), made(kind), GATES[kind]
    changed = live.swap_attribute(module, f"{all_names[-1]}.{name}", lambda old: old * 0.5 + 1)
    assert sorted(changed) == sorted(f"{variant}.{name}" for variant in all_names)
    with torch.no_grad():
        tensor = (
            model.get_submodule(fqn).get_parameter(name)
            if "." in name
            else model.get_submodule(fqn).get_buffer(name)
        )
        tensor.mul_(0.5).add_(1)
    assert torch.equal(module(example()), model(example()))
    # the dispatcher starts again at its first call
    assert torch.equal(module(example()), model(example()))


def test_an_attribute_keeps_its_kind() -> None:
    module = program(Twice)
    module.gate.proj.weight.requires_grad_(False)
    live.swap_attribute(module, "gate.proj.weight", torch.ones(4, 4))
    assert isinstance(module.gate.proj.weight, nn.Parameter)
    assert not module.gate.proj.weight.requires_grad
    assert module.get_submodule("gate@1.proj").weight is module.gate.proj.weight
    live.swap_attribute(module, "gate@1.proj.weight", nn.Parameter(torch.zeros(4, 4)))
    assert module.gate.proj.weight.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: live.variants(m, "nothing"), "no submodule 'nothing'"),
        (lambda m: live.variants(m, "gate@7"), "no submodule 'gate@7'"),
        (lambda m: live.variants(m, ""), "the root module has no variants"),
        (
            lambda m: live.swap_module(m, "gate", cast(Any, torch.ones(1))),
            "gate: a Tensor is not an nn.Module",
        ),
        (lambda m: live.swap_attribute(m, "gate.none", 1), "gate has no attribute 'none'"),
        (lambda m: live.swap_attribute(m, "gate.proj", 1), "gate.proj is a submodule"),
        (
            lambda m: live.swap_attribute(m, "gate.shift", 1),
            "gate.shift is a tensor, the new value an int",
        ),
        (
            lambda m: live.swap_attribute(m, "gate.shift", torch.ones(5)),
            "gate.shift has the shape [4], the new value [5]",
        ),
        (lambda m: live.swap_attribute(m, "none", 1), "the module has no attribute 'none'"),
        (lambda m: live.swap_attribute(m, "gate", 1), "gate is a submodule"),
        (
            lambda m: live.swap_attribute(m, "gate.training", 1),
            "gate.training is a bool, the new value an int",
        ),
        (
            lambda m: live.swap_attribute(m, "gate.training", nn.ReLU()),
            "gate.training is a bool, the new value a ReLU",
        ),
        (
            lambda m: live.swap_attribute(m, "gate.shift", lambda t: t.double()),
            "gate.shift has the dtype torch.float32, the new value torch.float64",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused(call: Any, message: str) -> None:
    module, model = program(Twice), made(Twice)
    with pytest.raises(CkptError) as raised:
        call(module)
    assert raised.value.message == message
    assert torch.equal(module(example()), model(example()))


def test_attributes_of_any_kind_can_be_set() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert live.swap_attribute(module, "training", False) == ("training",)
    assert not module.training
    assert module[0].training
    assert live.swap_attribute(module, "0.bias", None) == ("0.bias",)
    assert module[0].bias is None
    for value, problem_keys in ((torch.ones(2), "a Tensor"), (1, "an int")):
        with pytest.raises(Refused) as refused:
            live.swap_attribute(module, "0.bias", value)
        assert refused.value.message == (
            f"0.bias is a Parameter or None, the new value {problem_keys}"
        )
    assert module[0].bias is None
    assert live.swap_attribute(module, "0.bias", nn.Parameter(torch.ones(2))) == ("0.bias",)
    assert torch.equal(module(torch.zeros(2)), module[1](torch.ones(2)))
    assert live.swap_attribute(module[0], "weight", torch.zeros(2, 2)) == ("weight",)
    assert isinstance(module[0].weight, nn.Parameter)


@pytest.mark.parametrize(
    ("first", "second", "are_variants"),
    [
        (torch.ones(4), torch.ones(4), True),
        (torch.tensor([NAN, 1, 2, 3]), torch.tensor([NAN, 1, 2, 3]), True),
        (torch.ones(4), torch.ones(1), False),
        (torch.ones(4), torch.zeros(4), False),
        (torch.ones(4), torch.ones(4).double(), False),
        (torch.ones(4), nn.Parameter(torch.ones(4), False), False),
        (torch.ones(4), None, False),
        (None, torch.ones(4), False),
        (None, None, True),
    ],
)
def test_variants_that_differ_are_not_set_together(
    first: torch.Tensor | None, second: torch.Tensor | None, are_variants: bool
) -> None:
    module = program(Twice)
    for name, value in (("gate", first), ("gate@1", second)):
        module.get_submodule(name)._buffers["scale"] = value
    if are_variants:
        assert live.swap_attribute(module, "gate.scale", torch.zeros(4)) == (
            "gate.scale",
            "gate@1.scale",
        )
        return
    with pytest.raises(Refused) as refused:
        live.swap_attribute(module, "gate.scale", torch.zeros(4))
    assert [problem.key for problem in refused.value.problems] == ["gate@1.scale"]


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise ValueError("no order")

    __hash__ = None  # type: ignore[assignment]


def test_plain_attributes_that_differ_are_not_set_together() -> None:
    module = program(Twice)
    different: list[tuple[object, object]] = [
        ([1], [2]),
        (1, True),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        (NAN, 0.0),
        (np.ones(2), np.zeros(2)),
        (np.ones(2), np.ones(1)),
        (np.array([[1], None], dtype=object), np.array([[2], None], dtype=object)),
        ([torch.ones(2)], [torch.zeros(2)]),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (Incomparable(), Incomparable()),
    ]
    for first, second in different:
        vars(module.gate)["kind"], vars(module.get_submodule("gate@1"))["kind"] = first, second
        with pytest.raises(Refused) as refused:
            live.swap_attribute(module, "gate.kind", first)
        assert [problem.key for problem in refused.value.problems] == ["gate@1.kind"]
    equal: list[tuple[object, object]] = [
        ([1], [1]),
        ({"a": [NAN]}, {"a": [float("nan")]}),
        (np.array([1, NAN]), np.array([1, NAN])),
        (np.array([[1], None], dtype=object), np.array([[1], None], dtype=object)),
        ((torch.tensor([1, NAN]),), (torch.tensor([1, NAN]),)),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    ]
    for first, second in equal:
        vars(module.gate)["kind"], vars(module.get_submodule("gate@1"))["kind"] = first, second
        names = live.swap_attribute(module, "gate.kind", lambda old: old)
        assert names == ("gate.kind", "gate@1.kind")


def test_an_attribute_may_be_a_class() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    vars(module[0])["kind"] = nn.ReLU
    assert live.swap_attribute(module, "0.kind", nn.GELU) == ("0.kind",)
    assert vars(module[0])["kind"] is nn.GELU


class Stateful(nn.Linear):
    """A module with the class name that an unflattened program records, and with extra state."""

    def __init__(self, kind: str | None, weight: nn.Parameter | None) -> None:
        super().__init__(2, 2, bias=False)
        self.weight = cast(Any, weight)
        if kind is not None:
            self._ty = kind

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


WEIGHT = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("first", "second", "are_variants"),
    [
        (("A", WEIGHT), ("A", WEIGHT), True),
        (("A", WEIGHT), ("B", WEIGHT), False),
        (("A", WEIGHT), (None, WEIGHT), True),
        (("A", WEIGHT), ("A", nn.Parameter(torch.ones(2, 2))), False),
        (("A", WEIGHT), ("A", None), False),
        (("A", None), ("A", WEIGHT), False),
        (("A", None), ("A", None), True),
        (("A", None), ("B", None), False),
        ((None, None), (None, None), False),
    ],
)
def test_variants_have_one_class_and_the_same_tensors(
    first: Any, second: Any, are_variants: bool
) -> None:
    module = nn.Module()
    module.add_module("gate", Stateful(*first))
    module.add_module("gate@1", Stateful(*second))
    assert live.variants(module, "gate") == (("gate", "gate@1") if are_variants else ("gate",))


def test_other_paths_to_one_submodule_lead_to_each_other() -> None:
    """Whether torch kept the class of the first one, or of the second one only."""
    module = nn.Module()
    module.add_module("left", Stateful(None, WEIGHT))
    module.add_module("right", Stateful("A", WEIGHT))
    module.add_module("other", Stateful("A", nn.Parameter(torch.ones(2, 2))))
    for fqn in ("left", "right"):
        assert sorted(live.variants(module, fqn)) == ["left", "right"]
        assert live.variants(module, fqn, shared=False) == (fqn,)


def test_a_name_like_a_variant_without_a_base_is_not_a_variant() -> None:
    module = nn.Module()
    module.add_module("gate@1", nn.Linear(2, 2))
    module.add_module("gate", None)
    assert live.variants(module, "gate@1") == ("gate@1",)
    vars(module)["_call_modules"] = ["not a module"]
    assert live.variants(module, "gate@1") == ("gate@1",)
    with pytest.raises(CkptError, match="no submodule 'gate'"):
        live.variants(module, "gate")


def test_different_modules_with_names_like_variants_are_not_variants() -> None:
    module = nn.Module()
    module.add_module("gate", nn.Linear(2, 2))
    module.add_module("gate@1", nn.Linear(2, 2))
    assert live.variants(module, "gate") == ("gate",)
    assert live.variants(module, "gate@1") == ("gate@1",)
    new = nn.Linear(2, 2)
    assert live.swap_module(module, "gate@1", new) == ("gate@1",)
    assert module.gate is not new


# Files and names


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the weights of one program from its exported and its unflattened form."""
    tmp_path = tmp_path_factory.mktemp("files")
    torch.export.save(exported(Nested), tmp_path / "program.pt2")
    torch.save(exported(Nested).state_dict, tmp_path / "exported.pt")
    state = program(Nested).state_dict()
    torch.save(state, tmp_path / "unflattened.pt")
    safetensors.torch.save_file(
        {k: v.detach().clone() for k, v in state.items()}, tmp_path / "unflattened.safetensors"
    )
    (tmp_path / "model.py").write_text(
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "import torch\n"
        "from unflattened import Nested, exported, made\n"
        "plain = made(Nested)\n"
        "def flat():\n"
        "    return torch.export.unflatten(exported(Nested))\n"
    )
    return tmp_path


BASES = {"block.gate.shift", "block.gate.proj.weight", "block.gate.proj.bias"}


@pytest.mark.parametrize("name", ["unflattened.pt", "unflattened.safetensors"])
def test_variants_are_aliases_that_a_strict_load_refuses(run: Run, name: str, files: Path) -> None:
    result = run("inspect", files / name, "--format", "json").data
    aliases = {tensor["key"]: tensor["alias_of"] for tensor in result["tensors"]}
    assert {key for key, base in aliases.items() if base is None} == BASES
    assert all(base is None or re.sub(r"@\d+", "", key) == base for key, base in aliases.items())
    for pair in ((files / name, files / "exported.pt"), (files / "program.pt2", files / name)):
        done = run("diff", *pair, "--format", "json")
        assert (done.status, done.data["summary"]) == (1, {"same": 3, "alias": 9})


def test_diff_with_a_model_treats_variants_as_aliases(run: Run, files: Path) -> None:
    for model, name, status in (
        ("plain", "unflattened.pt", 1),  # torch calls them unexpected
        ("flat", "exported.pt", 1),  # torch calls them missing
        ("flat", "unflattened.safetensors", 0),
    ):
        done = run(
            "diff", "--model", f"{files / 'model.py'}:{model}", files / name, "--format", "json"
        )
        assert done.status == status
        assert not {"missing", "unexpected"} & done.data["summary"].keys()


def test_trace_groups_variants_as_aliases(run: Run, files: Path) -> None:
    result = run("trace", f"{files / 'model.py'}:flat", "--format", "json").data
    runtime = {tensor["fqn"]: tensor["alias_of"] for tensor in result["runtime"]}
    assert {fqn for fqn, first in runtime.items() if first is None} == BASES | {"block.gate.scale"}
    assert runtime["block@1.gate@1.proj.weight"] == "block.gate.proj.weight"
    result = run("trace", files / "program.pt2", "--format", "json").data
    assert {tensor["fqn"] for tensor in result["runtime"]} == BASES | {"block.gate.scale"}


def test_remap_collapses_and_expands_variants(run: Run, files: Path, tmp_path: Path) -> None:
    plain, flat = f"{files / 'model.py'}:plain", f"{files / 'model.py'}:flat"
    expected = torch.load(files / "unflattened.pt")
    for model in (plain, flat, files / "program.pt2"):
        out = tmp_path / "collapsed.pt"
        to_exported = ("--model", model, "--to", "exported", "-o", out, "--force")
        assert run("remap", files / "unflattened.safetensors", *to_exported).status == 0
        made(Nested).load_state_dict(torch.load(out), strict=True)
    to_unflattened = ("--model", flat, "--to", "unflattened", "-o", tmp_path / "out.pt")
    assert run("remap", files / "exported.pt", *to_unflattened).status == 0
    actual = torch.load(tmp_path / "out.pt")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    program(Nested).load_state_dict(actual, strict=True)


def test_variants_of_the_file_stay_if_the_model_has_none(
    run: Run, files: Path, tmp_path: Path
) -> None:
    state = torch.load(files / "unflattened.pt")
    for prefix in ("", "module.", "_orig_mod."):
        torch.save({f"{prefix}{key}": value for key, value in state.items()}, tmp_path / "in.pt")
        plain = ("--model", f"{files / 'model.py'}:plain", "--to", "unflattened")
        out = ("-o", tmp_path / "out.pt", "--force", "--format", "json")
        done = run("remap", tmp_path / "in.pt", *plain, *out)
        assert (done.status, done.data["dropped"]) == (0, [])
        program(Nested).load_state_dict(torch.load(tmp_path / "out.pt"), strict=True)
        assert not any("call variants" in note["text"] for note in done.data["notes"])
    done = run("remap", files / "exported.pt", *plain, *out)
    assert done.status == 0
    assert any("no call variants" in note["text"] for note in done.data["notes"])


def test_remap_refuses_variants_with_different_values(
    run: Run, files: Path, tmp_path: Path
) -> None:
    state = {key: value.clone() for key, value in torch.load(files / "unflattened.pt").items()}
    state["block@1.gate.shift"][0] += 1
    torch.save(state, tmp_path / "broken.pt")
    for model in ("plain", "flat"):
        out = tmp_path / "out.pt"
        operand = f"{files / 'model.py'}:{model}"
        done = run(
            "remap", tmp_path / "broken.pt", "--model", operand, "--to", "exported", "-o", out
        )
        assert done.status == 1
        assert "block@1.gate.shift" in done.err
        assert not out.exists()


def test_a_users_module_may_be_named_like_a_variant(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Module()\n"
        "    model.add_module('gate', nn.Linear(2, 2))\n"
        "    model.add_module('gate@1', nn.Linear(2, 2))\n"
        "    return model\n"
    )
    model = nn.Module()
    model.add_module("gate", nn.Linear(2, 2))
    model.add_module("gate@1", nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "own.pt")
    result = run("inspect", tmp_path / "own.pt", "--format", "json").data
    assert {tensor["alias_of"] for tensor in result["tensors"]} == {None}
    operand, out = f"{tmp_path / 'own.py'}:build", tmp_path / "out.pt"
    assert (
        run("remap", tmp_path / "own.pt", "--model", operand, "--to", "exported", "-o", out).status
        == 0
    )
    assert torch.load(out).keys() == model.state_dict().keys()


def test_another_model_has_no_place_for_a_module_named_like_a_variant(
    run: Run, tmp_path: Path
) -> None:
    """Two modules of the old model are call variants of the new model's by their names: only equal
    values are left out.
    """
    (tmp_path / "m.py").write_text(
        "from torch import nn\n"
        "def new():\n"
        "    model = nn.Module()\n"
        "    model.add_module('gate', nn.Linear(2, 2))\n"
        "    return model\n"
        "def old():\n"
        "    model = new()\n"
        "    model.add_module('gate@1', nn.Linear(2, 2))\n"
        "    return model\n"
    )
    model = nn.Module()
    model.add_module("gate", nn.Linear(2, 2))
    model.add_module("gate@1", nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "differs.pt")
    words = ("--model", f"{tmp_path / 'm.py'}:old", "--to-model", f"{tmp_path / 'm.py'}:new")
    out = tmp_path / "out.pt"
    refused = run("remap", tmp_path / "differs.pt", *words, "-o", out)
    assert refused.status == 1
    assert "a call variant of gate.weight with another value @ gate@1.weight" in refused.err
    assert "a call variant of gate.bias with another value @ gate@1.bias" in refused.err
    assert not out.exists()
    model.get_submodule("gate@1").load_state_dict(model.get_submodule("gate").state_dict())
    torch.save(model.state_dict(), tmp_path / "same.pt")
    assert run("remap", tmp_path / "same.pt", *words, "-o", out).status == 0
    model.__delattr__("gate@1")
    model.load_state_dict(torch.load(out))


@pytest.fixture
def called_twice(tmp_path: Path) -> str:
    """Return the names of a model that calls `f` twice, and has another tensor at `g@1`."""
    names = ("f.w", "f@1.w", "g.w", "g@1.w")
    tensors = [runtime(name, alias_of="f.w" if name == "f@1.w" else None) for name in names]
    keys = [serialized(name, ref(name)) for name in ("f.w", "g.w", "g@1.w")]
    loaded = {name: ref(name) for name in ("f.w", "g.w", "g@1.w")}
    return names_file(tmp_path / "names.json", tensors, keys, loaded)


def remapped(state: dict[str, float], to: str, names: str, folder: Path) -> Any:
    torch.save({key: torch.full((2,), value) for key, value in state.items()}, folder / "in.pt")
    out = str(folder / "out.pt")
    return ckpttool.remap(
        str(folder / "in.pt"), out, model=names, from_="runtime", to=to, force=True
    )


def test_only_a_name_of_the_same_tensor_is_added_as_a_variant(
    called_twice: str, tmp_path: Path
) -> None:
    remapped({"f.w": 1.0, "g.w": 2.0, "g@1.w": 3.0}, "unflattened", called_twice, tmp_path)
    found = {key: value[0].item() for key, value in torch.load(tmp_path / "out.pt").items()}
    assert found == {"f.w": 1, "f@1.w": 1, "g.w": 2, "g@1.w": 3}


def test_a_variant_may_have_another_base_than_the_shortest_name(run: Run, tmp_path: Path) -> None:
    """A user's own ``f@1`` has an ``h`` that is called twice; ``f.h`` is another tensor."""
    names = ("f.h.w", "f@1.h.w", "f@1.h@1.w")
    tensors = [runtime(name, alias_of="f@1.h.w" if "h@1" in name else None) for name in names]
    keys = [serialized(name, ref(name)) for name in names[:2]]
    loaded = {name: ref(name) for name in names[:2]}
    model = names_file(tmp_path / "names.json", tensors, keys, loaded)
    state = {"f.h.w": 1.0, "f@1.h.w": 2.0}
    remapped(state, "unflattened", model, tmp_path)
    expanded = {key: value[0].item() for key, value in torch.load(tmp_path / "out.pt").items()}
    assert expanded == {"f.h.w": 1, "f@1.h.w": 2, "f@1.h@1.w": 2}
    remapped(expanded, "exported", model, tmp_path)
    assert list(torch.load(tmp_path / "out.pt")) == ["f.h.w", "f@1.h.w"]
    result = run("inspect", tmp_path / "in.pt", "--format", "json").data
    aliases = {tensor["key"]: tensor["alias_of"] for tensor in result["tensors"]}
    assert aliases == {"f.h.w": None, "f@1.h.w": None, "f@1.h@1.w": "f@1.h.w"}


def test_only_a_variant_with_the_value_of_its_base_is_left_out(
    called_twice: str, tmp_path: Path
) -> None:
    state = {"f.w": 1.0, "f@1.w": 1.0, "g.w": 2.0, "g@1.w": 3.0}
    done = remapped(state, "exported", called_twice, tmp_path)
    assert list(torch.load(tmp_path / "out.pt")) == ["f.w", "g.w", "g@1.w"]
    assert [(one.key, one.reason) for one in done.plan.dropped] == [
        ("f@1.w", "a call variant of f.w")
    ]
    with pytest.raises(Refused) as refused:
        remapped({**state, "f@1.w": 9.0}, "exported", called_twice, tmp_path)
    assert [str(problem) for problem in refused.value.problems] == [
        "a call variant of f.w with another value @ f@1.w"
    ]
