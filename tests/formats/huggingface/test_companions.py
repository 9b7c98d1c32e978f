"""The files next to the weights of a Hugging Face folder: transformers loads OUT, or it has no
config.json.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
import real_models
from command import Run

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")
RULE = "model.layers.{x*} => model.blocks.{x*}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("llama") / "hf"
    model: Any = real_models.build("llama", 0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "onnx").mkdir()
    return folder, {key: value.clone() for key, value in model.state_dict().items()}


def loads(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Return True if from_pretrained restores the saved model, with exactly the saved keys."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    except (OSError, ValueError):
        return False
    assert not any(info.values()), info
    found = model.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (("--max-shard-size", "20KB"), True),
        (("--model", "hf:HF", "--to", "pretrained"), True),
        (("--rule", RULE), False),
        (("--rule", "{x*}.q_proj.{y*} => {x*}.query.{y*}"), False),
    ],
)
def test_config_json_is_copied_only_if_the_output_loads_with_it(
    options: tuple[str, ...],
    described: bool,
    llama: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    run: Run,
) -> None:
    if "HF" in str(options):
        pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
    folder, expected = llama
    words = [word.replace("HF", str(folder)) for word in options]
    command = "convert" if "--max-shard-size" in options else "remap"
    done = run(command, folder, "-o", tmp_path / "out", *words, "--format", "json")
    assert done.status == 0, done.err
    assert loads(tmp_path / "out", expected) is described
    assert (tmp_path / "out/config.json").exists() is described
    assert (tmp_path / "out/tokenizer.json").exists()
    found = done.data["companions"]
    left = {one["name"]: one["reason"] for one in found["left_out"]}
    assert ("config.json" in left) is not described
    assert left["onnx"] == "a folder"
    assert {*found["copied"], *left} >= {"config.json", "generation_config.json", "tokenizer.json"}


def test_a_rename_and_its_inverse_load_after_the_printed_commands(
    llama: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, expected = llama
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    for done in (
        lambda: ckpttool.remap(str(folder), there, rule=[RULE]),
        lambda: ckpttool.remap(there, back, rule=[RULE], reverse=True),
    ):
        (note,) = (note for note in done().notes if "config.json" in note)
        subprocess.run(shlex.split(note.split("`")[1]), check=True)
    assert loads(tmp_path / "back", expected)


def test_in_place_warns_that_config_json_describes_other_keys(
    llama: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = llama
    ckpttool.convert(str(folder), str(tmp_path / "own"), max_shard_size="20KB")
    done = ckpttool.remap(str(tmp_path / "own"), in_place=True, rule=[RULE])
    assert [note for note in done.notes if "config.json" in note]
    done = ckpttool.remap(str(tmp_path / "own"), in_place=True, rule=[RULE], reverse=True)
    assert loads(tmp_path / "own", llama[1])
