"""The tensors of a module, a program or a compiled package by FQN, and a state dict as a
section.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import field
from typing import Any, Union

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.optim.swa_utils import AveragedModel

from ckpttool.containers.tree import Container
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Payload, Section, Storage, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.names import Names
from ckpttool.core.strides import contiguous_stride
from ckpttool.core.tables import present, selected
from ckpttool.core.text import a, first_line, plural, title_of
from ckpttool.core.values import dataclass
from ckpttool.evaluate import torch_eval
from ckpttool.naming.wrappers import strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.in_memory import bytes_of, check_memory, checkpoint_of, is_container, levels
from ckpttool.operands.model import ModelOperand
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.instances import (
    dtype_name,
    is_dtensor,
    is_special,
    layout_of,
    listed,
    shape_of,
    wrapper_paths,
)
from ckpttool.tracing.memory import inside, token

Model = Union[
    str, Names, LoadedModel, ModelOperand, nn.Module, ExportedProgram, Callable[[], nn.Module]
]


@dataclass(frozen=True, slots=True, eq=False)
class LiveTarget:
    """`tensors`: canonical FQN -> parameter or persistent buffer. `constants` are in no state dict.

    `loads_constants`: a constant that the model's loading computes gets its new value; all others
    stay. `compares_constants`: the constants are compared with the model's; those of a module are
    its own state, and are not.
    """

    title: str
    tensors: Mapping[str, torch.Tensor]
    constants: Mapping[str, object] = field(default_factory=dict)
    loads_constants: bool = True
    compares_constants: bool = True


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside of the wrappers around all of it: DDP, `torch.compile`, FSDP1.

    An AveragedModel is another model, with a counter in its state dict. Raise `CkptError` if it is
    not a module.
    """
    if not isinstance(module, nn.Module):
        raise CkptError(
            f"{a(module)} is not a module", hint="ckpttool.swap_weights puts weights into a program"
        )
    while not isinstance(module, AveragedModel):
        wrapped = [path for path in wrapper_paths(module) if "." not in path]
        if not wrapped:
            break
        module = module.get_submodule(wrapped[0])
    return module


def module_target(module: nn.Module) -> LiveTarget:
    """Return the module's runtime tensors, under names without the segments of wrappers (compile,
    DDP, ...). Raise `Refused` if it has lazy parameters.
    """
    paths, items = wrapper_paths(module), listed(module)
    count = Counter(strip(item.fqn, paths) for item in items)
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for item in items:
        name = strip(item.fqn, paths)
        name = name if count[name] == 1 else item.fqn
        if item.persistent:
            tensors[name] = item.tensor
        else:
            constants[name] = item.tensor
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise Refused(
            f"the module is not initialized yet: it has {plural(len(lazy), 'lazy parameter')}",
            hint="run the module once on an example, then swap",
            problems=same_problem("a lazy parameter: it has no shape", lazy),
        )
    return LiveTarget(type(module).__name__, tensors, constants, compares_constants=False)


def program_target(program: ExportedProgram) -> LiveTarget:
    """Return the program's state dict; its constants are lifted from its code and stay."""
    return LiveTarget(
        "ExportedProgram",
        dict(program.state_dict),
        dict(program.constants),
        loads_constants=False,
    )


