"""Rules files: results compared with torch's operators, reversed rules, and every refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import CkptError, Refused
from ckpttool.core.checkpoint import Lazy
from ckpttool.core.expression import Op
from ckpttool.formats.fit import fit
from ckpttool.formats.registry import format_for
from ckpttool.io.write import WriteOptions
from ckpttool.io.write import write_file as write
from ckpttool.operands.checkpoint import model_section
from ckpttool.ruleset.parse import problems_of_rule, read_rules, step_of
from command import Run, main
from places import DOCS
from surroundings import limited

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
    """Apply the rules and read the result with the format's own library."""
    done = ckpttool.remap(str(source), rules=rules, reverse=reverse)
    target = format_for(str(out))
    write(target.layout(fit(done.result, target)), str(out), WriteOptions(fsync=False))
    return LOADERS[out.suffix](out)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape)
        and torch.equal(left[key], right[key])
        for key in left
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def without_lines(problems: Sequence[object]) -> list[str]:
    return [re.sub(r" at line \d+", "", str(problem)) for problem in problems]


QKV = """
[[rule]]
split = "{i}.qkv.{p}"
into = ["{i}.q.{p}", "{i}.k.{p}", "{i}.v.{p}"]
"""
# name -> rules, state, and the expected result from torch
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
    "split into numbered parts": (
        '[[rule]]\nsplit = "w"\ninto = "{e}.w"\nparts = 3', {"w": numbers(9, 2)},
        lambda w: {f"{e}.w": part for e, part in enumerate(w.split(3))}),
    "unstack": (
        '[[rule]]\nunstack = "w"\ninto = "e.{e}"', {"w": numbers(11, 2, 3)},
        lambda w: {f"e.{e}": part for e, part in enumerate(w)}),
    "unstack the last, listed": (
        '[[rule]]\nunstack = "w"\ninto = ["a", "b"]\ndim = -1', {"w": numbers(3, 2)},
        lambda w: {"a": w[:, 0], "b": w[:, 1]}),
    "rows of heads": (
        '[sizes]\nheads = 2\n[[rule]]\npermute = "w"\ndims = [0, 2, 1]\nrows = ["{heads}", -1, 2]',
        {"w": numbers(12, 5)},
        lambda w: {"w": w.view(2, 3, 2, 5).transpose(1, 2).reshape(12, 5)}),
    "rows of a bias": (
        '[[rule]]\npermute = "w"\ndims = [0, 2, 1]\nrows = [2, -1, 2]', {"w": numbers(12)},
        lambda w: {"w": w.view(2, 3, 2).transpose(1, 2).reshape(12)}),
    "named sizes": (
        '[sizes]\nheads = 2\n[[rule]]\nreshape = "w"\nfrom_shape = ["{rows}", "{in}"]\n'
        'shape = ["{heads}", "{rows} / {heads}", "{in} * 1"]', {"w": numbers(4, 3)}, lambda w: {"w": w.view(2, 2, 3)}),
    "split by named sizes": (
        '[sizes]\nheads = 3\nkv = 1\n' + QKV + 'sizes = ["{heads} * 2", "{kv} * 2", "{heads} * 2 -'
        ' 2 * 2 * {kv}"]',
        {"0.qkv.w": numbers(10, 2)}, lambda w: dict(zip(("0.q.w", "0.k.w", "0.v.w"), w.split([6, 2, 2])))),
    "padded rows": ('[[rule]]\npad = "w"\nsize = 7', {"w": numbers(5, 3)},
        lambda w: {"w": torch.cat([w, torch.zeros(2, 3)])}),
    "padded to a multiple": (
        '[[rule]]\npad = "w"\nmultiple = "{ranks} * 4"\ndim = -1\nvalue = 1\n[sizes]\nranks = 2',
        {"w": numbers(2, 9, dtype=torch.int64)},
        lambda w: {"w": torch.cat([w, torch.ones(2, 7, dtype=torch.int64)], -1)}),
    "padded rows of a transposed weight": (
        '[[rule]]\ntranspose = "w"\n[[rule]]\npad = "w"\nsize = 4', {"w": numbers(2, 3)},
        lambda w: {"w": torch.cat([w.t(), torch.zeros(1, 2)])}),
    "nothing to pad": (
        '[[rule]]\npad = "w"\nmultiple = 5\n[[rule]]\nrename = "w => x"', {"w": numbers(5, 3)}, lambda w: {"x": w}),
    "first rows": ('[[rule]]\nslice = "w"\nsize = 3', {"w": numbers(5, 2)}, lambda w: {"w": w[:3]}),
    "rows of the middle": (
        '[[rule]]\nslice = "w"\nsize = 2\nstart = 1\ndim = 1', {"w": numbers(2, 5)}, lambda w: {"w": w[:, 1:3]}),
    "all rows": (
        '[[rule]]\nslice = "w"\nsize = 5\n[[rule]]\nrename = "w => x"', {"w": numbers(5, 2)}, lambda w: {"x": w}),
    "a constant": (
        '[[rule]]\nconstant = "s"\nvalue = 1.5\nshape = [2, 3]\ndtype = "bfloat16"', {"w": numbers(2)},
        lambda w: {"w": w, "s": torch.full((2, 3), 1.5, dtype=torch.bfloat16)}),
    "constant with the variables of others": (
        '[[rule]]\nconstant = "{i}.bias"\nbeside = "{i}.weight"\nvalue = 0', {"7.weight": numbers(2)},
        lambda w: {"7.weight": w, "7.bias": torch.zeros(2)}),
    "conditions": (
        '[[rule]]\nrename = "w => x"\nwhen = "w [2]"\n[[rule]]\nrename = "x => y"\nunless = "y"\n'
        '[[rule]]\nrename = "y => z"\nwhen = "y [-1, 3] float32"\n[[rule]]\ndrop = "q"\noptional ='
        ' true',
        {"w": numbers(2)}, lambda w: {"y": w}),
    "integral float as an integer": (
        '[[rule]]\nconstant = "s"\nvalue = 3.0\nshape = [2]\ndtype = "int8"', {"w": numbers(2)},
        lambda w: {"w": w, "s": torch.full((2,), 3, dtype=torch.int8)}),
    "true as a bool": (
        '[[rule]]\nconstant = "s"\nvalue = true\nshape = [2]\ndtype = "bool"', {"w": numbers(2)},
        lambda w: {"w": w, "s": torch.full((2,), True)}),
    "conditions on shapes": (
        '[[rule]]\nrename = "w => x"\nunless = ["y", "w [2, -1]"]\n[[rule]]\nrename = "w =>'
        ' z"\nwhen = "w [2]"\n'
        '[[rule]]\nrename = "w => v"\nunless = "w [-1, 4]"', {"w": numbers(2, 3)}, lambda w: {"v": w}),
    "dropped part": (QKV + '[[rule]]\ndrop = "0.k.w"', {"0.qkv.w": numbers(9, 2)},
        lambda w: {"0.q.w": w[:3], "0.v.w": w[6:]}),
    "cast": ('[[rule]]\ncast = "w"\ndtype = "bfloat16"', {"w": numbers(999) / 7}, lambda w: {"w": w.bfloat16()}),
    "cast to fp8": (
        '[[rule]]\ncast = "*"\ndtype = "float8_e4m3fn"', {"w": numbers(99) / 7},
        lambda w: {"w": w.to(torch.float8_e4m3fn)}),
    "several rules": (
        '[[rule]]\ntranspose = "0.qkv.w"' + QKV + '[[rule]]\ncast = "0.k.w"\ndtype = "float16"',
        {"0.qkv.w": numbers(2, 9)},
        lambda w: {"0.q.w": w.t()[:3], "0.k.w": w.t()[3:6].half(), "0.v.w": w.t()[6:]}),
}  # fmt: skip


