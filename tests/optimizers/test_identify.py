"""Parameters of ids that the file does not name: the order of the model decides if only one
assignment fits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from ckpttool import Names, Refused
from ckpttool.core.checkpoint import Section, Span, Storage, TensorEntry
from ckpttool.core.expression import Ref
from ckpttool.core.names import RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup
from ckpttool.optimizers.identify import identify_params, names_without_model
from ckpttool.optimizers.key_order import compare_key_order, same_key_order, sorted_like_model

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2))
STORAGE = Storage(Span("o.pt", 0, 64))


def model(shapes: Sequence[Shape], trainable: Sequence[bool]) -> Names:
    runtime = (
        RuntimeTensor(f"p{at}", f"p{at}", "parameter", True, is_trainable, "float32", shape, None)
        for at, (shape, is_trainable) in enumerate(zip(shapes, trainable))
    )
    keys = (
        SerializedKey(f"p{at}", "float32", shape, Ref(f"p{at}"), None)
        for at, shape in enumerate(shapes)
    )
    return Names("net.py:Net", "2.6", tuple(runtime), tuple(keys), ())


def state_dict_section(keys: str, shapes: Sequence[Shape] = ()) -> Section:
    """Return a state_dict section with a key ``p0``, ``p1``, ... for each digit."""
    sizes = shapes or [(2,)] * len(keys)
    entries = (
        TensorEntry(f"p{key}", "float32", shape, (1,), 0, Storage(STORAGE.data))
        for key, shape in zip(keys, sizes)
    )
    return Section("model", "state_dict", tuple(entries))


def optimizer(groups: Sequence[Sequence[int]], shapes: Sequence[Shape | None]) -> OptimizerState:
    """Return groups of ids, with a moment for each id that has a shape."""
    moments: dict[Param, dict[str, TensorEntry]] = {
        number: {"exp_avg": TensorEntry("", "float32", shape, (1,) * len(shape), 0, STORAGE)}
        for number, shape in enumerate(shapes)
        if shape is not None
    }
    return OptimizerState(ID, tuple(ParamGroup(tuple(group), {}) for group in groups), moments)


def possible_assignments(
    sizes: Sequence[int], order: Sequence[Shape], moments: Sequence[Shape | None]
) -> list[dict[int, int]]:
    """Return each id -> position that assigns the ordered parameters to the groups and fits the
    moments.
    """
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    result = []
    for group_of in product(range(len(sizes)), repeat=len(order)):
        if [group_of.count(group) for group in range(len(sizes))] == list(sizes):
            assignment = {
                starts[group] + group_of[:at].count(group): at for at, group in enumerate(group_of)
            }
            if all(moments[number] in (None, order[at]) for number, at in assignment.items()):
                result.append(assignment)
    return result


def test_ids_are_assigned_only_if_exactly_one_assignment_fits() -> None:
    counts = []
    for seed in range(400):
        rng = random.Random(seed)
        shapes = [rng.choice(SHAPES) for _ in range(rng.randint(2, 6))]
        trainable = [rng.random() < 0.7 for _ in shapes]
        all_params = rng.random() < 0.5
        order = [at for at, is_trainable in enumerate(trainable) if is_trainable or all_params]
        if not order:
            continue
        group_of = [rng.randrange(3) for _ in order]
        assigned = [
            at for group in range(3) for at, own_group in zip(order, group_of) if own_group == group
        ]
        if rng.random() < 0.4:
            rng.shuffle(assigned)
        moments = [shapes[at] if rng.random() < 0.8 else None for at in assigned]
        sizes = [group_of.count(group) for group in range(3)]
        numbers = iter(range(len(order)))
        state = optimizer([[next(numbers) for _ in range(size)] for size in sizes], moments)
        possible = possible_assignments(sizes, [shapes[at] for at in order], moments)
        names = model(shapes, trainable)
        if len([size for size in sizes if size]) == 1:
            result = identify_params(state, names, "optimizer")
            assert result.names == {number: f"p{at}" for number, at in enumerate(order)}
            assert (result.doubt is None) == bool(possible), seed
            assert result.is_assumed
            assert "this answer assumes" in result.rests_on("optimizer")
            continue
        counts.append(min(len(possible), 2))
        if len(possible) == 1:
            result = identify_params(state, names, "optimizer").without_doubt("optimizer")
            assert result.names == {
                number: f"p{order[at]}" for number, at in possible[0].items()
            }, seed
            continue
        with pytest.raises(Refused, match="cannot be told apart" if possible else "fit no order"):
            identify_params(state, names, "optimizer")
    assert min(map(counts.count, range(3))) > 20


def test_another_number_of_parameters_is_refused() -> None:
    names = model([(2,)] * 4, [True, True, False, True])
    for count in (2, 5):
        with pytest.raises(
            Refused, match=f"has {count} parameters, and the model 4, 3 of them trainable"
        ):
            identify_params(optimizer([range(count)], [None] * count), names, "optimizer")


def named_optimizer(*names: str, shapes: Sequence[Shape] = ()) -> OptimizerState:
    """Return one group of ids with these names in the file."""
    state = optimizer([range(len(names))], shapes or [None] * len(names))
    return OptimizerState(ID, (ParamGroup(state.params, {PARAM_NAMES: list(names)}),), state.state)


def test_names_in_the_file_must_be_names_of_the_model() -> None:
    names = model([(2,), (3,), (2,)], [True] * 3)
    result = identify_params(
        named_optimizer("p2", "module.p0", shapes=[(2,), (2,)]), names, "optimizer"
    )
    assert (result.names, result.evidence, result.is_assumed, result.doubt) == (
        {0: "p2", 1: "p0"},
        "param_names",
        False,
        None,
    )
    with pytest.raises(
        Refused, match="optimizer: 2 names in the file that the model does not have"
    ) as refused:
        identify_params(named_optimizer("p0", "x", "y"), names, "optimizer")
    assert list(map(str, refused.value.problems)) == [
        "not a parameter of net.py:Net @ x",
        "not a parameter of net.py:Net @ y",
    ]
    for names_or_none in (names, None):
        with pytest.raises(Refused, match="several parameters have one name") as refused:
            identify_params(named_optimizer("p0", "p1", "p0"), names_or_none, "optimizer")
        assert list(map(str, refused.value.problems)) == [
            "the name of more than one parameter @ p0"
        ]


def test_names_that_contradict_the_shapes_are_doubted() -> None:
    names = model([(2,), (3,), (2,)], [True] * 3)
    doubt = identify_params(
        named_optimizer("p0", "p1", "p2", shapes=[(2,), (2,), (3,)]), names, "optimizer"
    ).doubt
    assert doubt is not None
    assert list(map(str, doubt.problems)) == [
        "cannot be p1: exp_avg is [2], the parameter [3] @ 1",
        "cannot be p2: exp_avg is [3], the parameter [2] @ 2",
    ]
    assert doubt.hint == "is it another model, or another version of it?"
    assert not doubt.by_another
    moments = optimizer([range(3)], [(2,), (2,), (2,)]).state
    by_param: dict[Param, Any] = {f"p{at}": state for at, state in moments.items()}
    by_name = OptimizerState(FQN, (ParamGroup(("p0", "p1", "p2"), {}),), by_param)
    with pytest.raises(Refused, match="the shapes in its state contradict its names") as refused:
        identify_params(by_name, names, "optimizer")
    assert list(map(str, refused.value.problems)) == ["exp_avg is [2], the parameter [3] @ p1"]


@pytest.mark.parametrize(
    ("groups", "keys", "assumed", "is_doubted"),
    [
        (["012"], [], True, False),
        (["012"], ["012"], False, False),  # all keys confirm it
        (["012"], ["01"], True, False),  # a key is missing
        (["012"], ["021"], True, True),
        (["012"], ["012", "210"], True, True),  # one contradiction is enough
        (["012"], ["20"], True, True),
        (["01", "2"], ["012"], False, False),
    ],
)
def test_the_order_of_the_state_dict_keys_confirms_or_contradicts_the_ids(
    groups: list[str], keys: list[str], assumed: bool, is_doubted: bool
) -> None:
    names = model([(2,), (2,), (2, 2)], [True] * 3)
    state = optimizer([[int(at) for at in group] for group in groups], [(2,), (2,), (2, 2)])
    sections = [
        state_dict_section(key, [names.runtime[int(at)].shape or () for at in key]) for key in keys
    ]
    result = identify_params(state, names, "optimizer", sections)
    assert (result.doubt is not None) == is_doubted
    if result.doubt is None:
        assert result.is_assumed == assumed
        assert (
            "the file lists the model's keys in this order" in result.rests_on("optimizer")
        ) != assumed
    else:
        assert result.doubt.by_another
        changed = next(
            at for at, key in enumerate(keys[-1]) if key != str(at) and key != sorted(keys[-1])[at]
        )
        assert any(
            problem.key == f"p{sorted(keys[-1])[changed]}" for problem in result.doubt.problems
        )


def test_without_state_only_several_groups_can_be_ambiguous() -> None:
    """Any order of a single group without state is right, but not the order of two groups."""
    names = model([(2,)] * 3, [True] * 3)
    assert (
        identify_params(
            optimizer([range(3)], [None] * 3), names, "optimizer", [state_dict_section("210")]
        ).doubt
        is None
    )
    assert (
        identify_params(
            optimizer([range(3)], [None, (2,), None]),
            names,
            "optimizer",
            [state_dict_section("210")],
        ).doubt
        is not None
    )
    with pytest.raises(Refused, match="cannot be told apart; its ids may not be this model's"):
        identify_params(
            optimizer([[0], [1, 2]], [None] * 3), names, "optimizer", [state_dict_section("210")]
        )


def test_own_names_come_from_the_keys_or_names_in_the_file() -> None:
    """Ids of one group get the keys of the state_dict if the number and all shapes match."""
    shapes: list[Shape] = [(2,), (3,), (2,)]
    state = optimizer([range(3)], [(2,), None, (2,)])
    result = names_without_model(
        state, [state_dict_section("01", shapes), state_dict_section("012", shapes)]
    )
    assert result is not None
    assert (result.names, result.is_assumed) == ({0: "p0", 1: "p1", 2: "p2"}, True)
    for sections in (
        [],
        [state_dict_section("01", shapes)],
        [state_dict_section("0123", [*shapes, (2,)])],
        [state_dict_section("012", [(2,), (2,), (3,)])],
    ):
        assert names_without_model(state, sections) is None
    assert (
        names_without_model(
            optimizer([[0], [1, 2]], [None] * 3), [state_dict_section("012", shapes)]
        )
        is None
    )
    names = names_without_model(named_optimizer("x", "y"), [])
    assert names is not None
    assert names.names == {0: "x", 1: "y"}


def test_a_file_may_name_serialized_keys() -> None:
    runtime = tuple(
        RuntimeTensor(f"r{at}", f"r{at}", "parameter", True, True, "float32", (2,), None)
        for at in "01"
    )
    keys = tuple(SerializedKey(f"k{at}", "float32", (2,), Ref(f"r{at}"), None) for at in "01")
    result = identify_params(
        OptimizerState(FQN, (ParamGroup(("k0", "r1"), {}),), {}),
        Names("M", "2.6", runtime, keys, ()),
        "o",
    )
    assert result.names == {"k0": "r0", "r1": "r1"}


def test_a_parameter_without_a_shape_fits_any_state() -> None:
    lazy = tuple(
        RuntimeTensor("p", "p", "parameter", True, True, "float32", None, None) for _ in "0"
    )
    result = identify_params(optimizer([[0]], [(2, 3)]), Names("M", "2.6", lazy, (), ()), "o")
    assert (result.names, result.doubt) == ({0: "p"}, None)


def test_too_many_assignments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state, names = optimizer([[0], [1], [2]], SHAPES), model(SHAPES, [True] * 3)
    assert identify_params(state, names, "o").names == {0: "p0", 1: "p1", 2: "p2"}
    monkeypatch.setattr("ckpttool.optimizers.identify._MOST_STATES", 0)
    with pytest.raises(Refused, match="its ids cannot be told apart"):
        identify_params(state, names, "o")


def test_tied_keys_count_as_one_parameter() -> None:
    sections = state_dict_section("01")
    tied = replace(sections, tensors=(*sections.tensors, replace(sections.tensors[0], key="again")))
    result = names_without_model(optimizer([[0, 1]], [(2,), (2,)]), [tied])
    assert result is not None
    assert result.names == {0: "p0", 1: "p1"}


def test_an_optimizer_without_parameters_has_no_order() -> None:
    key_order = compare_key_order([state_dict_section("01")], model(SHAPES, [True] * 3), ())
    assert not key_order.is_shown


def test_the_saved_order_is_found_for_runtime_names_and_serialized_keys() -> None:
    runtime = tuple(
        RuntimeTensor(f"r{at}", f"r{at}", "parameter", True, True, "float32", (2,), None)
        for at in "01"
    )
    keys = tuple(SerializedKey(f"p{at}", "float32", (2,), Ref(f"r{at}"), None) for at in "01")
    constant = SerializedKey("p2", "float32", (2,), None, None)
    names = Names("M", "2.6", runtime, (*keys, constant), ())
    for section in (state_dict_section("210"), _called("r", state_dict_section("10"))):
        key_order = compare_key_order([section], names, {"r0", "r1"})
        assert list(map(str, key_order.moved)) == [
            "the file's model has r1 instead @ r0",
            "the file's model has r0 instead @ r1",
        ]
        entries = sorted_like_model(section, names).tensors
        assert [entry.key for entry in entries] == sorted(section.by_key())


def _called(prefix: str, section: Section) -> Section:
    return replace(
        section, tensors=tuple(replace(e, key=prefix + e.key[1:]) for e in section.tensors)
    )


# Two files


@pytest.mark.parametrize("right", ["".join(order) for order in permutations("012")])
def test_the_order_of_common_keys_in_two_files_is_compared(right: str) -> None:
    left, other = [state_dict_section("013")], [state_dict_section(right)]
    in_order = right.index("0") < right.index("1")
    assert same_key_order(left, other) is in_order
    # one different position is enough
    assert same_key_order(left, [state_dict_section("01"), *other]) is in_order
    assert same_key_order(left, [*other, state_dict_section("01")]) is in_order


def test_a_single_common_key_does_not_show_the_order() -> None:
    for right in ([], [state_dict_section("")], [state_dict_section("20")]):
        assert same_key_order([state_dict_section("01")], right) is None
