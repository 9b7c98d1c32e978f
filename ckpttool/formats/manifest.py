"""Manifests: the contents of a checkpoint as digests, without its bytes; an in-toto statement, which other tools sign.

The subjects are the checkpoint's files, the predicate lists its sections, tensors and other objects, each with a
SHA-256: for a dense tensor of its elements in row-major order, so that it is the same in every format. The statement
has the layout of in-toto's attestation framework (github.com/in-toto/attestation, spec/v1/statement.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ckpttool.core.checkpoint import (
    KINDS,
    Checkpoint,
    Digested,
    ExtraEntry,
    Lazy,
    Section,
    Span,
    Storage,
    TensorEntry,
    Unreached,
    contiguous_stride,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError
from ckpttool.core.schema import COUNT, DTYPE, SHAPE, TEXT, TEXTS, check, list_of, nullable, object_of, one_of, plain
from ckpttool.distributed.job import Question, answers
from ckpttool.evaluate.compare import sha256, sha256_of
from ckpttool.formats import strict_json
from ckpttool.formats.torch.tensors import kind
from ckpttool.io import files, paths

_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:ckpttool:manifest:1"
_AGAIN = "write it again: ckpttool inspect CKPT --manifest FILE"
_DENSE = "strided"
_DEEPEST = 64  # folders inside each other behind a URL
_FILE, _TENSORS, _EXTRAS, _UNREACHED = "file", "tensors", "extras", "unreached"

_SHA256 = plain(
    "a SHA-256 in hexadecimal",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    {"type": "string", "pattern": "^[0-9a-f]{64}$"},
)
_TENSOR = object_of(
    {"key": TEXT, "dtype": DTYPE, "shape": SHAPE, "bytes": COUNT, "kind": TEXT, "sha256": nullable(_SHA256)},
    {"alias_of": nullable(TEXT)},
)
_EXTRA = object_of({"key": TEXT, "sha256": nullable(_SHA256)})
_SECTION = object_of(
    {
        "path": TEXT,
        "kind": one_of(*KINDS),
        "tensors": list_of(_TENSOR, unique="key"),
        "extras": list_of(_EXTRA, unique="key"),
    }
)
STATEMENT = replace(
    object_of(
        {
            "_type": one_of(_TYPE),
            "subject": list_of(object_of({"name": TEXT, "digest": object_of({"sha256": _SHA256})}), unique="name"),
            "predicateType": one_of(PREDICATE),
            "predicate": object_of(
                {
                    "format": TEXT,
                    "sections": list_of(_SECTION, unique="path"),
                    "others": TEXTS,
                    "unreached": list_of(object_of({"path": TEXT, "bytes": COUNT, "sha256": _SHA256}), unique="path"),
                }
            ),
        }
    ),
    title=_TYPE,
)


# Writing


def statement(checkpoint: Checkpoint, path: str | None, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the manifest of the checkpoint in the files at `path`, as JSON. Reads each byte of files and tensors.

    `path` is None for a checkpoint in memory, whose manifest lists no files. Files in `leave_out` are not listed.
    Raises `CkptError` if something cannot be read.
    """
    without = set(map(os.path.realpath, leave_out))
    have = {} if path is None else _files(path)
    names = {name: file for name, file in have.items() if os.path.realpath(file) not in without}
    digests = answers(f"hashing {path or checkpoint.source}", dict(_digests(checkpoint, names)))
    return {
        "_type": _TYPE,
        "subject": [{"name": name, "digest": {"sha256": digests[_FILE, name]}} for name in names],
        "predicateType": PREDICATE,
        "predicate": {
            "format": checkpoint.format,
            "sections": [_section_json(section, digests) for section in checkpoint.sections],
            "others": list(checkpoint.others),
            "unreached": [
                {"path": found.path, "bytes": found.storage.nbytes, "sha256": digests[_UNREACHED, found.path]}
                for found in checkpoint.unreached
            ],
        },
    }


def _digests(checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Question]]:
    for name, file in names.items():
        yield (_FILE, name), Question(name, files.size(file), partial(_of_file, file))
    for section in checkpoint.sections:
        aliases = section.aliases()
        for entry in section.tensors:
            if entry.key not in aliases:
                yield (_TENSORS, section.path, entry.key), Question(entry.key, entry.nbytes, partial(sha256, entry))
        for extra in all_extras(section):
            yield (_EXTRAS, section.path, extra.key), Question(extra.key, 0, partial(sha256, extra))
    for found in checkpoint.unreached:
        data = found.storage.data
        yield (_UNREACHED, found.path), Question(found.path, data.length, partial(sha256_of, data))


def _section_json(section: Section, digests: Mapping[tuple[str, ...], str | None]) -> dict[str, Any]:
    aliases = section.aliases()
    tensors = [
        {
            "key": entry.key,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "bytes": entry.nbytes,
            "kind": kind(entry),
            "sha256": digests[_TENSORS, section.path, aliases.get(entry.key, entry.key)],
            **({"alias_of": aliases[entry.key]} if entry.key in aliases else {}),
        }
        for entry in section.tensors
    ]
    extras = [{"key": e.key, "sha256": digests[_EXTRAS, section.path, e.key]} for e in all_extras(section)]
    return {"path": section.path, "kind": section.kind, "tensors": tensors, "extras": extras}


