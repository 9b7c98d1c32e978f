"""Completion, requested as the scripts of the shells request it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import Run


def completions(shell: str, line: str) -> list[str]:
    """Return the completions of the last word of the command line."""
    words = line.split(" ")
    env = {
        "_CKPTTOOL_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    env |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = (
        "import sys; from ckpttool.cli.app import process; sys.argv = ['ckpttool'];"
        " sys.exit(process())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ckpttool rem", {"remap"}),
        ("ckpttool inspect --form", {"--format"}),
        ("ckpttool diff --fail", {"--fail-on", "--fail-on-unused"}),
        ("ckpttool remap t.pt --optimizer", {"--optimizer", "--optimizer-keys"}),
        ("ckpttool nonsense --fo", set()),
        ("ckpttool remap t.pt --to ser", {"serialized"}),
        ("ckpttool remap t.pt --from com", {"compile"}),
        ("ckpttool diff t.pt --format ju", {"junit"}),
        ("ckpttool remap t.pt --rules llama-t", {"llama-torchtune-to-hf"}),
        ("ckpttool rules vit-timm-to-h", {"vit-timm-to-hf"}),
        ("ckpttool schema ins", {"inspect"}),
        ("ckpttool explain wrapper-p", {"wrapper-prefix"}),
        ("ckpttool diff a.pt b.pt --fail-on unex", {"unexpected"}),
        ("ckpttool inspect t.pt --sort b", {"bytes"}),
        ("ckpttool remap t.pt --optimizer-keys f", {"fqn", "flat"}),
    ],
)
def test_commands_and_options_are_completed(line: str, words: set[str]) -> None:
    assert set(completions("bash", line)) == words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_completions(shell: str) -> None:
    assert any("--format" in word for word in completions(shell, "ckpttool inspect --form"))
    assert any("serialized" in word for word in completions(shell, "ckpttool remap t.pt --to ser"))
    assert any("inspect" in word for word in completions(shell, "ckpttool schema ins"))


# Real shells

READY = "ready>"
RC_FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}
PROMPTS = {
    "bash": f"PS1='{READY}'\n",
    "zsh": f"unsetopt PROMPT_SP\nPS1='{READY}'\n",
    "fish": f"function fish_prompt; echo -n '{READY}'; end\nset -g fish_greeting\n",
}
INTERACTIVE = {
    "bash": ["bash", "-i"],
    "zsh": ["zsh", "-i"],
    "fish": ["fish", "--features=no-query-term", "-i"],
}


def environment(home: Path) -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG", "_TYPER", "ZDOTDIR"))
    }
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TERM": "dumb",
        "COLUMNS": "150",
    }


def typed(shell: str, keys: bytes, until: str, env: dict[str, str]) -> str:
    """Type the keys in an interactive shell, and return what it shows up to the text `until`."""
    process, terminal = pty.fork()
    if not process:
        os.execvpe(shell, INTERACTIVE[shell], env)
    shown, waiting = "", [(READY, keys), (until, b"")]
    try:
        deadline = time.monotonic() + 60
        while waiting and time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            shown += os.read(terminal, 4096).decode(errors="replace")
            if waiting[0][0] in shown:
                os.write(terminal, waiting.pop(0)[1])
    except OSError:  # the shell has ended
        pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return shown


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if shutil.which("ckpttool", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("ckpttool is not installed as a command")
    return str(request.param)


def test_installed_completion_works_in_the_shell(shell: str, tmp_path: Path) -> None:
    rc_file = tmp_path / RC_FILES[shell]
    rc_file.parent.mkdir(parents=True, exist_ok=True)
    rc_file.write_text(PROMPTS[shell])
    env = environment(tmp_path)
    done = subprocess.run(
        ["ckpttool", "--install-completion", shell], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{shell} completion installed" in done.stdout
    if shell == "zsh":  # after `compinit`
        with rc_file.open("a") as file:
            file.write(PROMPTS[shell])
    # In zsh, typer's script is loaded by the first tab, and answers from the second one on.
    assert (
        "usage: ckpttool inspect"
        in typed(shell, b"ckpttool insp\t\t--help\r", "Examples", env).lower()
    )


def test_values_are_completed_in_the_shell(shell: str, tmp_path: Path) -> None:
    rc_file = tmp_path / RC_FILES[shell]
    rc_file.parent.mkdir(parents=True, exist_ok=True)
    rc_file.write_text(PROMPTS[shell])
    env = environment(tmp_path)
    subprocess.run(
        ["ckpttool", "--install-completion", shell], env=env, capture_output=True, check=True
    )
    if shell == "zsh":  # after `compinit`
        with rc_file.open("a") as file:
            file.write(PROMPTS[shell])
    schema = typed(shell, b"ckpttool schema insp\t\t\r", "ckpttool.inspect/1", env)
    assert "ckpttool.inspect/1" in schema
    preset = typed(shell, b"ckpttool rules vit-timm-to-h\t\t\r", "[[rule]]", env)
    assert "[[rule]]" in preset


def test_shown_script_is_the_installed_one(shell: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    shown = subprocess.run(
        ["ckpttool", "--show-completion", shell], env=env, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    subprocess.run(
        ["ckpttool", "--install-completion", shell], env=env, capture_output=True, check=True
    )
    installed = [path.read_text().strip() for path in tmp_path.rglob("*") if path.is_file()]
    assert shown.stdout.strip() in installed


def test_the_running_shell_is_recognized(shell: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    named = subprocess.run(
        ["ckpttool", "--show-completion", shell], env=env, capture_output=True, text=True
    )
    line = [
        shell,
        "-c",
        "ckpttool --show-completion; exit $status"
        if shell == "fish"
        else "ckpttool --show-completion; :",
    ]
    running = subprocess.run(
        line, env={**env, "SHELL": str(shutil.which(shell))}, capture_output=True, text=True
    )
    assert (running.returncode, running.stdout) == (0, named.stdout), running.stderr


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_unknown_shell_is_an_error(
    option: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run(option, "tcsh")
    assert done.status == 2
    assert "zsh" in done.err
    assert not list(tmp_path.iterdir())
