"""The new values, made and checked before anything is changed: what can fail, fails here."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The value for one tensor that is there. `whole` means that `value` is a tensor object of its own, to be swapped
    for the old one; otherwise its elements go into the old one's memory. `is_own`: `value` has memory of its own.
    """

    fqn: str
    old: torch.Tensor
    value: torch.Tensor
    whole: bool
    is_own: bool = False

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is written in place, and with what: of a DTensor this rank's part. None where objects are swapped."""
        if not self.whole:
            return self.old, self.value
        mine, fresh = local_part(self.old), local_part(self.value)
        return None if mine is None or fresh is None else (mine, fresh)


def stage(
    tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Expression], state: Mapping[str, Any]
) -> list[New]:
    """A new value for every tensor object, of its dtype and shape and on its device.

    It may be a tensor of `state` itself, unless that lies in memory that is to be written. Raises `Refused`, with all
    problems at once, where a value cannot be made, and where one tensor gets two.
    """
    taken = _Ground(memory for memory in map(_memory, tensors.values()) if memory is not None)
    problems: list[Problem] = []
    made: dict[int, New] = {}
    for fqn, old in tensors.items():
        if id(old) in made:
            continue  # planning has compared what the names of one tensor get
        try:
            made[id(old)] = _new(fqn, old, sources[fqn], state, taken)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, CkptError) as error:
            problems.append(Problem(_reason(error), fqn))
    problems += _overlaps(list(made.values()))
    if problems:
        raise Refused(
            f"the weights do not fit: {plural(len(problems), 'problem')}",
            hint="nothing was changed; the problems say what stands against it",
            problems=problems,
        )
    return list(made.values())


def _memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a new value would be written into: of a DTensor this rank's part; None for what is no dense memory."""
    return tensor if layout_of(tensor) == "strided" else local_part(tensor)


class _Ground:
    """Where dense tensors lie, by address: numpy may give one byte to several storages."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._blocks: list[tuple[int, int]] = []  # begin and end, in order, none in another
        for begin, end in sorted(set(map(_reach, tensors))):
            if self._blocks and begin < self._blocks[-1][1]:
                self._blocks[-1] = self._blocks[-1][0], max(end, self._blocks[-1][1])
            else:
                self._blocks.append((begin, end))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a byte there."""
        begin, end = _reach(tensor)
        at = bisect_left(self._blocks, (end,))
        return at > 0 and self._blocks[at - 1][1] > begin


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the first behind its last."""
    lies, begin = geometry(tensor), tensor.data_ptr()
    return begin, begin + (lies.end - lies.offset) * tensor.element_size()


def _entangled(news: Sequence[New]) -> Iterator[Problem]:
    """Tensors that reach into another storage's tensor: what is written to one of them the other would have too."""
    places = sorted((*_reach(new.memory[0]), address(new.memory[0]), new.fqn) for new in news if new.memory is not None)
    last, storage = 0, 0
    for begin, end, own, fqn in places:
        if begin < last and own != storage:
            yield Problem("shares memory with another weight, each by a storage of its own", fqn)
        if end > last:
            last, storage = end, own


def check_in_place(news: Sequence[New]) -> None:
    """Raises `Refused`, with all problems at once, where a tensor's memory or object cannot take its new value."""
    problems = [Problem(reason, new.fqn) for new in news if (reason := _unwritable(new)) is not None]
    problems += _entangled(news)
    if problems:
        raise Refused(
            f"{plural(len(problems), 'tensor')} cannot be changed in place",
            hint="in_place=False puts new tensors into the module instead",
            problems=problems,
        )


def _unwritable(new: New) -> str | None:
    if new.memory is None:
        return "a weak reference to it would see the swap" if weakref.getweakrefs(new.old) else None
    old = new.memory[0]
    if old.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor"
    return "several of its elements are one in memory" if geometry(old).overlaps_itself else None


def _new(fqn: str, old: torch.Tensor, source: Expression, state: Mapping[str, Any], taken: _Ground) -> New:
    value = _value(source, state)
    if "meta" in (old.device.type, value.device.type):
        which = "it" if old.device.type == "meta" else "its new value"
        raise CkptError(f"{which} is on the meta device and has no data", hint="materialize it first")
    if layout_of(old) != "strided" or layout_of(value) != "strided":
        return New(fqn, old, _loaded(old, placed(value, old)), True)
    fitted = value.to(device=old.device, dtype=old.dtype)
    in_the_way = fitted in taken and token(fitted) != token(old)
    return New(fqn, old, fitted.clone() if in_the_way else fitted, False, in_the_way or fitted is not value)


def _value(source: Expression, state: Mapping[str, Any]) -> torch.Tensor:
    found = state[source.key] if isinstance(source, Ref) else evaluate(source, state.__getitem__)
    return found.detach()


def laid_out(source: Expression, like: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """The value in new memory with the strides and the dtype of `like`, on the device of `like` if that has data."""
    value = _value(source, state)
    device = value.device if like.device.type == "meta" else like.device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(value)


def _loaded(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What loading `value` into `old` gives, by the tensors' own `module_load`; `old` itself is left alone."""
    trial = old.detach().clone()
    found: torch.Tensor = trial.module_load(value, assign=False)
    if found is value:
        found = value.clone()
    for what in ("shape", "dtype", "device"):
        if getattr(found, what) != getattr(old, what):
            raise CkptError(f"its module_load gives the {what} {getattr(found, what)}", hint="it must keep it")
    if isinstance(old, nn.Parameter):
        found = nn.Parameter(found, old.requires_grad)
    found.__dict__.update({name: value for name, value in old.__dict__.items() if name not in found.__dict__})
    return found


def _overlaps(news: list[New]) -> list[Problem]:
    """Tensors that lie in one another's memory, and want different values there: tried out on a copy of the memory."""
    by_memory: defaultdict[int, list[New]] = defaultdict(list)
    for new in news:
        if not new.whole and new.old.numel():
            by_memory[address(new.old)].append(new)
    problems = []
    for group in by_memory.values():
        first: dict[Token, New] = {}  # planning knows what one storage has twice, and not what numpy has given to two
        for new in group:
            if not same_bits(first.setdefault(token(new.old), new).value, new.value):
                problems.append(_tied(first[token(new.old)], new))
        problems += _clashes(list(first.values())) if len(first) > 1 else []
    return problems


def _tied(first: New, new: New) -> Problem:
    return Problem(f"tied to {first.fqn}, and its new value is another one", new.fqn)


def _clashes(group: list[New]) -> list[Problem]:
    try:
        views = arranged(group)
    except RuntimeError as error:  # one of them is expanded
        return [Problem(_reason(error), new.fqn) for new in group]
    reason = "shares memory with another weight that gets another value"
    return [Problem(reason, new.fqn) for new, view in zip(group, views) if not same_bits(view, new.value)]


def arranged(group: list[New]) -> list[torch.Tensor]:
    """Tensors like the old ones, in new memory that they share as the old ones do, with the new values in it."""
    whole = max((new.old.untyped_storage() for new in group), key=torch.UntypedStorage.nbytes).clone()
    views = [_seen(whole, new.old) for new in group]
    for view, new in zip(views, group):
        view.copy_(new.value)
    return views


def _seen(memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """The memory as `like` sees its own."""
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    view.set_(memory, like.storage_offset(), like.shape, like.stride())
    view = view.conj() if like.is_conj() else view
    return torch._neg_view(view) if like.is_neg() else view


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, CkptError) else first_line(error)
