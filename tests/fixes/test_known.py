"""Regressions: cases in which a printed command was refused, or no fix was suggested."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
import hook_zoo
import small_models
from ckpttool import diff
from ckpttool.core.text import CKPT
from ckpttool.fixes.commands import PART
from ckpttool.naming.match import prefixes
from ckpttool.operands.output import command, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.ruleset.infer_rules import drops
from ckpttool.ruleset.patterns import matches
from ckpttool.tracing import trace as tracing
from command import fixes_in, main, notes_in
from small_models import hooked, net

State = dict[str, Any]
Diff = Callable[..., dict[str, Any]]
MODELS = Path(small_models.__file__)


@pytest.fixture
def diff_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Diff:
    """Run a diff in a folder that has the models in ``model.py``, and return the JSON."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(MODELS, "model.py")

    def run(*args: str) -> dict[str, Any]:
        capsys.readouterr()
        main(["diff", *args, "--format", "json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def saved(state: Any, name: str = "a.pt") -> str:
    torch.save(state, name)
    return name


def run_printed(line: str) -> str:
    words = shlex.split(line)
    assert main(words[1:]) == 0
    return words[words.index("-o") + 1]


def state_of(model: nn.Module) -> dict[str, Any]:
    return dict(model.state_dict())


def with_prefix(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def test_a_models_arguments_are_in_the_command(diff_json: Diff) -> None:
    words = ("--model", "model.py:net(layers=3)")
    found = diff_json(*words, saved(with_prefix("module.", state_of(net(layers=3)))))
    assert "net(layers=3)" in fixes_in(found)[0]
    assert diff_json(*words, run_printed(fixes_in(found)[0]))["identical"]


def test_printed_output_name_is_not_an_existing_file(diff_json: Diff) -> None:
    words = ("--model", "model.py:net", saved(with_prefix("module.", state_of(net()))))
    assert [run_printed(fixes_in(diff_json(*words))[0]) for _ in range(2)] == [
        "a.serialized.pt",
        "a.serialized2.pt",
    ]


@pytest.mark.parametrize("form", ["serialized", "runtime"])
def test_a_model_next_to_a_loss(diff_json: Diff, form: str) -> None:
    """The printed command takes the model's keys, and a note names what it leaves out."""
    state = state_of(hooked())
    if form == "runtime":
        state = {key: value.detach() for key, value in hooked().named_parameters()}
    words = ("--model", "model.py:hooked")
    found = diff_json(*words, saved({**with_prefix("net.", state), "loss.weight": torch.ones(2)}))
    assert [fix["complete"] for fix in found["fix"]] == [True]
    assert "leaves out 1 entry of left that the model does not have: loss.weight" in " ".join(
        notes_in(found)
    )
    hooked().load_state_dict(torch.load(run_printed(fixes_in(found)[0])), strict=True)


@pytest.mark.parametrize("right", ["model", "file"])
def test_no_submodule_is_chosen_if_several_match(diff_json: Diff, right: str) -> None:
    """Student and teacher both match; the note has a command for one of them."""
    plain = state_of(net())
    left = saved({**with_prefix("ema.teacher.", state_of(net())), **with_prefix("student.", plain)})
    words = (*(("--model", "model.py:net") if right == "model" else ()), left)
    words += (saved(plain, "plain.pt"),) if right == "file" else ()
    found = diff_json(*words)
    assert fixes_in(found) == []
    (note,) = (note for note in notes_in(found) if "below each of ema.teacher, student" in note)
    made = run_printed(note.partition("to take one: ")[2])
    net().load_state_dict(torch.load(made))


@pytest.mark.parametrize("right", ["model", "file"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_shapes_decide_between_submodules_with_the_same_names(
    diff_json: Diff, right: str, wrapper: str
) -> None:
    plain = state_of(net())
    other = {key: torch.cat([value, value]) for key, value in plain.items()}
    left = saved(
        with_prefix(
            wrapper,
            {**with_prefix("a.", other), **with_prefix("b.", plain), **with_prefix("c.", other)},
        )
    )
    words = (*(("--model", "model.py:net") if right == "model" else ()), left)
    words += (saved(plain, "plain.pt"),) if right == "file" else ()
    found = diff_json(*words)
    assert fixes_in(found) == []
    (note,) = (note for note in notes_in(found) if "the names and shapes of right below b" in note)
    made = run_printed(note.partition("to take them: ")[2])
    net().load_state_dict(torch.load(made))


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_a_model_that_refuses_its_own_keys_gets_no_fix(diff_json: Diff, prefix: str) -> None:
    """A hook renames keys on saving, but no hook reads them, so a rules file cannot help."""
    model = hook_zoo.partial_hook()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(model.state_dict())
    found = diff_json(
        "--model",
        f"{MODELS.parent}/hook_zoo.py:partial_hook",
        saved(with_prefix(prefix, state_of(model))),
    )
    assert (found["identical"], fixes_in(found)) == (False, [])
    if not prefix:
        assert {entry["code"] for entry in found["entries"] if entry["status"] == "unexpected"} == {
            "not-read-back"
        }


def test_fixes_do_not_depend_on_the_order_of_sets(diff_json: Diff) -> None:
    """Python orders sets of strings differently in each process."""
    plain = state_of(net())
    saved(plain, "plain.pt")
    saved({**with_prefix("old.", plain), **with_prefix("new.", state_of(net()))}, "two.pt")
    saved(
        {f"{key}_{index % 3}": value for index, (key, value) in enumerate(plain.items())},
        "other.pt",
    )
    code = (
        "from ckpttool.cli.app import main\nfor name in ('two.pt', 'other.pt'): main(['diff',"
        " name, 'plain.pt'])"
    )
    outputs = set()
    for seed in "012":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        outputs.add((done.stdout, done.stderr))
    ((out, _),) = outputs
    assert out.count("no differences") == 0
    assert out.count("differ") >= 2


def test_missing_keys_are_reported_with_a_partial_fix(diff_json: Diff) -> None:
    state = {key: value for key, value in net().state_dict().items() if "head" not in key}
    found = diff_json("--model", "model.py:net", saved(with_prefix("_orig_mod.", state)))
    assert PART in notes_in(found)
    assert any("head.weight, head.bias" in note for note in notes_in(found))
    after = diff_json("--model", "model.py:net", run_printed(fixes_in(found)[0]))
    assert (after["summary"], fixes_in(after)) == ({"same": len(state), "missing": 2}, [])


def test_extra_keys_are_reported_and_not_dropped(diff_json: Diff) -> None:
    more = {f"layers.{i}.fc.lora_A": torch.ones(1) for i in range(2)} | {"ema.decay": torch.ones(1)}
    found = diff_json("--model", "model.py:net", saved({**net().state_dict(), **more}))
    assert (fixes_in(found), found["summary"]["unexpected"]) == ([], 3)
    assert not any("--drop" in note for note in notes_in(found))
    found = diff_json(
        "--model", "model.py:net", saved(with_prefix("module.", {**net().state_dict(), **more}))
    )
    assert PART in notes_in(found)
    assert set(torch.load(run_printed(fixes_in(found)[0]))) == {*net().state_dict(), *more}


def test_keys_of_another_tree_are_not_dropped_while_others_are_missing(diff_json: Diff) -> None:
    tree = {
        key.replace("layers.", "transformer.h."): value for key, value in net().state_dict().items()
    }
    assert not any(
        "--drop" in line for line in fixes_in(diff_json("--model", "model.py:net", saved(tree)))
    )


@pytest.mark.parametrize("change", ["shape", "absent", "tree"])
def test_swap_that_would_be_refused_is_not_printed(diff_json: Diff, change: str) -> None:
    state = state_of(net())
    torch.export.save(torch.export.export(net(), (torch.ones(1, dtype=torch.int64),)), "p.pt2")
    damaged = {
        "shape": {**state, "head.weight": torch.ones(11, 4)},
        "absent": {key: value for key, value in state.items() if "head" not in key},
        "tree": {key.replace("layers.", "transformer.h."): value for key, value in state.items()},
    }[change]
    for words in ((), ("--model", "model.py:net")):
        found = diff_json(*words, saved(damaged), "p.pt2")
        assert not any(
            "swap-weights" in line or "--model MODEL" in line for line in fixes_in(found)
        )
        assert fixes_in(found) or notes_in(found)


@pytest.mark.parametrize("program_first", [False, True])
def test_swap_of_constants_with_another_dtype_is_printed_and_works(
    diff_json: Diff, program_first: bool
) -> None:
    model = small_models.lifted()
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), "p.pt2")
    weights = {
        key: value.double()
        for key, value in {**model.state_dict(), "scale": torch.full((4,), 2.0)}.items()
    }
    found = diff_json(*(("p.pt2", saved(weights)) if program_first else (saved(weights), "p.pt2")))
    (line,) = fixes_in(found)
    assert {"--constants", "--cast"} <= set(line.split())
    assert PART not in notes_in(found)
    swapped = torch.export.load(run_printed(line)).module()
    assert torch.equal(swapped(torch.ones(1, 4)), model(torch.ones(1, 4)) * 2)


HIDING = {
    f"{first}.{first}_inner.w": torch.zeros(number + 1) for number, first in enumerate("abcd")
}
HIDDEN = {f"{key[0]}.w": value for key, value in HIDING.items()}


@pytest.mark.parametrize(
    ("left", "right", "form"),
    [
        (HIDING, HIDDEN, "serialized"),
        (HIDDEN, HIDING, "exported"),
        ({**HIDING, "same": torch.ones(1)}, {**HIDDEN, "same": torch.ones(1)}, "serialized"),
        # not a tensor, hidden like the tensors
        ({**HIDING, "e.e_inner.n": 3}, {**HIDDEN, "e.n": 3}, "serialized"),
        ({**HIDING, "a.a_inner.w": torch.zeros(7)}, HIDDEN, None),
        ({**HIDING, "a.a_inner.w": torch.zeros(1).half()}, HIDDEN, None),
        ({**HIDING, "e.w": torch.ones(9)}, HIDDEN, None),
        ({**HIDING, "e.w": torch.ones(9)}, {**HIDDEN, "f.w": torch.ones(9)}, None),
        ({**HIDING, "same": torch.ones(1)}, {**HIDDEN, "same": torch.ones(2)}, None),
    ],
)
def test_model_is_requested_if_a_hook_may_hide_segments(
    diff_json: Diff, left: State, right: State, form: str | None
) -> None:
    """Names differ only by one missing segment, in more ways than a few rules could express."""
    found = diff_json(saved(left), saved(right, "b.pt"))
    assert [line for line in fixes_in(found) if "MODEL" in line] == (
        [f"ckpttool remap a.pt --model MODEL --to {form} -o a.{form}.pt"] if form else []
    )


def test_swap_is_printed_for_a_program_on_either_side(diff_json: Diff) -> None:
    model = hooked()
    torch.export.save(torch.export.export(model, (torch.ones(1, dtype=torch.int64),)), "p.pt2")
    for prefix in ("", "module._orig_mod."):
        weights = saved({prefix + key: value for key, value in state_of(model).items()})
        for sides in (("p.pt2", weights), (weights, "p.pt2")):
            assert fixes_in(diff_json(*sides))[0] == (
                "ckpttool swap-weights p.pt2 a.pt --model MODEL -o p.swapped.pt2"
            )


def test_wrapper_segments_do_not_change_the_pairs() -> None:
    shapes = {
        "norm.w": (8,),
        "attn.w": (24, 8),
        "mlp.0.w": (32, 8),
        "mlp.0.b": (32,),
        "mlp.2.w": (8, 32),
    }
    left = {f"layers.1.layer.{key}": torch.ones(shape) for key, shape in shapes.items()}
    right = {key.replace(".layer.", "."): value for key, value in left.items()}
    plain = ckpttool.diff(left, right).inferred
    assert plain is not None
    assert len(plain.pairs) == len(shapes)
    for left_prefix, right_prefix in (
        ("", "module._orig_mod."),
        ("_orig_mod.", ""),
        ("module.", "_orig_mod."),
    ):
        sides = (
            {prefix + key: value for key, value in side.items()}
            for prefix, side in ((left_prefix, left), (right_prefix, right))
        )
        found = ckpttool.diff(*sides).inferred
        assert found is not None
        pairs = [
            ((left_prefix + pair.left[0],), (right_prefix + pair.right[0],), pair.evidence)
            for pair in plain.pairs
        ]
        assert [(pair.left, pair.right, pair.evidence) for pair in found.pairs] == pairs


@pytest.mark.parametrize(("count", "by_file"), [(2, False), (3, True)])
def test_rules_are_printed_if_they_fix_more_than_unwrapping(
    diff_json: Diff, count: int, by_file: bool
) -> None:
    """A few rules are options, more are written to a file, even if another command would fix some
    differences.
    """
    left = {f"module.{'abcd'[n]}.w": torch.rand(2, n + 1) for n in range(count)} | {
        "module.z": torch.rand(5)
    }
    right = {f"{'pqrs'[n]}.v{n}": torch.rand(2, n + 1) for n in range(count)} | {"z": torch.rand(5)}
    fix = fixes_in(diff_json(saved(left), saved(right, "b.pt")))
    assert [line.split()[1] for line in fix] == (["diff", "remap"] if by_file else ["remap"])
    for line in fix:
        assert main(shlex.split(line)[1:]) == (1 if " diff " in line else 0)
    after = diff_json(fix[-1].split()[-1], "b.pt")
    assert after["summary"].get("missing", 0) == 0


def test_rules_file_for_a_remote_checkpoint_is_local(diff_json: Diff) -> None:
    left = {f"{name}.w": torch.rand(2, n + 1) for n, name in enumerate("abcd")}
    right = {f"{name}.v{n}": value for n, (name, value) in enumerate(zip("pqrs", left.values()))}
    with fsspec.open("memory://bucket/a.pt", "wb") as file:
        torch.save(left, file)
    fix = fixes_in(diff_json("memory://bucket/a.pt", saved(right, "b.pt")))
    assert fix == [
        "ckpttool diff memory://bucket/a.pt b.pt --suggest a.rules.toml",
        "ckpttool remap memory://bucket/a.pt --rules a.rules.toml -o memory://bucket/a.renamed.pt",
    ]
    for line in fix:
        assert main(shlex.split(line)[1:]) == (1 if " diff " in line else 0)
    assert diff_json("memory://bucket/a.renamed.pt", "b.pt")["identical"]


def test_in_memory_state_is_passed_as_like_object(diff_json: Diff) -> None:
    state = state_of(net())
    path = saved(with_prefix("module.", {**state, "more": torch.ones(1)}))
    (line,) = diff(path, state).fix
    assert line == f"ckpttool.remap({path!r}, like=like, out={'a.renamed.pt'!r})"
    path = saved({**state, "more": torch.ones(1)})
    assert diff(path, state).fix == ()


@pytest.mark.parametrize(
    ("missing", "more"),
    [(1, ""), (3, ""), (4, "; and 1 problem more"), (6, "; and 3 problems more")],
)
def test_note_has_three_reasons_why_a_swap_would_be_refused(
    diff_json: Diff, missing: int, more: str
) -> None:
    state = state_of(net())
    torch.export.save(torch.export.export(net(), (torch.ones(1, dtype=torch.int64),)), "p.pt2")
    absent = list(state)[:missing]
    incomplete = {key: state[key] for key in state if key not in absent}
    found = diff_json("--model", "model.py:net", saved(incomplete), "p.pt2")
    (note,) = (note for note in notes_in(found) if note.startswith("swap-weights would be refused"))
    assert f"the weights do not fit p.pt2: {missing} problem" in note
    assert [key in note for key in state] == [
        number < min(missing, 3) for number in range(len(state))
    ]
    assert note.endswith(f"{absent[:3][-1]}{more})")


FORGETFUL = """
from torch import nn

def saving(module, state, prefix, meta):
    for name in module.unsaved:
        state.pop(prefix + name)
    state[prefix + "kernel"] = state.pop(prefix + "a.weight")

def loading(state, prefix, *rest):
    state[prefix + "a.weight"] = state.pop(prefix + "kernel")

def build(*unsaved):
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    net["twin"], net.unsaved = net["b"], unsaved
    net.register_state_dict_post_hook(saving)
    net._register_load_state_dict_pre_hook(loading)
    return net

def nothing(): return build()
def twin(): return build("twin.weight")
def both(): return build("b.weight", "twin.weight")
def three(): return build("b.weight", "twin.weight", "a.bias")

def alone():
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(without_bias)
    return net

def without_bias(module, state, prefix, meta): del state[prefix + "bias"]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", None),
        ("twin", None),  # saved under its first name
        ("both", "1 tensor is not in any key that state_dict() writes (b.weight), so no command"),
        ("alone", "1 tensor is not in any key that state_dict() writes (bias), so no command"),
        (
            "three",
            "2 tensors are not in any key that state_dict() writes (a.bias, b.weight), so no"
            " command",
        ),
    ],
)
def test_tensors_that_a_model_does_not_save_are_reported(
    diff_json: Diff, name: str, message: str | None
) -> None:
    Path("forgetful.py").write_text(FORGETFUL)
    found = diff_json("--model", f"forgetful.py:{name}")
    notes = [note for note in notes_in(found) if "not in any key that state_dict() writes" in note]
    assert [note.startswith(message or "") for note in notes] == ([True] if message else [])
    names_differ = [] if name == "alone" else ["remap"]
    assert [line.split()[1] for line in fixes_in(found)] == (
        names_differ if message else ["swap-weights", "remap"]
    )


def test_placeholders_are_used_only_for_unknown_operands(diff_json: Diff) -> None:
    runtime = {key: value.detach() for key, value in hooked().named_parameters()}
    left, right = saved(state_of(hooked())), saved(runtime, "b.pt")
    for source, target in ((left, right), (right, left)):
        (line,) = fixes_in(diff_json(source, target))
        assert "MODEL" not in line
        assert diff_json(run_printed(line), target)["identical"]
    torch.export.save(torch.export.export(hooked(), (torch.ones(1, dtype=torch.int64),)), "p.pt2")
    assert fixes_in(diff_json(left, "p.pt2"))[0] == (
        "ckpttool swap-weights p.pt2 a.pt --model MODEL -o p.swapped.pt2"
    )
    known = fixes_in(diff_json("--model", "model.py:hooked", left, right))
    assert "MODEL" not in " ".join(known)
    assert diff_json(run_printed(known[0]), right)["identical"]


def test_tied_weights_in_safetensors(diff_json: Diff) -> None:
    state = {key: value.clone() for key, value in small_models.tied().state_dict().items()}
    save_file(with_prefix("module.", state), "a.safetensors")
    out = run_printed(fixes_in(diff_json("--model", "model.py:tied", "a.safetensors"))[0])
    assert diff_json("--model", "model.py:tied", out)["identical"]


def test_the_model_is_read_once(diff_json: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = tracing.trace_with_load

    def counted(model: Any) -> Any:
        traced.append(model)
        return trace(model)

    monkeypatch.setattr(tracing, "trace_with_load", counted)
    found = diff_json("--model", "model.py:net", saved(with_prefix("module.", state_of(net()))))
    assert fixes_in(found)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("train.pt", "train.new.pt"),
        ("train.pt::model", "train.new.pt"),
        ("rank_*.pt", "rank.new.pt"),
        ("runs/model.bin", "runs/model.new.bin"),
        ("model.pt2", "model.new.pt2"),
        ("model.weights", "model.new.pt"),
        ("memory://bucket/a.pt", "memory://bucket/a.new.pt"),
        ("runs/step.dcp", "runs/step.new.dcp"),
    ],
)
def test_default_output_is_next_to_its_source(source: str, name: str) -> None:
    assert next(outputs(source, "new")) == name


def test_output_of_a_folder_is_a_folder_if_it_can_hold_the_result(tmp_path: Path) -> None:
    (tmp_path / "v1.0").mkdir()
    assert list(outputs(str(tmp_path / "v1.0"), "new")) == [
        f"{tmp_path}/v1.0.new/",
        f"{tmp_path}/v1.0.new.pt",
    ]


def test_options_are_printed_as_command_line_words() -> None:
    options = RemapOptions(model="m.py:f(n=2)", materialize=True, drop=("a.*", "b"), out="o.pt")
    assert shlex.split(command("remap", ("a b.pt",), options)) == [
        *("ckpttool", "remap", "a b.pt", "--model", "m.py:f(n=2)", "--materialize"),
        *("--drop", "a.*", "--drop", "b", "-o", "o.pt"),
    ]
    assert command("remap", (CKPT,), RemapOptions(model=net, rule=["a => b"])) == (
        "ckpttool.remap(CKPT, model=model, rule=['a => b'])"
    )


KEYS = ["a.0.w", "a.1.w", "a.0.lora_A.w", "b.lora_A", "odd[0].w", "x{y}.w", "c.d"]


@pytest.mark.parametrize(
    "dropped", [KEYS[2:4], KEYS[4:6], ["c.d"], ["a.0.w"], KEYS[:2], [*KEYS[2:6], "a.1.w"]]
)
def test_patterns_match_exactly_the_dropped_keys(dropped: list[str]) -> None:
    patterns = drops(dropped, set(KEYS) - set(dropped)) or ()
    assert {key for key in KEYS if any(matches(text, key) for text in patterns)} == set(dropped)


def test_too_many_patterns_give_none() -> None:
    assert drops([f"k{i}" for i in range(100)], {"m.k1"}) is None


def test_prefixes() -> None:
    assert prefixes({"net.a.w", "net.b.w", "loss.w"}, {"a.w", "b.w"}) == ["net"]
    assert prefixes({"a.w", "b.w"}, {"a.w", "b.w"}) == [""]
    assert prefixes({"q.a.w", "x.y"}, {"a.w", "b.w"}) == []
    assert prefixes({"old.a.w", "new.a.w", "new.b"}, {"a.w"}) == ["new", "old"]


def test_the_fix_of_an_object_in_memory_is_a_python_call(diff_json: Diff) -> None:
    """A command line cannot name the object. The printed call works if pasted with the caller's
    variable names.
    """
    expected = saved(net().state_dict(), "b.pt")
    assert diff_json(expected, expected)["identical"]
    state = {f"model.{key}": value for key, value in net().state_dict().items()}
    sides: tuple[dict[str, Any], ...] = (
        *({"model": "model.py:net"}, {"model": net}),
        *({"right": expected}, {"right": net().state_dict()}),
    )
    for named in sides:
        found = diff(state, **named)
        (line,) = found.fix
        assert not any(note.startswith("not tried") for note in found.notes)
        names = {
            "ckpttool": ckpttool,
            "ckpt": state,
            "like": named.get("right"),
            "model": named.get("model"),
        }
        eval(line, names)
        (out,) = (path for path in Path().glob("checkpoint.*.pt"))
        assert diff(str(out), **named).identical
        out.unlink()


def test_many_rules_for_objects_in_memory_use_a_file(diff_json: Diff) -> None:
    left = {name: torch.full((n + 1,), 1.0) for n, name in enumerate("abcd")}
    right = {f"{name}.v{n}": value for n, (name, value) in enumerate(zip("pqrs", left.values()))}
    saved(left, "x.pt")
    saved(right, "y.pt")
    for one, other in ((left, right), ("x.pt", right), (left, "y.pt")):
        for line in diff(one, other).fix:
            if line.startswith("ckpttool "):
                assert main(shlex.split(line)[1:]) == 0
            else:
                eval(line, {"ckpttool": ckpttool, "pathlib": pathlib, "ckpt": one, "right": other})
        (out,) = Path().glob("*.renamed.pt")
        assert diff(str(out), other).identical
        out.unlink()
        Path(next(iter(map(str, Path().glob("*.rules.toml"))))).unlink()


def test_printed_commands_do_not_overwrite_existing_files(diff_json: Diff) -> None:
    """Commands for optimizers keep earlier outputs too, and still run."""
    model = net()
    saved({"optimizer": torch.optim.SGD(model.parameters()).state_dict()}, "a.pt")
    saved({"optimizer": torch.optim.SGD(model.named_parameters()).state_dict()}, "named.pt")
    assert main(["remap", "named.pt", "--optimizer-keys", "fqn", "-o", "b.pt"]) == 0
    outs = []
    for _ in range(2):
        (line,) = fixes_in(diff_json("a.pt", "b.pt", "--model", "model.py:net"))
        outs.append(run_printed(line))
    assert outs == ["a.fqn.pt", "a.fqn2.pt"]