@pytest.mark.parametrize("ending", LOADERS)
@pytest.mark.parametrize("name", ORACLE)
def test_rules_match_torch(tmp_path: Path, name: str, ending: str) -> None:
    text, state, expected = ORACLE[name]
    found = rewrite(
        save(state, tmp_path / f"in{ending}"), tmp_path / f"out{ending}", rules_in(tmp_path, text)
    )
    (tensor,) = state.values()
    result = expected(tensor)
    assert found.keys() == result.keys()
    for key, value in result.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert torch.equal(found[key].view(torch.uint8), value.contiguous().view(torch.uint8))
        assert found[key].is_contiguous()


def test_join_is_cat(tmp_path: Path) -> None:
    state = {"a": numbers(2, 3), "b": numbers(1, 3) + 9, "c": numbers(4, 3) - 9}
    text = '[[rule]]\njoin = ["c", "a", "b"]\ninto = "w"\nsizes = [4, 2, 1]'
    for ending in LOADERS:
        found = rewrite(
            save(state, tmp_path / f"i{ending}"), tmp_path / f"o{ending}", rules_in(tmp_path, text)
        )
        assert same(found, {"w": torch.cat([state["c"], state["a"], state["b"]])})


def test_numbered_parts_are_in_numeric_order(tmp_path: Path) -> None:
    parts = {
        f"l.{i}.e.{e}.w": numbers(2, 3) + 100 * e + i
        for e in (10, 2, 0, 1, 9, 3, 4, 8, 7, 6, 5)
        for i in (1, 0)
    }
    state = {**parts, "l.0.e.shared.w": numbers(1)}
    for operation, torchs in (("join", torch.cat), ("stack", torch.stack)):
        for dim in (0, 1, -1):
            text = (
                f'[[rule]]\n{operation} = "l.{{i}}.e.{{e}}.w"\ninto = "l.{{i}}.w"\ndim ='
                f" {dim}\nparts = 11"
            )
            for ending in LOADERS:
                source, rules = save(state, tmp_path / f"i{ending}"), rules_in(tmp_path, text)
                found = rewrite(source, tmp_path / f"o{ending}", rules)
                result = {
                    f"l.{i}.w": torchs([parts[f"l.{i}.e.{e}.w"] for e in range(11)], dim=dim)
                    for i in (0, 1)
                }
                assert same(found, {**result, "l.0.e.shared.w": numbers(1)})
                back = rewrite(
                    tmp_path / f"o{ending}", tmp_path / f"b{ending}", rules, reverse=True
                )
                assert same(back, state)


def test_experts_are_moved_without_loading(tmp_path: Path) -> None:
    """They are joined, stacked and restored as bytes, without torch."""
    state = {f"e.{e}.{name}": numbers(2, 3) * e for e in range(3) for name in ("gate", "up")}
    source = save(state, tmp_path / "in.safetensors")
    rules = rules_in(
        tmp_path,
        '[[rule]]\njoin = ["e.{e}.gate", "e.{e}.up"]\ninto = "e.{e}.both"\n'
        '[[rule]]\nstack = "e.{e}.both"\ninto = "experts"',
    )
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    code = "import sys; from ckpttool.cli.app import main\n"
    for line in (
        ["remap", str(source), "-o", str(there)],
        ["remap", str(there), "-o", str(back), "--reverse"],
    ):
        code += (
            f"assert main({[*line, '--rules', rules]!r}) == 0; assert 'torch' not in sys.modules\n"
        )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    gates, ups = (
        torch.stack([state[f"e.{e}.{name}"] for e in range(3)]) for name in ("gate", "up")
    )
    assert torch.equal(load_file(there)["experts"], torch.cat([gates, ups], dim=1))
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (
            'reshape = "w"\nfrom_shape = ["{rows}", "{in}"]\nshape = ["{in}", "{rows}"]',
            "the sizes of the rules: in, rows",
        ),
        ('permute = "w"\ndims = [1, 0]', "the rules have no named sizes"),
    ],
)
def test_an_unknown_size_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, hint: str
) -> None:
    torch.save({"w": torch.zeros(2, 3)}, tmp_path / "a.pt")
    (tmp_path / "rules.toml").write_text(f"[[rule]]\n{rule}\n")
    out = ["--rules", f"{tmp_path}/rules.toml(knees=1)", "-o", str(tmp_path / "b.pt")]
    assert main(["remap", str(tmp_path / "a.pt"), *out]) == 2
    message = capsys.readouterr().err
    assert "unknown size knees" in message
    assert hint in message


def test_sizes_of_the_command_line_override_the_file(tmp_path: Path) -> None:
    source = save({"w": numbers(8, 2)}, tmp_path / "in.safetensors")
    text = (
        '[sizes]\nhalves = 2\n[[rule]]\npermute = "w"\ndims = [0, 2, 1]\nrows = ["{heads}",'
        ' "{halves}", -1]'
    )
    line = ["remap", str(source), "-o", str(tmp_path / "out.safetensors"), "--rules"]
    rules = rules_in(tmp_path, text)
    for sizes, status in (
        ("", 2),
        ("(heads=0)", 2),
        ("(2=3)", 2),
        ("(heads=2, knees=1)", 2),
        ("(heads=3)", 1),
    ):
        assert main([*line, f"{rules}{sizes}"]) == status
    assert main([*line, f"{rules}(heads=2, halves=4)"]) == 0
    expected = numbers(8, 2).view(2, 4, 1, 2).transpose(1, 2).reshape(8, 2)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], expected)


def test_rules_on_strided_tensors(tmp_path: Path) -> None:
    state = {"0.qkv.w": numbers(4, 9).t(), "w": numbers(12)[::2]}
    text = QKV + '[[rule]]\nreshape = "w"\nshape = [2, 3]'
    found = rewrite(save(state, tmp_path / "in.pt"), tmp_path / "out.pt", rules_in(tmp_path, text))
    q, k, v = state["0.qkv.w"].split(3)
    assert same(found, {"0.q.w": q, "0.k.w": k, "0.v.w": v, "w": state["w"].reshape(2, 3)})


def test_rows_are_moved_without_loading(tmp_path: Path) -> None:
    """Splitting reads no bytes and does not import torch."""
    save({"0.qkv.w": numbers(9, 2), "a": numbers(2), "b": numbers(2)}, tmp_path / "in.safetensors")
    text = QKV + (
        '[[rule]]\njoin = ["a", "b"]\ninto = "ab"\n[[rule]]\nreshape = "ab"\nshape = [2, 2]'
    )
    rules = rules_in(tmp_path, text)
    done = ckpttool.remap(str(tmp_path / "in.safetensors"), rules=rules)
    lazy = [
        entry.key
        for entry in model_section(done.result).tensors
        if isinstance(entry.storage.data, Lazy)
    ]
    assert lazy == ["ab"]
    line = [
        "remap",
        str(tmp_path / "in.safetensors"),
        "--rules",
        rules,
        "-o",
        str(tmp_path / "out.safetensors"),
    ]
    code = (
        f"import sys; from ckpttool.cli.app import main; assert main({line!r}) == 0; assert"
        " 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert torch.equal(
        load_file(tmp_path / "out.safetensors")["ab"], torch.tensor([[0.0, 1], [0, 1]])
    )


