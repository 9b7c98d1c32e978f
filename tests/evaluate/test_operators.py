"""The list of allowed operators: each matches torch, and arguments that fail its check never reach
a kernel.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool import Checkpoint, CkptError, Plan, Refused
from ckpttool.core.checkpoint import Section, Span, Storage, TensorEntry
from ckpttool.core.expression import Argument, Op, Ref, Special
from ckpttool.core.plan import Output
from ckpttool.evaluate.apply import apply
from ckpttool.evaluate.ops import GETITEM, OPS
from ckpttool.evaluate.torch_eval import entry_of, evaluate, load
from surroundings import limited

torch.set_num_threads(1)
LEAVES = {
    "x": torch.linspace(0.1, 0.9, 12).reshape(3, 4),
    "y": torch.linspace(0.2, 0.8, 12).reshape(3, 4),
    "square": torch.linspace(-1, 1, 9).reshape(3, 3),
    "vector": torch.tensor([0.5, 1.0, 2.0]),
    "whole": torch.arange(1, 13).reshape(3, 4),
    "mask": torch.arange(12).reshape(3, 4) % 3 == 0,
    "index": torch.tensor([2, 0, 1]),
    "places": torch.tensor([[0, 1, 2, 0]]),
    "batch": torch.linspace(0, 1, 18).reshape(2, 3, 3),
    "pairs": torch.linspace(0, 1, 12).reshape(3, 2, 2),
    "complex": torch.complex(torch.ones(3, 4), torch.zeros(3, 4)),
    "row": torch.ones(4),
    "line": torch.linspace(0, 1, 8).reshape(1, 1, 8),
    "nothing": torch.ones(1, 1, 0),
    "image": torch.linspace(0, 1, 16).reshape(1, 1, 4, 4),
    "channels": torch.linspace(0, 1, 16).reshape(1, 4, 2, 2),
    "volume": torch.linspace(0, 1, 64).reshape(1, 1, 4, 4, 4),
}
X, Y, INDEX, WHOLE, MASK = (Ref(name) for name in ("x", "y", "index", "whole", "mask"))
FLOAT = Special("dtype", "float32")
NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
# Arguments of operators that need more than one tensor, or two of one shape: by overload first,
# then by packet.
ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "transpose": (X, 0, 1), "permute": (X, (1, 0)), "movedim.int": (X, 0, 1), "movedim.intlist": (X, (0,), (1,)),
    "swapaxes": (X, 0, 1), "view": (X, (4, 3)), "view.dtype": (X, Special("dtype", "int32")),
    "_unsafe_view": (X, (12,)), "reshape": (X, (2, 6)), "squeeze.dim": (X, 0), "squeeze.dims": (X, (0,)),
    "unsqueeze": (X, 0), "flatten": (X, 0, 1), "unflatten": (X, 1, (2, 2)), "view_as_real": (Ref("complex"),),
    "imag": (Ref("complex"),),
    "_conj": (Ref("complex"),), "view_as_complex": (Ref("pairs"),), "flip": (X, (0,)), "roll": (X, (1,), (0,)),
    "rot90": (X, 1, (0, 1)), "pixel_shuffle": (Ref("channels"), 2), "pixel_unshuffle": (Ref("image"), 2),
    "channel_shuffle": (Ref("channels"), 2), "complex": (X, Y), "polar": (X, Y), "trace": (Ref("square"),),
    "aminmax": (X,), "vdot": (Ref("vector"), Ref("vector")), "addmv": (Ref("vector"), X, Ref("row")),
    "addr": (X, Ref("vector"), Ref("row")),
    "select": (X, 0, 1), "slice": (X, 1, 1, 3), "narrow": (X, 0, 1, 2),
    "unfold": (X, 1, 2, 1), "expand": (Ref("row"), (3, 4)), "repeat": (X, (2, 1)), "tile": (X, (2,)),
    "repeat_interleave": (X, 2, 0), "cat": ((X, Y), 1), "stack": ((X, Y),), "constant_pad_nd": (X, (1, 1), 2.0),
    "slice_scatter": (X, Y), "select_scatter": (X, Ref("row"), 0, 1), "copy": (X, Y),
    "diagonal_scatter": (Ref("square"), Ref("vector")), "full": ((2, 2), 3.0), "zeros": ((2, 2),), "ones": ((2,),),
    "scalar_tensor": (1.5,), "eye": (3,), "eye.m": (3, 2), "arange": (5,), "arange.start": (1, 5),
    "arange.start_step": (1, 9, 2), "linspace": (0, 1, 5), "tril_indices": (3, 3), "triu_indices": (3, 3),
    "lerp.Scalar": (X, Y, 0.5), "lerp.Tensor": (X, Y, X), "masked_fill.Scalar": (X, MASK, 0.0),
    "masked_fill.Tensor": (X, MASK, Op("aten.scalar_tensor.default", (1.5,))), "where.self": (MASK, X, Y),
    "where.ScalarSelf": (MASK, 1.0, X), "where.ScalarOther": (MASK, X, 1.0), "where.Scalar": (MASK, 1.0, 0.0),
    "addcmul": (X, Y, X), "addcdiv": (X, Y, X), "clamp": (X, 0.2, 0.5), "clamp.Tensor": (X, X, Y), "pow.Scalar": (2, X),
    "any.dim": (X, 0), "all.dim": (X, 0), "max.dim": (X, 0), "min.dim": (X, 0), "sum.dim_IntList": (X, (0,)),
    "mean.dim": (X, (1,)), "prod.dim_int": (X, 0), "norm.Scalar": (X, 2), "norm.ScalarOpt_dim": (X, 2, (0,)),
    "logsumexp": (X, (0,)), "cumsum": (X, 0), "cumprod": (X, 0), "count_nonzero": (X, (0,)), "_softmax": (X, 1, False),
    "_log_softmax": (X, 1, False), "sort.stable": (X,), "argsort.stable": (X,), "acosh": (WHOLE,), "topk": (X, 2),
    "mm": (Ref("square"), X), "bmm": (Ref("batch"), Ref("batch")), "mv": (Ref("square"), Ref("vector")),
    "dot": (Ref("vector"), Ref("vector")), "addmm": (X, Ref("square"), X), "matmul": (Ref("square"), X),
    "baddbmm": (Ref("batch"), Ref("batch"), Ref("batch")), "outer": (Ref("vector"), Ref("row")),
    "as_strided": (X, (2, 2), (4, 1), 1), "as_strided_scatter": (X, Op("aten.full.default", ((2,), 7.0)), (2,), (5,)),
    "split": (X, 2), "unsafe_split": (X, 2), "unbind": (X,), "chunk": (X, 2), "unsafe_chunk": (X, 2),
    "split_with_sizes": (X, (1, 2)), "unsafe_split_with_sizes": (X, (1, 2)), "index_select": (X, 0, INDEX),
    "gather": (X, 0, Ref("places")), "scatter.src": (X, 0, Ref("places"), Y), "scatter.value": (X, 0, Ref("places"), 5),
    "scatter_add": (X, 0, Ref("places"), Y), "index_copy": (X, 0, INDEX, Y), "index_add": (X, 0, INDEX, Y),
    "index_fill": (X, 0, INDEX, 2.0), "index": (X, (INDEX, None)), "index_put": (X, (INDEX,), Y),
    "masked_select": (X, MASK), "round.decimals": (X,), "diagonal": (X,), "copysign.Scalar": (X, -1.0),
    "div.Tensor_mode": (X, Y), "div.Scalar_mode": (X, 2.0),
    **{f"{nearest}1d": (Ref("line"), (16,)) for nearest in NEAREST},
    **{f"{nearest}1d.vec": (Ref("line"), (16,), None) for nearest in NEAREST},
    **{f"{nearest}2d": (Ref("image"), (8, 8)) for nearest in NEAREST},
    **{f"{nearest}2d.vec": (Ref("image"), None, (2.0, 2.0)) for nearest in NEAREST},
    **{f"{nearest}3d": (Ref("volume"), (2, 2, 2)) for nearest in NEAREST},
    **{f"{nearest}3d.vec": (Ref("volume"), (2, 2, 2), None) for nearest in NEAREST},
    "upsample_linear1d": (Ref("line"), (16,), True), "upsample_linear1d.vec": (Ref("line"), (16,), True, None),
    "upsample_trilinear3d": (Ref("volume"), (8, 8, 8), True),
    "upsample_trilinear3d.vec": (Ref("volume"), (8, 8, 8), True, None),
    **{name: (Ref("image"), (7, 7), False) for name in (
        "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")},
    **{f"{name}.vec": (Ref("image"), (7, 7), False, None) for name in (
        "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")},
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Argument]] = {
    "round.decimals": {"decimals": 1}, "div.Tensor_mode": {"rounding_mode": "floor"},
    "div.Scalar_mode": {"rounding_mode": "trunc"}, "sort.stable": {"stable": True}, "argsort.stable": {"stable": True},
    "_to_copy": {"dtype": FLOAT}, "clone": {"memory_format": Special("memory_format", "contiguous_format")},
}  # fmt: skip
BITS = ("bitwise_", "__")
ATEN = sorted(name for name in OPS if name != GETITEM)


def example(name: str) -> Op:
    """Return the operator with valid arguments."""
    packet, overload = name.split(".")[1:]
    args = ARGUMENTS.get(f"{packet}.{overload}") or ARGUMENTS.get(packet)
    if args is None:
        first = WHOLE if packet.startswith(BITS) else MASK if packet.startswith("nonzero") else X
        schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
        kinds = [str(arg.real_type) for arg in schema.arguments if not arg.has_default_value()]
        known = {
            "Tensor": first,
            "number": 2 if packet.startswith(BITS) else 2.0,
            "List[Tensor]": (first, Y),
        }
        args = tuple(known[kind] for kind in kinds)
    keywords = KEYWORDS.get(f"{packet}.{overload}") or KEYWORDS.get(packet, {})
    return Op(name, args, tuple(keywords.items()))


def plain(argument: Argument) -> Any:
    """Return the argument to pass to torch."""
    if isinstance(argument, Ref):
        return LEAVES[argument.key]
    if isinstance(argument, Op):
        return torch_value(argument)
    if isinstance(argument, Special):
        return getattr(torch, argument.name)
    return [plain(item) for item in argument] if isinstance(argument, tuple) else argument


def torch_value(node: Op) -> Any:
    packet, overload = node.op.split(".")[1:]
    run = getattr(getattr(torch.ops.aten, packet), overload)
    return run(*map(plain, node.args), **{name: plain(value) for name, value in node.kwargs})


class Kernels(TorchDispatchMode):
    """Record the operators that run on tensors with data."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) and not arg.is_meta for arg in _flat(args)):
            self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, (list, tuple)) else (arg,)


