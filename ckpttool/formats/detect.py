"""Detect the format of a file by its content."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from shlex import quote

from ckpttool.containers.zip_read import read_archive
from ckpttool.core.errors import CkptError
from ckpttool.formats.safetensors import BLANKS, MAX_HEADER
from ckpttool.io import files, paths
from ckpttool.io.files import opened

# the first pickle
LEGACY_START = re.compile(rb"\x80[\2-\5](\x95\x0d\0{7})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.")

_HEAD = 4096  # bytes that tell every format
_WEIGHT_MAP = re.compile(rb'\s*\{.*"weight_map"', re.DOTALL)
_ZIP_MAGIC, _ZIP_END, _ZIP_TAIL = b"PK\3\4", b"PK\5\6", 65_557


def sniff(path: str) -> str:
    """Return the name in the table of formats of the file at `path`, such as ``safetensors`` or
    ``torch_zip``.

    Raises `CkptError` for everything else; it says what the file is instead, if its content shows
    it.
    """
    _check_exists(path)
    with opened(path) as file:
        head = file.read(_HEAD)
    if not head:
        raise CkptError(f"{path} is empty", hint="download or copy it again")
    if head.startswith(_ZIP_MAGIC):
        with opened(path) as file:
            file.seek(max(0, file.size - _ZIP_TAIL))
            has_end = _ZIP_END in file.read()
        if has_end:
            return classify_zip(path, [record.name for record in read_archive(path).records])
        raise CkptError(
            f"{path} is truncated: a zip archive without its end ({files.size(path)} bytes are"
            " there)",
            hint="download or copy it again",
        )
    # empty if all of it are blanks: more than `_HEAD` may come first
    header = head[8:].lstrip(BLANKS)
    if (
        len(head) > 8
        and header[:1] in (b"{", b"")
        and int.from_bytes(head[:8], "little") <= MAX_HEADER
    ):
        return "safetensors"
    if _WEIGHT_MAP.match(head):
        return "sharded"
    if LEGACY_START.match(head):
        if _is_tar(head):
            raise CkptError(
                f"{path} is also a tar archive: torch.load reads another content than the first"
                " bytes announce",
                hint=_HOSTILE,
            )
        return "torch_legacy"
    for matches, what, hint in _KNOWN:
        if matches(head):
            raise CkptError(f"{path} is {what}", hint=hint.format(path=quote(path)))
    if head[8:].lstrip().startswith(b"{"):
        return "safetensors"  # a broken one: its reader says how
    raise CkptError(f"{path} is not a checkpoint that ckpttool knows", hint=_READS)


def _check_exists(path: str) -> None:
    if "\0" in path:
        return
    if files.is_dir(path):
        endings = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2")
        inside = [paths.join(path, name) for name in files.names_in(path) if name.endswith(endings)]
        hint = (
            f"name one of its files, for example {inside[0]}"
            if inside
            else ("name one checkpoint file")
        )
        raise CkptError(f"{path} is a directory, not a checkpoint file", hint=hint)
    if paths.is_url(path) or files.exists(path):
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise CkptError(
            f"no such file: {path}",
            hint=f"the folder {folder} does not exist either: check the path",
        )
    from difflib import get_close_matches

    close = get_close_matches(Path(path).name, files.names_in(str(folder)), n=3, cutoff=0.6)
    hint = (
        "did you mean " + " or ".join(str(folder / name) for name in close) + "?"
        if close
        else "check the path"
    )
    raise CkptError(f"no such file: {path}", hint=hint)


# Files that are not zip archives


def _is_tar(head: bytes) -> bool:
    """Return whether Python's tarfile takes the file for an archive; torch.load tries it first."""
    import tarfile

    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _starts(*magics: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(magics)


def _pattern(pattern: bytes) -> Callable[[bytes], object]:
    return re.compile(pattern, re.DOTALL | re.IGNORECASE).match


def _torch(expression: str, path: str) -> str:
    return f'python -c "import torch, sys; torch.save({expression}, sys.argv[2])" {path} OUT.pt'


_HOSTILE = "the file was made to look harmless: do not load it"
_READS = (
    "ckpttool reads safetensors files, what torch.save and torch.jit.save write, and .pt2 programs"
)
_SCRIPTED = "use the TorchScript archive or the checkpoint that it was made from"
_PACKAGED = (
    "save the state dict of the model in it:"
    " torch.save(torch.package.PackageImporter(...).load_pickle(...)...)"
)
_AGAIN = (
    "download it again: the address needs a login, or is the address of the page and not of"
    " the file (…/resolve/…)"
)
_PICKLED = (
    "load it with the program that wrote it, if you trust it, and keep its tensors:"
    " torch.save(state_dict, 'OUT.pt')"
)
_TO_SAFETENSORS = "convert it to a safetensors file with the library that wrote it"


def _is_gzipped_tar(head: bytes) -> bool:
    if not head.startswith(b"\x1f\x8b"):
        return False
    try:
        unpacked = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 512)
    except zlib.error:
        return False
    return unpacked[257:262] == b"ustar"


