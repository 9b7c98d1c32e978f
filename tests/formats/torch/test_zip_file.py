"""The reader and writer of torch zip files, with torch.save and torch.load as the oracles."""

from __future__ import annotations

import argparse
import collections
import enum
import itertools
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch

from ckpttool import Checkpoint, CkptError, Refused, open_checkpoint
from ckpttool.containers.pickle_read import Call, Global, Persistent, loads
from ckpttool.containers.pickle_write import dumps
from ckpttool.containers.tensors import Carried, Rebuilder, kind
from ckpttool.containers.zip_read import read_archive
from ckpttool.containers.zip_write import NewRecord, layout_archive
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Section, Span, Storage, TensorEntry
from ckpttool.core.strides import contiguous_stride
from ckpttool.formats.torch_zip import layout, layout_in_place, of_tensor, read
from command import Run
from crafted_zip import GOOD, crafted, tensor_node
from files import change_archive, write_pieces
from places import DATA
from torch_version import needs_torch

REAL = sorted(DATA.glob("training-*.pt")) + sorted(DATA.glob("weights-*.pt"))


class Foreign:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Stage(enum.Enum):
    WARMUP = 1


def saved(tmp_path: Path, value: Any, **options: Any) -> str:
    path = tmp_path / "saved.pt"
    torch.save(value, path, **options)
    return str(path)


def rewritten(tmp_path: Path, checkpoint: Checkpoint) -> str:
    return write_pieces(layout(checkpoint), tmp_path / "out.pt")


def load(path: str, **options: Any) -> Any:
    return torch.load(path, **{"weights_only": False, "mmap": True, **options})


def with_keys(checkpoint: Checkpoint, path: str, rename: Callable[[str], str]) -> Checkpoint:
    section = checkpoint.section(path)
    renamed = replace(
        section, tensors=tuple(replace(e, key=rename(e.key)) for e in section.tensors)
    )
    return replace(
        checkpoint, sections=tuple(renamed if s is section else s for s in checkpoint.sections)
    )


def fresh(section: Section) -> Checkpoint:
    return Checkpoint("made up", "torch_zip", 0, (section,))


def same(left: Any, right: Any) -> bool:
    """Compare values, types, dtypes, layouts, strides and flags recursively."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and left.is_nested:
        return right.is_nested and all(
            same(a, b) for a, b in zip(left.unbind(), right.unbind(), strict=True)
        )
    if isinstance(left, torch.Tensor):
        flags = [
            (t.dtype, t.shape, t.layout, t.requires_grad, t.is_conj(), t.is_neg())
            for t in (left, right)
        ]
        if flags[0] != flags[1] or left.is_meta:
            return flags[0] == flags[1]
        if (
            left.layout is torch.strided
            and not left.is_quantized
            and left.stride() != right.stride()
        ):
            return False
        if left.is_quantized:
            return left.qscheme() == right.qscheme() and torch.equal(
                left.dequantize(), right.dequantize()
            )
        if left.layout is torch.sparse_coo:
            return same(left._indices(), right._indices()) and same(left._values(), right._values())
        if left.layout is not torch.strided:
            return torch.equal(left.to_dense(), right.to_dense())
        return raw(left) == raw(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dict__") and not isinstance(left, (type, enum.Enum)):
        return same(vars(left), vars(right))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> list[int]:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).tolist() if dense.numel() else []


DTYPES = """
    float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
    complex32 bcomplex32 complex64 complex128
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    bits8 bits16 bits1x8 bits2x4 bits4x2
""".split()  # noqa: SIM905
DTYPES = [name for name in DTYPES if hasattr(torch, name)]


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Return a tensor of any dtype, with irregular bytes."""
    dtype = getattr(torch, name)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    data = (
        torch.arange(nbytes, dtype=torch.uint8) % 2
        if name == "bool"
        else torch.arange(nbytes, dtype=torch.uint8)
    )
    return data.view(dtype).reshape(shape)


BASE = torch.arange(24.0)
PARAMETER = torch.nn.Parameter(torch.ones(2))
PARAMETER_WITH_STATE = torch.nn.Parameter(torch.ones(2))
PARAMETER_WITH_STATE.note = "kept"  # type: ignore[attr-defined]


def tensors() -> dict[str, Any]:
    return {
        **{f"dtype {name}": of_dtype(name, 2, 3) for name in DTYPES},
        **{f"0-dim {name}": of_dtype(name) for name in ("float32", "bool", "int64", "bfloat16")},
        **{
            f"empty {name}": torch.empty(0, 3, dtype=getattr(torch, name))
            for name in ("float32", "float8_e5m2", "bool")
        },
        "transposed": BASE.reshape(4, 6).t(),
        "sliced": BASE[3:9:2],
        "expanded": torch.ones(1).expand(3, 4),
        "negative": torch.complex(BASE, BASE).conj().imag,
        "conjugated": torch.complex(BASE, BASE).conj(),
        "requires grad": torch.ones(2, requires_grad=True),
        "parameter": PARAMETER,
        "parameter with state": PARAMETER_WITH_STATE,
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "sparse csr": torch.eye(3).to_sparse_csr(),
        "sparse csc": torch.eye(4).to_sparse_csc(),
        "sparse bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(BASE, 0.1, 2, torch.qint8),
        "quantized per channel": torch.quantize_per_channel(
            BASE.reshape(2, 12), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "quantized int32": torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint32),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        "jagged": torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged
        ),
        "meta": torch.empty(3, 4, device="meta"),
        "subclass": torch.nn.UninitializedParameter(),
    }


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some kinds are experimental, others deprecated
    TENSORS = tensors()
