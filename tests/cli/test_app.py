"""The command line in a subprocess: exit statuses, error lines, imports and output."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from importlib.metadata import version as torch_version
from pathlib import Path

import pytest
from safetensors.torch import save_file

from ckpttool import __version__
from command import Run, commands

COMMANDS = commands()


def ckpttool(
    *args: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpttool", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "100", **env},
        check=False,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    import torch

    path = tmp_path / "model.safetensors"
    save_file({f"layers.{index}.ключ": torch.zeros(2, 3) for index in range(4)}, path)
    return str(path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_begins_with_its_summary_and_has_correct_examples(name: str) -> None:
    done = ckpttool(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert COMMANDS[name] in text.partition("Examples:")[0]
    examples = re.findall(rf"^    ckpttool {name}(.*)$", done.stdout, re.MULTILINE)
    assert examples
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", done.stdout.split("Arguments:")[1]))
    assert {
        word for line in examples for word in re.findall(r"(?<= )--?[a-z][a-z-]*", line)
    } <= options


def test_remap_help_groups_its_options() -> None:
    text = ckpttool("remap", "--help").stdout
    headings = re.findall(r"^([A-Z][\w ]+):$", text, re.MULTILINE)
    names = ["Input", "Conversion", "Keys", "Output", "Advanced", "Common options"]
    names.append("Exit status")
    assert [one for one in headings if one not in ("Examples", "Arguments")] == names


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_does_not_import_torch_or_rich(args: list[str]) -> None:
    code = (
        f"import sys; from ckpttool.cli.app import main; main({args!r}); print(*sys.modules,"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "numpy", "rich", "safetensors"}


def test_version() -> None:
    done = ckpttool("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"ckpttool {__version__}\nPython 3.")
    assert f"\ntorch {torch_version('torch')}\n" in done.stdout


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["inspct", "x.pt"], "no such command: inspct", "did you mean `ckpttool inspect`?"),
        (["swap", "x.pt2"], "no such command: swap", "did you mean `ckpttool swap-weights`?"),
        (["load", "x.pt"], "no such command: load", "in Python: ckpttool.load(CKPT, model)"),
        (["inspect", "x.pt", "--json"], "no such option", "did you mean --format json?"),
        (
            ["diff", "x.pt", "y.pt", "--tolerance", "1"],
            "no such option",
            "did you mean --rtol or --atol?",
        ),
        (
            ["--all", "inspect", "x.pt"],
            "no such option",
            "usage: ckpttool [OPTIONS] COMMAND [ARGS]...",
        ),
        (["--nope"], "no such option", "usage: ckpttool [OPTIONS] COMMAND [ARGS]..."),
        (["inspect"], "missing argument 'CKPT'", "usage: ckpttool inspect [OPTIONS]"),
        (["inspect", "x.pt", "--fromat", "json"], "no such option", "did you mean --format?"),
        (
            ["remap", "x.pt", "--undo"],
            "no such option",
            "it is for `ckpttool undo`; usage: ckpttool remap [OPTIONS] CKPT",
        ),
        (
            ["remap", "x.pt", "--max-shard-size=5GB"],
            "no such option",
            "it is for `ckpttool convert`;",
        ),
        (
            ["inspect", "x.pt", "--format"],
            "option '--format' requires an argument",
            "see ckpttool --help",
        ),
        (
            ["inspect", "x.pt", "y.pt"],
            "got unexpected extra argument",
            "usage: ckpttool inspect [OPTIONS]",
        ),
        (
            ["remap", "x.pt", "a b.pt", "-q"],
            "got unexpected extra argument",
            "-o names the output: ckpttool remap x.pt -o 'a b.pt' -q",
        ),
        (
            ["diff", "--model", "a.py:build", "--model=b.py:build"],
            "--model is given twice: a.py:build and b.py:build",
            "name one of them; to compare the two: ckpttool trace a.py:build -o names.json &&"
            " ckpttool diff names.json --model b.py:build",
        ),
        (
            ["remap", "x.pt", "--to-model", "a.py:build", "--to-model", "b.py:build"],
            "--to-model is given twice: a.py:build and b.py:build",
            "name one of them",
        ),
        (
            ["explain", "head.weight", "model.py:build(n=4)"],
            "got unexpected extra argument",
            "--model names the model: ckpttool explain head.weight --model 'model.py:build(n=4)'",
        ),
        (
            ["fix", "x.pt", "model.py:build", "-o", "y.pt"],
            "missing option '--model'",
            "--model names the model: ckpttool fix x.pt --model model.py:build -o y.pt",
        ),
        (
            ["fix", "x.pt"],
            "missing option '--model'",
            "name the model, such as model.py:build: ckpttool fix x.pt --model MODEL",
        ),
        (
            ["check", "x.pt", "model.py:build"],
            "model.py:build is a model, and `check` takes files",
            "ckpttool check x.pt --model model.py:build",
        ),
        (
            ["remap", "x.pt", "y.pt", "-o", "z.pt"],
            "got unexpected extra argument",
            "usage: ckpttool remap [OPTIONS]",
        ),
        (
            ["inspect", "x.pt", "--format", "yaml"],
            "unknown format 'yaml'",
            "use one of text, json,",
        ),
        (
            ["inspect", "x.pt", "--report", "r.pdf"],
            "report file 'r.pdf' has no known ending",
            "use one of .txt,",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_has_a_hint(args: list[str], message: str, hint: str) -> None:
    done = ckpttool(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    error, advice = done.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert advice.startswith(f"hint: {hint}")


def run_failing(error: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that raises `error`."""
    code = (
        "import sys, types, errno; from ckpttool.cli import app, params; from ckpttool.core.errors"
        " import *\n"
        f"def command(): raise {error}\n"
        "sys.modules['failing'] = types.ModuleType('failing'); sys.modules['failing'].command ="
        " command\n"
        "params.COMMANDS['fail'] = ('failing', '')\n"
        "sys.exit(app.main(['fail']))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (
            "CkptError('no tensors', hint='name a file')",
            2,
            ["error: no tensors", "hint: name a file"],
        ),
        (
            r"Refused('2 collide', hint='use --rule', problems=[Problem('twice', 'a'),"
            r" Problem('twice', 'b\x1b')])",
            1,
            ["error: 2 collide", "  twice @ a", r"  twice @ b\x1b", "hint: use --rule"],
        ),
        (
            "FileNotFoundError(errno.ENOENT, 'No such file or directory', '/nowhere/at/all.pt')",
            2,
            [
                "error: /nowhere/at/all.pt: No such file or directory",
                "hint: check the path: ls -ld /",
            ],
        ),
        (
            "OSError(errno.ENOSPC, 'No space left on device', 'out.pt')",
            2,
            [
                "error: out.pt: No space left on device",
                "hint: free some space, or write to another disk",
            ],
        ),
        (
            "PermissionError(errno.EACCES, 'Permission denied', '/etc')",
            2,
            ["error: /etc: Permission denied", "hint: check the permissions: ls -ld /etc"],
        ),
        (
            "OSError('the store is down')",
            2,
            ["error: the store is down", "hint: check the file, and the disk it is on"],
        ),
        ("KeyboardInterrupt", 130, ["error: interrupted"]),
        ("BrokenPipeError", 141, []),
        (
            "MemoryError",
            2,
            ["error: out of memory", "hint: free some memory, or use a larger machine"],
        ),
        (
            "KeyError('x')",
            2,
            [
                "error: internal error: KeyError: 'x'",
                "hint: run it again with CKPTTOOL_DEBUG=1 and report the traceback as a bug of"
                " ckpttool",
            ],
        ),
    ],
)
def test_exception_becomes_an_error_and_a_hint(error: str, status: int, lines: list[str]) -> None:
    done = run_failing(error)
    assert done.stderr.splitlines() == lines
    assert done.returncode == status
    assert done.stdout == ""


