"""From a model definition to its `Names`: run its saving and loading once on meta, and write down what happened."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Ref, is_constant, refs
from ckpttool.core.keys import dotted
from ckpttool.core.names import AS_A_PART, LoadedTensor, Names, SerializedKey
from ckpttool.core.text import some
from ckpttool.tracing.build_model import CannotBuild, LoadedModel
from ckpttool.tracing.experiment import copied_state, metadata_of
from ckpttool.tracing.loading import Verdict, loaded, reads_of_any, versions_asked_for
from ckpttool.tracing.roundtrip import brought_back, roundtrip_problems
from ckpttool.tracing.runtime import check_memory, dtype_name, is_cheap, nbytes, on_meta_or_real, shape_of
from ckpttool.tracing.saving import Saved, save, save_once

_PART = "part"  # of another model; any name will do
_ABSOLUTE = "a state_dict hook looks for absolute keys, and breaks under DDP too"
_DEPENDS = "state_dict() writes some keys for some values of the tensors only: {keys}"
_NOT_LOOKED = "on the meta device alone: whether its constructor makes other tensors for real was not looked at"
_UNLIKE = "on the meta device the constructor creates other tensors, and there is not enough memory to build the model"
_WORTH_BUILDING = 1 << 30  # bytes; a smaller model is built for real if meta leaves a value unexplained


def trace(model: LoadedModel) -> Names:
    """Return all names of the model's tensors, both ways. Raises `CkptError` if its own code fails."""
    model, notes = _like_real(model)
    saved = _saved(model)

    def load(real: bool) -> tuple[Verdict, dict[str, object] | None]:
        """Load fresh tensors of the serialized keys into a fresh instance."""
        state = (saved if saved.real == real else save(model, real)).state
        verdict = loaded(model.build(real), copied_state(state), real)
        versions = versions_asked_for(model, state, verdict, real)
        if verdict.by_values:
            verdict = replace(verdict, reads=reads_of_any(model, state, verdict))
        return verdict, versions

    verdict, versions = on_meta_or_real(model, load)
    problems = (*_lost(model, saved), *roundtrip_problems(model, saved, verdict))
    certain = tuple(problem for problem in problems if problem.kind != "unknown")
    sources = {s.key: s.source for s in saved.serialized}
    reads = dict(verdict.reads)
    for fqn, value in reads.items():
        # If several keys hold the same tensor (tied weights), read each name from its own key.
        source = sources.get(fqn)
        if isinstance(value, Ref) and source is not None and source == sources.get(value.key):
            reads[fqn] = Ref(fqn)
    metadata, fed = metadata_of(saved.state), saved.fed
    return Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=(*saved.serialized, *saved.further),
        load=tuple(LoadedTensor(fqn, value) for fqn, value in reads.items()),
        not_serialized=tuple(r.fqn for r in saved.runtime if (r.alias_of or r.fqn) not in fed),
        extra_state=saved.extra_state,
        roundtrips=not certain,
        roundtrip_problems=certain,
        modules=None if metadata is None else tuple(metadata),
        versions=versions,
        notes=(
            *notes,
            *([_DEPENDS.format(keys=some(saved.varying))] if saved.varying else []),
            *(str(problem) for problem in problems if problem.kind == "unknown"),
            *(f"{AS_A_PART}: {problem}" for problem in _nested(model, saved)),
        ),
    )


# The tensors that the constructor makes


def _like_real(model: LoadedModel) -> tuple[LoadedModel, tuple[str, ...]]:
    """Return `model`, to be built for real from now on if on meta it has other tensors; and notes.

    A cheap model is built for real and compared; the constructor of any other runs with tensors that say that they are
    on the CPU, and have no memory.
    """
    if model.materialize:
        return model, ()
    try:
        on_meta = _listing(model.build(False))
        if is_cheap(model):
            real = _listing(model.build(True))
        else:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
                real = _listing(model.build(True))
    except CkptError:
        return model, (_NOT_LOOKED,)
    if on_meta == real:
        return model, ()
    try:
        check_memory(model, 0, _UNLIKE)
    except CkptError as error:
        return model, (error.message,)
    return replace(model, materialize=True), ()


