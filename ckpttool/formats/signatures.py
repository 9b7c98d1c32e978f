"""How a file of each built-in format begins, and what other files are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from shlex import quote

from ckpttool.core.errors import CkptError
from ckpttool.formats.folders import INDEX
from ckpttool.formats.look import Look
from ckpttool.formats.safetensors import BLANKS, MAX_HEADER
from ckpttool.io.paths import name

# the first pickle
LEGACY_START = re.compile(rb"\x80[\2-\5](\x95\x0d\0{7})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.")

_WEIGHT_MAP = re.compile(rb'\s*\{.*"weight_map"', re.DOTALL)
_PROGRAM = re.compile(r"models/.+\.json")


def is_safetensors(look: Look) -> bool:
    """Return whether the file begins as one of safetensors: the length of a header, and JSON."""
    head = look.head
    if len(head) <= 8 or int.from_bytes(head[:8], "little") > MAX_HEADER:
        return False
    # empty if all of it are blanks: more than the first bytes may come first
    header = head[8:].lstrip(BLANKS)
    return header[:1] in (b"{", b"")


def is_index(look: Look) -> bool:
    """Return whether the file is the index of shards, by its content or its name.

    A JSON file called ``model.safetensors.index.json`` is one: its reader says what is wrong with
    it.
    """
    has_name = INDEX.fullmatch(name(look.path)) and look.head.lstrip().startswith(b"{")
    return bool(has_name or _WEIGHT_MAP.match(look.head))


def is_torch_legacy(look: Look) -> bool:
    """Return whether torch.save before 1.6 wrote the file. Raises `CkptError` if it is a tar
    archive too, which torch.load reads first.
    """
    if not LEGACY_START.match(look.head):
        return False
    if _is_tar(look.head):
        raise CkptError(
            f"{look.path} is also a tar archive: torch.load reads another content than the first"
            " bytes announce",
            hint=_HOSTILE,
        )
    return True


def is_pickle(look: Look) -> bool:
    """Return whether the file begins as Python's own pickles do since protocol 2."""
    return _PICKLE(look.head) is not None


def is_program(look: Look) -> bool:
    """Return whether the zip archive holds exported or compiled programs."""
    if "serialized_exported_program.json" in look.inner_records:
        return True
    return any(map(_is_of_program, look.inner_records))


def _is_of_program(record: str) -> bool:
    return record.startswith("data/aotinductor/") or _PROGRAM.fullmatch(record) is not None


def is_torchscript(look: Look) -> bool:
    return {"data.pkl", "constants.pkl"} <= look.inner_records and not is_program(look)


def is_torch_zip(look: Look) -> bool:
    records = look.inner_records
    return "data.pkl" in records and "constants.pkl" not in records and not is_program(look)


def unknown(look: Look) -> CkptError:
    """Return what the file is instead, if its content shows it."""
    path = look.path
    if look.is_zip:
        return _unknown_zip(look)
    for matches, what, hint in _KNOWN:
        if matches(look.head):
            return CkptError(f"{path} is {what}", hint=hint.format(path=quote(path)))
    return CkptError(f"{path} is not a checkpoint that ckpttool knows", hint=_READS)


def is_damaged_safetensors(look: Look) -> bool:
    """Return whether JSON follows eight bytes that are not its length: the reader of safetensors
    says what is wrong.
    """
    if look.is_zip or any(matches(look.head) for matches, _, _ in _KNOWN):
        return False
    return look.head[8:].lstrip().startswith(b"{")


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


_PICKLE = _pattern(rb"\x80[\1-\5]")  # of protocol 2 or later


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
    (_PICKLE, "a pickle that torch.save did not write", _PICKLED),
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


def _unknown_zip(look: Look) -> CkptError:
    """Return what the zip archive is instead of a checkpoint."""
    path, names = look.path, look.records
    inner = look.inner_records
    if "model.json" in inner and any(name.startswith("tensors/") for name in inner):
        hint = "save its state dict with torch: " + _torch(
            "torch.jit.load(sys.argv[1]).state_dict()", quote(path)
        )
        return CkptError(f"{path} is a TorchScript archive of torch 1.0 to 1.3", hint=hint)
    if ".data/extern_modules" in inner:
        return CkptError(f"{path} is a torch.package archive, code with its data", hint=_PACKAGED)
    if any(name.endswith("archive_format") for name in inner):
        return CkptError(
            f"{path} is a .pt2 archive without a program in it",
            hint="export or compile the model again",
        )
    if names and all(name.endswith(".npy") for name in names):
        return CkptError(f"{path} is a NumPy archive (.npz)", hint=_TO_SAFETENSORS)
    return CkptError(
        f"{path} is a zip archive that torch did not write", hint=f"unzip it; {_READS}"
    )
