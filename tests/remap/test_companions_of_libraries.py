"""Files next to the weights that name modules: after a rename, their library can load OUT, or OUT
lacks them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import real_models
from command import Run, notes_in

RENAME = ["--rule", "body.{x*} => trunk.{x*}"]


class Net(nn.Module):
    def __init__(self, first: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(3, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(
            self.get_submodule("trunk" if hasattr(self, "trunk") else "body")(x).relu()
        )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3) + step).square().sum().backward()
        optimizer.step()


def test_accelerate_resumes_a_renamed_folder(tmp_path: Path, run: Run) -> None:
    """`save_state` writes the optimizer, scheduler and RNG states next to the weights."""
    accelerate = pytest.importorskip("accelerate")

    def prepared(first: str) -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = Net(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    accelerator, old, optimizer, scheduler = prepared("body")
    trained(old, optimizer, 2)
    scheduler.step()
    accelerator.save_state(str(tmp_path / "run"))
    trained(old, optimizer, 2)

    done = run("remap", tmp_path / "run", "-o", tmp_path / "out", *RENAME, "--format", "json")
    assert done.status == 0, done.err
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"optimizer.bin", "scheduler.bin", "model.safetensors"} <= files
    assert {path.name for path in (tmp_path / "out").iterdir()} == files

    accelerator, new, optimizer, scheduler = prepared("trunk")
    accelerator.load_state(str(tmp_path / "out"))
    trained(new, optimizer, 2)
    assert [*map(torch.Tensor.tolist, new.parameters())] == [
        *map(torch.Tensor.tolist, old.parameters())
    ]


def test_dcp_loads_a_renamed_folder_by_its_metadata(tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    old = Net("body")
    optimizer = torch.optim.AdamW(old.parameters(), lr=0.1)
    trained(old, optimizer, 1)
    dcp.save({"model": old.state_dict(), "epoch": 3}, checkpoint_id=tmp_path / "in.dcp")
    done = run("remap", tmp_path / "in.dcp", "-o", tmp_path / "out.dcp", *RENAME)
    assert done.status == 0, done.err
    planner = dcp.FileSystemReader(str(tmp_path / "out.dcp")).read_metadata()
    names = {".".join(map(str, path)) for path in (planner.planner_data or {}).values()}
    new = Net("trunk")
    assert names == {*(f"model.{key}" for key in new.state_dict()), "epoch"}
    state = {"model": new.state_dict(), "epoch": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out.dcp")
    assert state["epoch"] == 3
    assert all(
        torch.equal(a, b) for a, b in zip(new.state_dict().values(), old.state_dict().values())
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_ties_weights_missing_from_the_folder(
    tmp_path: Path, run: Run, tied: bool
) -> None:
    """`_tied_weights_keys` and `tie_word_embeddings` tie lm_head.weight to embed_tokens.weight."""
    transformers = pytest.importorskip(
        "transformers", "5.0", reason="transformers 5 is not installed"
    )
    model: Any = real_models.llama(tied)
    model.save_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "plain.pt")

    def loaded(folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
        found, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(info.values()), info
        return found.state_dict(), found.lm_head.weight is found.model.embed_tokens.weight

    # Rename and undo: config.json does not describe the names in between.
    there = ["--rule", "model.layers.{x*} => model.blocks.{x*}"]
    assert run("remap", tmp_path / "hf", "-o", tmp_path / "other", *there).status == 0
    assert not (tmp_path / "other/config.json").exists()
    back = run("remap", tmp_path / "other", "-o", tmp_path / "back", *there, "--reverse")
    assert back.status == 0, back.err
    (tmp_path / "back/config.json").write_bytes((tmp_path / "hf/config.json").read_bytes())
    # Convert state_dict() names, with both names of a tied tensor, to the names of save_pretrained.
    words = [
        "--model",
        f"hf:{tmp_path / 'hf'}",
        "--to",
        "pretrained",
        "-o",
        f"{tmp_path / 'from_plain'}/",
    ]
    done = run("remap", tmp_path / "plain.pt", *words)
    assert done.status == 0, done.err
    (tmp_path / "from_plain/config.json").write_bytes((tmp_path / "hf/config.json").read_bytes())
    for folder in ("back", "from_plain"):
        actual, is_tied = loaded(tmp_path / folder)
        assert is_tied == tied
        expected = model.state_dict()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


CAST = '[[rule]]\ncast = "{pattern}"\ndtype = "bfloat16"\n'


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("words", [["convert", "--dtype", "bfloat16"], ["remap", "--rules", "all"]])
def test_from_pretrained_loads_the_dtype_of_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, field: str, words: list[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    Path("all").write_text(CAST.format(pattern="{x*}"))
    model = real_models.build("llama", 0)
    model.save_pretrained("hf", max_shard_size="20KB")
    config = json.loads(Path("hf/config.json").read_text())
    config = {field if name == "dtype" else name: value for name, value in config.items()}
    config["audio_config"] = {"dtype": "float32", "quantization_config": {"dtype": "float32"}}
    config["vision_config"] = {"dtype": "float16", "size": 1e-06}
    Path("hf/config.json").write_text(json.dumps(config))
    done = run(words[0], "hf", "-o", "out/", *words[1:], "--format", "json")
    assert done.status == 0, done.err
    assert f"config.json is written with {field} bfloat16 instead of float32" in notes_in(done.data)
    assert done.data["companions"]["rewritten"] == ["config.json"]
    written = json.loads(Path("out/config.json").read_text())
    config[field] = config["audio_config"]["dtype"] = "bfloat16"
    assert list(written.items()) == list(config.items())
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert loaded.dtype == torch.bfloat16
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", {"": "float32"}])
def test_a_cast_of_some_weights_leaves_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, dtype: object
) -> None:
    monkeypatch.chdir(tmp_path)
    pattern = "{x*}.weight" if dtype == "float32" else "{x*}"
    Path("some.toml").write_text(CAST.format(pattern=pattern))
    Path("hf").mkdir()
    torch.save(nn.ModuleDict({"body": nn.Linear(2, 2)}).state_dict(), "hf/pytorch_model.bin")
    Path("hf/config.json").write_text(json.dumps({"dtype": dtype}))
    done = run("remap", "hf", "-o", "out/", "--rules", "some.toml", "--format", "json")
    assert done.status == 0, done.err
    (note,) = [note for note in notes_in(done.data) if "config.json" in note]
    assert note.startswith(f"config.json still says dtype {dtype}, to which")
    assert Path("out/config.json").read_text() == Path("hf/config.json").read_text()


def test_quantization_config_is_not_copied_after_a_rename(tmp_path: Path, run: Run) -> None:
    """`modules_to_not_convert` names modules, so a rename omits config.json and reports it."""
    from safetensors.torch import save_file

    folder = tmp_path / "hf"
    folder.mkdir()
    weights = {
        "body.weight": torch.ones(2, 2),
        "body.weight_scale": torch.ones(1),
        "head.weight": torch.ones(2, 2),
    }
    save_file(weights, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["head"]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    renamed = run(
        "remap",
        folder,
        "-o",
        tmp_path / "renamed",
        "--rule",
        "head.{x*} => out.{x*}",
        "--format",
        "json",
    )
    assert renamed.status == 0, renamed.err
    left = {one["name"] for one in renamed.data["companions"]["left_out"]}
    assert left == {"config.json", "quantize_config.json"}
    assert [path.name for path in (tmp_path / "renamed").iterdir()] == ["model.safetensors"]
    for name in left:
        assert any(f"not copied: {name}" in note for note in notes_in(renamed.data))
    resharded = run("convert", folder, "-o", tmp_path / "resharded", "--max-shard-size", "20B")
    assert resharded.status == 0, resharded.err
    assert {*left} <= {path.name for path in (tmp_path / "resharded").iterdir()}
