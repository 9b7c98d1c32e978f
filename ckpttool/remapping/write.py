"""Write an output: the checks before any work, the bytes, the verification afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress

from ckpttool.core.checkpoint import Checkpoint, Lazy, Span
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.options import OutputOptions
from ckpttool.core.schema import COUNT, TEXT, record
from ckpttool.core.text import human_bytes
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import current
from ckpttool.evaluate.compare import Fingerprints, verify
from ckpttool.formats.opening import open_checkpoint
from ckpttool.io import preflight, progress, sources
from ckpttool.io.files import files_of, forget_answers, is_dir, recover, size
from ckpttool.io.paths import is_url
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import (
    Digest,
    Files,
    Link,
    Pieces,
    Ready,
    comparing_checksums,
    digest_on_disk,
    nbytes_of,
)
from ckpttool.io.write import WriteOptions, write_file
from ckpttool.io.write_folder import Contents, write_folder
from ckpttool.operands.output import Target


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a command, in bytes.

    Attributes:
        read: Bytes that are read.
        written: Bytes that are written.
        memory: The most bytes of values held at a time; 0 if everything is copied in small parts.
    """

    read: int
    written: int
    memory: int

    def __str__(self) -> str:
        held = (
            f"holds {human_bytes(self.memory)} of values at most"
            if self.memory
            else ("holds no values")
        )
        return f"reads {human_bytes(self.read)}, writes {human_bytes(self.written)}, {held}"


COST = record(Cost, {"read": COUNT, "written": COUNT, "memory": COUNT})


@dataclass(frozen=True, slots=True)
class Verified:
    """How an output was checked, in bytes of its tensors.

    Attributes:
        read: Bytes that were read back and are what was planned.
        library: The library that loads such files; None if it was not used.
        by_library: Bytes of these that the library also read, with the same result.
    """

    read: int
    library: str | None = None
    by_library: int | None = None

    def __str__(self) -> str:
        by_library = ""
        if self.by_library:
            part = (
                "also"
                if self.by_library == self.read
                else (f"{human_bytes(self.by_library)} of it also")
            )
            by_library = f", {part} by {self.library}"
        return (
            f"every tensor of the output: {human_bytes(self.read)} read back and"
            f" compared{by_library}"
        )


VERIFIED = record(Verified, {"read": COUNT}, {"library": TEXT, "by_library": COUNT})


def cost_of(files: Files) -> Cost:
    """Return the cost of writing the files."""
    read = written = memory = 0
    for content in files.values():
        if isinstance(content, Link):
            copied = size(content.path)
            read, written = read + copied, written + copied
            continue
        written += nbytes_of(content)
        for piece in content:
            data = piece.data
            if isinstance(data, Span):
                read += data.length
            elif isinstance(data, Lazy):
                read += data.length if data.reads is None else data.reads
                memory = max(memory, data.held)
    return Cost(read, written, memory)


def recover_source(path: str) -> None:
    """Finish or roll back what killed runs began at the path, which will be written; on one rank,
    before the others.
    """
    job = current()
    if job is None:
        recover(path)
    else:
        job.of_first("settled", lambda: recover(path))


