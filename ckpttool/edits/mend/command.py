"""Options become the command line that asks for them, and a free name for its output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ckpttool.formats.recognise_folder import DCP_METADATA, INDEX
from ckpttool.formats.table import TABLE
from ckpttool.io.files import is_dir
from ckpttool.io.paths import is_url, join, name, parent
from ckpttool.operands.checkpoint import split
from ckpttool.options import Option, OutputOptions
from ckpttool.words import shell

_OUTPUT = frozenset(field.name for field in fields(OutputOptions))
_WRITABLE = tuple(ending for row in TABLE for ending in row.endings)


def command(verb: str, operands: tuple[str, ...], options: Any) -> str:
    """``ckpttool VERB OPERANDS OPTIONS`` for the options that are not as they are by default, those of the output last.

    An object of the caller's has no words: the name of its option stands for it (``MODEL``).
    """
    return shell("ckpttool", verb, *operands, *_words(options, output=False), *_words(options, output=True))


def _words(options: Any, *, output: bool) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = getattr(options, field.name)
        if (field.name in _OUTPUT) is not output or value == field.default:
            continue
        mark = next(part for part in get_args(hints[field.name]) if isinstance(part, Option))
        if value is True:
            yield mark.flags[0]
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield from (mark.flags[0], _text(one, mark))


def _text(value: Any, mark: Option) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return str(value) if isinstance(value, (str, int)) else mark.metavar or "VALUE"


def operand(source: str, format: str) -> str:
    """The operand that names a checkpoint; what is in memory has no name."""
    return "CKPT" if format == "memory" else source


def outputs(source: str, word: str) -> Iterator[str]:
    """Free names for an output beside the source, the source's own kind of file first: ``train.serialized.pt``."""
    whole = split(source)[0]
    folder = name(whole) == DCP_METADATA or INDEX.fullmatch(name(whole))
    whole = parent(whole) if folder else whole
    if folder or (is_dir(whole) and not whole.rstrip("/").endswith(".dcp")):
        yield _free(whole.rstrip("/"), word, "/")
        return
    ending = "".join(Path(whole.rstrip("/")).suffix)
    endings = (ending if ending.lower() in _WRITABLE else ".pt", ".pt")
    for chosen in dict.fromkeys(endings):
        yield _free(whole.rstrip("/").removesuffix(ending), word, chosen)


def _free(stem: str, word: str, ending: str) -> str:
    """``stem.word.ending``, with a number where that is taken; what makes a pattern of a name is left out."""
    own = re.sub(r"[*?\[\]{}]+", "", name(stem)).strip("._-") or "checkpoint"
    folder = parent(stem)
    for count in range(1, 1000):
        made = f"{own}.{word}{'' if count == 1 else count}{ending}"
        path = made if folder == "." and not is_url(stem) else join(folder, made)
        if is_url(stem) or not os.path.lexists(path.rstrip("/")):
            break
    return path