def _listing(model: nn.Module) -> list[tuple[object, ...]]:
    """Return names, dtypes, shapes, and which tensors are the same object; fake tensors have no address."""
    first: dict[int, str] = {}
    rows: list[tuple[object, ...]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        hidden = getattr(module, "_non_persistent_buffers_set", ())
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                fqn = dotted(path, name)
                if tensor is not None:
                    alias = first.setdefault(id(tensor), fqn)
                    rows.append((fqn, kind, name in hidden, alias, dtype_name(tensor.dtype), shape_of(tensor)))
    return rows


# What saving writes


def _saved(model: LoadedModel) -> Saved:
    saved = on_meta_or_real(model, lambda real: save(model, real))
    if saved.is_opaque and not saved.real and nbytes(model.build(False)) <= _WORTH_BUILDING:
        with suppress(CkptError):  # it builds on meta only: keep the result of meta
            saved = save(model, True)
    without_constants = [
        tuple(replace(key, source=None) if is_constant(key.source) else key for key in keys)
        for keys in (saved.serialized, saved.further)
    ]
    saved = replace(saved, serialized=without_constants[0], further=without_constants[1])
    # Extra state may carry tensors outside of torch (as pickled bytes): expressions cannot tell that.
    unfed = [r.fqn for r in saved.runtime if r.alias_of is None and r.fqn not in saved.fed]
    if saved.extra_state and unfed and is_cheap(model):
        with suppress(CannotBuild):
            saved = replace(saved, carried=saved.carried | brought_back(model, unfed))
    return saved


def _lost(model: LoadedModel, saved: Saved) -> list[Problem]:
    """Return each persistent tensor that no key holds, if another tensor took the key that it would have had.

    To find that key, save without the renamed tensors, then without all that are saved.
    """
    lost = {r.fqn for r in saved.runtime if r.persistent and r.alias_of is None and r.fqn not in saved.fed}
    if not lost:
        return []
    keys = {s.key: s for s in saved.serialized}
    renamed = {s.source.key for s in saved.serialized if isinstance(s.source, Ref) and s.source.key != s.key}
    problems: dict[str, Problem] = {}
    for removed in (renamed, {r.fqn for r in saved.runtime} - lost):
        for s in _saved_without(model, saved, removed):
            if isinstance(s.source, Ref) and s.source.key in lost and s.key in keys:
                taken = keys[s.key]
                kept = ", ".join(dict.fromkeys(refs(taken.source))) or "a constant"
                by = f", by {taken.hook}" if taken.hook else ""
                text = f"lost in saving: it and {kept} are sent to one key, {taken.key}{by}"
                problems.setdefault(s.source.key, Problem(text, s.source.key))
    return list(problems.values())


def _saved_without(model: LoadedModel, saved: Saved, removed: Collection[str]) -> tuple[SerializedKey, ...]:
    instance = model.build(saved.real)
    for tensor in saved.runtime:
        path, _, name = tensor.fqn.rpartition(".")
        if (tensor.alias_of or tensor.fqn) in removed:
            with suppress(AttributeError):  # the names of some wrappers lead through no module
                module = instance.get_submodule(path)
                for table in (module._parameters, module._buffers):
                    table.pop(name, None)
    try:
        return save_once(instance, real=True).serialized
    except CkptError:
        return ()  # the hooks need what was removed


def _nested(model: LoadedModel, saved: Saved) -> tuple[Problem, ...]:
    """Return what is wrong with the keys if the model is a child of another module, as under DDP.

    Checked only if hooks touch the keys: without them a module's path is put before each key, and that is all.
    """
    if not any(key.hook is not None for key in saved.serialized):
        return ()
    outer = nn.Module()
    outer.add_module(_PART, model.build(saved.real))  # hooks that read values cannot run on meta
    try:
        keys = set(map(str, outer.state_dict()))
    except Exception as error:  # a hook may raise anything
        return (Problem(f"is not saved at all as a part of another: {type(error).__name__}: {error}", "(root)"),)
    expected = {f"{_PART}.{key}" for key in (*(key.key for key in saved.serialized), *saved.extra_state)}
    lost, other = sorted(expected - keys), sorted(keys - expected)
    instead = f"; {other[0].removeprefix(_PART + '.')} is there instead" if other else ""
    problem = f"is not saved under this key where the model is a part of another: {_ABSOLUTE}{instead}"
    return tuple(Problem(problem, key.removeprefix(_PART + ".")) for key in lost or other)
