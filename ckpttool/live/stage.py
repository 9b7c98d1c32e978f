"""The new values, computed and checked before anything is changed: what can fail, fails here."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.text import first_line, plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.live.model import local_part, placed
from ckpttool.tracing.recorder.memory import Token, address, geometry, token
from ckpttool.tracing.runtime import layout_of


@dataclass(frozen=True, slots=True, eq=False)
class New:
    """The value for one tensor of the target. With `whole`, `value` is a tensor object to be swapped for the old one;
    otherwise its elements are copied into the old one's memory. `is_own`: nothing else uses the memory of `value`.
    """

    fqn: str
    old: torch.Tensor
    value: torch.Tensor
    whole: bool
    is_own: bool = False

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The memory to write, and its new value: of a DTensor this rank's part. None for swapped objects."""
        if not self.whole:
            return self.old, self.value
        old, value = local_part(self.old), local_part(self.value)
        return None if old is None or value is None else (old, value)


def stage(
    tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Expression], state: Mapping[str, Any]
) -> list[New]:
    """Return a new value for every tensor object, of its dtype and shape and on its device.

    It may be a tensor of `state` itself, unless that is in memory that will be written. Raises `Refused`, with all
    problems at once, if a value cannot be computed, or if one tensor gets two.
    """
    # The memory that will be written, by address: numpy may give one byte to several storages. Sorted and disjoint.
    blocks: list[tuple[int, int]] = []
    memory = (old if layout_of(old) == "strided" else local_part(old) for old in tensors.values())
    for begin, end in sorted({_extent(tensor) for tensor in memory if tensor is not None}):
        if blocks and begin < blocks[-1][1]:
            blocks[-1] = blocks[-1][0], max(end, blocks[-1][1])
        else:
            blocks.append((begin, end))
    problems: list[Problem] = []
    news: dict[int, New] = {}
    for fqn, old in tensors.items():
        if id(old) in news:
            continue  # planning has compared the values for the names of one tensor
        try:
            news[id(old)] = _new(fqn, old, _value(sources[fqn], state), blocks)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, CkptError) as error:
            problems.append(Problem(_reason(error), fqn))
    problems += _overlaps(list(news.values()))
    if problems:
        raise Refused(
            f"the weights do not fit: {plural(len(problems), 'problem')}",
            hint="nothing was changed; the problems say what stands against it",
            problems=problems,
        )
    return list(news.values())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one behind its last."""
    geom, begin = geometry(tensor), tensor.data_ptr()
    return begin, begin + (geom.end - geom.offset) * tensor.element_size()


def _value(source: Expression, state: Mapping[str, Any]) -> torch.Tensor:
    value = state[source.key] if isinstance(source, Ref) else evaluate(source, state.__getitem__)
    return value.detach()


def _new(fqn: str, old: torch.Tensor, value: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> New:
    if "meta" in (old.device.type, value.device.type):
        which = "it" if old.device.type == "meta" else "its new value"
        raise CkptError(f"{which} is on the meta device and has no data", hint="materialize it first")
    if layout_of(old) != "strided" or layout_of(value) != "strided":
        return New(fqn, old, _loaded(old, placed(value, old)), True)
    fitted = value.to(device=old.device, dtype=old.dtype)
    begin, end = _extent(fitted)
    at = bisect_left(blocks, (end,))
    will_be_written = at > 0 and blocks[at - 1][1] > begin and token(fitted) != token(old)
    return New(fqn, old, fitted.clone() if will_be_written else fitted, False, will_be_written or fitted is not value)


def _loaded(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the result of loading `value` into a copy of `old`, by the tensors' own `module_load`."""
    trial = old.detach().clone()
    result: torch.Tensor = trial.module_load(value, assign=False)
    if result is value:
        result = value.clone()
    for what in ("shape", "dtype", "device"):
        if getattr(result, what) != getattr(old, what):
            raise CkptError(f"its module_load gives the {what} {getattr(result, what)}", hint="it must keep it")
    if isinstance(old, nn.Parameter):
        result = nn.Parameter(result, old.requires_grad)
    result.__dict__.update({name: value for name, value in old.__dict__.items() if name not in result.__dict__})
    return result


def _overlaps(news: list[New]) -> list[Problem]:
    """Return tensors that share memory and get different values for it, tried on a copy of the memory."""
    by_memory: defaultdict[int, list[New]] = defaultdict(list)
    for new in news:
        if not new.whole and new.old.numel():
            by_memory[address(new.old)].append(new)
    problems = []
    for group in by_memory.values():
        # Planning knows names of one storage, but not two storages that numpy has given the same memory.
        first: dict[Token, New] = {}
        for new in group:
            other = first.setdefault(token(new.old), new)
            if not same_bits(other.value, new.value):
                problems.append(Problem(f"tied to {other.fqn}, and its new value is another one", new.fqn))
        distinct = list(first.values())
        if len(distinct) < 2:
            continue
        try:
            views = arranged(distinct)
        except RuntimeError as error:  # one of them is expanded
            problems += [Problem(_reason(error), new.fqn) for new in distinct]
            continue
        for new, view in zip(distinct, views):
            if not same_bits(view, new.value):
                problems.append(Problem("shares memory with another weight that gets another value", new.fqn))
    return problems


def arranged(group: list[New]) -> list[torch.Tensor]:
    """Return tensors with the new values in new memory, which they share as the old ones do."""
    storage = max((new.old.untyped_storage() for new in group), key=torch.UntypedStorage.nbytes).clone()
    views = []
    for new in group:
        old = new.old
        view = torch.empty(0, dtype=old.dtype, device=old.device)
        view.set_(storage, old.storage_offset(), old.shape, old.stride())
        view = view.conj() if old.is_conj() else view
        views.append(torch._neg_view(view) if old.is_neg() else view)
    for view, new in zip(views, group):
        view.copy_(new.value)
    return views


def check_in_place(news: Sequence[New]) -> None:
    """Raise `Refused`, with all problems at once, if a tensor's memory or object cannot take its new value."""
    problems = []
    places = []
    for new in news:
        if new.memory is None:
            if weakref.getweakrefs(new.old):
                problems.append(Problem("a weak reference to it would see the swap", new.fqn))
            continue
        old = new.memory[0]
        places.append((*_extent(old), address(old), new.fqn))
        if old.is_inference() and not torch.is_inference_mode_enabled():
            problems.append(Problem("an inference tensor", new.fqn))
        elif geometry(old).overlaps_itself:
            problems.append(Problem("several of its elements are one in memory", new.fqn))
    last, storage = 0, 0
    for begin, end, place, fqn in sorted(places):
        if begin < last and place != storage:
            problems.append(Problem("shares memory with another weight, each by a storage of its own", fqn))
        if end > last:
            last, storage = end, place
    if problems:
        raise Refused(
            f"{plural(len(problems), 'tensor')} cannot be changed in place",
            hint="in_place=False puts new tensors into the module instead",
            problems=problems,
        )


def laid_out(source: Expression, like: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """Return the value in new memory with the strides and dtype of `like`, on its device if that has data."""
    value = _value(source, state)
    device = value.device if like.device.type == "meta" else like.device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(value)


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, CkptError) else first_line(error)
