"""Sections of a file are recognized by their content, and mappings and references are read as by
torch.
"""

from __future__ import annotations

import resource
import time
from collections import OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import Checkpoint, CkptError, open_checkpoint
from ckpttool.containers.nodes import text_of
from ckpttool.containers.pickle_read import Call, Global, Persistent
from ckpttool.containers.tensors import Storages, storage_key
from ckpttool.containers.tree import find_sections
from ckpttool.core.checkpoint import Payload, Span, Storage
from ckpttool.formats.torch_zip import read
from crafted_zip import GOOD, crafted, tensor_node

W = torch.ones(2)
LINEAR = torch.nn.Linear(2, 1).state_dict()
STATE = {"w": W, "b": torch.zeros(3)}
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}


class Foreign:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Several:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return Several, self.parts


def opened(tmp_path: Path, value: Any) -> Checkpoint:
    torch.save(value, tmp_path / "saved.pt", pickle_protocol=3)  # supports bytes
    return open_checkpoint(str(tmp_path / "saved.pt"))


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


TWICE = {"w": W.clone()}

# The content of the file, and its sections: path, kind, keys of tensors
SECTIONS: dict[str, tuple[Any, list[tuple[str, str, list[str]]]]] = {
    "no tensors": (torch.nn.ReLU().state_dict(), [("", "state_dict", [])]),
    "two sections with one path": (
        {"a.b": STATE, "a": {"b": {"v": W}}},
        [("a.b", "state_dict", ["w", "b"]), ("a.b@1", "state_dict", ["v"])],
    ),
    "three tensors with one path": (
        {"x": 1, "y": 2, "z": 3, "a": [[W]], "a.0": [W], "a.0.0": W},
        [("", "other", ["a.0.0", "a.0.0@1", "a.0.0@2"])],
    ),
    "random states": (
        {
            "cpu": {"s": bytes_of(5056)},
            "old": {"s": bytes_of(816)},
            "cuda": {"s": bytes_of(16), "t": bytes_of(16)},
        },
        [("", "other", ["cpu.s", "old.s", "cuda.s", "cuda.t"])],
    ),
    "uint8 tensors of other sizes": ({"a": bytes_of(17)}, [("", "state_dict", ["a"])]),
    "a tensor of another dtype": ({"a": torch.ones(16)}, [("", "state_dict", ["a"])]),
    "a random state next to a tensor": (
        {"s": bytes_of(16), "w": W},
        [("", "state_dict", ["s", "w"])],
    ),
    "more settings than tensors": ({"w": W, "lr": 0.1, "name": "x"}, [("", "other", ["w"])]),
    "as many settings as tensors": ({"w": W, "version": 1}, [("", "state_dict", ["w"])]),
    "bools and None are settings": ({"w": W, "on": True, "off": None}, [("", "other", ["w"])]),
    "lists are not settings": ({"w": W, "a": [1], "b": [2]}, [("", "state_dict", ["w"])]),
    "a section next to a tensor": (
        {"w": W, "ema": STATE},
        [("ema", "state_dict", ["w", "b"]), ("", "other", ["w"])],
    ),
    "a module's own dict": ({"m.w": W, "m.packed": {"v": W}}, [("", "state_dict", ["m.w"])]),
    "a path next to a single name": (
        {"w": W, "m.x": STATE},
        [("m.x", "state_dict", ["w", "b"]), ("", "other", ["w"])],
    ),
    "a single name next to a path": (
        {"m.w": W, "x": STATE},
        [("x", "state_dict", ["w", "b"]), ("", "other", ["m.w"])],
    ),
    "extra state": ({"w": W, "_extra_state": STATE}, [("", "state_dict", ["w"])]),
    "module versions": (
        {"model": LINEAR | {}, "x": 1},
        [("model", "state_dict", ["weight", "bias"])],
    ),
    "an optimizer": (
        {"o": OPTIMIZER, "m": STATE},
        [("o", "optimizer", []), ("m", "state_dict", ["w", "b"])],
    ),
    "groups that are not a list": ({"o": {"state": {}, "param_groups": {}}}, []),
    "state that is not a dict": ({"o": {"state": [], "param_groups": []}}, []),
    "a flat optimizer": (
        {"o": {"state.w.exp_avg": W, "param_groups.w.lr": 0.1}},
        [("o", "optimizer", ["state.w.exp_avg"])],
    ),
    "state without groups": ({"state.w": W}, [("", "state_dict", ["state.w"])]),
    "a key twice, as text and as bytes": ({"w": W, b"w": W}, [("", "other", ["w", "w@1"])]),
    "keys as bytes": ({b"w": W, b"b": W}, [("", "state_dict", ["w", "b"])]),
    "keys that are not text": ({0: W, 1: W}, [("", "other", ["0", "1"])]),
    "attributes": ({"o": Foreign(w=W), "x": 1}, [("", "other", ["o.w"])]),
    "a dict in an object": ({"o": Foreign(m=STATE), "x": 1}, [("", "other", ["o.m.w", "o.m.b"])]),
    "a dict again in an object": (
        {"m": TWICE, "o": Foreign(m=TWICE), "x": 1},
        [("m", "state_dict", ["w"])],
    ),
    "a state dict again in an object": (
        {"m": LINEAR, "o": Foreign(m=LINEAR), "x": 1},
        [("m", "state_dict", ["weight", "bias"]), ("o.m", "state_dict", ["weight", "bias"])],
    ),
    "a state dict in an object": (
        {"o": Foreign(m=LINEAR)},
        [("o.m", "state_dict", ["weight", "bias"])],
    ),
    "a state dict in an object, next to a tensor": (
        {"o": Foreign(m=LINEAR), "w": [W]},
        [("o.m", "state_dict", ["weight", "bias"]), ("", "other", ["w.0"])],
    ),
    "tensors next to a state dict at the root": (
        [LINEAR, [W]],
        [("0", "state_dict", ["weight", "bias"]), ("", "other", ["1.0"])],
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_sections_are_recognized(tmp_path: Path, name: str) -> None:
    value, expected = SECTIONS[name]
    found = opened(tmp_path, value).sections
    assert [
        (section.path, section.kind, [e.key for e in section.tensors]) for section in found
    ] == expected


@pytest.mark.parametrize(
    "inner", [{3: tensor_node()}, Call(Global("own", "Kind"), ({"x": tensor_node()},)), [1]]
)
def test_of_two_objects_with_one_path_only_a_dict_of_names_is_a_state_dict(
    tmp_path: Path, inner: Any
) -> None:
    """Even if the path is marked as a state dict."""
    root = {"a.b": {"x": tensor_node(), "n": {"y": tensor_node()}}, "a": {"b": inner}}
    find = lambda key, nbytes: Storage(Span("nowhere", 0, 8))  # noqa: E731
    places = find_sections(root, Storages(find), ["a.b"]).places
    found = {
        path: (p.section.kind, [e.key for e in p.section.entries]) for path, p in places.items()
    }
    assert found.pop("a.b") == ("state_dict", ["x", "n"])
    assert all(kind == "other" for kind, _ in found.values())


@pytest.mark.parametrize("depth", [150, 250])
def test_dicts_inside_an_entry_are_candidates_for_a_state_dict(tmp_path: Path, depth: int) -> None:
    ring: dict[str, Any] = {"n": 1}
    ring["self"], ring["inner"] = ring, {"m": {"w": 1}}
    deep: dict[str, Any] = {"w": 1}
    for _ in range(depth):
        deep = {"d": deep}
    readings = opened(
        tmp_path,
        {
            "w": W,
            "v": W,
            "ring": ring,
            "deep": deep,
            "empty": {},
            "numbers": {1: {"w": 1}},
            "again": ring["inner"],
        },
    ).readings
    assert readings is not None
    names = {
        path: list(keys) for path, keys in readings.dicts.items() if not path.startswith("deep.")
    }
    assert names == {
        "ring": ["n", "self", "inner"], "ring.inner": ["m"], "ring.inner.m": ["w"], "deep": ["d"]
    }  # fmt: skip
    assert sum(path.startswith("deep") for path in readings.dicts) == min(depth + 1, 200)


def test_an_optimizer_is_read_as_nested_dicts(tmp_path: Path) -> None:
    """A dict with attributes, or with keys other than ids and names, is an opaque object."""
    with_attribute = OrderedDict(step=W)
    vars(with_attribute)["note"] = 1
    plain: dict[Any, Any] = {0: OrderedDict(step=W), 1: defaultdict(int, step=3), 2: OrderedDict()}
    state = {**plain, 3: with_attribute, 4: {None: 1}, "w": {"t": (W, 1)}}
    (section,) = opened(
        tmp_path, {"o": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}
    ).sections
    assert section.mapping is not None
    found = section.mapping["state"]
    assert {key: type(part).__name__ for key, part in found.items()} == {
        0: "dict", 1: "dict", 2: "dict", 3: "ExtraEntry", 4: "ExtraEntry", "w": "dict"
    }  # fmt: skip
    assert (found[0]["step"].key, found[1], found[2], found["w"]["t"][1]) == (
        "state.0.step",
        {"step": 3},
        {},
        1,
    )
    assert section.mapping["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    whole: Any = OrderedDict(state={}, param_groups=[])
    vars(whole)["note"] = 1
    (section,) = opened(tmp_path, {"o": whole}).sections
    assert (section.kind, section.mapping) == ("optimizer", None)


def test_a_dict_that_many_entries_share_is_read_once(tmp_path: Path) -> None:
    """Otherwise a file of a hundred kilobytes would take minutes."""
    text, numbers = ({kind(number): None for number in range(20_000)} for kind in (str, int))
    entries = {f"v{number}": (text, numbers)[number % 2] for number in range(20_000)}
    begun = time.process_time()
    readings = opened(tmp_path, {"w": W} | entries).readings
    assert time.process_time() - begun < 60
    assert readings is not None
    assert list(readings.dicts) == ["v0"]


def test_the_number_of_plain_values_is_limited(tmp_path: Path) -> None:
    shared = [0] * 5000
    (section,) = opened(
        tmp_path, {"w": W} | {f"v{number}": shared for number in range(201)}
    ).sections
    assert [type(extra.value) for extra in section.extras] == [list] * 199 + [type(None)] * 2


def test_the_content_of_an_object_excludes_its_sections(tmp_path: Path) -> None:
    contents = []
    for version, note in ((1, "a"), (2, "a"), (2, "b")):
        model: Any = torch.nn.Linear(2, 1).state_dict()
        model["_extra_state"] = version
        (found,) = opened(tmp_path, {"o": Foreign(m=model, note=note)}).objects
        assert isinstance(found.payload, Payload)
        contents.append(found.payload.content())
    assert contents[0] == contents[1] != contents[2]


def test_tensors_in_a_shared_object_are_listed_in_both_entries(tmp_path: Path) -> None:
    shared, nothing = [W, {"deep": W}], {"a": [1]}
    value = {
        "w": W,
        "a_extra_state": shared,
        "b_extra_state": [nothing, shared],
        "c_extra_state": [nothing],
    }
    (section,) = opened(tmp_path, value).sections
    keys = [entry.key for entry in section.all_tensors()]
    assert keys == [
        "w",
        "a_extra_state.0",
        "a_extra_state.1.deep",
        "b_extra_state.1.0",
        "b_extra_state.1.1.deep",
    ]


def test_optimizers_with_a_shared_state_are_read_completely(tmp_path: Path) -> None:
    """Two calls of `optimizer.state_dict()` share the state. If too much is shared, a note says
    where reading stops.
    """
    shared = {"exp_avg": W, "pad": [[number] for number in range(1000)]}
    few = {name: {"state": {0: shared}, "param_groups": []} for name in "abc"}
    found = opened(tmp_path, few)
    assert [[entry.key for entry in section.tensors] for section in found.sections] == [
        ["state.0.exp_avg"]
    ] * 3
    many = opened(
        tmp_path, {str(number): {"state": {0: shared}, "param_groups": []} for number in range(110)}
    )
    assert 5 < sum(len(section.tensors) for section in many.sections) < 50
    assert [note.partition(" on, ")[2] for note in many.notes] == [
        "a section at several places is listed at one of them"
    ]


def test_other_entries_are_listed_with_their_path(tmp_path: Path) -> None:
    value = {
        "m": STATE,
        "a": {"n": STATE | {}, "x": 1},
        "b": {"x": 1},
        "c": [1, 2],
        "o": Foreign(m=LINEAR, x=1),
    }
    assert opened(tmp_path, value).others == ("a.x", "b", "c")
    assert opened(tmp_path, {"a": 1, "b": {"x": [1]}}).others == ("a", "b")


def test_two_storages_of_one_object_have_different_paths(tmp_path: Path) -> None:
    storages = [torch.full((size,), 1.0).untyped_storage() for size in (2, 3)]
    value = {"m": STATE, "o": Several(*storages), "l": [torch.ones(5).untyped_storage()]}
    found = {entry.path: entry.storage.nbytes for entry in opened(tmp_path, value).unreached}
    names = list(found)
    assert (names[0], names[2]) == ("o", "l.0")
    assert names[1].startswith("o (data/")
    assert list(found.values()) == [8, 12, 20]


def _malicious(kind: str, n: int) -> Any:
    """Return a small pickle with `n` nodes that all share the same `n` parts."""
    none: dict[Any, Any] = dict.fromkeys(map(str, range(n)))
    foreign = Global("own", "Kind")
    if kind == "arguments":
        args = (None,) * n
        return {"a": [Call(foreign, args) for _ in range(n)]}
    if kind == "keywords":
        return {"a": [Call(foreign, (), "NEWOBJ_EX", none) for _ in range(n)]}
    if kind == "pairs":
        pairs = ([(number, None) for number in range(n)],)
        return {
            "w": tensor_node(),
            **{name: Call(Global("collections", "OrderedDict"), pairs) for name in none},
        }
    if kind == "chain":
        chain: Any = [(number, None) for number in range(n)]
        for _ in range(n):
            chain = Call(Global("collections", "OrderedDict"), (chain,))
            chain.pairs = {"own": None}
        return {"w": tensor_node(), "chain": chain}
    if kind == "entries":
        shared = [tensor_node(), *[None] * n]
        return {"w": tensor_node(), **{name: [shared] for name in none}}
    if kind == "optimizer":
        states: list[Any] = [{}, *[None] * n]
        return {"state": {0: {name: [states] for name in none}}, "param_groups": [{"params": [0]}]}
    modules = {}
    for name in none:
        modules[name] = Call(foreign, ())
        modules[name].state = {"_parameters": none, "_buffers": {}, "_modules": {}}
    root = Call(foreign, ())
    root.state = {"_parameters": {}, "_buffers": {}, "_modules": modules}
    return {"m": root}


def _peak_memory() -> int:
    """Return the peak memory in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "kind", ["arguments", "keywords", "pairs", "chain", "entries", "optimizer", "modules"]
)
def test_parts_that_many_objects_share_are_read_once(tmp_path: Path, kind: str) -> None:
    """Otherwise time and memory would grow with the square of the file size."""
    before, start = _peak_memory(), time.process_time()
    path = crafted(tmp_path, _malicious(kind, 3000), {"0": bytes(8)})
    start = time.process_time()
    with suppress(CkptError):
        open_checkpoint(path)
    assert time.process_time() - start < 20
    assert _peak_memory() <= max(before, 1 << 20)  # nine million pairs would take more


KINDS = {kind: Global("collections", kind) for kind in ("OrderedDict", "Counter", "defaultdict")}
KINDS["dict"] = Global("builtins", "dict")
A, B, C = (tensor_node() for _ in range(3))
PAIRS = [("a", A), ("b", B)]


def nested(kind: str) -> Call:
    return Call(KINDS[kind], (PAIRS,))


def with_pairs(node: Call, **pairs: Any) -> Call:
    node.pairs = pairs
    return node


# The arguments of the mapping, and the opcode
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": ((), "REDUCE"),
    "a list of pairs": ((PAIRS,), "REDUCE"),
    "a tuple of lists": ((tuple(map(list, PAIRS)),), "OBJ"),
    "a dict": ((dict(PAIRS),), "REDUCE"),
    "another mapping": ((nested("OrderedDict"),), "REDUCE"),
    # torch fails, or makes another object: it is copied unchanged
    "a pair of one": (([("a",)],), "REDUCE"),
    "a pair of three": (([("a", A, B)],), "REDUCE"),
    "two lists": ((PAIRS, PAIRS), "REDUCE"),
    "a list without a call": ((PAIRS,), "NEWOBJ"),
    "a list without a call, with keywords": ((PAIRS,), "NEWOBJ_EX"),
}

KNOWN = list(CALLS)[:5]


@pytest.mark.parametrize("more", [{}, {"c": C}, {"a": C}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_mappings_are_read_as_in_torch(
    tmp_path: Path, name: str, kind: str, more: dict[str, Any]
) -> None:
    args, how = CALLS[name]
    args = (None, *args) if kind == "defaultdict" and args else args
    node = with_pairs(Call(KINDS[kind], args, how, {} if how == "NEWOBJ_EX" else None), **more)
    path = crafted(tmp_path, {"m": node, "other": {"w": tensor_node()}}, GOOD)
    found = {
        section.path: [entry.key for entry in section.tensors] for section in read(path).sections
    }
    is_known = name in KNOWN and not (
        kind == "Counter" and type(args[0] if args else None) in (list, tuple)
    )
    assert found.get("m", []) == (
        list(torch.load(path, weights_only=False)["m"]) if is_known else []
    )


@pytest.mark.parametrize(
    ("key", "text"), [("a", "a"), (b"a", "a"), ("ü".encode(), "ü"), (b"\xff", "ÿ"), (3, None)]
)
def test_keys_are_converted_to_text(key: Any, text: str | None) -> None:
    assert text_of(key) == text


FLOAT = Global("torch", "FloatStorage")


@pytest.mark.parametrize("numel", [0, 4])
@pytest.mark.parametrize("more", [(), (None,)])  # before torch 1.6 a view could follow
def test_the_storage_key_is_read(numel: int, more: tuple[None, ...]) -> None:
    assert storage_key(Persistent(("storage", FLOAT, "7", "cpu", numel, *more))) == "7"


@pytest.mark.parametrize(
    "node",
    [
        ("storage", FLOAT, "7", "cpu", 4),
        Persistent(["storage", FLOAT, "7", "cpu", 4]),
        Persistent(("storage", FLOAT, "7", "cpu")),
        Persistent(("module", FLOAT, "7", "cpu", 4)),
        Persistent(("storage", "FloatStorage", "7", "cpu", 4)),
        Persistent(("storage", FLOAT, 7, "cpu", 4)),
        Persistent(("storage", FLOAT, "7", "cpu", -1)),
        Persistent(("storage", FLOAT, "7", "cpu", True)),
        Persistent(("storage", FLOAT, "7", "cpu", 4.0)),
    ],
)
def test_an_invalid_reference_is_refused(node: object) -> None:
    with pytest.raises(CkptError) as error:
        storage_key(node)
    assert error.value.message == "not as torch.save writes it: a storage reference"
