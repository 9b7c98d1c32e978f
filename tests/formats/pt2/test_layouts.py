"""Programs of older torch versions, with torch.export.load as the oracle if this torch can read
them.
"""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpttool
from ckpttool import Checkpoint, CkptError, Refused, open_checkpoint, swap_weights
from command import Run
from files import change_archive, write
from places import DATA
from torch_version import needs_torch

VERSIONS = ["2.5.1", "2.7.1", "2.8.0", "2.9.1"]
LAYOUTS = dict(zip(VERSIONS, ["torch<=2.7", "torch<=2.7", "torch 2.8", "torch>=2.9"]))
STATE = {
    "2.5.1": "serialized_state_dict.pt",
    "2.7.1": "serialized_state_dict.pt",
    "2.8.0": "tagger/data/weights/model.pt",
}
CONSTANTS = {
    "2.5.1": "serialized_constants.pt", "2.7.1": "serialized_constants.pt", "2.8.0": "tagger/data/constants/model.pt"
}  # fmt: skip


def program(version: str) -> Checkpoint:
    return open_checkpoint(str(DATA / f"tagger-torch-{version}.pt2"))


def new_weights(version: str) -> str:
    return str(DATA / f"weights-torch-{version}.pt")


def swapped(version: str, out: Path) -> str:
    swap_weights(program(version).source, new_weights(version), str(out))
    return str(out)


