"""The same tree of names below different modules, with transposed matrices, and with two possible
prefixes.
"""

from __future__ import annotations

import pytest

from ckpttool.naming.evidence import SideTensors, Tensor
from ckpttool.naming.pairing import infer
from ckpttool.naming.shapes import fit
from ckpttool.naming.vocabulary import inserted

Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("left", "right", "segment"),
    [
        ("a.w", "a.b.w", "b"),
        ("a.w", "b.a.w", "b"),
        ("a.w", "a.w.b", "b"),
        ("a.a.w", "a.w", "a"),
        ("a.w", "a.w", ""),
        ("a.w", "a.b.c.w", ""),
        ("a.w", "b.c.w", ""),
    ],
)
def test_an_inserted_segment_is_found(left: str, right: str, segment: str) -> None:
    first, second = tuple(left.split(".")), tuple(right.split("."))
    assert inserted(first, second) == inserted(second, first) == segment


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (3, 2), True),
        ((2, 3), (3, 3), False),
        ((2, 3, 4), (2, 3, 4), True),
        ((2, 3, 4), (4, 3, 2), False),  # only matrices may be transposed
        ((2,), (3,), False),
        ((), (), True),
    ],
)
def test_shapes_fit_if_equal_or_transposed(
    left: tuple[int, ...], right: tuple[int, ...], expected: bool
) -> None:
    assert fit(*(Tensor("w", "float32", shape) for shape in (left, right))) == expected


def side(shapes: Shapes) -> SideTensors:
    return SideTensors(tuple(Tensor(key, "float32", shape) for key, shape in shapes.items()))


def test_a_tree_below_another_module_is_paired_with_a_transposed_matrix() -> None:
    """Without a bias, only the names show it."""
    left: Shapes = {
        "enc.a.weight": (3, 4),
        "enc.b.weight": (5, 6),
        "enc.c.weight": (2, 2),
        "head.weight": (9, 9),
    }
    right: Shapes = {
        "net.body.a.weight": (3, 4),
        "net.body.b.weight": (6, 5),
        "net.body.c.weight": (2, 2),
    }
    result = infer(side(left), side(right))
    assert {(pair.left[0], pair.right[0], pair.transposed) for pair in result.pairs} == {
        (f"enc.{name}.weight", f"net.body.{name}.weight", "left" if name == "b" else "")
        for name in "abc"
    }
    assert {pair.evidence for pair in result.pairs} == {"the same name below `enc` and `net.body`"}


def test_two_equally_good_trees_are_not_paired() -> None:
    """Two encoders match equally well, until a tensor of only one of them decides."""
    left: Shapes = {
        f"{name}.{part}.weight": (3, 4) for name in ("left", "right") for part in ("a", "b")
    }
    right: Shapes = {f"net.{part}.weight": (3, 4) for part in ("a", "b")}
    assert infer(side(left), side(right)).pairs == ()
    extended = infer(
        side({**left, "right.c.weight": (7, 7)}), side({**right, "net.c.weight": (7, 7)})
    )
    assert {(pair.left[0], pair.right[0]) for pair in extended.pairs} == {
        (f"right.{part}.weight", f"net.{part}.weight") for part in "abc"
    }
