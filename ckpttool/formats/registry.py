"""The table of formats, and what each of them can hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from shlex import quote
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Payload
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.text import Info, dotted, shell
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import row_major
from ckpttool.formats import torchao
from ckpttool.formats.remarks import write_form
from ckpttool.io.pieces import Edited, Files, Pieces


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table. `module` reads and writes it, `endings` choose it for an output.

    `tensors_only`: it holds one state dict and no more. `aliases`: it can hold one tensor under two
    names. `folder`: it fills a folder, and is written by `layout_files`. `pickled`: it holds
    whatever torch.save pickles; the writer of one such format takes the container of any other.
    """

    name: str
    module: str
    title: str
    endings: tuple[str, ...]
    tensors_only: bool = False
    aliases: bool = True
    folder: bool = False
    pickled: bool = False

    def read(self, path: str) -> Checkpoint:
        """Return the index of the file at `path`. Raises `CkptError` if it is truncated, corrupt or
        unsafe.
        """
        checkpoint: Checkpoint = self._module.read(path)
        return checkpoint

    def layout(self, checkpoint: Checkpoint) -> Pieces:
        """Return the bytes of the checkpoint's file. Raises `Refused` for entries that the format
        cannot hold.
        """
        pieces: Pieces = self._module.layout(checkpoint)
        return pieces

    def layout_files(
        self, checkpoint: Checkpoint, name: str = "", max_shard_size: int | None = None
    ) -> Files:
        """Return the files of the checkpoint's folder; `name` is the name of the index,
        `max_shard_size` is in bytes.

        Raises `Refused` for entries that the format cannot hold.
        """
        content: Files = self._module.layout_files(checkpoint, self.name, name, max_shard_size)
        return content

    def layout_in_place(self, checkpoint: Checkpoint, name: str) -> Mapping[str, Edited] | None:
        """Return the edit of the file `name`, or of the files of the folder, that leaves all
        tensors in place.

        None if the format or the change needs everything to be rewritten.
        """
        lay_out = getattr(self._module, "layout_in_place", None)
        content: Edited | Mapping[str, Edited] | None = (
            None if lay_out is None else lay_out(checkpoint)
        )
        return {name: content} if isinstance(content, Edited) else content

    @property
    def _module(self) -> Any:
        return import_module(f"ckpttool.formats.{self.module}")


TABLE = (
    Format(
        "safetensors",
        "safetensors",
        "safetensors",
        (".safetensors",),
        tensors_only=True,
        aliases=False,
    ),
    Format(
        "torch_zip",
        "torch_zip",
        "torch zip (torch.save)",
        (".pt", ".pth", ".bin", ".ckpt"),
        pickled=True,
    ),
    Format("torch_legacy", "torch_legacy", "torch.save before 1.6 (no zip)", (), pickled=True),
    Format("torchscript", "torchscript", "TorchScript archive", ()),
    Format("pt2", "pt2", "exported program (.pt2)", (".pt2",)),
    Format(
        "sharded",
        "huggingface",
        "sharded safetensors (Hugging Face)",
        (".safetensors.index.json",),
        tensors_only=True,
        aliases=False,
        folder=True,
    ),
    Format(
        "sharded_bin",
        "huggingface",
        "sharded torch zip (Hugging Face)",
        (".bin.index.json",),
        tensors_only=True,
        folder=True,
    ),
    Format("rank_files", "rank_files", "files of the ranks of one run (torch.save)", ()),
    Format("deepspeed", "deepspeed", "DeepSpeed folder (ZeRO, universal)", ()),
    Format("accelerate", "accelerate", "accelerate's folder of an FSDP run", ()),
    Format(
        "dcp",
        "dcp",
        "torch.distributed.checkpoint folder",
        (".metadata", ".dcp"),
        folder=True,
        pickled=True,
    ),
)
# not a file: nothing reads or writes it
MEMORY = Format("memory", "", "a checkpoint in memory", (), pickled=True)
FORMATS = {row.name: row for row in (*TABLE, MEMORY)}


def format_for(out: str) -> Format:
    """Return the format of the ending of `out`. Raises `CkptError` for an ending that no format
    has.
    """
    for row in TABLE:
        if out.lower().endswith(row.endings):
            return row
    ending = os.path.splitext(out)[1]
    known = " ".join(ending for row in TABLE for ending in row.endings)
    raise CkptError(
        f"{out}: no format has the ending {ending!r}",
        hint=f"choose one of {known}, or name a folder",
    )