def records(path: str | Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def loaded(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("version", STATE)
def test_a_program_without_constants_has_no_unknown_storages(version: str, tmp_path: Path) -> None:
    empty = io.BytesIO()
    torch.save({}, empty)
    path = change_archive(
        program(version).source,
        lambda name, old: empty.getvalue() if name == CONSTANTS[version] else old,
        tmp_path / "none.pt2",
    )
    found = open_checkpoint(path)
    assert found.unreached == ()
    assert [section.path for section in found.sections] == [""]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_layout_gives_the_same_index(version):
    found, newest = program(version), program("2.9.1")
    for section, expected in zip(found.sections, newest.sections, strict=True):
        assert (section.path, section.kind) == (expected.path, expected.kind)
        geometry = {e.key: (e.dtype, e.shape, e.stride, e.offset) for e in expected.tensors}
        assert {e.key: (e.dtype, e.shape, e.stride, e.offset) for e in section.tensors} == geometry
        assert len(set(section.aliases()) | set(section.aliases().values())) == (
            2 if section.path == "" else 0
        )
    container: Any = found.container
    assert container.layout == LAYOUTS[version]
    program_names = ckpttool.trace(found.source)
    assert program_names.torch.startswith(version)
    assert program_names.not_serialized == ("table",)
    assert [r.fqn for r in program_names.runtime if r.kind == "parameter" and not r.trainable] == [
        "scale"
    ]
    ((alias, first),) = ((r.fqn, r.alias_of) for r in program_names.runtime if r.alias_of)
    assert {alias, first} == {"out.weight", "embed.weight"}


@pytest.mark.parametrize("version", STATE)
def test_values_match_torch(version):
    path = DATA / f"tagger-torch-{version}.pt2"
    for section, record in zip(program(version).sections, (STATE[version], CONSTANTS[version])):
        expected = loaded(records(path)[record])
        assert [entry.key for entry in section.tensors] == list(expected)
        for entry in section.tensors:
            span = entry.span
            assert (
                path.read_bytes()[span.offset :][: span.length]
                == expected[entry.key].detach().numpy().tobytes()
            )
            payload: Any = entry.payload
            assert payload.is_param == isinstance(expected[entry.key], nn.Parameter)
            assert payload.requires_grad == expected[entry.key].requires_grad


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unchanged_program_gives_the_same_file(version, tmp_path):
    out = write(program(version), tmp_path / "out.pt2")
    assert Path(out).read_bytes() == Path(program(version).source).read_bytes()


@pytest.mark.parametrize("version", ["2.7.1", "2.8.0", "2.9.1"])
def test_outputs_after_a_swap_match_the_trained_model(version, tmp_path):
    needs_torch(version, "loading its programs")
    model = torch.export.load(swapped(version, tmp_path / "tagger.pt2")).module()
    expected = torch.load(DATA / f"outputs-torch-{version}.pt", weights_only=True)
    assert torch.allclose(model(torch.arange(5)), expected, atol=1e-6)
    assert dict(model.named_parameters(remove_duplicate=False))["scale"].requires_grad is False


@pytest.mark.parametrize("version", STATE)
def test_a_swap_changes_only_values_of_the_state_dict(version, tmp_path):
    before, after = (
        records(program(version).source),
        records(swapped(version, tmp_path / "out.pt2")),
    )
    assert list(before) == list(after)
    assert [name for name in before if before[name] != after[name]] == [STATE[version]]
    old, new = loaded(before[STATE[version]]), loaded(after[STATE[version]])
    trained = torch.load(DATA / f"weights-torch-{version}.pt", weights_only=True)
    assert list(old) == list(new)
    for key, tensor in new.items():
        kinds = [(type(t), t.dtype, t.requires_grad) for t in (tensor, old[key])]
        assert kinds[0] == kinds[1]
        assert torch.equal(tensor, trained[key])
    assert new["embed.weight"] is not old["embed.weight"]
    assert new["embed.weight"].data_ptr() == new["out.weight"].data_ptr()
    (old_pickle,), (new_pickle,) = (
        [zipfile.ZipFile(io.BytesIO(r[STATE[version]])).read("archive/data.pkl")]
        for r in (before, after)
    )
    assert old_pickle == new_pickle
    with zipfile.ZipFile(tmp_path / "out.pt2") as outer:
        start = data_offset(outer, STATE[version])
        inner = zipfile.ZipFile(io.BytesIO(outer.read(STATE[version])))
    storages = [name for name in inner.namelist() if "/data/" in name]
    assert storages
    assert all((start + data_offset(inner, name)) % 64 == 0 for name in storages)


def data_offset(archive: zipfile.ZipFile, name: str) -> int:
    """Return where the bytes of the stored record begin in the archive's file."""
    with archive.open(name) as record:
        return record._orig_compress_start  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", VERSIONS)
def test_constants_are_swapped_on_request(version, tmp_path):
    torch.save(
        {**torch.load(DATA / f"weights-torch-{version}.pt"), "module.table": torch.eye(6)},
        tmp_path / "w.pt",
    )
    source, weights, out = (
        str(path) for path in (program(version).source, tmp_path / "w.pt", tmp_path / "out.pt2")
    )
    with pytest.raises(Refused, match="do not fit"):
        swap_weights(source, weights, out)
    torch.save({**torch.load(DATA / f"weights-torch-{version}.pt"), "table": torch.eye(6)}, weights)
    with pytest.raises(Refused) as caught:
        swap_weights(source, weights, out)
    assert "constants=True" in caught.value.hint
    done = swap_weights(source, weights, out, constants=True)
    assert (done.constants, done.to_json()["swapped"]) == ((), 15)
    (entry,) = open_checkpoint(out).sections[1].tensors
    assert (
        Path(out).read_bytes()[entry.span.offset :][: entry.span.length]
        == torch.eye(6).numpy().tobytes()
    )
    if "2.5.1" < version <= torch.__version__:
        assert torch.equal(torch.export.load(out).constants["table"], torch.eye(6))
    with pytest.raises(Refused) as caught:
        swap_weights(source, new_weights(version), out, constants=True, force=True)
    assert [problem.key for problem in caught.value.problems] == ["table"]


def test_swap_weights_reports_the_layout(tmp_path: Path, run: Run) -> None:
    for version in VERSIONS:
        weights, out = DATA / f"weights-torch-{version}.pt", tmp_path / f"{version}.pt2"
        done = run(
            "swap-weights",
            program(version).source,
            weights,
            "-o",
            out,
            "--verify",
            "--format",
            "json",
        )
        assert (done.status, done.data["layout"]) == (0, LAYOUTS[version])


def test_one_of_several_programs_is_swapped_by_name(tmp_path: Path, run: Run) -> None:
    needs_torch("2.8", "a package of several programs")
    from torch.export.pt2_archive._package import load_pt2, package_pt2

    path, out = str(tmp_path / "two.pt2"), str(tmp_path / "out.pt2")
    exported = torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),))
    package_pt2(path, exported_programs={"first": exported, "second": exported})
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "w.pt")

    done = run("swap-weights", path, tmp_path / "w.pt", "-o", out)
    assert (done.status, "--program first" in done.err) == (2, True)
    for words in (["--program", "second", path], [f"{path}::second"]):
        done = run("swap-weights", *words, tmp_path / "w.pt", "-o", out, "--verify", "--force")
        assert done.status == 0, done.err
        models = load_pt2(out).exported_programs
        assert torch.equal(models["second"].state_dict["weight"], torch.ones(2, 3))
        assert torch.equal(models["first"].state_dict["weight"], exported.state_dict["weight"])
    assert run("diff", f"{out}::second", tmp_path / "w.pt", "--values").status == 0
    assert run("diff", f"{out}::first", tmp_path / "w.pt", "--values").status == 1
    assert run("trace", f"{out}::first").status == 0


