"""Manifests against hashlib, sha256sum and torch: digests match the files, and every changed byte is reported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from command import Run, notes_in

FORMATS = {
    "a.pt": "torch_zip",
    "a.safetensors": "safetensors",
    "folder.dcp": "dcp",
    "folder/model.safetensors.index.json": "sharded",
}


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(4, 3),
        "a.bias": torch.randn(4).bfloat16(),
        "steps": torch.tensor(3),
        "b.weight": torch.randn(3, 5)[:, 1:4],  # not contiguous in its file
        "none": torch.empty(0, 2),
    }


def written(folder: Path, name: str) -> str:
    out = folder / name
    out.parent.mkdir(exist_ok=True)
    ckpttool.write(ckpttool.open_checkpoint(state()), str(out))
    return str(out if "index" not in name else out.parent)


def manifest(run: Run, ckpt: str, out: Path) -> Any:
    assert run("inspect", ckpt, "--manifest", out).status == 0
    return json.loads(out.read_text())


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", FORMATS)
def test_digests_match_the_bytes_and_every_format_with_the_same_tensors(run: Run, tmp_path: Path, name: str) -> None:
    ckpt = written(tmp_path, name)
    data = manifest(run, ckpt, tmp_path / "m.json")
    assert data["predicate"]["format"] == FORMATS[name]
    (section,) = data["predicate"]["sections"]
    digests = {tensor["key"]: tensor["sha256"] for tensor in section["tensors"]}
    assert digests == {key: digest(value.view(1) if not value.dim() else value) for key, value in state().items()}
    lines = "".join(f"{file['digest']['sha256']}  {file['name']}\n" for file in data["subject"])
    folder = ckpt if Path(ckpt).is_dir() else tmp_path
    assert subprocess.run(["sha256sum", "-c", "--quiet"], input=lines.encode(), cwd=folder, check=False).returncode == 0
    done = run("diff", "--values", ckpt, tmp_path / "m.json", "--format", "json")
    assert (done.status, notes_in(done.data)) == (0, ["the files and the manifest are the same, byte for byte"])
    again = tmp_path / "again"
    again.mkdir()
    for other in FORMATS:
        assert run("diff", "--values", written(again, other), tmp_path / "m.json").status == 0
    assert run("diff", "--values", tmp_path / "m.json", tmp_path / "m.json").status == 0


@pytest.mark.parametrize("key", [key for key, value in state().items() if value.numel()])
def test_a_changed_bit_is_reported_with_its_key(run: Run, tmp_path: Path, key: str) -> None:
    ckpt = written(tmp_path, "a.safetensors")
    manifest(run, ckpt, tmp_path / "m.json")
    changed = state()
    changed[key] = changed[key].clone()
    changed[key].view(-1).view(torch.uint8)[-1:] ^= 1
    torch.save(changed, tmp_path / "changed.pt")
    done = run("diff", "--values", tmp_path / "changed.pt", tmp_path / "m.json", "--format", "json")
    assert done.status == 1
    assert [entry["left"] for entry in done.data["entries"] if entry["status"] != "same"] == [[key]]
    assert run("diff", tmp_path / "changed.pt", tmp_path / "m.json").status == 0  # only names, dtypes and shapes


def test_storages_without_a_known_tensor_are_compared_by_their_bytes(run: Run, tmp_path: Path) -> None:
    files = {
        "none": {"w": torch.ones(2)},
        "one": {"w": torch.ones(2), "more": [torch.UntypedStorage(range(3))]},
        "other": {"w": torch.ones(2), "more": [torch.UntypedStorage(range(1, 4))]},
    }
    for name, value in files.items():
        torch.save(value, tmp_path / f"{name}.pt")
        result = manifest(run, str(tmp_path / f"{name}.pt"), tmp_path / f"{name}.json")
        assert len(result["predicate"]["unreached"]) == (name != "none")
    for left, right in product(files, files):
        for pair in (
            (f"{left}.pt", f"{right}.json"),
            (f"{left}.json", f"{right}.pt"),
            (f"{left}.json", f"{right}.json"),
        ):
            done = run("diff", *(tmp_path / name for name in pair), "--format", "json")
            unreached = [entry for entry in done.data["entries"] if "known tensor" in entry["reason"]]
            alone = {(True, False): "missing", (False, True): "unexpected"}.get(
                (left == "none", right == "none"), "value"
            )
            assert [entry["status"] for entry in unreached] == ([] if left == right else [alone])
            assert done.status == (left != right)
            valued = run("diff", "--values", *(tmp_path / name for name in pair))
            assert (valued.status, "byte for byte" in valued.out) == (
                left != right,
                left == right and "pt" in str(pair),
            )


def training_checkpoint() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    special = {"sparse": torch.eye(3).to_sparse(), "x._extra_state": {"scale": torch.ones(2), "at": 3}}
    tied = {"tied": model.weight.detach()}
    return {"model": {**model.state_dict(), **tied, **special}, "optimizer": optimizer.state_dict(), "step": 7}


class CustomTensor(torch.Tensor):
    """A user-defined tensor class."""


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda t: t.as_subclass(CustomTensor),
    "subclass without elements": lambda t: t[:0].as_subclass(CustomTensor),
    "parameter": torch.nn.Parameter,
    "conjugated": lambda t: torch.complex(t, t).conj(),
    "sparse": lambda t: t.to_sparse(),
    "rows": lambda t: t.to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.qint8),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "without values": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_tensor_matches_a_manifest_only_if_it_is_the_same(run: Run, tmp_path: Path, name: str) -> None:
    one, other = (KINDS[name](torch.full((2, 3), value)) for value in (1.0, 2.0))
    torch.save({"w": one, "v": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": other, "v": torch.ones(2)}, tmp_path / "b.pt")
    manifest(run, str(tmp_path / "a.pt"), tmp_path / "m.json")
    torch.save({"v": torch.ones(2), "w": one}, tmp_path / "again.pt")
    assert run("diff", "--values", tmp_path / "again.pt", tmp_path / "m.json").status == 0
    is_difference = "without" not in name
    assert run("diff", "--values", tmp_path / "b.pt", tmp_path / "m.json").status == is_difference
    torch.save({"w": torch.ones(2, 3), "v": torch.ones(2)}, tmp_path / "plain.pt")
    assert run("diff", "--values", tmp_path / "plain.pt", tmp_path / "m.json").status == (name != "parameter")
    if name not in ("quantized", "jagged"):  # only of float32
        torch.save({"w": KINDS[name](torch.ones(2, 3).double()), "v": torch.ones(2)}, tmp_path / "double.pt")
        for right in "a.pt", "m.json":
            done = run("diff", "--values", tmp_path / "double.pt", tmp_path / right, "--fail-on", "dtype")
            assert (done.status, "instead of" in done.out) == (1, True), done.err
            done = run("diff", "--values", tmp_path / "double.pt", tmp_path / right, "--ignore-dtype")
            assert done.status == int(right == "m.json" or name != "parameter"), done.err


CHANGES: dict[str, Callable[[Any], object]] = {
    "model.sparse": lambda ckpt: ckpt["model"].update(sparse=2 * torch.eye(3).to_sparse()),
    "model.x._extra_state": lambda ckpt: ckpt["model"]["x._extra_state"].update(at=4),
    "optimizer.param_groups": lambda ckpt: ckpt["optimizer"]["param_groups"][0].update(lr=0.2),
    "optimizer.state.1.exp_avg": lambda ckpt: ckpt["optimizer"]["state"][1]["exp_avg"].add_(1),
    "model.bias": lambda ckpt: ckpt["model"].pop("bias"),
    "model.new": lambda ckpt: ckpt["model"].update(new=torch.ones(1)),
    "step": lambda ckpt: ckpt.update(step=8),
}


@pytest.mark.parametrize("place", CHANGES)
def test_changes_outside_dense_tensors_are_reported(run: Run, tmp_path: Path, place: str) -> None:
    torch.save(training_checkpoint(), tmp_path / "a.pt")
    manifest(run, str(tmp_path / "a.pt"), tmp_path / "m.json")
    ckpt = torch.load(tmp_path / "a.pt", weights_only=False)
    CHANGES[place](ckpt)
    torch.save(ckpt, tmp_path / "b.pt")
    done = run("diff", "--values", tmp_path / "b.pt", tmp_path / "m.json", "--format", "json")
    assert done.status == (place != "step")
    differing = [entry for entry in done.data["entries"] if entry["status"] not in ("same", "alias")]
    assert [(*entry["left"], *entry["right"])[0] for entry in differing] == ([place] if place != "step" else [])
    assert place != "step" or "not compared (not tensors): step" in notes_in(done.data)


def test_non_tensor_entries_are_compared_in_any_order(run: Run, tmp_path: Path) -> None:
    model = {"model": {"w": torch.ones(2)}}
    torch.save({"epoch": 3, "x": 1, **model}, tmp_path / "a.pt")
    torch.save({"x": 1, **model, "epoch": 3}, tmp_path / "reordered.pt")
    torch.save({"x": 1, **model}, tmp_path / "less.pt")
    manifest(run, str(tmp_path / "a.pt"), tmp_path / "m.json")
    assert run("diff", "--values", tmp_path / "reordered.pt", tmp_path / "m.json").status == 0
    for accepted in ([], ["--fail-on", "missing"], ["--ignore", "missing epoch # not needed"]):
        done = run("diff", "--values", tmp_path / "less.pt", tmp_path / "m.json", *accepted)
        assert (done.status, done.out.splitlines()[1]) == (1, "only one side has some of the non-tensor entries")
        assert "non-tensor entries in right only: epoch" in done.err


def test_remap_writes_a_manifest_of_its_output(run: Run, tmp_path: Path) -> None:
    torch.save(training_checkpoint(), tmp_path / "a.pt")
    out, manifest_path = tmp_path / "b.pt", tmp_path / "b.json"
    arguments = ("remap", tmp_path / "a.pt", "-o", out, "--rule", "weight => w", "--manifest", manifest_path)
    assert run(*arguments, "--dry-run").status == 0
    assert not manifest_path.exists()
    assert run(*arguments).status == 0
    assert run("diff", "--values", out, manifest_path).status == 0
    refused = run("remap", tmp_path / "a.pt", "-o", tmp_path / "c.pt", "--manifest", manifest_path)
    assert refused.status == 2
    assert not (tmp_path / "c.pt").exists()


def test_commands_that_need_values_refuse_a_manifest(run: Run, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    manifest(run, str(tmp_path / "a.pt"), tmp_path / "m.json")
    refused = run("remap", tmp_path / "m.json", "-o", tmp_path / "b.pt")
    assert refused.status == 2
    assert "is a manifest: digests, and no values" in refused.err
    assert run("inspect", tmp_path / "m.json", "--stats").status == 2
    assert run("inspect", tmp_path / "m.json").status == 0


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data["subject"][0]["digest"].update(sha256="00"), "$.subject[0].digest.sha256"),
        (lambda data: data["subject"][0]["digest"].update(sha256=5), "$.subject[0].digest.sha256"),
        (lambda data: data["subject"][0]["digest"].update(sha256="A" * 64), "$.subject[0].digest.sha256"),
        (lambda data: data["subject"][0]["digest"].update(sha256="0" * 65), "$.subject[0].digest.sha256"),
        (lambda data: data.update(predicateType="other"), "$.predicateType"),
        (lambda data: data["predicate"]["sections"][0]["tensors"][1].pop("dtype"), "tensors[1].dtype"),
        (lambda data: data["predicate"]["sections"][0]["tensors"][0].update(bytes=5), "another size"),
        (lambda data: data["predicate"]["sections"][0]["tensors"][0].update(sha256=None), "no digest"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_path_of_the_damage(
    run: Run, tmp_path: Path, change: Any, place: str
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    data = manifest(run, str(tmp_path / "a.pt"), tmp_path / "m.json")
    change(data)
    (tmp_path / "m.json").write_text(json.dumps(data))
    done = run("diff", "--values", tmp_path / "a.pt", tmp_path / "m.json")
    assert done.status == 2
    assert place in done.err


def test_a_changed_file_in_a_subfolder_is_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m" / "sub").mkdir(parents=True)
    save_file({"a": torch.zeros(2)}, tmp_path / "m" / "sub" / "x.safetensors")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "sub/x.safetensors"}}))
    manifest(run, str(tmp_path / "m"), tmp_path / "m.json")
    assert run("diff", "--values", tmp_path / "m", tmp_path / "m.json").status == 0
    (tmp_path / "m" / "own.json").write_bytes((tmp_path / "m.json").read_bytes())  # a manifest does not list itself
    inside = run("diff", "--values", tmp_path / "m", tmp_path / "m" / "own.json", "--format", "json")
    assert notes_in(inside.data) == ["the files and the manifest are the same, byte for byte"]
    more = run("diff", "--values", tmp_path / "m", tmp_path / "m.json", "--format", "json")
    assert (more.status, notes_in(more.data)) == (0, ["not among the manifest's files: own.json"])
    save_file({"a": torch.ones(2)}, tmp_path / "m" / "sub" / "x.safetensors")
    assert run("diff", "--values", tmp_path / "m", tmp_path / "m.json").status == 1


def test_a_manifest_of_a_url_includes_subfolders(run: Run, tmp_path: Path) -> None:
    """It matches the manifest of the local folder, and a change in a deep subfolder is reported."""
    import fsspec

    folder = Path(written(tmp_path, "folder/model.safetensors.index.json"))
    (folder / "one" / "two").mkdir(parents=True)
    (folder / "one" / "two" / "tokens.json").write_text("{}")
    memory, url = fsspec.filesystem("memory"), "memory://manifests"
    memory.put(f"{folder}/", f"{url}/", recursive=True)
    local, remote = (manifest(run, ckpt, tmp_path / f"{name}.json") for name, ckpt in (("a", str(folder)), ("b", url)))
    assert [subject["name"] for subject in local["subject"]] == sorted(subject["name"] for subject in remote["subject"])
    assert {str(subject) for subject in local["subject"]} == {str(subject) for subject in remote["subject"]}
    assert "one/two/tokens.json" in {subject["name"] for subject in remote["subject"]}
    done = run("diff", "--values", url, tmp_path / "a.json")
    assert (done.status, "differs from the manifest" in done.out) == (0, False)
    memory.pipe(f"{url}/one/two/tokens.json", b"[]")
    assert "one/two/tokens.json differs from the manifest" in run("diff", "--values", url, tmp_path / "a.json").out


def test_a_manifest_omits_left_out_files_and_entries_that_are_not_files(tmp_path: Path) -> None:
    folder = Path(written(tmp_path, "folder/model.safetensors.index.json"))
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "own.json").write_text("{}")
    os.mkfifo(folder / "pipe")
    result = ckpttool.manifest(str(folder), leave_out=[str(folder / "own.json")])
    names = {path.name for path in folder.iterdir()} - {"gone", "own.json", "pipe"}
    assert {subject["name"] for subject in result["subject"]} == names


def test_a_manifest_of_a_url_matches_the_local_file(run: Run, tmp_path: Path) -> None:
    import fsspec

    path = Path(written(tmp_path, "a.safetensors"))
    fsspec.filesystem("memory").pipe("memory://manifests-of-one/a.safetensors", path.read_bytes())
    local = manifest(run, str(path), tmp_path / "here.json")
    assert manifest(run, "memory://manifests-of-one/a.safetensors", tmp_path / "there.json") == local


@pytest.mark.parametrize(("depth", "status"), [(64, 0), (65, 2)])
def test_the_depth_of_folders_at_a_url_is_limited(run: Run, tmp_path: Path, depth: int, status: int) -> None:
    import fsspec

    memory, url = fsspec.filesystem("memory"), f"memory://manifests-deep-{depth}"
    folder = Path(written(tmp_path, "folder/model.safetensors.index.json"))
    memory.put(f"{folder}/", f"{url}/", recursive=True)
    memory.pipe(f"{url}/{'d/' * depth}f", b"x")
    done = run("inspect", url, "--manifest", tmp_path / "m.json")
    assert (done.status, "more than 64 folders inside each other" in done.err) == (status, status == 2), done.err
