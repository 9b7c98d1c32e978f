"""Sharded checkpoints: reading, renaming, resharding; transformers and safetensors are the
oracles.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.serialization._base import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
import real_models
from ckpttool import CkptError, open_checkpoint
from command import Run, main
from surroundings import limited

INDEX = "model.safetensors.index.json"
RULE = "model.{x*} => trunk.{x*}"


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return dict(real_models.build("llama", 0).state_dict())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    real_models.build("llama", 0).save_pretrained(folder, max_shard_size="10KB")
    return folder


def remap(*words: object, status: int = 0) -> None:
    assert main(["convert" if "--max-shard-size" in words else "remap", *map(str, words)]) == status


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], **index: Any) -> Path:
    """Write a sharded checkpoint; `index` replaces items of its index."""
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name) if name.endswith("s") else torch.save(
            tensors, folder / name
        )
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    path = folder / INDEX
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map} | index, indent=2)
    )
    return path


def same(left: Path, right: Path) -> bool:
    names = sorted(path.name for path in left.iterdir())
    return names == sorted(path.name for path in right.iterdir()) and all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in names
    )


def loads(folder: Path, expected: Mapping[str, torch.Tensor]) -> bool:
    """Return whether `from_pretrained` restores these tensors."""
    found = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


def test_the_index_matches_transformers(llama: Path, expected: dict[str, torch.Tensor]) -> None:
    for operand in (llama, llama / INDEX):
        checkpoint = open_checkpoint(str(operand))
        assert checkpoint.format == "sharded"
        assert checkpoint.source == str(operand)
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.notes == ()
        assert {e.key: (e.shape, e.dtype) for e in checkpoint.sections[0].tensors} == {
            key: (tuple(value.shape), "float32") for key, value in expected.items()
        }
        for entry in checkpoint.sections[0].tensors:
            span = entry.span
            assert span is not None
            data = Path(span.path).read_bytes()[span.offset : span.offset + span.length]
            assert data == expected[entry.key].numpy().tobytes()


def test_a_rename_keeps_the_shards_and_its_inverse_restores_the_bytes(
    llama: Path, tmp_path: Path
) -> None:
    remap(llama, "-o", tmp_path / "renamed", "--rule", RULE, "--verify")
    before, after = (
        json.loads((folder / INDEX).read_text()) for folder in (llama, tmp_path / "renamed")
    )
    assert {
        key.replace("model.", "trunk."): shard for key, shard in before["weight_map"].items()
    } == after["weight_map"]
    assert before["metadata"] == after["metadata"]
    assert not (tmp_path / "renamed" / "config.json").exists()  # it describes the old keys
    remap(tmp_path / "renamed", "-o", f"{tmp_path}/back/", "--rule", RULE, "--reverse", "--verify")
    shutil.copy(llama / "config.json", tmp_path / "back")
    assert same(llama, tmp_path / "back")


def test_a_rename_in_place_and_its_inverse_restore_the_bytes(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "m")
    remap(tmp_path / "m", "--in-place", "--rule", "model.{x*} => trunk.{x*}", "--verify")
    remap(
        tmp_path / "m" / INDEX,
        "--in-place",
        "--rule",
        "model.{x*} => trunk.{x*}",
        "--reverse",
        "--verify",
    )
    (record,) = (tmp_path / "m").glob(".*.ckpttool.undo")
    record.unlink()
    assert same(llama, tmp_path / "m")


@pytest.mark.parametrize(
    "out",
    ["model.safetensors", "model.pt", "other/", f"other/{INDEX}", "o/pytorch_model.bin.index.json"],
)
def test_a_conversion_and_its_inverse_restore_the_values(
    llama: Path, expected: dict[str, torch.Tensor], tmp_path: Path, out: str
) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "other").mkdir()
    remap(llama, "-o", f"{tmp_path}/{out}", "--max-shard-size", "20KB", "--verify")
    remap(
        tmp_path / out.rstrip("/"),
        "-o",
        f"{tmp_path}/back/",
        "--max-shard-size",
        "10KB",
        "--verify",
    )
    shutil.copy(llama / "config.json", tmp_path / "back")
    assert loads(tmp_path / "back", expected)


def test_resharding_matches_transformers(
    llama: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(expected, tmp_path / "model.pt")
    remap(tmp_path / "model.pt", "-o", f"{tmp_path}/out/", "--max-shard-size", "10KB", "--verify")
    theirs, ours = (
        json.loads((folder / INDEX).read_text()) for folder in (llama, tmp_path / "out")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert set(ours["weight_map"].values()) == set(theirs["weight_map"].values())
    shutil.copy(llama / "config.json", tmp_path / "out")
    assert loads(tmp_path / "out", expected)
    with safe_open(tmp_path / "out" / "model-00001-of-00012.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}


def test_shards_do_not_exceed_the_limit(llama: Path, tmp_path: Path) -> None:
    remap(llama, "-o", f"{tmp_path}/out/", "--max-shard-size", "30KB")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    for shard in shards:
        assert sum(value.nbytes for value in load_file(shard).values()) <= 30_000


def test_a_single_file_has_no_index(
    llama: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    remap(llama, "-o", f"{tmp_path}/out/", "--max-shard-size", "1GB", "--verify")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    assert loads(tmp_path / "out", expected)
    remap(f"{tmp_path}/out", "-o", f"{tmp_path}/again", "--rule", RULE, "--verify")
    assert (tmp_path / "again" / "model.safetensors").is_file()
    remap(
        f"{tmp_path}/out",
        "-o",
        f"{tmp_path}/again",
        "--max-shard-size",
        "30KB",
        "--force",
        "--verify",
    )
    assert not (tmp_path / "again" / "model.safetensors").exists()
    assert loads(tmp_path / "again", expected)


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--dtype", "bfloat16"],
        ["remap", "--rules", "cast.toml"],
        ["remap", "--rules", "moved.toml"],
    ],
)
def test_computed_tensors_stay_in_their_shards(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cast.toml").write_text('[[rule]]\ncast = "{x*}"\ndtype = "bfloat16"\n')
    rename = f'[[rule]]\nrename = "{RULE}"\n'
    Path("moved.toml").write_text(Path("cast.toml").read_text() + rename)
    assert main([words[0], str(llama), "-o", "out/", *words[1:], "--verify"]) == 0
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (llama, Path("out")))
    shards = {key.replace("trunk.", "model."): name for key, name in after["weight_map"].items()}
    assert shards == before["weight_map"]
    assert after["metadata"]["total_size"] * 2 == before["metadata"]["total_size"]
    for name in set(shards.values()):
        old, new = load_file(llama / name), load_file(f"out/{name}")
        assert [value.tolist() for value in new.values()] == [
            value.bfloat16().tolist() for value in old.values()
        ]


@pytest.mark.parametrize(("dropped", "names"), [("b", (1, 2)), ("[bc]", ())])
def test_shards_that_are_left_get_new_numbers(
    tmp_path: Path, dropped: str, names: tuple[int, ...]
) -> None:
    shards = {f"model-0000{n}-of-00003.safetensors": key for n, key in enumerate("abc", 1)}
    write(tmp_path / "in", {name: {key: torch.ones(2)} for name, key in shards.items()})
    remap(tmp_path / "in", "-o", f"{tmp_path}/out/", "--drop", dropped, "--verify")
    expected = {f"model-0000{n}-of-00002.safetensors" for n in names} | {INDEX}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == (expected if names else {"model.safetensors"})
    kept = set("abc") - set(dropped)
    assert {entry.key for entry in open_checkpoint(f"{tmp_path}/out").sections[0].tensors} == kept


def test_tied_weights_are_saved_once_or_under_both_names(tmp_path: Path) -> None:
    model = real_models.build("tied_llama", 0)
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    remap(tmp_path / "tied.pt", "-o", f"{tmp_path}/out/", status=1)
    remap(
        tmp_path / "tied.pt", "-o", f"{tmp_path}/out/", "--keep-aliases", "--max-shard-size", "10KB"
    )
    model.config.save_pretrained(tmp_path / "out")
    expected = model.state_dict()
    assert loads(tmp_path / "out", expected)
    (tmp_path / "bin").mkdir()
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    remap(tmp_path / "tied.pt", "-o", index, "--max-shard-size", "10KB", "--verify")
    written = json.loads(index.read_text())
    assert (
        written["weight_map"]["lm_head.weight"]
        == written["weight_map"]["model.embed_tokens.weight"]
    )
    assert written["metadata"]["total_size"] == sum(
        {v.data_ptr(): v.nbytes for v in expected.values()}.values()
    )
    assert len(open_checkpoint(str(index)).sections[0].aliases()) == 1
    model.config.save_pretrained(tmp_path / "bin")
    assert loads(tmp_path / "bin", expected)


def test_each_shard_keeps_its_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(2)}},
    )
    save_file(
        {"x": torch.ones(2)}, tmp_path / "m" / "a.safetensors", {"format": "pt", "part": "first"}
    )
    save_file(
        {"y": torch.ones(2)}, tmp_path / "m" / "b.safetensors", {"format": "pt", "part": "second"}
    )
    assert open_checkpoint(str(path)).metadata == {"format": "pt"}
    remap(path, "-o", f"{tmp_path}/out/", "--rule", "{k} => z.{k}")
    for name, part in (("a", "first"), ("b", "second")):
        with safe_open(tmp_path / "out" / f"{name}.safetensors", "pt") as shard:
            assert shard.metadata() == {"format": "pt", "part": part}


def test_a_dropped_tensor_and_an_empty_shard_are_removed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(3)}},
    )
    remap(path, "-o", f"{tmp_path}/out/", "--drop", "y", "--verify")
    assert json.loads((tmp_path / "out" / INDEX).read_text()) == {
        "metadata": {"total_size": 8},
        "weight_map": {"x": "a.safetensors"},
    }
    assert not (tmp_path / "out" / "b.safetensors").exists()


def test_all_contradictions_are_reported(tmp_path: Path) -> None:
    shards = {
        name: {name[0]: torch.ones(2)}
        for name in ("a.safetensors", "b.safetensors", "c.safetensors")
    }
    path = write(
        tmp_path / "m",
        shards,
        weight_map={
            "a": "a.safetensors",
            "b": "a.safetensors",
            "b2": "b.safetensors",
            "gone": "gone.safetensors",
            "out": "../secret.safetensors",
            "root": "/etc/passwd",
            "c": "c.safetensors",
        },
    )
    (tmp_path / "m" / "c.safetensors").write_bytes(b"\x08" + bytes(7) + b"{       ")
    with pytest.raises(CkptError, match="disagree") as caught:
        open_checkpoint(str(path))
    places = {problem.key: problem.problem for problem in caught.value.problems}
    assert places.keys() == {
        "gone.safetensors", "../secret.safetensors", "/etc/passwd", "c.safetensors"
    }  # fmt: skip
    assert "missing" in places["gone.safetensors"]
    assert "leads out" in places["../secret.safetensors"]
    assert "leads out" in places["/etc/passwd"]


def test_shards_named_with_a_dot_and_slash_are_read(llama: Path, tmp_path: Path, run: Run) -> None:
    """transformers reads them, as joined with the name of the folder."""
    folder = shutil.copytree(llama, tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    names = index["weight_map"]
    index["weight_map"] = {key: f"./{name}" for key, name in names.items()}
    (folder / INDEX).write_text(json.dumps(index))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = dict(model.state_dict())
    remap(folder, "-o", tmp_path / "one.safetensors", "--max-shard-size", "1GB")
    found = load_file(tmp_path / "one.safetensors")
    assert found.keys() == names.keys() <= expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert "index" not in run("inspect", folder).err
    remap(folder, "-o", f"{tmp_path}/out/", "--rule", RULE)
    written = json.loads((tmp_path / "out" / INDEX).read_text())
    assert set(written["weight_map"].values()) == set(names.values())


@pytest.mark.parametrize("name", ["", ".", "a\0b", "sub/./b.safetensors", "sub//b.safetensors"])
def test_a_shard_without_a_plain_name_is_named(tmp_path: Path, run: Run, name: str) -> None:
    shards = {"a.safetensors": {"a": torch.ones(2)}}
    path = write(tmp_path / "m", shards, weight_map={"a": "a.safetensors", "b": name})
    done = run("inspect", path, "--format", "json")
    assert done.status == 2
    (problem,) = done.data["problems"]
    assert "is not the plain name of a file in the folder" in problem["problem"]
    assert problem["key"]


def test_the_note_on_a_missing_index_has_a_command_that_runs(tmp_path: Path, run: Run) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.ones(2)},
        "model-00002-of-00002.safetensors": {"b": torch.ones(2)},
    }
    folder = tmp_path / "with a space"
    write(folder, shards).unlink()
    command = run("inspect", folder).err.split("`")[1]
    program, *words = shlex.split(command)
    assert (program, words[-1]) == ("ckpttool", "OUT/")
    assert run(*words[:-1], f"{tmp_path}/out/").status == 0
    assert (tmp_path / "out" / INDEX).exists()


def test_shards_of_several_formats_are_named_by_title(tmp_path: Path, run: Run) -> None:
    shards = {"a.safetensors": {"a": torch.ones(2)}, "b.bin": {"b": torch.ones(2)}}
    done = run("inspect", write(tmp_path / "m", shards))
    assert done.status == 2
    assert "is in another format than other shards: torch.save" in done.err


def test_a_wrong_total_size_is_reported_and_fixed(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"a": torch.ones(2)}, "b.safetensors": {"b": torch.ones(2)}}
    path = write(tmp_path / "m", shards, metadata={"total_size": 7})
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.notes == ("the index says total_size 7, the tensors are 16 bytes",)
    remap(path, "-o", f"{tmp_path}/out/", "--drop", "a")
    assert json.loads((tmp_path / "out" / INDEX).read_text())["metadata"] == {"total_size": 8}


@pytest.mark.parametrize(("ascii_only", "end"), [(True, ""), (False, "\n")])
@pytest.mark.parametrize("indent", [None, 2, 4])
@pytest.mark.parametrize("keys", ["ab", "ba"])
def test_the_index_keeps_its_formatting_and_order(
    tmp_path: Path, keys: str, indent: int | None, ascii_only: bool, end: str
) -> None:
    """In any order or sorted, with all other items; the inverse rename restores the text."""
    shards = {f"{key}.safetensors": {f"é.{key}": torch.ones(2)} for key in "ab"}
    path = write(tmp_path / "m", shards)
    value: dict[str, Any] = {
        "note": "ü",
        "weight_map": {f"é.{key}": f"{key}.safetensors" for key in keys},
        "metadata": {"by": "x", "total_size": 16},
    }
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only) + end, "utf-8")
    new = "é.z" if keys == "ab" else "é.0"
    remap(path, "-o", f"{tmp_path}/out/", "--rule", f"é.a => {new}")
    renamed = {"é.a": new, "é.b": "é.b"}
    value["weight_map"] = {renamed[key]: own for key, own in value["weight_map"].items()}
    if keys == "ab":
        value["weight_map"] = dict(sorted(value["weight_map"].items()))
    expected = json.dumps(value, indent=indent, ensure_ascii=ascii_only) + end
    assert (tmp_path / "out" / INDEX).read_text("utf-8") == expected
    remap(tmp_path / "out", "-o", f"{tmp_path}/back/", "--rule", f"{new} => é.a")
    assert same(tmp_path / "m", tmp_path / "back")


def test_a_total_size_is_added_to_the_index(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"a.safetensors": {"a": torch.ones(2)}})
    path.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    assert open_checkpoint(str(path)).notes == ()
    remap(path, "-o", f"{tmp_path}/out/", "--rule", "a => b")
    expected = {"metadata": {"total_size": 8}, "weight_map": {"b": "a.safetensors"}}
    assert (tmp_path / "out" / INDEX).read_text() == json.dumps(expected)


@pytest.mark.parametrize(
    ("total_size", "is_noted"), [(40, False), (64, False), (63, True), ("40", True), (None, False)]
)
def test_tied_tensors_may_count_once_or_each(
    tmp_path: Path, total_size: object, is_noted: bool
) -> None:
    weight = torch.ones(6)
    path = write(
        tmp_path / "m", {"a.bin": {"w": weight, "tied": weight}, "b.bin": {"b": torch.ones(4)}}
    )
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"metadata": {"total_size": total_size}})
    )
    assert bool(open_checkpoint(str(path)).notes) == is_noted


def test_shards_are_named_after_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "in.pt")
    for index, name in (("own.safetensors.index.json", "own"), ("own.bin.index.json", "own")):
        (tmp_path / index).mkdir()
        ending = index.split(".")[1]
        remap(tmp_path / "in.pt", "-o", tmp_path / index / index, "--max-shard-size", "8")
        assert {path.name for path in (tmp_path / index).iterdir()} == {
            index, f"{name}-00001-of-00002.{ending}", f"{name}-00002-of-00002.{ending}"
        }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "b", "a": "c"}}',
        b'{"weight_map": {"a": "b"}, "metadata": 3}',
        b'{"weight_map": ' + b"[" * 100_000,
        b'{"weight_map": {"a": "fifo"}}',
        b'{"weight_map": {"a": "."}}',
        b'{"weight_map": {"a": "x.index.json"}}',
    ],
)
def test_damaged_indexes_are_refused(tmp_path: Path, text: bytes) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "x.index.json").write_bytes(text)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(str(tmp_path / "x.index.json"))
    assert caught.value.exit_status == 2


def test_shards_of_two_formats_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m", {"a.bin": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(2)}}
    )
    with pytest.raises(CkptError, match="disagree") as caught:
        open_checkpoint(str(path))
    assert {problem.key for problem in caught.value.problems} == {"a.bin", "b.safetensors"}


def test_files_are_only_overwritten_with_force(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("mine")
    remap(tmp_path / "m", "-o", tmp_path / "m", "--rule", RULE, status=2)
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    remap(tmp_path / "w.pt", "-o", tmp_path / "m", status=2)
    assert (tmp_path / "m" / INDEX).read_bytes() == (llama / INDEX).read_bytes()
    remap(tmp_path / "w.pt", "-o", tmp_path / "m", "--force", "--verify")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip


class Doubled(nn.Linear):
    """Saves twice its weight under the same key."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._back)

    @staticmethod
    def _out(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
    ) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _back(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: object
    ) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


