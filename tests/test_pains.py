"""Public issues: each from its symptom through the printed command to a strict load, or to the
expected message.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

import optimizer_models
import real_models
import small_models
from command import Done, Run, fixes_in, notes_in
from files import run_measured
from loading_zoo import Packed, packed_weight
from optimizer_support import save, steps, train
from places import ROOT
from small_models import hooked, lifted, net
from torch_version import needs_torch

torch.set_num_threads(1)
MODELS = Path(small_models.__file__)
State = dict[str, torch.Tensor]


@pytest.fixture
def ask(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in a folder with ``model.py``."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(MODELS, "model.py")
    return run


def fix(done: Done) -> str:
    return str(fixes_in(done.data)[0])


def said(done: Done) -> str:
    """Return the notes and the reasons for the differences."""
    return " ".join(
        [*notes_in(done.data), *(entry["reason"] for entry in done.data.get("entries", ()))]
    )


def diff(ask: Run, *args: str) -> Done:
    return ask("diff", *args, "--format", "json")


def run_printed(ask: Run, command: str, **operands: str) -> str:
    """Run a printed command and return the file that it writes; `operands` replace its
    placeholders.
    """
    words = [operands.get(word, word) for word in shlex.split(command)]
    assert words[0] == "ckpttool"
    answer = ask(*words[1:])
    assert answer.status == 0, answer.err
    return words[words.index("-o") + 1]


def saved(state: Any, name: str = "train.pt") -> str:
    torch.save(state, name)
    return name


def assert_loads(model: nn.Module, path: str, expected: State) -> None:
    state = load_file(path) if path.endswith(".safetensors") else torch.load(path)
    model.load_state_dict(state, strict=True)
    held = model.state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], expected[key]) for key in expected)


def assert_fixed(
    ask: Run, state: Any, model: str, fresh: nn.Module, expected: State, name: str = "train.pt"
) -> Done:
    """Check that a strict load fails, run the printed command, and check that a strict load
    succeeds.
    """
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|size mismatch"):
        fresh.load_state_dict(state, strict=True)
    if name.endswith(".safetensors"):
        save_file(state, name)
    else:
        torch.save(state, name)
    found = diff(ask, "--model", f"model.py:{model}", name)
    assert found.status == 1
    out = run_printed(ask, fix(found))
    assert_loads(fresh, out, expected)
    assert diff(ask, "--model", f"model.py:{model}", out).status == 0
    return found


def test_pytorch_101107_keys_of_a_compiled_model(ask: Run) -> None:
    model: Any = net()
    compiled: Any = torch.compile(model)
    found = assert_fixed(ask, compiled.state_dict(), "net", net(), dict(model.state_dict()))
    assert "torch.compile" in said(found)


@pytest.mark.parametrize("depth", ["root", "layer"])
def test_module_segments_of_data_parallel_at_any_depth(ask: Run, depth: str) -> None:
    model: Any = net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    wrapped: Any = model
    if depth == "root":
        wrapped = DataParallel(model)
    else:
        model.layers[0] = DataParallel(model.layers[0])
    assert_fixed(ask, dict(wrapped.state_dict()), "net", net(), expected)


ORDERS = (
    ("a.pt", "_checkpoint_wrapped_module._orig_mod."),
    ("b.pt", "_orig_mod._checkpoint_wrapped_module."),
)


def test_torchtitan_2622_order_of_wrappers_does_not_matter(ask: Run) -> None:
    expected = dict(net().state_dict())
    for name, prefix in ORDERS:
        assert_fixed(
            ask,
            {prefix + key: value for key, value in expected.items()},
            "net",
            net(),
            expected,
            name,
        )
    assert diff(ask, "a.serialized.pt", "b.serialized.pt", "--values").status == 0


def test_kokoro_368_non_strict_load_would_load_nothing(ask: Run) -> None:
    expected = dict(net().state_dict())
    state = {f"model.generator.{key}": value for key, value in expected.items()}
    assert len(net().load_state_dict(state, strict=False).missing_keys) == len(expected)
    found = diff(ask, "--model", "model.py:net", saved({**state, "loss.weight": torch.ones(2)}))
    assert "left has the prefix `model.generator`" in said(found)
    assert_loads(net(), run_printed(ask, fix(found)), expected)
    assert "leaves out 1 entry of left that the model does not have: loss.weight" in said(found)


def drop_keys(ask: Run, path: Path | str, pattern: str) -> str:
    """Drop entries that no printed command drops, because their values exist nowhere else."""
    assert ask("remap", path, "--drop", pattern, "-o", "dropped.pt", "--force").status == 0
    return "dropped.pt"


def exported(model: nn.Module, sample: torch.Tensor, name: str = "prog.pt2") -> str:
    torch.export.save(torch.export.export(model, (sample,)), name)
    return name


TOKENS = torch.tensor([1, 2])


def test_pytorch_137609_a_hooked_checkpoint_for_an_exported_program(ask: Run) -> None:
    program, model = exported(hooked(), TOKENS), hooked()
    with pytest.raises(RuntimeError, match="Missing key"):
        torch.export.load(program).module().load_state_dict(model.state_dict())
    ckpt = saved(model.state_dict())
    alone = diff(ask, "--model", "model.py:hooked")
    first = run_printed(ask, fix(alone), CKPT=ckpt, **{"PROGRAM.pt2": program})
    known = diff(ask, "--model", "model.py:hooked", ckpt, program)
    unknown = diff(ask, ckpt, program)
    again = fix(unknown).replace("-o prog.", "-o again.")
    outs = [first, run_printed(ask, fix(known)), run_printed(ask, again, MODEL="model.py:hooked")]
    for out in outs:
        assert torch.equal(torch.export.load(out).module()(TOKENS), model(TOKENS))
    renamed = run_printed(ask, fixes_in(known.data)[1])
    torch.export.load(program).module().load_state_dict(torch.load(renamed), strict=True)


def test_pytorch_146053_hooks_that_break_the_state_dict_helpers(ask: Run) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = hooked()
    with pytest.raises(AttributeError):
        get_model_state_dict(model)
    expected = dict(model.state_dict())
    runtime = dict(model.named_parameters())
    ckpt = saved(runtime)
    assert diff(ask, ckpt, saved(expected, "expected.pt"), "--model", "model.py:hooked").status == 1
    out = run_printed(ask, fix(diff(ask, ckpt, "expected.pt", "--model", "model.py:hooked")))
    assert_loads(hooked(), out, expected)


def test_pytorch_3852_param_groups_of_another_size(ask: Run) -> None:
    model: Any = net()
    first, rest = list(model.parameters())[:1], list(model.parameters())[1:]
    optimizer = torch.optim.AdamW([{"params": first}, {"params": rest}])
    model(TOKENS).sum().backward()
    optimizer.step()
    one = torch.optim.AdamW(net().parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        one.load_state_dict(optimizer.state_dict())
    ckpt = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    Path("opt.py").write_text(
        "import torch\ndef adamw(model): return torch.optim.AdamW(model.parameters())\n"
    )
    words = ("--model", "model.py:net", "--optimizer", "opt.py:adamw")
    found = diff(ask, *words, ckpt)
    assert found.status == 1
    assert "different number of parameter groups" in said(found)
    out = run_printed(ask, fix(found))
    one.load_state_dict(torch.load(out)["optimizer"])
    held = list(one.state_dict()["state"].values())
    saved_state = [optimizer.state[parameter] for parameter in (*first, *rest)]
    assert all(
        torch.equal(mine["exp_avg"], theirs["exp_avg"])
        for mine, theirs in zip(held, saved_state, strict=True)
    )


def test_pytorch_124546_state_by_name_for_an_optimizer_with_ids(ask: Run) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model: Any = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).sum().backward()
    optimizer.step()
    named = saved(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    )
    numbered = saved(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "numbered.pt"
    )
    words = ("--model", "model.py:net")
    out = run_printed(ask, fix(diff(ask, *words, f"{named}::optimizer", f"{numbered}::optimizer")))
    fresh = torch.optim.AdamW(net().parameters())
    fresh.load_state_dict(torch.load(out)["optimizer"])
    expected, held = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert all(torch.equal(held[i]["exp_avg"], expected[i]["exp_avg"]) for i in expected)


def test_dinov2_544_one_ranks_flat_parameter(ask: Run) -> None:
    ckpt = saved({"_flat_param": torch.ones(10)}, "rank_0.pt")
    found = diff(ask, "--model", "model.py:net", ckpt)
    assert (found.status, fixes_in(found.data)) == (1, [])
    assert "name the files of all ranks at once, as in 'rank_*.pt'" in said(found)


def test_transformers_20082_placeholders_of_zero_3(ask: Run) -> None:
    state = {key: torch.empty(0) for key in net().state_dict()}
    found = diff(ask, "--model", "model.py:net", saved(state))
    assert (found.status, fixes_in(found.data)) == (1, [])
    assert "ckpttool remap FOLDER -o whole.pt" in said(found)


def test_safetensors_98_tied_weights(ask: Run) -> None:
    model = small_models.tied()
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(state, "tied.safetensors")
    compiled = {f"_orig_mod.{key}": value for key, value in state.items()}
    assert_fixed(ask, compiled, "tied", small_models.tied(), dict(state))


def test_torch_mlir_4744_a_lifted_buffer(ask: Run) -> None:
    program = exported(lifted(), torch.ones(1, 4))
    model: Any = lifted()
    model.scale.fill_(3)
    ckpt = saved({**model.state_dict(), "scale": model.scale})
    for words in ((), ("--model", "model.py:lifted")):
        out = run_printed(ask, fix(diff(ask, *words, ckpt, program)))
        assert torch.equal(
            torch.export.load(out).module()(torch.ones(1, 4)), model(torch.ones(1, 4))
        )
        Path(out).unlink()


def test_pytorch_179278_call_variants_of_an_unflattened_program(ask: Run) -> None:
    state = dict(net().state_dict())
    variants = {**state, "layers.0@1.fc.weight": state["layers.0.fc.weight"]}
    found = assert_fixed(ask, variants, "net", net(), state)
    assert found.data["summary"].get("missing", 0) == 0


def test_transformers_46650_a_rename_that_collides(ask: Run) -> None:
    ckpt = saved({"a.w": torch.ones(1), "b.w": torch.zeros(1)})
    refused = ask("remap", ckpt, "--rule", "{x}.w => c.w", "-o", "out.pt")
    assert refused.status == 1
    assert "@ c.w" in refused.err
    assert not Path("out.pt").exists()


def test_simpletuner_2714_the_source_is_never_overwritten(ask: Run) -> None:
    state = {key: value.clone() for key, value in net().state_dict().items()}
    save_file({f"module.{key}": value for key, value in state.items()}, "m.safetensors")
    mapped = load_file("m.safetensors")
    assert ask("remap", "m.safetensors", "--to", "serialized", "--in-place").status == 0
    assert all(torch.equal(mapped[f"module.{key}"], state[key]) for key in state)
    assert load_file("m.safetensors").keys() == state.keys()
    # no room for longer names
    assert ask("remap", "m.safetensors", "--to", "ddp(ddp)", "--in-place").status == 1


def test_safetensors_549_metadata_is_kept(ask: Run) -> None:
    from safetensors import safe_open

    state = {f"module.{key}": value for key, value in net().state_dict().items()}
    save_file(state, "m.safetensors", metadata={"format": "pt", "step": "3"})
    out = run_printed(ask, fix(diff(ask, "--model", "model.py:net", "m.safetensors")))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    assert_loads(net(), out, dict(load_file(out)))


class Unknown:
    """A training script's class, pickled into its checkpoint."""


