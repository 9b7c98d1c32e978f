"""Exported programs: read without the graph, and written with new weights; torch.export.load is the
oracle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import random
import subprocess
import sys
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

import ckpttool
from ckpttool import Checkpoint, CkptError, Refused
from ckpttool.containers.zip_read import read_archive
from ckpttool.containers.zip_write import NewRecord, layout_archive
from ckpttool.core.checkpoint import Lazy, Section, Span, Storage, TensorEntry
from ckpttool.formats.pt2 import layout, names, read, read_program
from files import change_archive, write_pieces

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


def with_tensors(checkpoint: Checkpoint, *tensors: TensorEntry, section: int = 0) -> Checkpoint:
    sections = list(checkpoint.sections)
    sections[section] = replace(sections[section], tensors=tensors)
    return replace(checkpoint, sections=tuple(sections))


def with_weights_of(program: Checkpoint, weights: Checkpoint, lazily: bool = False) -> Checkpoint:
    """Replace the storages of the program with the ones from `weights` under the same names."""
    fresh: dict[Storage, Storage] = {}
    by_key = weights.section("").by_key()

    def storage(entry: TensorEntry) -> Storage:
        old: Any = by_key[entry.key].storage
        return (
            fresh.setdefault(old, Storage(Lazy(old.nbytes, lambda: [bytes_of(old.data)])))
            if lazily
            else old
        )

    return with_tensors(
        program, *(replace(e, storage=storage(e)) for e in program.section("").tensors)
    )


def bytes_of(span: Span) -> bytes:
    return Path(span.path).read_bytes()[span.offset :][: span.length]


def tensor_of(entry: TensorEntry) -> torch.Tensor:
    assert entry.storage is not None
    assert isinstance(entry.storage.data, Span)
    raw = bytearray(bytes_of(entry.storage.data))
    flat = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)) if raw else torch.empty(0)
    return flat.to(getattr(torch, entry.dtype)).as_strided(entry.shape, entry.stride, entry.offset)


def records(path: str | Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def with_record(path: str, name: str, data: bytes, out: Path) -> str:
    """Replace one record of the archive at `path`, or append it."""
    archive = read_archive(path)
    root = archive.records[0].name.partition("/")[0]
    new = NewRecord(f"{root}/{name}", data)
    records = [new if record.name == new.name else record for record in archive.records]
    return write_pieces(
        layout_archive(archive, records if new.name in archive.by_name else [*records, new]), out
    )


# Reading


def test_state_dict_and_constants_match_torch(folder):
    program = torch.export.load(folder / "old.pt2")
    checkpoint = read(str(folder / "old.pt2"))
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
    found = names(str(folder / "old.pt2"))
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


def test_reading_does_not_import_torch(folder):
    """The program calls an operator that is not registered in the other process."""
    code = (
        "import sys; from ckpttool.formats.pt2 import read, layout\n"
        "from ckpttool.formats.pt2 import names\n"
        "layout(read(sys.argv[1])), names(sys.argv[1]); assert 'torch' not in sys.modules, 'torch"
        " was imported'"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "old.pt2")], check=True)


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
    torch.export.save(torch.export.export(Wrapped(), (EXAMPLE,)), tmp_path / "old.pt2")
    checkpoint = read(str(tmp_path / "old.pt2"))
    pair, bias = checkpoint.section("").tensors
    assert (pair.key, pair.layout, pair.shape, pair.storage) == ("pair", "subclass", (3,), None)
    assert pair.nbytes == len(records(tmp_path / "old.pt2")["data/weights/weight_0"])
    new = replace(bias, storage=Storage(Lazy(12, lambda: [bytes(12)])))
    out = write_pieces(layout(with_tensors(checkpoint, pair, new)), tmp_path / "out.pt2")
    loaded = torch.export.load(out).state_dict
    assert loaded["bias"].tolist() == [0, 0, 0]
    assert loaded["pair"].b.tolist() == [2, 2, 2]
    with pytest.raises(Refused) as caught:
        layout(
            with_tensors(
                checkpoint, replace(pair, storage=Storage(Lazy(12, list)), payload=None), bias
            )
        )
    assert [str(p) for p in caught.value.problems] == [
        "a subclass tensor in the program, which cannot be replaced @ pair"
    ]


def test_programs_without_values_are_read(tmp_path):
    """If a program is exported with fake tensors, torch saves one empty record for all weights of a
    dtype.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, example = nn.Linear(3, 2), torch.ones(1, 3)
    torch.export.save(torch.export.export(model, (example,)), tmp_path / "fake.pt2")
    checkpoint = read(str(tmp_path / "fake.pt2"))
    assert [(e.key, e.layout, e.storage) for e in checkpoint.section("").tensors] == [
        ("weight", "meta", None), ("bias", "meta", None)
    ]  # fmt: skip
    assert checkpoint.section("").aliases() == {}
    assert len(layout(checkpoint)) == 1


