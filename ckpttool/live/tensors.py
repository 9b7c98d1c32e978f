"""The moment of the swap: staged values go into tensors that are there, or new tensors take their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpttool.errors import Refused
from ckpttool.io.interrupts import uninterrupted
from ckpttool.live.stage import New, arranged
from ckpttool.tracing.recorder.identity import address, token


def write(news: Sequence[New]) -> None:
    """Gives every old tensor its new value; every reference to it stays valid, and sees the new value.

    Tensor objects are swapped first, which torch may refuse (then those before are swapped back); the memory of all
    others is written last, in one call, in which nothing is left to go wrong: Ctrl-C waits for its end.
    """
    plain = [_as_it_lies(*new.memory) for new in news if new.memory is not None]
    with uninterrupted():
        _write(news, plain)


def _as_it_lies(old: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two without a lazy conjugation or negation of `old`, through which no call writes that takes many tensors."""
    old, value = (old.conj(), value.conj()) if old.is_conj() else (old, value)
    return (torch._neg_view(old), torch._neg_view(value)) if old.is_neg() else (old, value)


def _write(news: Sequence[New], plain: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    done: list[New] = []
    try:
        for new in news:
            if new.memory is None:
                _swap(new, done)
        if plain:
            with torch.no_grad():
                torch._foreach_copy_([old for old, _ in plain], [value for _, value in plain])
    except BaseException as error:
        for new in reversed(done):
            torch.utils.swap_tensors(new.old, new.value)
        if isinstance(error, RuntimeError):
            raise Refused(
                f"a tensor cannot be swapped: {str(error).splitlines()[0]}",
                hint="nothing was changed; in_place=False puts new tensors into the module instead",
            ) from error
        raise


def _swap(new: New, done: list[New]) -> None:
    """Swaps two tensor objects; the gradient and `requires_grad` stay with the name."""
    grad, trains = new.old.grad, new.old.requires_grad
    torch.utils.swap_tensors(new.old, new.value)
    done.append(new)
    new.old.requires_grad_(trains)
    if grad is not None:
        new.old.grad = grad


def replacements(news: Sequence[New]) -> dict[int, torch.Tensor]:
    """id of an old tensor -> the tensor that takes its place: of its class, strides, attributes and `requires_grad`,
    without a gradient, and in memory of its own that is shared wherever the old ones share theirs."""
    made = {id(new.old): new.value for new in news if new.whole}
    groups: defaultdict[int, list[New]] = defaultdict(list)
    for new in news:
        if not new.whole:
            groups[address(new.old) if new.old.numel() else id(new.old)].append(new)
    with torch.no_grad():
        for group in groups.values():
            for new, fresh in zip(group, _fresh(group)):
                made[id(new.old)] = _as(new.old, fresh)
    return made


def _fresh(group: list[New]) -> list[torch.Tensor]:
    if len({token(new.old) for new in group}) > 1:
        return arranged(group)
    old, value = group[0].old, group[0].value
    fits = group[0].is_own and value.stride() == old.stride()
    one = value if fits else torch.empty_like(old, requires_grad=False).copy_(value).detach()
    return [one.detach() for _ in group]


def put(fresh: Mapping[int, torch.Tensor], module: nn.Module) -> None:
    """Puts new tensors (by id of the old one) wherever `module` holds the old ones, each in one assignment."""
    places = [(table, at, old) for table in _tables(module) for at, old in _items(table) if id(old) in fresh]
    try:
        for table, at, old in places:
            table[at] = fresh[id(old)]
    except BaseException:
        for table, at, old in places:
            if table[at] is not old:
                table[at] = old
        raise


def _items(table: Any) -> list[tuple[Any, Any]]:
    return list(table.items() if isinstance(table, dict) else enumerate(table))


def _tables(module: nn.Module, seen: set[int] | None = None) -> Iterator[Any]:
    """Every dict and list in which a module may hold tensors: also those of modules that it keeps as attributes, such
    as the calls behind a dispatcher of an unflattened program, and the flat weights of an RNN."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module._parameters
    yield module._buffers
    yield module.__dict__
    lists = [value for value in module.__dict__.values() if isinstance(value, list)]
    yield from lists
    for value in (*module._modules.values(), *module.__dict__.values(), *(item for held in lists for item in held)):
        if isinstance(value, nn.Module):
            yield from _tables(value, seen)


def _as(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor of the class of `old` (which adds no behaviour of its own), with its attributes."""
    made: torch.Tensor = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made