LAYOUTS = {
    "negative": "neg",
    "conjugated": "conj",
    "sparse": "sparse_coo",
    "sparse csr": "sparse_csr",
    "sparse csc": "sparse_csc",
    "sparse bsr": "sparse_bsr",
    "quantized": "quantized",
    "quantized per channel": "quantized",
    "quantized int32": "quantized",
    "nested": "nested",
    "jagged": "subclass",
    "meta": "meta",
    "subclass": "uninitialized",
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("offset", [3, 4, 5])
def test_a_changed_view_is_written(tmp_path: Path, offset: int, stride: int, size: int) -> None:
    source = read(saved(tmp_path, {"w": BASE[4::2][:3]}))
    section = source.section("")
    entry = replace(section.tensors[0], offset=offset, stride=(stride,), shape=(size,))
    changed = replace(source, sections=(replace(section, tensors=(entry,)),))
    assert same(
        load(rewritten(tmp_path, changed)), {"w": BASE.as_strided((size,), (stride,), offset)}
    )


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_every_kind_are_read_and_renamed(tmp_path: Path, name: str) -> None:
    """Its entry matches torch, and renaming it, in the file or in a new file, keeps the tensor."""
    tensor = TENSORS[name]
    checkpoint = read(saved(tmp_path, {"before": torch.ones(3), "w": tensor, "after": tensor}))
    (section,) = checkpoint.sections
    entry = section.by_key()["w"]
    assert isinstance(entry, TensorEntry)
    assert entry.layout == LAYOUTS.get(name, "strided")
    assert kind(entry) == (
        "torch.nested._internal.nested_tensor._rebuild_njt" if name == "jagged" else entry.layout
    )
    if name not in ("nested", "subclass", "jagged"):
        assert (f"torch.{entry.dtype}", entry.shape) == (str(tensor.dtype), tuple(tensor.shape))
    if entry.storage is not None:
        assert entry.stride == tensor.stride()
        assert entry.offset == tensor.storage_offset()
        assert entry.nbytes == tensor.numel() * tensor.element_size()
    if entry.span is not None:
        with open(entry.span.path, "rb") as file:
            file.seek(entry.span.offset)
            assert list(file.read(entry.span.length)) == raw(tensor)
    assert name in LAYOUTS or entry.span is not None or not tensor.is_contiguous()
    assert section.aliases() == {"after": "w"}
    for changed in (with_keys(checkpoint, "", "x.".__add__), fresh(section)):
        loaded = load(rewritten(tmp_path, changed))
        prefix = "x." if changed.container else ""
        assert list(loaded) == [prefix + key for key in ("before", "w", "after")]
        if name != "subclass":
            assert same(loaded[prefix + "w"], tensor)
        if entry.storage is not None:
            assert loaded[prefix + "after"].data_ptr() == loaded[prefix + "w"].data_ptr()
        assert type(loaded[prefix + "w"]) is type(tensor)


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, stage=Stage.WARMUP, own=Foreign(a=[1])),
        "metrics": {"history": [0.5, 0.25], "note": "best"},
        "loss": torch.tensor(0.5),
        "rng": [torch.ones(3, dtype=torch.uint8), {"cuda": torch.zeros(2)}],
    }


def test_sections_of_a_training_checkpoint_are_recognized(tmp_path: Path) -> None:
    value = training()
    checkpoint = open_checkpoint(saved(tmp_path, value))
    kinds = {section.path: section.kind for section in checkpoint.sections}
    assert kinds == {
        "model": "state_dict",
        "optimizer": "optimizer",
        "rng.1": "state_dict",
        "": "other",
    }
    model = checkpoint.section("model")
    assert [entry.key for entry in model.tensors] == list(value["model"])
    assert dict(model.modules or {}) == dict(value["model"]._metadata)
    optimizer = checkpoint.section("optimizer")
    assert [entry.key for entry in optimizer.tensors][:3] == [
        "state.0.step",
        "state.0.exp_avg",
        "state.0.exp_avg_sq",
    ]
    assert [entry.key for entry in checkpoint.section("").tensors] == ["loss", "rng.0"]
    assert checkpoint.others == ("epoch", "args", "metrics")
    assert checkpoint.globals == ("argparse.Namespace", f"{__name__}.Foreign", f"{__name__}.Stage")


def test_extra_state_is_listed(tmp_path: Path) -> None:
    value = {
        "w": torch.ones(2),
        "w._extra_state": {"scale": torch.ones(1)},
        "version": 3,
        "names": ["a", {"b": None}],
    }
    (section,) = read(saved(tmp_path, value)).sections
    assert {extra.key: extra.value for extra in section.extras} == {
        "w._extra_state": None,
        "version": 3,
        "names": ["a", {"b": None}],
    }


@pytest.mark.parametrize(
    "value", [torch.ones(2), [torch.ones(2), 1], (), {}, 3, {"epoch": 3}, None, {"a": {"b": []}}]
)
def test_files_with_any_root_are_restored(tmp_path: Path, value: Any) -> None:
    path = saved(tmp_path, value)
    checkpoint = read(path)
    assert Path(rewritten(tmp_path, checkpoint)).read_bytes() == Path(path).read_bytes()
    if isinstance(value, dict):
        assert checkpoint.others == tuple(value)


@pytest.mark.parametrize("path", [*REAL, None], ids=lambda path: path.name if path else "training")
def test_renamed_files_load_and_the_inverse_restores_the_bytes(
    tmp_path: Path, path: Path | None
) -> None:
    """So does an unchanged copy, and one with every section rebuilt."""
    is_safe, path = path is not None, path or Path(saved(tmp_path, training()))
    checkpoint = read(str(path))
    assert Path(rewritten(tmp_path, checkpoint)).read_bytes() == path.read_bytes()
    rebuilt = replace(
        checkpoint,
        sections=tuple(
            replace(s, tensors=tuple(map(replace, s.tensors))) for s in checkpoint.sections
        ),
    )
    assert Path(rewritten(tmp_path, rebuilt)).read_bytes() == path.read_bytes()
    section = next(s.path for s in checkpoint.sections if s.kind == "state_dict")
    there = write_pieces(
        layout(with_keys(checkpoint, section, "x.".__add__)), tmp_path / "there.pt"
    )
    back = rewritten(tmp_path, with_keys(read(there), section, lambda key: key.removeprefix("x.")))
    assert Path(back).read_bytes() == path.read_bytes()
    before, after = load(str(path), mmap=False), load(there, weights_only=is_safe)
    if section:
        assert same({**before, section: None}, {**after, section: None})
        before, after = before[section], after[section]
    assert same({"x." + key: value for key, value in before.items()}, dict(after))
    assert after._metadata == before._metadata
    with zipfile.ZipFile(there) as archive:
        assert archive.testzip() is None


class Known(dict):
    def __init__(self, of: torch.Tensor) -> None:
        self.of = of

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Known, (self.of,), None, None, iter(self.items())


@pytest.mark.parametrize(
    "held", [Known(BASE), collections.defaultdict(list), collections.OrderedDict()]
)
def test_arguments_and_items_of_a_mapping_are_listed_once(tmp_path: Path, held: Any) -> None:
    held["deep"] = [torch.ones(2), 3]
    found = read(saved(tmp_path, {"held": held}))
    expected = [2, 24] if type(held) is Known else [2]
    assert (
        sorted(entry.numel for section in found.sections for entry in section.tensors) == expected
    )
    assert not found.unreached
    assert same(load(rewritten(tmp_path, found)), {"held": held})


