"""Convert between forms and back for every model of the hook zoo, with the models themselves as the
oracle.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool import Refused, Remap
from command import Run, call
from expressions import is_opaque, same_bits
from zoo import FLAT, State, randomized, runtime_values, state_of, traced, zoo_model

torch.set_num_threads(1)


ROUND = [name for name in FLAT if traced(name).roundtrips]
# loading does not depend on versions
UNVERSIONED = [name for name in FLAT if traced(name).versions is None]


def remapped(source: Path, **options: Any) -> Remap:
    return ckpttool.remap(str(source), partial=True, **options)


def converted(source: Path, out: Path, name: str, to: str, **options: Any) -> Remap:
    return remapped(source, out=str(out), model=traced(name), to=to, no_fsync=True, **options)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return same_bits(left.resolve_conj(), right.resolve_conj())


def assert_same(found: State, expected: State) -> None:
    assert {key for key in expected if key not in found} == set()
    assert [key for key in found if key in expected and not same(found[key], expected[key])] == []


def saved_by(name: str, folder: Path) -> Path:
    path = folder / "model.pt"
    torch.save(state_of(name), path)
    return path


@pytest.mark.parametrize("name", [name for name in ROUND if name in UNVERSIONED])
def test_runtime_and_back_gives_the_same_safetensors_file(tmp_path: Path, name: str) -> None:
    source, there, back = (tmp_path / f"{word}.safetensors" for word in ("source", "there", "back"))
    pointers = [
        tensor.untyped_storage().data_ptr() for tensor in state_of(name).values() if tensor.numel()
    ]
    if len(set(pointers)) < len(pointers) and name not in ("fused_qkv", "split_by_slices"):
        pytest.skip("safetensors cannot hold tensors that share memory")
    if name == "saves_a_tie_once":
        pytest.skip("the second name that the runtime form has stays in __metadata__")
    save_file({key: tensor.clone().contiguous() for key, tensor in state_of(name).items()}, source)
    converted(source, there, name, "runtime")
    converted(there, back, name, "serialized")
    assert back.read_bytes() == source.read_bytes()


AMBIGUOUS = ["permutes_rotary", "swaps_two_names"]  # same keys, shapes and dtypes, but other values
# parts of one storage, which torch would copy
OTHER_LAYOUT = ("fused_twice", "saves_complex_numbers_in_parts")


@pytest.mark.parametrize("name", FLAT)
def test_runtime_values_equal_the_loaded_models_and_convert_back_to_the_same_file(
    tmp_path: Path, name: str
) -> None:
    source, there, back = saved_by(name, tmp_path), tmp_path / "there.pt", tmp_path / "back.pt"
    try:
        converted(source, there, name, "runtime")
    except Refused:
        assert not traced(name).roundtrips
        return
    found, model = torch.load(there), randomized(zoo_model(name), 2)
    before = runtime_values(randomized(zoo_model(name), 1))
    try:
        model.load_state_dict(deepcopy(state_of(name)), strict=False)
        loaded = runtime_values(model)
    except RuntimeError:
        loaded = before
    wrong = [
        k
        for k in found
        if k in before and not (same(found[k], before[k]) or same(found[k], loaded[k]))
    ]
    assert wrong == []
    if not traced(name).roundtrips:
        return
    assert_same({**before, **found}, {k: v for k, v in before.items() if k in found})
    assert set(before) - set(found) <= set(traced(name).not_serialized)
    if name not in (*AMBIGUOUS, "adds_an_alias"):  # names show the form, so it is not recorded
        assert b"ckpttool.form" not in there.read_bytes()
    if name not in OTHER_LAYOUT:
        converted(there, back, name, "serialized")
        assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", UNVERSIONED)
def test_serialized_values_equal_the_hooks_output(tmp_path: Path, name: str) -> None:
    names, model = traced(name), randomized(zoo_model(name), 1)
    persistent = {t.fqn for t in names.runtime if t.persistent} | set(names.extra_state)
    made = {s.key: state_of(name)[s.key] for s in names.serialized if s.source is None}
    torch.save(
        {**{k: v for k, v in runtime_values(model).items() if k in persistent}, **made},
        tmp_path / "run.pt",
    )
    try:
        converted(tmp_path / "run.pt", tmp_path / "saved.pt", name, "serialized", from_="runtime")
    except Refused:
        assert any(s.source is not None and is_opaque(s.source) for s in names.serialized)
        return
    found = torch.load(tmp_path / "saved.pt")
    assert_same(found, {k: v for k, v in state_of(name).items() if k not in names.extra_state})


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_form_is_recorded_if_names_do_not_show_it(tmp_path: Path, name: str, ending: str) -> None:
    source, there, back = (tmp_path / f"{word}.{ending}" for word in ("source", "there", "back"))
    if ending == "pt":
        torch.save(state_of(name), source)
    else:
        save_file({key: tensor.contiguous() for key, tensor in state_of(name).items()}, source)
    first = converted(source, there, name, "runtime")
    assert "read as serialized" in " ".join(first.notes)
    assert b"ckpttool.form" in there.read_bytes()
    again = converted(there, back, name, "serialized")
    assert (again.source_form, again.notes) == ("runtime", ())
    assert back.read_bytes() == source.read_bytes()


def test_torch_ignores_a_recorded_form(tmp_path: Path) -> None:
    converted(
        saved_by("permutes_rotary", tmp_path), tmp_path / "there.pt", "permutes_rotary", "runtime"
    )
    state = torch.load(tmp_path / "there.pt", weights_only=True)
    nn.Linear(4, 8, bias=False).load_state_dict(state, strict=True)


def test_different_copies_are_not_dropped(tmp_path: Path) -> None:
    state = {**state_of("adds_an_alias"), "kernel": torch.full((2, 2), 7.0)}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(Refused) as caught:
        converted(tmp_path / "model.pt", tmp_path / "out.pt", "adds_an_alias", "runtime")
    assert [problem.key for problem in caught.value.problems] == ["kernel"]


@pytest.mark.parametrize("wrap", [lambda k: f"module.{k}", lambda k: f"_orig_mod.module.{k}"])
def test_wrappers_are_removed_from_keys_and_metadata(tmp_path: Path, wrap: Any) -> None:
    model = randomized(zoo_model("batch_norm"), 1)
    state: Any = model.state_dict()
    wrapped = type(state)((wrap(key), value) for key, value in state.items())
    wrapped._metadata = {wrap(path).rstrip("."): value for path, value in state._metadata.items()}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    done = converted(tmp_path / "wrapped.pt", tmp_path / "bare.pt", "batch_norm", "serialized")
    found = torch.load(tmp_path / "bare.pt")
    assert dict(found._metadata) == dict(state._metadata)
    assert_same(found, state)
    assert done.counts["renamed"] == len(state)
    zoo_model("batch_norm").load_state_dict(found, strict=True)


def test_rules_rename_metadata_and_hooks_do_not(tmp_path: Path) -> None:
    source = saved_by("batch_norm", tmp_path)
    done = remapped(source, rule="1.{x} => norm.{x}")
    (section,) = done.result.sections
    assert list(section.modules or ()) == ["", "0", "norm"]
    source = saved_by("strip_layer", tmp_path)
    done = remapped(source, model=traced("strip_layer"), to="runtime")
    (section,) = done.result.sections
    assert list(section.modules or ()) == list(state_of("strip_layer")._metadata)


def test_metadata_is_renamed_by_wrappers_then_rules(tmp_path: Path) -> None:
    state: Any = zoo_model("batch_norm").state_dict()
    wrapped = type(state)((f"module.{key}", value) for key, value in state.items())
    wrapped._metadata = {
        f"module.{path}".rstrip("."): value for path, value in state._metadata.items()
    }
    torch.save(wrapped, tmp_path / "wrapped.pt")
    done = remapped(tmp_path / "wrapped.pt", to="serialized", rule="1.{x} => norm.{x}")
    (section,) = done.result.sections
    assert list(section.modules or ()) == ["", "0", "norm"]


@pytest.mark.parametrize("line", ["--drop|twin", "--drop|optimizer", "--rule|0.{x} => a.{x}"])
def test_optimizers_that_no_pattern_matches_are_kept(tmp_path: Path, run: Run, line: str) -> None:
    """This includes an optimizer without state, and one that shares its state with another."""
    model = nn.Sequential(nn.Linear(2, 3))
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    adam.step()
    saved = {"model": model.state_dict(), "optimizer": adam.state_dict(), "twin": adam.state_dict()}
    torch.save(saved | {"plain": sgd.state_dict()}, tmp_path / "in.pt")
    assert run("remap", tmp_path / "in.pt", *line.split("|"), "-o", tmp_path / "out.pt").status == 0
    kept = torch.load(tmp_path / "out.pt")
    assert kept.keys() == {*saved, "plain"} - {line.removeprefix("--drop|")}
    for name in kept.keys() - {"model"}:
        assert same_objects(kept[name], torch.load(tmp_path / "in.pt")[name])


def same_objects(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_objects(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_objects, one, other))
    return bool(one == other)


class Held:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


@pytest.mark.parametrize("dropped", ["one", "two", "x"])
def test_non_tensor_entries_are_dropped_by_name(tmp_path: Path, run: Run, dropped: str) -> None:
    """The other entries are kept, with their storages."""
    held = {
        name: Held(torch.full((size,), 1.0).untyped_storage())
        for name, size in (("one", 2), ("two", 3))
    }
    torch.save({"model": {"w": torch.ones(2)}, **held, "x": 1}, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    assert run("remap", tmp_path / "in.pt", "--drop", dropped, "-o", out).status == 0
    kept = torch.load(out, weights_only=False)
    assert kept.keys() == {"model", "one", "two", "x"} - {dropped}
    assert all(
        kept[n].storage.tolist() == h.storage.tolist() for n, h in held.items() if n != dropped
    )
    assert [one.path for one in ckpttool.open_checkpoint(str(out)).unreached] == [
        f"{n}.storage" for n in held if n != dropped
    ]


class Versioned(nn.Linear):
    """Save and load a constant and an extra state next to the tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(
            lambda own, state, prefix, local: state.update({f"{prefix}v": torch.ones(1)})
        )
        self.register_load_state_dict_pre_hook(
            lambda own, state, prefix, *rest: state.pop(f"{prefix}v")
        )

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: object) -> None:
        assert state == 3


