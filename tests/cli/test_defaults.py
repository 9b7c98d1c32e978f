"""Defaults from the environment and from pyproject.toml: precedence, messages and mistakes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttool.cli import defaults, pyproject
from ckpttool.cli.params import load
from command import Run
from places import ROOT

MODEL = """
from torch import nn
def build(width=2): return nn.Sequential(nn.Linear(2, width))
def other(): return nn.ModuleDict({"a": nn.Linear(2, 2)})
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a default model; commands run in a subfolder."""
    for name in [name for name in os.environ if name.startswith("CKPTTOOL_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".git").mkdir()
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text('[tool.ckpttool]\nmodel = "model.py:build"\n')
    (tmp_path / "runs").mkdir()
    torch.save(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "runs" / "train.pt")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path


def write_pyproject(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(text)


def test_project_has_a_default_model(project: Path, run: Run) -> None:
    done = run("diff", "train.pt")
    assert done.status == 0
    assert "../model.py:build (what it loads)" in done.out
    assert done.err == "default: --model ../model.py:build (../pyproject.toml [tool.ckpttool])\n"
    assert "../model.py:build" in run("trace").out
    assert run("explain", "0.weight").status == 0
    assert run("remap", "train.pt", "-o", "runtime.pt", "--to", "runtime").status == 0


def test_command_line_overrides_environment(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_MODEL", "../model.py:other")
    assert run("diff", "train.pt").status == 1
    done = run("diff", "train.pt", "--model", "../model.py:build")
    assert (done.status, done.err) == (0, "")
    assert run("diff", "--model=../model.py:build", "--", "train.pt").status == 0
    monkeypatch.setenv("CKPTTOOL_MODEL", "")
    assert run("diff", "train.pt").status == 2
    monkeypatch.delenv("CKPTTOOL_MODEL")
    assert run("diff", "train.pt", "--no-defaults").status == 2


def test_another_model_ignores_model_defaults(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pyproject(project, '[tool.ckpttool]\nmodel = "model.py:build(width=3)"\nmaterialize = true\n')
    assert run("diff", "train.pt").status == 1
    assert run("diff", "train.pt", "--model", "../model.py:build").status == 0
    monkeypatch.setenv("CKPTTOOL_MODEL", "../model.py:build")
    assert run("diff", "train.pt").status == 0


def test_default_model_is_used_only_if_a_model_is_needed(project: Path, run: Run) -> None:
    write_pyproject(project, '[tool.ckpttool]\nmodel = "../none.py:build"\n')
    for line in ("inspect train.pt", "diff train.pt train.pt", "remap train.pt -o new.safetensors"):
        assert (run(*line.split()).status, run("diff", "train.pt", "train.pt").err) == (0, "")
    write_pyproject(project, '[tool.ckpttool.diff]\nmodel = "model.py:build"\n')
    assert "default: --model" in run("diff", "train.pt", "train.pt").err


def test_table_of_a_command_overrides_the_general_table(project: Path, run: Run) -> None:
    write_pyproject(
        project, '[tool.ckpttool]\nformat = "json"\n[tool.ckpttool.inspect]\nformat = "markdown"\nstats = true\n'
    )
    done = run("inspect", "train.pt")
    assert done.out.startswith("#")
    assert "default: --stats (../pyproject.toml [tool.ckpttool.inspect])" in done.err


@pytest.mark.parametrize(
    ("general_format", "command_format", "env_format", "options", "is_json"),
    [
        ("json", None, None, "", True),
        ("json", None, None, "--no-defaults", False),
        ("json", "text", None, "", False),
        ("json", None, "markdown", "", False),
        ("text", None, "json", "", True),
        ("json", None, None, "--format text", False),
        ("text", None, None, "--format=json", True),
        ("text", None, None, "--format json --format text", False),
        ("text", None, None, "--format=text --format=json", True),
        (None, None, None, "--format json --nope", True),
    ],
)
def test_error_has_the_format_of_the_output(
    project: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    general_format: str | None,
    command_format: str | None,
    env_format: str | None,
    options: str,
    is_json: bool,
) -> None:
    tables = [("tool.ckpttool", general_format), ("tool.ckpttool.inspect", command_format)]
    write_pyproject(project, "".join(f'[{name}]\nformat = "{value}"\n' for name, value in tables if value is not None))
    if env_format is not None:
        monkeypatch.setenv("CKPTTOOL_FORMAT", env_format)
    done = run("inspect", "none.pt", *options.split())
    assert (done.status, done.err.count("error: ")) == (2, 1)
    assert done.data["error"] in done.err if is_json else done.out == ""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('[tool.ckpttool]\nmodle = "m"', ["option that can have a default; did you mean model? @ tool.ckpttool.modle"]),
        ("[tool.ckpttool]\nforce = true", ["is not an option that can have a default @ tool.ckpttool.force"]),
        ("[tool.ckpttool]\nrtol = 'x'\nvalues = 2", ["@ tool.ckpttool.rtol", "@ tool.ckpttool.values"]),
        ("[tool.ckpttool.diff]\nrtol = -1", ["@ tool.ckpttool.diff.rtol"]),
        ("[tool.ckpttool]\nrtol = true", ["@ tool.ckpttool.rtol"]),
        ("[tool.ckpttool]\nmodel = ['m', 'n']", ["['m', 'n'] is not one value @ tool.ckpttool.model"]),
        ("[tool.ckpttool.diff.model]\nfile = 'm'", ["{'file': 'm'} is not one value @ tool.ckpttool.diff.model"]),
        ("[tool.ckpttool]\nformat = 'yaml'", ["unknown format 'yaml' @ tool.ckpttool.format"]),
        ("[tool.ckpttool]\nmodel = [", ["is not TOML"]),
        ("[tool.ckpttool]\nmodel = " + "[" * 50_000, ["is not TOML"]),
        ("[tool]\n# tool.ckpttool\nckpttool = 1", ["tool.ckpttool is not a table"]),
        ("[tool.ckpttool]\ndiff = 1", ["is not a table @ tool.ckpttool.diff"]),
        ("[tool.ckpttool.dif]\nrtol = 1", ["is not a command; did you mean diff? @ tool.ckpttool.dif"]),
        ("[tool.ckpttool.inspect]\nrtol = 1\n[tool.ckpttool.diff]\nfail = 1", ["@ tool.ckpttool.diff.fail"]),
    ],
)
def test_mistake_in_pyproject_is_located(project: Path, run: Run, text: str, problems: list[str]) -> None:
    write_pyproject(project, text)
    done = run("diff", "train.pt", "train.pt")
    assert done.status == 2
    assert "pyproject.toml" in done.err
    assert [problem for problem in problems if problem not in done.err] == []
    assert "--no-defaults" in done.err.splitlines()[-1]
    assert run("diff", "train.pt", "train.pt", "--no-defaults").status == 0


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("CKPTTOOL_MODLE", "m.py:build", "is not an option; did you mean CKPTTOOL_MODEL? @ CKPTTOOL_MODLE"),
        ("CKPTTOOL_VALUES", "maybe", " @ CKPTTOOL_VALUES"),
        ("CKPTTOOL_RTOL", "a", " @ CKPTTOOL_RTOL"),
        ("CKPTTOOL_FORMAT", "yaml", "unknown format 'yaml' @ CKPTTOOL_FORMAT"),
    ],
)
def test_mistake_in_the_environment_is_located(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(name, value)
    done = run("diff", "train.pt", "train.pt")
    assert (done.status, problem in done.err) == (2, True)


def test_unrelated_variable_is_ignored(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_IMAGE", "registry/ckpttool:1")
    monkeypatch.setenv("CKPTTOOL_TO", "ddp")  # an option of another command
    assert run("diff", "train.pt", "train.pt").status == 0


def test_only_a_pyproject_of_the_user_is_read(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".git").rmdir()
    assert run("diff", "train.pt").status == 2  # not a repository: only the folder itself is searched
    monkeypatch.setenv("CKPTTOOL_PYPROJECT", "../pyproject.toml")
    assert run("diff", "train.pt").status == 0
    monkeypatch.delenv("CKPTTOOL_PYPROJECT")
    (project / ".git").write_text("gitdir: elsewhere")
    assert run("diff", "train.pt").status == 0
    (project / "runs" / "pyproject.toml").write_text("[project]\n")  # without a [tool.ckpttool] table
    assert run("diff", "train.pt").status == 0
    monkeypatch.setattr(pyproject, "_is_own", lambda path: False)
    done = run("diff", "train.pt")
    assert done.status == 2
    assert "no defaults are taken from ../pyproject.toml, which is another user's" in done.err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change the owner of a file")
def test_pyproject_of_another_user_is_ignored(project: Path, run: Run) -> None:
    os.chown(project / "pyproject.toml", 12345, -1)
    assert run("diff", "train.pt").status == 2


def test_project_without_a_table_does_not_import_tomllib(project: Path) -> None:
    write_pyproject(project, "[project]\nname = 'x'\n")
    code = "import sys; from ckpttool.cli.app import main; main(['inspect', 'train.pt'])\n"
    code += "assert not {'tomllib', 'tomli', 'torch'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_multiple_values_are_a_list_or_lines(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"0.weight": torch.ones(1), "0.bias": torch.ones(3)}, "other.pt")
    assert run("diff", "train.pt", "other.pt").status == 1
    bias, both = "shape 0.bias # new", "shape,dtype 0.* # new"
    for value, words in ((["shape 0.w* # new", bias], ["shape 0.w* # new", "--ignore", bias]), (both, [both])):
        write_pyproject(project, f"[tool.ckpttool.diff]\nignore = {value!r}\n")
        done = run("diff", "train.pt", "other.pt")
        assert done.status == 0
        assert shlex.split(done.err.partition(" (")[0]) == ["default:", "--ignore", *words]
    write_pyproject(project, "[tool.ckpttool.diff]\nignore = []\n")
    assert "default:" not in run("diff", "train.pt", "other.pt").err
    monkeypatch.setenv("CKPTTOOL_IGNORE", f"shape 0.w* # new\n{both}\n")
    assert run("diff", "train.pt", "other.pt").status == 0


def test_flag_can_be_turned_off(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pyproject(project, "[tool.ckpttool]\nstats = true\n")
    assert run("inspect", "train.pt").err.startswith("default: --stats (")
    assert run("inspect", "train.pt", "-q").err == ""
    monkeypatch.setenv("CKPTTOOL_STATS", "off")
    done = run("inspect", "train.pt")
    assert (done.status, done.err) == (0, "")
    write_pyproject(project, "[tool.ckpttool]\nstats = true\n[tool.ckpttool.inspect]\nstats = false\n")
    monkeypatch.delenv("CKPTTOOL_STATS")
    assert run("inspect", "train.pt").err == ""


def test_empty_variable_removes_a_default(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("trace").status == 0
    monkeypatch.setenv("CKPTTOOL_MODEL", "")
    assert run("trace").status == 2
    monkeypatch.setenv("CKPTTOOL_PYPROJECT", "")
    monkeypatch.delenv("CKPTTOOL_MODEL")
    assert run("diff", "train.pt").status == 2


def test_another_model_keeps_unrelated_defaults(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pyproject(project, '[tool.ckpttool]\nmodel = "model.py:other"\nformat = "json"\n')
    monkeypatch.setenv("CKPTTOOL_MODEL", "../model.py:build")
    done = run("diff", "train.pt")
    assert done.status == 0
    assert "../model.py:build" in done.data["left"] + done.data["right"]


def test_saved_plan_does_not_use_the_default_model(project: Path, run: Run) -> None:
    assert "default" not in run("remap", "train.pt", "--rules", "p.json", "-o", "new.pt", "--to", "runtime").err
    assert "default" in run("remap", "train.pt", "-o", "new.pt", "--to", "runtime").err
    assert "default" in run("diff").err


def test_each_mistake_is_reported_once(project: Path, run: Run) -> None:
    write_pyproject(project, '[tool.ckpttool]\nformat = "json"\n[tool.ckpttool.dif]\n[tool.ckpttool.diff]\n')
    lines = [line.strip() for line in run("diff", "train.pt").err.splitlines() if " @ " in line]
    assert lines == ["is not a command; did you mean diff? @ tool.ckpttool.dif"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", "model.py:build", "../model.py:build"),
        ("model", "package.model:build", "package.model:build"),
        ("model", "names.json", "../names.json"),
        ("model", "program.pt2", "../program.pt2"),
        ("model", "/abs/model.py:build", "/abs/model.py:build"),
        ("like", "other.pt", "../other.pt"),
        ("like", "s3://bucket/other.pt", "s3://bucket/other.pt"),
        ("report", ["a.json", "b.md"], ["../a.json", "../b.md"]),
        ("optimizer", "opt.py:build", "../opt.py:build"),
        ("optimizer", "torch.optim:SGD", "torch.optim:SGD"),
        ("model", "model.py:build(width=3)", "../model.py:build(width=3)"),
        ("format", "json", "json"),
    ],
)
def test_paths_are_relative_to_pyproject(name: str, value: object, expected: object) -> None:
    actual = defaults._from_here("../pyproject.toml", load("remap").params[name].mark.metavar, value)
    assert actual == (os.path.relpath(str(expected)) if str(expected).startswith("/abs") else expected)


def test_files_without_owners_belong_to_the_user(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "geteuid")
    assert run("diff", "train.pt").status == 0