def test_comfyui_7425_weights_only_load_failed(ask: Run) -> None:
    state = dict(net().state_dict())
    ckpt = saved(
        {"state_dict": {f"module.{key}": value for key, value in state.items()}, "args": Unknown()}
    )
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(ckpt)
    assert "Unknown" in ask("inspect", ckpt).out
    out = run_printed(ask, fix(diff(ask, "--model", "model.py:net", f"{ckpt}::state_dict")))
    assert_loads(net(), out, state)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
    ],
)
def test_header_too_large_names_the_real_file_type(ask: Run, content: bytes, kind: str) -> None:
    Path("m.safetensors").write_bytes(content)
    answer = ask("inspect", "m.safetensors")
    assert answer.status == 2
    assert kind.lower() in answer.err.lower()
    assert "hint:" in answer.err


def test_vllm_19149_renamed_weights_are_found_before_they_are_sent(ask: Run) -> None:
    """Compare the trainer's checkpoint with the engine's, without a model."""
    state = dict(net().state_dict())
    ckpt = saved(
        {f"base.{key}": value for key, value in state.items()}
        | {"value_head.weight": torch.ones(4)}
    )
    found = diff(ask, ckpt, saved(state, "engine.pt"))
    out = drop_keys(ask, run_printed(ask, fix(found)), "value_head.*")
    assert_loads(net(), out, state)
    assert diff(ask, out, "engine.pt", "--values").status == 0


