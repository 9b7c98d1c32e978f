"""Test `check`, and run the pre-commit hooks and the GitHub action as their runners do."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import schemas
from command import Run
from places import ROOT

yaml = pytest.importorskip("yaml")


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("CKPTTOOL_")]:
        monkeypatch.delenv(name)
    shutil.copytree(
        ROOT / "examples" / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.chdir(tmp_path / "ci")
    torch.save({"w": torch.ones(2)}, "good.pt")
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=1)}, "args.pt")
    save_file({"w": torch.ones(2)}, "good.safetensors")
    Path("rules.toml").write_text('[[rule]]\nrename = "a.{x*} => b.{x*}"\n')
    return tmp_path / "ci"


def rename() -> None:
    text = Path("model.py").read_text()
    Path("model.py").write_text(text.replace("self.head", "self.classifier"))
    shutil.rmtree("__pycache__", ignore_errors=True)


@pytest.fixture
def rename_head(run: Run) -> Callable[[], None]:
    """Return a function that renames the head. `now.json` has the names of the model, for steps
    without torch.
    """
    shutil.copy("names.json", "now.json")

    def rename_head() -> None:
        rename()
        line = (
            "trace",
            "model.py:build",
            "--optimizer",
            "model.py:optimizer",
            "-o",
            "now.json",
            "--force",
            "-q",
        )
        assert run(*line).status == 0

    return rename_head


def test_each_file_is_checked_by_its_type(run: Run) -> None:
    files = ("good.pt", "good.safetensors", "rules.toml", "names.json")
    done = run("check", *files, "--format", "json")
    assert (done.status, done.data["ok"]) == (0, True)
    assert [file["kind"] for file in done.data["files"]] == [
        "checkpoint",
        "checkpoint",
        "rules",
        "names",
    ]
    assert schemas.check(done.data) == "check"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rules.toml", '[[rule]]\nrenam = "a => b"\n', "rule"),
        ("rules.toml", "[[rule", "not TOML"),
        ("names.json", '{"schema": "ckpttool.names/1"}', "$.model"),
        ("bad.pt", "not a checkpoint", "bad.pt"),
    ],
)
def test_invalid_file_is_reported(run: Run, name: str, content: str, problem: str) -> None:
    Path(name).write_text(content)
    done = run("check", "good.pt", name, "--format", "json")
    assert (done.status, done.data["ok"]) == (1, False)
    assert problem in str(done.data["files"][1]["problems"])
    assert done.data["files"][0]["problems"] == []


def test_problem_names_its_file_once_and_has_a_hint(run: Run) -> None:
    Path("bad.pt").write_text("not a checkpoint")
    Path("rules.toml").write_text('[[rule]]\nrenam = "a => b"\n')
    done = run("check", "bad.pt", "rules.toml")
    assert done.status == 1
    assert "error: is not a checkpoint that ckpttool knows @ bad.pt\n" in done.out
    assert re.search("error: rules.toml: .* @ rule 1 at line 1\n", done.out)
    hints = [
        file["hint"]
        for file in run("check", "bad.pt", "rules.toml", "good.pt", "--format", "json").data[
            "files"
        ]
    ]
    assert hints[2] is None
    assert all(
        f"hint: {path}: {hint}" in done.out for path, hint in zip(("bad.pt", "rules.toml"), hints)
    )
    rename()
    model = ("--model", "model.py:build", "--optimizer", "model.py:optimizer")
    (file,) = run("check", "names.json", *model, "--format", "json").data["files"]
    printed = shlex.split(file["hint"].partition(" (")[0])
    assert run(*printed[1:]).status == 1
    assert run(*printed[1:], "--update").status == 0
    assert run("check", "names.json", *model).status == 0


def test_pickle_imports_must_be_allowed(run: Run) -> None:
    done = run("check", "args.pt", "--format", "json")
    assert (done.status, done.data["files"][0]["problems"][0]["key"]) == (1, "argparse.Namespace")
    assert run("check", "args.pt", "--allow", "argparse.*").status == 0
    said = run("check", "args.pt").said[1]
    assert said.count("argparse.Namespace") == 2  # the problem, and the command
    assert "if you trust it: ckpttool check args.pt --allow argparse.Namespace\n" in said
    assert run("check", "none.pt").status == 2


class _Runs:
    def __reduce__(self) -> Any:
        return (os.system, ("touch executed",))


WEIGHT = torch.arange(4.0)
DANGEROUS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "next to a state dict": ({"state_dict": {"w": WEIGHT}, "x": _Runs()}, {"w": WEIGHT}),
    "next to weights": ({"w": WEIGHT, "x": _Runs()}, {"w": WEIGHT}),
    "in a state dict": ({"model": {"w": WEIGHT, "x.y": [_Runs()]}, "epoch": 3}, {"w": WEIGHT}),
    "tied": ({"model": {"a": WEIGHT, "b": WEIGHT}, "x": _Runs()}, {"a": WEIGHT}),
    "two state dicts": (
        {"model": {"w": WEIGHT}, "ema": {"w": -WEIGHT}, "x": {"y": _Runs()}},
        {"w": WEIGHT},
    ),
    "an object": ({"model": {"w": WEIGHT, "n": {"k"}}, "x": _Runs()}, {"w": WEIGHT}),
}


@pytest.mark.parametrize(("content", "weights"), DANGEROUS.values(), ids=DANGEROUS)
def test_weights_of_a_dangerous_file_are_written_by_the_printed_command(
    content: Any, weights: dict[str, torch.Tensor], run: Run
) -> None:
    torch.save(content, "my file.pth")
    done = run("check", "my file.pth", "--format", "json")
    assert done.status == 1
    (file,) = done.data["files"]
    assert "--allow" not in file["hint"]
    line = shlex.split(file["hint"].partition("do not load it; to take the weights only, run ")[2])
    assert line[0] == "ckpttool"
    assert run(*line[1:]).status == 0
    written = load_file(line[line.index("-o") + 1])
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[key], value) for key, value in weights.items())
    assert not Path("executed").exists()


def test_dangerous_file_without_weights_is_not_to_be_loaded(run: Run) -> None:
    torch.save(_Runs(), "x.pth")
    (file,) = run("check", "x.pth", "--format", "json").data["files"]
    assert file["hint"] == "do not load it"


def test_check_says_that_it_read_no_values(run: Run) -> None:
    for name in ("good.pt", "good.safetensors"):
        done = run("check", name, "--format", "json")
        assert done.status == 0
        assert [note["code"] for note in done.data["files"][0]["notes"]] == ["not-read"]


def test_names_are_compared_if_a_model_is_named(run: Run) -> None:
    rename()
    done = run(
        "check", "names.json", "--model", "model.py:build", "--optimizer", "model.py:optimizer"
    )
    assert done.status == 1
    assert "unexpected: not in model.py:build @ head.weight" in done.out
    done = run("check", "names.json")
    assert (done.status, "were not compared with a model's code" in done.err) == (0, True)


HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def hook(name: str, *args: str, files: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does: its entry, the repository's arguments, then the matching
    files.
    """
    (spec,) = [one for one in HOOKS if one["id"] == name]
    matching = [path for path in files or [] if re.search(spec.get("files", ""), path)]
    passed = matching if spec.get("pass_filenames", True) else []
    assert files is None or passed or not matching
    command = [sys.executable, "-m", *shlex.split(spec["entry"]), *args, *passed]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_pre_commit_hooks(rename_head: Callable[[], None]) -> None:
    everything = sorted(map(str, Path().iterdir()))
    assert hook("ckpttool-names", "names.json", "--model", "now.json").returncode == 0
    failed = hook("ckpttool-pickles", files=everything)
    assert (failed.returncode, "argparse.Namespace" in failed.stdout) == (1, True)
    assert hook("ckpttool-pickles", "--allow", "argparse.*", files=everything).returncode == 0
    assert hook("ckpttool-rules", files=everything).returncode == 0
    Path("rules.toml").write_text("[[rule]]\n")
    assert hook("ckpttool-rules", files=everything).returncode == 1
    rename_head()
    assert hook("ckpttool-names", "names.json", "--model", "now.json").returncode == 1


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