class Paired(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.pair = nn.Parameter(TwoTensor(torch.full((3,), value), torch.full((3,), 2 * value)))
        self.bias = nn.Parameter(torch.full((3,), value))

    def forward(self, x):
        return x * self.bias + self.pair.sum()


def test_subclass_weights_are_swapped_only_for_the_same_subclass(tmp_path):
    needs_torch("2.9", "a program of tensor subclasses that a test defines")
    torch.export.save(torch.export.export(Paired(1.0), (torch.ones(3),)), tmp_path / "old.pt2")
    old, new, out = (str(tmp_path / name) for name in ("old.pt2", "new.pt", "out.pt2"))
    torch.save(Paired(5.0).state_dict(), new)
    swap_weights(old, new, out)
    found = torch.export.load(out).state_dict
    assert isinstance(found["pair"], nn.Parameter)
    assert isinstance(found["pair"], TwoTensor)
    assert (found["pair"].a.tolist(), found["pair"].b.tolist()) == ([5.0] * 3, [10.0] * 3)
    assert found["bias"].tolist() == [5.0] * 3
    torch.save({"pair": torch.ones(3), "bias": torch.ones(3)}, tmp_path / "plain.pt")
    with pytest.raises(Refused) as caught:
        swap_weights(old, str(tmp_path / "plain.pt"), out, force=True)
    assert [p.key for p in caught.value.problems] == ["pair"]
    assert "subclass" in caught.value.problems[0].problem
    torch.save(
        {"pair": TwoTensor(torch.ones(4), torch.ones(4)), "bias": torch.ones(3)},
        tmp_path / "long.pt",
    )
    with pytest.raises(Refused) as caught:
        swap_weights(old, str(tmp_path / "long.pt"), out, force=True)
    assert [str(p) for p in caught.value.problems] == [
        "float32 [4], the program has float32 [3] @ pair"
    ]


class Scaled(Paired):
    def __init__(self):
        super().__init__(1.0)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: self._by(state, prefix, 0.5)
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: self._by(state, prefix, 2.0)
        )

    @staticmethod
    def _by(state, prefix, factor):
        state[f"{prefix}pair"] = state[f"{prefix}pair"] * factor


@pytest.mark.parametrize("pair", [None, "a word"])
def test_computed_subclass_weights_are_refused(tmp_path, pair):
    needs_torch("2.9", "a program of tensor subclasses that a test defines")
    torch.export.save(torch.export.export(Paired(1.0), (torch.ones(3),)), tmp_path / "old.pt2")
    state = Scaled().state_dict()
    torch.save(state if pair is None else {**state, "pair": pair}, tmp_path / "new.pt")
    names = ckpttool.trace(Scaled if pair is None else lambda: Paired(1.0))
    files = [str(tmp_path / name) for name in ("old.pt2", "new.pt", "out.pt2")]
    with pytest.raises(Refused) as caught:
        swap_weights(*files, model=names)
    assert [p.key for p in caught.value.problems] == ["pair"]