_WRITTEN_BY = "format"  # in ``__metadata__``: whose tensors these are, as in ``pt``


def check_in_place(checkpoint: Checkpoint, target: Format) -> None:
    """Raise `Refused` if writing a checkpoint over itself in the format `target` would lose other
    contents.
    """
    own = FORMATS[checkpoint.format]
    if own is not target and not (own.pickled and target.pickled):
        raise Refused(
            f"{checkpoint.source} is in another format ({own.title}) than its replacement"
            f" ({target.title})",
            hint="write another file: -o OUT",
        )


def fit(checkpoint: Checkpoint, target: Format, *, keep_aliases: bool = False) -> Checkpoint:
    """Return `checkpoint` as `target` can hold it, with the same keys and values.

    Raises `Refused`, all problems at once, for entries that the format has no place for.
    """
    lost: list[Problem] = []
    # the tensors of TorchScript's code are left out with it
    if checkpoint.format not in (target.name, "torchscript"):
        pickled = (
            target.pickled
            and FORMATS[checkpoint.format].pickled
            and checkpoint.container is not None
        )
        lost = [
            Problem("a storage that belongs to no tensor that is understood", storage.path)
            for storage in checkpoint.unreached
            if not (pickled and storage.is_referred)
        ]
    if lost:
        raise Refused(
            f"storages of no tensor that is understood would be lost: {target.title} has no place"
            " for them",
            hint=f"keep the format ({FORMATS[checkpoint.format].title}): choose an OUT that ends"
            " as CKPT does",
            problems=lost,
        )
    apart = [] if target.name in ("safetensors", "sharded") else torchao.come_apart(checkpoint)
    if apart:
        raise Refused(
            f"tensors of torchao would come apart: {target.title} has no place for the list of"
            " their parts",
            hint=f"let torchao put them together: {torchao.joined(checkpoint.source)}",
            problems=apart,
        )
    fitted = (
        _flat(checkpoint, target, keep_aliases)
        if target.tensors_only
        else _with_aliases(checkpoint)
    )
    # of safetensors
    fitted = write_form(fitted, in_metadata=target.tensors_only and not target.aliases)
    same = checkpoint.format == target.name or (
        target.pickled and FORMATS[checkpoint.format].pickled
    )
    if target.name == "safetensors" and checkpoint.format not in ("safetensors", "sharded"):
        # Some versions of transformers 4 do not load a file without it.
        fitted = replace(fitted, metadata={_WRITTEN_BY: "pt", **fitted.metadata})
    return fitted if same else replace(fitted, container=None)


def _flat(checkpoint: Checkpoint, target: Format, keep_aliases: bool) -> Checkpoint:
    """Return the checkpoint with its one state dict at the root, each tensor dense and under one
    name.
    """
    main = next(iter(checkpoint.state_dicts), None)
    problems = [
        Problem(f"a second section ({s.kind})", s.title)
        for s in checkpoint.sections
        if s is not main
    ]
    problems += [Problem("not a tensor", path) for path in checkpoint.others]
    if main is None:
        problems.append(Problem("no state dict", checkpoint.source))
    else:
        problems += [Problem("not a tensor", dotted(main.path, extra.key)) for extra in main.extras]
    if problems:
        hint = _hint(checkpoint)
        raise Refused(
            f"{target.title} holds tensors only, and one state dict", hint=hint, problems=problems
        )
    (section,) = checkpoint.sections
    aliases = {} if target.aliases else section.aliases()
    if aliases and not keep_aliases:
        raise Refused(
            f"{target.title} cannot hold one tensor under two names",
            hint="--keep-aliases keeps the first name and records the others in __metadata__",
            problems=[
                Problem(f"the same tensor as {first}", key) for key, first in aliases.items()
            ],
        )
    resolved = (
        e.payload.resolved(e) if isinstance(e.payload, Payload) else e for e in section.tensors
    )
    dense = tuple(entry if target.aliases else row_major(entry) for entry in resolved)
    section = replace(
        section, path="", tensors=tuple(e for e in dense if e.key not in aliases), modules=None
    )
    return replace(checkpoint, sections=(section,), metadata={**checkpoint.metadata, **aliases})