def test_foreign_classes_need_not_be_installed(tmp_path: Path) -> None:
    path = saved(tmp_path, training())
    renamed = (
        Path(path)
        .read_bytes()
        .replace(__name__.encode() + b"\nForeign", b"x" * len(__name__) + b"\nForeign")
    )
    Path(path).write_bytes(renamed)
    with pytest.raises(CkptError):  # the checksum no longer matches
        read(path)
    archive = read_archive(path)
    name = "saved/data.pkl"
    record = archive.by_name[name]
    fixed = NewRecord(name, renamed[record.data : record.data + record.nbytes])
    path = write_pieces(
        layout_archive(archive, [fixed, *archive.records[1:]]), tmp_path / "foreign.pt"
    )
    out = rewritten(tmp_path, with_keys(read(path), "model", "module.".__add__))
    assert "x" * len(__name__) + ".Foreign" in open_checkpoint(str(out)).globals
    with pytest.raises(ModuleNotFoundError):
        load(out)


def test_storages_with_other_numbers_keep_them(tmp_path: Path) -> None:
    """Old versions of torch named them by address; a new storage gets the first free number."""
    storages = {key: bytes(8) for key in ("5", "1")}
    checkpoint = read(crafted(tmp_path, {key: tensor_node(key=key) for key in storages}, storages))
    out = rewritten(tmp_path, with_keys(checkpoint, "", "w".__add__))
    assert [record.name for record in read_archive(out).records if "/data/" in record.name] == [
        "a/data/5",
        "a/data/1",
    ]
    assert list(load(out)) == ["w5", "w1"]
    for taken, key in ((set[str](), "0"), ({"0"}, "1"), ({"1"}, "2"), ({"2", "3"}, "4")):
        assert Rebuilder(taken=taken).key(computed(torch.ones(1))) == key


@pytest.mark.parametrize("name", ["parameter", "parameter with state", "sparse", "dtype float32"])
@pytest.mark.parametrize("is_param", [True, False])
def test_a_single_tensor_is_written(tmp_path: Path, name: str, is_param: bool) -> None:
    """A tensor becomes a Parameter only if requested, and a Parameter is not wrapped twice."""
    payload = read(saved(tmp_path, {"w": TENSORS[name]})).sections[0].tensors[0].payload
    assert isinstance(payload, Carried)
    found = load(write_pieces(of_tensor(payload, is_param, False), tmp_path / "one.pt"))
    was_param = name.startswith("parameter")
    assert isinstance(found, torch.nn.Parameter) == (is_param or was_param)
    assert was_param or not found.requires_grad
    with zipfile.ZipFile(tmp_path / "one.pt") as archive:
        node = loads(archive.read("archive/data.pkl")).root
    inner = node.args[0] if "_rebuild_parameter" in str(node.func) else node
    assert "_rebuild_parameter" not in str(inner.func)


class DeviceTensor:
    """Pickled like a tensor of a device without storages."""

    def __init__(self, data: Any, dtype: torch.dtype) -> None:
        self.parts = data, dtype

    def __reduce__(self) -> Any:
        how = "cpu_tensor" if isinstance(self.parts[0], torch.Tensor) else "numpy"
        rebuild = getattr(torch._utils, f"_rebuild_device_tensor_from_{how}")
        return rebuild, (*self.parts, "cpu", False)


@pytest.mark.parametrize("data", [torch.ones(2, 3), numpy.ones((2, 3), "float32")])
def test_tensors_of_devices_without_storages_are_renamed(tmp_path: Path, data: Any) -> None:
    path = saved(tmp_path, {"w": DeviceTensor(data, torch.float64)})
    loaded = load(path)["w"]
    (entry,) = read(path).sections[0].tensors
    assert (entry.layout, entry.shape, entry.nbytes) == ("device", tuple(loaded.shape), 48)
    assert (entry.dtype, loaded.dtype) == ("float64", torch.float64)
    out = rewritten(tmp_path, with_keys(read(path), "", "x.".__add__))
    assert torch.equal(load(out)["x.w"], loaded)


def test_tensors_in_a_store_are_compared(tmp_path: Path, run: Run) -> None:
    path = Path(
        saved(
            tmp_path,
            {name: TENSORS[name] for name in ("sparse", "quantized", "meta", "dtype float32")},
        )
    )
    url = f"memory://{tmp_path.name}/saved.pt"
    fsspec.filesystem("memory").pipe(url, path.read_bytes())
    assert run("diff", url, path, "--values").status == 0


def test_a_tensor_of_an_unnamed_class_is_listed(tmp_path: Path) -> None:
    odd = Call(Global("torch._tensor", "_rebuild_from_type_v2"), (3, 4, (tensor_node(),), None))
    (entry,) = read(crafted(tmp_path, {"w": odd}, GOOD)).sections[0].tensors
    assert (entry.layout, kind(entry), entry.nbytes) == ("subclass", "subclass", 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantized", "the scale and the zero point of its values"),
        ("sparse", "the indices of its values"),
        ("nested", "the shapes of its parts"),
        ("sparse csr", "how its values are made of what is stored"),
        (
            "jagged",
            "its class torch.nested._internal.nested_tensor._rebuild_njt, and what each"
            " tensor in it is for",
        ),
    ],
)
def test_the_error_names_what_would_be_lost(
    tmp_path: Path, run: Run, name: str, words: str
) -> None:
    done = run("remap", saved(tmp_path, {"w": TENSORS[name]}), "-o", tmp_path / "out.safetensors")
    assert done.status == 1
    assert f"{words} would be lost @ w" in done.err


