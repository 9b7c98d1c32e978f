"""The ready sets of rules that are part of the package: `file.read` takes their names in the place of a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.values import dataclass

SCHEMA = "ckpttool.rules/1"
LIST = "list"  # in the place of a set's name, where no checkpoint is named
_FOLDER = Path(__file__).parent / "sets"
_SIZES = re.compile(r"Sizes: ([\w, ]+)")


@dataclass(frozen=True, slots=True)
class Ready:
    """A set: its name, what it leads from and to, and the sizes that have to be named for it."""

    name: str
    about: str
    sizes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A set of the contract's object."""
        return {"name": self.name, "about": self.about, "sizes": list(self.sizes)}


def sets() -> list[str]:
    """The names of the sets."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def ready() -> list[Ready]:
    """The sets, each as the comment at the head of its file has it."""
    return [_described(name) for name in sets()]


def located(path: str) -> str:
    """The path of a set where `path` is the name of one and no file. Raises `CkptError` for other names."""
    if Path(path).exists() or not re.fullmatch(r"[\w-]+", path):
        return path
    if path not in sets():
        raise CkptError(f"{path}: no such file, and no set of rules", hint="ckpttool remap --rules list names the sets")
    return str(_FOLDER / f"{path}.toml")


def _described(name: str) -> Ready:
    head = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n\n")[0]
    said = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    sizes = _SIZES.search(said)
    return Ready(name, said.partition(" Sizes: ")[0], tuple(sizes[1].strip().split(", ")) if sizes else ())
