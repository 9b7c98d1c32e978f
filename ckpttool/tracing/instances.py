"""Instances of a model: list their tensors, fill them with values, load, compare; on the meta
device or for real.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, Union

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.names import RuntimeTensor
from ckpttool.core.strides import Shape
from ckpttool.core.text import dotted
from ckpttool.core.values import dataclass
from ckpttool.evaluate.torch_eval import same_bits
from ckpttool.naming.wrappers import BY_CLASS, strip
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.hooks import Watcher
from ckpttool.tracing.memory import Token, inside, token
from ckpttool.tracing.user_code import attempt, describe

T = TypeVar("T")
_CHEAP = 64 << 20  # bytes
MOST_TRIED = 256  # tensors that are changed one by one, to see what each of them changes


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``named_parameters`` / ``named_buffers``.

    `first` is the first FQN of the same tensor. `path` leads through the modules: the listings of
    some wrappers (FSDP1, activation checkpoint) leave the wrapper's segment out of the FQN.
    """

    fqn: str
    path: str
    first: str
    kind: str
    tensor: torch.Tensor
    token: Token
    persistent: bool


class CodeFailed(CkptError):
    """The model's own saving or loading code raised."""


def listed(model: nn.Module) -> tuple[Listed, ...]:
    """Return every runtime tensor under every name, in ``named_parameters`` then ``named_buffers``
    order.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    hidden = set()
    for path, module in modules:
        for name in getattr(module, "_non_persistent_buffers_set", ()):
            hidden.add(dotted(path, name))
    first: dict[Token, str] = {}
    items = []
    for kind in ("parameter", "buffer"):
        members = _members(modules, kind)
        listing = _overridden(model, kind)
        if listing is None:
            listing = members
        elif not _have_same_tensors(listing, members):
            members = listing
        for (fqn, tensor), (path, _) in zip(listing, members):
            mark = token(tensor)
            first_fqn = first.setdefault(mark, fqn)
            persistent = kind == "parameter" or path not in hidden
            items.append(Listed(fqn, path, first_fqn, kind, tensor, mark, persistent))
    return tuple(items)


def _overridden(model: nn.Module, kind: str) -> list[tuple[str, torch.Tensor]] | None:
    """Return what the model's own ``named_parameters`` or ``named_buffers`` gives; None if it is
    `nn.Module`'s.
    """
    method = f"named_{kind}s"
    if getattr(type(model), method) is getattr(nn.Module, method):
        return None
    # overridden with the signature from before torch 2.0
    with contextlib.suppress(TypeError):
        return list(getattr(model, method)(remove_duplicate=False))
    return None


def _have_same_tensors(
    left: Sequence[tuple[str, torch.Tensor]], right: Sequence[tuple[str, torch.Tensor]]
) -> bool:
    if len(left) != len(right):
        return False
    return all(tensor is other for (_, tensor), (_, other) in zip(left, right))


def _members(modules: Iterable[tuple[str, nn.Module]], kind: str) -> list[tuple[str, torch.Tensor]]:
    """Return what `nn.Module` lists as ``named_parameters`` or ``named_buffers``."""
    members = []
    for path, module in modules:
        for name, tensor in getattr(module, f"_{kind}s").items():
            if tensor is not None:
                members.append((dotted(path, name), tensor))
    return members


def runtime_tensors(model: nn.Module, items: tuple[Listed, ...]) -> tuple[RuntimeTensor, ...]:
    paths = wrapper_paths(model)
    return tuple(
        RuntimeTensor(
            fqn=item.fqn,
            canonical=strip(item.path, paths),
            kind=item.kind,
            persistent=item.persistent,
            trainable=item.tensor.requires_grad,
            dtype=dtype_name(item.tensor.dtype),
            shape=shape_of(item.tensor),
            alias_of=None if item.first == item.fqn else item.first,
        )
        for item in items
    )


def wrapper_paths(module: nn.Module) -> frozenset[str]:
    """Return the dotted paths whose last segment comes from a wrapper, by the classes of the live
    modules.
    """
    paths = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for cls in type(child).__mro__:
            row = BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
            if row is not None:
                paths.add(dotted(path, row.segment))
    return frozenset(paths)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> Shape | None:
    """Return the shape; None for a lazy parameter, which has none yet, and for a nested tensor,
    which has several.
    """
    return None if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a dense one of torch's own classes."""
    is_own = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_own and tensor.layout == torch.strided and not tensor.is_nested


