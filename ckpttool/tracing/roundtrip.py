"""Whether a model can read what it writes: by the expressions of saving and loading, and by trying it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref, is_opaque, refs, substitute
from ckpttool.core.names import NAMED_EXTRA_STATE
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.experiment import CONSTANT, Filling, failure_of_loading, filled, metadata_of, same, values_of
from ckpttool.tracing.loading import Verdict
from ckpttool.tracing.runtime import check_memory, listed
from ckpttool.tracing.saving import Saved
from ckpttool.tracing.simplify import Simplifier
from ckpttool.tracing.user_code import attempt, describe

_UNKNOWN = "cannot be told whether it is given back"
_INEXACT = "loading does not give the saved value back exactly"
_UNTRIED = "whether load_state_dict() reads them back for other values was not tried"
_ROOT = "(root)"
_PROBE_LIMIT = 50_000_000  # elements of the tensors that are filled with random values to compare both ways
_FEW, _ROUNDS = 1024, 16  # elements, and for fewer elements the number of random values that are tried

# Fillings of the instance that saves and the instance that loads; a change of sign shows in one element too.
_SEEDS: tuple[tuple[Filling, Filling], ...] = ((11, 12), (-11, 14))
# If the keys depend on values: one value everywhere, and the constructor's, into and out of random ones.
_EVERY = (*_SEEDS, *((one, 12) for one in (*CONSTANT, "own")), *((11, one) for one in CONSTANT))


def roundtrip_problems(model: LoadedModel, saved: Saved, verdict: Verdict) -> tuple[Problem, ...]:
    """Return every way in which loading what was saved does not give the same model again.

    `verdict` is of the model's own keys. Expressions answer first; a doubt is settled by trying it, if there is memory
    for that. An unsettled doubt is a problem of the kind ``unknown``.
    """
    problems = tuple(_by_expressions(saved, verdict))
    if not problems and not saved.varying:
        return ()
    try:
        check_memory(model, 0, "")
        failed, differing = _tried(model, _EVERY if saved.varying else _SEEDS)
    except CkptError:  # not enough memory, or the model builds on meta only
        return (*problems, Problem(_UNTRIED, _ROOT, "unknown")) if saved.varying else problems
    certain = tuple(problem for problem in problems if problem.kind != "unknown")
    if failed is not None:
        return certain or (Problem(f"load_state_dict refuses what state_dict wrote: {failed}", _ROOT),)
    by_fqn = {problem.key: problem for problem in certain}
    differing |= {fqn for fqn, problem in by_fqn.items() if problem.problem == _INEXACT}  # for other values
    fed = saved.fed
    return tuple(
        by_fqn.get(r.fqn, Problem(_INEXACT, r.fqn))
        for r in saved.runtime
        if r.fqn in differing and (r.alias_of or r.fqn) in fed
    )


# Try it


def _tried(model: LoadedModel, fillings: Iterable[tuple[Filling, Filling]]) -> tuple[str | None, set[str]]:
    """Save an instance and load it into one with other values, for each pair of fillings.

    Return what that raises (or None), and the FQNs that did not come back. Raises `CannotBuild`.
    """
    differing: set[str] = set()
    for filling, other in fillings:
        source, target = filled(model, filling), filled(model, other)
        for item in listed(target):  # change integers, to see which are not loaded
            tensor = item.tensor
            plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
            if plain and tensor.dtype in (torch.int64, torch.int32) and 0 not in tensor.stride():
                tensor += 1
        expected = values_of(source)
        failed = _pass_on(source, target)
        if failed is not None:
            return describe(failed), set()
        actual = values_of(target)
        differing |= {fqn for fqn, value in expected.items() if fqn not in actual or not same(value, actual[fqn])}
    return None, differing


def brought_back(model: LoadedModel, fqns: Iterable[str]) -> frozenset[str]:
    """Return the tensors whose random values another instance gets by loading. Raises `CannotBuild`."""
    source, target = (filled(model, seed) for seed in _SEEDS[0])
    expected, before = values_of(source), values_of(target)
    if _pass_on(source, target) is not None:
        return frozenset()
    actual = values_of(target)
    return frozenset(
        fqn
        for fqn in fqns
        if fqn in expected
        and fqn in actual
        and not same(expected[fqn], before[fqn])
        and same(expected[fqn], actual[fqn])
    )


def _pass_on(source: nn.Module, target: nn.Module) -> Exception | None:
    """Load what `source` saves into `target`; return what saving or strict loading raises."""
    state = attempt(lambda: _through_a_file(source.state_dict()))
    return state if isinstance(state, Exception) else failure_of_loading(target, state)


def _through_a_file(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict after `torch.save` and `torch.load`; a copy if a file cannot hold it as it is."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except RuntimeError:  # views of one tensor in several dtypes
        items = ((k, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in state.items())
        copied = type(state)(items)  # type: ignore[call-arg]
        if metadata_of(state) is not None:
            copied._metadata = metadata_of(state)  # type: ignore[attr-defined]
        return copied
    file.seek(0)
    result: Mapping[str, Any] = torch.load(file, weights_only=False)  # written by this process just now
    return result


# By expressions


def _by_expressions(saved: Saved, verdict: Verdict) -> Iterator[Problem]:
    tensors = {s.key for s in saved.serialized}
    for key in verdict.missing:
        yield Problem("load_state_dict expects a key that state_dict does not write", key)
    for key in verdict.unexpected:
        is_named_extra_state = key in tensors and key.rpartition(".")[2] == "_extra_state"
        unexpected = "state_dict writes a key that load_state_dict does not expect"
        yield Problem(NAMED_EXTRA_STATE if is_named_extra_state else unexpected, key)
    for text in verdict.errors:
        yield Problem(f"load_state_dict refuses what state_dict wrote: {' '.join(text.split())}", _ROOT)
    if not verdict.ok and not verdict.missing and not verdict.unexpected and not verdict.errors:
        yield Problem("load_state_dict refuses what state_dict wrote", _ROOT)
    sources = {s.key: s.source for s in saved.serialized}
    fed = {key for source in sources.values() for key in refs(source)}
    simplifier = Simplifier(_leaves(saved))
    for r in saved.runtime:
        first = r.alias_of or r.fqn
        value = verdict.reads.get(r.fqn)
        if first not in fed or r.fqn in verdict.missing:
            continue
        if r.fqn not in verdict.reads:
            yield Problem("saved, and gone from the model that has loaded it", r.fqn)
        elif value is None:
            yield Problem("saved, but not loaded again", r.fqn)
        elif not isinstance(value, Ref) or sources.get(value.key) != Ref(first):
            problem = _difference(value, Ref(first), sources, simplifier)
            if problem:
                yield Problem(problem, r.fqn, "unknown" if problem.startswith(_UNKNOWN) else "other")


def _difference(value: Expression, own: Ref, sources: Mapping[str, Expression | None], simplifier: Simplifier) -> str:
    """Return what is wrong with loading `value` (over keys) into the tensor `own`; empty if it is the same."""
    constant = next((key for key in refs(value) if sources.get(key) is None), None)
    if constant is not None:
        return f"{_UNKNOWN}: loaded from {constant}, which no tensor of the model is saved to"
    both_ways = substitute(value, lambda key: sources[key])
    if is_opaque(both_ways):
        return f"{_UNKNOWN}: computed by code that is not a tensor operator"
    simple = simplifier.simplify(both_ways)
    if simple == own:
        return ""
    if isinstance(simple, Ref):
        return f"loading gives it the value of {simple.key}"
    # Compare both sides on random values, bit by bit; of few elements on many, since one may be right by chance.
    assert isinstance(simple, Op)
    leaves = simplifier.leaves
    names = list(dict.fromkeys([own.key, *refs(simple)]))
    if any(name not in leaves for name in names):
        return f"{_UNKNOWN}: values of its kind cannot be made up"
    if sum(_base(leaves[name]).numel() for name in names) > _PROBE_LIMIT:
        return f"{_UNKNOWN}: too large to try out"
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS if leaves[own.key].numel() < _FEW else 1):
        values = _random_values({name: leaves[name] for name in names}, generator)
        try:
            back = evaluate(simple, values.__getitem__)
        except CkptError as error:
            return f"{_UNKNOWN}: {error.message}"
        expected = values[own.key]
        if back.shape != expected.shape or back.dtype != expected.dtype:
            return "loading gives it another shape or dtype"
        if not same_bits(back, expected):
            return _INEXACT
    return ""


def _leaves(saved: Saved) -> dict[str, torch.Tensor]:
    """Return the runtime tensors without data; tensors that overlap in the model share a storage."""
    storages: dict[Any, torch.Tensor] = {}
    leaves = {}
    for r in saved.runtime:
        place, dtype = saved.places[r.fqn], getattr(torch, r.dtype, None)
        if r.shape is None or not isinstance(dtype, torch.dtype) or r.dtype.startswith("q"):
            continue
        if not isinstance(place[0], int):
            leaves[r.fqn] = torch.empty(r.shape, dtype=dtype, device="meta")
            continue
        key, end = (place[0], dtype), place[1].end
        if key not in storages or storages[key].numel() < end:
            storages[key] = torch.empty(end, dtype=dtype, device="meta")
    for r in saved.runtime:
        place = saved.places[r.fqn]
        base = storages.get((place[0], getattr(torch, r.dtype, None)))
        if base is not None and r.shape is not None:
            geom = place[1]
            leaves[r.fqn] = base.as_strided(geom.shape, geom.stride, geom.offset)
    return leaves


def _random_values(tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random values for tensors without data, which share memory if those do."""
    storages: dict[int, torch.Tensor] = {}
    values = {}
    for name, tensor in tensors.items():
        base = _base(tensor)
        if id(base) not in storages:
            dtype, shape = base.dtype, base.shape
            if dtype.is_floating_point or dtype.is_complex:
                kind = torch.complex64 if dtype.is_complex else torch.float32
                scale = torch.randint(-10, 11, shape, generator=generator).exp2()  # so that a clamp shows too
                filling = torch.randn(shape, dtype=kind, generator=generator) * scale
            else:
                filling = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
            storages[id(base)] = filling.to(dtype)
        values[name] = storages[id(base)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return values


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
