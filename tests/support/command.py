"""The command line in this process, and the result of a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ckpttool.cli.app import main

__all__ = ["Done", "Run", "fixes_in", "main", "notes_in"]


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
