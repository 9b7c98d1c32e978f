"""Pickle trees: written bytes match CPython's pickler; malicious pickles are built opcode by
opcode.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import os
import pathlib
import pickle
import pickletools
import random
import struct
import tracemalloc
import types
import uuid
import zipfile
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.containers.pickle_read import ABSENT, Global, loads
from ckpttool.containers.pickle_write import dumps
from surroundings import limited

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    layers: int
    names: list[str]
    nested: "Config | None" = None


class Slotted:
    __slots__ = ("a", "b")


class ListLike(list):
    pass


class DictLike(dict):
    pass


class NewArgs(int):
    def __new__(cls, value: int, *, base: int = 10) -> "NewArgs":
        return super().__new__(cls, value)

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (int(self),), {"base": 10}


class WithSetter:
    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (WithSetter,), {"a": 1}, None, None, set_state


def set_state(instance: WithSetter, state: dict[str, Any]) -> None:
    instance.__dict__.update(state)


def slotted() -> Slotted:
    instance: Any = Slotted()
    instance.a, instance.b = 1, [2]
    return instance


def like(kind: type, content: Any, **attributes: Any) -> Any:
    instance = kind(content)
    instance.__dict__.update(attributes)
    return instance


def cyclic_list() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def cyclic_tuple() -> tuple[Any, ...]:
    inner: list[Any] = []
    cycle = (inner, 2, 3, 4)
    inner.append(cycle)
    return cycle


def cyclic_object() -> argparse.Namespace:
    cycle = argparse.Namespace(a=1)
    cycle.me, cycle.listed = cycle, [cycle]
    return cycle


SHARED = ["shared"]
OBJECTS: dict[str, Any] = {
    "scalars": [
        None,
        True,
        False,
        0,
        1,
        255,
        256,
        65535,
        65536,
        -1,
        -(2**31),
        2**31 - 1,
        2**31,
        1.5,
        -0.0,
        1e300,
    ],
    "big ints": [
        2**63,
        -(2**63),
        2**100,
        -(2**100),
        2**2000,
        -(2**64) - 1,
        -128,
        -(2**39),
        -(2**40) + 1,
    ],
    "ints of 255 bytes": [2**2039 - 1, -(2**2039)],
    "special floats": [float("inf"), float("-inf"), float("nan")],
    "strings": [
        "",
        "a",
        "abc",
        "ü",
        "日本語",
        "\ud800",
        "a\nb",
        "x" * 255,
        "x" * 256,
        "x" * 70_000,
        "\U0001f600",
    ],
    "bytes": [b"", b"a", b"\x00\xff" * 128, b"\xff" * 255, bytearray(b"abc"), bytearray()],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),), (("a",),) * 5],
    "containers": {
        "list": [],
        "dict": {},
        "set": {1},
        "frozen": frozenset("a"),
        "empty": [set(), frozenset()],
    },
    "complex and ranges": [1 + 2j, range(3), slice(1, 2)],
    "keys": {7: "a", "b": 2, (1, "c"): 3, None: 4, 2.5: 5, True: 6, Colour.RED: 7},
    "sharing": [SHARED, SHARED, {"a": SHARED}, ("t", "t")],
    "cyclic list": cyclic_list(),
    "cyclic tuple": cyclic_tuple(),
    "cyclic object": cyclic_object(),
    "namespace": argparse.Namespace(lr=0.1, names=["a"], nested=argparse.Namespace(x=None)),
    "simple namespace": types.SimpleNamespace(a=1, b="c"),
    "enums": [Colour.RED, Colour.BLUE, Flags.A | Flags.B, Colour.RED],
    "dataclass": Config(2, ["a"], Config(1, [])),
    "named tuple": Point(1, Point(2, 3)),
    "slots": slotted(),
    "list subclass": [like(ListLike, range(n), note="n") for n in (0, 1, 2, 999, 1000, 1001, 2001)],
    "dict subclass": [
        like(DictLike, dict.fromkeys(range(n)), note="n") for n in (0, 1, 2, 999, 1000, 1001, 2001)
    ],
    "lists": [list(range(n)) for n in (0, 1, 2, 999, 1000, 1001, 2000, 2001)],
    "dicts": [dict.fromkeys(range(n)) for n in (0, 1, 2, 999, 1000, 1001, 2000, 2001)],
    "collections": [
        collections.OrderedDict(first=1, second=collections.OrderedDict()),
        collections.defaultdict(list, first=[1]),
        collections.Counter(["one", "two", "one"]),
        collections.deque([1, 2, 3], maxlen=5),
        collections.ChainMap({"first": 1}),
    ],
    "datetime": [
        datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.timedelta(3),
        datetime.date.max,
    ],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/d")],
    "functions": [
        len,
        dict.fromkeys,
        pickle.dumps,
        functools.partial(int, base=2),
        Config,
        "".join,
        int,
    ],
    "types": [int, type(None), type(...), ..., NotImplemented, list, type],
    "numpy": [
        numpy.float32(1.5),
        numpy.int64(3),
        numpy.arange(6).reshape(2, 3),
        numpy.asfortranarray(numpy.ones((2, 3))),
        numpy.array(["a", "bc"]),
        numpy.array([None, {"a": 1}], dtype=object),
        numpy.dtype("float16"),
        numpy.datetime64("2020-01-01"),
        numpy.random.RandomState(0),
        numpy.bool_(True),
    ],
    "torch": [
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cuda:1"),
        torch.strided,
        torch.per_tensor_affine,
    ],
    "random state": random.Random(0),
    "new arguments": NewArgs(3),
    "state setter": WithSetter(),
    "exception": ValueError("a", 1),
}


def torch_pickle(value: Any, protocol: int = 2) -> bytes:
    """Return the ``data.pkl`` that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("name", OBJECTS)