def test_parts_get_separate_storages_and_tied_tensors_stay_tied(tmp_path: Path) -> None:
    tied = numbers(9, 2)
    state = {"0.qkv.w": tied, "1.qkv.w": tied, "x": tied[0], "y": tied[0]}
    rules = rules_in(tmp_path, QKV + '[[rule]]\ncast = ["x", "y"]\ndtype = "float16"')
    found = rewrite(save(state, tmp_path / "in.pt"), tmp_path / "out.pt", rules)
    pointers = {key: value.untyped_storage().data_ptr() for key, value in found.items()}
    assert len(set(pointers.values())) == 4
    assert pointers["0.k.w"] == pointers["1.k.w"]
    assert pointers["x"] == pointers["y"]
    assert found["0.q.w"].untyped_storage().nbytes() == 3 * 2 * 4


# Reversible rules with the tensors that they need; names contain the number of the rule.


@st.composite
def reversible(draw: st.DrawFn, number: int) -> tuple[str, State]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    dim = draw(st.integers(0, 2))
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
    )
    shape = [draw(st.integers(0, 3)) for _ in range(3)]
    parts = [f"r{number}.p{i}.{{x*}}" for i in range(len(sizes))]
    whole = f"r{number}.whole.{{x*}}"
    tails = draw(
        st.lists(st.sampled_from(["w", "b.c", "0.w"]), min_size=1, max_size=3, unique=True)
    )

    def tensors(names: Sequence[str], lengths: Sequence[int]) -> State:
        return {
            name.replace("{x*}", tail): torch.randint(
                0, 99, (*shape[:dim], length, *shape[dim + 1 :])
            ).to(dtype)
            for tail in tails
            for name, length in zip(names, lengths)
        }

    kind = draw(
        st.sampled_from(
            [
                "rename",
                "split",
                "join",
                "stack",
                "unstack",
                "rows",
                "transpose",
                "permute",
                "reshape",
                "pad",
            ]
        )
    )
    count, one = len(sizes), f"r{number}.{{e}}.{{x*}}"
    if kind in ("stack", "unstack"):
        slices = [f"r{number}.{place}.{{x*}}" for place in range(count)]
        if kind == "stack":
            return f"stack = {one!r}\ninto = {whole!r}\ndim = {dim - 4}", tensors(
                slices, [2] * count
            )
        return f"unstack = {whole!r}\ninto = {one!r}\ndim = {dim}", tensors([whole], [count])
    if kind == "pad":
        rule = f"pad = {whole!r}\nmultiple = 3\nfrom_size = {count}\ndim = {dim}"
        return rule, tensors([whole], [count])
    if kind == "rows":
        shape[0], dim = 6, 2
        return f"permute = {whole!r}\ndims = [1, 2, 0]\nrows = [3, -1, 1]", tensors([whole], [2])
    if kind == "split":
        return f"split = {whole!r}\ninto = {parts}\ndim = {dim}\nsizes = {sizes}", tensors(
            [whole], [sum(sizes)]
        )
    if kind == "join":
        return f"join = {parts}\ninto = {whole!r}\ndim = {dim - 3}\nsizes = {sizes}", tensors(
            parts, sizes
        )
    if kind == "rename":
        return f"rename = 'r{number}.whole.{{x*}} => other{number}.{{x*}}.end'", tensors(
            [whole], [2]
        )
    if kind == "transpose":
        return f"transpose = '{whole}'\ndims = [{dim}, {draw(st.integers(-3, 2))}]", tensors(
            [whole], [2]
        )
    if kind == "permute":
        return f"permute = '{whole}'\ndims = {draw(st.permutations(range(3)))}", tensors(
            [whole], [2]
        )
    state = tensors([whole], [2])
    was = list(next(iter(state.values())).shape)
    return (
        f"reshape = '{whole}'\nshape = [{was[0] * was[1]}, 1, {was[2]}]\nfrom_shape = {was}",
        state,
    )


RULES = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*(reversible(number) for number in range(count)))
)


@settings(max_examples=40)
@given(rules=RULES, ending=st.sampled_from(sorted(LOADERS)))
def test_reversed_rules_restore_the_file(
    tmp_path_factory: pytest.TempPathFactory, ending: str, rules: Sequence[tuple[str, State]]
) -> None:
    folder = tmp_path_factory.mktemp("there")
    text = "\n".join(f"[[rule]]\n{rule}" for rule, _ in rules)
    state = {"kept": numbers(3), **{key: value for _, part in rules for key, value in part.items()}}
    source, path = save(state, folder / f"in{ending}"), rules_in(folder, text)
    there = rewrite(source, folder / f"there{ending}", path)
    if "pad" not in text:
        assert sum(t.numel() for t in there.values()) == sum(t.numel() for t in state.values())
    back = rewrite(folder / f"there{ending}", folder / f"back{ending}", path, reverse=True)
    assert same(back, state)
    if torch.__version__ >= "2.7":  # older releases sort storages as text: 0, 1, 10, 2
        assert (folder / f"back{ending}").read_bytes() == source.read_bytes()


def test_reversed_rules_restore_a_model_file(tmp_path: Path) -> None:
    """A torch file, including module versions, is restored byte for byte."""
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


def test_rule_options_apply_after_the_file_and_before_it_in_reverse(tmp_path: Path) -> None:
    source = save({"0.qkv.w": numbers(9, 2), "1": numbers(1)}, tmp_path / "in.safetensors")
    line = [
        "--rules",
        rules_in(tmp_path, QKV),
        "--rule",
        "0.q.{p} => query.{p}",
        "--rule",
        "1 => one",
    ]
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert main(["remap", str(source), *line, "-o", str(there), "--verify"]) == 0
    assert set(load_file(there)) == {"query.w", "0.k.w", "0.v.w", "one"}
    assert main(["remap", str(there), *line, "--reverse", "-o", str(back), "--verify"]) == 0
    assert back.read_bytes() == source.read_bytes()


def test_rules_apply_after_the_model(tmp_path: Path) -> None:
    """A value that a hook computes can be split, and the plan is one expression."""
    import hook_zoo

    model = hook_zoo.ZOO["fused_qkv"]()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    fused = next(key for key, value in model.named_parameters() if "qkv" in key and value.ndim == 2)
    text = f'[[rule]]\nsplit = "{fused}"\ninto = ["first", "second", "third"]'
    operand = f"{hook_zoo.__file__}:fused_qkv"
    line = [
        "remap",
        str(tmp_path / "in.pt"),
        "--model",
        operand,
        "--to",
        "runtime",
        "-o",
        str(tmp_path / "out.pt"),
    ]
    assert main([*line, "--rules", rules_in(tmp_path, text)]) == 0
    found = torch.load(tmp_path / "out.pt")
    whole = dict(model.named_parameters())[fused]
    assert torch.equal(torch.cat([found["first"], found["second"], found["third"]]), whole)


