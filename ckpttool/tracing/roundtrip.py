"""Whether a model can read what it writes: the two ways, saving and loading, put behind each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref, is_opaque, refs, substitute
from ckpttool.core.names import NAMED_EXTRA_STATE
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing.experiment import Tried
from ckpttool.tracing.loading import Verdict
from ckpttool.tracing.recorder.simplify import Simplifier
from ckpttool.tracing.saving import Saved

_UNKNOWN = "cannot be told whether it is given back"
_INEXACT = "loading does not give the saved value back exactly"
_ROOT = "(root)"
_PROBE_LIMIT = 50_000_000  # elements of the tensors that are filled with random values to compare both ways


_FEW, _ROUNDS = 1024, 16  # elements, of fewer of which these many random values are tried


def problems(saved: Saved, verdict: Verdict) -> tuple[Problem, ...]:
    """Every way in which loading what was saved does not give the same model again; `verdict` is of its own keys.

    What cannot be told is a problem of the kind ``unknown``.
    """
    found = [Problem("load_state_dict expects a key that state_dict does not write", key) for key in verdict.missing]
    tensors = {s.key for s in saved.serialized}
    found += [Problem(_unexpected(key, key in tensors), key) for key in verdict.unexpected]
    found += [
        Problem(f"load_state_dict refuses what state_dict wrote: {' '.join(text.split())}", _ROOT)
        for text in verdict.errors
    ]
    if not verdict.ok and not found:
        found.append(Problem("load_state_dict refuses what state_dict wrote", _ROOT))
    return (*found, *_values(saved, verdict))


def _unexpected(key: str, is_tensor: bool) -> str:
    named = is_tensor and key.rpartition(".")[2] == "_extra_state"
    return NAMED_EXTRA_STATE if named else "state_dict writes a key that load_state_dict does not expect"


def resolve_problems(found: Iterable[Problem], saved: Saved, verdict: Verdict, truth: Tried) -> tuple[Problem, ...]:
    """The problems that are left, or come up, when a round trip is really made: `found` are those that symbols show."""
    if truth.failed is not None:
        certain = tuple(problem for problem in found if problem.kind != "unknown")
        return certain or (Problem(f"load_state_dict refuses what state_dict wrote: {truth.failed}", _ROOT),)
    first = {r.fqn: r.alias_of or r.fqn for r in saved.runtime}
    fed = saved.fed
    said = {problem.key: problem for problem in found if problem.kind != "unknown"}
    shown = {fqn for fqn, problem in said.items() if problem.problem == _INEXACT}  # by other values
    return tuple(
        said.get(fqn, Problem(_INEXACT, fqn))
        for fqn, own in first.items()
        if fqn in (truth.differing | shown) and own in fed
    )


def _values(saved: Saved, verdict: Verdict) -> Iterator[Problem]:
    sources = {s.key: s.source for s in saved.serialized}
    fed = {key for source in sources.values() for key in refs(source)}
    first = {r.fqn: r.alias_of or r.fqn for r in saved.runtime}
    simplifier = Simplifier(_leaves(saved))
    for fqn, own in first.items():
        value = verdict.reads.get(fqn)
        if own not in fed or fqn in verdict.missing:
            continue
        if fqn not in verdict.reads:
            yield Problem("saved, and gone from the model that has loaded it", fqn)
        elif value is None:
            yield Problem("saved, but not loaded again", fqn)
        elif not isinstance(value, Ref) or sources.get(value.key) != Ref(own):
            problem = _difference(value, Ref(own), sources, simplifier)
            if problem:
                yield Problem(problem, fqn, "unknown" if problem.startswith(_UNKNOWN) else "other")


def _difference(value: Expression, own: Ref, sources: Mapping[str, Expression | None], simplifier: Simplifier) -> str:
    """What is wrong with loading `value` (over keys) into the tensor `own`; empty where it is the same."""
    constant = next((key for key in refs(value) if sources.get(key) is None), None)
    if constant is not None:
        return f"{_UNKNOWN}: loaded from {constant}, which no tensor of the model is saved to"
    way = substitute(value, lambda key: sources[key])
    if is_opaque(way):
        return f"{_UNKNOWN}: computed by code that is no tensor operator"
    simple = simplifier.simplify(way)
    if simple == own:
        return ""
    if isinstance(simple, Ref):
        return f"loading gives it the value of {simple.key}"
    assert isinstance(simple, Op)
    return _probe(simple, own, simplifier.leaves)


def _probe(way: Op, own: Ref, leaves: Mapping[str, torch.Tensor]) -> str:
    """Compares both sides on random values, bit by bit; of few elements on many, since one may be right by chance."""
    names = list(dict.fromkeys([own.key, *refs(way)]))
    if any(name not in leaves for name in names):
        return f"{_UNKNOWN}: values of its kind cannot be made up"
    if sum(_base(leaves[name]).numel() for name in names) > _PROBE_LIMIT:
        return f"{_UNKNOWN}: too large to try out"
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS if leaves[own.key].numel() < _FEW else 1):
        values = _filled({name: leaves[name] for name in names}, generator)
        try:
            back = evaluate(way, values.__getitem__)
        except CkptError as error:
            return f"{_UNKNOWN}: {error.message}"
        own_value = values[own.key]
        if back.shape != own_value.shape or back.dtype != own_value.dtype:
            return "loading gives it another shape or dtype"
        if not same_bits(back, own_value):
            return _INEXACT
    return ""


def _leaves(saved: Saved) -> dict[str, torch.Tensor]:
    """The runtime tensors without data; those that overlap in the model share a storage here too."""
    storages: dict[Any, torch.Tensor] = {}
    found = {}
    for r in saved.runtime:
        place = saved.places[r.fqn]
        if r.shape is None or not isinstance(getattr(torch, r.dtype, None), torch.dtype) or r.dtype.startswith("q"):
            continue
        dtype = getattr(torch, r.dtype)
        if not isinstance(place[0], int):
            found[r.fqn] = torch.empty(r.shape, dtype=dtype, device="meta")
            continue
        geom, key = place[1], (place[0], dtype)
        if key not in storages or storages[key].numel() < geom.end:
            storages[key] = torch.empty(geom.end, dtype=dtype, device="meta")
    for r in saved.runtime:
        place = saved.places[r.fqn]
        base = storages.get((place[0], getattr(torch, r.dtype, None)))
        if base is not None and r.shape is not None:
            geom = place[1]
            found[r.fqn] = base.as_strided(geom.shape, geom.stride, geom.offset)
    return found


def _filled(tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random values for tensors without data, sharing memory where they do."""
    storages: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        base = _base(tensor)
        if id(base) not in storages:
            storages[id(base)] = _random(base, generator)
        found[name] = storages[id(base)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return found


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        kind = torch.complex64 if like.dtype.is_complex else torch.float32
        scale = torch.randint(-10, 11, like.shape, generator=generator).exp2()  # what is cut off far from 0 shows too
        return (torch.randn(like.shape, dtype=kind, generator=generator) * scale).to(like.dtype)
    return torch.randint(0, 2 if like.dtype == torch.bool else 100, like.shape, generator=generator).to(like.dtype)
