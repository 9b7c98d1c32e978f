"""Patches of real files: apply and invert to the byte, also after a process was killed at any step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io import patch, syscalls
from ckpttool.io.patch import Patch
from ckpttool.io.pieces import Piece

BLOCK = 4096
CUTS = st.tuples(*[st.floats(0, 1)] * 2)
SIZES = st.integers(1, 9 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK, 5 * BLOCK])
SHIFTS = st.sampled_from([0, 0, 0, BLOCK, -BLOCK, 2 * BLOCK, 1, -7])


@contextmanager
def opened(path: Path, content: bytes) -> Iterator[int]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def random_patch(
    size: int, cuts: tuple[float, float], shift: int, tail: int
) -> tuple[bytes, Span, bytes, bytes, bytes]:
    """Return the file's content, the span that is kept, the bytes before and after it, and the new content."""
    content = os.urandom(size)
    start, end = (int(cut * size) for cut in sorted(cuts))
    end = size if shift > 0 and not tail else end
    head, tail_bytes = os.urandom(max(0, start + shift)), os.urandom(tail)
    return content, Span("", start, end - start), head, tail_bytes, head + content[start:end] + tail_bytes


@settings(max_examples=80)
@given(size=SIZES, cuts=CUTS, shift=SHIFTS, tail=st.sampled_from([0, 0, 1, 300, 5000]))
@example(size=BLOCK + 1, cuts=(1.0, 1.0), shift=-BLOCK, tail=0)
def test_patch_writes_its_pieces_and_its_inverse_undoes_it(
    tmp_path_factory: pytest.TempPathFactory, size: int, cuts: tuple[float, float], shift: int, tail: int
) -> None:
    path = tmp_path_factory.mktemp("patch").resolve() / "file"
    content, kept_span, head, tail_bytes, expected = random_patch(size, cuts, shift, tail)
    pieces = [Piece(head), Piece(Span(str(path), kept_span.offset, kept_span.length)), Piece(tail_bytes)]
    with opened(path, content) as descriptor:
        result = patch.of_pieces(pieces, str(path), size)
        is_moved = len(head) != kept_span.offset
        if is_moved and (tail_bytes or kept_span.offset + kept_span.length < size):
            assert result is None  # only the end of the file can be moved
            return
        assert result is not None
        assert (result.after, len(result.head) + len(result.tail)) == (len(expected), len(head) + len(tail_bytes))
        back = patch.inverse(descriptor, result)
        try:
            patch.apply(descriptor, result, fsync=False)
        except OSError as error:
            number = error.errno
        else:
            number = 0
        if number:  # not a multiple of the block size, or not supported here
            assert is_moved
            assert number in syscalls.NOT_HERE
            assert path.read_bytes() == content
            return
        assert path.read_bytes() == expected
        assert patch.content_of(descriptor, back) == patch.hash_of(result)
        assert replace(patch.inverse(descriptor, back), dense=False) == result  # here the file has no holes either
        patch.apply(descriptor, result, fsync=False)  # idempotent
        assert path.read_bytes() == expected
        patch.apply(descriptor, back, fsync=False)
        assert path.read_bytes() == content


@pytest.mark.parametrize(("size", "new"), [(300, b"other"), (3, b"other bytes"), (5, b""), (0, b"first")])
def test_patch_that_keeps_nothing_rewrites_the_file(tmp_path: Path, size: int, new: bytes) -> None:
    content = os.urandom(size)
    result = patch.of_pieces([Piece(new[:2]), Piece(new[2:])], str(tmp_path / "file"), size)
    assert result is not None
    with opened(tmp_path / "file", content) as descriptor:
        back, sample = patch.inverse(descriptor, result), patch.sample_of(descriptor, result.start, result.length)
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
    kinds: list[list[Span | Lazy]] = [[Span(other, 100, 400)], [computed], [kept, kept], [kept, computed]]
    for kind in kinds:
        assert patch.of_pieces([Piece(b"head"), *(Piece(one) for one in kind)], place, 500) is None
    result = patch.of_pieces([Piece(b"head"), Piece(kept)], place, 500)
    assert result is not None
    assert (result.start, result.length, result.shift, result.head, result.after) == (100, 400, -96, b"head", 404)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    assert patch.of_pieces([Piece(b"head"), Piece(Span(str(tmp_path / "link"), 100, 400))], place, 500) == result


