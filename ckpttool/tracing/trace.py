"""From a model definition to its `Names`: runs its saving and loading once on meta, and writes down what happened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Ref, refs
from ckpttool.core.names import AS_A_PART, LoadedTensor, Names, SerializedKey
from ckpttool.core.text import some
from ckpttool.tracing.any_values import reads_of_any
from ckpttool.tracing.build_model import CannotBuild, LoadedModel
from ckpttool.tracing.experiment import beside_real, brought_back, tried, versions_asked_for
from ckpttool.tracing.loading import Verdict, loaded
from ckpttool.tracing.roundtrip import problems, resolve_problems
from ckpttool.tracing.runtime import check_memory, copied_state, is_cheap, metadata_of, nbytes, on_meta_or_real
from ckpttool.tracing.saving import Saved, run_once, save, without_constants

_PART = "part"  # of another model; any name will do
_ABSOLUTE = "a state_dict hook looks for absolute keys, and breaks under DDP too"
DEPENDS = "state_dict() writes some keys for some values of the tensors only: {keys}"
_UNTRIED = "whether load_state_dict() reads them back for other values was not tried"
_WORTH_BUILDING = 1 << 30  # bytes; a smaller model is built for real where meta leaves a value unexplained


def trace(model: LoadedModel) -> Names:
    """All names of the model's tensors, both ways. Raises `CkptError` where its own code fails."""
    model, notes = beside_real(model)
    saved = _with_hidden(model, _saved(model))
    verdict, versions = on_meta_or_real(model, lambda real: _load(model, saved, real))
    sources = {s.key: s.source for s in saved.serialized}
    found = [*_lost(model, saved), *_given_back(model, saved, verdict)]
    wrong = [problem for problem in found if problem.kind != "unknown"]
    metadata, fed = metadata_of(saved.state), saved.fed
    return Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=(*saved.serialized, *saved.further),
        load=tuple(LoadedTensor(fqn, _by_own_name(fqn, value, sources)) for fqn, value in verdict.reads.items()),
        not_serialized=tuple(r.fqn for r in saved.runtime if (r.alias_of or r.fqn) not in fed),
        extra_state=saved.extra_state,
        roundtrips=not wrong,
        roundtrip_problems=tuple(wrong),
        modules=None if metadata is None else tuple(metadata),
        versions=versions,
        notes=(
            *notes,
            *([DEPENDS.format(keys=some(saved.varying))] if saved.varying else []),
            *(str(problem) for problem in found if problem.kind == "unknown"),
            *(f"{AS_A_PART}: {problem}" for problem in _nested(model, saved)),
        ),
    )


def _nested(model: LoadedModel, saved: Saved) -> tuple[Problem, ...]:
    """What becomes of the keys where the model is a child of another module, as under DDP; none where all is as it
    should be. Asked only where hooks touch the keys: without them a module's path is all that is put before them.
    """
    if not any(key.hook is not None for key in saved.serialized):
        return ()
    outer = nn.Module()
    outer.add_module(_PART, model.build(saved.real))  # hooks that read values cannot run on meta
    try:
        found = set(map(str, outer.state_dict()))
    except Exception as error:  # whatever a hook raises
        return (Problem(f"is not saved at all as a part of another: {type(error).__name__}: {error}", "(root)"),)
    expected = {f"{_PART}.{key}" for key in (*(key.key for key in saved.serialized), *saved.extra_state)}
    lost, other = sorted(expected - found), sorted(found - expected)
    instead = f"; {other[0].removeprefix(_PART + '.')} is there instead" if other else ""
    problem = f"is not saved under this key where the model is a part of another: {_ABSOLUTE}{instead}"
    return tuple(Problem(problem, key.removeprefix(_PART + ".")) for key in lost or other)


