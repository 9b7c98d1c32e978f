"""Fit a checkpoint to the format of an output: refuse entries that the format cannot hold, and note
what is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint, Payload
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.tables import by_key
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
    present = format_of(checkpoint)
    if present is not target and not (present.holds.objects and target.holds.objects):
        raise Refused(
            f"{checkpoint.source} is in another format ({present.title}) than its replacement"
            f" ({target.title})",
            hint="write another file: -o OUT",
        )


def fit(checkpoint: Checkpoint, target: Format, *, keep_aliases: bool = False) -> Checkpoint:
    """Return `checkpoint` as `target` can hold it, with the same keys and values.

    Raises `Refused`, all problems at once, for entries that the format has no place for.
    """
    source = format_of(checkpoint)
    both_pickled = source.holds.objects and target.holds.objects
    # the tensors of TorchScript's code are left out with it
    if source is not target and not source.holds.code_storages:
        _check_unreached(checkpoint, source, target)
    apart = [] if target.holds.subclass_parts else torchao.come_apart(checkpoint)
    if apart:
        raise Refused(
            f"tensors of torchao would come apart: {target.title} has no place for the list of"
            " their parts",
            hint=f"let torchao put them together: {torchao.joined(checkpoint.source)}",
            problems=apart,
        )
    if holds_tensors_only(target):
        fitted = _flat(checkpoint, target, keep_aliases)
    else:
        fitted = _with_aliases(checkpoint)
    if not target.holds.programs:
        fitted = write_form(fitted, in_metadata=target.holds.metadata)
    if target.holds.metadata and not target.folder and not source.holds.metadata:
        # Some versions of transformers 4 do not load a file without it.
        fitted = replace(fitted, metadata={_WRITTEN_BY: "pt", **fitted.metadata})
    return fitted if source is target or both_pickled else replace(fitted, container=None)


def _check_unreached(checkpoint: Checkpoint, source: Format, target: Format) -> None:
    """Raise `Refused` for storages of no known tensor, which only the pickle that refers to them
    can take along.
    """
    lost = checkpoint.unreached
    both_pickled = source.holds.objects and target.holds.objects
    if both_pickled and checkpoint.container is not None:
        lost = tuple(storage for storage in lost if not storage.is_referred)
    if not lost:
        return
    text = "a storage that belongs to no tensor that is understood"
    raise Refused(
        f"storages of no tensor that is understood would be lost: {target.title} has no place"
        " for them",
        hint=f"keep the format ({source.title}): choose an OUT that ends as CKPT does",
        problems=[Problem(text, storage.path) for storage in lost],
    )


def holds_tensors_only(target: Format) -> bool:
    """Return whether the format holds one state dict, and no more."""
    return not target.holds.objects and not target.holds.programs


def _flat(checkpoint: Checkpoint, target: Format, keep_aliases: bool) -> Checkpoint:
    """Return the checkpoint with its one state dict at the root, each tensor dense and under one
    name.
    """
    problems = _more_than_tensors(checkpoint)
    if problems:
        raise Refused(
            f"OUT ({target.title}) holds tensors only, and one state dict",
            hint=_hint(checkpoint),
            problems=problems,
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
    tensors = []
    for entry in section.tensors:
        if entry.key in aliases:
            continue
        dense = entry.payload.resolved(entry) if isinstance(entry.payload, Payload) else entry
        tensors.append(dense if target.holds.aliases else row_major(dense))
    fitted = replace(section, path="", tensors=tuple(tensors), modules=None, packed_as="")
    if fitted == section:
        return checkpoint  # whose section keeps its known facts
    return replace(checkpoint, sections=(fitted,), metadata={**checkpoint.metadata, **aliases})


def _more_than_tensors(checkpoint: Checkpoint) -> list[Problem]:
    """List everything besides the tensors of the first state dict."""
    main = next(iter(checkpoint.state_dicts), None)
    problems = []
    for section in checkpoint.sections:
        if section is not main:
            problems.append(Problem(f"a second section ({section.kind})", section.title))
    problems += same_problem("not a tensor", checkpoint.others)
    if main is None:
        return [*problems, Problem("no state dict", checkpoint.source)]
    problems += [Problem("not a tensor", dotted(main.path, extra.key)) for extra in main.extras]
    return problems


def recorded_aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the second names that ``__metadata__`` records, as ``--keep-aliases`` and
    `safetensors.torch.save_model` do: name -> key of the tensor.
    """
    if not checkpoint.metadata:
        return {}
    (section,) = checkpoint.sections
    keys = by_key(section.tensors)
    aliases = {}
    for name, value in checkpoint.metadata.items():
        if value in keys and name not in keys and name != _WRITTEN_BY:
            aliases[name] = value
    return aliases


