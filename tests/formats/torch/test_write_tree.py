"""What is changed in the tree of a pickle, and what cannot be: torch loads what is written."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.formats.torch.zip_file import layout, read
from command import Run
from files import write_pieces

W, V = torch.ones(2), torch.zeros(3)


class Made:
    """Pickled as what it is made of: arguments, words, and a state of its own."""

    def __new__(cls, *args: Any, **words: Any) -> Made:
        made = super().__new__(cls)
        made.__dict__.update(args=args, words=words, own=None)
        return made

    def __getnewargs_ex__(self) -> tuple[Any, Any]:
        return self.__dict__["args"], self.__dict__["words"]

    def __getstate__(self) -> Any:
        return self.__dict__["own"]

    def __setstate__(self, state: Any) -> None:
        self.__dict__["own"] = state


class Items(list[Any]):
    """A list of one's own: it is made empty, then filled."""


def made(*args: Any, own: Any = None, **words: Any) -> Any:
    found: Any = Made(*args, **words)
    found.__dict__["own"] = own
    return found


def state() -> Any:
    return torch.nn.Linear(2, 1).state_dict()


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "saved.pt", pickle_protocol=4)
    return tmp_path / "saved.pt"


def with_sections(checkpoint: Checkpoint, **changed: Any) -> Checkpoint:
    sections = (changed.get(section.path, lambda section: section)(section) for section in checkpoint.sections)
    return replace(checkpoint, sections=tuple(sections))


def prefixed(prefix: str) -> Any:
    return lambda s: replace(s, tensors=tuple(replace(e, key=prefix + e.key) for e in s.tensors))


def written(tmp_path: Path, checkpoint: Checkpoint) -> Any:
    return torch.load(write_pieces(layout(checkpoint), tmp_path / "out.pt"), weights_only=False)


def test_state_dicts_wherever_they_stand(tmp_path: Path, run: Run) -> None:
    around = made(state(), 7, own=state(), word=state(), list=[state()])
    path = saved(tmp_path, OrderedDict(o=around, items=Items([3, state()]), epoch=3))
    names = ["o.0", "o.word", "o.list.0", "o", "items.1"]
    assert [section.path for section in read(str(path)).sections] == names
    for name in names:
        out = tmp_path / "out.pt"
        done = run("remap", path, "--rule", "{x} => a.{x}", "--sections", name, "-o", out, "--force", "--verify")
        assert done.status == 0, done.err
        found = torch.load(out, weights_only=False)
        (first, second), words = found["o"].args, found["o"].words
        places = [first, words["word"], words["list"][0], found["o"].own, found["items"][1]]
        assert [next(iter(place)) for place in places] == ["a.weight" if name == own else "weight" for own in names]
        assert (second, found["items"][0], found["epoch"], type(found), type(found["items"])) == (
            7, 3, 3, OrderedDict, Items
        )  # fmt: skip


@pytest.mark.parametrize("name", ["o.0", "o.word", "o", "o.list.0", "items.1"])
def test_what_an_object_is_made_of_is_not_dropped(tmp_path: Path, run: Run, name: str) -> None:
    """Without an argument the next one would take its place."""
    around = made(state(), 7, own=state(), word=state(), list=[state()])
    path = saved(tmp_path, {"o": around, "items": Items([3, state()]), "m": {"w": W}})
    done = run("remap", path, "--drop", name, "-o", tmp_path / "out.pt")
    if name in ("o.list.0", "items.1"):
        assert done.status == 0, done.err
        found = torch.load(tmp_path / "out.pt", weights_only=False)
        assert (found["o"].words["list"] == [], list(found["items"]) == [3]) == (name == "o.list.0", name != "o.list.0")
    else:
        assert done.status == 1
        assert f"an argument or the state of an object @ {name}" in done.err
        assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("value", "drops", "kept"),
    [
        ({"m": {"w": W}, "n": {"v": V}, "l": [W.clone().untyped_storage()]}, ["l.0"], None),
        ({"m": {"w": W}, "n": {"v": V}, "l": [W.clone().untyped_storage()]}, ["l", "l.0"], ["m", "n"]),
        ({"m": {"w": W}, "o": made(own={"s": W.clone().untyped_storage()})}, ["o.s"], None),
        ({"m": {"w": W}, "o": made(own={"s": W.clone().untyped_storage()})}, ["o", "o.s"], ["m"]),
        ({"w": W, "s": V.untyped_storage()}, ["s"], ["w"]),
        ({"m": state() | {"s": V.clone().untyped_storage()}, "n": {"v": V}}, ["m.s"], ["m", "n"]),
        ({"m": {"w": W}, "o": made(own={"s": V.untyped_storage(), "n": state()})}, ["o.s"], None),
        ([[W], V.untyped_storage(), 3], ["1"], [1, 2]),
        (W.untyped_storage(), ["(root)"], None),
    ],
)
def test_a_storage_goes_with_what_holds_it(
    tmp_path: Path, run: Run, value: Any, drops: list[str], kept: list[Any] | None
) -> None:
    words = [word for name in drops for word in ("--drop", name)]
    done = run("remap", saved(tmp_path, value), *words, "-o", tmp_path / "out.pt")
    if kept is None:
        assert done.status == 1
        assert f"the object around it is kept, and cannot be written without it @ {drops[-1]}" in done.err
    else:
        assert done.status == 0, done.err
        found = torch.load(tmp_path / "out.pt", weights_only=False)
        assert (list(found) if isinstance(found, dict) else [len(found[0]), len(found)]) == kept
        assert not [one for one in read(str(tmp_path / "out.pt")).unreached if one.path == drops[-1]]


