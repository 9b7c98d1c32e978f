"""Exported programs: read without the graph, and written with new weights; torch.export.load is the
oracle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.testing._internal.two_tensor import TwoTensor

from ckpttool import Checkpoint, CkptError, Refused, open_checkpoint, swap_weights, trace
from files import change_archive, content, write

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch 2.9 has a new layout of programs"
)


@torch.library.custom_op("ckpttool_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halve.register_fake
def _(x):
    return torch.empty_like(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("mask", torch.rand(3), persistent=False)

    def forward(self, x):
        return self.lin(x) * self.mask


class Everything(nn.Module):
    """Tied, shared, frozen, unused, transposed and sliced weights, buffers of every kind, and
    constants.
    """

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        whole = torch.randn(4, 3)
        self.upper, self.lower = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.brain = nn.Parameter(torch.randn(3).bfloat16())
        self.unused = nn.Parameter(torch.randn(2))
        self.block = Block()
        self.tied = self.block.lin.weight
        self.again = self.block
        self.register_buffer("small", torch.randint(-9, 9, (3,), dtype=torch.int8))
        self.register_buffer("flag", torch.tensor(seed % 2 == 0))
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("empty2", torch.zeros(3, 0))
        self.register_buffer("expanded", torch.randn(1).expand(3))
        self.register_buffer("column", torch.randn(3, 3)[:, 1])
        self.plain = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x):
        x = (
            self.again(self.block(x))
            + self.frozen
            + self.brain
            + self.small * self.flag
            + self.empty.sum()
        )
        x = (
            x * self.scalar
            + self.expanded * self.column
            + self.plain
            + torch.tensor([3.0, 2.0, 1.0])
        )
        return (
            halve(x)
            + self.turned.sum(0)
            + self.upper.sum(0)
            - self.lower.prod(0)
            + self.tied.sum()
            + self.empty2.sum()
        )


EXAMPLE = torch.linspace(-1, 1, 6).reshape(2, 3)


def exported(model: nn.Module, path: Path) -> str:
    program = torch.export.export(model, (EXAMPLE,), dynamic_shapes=({0: Dim("n", min=2)},))
    torch.export.save(program, path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    exported(Everything(0), path / "old.pt2")
    exported(Everything(1), path / "new.pt2")
    return path


def tensor_of(entry: Any) -> torch.Tensor:
    raw = bytearray(b"".join(content(entry.storage.data)))
    dtype = getattr(torch, entry.dtype)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.as_strided(entry.shape, entry.stride, entry.offset)


def records(path: str | Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def with_record(path: str, name: str, data: bytes, out: Path) -> str:
    """Replace one record of the archive at `path`, or append it."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        records = {old: archive.read(old) for old in archive.namelist()}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for old, content in {**records, f"{root}/{name}": data}.items():
            archive.writestr(old, content)
    return str(out)


# Reading


def test_state_dict_and_constants_match_torch(folder):
    program = torch.export.load(folder / "old.pt2")
    checkpoint = open_checkpoint(str(folder / "old.pt2"))
    weights, constants = checkpoint.sections
    assert (checkpoint.format, weights.kind) == ("pt2", "state_dict")
    assert (constants.path, constants.kind) == ("constants", "other")
    for section, expected in [(weights, program.state_dict), (constants, program.constants)]:
        assert [entry.key for entry in section.tensors] == list(expected)
        for entry in section.tensors:
            tensor = expected[entry.key]
            assert (entry.shape, entry.stride, entry.offset) == (
                tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            )  # fmt: skip
            assert torch.equal(tensor_of(entry), tensor)
            assert str(tensor.dtype) == f"torch.{entry.dtype}"
    assert weights.aliases() == {
        "block.lin.weight": "tied", "again.lin.weight": "tied", "again.lin.bias": "block.lin.bias"
    }  # fmt: skip
    storages = {entry.key: entry.storage for entry in weights.tensors}
    assert storages["upper"] is storages["lower"]
    assert storages["empty"] is not storages["empty2"]


