"""How a printed command names what it reads, and free names for what it writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ckpttool.formats.recognise_folder import DCP_METADATA, INDEX
from ckpttool.formats.table import TABLE
from ckpttool.io.files import is_dir
from ckpttool.io.paths import is_url, join, name, parent
from ckpttool.operands.checkpoint import split

_WRITABLE = tuple(ending for row in TABLE for ending in row.endings)


def operand(source: str, format: str) -> str:
    """The operand that names a checkpoint; what is in memory has no name."""
    return "CKPT" if format == "memory" else source


def outputs(source: str, word: str) -> Iterator[str]:
    """Free names for an output beside the source, the source's own kind of file first: ``train.serialized.pt``."""
    whole = split(source)[0]
    folder = name(whole) == DCP_METADATA or INDEX.fullmatch(name(whole))
    whole = parent(whole) if folder else whole
    if folder or (is_dir(whole) and not whole.rstrip("/").endswith(".dcp")):
        yield free(whole.rstrip("/"), word, "/")
        return
    ending = "".join(Path(whole.rstrip("/")).suffix)
    endings = (ending if ending.lower() in _WRITABLE else ".pt", ".pt")
    for chosen in dict.fromkeys(endings):
        yield free(whole.rstrip("/").removesuffix(ending), word, chosen)


def free(stem: str, word: str, ending: str) -> str:
    """``stem.word.ending``, with a number where that is taken; what makes a pattern of a name is left out."""
    own = re.sub(r"[*?\[\]{}]+", "", name(stem)).strip("._-") or "checkpoint"
    folder = parent(stem)
    for count in range(1, 1000):
        made = f"{own}.{word}{'' if count == 1 else count}{ending}"
        path = made if folder == "." else join(folder, made)
        if is_url(stem) or not os.path.lexists(path.rstrip("/")):
            break
    return path
