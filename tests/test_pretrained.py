"""Read, write, compare and swap the names of from_pretrained, with transformers as the oracle.

`CKPTTOOL_PRETRAINED=all` tries every model of `pretrained_models`.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import pretrained_models
from command import Run, fixes_in, notes_in
from pretrained_models import FEW, MANY

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="transformers 4 keeps no mapping of names as data",
)
ALL = os.environ.get("CKPTTOOL_PRETRAINED") == "all"
MODELS = [*FEW, *MANY] if ALL else list(FEW)
TIED = ["tied", "t5", "gpt2", "bert"]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    model: Any
    folder: Path  # what save_pretrained writes
    plain: Path  # what torch.save writes of state_dict()


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


def _saved(name: str, folder: Path) -> Saved:
    model: Any = pretrained_models.build(name)
    model.save_pretrained(folder / "hf")
    torch.save(model.state_dict(), folder / "plain.pt")
    return Saved(model, folder / "hf", folder / "plain.pt")


def _equal(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_roundtrip_between_state_dict_and_pretrained_names(
    saved: Saved, tmp_path: Path, run: Run
) -> None:
    """Convert to ``state_dict()`` names bit for bit, and back to files that from_pretrained loads
    without a warning.
    """
    model = f"hf:{saved.folder}"
    done = run(
        "remap", saved.folder, "--model", model, "--to", "serialized", "-o", tmp_path / "a.pt"
    )
    assert done.status == 0, done.err
    assert _equal(torch.load(tmp_path / "a.pt"), saved.model.state_dict())
    words = (
        "--model",
        model,
        "--to",
        "pretrained",
        "-o",
        f"{tmp_path / 'out'}/",
        "--verify",
        "--format",
        "json",
    )
    done = run("remap", saved.plain, *words)
    assert done.status == 0, done.err
    assert done.data["to"] == "pretrained"
    assert _equal(
        load_file(tmp_path / "out/model.safetensors"), load_file(saved.folder / "model.safetensors")
    )
    shutil.copy(saved.folder / "config.json", tmp_path / "out")
    loaded, info = type(saved.model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert _equal(loaded.state_dict(), saved.model.state_dict())


def _faults(state: State) -> dict[str, State]:
    """Return the intact state, and copies with one fault each."""
    first, last = min(state), max(state)
    faults = {"intact": state}
    for word, key in (("first", first), ("last", last)) if ALL else (("last", last),):
        faults[f"{word} is missing"] = {name: value for name, value in state.items() if name != key}
        faults[f"{word} is renamed"] = {
            f"{name}x" if name == key else name: value for name, value in state.items()
        }
        faults[f"{word} has another shape"] = {**state, key: state[key].reshape(-1).repeat(2)}
        faults[f"{word} has another dtype"] = {**state, key: state[key].double()}
    return {**faults, "unexpected key": {**state, "more": torch.ones(2)}}


def _loads(model: nn.Module, state: State) -> bool:
    """Return whether from_pretrained reports no missing or unexpected key, and no other shape or
    dtype.
    """
    kind: Any = type(model)
    try:
        _, info = kind.from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=dict(state),
            output_loading_info=True,
        )
    except RuntimeError:
        return False
    return not any(info.values()) and all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize("saved", MODELS if ALL else ["experts", "tied"], indirect=True)
def test_status_0_means_that_from_pretrained_loads_it(
    saved: Saved, tmp_path: Path, run: Run
) -> None:
    shutil.copy(saved.folder / "config.json", tmp_path)
    intact = load_file(saved.folder / "model.safetensors")
    prefix = f"{saved.model.base_model_prefix}."
    bare = {key.removeprefix(prefix): value for key, value in intact.items()}
    assert bare.keys() != intact.keys()
    for fault, state in {**_faults(intact), "no prefix of the base model": bare}.items():
        path = tmp_path / "model.safetensors"
        save_file(
            {key: value.clone() for key, value in state.items()}, path, metadata={"format": "pt"}
        )
        status = run("diff", "--model", f"hf:{tmp_path}", path).status
        assert status == (0 if _loads(saved.model, state) else 1), fault


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _saved("experts", tmp_path_factory.mktemp("experts-alone"))


def test_printed_commands_work(experts: Saved, tmp_path: Path, run: Run) -> None:
    """The model's strict loading rejects the file until it is fixed. The reverse works too, between
    two files.
    """
    model = tmp_path / "code.py"
    model.write_text(
        "import pretrained_models\ndef build():\n    return pretrained_models.build('experts')\n"
    )
    found = run("diff", "--model", f"{model}:build", experts.folder, "--format", "json")
    assert found.status == 1
    assert any("from_pretrained" in note for note in notes_in(found.data))
    (fix,) = fixes_in(found.data)
    assert run(*shlex.split(fix)[1:]).status == 0
    assert run("diff", "--model", f"{model}:build", shlex.split(fix)[-1]).status == 0
    found = run(
        "diff", experts.plain, experts.folder, "--model", f"{model}:build", "--format", "json"
    )
    (fix,) = fixes_in(found.data)
    assert "--to pretrained" in fix
    assert run(*shlex.split(fix)[1:]).status == 0
    again = run(
        "diff", shlex.split(fix)[-1], experts.folder, "--model", f"{model}:build", "--values"
    )
    assert again.status == 0, again.out


def test_into_an_exported_program(experts: Saved, tmp_path: Path, run: Run) -> None:
    inputs = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
    program = torch.export.export(pretrained_models.build("experts", 2), (), inputs, strict=False)
    torch.export.save(program, tmp_path / "p.pt2")
    words = [
        "swap-weights",
        tmp_path / "p.pt2",
        experts.folder,
        "--model",
        f"hf:{experts.folder}",
        "-o",
    ]
    for options in ([], ["--from", "pretrained"]):
        out = tmp_path / f"o{len(options)}.pt2"
        done = run(*words, out, *options)
        assert done.status == 0, done.err
        with torch.no_grad():
            found = torch.export.load(out).module()(**inputs).logits
            assert torch.equal(found, experts.model(**inputs).logits)
    assert run(*words, tmp_path / "no.pt2", "--from", "serialized").status == 1


def test_model_without_pretrained_names_is_refused(
    experts: Saved, tmp_path: Path, run: Run
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    words = ("remap", tmp_path / "a.pt", "-o", tmp_path / "b.pt", "--to", "pretrained")
    assert "needs the model's names" in run(*words).err
    assert (
        "not a model of transformers"
        in run(*words, "--model", "torch.nn:Linear(in_features=2, out_features=2)").err
    )
    assert "no config.json" in run(*words, "--model", f"hf:{tmp_path}").err
    (tmp_path / "config.json").write_text(
        '{"model_type": "no_such", "auto_map": {"AutoConfig": "code.Config"}}'
    )
    (tmp_path / "code.py").write_text("raise SystemExit('the code of a folder was run')")
    refused = run(*words, "--model", f"hf:{tmp_path}")
    assert (refused.status, "was run" in refused.err) == (2, False)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["NoSuchForCausalLM"]}'
    )
    assert "has no NoSuchForCausalLM" in run(*words, "--model", f"hf:{tmp_path}").err


def test_weights_at_a_url(experts: Saved, tmp_path: Path, run: Run) -> None:
    """The weights may be at a URL, but the model's config.json must be a local file."""
    memory = fsspec.filesystem("memory")
    memory.put(f"{experts.folder}/", "memory://pretrained/", recursive=True)
    model = f"hf:{experts.folder}"
    done = run(
        "remap",
        "memory://pretrained",
        "--model",
        model,
        "--to",
        "serialized",
        "-o",
        tmp_path / "a.pt",
    )
    assert done.status == 0, done.err
    assert _equal(torch.load(tmp_path / "a.pt"), experts.model.state_dict())
    done = run("diff", "--model", "hf:memory://pretrained", "memory://pretrained")
    assert (done.status, "a config.json on the disk" in done.err) == (2, True)


