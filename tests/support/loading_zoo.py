"""Modules whose loading checks more than names and shapes: tensor kinds, classes, values, objects.
In `ZOO`.

A factory takes no arguments and builds on the default device, as in `hook_zoo`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

ZOO: dict[str, Callable[[], nn.Module]] = {}


def pattern(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ZOO[build.__name__] = build
    return build


class Packed(torch.Tensor):
    """A wrapper subclass as in quantization libraries: int8 values and a scale; it copies only from
    its own class.
    """

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=torch.float32, device=values.device
        )

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: None, size: object, stride: object) -> Packed:
        return Packed(inner["values_"], inner["scale"])

    def __repr__(self) -> str:
        return "Packed(...)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and all(
            isinstance(arg, Packed) for arg in args[:2]
        ):
            args[0].values_.copy_(args[1].values_)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = type(args[0])(func(args[0].values_), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(f"Packed does not implement {func}")


class Undeclared(Packed):
    """A `Packed` with its own unpickling code, which is not declared safe."""

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)


def packed(cls: type[Packed] = Packed) -> Packed:
    return cls(torch.ones(3, 2, dtype=torch.int8), torch.rand(3, 1))


@dataclass
class Settings:
    """An object in an extra state; its class is declared safe to load."""

    level: int = 1


class Opaque:
    """An object in an extra state; its class is not declared safe."""

    level = 1


torch.serialization.add_safe_globals([Settings])


# Kinds of tensors


@pattern
def packed_weight() -> nn.Module:
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(packed(), requires_grad=False)
    return model


@pattern
def csr_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2, device="cpu").to_sparse_csr())
    return model


@pattern
def coo_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.eye(3, device="cpu").to_sparse(), requires_grad=False)
    return model


@pattern
def quantized_linear() -> nn.Module:
    return nn.Sequential(torch.ao.nn.quantized.Linear(3, 2), nn.LayerNorm(2))


@pattern
def dynamic_quantized_linear() -> nn.Module:
    return nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(3, 2))


@pattern
def quantized_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    values = torch.ones(2, 2, device="cpu")
    model.register_buffer("table", torch.quantize_per_tensor(values, 0.5, 0, torch.qint8))
    return model


@pattern
def fake_quantized() -> nn.Module:
    return torch.ao.quantization.FakeQuantize()


@pattern
def odd_dtypes() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("small", torch.ones(2, 2).to(torch.float8_e4m3fn))
    model.register_buffer("count", torch.ones(2).to(torch.uint16))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    return model


class AddsOnLoading(nn.Linear):
    """Add the file's other tensors to the weight, whatever their dtypes."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        delta = state_dict.pop(prefix + "delta", None)
        if delta is not None:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] + delta
        super()._load_from_state_dict(state_dict, prefix, *args)


@pattern
def adds_on_loading() -> nn.Module:
    model = AddsOnLoading(2, 2)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "delta": torch.zeros_like(sd[p + "weight"])})
    )
    return model


class JoinsOnLoading(nn.Module):
    """Save two halves and join them on loading: halves of different dtypes may be promoted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))
        self._register_state_dict_hook(JoinsOnLoading._save)
        self._register_load_state_dict_pre_hook(self._join)

    def _save(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "top"], sd[prefix + "bottom"] = sd.pop(prefix + "weight").chunk(2)

    def _join(self, sd: dict, prefix: str, *args: object) -> None:
        if prefix + "top" in sd and prefix + "bottom" in sd:
            sd[prefix + "weight"] = torch.cat([sd.pop(prefix + "top"), sd.pop(prefix + "bottom")])


@pattern
def joins_on_loading() -> nn.Module:
    return JoinsOnLoading()


# Classes


class ComparesTypes(nn.Module):
    """Like torchmetrics: a loaded value replaces the state, and must have the same class and
    kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        value = state_dict.pop(prefix + "total", None)
        if value is None:
            args[2].append(prefix + "total")  # type: ignore[attr-defined]
        elif type(value) is not torch.Tensor:
            raise TypeError(f"expected a torch.Tensor, got a {type(value).__name__}")
        else:
            self.total = value


