"""Put the tensors of a checkpoint into a live model and its optimizer: all, or none."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Module as Module  # the types of `ckpttool.load`
from torch.optim import Optimizer as Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from ckpttool.core.checkpoint import ExtraEntry, Section, Span, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.optimizer_state import rebuilt
from ckpttool.core.text import a, plural
from ckpttool.evaluate import torch_eval
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import map_span
from ckpttool.live.model import FSDP1, FSDP2, instances, placed
from ckpttool.live.swap import swap_weights
from ckpttool.operands.model import ModelOperand
from ckpttool.tracing.instances import wrapper_paths


def innermost(module: Module) -> Module:
    """Return the module inside of the wrappers around all of it: DDP, `torch.compile`, FSDP1.

    An AveragedModel is another model, with a counter in its state dict. Raise `CkptError` if it is not a module.
    """
    if not isinstance(module, Module):
        raise CkptError(f"{a(module)} is not a module", hint="ckpttool.swap_weights puts weights into a program")
    while not isinstance(module, AveragedModel) and (outer := [p for p in wrapper_paths(module) if "." not in p]):
        module = module.get_submodule(outer[0])
    return module


def check_copyable(module: Module) -> None:
    """Raise `CkptError` for a sharded module: it cannot be copied, so its names cannot be traced."""
    if instances(module, FSDP1) or instances(module, FSDP2):
        raise CkptError(
            "a sharded module cannot be copied, and its state_dict hooks are not known",
            hint="pass definition=build, the function or class that builds the model before it is sharded",
        )


def like(optimizer: Optimizer, model: Module) -> Callable[[Module], Optimizer]:
    """Return a function that makes such an optimizer, with a copy of its state, for a copy of `model`.

    The constructors of some optimizers create state that a step needs. Raise `CkptError` if the optimizer has
    parameters that the model does not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    strangers = [
        Problem(f"a parameter of shape {list(parameter.shape)}", f"param_groups.{index}")
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in names
    ]
    if strangers:
        raise CkptError(
            f"the optimizer has {plural(len(strangers), 'parameter')} that the model does not have",
            hint="pass the optimizer that was made of this model's parameters",
            problems=strangers,
        )

    def make(fresh: Module) -> Optimizer:
        twin = type(optimizer).__new__(type(optimizer))
        # Schedulers and profilers replace `step` in the instance, and hooks on steps are about the real one.
        twin.__dict__.update({name: own for name, own in vars(optimizer).items() if name != "step"})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in twin.__dict__:
                twin.__dict__[name] = type(twin.__dict__[name])()
        parameters = dict(fresh.named_parameters())
        twin.state = defaultdict(dict)
        for owner, values in optimizer.state.items():
            parameter = parameters[names[id(owner)]] if id(owner) in names else owner
            device = parameter.device if isinstance(parameter, torch.Tensor) else torch.device("cpu")
            twin.state[parameter] = tree_map(partial(_copied, device=device), values)
        twin.param_groups = [
            {**group, "params": [parameters[names[id(parameter)]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return twin

    return make


def _copied(value: Any, device: torch.device) -> Any:
    """Return a copy of a value of an optimizer's state; a step reads its counters, so single elements are real."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.numel() == 1 and device.type == "meta":
        device = torch.device("cpu")
    if type(value) is torch.Tensor:
        return value.detach().to(device, copy=True)
    return torch.zeros(value.shape, dtype=value.dtype, device=device)  # sharded


def put(
    model: Module,
    section: Section | None,
    definition: ModelOperand,
    optimizer: Optimizer | None,
    state: Mapping[Any, Any] | None,
    cast: bool,
) -> int:
    """Load the section, which `definition` loads, into `model`, and `state`, by ids, into `optimizer`.

    Return how many tensors of the model got values. If anything is raised, both are unchanged.
    """
    if section is None:
        with _optimizer_state(model, optimizer, state):
            return 0
    entries = section.entries
    opaque = [
        Problem("a pickled object, which only running its code can load", entry.key)
        for entry in entries
        if isinstance(entry, ExtraEntry) and entry.value is None
    ]
    opaque += [
        Problem(f"a tensor of layout {entry.layout}", entry.key)
        for entry in entries
        if isinstance(entry, TensorEntry) and entry.storage is None
    ]
    if opaque:
        raise Refused(
            f"only running code loads {plural(len(opaque), 'object')} of this file",
            hint="if you trust the file: model.load_state_dict(torch.load(CKPT, weights_only=False))",
            problems=opaque,
        )
    tensors = {entry.key: mapped(entry) for entry in section.tensors}
    with _extra_state(innermost(model), section), _optimizer_state(model, optimizer, state):
        return len(swap_weights(model, tensors, definition, cast=cast, in_place=True).sources)


def mapped(entry: TensorEntry) -> torch.Tensor:
    """Return the entry as a tensor in the memory of its file, if that is on this machine; else read or compute it.

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
    return torch.frombuffer(memory, dtype=getattr(torch, entry.dtype)).as_strided(entry.shape, entry.stride)


@contextmanager
def _extra_state(module: Module, section: Section) -> Iterator[None]:
    """Give the modules their extra state; take it back if the block raises."""
    before: list[tuple[Module, Any]] = []
    try:
        for extra in section.extras:
            path, _, name = extra.key.rpartition(".")
            if name == nn.modules.module._EXTRA_STATE_KEY_SUFFIX:
                part = module.get_submodule(path)
                before.append((part, part.get_extra_state()))
                part.set_extra_state(extra.value)
        yield
    except BaseException:
        for part, value in reversed(before):
            part.set_extra_state(value)
        raise


@contextmanager
def _optimizer_state(model: Module, optimizer: Optimizer | None, state: Mapping[Any, Any] | None) -> Iterator[None]:
    """Load the state; take it back if the block raises. Parts for a sharded parameter are sharded as that is."""
    if optimizer is None or state is None:
        yield
        return
    if instances(model, FSDP1):
        raise CkptError(
            "the state of an optimizer under FSDP1 is cut like its flat parameters",
            hint="load the model with ckpttool, and the optimizer with FSDP.optim_state_dict_to_load",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def value(path: tuple[str, ...], part: Any) -> Any:
        if isinstance(part, ExtraEntry):
            part = part.value
        if not isinstance(part, TensorEntry):
            return part
        tensor = torch_eval.load(part)
        if path[0] == "state" and path[1].isdecimal():
            parameter = parameters[int(path[1])]
            return placed(tensor, parameter) if tensor.shape == parameter.shape else tensor
        return tensor

    before = {name: vars(optimizer).get(name) for name in ("state", "param_groups")}
    try:
        optimizer.load_state_dict(rebuilt(state, value))
        yield
    except BaseException:
        vars(optimizer).update(before)
        raise
