"""Who may read what is written, for every mode of the sources: no more than could read all of them."""

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
def masked(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def made(folder: Path, name: str, mode: int) -> Path:
    (folder / name).touch()
    (folder / name).chmod(mode)
    return folder / name


def settled(folder: Path, place: Path, sources: list[Path]) -> int:
    """The bits of a new file that is to be at the place."""
    new = made(folder, "new", 0o600)
    with open(new, "rb") as file:
        syscalls.set_mode(file.fileno(), place, map(str, sources))
    return stat.S_IMODE(new.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
def test_a_new_file_has_the_bits_that_the_umask_and_all_sources_leave(tmp_path: Path, umask: int) -> None:
    for one, other in product(MODES, MODES):
        sources = [made(tmp_path, "one", one), made(tmp_path, "other", other)]
        with masked(umask):
            found = settled(tmp_path, tmp_path / "gone", sources)
            assert syscalls.umask() == syscalls.umask() == umask
        assert found == 0o666 & ~umask & (one & other | 0o600)
    with masked(umask):
        assert settled(tmp_path, tmp_path / "gone", [tmp_path / "no source"]) == 0o666 & ~umask


def test_a_replaced_file_keeps_its_bits_as_far_as_the_sources_have_them(tmp_path: Path) -> None:
    for old, source in product(MODES, MODES):
        place = made(tmp_path, "place", old)
        assert settled(tmp_path, place, [made(tmp_path, "source", source)]) == old & (source | 0o700 | _look(source))


def _look(source: int) -> int:
    return (source & 0o444) >> 2


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_who_may_read_no_source_does_not_look_into_the_folder(tmp_path: Path, umask: int) -> None:
    for one, inherited in product(MODES, (0, stat.S_ISGID)):
        folder = tmp_path / f"{one:o}-{inherited}"
        folder.mkdir()
        folder.chmod(0o700 | inherited)
        with masked(umask):
            syscalls.set_folder_mode(folder, [str(made(tmp_path, "source", one))])
        bits = folder.stat().st_mode
        assert stat.S_IMODE(bits) == 0o700 | (one | _look(one)) & 0o777 & ~umask | inherited


@pytest.mark.parametrize("bits", [0o750, 0o700, 0o755])
def test_a_folder_as_the_source_is_asked_for_its_own_bits(tmp_path: Path, bits: int) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source").chmod(bits)
    with masked(0):
        assert settled(tmp_path, tmp_path / "gone", [tmp_path / "source"]) == 0o666 & (bits | 0o600)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can make files of others")
def test_a_group_that_is_not_the_sources_own_may_do_what_all_others_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in MODES:
        source = made(tmp_path, "source", mode)
        os.chown(source, -1, 12_345)
        with masked(0):
            assert settled(tmp_path, tmp_path / "gone", [source]) == 0o666 & (mode | 0o600)
            assert (tmp_path / "new").stat().st_gid == 12_345
            os.chown(tmp_path / "new", -1, 0)
            with monkeypatch.context() as unable:
                unable.setattr(os, "fchown", _refused)
                found = settled(tmp_path, tmp_path / "gone", [source])
        assert found == 0o600 | mode & 0o006 | (mode & 0o006) << 3 & mode


def _refused(*_: object) -> None:
    raise PermissionError