def test_names_match_the_model(folder):
    model = Everything(0)
    found = trace(str(folder / "old.pt2"))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    persistent = set(model.state_dict()) - set(parameters)
    assert {r.fqn for r in found.runtime} == set(parameters) | set(buffers)
    assert [r.kind for r in found.runtime] == ["parameter"] * len(parameters) + ["buffer"] * len(
        buffers
    )
    tensors = parameters | buffers
    for r in found.runtime:
        tensor = tensors[r.fqn]
        assert (r.dtype, r.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert r.trainable == tensor.requires_grad
        assert r.persistent == (r.fqn in parameters or r.fqn in persistent)
        same = [other for other, t in tensors.items() if t is tensor]
        assert {r.fqn, r.alias_of or r.fqn} <= set(same)
        assert sum(other.alias_of is None for other in found.runtime if other.fqn in same) == 1
    assert set(found.not_serialized) == set(buffers) - persistent
    assert {s.key for s in found.serialized} == set(model.state_dict())
    assert all(tensors[s.source.key] is tensors[s.key] for s in found.serialized)
    assert found.torch == torch.__version__
    assert type(found).from_json(found.to_json(), "x") == found


def test_an_ending_in_capital_letters_is_the_ending(folder, tmp_path, run):
    shutil.copy(folder / "old.pt2", tmp_path / "OLD.PT2")
    assert trace(str(tmp_path / "OLD.PT2")).runtime == trace(str(folder / "old.pt2")).runtime
    assert run("diff", folder / "old.pt2", "--model", tmp_path / "OLD.PT2").status == 0


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x):
        return x * self.weight * self.scale + self.bias


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3) * 2))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.bias + self.pair.sum()


def test_tensor_subclasses_are_copied(tmp_path):
    path = str(tmp_path / "old.pt2")
    torch.export.save(torch.export.export(Wrapped(), (EXAMPLE,)), path)
    pair, _ = open_checkpoint(path).section("").tensors
    assert (pair.key, pair.layout, pair.shape, pair.storage) == ("pair", "subclass", (3,), None)
    assert pair.nbytes == len(records(path)["data/weights/weight_0"])
    torch.save({"bias": torch.zeros(3)}, tmp_path / "zeros.pt")
    zeros = open_checkpoint(str(tmp_path / "zeros.pt")).section("").tensors[0].storage
    write(changed_tensors(tmp_path / "old.pt2", "bias", storage=zeros), tmp_path / "out.pt2")
    loaded = torch.export.load(tmp_path / "out.pt2").state_dict
    assert loaded["bias"].tolist() == [0, 0, 0]
    assert loaded["pair"].b.tolist() == [2, 2, 2]
    replaced = changed_tensors(tmp_path / "old.pt2", "pair", storage=zeros, payload=None)
    assert problems(replaced, tmp_path / "no.pt2") == [
        "a subclass tensor in the program, which cannot be replaced @ pair"
    ]