THIS = {**os.environ, "PYTHONPATH": str(ROOT)}


def job(
    tmp: Path, action: Path = ROOT, around: Mapping[str, str] = THIS, /, **inputs: str
) -> tuple[int, dict[str, str], str, str]:
    """Run the action's steps with bash, as a runner does; return status, outputs, job summary and
    log.
    """
    given = {name: one.get("default", "") for name, one in ACTION["inputs"].items()} | inputs
    assert set(inputs) <= set(ACTION["inputs"])
    tmp.mkdir(exist_ok=True)
    written = {name: tmp / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    log = ""
    for step in ACTION["runs"]["steps"]:
        if step.get("if") == "inputs.install != ''" and not given["install"]:
            continue
        env = {name: substitute_inputs(value, given, action) for name, value in step["env"].items()}
        env = {
            **around,
            "GITHUB_ACTIONS": "true",
            **env,
            **{name: str(path) for name, path in written.items()},
        }
        for path in written.values():
            path.touch()
        where = substitute_inputs(step.get("working-directory", "."), given, action)
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(bash, env=env, cwd=where, capture_output=True, text=True, check=False)
        log += done.stdout + done.stderr
        if done.returncode:
            break
    outputs = dict(line.split("=", 1) for line in written["GITHUB_OUTPUT"].read_text().splitlines())
    said = {name: one["value"] for name, one in ACTION["outputs"].items()}
    assert set(said.values()) == {f"${{{{ steps.run.outputs.{name} }}}}" for name in said}
    return done.returncode, outputs, written["GITHUB_STEP_SUMMARY"].read_text(), log


def substitute_inputs(text: str, given: dict[str, Any], action: Path) -> str:
    install = "${{ inputs.install == '.' && github.action_path || inputs.install }}"
    values = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    target = str(action) if given["install"] == "." else given["install"]
    values |= {"${{ github.action_path }}": str(action), install: target}
    return values.get(text, text)


def test_action_fails_after_a_rename(tmp_path: Path, rename_head: Callable[[], None]) -> None:
    inputs = {
        "command": "diff names.json --model now.json",
        "install": "",
        "python": sys.executable,
    }
    status, outputs, summary, log = job(tmp_path / "1", **inputs)
    assert (status, outputs) == (0, {"identical": "true", "status": "0", "summary": '{"same": 16}'})
    assert "now.json has the names in names.json" in summary
    assert "::notice title=now.json has the names in names.json::now.json has the names" in log
    rename_head()
    status, outputs, summary, log = job(tmp_path / "2", **inputs)
    assert (status, outputs["identical"], outputs["status"]) == (1, "false", "1")
    assert json.loads(outputs["summary"]) == {"same": 14, "missing": 2, "unexpected": 2}
    assert "head.weight" in summary
    assert re.search(
        "^::error title=now.json has changed since names.json%3A 2 likely renames::"
        ".*%0A(fix: )?ckpttool remap CKPT --rule",
        log,
        re.MULTILINE,
    )
    status, outputs, *_ = job(tmp_path / "3", **inputs, fail="report")
    assert (status, outputs["identical"]) == (0, "false")


def test_action_reports_errors(tmp_path: Path) -> None:
    inputs = {"install": "", "python": sys.executable, "working-directory": ".."}
    status, outputs, summary, log = job(
        tmp_path / "1", command="diff 'no %0A.pt' x.pt", fail="report", **inputs
    )
    assert (status, outputs) == (2, {"identical": "", "status": "2", "summary": "{}"})
    assert "no %0A.pt" in summary
    errors = [line for line in log.splitlines() if line.startswith("::error")]
    assert len(errors) == 1
    assert errors[0].startswith("::error title=no such file%3A no %250A.pt")
    assert "hint: " in errors[0]
    status, outputs, *_ = job(tmp_path / "2", command="inspect ci/good.pt", **inputs)
    assert (status, outputs) == (0, {"identical": "", "status": "0", "summary": "{}"})


def snippet(path: str) -> Any:
    """Load a file of examples/ci, or the YAML block in docs/ci.md."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        (text,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of this repository in `vendor/ckpttool`, like a submodule."""
    copy = tmp_path_factory.mktemp("with") / "vendor" / "ckpttool"
    copy.mkdir(parents=True)
    for name in ("ckpttool", "action"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("action.yml", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy.parents[1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a job's environment: a Python with the dependencies but without ckpttool, and no
    package index.

    It shares this Python's packages, so that nothing is downloaded; pip installs into the new one.
    """
    wanted = importlib.util.find_spec("setuptools")
    if wanted is None or int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("building the package needs setuptools 77")
    home = tmp_path_factory.mktemp("python")
    venv.create(home, with_pip=False, symlinks=True)
    (found,) = home.glob("lib/python*/site-packages")
    (found / "deps.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = home / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {home}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return {**kept, **offline, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(home)}


def shell(script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script as the shell of a pipeline does."""
    return subprocess.run(
        ["bash", "-e", "-c", script], env=env, capture_output=True, text=True, check=False
    )


def test_ci_examples_of_the_documentation(
    tmp_path: Path, rename_head: Callable[[], None], vendored: Path, fresh: dict[str, str]
) -> None:
    """Run each example as its runner does, in an environment without ckpttool. The action comes
    first: it installs.
    """
    Path("vendor").symlink_to(vendored / "vendor")
    assert "No module named 'ckpttool'" in shell("python -c 'import ckpttool'", fresh).stderr
    checkout, github, *_ = snippet("docs/ci.md")
    assert (checkout["with"], github["uses"]) == ({"submodules": True}, "./vendor/ckpttool")
    assert set(github["with"]) <= set(ACTION["inputs"])
    status, outputs, _, log = job(
        tmp_path / "job", Path("vendor/ckpttool").absolute(), fresh, **github["with"]
    )
    assert (status, outputs.get("identical")) == (0, "true"), log
    where = shell("python -c 'import ckpttool; print(ckpttool.__file__)'", fresh).stdout
    assert where.startswith(fresh["HOME"])
    hooks = snippet("examples/ci/.pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [one["id"] for one in hooks] == [one["id"] for one in HOOKS]
    gitlab = snippet("examples/ci/.gitlab-ci.yml")["names"]
    (buildkite,) = snippet("examples/ci/.buildkite/pipeline.yml")["steps"]
    assert gitlab["variables"]["CKPTTOOL"] == buildkite["env"]["CKPTTOOL"] == "vendor/ckpttool"
    env = {**fresh, "CKPTTOOL": "--no-deps"}  # dependencies are there already
    assert shell("\n".join(gitlab["script"]), env).returncode == 0
    assert Path("names.html").exists()
    agent = Path(fresh["HOME"], "bin", "buildkite-agent")
    agent.write_text('#!/bin/sh\necho "$@" > annotated; cat >> annotated\n')
    agent.chmod(0o755)
    script = buildkite["command"]
    # no variables that Buildkite would interpolate
    assert not re.search(r"(?<!\$)\$(?!\$)", script.replace("$$", ""))
    script = "\n".join(script.replace("$$", "$").splitlines()[1:])
    assert script != buildkite["command"]
    assert shell(script, fresh).returncode == 0
    assert "--style success" in Path("annotated").read_text()
    rename_head()
    Path("names.html").unlink()
    Path("names.md").unlink()
    assert shell(gitlab["script"][1], fresh).returncode == 1
    assert Path("names.html").exists()
    assert shell(script, fresh).returncode == 1
    assert "--style error" in Path("annotated").read_text()
    assert "head.weight" in Path("annotated").read_text()


def test_different_optimizer_is_reported_with_renamed_keys(run: Run) -> None:
    """It is also reported if no key is renamed. Without an optimizer the printed command has no
    --optimizer.
    """
    for words in (("--optimizer", "torch.optim:SGD"), ()):
        assert run("trace", "model.py:build", *words, "-o", "traced.json", "--force").status == 0
        assert run("check", "traced.json", "--model", "model.py:build", *words).status == 0
        if words:
            done = run(
                "check",
                "traced.json",
                "--model",
                "model.py:build",
                "--optimizer",
                "torch.optim:Adam",
            )
            assert done.status == 1
            assert "different optimizer class @ traced.json" in " ".join(
                (done.out + done.err).split()
            )
            assert "--model model.py:build --optimizer torch.optim:Adam" in done.out + done.err
    rename()
    done = run("check", "traced.json", "--model", "model.py:build")
    assert done.status == 1
    assert "ckpttool diff traced.json --model model.py:build (with --update" in done.out + done.err


MISTYPED = {
    "missing file": ("check", "names.json", "--model", "nope.py:build"),
    "missing attribute": ("check", "names.json", "--model", "model.py:nope"),
    "a constructor that raises": ("check", "names.json", "--model", "broken.py:build"),
    "missing names file": ("check", "names.json", "--model", "nope.json"),
    "missing optimizer": (
        "check",
        "names.json",
        "--model",
        "model.py:build",
        "--optimizer",
        "torch.optim:Nope",
    ),
    "no --optimizer": ("check", "names.json", "--model", "model.py:build"),
    "missing file to check": ("check", "good.pt", "nope.pt"),
    "missing step": ("diff", "good.pt", "args.pt", "nope.pt"),
    "missing section": ("diff", "good.pt::nope", "args.pt"),
    "missing right side": ("diff", "good.pt", "nope.pt"),
    "missing model to load it": ("diff", "good.pt", "--model", "nope.py:build"),
    "broken code to compare names with": ("diff", "names.json", "--model", "broken.py:build"),
    "unknown tensor": ("explain", "nope", "--model", "names.json"),
}


@pytest.mark.parametrize("line", MISTYPED.values(), ids=MISTYPED)
def test_mistyped_operand_is_an_error_not_a_difference(run: Run, line: tuple[str, ...]) -> None:
    Path("broken.py").write_text("def build():\n    raise ValueError('no data')\n")
    done = run(*line)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ")


def test_a_checkpoint_is_not_compared_with_the_model_and_check_says_so(run: Run) -> None:
    line = "ckpttool diff good.pt --model model.py:build"
    done = run("check", "good.pt", "--model", "model.py:build")
    assert (done.status, done.err.count(line)) == (2, 1)
    assert "none is among the files" in done.err
    words = ("--model", "model.py:build", "--optimizer", "model.py:optimizer")
    done = run("check", "names.json", "good.pt", *words)
    assert done.status == 0
    assert f"whether it loads was not checked: {line}" in done.out
    assert run(*shlex.split(line)[1:]).status == 1