def test_sys_exit_in_model_code_is_an_error() -> None:
    done = run_failing("SystemExit(0)")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: code of an operand ended the program: sys.exit(0)\nhint: "
    )


def test_debug_shows_the_traceback_before_the_error() -> None:
    done = run_failing("KeyError('x')", CKPTTOOL_DEBUG="1")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.splitlines()[-2] == "error: internal error: KeyError: 'x'"
    assert done.returncode == 2


def test_command_result_is_the_exit_status() -> None:
    for result, status in [("0", 0), ("1", 1), ("None", 0)]:
        code = (
            "import sys, types; from ckpttool.cli import app, params\n"
            "sys.modules['m'] = types.ModuleType('m')\n"
            f"sys.modules['m'].command = lambda: {result}\n"
            "params.COMMANDS['c'] = ('m', '')\n"
            "sys.exit(app.main(['c']))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status


def test_inspect_prints_only_json(checkpoint: str) -> None:
    done = ckpttool("inspect", checkpoint, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["schema"] == "ckpttool.inspect/1"
    assert [tensor["key"] for tensor in data["tensors"]] == [
        f"layers.{index}.ключ" for index in range(4)
    ]


def test_inspect_writes_text_and_reports(checkpoint: str, tmp_path: Path) -> None:
    reports = [tmp_path / f"r.{ending}" for ending in ("md", "json", "html", "txt")]
    done = ckpttool(
        "inspect", checkpoint, *(arg for path in reports for arg in ("--report", str(path)))
    )
    assert done.returncode == 0
    assert "layers.{0-3}.ключ" in done.stdout
    assert reports[3].read_text(encoding="utf-8") == done.stdout
    assert reports[0].read_text(encoding="utf-8").startswith("## inspect ")
    assert json.loads(reports[1].read_text(encoding="utf-8"))["format"] == "safetensors"
    assert reports[2].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["model.safetensors", *(path.name for path in reports)]
    )


def test_error_is_an_object_with_format_json(tmp_path: Path) -> None:
    done = ckpttool("inspect", str(tmp_path / "none.pt"), "--format", "json")
    failure = json.loads(done.stdout)
    assert (failure["schema"], failure["status"], done.returncode) == ("ckpttool.error/1", 2, 2)
    assert done.stderr.splitlines() == [f"error: {failure['error']}", f"hint: {failure['hint']}"]


def test_report_that_cannot_be_written_is_an_error(checkpoint: str, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "r.json", Path("/dev/full")):
        link = tmp_path / "r.json"
        if path.name == "full":
            link.symlink_to(path)
            path = link
        done = ckpttool("inspect", checkpoint, "--report", str(path), "--format", "json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["schema"] == "ckpttool.error/1"
        assert done.stderr.startswith(f"error: {path}: ")
        assert len(done.stderr.splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "r.json"]


def test_full_disk_for_stdout_is_an_error(checkpoint: str) -> None:
    with open("/dev/full", "w") as full:
        done = ckpttool("inspect", checkpoint, stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: No space left on device",
        "hint: free some space, or write to another disk",
    ]


def test_closed_pipe_ends_the_command_silently(checkpoint: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = ckpttool("inspect", checkpoint, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_terminal_without_unicode_gets_escapes(checkpoint: str) -> None:
    done = ckpttool("inspect", checkpoint, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert r"layers.{0-3}.\u043a\u043b\u044e\u0447" in done.stdout


@pytest.mark.parametrize(
    ("env", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_terminal_gets_color_unless_disabled(
    checkpoint: str, env: dict[str, str], colored: bool
) -> None:
    controller, terminal = pty.openpty()
    done = ckpttool(
        "inspect", checkpoint, stdout=terminal, **{"TERM": "xterm", "NO_COLOR": "", **env}
    )
    os.close(terminal)
    output = os.read(controller, 65536).decode()
    os.close(controller)
    assert done.returncode == 0
    assert ("\x1b[" in output) is colored


def test_package_that_fails_when_it_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('libcudart.so: cannot open shared object file')\n"
    )
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "x.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    command = ("diff", "--model", str(tmp_path / "model.py:build"), str(tmp_path / "x.safetensors"))
    done = ckpttool(*command, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 2
    assert done.stderr == (
        "error: torch cannot be imported: OSError: libcudart.so: cannot open shared object file\n"
        "hint: install torch again in this environment: python -c 'import torch' has to succeed\n"
    )


def test_ckpttool_without_arguments_lists_the_first_commands() -> None:
    done = ckpttool()
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^  ckpttool ([\w-]+)", done.stdout, re.MULTILINE) == [
        "inspect", "diff", "fix", "remap", "swap-weights"
    ]  # fmt: skip
    for topic in ("patterns", "options"):
        done = ckpttool("help", topic)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_common_options_may_come_first(checkpoint: str, run: Run) -> None:
    for options in (["-q"], ["--format", "json"], ["--format=json", "-v"], ["--max-memory", "1M"]):
        first, last = run(*options, "inspect", checkpoint), run("inspect", checkpoint, *options)
        assert (first.status, first.out) == (last.status, last.out) == (0, last.out)