def package_target(package: Any, model: Model | None) -> LiveTarget:
    """Return the constants of a loaded AOTInductor package that are weights of `model`, with the
    model's shapes, dtypes and strides.

    The package itself tells names only, and `load_constants` copies bytes whatever their shape,
    dtype and strides. Raises `CkptError` without a model or with names alone, and `Refused` if it
    is another model.
    """
    if isinstance(model, ExportedProgram):
        target = program_target(model)
    elif isinstance(model, nn.Module):
        target = module_target(model)
    else:
        operand = model if isinstance(model, ModelOperand) else ModelOperand(model)
        if model is None or not operand.is_definition:
            raise CkptError(
                "a loaded AOTInductor package does not say what shapes, dtypes and strides its"
                " weights have",
                hint="pass model=: the program or the module that it was compiled from, or a"
                " file.py:build operand; names have no strides",
            )
        target = module_target(operand.definition().build())
    fqns = package.get_constant_fqns()
    tensors = selected(target.tensors, fqns)
    if not tensors:
        raise Refused(
            "no constant of the package is a weight of the model",
            hint="pass the model that the package was compiled from",
            problems=same_problem("no such weight in the model", fqns),
        )
    constants = {fqn: target.constants.get(fqn) for fqn in fqns if fqn not in tensors}
    return LiveTarget(type(package).__name__, tensors, constants)


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTensor(Payload):
    """The payload of a tensor that is not dense; its parts are compared."""

    tensor: torch.Tensor

    def content(self) -> bytes | None:
        """Return a digest, equal for tensors with the same parts and bytes; of DTensors, for this
        rank's parts.
        """
        digest = hashlib.blake2b()
        for level in levels(self.tensor.detach()):
            digest.update(_description(level).encode(errors="surrogatepass"))
            if layout_of(level) == "strided":
                digest.update(torch_eval.to_bytes(level.cpu()))
            elif not inside(level):
                return None
        return digest.digest()


def model_in(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return the state dict that `state` is, or the one inside it that holds the model.

    Raises `CkptError` if there are several such dicts, or none.
    """
    holds_tensors = any(isinstance(value, torch.Tensor) for value in state.values())
    if holds_tensors or not any(map(is_container, state.values())):
        return state
    checkpoint = checkpoint_of(state)
    path = model_section(checkpoint).path
    model: Any = state
    assert isinstance(checkpoint.container, Container)
    for _, key in checkpoint.container.tree.places[path].steps:
        model = model[key]
    if not isinstance(model, Mapping):
        raise CkptError(f"{path} is not a dict of tensors", hint="pass its state_dict()")
    return model


def section_of(state_dict: Mapping[str, object]) -> Section:
    """Return the state dict as a section. Tensors keep their storage: nothing is copied until bytes
    are compared.

    A tensor that is not dense (quantized, sparse, a subclass, meta) has no storage but a `layout`.
    Raises `CkptError` if a key is not a string, or if the memory of a tensor, or of a part, was
    freed: reading it would end the process.
    """
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    storages: dict[int, Storage] = {}
    first: dict[object, SpecialTensor] = {}
    check_memory(
        (key, value) for key, value in state_dict.items() if isinstance(value, torch.Tensor)
    )
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise CkptError(
                f"the state dict has a key that is not a string: {key!r}",
                hint="pass model.state_dict()",
            )
        if isinstance(value, torch.Tensor):
            packed = first.setdefault(_mark(value), SpecialTensor(value))
            tensors.append(_entry(key, value, storages, packed))
        else:  # a file holds plain values as they are
            plain = _is_plain(value)
            extras.append(ExtraEntry(key, None if plain else value, value if plain else None))
    modules = getattr(state_dict, "_metadata", None)
    if isinstance(modules, Mapping):
        modules = {path: dict(payload) for path, payload in modules.items()}
    else:
        modules = None
    return Section("", "state_dict", tuple(tensors), tuple(extras), modules)


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that is equal for two names of one tensor."""
    if not is_special(tensor):
        return (token(tensor),)
    return (token(tensor), *map(_description, levels(tensor.detach())))


def _is_plain(value: object) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str)


def _description(tensor: torch.Tensor) -> str:
    """Describe a tensor without the values of its dense parts, but with the context of a wrapper
    subclass (a scale).
    """
    context = tensor.__tensor_flatten__()[1] if hasattr(tensor, "__tensor_flatten__") else None
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    return repr((type(tensor).__name__, tensor.dtype, shape, context))


