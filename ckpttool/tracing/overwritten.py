"""Silent losses: tensors that saving sends to a key that another tensor gets. Found by saving without the other one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ckpttool.errors import CkptError, Problem
from ckpttool.expression import Ref, refs
from ckpttool.names import SerializedKey
from ckpttool.tracing.load_model import LoadedModel
from ckpttool.tracing.saving import Saved, run_once


def lost_problems(model: LoadedModel, saved: Saved) -> list[Problem]:
    """For every persistent tensor that no key holds: the key it would have had, where another tensor took that one."""
    fed = saved.fed
    lost = [r.fqn for r in saved.runtime if r.persistent and r.alias_of is None and r.fqn not in fed]
    if not lost:
        return []
    keys = {s.key: s for s in saved.serialized}
    renamed = [s.source.key for s in saved.serialized if isinstance(s.source, Ref) and s.source.key != s.key]
    everything = [r.fqn for r in saved.runtime if r.fqn not in lost]
    found: dict[str, Problem] = {}
    for removed in (renamed, everything):
        for s in _saved_without(model, saved, removed):
            if isinstance(s.source, Ref) and s.source.key in lost and s.key in keys:
                found.setdefault(s.source.key, _problem(s.source.key, keys[s.key]))
    return list(found.values())


def _saved_without(model: LoadedModel, saved: Saved, removed: Iterable[str]) -> tuple[SerializedKey, ...]:
    instance = model.build(saved.real)
    gone = set(removed)
    first = {r.fqn: r.alias_of or r.fqn for r in saved.runtime}
    for fqn, group in first.items():
        if group in gone:
            _remove(instance, fqn)
    try:
        return run_once(instance)
    except CkptError:
        return ()  # the hooks need what was taken away


def _remove(model: nn.Module, fqn: str) -> None:
    path, _, name = fqn.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    for table in (module._parameters, module._buffers):
        table.pop(name, None)


def _problem(lost: str, taken: SerializedKey) -> Problem:
    kept = ", ".join(dict.fromkeys(refs(taken.source))) if taken.source is not None else "a constant"
    by = f", by {taken.hook}" if taken.hook else ""
    return Problem(f"lost in saving: it and {kept} are sent to one key, {taken.key}{by}", lost)