def test_peft_a_checkpoint_with_adapters_for_the_plain_model(ask: Run) -> None:
    """The base model is extracted by name; a file with only the adapter is reported as an
    adapter.
    """
    from peft import LoraConfig, get_peft_model

    model: Any = net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    peft = get_peft_model(model, LoraConfig(target_modules=["fc"], r=2))
    state = dict(peft.state_dict())
    found = diff(ask, "--model", "model.py:net", saved(state))
    assert "--drop" not in fix(found)
    assert_loads(net(), drop_keys(ask, run_printed(ask, fix(found)), "*lora_*"), expected)
    alone = diff(
        ask,
        "--model",
        "model.py:net",
        saved({k: v for k, v in state.items() if "lora_" in k}, "lora.pt"),
    )
    assert fixes_in(alone.data) == []
    assert "the checkpoint is a LoRA adapter" in said(alone)


def test_megatron_bridge_6032_missing_keys_are_reported(ask: Run) -> None:
    state = dict(net().state_dict())
    found = diff(
        ask, "--model", "model.py:net", saved({k: v for k, v in state.items() if "head" not in k})
    )
    assert (found.status, fixes_in(found.data)) == (1, [])
    assert "head.weight" in said(found)


def test_torchtune_2291_a_hook_with_absolute_keys_under_data_parallel(ask: Run) -> None:
    """The hook renames its key only at the root. Both the model and a checkpoint saved under the
    wrapper show this.
    """
    model = small_models.Absolute()
    expected = dict(model.state_dict())
    breaks = "a state_dict hook looks for absolute keys, and breaks under DDP too"
    assert breaks in said(diff(ask, "--model", "model.py:Absolute"))
    wrapped = dict(DataParallel(model).state_dict())
    assert "module.weight" not in wrapped
    assert breaks in said(assert_fixed(ask, wrapped, "Absolute", small_models.Absolute(), expected))


