"""Write a file: complete or not at all, and never over a source that nobody asked to change.

It is staged next to its place, flushed, and moved into it with one call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import handles, sources, syscalls
from ckpttool.io.fill import fill
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Digest, Pieces, nbytes_of, new_digest
from ckpttool.io.preflight import is_one_of
from ckpttool.io.syscalls import confirm, put, uninterrupted
from ckpttool.io.temporary import staged_file
from ckpttool.io.transaction import forget_undo, locked, recover


@contextmanager
def explained(out: str) -> Iterator[None]:
    """Turn an OSError inside, after which `out` is as it was, into a `CkptError`."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CkptError(
            f"{out}: {reason}", hint=f"{out} is as it was; free some space, or write elsewhere"
        ) from error


def check_space(out: str, folder: Path, nbytes: int) -> None:
    import shutil

    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CkptError(
            f"{out} needs {nbytes:,} bytes, {free:,} are free",
            hint="free some space, or write elsewhere",
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an output is written.

    `replace`: existing files may be replaced, also files that appear meanwhile. `in_place`: the
    output is a source, and must still be what was read. Nobody who cannot read `readers_of` and the
    sources can read the output. `digests` gets a hash of each local file that is copied.
    """

    replace: bool = True
    in_place: bool = False
    readers_of: Collection[str] = ()
    fsync: bool = True
    digests: MutableMapping[str, Digest] | None = None

    def new_digest(self, path: str) -> Digest | None:
        """Return the digest that all bytes of the file are to update, if there is one."""
        if self.digests is None:
            return None
        return self.digests.setdefault(path, new_digest())


DEFAULT = WriteOptions()


def write_file(content: Pieces, out: str, options: WriteOptions = DEFAULT) -> None:
    """Write `content` to `out`, which appears complete or not at all.

    An existing `out` is replaced atomically: a process that has it mapped keeps the old bytes.
    Raises `CkptError` on a source that changed while it was read, and on a full or failing disk;
    `out` is then as it was.
    """
    if is_url(out):
        from ckpttool.io import write_remote as remote

        remote.write(content, out, replace=options.replace)
        return
    path = Path(os.path.realpath(out))
    with explained(out), ExitStack() as stack:
        recover(path.parent, [path.name])
        check_space(out, path.parent, nbytes_of(content))
        descriptor, staged = stack.enter_context(staged_file(path))
        fill(descriptor, content, options.new_digest(out), flush=options.fsync)
        read = sources.streamed()
        if not options.in_place and is_one_of(out, read):
            raise CkptError(f"{out} is a source itself", hint="name another file")
        syscalls.set_mode(descriptor, path, (*options.readers_of, *read))
        if options.fsync:
            os.fsync(descriptor)
        _put(staged, path, out, options)


def _put(staged: Path, path: Path, out: str, options: WriteOptions) -> None:
    """Move the file into its place. The lock keeps out a process that edits the old file where it
    lies.
    """
    try:
        with ExitStack() as stack:
            if options.in_place and path.exists():
                stack.enter_context(locked(path))
                sources.check_unchanged({str(path), os.path.abspath(out)})
            stack.enter_context(uninterrupted())
            handles.close(str(path))
            put(staged, path, replace=options.replace)
            sources.forget(str(path))
            forget_undo(path)
    except FileExistsError as error:
        raise CkptError(
            f"{out} exists: another process has written it meanwhile",
            hint="pass --force to overwrite it, or name another file",
        ) from error
    if options.fsync:
        confirm(out, path.parent)