def test_a_conjugated_complex32_tensor_is_read(tmp_path: Path, run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = saved(tmp_path, {"w": torch.ones(2, dtype=torch.complex32).conj()})
    (entry,) = read(path).sections[0].tensors
    assert (entry.layout, entry.dtype) == ("conj", "complex32")
    assert isinstance(entry.payload, Carried)
    resolved = entry.payload.resolved(entry)
    assert (resolved.layout, resolved.dtype, resolved.nbytes) == ("strided", "complex32", 8)
    assert run("remap", path, "-o", tmp_path / "out.safetensors").status == 1


def test_a_shared_state_dict_is_several_sections(tmp_path: Path, run: Run) -> None:
    """It stays shared if all copies change alike, and the inverse rename restores the bytes."""
    shared = torch.nn.Linear(2, 3).state_dict()
    path = saved(
        tmp_path,
        {"model": shared, "best": shared, "list": [shared, {"w": torch.ones(1)}], "epoch": 3},
    )
    checkpoint = read(path)
    assert [section.path for section in checkpoint.sections] == [
        "model",
        "best",
        "list.0",
        "list.1",
    ]
    assert checkpoint.others == ("epoch",)
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    assert (
        run(
            "remap",
            path,
            "--rule",
            "{x} => a.{x}",
            "--sections",
            "model,best,list.0",
            "-o",
            there,
            "--verify",
        )[0]
        == 0
    )
    found = load(str(there))
    assert found["model"] is found["best"] is found["list"][0]
    assert list(found["best"]) == ["a.weight", "a.bias"]
    assert (
        run(
            "remap", there, "--rule", "a.{x} => {x}", "--sections", "model,best,list.0", "-o", back
        )[0]
        == 0
    )
    assert back.read_bytes() == Path(path).read_bytes()
    assert (
        run(
            "remap",
            path,
            "--rule",
            "{x} => b.{x}",
            "--sections",
            "best",
            "--force",
            "-o",
            there,
            "--verify",
        )[0]
        == 0
    )
    found = load(str(there))
    assert [list(found[name]) for name in ("model", "best")] == [
        ["weight", "bias"],
        ["b.weight", "b.bias"],
    ]
    assert run("remap", path, "--drop", "best", "--force", "-o", there, "--verify")[0] == 0
    assert list(load(str(there))) == ["model", "list", "epoch"]


def test_a_shared_optimizer_or_module_is_several_sections(tmp_path: Path, run: Run) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.named_parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    own = optimizer.state_dict()
    path = saved(tmp_path, {"module": model, "ema": model, "optimizer": own, "best": own})
    kinds = [(section.path, section.kind, len(section.tensors)) for section in read(path).sections]
    assert kinds == [
        ("module", "state_dict", 2), ("ema", "state_dict", 2), ("optimizer", "optimizer", 2), ("best", "optimizer", 2)
    ]  # fmt: skip
    assert (
        run("remap", path, "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt", "--verify").status
        == 0
    )
    found = load(str(tmp_path / "out.pt"))
    assert list(found["optimizer"]["state"]) == list(found["best"]["state"]) == ["weight", "bias"]
    assert torch.equal(found["ema"].weight, model.weight)


@pytest.mark.parametrize("kind", [dict, list, tuple, Foreign])
def test_a_shared_container_has_sections_at_each_path(tmp_path: Path, run: Run, kind: Any) -> None:
    """For example ``best`` and ``last`` of a training; the object stays shared if both change
    alike.
    """
    parts = {"model": torch.nn.Linear(2, 1).state_dict(), "loose": [torch.ones(3)], "epoch": 3}
    held = kind(**parts) if kind in (dict, Foreign) else kind(parts.values())
    path = saved(tmp_path, {"last": held, "runs": [{"best": held}], "step": 1})
    names = [section.path for section in read(path).sections if section.kind == "state_dict"]
    name = "model" if kind in (dict, Foreign) else "0"
    assert names == [f"last.{name}", f"runs.0.best.{name}"]
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"

    def keys() -> list[list[str]]:
        ends = load(str(there))["last"], load(str(there))["runs"][0]["best"]
        return [
            list(end.model if kind is Foreign else end[name if kind is dict else 0]) for end in ends
        ]

    sections = ("--sections", ",".join(names), "--verify")
    assert run("remap", path, "--rule", "{x} => a.{x}", *sections, "-o", there).status == 0
    found = load(str(there))
    assert found["last"] is found["runs"][0]["best"]
    assert keys() == [["a.weight", "a.bias"]] * 2
    assert run("remap", there, "--rule", "a.{x} => {x}", *sections, "-o", back).status == 0
    assert back.read_bytes() == Path(path).read_bytes()
    assert (
        run("remap", path, "--drop", f"{names[0]}.bias", "-o", there, "--force", "--verify").status
        == 0
    )
    assert keys() == [["weight"], ["weight", "bias"]]


def test_a_cycle_prevents_a_rename_unless_it_is_dropped(tmp_path: Path, run: Run) -> None:
    value: dict[str, Any] = {
        "model": {"w": torch.ones(2)},
        "other": {"w": torch.ones(3)},
        "epoch": 3,
    }
    value["inner"] = {"ema": {"w": torch.ones(1)}, "around": [value], "self": [1]}
    value["inner"]["self"].append(value["inner"])
    path, out = saved(tmp_path, value), tmp_path / "out.pt"
    assert [section.path for section in read(path).sections] == ["model", "other", "inner.ema"]
    status, output = run(
        "remap", path, "--rule", "{x} => a.{x}", "--sections", "model", "-o", out
    ).said
    assert status == 1
    assert "refers back to a container around it @ inner.around.0" in output
    assert "inner.self" not in output
    status, output = run(
        "remap", path, "--rule", "{x} => a.{x}", "--sections", "inner.ema", "-o", out
    ).said
    assert status == 1
    assert "@ inner.around.0" in output
    assert "@ inner.self.1" in output
    rest = ("--drop", "inner.around", "--drop", "inner.self", "-o", out, "--verify")
    assert run("remap", path, "--rule", "{x} => a.{x}", "--sections", "model", *rest).status == 0
    assert [list(load(str(out))[name]) for name in ("model", "other")] == [["a.w"], ["w"]]


def test_the_number_of_repeated_sections_is_limited(tmp_path: Path) -> None:
    shared = {f"k{number}": torch.ones(1) for number in range(100)}
    checkpoint = read(saved(tmp_path, {"list": [shared] * 2000}))
    assert [section.path for section in checkpoint.sections] == [
        f"list.{number}" for number in range(101)
    ]
    assert len(checkpoint.others) == 1899
    assert checkpoint.notes == (
        "from list.101 on, a section at several places is listed at one of them",
    )


def test_new_module_versions_are_written(tmp_path: Path) -> None:
    checkpoint = read(saved(tmp_path, training()))
    section = checkpoint.section("model")
    for modules in ({"": {"version": 7}, "new": {"version": 2}}, None, {}, {"": None}):
        changed = replace(section, modules=modules)
        sections = tuple(changed if s is section else s for s in checkpoint.sections)
        loaded = load(rewritten(tmp_path, replace(checkpoint, sections=sections)))["model"]
        expected = (
            None if modules is None else {path: payload or {} for path, payload in modules.items()}
        )
        assert getattr(loaded, "_metadata", None) == expected


def test_dropped_tensors_are_removed_with_their_storages(tmp_path: Path) -> None:
    path = saved(tmp_path, training())
    checkpoint = read(path)
    model = checkpoint.section("model")
    smaller = replace(
        checkpoint, sections=(replace(model, tensors=model.tensors[1:]),), others=("epoch",)
    )
    out = rewritten(tmp_path, smaller)
    loaded = load(out)
    assert list(loaded) == ["model", "epoch", "rng"]
    assert loaded["rng"] == []
    assert list(loaded["model"]) == [entry.key for entry in model.tensors[1:]]
    with zipfile.ZipFile(out) as archive:
        assert sum("/data/" in name for name in archive.namelist()) == len(model.tensors) - 1


def test_entries_are_written_in_order(tmp_path: Path) -> None:
    value = collections.OrderedDict(a=torch.ones(1), version=3, b=torch.ones(2), c=torch.ones(3))
    checkpoint = read(saved(tmp_path, value))
    (section,) = checkpoint.sections
    backwards = replace(checkpoint, sections=(replace(section, tensors=section.tensors[::-1]),))
    assert list(load(rewritten(tmp_path, backwards))) == ["c", "version", "b", "a"]


def computed(values: torch.Tensor) -> Storage:
    data = bytes(raw(values))
    return Storage(Lazy(len(data), lambda: [data[:5], data[5:]]))


def test_computed_tensors_are_written(tmp_path: Path) -> None:
    checkpoint = read(saved(tmp_path, training()))
    model = checkpoint.section("model")
    new = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    first = TensorEntry("0.weight", "float32", (3, 4), (4, 1), 0, computed(new))
    half = TensorEntry(
        "0.half", "float8_e5m2", (3,), (1,), 0, computed(torch.ones(3, dtype=torch.float8_e5m2))
    )
    shared = replace(first, key="0.tied", shape=(4, 3), stride=(1, 4))
    changed = replace(model, tensors=(first, half, shared, *model.tensors[1:]))
    out = rewritten(tmp_path, replace(checkpoint, sections=(changed, *checkpoint.sections[1:])))
    loaded = load(out)["model"]
    assert same(loaded["0.weight"], new)
    assert same(loaded["0.tied"], new.t())
    assert loaded["0.half"].dtype == torch.float8_e5m2
    assert same(loaded["0.bias"], training()["model"]["0.bias"])
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("dtype", ["complex64", "float32", "uint8", "uint16"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_views_of_other_dtypes_are_written_next_to_their_tensor(
    tmp_path: Path, dtype: str, order: tuple[int, ...]
) -> None:
    """Torch uses the first reference to a storage for all; copied tensors keep their own
    reference.
    """
    data = torch.arange(16, dtype=torch.uint8)
    source = read(saved(tmp_path, {"w": data.view(getattr(torch, dtype)), "b": torch.ones(2)}))
    (section,) = source.sections
    whole, other = section.tensors
    views = [TensorEntry(name, name, (4,), (1,), 0, whole.storage) for name in ("float32", "int32")]
    tensors = [(whole, *views)[at] for at in order]
    section = replace(section, tensors=(*tensors, other))
    for changed in (replace(source, sections=(section,)), fresh(section)):
        found = load(rewritten(tmp_path, changed))
        assert all(raw(found[entry.key]) == data.tolist() for entry in tensors)
        again = read(rewritten(tmp_path, changed)).sections[0].tensors
        assert [(entry.key, entry.dtype) for entry in again] == [
            (e.key, e.dtype) for e in section.tensors
        ]
        assert [str(found[entry.key].dtype) for entry in again] == [
            f"torch.{e.dtype}" for e in section.tensors
        ]


def test_views_of_a_new_storage_in_several_dtypes_are_written(tmp_path: Path) -> None:
    data = torch.arange(16, dtype=torch.uint8)
    storage = computed(data)
    dtypes = ("float32", "int32", "complex64")
    entries = tuple(
        TensorEntry(name, name, (16 // of_dtype(name).itemsize,), (1,), 0, storage)
        for name in dtypes
    )
    found = load(rewritten(tmp_path, fresh(Section("", "state_dict", entries))))
    assert [(str(tensor.dtype), raw(tensor)) for tensor in found.values()] == [
        (f"torch.{name}", data.tolist()) for name in dtypes
    ]
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


def test_references_with_different_dtypes_are_refused(tmp_path: Path) -> None:
    """Torch loads both with the dtype of the first, or since 2.15 each with its own."""
    kinds = {"FloatStorage": torch.float32, "IntStorage": torch.int32}
    for first, second in (kinds, reversed(kinds)):
        path = crafted(
            tmp_path, {"w": tensor_node(kind=first), "again": tensor_node(kind=second)}, GOOD
        )
        assert load(path)["again"].dtype in kinds.values()
        words = [str(kinds[name]).removeprefix("torch.") for name in (first, second)]
        with pytest.raises(
            CkptError, match="storage 0 is one of {} and of {}".format(*words)
        ) as caught:
            read(path)
        assert [problem.key for problem in caught.value.problems] == ["again"]


def test_a_computed_tensor_in_an_optimizer_is_written(tmp_path: Path) -> None:
    checkpoint = read(saved(tmp_path, training()))
    optimizer = checkpoint.section("optimizer")
    index = next(i for i, entry in enumerate(optimizer.tensors) if entry.key == "state.1.exp_avg")
    entry = replace(
        optimizer.tensors[index], storage=computed(torch.tensor([7.0, 8.0, 9.0])), payload=None
    )
    tensors = (*optimizer.tensors[:index], entry, *optimizer.tensors[index + 1 :])
    sections = tuple(
        replace(s, tensors=tensors) if s is optimizer else s for s in checkpoint.sections
    )
    loaded = load(rewritten(tmp_path, replace(checkpoint, sections=sections)))["optimizer"]
    assert loaded["state"][1]["exp_avg"].tolist() == [7, 8, 9]
    assert loaded["param_groups"] == training()["optimizer"]["param_groups"]


def test_changes_of_sections_are_refused(tmp_path: Path) -> None:
    checkpoint = read(saved(tmp_path, [torch.ones(1)]))
    with pytest.raises(Refused, match="only the keys of state dicts"):
        layout(with_keys(checkpoint, "", "x.".__add__))
    with pytest.raises(Refused, match="nothing would be left"):
        layout(replace(read(saved(tmp_path, {"w": torch.ones(1)})), sections=()))
    for value, path in ({"w": torch.ones(1)}, "more"), ({"m": {"w": torch.ones(1)}}, ""):
        checkpoint = read(saved(tmp_path, value))
        with pytest.raises(Refused, match="cannot be added") as caught:
            layout(
                replace(
                    checkpoint, sections=(*checkpoint.sections, Section(path, "state_dict", ()))
                )
            )
        assert [problem.key for problem in caught.value.problems] == [path or "(root)"]


def plain(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """Return entries over a raw file, like the reader of another format."""
    path.write_bytes(b"".join(bytes(raw(tensor)) for tensor in tensors.values()))
    entries, offset = [], 0
    for key, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        storage = Storage(Span(str(path), offset, nbytes))
        entries.append(
            TensorEntry(
                key,
                str(tensor.dtype).removeprefix("torch."),
                shape,
                contiguous_stride(shape),
                0,
                storage,
            )
        )
        offset += nbytes
    return tuple(entries)


def test_the_layout_of_a_new_file_matches_torch(tmp_path: Path) -> None:
    needs_torch("2.7", "the layout that is written")
    tensors = {f"layer.{name}": of_dtype(name, 2, 3) for name in DTYPES}
    entries = plain(tmp_path / "raw", tensors)
    out = rewritten(
        tmp_path, fresh(Section("", "state_dict", entries, modules={"": {"version": 1}}))
    )
    like = collections.OrderedDict(tensors)
    like._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    torch.save(like, tmp_path / "archive.pt")
    with zipfile.ZipFile(out) as found, zipfile.ZipFile(tmp_path / "archive.pt") as expected:
        assert found.namelist() == expected.namelist()
        for name in found.namelist():
            if "serialization_id" in name:
                assert len(found.read(name)) == len(expected.read(name))
            elif "data.pkl" not in name:
                assert found.read(name) == expected.read(name)
            else:
                assert same(references_in(found.read(name)), references_in(expected.read(name)))
    assert same(dict(load(out, weights_only=True)), tensors)


def references_in(data: bytes) -> list[str]:
    references: list[Persistent] = []
    dumps(loads(data), references)
    return [str(reference.id) for reference in references]


def test_a_new_file_with_unusual_keys_is_loaded(tmp_path: Path) -> None:
    keys = [
        "",
        "a b",
        "ü.日本",
        "foo@1.w",
        ".",
        "a\nb",
        "\U0001f600",
        *(f"layers.{i}.weight" for i in range(2_100)),
    ]
    storage = Storage(Lazy(4, lambda: [bytes(4)]))
    entries = tuple(TensorEntry(key, "float32", (1,), (1,), 0, storage) for key in keys)
    out = rewritten(tmp_path, fresh(Section("", "state_dict", entries)))
    assert list(load(out, weights_only=True)) == keys
    assert [entry.key for entry in read(out).sections[0].tensors] == keys


def test_a_new_file_with_several_sections_is_loaded(tmp_path: Path) -> None:
    one, two = plain(tmp_path / "raw", {"w": torch.ones(2), "v": torch.zeros(3)})
    extra = ExtraEntry("version", value={"a": [1, "b"]})
    sections = (
        Section("model", "state_dict", (one,), (extra,)),
        Section("ema", "state_dict", (two,)),
    )
    loaded = load(
        rewritten(tmp_path, Checkpoint("made up", "torch_zip", 0, sections)), weights_only=True
    )
    assert same(
        {key: dict(value) for key, value in loaded.items()},
        {"model": {"w": torch.ones(2), "version": {"a": [1, "b"]}}, "ema": {"v": torch.zeros(3)}},
    )
    root, inner = Section("", "state_dict", (one,)), sections[1]
    for parts, keys in ((inner,), ["ema"]), ((root, inner), ["w", "ema"]):
        loaded = load(rewritten(tmp_path, Checkpoint("made up", "torch_zip", 0, parts)))
        assert (list(loaded), list(loaded["ema"])) == (keys, ["v"])


def test_the_first_storages_have_the_same_position_as_in_torch(tmp_path: Path) -> None:
    """In a file without storages: before the version record, or at the end if the file has no
    version.
    """
    (new,) = plain(tmp_path / "raw", {"w": torch.ones(2)})
    archive = read_archive(saved(tmp_path, torch.nn.ReLU().state_dict()))
    for without in ((), ("saved/version",)):
        kept = [record for record in archive.records if record.name not in without]
        source = read(write_pieces(layout_archive(archive, kept), tmp_path / "source.pt"))
        section = replace(source.section(""), tensors=(new,))
        out = rewritten(tmp_path, replace(source, sections=(section,)))
        names = [record.name for record in read_archive(out).records]
        behind = names[names.index("saved/data/0") + 1 :]
        assert behind == ([] if without else ["saved/version", "saved/.data/serialization_id"])
        assert without or torch.equal(load(out)["w"], torch.ones(2))  # torch needs the version


def test_new_entries_of_a_state_dict_are_appended(tmp_path: Path) -> None:
    (new,) = plain(tmp_path / "raw", {"new": torch.ones(2)})
    value = {"_extra_state": [1], "w": torch.ones(2), "n": 3, "v": torch.ones(1)}
    source = read(saved(tmp_path, value))
    section = source.section("")
    changed = replace(
        section,
        tensors=(*section.tensors, new),
        extras=(*section.extras, ExtraEntry("more", value=[2])),
    )
    found = load(rewritten(tmp_path, replace(source, sections=(changed,))))
    assert list(found) == ["_extra_state", "w", "n", "v", "new", "more"]
    assert found["more"] == [2]
    fewer = replace(section, tensors=section.tensors[1:], extras=section.extras[1:])
    assert list(load(rewritten(tmp_path, replace(source, sections=(fewer,))))) == ["n", "v"]


@pytest.mark.parametrize(("depth", "fits"), [(150, True), (190, True), (210, False), (400, False)])
def test_nested_objects_are_moved_or_refused(tmp_path: Path, depth: int, fits: bool) -> None:
    nested: list[Any] = [torch.ones(1)]
    for _ in range(depth):
        nested = [nested]
    (section,) = read(saved(tmp_path, {"w": torch.ones(2), "_extra_state": nested})).sections
    if fits:
        assert same(load(rewritten(tmp_path, fresh(section)))["_extra_state"], nested)
    else:
        with pytest.raises(CkptError, match="nested too deep to be moved"):
            layout(fresh(section))


def test_a_new_file_contains_extra_state(tmp_path: Path) -> None:
    value = {
        "w": torch.ones(2),
        "w._extra_state": {"scale": torch.ones(1), "who": argparse.Namespace(a=1)},
    }
    (section,) = read(saved(tmp_path, value)).sections
    assert same(dict(load(rewritten(tmp_path, fresh(section)))), value)


def test_a_new_file_refuses_unsupported_entries(tmp_path: Path) -> None:
    section = Section(
        "", "state_dict", (TensorEntry("w", "float32", (1,), (), 0, None, "sparse_coo"),)
    )
    with pytest.raises(Refused, match="sparse_coo"):
        layout(fresh(section))
    with pytest.raises(Refused, match="not everything fits"):
        layout(replace(fresh(Section("", "state_dict", ())), others=("epoch",)))
    with pytest.raises(Refused, match="not everything fits") as caught:
        layout(fresh(Section("adam", "optimizer", ())))  # too large to be split
    assert [problem.key for problem in caught.value.problems] == ["adam"]
    for extra in (ExtraEntry("x", object(), 3), ExtraEntry("x", None, b"3")):
        with pytest.raises(Refused, match="an object of another format cannot be written @ x"):
            layout(fresh(Section("", "state_dict", (), (extra,))))
    assert layout_in_place(fresh(Section("", "state_dict", ()))) is None


@pytest.mark.parametrize("order", ["kept", "reversed", "dropped", "grown"])
def test_torch_finds_storages_without_reading_headers(
    tmp_path: Path, order: str, monkeypatch: Any
) -> None:
    """Torch may compute storage offsets from the layout; its debug variable makes it verify
    them.
    """
    needs_torch("2.7", "offsets of storages from the layout")
    checkpoint = read(saved(tmp_path, {f"w{i}": torch.full((i + 1,), float(i)) for i in range(8)}))
    (section,) = checkpoint.sections
    tensors = {
        "kept": section.tensors,
        "reversed": section.tensors[::-1],
        "dropped": section.tensors[1:5] + section.tensors[6:],
        "grown": (
            *section.tensors[:4],
            replace(section.tensors[4], storage=computed(torch.ones(5)), payload=None),
        ),
    }[order]
    renamed = tuple(replace(entry, key="x." + entry.key) for entry in tensors)
    out = rewritten(tmp_path, replace(checkpoint, sections=(replace(section, tensors=renamed),)))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    config: Any = import_module("torch.utils.serialization").config
    with config.patch("load.calculate_storage_offsets", True):
        assert [len(t) for t in load(out).values()] == [entry.shape[0] for entry in tensors]
        assert [len(t) for t in load(out, mmap=False).values()] == [
            entry.shape[0] for entry in tensors
        ]
    assert [len(t) for t in load(out, map_location="meta").values()] == [
        entry.shape[0] for entry in tensors
    ]
    with zipfile.ZipFile(out) as archive:
        assert "saved/.format_version" in archive.namelist()  # storages are renumbered if necessary


def test_attributes_of_a_state_dict_are_kept(tmp_path: Path, run: Run) -> None:
    """Attributes of the OrderedDict other than torch's ``_metadata``, which is renamed with the
    modules.
    """
    state: Any = torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict()
    state.note = "own"
    path = saved(tmp_path, state)
    assert run("remap", path, "--rule", "0.{x} => a.{x}", "-o", tmp_path / "out.pt").status == 0
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert (list(found), found.note) == (["a.weight", "a.bias"], "own")
    assert list(found._metadata) == ["", "a"]
    assert list(vars(found)) == list(vars(state)) == ["_metadata", "note"]
    assert (
        run(
            "remap", tmp_path / "out.pt", "--rule", "a.{x} => 0.{x}", "-o", tmp_path / "back.pt"
        ).status
        == 0
    )
    assert (tmp_path / "back.pt").read_bytes() == Path(path).read_bytes()


def test_another_storage_alignment_is_kept(tmp_path: Path) -> None:
    needs_torch("2.7", "another alignment of storages")
    config: Any = import_module("torch.utils.serialization").config
    with config.patch("save.storage_alignment", 4096):
        path = saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    out = rewritten(tmp_path, with_keys(read(path), "", "a.much.longer.name.".__add__))
    assert all(record.data % 4096 == 0 for record in read_archive(out).records)
    assert len(load(out)) == 2


@pytest.mark.parametrize("text", [b"0", b"-64", b"65537", b"9" * 30])
def test_an_invalid_alignment_is_replaced_with_the_default(tmp_path: Path, text: bytes) -> None:
    path = saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    archive, name = read_archive(path), "saved/.storage_alignment"
    others = [
        NewRecord(name, text) if record.name == name else record for record in archive.records
    ]
    path = write_pieces(layout_archive(archive, others), tmp_path / "other.pt")
    out = rewritten(tmp_path, with_keys(read(path), "", "a.much.longer.name.".__add__))
    assert all(
        record.data % 64 == 0 for record in read_archive(out).records if "/data/" in record.name
    )
    assert len(load(out)) == 2


# Bad input


def rebuilt(kind: str, *args: Any) -> Call:
    return Call(Global("torch._utils", f"_rebuild_{kind}"), args)


def wrapped(depth: int) -> Call:
    node = tensor_node()
    for _ in range(depth):
        node = rebuilt("parameter", node, True, None)
    return node


NO_STORAGE = "meta_tensor_no_storage"
FROM_NUMPY = "device_tensor_from_numpy"
# The tensor, the storages, and a part of the error
WRONG: dict[str, tuple[Any, dict[str, bytes], str]] = {
    "missing storage": (tensor_node(key="7"), GOOD, "storage 7 is missing"),
    "storage too small": (
        tensor_node(numel=3, size=(3,)),
        GOOD,
        "storage 0 is 8 bytes, its tensors say 12",
    ),
    "storage too large": (
        tensor_node(numel=2),
        {"0": bytes(100)},
        "storage 0 is 100 bytes, its tensors say 8",
    ),
    "storage too large by 16 bytes": (
        tensor_node(),
        {"0": bytes(24)},
        "storage 0 is 24 bytes, its tensors say 8",
    ),
    "tensor too large": (tensor_node(size=(3,)), GOOD, "reaches element 2 of a storage of 2"),
    "offset out of range": (tensor_node(offset=1), GOOD, "reaches element 2 of a storage of 2"),
    "stride out of range": (tensor_node(stride=(2,)), GOOD, "reaches element 2 of a storage of 2"),
    "negative size": (tensor_node(size=(-1,)), GOOD, "sizes (-1,)"),
    "negative stride": (tensor_node(offset=1, stride=(-1,)), GOOD, "sizes (-1,)"),
    "negative offset": (tensor_node(offset=-1), GOOD, "offset -1, shape (2,), strides (1,)"),
    "offset of another type": (
        tensor_node(offset="0"),
        GOOD,
        "offset '0', shape (2,), strides (1,)",
    ),
    "offset that is a bool": (
        tensor_node(offset=False),
        GOOD,
        "offset False, shape (2,), strides (1,)",
    ),
    "more strides than sizes": (
        tensor_node(stride=(1, 1)),
        GOOD,
        "offset 0, shape (2,), strides (1, 1)",
    ),
    "one dimension too many": (
        tensor_node(size=(1,) * 65, stride=(1,) * 65),
        GOOD,
        "tuple where sizes have to be",
    ),
    "a size beyond torch's limit": (
        tensor_node(size=(2**63,), stride=(0,)),
        GOOD,
        "sizes that no tensor has",
    ),
    "sizes of another call": (
        tensor_node(size=Call(Global("torch", "Other"), ((2,),))),
        GOOD,
        "Call where sizes",
    ),
    "negative number of elements": (tensor_node(numel=-2), GOOD, "a storage reference"),
    "sizes and strides differ": (
        tensor_node(size=(1, 1)),
        GOOD,
        "offset 0, shape (1, 1), strides (1,)",
    ),
    "huge sizes": (tensor_node(size=(2**62, 2**62), stride=(0, 1)), GOOD, "of a storage of 2"),
    "sizes of another type": (tensor_node(size="ab"), GOOD, "str where sizes have to be"),
    "a bool as size": (tensor_node(size=(True,)), GOOD, "sizes (True,)"),
    "unknown storage class": (
        tensor_node(kind="OddStorage"),
        GOOD,
        "a storage of class OddStorage",
    ),
    "storage key of another type": (tensor_node(key=("a",)), GOOD, "a storage reference"),
    "no arguments": (
        rebuilt("tensor_v2"),
        GOOD,
        "the arguments of torch._utils._rebuild_tensor_v2",
    ),
    "not a storage": (rebuilt("tensor_v2", 1, 2, 3, 4, 5, 6), GOOD, "a storage reference"),
    "parameter of a number": (
        rebuilt("parameter", 1, True, None),
        GOOD,
        "int where a tensor has to be",
    ),
    "parameter of parameter of ...": (wrapped(5000), GOOD, "Call where a tensor has to be"),
    "sparse tensor of a number": (
        rebuilt("sparse_tensor", 1, (2, 3, 4)),
        GOOD,
        "the arguments of torch._utils._rebuild_sparse_tensor",
    ),
    "not a dtype": (
        rebuilt(NO_STORAGE, Global("os", "system"), (1,), (1,), False),
        GOOD,
        "os.system where a dtype has to be",
    ),
    "unknown dtype": (
        rebuilt(NO_STORAGE, Global("torch", "float3"), (1,), (1,), False),
        GOOD,
        "torch.float3 where a dtype has to be",
    ),
    "array of a device without a shape": (
        rebuilt(FROM_NUMPY, Call(Global("numpy", "a"), ()), Global("torch", "int8"), "xla"),
        GOOD,
        f"the arguments of torch._utils._rebuild_{FROM_NUMPY}",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused(tmp_path: Path, name: str) -> None:
    node, storages, words = WRONG[name]
    with pytest.raises(CkptError) as caught:
        read(crafted(tmp_path, {"w": node}, storages))
    (problem,) = caught.value.problems
    assert problem.key == "w"
    assert words in problem.problem


@pytest.mark.parametrize(
    "reference", [("storage", Global("torch", "FloatStorage"), "9", "cpu", 2), ("else",), "text"]
)
def test_references_to_missing_storages_are_refused(tmp_path: Path, reference: Any) -> None:
    """Objects that are copied without being read may refer to them."""
    checkpoint = read(crafted(tmp_path, {"w": tensor_node(), "own": [Persistent(reference)]}, GOOD))
    for changed in (with_keys(checkpoint, "", str.upper), fresh(checkpoint.sections[0])):
        with pytest.raises(CkptError):
            layout(changed)


@pytest.mark.parametrize(
    ("numels", "fits"), [((2, 1), True), ((1, 2), True), ((2, 3), False), ((1, 3), False)]
)
def test_references_with_different_lengths_are_read_or_refused(
    tmp_path: Path, numels: tuple[int, int], fits: bool
) -> None:
    nodes = {str(at): tensor_node(numel=numel, size=(1,)) for at, numel in enumerate(numels)}
    path = crafted(tmp_path, nodes, GOOD)
    if fits:
        assert [entry.nbytes for entry in read(path).sections[0].tensors] == [4, 4]
    else:
        with pytest.raises(CkptError, match="storage 0 is 8 bytes, not 12"):
            read(path)


MALICIOUS: dict[str, Any] = {
    "a list": [[[], 1]],
    "a large tuple": [[tuple(range(101)), 1]],
    "a pair of three": [["a", 1, 2]],
    "a number": 3,
    "words": ["ab"],
}


@pytest.mark.parametrize("name", MALICIOUS)
@pytest.mark.parametrize("kind", ["OrderedDict", "defaultdict", "Counter"])
def test_mappings_with_invalid_arguments_are_copied(tmp_path: Path, name: str, kind: str) -> None:
    args = (
        (Global("builtins", "list"), MALICIOUS[name])
        if kind == "defaultdict"
        else (MALICIOUS[name],)
    )
    path = crafted(
        tmp_path, {"m": Call(Global("collections", kind), args), "s": {"w": tensor_node()}}, GOOD
    )
    checkpoint = read(path)
    assert ([section.path for section in checkpoint.sections], checkpoint.others) == (["s"], ("m",))
    out = rewritten(tmp_path, with_keys(checkpoint, "s", str.upper))
    with zipfile.ZipFile(out) as archive:
        node = loads(archive.read("a/data.pkl")).root["m"]
    assert (node.args, node.pairs) == (args, None)


def test_valid_tensors_are_read(tmp_path: Path) -> None:
    path = crafted(tmp_path, {"w": tensor_node(), "p": wrapped(2)}, GOOD)
    assert [entry.nbytes for entry in read(path).sections[0].tensors] == [8, 8]
    assert load(path)["w"].tolist() == [0, 0]


def test_archives_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    for records, words in (
        ({"a/other": b""}, "0 records are called NAME/data.pkl, not one"),
        ({"a/data.pkl": b"N.", "b/data.pkl": b"N."}, "2 records are called NAME/data.pkl, not one"),
        ({"a/b/data.pkl": b"N."}, "0 records are called NAME/data.pkl, not one"),
        ({"a/data.pkl": b"N.more"}, "4 bytes follow the pickle"),
        ({"a/data.pkl": b"N.", "a/constants.pkl": b"N."}, "it is a TorchScript archive"),
    ):
        path = write_pieces(
            layout_archive(None, [NewRecord(k, v) for k, v in records.items()]), tmp_path / "x.pt"
        )
        with pytest.raises(CkptError, match=words):
            read(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="little-endian"):
        read(crafted(tmp_path, {"w": tensor_node()}, GOOD, byteorder=b"big"))


def test_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = change_archive(
        saved(tmp_path, {"w": torch.ones(100)}), lambda _, data: data, method=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(CkptError, match="compressed") as caught:
        read(path)
    assert "zip -0" in caught.value.hint


def test_cyclic_and_exponential_structures_are_read_once(tmp_path: Path) -> None:
    """Cycles, and lists that contain the previous list twice: each object is read once."""
    cycle: dict[str, Any] = {"w": tensor_node()}
    cycle["me"] = {"deep": [cycle]}
    laughs: list[Any] = [tensor_node()]
    for _ in range(100):
        laughs = [laughs, laughs]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    checkpoint = read(crafted(tmp_path, [cycle, laughs, deep], GOOD))
    assert [len(section.tensors) for section in checkpoint.sections] == [1, 1]


def test_too_many_shared_parts_are_refused(tmp_path: Path) -> None:
    parts = [0] * 20_000
    packed = {
        str(number): Call(
            Global("torch._tensor", "_rebuild_from_type_v2"),
            (Global("a", "b"), Global("a", "b"), (parts,), (parts, number)),
        )
        for number in range(5000)
    }
    with pytest.raises(CkptError, match="too many parts"):
        read(crafted(tmp_path, packed, {}))