@pytest.mark.parametrize("version", STATE)
def test_constants_that_are_not_tensors_are_kept(version, tmp_path):
    constants = {"table": torch.eye(6), "words": {"a": [1, 2]}, "more": torch.Size([3])}
    old = rewritten(version, tmp_path / "old.pt2", CONSTANTS[version], saved(constants))
    found = open_checkpoint(old)
    assert [entry.key for entry in found.sections[1].tensors] == ["table"]
    assert [entry.key for entry in found.sections[1].extras] == ["words", "more"]
    swap_weights(old, new_weights(version), str(tmp_path / "out.pt2"))
    out = records(tmp_path / "out.pt2")
    assert out[CONSTANTS[version]] == records(old)[CONSTANTS[version]]
    assert out[STATE[version]] != records(old)[STATE[version]]
    without = replace(found.sections[1], extras=())
    with pytest.raises(Refused) as caught:
        write(replace(found, sections=(found.sections[0], without)), tmp_path / "out.pt2")
    assert [str(p) for p in caught.value.problems] == [
        "its objects that are not tensors cannot be changed @ constants"
    ]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("version", STATE)
def test_a_renamed_state_dict_keeps_its_type(version, kind, tmp_path):
    state = loaded(records(program(version).source)[STATE[version]])
    old = open_checkpoint(
        rewritten(version, tmp_path / "old.pt2", STATE[version], saved(kind(state)))
    )
    new = {key: key.replace("norm.", "other.") for key in state}
    sections = [
        replace(s, tensors=tuple(e.under(new.get(e.key, e.key)) for e in s.tensors))
        for s in old.sections
    ]
    out = write(replace(old, sections=tuple(sections)), tmp_path / "out.pt2")
    found = loaded(records(out)[STATE[version]])
    assert (type(found), list(found)) == (kind, list(new.values()))
    assert all(torch.equal(found[new[key]], state[key]) for key in state)


# Malicious and damaged files


def test_weights_that_do_not_fit_an_old_program_are_refused(tmp_path: Path) -> None:
    old = program("2.7.1")
    state, constants = old.sections
    scale = next(entry for entry in state.tensors if entry.key == "scale")
    others = {entry.span.length: entry for entry in state.tensors if entry.dtype == scale.dtype}
    longer = replace(scale, storage=others[max(others)].storage)
    tensors = tuple(longer if entry is scale else entry for entry in state.tensors)
    with pytest.raises(Refused) as caught:
        write(
            replace(old, sections=(replace(state, tensors=tensors), constants)), tmp_path / "o.pt2"
        )
    assert [str(p) for p in caught.value.problems] == [
        f"a storage of {max(others)} bytes, the program's has 24 @ scale"
    ]


def rewritten(version: str, out: Path, name: str, data: bytes | None) -> str:
    return change_archive(
        program(version).source, lambda record, old: data if record == name else old, out
    )


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("version", STATE)
@pytest.mark.parametrize(
    "data",
    [b"", b"PK\5\6", b"x" * 200, saved([torch.ones(2)]), saved({1: torch.ones(2)}), saved(torch.ones(2)), None],
)  # fmt: skip
def test_an_invalid_state_dict_is_an_error(version, data, tmp_path):
    with pytest.raises(CkptError) as caught:
        open_checkpoint(rewritten(version, tmp_path / "broken.pt2", STATE[version], data))
    assert caught.value.exit_status == 2


def test_old_names_of_the_records_are_read(tmp_path):
    """Torch 2.1 named the same records ``.json``."""
    with zipfile.ZipFile(tmp_path / "first.pt2", "w") as archive:
        for name, data in records(program("2.5.1").source).items():
            archive.writestr(name.replace(".pt", ".json"), data)
    found = open_checkpoint(str(tmp_path / "first.pt2"))
    assert [e.key for e in found.section("").tensors] == [
        e.key for e in program("2.5.1").section("").tensors
    ]
    swap_weights(found.source, new_weights("2.5.1"), str(tmp_path / "out.pt2"))
    out = records(tmp_path / "out.pt2")
    trained = torch.load(DATA / "weights-torch-2.5.1.pt", weights_only=True)
    assert torch.equal(loaded(out["serialized_state_dict.json"])["scale"], trained["scale"])


def test_a_program_without_constants_is_read(tmp_path):
    path = rewritten("2.5.1", tmp_path / "old.pt2", CONSTANTS["2.5.1"], None)
    assert len(open_checkpoint(path).sections) == 1


def test_a_compressed_state_dict_is_refused(tmp_path):
    small = change_archive(
        program("2.7.1").source, lambda _, data: data, tmp_path / "small.pt2", zipfile.ZIP_DEFLATED
    )
    with pytest.raises(CkptError, match="compressed"):
        open_checkpoint(small)