def _lost(model: LoadedModel, saved: Saved) -> list[Problem]:
    """Silent losses: every persistent tensor that no key holds, and the key it would have had, where another took that.

    Found by saving without the others: those that are renamed, then all that are saved.
    """
    fed = saved.fed
    lost = {r.fqn for r in saved.runtime if r.persistent and r.alias_of is None and r.fqn not in fed}
    if not lost:
        return []
    keys = {s.key: s for s in saved.serialized}
    renamed = {s.source.key for s in saved.serialized if isinstance(s.source, Ref) and s.source.key != s.key}
    found: dict[str, Problem] = {}
    for removed in (renamed, {r.fqn for r in saved.runtime} - lost):
        for s in _saved_without(model, saved, removed):
            if isinstance(s.source, Ref) and s.source.key in lost and s.key in keys:
                found.setdefault(s.source.key, _sent_to_one(s.source.key, keys[s.key]))
    return list(found.values())


def _saved_without(model: LoadedModel, saved: Saved, removed: Collection[str]) -> tuple[SerializedKey, ...]:
    instance = model.build(saved.real)
    for tensor in saved.runtime:
        path, _, name = tensor.fqn.rpartition(".")
        if (tensor.alias_of or tensor.fqn) in removed:
            with suppress(AttributeError):  # some wrappers' names lead through no module
                module = instance.get_submodule(path)
                for table in (module._parameters, module._buffers):
                    table.pop(name, None)
    try:
        return run_once(instance)
    except CkptError:
        return ()  # the hooks need what was taken away


def _sent_to_one(lost: str, taken: SerializedKey) -> Problem:
    kept = ", ".join(dict.fromkeys(refs(taken.source))) or "a constant"
    by = f", by {taken.hook}" if taken.hook else ""
    return Problem(f"lost in saving: it and {kept} are sent to one key, {taken.key}{by}", lost)


def _with_hidden(model: LoadedModel, saved: Saved) -> Saved:
    """`saved`, with what extra state carries outside of torch (as pickled bytes) among `carried`.

    Symbols cannot tell that: asked only where building the model for real takes a moment.
    """
    unfed = [r.fqn for r in saved.runtime if r.alias_of is None and r.fqn not in saved.fed]
    if not saved.extra_state or not unfed or not is_cheap(model):
        return saved
    try:
        return replace(saved, carried=saved.carried | brought_back(model, unfed))
    except CannotBuild:
        return saved


def _given_back(model: LoadedModel, saved: Saved, verdict: Verdict) -> tuple[Problem, ...]:
    """What does not come back when a saved model is loaded: by symbols, and where these leave a doubt by doing it."""
    found = problems(saved, verdict)
    if not found and not saved.varying:
        return ()
    try:
        check_memory(model, 0, "")
        return resolve_problems(found, saved, verdict, tried(model, varying=bool(saved.varying)))
    except CkptError:  # there is no memory for it, or it builds on meta only
        return (*found, Problem(_UNTRIED, "(root)", "unknown")) if saved.varying else found


def _saved(model: LoadedModel) -> Saved:
    saved = on_meta_or_real(model, lambda real: save(model, real))
    if saved.is_opaque and not saved.real and nbytes(model.build(False)) <= _WORTH_BUILDING:
        with suppress(CkptError):  # it builds on meta only; what meta showed stands
            saved = save(model, True)
    return replace(saved, serialized=without_constants(saved.serialized), further=without_constants(saved.further))


def _load(model: LoadedModel, saved: Saved, real: bool) -> tuple[Verdict, dict[str, Any] | None]:
    """Loads fresh tensors of the serialized keys into a fresh instance; with the versions, where these matter."""
    source = saved if saved.real == real else save(model, real)
    verdict = loaded(model.build(real), copied_state(source.state), real)
    versions = versions_asked_for(model, source.state, verdict, real)
    if verdict.by_values:
        verdict = replace(verdict, reads=reads_of_any(model, source.state, verdict))
    return verdict, versions


def _by_own_name(fqn: str, value: Expression | None, sources: Mapping[str, Expression | None]) -> Expression | None:
    """`value`, by the key of the tensor's own name where several keys hold the same tensor (tied weights)."""
    source = sources.get(fqn)
    if isinstance(value, Ref) and source is not None and source == sources.get(value.key):
        return Ref(fqn)
    return value
