"""Rules in a file: what torch's own operators make of the same tensors, there and back, and every refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpttool.checkpoint import Lazy
from ckpttool.cli.app import main
from ckpttool.edits.remap.remap import by_plan, remap
from ckpttool.edits.remap.request import RemapRequest
from ckpttool.edits.rules.file import read
from ckpttool.errors import CkptError, Refused
from ckpttool.formats.fit import fit
from ckpttool.formats.table import format_for
from ckpttool.io.write_file import write
from ckpttool.operands.checkpoint import model_section, open_operand
from ckpttool.plan import Plan
from places import DOCS

torch.set_num_threads(1)
State = dict[str, torch.Tensor]
LOADERS: dict[str, Callable[[Path], State]] = {".safetensors": load_file, ".pt": torch.load}


def save(state: State, path: Path) -> Path:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def rules_in(folder: Path, text: str) -> str:
    path = folder / "rules.toml"
    path.write_text(text)
    return str(path)


def rewrite(source: Path, out: Path, rules: str, *, reverse: bool = False) -> State:
    """What the rules make of the file, read by its own library."""
    done = remap(open_operand(str(source)), RemapRequest(rule_steps=read(rules, reverse=reverse)))
    target = format_for(str(out))
    write(target.layout(fit(done.result, target)), str(out), fsync=False)
    return LOADERS[out.suffix](out)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape)
        and torch.equal(left[key], right[key])
        for key in left
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


QKV = """
[[rule]]
split = "{i}.qkv.{p}"
into = ["{i}.q.{p}", "{i}.k.{p}", "{i}.v.{p}"]
"""
# rules, the state, and what torch makes of it
ORACLE: dict[str, tuple[str, State, Callable[[torch.Tensor], State]]] = {
    "split": (QKV, {"0.qkv.w": numbers(9, 2)}, lambda w: dict(zip(("0.q.w", "0.k.w", "0.v.w"), w.split(3)))),
    "split by sizes": (
        QKV + "sizes = [4, 3, 2]", {"0.qkv.w": numbers(9, 2)},
        lambda w: dict(zip(("0.q.w", "0.k.w", "0.v.w"), w.split([4, 3, 2])))),
    "split by columns": (
        QKV + "dim = -1", {"0.qkv.w": numbers(2, 9)}, lambda w: dict(zip(("0.q.w", "0.k.w", "0.v.w"), w.split(3, -1)))),
    "transpose": ('[[rule]]\ntranspose = "w"', {"w": numbers(2, 3)}, lambda w: {"w": w.t()}),
    "transpose the last two": (
        '[[rule]]\ntranspose = "w"\ndims = [-1, -2]', {"w": numbers(2, 3, 4)}, lambda w: {"w": w.mT}),
    "permute": (
        '[[rule]]\npermute = "w"\ndims = [2, 0, 1]', {"w": numbers(2, 3, 4)}, lambda w: {"w": w.permute(2, 0, 1)}),
    "reshape": ('[[rule]]\nreshape = "w"\nshape = [3, -1]', {"w": numbers(2, 6)}, lambda w: {"w": w.reshape(3, -1)}),
    "cast": ('[[rule]]\ncast = "w"\ndtype = "bfloat16"', {"w": numbers(999) / 7}, lambda w: {"w": w.bfloat16()}),
    "cast to fp8": (
        '[[rule]]\ncast = "*"\ndtype = "float8_e4m3fn"', {"w": numbers(99) / 7},
        lambda w: {"w": w.to(torch.float8_e4m3fn)}),
    "one after the other": (
        '[[rule]]\ntranspose = "0.qkv.w"' + QKV + '[[rule]]\ncast = "0.k.w"\ndtype = "float16"',
        {"0.qkv.w": numbers(2, 9)},
        lambda w: {"0.q.w": w.t()[:3], "0.k.w": w.t()[3:6].half(), "0.v.w": w.t()[6:]}),
}  # fmt: skip


@pytest.mark.parametrize("ending", LOADERS)
@pytest.mark.parametrize("name", ORACLE)
def test_values_are_what_torch_computes(tmp_path: Path, name: str, ending: str) -> None:
    text, state, expected = ORACLE[name]
    found = rewrite(save(state, tmp_path / f"in{ending}"), tmp_path / f"out{ending}", rules_in(tmp_path, text))
    (tensor,) = state.values()
    wanted = expected(tensor)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert torch.equal(found[key].view(torch.uint8), value.contiguous().view(torch.uint8))
        assert found[key].is_contiguous()


def test_join_is_cat(tmp_path: Path) -> None:
    state = {"a": numbers(2, 3), "b": numbers(1, 3) + 9, "c": numbers(4, 3) - 9}
    text = '[[rule]]\njoin = ["c", "a", "b"]\ninto = "w"\nsizes = [4, 2, 1]'
    for ending in LOADERS:
        found = rewrite(save(state, tmp_path / f"i{ending}"), tmp_path / f"o{ending}", rules_in(tmp_path, text))
        assert same(found, {"w": torch.cat([state["c"], state["a"], state["b"]])})


def test_strided_tensors_are_taken_as_they_are_seen(tmp_path: Path) -> None:
    state = {"0.qkv.w": numbers(4, 9).t(), "w": numbers(12)[::2]}
    text = QKV + '[[rule]]\nreshape = "w"\nshape = [2, 3]'
    found = rewrite(save(state, tmp_path / "in.pt"), tmp_path / "out.pt", rules_in(tmp_path, text))
    q, k, v = state["0.qkv.w"].split(3)
    assert same(found, {"0.q.w": q, "0.k.w": k, "0.v.w": v, "w": state["w"].reshape(2, 3)})


def test_rows_are_moved_and_not_loaded(tmp_path: Path) -> None:
    """No byte of a tensor that is split, and no torch."""
    save({"0.qkv.w": numbers(9, 2), "a": numbers(2), "b": numbers(2)}, tmp_path / "in.safetensors")
    text = QKV + '[[rule]]\njoin = ["a", "b"]\ninto = "ab"\n[[rule]]\nreshape = "ab"\nshape = [2, 2]'
    rules = rules_in(tmp_path, text)
    done = remap(open_operand(str(tmp_path / "in.safetensors")), RemapRequest(rule_steps=read(rules)))
    lazy = [entry.key for entry in model_section(done.result).tensors if isinstance(entry.storage.data, Lazy)]
    assert lazy == ["ab"]
    line = ["remap", str(tmp_path / "in.safetensors"), "--rules", rules, "-o", str(tmp_path / "out.safetensors")]
    code = (
        f"import sys; from ckpttool.cli.app import main; assert main({line!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["ab"], torch.tensor([[0.0, 1], [0, 1]]))


def test_each_part_has_its_own_storage_and_tied_tensors_stay_tied(tmp_path: Path) -> None:
    tied = numbers(9, 2)
    state = {"0.qkv.w": tied, "1.qkv.w": tied, "x": tied[0], "y": tied[0]}
    rules = rules_in(tmp_path, QKV + '[[rule]]\ncast = ["x", "y"]\ndtype = "float16"')
    found = rewrite(save(state, tmp_path / "in.pt"), tmp_path / "out.pt", rules)
    pointers = {key: value.untyped_storage().data_ptr() for key, value in found.items()}
    assert len(set(pointers.values())) == 4
    assert pointers["0.k.w"] == pointers["1.k.w"]
    assert pointers["x"] == pointers["y"]
    assert found["0.q.w"].untyped_storage().nbytes() == 3 * 2 * 4


# Reversible rules with everything that they need of a checkpoint: names are the rule's own, by its number.


@st.composite
def reversible(draw: st.DrawFn, number: int) -> tuple[str, State]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    dim = draw(st.integers(0, 2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]))
    shape = [draw(st.integers(0, 3)) for _ in range(3)]
    parts = [f"r{number}.p{i}.{{x*}}" for i in range(len(sizes))]
    whole = f"r{number}.whole.{{x*}}"
    tails = draw(st.lists(st.sampled_from(["w", "b.c", "0.w"]), min_size=1, max_size=3, unique=True))

    def tensors(names: Sequence[str], lengths: Sequence[int]) -> State:
        return {
            name.replace("{x*}", tail): torch.randint(0, 99, (*shape[:dim], length, *shape[dim + 1 :])).to(dtype)
            for tail in tails
            for name, length in zip(names, lengths)
        }

    kind = draw(st.sampled_from(["rename", "split", "join", "transpose", "permute", "reshape"]))
    if kind == "split":
        return f"split = {whole!r}\ninto = {parts}\ndim = {dim}\nsizes = {sizes}", tensors([whole], [sum(sizes)])
    if kind == "join":
        return f"join = {parts}\ninto = {whole!r}\ndim = {dim - 3}\nsizes = {sizes}", tensors(parts, sizes)
    if kind == "rename":
        return f"rename = 'r{number}.whole.{{x*}} => other{number}.{{x*}}.end'", tensors([whole], [2])
    if kind == "transpose":
        return f"transpose = '{whole}'\ndims = [{dim}, {draw(st.integers(-3, 2))}]", tensors([whole], [2])
    if kind == "permute":
        return f"permute = '{whole}'\ndims = {draw(st.permutations(range(3)))}", tensors([whole], [2])
    state = tensors([whole], [2])
    was = list(next(iter(state.values())).shape)
    return f"reshape = '{whole}'\nshape = [{was[0] * was[1]}, 1, {was[2]}]\nfrom_shape = {was}", state


RULES = st.integers(1, 4).flatmap(lambda count: st.tuples(*(reversible(number) for number in range(count))))


@pytest.mark.parametrize("ending", LOADERS)
@settings(max_examples=40, deadline=None)
@given(rules=RULES)
def test_there_and_back_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, ending: str, rules: Sequence[tuple[str, State]]
) -> None:
    folder = tmp_path_factory.mktemp("there")
    text = "\n".join(f"[[rule]]\n{rule}" for rule, _ in rules)
    state = {"kept": numbers(3), **{key: value for _, part in rules for key, value in part.items()}}
    source, path = save(state, folder / f"in{ending}"), rules_in(folder, text)
    there = rewrite(source, folder / f"there{ending}", path)
    assert sum(t.numel() for t in there.values()) == sum(t.numel() for t in state.values())
    back = rewrite(folder / f"there{ending}", folder / f"back{ending}", path, reverse=True)
    assert same(back, state)
    if torch.__version__ >= "2.7":  # before, torch sorted storages as text: 0, 1, 10, 2
        assert (folder / f"back{ending}").read_bytes() == source.read_bytes()


def test_a_whole_model_there_and_back(tmp_path: Path) -> None:
    """The module versions too, in a file of torch: byte for byte."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6))
    source = tmp_path / "in.pt"
    torch.save(model.state_dict(), source)
    text = """
        [[rule]]
        split = "0.{p}"
        into = ["0.q.{p}", "0.k.{p}"]
        [[rule]]
        rename = "1.{p} => norm.{p}"
        [[rule]]
        rename = "norm.{p} => ln.{p}"
        """
    there: Any = rewrite(source, tmp_path / "there.pt", rules_in(tmp_path, text))
    assert list(there._metadata) == ["", "0", "ln"]
    rewrite(tmp_path / "there.pt", tmp_path / "back.pt", rules_in(tmp_path, text), reverse=True)
    assert (tmp_path / "back.pt").read_bytes() == source.read_bytes()


