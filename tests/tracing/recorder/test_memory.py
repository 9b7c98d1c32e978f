"""The geometry of tensors in a storage, equal tensors, and free memory."""

from __future__ import annotations

import os

import pytest
import torch

import loading_zoo
from ckpttool.tracing import instances
from ckpttool.tracing.instances import same
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


def test_same_compares_the_parts_of_tensors() -> None:
    sparse = torch.eye(2).to_sparse()
    assert same(sparse, torch.eye(2).to_sparse())
    assert not same(sparse, (torch.eye(2) * 2).to_sparse())
    assert not same(sparse, torch.ones(2, 2).to_sparse())
    assert not same(sparse, torch.eye(2))
    assert same(
        loading_zoo.Packed(torch.ones(2, 2), torch.ones(2)),
        loading_zoo.Packed(torch.ones(2, 2), torch.ones(2)),
    )
    quantized = [
        torch.quantize_per_tensor(torch.ones(2) * one, 0.5, 0, torch.qint8) for one in (1, 1, 2)
    ]
    assert same(quantized[0], quantized[1])
    assert not same(quantized[0], quantized[2])


def test_a_platform_that_does_not_tell_its_memory_has_4_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*args: object) -> int:
        raise OSError

    assert instances.memory_available() > 1 << 20
    monkeypatch.setattr("builtins.open", unknown)
    monkeypatch.setattr(os, "sysconf", unknown)
    assert instances.memory_available() == 4 << 30