def test_required_keys_without_a_source_are_reported_as_missing(tmp_path: Path, run: Run) -> None:
    model = Versioned()
    torch.save(dict(model.named_parameters()), tmp_path / "runtime.pt")
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    options = (
        "--model",
        f"{__file__}:Versioned",
        "-o",
        tmp_path / "out.pt",
        "--force",
        "--format",
        "json",
        "--to",
    )
    assert run("remap", tmp_path / "runtime.pt", *options, "serialized").status == 1
    done = run("remap", tmp_path / "runtime.pt", "--partial", *options, "serialized")
    assert done.data["missing"] == ["v", "_extra_state"]
    with pytest.raises((KeyError, RuntimeError)):
        Versioned().load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    run("remap", tmp_path / "whole.pt", *options, "runtime")
    (tmp_path / "out.pt").rename(tmp_path / "back.pt")
    done = run("remap", tmp_path / "back.pt", *options, "serialized", "--from", "runtime")
    assert done.data["missing"] == []
    Versioned().load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))


def test_key_missing_from_one_section_is_reported_for_that_section(
    tmp_path: Path, run: Run
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    incomplete = {key: value for key, value in model.state_dict().items() if key != "1.bias"}
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))"
    )
    torch.save({"model": model.state_dict(), "ema": incomplete}, tmp_path / "in.pt")
    options = ("--model", f"{tmp_path / 'm.py'}:net", "--to", "ddp", "--sections", "model,ema")
    words = (*options, "-o", tmp_path / "out.pt", "--format", "json", "--partial")
    assert run("remap", tmp_path / "in.pt", *words).data["missing"] == ["ema.1.bias"]
    torch.save({"model": incomplete, "ema": dict(incomplete)}, tmp_path / "in.pt")
    missing = run("remap", tmp_path / "in.pt", *words, "--force").data["missing"]
    assert missing == ["model.1.bias", "ema.1.bias"]