def _with_aliases(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the names that ``--keep-aliases`` recorded in ``__metadata__``."""
    if not checkpoint.metadata:
        return checkpoint
    (section,) = checkpoint.sections
    have = {entry.key: entry for entry in section.tensors}
    names = {
        key: first
        for key, first in checkpoint.metadata.items()
        if first in have and key not in have
    }
    names.pop(_WRITTEN_BY, None)
    again = [replace(have[first], key=key) for key, first in names.items()]
    metadata = {name: value for name, value in checkpoint.metadata.items() if name not in names}
    return replace(
        checkpoint,
        sections=(replace(section, tensors=(*section.tensors, *again)),),
        metadata=metadata,
    )


_NAMED = "import torch, sys; torch.save({'tensor': torch.load(sys.argv[1])}, sys.argv[2])"


def _hint(checkpoint: Checkpoint) -> str:
    if not checkpoint.state_dicts:
        if [entry.key for section in checkpoint.sections for entry in section.tensors] == [""]:
            name = f'python -c "{_NAMED}" {quote(checkpoint.source)} OUT.pt'
            return f"it is one tensor without a name; give it one: {name}"
        if checkpoint.optimizers:
            return (
                "it is an optimizer's state, which torch files can hold: choose an output that"
                " ends in .pt"
            )
    named = [section for section in checkpoint.state_dicts if section.path]
    others = [
        section.path
        for section in checkpoint.sections
        if section.kind != "state_dict" or not section.path
    ]
    others += checkpoint.others
    takes_part = bool(named and others) and "::" not in checkpoint.source
    hint = "choose an output that ends in .pt"
    if takes_part:
        hint = f"take the section alone: {checkpoint.part(named[0].path)}, or {hint}"
    extras = [extra.key for section in checkpoint.state_dicts[:1] for extra in section.extras]
    if extras and checkpoint.source != MEMORY.title:
        source = checkpoint.part(named[0].path) if takes_part else checkpoint.source
        line = shell("ckpttool", "remap", source, *_dropped(extras), "-o", "OUT.safetensors")
        hint = f"{hint}; to leave out what is not a tensor: {line}"
    return hint


_EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` returns


def _dropped(keys: Sequence[str]) -> list[str]:
    """Return the options that drop these keys of a state dict, also if the command renames them."""
    if all(key.endswith(_EXTRA_STATE) for key in keys):
        return ["--drop", f"*{_EXTRA_STATE}"]
    return [word for key in keys for word in ("--drop", key)]


def holds_versions(checkpoint: Checkpoint) -> bool:
    """Return whether the format of the checkpoint has a place for module versions
    (``_metadata``).
    """
    return FORMATS[checkpoint.format].pickled and checkpoint.format != "dcp"


def loses_versions(checkpoint: Checkpoint, target: Format) -> bool:
    """Return whether there are module versions (``_metadata``), and the format has no place for
    them.
    """
    versions = any(section.modules is not None for section in checkpoint.sections)
    return versions and not has_place_for_versions(target)


def has_place_for_versions(target: Format) -> bool:
    """Return whether the format, to be written, has a place for module versions."""
    return not target.tensors_only and target.name != "dcp"


def losses(checkpoint: Checkpoint, target: Format) -> list[str]:
    """Return sentences about other contents that the output will not hold."""
    notes: list[str] = []
    if checkpoint.format == "torch_legacy" and target.name == "torch_zip":
        notes.append(Info("written in the format of torch 1.6 and later", "written"))
    if checkpoint.format == "torchscript":
        notes.append("the state dict alone: the code of the TorchScript archive is left out")
    if loses_versions(checkpoint, target):
        notes.append(
            f"the module versions in _metadata are left out: {target.title} has no place for them"
        )
    forms = [section.form for section in checkpoint.sections if section.form is not None]
    if forms and target.name == "dcp":
        notes.append(
            f"nothing will say that this is the {forms[0]} form, whose keys fit another: read it"
            f" with --from {forms[0]}"
        )
    if not target.tensors_only and _with_aliases(checkpoint).metadata.items() - {
        (_WRITTEN_BY, "pt")
    }:
        notes.append(f"__metadata__ is left out: {target.title} has no place for it")
    return notes
