"""Every storage of a file belongs to a tensor or is reported as unknown, and unknown content is
never equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import oracle
import python2
from ckpttool import open_checkpoint
from command import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "40"))


def saved(path: Path, value: Any, **options: Any) -> str:
    torch.save(value, path, **options)
    return str(path)


class Holder:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


# Python 2


def network(seed: int) -> OrderedDict[str, Any]:
    torch.manual_seed(seed)
    state = OrderedDict(
        [("lin.weight", torch.randn(3, 4)), ("lin.bias", torch.randn(3)), ("n", torch.tensor(7))]
    )
    state._metadata = OrderedDict([("", {"version": 1}), ("lin", {"version": 1})])  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_of_python_2_is_read(tmp_path: Path, legacy: bool) -> None:
    path = python2.save(network(0), tmp_path / "old.pth", legacy=legacy)
    assert list(torch.load(path, weights_only=False)) == list(network(0))  # torch reads the file
    (section,) = open_checkpoint(path).sections
    assert [(e.key, e.shape) for e in section.tensors] == [
        ("lin.weight", (3, 4)),
        ("lin.bias", (3,)),
        ("n", ()),
    ]
    assert list(section.modules or ()) == ["", "lin"]
    assert oracle.disagreements(path) == []


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_of_python_2_is_compared_and_rewritten(
    run: Run, tmp_path: Path, legacy: bool
) -> None:
    one = python2.save({"model": network(0), "epoch": 3}, tmp_path / "one.pth", legacy=legacy)
    two = python2.save({"model": network(1), "epoch": 3}, tmp_path / "two.pth", legacy=legacy)
    assert run("diff", one, one, "--values")[0] == 0
    assert run("diff", one, two, "--values")[0] == 1
    out = tmp_path / "out.pt"
    assert run("remap", one, "-o", out, "--rule", "lin.{x*} => head.{x*}", "--verify")[0] == 0
    found = torch.load(out, weights_only=True)
    assert found["epoch"] == 3
    assert list(found["model"]) == ["head.weight", "head.bias", "n"]
    assert torch.equal(found["model"]["head.weight"], network(0)["lin.weight"])
    assert list(found["model"]._metadata) == ["", "head"]


def test_keys_of_python_2_that_are_not_ascii_are_read(run: Run, tmp_path: Path) -> None:
    path = python2.save(
        OrderedDict([("caf\xe9", torch.ones(2)), ("w", torch.zeros(3))]), tmp_path / "old.pth"
    )
    (section,) = open_checkpoint(path).sections
    assert [entry.key for entry in section.tensors] == ["caf\xe9", "w"]
    out = tmp_path / "out.safetensors"
    assert run("remap", path, "-o", out, "--verify")[0] == 0


def test_dicts_that_are_pickled_with_their_items_are_read(tmp_path: Path) -> None:
    class WithItems(OrderedDict[str, Any]):
        def __reduce__(self) -> Any:
            return OrderedDict, ([*self.items()],)

    state = WithItems(a=torch.ones(2), b=torch.zeros(2))
    path = saved(
        tmp_path / "items.pt",
        {"model": state, "count": Counter(a=1), "more": defaultdict(list, x=[1])},
    )
    assert [e.key for e in open_checkpoint(path).section("model").tensors] == ["a", "b"]
    assert oracle.disagreements(path) == []


# Pickles of any content


def anything(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.2:
        return leaf(rng)
    parts = [anything(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    names = [
        rng.choice(["model", "weight", "ema", "a.b", "0", "state", "optimizer", "_metadata"])
        for _ in parts
    ]
    kinds = (
        lambda: parts,
        lambda: tuple(parts),
        lambda: dict(zip(names, parts)),
        lambda: OrderedDict(zip(names, parts)),
        lambda: defaultdict(int, zip(names, parts)),
        lambda: dict(enumerate(parts)),
        lambda: Holder(**dict(zip("abc", parts))),
        lambda: argparse.Namespace(**dict(zip("abc", parts))),
        lambda: Slotted(parts),
        lambda: {torch.ones(rng.randrange(1, 9)): parts},
        lambda: {parts[0]} if isinstance(parts[0], torch.Tensor) else parts,
        lambda: python2_like(dict(zip(names, parts))),
        lambda: nn.ParameterList([p for p in parts if isinstance(p, nn.Parameter)]),
    )
    return rng.choice(kinds)()


def leaf(rng: random.Random) -> Any:
    size = rng.randrange(1, 9)
    numbers = torch.tensor([rng.random() for _ in range(size)])
    return rng.choice(
        [numbers, numbers, numbers, nn.Parameter(numbers), numbers.untyped_storage(), numbers.storage(), numbers[1:],
         torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8), numbers.to_sparse(), 3, "word", None]
    )  # fmt: skip


class python2_like(dict[str, Any]):
    def __reduce__(self) -> Any:
        return OrderedDict, ([[key, value] for key, value in self.items()],)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_storage_is_accounted_for(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "any.pt"
    try:
        torch.save(anything(rng, 4), path, _use_new_zipfile_serialization=bool(seed % 2))
        oracle.load(str(path))
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        pytest.skip(f"torch does not save and load this: {error}")
    assert oracle.disagreements(str(path)) == []


def test_a_storage_without_a_tensor_is_reported(run: Run, tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(2)}, "buffers": {"raw": torch.arange(5.0).untyped_storage()}}
    path = saved(tmp_path / "bare.pt", value)
    code, out, _ = run("inspect", path, "--format", "json")
    (found,) = json.loads(out)["unreached"]
    assert (code, found["path"], found["bytes"]) == (0, "buffers.raw", 20)
    assert "1 storage (20 bytes) of no tensor that is understood: buffers.raw" in "".join(
        run("inspect", path)[1:]
    )
    other = saved(
        tmp_path / "other.pt", {**value, "buffers": {"raw": torch.ones(5).untyped_storage()}}
    )
    assert run("diff", path, path)[0] == 0
    code, out, _ = run("diff", path, other)
    assert code == 1
    assert "buffers.raw" in out
    code, _, err = run("remap", path, "-o", tmp_path / "out.safetensors")
    assert code == 1
    assert "buffers.raw" in err
    assert run("remap", path, "-o", tmp_path / "out.pt", "--rule", "w => v", "--verify")[0] == 0
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert list(found["buffers"]["raw"]) == list(value["buffers"]["raw"])


@pytest.mark.parametrize(("model", "operand"), [("model", ""), ("", ""), ("", "::")])
def test_a_storage_outside_the_model_is_compared(
    run: Run, tmp_path: Path, model: str, operand: str
) -> None:
    """Both for a selected section and for the complete file."""
    weights = {"w": torch.ones(2)}
    for name in ("left.pt", "right.pt"):
        raw = torch.full((3,), len(name)).untyped_storage()
        torch.save({**({model: weights} if model else weights), "raw": raw}, tmp_path / name)
    done = run(
        "diff", f"{tmp_path}/left.pt{operand}", f"{tmp_path}/right.pt{operand}", "--format", "json"
    )
    assert done.status == 1
    reasons = [
        entry["reason"] for entry in done.data["entries"] if "raw" in entry["left"] + entry["right"]
    ]
    assert sum("a storage that belongs to no known tensor" in reason for reason in reasons) == 2


def test_an_unreferenced_record_is_reported_and_copied(run: Run, tmp_path: Path) -> None:
    import zipfile

    path = saved(tmp_path / "more.pt", {"w": torch.ones(2), "v": torch.zeros(3)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more/data/7", b"\1\2\3\4")
    assert [found.path for found in open_checkpoint(path).unreached] == ["data/7"]
    out = tmp_path / "out.pt"
    assert run("remap", path, "-o", out, "--rule", "w => a", "--verify")[0] == 0
    assert [found.path for found in open_checkpoint(str(out)).unreached] == ["data/7"]
    assert run("remap", path, "-o", tmp_path / "out.safetensors")[0] == 1
    assert run("remap", path, "-o", tmp_path / "out.safetensors", "--drop", "data/7")[0] == 0
    assert run("remap", path, "-o", tmp_path / "without.pt", "--drop", "data/7")[0] == 0
    assert open_checkpoint(str(tmp_path / "without.pt")).unreached == ()


def test_a_storage_in_a_folder_of_torch_distributed_is_reported(tmp_path: Path) -> None:
    value = {
        "model": {"w": torch.ones(2)},
        "more": (torch.arange(3.0), torch.arange(4.0).untyped_storage()),
    }
    dcp.save(value, checkpoint_id=tmp_path / "folder")
    checkpoint = open_checkpoint(str(tmp_path / "folder"))
    assert sum(len(section.all_tensors()) for section in checkpoint.sections) == 2
    assert [found.path for found in checkpoint.unreached] == ["more.1"]


# Tensors inside the entries of a state dict


def nested(first: float) -> dict[str, Any]:
    return {
        "w": torch.ones(3), "pair": (torch.full((2,), first), torch.zeros(2, 2)), "list": [torch.ones(1), "x"],
        "object": Holder(weight=torch.arange(3.0)), "fc._extra_state": {"scale": torch.ones(4)},
    }  # fmt: skip


def test_tensors_inside_entries_are_listed(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "nested.pt", nested(0.0))
    data = json.loads(run("inspect", path, "--format", "json")[1])
    inside = {(t["key"], t["inside"]) for t in data["tensors"] if "inside" in t}
    assert inside == {
        ("pair.0", "pair"), ("pair.1", "pair"), ("list.0", "list"), ("object.weight", "object"),
        ("fc._extra_state.scale", "fc._extra_state"),
    }  # fmt: skip
    assert data["sections"][0]["tensors"] == 6
    assert "pair.1" in run("inspect", path, "--all")[1]
    assert oracle.disagreements(path) == []


def test_tensors_inside_entries_are_compared(run: Run, tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one.pt", nested(0.0)), saved(tmp_path / "two.pt", nested(1.0))
    assert run("diff", one, one, "--values")[0] == 0
    code, out, _ = run("diff", one, two, "--values")
    assert code == 1
    assert "pair.0" in out
    other = saved(tmp_path / "other.pt", {**nested(0.0), "pair": (torch.zeros(2), torch.zeros(9))})
    assert run("diff", one, other)[0] == 1


def test_tensors_inside_entries_are_copied_under_the_new_key(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "nested.pt", nested(0.5))
    out = tmp_path / "out.pt"
    assert run("remap", path, "-o", out, "--rule", "pair => two", "--verify")[0] == 0
    found = torch.load(out, weights_only=False)
    assert [part.tolist() for part in found["two"]] == [
        part.tolist() for part in nested(0.5)["pair"]
    ]
    code, _, err = run("remap", path, "-o", tmp_path / "out.safetensors")
    assert code == 1
    assert "pair" in err


def test_a_dynamically_quantized_model_is_renamed_and_loaded(run: Run, tmp_path: Path) -> None:
    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, torch.qint8
        )

    one = saved(tmp_path / "one.pt", quantized(0).state_dict())
    two = saved(tmp_path / "two.pt", quantized(1).state_dict())
    assert "0._packed_params._packed_params.0" in run("inspect", one)[1]
    assert run("diff", one, one, "--values")[0] == 0
    assert run("diff", one, two, "--values")[0] == 1
    out = tmp_path / "out.pt"
    assert run("remap", one, "-o", out, "--rule", "0.{x*} => fc.{x*}", "--verify")[0] == 0
    again = tmp_path / "again.pt"
    assert run("remap", out, "-o", again, "--rule", "fc.{x*} => 0.{x*}", "--verify")[0] == 0
    loaded = quantized(1)
    loaded.load_state_dict(torch.load(again, weights_only=False))
    ones = torch.ones(1, 4)
    assert torch.equal(loaded(ones), quantized(0)(ones))


@pytest.mark.parametrize("kind", ["quantized", "four bits", "sparse", "conj"])
def test_packed_tensors_are_compared_by_content(run: Run, tmp_path: Path, kind: str) -> None:
    def packed(value: float) -> torch.Tensor:
        numbers = torch.tensor([value, 0.0, 2.0])
        if kind == "quantized":
            return torch.quantize_per_tensor(numbers, 0.5, 0, torch.qint8)
        if kind == "four bits":  # two elements in a byte
            return torch.quantize_per_channel(
                numbers[None], torch.ones(1), torch.zeros(1), 0, torch.quint4x2
            )
        return numbers.to_sparse() if kind == "sparse" else torch.complex(numbers, numbers).conj()

    one, two = (saved(tmp_path / f"{value}.pt", {"w": packed(value)}) for value in (1.0, 4.0))
    again = saved(tmp_path / "again.pt", {"w": packed(1.0)}, _use_new_zipfile_serialization=False)
    noted: Any = nn.Parameter(packed(1.0), requires_grad=False)
    noted.note = "own"
    for same in (again, saved(tmp_path / "noted.pt", {"w": noted})):
        assert run("diff", one, same, "--values")[0] == 0
    assert run("diff", one, two, "--values")[0] == 1
    assert run("remap", one, "--rule", "w => v", "-o", tmp_path / "out.pt")[0] == 0
    found = torch.load(tmp_path / "out.pt")["v"]
    assert repr(found) == repr(packed(1.0))


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2, bias=False)
        self.again = self.head
        self.register_buffer("rope", torch.ones(4), persistent=False)
        self.register_buffer("mask", torch.ones(2))
        self.plain = torch.arange(5.0)


def test_a_pickled_module_is_read_as_its_state_dict(run: Run, tmp_path: Path) -> None:
    model = Net()
    path = saved(tmp_path / "best.pt", {"model": model, "epoch": 3})
    checkpoint = open_checkpoint(path)
    section = checkpoint.section("model")
    assert section.kind == "state_dict"
    assert [entry.key for entry in section.tensors] == list(model.state_dict())
    assert section.aliases() == {"again.weight": "head.weight"}
    assert {e.key for s in checkpoint.sections if s.kind == "other" for e in s.tensors} == {
        "model.rope",
        "model.plain",
    }
    assert section.module_class == f"{__name__}.Net"
    assert oracle.disagreements(path) == []
    out = tmp_path / "weights.safetensors"
    assert run("remap", f"{path}::model", "-o", out, "--keep-aliases", "--verify")[0] == 0
    weights = tmp_path / "weights.pt"
    assert run("remap", f"{path}::model", "-o", weights, "--verify")[0] == 0
    Net().load_state_dict(torch.load(weights), strict=True)
    assert torch.equal(torch.load(weights)["head.weight"], model.head.weight)
    assert run("remap", path, "-o", tmp_path / "less.pt", "--drop", "epoch", "--verify")[0] == 0
    assert run("remap", path, "-o", tmp_path / "no.pt", "--rule", "head.{x*} => h.{x*}")[0] == 1


def test_pickled_modules_of_other_classes_are_read_as_state_dicts(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for number, model in enumerate(
        [nn.DataParallel(Net()), graph, nn.ParameterList([torch.ones(2)]), nn.LSTM(2, 3)]
    ):
        for zipped in (True, False):
            path = saved(tmp_path / f"{number}.pt", model, _use_new_zipfile_serialization=zipped)
            (section, *_) = open_checkpoint(path).sections
            assert [entry.key for entry in section.tensors] == list(model.state_dict()), type(model)


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), torch.optim.Adam([nn.Parameter(torch.ones(2))]).state_dict(), nn.ReLU()],
)
def test_no_drop_is_suggested_for_a_file_without_a_state_dict(
    run: Run, tmp_path: Path, value: Any
) -> None:
    path = saved(tmp_path / "bare.pt", value)
    code, _, err = run("remap", path, "-o", tmp_path / "out.safetensors")
    assert code in (0, 1, 2)
    assert "--drop" not in err


# Not a state dict


def test_settings_scores_and_random_states_are_not_state_dicts(tmp_path: Path) -> None:
    value = {
        "state_dict": nn.Linear(2, 2).state_dict(),
        "callbacks": {
            "checkpoint": {
                "best_model_score": torch.tensor(0.5),
                "best_model_path": "x",
                "monitor": "loss",
            }
        },
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "config": {"lr": 0.1, "name": "run", "class_weights": torch.ones(3)},
    }
    checkpoint = open_checkpoint(saved(tmp_path / "last.ckpt", value))
    assert [section.path for section in checkpoint.sections if section.kind == "state_dict"] == [
        "state_dict"
    ]
    assert sum(len(section.all_tensors()) for section in checkpoint.sections) == 5


def test_conjugated_and_negated_views_are_resolved_for_safetensors(
    run: Run, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    numbers = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
    state = {
        "conj": numbers.conj(),
        "neg": torch._neg_view(torch.arange(4.0)),
        "part": numbers.t().conj()[1:],
    }
    path = saved(tmp_path / "lazy.pt", state)
    assert state["neg"].is_neg()
    out = tmp_path / "out.safetensors"
    assert run("remap", path, "-o", out, "--verify")[0] == 0
    found = load_file(out)
    assert all(
        torch.equal(found[key], value.resolve_conj().resolve_neg()) for key, value in state.items()
    )


def test_a_missing_crc_is_computed(run: Run, tmp_path: Path) -> None:
    import zipfile

    state = {"w": torch.arange(9.0), "v": torch.ones(2)}
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "fast.pt", state)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert not any(record.CRC for record in archive.infolist())
    for words in (["--drop", "v"], ["--rule", "v => x"]):
        out = tmp_path / f"out{words[0]}.pt"
        assert run("remap", path, "-o", out, "--verify", *words)[0] == 0
        assert torch.equal(torch.load(out)["w"], state["w"])
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None
            assert all(record.CRC for record in archive.infolist())


def test_a_file_next_to_a_distributed_checkpoint_is_copied_or_refused(
    run: Run, tmp_path: Path
) -> None:
    """Megatron-Core saves the iteration and its arguments in such a file."""
    folder = tmp_path / "iter_0000010"
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder)
    common = saved(folder / "common.pt", {"iteration": 10, "args": argparse.Namespace(lr=0.1)})
    assert "common.pt" in "".join(run("inspect", folder)[1:])
    assert (
        run("remap", folder, "-o", tmp_path / "out.dcp", "--rule", "w => v", "--verify").status == 0
    )
    assert (tmp_path / "out.dcp" / "common.pt").read_bytes() == Path(common).read_bytes()
    for name in ("out.pt", "out.safetensors"):
        done = run("remap", folder, "-o", tmp_path / name)
        assert done.status == 1
        assert "common.pt" in done.err
        assert run("remap", folder, "-o", tmp_path / name, "--drop", "common.pt").status == 0
    assert run("remap", f"{folder}::model", "-o", tmp_path / "model.pt").status == 0
    done = run("remap", folder, "-o", tmp_path / "without.dcp", "--drop", "common.pt")
    assert done.status == 0
    assert "common.pt: other files in the folder" not in done.err
    assert not (tmp_path / "without.dcp" / "common.pt").exists()


QUANTIZED = """
import torch
from torch import nn