@pytest.mark.parametrize("way", ["kept", "resharded"])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_are_marked_with_their_form(tmp_path: Path, ending: str, way: str) -> None:
    """Keys, shapes and dtypes are the same for both forms, so only the mark in the shards
    distinguishes them.
    """
    torch.manual_seed(0)
    model = Doubled()
    state, runtime = dict(model.state_dict()), dict(model.named_parameters())
    path = write(tmp_path / "m", {f"{key}.{ending}": {key: value} for key, value in state.items()})
    name = "pytorch_model.bin.index.json" if ending == "bin" else INDEX
    path.rename(path.with_name(name))
    at = tmp_path / "m"
    for number, form in enumerate(("runtime", "serialized", "runtime", "runtime", "serialized")):
        words = ("--model", f"{__file__}:Doubled", "--to", form)
        remap(at, *words, "-o", tmp_path / str(number) / name)
        at = tmp_path / str(number)
        if way == "resharded":
            remap(
                at,
                "-o",
                tmp_path / f"{number} again" / name,
                "--max-shard-size",
                "36" if number % 2 else "72",
            )
            at = tmp_path / f"{number} again"
        remap(at, "-o", tmp_path / f"{number}.safetensors")
        found = load_file(tmp_path / f"{number}.safetensors")
        expected = runtime if form == "runtime" else state
        assert all(torch.equal(found[key], value) for key, value in expected.items()), (
            number,
            form,
        )


