"""Round trips and meta models, against instances that are really built, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import loading_zoo
import small_models
from ckpttool import CkptError
from surroundings import free_memory, only_large_models
from zoo import runtime_values

torch.set_num_threads(1)


class SavesAsInt32(nn.Linear):
    """Saves the bits as int32 in numpy, which a trace cannot follow, and restores them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(SavesAsInt32._save)
        self._register_load_state_dict_pre_hook(self._load)

    def _save(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy().view("int32").copy())

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = torch.from_numpy(
            sd[prefix + "weight"].numpy().view("float32").copy()
        )


class LosesOneRow(SavesAsInt32):
    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        super()._load(sd, prefix)
        sd[prefix + "weight"] = torch.from_numpy(
            sd[prefix + "weight"].numpy() * [[1.0], [0.0]]
        ).float()


class SavesUpToABound(nn.Linear):
    """Saves a value of at most 5, in numpy; other random values of one element are seldom
    larger.
    """

    def __init__(self) -> None:
        super().__init__(1, 1)
        self._register_state_dict_hook(SavesUpToABound._save)

    def _save(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = torch.from_numpy(sd[prefix + "weight"].numpy().clip(-5, 5))


class ChecksABound(SavesAsInt32):
    """Restores the bits, and refuses large values."""

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        super()._load(sd, prefix)
        if sd[prefix + "weight"].abs().max() > 50:
            raise ValueError("too large")


class AddsSavedZeros(nn.Linear):
    """Loads the sum of two keys; one of them is a saved constant."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({p + "shift": torch.zeros(2, 2)})
        )
        self._register_load_state_dict_pre_hook(self._load)

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "weight"] = sd[prefix + "weight"] + sd.pop(prefix + "shift")


class TransposesQuantized(nn.Linear):
    """Saves a quantized table transposed; a trace cannot generate quantized test values."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        with torch.device("cpu"):
            self.register_buffer(
                "table", torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8)
            )
        self._register_state_dict_hook(lambda m, sd, p, meta: m._turn(sd, p))
        self._register_load_state_dict_pre_hook(self._turn)

    def _turn(self, sd: dict, prefix: str, *args: object) -> None:
        sd[prefix + "table"] = sd[prefix + "table"].t()


class SavesAbs(nn.Module):
    """Saves a number without its sign, which restores half of all random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({p + "gain": self.change(sd[p + "gain"])})
        )

    def change(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.abs()


class SavesAbsByNumpy(SavesAbs):
    def change(self, gain: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(abs(gain.detach().numpy()).copy())


class Clamps(SavesAbs):
    def change(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.clamp(-50, 50)


class OverlappingBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("columns", whole[:, ::2])


class Forgets(SavesAsInt32):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def _load(self, sd: dict, prefix: str, *args: object) -> None:
        super()._load(sd, prefix)
        sd.pop(prefix + "table")
        del self._buffers["table"]


class Expands(SavesAsInt32):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(1, dtype=torch.int64).expand(4), persistent=False)


class InTwoDtypes(SavesAsInt32):
    """Saves one memory in two dtypes, which no file can store, and an object; checks the version at
    load.
    """

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


ROUND_TRIPS: dict[type[nn.Module], bool] = {
    **dict.fromkeys(
        (
            SavesAsInt32,
            AddsSavedZeros,
            TransposesQuantized,
            OverlappingBuffers,
            Expands,
            InTwoDtypes,
        ),
        True,
    ),
    **dict.fromkeys(
        (LosesOneRow, SavesUpToABound, SavesAbs, SavesAbsByNumpy, Clamps, Forgets), False
    ),
}


@pytest.mark.parametrize("cls", ROUND_TRIPS)
def test_round_trips_match_torch(cls: type[nn.Module]) -> None:
    """A single number is not restored by chance."""
    source, target = cls(), cls()
    for parameter in source.parameters():
        parameter.data.fill_(-100.0)
    target.load_state_dict(source.state_dict(), strict=True)
    expected, restored = runtime_values(source), runtime_values(target)
    same = expected.keys() == restored.keys() and all(
        torch.equal(restored[name], expected[name]) for name in expected
    )
    assert same == ROUND_TRIPS[cls]
    names = ckpttool.trace(cls)
    assert (names.roundtrips, names.notes) == (same, ())


def test_a_model_may_refuse_large_values() -> None:
    assert ckpttool.trace(ChecksABound).roundtrips


def test_a_round_trip_that_cannot_be_tried_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise CkptError("no memory", hint="add memory")

    monkeypatch.setattr("ckpttool.tracing.trace.check_memory", no_memory)
    names = ckpttool.trace(AddsSavedZeros)
    assert names.roundtrips
    assert names.notes == (
        "cannot be told whether it is given back: loaded from shift, which no tensor of the model"
        " is saved to @ weight",
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


class CacheIfReal(nn.Module):
    """Creates its cache only if it is not on meta, as some rotary embeddings do."""

    def __init__(self, is_real: Callable[[torch.Tensor], bool] = has_device) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(2))
        if is_real(self.theta):
            self.register_buffer(
                "cache", torch.outer(torch.arange(3.0), self.theta.detach()), persistent=False
            )


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("is_real", [has_device, has_default_device, has_class_of_cpu, has_values])
def test_a_constructor_that_creates_other_tensors_on_meta_is_traced(
    is_real: Callable[[torch.Tensor], bool], cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cheap:  # it is built with tensors that look real
        only_large_models(monkeypatch)
    names = ckpttool.trace(lambda: CacheIfReal(is_real))
    assert [tensor.fqn for tensor in names.runtime] == ["theta", "cache"]
    assert names.not_serialized == ("cache",)
    assert names.notes == ()


def test_a_large_constructor_may_copy_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Transformer copies its layers; only tensors are copied, not the mode that creates
    them.
    """

    class Copies(CacheIfReal):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(2))

    real = [name for name, _ in (*Copies().named_parameters(), *Copies().named_buffers())]
    only_large_models(monkeypatch)
    names = ckpttool.trace(Copies)
    assert (sorted(tensor.fqn for tensor in names.runtime), names.notes) == (sorted(real), ())
    assert "cache" in real