def test_like_copies_only_the_wrappers(tmp_path: Path, run: Run) -> None:
    torch.save({"model.up": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"net.down": torch.ones(1)}, tmp_path / "b.pt")
    done = run("remap", tmp_path / "a.pt", "--like", tmp_path / "b.pt", "-o", tmp_path / "c.pt")
    assert (done.status, (tmp_path / "c.pt").exists()) == (1, False)
    assert "--to pretrained" in done.err


def _tied_keys(model: Any) -> list[tuple[str, str]]:
    """Return pairs of keys of one tensor."""
    first: dict[int, str] = {}
    pairs = []
    for key, value in model.state_dict().items():
        twin = first.setdefault(value.data_ptr(), key)
        if twin != key:
            pairs.append((twin, key))
    return pairs


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("values", ["other", "same"])
def test_tied_weights_with_two_values_are_judged_by_from_pretrained(
    name: str, values: str, tmp_path: Path, run: Run
) -> None:
    """transformers does not tie weights that the file has two values for; nothing may be left out
    then.
    """
    model: Any = pretrained_models.build(name)
    model.save_pretrained(tmp_path)
    state = {key: value.clone().contiguous() for key, value in model.state_dict().items()}
    pairs = _tied_keys(model)
    assert pairs
    for twin, key in pairs:
        state[key] = torch.randn_like(state[key]) if values == "other" else state[twin].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    loads = not info["missing_keys"] and not info["unexpected_keys"]
    keeps = all(torch.equal(loaded.state_dict()[key], state[key]) for pair in pairs for key in pair)

    operand = f"hf:{tmp_path}"
    done = run("diff", tmp_path, "--model", operand, "--format", "json")
    assert (done.status == 0) is (loads and keeps), done.out
    untied = [note for note in notes_in(done.data) if "has different values for them" in note]
    assert bool(untied) is (values == "other" and loads and keeps)

    out = tmp_path / "out"
    written = run("remap", tmp_path, "--model", operand, "--to", "pretrained", "-o", f"{out}/")
    if values == "same":
        assert written.status == 0, written.err
        return
    assert written.status == 1
    assert "they would be lost" in written.err
    assert not out.exists()
    keys = [key for _, key in pairs]
    drops = [word for key in keys for word in ("--drop", key)]
    assert (
        run(
            "remap", tmp_path, "--model", operand, "--to", "pretrained", *drops, "-o", f"{out}/"
        ).status
        == 0
    )
