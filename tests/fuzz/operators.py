"""Evaluate random allowed operators on random arguments for a number of seconds: no kernel may
crash the process.

Run it as a program, because a crash ends it: ``python tests/fuzz/operators.py SECONDS SEED``. With
``--say`` the last printed line is the operator that crashed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from typing import Any

import torch

from ckpttool import CkptError
from ckpttool.core.expression import Argument, Op, Ref, Special
from ckpttool.core.limits import Limits, limited
from ckpttool.evaluate.ops import GETITEM, OPS
from ckpttool.evaluate.torch_eval import evaluate

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
    "complex64",
)
SHAPES = (
    (),
    (0,),
    (1,),
    (4,),
    (3, 4),
    (4, 3),
    (3, 3),
    (2, 3, 4),
    (1, 1, 8),
    (1, 1, 4, 4),
    (2, 2, 2, 2, 2),
    (2, 0, 3),
)
INTEGERS = (0, 1, -1, 2, 3, 4, 5, -2, 7, 64, -(2**63), 2**63 - 1, 2**31, 2**32 + 1, 1 << 40)
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.5, 1e-320, 1e300, float("inf"), float("-inf"), float("nan"))
_MIN_COUNT = 500  # expressions; the first ones load much of torch
LIMITS = Limits(made_bytes=1 << 20, made_times=4)


class Arguments:
    """Random arguments for one operator; `leaves` collects its tensors."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.leaves: dict[str, torch.Tensor] = {}

    def expression(self, name: str) -> Op:
        packet, overload = name.split(".")[1:]
        schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
        shape, dtype = self.random.choice(SHAPES), self.random.choice(DTYPES)
        positions: list[Argument] = []
        keywords: list[tuple[str, Argument]] = []
        for arg in schema.arguments:
            if arg.has_default_value() and self.random.random() < 0.5:
                if not arg.kwarg_only:
                    break
                continue
            value = self.value(str(arg.real_type), shape, dtype, len(positions))
            if arg.kwarg_only:
                keywords.append((arg.name, value))
            else:
                positions.append(value)
        return Op(name, tuple(positions), tuple(keywords))

    def value(self, kind: str, shape: tuple[int, ...], dtype: str, place: int) -> Argument:
        choose = self.random.choice
        if kind.startswith("Optional["):
            return (
                None if self.random.random() < 0.3 else self.value(kind[9:-1], shape, dtype, place)
            )
        if kind.startswith("List["):
            length = choose((0, 1, 2, 2, 3, len(shape)))
            return tuple(self.value(kind[5:-1], shape, dtype, place) for _ in range(length))
        if kind == "Tensor":
            alike = place == 0 or self.random.random() < 0.5
            return self.tensor(
                shape if alike else choose(SHAPES), choose((dtype, dtype, "int64", choose(DTYPES)))
            )
        if kind == "ScalarType":
            return Special("dtype", choose((*DTYPES, "qint8", "bits8")))
        plain: dict[str, Any] = {
            "int": lambda: choose(INTEGERS[:8] if self.random.random() < 0.7 else INTEGERS),
            "float": lambda: choose(FLOATS),
            "number": lambda: choose((*INTEGERS, *FLOATS, True)),
            "bool": lambda: choose((True, False)),
            "str": lambda: choose(("floor", "trunc", "sum", "x")),
            "Layout": lambda: Special("layout", choose(("strided", "sparse_coo"))),
            "MemoryFormat": lambda: Special(
                "memory_format", choose(("contiguous_format", "channels_last"))
            ),
            "Device": lambda: Special("device", "cuda"),
        }
        return plain[kind]()

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Ref:
        kind = getattr(torch, dtype)
        extreme = self.random.random()
        if kind.is_floating_point or kind.is_complex:
            tensor = (
                torch.randn(shape, dtype=torch.float64)
                .mul_(1e30 if extreme < 0.2 else 1.0)
                .to(kind)
            )
        else:
            tensor = torch.randint(-3, 4, shape).to(kind)
            if extreme < 0.2 and kind in (torch.int64, torch.int32, torch.int8):
                tensor = torch.full(shape, torch.iinfo(kind).min, dtype=kind)
        if tensor.dim() > 1 and self.random.random() < 0.3:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        key = str(len(self.leaves))
        self.leaves[key] = tensor
        return Ref(key)


def main(seconds: float, seed: int, say: bool = False) -> Counter[str]:
    """Fuzz, and count the values and the refused expressions."""
    torch.set_num_threads(1)
    names = sorted(name for name in OPS if name != GETITEM)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with limited(LIMITS):
        while time.monotonic() < end or sum(counts.values()) < _MIN_COUNT:
            seed += 1
            arguments = Arguments(seed)
            node = arguments.expression(names[seed % len(names)])
            if say:
                print(
                    seed,
                    node,
                    {key: (leaf.dtype, leaf.shape) for key, leaf in arguments.leaves.items()},
                    flush=True,
                )
            try:
                evaluate(node, arguments.leaves.__getitem__)
                counts["values"] += 1
            except CkptError as error:
                counts["several" if "gives a list" in error.message else "refused"] += 1
    return counts


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), int(sys.argv[2]), "--say" in sys.argv)))
