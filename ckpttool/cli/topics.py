"""What `ckpttool` alone prints, the topics of `ckpttool help`, and the versions."""

from __future__ import annotations

import platform

import ckpttool
from ckpttool.cli.params import common_options
from ckpttool.core.options import Option

_FIRST = """\
ckpttool inspects, diffs and converts PyTorch checkpoints. The commands that you need first:

  ckpttool inspect train.pt                                          what is in a checkpoint
  ckpttool diff train.pt --model model.py:build                      why it does not load, and what fixes it
  ckpttool fix train.pt --model model.py:build -o fixed.pt           write it with that fix
  ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => vit.{x*}'  rename keys
  ckpttool swap-weights deployed.pt2 train.pt -o new.pt2             new weights for an exported program

All commands: ckpttool --help
"""  # noqa: E501
_PATTERNS = """\
Patterns name keys, in --drop, --filter, --ignore and --rule:

  head.weight        this key
  {x}.weight         {x} is one segment between dots
  encoder.{x*}       {x*} is one or more segments
  re:h\\.(\\d+)\\.w     a regular expression for the complete key
  head.*             any text, also across dots; not in --rule
  layers.[0-3].*     one of these characters, ? is any one; not in --rule

A rule is 'FROM => TO'. Variables have the same text on both sides. If FROM is a regular
expression, TO has \\1 for its first group.

Examples:
  ckpttool remap old.pt -o new.pt --drop 'head.*'
  ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => backbone.{x*}'
  ckpttool inspect old.pt --filter 'layers.*'
"""
_OPTIONS = """\
Options that all commands have, before or after the command:

{common}

Arguments of a model, an optimizer, rules or a form are written behind it, as literals of Python:

  ckpttool diff train.pt --model 'model.py:build(layers=4, tie=True)'
  ckpttool trace model.py:build --optimizer 'model.py:optimizer(lr=0.1)'
  ckpttool remap llama.pt -o hf.pt --rules 'llama-torchtune-to-hf(heads=32, kv_heads=8)'

Exit status: {status}
"""
EXIT_STATUS = "0: no differences, or success; 1: differences, or refused; 2: error."


def text(topic: str = "") -> str | None:
    """Return the text of a topic, of no topic what `ckpttool` alone prints; None if there is no
    such topic.
    """
    if topic == "options":
        marks = (*common_options(), Option("-h, --help", "The help of the command."))
        rows = [f"  {mark.spelled:<20} {mark.help}" for mark in marks]
        return _OPTIONS.replace("{common}", "\n".join(rows)).replace("{status}", EXIT_STATUS)
    if topic == "formats":
        return formats()
    return {"": _FIRST, "patterns": _PATTERNS}.get(topic)


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
    return "\n".join(
        [*lines, "", "More: docs/formats.md; a format of your own: examples/plugin", ""]
    )


def versions() -> str:
    """Return the versions that a bug report needs."""
    from importlib.metadata import PackageNotFoundError, version

    found = [f"ckpttool {ckpttool.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: not installed")
    return "\n".join(found)
