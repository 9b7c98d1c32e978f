"""Build the model that a MODEL operand names, on the meta device or for real."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool.core.errors import CkptError
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.tracing.copy_module import copy_module
from ckpttool.tracing.find_object import find_object
from ckpttool.tracing.memory import place_of, token
from ckpttool.tracing.user_code import seeded, user_code

_FORM = "a model is package.module:attr or path/to/file.py:attr"


@dataclass(frozen=True)
class LoadedModel:
    """A model definition. `build()` returns a fresh instance each time, since some state_dict
    methods change the model.

    `operand` is what the user named; `make` calls the user's factory or copies the user's instance.
    """

    operand: str
    make: Callable[[bool], nn.Module] = field(repr=False)
    materialize: bool = False

    def build(self, materialize: bool | None = None, seed: int = 0) -> nn.Module:
        """Return a fresh instance, on meta or with real weights (`materialize`; default: as
        loaded).

        Raises `CannotBuild` with the user's own error if the constructor fails.
        """
        real = self.materialize if materialize is None else materialize
        what = f"{self.operand} cannot be built"
        with user_code(what, on_meta=not real, error=CannotBuild), seeded(seed):
            if real:
                instance = self.make(True)
            else:
                with _WithoutValues(), _StaysOnMeta():
                    instance = self.make(False)
        # fill in the cached properties, which would build another instance
        vars(self).setdefault("kind", type(instance))
        if not real and "nbytes" not in vars(self):
            vars(self)["nbytes"] = _nbytes(instance)
        return instance

    @cached_property
    def kind(self) -> type[nn.Module]:
        """The class of an instance. Raises as `build`."""
        return type(self.build())

    @cached_property
    def nbytes(self) -> int:
        """The bytes of an instance's parameters and buffers, shared ones once; 0 if it cannot be
        built on meta.
        """
        with contextlib.suppress(CannotBuild):
            return _nbytes(self.build(False))
        return 0


def _nbytes(model: nn.Module) -> int:
    sizes: dict[object, int] = {}  # by the place of the bytes
    with torch._C.DisableTorchFunction():  # not a question of the constructor
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                    sizes[place_of(token(tensor))] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


class _WithoutValues(TorchDispatchMode):
    """Leave out random values on meta: torch would import its compiler to fill tensors that have no
    data.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `Recorder`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default and args[0].is_meta:
            deviation = args[2] if len(args) > 2 else 1.0
            if deviation >= 0:  # torch refuses any other
                return args[0]
        out = func(*args, **(kwargs or {}))
        if _DEVICES and args and _is_on_meta(args[0]) and _is_on_meta(out):
            _DEVICES[out.untyped_storage()] = device_for_real(args[0])
        return out


class _StaysOnMeta(TorchFunctionMode):
    """Keep tensors without values on meta if the constructor moves them, whether or not there is
    such a device.

    As for real, a move to the device that a tensor is on returns the same tensor, and a move to
    another one a copy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.kaiming_uniform_ and _only_fills_meta_tensor(**(kwargs or {})):
            return kwargs["tensor"]
        if func in _MOVES:
            # not a question of the constructor, which `trace` would note
            with torch._C.DisableTorchFunction():
                moved = _kept_on_meta(func, *args, **(kwargs or {}))
            if moved is not None:
                return moved
        return func(*args, **(kwargs or {}))


def _only_fills_meta_tensor(
    tensor: Any = None, mode: str = "", nonlinearity: str = "", **others: Any
) -> bool:
    """Return whether a call of `kaiming_uniform_`, with which most layers begin, only fills a
    tensor without values.
    """
    if mode != "fan_in" or nonlinearity != "leaky_relu":
        return False
    with torch._C.DisableTorchFunction():  # not a question of the constructor
        return _is_on_meta(tensor) and tensor.dim() >= 2


_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu})
# Storages on meta, and the device that they would be on: the CPU for all others.
_DEVICES: WeakKeyDictionary[torch.UntypedStorage, torch.device] = WeakKeyDictionary()


def device_for_real(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor; of one on meta the device that the model's code moves it
    to.
    """
    if not _is_on_meta(tensor):
        return tensor.device
    return _DEVICES.get(tensor.untyped_storage(), torch.device("cpu"))


def _kept_on_meta(
    func: Any, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any
) -> Any:
    """Return the tensor that a move off the meta device gives; None if the call is no such move."""
    if not _is_on_meta(tensor):
        return None
    dtype, memory_format = None, None
    try:
        if func is torch.Tensor.to:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        else:
            place = args[0] if args else kwargs.get("device")
            name = func.__name__
            device = (
                torch.device(name, place) if isinstance(place, int) else torch.device(place or name)
            )
    except (RuntimeError, TypeError):  # the call raises it too
        return None
    if device is None or device.type == "meta":
        return None
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    copy = copy or device != device_for_real(tensor)
    moved = tensor.to(
        dtype=dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format
    )
    _DEVICES[moved.untyped_storage()] = device
    return moved


def _is_on_meta(value: object) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter) and value.is_meta  # type: ignore[attr-defined]


class CannotBuild(CkptError):
    """The model's constructor raised."""


