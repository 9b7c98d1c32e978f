"""Whether an output can and may be written: asked before any work is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.io.files import exists, is_dir
from ckpttool.io.paths import is_url, parent


def check_file(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raise `CkptError` if the file `out` cannot or must not be written. Called before any work is
    done.

    `source` are the files that are read; `force` never allows writing over one of them, `in_place`
    does.
    """
    path = Path(out)
    if is_url(out):
        _check_url(out, in_place)
    elif not path.parent.is_dir():
        raise _without_folder(out, path.parent)
    elif path.is_symlink():
        _check_link(path, force)
    if is_dir(out):
        raise CkptError(f"{out} is a folder", hint="name a file")
    if not is_url(out):
        if path.exists() and not path.is_file():
            raise CkptError(f"{out} is not a regular file", hint="name a file that can be replaced")
        if not os.access(path.resolve().parent, os.W_OK):
            raise CkptError(
                f"{path.resolve().parent}: not writable",
                hint="choose another folder for the output",
            )
    if not in_place:
        check_no_source(out, source)
    if not (force or in_place) and exists(out):
        raise CkptError(f"{out} exists", hint="pass --force to overwrite it, or name another file")


def _check_url(out: str, in_place: bool) -> None:
    from ckpttool.io import write_remote as remote

    remote.check_url(out, in_place=in_place)


def _check_link(path: Path, force: bool) -> None:
    link, folder = path.lstat(), path.parent.stat()
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    # as the kernel's fs.protected_symlinks
    if shared and link.st_uid not in (os.geteuid(), folder.st_uid):
        raise CkptError(
            f"{path} is a link that another user made, in a folder of all", hint="name another file"
        )
    try:
        path.stat()
    except FileNotFoundError:
        if not force:
            raise CkptError(
                f"{path} is a link to a file that does not exist: {os.readlink(path)}",
                hint="pass --force to write the file that it points to, or name another file",
            ) from None
    except OSError as error:
        raise CkptError(
            f"{path}: {error.strerror}", hint=f"look at the links: ls -l {path}"
        ) from error


def check_folder(
    out: str, present: Collection[str], source: str, *, force: bool, in_place: bool
) -> None:
    """Raise `CkptError` if a checkpoint cannot or must not be written into the folder `out`.

    `present` are the files of a checkpoint that is there already, `source` the path that is read.
    """
    if is_url(out):
        _check_url(out, in_place)
        is_source = is_one_of(out, (source, parent(source)))
    else:
        home = source if os.path.isdir(source) else os.path.dirname(source) or "."
        is_source = os.path.isdir(out) and os.path.isdir(home) and os.path.samefile(out, home)
    if (exists(out) or os.path.islink(out)) and not is_dir(out):
        raise CkptError(f"{out} is a file", hint="name a folder")
    if not is_url(out):
        place = Path(out) if os.path.isdir(out) else Path(out).parent
        if not place.is_dir():
            raise _without_folder(out, place)
        if not os.access(place, os.W_OK):
            raise CkptError(f"{place}: not writable", hint="choose another folder for the output")
    if is_source and not in_place:
        raise CkptError(f"{out} is the folder of the source", hint=_another("folder", out))
    if not present:
        return
    hint = ""
    if is_url(out):
        hint = (
            "name another folder, or remove it first: a store cannot replace several files at once"
        )
    elif not force and not in_place:
        hint = "pass --force to replace it, or name another folder"
    if hint:
        raise CkptError(f"{out} holds a checkpoint: {min(present)}", hint=hint)


def check_no_source(out: str, source: Iterable[str]) -> None:
    """Raise `CkptError` if the file is a source, maybe under another name."""
    if is_one_of(out, source):
        raise CkptError(f"{out} is the source itself", hint=_another("file", out))


def is_one_of(out: str, files: Iterable[str]) -> bool:
    """Return True if the file is one of these, maybe under another name."""
    if is_url(out):
        return out.rstrip("/") in {name.rstrip("/") for name in files}
    return os.path.exists(out) and any(
        os.path.samefile(out, name) for name in files if os.path.exists(name)
    )


def _another(what: str, out: str) -> str:
    return f"name another {what}" + ("" if is_url(out) else ", or pass --in-place")


def _without_folder(out: str, folder: Path) -> CkptError:
    """Return the error for an output whose folder does not exist."""
    files = [place for place in (folder, *folder.parents) if os.path.lexists(place)]
    if files and not files[0].is_dir():
        return CkptError(f"{out}: {files[0]} is not a folder", hint="name another place")
    return CkptError(f"{out}: no such folder: {folder}", hint=shell("mkdir", "-p", str(folder)))
