"""Patches of real files: apply and invert to the byte, also after a process was killed at any
step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io import patch
from ckpttool.io.patch import Patch
from ckpttool.io.pieces import Piece

BLOCK = 4096
CUTS = st.tuples(*[st.floats(0, 1)] * 2)
SIZES = st.sampled_from([0, 1, 300, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])


@contextmanager
def opened(path: Path, content: bytes) -> Iterator[int]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@settings(max_examples=80)
@given(
    size=SIZES,
    cuts=CUTS,
    tail=st.sampled_from([0, 0, 1, 300, 5000]),
    shift=st.sampled_from([0, 0, 0, 1, BLOCK]),
)
def test_patch_writes_its_pieces_and_its_inverse_undoes_it(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    cuts: tuple[float, float],
    tail: int,
    shift: int,
) -> None:
    path = tmp_path_factory.mktemp("patch").resolve() / "file"
    content = os.urandom(size)
    start, end = (int(cut * size) for cut in sorted(cuts))
    head, tail_bytes = os.urandom(start + shift), os.urandom(tail)
    expected = head + content[start:end] + tail_bytes
    pieces = [Piece(head), Piece(Span(str(path), start, end - start)), Piece(tail_bytes)]
    with opened(path, content) as descriptor:
        result = patch.of_pieces(pieces, str(path), size)
        if shift:
            assert result is None  # the bytes that stay would move
            return
        assert result is not None
        assert (result.after, len(result.head) + len(result.tail)) == (
            len(expected),
            len(head) + len(tail_bytes),
        )
        back = patch.inverse(descriptor, result)
        patch.apply(descriptor, result, fsync=False)
        assert path.read_bytes() == expected
        assert patch.content_of(descriptor, back) == patch.hash_of(result)
        assert patch.inverse(descriptor, back) == result
        patch.apply(descriptor, result, fsync=False)  # idempotent
        assert path.read_bytes() == expected
        patch.apply(descriptor, back, fsync=False)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("size", "new"), [(300, b"other"), (3, b"other bytes"), (5, b""), (0, b"first")]
)
def test_patch_that_keeps_nothing_rewrites_the_file(tmp_path: Path, size: int, new: bytes) -> None:
    content = os.urandom(size)
    result = patch.of_pieces([Piece(new[:2]), Piece(new[2:])], str(tmp_path / "file"), size)
    assert result is not None
    with opened(tmp_path / "file", content) as descriptor:
        back, sample = (
            patch.inverse(descriptor, result),
            patch.sample_of(descriptor, result.start, result.length),
        )
        patch.apply(descriptor, result, fsync=False)
        assert (tmp_path / "file").read_bytes() == new
        assert patch.fits(descriptor, back, sample)
        patch.apply(descriptor, back, fsync=False)
        assert (tmp_path / "file").read_bytes() == content


def test_patch_keeps_only_one_span_of_the_file(tmp_path: Path) -> None:
    """Bytes of another file, computed bytes and several spans need a copy."""
    place, other = str(tmp_path.resolve() / "file"), str(tmp_path.resolve() / "other")
    kept = Span(place, 100, 400)
    computed = Lazy(400, lambda: [bytes(400)])
    kinds: list[list[Span | Lazy]] = [
        [Span(other, 100, 400)],
        [computed],
        [kept, kept],
        [kept, computed],
    ]
    for kind in kinds:
        assert patch.of_pieces([Piece(b"head"), *(Piece(one) for one in kind)], place, 500) is None
    head = Piece(bytes(100))
    result = patch.of_pieces([head, Piece(kept)], place, 500)
    assert result is not None
    assert (result.start, result.length, result.head, result.after) == (100, 400, bytes(100), 500)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    assert (
        patch.of_pieces([head, Piece(Span(str(tmp_path / "link"), 100, 400))], place, 500) == result
    )


class Died(Exception):
    """Stand-in for a killed process."""


def fail_after(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Allow `left` calls that change a file, of which a last write is cut in half; later ones
    raise.
    """
    calls = [left]

    def limit(owner: Any, name: str, call: Any) -> None:
        def wrapped(*args: Any) -> Any:
            calls[0] -= 1
            if calls[0] == 0 and name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            if calls[0] <= 0:
                raise Died
            return call(*args)

        monkeypatch.setattr(owner, name, wrapped)

    limit(os, "write", os.write)
    limit(os, "ftruncate", os.ftruncate)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
@pytest.mark.parametrize("tail", [b"", b"x" * 9_000, b"x"])
def test_patch_interrupted_at_any_step_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes, left: int
) -> None:
    content = os.urandom(20_000)
    length = 19_400 - (2_000 if tail else 0)
    new = Patch(20_000, 600, length, os.urandom(600), tail)
    with opened(tmp_path / "file", content) as descriptor:
        back, sample = patch.inverse(descriptor, new), patch.sample_of(descriptor, 600, length)
        with monkeypatch.context() as inside:
            fail_after(inside, left)
            with suppress(Died):
                patch.apply(descriptor, new, fsync=False)
        assert patch.fits(descriptor, back, sample)
        patch.apply(descriptor, back, fsync=False)
        assert (tmp_path / "file").read_bytes() == content


def test_another_file_does_not_fit_the_patch(tmp_path: Path) -> None:
    """The size must be between the old and the new one, and both ends of the kept span must
    match.
    """
    content = os.urandom(20_480)
    new = Patch(len(content), 600, len(content) - 600, os.urandom(600), b"")
    tail = Patch(len(content), 600, 10_000, os.urandom(600), b"x" * 100)
    with opened(tmp_path / "file", content) as descriptor:
        for one in (new, tail):
            sample = patch.sample_of(descriptor, one.start, one.length)
            assert patch.fits(descriptor, one, sample)
            for at in (one.start, one.start + one.length - 1):
                os.pwrite(descriptor, bytes([content[at] ^ 1]), at)
                assert not patch.fits(descriptor, one, sample)
                os.pwrite(descriptor, content[at : at + 1], at)
            for size in (one.after - 1, len(content) + 1):
                os.ftruncate(descriptor, size)
                assert not patch.fits(descriptor, one, sample)
                os.ftruncate(descriptor, len(content))
                os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, (len(content) + tail.after) // 2)
        assert patch.fits(descriptor, tail, patch.sample_of(descriptor, tail.start, tail.length))


def test_file_shorter_than_the_kept_span_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "file", bytes(500)) as descriptor:
        with pytest.raises(OSError, match="the file became shorter"):
            patch.inverse(descriptor, Patch(600, 100, 400, b"", b""))
        with pytest.raises(OSError, match="the file became shorter"):
            patch.sample_of(descriptor, 300, 300)


def test_large_change_is_not_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Piece(Span("/file", 100, 400))
    monkeypatch.setattr(patch, "_MOST", 100)
    assert patch.of_pieces([Piece(bytes(100)), span], "/file", 500) is not None
    assert patch.of_pieces([Piece(bytes(100)), span, Piece(b"x")], "/file", 500) is None
