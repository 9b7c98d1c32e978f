"""Put a section and the state of an optimizer into a live module and its optimizer, all or
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpttool.core.checkpoint import AnyEntry, ExtraEntry, Section, Span, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.optimizer_state import rebuilt
from ckpttool.core.text import plural
from ckpttool.evaluate import torch_eval
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import comparing_checksums, map_span
from ckpttool.live.model import innermost, sharded_like
from ckpttool.live.swap import swap_weights
from ckpttool.operands.model import ModelOperand
from ckpttool.tracing.instances import copied_state, load_strictly
from ckpttool.tracing.safe_state_dict import Maker, NotMade, stored
from ckpttool.tracing.user_code import describe

_EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def put(
    model: Module,
    section: Section | None,
    definition: ModelOperand,
    optimizer: Optimizer | None,
    state: Mapping[Any, Any] | None,
    cast: bool,
    by_code: bool = False,
) -> int:
    """Load the section, which `definition` loads, into `model`, and `state`, by ids, into
    `optimizer`. `by_code`: only the model's own code loads the section.

    Return how many tensors of the model got values. If anything is raised, both are unchanged.
    """
    if section is None:
        with _optimizer_state(model, optimizer, state):
            return 0
    maker, problems = Maker(True), list[Problem]()
    tensors: Any = OrderedDict()
    with comparing_checksums():
        for entry in section.tensors:
            if entry.storage is not None:
                tensors[entry.key] = mapped(entry)
            else:
                tensors[entry.key] = _created(entry, maker, problems)
        objects = {extra.key: _created(extra, maker, problems) for extra in section.extras}
    _check_created(problems)
    if section.modules is not None:
        tensors._metadata = section.modules
    only_extra_state = all(key.rpartition(".")[2] == _EXTRA_STATE for key in objects)
    # Quantized layers keep their weights in objects, which only their code loads; so is the shape
    # of lazy parameters.
    if by_code or not only_extra_state or any(map(is_lazy, innermost(model).parameters())):
        with (
            _own_loading(innermost(model), stored(section, True).state),
            _optimizer_state(model, optimizer, state),
        ):
            return len(section.tensors)
    with _extra_state(innermost(model), objects), _optimizer_state(model, optimizer, state):
        return len(swap_weights(model, tensors, definition, cast=cast, in_place=True).sources)


def _created(entry: AnyEntry, maker: Maker, problems: list[Problem]) -> Any:
    """Return the tensor or object that the safe loader of torch creates; add a problem if there is
    none.
    """
    try:
        return maker.value(entry)
    except NotMade as reason:
        kind = "kind" if isinstance(entry, TensorEntry) else "object"
        problems.append(Problem(f"{reason}, which no safe loader creates", entry.key, kind))
        return None


def _check_created(problems: Sequence[Problem]) -> None:
    if problems:
        raise Refused(
            f"only running code loads {plural(len(problems), 'object')} of this file",
            hint="if you trust the file: model.load_state_dict(torch.load(CKPT,"
            " weights_only=False)); or declare the classes as safe:"
            " torch.serialization.add_safe_globals([CLASS])",
            problems=problems,
        )


@contextmanager
def _own_loading(module: Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Let the module load the state dict itself; give it its old state if that or the block
    raises.
    """
    before = copied_state(module.state_dict())
    every = (*module.parameters(), *module.buffers())
    lazy = {tensor: type(tensor) for tensor in every if is_lazy(tensor)}
    try:
        load_strictly(module, state)
        yield
    except BaseException:
        for tensor, cls in lazy.items():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.__class__ = cls
        load_strictly(module, before)
        raise


def mapped(entry: TensorEntry) -> torch.Tensor:
    """Return the entry as a tensor in the memory of its file, if that is on this machine; else read
    or compute it.

    Raise `CkptError` if the file cannot be read.
    """
    data = None if entry.storage is None else entry.storage.data
    if not isinstance(data, Span) or is_url(data.path) or not entry.numel:
        return torch_eval.load(entry)
    size = itemsize(entry.dtype)
    begin = data.offset + entry.offset * size
    if begin % size:
        return torch_eval.load(entry)
    memory = map_span(Span(data.path, begin, (entry.end - entry.offset) * size))
    elements = torch.frombuffer(memory, dtype=getattr(torch, entry.dtype))
    return elements.as_strided(entry.shape, entry.stride)


@contextmanager
def _extra_state(module: Module, states: Mapping[str, Any]) -> Iterator[None]:
    """Give the modules their extra state; take it back if the block raises."""
    before: list[tuple[Module, Any]] = []
    try:
        for key, value in states.items():
            part = module.get_submodule(key.rpartition(".")[0])
            before.append((part, part.get_extra_state()))
            part.set_extra_state(value)
        yield
    except BaseException:
        for part, value in reversed(before):
            part.set_extra_state(value)
        raise


@contextmanager
def _optimizer_state(
    model: Module, optimizer: Optimizer | None, state: Mapping[Any, Any] | None
) -> Iterator[None]:
    """Load the state; take it back if the block raises. Parts for a sharded parameter are sharded
    as that is.
    """
    if optimizer is None or state is None:
        yield
        return
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    maker, problems = Maker(True), list[Problem]()

    def value(path: tuple[str, ...], part: Any) -> Any:
        if not isinstance(part, (TensorEntry, ExtraEntry)):
            return part
        if isinstance(part, ExtraEntry) or part.storage is None:
            return _created(part, maker, problems)
        tensor = torch_eval.load(part)
        if path[0] == "state" and path[1].isdecimal():
            parameter = parameters[int(path[1])]
            return sharded_like(tensor, parameter) if tensor.shape == parameter.shape else tensor
        return tensor

    with comparing_checksums():
        loaded = rebuilt(state, value)
    _check_created(problems)
    before = {name: vars(optimizer).get(name) for name in ("state", "param_groups")}
    try:
        try:
            optimizer.load_state_dict(loaded)
        except Exception as error:
            hint = "start the optimizer from scratch, and load the model alone"
            raise Refused(
                f"torch does not load the optimizer state: {describe(error)}", hint=hint
            ) from error
        yield
    except BaseException:
        vars(optimizer).update(before)
        raise
