"""Writing a file: it appears complete or not at all, and a rename needs little memory and no
torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckpttool import CkptError
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io import files, progress, sources, syscalls
from ckpttool.io.files import opened
from ckpttool.io.fill import FLUSHED
from ckpttool.io.pieces import CHUNK, LEAST, Crc, Piece, same_bytes
from ckpttool.io.preflight import check_file
from ckpttool.io.syscalls import put
from ckpttool.io.write import WriteOptions, explained
from ckpttool.io.write import write_file as write
from files import run_measured


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3 * CHUNK + 17))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_pieces_are_written_in_order(tmp_path: Path, source: Path) -> None:
    lazy = Lazy(5, lambda: [b"ab", memoryview(b"cde")])
    pieces = [
        Piece(b"head"),
        Piece(Span(str(source), 7, 2 * CHUNK + 3)),
        Piece(lazy),
        Piece(Span(str(source), 0, 0)),
    ]
    write(pieces, str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"head" + source.read_bytes()[
        7 : 7 + 2 * CHUNK + 3
    ] + b"abcde"
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize(
    "number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.ENOSPC, errno.EIO]
)
def test_disk_space_is_reserved_before_writing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file is written if the file system cannot reserve space; no error leaves a file
    behind.
    """

    def refused(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, "fallocate", refused)
    pieces = [Piece(Span(str(source), 0, source.stat().st_size))] * (1 + LEAST // CHUNK)
    if number in (errno.ENOSPC, errno.EIO):
        monkeypatch.setattr(os, "write", None)
        with pytest.raises(CkptError, match="full" if number == errno.ENOSPC else "error"):
            write(pieces, str(tmp_path / "out"))
        assert names(tmp_path) == ["source"]
    else:
        write(pieces, str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == source.read_bytes() * len(pieces)


def test_write_back_starts_before_fsync(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(
        syscalls, "write_back", lambda _, offset, length: ranges.append((offset, length))
    )
    pieces = [Piece(Span(str(source), 0, 3 * CHUNK))] * 40
    write(pieces, str(tmp_path / "without"), WriteOptions(fsync=False))
    assert not ranges
    write(pieces, str(tmp_path / "out"))
    assert [offset for offset, _ in ranges] == [
        sum(length for _, length in ranges[:n]) for n in range(len(ranges))
    ]
    assert 0 <= 120 * CHUNK - sum(length for _, length in ranges) < FLUSHED


def test_large_outputs_are_evicted_from_the_page_cache(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs of one command may use a part of the memory; further pages are evicted once they
    are on disk.

    Earlier outputs of the process do not count.
    """
    pieces = [Piece(Span(str(source), 0, 3 * CHUNK))] * 40
    nbytes = 120 * CHUNK
    # as on a fast disk
    monkeypatch.setattr(syscalls, "write_back", lambda descriptor, *_: os.fsync(descriptor))
    for memory, kept in ((nbytes, [False, False, False]), (8 * nbytes, [True, True, False])):
        monkeypatch.setattr(syscalls, "memory", lambda memory=memory: memory)
        with progress.doing("a folder", len(kept) * nbytes, "written"):
            outs = [tmp_path / f"{memory}-{number}" for number in range(len(kept))]
            for out in outs:
                write(pieces, str(out))
        for out, is_kept in zip(outs, kept):
            cached = resident(out)
            assert cached == nbytes if is_kept else cached <= 3 * FLUSHED
            with open(out, "rb") as file:
                syscalls.evict(file.fileno(), 0, nbytes)
            if resident(out):
                pytest.skip("this file system is in memory")


def resident(path: Path) -> int:
    """Return the number of bytes of the file that are in the page cache."""
    nbytes = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        address = ctypes.addressof(mapping := ctypes.c_char.from_buffer(mapped))
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages)
        del mapping
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_checksum_is_computed_while_writing(tmp_path: Path, source: Path) -> None:
    crc = Crc()
    late = Lazy(4, lambda: [crc.value.to_bytes(4, "little")])
    write(
        [Piece(Span(str(source), 0, source.stat().st_size), crc), Piece(late)],
        str(tmp_path / "out"),
    )
    assert (tmp_path / "out").read_bytes()[-4:] == zlib.crc32(source.read_bytes()).to_bytes(
        4, "little"
    )


def test_progress_counts_every_byte(tmp_path: Path, source: Path) -> None:
    seen: list[int] = []
    progress.begin()
    with (
        progress.shown(lambda title, total: nullcontext(seen.append)),
        progress.doing("out", CHUNK + 2, "written"),
    ):
        write([Piece(b"x"), Piece(Span(str(source), 0, CHUNK + 1))], str(tmp_path / "out"))
    assert sum(seen) == CHUNK + 2
    assert (progress.counts.read, progress.counts.moved, progress.counts.written) == (
        CHUNK + 1,
        CHUNK + 1,
        CHUNK + 2,
    )


def test_progress_counts_parts_after_a_failed_one() -> None:
    seen: list[int] = []

    def fail() -> None:
        with progress.part(10):
            progress.count_read(4)
            raise CkptError("broken", hint="none")

    with progress.shown(lambda title, total: nullcontext(seen.append)), progress.doing("all", 30):
        with pytest.raises(CkptError):
            fail()
        with progress.part(20):
            progress.count_read(50)  # includes bytes that were read for planning
        progress.count_written(7)
    assert seen == [4, 20, 0]


def test_nested_parts_count_once_and_idle_parts_are_ignored() -> None:
    seen: list[int] = []
    with progress.shown(lambda title, total: nullcontext(seen.append)):
        with progress.doing("all", 30):
            with progress.part(20), progress.part(15):
                progress.count_read(12)
            with progress.part(10):
                progress.count_read(10)
        with progress.part(5):
            progress.count_read(5)
    assert seen == [12, 8, 10, 0]


def failing_pieces(kind: str, source: Path) -> list[Piece]:
    def raise_error() -> list[bytes]:
        raise {"computing": ValueError("no"), "interrupt": KeyboardInterrupt()}[kind]

    if kind == "truncated source":
        return [Piece(b"x"), Piece(Span(str(source), 0, source.stat().st_size + 1))]
    if kind == "no source":
        return [Piece(b"x"), Piece(Span(str(source) + ".gone", 0, 1))]
    if kind == "wrong length":
        return [Piece(b"x"), Piece(Lazy(3, lambda: [b"ab"]))]
    return [Piece(b"x"), Piece(Lazy(1, raise_error))]


@pytest.mark.parametrize(
    "kind", ["truncated source", "no source", "wrong length", "computing", "interrupt"]
)
@pytest.mark.parametrize("existed", [False, True])
def test_failed_write_leaves_no_file(
    tmp_path: Path, source: Path, kind: str, existed: bool
) -> None:
    out = tmp_path / "out"
    if existed:
        out.write_bytes(b"before")
    expected = {"computing": ValueError, "interrupt": KeyboardInterrupt}.get(kind, CkptError)
    with pytest.raises(expected):
        write(failing_pieces(kind, source), str(out))
    assert names(tmp_path) == (["out", "source"] if existed else ["source"])
    assert not existed or out.read_bytes() == b"before"


def test_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """A file size limit simulates the full disk: the kernel refuses the write halfway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK + 5, before[1]))
    try:
        with pytest.raises(CkptError, match="out: File too large"):
            write([Piece(bytes(3 * CHUNK))], str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_output_larger_than_free_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="are free"):
        write([Piece(Lazy(1 << 60, list))], str(tmp_path / "out"))
    assert names(tmp_path) == []


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="No such file"):
        write([Piece(b"x")], str(tmp_path / "gone" / "out"))


def test_symlink_stays_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write([Piece(b"new")], str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_readers_of_the_old_file_keep_its_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    with out.open("rb") as reader:
        write([Piece(Span(str(out), 0, 3)), Piece(b"+")], str(out), WriteOptions(in_place=True))
        assert reader.read() == b"old"
    assert out.read_bytes() == b"old+"


def test_refused_and_allowed_outputs(tmp_path: Path, source: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "link").symlink_to("source")
    for place, hint in (
        (tmp_path / "other", "--force"),
        (source, "--in-place"),
        (tmp_path / "link", "--in-place"),
        (tmp_path, "name a file"),
        (tmp_path / "gone" / "out", "mkdir -p"),
        (Path(os.devnull), "can be replaced"),
    ):
        with pytest.raises(CkptError) as caught:
            check_file(str(place), [str(source)], force=False, in_place=False)
        assert hint in caught.value.hint
    with pytest.raises(CkptError, match="the source itself"):
        check_file(str(source), [str(source)], force=True, in_place=False)
    check_file(str(tmp_path / "new"), [str(source)], force=False, in_place=False)
    check_file(str(tmp_path / "other"), [str(source)], force=True, in_place=False)
    check_file(str(source), [str(source)], force=False, in_place=True)


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EIO, errno.EACCES]
)
@pytest.mark.parametrize("renames", [True, False])
def test_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, renames: bool
) -> None:
    """Other errors are raised; an existing file is never replaced."""

    def no_link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    if not renames:
        monkeypatch.setattr(syscalls, "renameat2", no_link)
    (tmp_path / "there").write_bytes(b"old")
    for name, error in (("there", FileExistsError), ("new", None)):
        (tmp_path / "staged").write_bytes(b"new")
        expected = error if number in syscalls.NOT_HERE else OSError
        with pytest.raises(expected) if expected else nullcontext():
            put(tmp_path / "staged", tmp_path / name, replace=False)
    assert (tmp_path / "there").read_bytes() == b"old"
    assert (tmp_path / "new").exists() is (number in syscalls.NOT_HERE)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_failed_rename_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(answer: int) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise OSError(answer, os.strerror(answer))

        return call

    monkeypatch.setattr(os, "link", refused(errno.EPERM))
    monkeypatch.setattr(syscalls, "renameat2", refused(number))
    (tmp_path / "staged").write_bytes(b"new")
    with pytest.raises(OSError, match=os.strerror(number)):
        put(tmp_path / "staged", tmp_path / "new", replace=False)
    assert names(tmp_path) == ["staged"]


