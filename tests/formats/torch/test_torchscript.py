"""TorchScript archives, with torch.jit.load(...).state_dict() as the oracle for keys and values."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, open_checkpoint
from command import Run
from files import change_archive
from places import DATA

OLD = str(DATA / "script-torch-2.5.1.pt")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.table = torch.arange(3.0)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.none = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.none(self.inner(x)) * self.mask * self.scale + self.table


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Attention(), Attention())
        self.norm = nn.BatchNorm1d(3)
        self.again = self.blocks[0]
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.blocks.get_parameter("0.inner.weight")
        self.brain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return (
            self.tied(self.again(self.norm(self.blocks(x))))
            + self.brain
            + torch.tensor([1.0, 2.0, 3.0])
        )


def scripted(path: Path, traced: bool) -> str:
    torch.manual_seed(0)
    model = Model().eval()
    module = torch.jit.trace(model, torch.ones(2, 3)) if traced else torch.jit.script(model)
    torch.jit.save(module, path)
    return str(path)


@pytest.mark.parametrize("traced", [True, False])
def test_keys_and_values_match_the_state_dict(tmp_path, traced):
    path = scripted(tmp_path / "model.pt", traced)
    assert open_checkpoint(path).format == "torchscript"
    (section,) = open_checkpoint(path).sections
    expected = torch.jit.load(path).state_dict()
    assert [entry.key for entry in section.tensors] == list(expected)
    for entry in section.tensors:
        tensor = expected[entry.key]
        assert (entry.dtype, entry.shape) == (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        raw = Path(path).read_bytes()[entry.span.offset :][: entry.span.length]
        assert raw == bytes(tensor.detach().reshape(-1).view(torch.uint8))
    aliases = section.aliases()
    assert aliases["again.inner.weight"] == aliases["tied.weight"] == "blocks.0.inner.weight"
    assert "plain attributes and constants of its code: " in open_checkpoint(path).notes[0]


class WithLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.listed: Any = torch.jit.Attribute([torch.ones(2), torch.zeros(2)], list[torch.Tensor])
        self.named: Any = torch.jit.Attribute({"a": torch.ones(3)}, dict[str, torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.listed[0] + self.listed[1] + self.named["a"].sum()


@pytest.mark.filterwarnings("ignore")
def test_tensors_in_lists_and_packed_weights_are_counted(tmp_path: Path, run: Run) -> None:
    """`state_dict()` does not have them, so a swap keeps them, and says so."""
    path, new = tmp_path / "model.pt", tmp_path / "new.pt"
    torch.jit.script(WithLists()).save(str(path))
    torch.save(WithLists().state_dict(), new)
    expected = "plain attributes and constants of its code: 3 tensors"
    assert open_checkpoint(str(path)).notes == (expected,)
    assert f"kept, not compared: {expected}" in run("swap-weights", path, new, "--dry-run").out
    quantized = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, dtype=torch.qint8
    )
    torch.jit.script(quantized).save(str(path))
    assert not torch.jit.load(str(path)).state_dict()
    assert "2 tensors" in open_checkpoint(str(path)).notes[0]


def test_views_of_another_dtype_match_torch(tmp_path):
    """Torch writes the first dtype of the storage for both views."""
    module = nn.Module()
    module.register_buffer("bits", torch.arange(4, dtype=torch.int32))
    module.register_buffer("floats", module.bits.view(torch.float32))
    path = str(tmp_path / "model.pt")
    torch.jit.save(torch.jit.script(module), path)
    expected = torch.jit.load(path).state_dict()
    assert ckpttool.diff(path, expected, values=True).identical


def test_tensors_are_extracted(tmp_path: Path, run: Run) -> None:
    path = scripted(tmp_path / "model.pt", True)
    expected = torch.jit.load(path).state_dict()
    for out in ("out.pt", "out.safetensors"):
        assert run("remap", path, "-o", tmp_path / out, "--verify", "--keep-aliases").status == 0
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert run("diff", path, tmp_path / "out.pt", "--values").status == 0


def test_renames_are_refused(tmp_path: Path, run: Run) -> None:
    path = scripted(tmp_path / "model.pt", True)
    before = Path(path).read_bytes()
    done = run("remap", path, "--in-place", "--drop", "brain")
    assert (done.status, "TorchScript" in done.err) == (1, True)
    assert Path(path).read_bytes() == before


def trained() -> Model:
    """Return another model of the same definition, with other buffers."""
    torch.manual_seed(1)
    model = Model().eval()
    model.norm.running_mean += torch.randn(3)
    return model


@pytest.mark.parametrize("traced", [True, False])
def test_swap_weights_changes_only_values(tmp_path: Path, run: Run, traced: bool) -> None:
    """Like `load_state_dict` on the archive; code, constants and other records keep their bytes."""
    path, out, model = scripted(tmp_path / "model.pt", traced), tmp_path / "out.pt", trained()
    torch.save(model.state_dict(), tmp_path / "new.pt")
    done = run("swap-weights", path, tmp_path / "new.pt", "-o", out)
    assert done.status == 1  # the archive also has non-persistent buffers
    assert "missing weight @ blocks.0.mask" in done.err
    options = ("--model", f"{__file__}:Model", "--verify")
    done = run("swap-weights", path, tmp_path / "new.pt", "-o", out, *options, "--format", "json")
    assert done.status == 0, done.err
    assert (done.data["layout"], done.data["kept"]) == (
        "torchscript",
        ["blocks.0.mask", "blocks.1.mask", "again.mask"],
    )
    expected, swapped, x = torch.jit.load(path), torch.jit.load(out), torch.randn(4, 3)
    expected.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(swapped(x), expected(x))
    assert torch.equal(swapped(x), model(x))
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out) as new:
        assert new.namelist() == old.namelist()
        changed = {
            name.partition("/")[2] for name in old.namelist() if old.read(name) != new.read(name)
        }
    assert changed
    assert all(name.startswith("data/") for name in changed)


def test_weights_from_the_archive_itself_give_the_same_file(tmp_path: Path, run: Run) -> None:
    done = run("swap-weights", OLD, OLD, "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    expected = torch.jit.load(OLD).state_dict()
    assert [entry.key for entry in open_checkpoint(OLD).section("").tensors] == list(expected)
    found = torch.jit.load(tmp_path / "out.pt").state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

    def forward(self, x):
        return x * self.weight


def test_quantized_tensors_are_kept(tmp_path: Path, run: Run) -> None:
    torch.jit.save(torch.jit.script(Quantized()), tmp_path / "p.pt")
    torch.save({"weight": torch.full((3,), 2.0)}, tmp_path / "new.pt")
    done = run("swap-weights", tmp_path / "p.pt", tmp_path / "p.pt", "-o", tmp_path / "o.pt")
    assert "quantized, and its new value is not pickled as such a tensor" in done.err
    done = run("swap-weights", tmp_path / "p.pt", tmp_path / "new.pt", "-o", tmp_path / "o.pt")
    assert "missing weight @ table" in done.err


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, run: Run) -> None:
    path, state = (
        scripted(tmp_path / "model.pt", True),
        dict(torch.jit.load(scripted(tmp_path / "m.pt", True)).state_dict()),
    )
    state["brain"] = state["brain"].float()
    state["norm.bias"] = torch.ones(4)
    state["tied.weight"] = state["tied.weight"] + 1
    state["table"] = torch.ones(3)
    torch.save(state, tmp_path / "new.pt")
    done = run("swap-weights", path, tmp_path / "new.pt", "-o", tmp_path / "out.pt")
    assert done.status == 1
    for key in ("brain", "norm.bias", "tied.weight", "table"):
        assert f"@ {key}\n" in done.err, done.err
    assert not (tmp_path / "out.pt").exists()
    done = run("swap-weights", f"{path}::model", tmp_path / "new.pt", "-o", tmp_path / "out.pt")
    assert (done.status, f"{path} holds one program without a name" in done.err) == (2, True)
    done = run("swap-weights", tmp_path / "new.pt", path, "-o", tmp_path / "out.pt")
    assert (
        f"hint: the program comes first: ckpttool swap-weights {path} {tmp_path / 'new.pt'}"
        in done.err
    )


def altered(path: str, out: Path, changes: dict[str, bytes | None]) -> str:
    return change_archive(path, lambda name, data: changes.get(name.partition("/")[2], data), out)


CODE = "code/__torch__.py"
OBJECT = b"c__torch__\nTagger\n)\x81"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.pkl": b"\x80\x02" + OBJECT + b"q\0}(X\1\0\0\0ah\0ub."}, "holds too many others"),
        (
            {"data.pkl": b"\x80\x02" + b"".join(
                OBJECT + b"q%c}(X\1\0\0\0ah%cX\1\0\0\0bh%cub0" % (n, n - 1, n - 1) for n in range(1, 60)
            ).replace(b"ah\0X\1\0\0\0bh\0", b"aNX\1\0\0\0bN", 1) + b"h\x3b."},
            "holds too many others",
        ),
        ({"data.pkl": b"\x80\x02."}, "damaged pickle"),
        ({"data.pkl": b""}, "damaged pickle"),
        ({CODE: None}, "code/__torch__.py is missing"),
        ({"data/0": None}, "storage 0 is missing"),
        ({"data/0": b"x"}, "its tensors say"),
        ({"byteorder": b"big"}, "not little-endian"),
    ],
)  # fmt: skip
def test_damaged_and_malicious_archives_are_refused(tmp_path, changes, message):
    broken = altered(OLD, tmp_path / "broken.pt", changes)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(broken)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "root",
    [
        b"}.",
        b"cother\nKind\n)\x81}b.",
        b"c__torch__.torch.classes.own\nKind\n)\x81}b.",
        b"c__torch__\nTagger\n)\x81.",
        b"c__torch__\nTagger\n)\x81]b.",
        b"](c__torch__\nTagger\n)\x81}be.",
        b"](]c__torch__\nTagger\n)\x81}be)R}b.",
        b"](" + OBJECT + b"}K\x01" + OBJECT + b"}bsbe.",
    ],
)
def test_an_object_other_than_a_module_of_the_code_has_no_tensors(tmp_path, root):
    """An object of another class, of a torch class, without attributes, in a list, or of an invalid
    class.
    """
    odd = altered(OLD, tmp_path / "odd.pt", {"data.pkl": b"\x80\x02" + root})
    assert open_checkpoint(odd).section("").tensors == ()


def test_attributes_without_a_name_are_ignored(tmp_path):
    root = OBJECT + b"}(K\x01" + OBJECT + b"}bX\1\0\0\0aNub."
    assert (
        open_checkpoint(altered(OLD, tmp_path / "odd.pt", {"data.pkl": b"\x80\x02" + root}))
        .section("")
        .tensors
        == ()
    )


def test_two_pickles_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as archive:
        for name in ("a/data.pkl", "b/data.pkl", "a/constants.pkl"):
            archive.writestr(name, b"N.")
    with pytest.raises(CkptError, match=r"2 records are called NAME/data.pkl, not one"):
        open_checkpoint(str(tmp_path / "two.pt"))


@pytest.mark.parametrize("code", [b"", b"\xff"])
def test_a_class_without_code_has_no_tensors(tmp_path, code):
    changed = altered(OLD, tmp_path / "other.pt", {CODE: code})
    assert open_checkpoint(changed).section("").tensors == ()


def test_other_archives_are_named_in_the_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "old.pt", "w") as archive:
        for name in ("m/model.json", "m/tensors/0", "m/code/m.py"):
            archive.writestr(name, b"x")
    with pytest.raises(CkptError, match=r"torch 1.0 to 1.3"):
        open_checkpoint(str(tmp_path / "old.pt"))
    buffer = io.BytesIO()
    with torch.package.PackageExporter(buffer) as exporter:
        exporter.save_pickle("model", "model.pkl", {"a": torch.ones(1)})
    (tmp_path / "package.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CkptError, match=r"torch.package"):
        open_checkpoint(str(tmp_path / "package.pt"))
    (tmp_path / "mobile.ptl").write_bytes(b"\x1c\0\0\0PTMF" + bytes(64))
    with pytest.raises(CkptError, match="mobile"):
        open_checkpoint(str(tmp_path / "mobile.ptl"))
