"""The same tree of names below other modules, with transposed matrices in it, and what two prefixes explain alike."""

from __future__ import annotations

import pytest

from ckpttool.naming.evidence import Side, Tensor, fit, inserted
from ckpttool.naming.pairing import infer

Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("one", "other", "segment"),
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
def test_the_inserted_segment(one: str, other: str, segment: str) -> None:
    left, right = tuple(one.split(".")), tuple(other.split("."))
    assert inserted(left, right) == inserted(right, left) == segment


@pytest.mark.parametrize(
    ("left", "right", "fits"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (3, 2), True),
        ((2, 3), (3, 3), False),
        ((2, 3, 4), (2, 3, 4), True),
        ((2, 3, 4), (4, 3, 2), False),  # only matrices are kept transposed
        ((2,), (3,), False),
        ((), (), True),
    ],
)
def test_shapes_that_fit(left: tuple[int, ...], right: tuple[int, ...], fits: bool) -> None:
    assert fit(*(Tensor("w", "float32", shape) for shape in (left, right))) == fits


def side(shapes: Shapes) -> Side:
    return Side(tuple(Tensor(key, "float32", shape) for key, shape in shapes.items()))


def test_a_tree_below_another_module_with_one_matrix_turned() -> None:
    """No bias shows it; the names do."""
    left: Shapes = {"enc.a.weight": (3, 4), "enc.b.weight": (5, 6), "enc.c.weight": (2, 2), "head.weight": (9, 9)}
    right: Shapes = {"net.body.a.weight": (3, 4), "net.body.b.weight": (6, 5), "net.body.c.weight": (2, 2)}
    found = infer(side(left), side(right))
    assert {(pair.left[0], pair.right[0], pair.transposed) for pair in found.pairs} == {
        (f"enc.{name}.weight", f"net.body.{name}.weight", "left" if name == "b" else "") for name in "abc"
    }
    assert {pair.evidence for pair in found.pairs} == {"the same name below `enc` and `net.body`"}


def test_two_equally_good_trees_are_not_paired() -> None:
    """Either of two encoders could be the one; what only one of them has tells them apart."""
    one: Shapes = {f"{name}.{part}.weight": (3, 4) for name in ("left", "right") for part in ("a", "b")}
    other: Shapes = {f"net.{part}.weight": (3, 4) for part in ("a", "b")}
    assert infer(side(one), side(other)).pairs == ()
    more = infer(side({**one, "right.c.weight": (7, 7)}), side({**other, "net.c.weight": (7, 7)}))
    assert {(pair.left[0], pair.right[0]) for pair in more.pairs} == {
        (f"right.{part}.weight", f"net.{part}.weight") for part in "abc"
    }
