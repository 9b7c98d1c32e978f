"""Live modules that `copy.deepcopy` refuses: `load` and `diff` work on them as `load_state_dict`
does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ckpttool

X = torch.ones(3, 4)
CASES: dict[str, Callable[[], nn.Module]] = {}


_LOG = open(os.devnull)  # noqa: SIM115


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _LOG.close()


def case(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    CASES[build.__name__] = build
    return build


def base() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).train()


@case
def weight_norm() -> nn.Module:
    model = base()
    nn.utils.weight_norm(model[0])
    model(X)
    return model


@case
def pruned() -> nn.Module:
    model = base()
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(X)
    return model


@case
def spectral_norm() -> nn.Module:
    model = base()
    nn.utils.spectral_norm(model[0])
    model(X)
    return model


@case
def cached_activation() -> nn.Module:
    model = base()
    model.register_forward_hook(
        lambda module, inputs, output: setattr(module, "last", {"out": [output]})
    )
    model(X)
    return model


@case
def stored_loss() -> nn.Module:
    model = base()
    model[0].aux_loss = model(X).sum()
    return model


@case
def lock() -> nn.Module:
    model = base()
    model.lock, model.settings = (
        threading.Lock(),
        SimpleNamespace(lock=threading.RLock(), part=model[0], owner=model),
    )
    return model


class Cleared(nn.Module):
    """Its load hook changes its layer, which it knows from its settings too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.settings = SimpleNamespace(lock=threading.Lock(), layer=self.layer, owner=self)
        self.register_load_state_dict_pre_hook(Cleared.clear)

    @staticmethod
    def clear(module: Any, state: Any, *_: Any) -> None:
        assert module.settings.layer is module.layer
        assert module.settings.owner is module
        nn.init.zeros_(module.settings.layer.weight)


@case
def hooks_that_use_settings() -> nn.Module:
    return Cleared()


@case
def log_file() -> nn.Module:
    model = base()
    model.log = _LOG
    return model


@case
def generator() -> nn.Module:
    model = base()
    model.batches = (number for number in range(3))
    return model


@case
def recurrent() -> nn.Module:
    model: Any = nn.ModuleDict({"rnn": nn.LSTM(4, 4)})
    model.out = model["rnn"](X)
    return model


@case
def scripted() -> nn.Module:
    model: Any = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    model.loss = model(X).sum()
    return model


@case
def traced_graph() -> nn.Module:
    model: Any = nn.Sequential(torch.fx.symbolic_trace(base()))
    model.loss = model(X).sum()
    return model


@case
def computed_buffer() -> nn.Module:
    model = base()
    model.register_buffer("scale", model(X).sum())
    return model


class Refuses(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies of this")


@case
def refuses_copies() -> nn.Module:
    return nn.Sequential(Refuses(4, 4))


class Renaming(nn.Module):
    """Its hooks use a lock, and rename what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(4, 4), threading.Lock()
        self.register_state_dict_post_hook(Renaming.save)
        self.register_load_state_dict_pre_hook(Renaming.load)

    @staticmethod
    def save(module: Any, state: Any, prefix: str, _: Any) -> None:
        with module.lock:
            state[f"{prefix}outer.weight"] = state.pop(f"{prefix}inner.weight")

    @staticmethod
    def load(module: Any, state: Any, prefix: str, *_: Any) -> None:
        with module.lock:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}outer.weight")


@case
def hooks_with_a_lock() -> nn.Module:
    return Renaming()


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("name", CASES)
def test_load_and_diff_of_a_live_module(name: str, tmp_path: Path) -> None:
    torch.save(
        {key: value.detach() + 1 for key, value in CASES[name]().state_dict().items()},
        tmp_path / "new.pt",
    )
    expected = CASES[name]()
    expected.load_state_dict(torch.load(tmp_path / "new.pt"))
    model = CASES[name]()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    values = {key: value.clone() for key, value in model.state_dict().items()}

    assert ckpttool.diff(tmp_path / "new.pt", model=model).identical
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    wrapped = {f"module.{key}": value for key, value in torch.load(tmp_path / "new.pt").items()}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    ckpttool.load(tmp_path / "wrapped.pt", model)

    state = expected.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for path, module in model.named_modules():
        attributes = vars(module)
        assert attributes.keys() == before[path].keys()
        assert all(attributes[attribute] is value for attribute, value in before[path].items())


class NoCopies(torch.Tensor):
    """A tensor that nothing can copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone, torch.clone):
            raise NotImplementedError("no copies")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameter_that_nothing_copies_is_an_error_and_not_shared(tmp_path: Path) -> None:
    model = base()
    model.extra = nn.Parameter(torch.ones(2).as_subclass(NoCopies))
    torch.save({**base().state_dict(), "extra": torch.zeros(2)}, tmp_path / "in.pt")
    with pytest.raises(ckpttool.CkptError, match="extra cannot be copied"):
        ckpttool.load(tmp_path / "in.pt", model)
    assert model.extra.tolist() == [1, 1]


def needs_values(device: Any = None) -> nn.Module:
    """Build only with real tensors: on meta the constructor fails."""
    model = base()
    float(model[0].weight.sum())
    return model


@pytest.mark.parametrize(
    "call",
    [
        lambda path: ckpttool.trace(needs_values),
        lambda path: ckpttool.remap(path, path.with_name("out.pt"), model=nn.Identity),
        lambda path: ckpttool.remap(path, path.with_name("out.pt"), to="runtime"),
        lambda path: ckpttool.remap(path, path.with_name("out.pt"), reverse=True),
        lambda path: ckpttool.remap(path, path.with_name("out.pt"), trainable_only=True),
        lambda path: ckpttool.remap(path, path, to="ddp"),
        lambda path: ckpttool.remap(path, path.with_name("out.pt"), drop="nothing.*"),
        lambda path: ckpttool.load(path, nn.Linear(7, 7)),
        lambda path: ckpttool.load(path, base().double()),
    ],
)
def test_errors_of_the_api_name_keywords_and_no_flags(
    call: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "in.pt"
    torch.save(base().state_dict(), path)
    with pytest.raises(ckpttool.CkptError) as error:
        call(path)
    texts = [
        error.value.message,
        error.value.hint,
        str(error.value),
        *getattr(error.value, "__notes__", ()),
    ]
    outside_of_commands = [text.partition("ckpttool ")[0] for text in texts]
    assert not [text for text in outside_of_commands if "--" in text]


def test_load_builds_a_definition_for_real_if_it_needs_values(tmp_path: Path) -> None:
    torch.save(base().state_dict(), tmp_path / "in.pt")
    assert ckpttool.load(tmp_path / "in.pt", base(), definition=needs_values).tensors == 4