def _entry(
    key: str, tensor: torch.Tensor, storages: dict[int, Storage], first: SpecialTensor
) -> TensorEntry:
    shape, dtype, layout = shape_of(tensor) or (), dtype_name(tensor.dtype), layout_of(tensor)
    if layout != "strided":
        nbytes = tensor.numel() * tensor.element_size()
        return TensorEntry(
            key, dtype, shape, contiguous_stride(shape), 0, None, layout, nbytes, payload=first
        )
    tensor = tensor.resolve_conj().resolve_neg()  # the memory of a lazy one holds other values
    memory = tensor.untyped_storage()
    storage = storages.setdefault(memory._cdata, Storage(Lazy(memory.nbytes(), bytes_of(memory))))
    return TensorEntry(
        key, dtype, shape, tuple(tensor.stride()), int(tensor.storage_offset()), storage
    )


FSDP1 = "torch.distributed.fsdp", "FullyShardedDataParallel"
FSDP2 = "torch.distributed.fsdp", "FSDPModule"
_DDP = "torch.nn.parallel", "DistributedDataParallel"
_SCRIPT = "torch.jit", "ScriptModule"
# Wrappers that keep references to their parameters, and do not follow if other tensors replace
# them.
_HOLDERS = {
    FSDP1: "FSDP computes with its flat parameters, of which the module's are views",
    FSDP2: "fully_shard computes with the shards that it has",
    _DDP: "DDP averages the gradients of the parameters that it has",
    _SCRIPT: "TorchScript keeps its parameters where Python cannot replace them",
}


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Give the module the parameters that every later forward pass reads.

    Under `fully_shard` these are the shards: tensors that were gathered for a pass are freed first,
    as torch's own loading does. Under FSDP1 they are unsharded inside the block and sharded again
    after it: all ranks must come here, and each needs memory for the complete model. Raises
    `CkptError` during a pass.
    """
    with ExitStack() as held:
        try:
            for part in instances(module, FSDP2):
                _reshard(part)
            if instances(module, FSDP1):
                whole = torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(
                    module, writeback=True
                )
                whole.__enter__()
                # without the block's error: it is not FSDP's
                held.callback(whole.__exit__, None, None, None)
        except (AssertionError, RuntimeError, AttributeError) as error:
            reason = first_line(error)
            raise CkptError(
                f"FSDP does not give its parameters: {reason}",
                hint="swap between steps, outside of forward and backward",
            ) from error
        yield


def check_replaceable(module: nn.Module) -> None:
    """Raise `Refused`, naming every wrapper, if the module would not use new tensors put into
    it.
    """
    reasons: dict[int, str] = {}
    for kind, reason in _HOLDERS.items():
        reasons.update(dict.fromkeys(map(id, instances(module, kind)), reason))
    problems = []
    for name, part in module.named_modules():
        if id(part) in reasons:
            problems.append(Problem(reasons[id(part)], title_of(name)))
    if problems:
        raise Refused(
            "in_place=False cannot replace the parameters of this module",
            hint="pass in_place=True, which works here: it writes into the parameters (under"
            " fully_shard the shards)",
            problems=problems,
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a DTensor's part on this rank if that is dense; None for any other
    tensor.
    """
    if not is_dtensor(tensor):
        return None
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local if type(local) is torch.Tensor and local.layout == torch.strided else None


def sharded_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a complete tensor sharded as the DTensor `like`; each rank takes its part of the
    tensor that it has.
    """
    if not is_dtensor(like) or is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    whole = DTensor.from_local(
        value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return whole.redistribute(placements=like.placements)  # type: ignore[attr-defined]


def instances(module: nn.Module, kind: tuple[str, str]) -> list[nn.Module]:
    """Return the parts of the module that are of this class, by its module and name; it may not be
    imported yet.
    """
    cls = getattr(sys.modules.get(kind[0]), kind[1], None)
    return [] if cls is None else [part for part in module.modules() if isinstance(part, cls)]


def _reshard(part: Any) -> None:
    """Return the parameters of one `fully_shard`ed module to its shards, and update its view of
    them.

    A gather in progress (`unshard(async_op=True)`, a prefetch) is awaited: its result would be used
    later as if it were new.
    """
    state = part._get_fsdp_state()
    # one until torch 2.12
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    groups = present(groups)
    if any(group._all_gather_result is not None for group in groups):
        part.unshard()
    part.reshard()
    with torch.no_grad():
        for group in groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