def kernels_run_by(node: Op) -> list[str]:
    """Return the kernels that ran before the expression was refused; the error must name the
    operator.
    """
    with Kernels() as kernels, pytest.raises(Refused, match="does not fit") as refused:
        evaluate(node, LEAVES.__getitem__)
    assert node.op in refused.value.message
    return [name for name in kernels.ran if name.startswith(node.op.rsplit(".", 1)[0])]


@pytest.mark.parametrize("name", ATEN)
def test_each_operator_matches_torch_and_refuses_arguments_of_another_type(name: str) -> None:
    node = example(name)
    expected = torch_value(node)
    several = isinstance(expected, (list, tuple))
    for number, tensor in enumerate(expected if several else [expected]):
        found = evaluate(Op(GETITEM, (node, number)) if several else node, LEAVES.__getitem__)
        assert torch.equal(found.resolve_conj(), tensor.resolve_conj())
        assert found.dtype == tensor.dtype
    for bad in ("text", 2**70, (Special("dtype", "float32"),)):
        assert not kernels_run_by(Op(name, (bad, *node.args[1:]), node.kwargs))
    assert not kernels_run_by(Op(name, (), node.kwargs))
    assert not kernels_run_by(Op(name, node.args, (*node.kwargs, ("nonsense", 1))))
    assert not node.args or not kernels_run_by(
        Op(name, node.args, ((first_name(name), node.args[0]), *node.kwargs))
    )
    assert not kernels_run_by(Op(name, (*node.args, *([1] * 20)), node.kwargs))


