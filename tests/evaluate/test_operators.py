"""The operators that a names file may hold: each computes what torch computes, and arguments that do
not fit never reach a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool import CkptError, Refused
from computed import ROW_MAJOR, by_torch, cast, computed, item
from expressions import same_bits
from names_files import Json, operator, ref
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
    "odd": torch.arange(9.0)[1:],
    "line": torch.linspace(0, 1, 8).reshape(1, 1, 8),
    "nothing": torch.ones(1, 1, 0),
    "image": torch.linspace(0, 1, 16).reshape(1, 1, 4, 4),
    "channels": torch.linspace(0, 1, 16).reshape(1, 4, 2, 2),
    "volume": torch.linspace(0, 1, 64).reshape(1, 1, 4, 4, 4),
}
X, Y, INDEX, WHOLE, MASK = (ref(name) for name in ("x", "y", "index", "whole", "mask"))
NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
# Arguments of operators that need more than one tensor, or two of one shape: by overload first,
# then by packet.
ARGUMENTS: dict[str, list[Any]] = {
    'transpose': [X, 0, 1],
    'permute': [X, [1, 0]],
    'movedim.int': [X, 0, 1],
    'movedim.intlist': [X, [0], [1]],
    'swapaxes': [X, 0, 1],
    'view': [X, [4, 3]],
    'view.dtype': [X, {'dtype': 'int32'}],
    '_unsafe_view': [X, [12]],
    'reshape': [X, [2, 6]],
    'squeeze.dim': [X, 0],
    'squeeze.dims': [X, [0]],
    'unsqueeze': [X, 0],
    'flatten': [X, 0, 1],
    'unflatten': [X, 1, [2, 2]],
    'view_as_real': [ref('complex')],
    'imag': [ref('complex')],
    '_conj': [ref('complex')],
    'view_as_complex': [ref('pairs')],
    'flip': [X, [0]],
    'roll': [X, [1], [0]],
    'rot90': [X, 1, [0, 1]],
    'pixel_shuffle': [ref('channels'), 2],
    'pixel_unshuffle': [ref('image'), 2],
    'channel_shuffle': [ref('channels'), 2],
    'complex': [X, Y],
    'polar': [X, Y],
    'trace': [ref('square')],
    'aminmax': [X],
    'vdot': [ref('vector'), ref('vector')],
    'addmv': [ref('vector'), X, ref('row')],
    'addr': [X, ref('vector'), ref('row')],
    'select': [X, 0, 1],
    'slice': [X, 1, 1, 3],
    'narrow': [X, 0, 1, 2],
    'unfold': [X, 1, 2, 1],
    'expand': [ref('row'), [3, 4]],
    'repeat': [X, [2, 1]],
    'tile': [X, [2]],
    'repeat_interleave': [X, 2, 0],
    'cat': [[X, Y], 1],
    'stack': [[X, Y]],
    'constant_pad_nd': [X, [1, 1], 2.0],
    'slice_scatter': [X, Y],
    'select_scatter': [X, ref('row'), 0, 1],
    'copy': [X, Y],
    'diagonal_scatter': [ref('square'), ref('vector')],
    'full': [[2, 2], 3.0],
    'zeros': [[2, 2]],
    'ones': [[2]],
    'scalar_tensor': [1.5],
    'eye': [3],
    'eye.m': [3, 2],
    'arange': [5],
    'arange.start': [1, 5],
    'arange.start_step': [1, 9, 2],
    'linspace': [0, 1, 5],
    'tril_indices': [3, 3],
    'triu_indices': [3, 3],
    'lerp.Scalar': [X, Y, 0.5],
    'lerp.Tensor': [X, Y, X],
    'masked_fill.Scalar': [X, MASK, 0.0],
    'masked_fill.Tensor': [X, MASK, operator('aten.scalar_tensor.default', 1.5)],
    'where.self': [MASK, X, Y],
    'where.ScalarSelf': [MASK, 1.0, X],
    'where.ScalarOther': [MASK, X, 1.0],
    'where.Scalar': [MASK, 1.0, 0.0],
    'addcmul': [X, Y, X],
    'addcdiv': [X, Y, X],
    'clamp': [X, 0.2, 0.5],
    'clamp.Tensor': [X, X, Y],
    'pow.Scalar': [2, X],
    'any.dim': [X, 0],
    'all.dim': [X, 0],
    'max.dim': [X, 0],
    'min.dim': [X, 0],
    'sum.dim_IntList': [X, [0]],
    'mean.dim': [X, [1]],
    'prod.dim_int': [X, 0],
    'norm.Scalar': [X, 2],
    'norm.ScalarOpt_dim': [X, 2, [0]],
    'logsumexp': [X, [0]],
    'cumsum': [X, 0],
    'cumprod': [X, 0],
    'count_nonzero': [X, [0]],
    '_softmax': [X, 1, False],
    '_log_softmax': [X, 1, False],
    'sort.stable': [X],
    'argsort.stable': [X],
    'acosh': [WHOLE],
    'topk': [X, 2],
    'mm': [ref('square'), X],
    'bmm': [ref('batch'), ref('batch')],
    'mv': [ref('square'), ref('vector')],
    'dot': [ref('vector'), ref('vector')],
    'addmm': [X, ref('square'), X],
    'matmul': [ref('square'), X],
    'baddbmm': [ref('batch'), ref('batch'), ref('batch')],
    'outer': [ref('vector'), ref('row')],
    'as_strided': [X, [2, 2], [4, 1], 1],
    'as_strided_scatter': [X, operator('aten.full.default', [2], 7.0), [2], [5]],
    'split': [X, 2],
    'unsafe_split': [X, 2],
    'unbind': [X],
    'chunk': [X, 2],
    'unsafe_chunk': [X, 2],
    'split_with_sizes': [X, [1, 2]],
    'unsafe_split_with_sizes': [X, [1, 2]],
    'index_select': [X, 0, INDEX],
    'gather': [X, 0, ref('places')],
    'scatter.src': [X, 0, ref('places'), Y],
    'scatter.value': [X, 0, ref('places'), 5],
    'scatter_add': [X, 0, ref('places'), Y],
    'index_copy': [X, 0, INDEX, Y],
    'index_add': [X, 0, INDEX, Y],
    'index_fill': [X, 0, INDEX, 2.0],
    'index': [X, [INDEX, None]],
    'index_put': [X, [INDEX], Y],
    'masked_select': [X, MASK],
    'round.decimals': [X],
    'diagonal': [X],
    'copysign.Scalar': [X, -1.0],
    'div.Tensor_mode': [X, Y],
    'div.Scalar_mode': [X, 2.0],
    **{f'{nearest}1d': [ref('line'), [16]] for nearest in NEAREST},
    **{f'{nearest}1d.vec': [ref('line'), [16], None] for nearest in NEAREST},
    **{f'{nearest}2d': [ref('image'), [8, 8]] for nearest in NEAREST},
    **{f'{nearest}2d.vec': [ref('image'), None, [2.0, 2.0]] for nearest in NEAREST},
    **{f'{nearest}3d': [ref('volume'), [2, 2, 2]] for nearest in NEAREST},
    **{f'{nearest}3d.vec': [ref('volume'), [2, 2, 2], None] for nearest in NEAREST},
    'upsample_linear1d': [ref('line'), [16], True],
    'upsample_linear1d.vec': [ref('line'), [16], True, None],
    'upsample_trilinear3d': [ref('volume'), [8, 8, 8], True],
    'upsample_trilinear3d.vec': [ref('volume'), [8, 8, 8], True, None],
    **{name: [ref('image'), [7, 7], False] for name in ['upsample_bilinear2d', 'upsample_bicubic2d', '_upsample_bilinear2d_aa', '_upsample_bicubic2d_aa']},
    **{f'{name}.vec': [ref('image'), [7, 7], False, None] for name in ['upsample_bilinear2d', 'upsample_bicubic2d', '_upsample_bilinear2d_aa', '_upsample_bicubic2d_aa']},
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Any]] = {
    "round.decimals": {"decimals": 1}, "div.Tensor_mode": {"rounding_mode": "floor"},
    "div.Scalar_mode": {"rounding_mode": "trunc"}, "sort.stable": {"stable": True},
    "argsort.stable": {"stable": True}, "_to_copy": {"dtype": {"dtype": "float32"}},
    "clone": {"memory_format": ROW_MAJOR},
}  # fmt: skip
BITS = ("bitwise_", "__")


def schema_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)._schema


def known_to_torch() -> list[str]:
    names = []
    for packet in dir(torch.ops.aten):
        overloads = getattr(getattr(torch.ops.aten, packet), "overloads", None)
        names += [f"aten.{packet}.{one}" for one in (overloads() if overloads else ())]
    return sorted(names)


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return all operators of torch that are not refused by name."""
    names = known_to_torch()
    folder = tmp_path_factory.mktemp("names")
    with pytest.raises(CkptError, match="uses operators that are not allowed") as refused:
        computed(LEAVES, {name: operator(name, X) for name in [*names, "os.system"]}, folder)
    assert refused.value.exit_status == 2
    for problem in refused.value.problems:
        assert problem.problem == f"{problem.key!r} is not an operator that a plan may hold"
    return [name for name in names if name not in {one.key for one in refused.value.problems}]