def moments_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {
        name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("make", ["adamw", "named"])
def test_pytorch_1489_reordered_parameters_get_their_own_moments(ask: Run, make: str) -> None:
    """Match by `param_names`, or by the definition that saved the file if it has only ids."""
    build = getattr(optimizer_models, make)
    old, optimizer = train(optimizer_models.Net, build, 2)
    ckpt, expected = save(Path("old.pt"), old, optimizer), moments_by_name(old, optimizer)

    def resumed(path: str) -> State:
        content, model = torch.load(path), optimizer_models.Reordered()
        model.load_state_dict(content["model"], strict=True)
        fresh = build(model)
        fresh.load_state_dict(content["optimizer"])
        return moments_by_name(model, fresh)

    held = resumed(ckpt)  # torch does not complain
    assert any(held[name].shape != value.shape for name, value in expected.items())
    words = ("--model", "optimizer_models:Reordered", "--optimizer", f"optimizer_models:{make}")
    found = diff(ask, *words, ckpt)
    assert (found.status, found.data["summary"]["order"]) == (1, 9)
    out = run_printed(ask, fix(found), OLD="optimizer_models:Net")
    held = resumed(out)
    assert all(torch.equal(held[name], value) for name, value in expected.items())
    assert diff(ask, *words, out).status == 0


def test_pytorch_7499_state_of_another_optimizer_class(ask: Run) -> None:
    """A remap cannot convert the state: the model is kept, and the optimizer starts from
    scratch.
    """
    model, optimizer = train(optimizer_models.Net, optimizer_models.sgd, 1)
    ckpt, fresh = save(Path("sgd.pt"), model, optimizer), optimizer_models.Net()
    adamw = optimizer_models.adamw(fresh)
    with pytest.raises(KeyError, match="step"):
        adamw.load_state_dict(torch.load(ckpt)["optimizer"])
    words = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:adamw")
    found = diff(ask, *words, ckpt)
    assert found.status == 1
    assert "the state is from SGD, the optimizer is Adam or AdamW" in said(found)
    assert fixes_in(found.data) == []  # discarding the state is the user's decision
    content = torch.load(drop_keys(ask, ckpt, "optimizer"))
    assert content.keys() == {"model", "epoch"}
    fresh.load_state_dict(content["model"], strict=True)
    steps(fresh, optimizer_models.adamw(fresh), 0, 1)


def test_pytorch_142246_package_constants_are_checked_before_loading(ask: Run) -> None:
    """torch accepts a weight of another shape, and computes with it."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    needs_torch("2.9", "package weights outside the compiled code")
    from torch.export.pt2_archive._package import load_pt2

    inductor, x = torch._inductor, torch.linspace(-1, 1, 32).reshape(2, 16)
    outside = {
        "package_constants_in_so": False,
        "package_constants_on_disk_format": "pickle_weights",
    }
    configs = {f"aot_inductor.{name}": value for name, value in outside.items()}
    model, new = small_models.Wide(), small_models.Wide()
    program = torch.export.export(model, (x,))
    inductor.aoti_compile_and_package(program, package_path="package.pt2", inductor_configs=configs)
    loaded = load_pt2("package.pt2", load_weights_from_disk=True).aoti_runners["model"]
    state = dict(new.state_dict())
    wrong = {**state, "fc.weight": state["fc.weight"].t().contiguous()}
    loaded.load_constants(wrong, check_full_update=False)
    assert not torch.allclose(loaded(x), new(x))
    with pytest.raises(RuntimeError, match="Constant not found"):
        loaded.load_constants({**state, "spare": torch.ones(1)}, check_full_update=False)
    for broken, message in (
        (wrong, "shape [16, 64], the program has [64, 16] (from fc.weight) @ fc.weight"),
        (
            {**state, "fc.weight": state["fc.weight"].half()},
            "dtype float16, the program has float32",
        ),
        ({**state, "spare": torch.ones(1)}, "@ spare"),
        ({key: value for key, value in state.items() if key != "out.weight"}, "@ out.weight"),
    ):
        assert diff(ask, saved(broken), "package.pt2").status == 1
        refused = ask("swap-weights", "package.pt2", "train.pt", "-o", "no.pt2")
        assert refused.status == 1
        assert message in refused.err
        assert not Path("no.pt2").exists()
    compiled = {f"_orig_mod.{key}": value for key, value in state.items()}
    out = run_printed(ask, fix(diff(ask, saved(compiled), "package.pt2")))
    assert torch.allclose(
        load_pt2(out, load_weights_from_disk=True).aoti_runners["model"](x), new(x)
    )


def test_torchtitan_1291_rotary_rows_in_another_order(ask: Run) -> None:
    """All keys and shapes match, and a strict load succeeds: only the values differ. The named
    rules fix it.
    """
    model = real_models.llama()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    heads = {"q": 4, "k": 2}  # of 8 rows

    def interleaved(key: str, value: torch.Tensor) -> torch.Tensor:
        count = next((heads[kind] for kind in heads if f".{kind}_proj." in key), 0)
        return (
            value.view(count, 2, 4, 32).transpose(1, 2).reshape(count * 8, 32) if count else value
        )

    tokens = torch.arange(6)[None]
    right = model(tokens).logits
    ckpt = saved({key: interleaved(key, value) for key, value in expected.items()}, "theirs.pt")
    model.load_state_dict(torch.load(ckpt), strict=True)
    assert not torch.allclose(model(tokens).logits, right)
    alone = diff(ask, "--model", "real_models:llama", ckpt)
    assert alone.status == 0
    assert any(
        "model.layers.0.self_attn.q_proj.weight" in keys for keys in alone.data["exchangeable"]
    )
    found = diff(ask, ckpt, saved(expected, "ours.pt"), "--values")
    assert (found.status, found.data["summary"]["value"]) == (1, 4)
    assert "heads of 8: adjacent pairs in left, halves in right" in said(found)
    suggest, fix = (shlex.split(line)[1:] for line in fixes_in(found.data))
    assert ask(*suggest).status == 1
    assert ask(*fix).status == 0
    out = fix[fix.index("-o") + 1]
    assert_loads(model, out, expected)
    assert torch.equal(model(tokens).logits, right)
    assert diff(ask, out, "ours.pt", "--values").status == 0


def test_torchtitan_1441_swapped_norms(ask: Run) -> None:
    """Two tensors of the same shape have each other's names."""
    state = {"first.weight": torch.rand(4), "second.weight": torch.rand(4)}
    ckpt = saved({"first.weight": state["second.weight"], "second.weight": state["first.weight"]})
    found = diff(ask, ckpt, saved(state, "ours.pt"), "--values")
    assert found.status == 1
    assert "left `first` is right `second`" in said(found)
    assert "pass --rule 'FROM => TO'" in said(found)
    assert [(one["code"], len(one["keys"])) for one in found.data["unfixed"]] == [("moved", 2)]
    rules = ("--rule", "first.{x} => second.{x}", "--rule", "second.{x} => first.{x}")
    assert ask("remap", ckpt, *rules, "-o", "out.pt").status == 0
    assert diff(ask, "out.pt", "ours.pt", "--values").status == 0


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_safetensors_458_a_conversion_does_not_need_the_model_in_memory(
    ask: Run, ending: str
) -> None:
    peaks = []
    for count in (1, 1 << 17):  # 1 KiB and 128 MiB
        state = {f"module.layers.{layer}.weight": torch.ones(count, 64) for layer in range(4)}
        command = [
            "remap",
            saved(state),
            "--rule",
            "module.{x*} => {x*}",
            "-o",
            f"out.{ending}",
            "--force",
        ]
        peaks.append(run_measured([sys.executable, "-m", "ckpttool", *command], Path())[1])
    assert peaks[1] - peaks[0] < 32 << 20
    found = (
        load_file("out.safetensors") if ending == "safetensors" else torch.load("out.pt", mmap=True)
    )
    assert {key.removeprefix("module.") for key in state} == found.keys()
    assert all(
        torch.equal(found[key.removeprefix("module.")], value) for key, value in state.items()
    )


def test_safetensors_515_tensor_subclasses_are_kept_or_refused(ask: Run) -> None:
    """They are never flattened: a torch file keeps them, safetensors cannot hold them, and rules
    cannot change them.
    """
    state = dict(packed_weight().state_dict())
    ckpt = saved({f"module.{key}": value for key, value in state.items()})
    found = diff(ask, "--model", "loading_zoo:packed_weight", ckpt)
    out = run_printed(ask, fix(found))
    model = packed_weight()
    with torch.serialization.safe_globals([Packed]):
        model.load_state_dict(torch.load(out), strict=True)
    for key, value in state.items():
        held = model.state_dict()[key]
        assert type(held) is type(value)
        if isinstance(value, Packed):
            assert torch.equal(held.values_, value.values_)
            assert torch.equal(held.scale, value.scale)
        else:
            assert torch.equal(held, value)
    refused = ask("remap", out, "--rule", "weight => kernel", "-o", "out.safetensors")
    assert refused.status == 1
    assert "a subclass tensor has no place in the format: its class " in refused.err
    assert (
        f"{Packed.__name__}, and what each tensor in it is for would be lost @ kernel"
        in refused.err
    )
    assert "write a torch file (OUT ending in .pt)" in refused.err
    Path("rules.toml").write_text('[[rule]]\ncast = "weight"\ndtype = "bfloat16"\n')
    assert ask("remap", out, "--rules", "rules.toml", "-o", "cast.pt").status == 1
    assert not any(Path(name).exists() for name in ("out.safetensors", "cast.pt"))


def test_activation_checkpoint_segment_is_hidden(ask: Run) -> None:
    model: Any = net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    raw = {key: value.detach() for key, value in nn.Module.named_parameters(model)}
    assert_fixed(ask, raw, "net", net(), expected)


def test_every_issue_on_the_page_has_a_test() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tests = {name for name in globals() if name.startswith("test_")}
    named = [
        (where.lower().replace("-", "_"), number)
        for where, number in re.findall(r"([\w-]+)#(\d+)", page)
    ]
    assert named
    assert [one for one in named if not any(f"_{one[0]}_{one[1]}_" in name for name in tests)] == []
    tested = {found[1] for name in tests if (found := re.match(r"test_[a-z_]+_(\d+)_", name))}
    assert tested - {number for _, number in named} == set()