def all_extras(section: Section) -> tuple[ExtraEntry, ...]:
    """Return the entries that are not tensors; an optimizer's groups and hyperparameters are one more."""
    if section.mapping is None:
        return section.extras
    return (*section.extras, ExtraEntry("param_groups", value=_without_tensors(section.mapping)))


def _without_tensors(value: Any) -> Any:
    """Return the value with its key instead of every tensor and every other entry."""
    if isinstance(value, Mapping):
        return {key: _without_tensors(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(member) for member in value]
    return value.key if isinstance(value, (TensorEntry, ExtraEntry)) else value


def _files(source: str) -> dict[str, str]:
    """Return the checkpoint's files by their names in its folder: all files below it, since any may be a part."""
    if paths.is_url(source):
        return dict(_below(source)) if files.is_dir(source) else {paths.name(source): source}
    if os.path.isdir(source):
        within = (os.path.join(home, name) for home, _, names in os.walk(source) for name in names)
        return {os.path.relpath(path, source): path for path in sorted(within) if files.is_file(path)}
    return {paths.name(path): path for path in sorted(files.files_of(source))}


def _below(folder: str, way: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the files behind a URL and in all folders below it, by their relative paths."""
    if depth > _DEEPEST:
        raise CkptError(f"{folder}: more than {_DEEPEST} folders inside each other", hint="name one of them")
    for name in files.names_in(folder):
        path = paths.join(folder, name)
        if files.is_dir(path):
            yield from _below(path, f"{way}{name}/", depth + 1)
        else:
            yield f"{way}{name}", path


def _of_file(path: str) -> str:
    return sha256_of(Span(path, 0, files.size(path)))


# Reading


def read(path: str) -> Checkpoint:
    """Return the index of the checkpoint of the manifest at `path`; its tensors have digests and no bytes.

    Raises `CkptError`, with the JSON path of every fault, if it is not a manifest.
    """
    data = strict_json.read_file(path, _AGAIN)
    check(STATEMENT, data, f"{path} is not a manifest of a checkpoint", _AGAIN)
    own, subjects = data["predicate"], {file["name"]: file["digest"]["sha256"] for file in data["subject"]}
    return Checkpoint(
        source=path,
        format="manifest",
        nbytes=files.size(path),
        sections=tuple(_section(path, section) for section in own["sections"]),
        others=tuple(own["others"]),
        container=subjects,
        unreached=tuple(
            Unreached(found["path"], _storage(path, found["bytes"], found["sha256"])) for found in own["unreached"]
        ),
    )


def _section(path: str, data: Mapping[str, Any]) -> Section:
    storages: dict[object, Storage] = {}
    tensors = tuple(_tensor(path, tensor, storages) for tensor in data["tensors"])
    extras = tuple(ExtraEntry(extra["key"], Digested(extra["sha256"])) for extra in data["extras"])
    return Section(data["path"], data["kind"], tensors, extras)


def _tensor(path: str, data: Mapping[str, Any], storages: dict[object, Storage]) -> TensorEntry:
    """Return the entry; aliases share a storage. Raises `CkptError` if it contradicts itself."""
    shape, digest, dense = tuple(data["shape"]), data["sha256"], data["kind"] == _DENSE
    entry = TensorEntry(
        *(data["key"], data["dtype"], shape, contiguous_stride(shape), 0, None, data["kind"], data["bytes"]),
        payload=None if dense else Digested(digest),
    )
    if not dense:
        return entry
    if digest is None or data["bytes"] != entry.numel * itemsize(entry.dtype):
        raise CkptError(f"{path}: {entry.key} has another size than its shape, or no digest", hint=_AGAIN)
    name = data.get("alias_of") or entry.key, digest, entry.nbytes
    return replace(entry, storage=storages.setdefault(name, _storage(path, entry.nbytes, digest)), packed_bytes=0)


def _storage(path: str, length: int, digest: str) -> Storage:
    def no_values() -> NoReturn:
        raise CkptError(f"{path} holds digests, and no values", hint="name the checkpoint that it was written for")

    return Storage(Lazy(length, no_values, digest))


def other_files(manifest: Checkpoint, path: str) -> tuple[list[str], list[str]]:
    """Return the manifest's files that differ or are missing at `path`, and the files there that it does not list.

    Reads all of the former. The manifest may be next to its files, and is left out.
    """
    subjects, have = manifest.container, _files(path)
    assert isinstance(subjects, dict)
    both = [name for name in subjects if name in have]
    asked = {name: Question(name, files.size(have[name]), partial(_of_file, have[name])) for name in both}
    digests = answers("hashing files", asked)
    itself = os.path.realpath(manifest.source)
    more = [name for name, file in have.items() if name not in subjects and os.path.realpath(file) != itself]
    return [name for name, digest in subjects.items() if digests.get(name) != digest], more