def put(held: Any, made: Any, state: Any) -> None:
    made.held, made.state = held, state


class BySetter:
    """Its state is set by a function that holds a tensor."""

    def __reduce__(self) -> Any:
        return object.__new__, (BySetter,), {"n": 3}, None, None, partial(put, torch.full((4,), 7.0))


def test_what_sets_the_state_of_an_object_is_a_part_of_it(tmp_path: Path, run: Run) -> None:
    """Its storages go where the others go, to new numbers too."""
    path = saved(tmp_path, {"first": {"w": V}, "last": {"w": W, "x._extra_state": BySetter()}})
    (unreached,) = read(str(path)).unreached
    assert unreached.is_referred
    words = ("--drop", "first", "--keep-pickled-code")
    done = run("remap", path, "-o", tmp_path / "out.pt", *words)
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "out.pt", weights_only=False)["last"]
    own = found["x._extra_state"]
    assert (own.held.tolist(), own.state) == ([7.0] * 4, {"n": 3})
    assert torch.equal(found["w"], W)


def test_one_state_dict_at_two_places_that_becomes_two(tmp_path: Path) -> None:
    shared = state()
    checkpoint = read(str(saved(tmp_path, {"model": shared, "best": shared})))
    found = written(tmp_path, with_sections(checkpoint, model=prefixed("a."), best=prefixed("b.")))
    assert [list(found[name]) for name in ("model", "best")] == [["a.weight", "a.bias"], ["b.weight", "b.bias"]]

    def versions(section: Section, number: int) -> Section:
        return replace(prefixed("a.")(section), modules={"": {"version": number}})

    both = with_sections(checkpoint, model=lambda s: versions(s, 1), best=lambda s: versions(s, 2))
    found = written(tmp_path, both)
    assert [dict(found[name]._metadata) for name in ("model", "best")] == [{"": {"version": 1}}, {"": {"version": 2}}]

    def swapped(section: Section) -> Section:
        weight, bias = prefixed("a.")(section).tensors
        return replace(section, tensors=(replace(weight, key=bias.key), replace(bias, key=weight.key)))

    def turned(section: Section) -> Section:
        weight, bias = prefixed("a.")(section).tensors
        return replace(section, tensors=(replace(bias, key=bias.key), replace(weight, key=weight.key)))

    found = written(tmp_path, with_sections(checkpoint, model=swapped, best=turned))
    assert [[(key, value.dim()) for key, value in found[name].items()] for name in ("model", "best")] == [
        [("a.bias", 2), ("a.weight", 1)],
        [("a.bias", 1), ("a.weight", 2)],
    ]


def test_what_holds_two_that_become_others_at_each_of_its_places(tmp_path: Path) -> None:
    held = [{"w": W, "v": V}]
    checkpoint = read(str(saved(tmp_path, {"last": held, "best": held})))
    changed = {"last.0": prefixed("a."), "best.0": prefixed("b.")}
    found = written(tmp_path, with_sections(checkpoint, **changed))
    assert [list(found[name][0]) for name in ("last", "best")] == [["a.w", "a.v"], ["b.w", "b.v"]]


def test_what_a_state_dict_says_of_itself_stays_without_its_versions(tmp_path: Path) -> None:
    own = state()
    own.note = "own"
    checkpoint = read(str(saved(tmp_path, {"m": own, "n": state()})))
    found = written(tmp_path, with_sections(checkpoint, **dict.fromkeys("mn", lambda s: replace(s, modules=None))))
    assert [vars(found[name]) for name in "mn"] == [{"note": "own"}, {}]
    plain = OrderedDict(w=W)
    vars(plain)["note"] = "own"
    checkpoint = read(str(saved(tmp_path, plain)))
    assert checkpoint.sections[0].modules is None
    found = written(tmp_path, with_sections(checkpoint, **{"": prefixed("a.")}))
    assert (list(found), vars(found)) == (["a.w"], {"note": "own"})