def test_a_saved_plan_does_the_same(tmp_path: Path) -> None:
    text, state, _ = ORACLE["one after the other"]
    source, rules, plan = save(state, tmp_path / "in.pt"), rules_in(tmp_path, text), tmp_path / "plan.json"
    line = ["remap", str(source), "--rules", rules, "-o", str(tmp_path / "one.pt"), "--save-plan", str(plan)]
    assert main(line) == 0
    assert main(["remap", str(source), "--plan", str(plan), "-o", str(tmp_path / "two.pt")]) == 0
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()
    assert by_plan(open_operand(str(source)), Plan.from_json(json.loads(plan.read_text()))).counts["transformed"] == 3


def test_rules_of_the_command_line_come_after_the_file_and_before_it_in_reverse(tmp_path: Path) -> None:
    source = save({"0.qkv.w": numbers(9, 2), "1": numbers(1)}, tmp_path / "in.safetensors")
    line = ["--rules", rules_in(tmp_path, QKV), "--rule", "0.q.{p} => query.{p}", "--rule", "1 => one"]
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert main(["remap", str(source), *line, "-o", str(there), "--verify"]) == 0
    assert set(load_file(there)) == {"query.w", "0.k.w", "0.v.w", "one"}
    assert main(["remap", str(there), *line, "--reverse", "-o", str(back), "--verify"]) == 0
    assert back.read_bytes() == source.read_bytes()