def test_optimizer_names_follow_renames(tmp_path: Path) -> None:
    names = ["0.qkv.w", "a.w"]
    state = {
        name: {"step": torch.tensor(1.0), "exp_avg": numbers(9, 2), "exp_avg_sq": numbers(9, 2)}
        for name in names
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}
    model = {name: numbers(9, 2) for name in names}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "in.pt")
    text = '[[rule]]\nrename = "a.{p} => b.{p}"\n[[rule]]\nrename = "b.{p} => c.{p}"'
    line = [
        "remap",
        str(tmp_path / "in.pt"),
        "-o",
        str(tmp_path / "out.pt"),
        "--rules",
        rules_in(tmp_path, text),
    ]
    assert main(line) == 0
    assert list(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == ["0.qkv.w", "c.w"]


MISFITS: dict[str, tuple[str, list[str]]] = {
    # name -> rules for the state below, and the problems
    "unequal": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b", "c"]',
        ["rule 1 (split): dimension 0 of [4, 6] is 4, not 3 times 1 @ w"]),
    "other sizes": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b"]\nsizes = [1, 2]',
        ["rule 1 (split): dimension 0 of [4, 6] is 4, not 1 + 2 @ w"]),
    "sizes with a too large sum": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b"]\nsizes = [3, 2]',
        ["rule 1 (split): dimension 0 of [4, 6] is 4, not 3 + 2 @ w"]),
    "unknown dimension": (
        '[[rule]]\nsplit = "w"\ninto = ["a", "b"]\ndim = 2', ["rule 1 (split): shape [4, 6] has no"
        " dimension 2 @ w"]),
    "a missing part": (
        '[[rule]]\njoin = ["0.q.{p}", "0.k.{p}"]\ninto = "0.qk.{p}"',
        ["rule 1 (join): needs 0.k.b, which is not there @ 0.qk.b"]),
    "parts of other shapes": (
        '[[rule]]\njoin = ["w", "0.q.w"]\ninto = "x"',
        ["rule 1 (join): parts of shapes [4, 6], [2, 3] do not fit together @ x"]),
    "parts of other dtypes": (
        '[[rule]]\njoin = ["n", "v"]\ninto = "x"', ["rule 1 (join): the parts have dtypes int64,"
        " float32 @ x"]),
    "parts that are not equal": (
        '[[rule]]\njoin = ["v", "0.q.b"]\ninto = "x"',
        ["rule 1 (join): the parts are not equal: sizes = [4, 2] allows this @ x"]),
    "parts of other sizes": (
        '[[rule]]\njoin = ["v", "0.q.b"]\ninto = "x"\nsizes = [2, 4]',
        ["rule 1 (join): the parts have sizes [4, 2] in dimension 0, not [2, 4] @ x"]),
    "a collision": ('[[rule]]\nrename = "w => v"', ["rule 1 (rename): written 2 times, from w, v @"
    " v"]),
    "parts that collide": (
        '[[rule]]\nsplit = "w"\ninto = ["v", "x"]', ["rule 1 (split): written 2 times, from w, v @"
        " v"]),
    "a vector transposed": ('[[rule]]\ntranspose = "v"', ["rule 1 (transpose): shape [4] has no"
    " dimension 1 @ v"]),
    "too few dimensions": (
        '[[rule]]\npermute = "w"\ndims = [2, 1, 0]', ["rule 1 (permute): shape [4, 6] has 2"
        " dimensions, not 3 @ w"]),
    "too many dimensions": (
        '[[rule]]\npermute = "w"\ndims = [0]', ["rule 1 (permute): shape [4, 6] has 2 dimensions,"
        " not 1 @ w"]),
    "too few elements": (
        '[[rule]]\nreshape = "w"\nshape = [5, 5]',
        ["rule 1 (reshape): the elements of shape [4, 6] do not fill [5, 5] @ w"]),
    "elements left over": (
        '[[rule]]\nreshape = "w"\nshape = [5, -1]',
        ["rule 1 (reshape): the elements of shape [4, 6] do not fill [5, -1] @ w"]),
    "another shape before": (
        '[[rule]]\nreshape = "w"\nshape = [24]\nfrom_shape = [6, 4]',
        ["rule 1 (reshape): the shape is [4, 6], not [6, 4] @ w"]),
    "a smaller shape before": (
        '[[rule]]\nreshape = "w"\nshape = [24]\nfrom_shape = [4, 7]',
        ["rule 1 (reshape): the shape is [4, 6], not [4, 7] @ w"]),
    "another number of dimensions before": (
        '[[rule]]\nreshape = "w"\nshape = [24]\nfrom_shape = [4]',
        ["rule 1 (reshape): the shape is [4, 6], not [4] @ w"]),
    "a cast of nothing": ('[[rule]]\ncast = "n"\ndtype = "float16"', ["rule 1 (cast): applies to"
    " no key @ n"]),
    "unused pattern": (
        '[[rule]]\ndrop = ["w", "x", "y"]',
        ["rule 1 (drop): applies to no key @ x", "rule 1 (drop): applies to no key @ y"]),
    "an extra": (
        '[[rule]]\nreshape = "*state"\nshape = [1]',
        ["rule 1 (reshape): not a dense tensor (not a tensor): it can be renamed or dropped only @"
        " _extra_state"]),
    "a sparse tensor": (
        '[[rule]]\ncast = "s"\ndtype = "float16"',
        ["rule 1 (cast): not a dense tensor (sparse_coo): it can be renamed or dropped only @ s"]),
    "two ways": (
        '[[rule]]\nsplit = "{a*}.{b*}.q.w"\ninto = ["{a*}.x.{b*}", "{a*}.y.{b*}"]',
        ["rule 1 (split): the rule '{a*}.{b*}.q.w => {a*}.x.{b*}' matches a key in more than one"
        " way @ 0.q.w"]),
    "two ways to a part": (
        '[[rule]]\njoin = ["{a*}.{b*}.w", "{a*}.{b*}.b"]\ninto = "{a*}.x.{b*}"\noptional = true',
        ["rule 1 (join): needs b, which is not there @ x",
         *(f"rule 1 (join): the rule '{{a*}}.x.{{b*}} => {{a*}}.{{b*}}.{key[-1]}' "
           f"matches a key in more than one way @ {key}" for key in ("0.k.w", "0.q.b", "0.q.w"))]),
    "two keys of one part": (
        '[[rule]]\nrename = ["e.1 => p.x.q", "e.3 => x.p.q", "n => p.y.q"]\n'
        '[[rule]]\njoin = ["{a*}.x.{b*}", "{a*}.y.{b*}"]\ninto = "{a*}.{b*}"',
        ["rule 2 (join): would be the same part of p.q as p.x.q @ x.p.q",
         "rule 2 (join): the parts have dtypes float32, int64 @ p.q"]),
    "many missing parts": (
        '[[rule]]\nstack = "e.{e}"\ninto = "e"\nparts = 10',
        ["rule 1 (stack): needs e.0 and e.2 and e.4 and e.5 and e.6 and e.7 and e.8 and e.9, which"
        " are not there @ e"]),
    "too many missing parts to list": (
        '[[rule]]\nstack = "e.{e}"\ninto = "e"\nparts = 11',
        ["rule 1 (stack): needs e.0 and e.2 and e.4 and e.5 and e.6 and e.7 and e.8 and e.9 and"
        " more, "
         "which are not there @ e"]),
    "one part too many": (
        '[[rule]]\nrename = "e.3 => e.0"\n[[rule]]\nstack = "e.{e}"\ninto = "e"\nparts = 1',
        ["rule 2 (stack): has 2 parts, not 1 @ e"]),
    "missing number": (
        '[[rule]]\nstack = "{e}.q.w"\ninto = "q.w"\n[[rule]]\njoin = "e.{e}"\ninto = "e"',
        ["rule 2 (join): needs e.0 and e.2, which are not there @ e"]),
    "unexpected part": (
        '[[rule]]\nstack = "e.{e}"\ninto = "e"\nparts = 1',
        ["rule 1 (stack): needs e.0, which is not there @ e"]),
    "another number of slices": (
        '[[rule]]\nunstack = "w"\ninto = "{e}.w"\nparts = 3',
        ["rule 1 (unstack): dimension 0 of [4, 6] is 4, not 3 @ w"]),
    "too many slices": (
        '[[rule]]\nunstack = "w"\ninto = "{e}.w"\nparts = 5',
        ["rule 1 (unstack): dimension 0 of [4, 6] is 4, not 5 @ w"]),
    "slices of other shapes": (
        '[[rule]]\nstack = ["w", "v"]\ninto = "x"',
        ["rule 1 (stack): parts of shapes [4, 6], [4] do not fit together @ x"]),
    "rows that do not fit": (
        '[[rule]]\npermute = "w"\ndims = [1, 0]\nrows = [3, -1]',
        ["rule 1 (permute): dimension 0 of [4, 6] is 4, not [3, -1] rows @ w"]),
    "a larger dimension": (
        '[[rule]]\npad = "w"\nsize = 3', ["rule 1 (pad): dimension 0 of [4, 6] is larger than 3 @ w"]),
    "another size before": (
        '[[rule]]\npad = "w"\nsize = 9\nfrom_size = 5', ["rule 1 (pad): dimension 0 of [4, 6] is 4, not 5 @ w"]),
    "an integer filled with a fraction": (
        '[[rule]]\npad = "n"\nsize = 9\nvalue = 0.5', ["rule 1 (pad): int64 cannot hold 0.5 @ n"]),
    "a slice behind the end": (
        '[[rule]]\nslice = "w"\nsize = 3\nstart = 2', ["rule 1 (slice): dimension 0 of [4, 6] ends before 5 @ w"]),
    "a dimension to slice that does not exist": (
        '[[rule]]\nslice = "v"\nsize = 3\ndim = 1', ["rule 1 (slice): shape [4] has no dimension 1 @ v"]),
    "not a whole number": (
        '[[rule]]\nreshape = "w"\nfrom_shape = ["{a}", "{b}"]\nshape = ["{a} / 3", -1]',
        ["rule 1 (reshape): {a} / 3 does not divide without a rest @ w"]),
    "division by zero": (
        '[[rule]]\nreshape = "w"\nfrom_shape = ["{a}", "{b}"]\nshape = ["{a} / 0", -1]',
        ["rule 1 (reshape): {a} / 0 does not divide without a rest @ w"]),
    "existing constant": (
        '[[rule]]\nconstant = "v"\nvalue = 1\nshape = []', ["rule 1 (constant): written 2 times,"
        " from v @ v"]),
    "fraction for an integer": (
        '[[rule]]\nconstant = "x"\nbeside = "n"\nvalue = 0.5', ["rule 1 (constant): int64 cannot"
        " hold 0.5 @ n"]),
    "true as an integer": (
        '[[rule]]\nconstant = "x"\nshape = []\nvalue = true\ndtype = "int8"',
        ["rule 1 (constant): int8 cannot hold True @ x"]),
    "negative value for an unsigned dtype": (
        '[[rule]]\nconstant = "x"\nshape = []\nvalue = -1\ndtype = "uint8"',
        ["rule 1 (constant): uint8 cannot hold -1 @ x"]),
    "fraction for a bool": (
        '[[rule]]\nconstant = "x"\nshape = []\nvalue = 0.5\ndtype = "bool"',
        ["rule 1 (constant): bool cannot hold 0.5 @ x"]),
    "no follow-up problems": (
        '[[rule]]\ntranspose = ["v", "0.q.b"]\n[[rule]]\njoin = ["v", "n"]\ninto ='
        ' "u"\n[[rule]]\nsplit = "u"\n'
        'into = ["a", "b"]\n[[rule]]\nunstack = "0.q.b"\ninto = "c.{c}"\n[[rule]]\ntranspose ='
        ' ["b", "c.0"]',
        [f"rule 1 (transpose): shape [{size}] has no dimension 1 @ {key}" for key, size in (("0.q.b", 2), ("v", 4))]),
    "several rules": (
        '[[rule]]\ntranspose = "v"\n[[rule]]\nrename = "v => u"\n[[rule]]\npermute = "u"\ndims ='
        ' [1, 0]\n'
        '[[rule]]\nreshape = "w"\nshape = [5]',
        ["rule 1 (transpose): shape [4] has no dimension 1 @ v",
         "rule 4 (reshape): the elements of shape [4, 6] do not fill [5] @ w"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_all_problems_are_refused_at_once(tmp_path: Path, name: str) -> None:
    state: dict[str, Any] = {
        "w": numbers(4, 6),
        "v": numbers(4),
        "0.q.w": numbers(2, 3),
        "0.q.b": numbers(2),
    }
    state.update(
        {"0.k.w": numbers(2, 3), "n": numbers(3, dtype=torch.int64), "_extra_state": {"version": 1}}
    )
    state.update({"e.1": numbers(2), "e.3": numbers(2)})
    torch.save({**state, "s": torch.eye(3).to_sparse()}, tmp_path / "in.pt")
    text, problems = MISFITS[name]
    with pytest.raises(Refused) as caught:
        ckpttool.remap(str(tmp_path / "in.pt"), rules=rules_in(tmp_path, text))
    assert sorted(without_lines(caught.value.problems)) == sorted(problems)


# field, the rest of its rule, accepted values, refused values
SPLIT: dict[str, Any] = {"split": "a", "into": ["b", "c"]}
SHAPES: tuple[list[Any], list[Any]] = (
    [[], [0], [-1, 2], ["{n}"]],
    [[-1, -1], [-2], [True], [1.0], 1, "1"],
)
FIELDS: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("dim", SPLIT, [0, -1], [True, 1.0, "1", [1]]),
    (
        "parts",
        {"split": "a", "into": "{e}"},
        [1, "{n}", "{n} + 1"],
        [0, True, 1.0, [1], "n", "{n", "1 + " * 250 + "1"],
    ),
    ("sizes", SPLIT, [[1, 2], ["{n}", 1]], [[0, 1], [True, 1], [1.0, 1], 1, "{n}"]),
    (
        "dims",
        {"transpose": "a"},
        [[0, 1], [-1, 0]],
        [[0], [0, 1, 2], [0, True], ["0", "1"], 1, "01"],
    ),
    ("dims", {"permute": "a"}, [[], [0], [1, 0]], [[1], [0, 0], [True, False], [0.0], 0, "10"]),
    (
        "rows",
        {"permute": "a", "dims": [1, 0]},
        [[-1, 2], ["{n}", -1]],
        [[-1, -1], [-2, 1], [True, 1], 1, "2"],
    ),
    ("shape", {"reshape": "a", "from_shape": ["{n}"]}, *SHAPES),
    ("from_shape", {"reshape": "a", "shape": [1]}, *SHAPES),
    ("size", {"pad": "a"}, [1, "{n}"], [0, -1, True, [1], "n"]),
    ("multiple", {"pad": "a"}, [1, "{n} * 64"], [0, -1, True, [1], "n"]),
    ("from_size", {"pad": "a", "size": 2}, [1, "{n}"], [0, True, "n"]),
    ("size", {"slice": "a"}, [1, "{n}"], [0, True, [1], "n"]),
    ("start", {"slice": "a", "size": 2}, [0, 1], [-1, True, "{n}"]),
    ("shape", {"constant": "a", "value": 1}, [[], [0, 2]], [[-1], [True], 1, "1"]),
    ("dtype", {"cast": "a"}, ["bool", "bfloat16"], ["", "bf16", 1, ["bool"]]),
    (
        "from",
        {"cast": "a", "dtype": "bool"},
        ["int8", ["bool", "int8"]],
        ["bf16", 1, [], ["bool", 1], [["bool"]]],
    ),
    (
        "value",
        {"constant": "a", "shape": []},
        [1, 1.5, True, -(2**63), 2**63 - 1],
        [2**63, -(2**63) - 1, "1", [1]],
    ),
    ("optional", SPLIT, [True, False], [1, "true", []]),
    *(
        (field, SPLIT, ["a", ["a", "b"]], ["", " ", [], ["a", ""], [1], 1])
        for field in ("when", "unless")
    ),
    ("into", {"split": "a"}, [["b", "c"], "{e}"], [["b"], [], "", ["b", 1], ["b", ""], 1]),
    ("into", {"join": ["b", "c"]}, ["a"], ["", ["a"], 1]),
    ("split", {"into": ["b", "c"]}, ["a"], ["", ["a"], 1]),
    ("drop", {"optional": True}, ["a", ["a", "b"]], ["", [], [""], [1], 1]),
]


@pytest.mark.parametrize(("field", "rule", "accepted", "refused"), FIELDS)
def test_values_of_each_field(
    field: str, rule: dict[str, Any], accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        assert problems_of_rule({**rule, field: value}) == []
        assert step_of({**rule, field: value}, "rule 1", {"n": 2})
    for value in refused:
        (problem,) = problems_of_rule({**rule, field: value})
        assert problem.startswith(f"{field!r} is not ")


def test_limits_of_the_file(tmp_path: Path) -> None:
    text = '# a.b.c\n[[rule]]\nrename = "a.b.c.d.e => b" # d.e.f.g\n'
    rules = rules_in(tmp_path, text)
    for limits, passes in (
        ({"rules_bytes": len(text)}, True),
        ({"rules_bytes": len(text) - 1}, False),
        ({"rules_dots": 3}, True),
        ({"rules_dots": 2}, False),
    ):
        with (
            limited(**limits),
            nullcontext()
            if passes
            else pytest.raises(
                CkptError,
                match=r"is not TOML: .*the limit"
                r" rules_",
            ),
        ):
            assert read_rules(rules)


def test_more_parts_than_the_limit_are_refused(tmp_path: Path) -> None:
    source = str(save({"w": numbers(3, 2)}, tmp_path / "in.safetensors"))
    rules = rules_in(tmp_path, '[[rule]]\nunstack = "w"\ninto = "{e}.w"')
    with limited(made_parts=3):
        assert len(model_section(ckpttool.remap(source, rules=rules).result).tensors) == 3
    with limited(made_parts=2), pytest.raises(Refused) as caught:
        ckpttool.remap(source, rules=rules)
    assert [problem.key for problem in caught.value.problems] == ["w"]
    assert "the limit made_parts is 2" in caught.value.problems[0].problem


def test_cast_applies_to_tensors_of_its_kind(tmp_path: Path) -> None:
    """Like `Module.to`, or the dtypes in `from`. A tensor that already has the dtype is
    unchanged.
    """
    kinds = (torch.float16, torch.float32, torch.uint8, torch.int64, torch.bool, torch.complex64)
    state = {str(dtype)[6:]: numbers(3, dtype=dtype) for dtype in kinds}
    source = save(state, tmp_path / "in.pt")
    for dtype, was, cast in (
        ("float16", "", ["float32"]),
        ("int64", "", ["uint8"]),
        ("float32", "from = ['bool', 'int64']", ["int64", "bool"]),
        ("complex64", "from = 'float16'", ["float16"]),
    ):
        text = f'[[rule]]\ncast = "*"\ndtype = "{dtype}"\n{was}'
        done = ckpttool.remap(str(source), rules=rules_in(tmp_path, text))
        assert [output.key for output in done.plan.outputs if isinstance(output.source, Op)] == cast
        assert same(
            rewrite(source, tmp_path / "out.pt", rules_in(tmp_path, text)),
            {
                key: value.to(getattr(torch, dtype)) if key in cast else value
                for key, value in state.items()
            },
        )


def test_a_dropped_part_of_a_tensor_in_use_is_not_reported(tmp_path: Path) -> None:
    source = save({"0.qkv.w": numbers(9, 2), "b": numbers(2)}, tmp_path / "in.safetensors")
    rules = rules_in(tmp_path, QKV + '[[rule]]\ndrop = ["0.k.w", "b"]')
    assert ckpttool.remap(str(source), rules=rules).dropped == ["b"]


KINDS = (
    "rename, split, join, unstack, stack, transpose, permute, reshape, pad, slice,"
    " dequantize, cast, constant, check, drop"
)
MISTAKES: dict[str, tuple[str, list[str]]] = {
    # name -> file, and the problems
    "no TOML": ("[[rule", []),
    "too deep": ("a = " + "[" * 100_000, []),
    "empty": ("", []),
    "no rules": ("rule = []", []),
    "not a list": ("[rule]\nrename = 'a => b'", []),
    "something else": ("speed = 1\n[[rule]]\nrename = 'a => b'", []),
    "examples that are not a list": ("example = 5\n[[rule]]\nrename = 'a => b'", []),
    "a list of numbers": ("rule = [1]", ["not a table @ rule 1"]),
    "no operation": ("[[rule]]\ndim = 1", [
        f"has to be one of {KINDS} @ rule 1"]),
    "two operations": ("[[rule]]\ndrop = 'a'\ncast = 'a'", [
        f"has to be one of {KINDS}, not drop and cast @ rule 1"]),
    "an unknown field": ("[[rule]]\ndrop = 'a'\ndimension = 1", ["drop takes no 'dimension' @ rule"
    " 1"]),
    "a missing field": ("[[rule]]\nsplit = 'a'", ["split needs 'into' @ rule 1"]),
    "one part": ("[[rule]]\nsplit = 'a'\ninto = ['b']", [
        "'into' is not a list of two strings or more, or one name with a variable that counts @"
        " rule 1"]),
    "bool for a number": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\ndim = true", [
        "'dim' is not an integer @ rule 1"]),
    "an empty part": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [0, 1]", [
        "'sizes' is not a list of positive integers @ rule 1"]),
    "too many sizes": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1, 1, 1]", ["3 sizes"
    " for 2 parts @ rule 1"]),
    "too few sizes": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c', 'd']\nsizes = [1, 1]", [
        "2 sizes for 3 parts @ rule 1"]),
    "count of listed parts": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nparts = 2", [
        "parts = counts numbered parts, and these are listed @ rule 1"]),
    "more dims than rows": ("[[rule]]\npermute = 'a'\ndims = [1, 0]\nrows = [-1]", ["2 dims for 1"
    " rows @ rule 1"]),
    "the same part": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'b']", ["two parts have the same name @"
    " rule 1"]),
    "an arrow": ("[[rule]]\nsplit = 'a => b'\ninto = ['b', 'c']", [
        "'a => b' is not a name: => is for rename rules @ rule 1"]),
    "a variable of one side": ("[[rule]]\nsplit = 'a.{x}'\ninto = ['b', 'c']", [
        "the rule 'a.{x} => b' uses {x}, which the other side does not bind @ rule 1"]),
    "not a permutation": ("[[rule]]\npermute = 'a'\ndims = [1, 2]", [
        "'dims' is not each of the dimensions 0, 1, ... once @ rule 1"]),
    "two sizes to find": ("[[rule]]\nreshape = 'a'\nshape = [-1, -1]", [
        "'shape' is not a list of sizes, with one -1 at most @ rule 1"]),
    "unknown dtype": ("[[rule]]\ncast = 'a'\ndtype = 'bf16'", [
        "'dtype' is not a dtype of torch, as in 'bfloat16' @ rule 1"]),
    "no dtypes to cast": ("[[rule]]\ncast = 'a'\ndtype = 'bfloat16'\nfrom = []", [
        "'from' is not a dtype of torch, or a list of them @ rule 1"]),
    "invalid regular expression": ("[[rule]]\ndrop = 're:('", [
        "not a regular expression: 're:(': missing ), unterminated subpattern at position 0 @ rule"
        " 1"]),
    "no counting variable": ("[[rule]]\nstack = 'a.{i}'\ninto = 'b.{i}'", [
        "'a.{i}' needs one variable that 'b.{i}' lacks, as {e}, to count the parts: none @ rule 1"]),
    "two counting variables": ("[[rule]]\nstack = 'a.{i}.{e}'\ninto = 'b'", [
        "'a.{i}.{e}' needs one variable that 'b' lacks, as {e}, to count the parts: {e} and {i} @"
        " rule 1"]),
    "counting variable for several segments": ("[[rule]]\nstack = 'a.{e*}'\ninto = 'b'", [
        "'a.{e*}' needs one variable that 'b' lacks, as {e}, to count the parts: {e*} @ rule 1"]),
    "sizes of numbered parts": ("[[rule]]\njoin = 'a.{e}'\ninto = 'b'\nsizes = [1]", [
        "sizes = is for listed parts: numbered parts are of equal size @ rule 1"]),
    "a size without a value": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1, '{n}']", [
        "{n} has no value: name it as in --rules 'FILE(n=32)' @ rule 1"]),
    "a shape without a value": ("[[rule]]\nreshape = 'a'\nshape = ['{n}']", [
        "{n} has no value: name it in from_shape, or as in --rules 'FILE(n=32)' @ rule 1"]),
    "invalid sizes": ("[sizes]\nn = 0\n[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1, '{n']", [
        "'sizes' is not a list of positive integers @ rule 1", "not a positive integer @ sizes.n"]),
    "negative size": ("[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1, '1 - 2']", [
        "1 - 2 is -1: it must be at least 1 @ rule 1"]),
    "constant without a shape": ("[[rule]]\nconstant = 'a'\nvalue = 1", [
        "constant needs 'shape', or 'beside' for one that has it @ rule 1"]),
    "an arrow in a constant": ("[[rule]]\nconstant = 'a => b'\nvalue = 1\nshape = []", [
        "'a => b' is not a name: => is for rename rules @ rule 1"]),
    "sizes that are not a table": ("sizes = 5\n[[rule]]\nrename = 'a => b'", ["not a table @ sizes"]),
    "a size next to an example": (
        "[sizes]\nn = 2\n[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = [1,"
        " '{n}']\n[[example]]\nbefore = []", [
        "'after' is not a list of tensors, as in ['w [4, 2]'] @ example 1"]),
    "constant with a variable": ("[[rule]]\nconstant = 'a.{i}'\nvalue = 1\nshape = []", [
        "'a.{i}' has variables: pass 'beside' with the tensors that bind them @ rule 1"]),
    "invalid example": ("[[rule]]\nrename = 'a => b'\n[[example]]\nbefore = ['a']\nafter = 1\nhow"
    " = 2", [
        "an example takes no 'how' @ example 1",
        "'a' in 'before' is not a tensor, as in 'w [4, 2] bfloat16' @ example 1",
        "'after' is not a list of tensors, as in ['w [4, 2]'] @ example 1"]),
    "examples that are not tables": ("example = [1]\n[[rule]]\nrename = 'a => b'", ["not a table @"
    " example 1"]),
    "examples of odd sizes": ("[[rule]]\nrename = 'a => b'" + "".join(
        f"\n[[example]]\nbefore = ['a [1]']\nafter = {after}\nsizes = {sizes}"
        for after, sizes in (
            ("[1]", "{n = 1}"), ("['b [1] bf16']", 5), ("['b [1]']", "{n = 0}"), ("[]", "{n ="
            " true}"))), [
        "'after' is not a list of tensors, as in ['w [4, 2]'] @ example 1",
        "'b [1] bf16' in 'after' is not a tensor, as in 'w [4, 2] bfloat16' @ example 2",
        *(f"'sizes' is not a table of positive integers @ example {number}" for number in (2, 3, 4))]),
    "wrong example": (
        "[[rule]]\ntranspose = 'a'\n[[example]]\nbefore = ['a [2, 3]', 'b []']\nafter = ['a [2, 3]"
        " int8', 'c [1]']", [
        "the rules make no c @ example 1", "the rules leave or make b too @ example 1",
        "a is [3, 2] float32, not [2, 3] int8 @ example 1"]),
    "example that is refused": ("[[rule]]\ntranspose = 'a'\n[[example]]\nbefore = ['a [2]']\nafter"
    " = ['a [2]']", [
        "rule 1 (transpose): shape [2] has no dimension 1 @ a @ example 1"]),
    "several": ("[[rule]]\nrename = 'a'\n[[rule]]\ndrop = 1\n[[rule]]\ncast = ''\ndtype = 1", [
        "not a rule: 'a' @ rule 1",
        "'drop' is not a string or a list of strings @ rule 2",
        "'cast' is not a string or a list of strings @ rule 3",
        "'dtype' is not a dtype of torch, as in 'bfloat16' @ rule 3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_all_mistakes_are_reported_at_once(tmp_path: Path, name: str) -> None:
    text, problems = MISTAKES[name]
    with pytest.raises(CkptError) as caught:
        read_rules(rules_in(tmp_path, text))
    assert without_lines(caught.value.problems) == problems
    assert caught.value.exit_status == 2
    assert caught.value.hint


def test_mistakes_have_line_numbers(tmp_path: Path) -> None:
    text = "# first\n\n[[rule]]\nrename = 'a => b'\n\n  [[ rule ]]  # second\ndrop = 1\n"
    text += "[[example]]\nbefore = 1\nafter = []"
    with pytest.raises(CkptError) as caught:
        read_rules(rules_in(tmp_path, text))
    assert [problem.key for problem in caught.value.problems] == [
        "rule 2 at line 6",
        "example 1 at line 8",
    ]
    # header inside a string: no line number is better than a wrong one
    with pytest.raises(CkptError) as caught:
        read_rules(
            rules_in(tmp_path, "x = '''\n[[rule]]\n'''\n[[rule]]\ndrop = 1".replace("x", "sizes.x"))
        )
    assert caught.value.problems[0].key == "rule 1"


def test_examples_are_checked_in_the_given_direction(tmp_path: Path) -> None:
    rules = "[[rule]]\nreshape = 'a'\nfrom_shape = ['{n}', 2]\nshape = [2, '{n}']\n[[example]]\n"
    good = rules_in(tmp_path, rules + "before = ['a [3, 2] int8']\nafter = ['a [2, 3] int8']")
    assert read_rules(good)
    assert read_rules(good, reverse=True)
    sized = (
        "[[rule]]\nsplit = 'a'\ninto = ['b', 'c']\nsizes = ['{n}', 1]\n[[example]]\nsizes = {n"
        " = 2}\n"
    )
    path = rules_in(tmp_path, sized + "before = ['a [3]']\nafter = ['b [2]', 'c [1]']")
    with pytest.raises(CkptError, match="1 mistake"):  # n has a value only in the example
        read_rules(path)
    assert read_rules(f"{path}(n=5)")


def test_conditions_and_constants_have_no_reverse(tmp_path: Path) -> None:
    text = "[[rule]]\nrename = 'a => b'\nwhen = 'c'\n[[rule]]\nrename = 'f => g'\nunless = 'h'\n"
    text += "[[rule]]\nconstant = 'd'\nvalue = 1\nshape = []\n"
    with pytest.raises(CkptError) as caught:
        read_rules(rules_in(tmp_path, text + "[[rule]]\njoin = 'e.{i}'\ninto = 'e'"), reverse=True)
    assert without_lines(caught.value.problems) == [
        "a => b: the names of its conditions may be others by then @ rule 1 (rename)",
        "f => g: the names of its conditions may be others by then @ rule 2 (rename)",
        "d: drop it in a file with the way back @ rule 3 (constant)",
        "e: parts = N says into how many @ rule 4 (join)",
    ]


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CkptError, match="is not TOML"):
        read_rules(str(tmp_path / "rules.toml"))


def test_rules_without_a_reverse_are_reported(tmp_path: Path) -> None:
    text = (
        "[[rule]]\ncast = '*'\ndtype = 'float16'\n[[rule]]\ndrop = 'a'\n[[rule]]\nreshape ="
        " 'b'\nshape = [1]\n[[rule]]\npad = 'p'\nsize = 9\n[[rule]]\nslice = 's'\nsize = 2\n"
    )
    with pytest.raises(CkptError) as caught:
        read_rules(
            rules_in(tmp_path, text + "[[rule]]\nrename = ['re:a => b', 'c => d']"), reverse=True
        )
    assert without_lines(caught.value.problems) == [
        "*: what is lost does not come back @ rule 1 (cast)",
        "a: what is lost does not come back @ rule 2 (drop)",
        "b: from_shape = [...] says what shape it had @ rule 3 (reshape)",
        "p: from_size = N says what size it had @ rule 4 (pad)",
        "s: what is lost does not come back @ rule 5 (slice)",
        "a regular expression has no reverse: 're:a => b' @ rule 6 (rename)",
    ]


@pytest.mark.parametrize("fields", ["", "size = 8\nmultiple = 4"])
def test_pad_needs_a_size_or_a_multiple(tmp_path: Path, fields: str) -> None:
    with pytest.raises(CkptError) as caught:
        read_rules(rules_in(tmp_path, f"[[rule]]\npad = 'a'\n{fields}"))
    assert without_lines(caught.value.problems) == [
        "pad needs either 'size' or 'multiple' @ rule 1"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--reverse", "--rules"),
        ("--rules missing.toml", "missing.toml"),
    ],
)
def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    source = save({"a": numbers(1)}, tmp_path / "in.safetensors")
    assert main(["remap", str(source), "-o", str(tmp_path / "out.safetensors"), *line.split()]) == 2
    assert words in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "out.safetensors").exists()


