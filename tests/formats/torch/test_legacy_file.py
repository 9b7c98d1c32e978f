"""Files of torch.save before 1.6, with torch.load as the oracle; old and malicious files are built
by hand.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch._utils import _rebuild_tensor, _rebuild_tensor_v2

import ckpttool
from ckpttool import CkptError, open_checkpoint
from command import Run
from places import DATA
from surroundings import limited

MAGIC = 0x1950A86A20F9469CFC6C


def saved(value: object, path: Path, **kwargs) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=False, **kwargs)
    return str(path)


def everything() -> dict[str, torch.Tensor]:
    whole = torch.arange(12.0).reshape(3, 4)
    names = (
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
    )
    return {
        **{name: torch.ones(3, dtype=getattr(torch, name)) for name in names},
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "whole": whole,
        "tied": whole,
        "strided": whole.t(),
        "row": whole[1],
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "a@1.b c.ü": torch.ones(1),
        "": torch.ones(1),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor)
        assert (type(found[key]), found[key].dtype, found[key].stride(), found[key].storage_offset()) == (
            type(tensor), tensor.dtype, tensor.stride(), tensor.storage_offset()
        )  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_index_matches_torch(tmp_path, protocol):
    path = saved(everything(), tmp_path / "old.pt", pickle_protocol=protocol)
    assert open_checkpoint(path).format == "torch_legacy"
    checkpoint = open_checkpoint(path)
    (section,) = checkpoint.sections
    loaded = torch.load(path, weights_only=False)
    assert [entry.key for entry in section.tensors] == list(loaded)
    for entry in section.tensors:
        tensor = loaded[entry.key]
        assert (entry.dtype, entry.shape, entry.stride, entry.offset) == (
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )  # fmt: skip
        if entry.span is not None and tensor.numel():
            raw = Path(path).read_bytes()[entry.span.offset :][: entry.span.length]
            assert (
                raw == bytes(tensor.detach().contiguous().view(torch.uint8).flatten())
                if tensor.dim()
                else True
            )
    assert section.aliases() == {"tied": "whole"}
    assert (
        len(
            {id(e.storage) for e in section.tensors if e.key in ("whole", "tied", "strided", "row")}
        )
        == 1
    )


def converted(path: str, out: Path) -> str:
    ckpttool.convert(path, str(out), keep_pickled_code=True, no_fsync=True)
    return str(out)


def test_conversion_to_a_zip_file_keeps_the_tensors(tmp_path):
    path = saved(everything(), tmp_path / "old.pt")
    out = converted(path, tmp_path / "new.pt")
    assert open_checkpoint(out).format == "torch_zip"
    found = torch.load(out, weights_only=True)
    assert_same(found, everything())
    assert found["tied"].data_ptr() == found["whole"].data_ptr()
    assert found["row"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert torch.load(out, weights_only=True, mmap=True)["whole"][2, 3] == 11


def test_conversion_keeps_all_entries_of_a_training_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
        "args": argparse.Namespace(lr=0.1), "module": nn.Linear(2, 2), "storage": torch.ones(3).untyped_storage(),
    }  # fmt: skip
    path = saved(state, tmp_path / "old.pt")
    checkpoint = open_checkpoint(path)
    assert {s.path: s.kind for s in checkpoint.sections if s.path in ("model", "optimizer")} == {
        "model": "state_dict", "optimizer": "optimizer"
    }  # fmt: skip
    assert "argparse.Namespace" in open_checkpoint(path).globals
    found = torch.load(converted(path, tmp_path / "new.pt"), weights_only=False)
    assert_same(found["model"], state["model"])
    assert found["model"]._metadata == state["model"]._metadata
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert torch.equal(
        found["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"]
    )
    assert (found["epoch"], found["args"]) == (3, argparse.Namespace(lr=0.1))
    assert torch.equal(found["module"].weight, state["module"].weight)
    assert found["storage"].tolist() == state["storage"].tolist()


def test_a_file_of_torch_2_5_equals_its_zip_file(run: Run, tmp_path: Path) -> None:
    old = open_checkpoint(str(DATA / "legacy-torch-2.5.1.pt")).section("")
    new = open_checkpoint(str(DATA / "weights-torch-2.5.1.pt")).section("")
    assert [e.key for e in old.tensors] == [e.key for e in new.tensors]
    assert list(old.modules or ()) == list(new.modules or ())
    assert old.aliases() == new.aliases()
    both = [DATA / f"{name}-torch-2.5.1.pt" for name in ("legacy", "weights")]
    assert run("diff", "--values", *both).status == 0
    options = ("--keep-aliases", "--verify", "--rule", "mix.{x*} => mixed.{x*}")
    for out in ("w.safetensors", "w.pt"):
        assert (
            run("remap", DATA / "legacy-torch-2.5.1.pt", "-o", tmp_path / out, *options).status == 0
        )
    assert "mixed.0.weight" in torch.load(tmp_path / "w.pt", weights_only=True)


def test_large_pickles_are_read_completely(tmp_path):
    state = {f"layer.{index}.weight": torch.tensor(float(index)) for index in range(12_000)}
    path = saved(state, tmp_path / "many.pt")
    assert [e.key for e in open_checkpoint(path).section("").tensors] == list(state)
    for most in (1 << 17, 1 << 18, 200_000):
        with limited(pickle_bytes=most), pytest.raises(CkptError, match="damaged pickle"):
            open_checkpoint(path)


# Files built by hand


class Ref:
    def __init__(self, *reference: object) -> None:
        self.reference = reference


class Pickler(pickle.Pickler):
    def persistent_id(self, node: object) -> object:
        return node.reference if type(node) is Ref else None


class Rebuilt:
    def __init__(self, func, *args) -> None:
        self.call = (func, args)

    def __reduce__(self):
        return self.call


def built(root: object, keys: object, *storages: bytes, protocol: object = 1001) -> bytes:
    out = io.BytesIO()
    for value in (MAGIC, protocol, {"little_endian": True}):
        pickle.dump(value, out, protocol=2)
    Pickler(out, protocol=2).dump(root)
    pickle.dump(keys, out, protocol=2)
    return out.getvalue() + b"".join(storages)


def storage(numel: int, data: bytes) -> bytes:
    return struct.pack("<q", numel) + data


FOUR = storage(4, struct.pack("<4f", 0, 1, 2, 3))


def reference(
    key: object = "7", numel: object = 4, view: object = None, kind: type = torch.FloatStorage
) -> Ref:
    return Ref("storage", kind, key, "cpu", numel, view)


def tensor(where: Ref, offset: int, *shape: int) -> Rebuilt:
    return Rebuilt(
        _rebuild_tensor_v2, where, offset, shape, (1,) * len(shape), False, OrderedDict()
    )


def written(tmp_path: Path, data: bytes) -> str:
    (tmp_path / "built.pt").write_bytes(data)
    return str(tmp_path / "built.pt")


def test_views_share_their_storage(tmp_path):
    """Before 0.4 torch wrote one storage, and views of it under separate keys."""
    part = reference(view=("8", 1, 3))
    old = Rebuilt(_rebuild_tensor, part, 1, (2,), (1,))
    state = {"whole": tensor(reference(), 0, 4), "tail": tensor(part, 0, 3), "end": old}
    path = written(tmp_path, built(state, ["7"], FOUR))
    expected = torch.load(path, weights_only=True)
    assert [expected[key].tolist() for key in state] == [[0, 1, 2, 3], [1, 2, 3], [2, 3]]
    found = torch.load(converted(path, tmp_path / "new.pt"), weights_only=True)
    assert [found[key].tolist() for key in state] == [[0, 1, 2, 3], [1, 2, 3], [2, 3]]
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1


def test_classes_of_modules_are_read_without_source(tmp_path):
    root = {
        "model": Rebuilt(OrderedDict),
        "kind": Ref("module", nn.Linear, "linear.py", "class Linear: ..."),
        "w": tensor(reference(), 0, 4),
    }
    path = written(tmp_path, built(root, ["7"], FOUR))
    assert torch.load(converted(path, tmp_path / "new.pt"), weights_only=False)["kind"] is nn.Linear


def test_trailing_bytes_are_reported(tmp_path):
    assert open_checkpoint(
        written(tmp_path, built({"w": tensor(reference(), 0, 4)}, ["7"], FOUR, b"more"))
    ).notes == ("4 bytes follow the last storage: not read",)


W = {"w": tensor(reference(), 0, 4)}
VIEW = reference(view=("8", 1, 3))
DAMAGED = [
    (built(W, ["7"], FOUR[:-1]), "is truncated"),
    (built(W, ["7"], FOUR[:5]), "is truncated"),
    (built(W, ["7"]), "is truncated"),
    (built(W, ["7"], storage(2**62, b"")), "is truncated"),
    (built(W, ["7"], storage(-1, b"")), "is truncated"),
    (built(W, ["7"], storage(3, bytes(12))), "storage 0 is 12 bytes, its tensors say 16"),
    (built(W, []), "storage 0 is missing"),
    (built(W, ["7", "7"], FOUR, FOUR), "listed twice"),
    (built(W, ["8"], FOUR), "belongs to nothing"),
    (built(W, 7, FOUR), "the list of its storages is not a list of keys"),
    (built(W, [["7"]], FOUR), "the list of its storages is not a list of keys"),
    (built(W, ["7"], FOUR, protocol=1000), "the version of the format is 1000"),
    (built(W, ["7"], FOUR, protocol=[1]), "the version of the format is"),
    (built({"w": tensor(reference(), 1, 4)}, ["7"], FOUR), "reaches element 4 of a storage of 4"),
    (built({"w": tensor(reference(numel=-4), 0, 4)}, ["7"], FOUR), "damaged pickle"),
    (built({"w": tensor(reference(numel=2**70), 0, 4)}, ["7"], FOUR), "its tensors say"),
    (built({"w": tensor(reference(kind=dict), 0, 4)}, ["7"], FOUR), "damaged pickle"),
    (built({"w": tensor(reference(key=("7",)), 0, 4)}, ["7"], FOUR), "damaged pickle"),
    (built({"w": tensor(reference(view=("8", -1, 3)), 0, 3)}, ["7"], FOUR), "damaged pickle"),
    (built({"w": tensor(reference(view=("8", 2**60, 3)), 0, 3)}, ["7"], FOUR), "reaches element"),
    (built({"w": tensor(reference(view=7), 0, 3)}, ["7"], FOUR), "damaged pickle"),
    (
        built([reference(view=("8", 1, 3))], ["7"], FOUR),
        "a part of a storage is outside of every tensor",
    ),
    (built({"w": Ref("storage", torch.FloatStorage)}, ["7"], FOUR), "damaged pickle"),
    (built({"w": Ref()}, ["7"], FOUR), "damaged pickle"),
    (built({"w": Ref("module")}, ["7"], FOUR), "damaged pickle"),
    (built(W, ["7"], FOUR)[:60], "damaged pickle"),
    (
        built({"w": Ref("storage", "FloatStorage", "7", "cpu", 4, None)}, ["7"], FOUR),
        "a storage reference",
    ),
    (built({"w": tensor(reference(numel="4"), 0, 4)}, ["7"], FOUR), "a storage reference"),
    (
        built({"w": tensor(reference(view=("8", "1", 3)), 0, 3)}, ["7"], FOUR),
        "a view that begins at '1'",
    ),
    (
        built({"w": Rebuilt(_rebuild_tensor_v2, VIEW)}, ["7"], FOUR),
        "the arguments of torch._utils._rebuild_tensor",
    ),
    (
        built({"w": Rebuilt(_rebuild_tensor_v2, VIEW, "0", (2,), (1,))}, ["7"], FOUR),
        "the arguments of torch._utils",
    ),
    (
        built({"w": Rebuilt(_rebuild_tensor_v2), "v": tensor(VIEW, 0, 3)}, ["7"], FOUR),
        "the arguments of torch._utils",
    ),
]


def read_in_a_store(tmp_path: Path, data: bytes) -> None:
    """In a store, the lengths of storages are taken from the pickle until their bytes are read."""
    url = f"memory://{tmp_path.name}/built.pt"
    fsspec.filesystem("memory").pipe(url, data)
    ckpttool.inspect(url, stats=True)


@pytest.mark.parametrize(("data", "message"), DAMAGED)
def test_damaged_and_malicious_files_are_refused(tmp_path, data, message):
    for opens in (
        lambda: open_checkpoint(written(tmp_path, data)),
        lambda: read_in_a_store(tmp_path, data),
    ):
        with pytest.raises(CkptError) as caught:
            opens()
        assert message in caught.value.message
        assert caught.value.exit_status == 2


def test_a_storage_of_another_length_in_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="not as long as"):
        read_in_a_store(tmp_path, built(W, ["7"], storage(3, bytes(16))))


def test_the_tar_format_is_an_error_with_a_hint(tmp_path):
    with tarfile.open(tmp_path / "ancient.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(CkptError, match=r"tar format of torch.save before torch 0.1.10") as caught:
        open_checkpoint(str(tmp_path / "ancient.pt"))
    assert "if you trust it" in caught.value.hint