def test_programs_without_values_are_read(tmp_path):
    """If a program is exported with fake tensors, torch saves one empty record for all weights of a
    dtype.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, example = nn.Linear(3, 2), torch.ones(1, 3)
    torch.export.save(torch.export.export(model, (example,)), tmp_path / "fake.pt2")
    checkpoint = open_checkpoint(str(tmp_path / "fake.pt2"))
    assert [(e.key, e.layout, e.storage) for e in checkpoint.section("").tensors] == [
        ("weight", "meta", None), ("bias", "meta", None)
    ]  # fmt: skip
    assert checkpoint.section("").aliases() == {}
    write(checkpoint, tmp_path / "out.pt2")
    assert (tmp_path / "out.pt2").read_bytes() == (tmp_path / "fake.pt2").read_bytes()


def test_several_programs_are_read_and_written_separately(tmp_path):
    from torch.export.pt2_archive._package import package_pt2

    program = torch.export.export(Small(), (EXAMPLE,))
    path, out = str(tmp_path / "two.pt2"), str(tmp_path / "out.pt2")
    package_pt2(
        path,
        exported_programs={"first": program, "inner/second": program},
        extra_files={"note": "hello"},
    )
    together = open_checkpoint(path)
    assert [(section.path, section.kind) for section in together.sections] == [
        ("first", "state_dict"), ("first.constants", "other"),
        ("inner/second", "state_dict"), ("inner/second.constants", "other"),
    ]  # fmt: skip
    assert together.notes == ("2 programs: first, inner/second",)
    picked = open_checkpoint(f"{path}::inner/second").section("")
    assert [entry.span for entry in picked.tensors] == [
        entry.span for entry in together.sections[2].tensors
    ]
    new = {"weight": torch.ones(3), "bias": torch.full((3,), 7.0)}
    with pytest.raises(CkptError, match="holds 2 programs: first, inner/second") as caught:
        swap_weights(path, new, out)
    assert caught.value.hint == "name one: name='first'"
    with pytest.raises(CkptError, match="holds no program third"):
        swap_weights(path, new, out, name="third")
    swap_weights(path, new, out, name="inner/second")
    old_records, new_records = records(path), records(out)
    changed = [name for name in old_records if old_records[name] != new_records[name]]
    assert changed == ["data/weights/weight_3"]
    assert trace(f"{path}::inner/second").not_serialized == ("scale",)


@pytest.mark.parametrize(
    ("name", "spec", "kinds"),
    [
        # not a constant, because it is saved
        ("upper", {"tensor_constant": {"tensor_constant_name": "upper"}}, ["parameter"]),
        ("small", None, ["buffer"]),
        ("block.mask", None, []),
    ],
)
def test_tensors_missing_from_the_signature_are_read(folder, tmp_path, name, spec, kinds):
    model = json.loads(records(folder / "old.pt2")["models/model.json"])
    specs = model["graph_module"]["signature"]["input_specs"]
    (at,) = (n for n, old in enumerate(specs) for kind in old.values() if name in kind.values())
    specs[at : at + 1] = [spec] if spec else []
    path = with_record(
        str(folder / "old.pt2"), "models/model.json", json.dumps(model).encode(), tmp_path / "p.pt2"
    )
    found = trace(path)
    assert [r.kind for r in found.runtime if r.fqn == name] == kinds
    assert [s.key for s in found.serialized] == [
        s.key for s in trace(str(folder / "old.pt2")).serialized
    ]


def with_objects(path: str, value: object, out: Path) -> str:
    """Add constants that are not tensors to the program, in both pickle formats of torch."""
    folder, config = "data/constants", {}
    for name, data in {
        "opaque_obj_0": pickle.dumps(value),
        "custom_obj_0": torch._C._pickle_save(value),
    }.items():
        path = with_record(path, f"{folder}/{name}", data, out.with_name(f"{name}.pt2"))
        config[name[0]] = {
            "path_name": name,
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }
    return with_record(
        path, f"{folder}/model_constants_config.json", json.dumps({"config": config}).encode(), out
    )


def test_constants_that_are_not_tensors_are_compared(linear, tmp_path, run):
    old, new, same = (
        with_objects(linear, value, tmp_path / f"{n}.pt2")
        for n, value in enumerate(((1, 2), (1, 3), (1, 2)))
    )
    assert (
        [entry.key for entry in open_checkpoint(old).sections[1].extras]
        == ["o", "c"]
        == list(torch.export.load(old).constants)
    )
    assert open_checkpoint(old).unreached == ()
    assert run("diff", old, same, "--values")[0] == 0
    status, out, _ = run("diff", old, new, "--values", "--format", "json")
    assert (status, json.loads(out)["summary"]["value"]) == (1, 2)
    status, out, err = run("diff", old, linear)
    assert (
        status,
        f"not compared: 2 entries outside of state dicts in {old} only: o, c" in out + err,
    ) == (0, True)
    assert run("diff", old, linear, "--whole")[0] == 1


def test_records_without_an_entry_are_reported(linear, tmp_path):
    path = with_record(linear, "data/weights/weight_8", b"", tmp_path / "empty.pt2")
    path = with_record(path, "data/weights/weight_9", b"left", tmp_path / "left.pt2")
    assert [(u.path, u.storage.nbytes, u.is_referred) for u in open_checkpoint(path).unreached] == [
        ("linear/data/weights/weight_9", 4, False)
    ]


def test_tensor_subclasses_are_compared_by_content(tmp_path, run):
    for name, value in (("old", 2), ("new", 3), ("same", 2)):
        model = Wrapped()
        model.pair = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3) * value))
        torch.export.save(torch.export.export(model, (EXAMPLE,)), tmp_path / f"{name}.pt2")
    assert run("diff", tmp_path / "old.pt2", tmp_path / "same.pt2", "--values")[0] == 0
    status, out, _ = run(
        "diff", tmp_path / "old.pt2", tmp_path / "new.pt2", "--values", "--format", "json"
    )
    assert (status, json.loads(out)["summary"]["value"]) == (1, 1)


# Writing


def test_an_unchanged_program_gives_the_same_file(folder, tmp_path):
    write(open_checkpoint(str(folder / "old.pt2")), tmp_path / "out.pt2")
    assert (tmp_path / "out.pt2").read_bytes() == (folder / "old.pt2").read_bytes()


@pytest.mark.parametrize("in_memory", [False, True])
def test_new_weights_give_the_outputs_of_the_new_model(folder, tmp_path, in_memory):
    old, out, back = folder / "old.pt2", tmp_path / "out.pt2", tmp_path / "back.pt2"
    model = Everything(1)
    swap_weights(str(old), model.state_dict() if in_memory else str(folder / "new.pt2"), str(out))
    # its mask is not persistent: a constant of the old program
    model.block.get_buffer("mask").copy_(Everything(0).block.get_buffer("mask"))
    loaded = torch.export.load(out).module()
    for n in (2, 7):
        example = torch.randn(n, 3)
        assert torch.equal(loaded(example), model(example))
    before, after = records(old), records(out)
    assert list(before) == list(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert all(name.startswith("data/weights/weight_") for name in changed)
    assert zipfile.ZipFile(out).testzip() is None
    assert out.stat().st_size == old.stat().st_size
    swap_weights(str(out), str(old), str(back))
    assert torch.equal(torch.export.load(back).module()(EXAMPLE), Everything(0)(EXAMPLE))


def test_other_values_for_one_element_in_memory_are_refused(folder, tmp_path):
    new = {**Everything(1).state_dict(), "expanded": torch.arange(3.0)}
    with pytest.raises(Refused, match="expanded repeats elements in memory"):
        swap_weights(str(folder / "old.pt2"), new, str(tmp_path / "out.pt2"))
    assert not (tmp_path / "out.pt2").exists()


class Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        whole = torch.zeros(4)
        self.a, self.b = nn.Parameter(whole[:3]), nn.Parameter(whole[1:])

    def forward(self, x):
        return x * self.a + self.b


def test_other_values_for_weights_that_share_memory_are_refused(tmp_path):
    path, out = exported(Overlapping(), tmp_path / "old.pt2"), tmp_path / "out.pt2"
    with pytest.raises(Refused, match="shares memory with another weight"):
        swap_weights(path, {"a": torch.ones(3), "b": torch.full((3,), 2.0)}, str(out))
    assert not out.exists()
    new = torch.arange(4.0)
    swap_weights(path, {"a": new[:3].clone(), "b": new[1:].clone()}, str(out))
    assert torch.export.load(out).state_dict["b"].tolist() == [1, 2, 3]


def test_a_name_that_is_there_twice_is_refused(folder, tmp_path):
    old = open_checkpoint(str(folder / "old.pt2"))
    first, *rest = old.sections
    twice = replace(first, tensors=(*first.tensors, first.tensors[0]))
    assert problems(replace(old, sections=(twice, *rest)), tmp_path / "out.pt2") == [
        f"the name is there twice @ {first.tensors[0].key}"
    ]


def changed_tensors(path: Path, fqn: str, **changes: Any) -> Checkpoint:
    """Return the program with another entry under this name."""
    checkpoint = open_checkpoint(str(path))
    first, *rest = checkpoint.sections
    entries = [replace(e, **changes) if e.key == fqn else e for e in first.tensors]
    return replace(checkpoint, sections=(replace(first, tensors=tuple(entries)), *rest))


def problems(checkpoint: Checkpoint, out: Path) -> list[str]:
    with pytest.raises(Refused) as caught:
        write(checkpoint, out)
    assert caught.value.hint
    assert not out.exists()
    return [str(problem) for problem in caught.value.problems]


MISFITS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "dtype": ("brain", {"dtype": "float16"}, ["dtype float16, the program has bfloat16 @ brain"]),
    "shape": (
        "frozen",
        {"shape": (3, 1), "stride": (1, 1)},
        ["shape [3, 1], the program has [3] @ frozen"],
    ),
    "stride": ("turned", {"stride": (3, 1)}, ["stride [3, 1], the program has [1, 5] @ turned"]),
    "offset": ("lower", {"offset": 0}, ["offset 0, the program has 6 @ lower"]),
    "name": (
        "frozen",
        {"key": "thawed", "payload": None},
        ["the program has no such tensor @ thawed", "missing @ frozen"],
    ),
    "name of a method": (
        "frozen",
        {"key": "forward", "dtype": "float64"},
        [
            "dtype float64, the program has float32 @ frozen",
            "not a name that a module of torch can have: forward @ forward",
        ],
    ),
    "layout": (
        "frozen",
        {"storage": None, "layout": "sparse_coo"},
        ["a sparse_coo tensor, the program has a strided one @ frozen"],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_weights_that_do_not_fit_are_refused(folder, tmp_path, name):
    fqn, changes, expected = MISFITS[name]
    changed = changed_tensors(folder / "old.pt2", fqn, **changes)
    assert problems(changed, tmp_path / "out.pt2") == expected


@pytest.mark.parametrize(
    ("fqn", "other", "expected"),
    [
        ("frozen", "unused", "a storage of 8 bytes, the program's has 12 @ frozen"),
        ("frozen", "turned", "a storage of 60 bytes, the program's has 12 @ frozen"),
        (
            "again.lin.bias",
            "frozen",
            "shares its storage with block.lin.bias in the program, but not here @ again.lin.bias",
        ),
    ],
)
def test_storages_that_do_not_fit_are_refused(folder, tmp_path, fqn, other, expected):
    storage = open_checkpoint(str(folder / "new.pt2")).section("").by_key()[other].storage
    changed = changed_tensors(folder / "old.pt2", fqn, storage=storage)
    assert problems(changed, tmp_path / "out.pt2") == [expected]


def test_other_sections_than_the_programs_are_refused(folder, tmp_path):
    old = open_checkpoint(str(folder / "old.pt2"))
    model = replace(old.sections[0], path="model")
    assert problems(replace(old, sections=(model,)), tmp_path / "out.pt2") == [
        "not the sections of the program @ model"
    ]


def test_compiled_code_next_to_the_program_is_refused(folder, tmp_path):
    path = with_record(
        str(folder / "old.pt2"), "data/aotinductor/model/code.so", b"\x7fELF", tmp_path / "both.pt2"
    )
    write(open_checkpoint(path), tmp_path / "copy.pt2")
    assert records(tmp_path / "copy.pt2") == records(path)
    with pytest.raises(Refused) as caught:
        swap_weights(path, str(folder / "new.pt2"), str(tmp_path / "out.pt2"))
    assert [str(problem) for problem in caught.value.problems] == [
        "compiled code in the file (AOTInductor) holds the old weights too @ data/aotinductor"
    ]


# Other and broken files


CONFIG = "data/weights/model_weights_config.json"


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> str:
    tmp_path = tmp_path_factory.mktemp("linear")
    torch.export.save(torch.export.export(nn.Linear(3, 2), (EXAMPLE,)), tmp_path / "linear.pt2")
    return str(tmp_path / "linear.pt2")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("path_name",), "weight_9", "the record weight_9 of weight is missing"),
        (("path_name",), "../../models/model.json", "is missing"),
        (("path_name",), None, "not as torch.export.save writes it"),
        (("tensor_meta", "dtype"), 99, "the dtype number 99"),
        (("tensor_meta", "dtype"), [7], "not as torch.export.save writes it"),
        (
            ("tensor_meta", "sizes"),
            [{"as_int": 3}, {"as_int": 3}],
            "weight needs 36 bytes, its record",
        ),
        (("tensor_meta", "sizes"), [{"as_int": 2}], "1 sizes and 2 strides"),
        (
            ("tensor_meta", "sizes"),
            [{"as_int": -2}, {"as_int": 3}],
            "not as torch.export.save writes it",
        ),
        (
            ("tensor_meta", "sizes"),
            [{"as_int": 2.0}, {"as_int": 3}],
            "not as torch.export.save writes it",
        ),
        (("tensor_meta", "sizes"), [{"as_int": 2**62}, {"as_int": 2**62}], "bytes, its record"),
        (
            ("tensor_meta", "sizes"),
            [{"as_expr": {"expr_str": "s0"}}],
            "not as torch.export.save writes it",
        ),
        (("tensor_meta", "strides"), 3, "not as torch.export.save writes it"),
        (("tensor_meta", "storage_offset"), {"as_int": 1}, "weight needs 28 bytes, its record"),
        (("tensor_meta",), "x", "not as torch.export.save writes it"),
        ((), 7, "not as torch.export.save writes it"),
    ],
)
def test_a_wrong_config_is_an_error(linear, tmp_path, where, value, message):
    config = json.loads(records(linear)[CONFIG])
    place = config["config"]
    for step, following in zip(("weight", *where), (*where, None)):
        if following is None:
            place[step] = value
        else:
            place = place[step]
    broken = with_record(linear, CONFIG, json.dumps(config).encode(), tmp_path / "broken.pt2")
    with pytest.raises(CkptError) as caught:
        open_checkpoint(broken)
    assert message in caught.value.message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"config":[]}', b'{"config":{"a":1}}', b"\xff", b"[" * 99_999]
)
@pytest.mark.parametrize("name", [CONFIG, "data/constants/model_constants_config.json"])
def test_an_invalid_config_is_an_error(linear, tmp_path, name, data):
    with pytest.raises(CkptError, match="is not"):
        open_checkpoint(with_record(linear, name, data, tmp_path / "broken.pt2"))


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"torch_version": "2.9", "graph_module": {"signature": {"input_specs": [{}]}}},
        {"torch_version": "2.9", "graph_module": {"signature": {"input_specs": [{"buffer": {}}]}}},
        {
            "torch_version": "2.9",
            "graph_module": {"signature": {"input_specs": [{"buffer": {"buffer_name": []}}]}},
        },
    ],
)
def test_an_invalid_signature_is_an_error(linear, tmp_path, model):
    path = with_record(
        linear, "models/model.json", json.dumps(model).encode(), tmp_path / "broken.pt2"
    )
    assert len(open_checkpoint(path).section("").tensors) == 2
    with pytest.raises(CkptError, match="not as torch"):
        trace(path)


JUNK = [
    None,
    True,
    0,
    -1,
    7,
    2**70,
    1.5,
    "",
    "weight_1",
    [],
    {},
    [1],
    {"as_int": 2},
    {"as_int": None},
    [{"as_int": 2}],
]
MODEL = "models/model.json"


def places(value, path=()):
    yield path
    for step in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from places(value[step], (*path, step))


@pytest.mark.parametrize("name", [CONFIG, MODEL])
def test_random_damage_is_an_error_or_harmless(linear, tmp_path, name):
    chance = random.Random(0)
    text = records(linear)[name]
    signature = ("graph_module", "signature")
    candidates = [
        place
        for place in places(json.loads(text))
        if place and (name == CONFIG or place[:2] == signature)
    ]
    for place in chance.choices(candidates, k=75):
        value = json.loads(text)
        inner = functools.reduce(lambda outer, step: outer[step], place[:-1], value)
        inner[place[-1]] = chance.choice(JUNK)
        broken = with_record(linear, name, json.dumps(value).encode(), tmp_path / "broken.pt2")
        with contextlib.suppress(CkptError):  # any other exception fails the test
            write(open_checkpoint(broken), tmp_path / "out.pt2")
            trace(broken)


def test_a_big_endian_program_is_refused(linear, tmp_path):
    with pytest.raises(CkptError, match="big-endian"):
        open_checkpoint(with_record(linear, "byteorder", b"big", tmp_path / "big.pt2"))


def test_other_archives_are_refused(linear, tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.pt2", "w"):
        pass
    with pytest.raises(CkptError, match="is an empty zip archive"):
        open_checkpoint(str(tmp_path / "empty.pt2"))
    deflated = change_archive(
        linear, lambda _, data: data, tmp_path / "deflated.pt2", zipfile.ZIP_DEFLATED
    )
    with pytest.raises(CkptError, match="is compressed") as caught:
        open_checkpoint(deflated)
    assert "torch.export.save" in caught.value.hint