def test_rules_come_after_the_models_way(tmp_path: Path) -> None:
    """What the model's hook computes can be split, and the plan is one expression."""
    import hook_zoo

    model = hook_zoo.ZOO["fused_qkv"]()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    fused = next(key for key, value in model.named_parameters() if "qkv" in key and value.ndim == 2)
    text = f'[[rule]]\nsplit = "{fused}"\ninto = ["first", "second", "third"]'
    operand = f"{hook_zoo.__file__}:fused_qkv"
    line = ["remap", str(tmp_path / "in.pt"), "--model", operand, "--to", "runtime", "-o", str(tmp_path / "out.pt")]
    assert main([*line, "--rules", rules_in(tmp_path, text)]) == 0
    found = torch.load(tmp_path / "out.pt")
    whole = dict(model.named_parameters())[fused]
    assert torch.equal(torch.cat([found["first"], found["second"], found["third"]]), whole)


def test_an_optimizer_follows_renames_and_a_warning_says_what_it_does_not_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["0.qkv.w", "a.w"]
    state = {name: {"step": torch.tensor(1.0), "exp_avg": numbers(9, 2), "exp_avg_sq": numbers(9, 2)} for name in names}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}
    model = {name: numbers(9, 2) for name in names}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "in.pt")
    text = '[[rule]]\nrename = "a.{p} => b.{p}"\n[[rule]]\nrename = "b.{p} => c.{p}"'
    line = ["remap", str(tmp_path / "in.pt"), "-o", str(tmp_path / "out.pt"), "--force", "--rules"]
    assert main([*line, rules_in(tmp_path, text)]) == 0
    assert list(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == ["0.qkv.w", "c.w"]
    assert "before the rules file" not in "".join(capsys.readouterr())
    assert main([*line, rules_in(tmp_path, QKV)]) == 0
    assert "--drop optimizer" in "".join(capsys.readouterr())


MISFITS: dict[str, tuple[str, list[str]]] = {
    # rules over the state below -> problem @ key
    "unequal": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b", "c"]',
        ["rule 1 (split): dimension 0 of [4, 6] is 4, not 3 times 1 @ w"]),
    "other sizes": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b"]\nsizes = [1, 2]',
        ["rule 1 (split): dimension 0 of [4, 6] is 4, not 1 + 2 @ w"]),
    "no such dimension": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b"]\ndim = 2', ["rule 1 (split): shape [4, 6] has no dimension 2 @ w"]),
    "a missing part": (
        '[[rule]]\njoin = ["0.q.{p}", "0.k.{p}"]\ninto = "0.qk.{p}"',
        ["rule 1 (join): needs 0.k.b, which is not there @ 0.qk.b"]),
    "parts of other shapes": (
        '[[rule]]\njoin = ["w", "0.q.w"]\ninto = "x"',
        ["rule 1 (join): parts of shapes [4, 6], [2, 3] do not fit together @ x"]),
    "parts of other dtypes": (
        '[[rule]]\njoin = ["n", "v"]\ninto = "x"', ["rule 1 (join): the parts have dtypes int64, float32 @ x"]),
    "parts that are not equal": (
        '[[rule]]\njoin = ["v", "0.q.b"]\ninto = "x"',
        ["rule 1 (join): the parts are not equal: sizes = [4, 2] says that this is meant @ x"]),
    "parts of other sizes": (
        '[[rule]]\njoin = ["v", "0.q.b"]\ninto = "x"\nsizes = [2, 4]',
        ["rule 1 (join): the parts have sizes [4, 2] in dimension 0, not [2, 4] @ x"]),
    "a collision": ('[[rule]]\nrename = "w => v"', ["rule 1 (rename): written 2 times @ v"]),
    "parts that collide": (
        '[[rule]]\nsplit = "w"\ninto = ["v", "x"]', ["rule 1 (split): written 2 times @ v"]),
    "a vector transposed": ('[[rule]]\ntranspose = "v"', ["rule 1 (transpose): shape [4] has no dimension 1 @ v"]),
    "too few dimensions": (
        '[[rule]]\npermute = "w"\ndims = [2, 1, 0]', ["rule 1 (permute): shape [4, 6] has 2 dimensions, not 3 @ w"]),
    "elements left over": (
        '[[rule]]\nreshape = "w"\nshape = [5, -1]',
        ["rule 1 (reshape): the elements of shape [4, 6] do not fill [5, -1] @ w"]),
    "another shape before": (
        '[[rule]]\nreshape = "w"\nshape = [24]\nfrom_shape = [6, 4]',
        ["rule 1 (reshape): the shape is [4, 6], not [6, 4] @ w"]),
    "a cast of nothing": ('[[rule]]\ncast = "n"\ndtype = "float16"', ["rule 1 (cast): applies to no key @ n"]),
    "an idle pattern": (
        '[[rule]]\ndrop = ["w", "x", "y"]',
        ["rule 1 (drop): applies to no key @ x", "rule 1 (drop): applies to no key @ y"]),
    "an extra": (
        '[[rule]]\nreshape = "*state"\nshape = [1]',
        ["rule 1 (reshape): not a dense tensor (not a tensor): it can be renamed or dropped only @ _extra_state"]),
    "a sparse tensor": (
        '[[rule]]\ncast = "s"\ndtype = "float16"',
        ["rule 1 (cast): not a dense tensor (sparse_coo): it can be renamed or dropped only @ s"]),
    "two ways": (
        '[[rule]]\nsplit = "{a*}.{b*}.q.w"\ninto = ["{a*}.x.{b*}", "{a*}.y.{b*}"]',
        ["rule 1 (split): the rule '{a*}.{b*}.q.w => {a*}.x.{b*}' matches a key in more than one way @ 0.q.w"]),
    "several rules": (
        '[[rule]]\ntranspose = "v"\n[[rule]]\nrename = "v => u"\n[[rule]]\npermute = "u"\ndims = [1, 0]\n'
        '[[rule]]\nreshape = "w"\nshape = [5]',
        ["rule 1 (transpose): shape [4] has no dimension 1 @ v",
         "rule 4 (reshape): the elements of shape [4, 6] do not fill [5] @ w"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_all_at_once(tmp_path: Path, name: str) -> None:
    state: dict[str, Any] = {"w": numbers(4, 6), "v": numbers(4), "0.q.w": numbers(2, 3), "0.q.b": numbers(2)}
    state.update({"0.k.w": numbers(2, 3), "n": numbers(3, dtype=torch.int64), "_extra_state": {"version": 1}})
    torch.save({**state, "s": torch.eye(3).to_sparse()}, tmp_path / "in.pt")
    text, problems = MISFITS[name]
    with pytest.raises(Refused) as caught:
        remap(open_operand(str(tmp_path / "in.pt")), RemapRequest(rule_steps=read(rules_in(tmp_path, text))))
    assert sorted(map(str, caught.value.problems)) == sorted(problems)


MISTAKES: dict[str, tuple[str, list[str]]] = {
    # the file -> problem @ rule
    "no TOML": ("[[rule", []),
    "too deep": ("a = " + "[" * 100_000, []),
    "empty": ("", []),
    "no list": ("[rule]\nrename = 'a => b'", []),
    "something else": ("speed = 1\n[[rule]]\nrename = 'a => b'", []),
    "a list of numbers": ("rule = [1]", ["not a table @ rule 1"]),
    "no operation": ("[[rule]]\ndim = 1", [
        "has to be one of rename, split, join, transpose, permute, reshape, cast, drop @ rule 1"]),
    "two operations": ("[[rule]]\ndrop = 'a'\ncast = 'a'", [
        "has to be one of rename, split, join, transpose, permute, reshape, cast, drop, not drop and cast @ rule 1"]),
    "an unknown field": ("[[rule]]\ndrop = 'a'\ndimension = 1", ["drop takes no 'dimension' @ rule 1"]),
    "a missing field": ("[[rule]]\nsplit = 'a'", ["split needs 'into' @ rule 1"]),
    "one part": ("[[rule]]\nsplit = 'a'\ninto = ['b']", ["'into' is not a list of two strings or more @ rule 1"]),
    "a truth value for a number": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\ndim = true", [
        "'dim' is not an integer @ rule 1"]),
    "an empty part": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [0, 1]", [
        "'sizes' is not a list of positive integers @ rule 1"]),
    "too many sizes": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1, 1, 1]", ["3 sizes for 2 parts @ rule 1"]),
    "the same part": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'b']", ["two parts have the same name @ rule 1"]),
    "an arrow": ("[[rule]]\nsplit = 'a => b'\ninto = ['b', 'c']", [
        "'a => b' is not a name: => belongs into a rename @ rule 1"]),
    "a variable of one side": ("[[rule]]\nsplit = 'a.{x}'\ninto = ['b', 'c']", [
        "the rule 'a.{x} => b' uses {x}, which the other side does not bind @ rule 1"]),
    "no permutation": ("[[rule]]\npermute = 'a'\ndims = [1, 2]", [
        "'dims' is not each of the dimensions 0, 1, ... once @ rule 1"]),
    "two sizes to find": ("[[rule]]\nreshape = 'a'\nshape = [-1, -1]", [
        "'shape' is not a list of sizes, with one -1 at most @ rule 1"]),
    "no dtype": ("[[rule]]\ncast = 'a'\ndtype = 'bf16'", [
        "'dtype' is not a dtype of torch, as in 'bfloat16' @ rule 1"]),
    "no regular expression": ("[[rule]]\ndrop = 're:('", [
        "not a regular expression: 're:(': missing ), unterminated subpattern at position 0 @ rule 1"]),
    "several": ("[[rule]]\nrename = 'a'\n[[rule]]\ndrop = 1\n[[rule]]\ncast = ''\ndtype = 1", [
        "not a rule: 'a' @ rule 1",
        "'drop' is not a string or a list of strings @ rule 2",
        "'cast' is not a string or a list of strings @ rule 3",
        "'dtype' is not a dtype of torch, as in 'bfloat16' @ rule 3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_file_are_named_all_at_once(tmp_path: Path, name: str) -> None:
    text, problems = MISTAKES[name]
    with pytest.raises(CkptError) as caught:
        read(rules_in(tmp_path, text))
    assert [str(problem) for problem in caught.value.problems] == problems
    assert caught.value.exit_status == 2
    assert caught.value.hint


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CkptError, match="is not TOML"):
        read(str(tmp_path / "rules.toml"))


def test_what_has_no_reverse_is_named(tmp_path: Path) -> None:
    text = "[[rule]]\ncast = '*'\ndtype = 'float16'\n[[rule]]\ndrop = 'a'\n[[rule]]\nreshape = 'b'\nshape = [1]\n"
    with pytest.raises(CkptError) as caught:
        read(rules_in(tmp_path, text + "[[rule]]\nrename = ['re:a => b', 'c => d']"), reverse=True)
    assert [str(problem) for problem in caught.value.problems] == [
        "*: what is lost does not come back @ rule 1 (cast)",
        "a: what is lost does not come back @ rule 2 (drop)",
        "b: from_shape = [...] says what shape it had @ rule 3 (reshape)",
        "a regular expression has no reverse: 're:a => b' @ rule 4 (rename)",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--reverse", "--rules"),
        ("--rules gone.toml", "gone.toml"),
        ("--plan p.json --rules r.toml", "--plan stands alone"),
    ],
)
def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    source = save({"a": numbers(1)}, tmp_path / "in.safetensors")
    assert main(["remap", str(source), "-o", str(tmp_path / "out.safetensors"), *line.split()]) == 2
    assert words in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "out.safetensors").exists()