# The examples of docs/rules.md: each block of rules, with its table of tensors before and after.

BLOCKS = 10
PAGE = DOCS / "rules.md"
EXAMPLE = re.compile(
    r"```toml\n(.*?)```\n\n\| before \| after \|\n\| --- \| --- \|\n((?:\|[^\n]*\n)+)", re.DOTALL
)
TENSOR = re.compile(r"`([^`]+)` (\[[\d, ]+\])(?: (\w+))?")


def tensors(cells: Sequence[str]) -> Iterator[tuple[str, list[int], str]]:
    for cell in cells:
        yield from (
            (key, json.loads(shape), dtype or "float32")
            for key, shape, dtype in TENSOR.findall(cell)
        )


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text())


def test_every_block_of_the_page_is_an_example() -> None:
    assert len(examples()) == PAGE.read_text().count("```toml") == BLOCKS


@pytest.mark.parametrize("number", range(BLOCKS))
def test_examples_on_the_page_are_correct(tmp_path: Path, number: int) -> None:
    text, table = examples()[number]
    rows = [row.split("|")[1:3] for row in table.splitlines()]
    before, after = (list(tensors([row[side] for row in rows])) for side in (0, 1))
    state = {key: numbers(*shape, dtype=getattr(torch, dtype)) for key, shape, dtype in before}
    source, rules = save(state, tmp_path / "in.safetensors"), rules_in(tmp_path, text)
    found = rewrite(source, tmp_path / "out.safetensors", rules)
    assert {key: list(value.shape) for key, value in found.items()} == {
        key: shape for key, shape, _ in after
    }
    if "cast" in text:
        assert {str(value.dtype) for value in found.values()} == {
            "torch.bfloat16",
            "torch.int64",
            "torch.float32",
        }
    elif not any(operation in text for operation in ("drop", "constant", "slice", "dequantize")):
        back = rewrite(
            tmp_path / "out.safetensors", tmp_path / "back.safetensors", rules, reverse=True
        )
        assert same(back, state)


