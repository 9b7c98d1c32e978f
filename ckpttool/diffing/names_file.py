"""Compare a names file with the model's code: did the code change what checkpoints hold?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Ref, substitute
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import GROUPS
from ckpttool.core.tables import by_key, sources_of
from ckpttool.core.text import Info, Note, shell
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.renames import suggestions
from ckpttool.diffing.result import (
    EITHER_WAY,
    NO_VALUES,
    Diff,
    Entry,
    only_left,
    only_right,
    outlines,
    statuses_of,
)
from ckpttool.diffing.sections import compare
from ckpttool.naming.evidence import Inference
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_files import saved_by
from ckpttool.optimizers.parameters import Parameters

_NOT_KEYS = (Code.RUNTIME_NAME, Code.OPTIMIZER_ID, Code.PARAM_REMOVED, Code.PARAM_ADDED)


def compare_with_code(old: Names, path: str, model: ModelOperand) -> Diff:
    """Compare `old`, read from `path`, with the model's code: keys, runtime names, optimizer ids.

    Identical if a checkpoint that the old code wrote has the keys, shapes and ids of one that the
    new code writes. Raises `CkptError` if the file has optimizer ids and the operand has no
    optimizer.
    """
    new = model.names()
    if old.optimizer_class is not None and new.optimizer_class is None:
        command = shell("ckpttool", "diff", path, *model.words, "--optimizer")
        raise CkptError(
            f"{path} has the ids of an optimizer ({old.optimizer_class}): name the optimizer to"
            " compare them with",
            hint=f"{command} OPTIMIZER",
        )
    left, right = saved_by(old), saved_by(new)
    renames = _runtime_names(old, new)
    was_section, now_section = model_section(left), model_section(right)
    compared = _with_sources(compare(was_section, now_section), old, new, renames)
    keys = tuple(_new_first(entry, was_section, now_section) for entry in compared)
    inferred = suggestions(left, right, keys, False)
    entries = [*keys]
    for was, now in renames.items():
        if was != now:
            entries.append(Entry("renamed", (was,), (now,), Cause(Code.RUNTIME_NAME)))
    entries += _optimizer_ids(old, new, keys, _runtime_names(old, new, inferred))
    is_same = statuses_of(entries) <= EITHER_WAY
    other_class = old.optimizer_class != new.optimizer_class
    notes: list[Note] = []
    if other_class:
        was_class = old.optimizer_class or "not named"
        text = f"the optimizer is {new.optimizer_class}; it was {was_class}"
        notes.append(Note(text, "optimizer-class"))
    if model.is_definition and not is_same:
        notes.append(_note_on_loading(model, left))
    return Diff(
        f"{path} (keys in checkpoints)",
        f"{model.title} (keys from its code)",
        identical=is_same and not other_class,
        entries=tuple(entries),
        notes=tuple(notes),
        inferred=inferred,
        harmless=EITHER_WAY,
        other_failure="different optimizer class" if other_class else "",
        asks="drift",
        names=(path, model.title),
        compared={
            **dict.fromkeys(("keys", "shapes", "dtypes"), True),
            "values": False,
            "aliases": True,
            "metadata": False,
            "optimizers": old.optimizer_class is not None,
        },
        scope=NO_VALUES,
    )


def _note_on_loading(model: ModelOperand, saved: Checkpoint) -> Note:
    """Return whether the code loads what it saved before."""
    from ckpttool.tracing.loading import verdict_on_section

    subject = "load_state_dict(strict=True) of the new code"
    try:
        loads = verdict_on_section(model.definition(), model_section(saved)).ok
    except CkptError as error:
        text = f"could not check if the new code loads the old keys: {error.message}"
        return Note(text, "old-keys")
    if loads:
        return Info(f"{subject} accepts the old keys", "old-keys")
    return Note(f"{subject} rejects checkpoints with the old keys", "old-keys")


def renamable(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of state_dict keys that rules can rename: no runtime names, optimizer ids
    or computed keys.
    """
    return [
        entry for entry in entries if entry.status != "transformed" and not entry.has(*_NOT_KEYS)
    ]


def _runtime_names(old: Names, new: Names, inferred: Inference | None = None) -> dict[str, str]:
    """Map old runtime names to new ones, for tensors whose key stays or is likely renamed."""
    likely: dict[str, str] = {}
    for pair in () if inferred is None else inferred.pairs:
        if len(pair.left) == len(pair.right) == 1:
            likely[pair.left[0]] = pair.right[0]
    sources = sources_of(new.serialized)
    names = {}
    for key in old.serialized:
        source = sources.get(likely.get(key.key, key.key))
        if isinstance(key.source, Ref) and isinstance(source, Ref):
            names[key.source.key] = source.key
    return names


def _with_sources(
    entries: Iterable[Entry], old: Names, new: Names, renames: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield the entries; a key that hooks now compute in another way is not the same."""
    was = by_key(old.serialized)
    now = by_key(new.serialized)
    for entry in entries:
        key = entry.left[0] if entry.status == "same" else ""
        if key not in was:
            yield entry
            continue
        source = was[key].source
        if source is not None:
            source = substitute(source, lambda name: Ref(renames.get(str(name), str(name))))
        if source == now[key].source:
            yield entry
        else:
            yield Entry("transformed", (key,), (key,), Cause(Code.RECOMPUTED), now[key].hook)


def _new_first(entry: Entry, old: Section, new: Section) -> Entry:
    """Return the entry in the words of a change: what is new instead of what was."""
    cause = entry.cause
    if cause is None or not cause.has(Code.DTYPE, Code.SHAPE):
        return entry
    was, now = outlines(old)[entry.left[0]], outlines(new)[entry.right[0]]
    if cause.code is Code.DTYPE:
        return replace(entry, cause=replace(cause, args=(now.dtype, was.dtype)))
    old_shape, new_shape = list(was.shape or ()), list(now.shape or ())
    return replace(entry, detail=f"{new_shape} instead of {old_shape}")


def _optimizer_ids(
    old: Names, new: Names, keys: Iterable[Entry], renames: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield parameters with another id, and parameters that only one optimizer has.

    If keys differ, only parameters that both models have tell what the optimizers lack.
    """
    if old.optimizer_class is None:
        new = replace(new, optimizer_class=None, optimizer=())
    old_ids = {renames.get(fqn, fqn): id_key for fqn, id_key in _id_keys(old).items()}
    new_ids = _id_keys(new)
    decisive = {*old_ids, *new_ids}
    if statuses_of(keys) & {"missing", "unexpected"}:
        decisive = Parameters(old).canonical.keys() & Parameters(new).canonical.keys()
    for name, id_key in old_ids.items():
        if name not in new_ids:
            if name in decisive:
                yield only_left(id_key, Cause(Code.PARAM_REMOVED), None, name)
        elif new_ids[name] != id_key:
            yield Entry("order", (id_key,), (new_ids[name],), Cause(Code.OPTIMIZER_ID), None, name)
    for name, id_key in new_ids.items():
        if name not in old_ids and name in decisive:
            yield only_right(id_key, Cause(Code.PARAM_ADDED), None, name)


def _id_keys(names: Names) -> dict[str, str]:
    """Return the place of each parameter's id in the optimizer's state dict, by FQN."""
    return {param.fqn: f"{GROUPS}.{param.group}.params.{param.id}" for param in names.ids}
