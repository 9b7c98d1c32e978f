"""Round trips and meta twins against the truth: instances built for real, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import loading_zoo
import small_models
from ckpttool.core.errors import CkptError
from ckpttool.tracing import instances
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.instances import same
from ckpttool.tracing.trace import trace

torch.set_num_threads(1)


class Dequantises(nn.Linear):
    """Saves bytes that numpy makes, and reads them back: no symbol can follow, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(Dequantises._save)
        self._register_load_state_dict_pre_hook(self._load)

    def _save(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy().view("int32").copy())

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy().view("float32").copy())


class Halves(Dequantises):
    """The same, and it forgets half of what it had."""

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        super()._load(sd, prefix)
        sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy() * [[1.0], [0.0]]).float()


class AddsNothing(nn.Linear):
    """Loads the sum of two keys, one of which is a constant that it saved."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(lambda m, sd, p, meta: sd.update({p + "shift": torch.zeros(2, 2)}))
        self._register_load_state_dict_pre_hook(self._load)

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = sd[prefix + "weight"] + sd.pop(prefix + "shift")


class TurnsQuantized(nn.Linear):
    """Saves a quantized table turned around: no values of such a tensor can be made up to try the way back with."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        with torch.device("cpu"):
            self.register_buffer("table", torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8))
        self._register_state_dict_hook(lambda m, sd, p, meta: m._turn(sd, p))
        self._register_load_state_dict_pre_hook(self._turn)

    def _turn(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "table"] = sd[prefix + "table"].t()


class SavesSize(nn.Module):
    """Saves one number without its sign: half of all random numbers come back."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self._register_state_dict_hook(lambda m, sd, p, meta: sd.update({p + "gain": self.size(sd[p + "gain"])}))

    def size(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.abs()


class SavesSizeByNumpy(SavesSize):
    """The same, computed outside of torch."""

    def size(self, gain: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(abs(gain.detach().numpy()).copy())


class CutsOff(SavesSize):
    """Numbers far from 0 do not come back."""

    def size(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.clamp(-50, 50)


class Overlaps(nn.Module):
    """Two buffers on one memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("columns", whole[:, ::2])


def model(cls: Callable[[], nn.Module]) -> LoadedModel:
    def make(real: bool) -> nn.Module:
        with torch.device("cpu" if real else "meta"):
            return cls()

    return LoadedModel(cls.__name__, make)


@pytest.mark.parametrize("cls", [SavesSize, SavesSizeByNumpy, CutsOff])
def test_no_single_number_comes_back_by_chance(cls: type[SavesSize]) -> None:
    source, target = cls(), cls()
    source.gain.data.fill_(-100.0)
    target.load_state_dict(source.state_dict(), strict=True)
    assert target.gain.item() != source.gain.item()
    assert not trace(model(cls)).roundtrips


BACK = (Dequantises, AddsNothing, TurnsQuantized, Overlaps)


@pytest.mark.parametrize(("cls", "comes_back"), [(Halves, False), *((cls, True) for cls in BACK)])
def test_opaque_round_trips_are_tried(cls: type[nn.Module], comes_back: bool) -> None:
    torch.manual_seed(0)
    source, target = cls(), cls()
    target.load_state_dict(source.state_dict(), strict=True)
    same = all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values()))
    assert same == comes_back
    names = trace(model(cls))
    assert (names.roundtrips, names.notes) == (comes_back, ())


def test_a_round_trip_that_cannot_be_tried_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise CkptError("no memory", hint="buy some")

    monkeypatch.setattr("ckpttool.tracing.trace.check_memory", no_memory)
    names = trace(model(AddsNothing))
    assert names.roundtrips
    assert names.notes == (
        "cannot be told whether it is given back: loaded from shift, which no tensor of the model is saved to @ weight",
    )


def has_device(theta: torch.Tensor) -> bool:
    return theta.device.type != "meta"


def has_default_device(theta: torch.Tensor) -> bool:
    return torch.get_default_device().type != "meta"


def has_class_of_cpu(theta: torch.Tensor) -> bool:
    return theta.type() == "torch.FloatTensor"


def has_values(theta: torch.Tensor) -> bool:
    try:
        theta.to("cpu")
    except NotImplementedError:
        return False
    return True


class AsksForMeta(nn.Module):
    """As rotary embeddings that make their caches only where there is memory for them."""

    def __init__(self, is_real: Callable[[torch.Tensor], bool] = has_device) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(2))
        if is_real(self.theta):
            self.register_buffer("cache", torch.outer(torch.arange(3.0), self.theta.detach()), persistent=False)


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("is_real", [has_device, has_default_device, has_class_of_cpu, has_values])
def test_a_constructor_that_makes_other_tensors_on_meta(
    is_real: Callable[[torch.Tensor], bool], cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cheap:  # then it is built with tensors that pass for real
        monkeypatch.setattr(instances, "_CHEAP", -1)
    names = trace(model(lambda: AsksForMeta(is_real)))
    assert [tensor.fqn for tensor in names.runtime] == ["theta", "cache"]
    assert names.not_serialized == ("cache",)
    assert names.notes == ()


def test_a_large_constructor_may_copy_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the layers of torch's Transformer: the copies are of tensors alone, not of the mode that makes them."""

    class Copies(AsksForMeta):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(2))

    real = [name for name, _ in (*Copies().named_parameters(), *Copies().named_buffers())]
    monkeypatch.setattr(instances, "_CHEAP", -1)
    names = trace(model(Copies))
    assert (sorted(tensor.fqn for tensor in names.runtime), names.notes) == (sorted(real), ())
    assert "cache" in real


