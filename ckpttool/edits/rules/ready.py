"""The ready sets of rules that are part of the package: `file.read` takes their names in the place of a path."""

from __future__ import annotations

import re
from pathlib import Path

from ckpttool.errors import CkptError
from ckpttool.json_schema import TEXT, TEXTS, list_of, record, row, titled
from ckpttool.values import dataclass

LIST = "list"  # in the place of a set's name, where no checkpoint is named
_FOLDER = Path(__file__).parent / "sets"
_SIZES = re.compile(r"Sizes: ([\w, ]+)")


@dataclass(frozen=True, slots=True)
class Ready:
    """A set: its name, what it leads from and to, and the sizes that have to be named for it."""

    name: str
    about: str
    sizes: tuple[str, ...]


SETS = titled("ckpttool.rules/1", row({"sets": list_of(record(Ready, {"name": TEXT, "about": TEXT, "sizes": TEXTS}))}))


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