def test_a_note_names_the_option_that_reads_an_unmarked_form(tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    state = dict(Doubled().state_dict())
    save_file(state, tmp_path / "in.safetensors")
    model = ("--model", f"{__file__}:Doubled")
    done = run(
        "remap", tmp_path / "in.safetensors", *model, "--to", "runtime", "-o", tmp_path / "out.dcp"
    )
    assert (done.status, "read it with --from runtime" in done.err) == (0, True)
    words = ("--from", "runtime", "--to", "serialized")
    assert (
        run(
            "remap", tmp_path / "out.dcp", *model, *words, "-o", tmp_path / "back.safetensors"
        ).status
        == 0
    )
    assert torch.equal(load_file(tmp_path / "back.safetensors")["weight"], state["weight"])


def test_objects_are_copied(tmp_path: Path) -> None:
    shards: dict[str, dict[str, Any]] = {
        "a.bin": {"x": torch.ones(2), "x._extra_state": {"n": 1}},
        "b.bin": {"y": torch.zeros(2)},
    }
    path = tmp_path / "m" / "pytorch_model.bin.index.json"
    path.parent.mkdir()
    for name, content in shards.items():
        torch.save(content, tmp_path / "m" / name)
    weight_map = {key: name for name, content in shards.items() for key in content}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert [extra.key for extra in open_checkpoint(str(path)).sections[0].extras] == [
        "x._extra_state"
    ]
    remap(path, "-o", tmp_path / "other" / path.name, status=1)
    remap(path, "-o", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert (found["x"].tolist(), found["x._extra_state"], found["y"].tolist()) == (
        [1, 1],
        {"n": 1},
        [0, 0],
    )


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (
            lambda folder: (folder / "a.safetensors").write_bytes(
                bytes([10, *[0] * 7]) + b'{"a":null}'
            ),
            ["not an object with dtype, shape and data_offsets @ a.safetensors: a"],
        ),
        (
            lambda folder: torch.save(
                {}, folder / "a.safetensors", _use_new_zipfile_serialization=False
            ),
            ["is in a format that shards cannot have: torch.save before torch 1.6 @ a.safetensors"],
        ),
        (
            lambda folder: torch.save([torch.ones(2)], folder / "a.safetensors"),
            ["does not hold one state dict @ a.safetensors"],
        ),
        (
            lambda folder: torch.save({}, folder / "a.safetensors"),
            ["does not hold one state dict @ a.safetensors"],
        ),
        (
            lambda folder: torch.save(
                {"a": torch.ones(2), "m": {"b": torch.ones(2)}}, folder / "a.safetensors"
            ),
            ["does not hold one state dict @ a.safetensors"],
        ),
    ],
)
def test_shards_that_the_index_contradicts_are_refused(
    tmp_path: Path, change: Any, problems: list[str]
) -> None:
    path = write(
        tmp_path / "m",
        {"a.safetensors": {"a": torch.ones(2)}, "b.safetensors": {"b": torch.ones(2)}},
    )
    change(tmp_path / "m")
    with pytest.raises(CkptError, match="disagree") as caught:
        open_checkpoint(str(path))
    assert list(map(str, caught.value.problems)) == problems


