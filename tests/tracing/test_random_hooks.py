"""Models whose hooks do random things to their tensors: what `trace` says of them against torch itself."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpttool.core import expression as ex
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.trace import trace

torch.set_num_threads(1)

SEEDS = range(int(os.environ.get("CKPTTOOL_SEEDS", "12")))
LOADS = 24  # of random values each, by which a way back is judged
SHAPES = [(1,), (2, 3), (4, 4), (), (1, 1), (3, 1), (0, 2), (5,)]
DTYPES = [*[torch.float32] * 4, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
Change = Callable[[torch.Tensor], torch.Tensor]


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def numbers(change: Change) -> Change:
    """The change, of all but truths."""
    return lambda x: x if x.dtype == torch.bool else change(x)


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.0, -0.0]).repeat(x.numel())[: x.numel()].reshape(x.shape)


def without_first(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.view(-1)[:1].zero_()
    return made


# A change that a hook makes when it saves, and the change back when it loads: not all are inverse.
CHANGES: dict[str, tuple[Change, Change]] = {
    "transpose": (lambda x: x.transpose(0, -1) if x.dim() else x,) * 2,
    "copied transpose": (lambda x: x.transpose(0, -1).contiguous() if x.dim() else x,) * 2,
    "negate": (lambda x: ~x if x.dtype == torch.bool else -x,) * 2,
    "flip": (lambda x: x.flip(0) if x.dim() else x,) * 2,
    "unsqueeze": (lambda x: x.unsqueeze(0), lambda x: x.squeeze(0)),
    "flatten": (lambda x: x.reshape(-1), same),
    "double": (lambda x: x.double(), same),
    "half": (lambda x: x.half(), same),
    "twice": (numbers(lambda x: x * 2), numbers(lambda x: x / 2 if x.is_floating_point() else x // 2)),
    "abs": (numbers(torch.abs), same),
    "relu": (numbers(lambda x: x.clone().clamp_(min=0)), same),
    "clamp": (numbers(lambda x: x.clamp(-5, 5)), same),
    "by numpy": (lambda x: torch.from_numpy(x.double().numpy().copy()), same),
    "signs": (lambda x: torch.copysign(x, signs(x)) if x.is_floating_point() else x, same),
    "without the first": (without_first, same),
    "the first last": (lambda x: torch.cat([x.reshape(-1)[1:], x.reshape(-1)[:1]]), same),
    "roll": (lambda x: x.roll(1), lambda x: x.roll(-1)),
    "square": (numbers(torch.square), lambda x: x.sqrt() if x.is_floating_point() else x),
}


class Hooked(nn.Module):
    """One to three tensors, and what becomes of each in hooks that load or save them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        self.ways: dict[str, tuple[list[str], bool]] = {}
        for number in range(chosen.randint(1, 3)):
            tensor = torch.ones(chosen.choice(SHAPES), dtype=chosen.choice(DTYPES))
            if tensor.is_floating_point():
                self.register_parameter(f"p{number}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"p{number}", tensor)
            changes = [chosen.choice(sorted(CHANGES)) for _ in range(chosen.randint(0, 3))]
            self.ways[f"p{number}"] = (changes, chosen.random() < 0.85)
        self._register_state_dict_hook(lambda m, sd, prefix, meta: m.save(sd, prefix))
        self._register_load_state_dict_pre_hook(self.load)

    def save(self, sd: dict, prefix: str) -> None:
        for name, (changes, _) in self.ways.items():
            value = sd[prefix + name].detach()
            for change in changes:
                value = CHANGES[change][0](value)
            sd[prefix + name] = value

    def load(self, sd: dict, prefix: str, *args: object) -> None:
        for name, (changes, inverse) in self.ways.items():
            if inverse:
                value, own = sd[prefix + name], getattr(self, name)
                for change in reversed(changes):
                    value = CHANGES[change][1](value)
                sd[prefix + name] = value.reshape(own.shape).to(own.dtype)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def filled(seed: int, generator: torch.Generator) -> Hooked:
    model = Hooked(seed)
    for value in tensors(model).values():
        if value.is_floating_point():
            scale = torch.randint(-8, 9, value.shape, generator=generator).exp2()
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
        else:
            most = 2 if value.dtype == torch.bool else 100
            value.copy_(torch.randint(0, most, value.shape, generator=generator))
    return model


def lost(seed: int, generator: torch.Generator) -> set[str]:
    """The tensors that do not come back; all of them where torch refuses to load."""
    found: set[str] = set()
    for _ in range(LOADS):
        source, target = filled(seed, generator), filled(seed, generator)
        wanted = {name: value.clone() for name, value in tensors(source).items()}
        try:
            target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True)
        except RuntimeError:
            return set(wanted)
        found |= {name for name, value in tensors(target).items() if not same_bits(value, wanted[name])}
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_random_hooks_are_traced_as_torch_runs_them(seed: int) -> None:
    def make(real: bool) -> nn.Module:
        with torch.device("cpu" if real else "meta"):
            return Hooked(seed)

    try:
        Hooked(seed).state_dict()
    except (RuntimeError, NotImplementedError, TypeError):
        return  # no such model: an operator does not take the dtype
    names, generator = trace(LoadedModel("hooked", make)), torch.Generator().manual_seed(seed)
    gone = lost(seed, generator) - set(names.not_serialized)
    assert names.roundtrips == (not gone), (gone, names.roundtrip_problems)
    model = filled(seed, generator)
    runtime, saved = tensors(model), model.state_dict()
    for key in names.serialized:
        if key.source is not None and not ex.is_opaque(key.source):
            made = evaluate(key.source, runtime.__getitem__)
            assert (made.dtype, made.shape) == (saved[key.key].dtype, saved[key.key].shape)
            assert same_bits(made, saved[key.key])