def layout_of(tensor: torch.Tensor) -> str:
    """Return ``strided`` for a dense block of memory that can be read, else what the tensor is
    instead.
    """
    if is_special(tensor):
        return "subclass"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.device.type == "meta" else "strided"


def is_special(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's class changes what operators do (a quantized weight, a DTensor,
    ...).
    """
    overrides_functions = torch.overrides.has_torch_function_unary(tensor)
    return (
        overrides_functions
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    # if nothing has imported it, there are no DTensors
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def code_failed(what: str, watcher: Watcher, error: BaseException) -> CodeFailed:
    """Return the error for what the model's own saving or loading raised; it names the hook."""
    hint = "fix it there: torch fails the same way"
    if _is_raised_by_fsdp1(error):
        hint = (
            "FSDP1 saves and loads only the module that it wraps, and ckpttool runs a copy of it:"
            " pass the model before it is wrapped"
        )
    return CodeFailed(f"{what} fails{watcher.where}: {describe(error)}", hint=hint)


def _is_raised_by_fsdp1(error: BaseException) -> bool:
    """Return whether code of FSDP1 raised the error; FSDP2 is a package next to its modules."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.distributed.fsdp._") and "_fully_shard" not in module:
            return True
    return False


def on_meta_or_real(model: LoadedModel, run: Callable[[bool], T], extra: int = 0) -> T:
    """Return ``run(False)``, on meta; if the model's code cannot do that, ``run(True)``, with real
    tensors if they fit.

    `extra` are bytes that the real run needs in addition to the model. Raises `CkptError` with the
    model's own error.
    """
    if model.materialize:
        return run(True)
    try:
        return run(False)
    except CodeFailed as error:
        check_memory(model, extra, error.message)
    return run(True)


def check_memory(model: LoadedModel, extra: int, why: str) -> int:
    """Return the bytes that real instances of the model take, with their results and `extra`.

    Raises `CkptError`, which says `why` real tensors are needed, if there is not enough memory.
    """
    need, free = 3 * model.nbytes + extra, memory_available()
    if need > free:
        raise CkptError(
            f"{why}; on real tensors it takes {need >> 20} MiB, and {free >> 20} MiB are free",
            hint="run it where there is more memory, or make a smaller model of the same kind",
        )
    return need


def is_cheap(model: LoadedModel, extra: int = 0) -> bool:
    """Return whether the model and `extra` bytes are so small that real instances are built at
    once.
    """
    return model.nbytes + extra <= _CHEAP


def memory_available() -> int:
    """Return the bytes that can be allocated without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors inside nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# a seed, one value everywhere, or the values of the constructor
Filling = Union[int, Literal["zeros", "ones", "own"]]
# seeds of the further runs that tell whether names or expressions depend on values
FILLINGS = (1, 2)
CONSTANT: tuple[Filling, ...] = ("zeros", "ones")


def filled(model: LoadedModel, filling: Filling, real: bool = True) -> nn.Module:
    instance = model.build(real)
    fill(instance, filling)
    return instance