@pattern
def compares_types() -> nn.Module:
    return nn.Sequential(ComparesTypes(), nn.Linear(2, 2))


class SetsAttributes(nn.Module):
    """Assign the file's values; torch refuses to replace a buffer with a Parameter and vice
    versa.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))

    def load_state_dict(self, state_dict: dict, strict: bool = True, assign: bool = False) -> None:
        self.mean = state_dict["mean"]
        if state_dict["scale"].requires_grad:
            raise ValueError("scale is being trained")
        if not state_dict["scale"].is_contiguous() or state_dict["scale"].is_sparse:
            raise ValueError("scale is not a dense tensor")


@pattern
def sets_attributes() -> nn.Module:
    return SetsAttributes()


# Values


class Checks(nn.Module):
    """Check values before loading."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("version", torch.tensor(2))
        self._register_load_state_dict_pre_hook(self._check)

    def _check(self, sd: dict, prefix: str, *args: object) -> None:
        if prefix + "version" in sd and int(sd[prefix + "version"]) != 2:
            raise ValueError("another version")
        if not all(
            bool(value.isfinite().all()) for value in sd.values() if isinstance(value, torch.Tensor)
        ):
            raise ValueError("not finite")


@pattern
def checks_values() -> nn.Module:
    return Checks()


class Renames(nn.Module):
    """A value in the file determines which key is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("style", torch.tensor(1))
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, sd: dict, prefix: str, *args: object) -> None:
        style = sd.get(prefix + "style")
        if style is not None and style.item() == 0:
            sd[prefix + "net.weight"] = sd.pop(prefix + "net.kernel")


@pattern
def renames_by_value() -> nn.Module:
    return Renames()


@pattern
def selects_rows() -> nn.Module:
    model = nn.Embedding(4, 2)

    def load(module: nn.Module, sd: dict, prefix: str, *args: object) -> None:
        used = sd.pop(prefix + "used")
        sd[prefix + "weight"] = torch.zeros(4, 2).masked_scatter(used, sd[prefix + "weight"])

    model.register_load_state_dict_pre_hook(load)
    model._register_state_dict_hook(
        lambda m, sd, p, meta: sd.update({p + "used": torch.ones(4, 1, dtype=torch.bool)})
    )
    return model


def _with_load_hook(change: Callable[[dict, str], object]) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    model._register_load_state_dict_pre_hook(lambda sd, prefix, *args: change(sd, prefix))
    return model


@pattern
def resets_a_buffer() -> nn.Module:
    return _with_load_hook(
        lambda sd, p: sd.update({p + "scale": torch.full_like(sd[p + "scale"], 3)})
    )


@pattern
def exchanges_on_loading() -> nn.Module:
    return _with_load_hook(
        lambda sd, p: sd.update({p + "scale": sd[p + "bias"], p + "bias": sd[p + "scale"]})
    )


@pattern
def doubles_on_loading() -> nn.Module:
    return _with_load_hook(lambda sd, p: sd.update({p + "bias": sd[p + "bias"] * 2}))


# Objects


class Extra(nn.Linear):
    """`get` creates the extra state, and `check` decides whether a loaded one is valid."""

    def __init__(self, get: Callable[[Any], object], check: Callable[[Any], bool]) -> None:
        super().__init__(2, 2)
        self.get, self.check = get, check

    def get_extra_state(self) -> object:
        return self.get(self)

    def set_extra_state(self, state: object) -> None:
        if not self.check(state):
            raise ValueError(f"not an extra state: {state!r}")


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(value: Any) -> object:
    return pickle.loads(value.detach().numpy(force=True).tobytes())


EXTRAS: dict[str, tuple[Callable[[Any], object], Callable[[Any], bool]]] = {
    "none": (lambda m: None, lambda s: s is None),
    "number": (lambda m: 3, lambda s: s == 3),
    "nested": (
        lambda m: {"a": (torch.ones(2), [1, None])},
        lambda s: s["a"][0].sum() == 2 and s["a"][1] == [1, None],
    ),
    "bytes": (lambda m: b"abc", lambda s: s == b"abc"),
    "bytesio": (lambda m: io.BytesIO(b"abc"), lambda s: s.getvalue() == b"abc"),
    "pickled": (lambda m: _pickled({"amax": 2}), lambda s: _unpickled(s) == {"amax": 2}),
    "of_a_buffer": (
        lambda m: _pickled(m.bias.detach().to("cpu").shape),
        lambda s: _unpickled(s) == torch.Size([2]),
    ),
    "parameter": (lambda m: nn.Parameter(torch.ones(1)), lambda s: type(s) is nn.Parameter),
    "safe": (lambda m: Settings(), lambda s: s.level == 1),
    "opaque": (lambda m: Opaque(), lambda s: s.level == 1),
    "careless": (lambda m: Opaque(), lambda s: True),
    "set": (lambda m: {"x"}, lambda s: s == {"x"}),
    "dtype": (lambda m: torch.float16, lambda s: s is torch.float16),
    "size": (lambda m: torch.Size([2]), lambda s: s == torch.Size([2])),
}


def _extra(name: str) -> None:
    ZOO[f"extra_{name}"] = lambda: nn.Sequential(Extra(*EXTRAS[name]))
    globals()[f"extra_{name}"] = ZOO[f"extra_{name}"]


for _name in EXTRAS:
    _extra(_name)


# Signatures and names


class Bare(nn.Module):
    """state_dict methods without torch's keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def state_dict(self) -> dict:
        return self.net.state_dict()

    def load_state_dict(self, d: dict) -> object:
        return self.net.load_state_dict(d)