def test_a_constructor_that_reads_values_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.total = 0.0 if self.weight.device.type == "meta" else float(self.weight.sum())

    monkeypatch.setattr(instances, "_CHEAP", -1)
    assert trace(model(Reads)).notes == (
        "on the meta device alone: whether its constructor makes other tensors for real was not looked at",
    )


def test_a_buffer_whose_name_ends_with_extra_state() -> None:
    names = trace(model(loading_zoo.buffer_with_such_an_ending))
    assert [s.key for s in names.serialized] == ["weight", "bias", "my_extra_state"]
    assert (names.extra_state, names.not_serialized, names.roundtrips) == ((), (), True)


class Forgets(Dequantises):
    """Loading takes a buffer away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        super()._load(sd, prefix)
        sd.pop(prefix + "table")
        del self._buffers["table"]


class Expands(Dequantises):
    """One integer is all of a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(1, dtype=torch.int64).expand(4), persistent=False)


class InTwoDtypes(Dequantises):
    """Saves one memory in two dtypes, which no file can hold, and an object; by the version it knows its own."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({p + "bits": sd[p + "weight"].view(torch.int16)})
        )

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        metadata: Any = args[0]
        if metadata.get("version") != 3:
            raise ValueError("another version")
        super()._load(sd, prefix)
        sd.pop(prefix + "bits")

    def get_extra_state(self) -> object:
        return {"level": 1}

    def set_extra_state(self, state: object) -> None:
        assert state == {"level": 1}


@pytest.mark.parametrize(("cls", "comes_back"), [(Forgets, False), (Expands, True), (InTwoDtypes, True)])
def test_round_trips_of_buffers_and_extra_state(cls: type[nn.Module], comes_back: bool) -> None:
    assert trace(model(cls)).roundtrips == comes_back


def test_tensors_with_the_same_parts_are_the_same() -> None:
    sparse = torch.eye(2).to_sparse()
    assert same(sparse, torch.eye(2).to_sparse())
    assert not same(sparse, (torch.eye(2) * 2).to_sparse())
    assert not same(sparse, torch.ones(2, 2).to_sparse())
    assert not same(sparse, torch.eye(2))
    assert same(
        loading_zoo.Packed(torch.ones(2, 2), torch.ones(2)), loading_zoo.Packed(torch.ones(2, 2), torch.ones(2))
    )
    quantized = [torch.quantize_per_tensor(torch.ones(2) * one, 0.5, 0, torch.qint8) for one in (1, 1, 2)]
    assert same(quantized[0], quantized[1])
    assert not same(quantized[0], quantized[2])


class Picky(small_models.Pickled):
    """Takes no other than its own extra state: nobody knows what would come back."""

    def set_extra_state(self, state: torch.Tensor) -> None:
        if not bool((pickle.loads(state.numpy().tobytes())["amax"] == 1).all()):
            raise ValueError("another")
        super().set_extra_state(state)


def test_extra_state_that_fails_to_load() -> None:
    assert trace(model(small_models.Pickled)).not_serialized == ()
    assert trace(model(Picky)).not_serialized == ("amax",)


def test_no_memory_to_build_a_model_that_differs_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_CHEAP", -1)
    monkeypatch.setattr(instances, "memory_available", lambda: -1)
    (note,) = trace(model(AsksForMeta)).notes
    assert note.startswith("on the meta device the constructor creates other tensors")


class Changes(nn.Module):
    """Changes the state dict when it saves, and when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4))
        self._register_state_dict_hook(lambda module, sd, prefix, meta: module.save(sd))
        self.register_load_state_dict_pre_hook(lambda module, sd, *rest: module.load(sd))

    def save(self, sd: dict) -> None: ...

    def load(self, sd: dict) -> None: ...


class Swaps(Changes):
    def load(self, sd: dict) -> None:
        sd["a"], sd["b"] = sd["b"], sd["a"]


class Shortens(Changes):
    def load(self, sd: dict) -> None:
        self.table = sd["table"] = sd["table"][:2] + 0


class Rounds(Changes):
    def load(self, sd: dict) -> None:
        self.table = sd["table"] = (sd["table"] + 0).double()


class Solves(Changes):
    """By an operator that is not evaluated here."""

    def save(self, sd: dict) -> None:
        sd["a"] = torch.fft.fft(sd["a"].detach()).real


class Turns(Changes):
    """And back again, element for element."""

    def save(self, sd: dict) -> None:
        sd["a"] = torch.special.bessel_j0(sd["a"].detach()) * 0 + sd["a"].detach().flip(0)

    def load(self, sd: dict) -> None:
        sd["a"] = sd["a"].flip(0)


SAID: dict[type[Changes], list[str]] = {
    Swaps: ["loading gives it the value of b @ a", "loading gives it the value of a @ b"],
    Shortens: ["loading gives it another shape or dtype @ table"],
    Rounds: ["loading gives it another shape or dtype @ table"],
    Solves: ["loading does not give the saved value back exactly @ a"],
    Turns: [],
}


@pytest.mark.parametrize("limit", [50_000_000, 7])
@pytest.mark.parametrize("build", SAID)
def test_tensors_that_do_not_come_back_are_reported(
    build: type[Changes], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is too large for random values, and only a real round trip tells."""
    monkeypatch.setattr("ckpttool.tracing.trace._PROBE_LIMIT", limit)
    names = trace(model(build))
    assert list(map(str, names.roundtrip_problems)) == SAID[build]
