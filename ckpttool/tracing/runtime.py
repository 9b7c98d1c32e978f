"""A live model's runtime tensors under all their names, and how its code is run: on meta, or for real if it must."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.keys import dotted
from ckpttool.core.names import RuntimeTensor
from ckpttool.core.values import dataclass
from ckpttool.naming.wrappers import BY_CLASS, strip
from ckpttool.tracing.build_model import CannotBuild, LoadedModel, describe
from ckpttool.tracing.hooks import Watcher
from ckpttool.tracing.output_capture import prints_once
from ckpttool.tracing.recorder.memory import Token, token
from ckpttool.tracing.recorder.meta_shim import Questions, storages_told_apart
from ckpttool.tracing.recorder.recorder import Recorder

T = TypeVar("T")
_CHEAP = 64 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``named_parameters`` / ``named_buffers``.

    `first` is the first FQN of the same tensor, `path` the way through the modules: some wrappers' listings (FSDP1,
    activation checkpoint) leave their own segment out of the FQN.
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
    """Every runtime tensor under every name, in ``named_parameters`` then ``named_buffers`` order."""
    hidden = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name in getattr(module, "_non_persistent_buffers_set", ()):
            hidden.add(dotted(path, name))
    first: dict[Token, str] = {}
    found = []
    for kind in ("parameter", "buffer"):
        for fqn, path, tensor in _members(model, kind):
            mark = token(tensor)
            persistent = kind == "parameter" or path not in hidden
            found.append(Listed(fqn, path, first.setdefault(mark, fqn), kind, tensor, mark, persistent))
    return tuple(found)


def _members(model: nn.Module, kind: str) -> list[tuple[str, str, torch.Tensor]]:
    method = f"named_{kind}s"
    plain = list(getattr(nn.Module, method)(model, remove_duplicate=False))
    try:
        own = list(getattr(model, method)(remove_duplicate=False))
    except TypeError:  # overridden with the signature of before torch 2.0
        own = plain
    if len(own) == len(plain) and all(a is b for (_, a), (_, b) in zip(own, plain)):
        return [(fqn, path, tensor) for (fqn, tensor), (path, _) in zip(own, plain)]
    return [(fqn, fqn, tensor) for fqn, tensor in own]


def runtime_tensors(model: nn.Module, items: tuple[Listed, ...]) -> tuple[RuntimeTensor, ...]:
    """The `runtime` list of `Names`."""
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
    """The dotted paths whose last segment was put there by a wrapper: a live module of a wrapper's class says so."""
    paths = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for cls in type(child).__mro__:
            row = BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
            if row is not None:
                paths.add(dotted(path, row.segment))
    return frozenset(paths)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The shape; None for a lazy parameter, which has none yet."""
    return None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def layout_of(tensor: torch.Tensor) -> str:
    """``strided`` for a dense block of memory that can be read, else what the tensor is instead."""
    if is_special(tensor):
        return "subclass"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.device.type == "meta" else "strided"


def is_special(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class has its own idea of what operators do (a quantized weight, a DTensor, ...)."""
    overrides_functions = torch.overrides.has_torch_function_unary(tensor)
    return overrides_functions or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Runs the model's own code under the recorder; its prints go to stderr, its warnings nowhere."""
    with prints_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with storages_told_apart(), recorder, Questions(recorder):
            yield


@contextlib.contextmanager
def model_code(what: str, watcher: Watcher) -> Iterator[None]:
    """Turns what the model's own code raises into a `CodeFailed` that names the hook."""
    try:
        yield
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        where = f" in {watcher.failed}" if watcher.failed else ""
        raise CodeFailed(
            f"{what} fails{where}: {describe(error)}", hint="fix it there: torch fails the same way"
        ) from error


def load_strictly(model: nn.Module, state: Mapping[str, object], **options: bool) -> object:
    """``load_state_dict(state, strict=True)``; without the argument where the model's own method does not take it."""
    parameters = inspect.signature(model.load_state_dict).parameters.values()
    if any(parameter.name == "strict" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return model.load_state_dict(state, strict=True, **options)
    return model.load_state_dict(state, **options)


def failure_of_loading(model: nn.Module, state: Mapping[str, object], **options: bool) -> Exception | None:
    """What the model's own strict loading raises, None where it succeeds; nothing of ours stands in between."""
    found = attempted(lambda: load_strictly(model, state, **options))
    return found if isinstance(found, Exception) else None


def attempted(run: Callable[[], T]) -> T | Exception:
    """What the model's own code gives, or raises; its prints go to stderr, its warnings nowhere."""
    try:
        with prints_once(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except (Exception, SystemExit) as error:
        return failure(error)


def failure(error: Exception | SystemExit) -> Exception:
    """What the model's own code raised, the end of the process too."""
    return error if isinstance(error, Exception) else RuntimeError(f"exits: {error}")


def on_meta_or_real(model: LoadedModel, run: Callable[[bool], T], extra: int = 0) -> T:
    """``run(False)`` on meta; where the model's code cannot do that, ``run(True)`` with real tensors if they fit.

    `extra` are bytes that the real run needs beside the model. Raises `CkptError` with the model's own error.
    """
    if model.materialize:
        return run(True)
    try:
        return run(False)
    except CodeFailed as error:
        check_memory(model, extra, error.message)
    return run(True)


def check_memory(model: LoadedModel, extra: int, why: str) -> int:
    """The bytes that real instances of the model take, what they make, and `extra`.

    Raises `CkptError`, which says `why` real tensors are needed, where there are not as many.
    """
    need, free = 3 * size_of(model) + extra, memory_available()
    if need > free:
        raise CkptError(
            f"{why}; on real tensors it takes {need >> 20} MiB, and {free >> 20} MiB are free",
            hint="run it where there is more memory, or make a smaller model of the same kind",
        )
    return need


def is_cheap(model: LoadedModel, extra: int = 0) -> bool:
    """Whether building the model for real, beside `extra` bytes, takes a moment: then nothing has to rest on meta."""
    return size_of(model) + extra <= _CHEAP


def size_of(model: LoadedModel) -> int:
    """Bytes of an instance of the model; 0 where it cannot be built on meta, and nobody knows."""
    try:
        return nbytes(model.build(False))
    except CannotBuild:
        return 0


def nbytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers, shared ones once."""
    storages = {}
    for item in listed(model):
        if not torch.nn.parameter.is_lazy(item.tensor):
            storages[item.token[:1]] = item.tensor.numel() * item.tensor.element_size()
    return sum(storages.values())


def memory_available() -> int:
    """Bytes that can be taken without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def fresh(value: torch.Tensor) -> torch.Tensor:
    """A tensor like `value` in memory of its own."""
    if torch.nn.parameter.is_lazy(value):
        return value
    if value.device.type == "meta" and type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value.detach().clone()


def copied_state(state: Mapping[str, object]) -> OrderedDict[str, Any]:
    """The state dict with its tensors in memory of their own, and its ``_metadata``."""
    made = OrderedDict(
        (key, fresh(value) if isinstance(value, torch.Tensor) else value) for key, value in state.items()
    )
    metadata = metadata_of(state)
    if metadata is not None:
        made._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return made


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors inside of nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def metadata_of(state: Mapping[str, object]) -> Mapping[str, object] | None:
    """The ``_metadata`` (module versions) that a state dict carries."""
    found = getattr(state, "_metadata", None)
    return found if isinstance(found, Mapping) else None
