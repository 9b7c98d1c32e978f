"""Comparison with Python's unpickler: all of its imports are found, and plain values are equal."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.containers.pickle_read import PickledSet, loads
from ckpttool.containers.pickle_write import dumps
from mutate import changed

EXAMPLES = 5_000 if os.environ.get("CKPTTOOL_SUITES") == "all" else 300


def frame(length: int, *inside: bytes) -> bytes:
    return b"\x95" + struct.pack("<Q", length) + b"".join(inside)


SEEDS = [
    *(
        pickle.dumps(value, protocol)
        for value in (
            {"a": [1, 2.5, "x", b"y", (None, True)], 3: {1, 2}, "n": [1, 1000, 70_000, 2**70, -5]},
            [frozenset([1]), "a" * 300, b"b" * 300, bytearray(b"q")],
        )
        for protocol in range(6)
    ),
    b"(I10\nI01\nL5L\nF1.5\nS'a'\nVb\\u0041\nccollections\nOrderedDict\n)Rt.",
    b"\x80\x04" + frame(16, b"\x8c\x02os\x94\x8c\x06system\x94\x93\x94."),
]
WORDS = (
    *(
        b"(",
        b"t",
        b"t.",
        b"\x85",
        b"}",
        b"]",
        b"R",
        b"b",
        b"o",
        b"\x81",
        b"\x92",
        b"a",
        b"e",
        b"s",
        b"u",
        b"\x90",
    ),
    *(
        b"\x91",
        b"\x8f",
        b"l",
        b"d",
        b"N",
        b"K\1",
        b".",
        b"0",
        b"1",
        b"2",
        b"Q",
        b"\x94",
        b"q\0",
        b"h\0",
        b"j\0\0\0\0",
    ),
    *(
        b"p0\n",
        b"g0\n",
        b"cos\nsystem\n",
        b"ios\nsystem\n",
        b"\x8c\2os\x8c\6system\x93",
        b"\x80\4",
        frame(2),
        frame(5),
    ),
    *(
        b"I010\n",
        b"I 1\n",
        b"I0x1F\n",
        b"L07L\n",
        b"I1_0\n",
        b"F1_0\n",
        b"S'a'\n",
        b"Vab\n",
        b"U\1a",
    ),
)


class Inert:
    """An inert replacement for anything that the unpickler imports; it accepts any arguments and
    state.
    """

    def __new__(cls, *args: object, **options: object) -> Inert:
        return object.__new__(cls)

    def __init__(self, *args: object, **options: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, item: object) -> None: ...
    def extend(self, items: object) -> None: ...
    def add(self, item: object) -> None: ...


class Recorder(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.imported: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.imported.append((module, name))
        return type("Class", (Inert,), {})

    def persistent_load(self, name: object) -> Any:
        return Inert()


def plain(value: Any, level: int = 0) -> Any:
    """Return a comparable form of the value, with its types; raise if it is not plain or too
    deep.
    """
    if type(value) in (int, float, str, bytes, bytearray, bool, type(None)):
        return type(value).__name__, repr(value)
    if level > 8:
        raise ValueError("deep")
    if type(value) in (tuple, list):
        return type(value).__name__, *(plain(part, level + 1) for part in value)
    if type(value) is dict:
        return "dict", *(
            (plain(key, level + 1), plain(part, level + 1)) for key, part in value.items()
        )
    if type(value) is PickledSet:
        value = (frozenset if value.frozen else set)(value.items)
    if type(value) in (set, frozenset):
        return type(value).__name__, *sorted(plain(part, level + 1) for part in value)
    raise ValueError("not plain")


def compare(data: bytes) -> None:
    try:
        tree = loads(data)
    except CkptError:
        return
    again = dumps(tree)
    assert dumps(loads(again)) == again
    python, value = Recorder(data), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences
        try:
            value = python.load()
        except Exception:  # imports before the error count too
            value = NotImplemented
    assert {f"{module}.{name}" for module, name in python.imported} <= {
        str(name) for name in tree.globals
    }
    try:
        expected = plain(value)
    except (ValueError, TypeError):
        return
    assert plain(tree.root) == expected


@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32))
def test_mutated_pickles_match_python_or_are_refused(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        compare(changed(chance.choice(SEEDS), SEEDS, WORDS, chance))
        compare(b"".join(chance.choices(WORDS, k=chance.randrange(3, 14))) + b".")


HIDDEN = b"cos\nsystem\n)R"
BROKEN_FRAMES = {
    "bytes that exceed their frame": frame(2, b"B\x20\0\0\0", HIDDEN.ljust(32, b"N"), b"."),
    "a name that exceeds its frame": frame(4, b"cmacos\nsystem\n."),
    "a frame in a frame": frame(13, b"N0", frame(2, b"N.")),
    "a frame that is not complete": frame(30, b"N."),
    "an end inside a frame": frame(10, b"N.") + HIDDEN + b".",
}


@pytest.mark.parametrize("name", BROKEN_FRAMES)
def test_invalid_frames_are_refused(name: str) -> None:
    """Python reads a frame at once; if an opcode needs more bytes, it skips the rest of the
    frame.
    """
    with pytest.raises(CkptError):
        loads(b"\x80\x05" + BROKEN_FRAMES[name])


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "value", [b"x" * 100_000, [1, b"y" * 100_000, 2], list(range(200_000)), [["a" * 70_000]] * 3]
)
def test_frames_of_large_values_are_read(value: object, protocol: int) -> None:
    assert plain(loads(pickle.dumps(value, protocol)).root) == plain(value)


@pytest.mark.parametrize(
    "line", [b"I010\n", b"I 1\n", b"I+1\n", b"I-0\n", b"I1_0\n", b"L010L\n", b"L 1L\n"]
)
def test_a_number_in_an_unusual_form_is_refused(line: bytes) -> None:
    """Python's unpicklers in C and in Python read some of them differently."""
    with pytest.raises(CkptError, match="unusual form"):
        loads(line + b".")
