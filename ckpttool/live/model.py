"""What is swapped into (a module, a program, a compiled package) as FQN -> tensor, and what a model says of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Union

import torch
from torch import nn
from torch.export import ExportedProgram

from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.names import Names
from ckpttool.naming.wrappers.table import strip
from ckpttool.operands.model import ModelOperand
from ckpttool.tracing.load_model import LoadedModel
from ckpttool.tracing.runtime import listed, wrapper_paths
from ckpttool.values import dataclass
from ckpttool.words import plural

Model = Union[str, Names, LoadedModel, nn.Module, ExportedProgram, Callable[[], nn.Module]]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """`tensors`: canonical FQN -> parameter or persistent buffer. `constants` are in no state dict: they stay as they
    are, but for those tensors that the model's loading makes anew (`remade`: these can be changed).
    `compared`: whether they are compared with the model's. Those of a module are its own state, and are not.
    """

    title: str
    tensors: Mapping[str, torch.Tensor]
    constants: Mapping[str, object] = field(default_factory=dict)
    remade: bool = True
    compared: bool = True


def module_target(module: nn.Module) -> Target:
    """The module's runtime tensors, under names without the segments of wrappers (compile, DDP, ...)."""
    paths, items = wrapper_paths(module), listed(module)
    count = Counter(strip(item.fqn, paths) for item in items)
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for item in items:
        name = strip(item.fqn, paths)
        name = name if count[name] == 1 else item.fqn
        (tensors if item.persistent else constants)[name] = item.tensor
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise Refused(
            f"the module is not initialised yet: it has {plural(len(lazy), 'lazy parameter')}",
            hint="run the module once on an example, then swap",
            problems=[Problem("a lazy parameter: it has no shape", name) for name in lazy],
        )
    return Target(type(module).__name__, tensors, constants, compared=False)


def program_target(program: ExportedProgram) -> Target:
    """The program's state dict; its constants are lifted from its code and stay."""
    return Target("ExportedProgram", dict(program.state_dict), dict(program.constants), remade=False)


def package_target(package: Any, model: Model | None) -> Target:
    """The constants of a loaded AOTInductor package that are weights of `model`, with the model's shapes and dtypes.

    The package itself tells names only, and `load_constants` copies bytes whatever their shape and dtype. Raises
    `CkptError` where no model is given, `Refused` where it is another one.
    """
    if model is None:
        raise CkptError(
            "a loaded AOTInductor package does not say what shapes and dtypes its weights have",
            hint="pass model=: the program or the module that it was compiled from, or a file.py:build operand",
        )
    have, (like, unsaved) = package.get_constant_fqns(), _weights(model)
    if not any(fqn in like for fqn in have):
        raise Refused(
            "no constant of the package is a weight of the model",
            hint="pass the model that the package was compiled from",
            problems=[Problem("no such weight in the model", fqn) for fqn in have],
        )
    tensors = {fqn: like[fqn] for fqn in have if fqn in like}
    return Target(type(package).__name__, tensors, {fqn: unsaved.get(fqn) for fqn in have if fqn not in tensors})


def _weights(model: Model) -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
    """Tensors with the shape, dtype and strides of the model's weights; contiguous where only names are known.

    Behind them those of buffers that are not saved.
    """
    if isinstance(model, (ExportedProgram, nn.Module)):
        target = program_target(model) if isinstance(model, ExportedProgram) else module_target(model)
        return target.tensors, target.constants
    found: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}
    for tensor in ModelOperand(model).names().runtime:
        if tensor.shape is not None:
            like = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            found[tensor.persistent][tensor.fqn] = like
    return found[True], found[False]
