"""From a model definition to its `Names`: runs its saving and loading once on meta, and writes down what happened."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from ckpttool.errors import CkptError, Problem
from ckpttool.expression import Expression, Ref
from ckpttool.names import AS_A_PART, LoadedTensor, Names
from ckpttool.tracing.any_values import reads_of_any
from ckpttool.tracing.load_model import CannotBuild, LoadedModel
from ckpttool.tracing.loading import DtypeChange, Verdict, load_verdict, loaded
from ckpttool.tracing.meta_twin import beside_real
from ckpttool.tracing.nested import nested_problems
from ckpttool.tracing.overwritten import lost_problems
from ckpttool.tracing.roundtrip import problems, settled
from ckpttool.tracing.runtime import (
    check_memory,
    copied_state,
    is_cheap,
    metadata_of,
    nbytes,
    on_meta_or_real,
    wrapper_paths,
)
from ckpttool.tracing.saving import Saved, save, without_constants
from ckpttool.tracing.tried import brought_back, tried

__all__ = ["DtypeChange", "Verdict", "load_verdict", "trace", "wrapper_paths"]

_WORTH_BUILDING = 1 << 30  # bytes; a smaller model is built for real where meta leaves a value unexplained


def trace(model: LoadedModel) -> Names:
    """All names of the model's tensors, both ways. Raises `CkptError` where its own code fails."""
    model, notes = beside_real(model)
    saved = _with_hidden(model, _saved(model))
    verdict = on_meta_or_real(model, lambda real: _load(model, saved, real))
    sources = {s.key: s.source for s in saved.serialized}
    found = [*_unstable(saved), *lost_problems(model, saved), *_given_back(model, saved, verdict)]
    wrong = [problem for problem in found if problem.kind != "unknown"]
    metadata = metadata_of(saved.state)
    return Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=saved.serialized,
        load=tuple(LoadedTensor(fqn, _by_own_name(fqn, value, sources)) for fqn, value in verdict.reads.items()),
        not_serialized=_not_serialized(saved),
        extra_state=saved.extra_state,
        roundtrips=not wrong,
        roundtrip_problems=tuple(wrong),
        modules=None if metadata is None else tuple(metadata),
        notes=(
            *notes,
            *(str(problem) for problem in found if problem.kind == "unknown"),
            *(f"{AS_A_PART}: {problem}" for problem in _nested(model, saved)),
        ),
    )


def _nested(model: LoadedModel, saved: Saved) -> tuple[Problem, ...]:
    """Asked only where hooks touch the keys: without them a module's path is all that is put before them."""
    if not any(key.hook is not None for key in saved.serialized):
        return ()
    as_saved = replace(model, materialize=saved.real)  # hooks that read values cannot run on meta
    return nested_problems(as_saved, [*(key.key for key in saved.serialized), *saved.extra_state])


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
    if not found:
        return ()
    try:
        check_memory(model, 0, "")
        return settled(found, saved, verdict, tried(model))
    except CkptError:  # there is no memory for it, or it builds on meta only
        return found


def _saved(model: LoadedModel) -> Saved:
    saved = on_meta_or_real(model, lambda real: save(model, real))
    if saved.is_opaque and not saved.real and nbytes(model.build(False)) <= _WORTH_BUILDING:
        with suppress(CkptError):  # it builds on meta only; what meta showed stands
            saved = save(model, True)
    return replace(saved, serialized=without_constants(saved.serialized))


def _load(model: LoadedModel, saved: Saved, real: bool) -> Verdict:
    """Loads fresh tensors of the serialized keys into a fresh instance."""
    source = saved if saved.real == real else save(model, real)
    verdict = loaded(model.build(real), copied_state(source.state), real)
    return replace(verdict, reads=reads_of_any(model, source.state, verdict)) if verdict.by_values else verdict


def _by_own_name(fqn: str, value: Expression | None, sources: Mapping[str, Expression | None]) -> Expression | None:
    """`value`, by the key of the tensor's own name where several keys hold the same tensor (tied weights)."""
    source = sources.get(fqn)
    if isinstance(value, Ref) and source is not None and source == sources.get(value.key):
        return Ref(fqn)
    return value


def _not_serialized(saved: Saved) -> tuple[str, ...]:
    fed = saved.fed
    return tuple(r.fqn for r in saved.runtime if (r.alias_of or r.fqn) not in fed)


def _unstable(saved: Saved) -> list[Problem]:
    return [Problem("which keys are saved depends on the values of the tensors", "(root)")] if saved.unstable else []
