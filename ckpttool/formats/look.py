"""Facts about a path before its format is known. Each is read once, when it is first needed."""

from __future__ import annotations

import os
from functools import cached_property

from ckpttool.containers.zip_read import read_archive
from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.io import files, paths
from ckpttool.io.files import opened

_HEAD = 4096  # bytes that tell every format
_ZIP_MAGIC, _ZIP_END, _ZIP_TAIL = b"PK\3\4", b"PK\5\6", 65_557


class Look:
    """A file, a folder or a pattern of files at `path`.

    A format's `matches` asks for the first bytes of a file, for the names of a zip archive's
    records, or for the names in a folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def is_pattern(self) -> bool:
        """Whether the path is a pattern of several files, as in ``rank_*.pt``."""
        return files.is_glob(self.path)

    @cached_property
    def is_folder(self) -> bool:
        return not self.is_pattern and files.is_dir(self.path)

    @cached_property
    def head(self) -> bytes:
        """The first 4,096 bytes of the file; none for a folder. Raises `CkptError` if it cannot be
        read, or is empty.
        """
        if self.is_pattern or self.is_folder:
            return b""
        _check_exists(self.path)
        _check_not_a_part(self.path)
        with opened(self.path) as file:
            head = file.read(_HEAD)
        if not head:
            raise CkptError(f"{self.path} is empty", hint="download or copy it again")
        return head

    @cached_property
    def is_zip(self) -> bool:
        return self.head.startswith(_ZIP_MAGIC)

    @cached_property
    def records(self) -> tuple[str, ...]:
        """The names of the zip archive's records; none for another file. Raises `CkptError` for a
        truncated archive.
        """
        if not self.is_zip:
            return ()
        with opened(self.path) as file:
            file.seek(max(0, file.size - _ZIP_TAIL))
            has_end = _ZIP_END in file.read()
            nbytes = file.size
        if not has_end:
            raise CkptError(
                f"{self.path} is truncated: a zip archive without its end ({nbytes} bytes are"
                " there)",
                hint="download or copy it again",
            )
        return tuple(record.name for record in read_archive(self.path).records)

    @cached_property
    def inner_records(self) -> frozenset[str]:
        """The names of the records with and without their first folder: torch puts all records into
        one folder, mostly.
        """
        without = {name.partition("/")[2] for name in self.records}
        return frozenset(without.union(self.records))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of files and folders in the folder; none for a file."""
        return tuple(files.names_in(self.path)) if self.is_folder else ()

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the files in the folder; none for a file."""
        return tuple(name for name in self.names if files.is_file(paths.join(self.path, name)))


def _check_not_a_part(path: str) -> None:
    """Raise `CkptError` if it is a file of torch.distributed.checkpoint: only the folder says what
    is in it.
    """
    folder = paths.parent(path)
    if path.endswith(".distcp") and files.is_file(paths.join(folder, ".metadata")):
        raise CkptError(
            f"{path} is a part of the checkpoint in {folder}",
            hint=f"name the folder: {shell('ckpttool', 'inspect', folder)}",
        )


def _check_exists(path: str) -> None:
    """Raise `CkptError` if there is no such file; the hint says which names are close."""
    if "\0" in path or paths.is_url(path) or files.exists(path):
        return
    if os.path.islink(path):
        raise CkptError(
            f"{path} is a link to {os.readlink(path)}, which does not exist",
            hint="download or copy that file again",
        )
    folder = paths.parent(path)
    if not files.is_dir(folder):
        raise CkptError(
            f"no such file: {path}",
            hint=f"the folder {folder} does not exist either: check the path",
        )
    from difflib import get_close_matches

    close = get_close_matches(paths.name(path), files.names_in(folder), n=3, cutoff=0.7)
    hint = "check the path"
    if close:
        hint = f"did you mean {' or '.join(paths.join(folder, name) for name in close)}?"
    raise CkptError(f"no such file: {path}", hint=hint)