def build():
    with torch.device("cpu"):
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, torch.qint8)
"""


def test_diff_accepts_packed_parameters_that_torch_loads(run: Run, tmp_path: Path) -> None:
    (tmp_path / "quantized.py").write_text(QUANTIZED)
    space: dict[str, Any] = {}
    exec(QUANTIZED, space)  # the model that `diff --model` builds
    whole = space["build"]().state_dict()
    path = saved(tmp_path / "whole.pt", whole)
    space["build"]().load_state_dict(torch.load(path, weights_only=False), strict=True)
    model = f"{tmp_path / 'quantized.py'}:build"
    assert run("diff", "--model", model, path).status == 0
    without = {
        key: value
        for key, value in whole.items()
        if not key.endswith("_packed_params._packed_params")
    }
    assert run("diff", "--model", model, saved(tmp_path / "part.pt", without)).status == 1


def test_swap_weights_ignores_the_counter_of_an_averaged_model(run: Run, tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.DataParallel(nn.Linear(3, 2)))
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),))
    torch.export.save(program, tmp_path / "program.pt2")
    path = saved(tmp_path / "averaged.pt", averaged.state_dict())
    out = tmp_path / "out.pt2"
    assert run("swap-weights", tmp_path / "program.pt2", path, "-o", out, "--verify").status == 0
    found = torch.export.load(out).state_dict
    assert torch.equal(found["weight"], averaged.state_dict()["module.module.weight"])


def test_a_wrong_total_size_is_corrected(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    saved(tmp_path / "w.pt", {"w": torch.ones(64), "v": torch.ones(64), "u": torch.ones(16)})
    assert (
        run("convert", tmp_path / "w.pt", "-o", f"{folder}/", "--max-shard-size", "300").status == 0
    )
    index = folder / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["metadata"] |= {"total_size": 7, "total_parameters": 3}
    index.write_text(json.dumps(text))
    for number, words in enumerate(
        (["remap", "--rule", "w => x"], ["convert", "--max-shard-size", "330"])
    ):
        out = tmp_path / f"out{number}"
        assert run(words[0], folder, "-o", f"{out}/", *words[1:]).status == 0
        assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"] == {
            "total_size": 576
        }
    text["metadata"] |= {"total_size": 576, "total_parameters": 144}
    index.write_text(json.dumps(text))
    assert run("remap", folder, "-o", f"{tmp_path}/renamed/", "--rule", "w => x").status == 0
    assert (
        json.loads((tmp_path / "renamed" / index.name).read_text())["metadata"] == text["metadata"]
    )
