"""What `ckpttool` alone prints, the topics of `ckpttool help`, and the versions."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator

import ckpttool
from ckpttool.cli.params import common_options
from ckpttool.core.options import Option

_FIRST = """\
ckpttool inspects, diffs and converts PyTorch checkpoints. Begin with:

What is in a checkpoint?
  ckpttool inspect train.pt
Why does it not load, and which command fixes it?
  ckpttool diff train.pt --model model.py:build
Write it with that fix:
  ckpttool fix train.pt --model model.py:build -o fixed.pt
Rename keys:
  ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => vit.{x*}'
Put new weights into an exported program:
  ckpttool swap-weights deployed.pt2 train.pt -o new.pt2

All commands: ckpttool --help. Rules: ckpttool help rules
"""
_PATTERNS = """\
Patterns name keys, in --drop, --filter and --ignore:

  head.weight      this key
  {x}.weight       {x} is one segment between dots
  encoder.{x*}     {x*} is any number of segments
  head.*           any text, also across dots
  layers.[0-3].*   one of these characters; ? is any one
  re:h\\.(\\d+)\\.w   a regular expression for the complete key

Examples:
  ckpttool remap old.pt -o new.pt --drop 'head.*'
  ckpttool inspect old.pt --filter 'layers.*'

Rules have patterns without wildcards: ckpttool help rules
"""
_RULES = """\
A rule is 'FROM => TO'. {x} is one segment of a key, {x*} is any number of them:

  ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => backbone.{x*}'
  ckpttool remap old.pt -o new.pt --rule 're:(.*)\\.bias => \\1.offset'

Several --rule: the first that matches renames a key. A file has steps, in TOML:

  [[rule]]
  rename = "encoder.{x*} => backbone.{x*}"
  [[rule]]
  split = "blocks.{i}.qkv.{p}"
  into = ["blocks.{i}.q.{p}", "blocks.{i}.k.{p}", "blocks.{i}.v.{p}"]

Other operations: join, stack, unstack, transpose, permute, reshape, pad, slice,
cast, dequantize, drop, check.

--rules FILE applies it, and this writes one that leads from old.pt to new.pt:

  ckpttool diff old.pt new.pt --suggest rules.toml

Presets: ckpttool rules. All fields: docs/rules.md
"""
_OPTIONS = """\
Options that all commands have, before or after the command:

{common}

Arguments of a model, an optimizer, rules or a form follow it, as in Python:

  ckpttool diff train.pt --model 'model.py:build(layers=4, tie=True)'
  ckpttool trace model.py:build --optimizer 'model.py:optimizer(lr=0.1)'
  ckpttool remap llama.pt -o hf.pt --rules 'llama-torchtune-to-hf(heads=32, kv_heads=8)'

Exit status: {status}
"""
_FORMS = """\
A form is one naming of the same tensors. --to writes it, --from reads it:

  serialized    what state_dict() returns, without wrappers
  runtime       what named_parameters() and named_buffers() return
  exported      what an exported program has
  unflattened   what torch.export.unflatten gives
  pretrained    what save_pretrained() of transformers writes

Inside wrappers, also nested as in 'ddp(compile)': {wrappers}.

Examples:
  ckpttool remap train.pt -o plain.pt --model model.py:build --to serialized
  ckpttool remap model.pt -o ddp.pt --model model.py:build --to 'ddp(compile)'
"""
EXIT_STATUS = "0: no differences, or success; 1: differences, or refused; 2: error."
_ROW = re.compile(r"(  \S.*?  +)\S")  # a term and its explanation
_WORD = re.compile(r"(?:'[^']*'|\S)+")  # of a command line


def text(topic: str = "", width: int | None = None) -> str | None:
    """Return the text of a topic, of no topic what `ckpttool` alone prints; None if there is no
    such topic. No line is wider than `width`, by default the terminal's.
    """
    texts = {"": _FIRST, "patterns": _PATTERNS, "rules": _RULES}
    functions = {"options": _options, "forms": _forms, "formats": formats}
    shown = functions[topic]() if topic in functions else texts.get(topic)
    return None if shown is None else fitted(shown, width or shutil.get_terminal_size().columns)


TOPICS = ("", "rules", "patterns", "forms", "formats", "options")


def _options() -> str:
    marks = (*common_options(), Option("-h, --help", "The help of the command."))
    rows = [f"  {mark.spelled:<20} {mark.help}" for mark in marks]
    return _OPTIONS.replace("{common}", "\n".join(rows)).replace("{status}", EXIT_STATUS)


def _forms() -> str:
    from ckpttool.naming.wrappers import WORDS

    return _FORMS.replace("{wrappers}", ", ".join(WORDS))


def fitted(text: str, width: int) -> str:
    """Return the text in lines of at most `width` columns: explanations continue below each other,
    and commands after a backslash, so that they can be pasted.
    """
    from ckpttool.report.renderers.text import wrapped

    lines: list[str] = []
    for line in text.splitlines():
        command = line.lstrip()
        row = _ROW.match(line)
        if len(line) <= width:
            lines.append(line)
        elif command.startswith("ckpttool "):
            lines += continued(command, width, len(line) - len(command))
        elif row and len(row[1]) > width // 2:
            lines += [row[1].rstrip(), *wrapped("    " + line[len(row[1]) :], width, 4)]
        else:
            lines += wrapped(line, width, len(row[1]) if row else 0)
    return "\n".join(lines) + "\n"


def continued(command: str, width: int, indent: int) -> Iterator[str]:
    """Yield the lines of a shell command, each but the last with a backslash at its end."""
    line = " " * indent
    for word in _WORD.findall(command):
        if line.strip() and len(f"{line} {word} \\") > width:
            yield f"{line} \\"
            line = " " * (indent + 2)
        line += f" {word}" if line.strip() else word
    yield line


def formats() -> str:
    """Return the formats that are read, the endings of outputs, and the packages that add some."""
    from ckpttool.formats.registry import TABLE, installed

    added = installed()
    lines = ["Formats, and the endings of OUT that choose them:", ""]
    for row in (*TABLE, *added.formats):
        endings = [text for text in (row.index, *row.endings) if text] if row.writes else []
        package = f"  (package {row.package})" if row.package else ""
        lines.append(f"  {row.title:<43}{' '.join(endings) or 'read only'}{package}".rstrip())
    for problem in added.problems:
        lines.append(f"  the package {problem.key} fails: {problem.problem}")
    return "\n".join([*lines, "", "More: docs/formats.md; to add a format: examples/plugin", ""])


def versions() -> str:
    """Return the versions that a bug report needs."""
    from importlib.metadata import PackageNotFoundError, version

    lines = [f"ckpttool {ckpttool.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "safetensors"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return "\n".join(lines)
