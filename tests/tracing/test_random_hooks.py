"""`trace` of models whose hooks change their tensors at random, against torch itself."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ckpttool
from expressions import evaluate, is_opaque, same_bits

torch.set_num_threads(1)

SEEDS = range(int(os.environ.get("CKPTTOOL_SEEDS", "12")))
LOADS = 24  # loads with random values, which decide if a change is reversible
SHAPES = [(1,), (2, 3), (4, 4), (), (1, 1), (3, 1), (0, 2), (5,)]
DTYPES = [
    *[torch.float32] * 4,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
]
Change = Callable[[torch.Tensor], torch.Tensor]


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def except_booleans(change: Change) -> Change:
    return lambda x: x if x.dtype == torch.bool else change(x)


def alternating_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.0, -0.0]).repeat(x.numel())[: x.numel()].reshape(x.shape)


def without_first(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result.view(-1)[:1].zero_()
    return result


# A change in a save hook and the reverse change in a load hook; not all of them are inverse.
CHANGES: dict[str, tuple[Change, Change]] = {
    "transpose": (lambda x: x.transpose(0, -1) if x.dim() else x,) * 2,
    "copied transpose": (lambda x: x.transpose(0, -1).contiguous() if x.dim() else x,) * 2,
    "negate": (lambda x: ~x if x.dtype == torch.bool else -x,) * 2,
    "flip": (lambda x: x.flip(0) if x.dim() else x,) * 2,
    "unsqueeze": (lambda x: x.unsqueeze(0), lambda x: x.squeeze(0)),
    "flatten": (lambda x: x.reshape(-1), same),
    "double": (lambda x: x.double(), same),
    "half": (lambda x: x.half(), same),
    "twice": (
        except_booleans(lambda x: x * 2),
        except_booleans(lambda x: x / 2 if x.is_floating_point() else x // 2),
    ),
    "abs": (except_booleans(torch.abs), same),
    "relu": (except_booleans(lambda x: x.clone().clamp_(min=0)), same),
    "clamp": (except_booleans(lambda x: x.clamp(-5, 5)), same),
    "by numpy": (lambda x: torch.from_numpy(x.double().numpy().copy()), same),
    "alternating_zeros": (
        lambda x: torch.copysign(x, alternating_zeros(x)) if x.is_floating_point() else x,
        same,
    ),
    "without the first": (without_first, same),
    "the first last": (lambda x: torch.cat([x.reshape(-1)[1:], x.reshape(-1)[:1]]), same),
    "roll": (lambda x: x.roll(1), lambda x: x.roll(-1)),
    "square": (except_booleans(torch.square), lambda x: x.sqrt() if x.is_floating_point() else x),
}


class Hooked(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.changes_of: dict[str, tuple[list[str], bool]] = {}
        for number in range(rng.randint(1, 3)):
            tensor = torch.ones(rng.choice(SHAPES), dtype=rng.choice(DTYPES))
            if tensor.is_floating_point():
                self.register_parameter(f"p{number}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"p{number}", tensor)
            changes = [rng.choice(sorted(CHANGES)) for _ in range(rng.randint(0, 3))]
            self.changes_of[f"p{number}"] = (changes, rng.random() < 0.85)
        self._register_state_dict_hook(lambda m, sd, prefix, meta: m.save(sd, prefix))
        self._register_load_state_dict_pre_hook(self.load)

    def save(self, sd: dict, prefix: str) -> None:
        for name, (changes, _) in self.changes_of.items():
            value = sd[prefix + name].detach()
            for change in changes:
                value = CHANGES[change][0](value)
            sd[prefix + name] = value

    def load(self, sd: dict, prefix: str, *args: object) -> None:
        for name, (changes, inverse) in self.changes_of.items():
            if inverse:
                value, target = sd[prefix + name], getattr(self, name)
                for change in reversed(changes):
                    value = CHANGES[change][1](value)
                sd[prefix + name] = value.reshape(target.shape).to(target.dtype)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def random_model(seed: int, generator: torch.Generator) -> Hooked:
    model = Hooked(seed)
    for value in tensors(model).values():
        if value.is_floating_point():
            scale = torch.randint(-8, 9, value.shape, generator=generator).exp2()
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
        else:
            limit = 2 if value.dtype == torch.bool else 100
            value.copy_(torch.randint(0, limit, value.shape, generator=generator))
    return model


def lost_tensors(seed: int, generator: torch.Generator) -> set[str]:
    """Return the tensors that a load does not restore; all of them if torch refuses to load."""
    result: set[str] = set()
    for _ in range(LOADS):
        source, target = random_model(seed, generator), random_model(seed, generator)
        expected = {name: value.clone() for name, value in tensors(source).items()}
        try:
            target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True)
        except RuntimeError:
            return set(expected)
        result |= {
            name for name, value in tensors(target).items() if not same_bits(value, expected[name])
        }
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_traces_of_random_hooks_match_torch(seed: int) -> None:
    try:
        Hooked(seed).state_dict()
    except (RuntimeError, NotImplementedError, TypeError):
        return  # an operator does not support the dtype
    names, generator = ckpttool.trace(lambda: Hooked(seed)), torch.Generator().manual_seed(seed)
    lost = lost_tensors(seed, generator) - set(names.not_serialized)
    assert names.roundtrips == (not lost), (lost, names.roundtrip_problems)
    model = random_model(seed, generator)
    runtime, saved = tensors(model), model.state_dict()
    for key in names.serialized:
        if key.source is not None and not is_opaque(key.source):
            result = evaluate(key.source, runtime)
            assert (result.dtype, result.shape) == (saved[key.key].dtype, saved[key.key].shape)
            assert same_bits(result, saved[key.key])
