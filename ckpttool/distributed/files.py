"""The ranks write the files of one output: each rank its share, by an assignment that all of them
compute alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.distributed.job import Job, RankDone, assigned
from ckpttool.io import progress, sources
from ckpttool.io.files import size
from ckpttool.io.fill import fill
from ckpttool.io.paths import is_url, join
from ckpttool.io.pieces import (
    Files,
    Link,
    Piece,
    Pieces,
    Ready,
    digest_on_disk,
    nbytes_of,
    new_digest,
)
from ckpttool.io.syscalls import lock
from ckpttool.io.temporary import is_mine, remove
from ckpttool.io.write import WriteOptions, check_space, explained
from ckpttool.io.write_folder import NEW, Contents, home_of


def is_text(content: Pieces) -> bool:
    """Return True if all bytes of the file are literal: an index, an empty file. Only the first
    rank writes it.
    """
    return all(isinstance(piece.data, bytes) for piece in content)


def as_pieces(content: Pieces | Link) -> Pieces:
    """Return the file's pieces; a file that is used as it is, is copied."""
    if isinstance(content, Link):
        return [Piece(Span(content.path, 0, size(content.path)))]
    return content


def digest(files: Mapping[str, Pieces], *more: object) -> str:
    """Return the SHA-256 of everything that decides what is written: all layouts, the sources, and
    `more` (JSON).
    """
    decided = hashlib.sha256(json.dumps(more).encode())
    urls: set[str] = set()
    for name, pieces in files.items():
        decided.update(json.dumps(["file", name]).encode())
        for piece in pieces:
            data = piece.data
            if isinstance(data, bytes):
                layout = ["bytes", hashlib.sha256(data).hexdigest()]
            elif isinstance(data, Span):
                layout = ["span", data.path, str(data.offset), str(data.length)]
                if is_url(data.path):
                    urls.add(data.path)
            else:
                layout = ["computed", str(data.length)]
            decided.update(json.dumps(layout).encode())
    decided.update(json.dumps(_versions(urls)).encode())
    return decided.hexdigest()


def _versions(urls: Collection[str]) -> dict[str, list[object]]:
    """Return the size and the version of each object in a store."""
    if not urls:
        return {}
    from ckpttool.io.remote import there

    versions: dict[str, list[object]] = {}
    for url in sorted(urls):
        stat = there(url)
        versions[url] = [stat.size, *stat.version]
    return versions


def _files_of_rank(job: Job, files: Mapping[str, Pieces], plan: object) -> list[str]:
    """Return the names of the files that this rank writes. Raises `CkptError` if the ranks mean
    different outputs.
    """
    job.agree(digest(files, job.command, plan, sources.states()))
    sizes = {name: nbytes_of(pieces) for name, pieces in files.items() if not is_text(pieces)}
    share = assigned(sizes, job.size)[job.rank]
    # other ranks write the rest
    progress.advance(sum(sizes.values()) - sum(sizes[name] for name in share))
    return share


def shared(
    job: Job, files: Files, out: str, plan: object, options: WriteOptions, *, verify: bool
) -> AbstractContextManager[Contents]:
    """Let all ranks write the files with tensors; yield, on the first rank only, what it must
    still put into the folder `out`.

    `plan` is what else decides the bytes, as JSON. To `verify` the files they are read back, but
    from a store. Raises `CkptError` if the ranks mean different outputs, if a source changes and if
    the disk fails.
    """
    if is_url(out):
        return _write_to_store(job, files, out, plan)
    return _write_to_disk(job, files, out, plan, options, verify=verify)


# On a file system


