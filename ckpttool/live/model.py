"""What is swapped into (a module, a program, a compiled package) as FQN -> tensor, and what a model says of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from ckpttool.words import plural

Model = Union[str, Names, LoadedModel, nn.Module, ExportedProgram, Callable[[], nn.Module]]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """`tensors`: canonical FQN -> parameter or persistent buffer. `constants` are what stays as it is."""

    title: str
    tensors: Mapping[str, torch.Tensor]
    constants: tuple[str, ...] = ()


def module_target(module: nn.Module) -> Target:
    """The module's runtime tensors, under names without the segments of wrappers (compile, DDP, ...)."""
    paths, items = wrapper_paths(module), listed(module)
    count = Counter(strip(item.fqn, paths) for item in items)
    tensors: dict[str, torch.Tensor] = {}
    constants = []
    for item in items:
        name = strip(item.fqn, paths)
        name = name if count[name] == 1 else item.fqn
        if item.persistent:
            tensors[name] = item.tensor
        else:
            constants.append(name)
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise Refused(
            f"{plural(len(lazy), 'parameter')} of the module {'is' if len(lazy) == 1 else 'are'} not initialised yet",
            hint="run the module once on an example, then swap",
            problems=[Problem("a lazy parameter: it has no shape", name) for name in lazy],
        )
    return Target(type(module).__name__, tensors, tuple(constants))


def program_target(program: ExportedProgram) -> Target:
    """The program's state dict; its constants are lifted from its code and stay."""
    return Target("ExportedProgram", dict(program.state_dict), tuple(program.constants))


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
    have, like = package.get_constant_fqns(), _weights(model)
    if not any(fqn in like for fqn in have):
        raise Refused(
            "no constant of the package is a weight of the model",
            hint="pass the model that the package was compiled from",
            problems=[Problem("no such weight in the model", fqn) for fqn in have],
        )
    tensors = {fqn: like[fqn] for fqn in have if fqn in like}
    return Target(type(package).__name__, tensors, tuple(fqn for fqn in have if fqn not in tensors))


def _weights(model: Model) -> Mapping[str, torch.Tensor]:
    """Tensors with the shape, dtype and strides of the model's weights; contiguous where only names are known."""
    if isinstance(model, ExportedProgram):
        return program_target(model).tensors
    if isinstance(model, nn.Module):
        return module_target(model).tensors
    names = names_of(model)
    return {
        tensor.fqn: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for tensor in (names.runtime if names is not None else ())
        if tensor.persistent and tensor.shape is not None
    }


def names_of(model: Model | None) -> Names | None:
    """The names that the model gives its tensors. Raises `CkptError` where it is none, or its own code fails."""
    return None if model is None else ModelOperand(model).names()
