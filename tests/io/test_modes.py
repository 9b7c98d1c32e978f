"""Permissions of outputs: nobody can read an output who cannot read all its sources."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool

MODES = (0o600, 0o640, 0o604, 0o644, 0o660, 0o666, 0o444, 0o755)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        save_file({name: torch.ones(2)}, f"{name}.safetensors")


@contextmanager
def umask_set_to(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def mode_of_output(source: str, out: str = "out.safetensors") -> int:
    ckpttool.remap(source, out, rule="{x*} => a.{x*}", force=True, no_fsync=True)
    return mode_of(out)


def search_bits(mode: int) -> int:
    return (mode & 0o444) >> 2


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
def test_new_file_gets_the_common_bits_of_umask_and_sources(umask: int) -> None:
    for mode, other in product(MODES, MODES):
        Path("one.safetensors").chmod(mode)
        Path("other.safetensors").chmod(other)
        Path("out.safetensors").unlink(missing_ok=True)
        with umask_set_to(umask):
            ckpttool.remap(
                "one.safetensors",
                "out.safetensors",
                like={"one": torch.ones(2), "other": torch.ones(2)},
                fill_from=["other.safetensors"],
                no_fsync=True,
            )
            assert os.umask(umask) == umask
        assert mode_of("out.safetensors") == 0o666 & ~umask & (mode & other | 0o600)


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
def test_new_file_without_a_source_file_gets_the_bits_of_umask(umask: int) -> None:
    with umask_set_to(umask):
        ckpttool.convert({"w": torch.ones(2)}, "out.safetensors")
    assert mode_of("out.safetensors") == 0o666 & ~umask


def test_replaced_file_keeps_only_bits_that_the_sources_have() -> None:
    for old, source in product(MODES, MODES):
        Path("out.safetensors").touch()
        Path("out.safetensors").chmod(old)
        Path("one.safetensors").chmod(source)
        expected = old & (source | 0o700 | search_bits(source))
        assert mode_of_output("one.safetensors") == expected


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_new_folder_is_closed_to_users_who_cannot_read_the_sources(
    tmp_path: Path, umask: int
) -> None:
    for source, inherited in product(MODES, (0, stat.S_ISGID)):
        Path("one.safetensors").chmod(source)
        tmp_path.chmod(0o700 | inherited)
        with umask_set_to(umask):
            mode = mode_of_output("one.safetensors", "out.dcp")
        shutil.rmtree("out.dcp")
        assert mode == 0o700 | (source | search_bits(source)) & 0o777 & ~umask | inherited


@pytest.mark.parametrize("bits", [0o750, 0o700, 0o755])
def test_source_folder_uses_its_own_mode(bits: int) -> None:
    ckpttool.convert("one.safetensors", "in.dcp")
    for path in Path("in.dcp").iterdir():
        path.chmod(0o666)
    Path("in.dcp").chmod(bits)
    with umask_set_to(0):
        assert mode_of_output("in.dcp") == 0o666 & (bits | 0o600)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_group_other_than_the_sources_gets_the_bits_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    os.chown("one.safetensors", -1, 12_345)
    for mode in MODES:
        Path("one.safetensors").chmod(mode)
        with umask_set_to(0):
            assert mode_of_output("one.safetensors") == 0o666 & (mode | 0o600)
            assert Path("out.safetensors").stat().st_gid == 12_345
            Path("out.safetensors").unlink()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fchown", refuse)
                found = mode_of_output("one.safetensors")
            Path("out.safetensors").unlink()
        assert found == 0o600 | mode & 0o006 | (mode & 0o006) << 3 & mode