def test_exchanged_shards_are_read_with_a_note(tmp_path: Path) -> None:
    """transformers reads all tensors of the shards that the index names."""
    shards = {"a.safetensors": {"a": torch.ones(2)}, "b.safetensors": {"b": torch.zeros(2)}}
    path = write(tmp_path / "m", shards)
    for old, new in ("ac", "ba", "cb"):
        (tmp_path / f"m/{old}.safetensors").rename(tmp_path / f"m/{new}.safetensors")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.section("").keys == ["a", "b"]
    (note,) = checkpoint.notes
    assert note.startswith("2 keys in another shard than the index says: b (a.safetensors, not b")


def test_an_index_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"a.safetensors": {"a": torch.ones(2)}})
    nbytes = path.stat().st_size
    with limited(json_bytes=nbytes):
        open_checkpoint(str(path))
    with limited(json_bytes=nbytes - 1), pytest.raises(CkptError, match="it is longer"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(("drop", "left"), [("y", ["x", "z"]), ("x", ["y", "z"])])
def test_a_dropped_tensor_is_removed_from_its_shard(
    tmp_path: Path, drop: str, left: list[str]
) -> None:
    shards = {
        "a.safetensors": {"x": torch.ones(2), "z": torch.ones(1)},
        "b.safetensors": {"y": torch.ones(3)},
    }
    path = write(tmp_path / "m", shards)
    remap(path, "-o", f"{tmp_path}/out/", "--drop", drop)
    checkpoint = open_checkpoint(f"{tmp_path}/out")
    assert {entry.key for entry in checkpoint.sections[0].tensors} == set(left)


def test_each_shard_gets_new_metadata(tmp_path: Path) -> None:
    """A changed item of one shard stays in that shard; a removed item is removed from all
    shards.
    """
    path = write(
        tmp_path / "m",
        {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(2)}},
    )
    for key, own in (("x", {"one": "1"}), ("y", {})):
        name = "a.safetensors" if key == "x" else "b.safetensors"
        save_file(
            {key: torch.ones(2)},
            tmp_path / "m" / name,
            {"format": "pt", "old": "o", "part": key, **own},
        )
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.metadata == {"format": "pt", "old": "o", "one": "1"}
    changed = replace(checkpoint, metadata={"format": "tf", "one": "2", "new": "n"})
    ckpttool.write(changed, f"{tmp_path}/out/")
    found = {}
    for name in ("a.safetensors", "b.safetensors"):
        with safe_open(tmp_path / "out" / name, "pt") as shard:
            found[name] = shard.metadata()
    assert found == {
        "a.safetensors": {"format": "tf", "part": "x", "one": "2", "new": "n"},
        "b.safetensors": {"format": "tf", "part": "y", "new": "n"},
    }


