"""A live model's runtime tensors under all their names, and whether its code runs on meta or for real."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.keys import dotted
from ckpttool.core.names import RuntimeTensor
from ckpttool.core.values import dataclass
from ckpttool.naming.wrappers import BY_CLASS, strip
from ckpttool.tracing.build_model import CannotBuild, LoadedModel
from ckpttool.tracing.recorder.hooks import Watcher
from ckpttool.tracing.recorder.memory import Token, token
from ckpttool.tracing.user_code import describe

T = TypeVar("T")
_CHEAP = 64 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``named_parameters`` / ``named_buffers``.

    `first` is the first FQN of the same tensor. `path` leads through the modules: the listings of some wrappers (FSDP1,
    activation checkpoint) leave the wrapper's segment out of the FQN.
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
    """Return every runtime tensor under every name, in ``named_parameters`` then ``named_buffers`` order."""
    hidden = {
        dotted(path, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }
    first: dict[Token, str] = {}
    items = []
    for kind in ("parameter", "buffer"):
        method = f"named_{kind}s"
        plain = list(getattr(nn.Module, method)(model, remove_duplicate=False))
        try:
            listing = list(getattr(model, method)(remove_duplicate=False))
        except TypeError:  # overridden with the signature from before torch 2.0
            listing = plain
        same = len(listing) == len(plain) and all(a is b for (_, a), (_, b) in zip(listing, plain))
        for (fqn, tensor), (path, _) in zip(listing, plain if same else listing):
            mark = token(tensor)
            persistent = kind == "parameter" or path not in hidden
            items.append(Listed(fqn, path, first.setdefault(mark, fqn), kind, tensor, mark, persistent))
    return tuple(items)


def runtime_tensors(model: nn.Module, items: tuple[Listed, ...]) -> tuple[RuntimeTensor, ...]:
    """Return the `runtime` list of `Names`."""
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
    """Return the dotted paths whose last segment comes from a wrapper, by the classes of the live modules."""
    paths = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for cls in type(child).__mro__:
            row = BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
            if row is not None:
                paths.add(dotted(path, row.segment))
    return frozenset(paths)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape; None for a lazy parameter, which has none yet."""
    return None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def layout_of(tensor: torch.Tensor) -> str:
    """Return ``strided`` for a dense block of memory that can be read, else what the tensor is instead."""
    if is_special(tensor):
        return "subclass"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.device.type == "meta" else "strided"


def is_special(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's class changes what operators do (a quantized weight, a DTensor, ...)."""
    overrides_functions = torch.overrides.has_torch_function_unary(tensor)
    return overrides_functions or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def code_failed(what: str, watcher: Watcher, error: BaseException) -> CodeFailed:
    """Return the error for what the model's own saving or loading raised; it names the hook."""
    return CodeFailed(f"{what} fails{watcher.where}: {describe(error)}", hint="fix it there: torch fails the same way")


def on_meta_or_real(model: LoadedModel, run: Callable[[bool], T], extra: int = 0) -> T:
    """Return ``run(False)``, on meta; if the model's code cannot do that, ``run(True)``, with real tensors if they fit.

    `extra` are bytes that the real run needs in addition to the model. Raises `CkptError` with the model's own error.
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
    need, free = 3 * size_of(model) + extra, memory_available()
    if need > free:
        raise CkptError(
            f"{why}; on real tensors it takes {need >> 20} MiB, and {free >> 20} MiB are free",
            hint="run it where there is more memory, or make a smaller model of the same kind",
        )
    return need


def is_cheap(model: LoadedModel, extra: int = 0) -> bool:
    """Return whether the model and `extra` bytes are so small that real instances are built at once."""
    return size_of(model) + extra <= _CHEAP


def size_of(model: LoadedModel) -> int:
    """Return the bytes of an instance; 0 if it cannot be built on meta, so that nobody knows."""
    try:
        return nbytes(model.build(False))
    except CannotBuild:
        return 0


def nbytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters and buffers, shared ones once."""
    storages = {}
    for item in listed(model):
        if not torch.nn.parameter.is_lazy(item.tensor):
            storages[item.token[:1]] = item.tensor.numel() * item.tensor.element_size()
    return sum(storages.values())


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
