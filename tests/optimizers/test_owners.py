"""Owners of ids if the file does not name them: the order of the model, if exactly one assignment fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from ckpttool.core.checkpoint import Section, Span, Storage, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Ref
from ckpttool.core.names import Names, RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup
from ckpttool.optimizers.identify import in_order_of, own_names, owners, same_key_order, saved_order

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2))
STORAGE = Storage(Span("o.pt", 0, 64))


def model(shapes: Sequence[Shape], trainable: Sequence[bool]) -> Names:
    runtime = (
        RuntimeTensor(f"p{at}", f"p{at}", "parameter", True, own, "float32", shape, None)
        for at, (shape, own) in enumerate(zip(shapes, trainable))
    )
    keys = (SerializedKey(f"p{at}", "float32", shape, Ref(f"p{at}"), None) for at, shape in enumerate(shapes))
    return Names("net.py:Net", "2.6", tuple(runtime), tuple(keys), ())


def keyed(keys: str, shapes: Sequence[Shape] = ()) -> Section:
    """A state dict next to the optimizer, with the keys ``p`` and these digits."""
    sizes = shapes or [(2,)] * len(keys)
    entries = (
        TensorEntry(f"p{key}", "float32", shape, (1,), 0, Storage(STORAGE.data)) for key, shape in zip(keys, sizes)
    )
    return Section("model", "state_dict", tuple(entries))


def optimizer(groups: Sequence[Sequence[int]], shapes: Sequence[Shape | None]) -> OptimizerState:
    """Groups of ids, and a moment of its shape for each that has one."""
    moments: dict[Param, dict[str, TensorEntry]] = {
        number: {"exp_avg": TensorEntry("", "float32", shape, (1,) * len(shape), 0, STORAGE)}
        for number, shape in enumerate(shapes)
        if shape is not None
    }
    return OptimizerState(ID, tuple(ParamGroup(tuple(group), {}) for group in groups), moments)


def deals(sizes: Sequence[int], order: Sequence[Shape], moments: Sequence[Shape | None]) -> list[dict[int, int]]:
    """Every way to give the parameters in their order to groups of these sizes that the moments allow: id -> place."""
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    found = []
    for homes in product(range(len(sizes)), repeat=len(order)):
        if [homes.count(group) for group in range(len(sizes))] == list(sizes):
            deal = {starts[home] + homes[:at].count(home): at for at, home in enumerate(homes)}
            if all(moments[number] in (None, order[at]) for number, at in deal.items()):
                found.append(deal)
    return found


def test_ids_are_told_apart_exactly_where_one_order_alone_fits() -> None:
    ways = []
    for seed in range(400):
        chance = random.Random(seed)
        shapes = [chance.choice(SHAPES) for _ in range(chance.randint(2, 6))]
        trainable = [chance.random() < 0.7 for _ in shapes]
        every = chance.random() < 0.5
        order = [at for at, own in enumerate(trainable) if own or every]
        if not order:
            continue
        homes = [chance.randrange(3) for _ in order]
        dealt = [at for group in range(3) for at, home in zip(order, homes) if home == group]
        if chance.random() < 0.4:
            chance.shuffle(dealt)
        moments = [shapes[at] if chance.random() < 0.8 else None for at in dealt]
        sizes = [homes.count(group) for group in range(3)]
        numbers = iter(range(len(order)))
        state = optimizer([[next(numbers) for _ in range(size)] for size in sizes], moments)
        possible = deals(sizes, [shapes[at] for at in order], moments)
        names = model(shapes, trainable)
        if len([size for size in sizes if size]) == 1:
            found = owners(state, names, "optimizer")
            assert found.names == {number: f"p{at}" for number, at in enumerate(order)}
            assert (found.doubt is None) == bool(possible), seed
            assert found.assumed
            assert "this answer assumes" in found.rests_on("optimizer")
            continue
        ways.append(min(len(possible), 2))
        if len(possible) == 1:
            found = owners(state, names, "optimizer").settled("optimizer")
            assert found.names == {number: f"p{order[at]}" for number, at in possible[0].items()}, seed
            continue
        with pytest.raises(Refused, match="cannot be told apart" if possible else "fit no order"):
            owners(state, names, "optimizer")
    assert min(map(ways.count, range(3))) > 20


def test_parameters_of_another_number_are_none_of_the_model() -> None:
    names = model([(2,)] * 4, [True, True, False, True])
    for count in (2, 5):
        with pytest.raises(Refused, match=f"has {count} parameters, and the model 4, 3 of them trainable"):
            owners(optimizer([range(count)], [None] * count), names, "optimizer")


def named(*names: str, shapes: Sequence[Shape] = ()) -> OptimizerState:
    """One group whose file calls its parameters so."""
    state = optimizer([range(len(names))], shapes or [None] * len(names))
    return OptimizerState(ID, (ParamGroup(state.params, {PARAM_NAMES: list(names)}),), state.state)


def test_names_in_the_file_are_the_models_or_refused() -> None:
    names = model([(2,), (3,), (2,)], [True] * 3)
    found = owners(named("p2", "module.p0", shapes=[(2,), (2,)]), names, "optimizer")
    assert (found.names, found.evidence, found.assumed, found.doubt) == ({0: "p2", 1: "p0"}, "param_names", False, None)
    with pytest.raises(Refused, match="optimizer holds 2 parameters that the model lacks") as refused:
        owners(named("p0", "x", "y"), names, "optimizer")
    assert list(map(str, refused.value.problems)) == [
        "not a parameter of net.py:Net @ x",
        "not a parameter of net.py:Net @ y",
    ]
    for which in (names, None):
        with pytest.raises(Refused, match="several parameters have one name") as refused:
            owners(named("p0", "p1", "p0"), which, "optimizer")
        assert list(map(str, refused.value.problems)) == ["the name of more than one parameter @ p0"]


def test_names_that_the_shapes_speak_against_are_doubted() -> None:
    names = model([(2,), (3,), (2,)], [True] * 3)
    doubt = owners(named("p0", "p1", "p2", shapes=[(2,), (2,), (3,)]), names, "optimizer").doubt
    assert doubt is not None
    assert list(map(str, doubt.problems)) == [
        "cannot be p1: exp_avg is [2], the parameter [3] @ 1",
        "cannot be p2: exp_avg is [3], the parameter [2] @ 2",
    ]
    assert doubt.hint == "is it another model, or another version of it?"
    assert not doubt.by_another
    moments = optimizer([range(3)], [(2,), (2,), (2,)]).state
    own: dict[Param, Any] = {f"p{at}": state for at, state in moments.items()}
    by_name = OptimizerState(FQN, (ParamGroup(("p0", "p1", "p2"), {}),), own)
    with pytest.raises(Refused, match="the shapes in its state contradict its names") as refused:
        owners(by_name, names, "optimizer")
    assert list(map(str, refused.value.problems)) == ["exp_avg is [2], the parameter [3] @ p1"]


@pytest.mark.parametrize(
    ("groups", "keys", "assumed", "doubted"),
    [
        (["012"], [], True, False),
        (["012"], ["012"], False, False),  # the model's keys bear it out
        (["012"], ["01"], True, False),  # not all of them
        (["012"], ["021"], True, True),
        (["012"], ["012", "210"], True, True),  # one that speaks against it is enough
        (["012"], ["20"], True, True),
        (["01", "2"], ["012"], False, False),
    ],
)
def test_the_order_of_the_keys_beside_it(groups: list[str], keys: list[str], assumed: bool, doubted: bool) -> None:
    names = model([(2,), (2,), (2, 2)], [True] * 3)
    state = optimizer([[int(at) for at in group] for group in groups], [(2,), (2,), (2, 2)])
    beside = [keyed(key, [names.runtime[int(at)].shape or () for at in key]) for key in keys]
    found = owners(state, names, "optimizer", beside)
    assert (found.doubt is not None) == doubted
    if found.doubt is None:
        assert found.assumed == assumed
        assert ("the file lists the model's keys in this order" in found.rests_on("optimizer")) != assumed
    else:
        assert found.doubt.by_another
        wrong = next(at for at, key in enumerate(keys[-1]) if key != str(at) and key != sorted(keys[-1])[at])
        assert any(problem.key == f"p{sorted(keys[-1])[wrong]}" for problem in found.doubt.problems)


def test_of_no_state_only_the_groups_can_be_wrong() -> None:
    """One group of parameters without state is the same in any order of the model's keys; two need not be."""
    names = model([(2,)] * 3, [True] * 3)
    assert owners(optimizer([range(3)], [None] * 3), names, "optimizer", [keyed("210")]).doubt is None
    assert owners(optimizer([range(3)], [None, (2,), None]), names, "optimizer", [keyed("210")]).doubt is not None
    with pytest.raises(Refused, match="cannot be told apart; its ids may not be this model's"):
        owners(optimizer([[0], [1, 2]], [None] * 3), names, "optimizer", [keyed("210")])