def load(
    operand: str,
    kwargs: Mapping[str, Any] | None = None,
    materialize: bool = False,
    option: str = "--model",
) -> LoadedModel:
    """Return the model that `operand`, the value of `option`, names; runs the user's code, as
    ``import`` does.

    `kwargs` are passed to a class or a function. Raises `CkptError` if the operand, the import, the
    attribute or its value is wrong; a constructor's own failure is raised by `build`.
    """
    target = find_object(operand, _FORM, ", for example my_package.model:build")
    if isinstance(target, nn.Module):
        if kwargs:
            raise CkptError(
                f"{operand} is a module, not a factory: it takes no arguments",
                hint=f"leave them out: {option} {operand}",
            )
        return LoadedModel(operand, lambda real: deep_copy(target, real), materialize)
    if not callable(target):
        raise CkptError(
            f"{operand} is not a model but {a(target)}",
            hint="name an nn.Module, a class of one, or a function that returns one",
        )
    return LoadedModel(operand, _factory(target, dict(kwargs or {}), operand, option), materialize)


def of_object(
    model: Any, kwargs: Mapping[str, Any] | None = None, materialize: bool = False
) -> LoadedModel:
    """Return the definition of a module, a class, a factory or an exported program, without
    changing the object.

    Raises `CkptError` if it is none of these.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, ExportedProgram):
        module = model.module()
        return LoadedModel("the program", lambda real: deep_copy(module, real), materialize)
    if isinstance(model, nn.Module):
        return LoadedModel(type(model).__name__, lambda real: deep_copy(model, real), materialize)
    if not callable(model):
        raise CkptError(
            f"{a(model)} is not a model", hint="pass a module, a program, or file.py:build"
        )
    name = getattr(model, "__name__", repr(model))
    return LoadedModel(name, _factory(model, dict(kwargs or {}), name, "--model"), materialize)


def _factory(
    target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str
) -> Callable[[bool], nn.Module]:
    on_meta: list[weakref.ref[nn.Module]] = []
    # A cached function would return the instance on meta again when a real one is needed.
    is_cached = hasattr(target, "cache_info")
    constructor = getattr(target, "__wrapped__", target) if is_cached else target

    def make(real: bool) -> nn.Module:
        _check_arguments(target, kwargs, operand, option)
        with contextlib.nullcontext() if real else torch.device("meta"):
            instance = constructor(**kwargs)
        if not isinstance(instance, nn.Module):
            raise CkptError(
                f"{operand} gives {a(instance)}, not an nn.Module",
                hint="name an nn.Module, a class of one, or a function that returns one",
            )
        if not real:
            on_meta.append(weakref.ref(instance))
        elif any(earlier() is instance for earlier in on_meta) and _has_meta(instance):
            raise CkptError(
                f"{operand} gives the model that it built on the meta device before, and its"
                " values are needed",
                hint="pass --materialize, or build a new model in each call",
            )
        module = sys.modules.get(getattr(target, "__module__", ""))
        # The next call of a factory that keeps the object would return it with the changes of this
        # one.
        if module and any(value is instance for value in vars(module).values()):
            return deep_copy(instance, real)
        return instance

    return make


def _has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _check_arguments(
    target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str
) -> None:
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        signature = inspect.signature(target)
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            parameters = ", ".join(map(str, signature.parameters.values()))
            raise CkptError(
                f"{operand} cannot be called with these arguments: {error}",
                hint=f"it takes ({parameters}); pass them as in {option} '{operand}(name=1)',"
                " or name a function without required parameters",
            ) from error


def deep_copy(module: nn.Module, real: bool) -> nn.Module:
    """Return a deep copy; on meta unless `real`, with tied and overlapping tensors tied in the same
    way. Raise `CannotBuild` for a module in FSDP1, which frees the memory of its parameters.
    """
    if _frees_memory(module):
        raise CannotBuild(
            "a module in FSDP1 cannot be copied: it saves and loads only the module that it wraps",
            hint="pass the model before it is wrapped",
        )
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) is torch.nn.UninitializedBuffer:  # `deepcopy` copies lazy parameters only
            memo[id(tensor)] = _uninitialized(tensor, real)
            continue
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_nested:
            continue  # copied as it is
        if real and 0 not in tensor.stride():
            continue  # `deepcopy` does this right, except for expanded tensors
        place = tensor.untyped_storage()._cdata
        if place not in storages:
            storages[place] = _copy_storage(tensor, real)
        storage = storages[place]
        twin = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin
    return copy_module(module, memo, real)


def _frees_memory(module: nn.Module) -> bool:
    """Return True if FSDP1 is in the module, or around it: then tensors are views of a flat
    parameter without memory.
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None and any(isinstance(part, fsdp) for part in module.modules()):
        return True
    return any(
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() == 0
        for part in module.modules()
        for tensor in vars(part).values()
        if isinstance(tensor, torch.Tensor)
    )


def _uninitialized(buffer: torch.Tensor, real: bool) -> torch.Tensor:
    make: Any = torch.nn.UninitializedBuffer
    copy: torch.Tensor = make(device=buffer.device if real else "meta", dtype=buffer.dtype)
    return copy


def _copy_storage(tensor: torch.Tensor, real: bool) -> torch.UntypedStorage:
    """Return a copy of the storage of a tensor; without data unless `real`."""
    storage = tensor.untyped_storage()
    if real:
        return storage.clone()
    on_meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
    _DEVICES[on_meta] = device_for_real(tensor)
    return on_meta
