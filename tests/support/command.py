"""The command line in this process, and the result of a command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

from ckpttool.cli.app import main

__all__ = ["HARMLESS", "Done", "Run", "call", "commands", "fixes_in", "main", "notes_in"]

# statuses of entries that do not make a difference
HARMLESS = frozenset({"same", "alias", "not_serialized", "extra_state"})


class Done(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> tuple[int, str]:
        """Return the status and the complete output."""
        return self.status, self.out + self.err

    @property
    def data(self) -> Any:
        """Return the JSON object on stdout, or None."""
        return json.loads(self.out) if self.out else None


Run = Callable[..., Done]


def fixes_in(data: Any) -> list[str]:
    """Return the commands that a JSON report suggests."""
    return [one["command"] for one in data["fix"]]


def notes_in(data: Any) -> list[str]:
    """Return the sentences of a JSON report's notes."""
    return [one["text"] for one in data["notes"]]


def call(name: str, **arguments: Any) -> str:
    """Return ``NAME(heads=32)``: a model, a preset or a form with arguments."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def commands() -> dict[str, str]:
    """Return the summary of each command that ``ckpttool --help`` lists."""
    with redirect_stdout(StringIO()) as out:
        assert main(["--help"]) == 0
    return dict(re.findall(r"^  ([a-z][a-z-]*)  +(\S.*)$", out.getvalue(), re.MULTILINE))
