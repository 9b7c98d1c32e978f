"""Permissions of outputs: nobody can read an output who cannot read all its sources."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from ckpttool.io import syscalls

MODES = (0o600, 0o640, 0o604, 0o644, 0o660, 0o666, 0o444, 0o755)


@contextmanager
def umask_set_to(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def file_with_mode(folder: Path, name: str, mode: int) -> Path:
    (folder / name).touch()
    (folder / name).chmod(mode)
    return folder / name


def mode_of_output(folder: Path, place: Path, sources: list[Path]) -> int:
    """Return the mode that a new file at `place` would get."""
    new = file_with_mode(folder, "new", 0o600)
    with open(new, "rb") as file:
        syscalls.set_mode(file.fileno(), place, map(str, sources))
    return stat.S_IMODE(new.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
def test_new_file_gets_the_common_bits_of_umask_and_sources(tmp_path: Path, umask: int) -> None:
    for one, other in product(MODES, MODES):
        sources = [file_with_mode(tmp_path, "one", one), file_with_mode(tmp_path, "other", other)]
        with umask_set_to(umask):
            mode = mode_of_output(tmp_path, tmp_path / "gone", sources)
            assert syscalls.umask() == syscalls.umask() == umask
        assert mode == 0o666 & ~umask & (one & other | 0o600)
    with umask_set_to(umask):
        assert (
            mode_of_output(tmp_path, tmp_path / "gone", [tmp_path / "no source"]) == 0o666 & ~umask
        )


def test_replaced_file_keeps_only_bits_that_the_sources_have(tmp_path: Path) -> None:
    for old, source in product(MODES, MODES):
        place = file_with_mode(tmp_path, "place", old)
        assert mode_of_output(
            tmp_path, place, [file_with_mode(tmp_path, "source", source)]
        ) == old & (source | 0o700 | _search_bits(source))


def _search_bits(source: int) -> int:
    return (source & 0o444) >> 2


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_new_folder_is_closed_to_users_who_cannot_read_the_sources(
    tmp_path: Path, umask: int
) -> None:
    for one, inherited in product(MODES, (0, stat.S_ISGID)):
        folder = tmp_path / f"{one:o}-{inherited}"
        folder.mkdir()
        folder.chmod(0o700 | inherited)
        with umask_set_to(umask):
            syscalls.set_folder_mode(folder, [str(file_with_mode(tmp_path, "source", one))])
        bits = folder.stat().st_mode
        assert stat.S_IMODE(bits) == 0o700 | (one | _search_bits(one)) & 0o777 & ~umask | inherited


@pytest.mark.parametrize("bits", [0o750, 0o700, 0o755])
def test_source_folder_uses_its_own_mode(tmp_path: Path, bits: int) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source").chmod(bits)
    with umask_set_to(0):
        assert mode_of_output(tmp_path, tmp_path / "gone", [tmp_path / "source"]) == 0o666 & (
            bits | 0o600
        )


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_group_other_than_the_sources_gets_the_bits_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in MODES:
        source = file_with_mode(tmp_path, "source", mode)
        os.chown(source, -1, 12_345)
        with umask_set_to(0):
            assert mode_of_output(tmp_path, tmp_path / "gone", [source]) == 0o666 & (mode | 0o600)
            assert (tmp_path / "new").stat().st_gid == 12_345
            os.chown(tmp_path / "new", -1, 0)
            with monkeypatch.context() as patched:
                patched.setattr(os, "fchown", _raise_permission_error)
                found = mode_of_output(tmp_path, tmp_path / "gone", [source])
        assert found == 0o600 | mode & 0o006 | (mode & 0o006) << 3 & mode


def _raise_permission_error(*_: object) -> None:
    raise PermissionError