def test_equal_constants_are_not_tied(tmp_path: Path, run: Run) -> None:
    torch.save({f"{name}.weight": torch.ones(3) for name in "ab"}, tmp_path / "a.pt")
    rule = '[[rule]]\nconstant = "{x}.bias"\nbeside = "{x}.weight"\nvalue = 0\nshape = [3]\n'
    (tmp_path / "r.toml").write_text(rule)
    for out in ("o.pt", "o.safetensors"):
        assert (
            run(
                "remap", tmp_path / "a.pt", "--rules", tmp_path / "r.toml", "-o", tmp_path / out
            ).status
            == 0
        )
    found = torch.load(tmp_path / "o.pt")
    assert found["a.bias"].data_ptr() != found["b.bias"].data_ptr()


def test_conditional_renames_do_not_apply_to_names_without_tensors(tmp_path: Path) -> None:
    from ckpttool.ruleset.steps import name_after

    text = (
        '[[rule]]\nrename = "a.{x} => z.{x}"\nwhen = "other.weight"\n[[rule]]\nrename = "b.{x}'
        ' => c.{x}"\n'
    )
    text += (
        '[[rule]]\nrename = "c.{x} => d.{x}"\nunless = "other.weight"\n[[rule]]\ndrop = "c.{x}"\n'
    )
    (tmp_path / "r.toml").write_text(text)
    steps = read_rules(str(tmp_path / "r.toml"))
    assert [name_after(steps, name) for name in ("a.w", "b.w")] == ["a.w", "c.w"]


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        ("['a [{n}]', 'b.{i} [{n}, -1]']", ""),
        ("['a [4]', 'b.{i} [-1, 2]']", ""),
        ("['a [{n}]', 'b.{i} [-1, {n}]']", "dimension 1 is 2, and 4 in a"),
        ("['b.{i} [{n}, {n}]']", "dimension 1 is 2, and 4 in b.0"),
        ("['b.{i} [3, -1]']", "dimension 0 is 4 instead of 3"),
        ("['b.{i} [4]']", "[4, 2] instead of 1 dimension"),
        ("['c [4]']", "applies to no key"),
    ],
)
def test_a_check_compares_the_sizes_of_tensors(
    run: Run, tmp_path: Path, check: str, problem: str
) -> None:
    source, rules, out = tmp_path / "in.pt", tmp_path / "rules.toml", tmp_path / "out.pt"
    torch.save({"a": torch.ones(4), "b.0": torch.ones(4, 2), "b.1": torch.ones(4, 2)}, source)
    rules.write_text(f"[[rule]]\ncheck = {check}\n[[rule]]\nrename = 'a => c'\n")
    done = run("remap", source, "--rules", rules, "-o", out)
    assert done.status == (1 if problem else 0), done.err
    assert problem in done.err
    assert out.exists() != bool(problem)
    if not problem:
        back = tmp_path / "back.pt"
        assert run("remap", out, "--rules", rules, "--reverse", "-o", back).status == 0
        assert list(torch.load(back)) == ["a", "b.0", "b.1"]


@pytest.mark.parametrize("check", ["['a']", "['a [x]']", "['a [{n} + 1]']", "'a [4]'", "[]"])
def test_a_check_of_anything_else_is_a_mistake(tmp_path: Path, check: str) -> None:
    with pytest.raises(CkptError) as caught:
        read_rules(rules_in(tmp_path, f"[[rule]]\ncheck = {check}\n"))
    (problem,) = caught.value.problems
    assert problem.problem.startswith("'check' is not a list of tensors with sizes")


def test_a_rule_with_the_section_in_its_keys_gets_a_hint(tmp_path: Path) -> None:
    state = {"model": {"a.w": torch.ones(1)}, "epoch": 1}
    with pytest.raises(Refused) as refused:
        ckpttool.remap(state, rule="model.a.{x*} => model.b.{x*}")
    assert refused.value.hint == "rules name keys without their section: leave out `model.`"
    assert ckpttool.remap(state, rule="a.{x*} => b.{x*}").counts["renamed"] == 1