# The examples of docs/rules.md: each block of rules, with the table of what it makes of which tensors.

PAGE = DOCS / "rules.md"
EXAMPLE = re.compile(r"```toml\n(.*?)```\n\n\| before \| after \|\n\| --- \| --- \|\n((?:\|[^\n]*\n)+)", re.DOTALL)
TENSOR = re.compile(r"`([^`]+)` (\[[\d, ]+\])(?: (\w+))?")


def tensors(cells: Sequence[str]) -> Iterator[tuple[str, list[int], str]]:
    for cell in cells:
        yield from ((key, json.loads(shape), dtype or "float32") for key, shape, dtype in TENSOR.findall(cell))


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text())


def test_every_block_of_the_page_is_an_example() -> None:
    assert len(examples()) == PAGE.read_text().count("```toml") == 8


@pytest.mark.parametrize("number", range(8))
def test_the_examples_do_what_the_page_says(tmp_path: Path, number: int) -> None:
    text, table = examples()[number]
    rows = [row.split("|")[1:3] for row in table.splitlines()]
    before, after = (list(tensors([row[side] for row in rows])) for side in (0, 1))
    state = {key: numbers(*shape, dtype=getattr(torch, dtype)) for key, shape, dtype in before}
    source, rules = save(state, tmp_path / "in.safetensors"), rules_in(tmp_path, text)
    found = rewrite(source, tmp_path / "out.safetensors", rules)
    assert {key: list(value.shape) for key, value in found.items()} == {key: shape for key, shape, _ in after}
    if "cast" in text:
        assert {str(value.dtype) for value in found.values()} == {"torch.bfloat16", "torch.int64", "torch.float32"}
    elif "drop" not in text:
        back = rewrite(tmp_path / "out.safetensors", tmp_path / "back.safetensors", rules, reverse=True)
        assert same(back, state)
