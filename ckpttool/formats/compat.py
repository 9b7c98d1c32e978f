"""Make a checkpoint fit the format that it will be written in, or refuse what that format cannot hold."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint, Resolvable, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.keys import dotted
from ckpttool.core.text import Info
from ckpttool.evaluate.chunks import row_major
from ckpttool.formats.registry import FORMATS, Format
from ckpttool.formats.remarks import write_form
from ckpttool.formats.safetensors import torchao

_WRITTEN_BY = "format"  # in ``__metadata__``: whose tensors these are, as in ``pt``


def check_in_place(checkpoint: Checkpoint, target: Format) -> None:
    """Raises `Refused` where a checkpoint replaced by itself in the format `target` would lose what else is in it."""
    own = FORMATS[checkpoint.format]
    if own is not target and not (own.pickled and target.pickled):
        raise Refused(
            f"{checkpoint.source} is in another format ({own.title}) than what would replace it ({target.title})",
            hint="write what can be converted to another file: -o OUT",
        )


def fit(checkpoint: Checkpoint, target: Format, *, keep_aliases: bool = False) -> Checkpoint:
    """`checkpoint` as `target` can hold it, with the same keys and values.

    Raises `Refused`, all problems at once, on what the format has no place for.
    """
    lost = _unreached(checkpoint, target)
    if lost:
        raise Refused(
            f"storages of no tensor that is understood would be lost: {target.title} has no place for them",
            hint=f"keep the format ({FORMATS[checkpoint.format].title}): choose an OUT that ends as CKPT does",
            problems=lost,
        )
    apart = [] if target.name in ("safetensors", "sharded") else torchao.come_apart(checkpoint)
    if apart:
        raise Refused(
            f"tensors of torchao would come apart: {target.title} has no place for what says which parts are one",
            hint=f"let torchao put them together: {torchao.joined(checkpoint.source)}",
            problems=apart,
        )
    fitted = _flat(checkpoint, target, keep_aliases) if target.tensors_only else _with_aliases(checkpoint)
    fitted = write_form(fitted, in_metadata=target.tensors_only and not target.aliases)  # of safetensors
    same = checkpoint.format == target.name or (target.pickled and FORMATS[checkpoint.format].pickled)
    return fitted if same else replace(fitted, container=None)


def _unreached(checkpoint: Checkpoint, target: Format) -> list[Problem]:
    """What of the file is no tensor, and does not come along in the tree of its pickle."""
    if checkpoint.format in (target.name, "torchscript"):  # the tensors of TorchScript's code are left out with it
        return []
    carried = target.pickled and FORMATS[checkpoint.format].pickled and checkpoint.container is not None
    lost = [found for found in checkpoint.unreached if not (carried and found.is_referred)]
    return [Problem("a storage that belongs to no tensor that is understood", found.path) for found in lost]


def _flat(checkpoint: Checkpoint, target: Format, keep_aliases: bool) -> Checkpoint:
    """The one state dict of the checkpoint at the root, each tensor dense and under one name."""
    problems = _not_flat(checkpoint)
    if problems:
        raise Refused(
            f"{target.title} holds tensors only, and one state dict", hint=_narrower(checkpoint), problems=problems
        )
    (section,) = checkpoint.sections
    aliases = {} if target.aliases else section.aliases()
    if aliases and not keep_aliases:
        raise Refused(
            f"{target.title} cannot hold one tensor under two names",
            hint="--keep-aliases keeps the first name and records the others in __metadata__",
            problems=[Problem(f"the same tensor as {first}", key) for key, first in aliases.items()],
        )
    resolved = tuple(map(_resolved, section.tensors))
    dense = tuple(entry if target.aliases else row_major(entry) for entry in resolved)
    section = replace(section, path="", tensors=tuple(e for e in dense if e.key not in aliases), modules=None)
    return replace(checkpoint, sections=(section,), metadata={**checkpoint.metadata, **aliases})


def _resolved(entry: TensorEntry) -> TensorEntry:
    payload = entry.payload  # asking a protocol of None for each of many entries takes time
    return payload.resolved(entry) if payload is not None and isinstance(payload, Resolvable) else entry


def _with_aliases(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names that ``--keep-aliases`` recorded in ``__metadata__``."""
    if not checkpoint.metadata:
        return checkpoint
    (section,) = checkpoint.sections
    have = {entry.key: entry for entry in section.tensors}
    names = {key: first for key, first in checkpoint.metadata.items() if first in have and key not in have}
    names.pop(_WRITTEN_BY, None)
    again = [replace(have[first], key=key) for key, first in names.items()]
    metadata = {name: value for name, value in checkpoint.metadata.items() if name not in names}
    return replace(checkpoint, sections=(replace(section, tensors=(*section.tensors, *again)),), metadata=metadata)


def _not_flat(checkpoint: Checkpoint) -> list[Problem]:
    """What of the checkpoint is no tensor of its one state dict."""
    main = next(iter(checkpoint.state_dicts), None)
    problems = [Problem(f"a second section ({s.kind})", s.title) for s in checkpoint.sections if s is not main]
    problems += [Problem("not a tensor", path) for path in checkpoint.others]
    if main is not None:
        problems += [Problem("not a tensor", dotted(main.path, e.key)) for e in main.extras]
    else:
        problems += [Problem("no state dict", checkpoint.source)]
    return problems


def _narrower(checkpoint: Checkpoint) -> str:
    """The hint that names the shortest way to a checkpoint that fits."""
    if not checkpoint.state_dicts:
        return _hint_without_state_dict(checkpoint)
    main = [s for s in checkpoint.state_dicts if s.path]
    others = [s.path for s in checkpoint.sections if s not in main] + list(checkpoint.others)
    if main and others and "::" not in checkpoint.source:
        return f"take the section alone: {checkpoint.part(main[0].path)}, or choose an output that ends in .pt"
    return "choose an output that ends in .pt"


_NAMED = "import torch, sys; torch.save({'tensor': torch.load(sys.argv[1])}, sys.argv[2])"


def _hint_without_state_dict(checkpoint: Checkpoint) -> str:
    if [entry.key for section in checkpoint.sections for entry in section.tensors] == [""]:
        return f'it is one tensor without a name; give it one: python -c "{_NAMED}" {quote(checkpoint.source)} OUT.pt'
    if checkpoint.optimizers:
        return "it is an optimizer's state, which torch files can hold: choose an output that ends in .pt"
    return "choose an output that ends in .pt"


def loses_versions(checkpoint: Checkpoint, target: Format) -> bool:
    """Whether there are module versions (``_metadata``), and the format has no place for them."""
    versions = any(section.modules is not None for section in checkpoint.sections)
    return versions and (target.tensors_only or target.name == "dcp")


def losses(checkpoint: Checkpoint, target: Format) -> list[str]:
    """What else the output will not hold, in sentences: it belongs to no tensor, and the format has no place for it."""
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