def test_elements_smaller_than_a_byte_stay_in_their_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {f"{key}.safetensors": {key: torch.ones(2)} for key in "ab"})
    for number, key in enumerate("ab"):
        raw = json.dumps({key: {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
        (tmp_path / "m" / f"{key}.safetensors").write_bytes(
            struct.pack("<Q", len(raw)) + raw + bytes([number] * 3)
        )
    remap(path, "-o", f"{tmp_path}/out/", "--rule", "b => z")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {"a": "a.safetensors", "z": "b.safetensors"}
    assert [(tmp_path / "out" / f"{key}.safetensors").read_bytes()[-3:] for key in "ab"] == [
        bytes(3),
        b"\1\1\1",
    ]


def shards_of(
    sizes: Mapping[str, int], limit: int, folder: Path, tied: str = ""
) -> list[list[str]]:
    """Return the keys of each shard of tensors with these numbers of bytes."""
    state = {key: torch.zeros(size, dtype=torch.uint8) for key, size in sizes.items()}
    for key in filter(None, tied.split()):
        state[key] = state[key[0]]
    out = folder / "pytorch_model.bin.index.json"
    ckpttool.convert(state, str(out), max_shard_size=str(limit), force=True, no_fsync=True)
    shards: dict[str, list[str]] = {}
    for key, name in json.loads(out.read_text())["weight_map"].items():
        shards.setdefault(name, []).append(key)
    count = len(shards)
    assert sorted(shards) == [f"pytorch_model-{at + 1:05}-of-{count:05}.bin" for at in range(count)]
    return [shards[name] for name in sorted(shards)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((6, 6, 2, 6, 2, 2), ["a", "bc", "def"]),
        ((5, 5, 1), ["ab", "c"]),
        ((3, 20, 4), ["b", "ac"]),
        ((0, 0), ["ab"]),
    ],
)
def test_shards_are_filled_in_order(
    sizes: tuple[int, ...], expected: list[str], tmp_path: Path
) -> None:
    assert shards_of(dict(zip("abcdef", sizes)), 10, tmp_path) == [list(keys) for keys in expected]


def test_tied_tensors_stay_together_and_count_once(tmp_path: Path) -> None:
    sizes = {"a": 6, "b": 6, "a2": 6, "c": 4}
    assert shards_of(sizes, 10, tmp_path, tied="a2") == [["a", "a2"], ["b", "c"]]


def test_the_shards_are_those_of_huggingface_hub(tmp_path: Path) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        sizes = {f"t{at:02}": chance.randint(0, 30) for at in range(chance.randint(1, 12))}
        limit = chance.randint(1, 40)
        reference = split_state_dict_into_shards_factory(
            {key: (size, key) for key, size in sizes.items()},
            get_storage_size=lambda tensor: tensor[0],
            get_storage_id=lambda tensor: tensor[1],
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=limit,
        )
        expected = [sorted(keys) for keys in reference.filename_to_tensors.values() if keys]
        found = shards_of(sizes, limit, tmp_path)
        assert [sorted(keys) for keys in found if keys] == expected, seed


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1.5kb", 1500), ("1.5KiB", 1536), ("1000", 1000), ("7 B", 7), ("0.001MB", 1000)],
)
def test_sizes_are_read_with_their_unit(text: str, nbytes: int, tmp_path: Path) -> None:
    torch.save({key: torch.zeros(nbytes, dtype=torch.uint8) for key in "ab"}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", f"{tmp_path}/fits/", "--max-shard-size", text)
    assert len([*(tmp_path / "fits").glob("*.safetensors")]) == 2
    torch.save(
        {key: torch.zeros(nbytes // 2, dtype=torch.uint8) for key in "ab"}, tmp_path / "in.pt"
    )
    remap(tmp_path / "in.pt", "-o", f"{tmp_path}/both/", "--max-shard-size", text)
    assert len([*(tmp_path / "both").glob("*.safetensors")]) == 1


@pytest.mark.parametrize("text", ["1GB", "2tib"])
def test_large_sizes_have_room_for_all(text: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(5000)}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", f"{tmp_path}/out/", "--max-shard-size", text)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-1", "GB", "1e9", "5 apples", "2g", "9" * 400 + "TB"]
)
def test_invalid_sizes_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="not a size"):
        ckpttool.convert({"a": torch.ones(1)}, f"{tmp_path}/out/", max_shard_size=text)