def test_a_constructor_that_reads_values_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.total = 0.0 if self.weight.device.type == "meta" else float(self.weight.sum())

    only_large_models(monkeypatch)
    assert ckpttool.trace(Reads).notes == (
        "on the meta device alone: whether its constructor makes other tensors for real was not"
        " looked at",
    )


def test_a_buffer_whose_name_ends_in_extra_state_is_a_tensor() -> None:
    names = ckpttool.trace(loading_zoo.buffer_with_such_an_ending)
    assert [s.key for s in names.serialized] == ["weight", "bias", "my_extra_state"]
    assert (names.extra_state, names.not_serialized, names.roundtrips) == ((), (), True)


class AcceptsOneExtraState(small_models.Pickled):
    """Accepts only its initial extra state, so other values cannot be tried."""

    def set_extra_state(self, state: torch.Tensor) -> None:
        if not bool((pickle.loads(state.numpy().tobytes())["amax"] == 1).all()):
            raise ValueError("another")
        super().set_extra_state(state)


def test_a_tensor_in_extra_state_that_fails_to_load_is_not_saved() -> None:
    assert ckpttool.trace(small_models.Pickled).not_serialized == ()
    assert ckpttool.trace(AcceptsOneExtraState).not_serialized == ("amax",)


def test_a_model_that_differs_on_meta_and_does_not_fit_in_memory_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_large_models(monkeypatch)
    free_memory(monkeypatch, -1)
    (note,) = ckpttool.trace(CacheIfReal).notes
    assert note.startswith("on the meta device the constructor creates other tensors")


class ChangesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4))
        self._register_state_dict_hook(lambda module, sd, prefix, meta: module.save(sd))
        self.register_load_state_dict_pre_hook(lambda module, sd, *rest: module.load(sd))

    def save(self, sd: dict) -> None: ...

    def load(self, sd: dict) -> None: ...


class SwapsTwo(ChangesState):
    def load(self, sd: dict) -> None:
        sd["a"], sd["b"] = sd["b"], sd["a"]


class Shortens(ChangesState):
    def load(self, sd: dict) -> None:
        self.table = sd["table"] = sd["table"][:2] + 0


class Rounds(ChangesState):
    def load(self, sd: dict) -> None:
        self.table = sd["table"] = (sd["table"] + 0).double()


class AppliesFft(ChangesState):
    def save(self, sd: dict) -> None:
        sd["a"] = torch.fft.fft(sd["a"].detach()).real


class FlipsTwice(ChangesState):
    def save(self, sd: dict) -> None:
        sd["a"] = torch.special.bessel_j0(sd["a"].detach()) * 0 + sd["a"].detach().flip(0)

    def load(self, sd: dict) -> None:
        sd["a"] = sd["a"].flip(0)


PROBLEMS: dict[type[ChangesState], list[str]] = {
    SwapsTwo: ["loading gives it the value of b @ a", "loading gives it the value of a @ b"],
    Shortens: ["loading gives it another shape or dtype @ table"],
    Rounds: ["loading gives it another shape or dtype @ table"],
    AppliesFft: ["loading does not give the saved value back exactly @ a"],
    FlipsTwice: [],
}


@pytest.mark.parametrize("limit", [50_000_000, 7])
@pytest.mark.parametrize("build", PROBLEMS)
def test_tensors_that_are_not_restored_are_reported(
    build: type[ChangesState], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too large for random values is checked by a real round trip."""
    monkeypatch.setattr("ckpttool.tracing.trace._PROBE_LIMIT", limit)
    names = ckpttool.trace(build)
    assert list(map(str, names.roundtrip_problems)) == PROBLEMS[build]
