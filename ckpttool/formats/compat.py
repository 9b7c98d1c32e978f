"""Make a checkpoint fit the format that it will be written in, or refuse what that format cannot hold."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint, Resolvable
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.keys import dotted
from ckpttool.core.text import Info
from ckpttool.evaluate.chunks import row_major
from ckpttool.formats.registry import FORMATS, Format
from ckpttool.formats.remarks import write_form
from ckpttool.formats.safetensors import torchao

_WRITTEN_BY = "format"  # in ``__metadata__``: whose tensors these are, as in ``pt``


def check_in_place(checkpoint: Checkpoint, target: Format) -> None:
    """Raise `Refused` if replacing a checkpoint by itself in the format `target` would lose other contents."""
    own = FORMATS[checkpoint.format]
    if own is not target and not (own.pickled and target.pickled):
        raise Refused(
            f"{checkpoint.source} is in another format ({own.title}) than its replacement ({target.title})",
            hint="write another file: -o OUT",
        )


def fit(checkpoint: Checkpoint, target: Format, *, keep_aliases: bool = False) -> Checkpoint:
    """Return `checkpoint` as `target` can hold it, with the same keys and values.

    Raises `Refused`, all problems at once, for entries that the format has no place for.
    """
    lost: list[Problem] = []
    if checkpoint.format not in (target.name, "torchscript"):  # the tensors of TorchScript's code are left out with it
        pickled = target.pickled and FORMATS[checkpoint.format].pickled and checkpoint.container is not None
        lost = [
            Problem("a storage that belongs to no tensor that is understood", storage.path)
            for storage in checkpoint.unreached
            if not (pickled and storage.is_referred)
        ]
    if lost:
        raise Refused(
            f"storages of no tensor that is understood would be lost: {target.title} has no place for them",
            hint=f"keep the format ({FORMATS[checkpoint.format].title}): choose an OUT that ends as CKPT does",
            problems=lost,
        )
    apart = [] if target.name in ("safetensors", "sharded") else torchao.come_apart(checkpoint)
    if apart:
        raise Refused(
            f"tensors of torchao would come apart: {target.title} has no place for the list of their parts",
            hint=f"let torchao put them together: {torchao.joined(checkpoint.source)}",
            problems=apart,
        )
    fitted = _flat(checkpoint, target, keep_aliases) if target.tensors_only else _with_aliases(checkpoint)
    fitted = write_form(fitted, in_metadata=target.tensors_only and not target.aliases)  # of safetensors
    same = checkpoint.format == target.name or (target.pickled and FORMATS[checkpoint.format].pickled)
    return fitted if same else replace(fitted, container=None)


def _flat(checkpoint: Checkpoint, target: Format, keep_aliases: bool) -> Checkpoint:
    """Return the checkpoint with its one state dict at the root, each tensor dense and under one name."""
    main = next(iter(checkpoint.state_dicts), None)
    problems = [Problem(f"a second section ({s.kind})", s.title) for s in checkpoint.sections if s is not main]
    problems += [Problem("not a tensor", path) for path in checkpoint.others]
    if main is None:
        problems.append(Problem("no state dict", checkpoint.source))
    else:
        problems += [Problem("not a tensor", dotted(main.path, extra.key)) for extra in main.extras]
    if problems:
        hint = _hint(checkpoint)
        raise Refused(f"{target.title} holds tensors only, and one state dict", hint=hint, problems=problems)
    (section,) = checkpoint.sections
    aliases = {} if target.aliases else section.aliases()
    if aliases and not keep_aliases:
        raise Refused(
            f"{target.title} cannot hold one tensor under two names",
            hint="--keep-aliases keeps the first name and records the others in __metadata__",
            problems=[Problem(f"the same tensor as {first}", key) for key, first in aliases.items()],
        )
    # asking a protocol of None for each of many entries takes time
    resolved = (
        entry.payload.resolved(entry) if entry.payload is not None and isinstance(entry.payload, Resolvable) else entry
        for entry in section.tensors
    )
    dense = tuple(entry if target.aliases else row_major(entry) for entry in resolved)
    section = replace(section, path="", tensors=tuple(e for e in dense if e.key not in aliases), modules=None)
    return replace(checkpoint, sections=(section,), metadata={**checkpoint.metadata, **aliases})


def _with_aliases(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the names that ``--keep-aliases`` recorded in ``__metadata__``."""
    if not checkpoint.metadata:
        return checkpoint
    (section,) = checkpoint.sections
    have = {entry.key: entry for entry in section.tensors}
    names = {key: first for key, first in checkpoint.metadata.items() if first in have and key not in have}
    names.pop(_WRITTEN_BY, None)
    again = [replace(have[first], key=key) for key, first in names.items()]
    metadata = {name: value for name, value in checkpoint.metadata.items() if name not in names}
    return replace(checkpoint, sections=(replace(section, tensors=(*section.tensors, *again)),), metadata=metadata)


_NAMED = "import torch, sys; torch.save({'tensor': torch.load(sys.argv[1])}, sys.argv[2])"


def _hint(checkpoint: Checkpoint) -> str:
    """Return the hint with the shortest way to a checkpoint that fits."""
    if not checkpoint.state_dicts:
        if [entry.key for section in checkpoint.sections for entry in section.tensors] == [""]:
            name = f'python -c "{_NAMED}" {quote(checkpoint.source)} OUT.pt'
            return f"it is one tensor without a name; give it one: {name}"
        if checkpoint.optimizers:
            return "it is an optimizer's state, which torch files can hold: choose an output that ends in .pt"
    named = [section for section in checkpoint.state_dicts if section.path]
    others = [section.path for section in checkpoint.sections if section not in named] + list(checkpoint.others)
    if named and others and "::" not in checkpoint.source:
        return f"take the section alone: {checkpoint.part(named[0].path)}, or choose an output that ends in .pt"
    return "choose an output that ends in .pt"


def loses_versions(checkpoint: Checkpoint, target: Format) -> bool:
    """Return whether there are module versions (``_metadata``), and the format has no place for them."""
    versions = any(section.modules is not None for section in checkpoint.sections)
    return versions and (target.tensors_only or target.name == "dcp")


def losses(checkpoint: Checkpoint, target: Format) -> list[str]:
    """Return sentences about other contents that the output will not hold."""
    notes: list[str] = []
    if checkpoint.format == "torch_legacy" and target.name == "torch_zip":
        notes.append(Info("written in the format of torch 1.6 and later"))
    if checkpoint.format == "torchscript":
        notes.append("the state dict alone: the code of the TorchScript archive is left out")
    if loses_versions(checkpoint, target):
        notes.append(f"the module versions in _metadata are left out: {target.title} has no place for them")
    forms = [section.form for section in checkpoint.sections if section.form is not None]
    if forms and target.name == "dcp":
        notes.append(
            f"nothing will say that this is the {forms[0]} form, whose keys fit another: read it with --from {forms[0]}"
        )
    if not target.tensors_only and _with_aliases(checkpoint).metadata:
        notes.append(f"__metadata__ is left out: {target.title} has no place for it")
    return notes