def test_written_bytes_match_torch_save(name: str) -> None:
    data = torch_pickle(OBJECTS[name])
    assert dumps(loads(data)) == data


def test_a_pickle_of_all_objects_matches_torch_save() -> None:
    """The trees are equal, but CPython writes some one-letter strings twice."""
    data = torch_pickle({"a": OBJECTS, "b": list(OBJECTS.values()), "c": {"nested": [OBJECTS]}})
    again = dumps(loads(data))
    assert len(data) - 30 < len(again) <= len(data)
    assert dumps(loads(again)) == again


def test_written_tensors_match_torch_save() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "itself": model,
        "epoch": 3,
    }
    data = torch_pickle(whole)
    assert dumps(loads(data)) == data


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
@pytest.mark.parametrize(
    "name", sorted(set(OBJECTS) - {"cyclic list", "cyclic tuple", "cyclic object"})
)
def test_other_protocols_load_as_the_same_value(name: str, protocol: int) -> None:
    try:
        data = pickle.dumps(OBJECTS[name], protocol)
    except Exception as error:  # some objects have no pickle of protocol 0
        pytest.skip(f"cannot be pickled: {error}")
    tree = loads(data)
    assert tree.end == len(data)
    again = dumps(tree)
    assert again[1] == max(protocol, 2)
    assert pickle.dumps(pickle.loads(again), protocol) == pickle.dumps(pickle.loads(data), protocol)
    assert dumps(loads(again)) == again


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_cycles_are_read_in_every_protocol(protocol: int) -> None:
    a_list, a_tuple, an_object = (
        pickle.loads(dumps(loads(pickle.dumps(OBJECTS[f"cyclic {kind}"], protocol))))
        for kind in ("list", "tuple", "object")
    )
    assert a_list[1] is a_list
    assert a_tuple[0][0] is a_tuple
    assert an_object.me is an_object.listed[0] is an_object