def example(name: str) -> Json:
    """Return the operator with valid arguments."""
    packet, overload = name.split(".")[1:]
    args = ARGUMENTS.get(f"{packet}.{overload}") or ARGUMENTS.get(packet)
    if args is None:
        first = WHOLE if packet.startswith(BITS) else MASK if packet.startswith("nonzero") else X
        needed = [arg for arg in schema_of(name).arguments if not arg.has_default_value()]
        number = 2 if packet.startswith(BITS) else 2.0
        values = {"Tensor": first, "number": number, "List[Tensor]": [first, Y]}
        args = [values[str(arg.real_type)] for arg in needed]
    keywords = KEYWORDS.get(f"{packet}.{overload}") or KEYWORDS.get(packet, {})
    return operator(name, *args, **keywords)


class Kernels(TorchDispatchMode):
    """Record the operators that run on tensors with data."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) and not arg.is_meta for arg in _flat(args)):
            self.ran.add(str(func))
        return func(*args, **(kwargs or {}))


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, (list, tuple)) else (arg,)


def refused_keys(sources: Mapping[str, Json], folder: Path) -> list[str]:
    """Return the keys that are refused, before a kernel of their operator has run."""
    with Kernels() as kernels, pytest.raises(Refused) as refused:
        computed(LEAVES, sources, folder)
    problems = refused.value.problems
    assert not (folder / "computed.pt").exists()
    for problem in problems:
        name = sources[problem.key]["op"]
        assert problem.problem.startswith(f"{name} does not fit")
        assert not [ran for ran in kernels.ran if f"{ran}.".startswith(f"{name}.")]
    return [problem.key for problem in problems]


def test_every_operator_that_is_allowed_computes_what_torch_does(
    allowed: list[str], tmp_path: Path
) -> None:
    sources: dict[str, Json] = {}
    for name in allowed:
        several = by_torch(example(name), LEAVES)
        if not isinstance(several, (list, tuple)):
            sources[name] = example(name)
            continue
        for number in range(len(several)):
            sources[f"{name} {number}"] = item(example(name), number)
    found = computed(LEAVES, sources, tmp_path)
    expected = {key: by_torch(source, LEAVES) for key, source in sources.items()}
    assert [key for key, value in expected.items() if not same_bits(found[key], value)] == []
    assert len(allowed) > 200


def test_arguments_of_another_type_are_refused(allowed: list[str], tmp_path: Path) -> None:
    sources: dict[str, Json] = {}
    for name in allowed:
        node = example(name)
        (first, *rest), keywords = node["args"] or [None], node["kwargs"]
        wrong = {
            "text": operator(name, "text", *rest, **keywords),
            "a number too large": operator(name, 2**70, *rest, **keywords),
            "a list of dtypes": operator(name, [{"dtype": "float32"}], *rest, **keywords),
            "nothing": operator(name, **keywords),
            "an unknown keyword": operator(name, *node["args"], **keywords, nonsense=1),
            "twice": operator(
                name, *node["args"], **{schema_of(name).arguments[0].name: first}, **keywords
            ),
            "too many": operator(name, *node["args"], *[1] * 20, **keywords),
        }
        sources |= {f"{name}: {what}": source for what, source in wrong.items()}
    assert refused_keys(sources, tmp_path) == list(sources)


FORBIDDEN = [
    "os.system", "aten.save.default", "aten.from_file.default", "aten.add_.Tensor", "aten.copy_.default",
    "aten.fill.Tensor_out", "aten.__class__", "aten.rand_like.default", "aten.nowhere.default", "aten", "",
    "aten._print.default", "aten.item.default", "torch.ops.aten.t.default", "builtins.eval", "aten.t.nowhere",
    # Functions of tensors that crash the process with some arguments:
    "aten._convert_indices_from_csr_to_coo.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.segment_reduce.default", "aten._segment_reduce_backward.default", "aten.set_.source_Storage",
    "aten.resize.default", "aten.empty_strided.default", "aten._sparse_coo_tensor_unsafe.default",
    "prims.as_strided.default", "aten.linalg_svd.default", "aten.embedding_dense_backward.default",
    "aten._cdist.default",
]  # fmt: skip


def test_other_operators_are_refused_by_name_together(tmp_path: Path) -> None:
    written = tmp_path / "written"
    sources = {f"k{at}": operator(name, X, str(written)) for at, name in enumerate(FORBIDDEN)}
    with pytest.raises(CkptError, match="uses operators that are not allowed") as refused:
        computed(LEAVES, {**sources, "valid": X}, tmp_path)
    assert [problem.problem for problem in refused.value.problems] == [
        f"{name!r} is not an operator that a plan may hold" for name in FORBIDDEN
    ]
    assert not written.exists()


SPLIT = operator("aten.split.Tensor", X, 2)
UNFIT: dict[str, Json] = {
    "incompatible shapes": operator("aten.mm.default", X, X),
    "an index out of range": item(SPLIT, 7),
    "too few arguments": operator("aten.mm.default", X),
    "getitem without an index": operator("getitem", SPLIT),
    "getitem of a tensor": item(X, 0),
    "getitem with text": item(SPLIT, "0"),
    "getitem with a bool": item(SPLIT, True),
    "getitem with a keyword": operator("getitem", SPLIT, 0, dim=0),
    "a number too large": operator("aten.add.Scalar", X, 2**80),
    "an argument of another type": operator("aten.cat.default", "x"),
}


def test_arguments_that_do_not_fit_are_refused_together(tmp_path: Path) -> None:
    assert refused_keys({**UNFIT, "valid": X}, tmp_path) == list(UNFIT)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (cast(X, "save"), "torch has no"),
        (cast(X, "nowhere"), "torch has no"),
        (operator("aten._to_copy.default", X, dtype={"complex": "two"}), "torch has no"),
        (SPLIT, "not a tensor"),
    ],
)
def test_an_unknown_dtype_or_a_list_of_tensors_is_an_error(
    source: Json, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CkptError) as error:
        computed(LEAVES, {"k": source}, tmp_path)
    assert message in f"{error.value.message} {[*map(str, error.value.problems)]}"


def filled(value: int, size: int = 1) -> Json:
    return operator("aten.full.default", [size], value, dtype={"dtype": "int64"})


OUTSIDE: dict[str, Json] = {
    "as_strided beyond its tensor": operator("aten.as_strided.default", X, [13], [1], 0),
    "as_strided before its tensor": operator("aten.as_strided.default", X, [2], [-1], 1),
    "as_strided from an offset past its tensor": operator(
        "aten.as_strided.default", X, [1], [1], 12
    ),
    "as_strided of a part, beyond it": operator(
        "aten.as_strided.default", operator("aten.select.int", X, 0, 0), [5], [1], 0
    ),
    "as_strided with sums that overflow": operator(
        "aten.as_strided.default", X, [2**62, 2], [4, 2**62], 0
    ),
    "as_strided_scatter beyond its tensor": operator(
        "aten.as_strided_scatter.default", X, X, [13], [1], 0
    ),
    "too many parts": operator("aten.unbind.int", operator("aten.zeros.default", [1 << 40, 0])),
    "parts of size zero": operator("aten.split.Tensor", X, 0),
    "the lowest integer divided": operator(
        "aten.div.Tensor_mode", filled(-(2**63)), filled(-1), rounding_mode="trunc"
    ),
    "the remainder of the lowest integer": operator("aten.fmod.Scalar", filled(-(2**63)), -1),
    "integers divided by zero": operator("aten.floor_divide.default", WHOLE, filled(0)),
    "an index past the end": operator("aten.index.Tensor", X, [filled(3)]),
    "an index before the start": operator("aten.index_put.default", X, [filled(-4)], Y),
    "a position past the end": operator("aten.index_select.default", X, 0, filled(3)),
    "a scattered position past the end": operator(
        "aten.scatter.value", X, 0, operator("aten.reshape.default", filled(3), [1, 1]), 1.0
    ),
    "an interpolation of no elements": operator(
        "aten.upsample_linear1d.default", ref("nothing"), [4], True
    ),
    "the lowest integer as a number": operator("aten.floor_divide.default", -(2**63), filled(-1)),
    "a dtype that is a number": operator("aten._to_copy.default", X, dtype=6),
    "a factor close to zero": operator(
        "aten.upsample_nearest2d.default", ref("image"), [8, 8], 1e-320, 1e-320
    ),
    "a factor that reaches outside": operator(
        "aten._upsample_bicubic2d_aa.default", ref("image"), [8, 8], False, 90.0
    ),
    "a dtype without arithmetic": operator("aten._to_copy.default", X, dtype={"dtype": "qint8"}),
    "a sparse layout": operator("aten._to_copy.default", X, layout={"layout": "sparse_coo"}),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_arguments_outside_of_the_tensor_are_refused(name: str, tmp_path: Path) -> None:
    op = OUTSIDE[name]["op"]
    with Kernels() as kernels, pytest.raises(Refused) as refused:
        computed(LEAVES, {"k": OUTSIDE[name]}, tmp_path)
    assert f"{op} does not fit" in f"{refused.value.message} {[*map(str, refused.value.problems)]}"
    assert not [ran for ran in kernels.ran if ran == op]
    assert not (tmp_path / "computed.pt").exists()


ALLOWED: dict[str, Json] = {
    "integers of a file are divided": operator("aten.floor_divide.default", WHOLE, WHOLE),
    "an integer as a float": operator("aten.nan_to_num.default", X, 0),
    "the dense layout": operator("aten._to_copy.default", X, layout={"layout": "strided"}),
    "another device": operator("aten._to_copy.default", X, device={"device": "cuda"}),
    "a constant": operator("aten.cat.default", [X, operator("aten.full.default", [1, 4], 2.0)]),
    "a shape that depends on values": operator("aten.nonzero.default", X),
    "a complex number": operator("aten.mul.Scalar", X, {"complex": "2j"}),
    "other dtype, same bits": operator("aten.view.dtype", X, {"dtype": "int16"}),
    "a conjugate": operator("aten._conj.default", ref("complex")),
    "a part of a conjugate": operator(
        "aten.imag.default", operator("aten._conj.default", ref("complex"))
    ),
    "a copy in another order": operator(
        "aten.reshape.default", operator("aten.t.default", X), [12]
    ),
    "a view inside": operator("aten.as_strided.default", X, [2], [2], 1),
    "elements of a part": operator(
        "aten.as_strided.default", operator("aten.slice.Tensor", X, 0, 1, 3), [2, 2], [3, 1], 2
    ),
}


def test_values_are_those_of_torch(tmp_path: Path) -> None:
    sources = {name: source for name, source in ALLOWED.items() if "of a part" not in name}
    found = computed(LEAVES, ALLOWED, tmp_path)
    for name, source in sources.items():
        assert same_bits(found[name], by_torch(source, LEAVES).resolve_conj().resolve_neg()), name


def test_bits_at_an_offset_that_a_wider_dtype_cannot_have_are_copied(tmp_path: Path) -> None:
    wide = operator("aten.view.dtype", ref("odd"), {"dtype": "int64"})
    found = computed(LEAVES, {"k": wide}, tmp_path)["k"]
    assert same_bits(found, torch.arange(1.0, 9.0).view(torch.int64))


@pytest.mark.parametrize("view", ["a part", "a transpose"])
def test_as_strided_counts_elements_of_its_tensor(view: str, tmp_path: Path) -> None:
    source = operator("aten.t.default", X)
    if view == "a part":
        source = operator("aten.slice.Tensor", X, 0, 1, 3)
    elements = by_torch(source, LEAVES).clone(memory_format=torch.contiguous_format)
    zeros = operator("aten.zeros.default", [2])
    found = computed(
        LEAVES,
        {
            "read": operator("aten.as_strided.default", source, [2, 2], [3, 1], 2),
            "changed": operator("aten.as_strided_scatter.default", source, zeros, [2], [3], 1),
        },
        tmp_path,
    )
    assert torch.equal(found["read"], elements.as_strided((2, 2), (3, 1), 2))
    expected = elements.clone()
    expected.as_strided((2,), (3,), 1).zero_()
    assert torch.equal(found["changed"], expected)


def test_a_view_cannot_read_other_bytes_of_the_file(tmp_path: Path) -> None:
    both = torch.tensor([1.0] * 4 + [9.0] * 4)
    tensors = {"own": both[:4], "secret": both[4:]}
    for args in (([8], [1], 0), ([4], [1], 4), ([2, 2], [4, 1], 0)):
        view = operator("aten.as_strided.default", ref("own"), *args)
        with pytest.raises(Refused) as refused:
            computed(tensors, {"k": view}, tmp_path)
        assert "reaches element" in str(refused.value.problems[0])


def test_more_parts_than_the_limit_are_refused(tmp_path: Path) -> None:
    rows = {"k": item(operator("aten.unbind.int", X), 2)}
    with limited(made_parts=3):
        assert torch.equal(computed(LEAVES, rows, tmp_path)["k"], LEAVES["x"][2])
    with limited(made_parts=2), pytest.raises(Refused) as refused:
        computed(LEAVES, rows, tmp_path)
    assert "aten.unbind.int does not fit" in str(refused.value.problems[0])


MILLION = operator("aten.ones.default", [1 << 20])
TOO_LARGE: dict[str, Json] = {
    "a constant": operator("aten.full.default", [1 << 20, 1 << 20], 1.0),
    "an expansion": operator("aten.expand.default", ref("row"), [1 << 40, 4]),
    "a repetition": operator("aten.repeat.default", X, [1 << 30, 1]),
    "an outer product": operator("aten.outer.default", MILLION, MILLION),
    "a tensor joined to itself": operator(
        "aten.cat.default", [operator("aten.expand.default", ref("row"), [1 << 25, 4])] * 3
    ),
    "padding": operator("aten.constant_pad_nd.default", X, [1 << 40, 0]),
    "an interpolation": operator("aten.upsample_nearest1d.default", ref("line"), [1 << 40]),
}


def test_results_beyond_the_limit_are_refused_together(tmp_path: Path) -> None:
    with Kernels() as kernels, pytest.raises(Refused) as refused:
        computed(LEAVES, TOO_LARGE, tmp_path)
    assert [problem.key for problem in refused.value.problems] == list(TOO_LARGE)
    for problem in refused.value.problems:
        assert "made_bytes" in problem.problem, problem
        assert "max-memory" in problem.problem, problem
    assert not kernels.ran & {source["op"] for source in TOO_LARGE.values()}


def test_the_limit_counts_bytes_in_memory_at_once(tmp_path: Path) -> None:
    chain = X
    for _ in range(100):
        chain = operator("aten.neg.default", chain)
    negative = operator("aten.neg.default", X)
    wide = {"k": operator("aten.stack.default", [negative] * 5)}
    with limited(made_bytes=4 * 48, made_times=4):
        assert torch.equal(computed(LEAVES, {"k": chain}, tmp_path)["k"], LEAVES["x"])
    for name, nbytes in (("made_bytes", 4 * 48), ("made_times", 1)):
        with limited(made_bytes=nbytes, made_times=4), pytest.raises(Refused) as refused:
            computed(LEAVES, wide, tmp_path)
        assert name in str(refused.value.problems[0])
