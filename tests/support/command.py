"""One command line, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Done(NamedTuple):
    """What a command said, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> tuple[int, str]:
        """The status, and all that was said."""
        return self.status, self.out + self.err

    @property
    def data(self) -> Any:
        """The JSON object on stdout; None where there is none."""
        return json.loads(self.out) if self.out else None


Run = Callable[..., Done]


def fixes_in(data: Any) -> list[str]:
    """The commands that a JSON report suggests."""
    return [one["command"] for one in data["fix"]]


def notes_in(data: Any) -> list[str]:
    """The sentences of a JSON report's notes."""
    return [one["text"] for one in data["notes"]]