def fill(model: nn.Module, filling: Filling, only: Collection[str] | None = None) -> None:
    """Give every tensor that has values (or `only` those with these first names) other values,
    integers as `others`.

    A negative seed gives the negatives of the positive seed's values; a seed over 100 gives values
    that are 64 times as large.
    """
    if filling == "own":
        return
    seed = 0 if isinstance(filling, str) else filling
    factor = (-1 if seed < 0 else 1) * (64 if abs(seed) > 100 else 1)
    generator = torch.Generator().manual_seed(abs(seed))
    with torch.no_grad():
        for item in listed(model):
            tensor = item.tensor
            if only is not None and item.first not in only:
                continue
            if not _has_values(tensor):
                continue
            is_number = tensor.is_floating_point() or tensor.is_complex()
            if isinstance(filling, str):
                if is_number or tensor.dtype == torch.bool:
                    tensor.fill_(filling == "ones")  # integers may be indices
            elif is_number:
                kind = tensor.dtype if tensor.is_complex() else None
                values = torch.randn(tensor.shape, generator=generator, dtype=kind)
                tensor.copy_(values * factor)
            else:
                # Of two even or two odd seeds, one negative, each truth value is tried both ways.
                opposite = tensor.dtype == torch.bool and (seed % 2 == 0) != (seed < 0)
                tensor.copy_(~others(tensor) if opposite else others(tensor))


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a plain one on the CPU, none of whose elements is several."""
    if not is_plain(tensor) or tensor.is_quantized:
        return False
    return tensor.device.type == "cpu" and 0 not in tensor.stride()


def others(integers: torch.Tensor) -> torch.Tensor:
    """Return other integers or truth values of the same shape: the same in another order, since
    they may be indices.

    If the order changes nothing, the first half gets other values, so that the order matters the
    next time.
    """
    if integers.dtype in _SIGNED:  # torch can do little with unsigned integers
        return others(integers.view(_SIGNED[integers.dtype])).view(integers.dtype)
    reordered = integers.flip(tuple(range(integers.dim())))
    if not torch.equal(reordered, integers):
        return reordered
    half = torch.arange(integers.numel()) * 2 <= integers.numel()
    half = half.reshape(integers.shape)
    if integers.dtype == torch.bool:
        return integers ^ half
    return (integers + half).to(integers.dtype)


def load_strictly(model: nn.Module, state: Mapping[str, object], **options: bool) -> object:
    """Run ``load_state_dict(state, strict=True)``; without `strict` if the model's own method does
    not take it.
    """
    for parameter in inspect.signature(model.load_state_dict).parameters.values():
        if parameter.name == "strict" or parameter.kind is parameter.VAR_KEYWORD:
            return model.load_state_dict(state, strict=True, **options)
    return model.load_state_dict(state, **options)


def failure_of_loading(
    model: nn.Module, state: Mapping[str, object], **options: bool
) -> Exception | None:
    """Return what the model's own strict loading raises, without a recorder; None if it
    succeeds.
    """
    result = attempt(lambda: load_strictly(model, state, **options))
    return result if isinstance(result, Exception) else None


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every runtime tensor that has values."""
    lazy = torch.nn.parameter.is_lazy
    return {
        item.fqn: item.tensor.detach().clone() for item in listed(model) if not lazy(item.tensor)
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have one class, dtype and shape, and the same bits."""
    if type(left) is not type(right) or left.layout != right.layout:
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left_parts, right_parts = inside(left), inside(right)
    if left_parts:
        return len(left_parts) == len(right_parts) and all(map(same, left_parts, right_parts))
    if left.is_quantized:
        return torch.equal(left, right)
    return same_bits(left, right)


def feeders(
    inputs: Sequence[str],
    outputs: Iterable[str],
    before: Mapping[str, Any],
    run: Callable[[str], Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Return for each of `outputs` the inputs that change it if changed alone (`run`); all if there
    are very many.
    """
    if len(inputs) > MOST_TRIED:
        return {name: [*inputs] for name in outputs}
    feeding: dict[str, list[str]] = {name: [] for name in outputs}
    if not feeding:
        return feeding
    for changed in inputs:
        after = run(changed)
        for name, names in feeding.items():
            if name not in after or not same(before[name], after[name]):
                names.append(changed)
    return feeding


def copied_state(state: Mapping[str, object]) -> OrderedDict[str, Any]:
    """Return the state dict with its tensors in new memory, and with its ``_metadata``."""
    copied: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            copied[key] = value
        elif value.device.type == "meta" and is_plain(value):
            shape, stride = value.shape, value.stride()
            copied[key] = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        else:
            copied[key] = _clone(key, value)
    metadata = metadata_of(state)
    if metadata is not None:
        copied._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return copied


def _clone(key: str, value: torch.Tensor) -> torch.Tensor:
    copied = attempt(value.detach().clone)
    if isinstance(copied, Exception) and value.is_quantized:
        # torch clones only some schemes (none of embeddings), and copies all of them in this way
        copied = attempt(partial(copy.deepcopy, value.detach()))
    if isinstance(copied, Exception):
        raise CkptError(
            f"{key} cannot be copied: {describe(copied)}", hint="its class has to implement clone()"
        )
    return copied


def metadata_of(state: Mapping[str, object]) -> Mapping[str, object] | None:
    metadata = getattr(state, "_metadata", None)
    return metadata if isinstance(metadata, Mapping) else None