def test_source_without_a_recorded_state_is_not_overwritten(tmp_path: Path, source: Path) -> None:
    """Its index was never read; it is recognized by its path and by a hard link."""
    os.link(source, tmp_path / "linked")
    before = source.read_bytes()
    for out in (source, tmp_path / "linked"):
        with pytest.raises(CkptError, match="is a source itself"):
            write([Piece(b"x"), Piece(Span(str(source), 0, 5))], str(out))
    assert source.read_bytes() == before
    assert names(tmp_path) == ["linked", "source"]


def test_os_errors_without_errno_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=r"^out: odd\n"), explained("out"):
        raise OSError("odd")
    (tmp_path / "a").touch()
    with pytest.raises(CkptError, match=r"^cannot read .*/a: odd\n"), opened(str(tmp_path / "a")):
        raise OSError("odd")


@pytest.mark.parametrize("pipes", [False, True])
def test_devices_and_pipes_are_not_opened(tmp_path: Path, pipes: bool) -> None:
    with (
        pytest.raises(CkptError, match="it is a terminal or another device"),
        opened("/dev/null", pipes=pipes),
    ):
        pass
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(end, b"data")
    raised = pytest.raises(CkptError, match="it is a pipe")
    with nullcontext() if pipes else raised, opened(str(tmp_path / "pipe"), pipes=pipes) as file:
        assert file.read(4) == b"data"
    os.close(end)
    with pytest.raises(CkptError, match="a null byte in the path"), opened("a\0b"):
        pass
    with pytest.raises(CkptError, match="cannot read gone: No such file"):
        files.names_in("gone")