class Died(Exception):
    """Stand-in for a killed process."""


def fail_after(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Allow `left` calls that change a file, of which a last write is cut in half; later ones raise."""
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
    limit(syscalls, "fallocate", syscalls.fallocate)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("size", "start", "shift", "tail"),
    [
        (20_000, 600, 0, b""),
        (20_000, 600, 0, b"x" * 9_000),
        (20_000, 600, 0, b"x"),
        (20_480, 600, BLOCK, b""),
        (20_480, 6_000, -BLOCK, b""),
    ],
)
def test_patch_interrupted_at_any_step_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, start: int, shift: int, tail: bytes, left: int
) -> None:
    content = os.urandom(size)
    length = size - start - (2_000 if tail else 0)
    new = Patch(size, start, length, shift, os.urandom(start + shift), tail)
    with opened(tmp_path / "file", content) as descriptor:
        back, sample = patch.inverse(descriptor, new), patch.sample_of(descriptor, start, length)
        with monkeypatch.context() as inside:
            fail_after(inside, left)
            try:
                patch.apply(descriptor, new, fsync=False)
            except Died:
                pass
            except OSError:
                pytest.skip("this file system cannot insert blocks")
        assert patch.fits(descriptor, back, sample)
        patch.apply(descriptor, back, fsync=False)
        assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("shift", [0, BLOCK])
def test_another_file_does_not_fit_the_patch(tmp_path: Path, shift: int) -> None:
    """The size must be between the old and the new one, and both ends of the kept span must match."""
    content = os.urandom(20_480)
    new = Patch(len(content), 600, len(content) - 600, shift, os.urandom(600 + shift), b"")
    tail = Patch(len(content), 600, 10_000, 0, os.urandom(600), b"x" * 100)
    with opened(tmp_path / "file", content) as descriptor:
        for one in (new, tail):
            sample = patch.sample_of(descriptor, one.start, one.length)
            assert patch.fits(descriptor, one, sample)
            for at in (one.start, one.start + one.length - 1):
                os.pwrite(descriptor, bytes([content[at] ^ 1]), at)
                assert not patch.fits(descriptor, one, sample)
                os.pwrite(descriptor, content[at : at + 1], at)
            for size in (one.after - 1, len(content) + shift + 1):
                os.ftruncate(descriptor, size)
                assert not patch.fits(descriptor, one, sample)
                os.ftruncate(descriptor, len(content))
                os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, (len(content) + tail.after) // 2)
        assert patch.fits(descriptor, tail, patch.sample_of(descriptor, tail.start, tail.length))


def test_file_shorter_than_the_kept_span_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "file", bytes(500)) as descriptor:
        with pytest.raises(OSError, match="the file became shorter"):
            patch.inverse(descriptor, Patch(600, 100, 400, 0, b"", b""))
        with pytest.raises(OSError, match="the file became shorter"):
            patch.sample_of(descriptor, 300, 300)


def test_hole_at_the_end_of_a_file_is_not_a_torn_insert(tmp_path: Path) -> None:
    with opened(tmp_path / "file", bytes(BLOCK) * 2) as descriptor:
        for size in (2 * BLOCK, 6 * BLOCK, 0):
            os.ftruncate(descriptor, size)
            assert patch._hole(descriptor) == (size, size)
            assert patch._torn_at(descriptor, 4 * BLOCK) == 0
        os.pwrite(descriptor, b"x", 6 * BLOCK)
        if patch._hole(descriptor) != (0, 6 * BLOCK):
            pytest.skip("this file system does not report holes")


def test_large_change_is_not_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Piece(Span("/file", 100, 400))
    monkeypatch.setattr(patch, "_MOST", 100)
    assert patch.of_pieces([Piece(bytes(100)), span], "/file", 500) is not None
    assert patch.of_pieces([Piece(bytes(100)), span, Piece(b"x")], "/file", 500) is None