def _with_aliases(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the names that are recorded in ``__metadata__``."""
    aliases = recorded_aliases(checkpoint)
    if not aliases:
        return checkpoint
    (section,) = checkpoint.sections
    entries = by_key(section.tensors)
    tensors = list(section.tensors)
    for name, key in aliases.items():
        tensors.append(replace(entries[key], key=name))
    metadata = {name: text for name, text in checkpoint.metadata.items() if name not in aliases}
    section = replace(section, tensors=tuple(tensors))
    return replace(checkpoint, sections=(section,), metadata=metadata)


_NAMED = "import torch, sys; torch.save({'tensor': torch.load(sys.argv[1])}, sys.argv[2])"


def _hint(checkpoint: Checkpoint) -> str:
    hint = "choose an output that ends in .pt"
    if not checkpoint.state_dicts:
        keys: list[str] = []
        for section in checkpoint.sections:
            keys += section.keys
        if keys == [""]:
            name = f'python -c "{_NAMED}" {quote(checkpoint.source)} OUT.pt'
            return f"it is one tensor without a name; give it one: {name}"
        if checkpoint.optimizers:
            return f"it is an optimizer's state, which torch files can hold: {hint}"
        return hint
    source = checkpoint.source
    named = [section for section in checkpoint.state_dicts if section.path]
    has_more = bool(checkpoint.others) or len(named) < len(checkpoint.sections)
    if named and has_more and "::" not in source:
        source = checkpoint.part(named[0].path)
        hint = f"take the section alone: {source}, or {hint}"
    extras = checkpoint.state_dicts[0].extras
    holds_weights = any(extra.tensors for extra in extras)
    if extras and not holds_weights and not checkpoint.in_memory:
        drops = _dropped([extra.key for extra in extras])
        line = shell("ckpttool", "remap", source, *drops, "-o", "OUT.safetensors")
        hint = f"{hint}; to leave out what is not a tensor: {line}"
    return hint


_EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` returns


def _dropped(keys: Sequence[str]) -> list[str]:
    """Return the options that drop these keys of a state dict, also if the command renames them."""
    if all(key.endswith(_EXTRA_STATE) for key in keys):
        return ["--drop", f"*{_EXTRA_STATE}"]
    options = []
    for key in keys:
        options += ["--drop", key]
    return options


def loses_versions(checkpoint: Checkpoint, target: Format) -> bool:
    """Return whether there are module versions (``_metadata``), and the format has no place for
    them.
    """
    if target.holds.versions:
        return False
    return any(section.modules is not None for section in checkpoint.sections)


def losses(checkpoint: Checkpoint, target: Format) -> list[str]:
    """Return sentences about other contents that the output will not hold."""
    notes: list[str] = []
    source = format_of(checkpoint)
    if source.succeeded_by == target.name:
        notes.append(Info(f"written as {target.title}: {source.title} is only read", "written"))
    if source.holds.code_storages:
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
    metadata = {} if target.holds.metadata else _with_aliases(checkpoint).metadata
    if metadata.items() - {(_WRITTEN_BY, "pt")}:
        notes.append(f"__metadata__ is left out: {target.title} has no place for it")
    return notes