@pattern
def bare_signatures() -> nn.Module:
    return Bare()


@pattern
def buffer_called_extra_state() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("_extra_state", torch.ones(2))
    return model


@pattern
def buffer_with_such_an_ending() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("my_extra_state", torch.ones(2))
    return model


@pattern
def forgives() -> nn.Module:
    """A post hook clears torch's lists of missing and unexpected keys."""
    model = nn.Linear(2, 2)
    model.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())
    return model


@pattern
def recurrent() -> nn.Module:
    return nn.LSTM(3, 2, num_layers=2)


@pattern
def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 4)


# State dicts that look like something else if they are the entire file


class Folded(nn.Linear):
    """Save the tensors named in `inside` in a nested dict."""

    def __init__(self, *inside: str) -> None:
        super().__init__(2, 2)
        self.inside = inside

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}folded"] = {
            name: destination.pop(prefix + name) for name in self.inside
        }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, value in state_dict.pop(f"{prefix}folded", {}).items():
            state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


@pattern
def dict_next_to_tensors() -> nn.Module:
    return Folded("bias")


@pattern
def dict_of_all_tensors() -> nn.Module:
    return Folded("weight", "bias")


@pattern
def dicts_of_layers() -> nn.Module:
    return nn.ModuleDict({"first": Folded("bias"), "second": Folded("weight", "bias")})


@pattern
def mostly_numbers() -> nn.Module:
    settings = (Extra(lambda m: 3, lambda s: s == 3) for _ in range(3))
    return nn.ModuleDict(
        {"net": nn.Linear(2, 2, bias=False), **{f"s{i}": one for i, one in enumerate(settings)}}
    )


@pattern
def like_a_random_state() -> nn.Module:
    model = nn.Module()
    model.register_buffer("state", torch.zeros(16, dtype=torch.uint8))
    return model


@pattern
def called_state() -> nn.Module:
    """It has the same keys as a flattened optimizer state."""
    return nn.ModuleDict({"state": nn.Linear(2, 2), "param_groups": nn.Linear(2, 2)})