def test_several_programs_are_read_and_written_separately(tmp_path):
    from torch.export.pt2_archive._package import package_pt2

    program = torch.export.export(Small(), (EXAMPLE,))
    path = str(tmp_path / "two.pt2")
    package_pt2(
        path,
        exported_programs={"first": program, "inner/second": program},
        extra_files={"note": "hello"},
    )
    together = read(path)
    assert [(section.path, section.kind) for section in together.sections] == [
        ("first", "state_dict"), ("first.constants", "other"),
        ("inner/second", "state_dict"), ("inner/second.constants", "other"),
    ]  # fmt: skip
    assert together.notes == ("2 programs: first, inner/second",)
    picked = ckpttool.open_checkpoint(f"{path}::inner/second").section("")
    assert [entry.span for entry in picked.tensors] == [
        entry.span for entry in together.sections[2].tensors
    ]
    with pytest.raises(CkptError, match="holds 2 programs: first, inner/second") as caught:
        read_program(path)
    assert caught.value.hint == "name one: --program first"
    with pytest.raises(CkptError, match="holds no program third"):
        read_program(path, "third")
    second = read_program(path, "inner/second")
    weight, bias = second.section("").tensors
    new = replace(bias, storage=Storage(Lazy(12, lambda: [b"\1" * 12])))
    out = write_pieces(layout(with_tensors(second, weight, new)), tmp_path / "out.pt2")
    old_records, new_records = records(path), records(out)
    changed = [name for name in old_records if old_records[name] != new_records[name]]
    assert changed == ["data/weights/weight_3"]
    assert names(path, "inner/second").not_serialized == ("scale",)


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
    found = names(path)
    assert [r.kind for r in found.runtime if r.fqn == name] == kinds
    assert [s.key for s in found.serialized] == [
        s.key for s in names(str(folder / "old.pt2")).serialized
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
        [entry.key for entry in read(old).sections[1].extras]
        == ["o", "c"]
        == list(torch.export.load(old).constants)
    )
    assert read(old).unreached == ()
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
    assert [(u.path, u.storage.nbytes, u.is_referred) for u in read(path).unreached] == [
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
    out = write_pieces(layout(read(str(folder / "old.pt2"))), tmp_path / "out.pt2")
    assert Path(out).read_bytes() == (folder / "old.pt2").read_bytes()


@pytest.mark.parametrize("lazily", [False, True])
def test_new_weights_give_the_outputs_of_the_new_model(folder, tmp_path, lazily):
    old, new = read(str(folder / "old.pt2")), read(str(folder / "new.pt2"))
    out = write_pieces(layout(with_weights_of(old, new, lazily)), tmp_path / "out.pt2")
    model = Everything(1)  # its mask is not persistent: a constant of the old program
    model.block.get_buffer("mask").copy_(Everything(0).block.get_buffer("mask"))
    loaded = torch.export.load(out).module()
    for n in (2, 7):
        example = torch.randn(n, 3)
        assert torch.equal(loaded(example), model(example))
    before, after = records(folder / "old.pt2"), records(out)
    assert list(before) == list(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert all(name.startswith("data/weights/weight_") for name in changed)
    assert zipfile.ZipFile(out).testzip() is None
    assert (tmp_path / "out.pt2").stat().st_size == (folder / "old.pt2").stat().st_size
    back = write_pieces(layout(with_weights_of(read(out), old)), tmp_path / "back.pt2")
    assert torch.equal(torch.export.load(back).module()(EXAMPLE), Everything(0)(EXAMPLE))


def test_unchanged_weights_are_copied_as_spans(folder):
    old = read(str(folder / "old.pt2"))
    pieces = layout(replace_storage(old, "frozen", Storage(Span(str(folder / "new.pt2"), 0, 12))))
    assert sum(isinstance(piece.data, Span) for piece in pieces) == 3  # before, the weight, after


def replace_storage(
    checkpoint: Checkpoint, fqn: str, storage: Storage | None, **changes
) -> Checkpoint:
    tensors = checkpoint.section("").tensors
    return with_tensors(
        checkpoint,
        *(replace(e, storage=storage, **changes) if e.key == fqn else e for e in tensors),
    )


def problems(checkpoint: Checkpoint) -> list[str]:
    with pytest.raises(Refused) as caught:
        layout(checkpoint)
    assert caught.value.hint
    return [str(problem) for problem in caught.value.problems]


def test_weights_that_do_not_fit_are_refused(folder):
    old = read(str(folder / "old.pt2"))
    tensors = old.section("").tensors
    by_key = old.section("").by_key()
    twelve = Storage(Lazy(12, list))

    def change(fqn: str, **changes) -> list[str]:
        return problems(replace_storage(old, fqn, by_key[fqn].storage, **changes))

    assert change("brain", dtype="float16") == ["dtype float16, the program has bfloat16 @ brain"]
    assert change("frozen", shape=(3, 1), stride=(1, 1)) == [
        "shape [3, 1], the program has [3] @ frozen"
    ]
    assert change("turned", stride=(3, 1)) == ["stride [3, 1], the program has [1, 5] @ turned"]
    assert change("lower", offset=0) == ["offset 0, the program has 6 @ lower"]
    assert change("frozen", key="thawed", payload=None) == [
        "the program has no such tensor @ thawed",
        "missing @ frozen",
    ]
    assert problems(with_tensors(old, *tensors, tensors[0])) == [
        f"the name is there twice @ {tensors[0].key}"
    ]
    for nbytes in (8, 16):
        assert problems(replace_storage(old, "frozen", Storage(Lazy(nbytes, list)))) == [
            f"a storage of {nbytes} bytes, the program's has 12 @ frozen"
        ]
    assert change("frozen", key="forward", dtype="float64") == [
        "dtype float64, the program has float32 @ frozen",
        "not a name that a module of torch can have: forward @ forward",
    ]
    assert problems(replace_storage(old, "frozen", None, layout="sparse_coo")) == [
        "a sparse_coo tensor, the program has a strided one @ frozen"
    ]
    assert problems(replace_storage(old, "again.lin.bias", twelve)) == [
        "shares its storage with block.lin.bias in the program, but not here @ again.lin.bias"
    ]
    assert problems(replace(old, sections=(Section("model", "state_dict", tensors),))) == [
        "not the sections of the program @ model"
    ]
    assert problems(replace(old, container=None)) == []


def test_compiled_code_next_to_the_program_is_refused(folder, tmp_path):
    path = with_record(
        str(folder / "old.pt2"), "data/aotinductor/model/code.so", b"\x7fELF", tmp_path / "both.pt2"
    )
    checkpoint = read(path)
    assert len(layout(checkpoint)) == 1
    assert problems(with_weights_of(checkpoint, read(str(folder / "new.pt2")))) == [
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
        read(broken)
    assert message in caught.value.message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"config":[]}', b'{"config":{"a":1}}', b"\xff", b"[" * 99_999]
)
@pytest.mark.parametrize("name", [CONFIG, "data/constants/model_constants_config.json"])
def test_an_invalid_config_is_an_error(linear, tmp_path, name, data):
    with pytest.raises(CkptError, match="is not"):
        read(with_record(linear, name, data, tmp_path / "broken.pt2"))


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
    assert len(read(path).section("").tensors) == 2
    with pytest.raises(CkptError, match="not as torch"):
        names(path)


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
            layout(read(broken))
            names(broken)


def test_a_big_endian_program_is_refused(linear, tmp_path):
    with pytest.raises(CkptError, match="big-endian"):
        read(with_record(linear, "byteorder", b"big", tmp_path / "big.pt2"))


def test_other_archives_are_refused(linear, tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(CkptError, match="holds no exported program"):
        read(str(tmp_path / "weights.pt"))
    with zipfile.ZipFile(tmp_path / "empty.pt2", "w"):
        pass
    with pytest.raises(CkptError, match="holds no exported program"):
        read(str(tmp_path / "empty.pt2"))
    deflated = change_archive(
        linear, lambda _, data: data, tmp_path / "deflated.pt2", zipfile.ZIP_DEFLATED
    )
    with pytest.raises(CkptError, match="is compressed") as caught:
        read(deflated)
    assert "torch.export.save" in caught.value.hint
