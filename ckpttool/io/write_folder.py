"""The byte mover for folders: all files are written beside their place first, then the folder is completed at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from ckpttool.checkpoint import Span
from ckpttool.errors import CkptError
from ckpttool.io import write_file
from ckpttool.io.files import size
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Files, Link, Piece, Pieces, Progress

LINKS = ("copy", "hard", "reflink")

_FICLONE = 0x40049409  # Linux's ioctl that shares the blocks of one file with another, copied when either changes


def preflight(out: str, present: Collection[str], source: str, *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where a checkpoint cannot or must not be written into the folder `out`.

    `present` are the files of a checkpoint that is there already, `source` the path that is read.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        write_remote.preflight_folder(out, present, source, force=force, in_place=in_place)
        return
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CkptError(f"{out} is a file", hint="name a folder")
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir():
        raise CkptError(f"{out}: no such folder: {parent}", hint=f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK):
        raise CkptError(f"{parent}: not writable", hint="choose another folder for the output")
    home = source if os.path.isdir(source) else os.path.dirname(source) or "."
    if not in_place and folder.is_dir() and os.path.isdir(home) and os.path.samefile(folder, home):
        raise CkptError(f"{out} is the folder of the source", hint="name another folder, or pass --in-place")
    if present and not (force or in_place):
        raise CkptError(
            f"{out} holds a checkpoint: {min(present)}", hint="pass --force to replace it, or name another folder"
        )


def write_folder(
    files: Files,
    out: str,
    *,
    stale: Collection[str] = (),
    link: str = "copy",
    fsync: bool = True,
    progress: Progress | None = None,
) -> int:
    """Writes `files` into the folder `out` and returns their size in bytes.

    A new folder appears complete or not at all. In one that exists, the files named `stale` and the last of `files`,
    which makes the folder complete, are taken away first and that last one comes back last, so that no reader ever
    takes a mixture for a checkpoint; all other files stay. `link` says how each `Link` is taken over: ``copy``,
    ``hard`` (one file under two names) or ``reflink`` (blocks shared until one of the two changes).
    Raises `CkptError` on a source that changed while it was read, and on a full or failing disk.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        return write_remote.write_folder(files, out, stale, link, progress)
    folder = Path(os.path.realpath(out))
    new = not folder.is_dir()
    parent = folder.parent if new else folder
    _check_space(files, out, parent, link)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", suffix=".tmp", dir=parent))
    except OSError as error:
        raise _failed(out, error) from error
    try:
        nbytes = sum(
            _put(content, folder / name, temporary / name, link, fsync, progress) for name, content in files.items()
        )
        if new:
            temporary.chmod(0o777 & ~_umask())
            temporary.rename(folder)
        else:
            _move_in(temporary, folder, list(files), stale)
    except OSError as error:
        raise _failed(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if fsync:
        write_file.sync_folder(parent)
    return nbytes


def _check_space(files: Files, out: str, parent: Path, link: str) -> None:
    needed = 0
    for content in files.values():
        if not isinstance(content, Link):
            needed += sum(piece.nbytes for piece in content)
        elif link == "copy":
            needed += size(content.path)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CkptError(f"{out}: needs {needed:,} bytes, {free:,} are free", hint="free some space, or write elsewhere")


def _put(
    content: Pieces | Link, place: Path, temporary: Path, link: str, fsync: bool, progress: Progress | None
) -> int:
    """Makes one file, called `temporary` until it is moved to its `place`. Returns its size in bytes."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, Link):
        return write_file.write(content, str(temporary), fsync=fsync, progress=progress)
    source = content.path if is_url(content.path) else os.path.realpath(content.path)
    nbytes = size(source)
    if not is_url(source) and place.exists() and os.path.samefile(source, place):
        return nbytes  # it is there already
    if link == "copy":
        return write_file.write([Piece(Span(source, 0, nbytes))], str(temporary), fsync=fsync, progress=progress)
    try:
        if is_url(source):
            raise OSError("it is no file of this machine")
        _hard_link(source, temporary) if link == "hard" else _reflink(source, temporary)
    except OSError as error:
        raise CkptError(
            f"{content.path} cannot be linked ({link}): {error.strerror or error}",
            hint="--link copy works on every file system, and across two",
        ) from error
    return nbytes


def _hard_link(source: str, target: Path) -> None:
    os.link(source, target)


def _reflink(source: str, target: Path) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise OSError("not on this platform") from error
    with open(source, "rb") as old, open(target, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())


def _move_in(temporary: Path, folder: Path, names: list[str], stale: Collection[str]) -> None:
    for name in {*stale}.difference(names[:-1]) | {names[-1]}:
        (folder / name).unlink(missing_ok=True)
    for name in names:
        if (temporary / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / name, folder / name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _failed(out: str, error: OSError) -> CkptError:
    return CkptError(f"{out}: {error.strerror or error}", hint="free some space or write elsewhere")