def test_what_the_file_itself_calls_them() -> None:
    """Ids of one group get the keys of the state dict, if there are as many and all shapes fit."""
    shapes: list[Shape] = [(2,), (3,), (2,)]
    state = optimizer([range(3)], [(2,), None, (2,)])
    found = own_names(state, [keyed("01", shapes), keyed("012", shapes)])
    assert found is not None
    assert (found.names, found.assumed) == ({0: "p0", 1: "p1", 2: "p2"}, True)
    for beside in ([], [keyed("01", shapes)], [keyed("0123", [*shapes, (2,)])], [keyed("012", [(2,), (2,), (3,)])]):
        assert own_names(state, beside) is None
    assert own_names(optimizer([[0], [1, 2]], [None] * 3), [keyed("012", shapes)]) is None
    names = own_names(named("x", "y"), [])
    assert names is not None
    assert names.names == {0: "x", 1: "y"}


def test_a_file_may_name_serialized_keys() -> None:
    runtime = tuple(RuntimeTensor(f"r{at}", f"r{at}", "parameter", True, True, "float32", (2,), None) for at in "01")
    keys = tuple(SerializedKey(f"k{at}", "float32", (2,), Ref(f"r{at}"), None) for at in "01")
    found = owners(OptimizerState(FQN, (ParamGroup(("k0", "r1"), {}),), {}), Names("M", "2.6", runtime, keys, ()), "o")
    assert found.names == {"k0": "r0", "r1": "r1"}


