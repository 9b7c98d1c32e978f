"""Options in Python: their types, errors of type checkers for wrong calls, and errors for
misspelled options.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.core.options import (
    EditOptions,
    ModelOptions,
    OptimizerOptions,
    OutputOptions,
    in_python,
)
from ckpttool.diffing.options import CompareOptions, DiffOptions
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.run import WRITTEN
from ckpttool.swap.options import SwapOptions

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "ckpttool" / "keywords.py"
HEAD = '''"""Options as type checkers see them: a TypedDict for each dataclass of options.

Generated from the dataclasses: UPDATE_KEYWORDS=1 make test ARGS=tests/api/test_keywords.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict
'''


DOCSTRINGS = {
    "ModelKeywords": "How the model is built.",
    "OptimizerKeywords": "How the model and its optimizer are built: options of `trace` and"
    " `explain`.",
    "CheckKeywords": "Options of `check`.",
    "CompareKeywords": "How tensors are compared.",
    "DiffKeywords": "Options of `diff`.",
    "ConvertKeywords": "Options of `convert`.",
    "OutputKeywords": "How an output is written, and the model that is to load it.",
    "FixKeywords": "Options of `fix`.",
    "RemapKeywords": "Options of `remap`.",
    "SwapKeywords": "Options of `swap_weights` into a file.",
    "WriteKeywords": "Options of `write`.",
}


def rows(options: type, *excluded: str) -> dict[str, str]:
    """Return the fields that the class adds, with their types as text."""
    hints = typing.get_type_hints(options)
    names = [
        field.name for field in dataclasses.fields(options) if field.name in options.__annotations__
    ]
    return {name: text(hints[name]) for name in names if name not in excluded}


def text(hint: object) -> str:
    plain = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"(typing|collections\.abc)\.", "", plain).replace(
        "Sequence[str]", "str | Sequence[str]"
    )


def generate() -> str:
    model = {"model": "Any"}
    output = {**rows(OutputOptions), **rows(ConvertOptions)}
    classes: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("ModelKeywords", "TypedDict", rows(ModelOptions, "model")),
        ("OptimizerKeywords", "ModelKeywords", rows(OptimizerOptions)),
        ("CheckKeywords", "OptimizerKeywords", model),
        ("CompareKeywords", "TypedDict", rows(CompareOptions)),
        ("DiffKeywords", "CheckKeywords, CompareKeywords", rows(DiffOptions)),
        ("OutputKeywords", "TypedDict", {**model, **rows(OutputOptions, "out")}),
        ("FixKeywords", "OptimizerKeywords, OutputKeywords", rows(EditOptions)),
        (
            "RemapKeywords",
            "OptimizerKeywords, OutputKeywords",
            {**rows(EditOptions), **rows(RemapOptions)},
        ),
        ("ConvertKeywords", "ModelKeywords, OutputKeywords", rows(ConvertOptions)),
        ("SwapKeywords", "ModelKeywords, OutputKeywords", rows(SwapOptions)),
        ("WriteKeywords", "TypedDict", {name: output[name] for name in WRITTEN}),
    )
    source = HEAD
    for name, base, fields in classes:
        source += f"\n\nclass {name}({base}, total=False):\n"
        source += f'    """{DOCSTRINGS[name]}"""\n' + "\n" * bool(fields)
        source += "".join(f"    {field}: {hint}\n" for field, hint in fields.items())
    return source


def test_keyword_types_match_the_options() -> None:
    if os.environ.get("UPDATE_KEYWORDS"):
        FILE.write_text(generate())
    assert FILE.read_text() == generate(), "run this test with UPDATE_KEYWORDS=1"


RIGHT = """
import ckpttool
import torch
from torch import nn

module = nn.Linear(1, 1)
found: ckpttool.Diff = ckpttool.diff("a.pt", {"w": torch.ones(1)}, model=module, values=True, ignore="shape a.*")
done: ckpttool.Remap = ckpttool.remap([{"w": torch.ones(1)}], "b.pt", rule="a => b", drop=["c"], to=None)
back: ckpttool.Remap = ckpttool.convert("a.pt", "b.safetensors", max_shard_size="5GB")
good: ckpttool.Remap = ckpttool.fix("a.pt", "b.pt", model=module)
ckpttool.write(done.result, "c.pt", force=True)
file: ckpttool.Swap = ckpttool.swap_weights("a.pt2", "b.pt", "c.pt2", cast=True)
live: ckpttool.Swapped = ckpttool.swap_weights(module, module.state_dict(), in_place=False)
names: ckpttool.Names = ckpttool.trace(module, optimizer=torch.optim.SGD)
one: ckpttool.Explanation = ckpttool.explain("weight", module)
inside: ckpttool.Inspection = ckpttool.inspect("a.pt", stats=True)
files: ckpttool.Checks = ckpttool.check(["a.toml"], model=module)
"""
WRONG = """
import ckpttool
from ckpttool.live.swap import Package
from torch import nn

ckpttool.diff("a.pt", "b.pt", modle=None)
ckpttool.diff("a.pt", "b.pt", values="yes")
ckpttool.remap("a.pt", "b.pt", rule=3)
ckpttool.remap("a.pt", "b.pt", keep_aliasses=True)
ckpttool.remap(3)
ckpttool.write(ckpttool.open_checkpoint("a.pt"), "b.pt", rule="a => b")
ckpttool.swap_weights("a.pt2", "b.pt", casts=True)
ckpttool.swap_weights(Package(), {}, constants=True)
ckpttool.trace(nn.Linear(1, 1), values=True)
ckpttool.check(["a.toml"], rtol=1.0)
ckpttool.open_checkpoint("a.pt").source = "b.pt"
ckpttool.no_such_function()
"""


# mypy skips torch and numpy, because reading them takes a minute.
CONFIG = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,fsspec.*,tomli.*]
follow_imports = skip
ignore_missing_imports = true
"""


def test_type_checkers_report_only_wrong_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    cache = str(ROOT / "build" / "mypy_keywords")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        cache,
        "right.py",
        "wrong.py",
    ]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    error_lines = {
        int(line) for line in re.findall(r"^wrong\.py:(\d+): error", done.stdout, re.MULTILINE)
    }
    expected = {at for at, line in enumerate(WRONG.splitlines(), 1) if line.startswith("ckpttool.")}
    assert error_lines == expected, done.stdout + done.stderr
    assert "right.py" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "remap('a.pt', modle=None)",
            "remap() got an unexpected keyword argument 'modle'; did you mean 'model'?",
        ),
        (
            "diff('a.pt', valeus=1)",
            "diff() got an unexpected keyword argument 'valeus'; did you mean 'values'?",
        ),
        (
            "inspect('a.pt', stat=1)",
            "inspect() got an unexpected keyword argument 'stat'; did you mean 'stats'?",
        ),
        ("trace(None, adam=1)", "trace() got an unexpected keyword argument 'adam'"),
        (
            "swap_weights('', '', nam=1)",
            "swap_weights() got an unexpected keyword argument 'nam'; did you mean 'name'?",
        ),
        ("write('a', 'b', rule='c')", "write() got an unexpected keyword argument 'rule'"),
        ("explain('a', None, zzz=1)", "explain() got an unexpected keyword argument 'zzz'"),
    ],
)
def test_a_misspelled_option_gets_a_suggestion(call: str, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        eval(f"ckpttool.{call}", {"ckpttool": ckpttool})
    assert str(raised.value) == message


def test_help_lists_every_option() -> None:
    for function, options in ((ckpttool.remap, RemapOptions), (ckpttool.diff, DiffOptions)):
        known = set(inspect.signature(function).parameters)
        assert {field.name for field in dataclasses.fields(options)} <= known


def test_dir_lists_only_public_names() -> None:
    assert [name for name in dir(ckpttool) if not name.startswith("_")] == sorted(ckpttool.__all__)
    assert all(getattr(ckpttool, name) is not None for name in dir(ckpttool))


def results() -> list[object]:
    state, net = {str(at): torch.ones(1) for at in range(50)}, torch.nn.Linear(2, 2)
    optimizer = {
        "model": state,
        "optimizer": torch.optim.Adam(net.parameters()).state_dict(),
        "text": "\0" * 1000,
    }
    done = ckpttool.remap(optimizer, rule="0 => zero")
    return [
        *(ckpttool.open_checkpoint(optimizer), ckpttool.inspect(optimizer), done, done.plan),
        *(
            ckpttool.diff(state, {**state, "0": torch.ones(2)}),
            ckpttool.trace(net),
            ckpttool.explain("bias", net),
        ),
        ckpttool.check([str(FILE)]),
        ckpttool.swap_weights(net, net.state_dict()),
    ]


def test_results_have_a_short_repr_and_a_table_in_notebooks() -> None:
    for result in results():
        shown = repr(result)
        assert len(shown) <= 200, shown
        assert "\n" not in shown
        assert shown.startswith(type(result).__name__)
        html = result._repr_html_()  # type: ignore[attr-defined]
        assert "<script" not in html if html else isinstance(result, ckpttool.Swapped)
        assert html is None or html.startswith("<div>")


def test_a_repr_does_not_depend_on_the_size_of_the_checkpoint() -> None:
    state = {f"layer.{at}": torch.ones(1) for at in range(2000)}
    done = ckpttool.remap({"model": state, "changed": [state] * 3}, rule="layer.0 => zero")
    lines = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal lines
        lines += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        repr(done), repr(done.result), repr(ckpttool.inspect)
    finally:
        sys.setprofile(None)
    assert lines < 500


def test_a_changed_copy_of_an_entry_is_not_equal() -> None:
    """The page on the Python API documents this for values that exist once per tensor."""
    checkpoint = ckpttool.open_checkpoint({"a": torch.ones(1)})
    (entry,) = checkpoint.sections[0].tensors
    before, changed = hash(entry), dataclasses.replace(entry, key="b")
    assert (entry.key, changed.key) == ("a", "b")
    assert changed != entry
    assert hash(entry) == before != hash(changed)


def test_results_are_frozen() -> None:
    for result in results():
        for field in dataclasses.fields(result):  # type: ignore[arg-type]
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(result, field.name, None)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(result, field.name)
        assert dataclasses.replace(result) == result  # type: ignore[type-var]


def test_flags_become_keywords_outside_of_commands() -> None:
    for text, expected in (
        ("add --materialize to build it for real", "add materialize=True to build it for real"),
        ("pass --model MODEL too", "pass model=MODEL too"),
        ("... 2 more (--all)", "... 2 more (to_json())"),
        ("--optimizer-keys names: no such form", "optimizer_keys='names': no such form"),
        ("fetch it: git lfs pull --include a.pt", "fetch it: git lfs pull --include a.pt"),
        ("list them: ckpttool trace M --all", "list them: ckpttool trace M --all"),
        (
            "`remap CKPT -o OUT --to runtime`, or (remap --drop 'a b')",
            "`remap(CKPT, out=OUT, to='runtime')`, or (remap drop='a b')",
        ),
        ("--like and --to both say it", "like= and to= both say it"),
        ("choose: -o OUT or --from FORM", "choose: out=OUT or from_=FORM"),
        ("leave it out: --drop common.pt", "leave it out: drop='common.pt'"),
        ("--drop optimizer; or --drop 'a.*'", "drop='optimizer'; or drop='a.*'"),
        ("--from runtime says otherwise", "from_= runtime says otherwise"),
        (
            "`ckpttool remap x --drop y`, or --rule 'A => B'",
            "`ckpttool remap x --drop y`, or rule='A => B'",
        ),
        (
            "as here: ckpttool diff x --model M; --partial writes it",
            "as here: ckpttool diff x --model M; partial=True writes it",
        ),
    ):
        assert in_python(text) == expected