@contextmanager
def _write_to_disk(
    job: Job, files: Files, out: str, plan: object, options: WriteOptions, *, verify: bool
) -> Iterator[Contents]:
    """Yield the files, those with tensors written by all ranks next to their places. The block, in
    which they are moved there, runs on the first rank only.
    """
    contents = {name: as_pieces(content) for name, content in files.items()}
    share = _files_of_rank(job, contents, plan)
    total = sum(nbytes_of(pieces) for pieces in contents.values())
    with explained(out), _staging(job, out, total) as staging:
        read: dict[str, list[str]] = {}
        for name in share:
            job.check()
            read[name] = _write(contents[name], staging / NEW / name, options, verify=verify)
        job.tell(f"done/{job.rank}", read)
        done = job.gather("done") if job.is_first else []
        job.only_first()
        ready: dict[str, Ready] = {}
        for names in done:
            for name, paths in names.items():
                ready[name] = Ready(str(staging / NEW / name), tuple(sorted(paths)))
        yield {**contents, **ready}


def _write(pieces: Pieces, path: Path, options: WriteOptions, *, verify: bool) -> list[str]:
    """Write the file; return the files whose bytes it has. Raises OSError, and `CkptError` if a
    source changes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    expected = new_digest() if verify else None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fill(descriptor, pieces, expected, flush=options.fsync)
        read = sorted(sources.streamed())
        if options.fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if expected is not None and digest_on_disk(str(path)) != expected.digest():
        raise CkptError(
            "what was written is not what the disk holds",
            hint="check the disk",
            problems=[Problem("other bytes on the disk than were written", path.name)],
        )
    return read


_ENDING = ".ckpttool.job"


def _short(name: str) -> str:
    return name.encode(errors="surrogateescape")[:100].decode(errors="ignore")


def is_staging(folder: str, name: str) -> bool:
    """Return True if it is the name of a folder in which ranks make the output `name`."""
    pattern = rf"\.{re.escape(_short(name))}\.[0-9a-f]{{16}}{re.escape(_ENDING)}"
    return re.fullmatch(pattern, folder) is not None


@contextmanager
def _staging(job: Job, out: str, nbytes: int) -> Iterator[Path]:
    """Yield the folder that the first rank makes and locks, in place of what a killed job left;
    removed at the end.
    """
    if not job.is_first:
        yield Path(job.hear("begun"))
        return
    home = home_of(out)
    name = os.path.basename(os.path.realpath(out))
    for path in home.iterdir():
        if not is_staging(path.name, name) or not is_mine(path.lstat()):
            continue
        with _locked(path) as is_left:
            if is_left is False:
                raise CkptError(
                    f"{out} is being written by another job", hint="wait until it has ended"
                )
            if is_left:
                remove(path)
    check_space(out, home, nbytes)
    staging = home / f".{_short(name)}.{secrets.token_hex(8)}{_ENDING}"
    (staging / NEW).mkdir(mode=0o700, parents=True)
    try:
        with _locked(staging):
            job.tell("begun", str(staging))
            yield staging
    finally:
        remove(staging)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Lock the folder until the block ends; False if another process has it, None on a file system
    without locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor)
    finally:
        os.close(descriptor)


# In a store


@contextmanager
def _write_to_store(job: Job, files: Files, folder: str, plan: object) -> Iterator[Contents]:
    """Put the files with tensors into the folder of a store, each by one rank; yield the others, on
    the first rank.

    They have their final names, but without the index, which is among the others, nothing refers to
    them. If this or the block raises, they are removed.
    """
    from ckpttool.io import write_remote

    contents = {name: as_pieces(content) for name, content in files.items()}
    others = {name: pieces for name, pieces in contents.items() if is_text(pieces)}
    names = _files_of_rank(job, contents, plan)
    try:
        for name in names:
            job.check()
            write_remote.write(contents[name], join(folder, name), replace=False)
        job.tell(f"done/{job.rank}", None)
        if job.is_first:
            job.gather("done")
            names = [name for name in contents if name not in others]
        job.only_first()
        yield others
    except RankDone:
        raise
    except BaseException:
        job.fail()
        _remove_all(folder, names)
        raise


def _remove_all(folder: str, names: list[str]) -> None:
    from ckpttool.io import remote

    for name in names:
        with suppress(CkptError):
            remote.remove(join(folder, name))
