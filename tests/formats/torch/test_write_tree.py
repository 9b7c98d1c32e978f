"""Changes in the tree of a pickle: torch loads the result, or the change is refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool import Checkpoint
from command import Run
from files import write

W, V = torch.ones(2), torch.zeros(3)


class Pickled:
    def __new__(cls, *args: Any, **words: Any) -> Pickled:
        instance = super().__new__(cls)
        instance.__dict__.update(args=args, words=words, own=None)
        return instance

    def __getnewargs_ex__(self) -> tuple[Any, Any]:
        return self.__dict__["args"], self.__dict__["words"]

    def __getstate__(self) -> Any:
        return self.__dict__["own"]

    def __setstate__(self, state: Any) -> None:
        self.__dict__["own"] = state


class Items(list[Any]):
    """A subclass of list: pickled empty, and then filled."""


def pickled(*args: Any, own: Any = None, **words: Any) -> Any:
    instance: Any = Pickled(*args, **words)
    instance.__dict__["own"] = own
    return instance


def state() -> Any:
    return torch.nn.Linear(2, 1).state_dict()


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "saved.pt", pickle_protocol=4)
    return tmp_path / "saved.pt"


def with_sections(checkpoint: Checkpoint, **changed: Any) -> Checkpoint:
    sections = (
        changed.get(section.path, lambda section: section)(section)
        for section in checkpoint.sections
    )
    return replace(checkpoint, sections=tuple(sections))


def prefixed(prefix: str) -> Any:
    return lambda s: replace(s, tensors=tuple(replace(e, key=prefix + e.key) for e in s.tensors))


def written(tmp_path: Path, checkpoint: Checkpoint) -> Any:
    return torch.load(write(checkpoint, tmp_path / "out.pt"), weights_only=False)


def test_state_dicts_inside_objects_are_renamed(tmp_path: Path, run: Run) -> None:
    instance = pickled(state(), 7, own=state(), word=state(), list=[state()])
    path = saved(tmp_path, OrderedDict(o=instance, items=Items([3, state()]), epoch=3))
    names = ["o.0", "o.word", "o.list.0", "o", "items.1"]
    assert [section.path for section in ckpttool.open_checkpoint(str(path)).sections] == names
    for name in names:
        out = tmp_path / "out.pt"
        done = run(
            "remap",
            path,
            "--rule",
            "{x} => a.{x}",
            "--sections",
            name,
            "-o",
            out,
            "--force",
            "--verify",
        )
        assert done.status == 0, done.err
        found = torch.load(out, weights_only=False)
        (first, second), words = found["o"].args, found["o"].words
        places = [first, words["word"], words["list"][0], found["o"].own, found["items"][1]]
        assert [next(iter(place)) for place in places] == [
            "a.weight" if name == own else "weight" for own in names
        ]
        assert (second, found["items"][0], found["epoch"], type(found), type(found["items"])) == (
            7, 3, 3, OrderedDict, Items
        )  # fmt: skip


@pytest.mark.parametrize("name", ["o.0", "o.word", "o", "o.list.0", "items.1"])
def test_arguments_and_states_of_objects_are_not_dropped(
    tmp_path: Path, run: Run, name: str
) -> None:
    """If an argument were removed, the next one would take its position."""
    instance = pickled(state(), 7, own=state(), word=state(), list=[state()])
    path = saved(tmp_path, {"o": instance, "items": Items([3, state()]), "m": {"w": W}})
    done = run("remap", path, "--drop", name, "-o", tmp_path / "out.pt")
    if name in ("o.list.0", "items.1"):
        assert done.status == 0, done.err
        found = torch.load(tmp_path / "out.pt", weights_only=False)
        assert (found["o"].words["list"] == [], list(found["items"]) == [3]) == (
            name == "o.list.0",
            name != "o.list.0",
        )
    else:
        assert done.status == 1
        assert f"an argument or the state of an object @ {name}" in done.err
        assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("value", "drops", "kept"),
    [
        ({"m": {"w": W}, "n": {"v": V}, "l": [W.clone().untyped_storage()]}, ["l.0"], None),
        (
            {"m": {"w": W}, "n": {"v": V}, "l": [W.clone().untyped_storage()]},
            ["l", "l.0"],
            ["m", "n"],
        ),
        ({"m": {"w": W}, "o": pickled(own={"s": W.clone().untyped_storage()})}, ["o.s"], None),
        (
            {"m": {"w": W}, "o": pickled(own={"s": W.clone().untyped_storage()})},
            ["o", "o.s"],
            ["m"],
        ),
        ({"w": W, "s": V.untyped_storage()}, ["s"], ["w"]),
        ({"m": state() | {"s": V.clone().untyped_storage()}, "n": {"v": V}}, ["m.s"], ["m", "n"]),
        (
            {"m": {"w": W}, "o": pickled(own={"s": V.untyped_storage(), "n": state()})},
            ["o.s"],
            None,
        ),
        ([[W], V.untyped_storage(), 3], ["1"], [1, 2]),
        (W.untyped_storage(), ["(root)"], None),
    ],
)
def test_a_storage_is_dropped_only_with_its_container(
    tmp_path: Path, run: Run, value: Any, drops: list[str], kept: list[Any] | None
) -> None:
    words = [word for name in drops for word in ("--drop", name)]
    done = run("remap", saved(tmp_path, value), *words, "-o", tmp_path / "out.pt")
    if kept is None:
        assert done.status == 1
        assert (
            f"the object around it is kept, and cannot be written without it @ {drops[-1]}"
            in done.err
        )
    else:
        assert done.status == 0, done.err
        found = torch.load(tmp_path / "out.pt", weights_only=False)
        assert (list(found) if isinstance(found, dict) else [len(found[0]), len(found)]) == kept
        assert drops[-1] not in [
            entry.path for entry in ckpttool.open_checkpoint(str(tmp_path / "out.pt")).unreached
        ]


def put(held: Any, instance: Any, state: Any) -> None:
    instance.held, instance.state = held, state


class BySetter:
    """Its state is set by a function that holds a tensor."""

    def __reduce__(self) -> Any:
        return (
            object.__new__,
            (BySetter,),
            {"n": 3},
            None,
            None,
            partial(put, torch.full((4,), 7.0)),
        )


def test_a_state_setter_is_copied_with_its_object(tmp_path: Path, run: Run) -> None:
    """Its storages are copied and renumbered with the others."""
    path = saved(tmp_path, {"first": {"w": V}, "last": {"w": W, "x._extra_state": BySetter()}})
    (unreached,) = ckpttool.open_checkpoint(str(path)).unreached
    assert unreached.is_referred
    words = ("--drop", "first", "--keep-pickled-code")
    done = run("remap", path, "-o", tmp_path / "out.pt", *words)
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "out.pt", weights_only=False)["last"]
    own = found["x._extra_state"]
    assert (own.held.tolist(), own.state) == ([7.0] * 4, {"n": 3})
    assert torch.equal(found["w"], W)


def test_a_shared_state_dict_is_split_if_its_copies_differ(tmp_path: Path) -> None:
    shared = state()
    checkpoint = ckpttool.open_checkpoint(str(saved(tmp_path, {"model": shared, "best": shared})))
    found = written(tmp_path, with_sections(checkpoint, model=prefixed("a."), best=prefixed("b.")))
    assert [list(found[name]) for name in ("model", "best")] == [
        ["a.weight", "a.bias"],
        ["b.weight", "b.bias"],
    ]

    def versions(section: Any, number: int) -> Any:
        return replace(prefixed("a.")(section), modules={"": {"version": number}})

    both = with_sections(checkpoint, model=lambda s: versions(s, 1), best=lambda s: versions(s, 2))
    found = written(tmp_path, both)
    assert [dict(found[name]._metadata) for name in ("model", "best")] == [
        {"": {"version": 1}},
        {"": {"version": 2}},
    ]

    def swapped(section: Any) -> Any:
        weight, bias = prefixed("a.")(section).tensors
        return replace(
            section, tensors=(replace(weight, key=bias.key), replace(bias, key=weight.key))
        )

    def reordered(section: Any) -> Any:
        weight, bias = prefixed("a.")(section).tensors
        return replace(
            section, tensors=(replace(bias, key=bias.key), replace(weight, key=weight.key))
        )

    found = written(tmp_path, with_sections(checkpoint, model=swapped, best=reordered))
    assert [
        [(key, value.dim()) for key, value in found[name].items()] for name in ("model", "best")
    ] == [
        [("a.bias", 2), ("a.weight", 1)],
        [("a.bias", 1), ("a.weight", 2)],
    ]


def test_a_shared_list_is_split_if_its_state_dicts_differ(tmp_path: Path) -> None:
    held = [{"w": W, "v": V}]
    checkpoint = ckpttool.open_checkpoint(str(saved(tmp_path, {"last": held, "best": held})))
    changed = {"last.0": prefixed("a."), "best.0": prefixed("b.")}
    found = written(tmp_path, with_sections(checkpoint, **changed))
    assert [list(found[name][0]) for name in ("last", "best")] == [["a.w", "a.v"], ["b.w", "b.v"]]


def test_attributes_of_a_state_dict_are_kept_without_its_versions(tmp_path: Path) -> None:
    own = state()
    own.note = "own"
    checkpoint = ckpttool.open_checkpoint(str(saved(tmp_path, {"m": own, "n": state()})))
    found = written(
        tmp_path,
        with_sections(checkpoint, **dict.fromkeys("mn", lambda s: replace(s, modules=None))),
    )
    assert [vars(found[name]) for name in "mn"] == [{"note": "own"}, {}]
    plain = OrderedDict(w=W)
    vars(plain)["note"] = "own"
    checkpoint = ckpttool.open_checkpoint(str(saved(tmp_path, plain)))
    assert checkpoint.sections[0].modules is None
    found = written(tmp_path, with_sections(checkpoint, **{"": prefixed("a.")}))
    assert (list(found), vars(found)) == (["a.w"], {"note": "own"})
