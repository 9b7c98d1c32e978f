"""Hooks that run random programs of views, copies and in-place writes, which must be traced
exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckpttool
from expressions import evaluate, is_opaque
from zoo import assert_same, randomized, runtime_values

torch.set_num_threads(1)

Step = tuple[str, int, int, int]


def part_of(t: torch.Tensor, dim: int, at: int) -> torch.Tensor:
    dim %= t.dim()
    start = at % t.shape[dim]
    return t.narrow(dim, start, max(1, (t.shape[dim] - start + 1) // 2))


def assign(t: torch.Tensor, other: torch.Tensor) -> None:
    t.copy_(other.reshape(-1)[:1].to(t.dtype).expand(t.numel()).reshape(t.shape).contiguous())


CREATE: dict[str, Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]] = {
    "slice": lambda t, o, a, b: part_of(t, a, b),
    "strided": lambda t, o, a, b: t[:: 1 + a % 3],
    "select": lambda t, o, a, b: (
        t.select(a % t.dim(), b % t.shape[a % t.dim()]) if t.dim() > 1 else t
    ),
    "transpose": lambda t, o, a, b: t.transpose(a % t.dim(), b % t.dim()),
    "reshape": lambda t, o, a, b: t.reshape(-1),
    "unsqueeze": lambda t, o, a, b: t.unsqueeze(a % (t.dim() + 1)) if t.dim() < 4 else t,
    "chunk": lambda t, o, a, b: t.chunk(2, a % t.dim())[0],
    "unbind": lambda t, o, a, b: t.unbind(0)[-1] if t.dim() > 1 else t,
    "clone": lambda t, o, a, b: t.clone(),
    "contiguous": lambda t, o, a, b: t.contiguous(),
    "add": lambda t, o, a, b: t + a,
    "half": lambda t, o, a, b: t.to(torch.float16),
    "cat": lambda t, o, a, b: torch.cat([t, t], a % t.dim()) if t.numel() < 200 else t,
    "flip": lambda t, o, a, b: t.flip(a % t.dim()),
    "diagonal": lambda t, o, a, b: t.diagonal() if t.dim() == 2 else t,
    "roll": lambda t, o, a, b: t.roll(1, 0),
    "pick": lambda t, o, a, b: t.index_select(
        0, torch.tensor([a % t.shape[0], 0], device=t.device)
    ),
    "parameter": lambda t, o, a, b: nn.Parameter(t.detach(), requires_grad=False),
    "data": lambda t, o, a, b: t.data,
    "empty": lambda t, o, a, b: torch.zeros_like(t),
    "where": lambda t, o, a, b: torch.where(t > 0, t, torch.zeros((), dtype=t.dtype)),
    "as_strided": lambda t, o, a, b: (
        t.as_strided((min(2, t.numel()),), (1,)) if t.is_contiguous() else t
    ),
}
CHANGE: dict[str, Callable[[torch.Tensor, torch.Tensor, int, int], object]] = {
    "mul_": lambda t, o, a, b: t.mul_(a),
    "zero_": lambda t, o, a, b: t.zero_(),
    "fill_": lambda t, o, a, b: t.fill_(a),
    "copy_": lambda t, o, a, b: t.copy_(o) if t.shape == o.shape else None,
    "copy_ a number": lambda t, o, a, b: t.copy_(a),  # type: ignore[arg-type]
    "assign": lambda t, o, a, b: assign(t, o),
    "set row": lambda t, o, a, b: t.__setitem__(a % t.shape[0], b),
    "set slice": lambda t, o, a, b: part_of(t, a, b).mul_(3).add_(1),
    "masked": lambda t, o, a, b: t.masked_fill_(t > 0, a),
    "clamp_": lambda t, o, a, b: t.clamp_(max=a),
    "neg_": lambda t, o, a, b: t.neg_(),
    "set data": lambda t, o, a, b: setattr(t, "data", o) if t.dtype == o.dtype else None,
}


def run(steps: list[Step], tensors: list[torch.Tensor]) -> None:
    for name, which, a, b in steps:
        t, other = tensors[which % len(tensors)], tensors[a % len(tensors)]
        if not t.dim() or not t.numel():
            continue
        if name in CREATE:
            tensors.append(CREATE[name](t, other, a, b))
        elif not any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride())):
            CHANGE[name](t, other, a, b)


def model(steps: list[Step]) -> nn.Module:
    net = nn.Module()
    net.w = nn.Parameter(torch.randn(4, 6))
    net.v = nn.Parameter(torch.randn(5))
    base = torch.randn(3, 4)
    net.register_buffer("base", base)
    net.register_buffer("view", base[1:, ::2])

    def save(module: nn.Module, sd: dict, prefix: str, meta: dict) -> None:
        tensors = list(sd.values())
        run(steps, tensors)
        sd.update({f"t{i}": t for i, t in enumerate(tensors)})

    net._register_state_dict_hook(save)
    return net


STEPS = st.lists(
    st.tuples(
        st.sampled_from([*CREATE, *CHANGE, *CHANGE]),
        st.integers(0, 12),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=10,
)


@settings(max_examples=50, suppress_health_check=list(HealthCheck), derandomize=True)
@given(steps=STEPS)
def test_the_trace_of_a_random_program_is_exact(steps: list[Step]) -> None:
    names = ckpttool.trace(lambda: model(steps))
    live = randomized(model(steps), 1)
    runtime = runtime_values(live)
    state = live.state_dict()
    other = randomized(model(steps), 2).state_dict()
    assert [s.key for s in names.serialized] == list(state)
    for s in names.serialized:
        assert s.source is None or not is_opaque(s.source), s
        if s.source is None:
            assert_same(other[s.key], state[s.key], s.key)  # a constant
        else:
            assert_same(evaluate(s.source, runtime), state[s.key], s.key)
