"""The page on safety lists the operators and the limits that there are: ``UPDATE_DOCS=1`` writes them anew."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import fields

import pytest

from ckpttool.core import limits
from ckpttool.core.limits import Limits
from ckpttool.evaluate.ops import GETITEM, OPS
from places import ROOT

PAGE = ROOT / "docs" / "safety.md"


def listed_operators() -> str:
    """The packets of the list, each with its overloads where they are not all there is to say."""
    packets: dict[str, list[str]] = {}
    for name in sorted(name for name in OPS if name != GETITEM):
        packet, overload = name.split(".")[1:]
        packets.setdefault(packet, []).append(overload)
    return textwrap.fill(", ".join(f"`{packet}`" for packet in packets) + ".", 120)


def listed_limits() -> str:
    """A row for each limit, with the comment of its line as its meaning."""
    source = (ROOT / "ckpttool" / "core/limits.py").read_text(encoding="utf-8")
    rows = ["| limit | default | of what |", "| --- | --- | --- |"]
    for field in fields(Limits):
        (said,) = re.findall(rf"^    {field.name}: int = .*?# (.*)$", source, re.MULTILINE)
        rows.append(f"| `{field.name}` | {getattr(Limits(), field.name):,} | {said} |")
    return "\n".join(rows)


BLOCKS = {"operators": listed_operators, "limits": listed_limits}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_page_lists_what_there_is(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    block = f"<!-- {name} -->\n{BLOCKS[name]()}\n<!-- /{name} -->"
    new = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(new, encoding="utf-8")
    assert new == text or os.environ.get("UPDATE_DOCS") == "1"


def test_a_limit_can_be_raised_from_python_as_the_page_says() -> None:
    assert callable(limits.limited)