@pytest.mark.parametrize(
    ("kwargs", "problems"),
    [
        ({"width": 3}, {"0.weight", "0.bias", "1.weight"}),
        ({"layers": 1}, {"1.weight", "1.bias"}),
        ({"width": 3, "layers": 1}, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        ({}, set()),
    ],
)
def test_tensors_that_do_not_fit_another_model_are_refused_by_name(
    tmp_path: Path, run: Run, kwargs: dict[str, int], problems: set[str]
) -> None:
    (tmp_path / "m.py").write_text(
        "from torch import nn\n"
        "def net(width=2, layers=2):\n"
        "    return nn.Sequential(*(nn.Linear(*sizes) for sizes in ((2, width), (width,"
        " 2))[:layers]))"
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), tmp_path / "in.pt")
    operand = f"{tmp_path / 'm.py'}:net"
    words = ("--model", operand, "--to-model", call(operand, **kwargs), "--format", "json")
    done = run("remap", tmp_path / "in.pt", *words, "-o", tmp_path / "out.pt")
    assert {
        problem["key"].removeprefix("module.") for problem in done.data.get("problems", ())
    } == problems
    if not problems:
        model.load_state_dict(torch.load(tmp_path / "out.pt"))


def test_adapter_without_its_model_is_recognized(tmp_path: Path, run: Run) -> None:
    """Its keys are module paths, so the names of a single model do not determine new ones."""
    keys = [f"base_model.model.0.lora_{side}.weight" for side in "AB"]
    torch.save({key: torch.ones(2, 2) for key in keys}, tmp_path / "a.pt")
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(2, 2))\n"
    )
    options = ("--model", f"{tmp_path}/model.py:build", "--to", "runtime")
    refused = run("remap", tmp_path / "a.pt", *options, "-o", tmp_path / "b.pt")
    assert (
        refused.status,
        "a LoRA adapter without its model: pass --to-model NEW" in refused.err,
    ) == (1, True)
