"""Help and completion: what is offered after Tab, by the program and by real shells; no code is run for it."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ckpttool.cli import app
from ckpttool.cli.fields import taken_by, with_common
from ckpttool.cli.parse import parse
from command import Run
from places import ROOT

MODEL = "import os\nos.mkdir('ran')\ndef build(): ...\nclass Net: ...\ndef _hidden(): ...\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    torch.save({"model": {"layers.0.w": torch.ones(1), "head.w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "t.pt")
    torch.save({"w": torch.ones(1)}, "plain.pt")
    shutil.copy(ROOT / "examples" / "ci" / "names.json", "names.json")
    return tmp_path


OFFERED = [
    (["rem"], ["remap"]),
    (["help", "sw"], ["swap-weights"]),
    (["diff", "--fail-on"], ["--fail-on", "--fail-on-unused"]),
    (["diff", "--fail-on", "missing,sh"], ["missing,shape"]),
    (["inspect", "--format", ""], ["text", "json", "markdown", "github", "html"]),
    (["inspect", "--format=ma"], ["--format=markdown"]),
    (["inspect", "t.pt::"], ["t.pt::model", "t.pt::ema"]),
    (["diff", "t.pt::model", "t.pt::e"], ["t.pt::ema"]),
    (["diff", "--model", "model.py:"], ["model.py:build", "model.py:Net"]),
    (["trace", "model.py:b"], ["model.py:build"]),
    (["remap", "t.pt", "--drop", "he"], ["head.w"]),
    (["remap", "t.pt", "--to", "ser"], ["serialized"]),
    (["remap", "t.pt", "--optimizer-keys", ""], ["id", "fqn", "flat"]),
    (["explain", "--model", "names.json", "head"], ["head.weight", "head.bias"]),
    (["schema", "na"], ["names"]),
    (["remap", "t.pt", "--rules", "vit-timm"], ["vit-timm-to-hf", "vit-timm-to-torchvision"]),
    (["remap", "t.pt", "--rules", ""], []),
    (["inspect", "t."], []),  # the shell's own names of files
    (["inspect", "none.pt::"], []),
    (["nonsense", ""], []),
    (["inspect", "plain.pt::"], []),  # which has no sections
    (["inspect", "--nope=te"], []),
    (["inspect", "--all", "--form"], ["--format"]),
    (["remap", "--force", "--to=runtime", "t.pt", "--drop", "he"], ["head.w"]),
    (["remap", "t.pt", "--force="], []),
    (["remap", "none.pt", "--drop", "he"], []),
    (["remap", "t.pt", "-o", "x", "--drop", "he"], ["head.w"]),
    (["swap-weights", "--model", "names.json", "--program", "head"], []),
    (["diff", ""], []),
    (["trace", "model.p"], []),
    (["trace", "none.py:"], []),
    (["trace", "names.json:"], []),
]


@pytest.mark.parametrize(("words", "offered"), OFFERED, ids=[" ".join(words) for words, _ in OFFERED])
def test_what_is_offered(run: Run, words: list[str], offered: list[str]) -> None:
    done = run("--complete", "zsh", *words)
    assert (done.status, [line.partition("\t")[0] for line in done.out.splitlines()]) == (0, offered)
    line = run("--complete", "bash", "ckpttool " + " ".join(words)).out.splitlines()
    assert line == [word[max(words[-1].rfind(":"), words[-1].rfind("=")) + 1 :] for word in offered]
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ckpttool inspect 't.pt::", ["model", "ema"]),
        ('ckpttool inspect "t.pt::e', ["ema"]),
        ("ckpttool help 'x ", []),  # the blank is inside of the word
        ("ckpttool help ", list(app.COMMANDS)),
        ('ckpttool help "sw\\', []),
        ("ckpttool", [*app.COMMANDS, "help", "--help", "--version"]),
        ("", [*app.COMMANDS, "help", "--help", "--version"]),
    ],
)
def test_a_line_of_bash_that_is_not_finished(run: Run, line: str, offered: list[str]) -> None:
    done = run("--complete", "bash", line)
    assert (done.status, done.out.splitlines()) == (0, offered)


def test_who_asks_for_nothing_gets_all_commands(run: Run) -> None:
    for words in ([], ["zsh"], ["bash"]):
        done = run("--complete", *words)
        assert done.status == 0
        assert [line.partition("\t")[0] for line in done.out.splitlines()][: len(app.COMMANDS)] == [*app.COMMANDS]


def environment(tmp: Path) -> dict[str, str]:
    """Where `ckpttool` is on the path."""
    (tmp / "bin").mkdir(exist_ok=True)
    (tmp / "bin" / "ckpttool").write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpttool "$@"\n')
    (tmp / "bin" / "ckpttool").chmod(0o755)
    path = f"{tmp / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp), "TERM": "dumb"}


def installed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp: Path, shell: str) -> str:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp))
    done = run("--install-completion", shell)
    assert done.status == 0
    path = done.out.splitlines()[0]
    assert Path(path).read_text() == run("--show-completion", shell).out
    return path


def test_in_bash(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = installed(run, monkeypatch, folder, "bash")
    for line, offered in (
        ("ckpttool rem", "remap"),
        ("ckpttool inspect t.pt::", "model ema"),
        ("ckpttool inspect t", ""),
    ):
        asked = f"COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; _ckpttool"
        script = f"source {path}; {asked}; echo ${{COMPREPLY[*]}}"
        done = subprocess.run(
            ["bash", "-c", script], env=environment(folder), capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == offered.split()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_in_fish(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = installed(run, monkeypatch, folder, "fish")
    for line, offered in (
        ("rem", ["remap"]),
        ("inspect t.pt::", ["t.pt::model", "t.pt::ema"]),
        ("inspect mod", ["model.py"]),
    ):
        script = f"source {path}; complete -C 'ckpttool {line}'"
        done = subprocess.run(
            ["fish", "-c", script], env=environment(folder), capture_output=True, text=True, check=True
        )
        assert sorted(found.partition("\t")[0] for found in done.stdout.splitlines()) == sorted(offered)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("rem\t", "ckpttool remap"),
        ("inspect t.pt::m\t", "t.pt::model"),
        ("trace model.py:b\t", "model.py:build"),
        ("inspect nam\t", "names.json"),
    ],
)
def test_in_zsh(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str, line: str) -> None:
    """Typed into a terminal, as there is no other way to ask zsh."""
    path = installed(run, monkeypatch, folder, "zsh")
    setup = f"PS1='>'; fpath=({Path(path).parent} $fpath); autoload -U compinit; compinit -u -D; echo rea''dy"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment(folder))
    try:
        os.write(terminal, f"{setup}\n".encode())
        until(terminal, "ready")
        os.write(terminal, f"ckpttool {typed}".encode())
        assert line in until(terminal, line)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def until(terminal: int, wanted: str, seconds: float = 20) -> str:
    said, end = "", time.monotonic() + seconds
    while wanted not in said and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            said += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\b\r]", "", os.read(terminal, 65536).decode(errors="replace"))
    return said


def test_the_shell_is_that_of_the_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert "complete -c ckpttool" in run("--show-completion").out
    monkeypatch.setenv("SHELL", "/usr/bin/tcsh")
    done = run("--install-completion")
    assert (done.status, "no completion for tcsh" in done.err, "bash|zsh|fish" in done.err) == (2, True, True)
    monkeypatch.delenv("SHELL")
    assert "no completion for an unnamed shell" in run("--show-completion").err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_is_installed_where_the_shell_looks(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    done = run("--install-completion", shell)
    path, rest = done.out.splitlines()
    wanted = ".config/fish/" if shell == "fish" else ".local/share/"
    assert path.startswith(str(folder / wanted))
    assert Path(path).read_text() == run("--show-completion", shell).out
    assert {"bash": path, "zsh": str(Path(path).parent), "fish": "fish finds it there"}[shell] in rest


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_has_examples_that_are_command_lines(run: Run, name: str) -> None:
    said = run("help", name)
    assert said == run(name, "-h") == run(name, "--help")
    examples = re.findall(r"^ +(ckpttool .*)$", said.out.split("Examples:")[1], re.MULTILINE)
    assert examples
    for example in examples:
        _, command, *words = shlex.split(example)
        assert command == name
        assert parse(taken_by(with_common(import_module(app.COMMANDS[name][0]).command)), words) is not None, example


def test_short_words(run: Run) -> None:
    assert run("-V") == run("--version")
    assert run("-h") == run("--help") == run("help")
    assert "Exit status: 0 the same, or done; 1 the answer is no; 2 no answer." in run("-h").out
    assert run("help", "remp").status == 2


def test_options_stand_under_headings(run: Run) -> None:
    said = run("help", "remap").out
    headings = re.findall(r"^([A-Z][^\n]*):$", said, re.MULTILINE)
    assert headings == [
        *("Arguments", "The model", "Which names", "Optimizers", "The output", "How it is written", "The report"),
        "In common",
    ]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_manual_page_has_every_command_and_option() -> None:
    from ckpttool.cli.man import _plain, page

    assert _plain(".pt2 is a program's") == r"\&.pt2 is a program\(aqs"
    printed = subprocess.run([sys.executable, "-m", "ckpttool.cli.man"], capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines() == "\n".join(page()).splitlines()
    shown = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-cbou", "-ww"],
        input=printed.stdout,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stderr == ""
    for name, (module, _) in app.COMMANDS.items():
        assert f"ckpttool {name}" in shown.stdout
        taken = taken_by(with_common(import_module(module).command))
        assert [flag for one in taken for flag in getattr(one.mark, "flags", ()) if flag not in shown.stdout] == []
    assert "remap old.pt -o new.pt --rule 'encoder.{x*} => backbone.{x*}'" in shown.stdout