def first_name(name: str) -> str:
    packet, overload = name.split(".")[1:]
    return str(getattr(getattr(torch.ops.aten, packet), overload)._schema.arguments[0].name)


def index_of(value: int) -> Op:
    return Op("aten.full.default", ((1,), value), (("dtype", Special("dtype", "int64")),))


MIN_INT64 = Op("aten.full.default", ((1,), -(2**63)), (("dtype", Special("dtype", "int64")),))
OUTSIDE: dict[str, Op] = {
    "as_strided beyond its tensor": Op("aten.as_strided.default", (X, (13,), (1,), 0)),
    "as_strided before its tensor": Op("aten.as_strided.default", (X, (2,), (-1,), 1)),
    "as_strided from an offset past its tensor": Op("aten.as_strided.default", (X, (1,), (1,), 12)),
    "as_strided of a part, beyond it": Op(
        "aten.as_strided.default", (Op("aten.select.int", (X, 0, 0)), (5,), (1,), 0)
    ),
    "as_strided with sums that overflow": Op(
        "aten.as_strided.default", (X, (2**62, 2), (4, 2**62), 0)
    ),
    "as_strided_scatter beyond its tensor": Op(
        "aten.as_strided_scatter.default", (X, X, (13,), (1,), 0)
    ),
    "too many parts": Op("aten.unbind.int", (Op("aten.zeros.default", ((1 << 40, 0),)),)),
    "parts of size zero": Op("aten.split.Tensor", (X, 0)),
    "the lowest integer divided": Op(
        "aten.div.Tensor_mode", (MIN_INT64, index_of(-1)), (("rounding_mode", "trunc"),)
    ),
    "the remainder of the lowest integer": Op("aten.fmod.Scalar", (MIN_INT64, -1)),
    "integers divided by zero": Op("aten.floor_divide.default", (WHOLE, index_of(0))),
    "an index past the end": Op("aten.index.Tensor", (X, (index_of(3),))),
    "an index before the start": Op("aten.index_put.default", (X, (index_of(-4),), Y)),
    "a position past the end": Op("aten.index_select.default", (X, 0, index_of(3))),
    "a scattered position past the end": Op(
        "aten.scatter.value", (X, 0, Op("aten.reshape.default", (index_of(3), (1, 1))), 1.0)
    ),
    "an interpolation of no elements": Op(
        "aten.upsample_linear1d.default", (Ref("nothing"), (4,), True)
    ),
    "the lowest integer as a number": Op("aten.floor_divide.default", (-(2**63), index_of(-1))),
    "a dtype that is a number": Op("aten._to_copy.default", (X,), (("dtype", 6),)),
    "a factor close to zero": Op(
        "aten.upsample_nearest2d.default", (Ref("image"), (8, 8), 1e-320, 1e-320)
    ),
    "a factor that reaches outside": Op(
        "aten._upsample_bicubic2d_aa.default", (Ref("image"), (8, 8), False, 90.0)
    ),
    "a dtype without arithmetic": Op(
        "aten._to_copy.default", (X,), (("dtype", Special("dtype", "qint8")),)
    ),
    "a sparse layout": Op(
        "aten._to_copy.default", (X,), (("layout", Special("layout", "sparse_coo")),)
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_arguments_outside_of_the_tensor_are_refused(name: str) -> None:
    assert not kernels_run_by(OUTSIDE[name])


def test_integers_of_a_file_are_divided(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(torch.tensor([7, -8, 9, 2]).numpy().tobytes())
    storage = Storage(Span(str(tmp_path / "w"), 0, 32))
    entries = {
        key: TensorEntry(key, "int64", (2,), (1,), at, storage) for key, at in (("w", 0), ("by", 2))
    }
    result = entry_of("new", Op("aten.floor_divide.default", (Ref("w"), Ref("by"))), entries)
    assert load(result).tolist() == [0, -4]


def test_more_parts_than_the_limit_are_refused() -> None:
    rows = Op("aten.unbind.int", (X,))
    with limited(made_parts=3):
        assert torch.equal(evaluate(Op(GETITEM, (rows, 2)), LEAVES.__getitem__), LEAVES["x"][2])
    with limited(made_parts=2):
        assert not kernels_run_by(rows)


def test_an_operator_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "aten.nowhere.default", OPS["aten.neg.default"])
    with pytest.raises(CkptError, match="this torch has no operator"):
        evaluate(Op("aten.nowhere.default", (X,)), LEAVES.__getitem__)


def test_integers_as_floats_and_the_dense_layout_are_allowed() -> None:
    found = evaluate(Op("aten.nan_to_num.default", (X, 0)), LEAVES.__getitem__)
    assert torch.equal(found, LEAVES["x"])
    dense = Op("aten._to_copy.default", (X,), (("layout", Special("layout", "strided")),))
    assert torch.equal(evaluate(dense, LEAVES.__getitem__), LEAVES["x"])


TOO_LARGE: dict[str, Op] = {
    "a constant": Op("aten.full.default", ((1 << 20, 1 << 20), 1.0)),
    "an expansion": Op("aten.expand.default", (Ref("row"), (1 << 40, 4))),
    "a repetition": Op("aten.repeat.default", (X, (1 << 30, 1))),
    "an outer product": Op(
        "aten.outer.default",
        (Op("aten.ones.default", ((1 << 20,),)), Op("aten.ones.default", ((1 << 20,),))),
    ),
    "a tensor joined to itself": Op(
        "aten.cat.default", ((Op("aten.expand.default", (Ref("row"), (1 << 25, 4))),) * 3,)
    ),
    "padding": Op("aten.constant_pad_nd.default", (X, (1 << 40, 0))),
    "an interpolation": Op("aten.upsample_nearest1d.default", (Ref("line"), (1 << 40,))),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_results_beyond_the_limit_are_refused(name: str) -> None:
    with Kernels() as kernels, pytest.raises(Refused, match="made_bytes") as refused:
        evaluate(TOO_LARGE[name], LEAVES.__getitem__)
    assert not [ran for ran in kernels.ran if ran == TOO_LARGE[name].op]
    assert "--max-memory" in refused.value.message


def test_the_limit_counts_bytes_in_memory_at_once() -> None:
    chain: Argument = X
    for _ in range(100):
        chain = Op("aten.neg.default", (chain,))
    with limited(made_bytes=4 * 48, made_times=4):
        assert torch.equal(evaluate(chain, LEAVES.__getitem__), LEAVES["x"])  # type: ignore[arg-type]
        wide = Op("aten.stack.default", (tuple(Op("aten.neg.default", (X,)) for _ in range(5)),))
        with pytest.raises(Refused, match="made_bytes"):
            evaluate(wide, LEAVES.__getitem__)
    with limited(made_bytes=1, made_times=4), pytest.raises(Refused, match="made_times"):
        evaluate(wide, LEAVES.__getitem__)


def stored(folder: Path, count: int = 4) -> Checkpoint:
    """Return two tensors of a file in a row: views of the first must not reach the second."""
    path = folder / "two.bin"
    path.write_bytes(torch.tensor([1.0] * count + [9.0] * count).numpy().tobytes())
    entries = tuple(
        TensorEntry(
            key, "float32", (count,), (1,), at * count, Storage(Span(str(path), 0, 8 * count))
        )
        for at, key in enumerate(("own", "secret"))
    )
    return Checkpoint(str(path), "torch_zip", 8 * count, (Section("", "state_dict", entries),))


def test_all_forbidden_operators_of_a_plan_are_reported(tmp_path: Path) -> None:
    outputs = tuple(
        Output("", key, Op(f"aten.{key}.default", (Ref("own"), Ref("secret"))))
        for key in ("save", "_cdist")
    )
    with pytest.raises(CkptError, match="not an operator that a plan may hold") as refused:
        apply(Plan(outputs), stored(tmp_path))
    assert [str(p) for p in refused.value.problems] == [
        "'aten.save.default' is not an operator that a plan may hold @ save",
        "'aten._cdist.default' is not an operator that a plan may hold @ _cdist",
    ]


def test_all_values_that_cannot_be_computed_are_reported(tmp_path: Path) -> None:
    own, secret = Ref("own"), Ref("secret")
    sources: dict[str, Op | Ref] = {
        "a": Op("aten.mm.default", (own, secret)),
        "b": own,
        "c": Op("aten.narrow.default", (own, 0, 3, 2)),
    }
    with pytest.raises(Refused, match="some values cannot be computed") as refused:
        apply(
            Plan(tuple(Output("", key, source) for key, source in sources.items())),
            stored(tmp_path),
        )
    assert [problem.key for problem in refused.value.problems] == ["a", "c"]


def test_a_view_cannot_read_other_bytes_of_the_file(tmp_path: Path) -> None:
    entries = stored(tmp_path).section("").by_key()
    for args in (((8,), (1,), 0), ((4,), (1,), 4), ((2, 2), (4, 1), 0)):
        with pytest.raises(Refused, match="reaches element"):
            entry_of("new", Op("aten.as_strided.default", (Ref("own"), *args)), entries)
    inside = entry_of("new", Op("aten.as_strided.default", (Ref("own"), (2,), (2,), 1)), entries)
    assert (inside.shape, inside.stride, inside.offset) == ((2,), (2,), 1)


@pytest.mark.parametrize("view", ["a part", "a transpose"])
def test_as_strided_counts_elements_of_its_tensor(view: str) -> None:
    source = (
        Op("aten.slice.Tensor", (X, 0, 1, 3)) if view == "a part" else Op("aten.t.default", (X,))
    )
    elements = torch_value(source).clone(memory_format=torch.contiguous_format)
    found = evaluate(Op("aten.as_strided.default", (source, (2, 2), (3, 1), 2)), LEAVES.__getitem__)
    assert torch.equal(found, elements.as_strided((2, 2), (3, 1), 2))
    changed = Op(
        "aten.as_strided_scatter.default",
        (source, Op("aten.zeros.default", ((2,),)), (2,), (3,), 1),
    )
    expected = elements.clone()
    expected.as_strided((2,), (3,), 1).zero_()
    assert torch.equal(evaluate(changed, LEAVES.__getitem__), expected)


def test_the_table_of_operators_does_not_import_torch() -> None:
    code = "import ckpttool.evaluate.ops, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