def test_of_a_parameter_without_a_shape_nothing_speaks_against_it() -> None:
    lazy = tuple(RuntimeTensor("p", "p", "parameter", True, True, "float32", None, None) for _ in "0")
    found = owners(optimizer([[0]], [(2, 3)]), Names("M", "2.6", lazy, (), ()), "o")
    assert (found.names, found.doubt) == ({0: "p"}, None)


def test_too_many_ways_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    state, names = optimizer([[0], [1], [2]], SHAPES), model(SHAPES, [True] * 3)
    assert owners(state, names, "o").names == {0: "p0", 1: "p1", 2: "p2"}
    monkeypatch.setattr("ckpttool.optimizers.identify._MOST_STATES", 0)
    with pytest.raises(Refused, match="its ids cannot be told apart"):
        owners(state, names, "o")


def test_tied_keys_beside_ids_are_one_parameter() -> None:
    beside = keyed("01")
    tied = replace(beside, tensors=(*beside.tensors, replace(beside.tensors[0], key="again")))
    found = own_names(optimizer([[0, 1]], [(2,), (2,)]), [tied])
    assert found is not None
    assert found.names == {0: "p0", 1: "p1"}


def test_no_parameters_are_in_no_order() -> None:
    assert saved_order([keyed("01")], model(SHAPES, [True] * 3), ()) is None


def test_an_order_in_either_form_and_of_keys_that_are_none() -> None:
    runtime = tuple(RuntimeTensor(f"r{at}", f"r{at}", "parameter", True, True, "float32", (2,), None) for at in "01")
    keys = tuple(SerializedKey(f"p{at}", "float32", (2,), Ref(f"r{at}"), None) for at in "01")
    constant = SerializedKey("p2", "float32", (2,), None, None)
    names = Names("M", "2.6", runtime, (*keys, constant), ())
    for section in (keyed("210"), _called("r", keyed("10"))):
        moved = saved_order([section], names, {"r0", "r1"})
        assert list(map(str, moved or ())) == [
            "the file's model has r1 instead @ r0",
            "the file's model has r0 instead @ r1",
        ]
        entries = in_order_of(section, names).tensors
        assert [entry.key for entry in entries] == sorted(section.by_key())


def _called(prefix: str, section: Section) -> Section:
    return replace(section, tensors=tuple(replace(e, key=prefix + e.key[1:]) for e in section.tensors))


# Two files


@pytest.mark.parametrize("right", ["".join(order) for order in permutations("012")])
def test_two_files_list_their_common_keys_in_one_order_or_not(right: str) -> None:
    left, other = [keyed("013")], [keyed(right)]
    in_order = right.index("0") < right.index("1")
    assert same_key_order(left, other) is in_order
    assert same_key_order(left, [keyed("01"), *other]) is in_order  # one of several that differs is enough
    assert same_key_order(left, [*other, keyed("01")]) is in_order


def test_one_common_key_shows_no_order() -> None:
    for right in ([], [keyed("")], [keyed("20")]):
        assert same_key_order([keyed("01")], right) is None