# What the first bytes show, what the file is, and what to do about it; `{path}` in the hint is the
# file.
_KNOWN: tuple[tuple[Callable[[bytes], object], str, str], ...] = (
    (
        _starts(b"version https://git-lfs.github.com/spec/"),
        "a Git LFS pointer, not the file itself",
        "fetch the file: git lfs pull --include {path}",
    ),
    (_pattern(rb"(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head|<body)"), "an HTML page", _AGAIN),
    (_pattern(rb"(\xef\xbb\xbf)?\s*<(\?xml|error>)"), "an XML page", _AGAIN),
    (_pattern(rb"\x80[\1-\5]"), "a pickle that torch.save did not write", _PICKLED),
    (_is_gzipped_tar, "a tar archive compressed with gzip", "unpack it first: tar -xzf {path}"),
    (_starts(b"\x1f\x8b"), "compressed with gzip", "decompress it first: gzip -dk {path}"),
    (_starts(b"\xfd7zXZ\0"), "compressed with xz", "decompress it first: xz -dk {path}"),
    (_starts(b"\x28\xb5\x2f\xfd"), "compressed with zstd", "decompress it first: zstd -dk {path}"),
    (
        _pattern(rb"BZh[1-9]1AY&SY"),
        "compressed with bzip2",
        "decompress it first: bzip2 -dk {path}",
    ),
    (_starts(b"7z\xbc\xaf\x27\x1c"), "a 7z archive", "unpack it first: 7z x {path}"),
    (
        lambda head: (
            head[257:262] == b"ustar"
            and head.startswith((b"sys_info\0", b"pickle\0", b"storages\0"))
        ),
        "in the tar format of torch.save before torch 0.1.10",
        "if you trust it, load and save it again: "
        + _torch("torch.load(sys.argv[1], weights_only=False)", "{path}"),
    ),
    (lambda head: head[4:8] == b"PTMF", "a TorchScript model for mobile (flatbuffer)", _SCRIPTED),
    (lambda head: head[257:262] == b"ustar", "a tar archive", "unpack it first: tar -xf {path}"),
    (_starts(b"\x93NUMPY"), "a NumPy array (.npy)", _TO_SAFETENSORS),
    (_starts(b"\x89HDF\r\n\x1a\n"), "an HDF5 file, as Keras writes it", _TO_SAFETENSORS),
    (
        _starts(b"GGUF", b"FUGG"),
        "a GGUF file, as llama.cpp reads it",
        "use the checkpoint that it was made from",
    ),
    (
        # a ModelProto: ir_version, then producer_name or the graph
        _pattern(rb"\x08[\1-\x1f](\x12.[ -~]+\x1a|\x3a)"),
        "an ONNX model",
        "use the PyTorch checkpoint that it was exported from",
    ),
    (
        _pattern(rb'\s*(\{\s*["}]|\[\s*[\[\{"\d\]])'),
        "JSON text",
        "name the file that holds the tensors",
    ),
    (_starts(b"PK\5\6"), "an empty zip archive", "download or copy it again"),
)


# Zip archives

_PROGRAM = re.compile(r"models/.+\.json")


def classify_zip(path: str, names: Collection[str]) -> str:
    """Return the name in the table of formats of the zip archive at `path` with records of these
    `names`.

    Raises `CkptError` for an archive without a checkpoint, or with one that ckpttool does not read.
    """
    # torch puts all records into one folder, mostly
    inner = {name.partition("/")[2] for name in names} | set(names)
    if "serialized_exported_program.json" in inner or any(
        _PROGRAM.fullmatch(name) for name in inner
    ):
        return "pt2"
    if any(name.startswith("data/aotinductor/") for name in inner):
        return "pt2"
    if "data.pkl" in inner:
        return "torchscript" if "constants.pkl" in inner else "torch_zip"
    if "model.json" in inner and any(name.startswith("tensors/") for name in inner):
        hint = "save its state dict with torch: " + _torch(
            "torch.jit.load(sys.argv[1]).state_dict()", quote(path)
        )
        raise CkptError(f"{path} is a TorchScript archive of torch 1.0 to 1.3", hint=hint)
    if ".data/extern_modules" in inner:
        raise CkptError(f"{path} is a torch.package archive, code with its data", hint=_PACKAGED)
    if any(name.endswith("archive_format") for name in inner):
        raise CkptError(
            f"{path} is a .pt2 archive without a program in it",
            hint="export or compile the model again",
        )
    if names and all(name.endswith(".npy") for name in names):
        raise CkptError(f"{path} is a NumPy archive (.npz)", hint=_TO_SAFETENSORS)
    raise CkptError(f"{path} is a zip archive that torch did not write", hint=f"unzip it; {_READS}")
