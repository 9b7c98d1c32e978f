"""Whether what loading showed holds for any values: on real tensors, code outside of torch makes constants of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckpttool.core.expression import Expression, Ref
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.experiment import same, values_of
from ckpttool.tracing.loading import Verdict, loaded
from ckpttool.tracing.recorder.memory import opaque
from ckpttool.tracing.runtime import attempted, copied_state, failure_of_loading, is_cheap
from ckpttool.tracing.saving import FILLINGS, filled, others

_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)} | {torch.bool}
_MOST_TRIED = 256  # keys that are changed one by one, to see which of them feed a tensor


def reads_of_any(model: LoadedModel, state: Mapping[str, Any], verdict: Verdict) -> dict[str, Expression | None]:
    """What `verdict`, of loading `state` for real, says that tensors are made of; opaque where that depends on values.

    Raises `CkptError` where the model's own code fails.
    """
    reads, proven = dict(verdict.reads), False
    before = _after(model, state)
    for seed in FILLINGS:
        other = attempted(lambda: _of_others(model, seed, state))  # noqa: B023  # it is called at once
        if isinstance(other, Exception):
            continue  # a check on values that these do not pass
        again = loaded(model.build(True), copied_state(other), True)
        if not again.ok:
            continue
        proven, after = True, _after(model, other)
        varying = [fqn for fqn in reads if _varies(reads[fqn], again.reads.get(fqn), before.get(fqn), after.get(fqn))]
        for fqn, keys in _feeders(model, state, other, varying).items():
            reads[fqn] = opaque(reads[fqn], again.reads.get(fqn), *map(Ref, keys))
    return reads if proven else _unproven(model, state, reads, before)


def _of_others(model: LoadedModel, seed: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an instance with other values saves; integers that are still those of `state` become others too."""
    made = copied_state(filled(model, seed).state_dict())
    for key, value in made.items():
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if plain and value.dtype in _INTEGERS and same(value, state.get(key, value)):
            made[key] = others(value)
    return made


def _unproven(
    model: LoadedModel, state: Mapping[str, Any], reads: dict[str, Expression | None], after: Mapping[str, torch.Tensor]
) -> dict[str, Expression | None]:
    """`reads`, opaque wherever they say more than that a tensor is a key: no other values could be tried."""
    keys = [Ref(key) for key, value in state.items() if isinstance(value, torch.Tensor)]
    fresh = values_of(model.build(True))

    def is_plain(fqn: str, source: Expression | None) -> bool:
        untouched = source is None and fqn in fresh and fqn in after and same(fresh[fqn], after[fqn])
        return untouched or isinstance(source, Ref)

    return {fqn: source if is_plain(fqn, source) else opaque(*keys) for fqn, source in reads.items()}


def _varies(
    one: Expression | None, other: Expression | None, before: torch.Tensor | None, after: torch.Tensor | None
) -> bool:
    """Whether two loads of other values cannot both be told by the expression `one`."""
    if one != other or one is not None:
        return one != other
    return before is not None and (after is None or not same(before, after))


def _after(model: LoadedModel, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The runtime tensors of a fresh instance that has loaded `state`; none where it does not take it."""
    instance = model.build(True)
    return {} if failure_of_loading(instance, copied_state(state)) is not None else values_of(instance)


def _feeders(
    model: LoadedModel, state: Mapping[str, Any], other: Mapping[str, Any], varying: Iterable[str]
) -> dict[str, list[str]]:
    """For each of the `varying` tensors the keys that change it when they alone are changed; all, of very many."""
    found: dict[str, list[str]] = {fqn: [] for fqn in varying}
    keys = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    if not found:
        return {}
    if len(keys) > _MOST_TRIED or not is_cheap(model):
        return dict.fromkeys(found, keys)
    before = _after(model, state)
    for key in (key for key in keys if key in other):
        after = _after(model, copied_state({**state, key: other[key]}))
        for fqn, feeders in found.items():
            if fqn not in after or not same(before[fqn], after[fqn]):
                feeders.append(key)
    return found
