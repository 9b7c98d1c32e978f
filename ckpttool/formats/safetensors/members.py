"""The members of a header that is spelled as writers spell it, without reading it as JSON: a third of the time.

What stands in the way of that (an escape, a field that the format does not know, anything that is wrong) is left to the
reader of JSON, which says what it is. So this takes nothing that the strict way would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpttool.checkpoint import Span, Storage, TensorEntry
from ckpttool.formats.containers import json_text

_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_TENSOR = re.compile(
    r'"([^"\\\x00-\x1f]*)": ?'
    rf'(\{{"dtype": ?"[A-Z0-9_]+", ?"shape": ?\[(?:{_SIZE}(?:, ?{_SIZE})*)?\]), ?'
    rf'"data_offsets": ?\[({_SIZE}), ?({_SIZE})\]\}}(, ?|\}}[ \t\n\r]*\Z)'
)
# A member of the outermost object, by whatever spelling: its name, and an object that holds no other.
_MEMBER = re.compile(
    r'("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(?:null|\{[^"{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}]*)*\})\s*[,}]\s*'
)

# What all tensors of one dtype and shape have in common: dtype, shape, stride, bytes.
Alike = tuple[str, tuple[int, ...], tuple[int, ...], int]


def tensors(text: str, at: int, data: Span, alike: Callable[[str], Alike | None]) -> dict[str, TensorEntry] | None:
    """The tensors of the header `text` from character `at` on, by name; None where the strict way has to look.

    `data` are the bytes behind the header. `alike` reads the text of a dtype and shape
    (``{"dtype":"F32","shape":[2]}``), and gives None where these are not a plain dtype and a size.
    """
    known: dict[str, Alike | None] = {}
    found: dict[str, TensorEntry] = {}
    start, path, in_order, reach, count = data.offset, data.path, True, 0, 0
    last = ""
    for match in _TENSOR.finditer(text, at):
        if match.start() != at:
            return None
        at = match.end()
        key, described, begins, ends, last = match.groups()
        if described not in known:
            known[described] = alike(described + "}")
        likeness = known[described]
        begin, end = int(begins), int(ends)
        if likeness is None or end - begin != likeness[3]:
            return None
        dtype, shape, stride, length = likeness
        found[key] = TensorEntry(key, dtype, shape, stride, 0, Storage(Span(path, start + begin, length)))
        count += 1
        in_order = in_order and begin == reach
        reach = end
    if at != len(text) or not last.startswith("}") or len(found) != count:
        return None
    in_order = in_order and reach == data.length
    return found if in_order or _is_covered(found.values(), data) else None


def _is_covered(tensors: Iterable[TensorEntry], data: Span) -> bool:
    """Whether the tensors, in some order, lie one behind the other from the begin of `data` to its end."""
    reach = data.offset
    for offset, length in sorted((span.offset, span.length) for entry in tensors if (span := entry.span)):
        if offset != reach:
            return False
        reach += length
    return reach == data.offset + data.length


def first(text: str, name: str) -> tuple[Any, int]:
    """The value of the first member and where it ends, if that has the name; else ({}, 0), and None for no JSON."""
    start = f'{{"{name}":'
    try:
        return json_text.value_at(text, len(start)) if text.startswith(start) else ({}, 0)
    except ValueError:
        return None, 0


def names(text: str, but: str) -> Iterator[tuple[int, int]]:
    """Where each quoted name of the outermost object of a header begins and ends, those of the member `but` left out.

    The header is one that was read: all members are objects without objects in them, or the metadata.
    """
    quoted = json_text.quoted(but)
    for match in _MEMBER.finditer(text, text.index("{") + 1):
        name = match[1]
        if name != quoted and ("\\" not in name or json_text.loads(name) != but):
            yield match.span(1)
