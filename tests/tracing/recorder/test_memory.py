"""The geometry of tensors in a storage: the same elements have the same geometry for any
strides.
"""

from __future__ import annotations

import pytest
import torch

from ckpttool.tracing.memory import geometry


@pytest.mark.parametrize("stride", [(2, 1), (2, 7), (2, 0)])
def test_the_stride_of_a_dimension_of_one_element_does_not_matter(stride: tuple[int, int]) -> None:
    x = torch.arange(6.0)
    assert geometry(x.as_strided((3, 1), stride)) == geometry(x.view(3, 2)[:, :1])
    assert geometry(x.as_strided((3, 1), stride)) != geometry(x.view(2, 3)[:, :1].expand(2, 1))


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 2), (2, 1)), ((3, 2), (0, 1)), ((2, 3), (1, 1)), ((2, 3), (1, 2)), ((1, 3), (0, 1)),
                        ((2, 2), (3, 0)), ((2, 2), (3, 1)), ((2, 2), (1, 1)), ((2, 3), (3, 1)), ((0, 3), (3, 1))]
)  # fmt: skip
def test_overlapping_elements_are_detected(shape: tuple[int, int], stride: tuple[int, int]) -> None:
    x = torch.arange(20).as_strided(shape, stride, 5)
    assert geometry(x).overlaps_itself == (x.unique().numel() < x.numel())
    extent = int(x.max() - x.min()) + 1 if x.numel() else 0
    assert geometry(x).is_dense == (extent == x.numel() == x.unique().numel())
