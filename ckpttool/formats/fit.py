"""What an output can hold: fit a checkpoint to it, refuse what it has no place for, and say what is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint, Payload
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.text import Info, dotted, shell
from ckpttool.evaluate.chunks import row_major
from ckpttool.formats import torchao
from ckpttool.formats.protocol import Format
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import write_form

_WRITTEN_BY = "format"  # in ``__metadata__``: whose tensors these are, as in ``pt``


def check_in_place(checkpoint: Checkpoint, target: Format) -> None:
    """Raise `Refused` if writing a checkpoint over itself in the format `target` would lose other
    contents.
    """
    own = format_of(checkpoint)
    if own is not target and not (own.holds.objects and target.holds.objects):
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
    own = format_of(checkpoint)
    both_pickled = own.holds.objects and target.holds.objects
    # the tensors of TorchScript's code are left out with it
    if own is not target and not own.holds.code_storages:
        pickled = both_pickled and checkpoint.container is not None
        lost = [
            Problem("a storage that belongs to no tensor that is understood", storage.path)
            for storage in checkpoint.unreached
            if not (pickled and storage.is_referred)
        ]
    if lost:
        raise Refused(
            f"storages of no tensor that is understood would be lost: {target.title} has no place"
            " for them",
            hint=f"keep the format ({own.title}): choose an OUT that ends as CKPT does",
            problems=lost,
        )
    apart = [] if target.holds.subclass_parts else torchao.come_apart(checkpoint)
    if apart:
        raise Refused(
            f"tensors of torchao would come apart: {target.title} has no place for the list of"
            " their parts",
            hint=f"let torchao put them together: {torchao.joined(checkpoint.source)}",
            problems=apart,
        )
    fitted = (
        _flat(checkpoint, target, keep_aliases)
        if holds_tensors_only(target)
        else _with_aliases(checkpoint)
    )
    fitted = write_form(fitted, in_metadata=target.holds.metadata)
    if target.holds.metadata and not target.folder and not own.holds.metadata:
        # Some versions of transformers 4 do not load a file without it.
        fitted = replace(fitted, metadata={_WRITTEN_BY: "pt", **fitted.metadata})
    return fitted if own is target or both_pickled else replace(fitted, container=None)


def holds_tensors_only(target: Format) -> bool:
    """Return whether the format holds one state dict, and no more."""
    return not target.holds.objects and not target.holds.programs


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
    aliases = {} if target.holds.aliases else section.aliases()
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
    dense = tuple(entry if target.holds.aliases else row_major(entry) for entry in resolved)
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
    if extras and not checkpoint.in_memory:
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


def loses_versions(checkpoint: Checkpoint, target: Format) -> bool:
    """Return whether there are module versions (``_metadata``), and the format has no place for
    them.
    """
    versions = any(section.modules is not None for section in checkpoint.sections)
    return versions and not target.holds.versions


def losses(checkpoint: Checkpoint, target: Format) -> list[str]:
    """Return sentences about other contents that the output will not hold."""
    notes: list[str] = []
    own = format_of(checkpoint)
    if own.succeeded_by == target.name:
        notes.append(Info(f"written as {target.title}, which succeeds {own.title}", "written"))
    if own.holds.code_storages:
        notes.append("the state dict alone: the code of the TorchScript archive is left out")
    if loses_versions(checkpoint, target):
        notes.append(
            f"the module versions in _metadata are left out: {target.title} has no place for them"
        )
    forms = [section.form for section in checkpoint.sections if section.form is not None]
    if forms and not target.holds.form:
        notes.append(
            f"nothing will say that this is the {forms[0]} form, whose keys fit another: read it"
            f" with --from {forms[0]}"
        )
    if not target.holds.metadata and _with_aliases(checkpoint).metadata.items() - {
        (_WRITTEN_BY, "pt")
    }:
        notes.append(f"__metadata__ is left out: {target.title} has no place for it")
    return notes