class SelfContaining:
    """Pickled as a call with a list that contains the object itself."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return SelfContaining, (self.held,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_objects_that_contain_themselves_are_read_and_written(protocol: int, length: int) -> None:
    """Tuples, frozensets and calls are created after their parts."""
    inner: list[Any] = []
    recursive = (inner, *range(1, length))
    inner.append(recursive)
    call = SelfContaining([length])
    call.held.append(call)
    held = Slotted()
    frozen = frozenset((held, *range(length)))
    held.a = frozen  # type: ignore[attr-defined]
    again = dumps(loads(pickle.dumps([recursive, call, frozen], protocol)))
    assert dumps(loads(again)) == again
    found_tuple, found_call, found_set = pickle.loads(again)
    assert found_tuple[0][0] is found_tuple
    assert found_tuple[1:] == recursive[1:]
    assert found_call.held == [length, found_call]
    rings: list[Any] = [part for part in found_set if isinstance(part, Slotted)]
    # before, CPython makes an empty set
    assert [part.a is found_set for part in rings] == [True] * (protocol >= 4)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-(2**62), 2**62), inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@settings(max_examples=150)
@given(PLAIN, st.integers(0, 5))
def test_plain_values_are_restored(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert pickle.loads(dumps(loads(data))) == value
    if protocol == 2:
        assert dumps(loads(data)) == data


def test_nothing_is_executed() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.abort, ("executed",)

    tree = loads(pickle.dumps([Evil(), Evil()], 2))
    assert [call.args for call in tree.root] == [("executed",), ("executed",)]
    assert tree.globals == (Global("posix", "abort"),)


def test_a_call_with_a_discarded_result_is_found() -> None:
    tree = loads(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R0}.")
    assert tree.globals == (Global("os", "system"),)
    assert dumps(tree) == b"\x80\x02}q\x00."


@pytest.mark.parametrize("arguments", ["(0, 1)", "(1, 1)", "(1,)", "(1, 1, 1)", "()"])
def test_only_a_call_on_the_object_below_is_its_state_setter(arguments: str) -> None:
    """A state setter is a discarded call; its arguments are the objects 0 (below it) and 1."""
    parts = {"0": b"h\x00", "1": b"h\x01", "(": b"(", ")": b"t"}
    opcodes = b"".join(parts.get(word, b"") for word in arguments)
    root = loads(b"\x80\x02ca\nb\n)Rq\x01ca\nb\n)Rq\x00cset\nstate\n" + opcodes + b"R0\x86.").root
    assert (root[1].setter is not None) == (arguments == "(0, 1)")
    assert root[1].state is (root[0] if root[1].setter else ABSENT)


def test_consecutive_pickles_are_read() -> None:
    data = pickle.dumps([1], 2) + pickle.dumps({"a": 2}, 2)
    first = loads(data)
    assert first.root == [1]
    assert loads(data, start=first.end).root == {"a": 2}


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"I01\n.", True),
        (b"I00\n.", False),
        (b"I-7\n.", -7),
        (b"L123L\n.", 123),
        (b"F1.5\n.", 1.5),
        (b"S'a\\'b'\n.", "a'b"),
        (b"U\x03abc.", "abc"),
        (b"T\x03\x00\x00\x00abc.", "abc"),
        (b"V\\u00fc\n.", "ü"),
        (b"(lI1\na.", [1]),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"(I1\nt.", (1,)),
        (b"]p5\n0g5\n.", []),
        (b"K\x012\x86.", (1, 1)),
        (b"\x88.", True),
        (b"I" + b"9" * 4300 + b"\n.", 10**4300 - 1),
        (b"}\x8a\x09" + b"\xff" * 8 + b"\x00K\x01s.", {2**64 - 1: 1}),
    ],
)
def test_opcodes_of_old_protocols_are_read(data: bytes, value: Any) -> None:
    assert loads(data).root == value == pickle.loads(data)
    assert loads(data).protocol == 0
    assert pickle.loads(dumps(loads(data))) == value


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_quoted_strings_match_the_unpickler() -> None:
    for letters in itertools.chain.from_iterable(
        itertools.product("'\"a\\x0u ", repeat=n) for n in range(5)
    ):
        data = f"S{''.join(letters)}\n.".encode()
        try:
            value = pickle.loads(data)
        except Exception:
            with pytest.raises(CkptError, match="damaged pickle"):
                loads(data)
        else:
            assert loads(data).root == value, data


def test_old_style_classes_are_kept() -> None:
    for data in (b"(I1\niwhere\nKind\n.", b"(cwhere\nKind\nI1\no."):
        tree = loads(data)
        assert (tree.root.how, tree.root.func, tree.root.args) == (
            "OBJ",
            Global("where", "Kind"),
            (1,),
        )
        assert [op.name for op, _, _ in pickletools.genops(dumps(tree))][-3:] == [
            "OBJ",
            "BINPUT",
            "STOP",
        ]


def test_strings_of_python_2_keep_their_bytes() -> None:
    data = b"\x80\x02U\x02\xff\xfeq\x00."
    assert dumps(loads(data)) == data


def test_a_global_with_a_line_end_in_its_name_does_not_become_opcodes() -> None:
    for name in (b"b\nK\x01.", b"\xed\xa0\x80", "ü".encode()):
        tree = loads(
            b"\x80\x02X\x01\x00\x00\x00aX" + struct.pack("<i", len(name)) + name + b"\x93."
        )
        assert loads(dumps(tree)).root == Global("a", name.decode("utf-8", "surrogatepass"))


BAD = {
    "empty": b"",
    "no stop": b"\x80\x02]",
    "empty stack": b"\x80\x02.",
    "two objects": b"\x80\x02]].",
    "open mark": b"\x80\x02(].",
    "underflow": b"\x80\x02\x86.",
    "underflow at tuple3": b"\x80\x02]\x87.",
    "pop of an empty stack": b"\x80\x020.",
    "tuple without mark": b"\x80\x02t.",
    "appends without mark": b"\x80\x02]e.",
    "mark below the remaining stack": b"\x80\x02]](\x86t\x86.",
    "pop below a mark": b"\x80\x02]](\x860.",
    "unknown memo": b"\x80\x02h\x07.",
    "unknown opcode": b"\x80\x02\xff.",
    "extension": b"\x80\x02\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "string longer than the pickle": b"\x80\x02X\xff\xff\xff\xffabc.",
    "string longer than memory": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
    "bytes longer than the pickle": b"\x80\x03B\xff\xff\xff\x7fabc.",
    "int longer than the pickle": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "frame longer than the pickle": b"\x80\x04\x95\xff",
    "cut off in a number": b"\x80\x02J\x01",
    "cut off in a line": b"\x80\x02cos\nsystem",
    "not UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "invalid int": b"Iabc\n.",
    "int of too many digits": b"I" + b"9" * 100_000 + b"\n.",
    "invalid float": b"Fabc\n.",
    "string without quotes": b"Sabc\n.",
    "list as key": b"\x80\x02}]K\x01s.",
    "dict in a tuple as key": b"\x80\x02}}\x85K\x01s.",
    "endless int as key": b"\x80\x02}\x8a\x20" + b"\x01" * 32 + b"K\x01s.",
    "int of 65 bits as key": b"\x80\x02}\x8a\x09" + bytes(8) + b"\x01K\x01s.",
    "key without value": b"\x80\x02}(K\x01u.",
    "append to a tuple": b"\x80\x02)K\x01a.",
    "set on a list": b"\x80\x02]K\x01K\x01s.",
    "build on a list": b"\x80\x02]}b.",
    "build twice": b"\x80\x02cos\nsystem\n)R}b}b.",
    "append after build": b"\x80\x02cos\nsystem\n)R}bK\x01a.",
    "call without tuple": b"\x80\x02cos\nsystem\n]R.",
    "name that is not a string": b"\x80\x04K\x01K\x02\x93.",
    "module that is not a string": b"\x80\x04K\x01\x8c\x01a\x93.",
    "keywords that are not a dict": b"\x80\x04ca\nb\n)]\x92.",
    "arguments that are not a tuple": b"\x80\x04ca\nb\n]}\x92.",
    "persistent id that is a list": b"\x80\x02]Q.",
    "items for a frozenset": b"\x80\x04(\x91\x94(h\x00\x90.",
    "protocol cut off": b"\x80",
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_pickles_are_refused(name: str) -> None:
    with pytest.raises(CkptError):
        loads(BAD[name])


def test_truncation_and_stack_underflow_have_different_errors() -> None:
    data = torch_pickle({"a": torch.ones(2), "b": [1.5, "text"]})
    for _, _, at in pickletools.genops(data):
        with pytest.raises(CkptError, match=f"at byte {at}: the pickle is cut off"):
            loads(data[:at])
    for name in ("underflow", "underflow at tuple3", "pop of an empty stack", "tuple without mark"):
        with pytest.raises(CkptError, match="an opcode finds nothing to work on"):
            loads(BAD[name])


def test_pickles_beyond_a_limit_are_refused() -> None:
    with (
        limited(pickle_bytes=3),
        pytest.raises(CkptError, match="the limit pickle_bytes is 3 "),
    ):
        loads(b"\x80\x02].")
    with limited(pickle_bytes=3):
        assert loads(b"abK\x07.", start=2).root == 7
    with (
        limited(pickle_opcodes=50),
        pytest.raises(CkptError, match="the limit pickle_opcodes is 50 "),
    ):
        loads(b"\x80\x02" + b"]0" * 100 + b"].")


def test_a_million_marks_are_refused_at_the_limit_in_little_memory() -> None:
    data = b"\x80\x02" + b"(" * 1_000_000 + b"."
    tracemalloc.start()
    with pytest.raises(CkptError, match="the limit pickle_marks is 10,000"):
        loads(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()


def test_large_memo_indexes_use_little_memory() -> None:
    assert loads(b"\x80\x02]r\xff\xff\xff\xff0j\xff\xff\xff\xff.").root == []


DEEP = 30_000
NESTED = {
    "tuples": b"\x80\x02)" + b"\x85" * DEEP + b".",
    "lists": b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "dicts": b"\x80\x02" + b"}K\x01" * DEEP + b"N" + b"s" * DEEP + b".",
    "calls": b"\x80\x02" + b"ca\nb\n" * DEEP + b")" + b"R\x85" * DEEP + b".",
}


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_read_and_written(name: str) -> None:
    again = dumps(loads(NESTED[name]))
    assert dumps(loads(again)) == again


def doubled(times: int) -> bytes:
    """Return opcodes for pairs of pairs of ...: 2**times leaves."""
    return b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(times))


@pytest.mark.parametrize("key", [b"\x85" * 200_000, doubled(60)])
def test_a_deep_or_exponential_tuple_as_key_is_refused(key: bytes) -> None:
    with pytest.raises(CkptError, match="too large"):
        loads(b"\x80\x02}K\x01" + key + b"K\x01s.")


def test_an_exponential_tuple_stays_small() -> None:
    assert len(dumps(loads(b"\x80\x02]" + doubled(200) + b"."))) < 2000


def test_a_repeated_large_number_stays_small() -> None:
    for number in (2**2039, -(2**2039) - 1):  # 256 bytes each
        assert pickle.loads(dumps(loads(pickle.dumps([number] * 2, 2)))) == [number] * 2
    data = (
        b"\x80\x02(\x8b"
        + struct.pack("<i", 100_000)
        + b"\x01" * 100_000
        + b"q\x00"
        + b"h\x00" * 10_000
        + b"t."
    )
    assert len(dumps(loads(data))) < 200_000