# What decides the values of an output, as JSON: ranks tell by it whether they mean the same.
Decided = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Writer:
    """How a command writes its output, by its options. `source` is the path of the CKPT.

    `in_place`: the source itself is changed.
    """

    source: str
    options: OutputOptions
    in_place: bool = False

    def check(self, target: Target, *others: str) -> None:
        """Raise `CkptError` if OUT cannot or must not be written. `others` are also read."""
        if target.folder is None:
            if current() is not None and not self.in_place:
                raise Refused(
                    f"{target.path} is one file, and each rank writes separate files",
                    hint="write a folder (-o OUT/, or -o OUT.dcp), or run the command without"
                    " torchrun",
                )
            self.check_file(target.path, *others)
            return
        forget_answers(target.folder)
        force, in_place = self.options.force, self.in_place
        for source in (self.source, *others):
            preflight.check_folder(
                target.folder, target.present(), source, force=force, in_place=in_place
            )

    def check_file(self, out: str, *others: str) -> None:
        """Raise `CkptError` if the file cannot or must not be written. `others` are also read."""
        read: list[str] = []
        for source in (self.source, *others):
            read += (source, *files_of(source))
        read += sources.files_read()
        preflight.check_file(out, read, force=self.options.force, in_place=self.in_place)

    def file(self, pieces: Pieces, out: str, decided: Decided | None = None) -> None:
        """Write the file; `decided`, if known, is everything that decides its values."""
        # now that all is open which the command reads
        preflight.check_no_source(out, sources.files_read())
        name = name_of(out if is_url(out) else os.path.realpath(out))
        self._write({name: pieces}, out, None, decided)

    def target(self, target: Target, files: Files, decided: Decided | None = None) -> None:
        """Write the file or folder; `decided`, if known, is everything that decides its values."""
        if target.folder is None:
            (pieces,) = (content for content in files.values() if not isinstance(content, Link))
            self.file(pieces, target.path, decided)
        else:
            self._write(files, target.folder, target.present(files), decided)

    def _write(
        self, files: Files, out: str, stale: Collection[str] | None, decided: Decided | None
    ) -> None:
        """Write the files of the folder `out`, which replace the `stale` ones; the file `out` if
        `stale` is None.
        """
        job = current()
        options = self._options(is_url(out))
        with ExitStack() as stack:
            stack.enter_context(progress.doing(out, _nbytes(files), "written"))
            if stale is None:
                (content,) = files.values()
                assert not isinstance(content, Link)
                write_file(content, out, options)
            else:
                contents: Contents = files
                if job is not None:
                    from ckpttool.distributed.files import shared

                    plan = None if decided is None else decided()
                    contents = stack.enter_context(
                        shared(job, files, out, plan, options, verify=self.options.verify)
                    )
                write_folder(contents, out, options, stale=stale)
        _prove_bytes(options.digests)

    def _options(self, is_remote: bool = False) -> WriteOptions:
        """Return the options of the writers, and with `verify` the record that proves the bytes of
        these files.
        """
        options = self.options
        return WriteOptions(
            replace=options.force,
            readers_of=[self.source] if is_dir(self.source) else files_of(self.source),
            fsync=not options.no_fsync,
            digests={} if options.verify and not is_remote else None,
        )

    def prove(
        self, out: str, expected: Checkpoint | Fingerprints, written: Checkpoint | None = None
    ) -> Verified:
        """Prove that `out` holds `expected`: read it back.

        Raise `CkptError`, with every tensor that is not as planned. `written` is the index of
        `out`, if it is not the usual one.
        """
        actual = written or open_checkpoint(out)
        sides = 1 if isinstance(expected, Mapping) else 2
        nbytes = sum(section.nbytes for section in actual.sections)
        with progress.doing(f"verifying {out}", sides * nbytes), comparing_checksums():
            problems = verify(actual, expected)
        if problems:
            raise CkptError(
                f"{out} is not what was planned",
                hint="do not use it, and report this",
                problems=problems,
            )
        if is_url(out):
            return Verified(nbytes)
        library = None
        with suppress(ImportError):  # torch may be left out
            from ckpttool.operands.reference import compare

            library = compare(actual, out)
        return Verified(nbytes, *(library or ()))


def _nbytes(files: Contents) -> int:
    """Return the bytes of files that must still be written; linked files are not."""
    todo = (content for content in files.values() if not isinstance(content, (Link, Ready)))
    return sum(piece.nbytes for content in todo for piece in content)


def _prove_bytes(digests: Mapping[str, Digest] | None) -> None:
    """Raise `CkptError` if the disk does not hold exactly the bytes that were written."""
    if not digests:
        return
    first, *more = digests
    with progress.doing(
        f"verifying {first}" + (f" and {len(more)} more" if more else ""), sum(map(size, digests))
    ):
        problems = [
            Problem("other bytes on the disk than were written", path)
            for path, digest in digests.items()
            if digest_on_disk(path) != digest.digest()
        ]
    if problems:
        raise CkptError(
            "what was written is not what the disk holds",
            hint="check the disk, and do not use it",
            problems=problems,
        )