def test_existing_name_with_brackets_is_not_a_glob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].pt", "a1.pt", "b.pt"):
        Path(name).touch()
    Path("a2.pt").mkdir()
    assert files.files_of("a[1].pt") == ["a[1].pt"]
    assert files.files_of("a[12].pt") == ["a1.pt"]
    assert files.files_of("a*\0/*") == files.files_of("s3://b/*") == []
    assert files.glob("a*") == ["a1.pt", "a[1].pt"]


def test_spans_are_compared_chunk_by_chunk(tmp_path: Path, source: Path) -> None:
    data = bytearray(source.read_bytes())
    other = tmp_path / "other"
    for at in (None, 0, CHUNK, len(data) - 1):
        changed = bytearray(data)
        if at is not None:
            changed[at] ^= 1
        other.write_bytes(b"-" + changed)
        sources.forget(str(other))
        spans = Span(str(source), 0, len(data)), Span(str(other), 1, len(data))
        assert same_bytes(*spans) == (at is None)
    assert not same_bytes(Span(str(source), 0, 3), Span(str(source), 0, 4))


RENAME = """
import os, struct, sys
from ckpttool.cli.app import main
path, nbytes = sys.argv[1], int(sys.argv[2])
header = b'{"a.w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header)
    file.truncate(8 + len(header) + nbytes)
status = main(["remap", path, "-o", path + ".new.safetensors", "--rule", "a.w => b.w", "--no-fsync"])
print(status, "torch" in sys.modules, os.path.getsize(path + ".new.safetensors") > nbytes)
"""


def test_large_rename_needs_little_memory_and_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RENAME, str(tmp_path / "big.safetensors"), str(192 << 20)]
    printed, peak = run_measured(command, tmp_path)
    status, torch, complete = printed.splitlines()[-1].split()
    assert (status, torch, complete) == ("0", "False", "True")
    assert peak < 100 << 20
