"""Offsets of storages computed from the directory alone, with torch's archives as the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttool.formats.zip_read import U32, data_of, is_storage, read_archive


@pytest.mark.parametrize("sizes", [[1, 0, 33, 64, 5000], [U32 - 1, 7], [U32, 7], [1 << 31, 1 << 31, U32 + 70, 7]])
def test_computed_offsets_match_torch(tmp_path: Path, sizes: list[int]) -> None:
    """Also beyond four gibibytes: large storages are sparse."""
    with torch.serialization.skip_data():
        torch.save({str(n): torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}, tmp_path / "a.pt")
    archive = read_archive(str(tmp_path / "a.pt"))
    storages = [record for record in archive.records if is_storage(record.name.encode()) and record.nbytes]
    assert len(storages) == sum(size > 0 for size in sizes)
    for record in storages:
        place = (record.name.encode(), record.start, record.nbytes)
        assert data_of(*place, record.end) == record.data
        assert data_of(*place, record.end + 1) is None
        assert data_of(*place, record.end - 1) is None


def test_an_offset_of_four_gibibytes_is_computed(tmp_path: Path) -> None:
    """From this offset on, the header stores it in 64 bits."""
    sizes = [1 << 31, 7]
    for _ in range(2):
        with torch.serialization.skip_data():
            torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], tmp_path / "a.pt")
        first, record = (r for r in read_archive(str(tmp_path / "a.pt")).records if is_storage(r.name.encode()))
        sizes = [U32 - 16 - first.data, 7]
    assert record.start == U32
    assert data_of(record.name.encode(), record.start, record.nbytes, record.end) == record.data


@pytest.mark.parametrize("length", range(1, 66))
def test_offsets_are_computed_for_names_of_any_length(tmp_path: Path, length: int) -> None:
    """The name of each record includes the archive's name, so its length covers every alignment of the data."""
    path = tmp_path / f"{'n' * length}.pt"
    torch.save({"w": torch.ones(3)}, path)
    (record,) = (one for one in read_archive(str(path)).records if is_storage(one.name.encode()))
    assert data_of(record.name.encode(), record.start, record.nbytes, record.end) == record.data
