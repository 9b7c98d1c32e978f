"""A step of a GitHub job: one ckpttool command, its annotations, the job's summary, and its answer
as outputs.

Reads COMMAND and FAIL (action.yml says what they are), and writes to the files that GitHub names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        text, data = Path(folder, "report.md"), Path(folder, "report.json")
        words = shlex.split(os.environ["COMMAND"])
        reports = ["--format", "github", "--report", str(text), "--report", str(data)]
        command = [sys.executable, "-m", "ckpttool", *words, *reports]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="backslashreplace", check=False
        )
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        answer: dict[str, Any] = (
            json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
        )
        shown = text.read_text(encoding="utf-8") if text.exists() else _fenced(done.stderr)
        if done.returncode and not re.search("^::error ", done.stdout, re.MULTILINE):
            print(f"::error title=ckpttool::no answer: exit status {done.returncode}")
    _append("GITHUB_STEP_SUMMARY", shown)
    identical = answer.get("identical")
    outputs = {
        "identical": "" if identical is None else json.dumps(identical),
        "status": str(done.returncode),
    }
    outputs["summary"] = json.dumps(answer.get("summary", {}))
    _append("GITHUB_OUTPUT", "".join(f"{name}={value}\n" for name, value in outputs.items()))
    return 0 if os.environ["FAIL"] == "report" and done.returncode == 1 else done.returncode


def _fenced(said: str) -> str:
    """The summary of a command that has no report."""
    fence = "`" * max(3, 1 + max((len(run) for run in _backticks(said)), default=0))
    return f"{fence}text\n{said.rstrip()}\n{fence}\n"


def _backticks(text: str) -> list[str]:
    return "".join(char if char == "`" else " " for char in text).split()


def _append(variable: str, text: str) -> None:
    with open(os.environ[variable], "a", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
