"""The recorder: runs while a model saves or loads, and knows how each tensor was computed from
named ones.

Values are followed by memory (storage, offset, shape, stride, dtype), not by Python object:
``nn.Parameter(x)`` and ``.data`` bypass the dispatcher, but share the storage.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool.core.expression import OPAQUE, Argument, Expression, Op, Special, refs
from ckpttool.core.strides import Shape
from ckpttool.tracing.build_model import device_for_real
from ckpttool.tracing.memory import (
    StorageValues,
    StorageView,
    Token,
    address,
    inside,
    meet,
    opaque,
    place_of,
    token,
)
from ckpttool.tracing.user_code import prints_once, says_meta

# Operators that return their first argument's value, perhaps in other memory.
_SAME = frozenset({
    "detach", "alias", "clone", "contiguous", "lift_fresh", "lift", "lift_fresh_copy",
    "_pin_memory", "resolve_conj", "resolve_neg", "detach_copy", "alias_copy", "_lazy_clone",
})  # fmt: skip
# A view succeeds or fails by strides; `reshape` has the same value for any.
_RESHAPES = frozenset(
    {
        "view.default",
        "_unsafe_view.default",
        "_reshape_alias.default",
        "reshape.default",
        "view_copy.default",
    }
)
_FILLS: Mapping[str, int] = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "zero": 0,
}  # fmt: skip
_FILL_ARGUMENT: Mapping[str, int] = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1}
# Operators that read a shape only, and whose values nothing can tell.
_UNKNOWN = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
    "rand_like", "randn_like", "randint_like",
})  # fmt: skip
# these do not change values
_PLACEMENT = frozenset({"device", "pin_memory", "layout", "non_blocking", "generator"})
# Questions about a tensor that are answered without reading its values.
_HARMLESS = frozenset({
    "is_pinned", "is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
    "size", "stride", "storage_offset", "is_contiguous", "is_strides_like_format", "dim", "numel",
})  # fmt: skip
# Few operators support other dtypes, on any device, and meta accepts more than real tensors do.
_COMMON = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip
# elements; a constant made outside torch is written into the expression up to here
_LITERAL_LIMIT = 4096
_DEEPEST = 100  # operators inside each other; everything that walks expressions recurses
_LARGEST = 20_000  # nodes; a node that occurs twice counts twice


_CLASSES = (torch.Tensor, torch.nn.Parameter)


class ValuesAsked(Exception):
    """Code asked for the values of a tensor that has none (meta)."""

    def __str__(self) -> str:
        return "it reads the values of tensors, which a model on the meta device does not have"


class ConvertingCopy(NamedTuple):
    """A copy of `value` into the tensor of the token that changed the dtype."""

    token: Token
    source: torch.dtype
    target: torch.dtype
    value: Expression


class Recorder(TorchDispatchMode):
    """Record every operator that runs; `value(tensor)` then says how the tensor was computed.

    `author` is set from outside to whose code is running. `reads` lists ``(author, names)`` for
    each time that code looked at values; `blind` says that it asked for values that do not exist
    (and may have caught the error). `doubtful` says that an operator ran on meta that real
    tensors may refuse, `outside` that a tensor was made outside of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[int, StorageValues] = {}
        # value and author of tensors without a storage; holding the tensor keeps its id unique
        self.objects: dict[Token, tuple[Expression, Any, torch.Tensor]] = {}
        self.author: Any = None
        self.clock = 0
        self.writes: list[tuple[int, Token]] = []
        self.reads: list[tuple[Any, tuple[str, ...]]] = []
        self.blind = False
        self.doubtful = False
        self.outside = False
        # of expressions: holding the node keeps its id unique
        self.sizes: dict[int, tuple[Op, int, int]] = {}
        self.conversions: list[ConvertingCopy] = []

    def name(self, tensor: torch.Tensor, expression: Expression) -> None:
        """Name `tensor` before recording starts; the first name of a tensor stays."""
        mark = token(tensor)
        if not isinstance(mark, StorageView):
            self.objects.setdefault(mark, (expression, None, tensor))
            for part in inside(tensor):
                self.name(part, opaque(expression))
            return
        self._memory(tensor).roots.setdefault(mark.geometry, expression)

    def value(self, tensor: torch.Tensor) -> Expression:
        """Return how the tensor was computed. From now on, one that was made outside of torch is
        known as a constant.
        """
        mark = token(tensor)
        if not isinstance(mark, StorageView):
            noted = self.objects.get(mark)
            return noted[0] if noted else opaque(*map(self.value, inside(tensor)))
        if mark.address not in self.memories:
            self.outside = True
            self._memory(tensor).roots[mark.geometry] = _literal(tensor)
        return self.memories[mark.address].read(mark.geometry)

    def author_of(self, mark: Token) -> Any:
        if isinstance(mark, StorageView):
            memory = self.memories.get(mark.address)
            return memory.author if memory else None
        noted = self.objects.get(mark)
        return noted[1] if noted else None

    def written_since(self, clock: int) -> set[Any]:
        """Return the storages (or objects) that were written in place after `clock`."""
        return {place_of(mark) for when, mark in self.writes if when > clock}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for the first operator, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Compiled code of a hook must not be compiled together with this.
        record = _uncompiled if "torch._dynamo" in sys.modules else Recorder._record
        return record(self, func, args, kwargs or {})

    def _record(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if _is_composite(func):  # in inference mode such an operator arrives undivided
            with self:
                return func.decompose(*args, **kwargs)
        written = _written(func)
        if written and torch.Tag.inplace_view in func.tags:
            return self._inplace_view(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and _is_plain_copy(*args):
            value = self.value(args[1])
            func(*args)
            self.write(args[0], value)
            return args[0]
        if written:
            return self._inplace(func, args, kwargs, written)
        out = self._run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            mark = token(out)
            if not self._is_known(mark):
                self._note(out, mark, _call_expression(func, args, kwargs, out, self.value))
        elif isinstance(out, (list, tuple)):
            self._note_several(func, args, kwargs, out)
        elif func.__name__.partition(".")[0] not in _HARMLESS:
            self.note_read(_tensors(args, kwargs))
        return out

    def _inplace_view(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Run ``t_``, ``squeeze_``, ...: the tensor sees the same memory differently; ``set_``
        gives it other memory.
        """
        tensor = args[0]
        before = self.value(tensor)
        out = func(*args, **kwargs)
        mark = token(tensor)
        if not func.__name__.startswith(("set_", "resize_")) and not self._is_known(mark):
            view = _functional(func)
            expression = _call_expression(view, args, kwargs, tensor, lambda tensor: before)
            self._note(tensor, mark, expression)
        return out

    def _note_several(
        self, func: Any, args: Sequence[Any], kwargs: Any, out: Sequence[Any]
    ) -> None:
        marks = {}
        for index, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                marks[index] = token(item)
        if all(map(self._is_known, marks.values())):
            return
        whole = _call_expression(func, args, kwargs, out, self.value)
        for index, mark in marks.items():
            self._note(out[index], mark, Op("getitem", (whole, index)))

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.doubtful = self.doubtful or _is_doubtful(func, _tensors(args, kwargs))
        # a view needs no values, and later writes through it must reach the same memory
        runnable = args if func.is_view else self._runnable(args, kwargs)
        if "device" in kwargs and any(t.device.type == "meta" for t in _tensors(args, {})):
            # a tensor without values cannot leave
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return func(*runnable, **kwargs)
        except Exception as error:
            self.blind = self.blind or says_meta(str(error))
            raise

    def _runnable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the arguments, all on meta if one of them has no values: torch refuses to mix
        devices.
        """
        return _on_meta(args) if any(map(self._is_unreal, _tensors(args, kwargs))) else args

    def _is_unreal(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return True
        memory = self.memories.get(place_of(token(tensor)))
        return memory is not None and memory.stale

    def note_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that code looked at the values of `tensors`. Raises `ValuesAsked` if they have
        none.
        """
        names: dict[str, None] = {}
        for tensor in tensors:
            names.update(dict.fromkeys(refs(self.value(tensor))))
            if self._is_unreal(tensor):
                self.blind = True
                raise ValuesAsked
        if names:
            self.reads.append((self.author, tuple(names)))

    def _is_known(self, mark: Token) -> bool:
        if not isinstance(mark, StorageView):
            return mark in self.objects
        memory = self.memories.get(mark.address)
        return memory is not None and memory.value_of(mark.geometry) is not None

    def _note(self, tensor: torch.Tensor, mark: Token, expression: Expression) -> None:
        expression = self._bounded(expression)
        if not isinstance(mark, StorageView):
            self.objects[mark] = expression, self.author, tensor
        elif mark.address not in self.memories:
            self._memory(tensor).roots[mark.geometry] = expression
        elif isinstance(expression, Op) and expression.op == OPAQUE:
            self.memories[mark.address].read(mark.geometry)  # derive it from the memory if possible
        else:
            self.memories[mark.address].views[mark.geometry] = expression

    def _memory(self, tensor: torch.Tensor) -> StorageValues:
        place = address(tensor)
        if place not in self.memories:
            self.memories[place] = StorageValues(tensor.untyped_storage(), author=self.author)
        return self.memories[place]

    def _inplace(
        self, func: Any, args: Sequence[Any], kwargs: Any, written: tuple[str, ...]
    ) -> Any:
        arguments = dict(zip((arg.name for arg in func._schema.arguments), args)) | dict(kwargs)
        targets = _tensors([arguments.get(name) for name in written], {})
        if any(map(_is_expanded, targets)):
            # Most operators refuse this for tensors with values, and not on meta.
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers"
                " to a single memory location. Please clone() the tensor before performing the"
                " operation."
            )
        values = self._results(func, args, kwargs, targets)
        out = self._run(func, args, kwargs)
        real = set(map(id, _tensors(self._runnable(args, kwargs), kwargs)))
        if any(id(target) not in real for target in targets):
            # Real memory cannot take a value that does not exist: from now on its bytes mean
            # nothing.
            for target in targets:
                if isinstance(token(target), StorageView):
                    self._memory(target).stale = True
            returns = len(func._schema.returns)
            out = None
            if returns:
                out = targets[0] if returns == 1 else tuple(targets)
        for target, value in zip(targets, values):
            self.write(target, value)
        return out

    def write(self, target: torch.Tensor, value: Expression) -> None:
        mark = token(target)
        self.clock += 1
        self.writes.append((self.clock, mark))
        if not isinstance(mark, StorageView):
            self.objects[mark] = value, self.author, target
            return
        memory = self._memory(target)
        memory.write(mark.geometry, self._bounded(value))
        memory.roots = {root: self._bounded(content) for root, content in memory.roots.items()}
        memory.author = self.author

    def _results(
        self, func: Any, args: Any, kwargs: Any, targets: Sequence[torch.Tensor]
    ) -> list[Expression]:
        """Return what the operator writes into each of the targets."""
        for target in targets:
            self.value(target)  # it must be known before it is written
        if func is torch.ops.aten.copy_.default:
            return [self._copied(targets[0], args[1])]
        if func.__name__.startswith("zero_"):
            return [_full(tuple(targets[0].shape), 0, targets[0].dtype)]
        inputs = _tensors(args, kwargs)
        unknown = opaque(*map(self.value, inputs))
        if _depends_on_order(inputs, targets):
            return [unknown for _ in targets]
        return self._computed(func, args, kwargs, targets) or [unknown for _ in targets]

    def _computed(
        self, func: Any, args: Any, kwargs: Any, targets: Sequence[torch.Tensor]
    ) -> list[Expression] | None:
        """Return what the operator writes as results of its functional counterpart; None if it has
        none, or if that gives something else.
        """
        pure = _functional(func)
        if pure is None or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        outputs = {arg.name for arg in func._schema.arguments if arg.is_out}
        inputs = {name: value for name, value in kwargs.items() if name not in outputs}
        on_meta = {name: _on_meta(value) for name, value in inputs.items()}
        try:
            out = pure(*_on_meta(args), **on_meta)
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        if len(results) != len(targets):
            return None
        whole = _call_expression(pure, args, inputs, out, self.value)
        values = []
        for index, (result, target) in enumerate(zip(results, targets)):
            part = whole if isinstance(out, torch.Tensor) else Op("getitem", (whole, index))
            if result.dtype != target.dtype:
                part = _cast(part, target.dtype)
            values.append(part)
        return values

    def _copied(self, target: torch.Tensor, source: Any) -> Expression:
        if not isinstance(source, torch.Tensor):  # torch takes a number too
            return _full(tuple(target.shape), source, target.dtype)
        value = self.value(source)
        if torch.nn.parameter.is_lazy(source):
            return value
        if source.dtype != target.dtype:
            self.conversions.append(
                ConvertingCopy(token(target), source.dtype, target.dtype, value)
            )
            value = _cast(value, target.dtype)
        if source.shape != target.shape:
            value = Op("aten.expand.default", (value, tuple(target.shape)))
        return value

    def _bounded(self, expression: Expression) -> Expression:
        """Return `expression`; if it is too large (code that loops over a tensor doubles it), only
        its inputs.
        """
        if isinstance(expression, Op):
            size, depth = self._size(expression)
            if size > _LARGEST or depth > _DEEPEST:
                return opaque(expression)
        return expression

    def _size(self, node: Argument) -> tuple[int, int]:
        """Return the number of nodes and the depth; known parts are not counted again."""
        if isinstance(node, tuple):
            total = deepest = 0
            for item in node:
                size, depth = self._size(item)
                total += size
                deepest = max(deepest, depth)
            return total, deepest
        if not isinstance(node, Op):
            return 1, 0
        if id(node) not in self.sizes:
            size, depth = self._size((*node.args, *(value for _, value in node.kwargs)))
            self.sizes[id(node)] = (node, size + 1, depth + 1)
        return self.sizes[id(node)][1:]


_uncompiled = _disable_dynamo(Recorder._record)


def _is_doubtful(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether meta may accept what real tensors refuse: a computation in a dtype that few
    operators know.
    """
    dtypes = {tensor.dtype for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)}
    if dtypes <= _COMMON or not any(tensor.device.type == "meta" for tensor in tensors):
        return False
    if len(dtypes) > 1:
        return True
    if func.is_view:
        return False
    copies = func is torch.ops.aten.copy_.default or func.__name__.partition(".")[0] in _SAME
    return not copies or not all(map(_can_copy, dtypes))


def _is_plain_copy(target: Any, source: Any, non_blocking: bool = False) -> bool:
    """Return whether it is what loading does for nearly every tensor: on meta, a copy to the same
    dtype and shape.
    """
    if type(source) not in _CLASSES or type(target) not in _CLASSES:
        return False
    if not source.is_meta or not target.is_meta or not target.is_contiguous():
        return False
    if target.layout != torch.strided or source.layout != torch.strided:
        return False
    return bool(
        source.dtype == target.dtype and source.dtype in _COMMON and source.shape == target.shape
    )


def _is_expanded(target: torch.Tensor) -> bool:
    """Return whether several elements of a tensor on meta are one element of its memory."""
    if torch.nn.parameter.is_lazy(target) or target.device.type != "meta":
        return False
    if target.layout != torch.strided or not target.numel():
        return False
    for size, step in zip(target.shape, target.stride()):
        if size > 1 and step == 0:
            return True
    return False


def _depends_on_order(inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Return whether a target is read as well, as another target or another view: then the order of
    writes would matter.
    """
    marks = [token(tensor) for tensor in inputs]
    places = Counter(map(place_of, marks))
    for mark in map(token, targets):
        if len(targets) > 1 and places[place_of(mark)] > 1:
            return True
        if not isinstance(mark, StorageView):
            continue
        for other in marks:
            if not isinstance(other, StorageView) or other.address != mark.address:
                continue
            if other != mark and meet(other.geometry, mark.geometry):
                return True
    return False


@cache
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether real tensors of the dtype can be copied: four-bit tensors cannot."""
    try:
        source, target = (torch.empty(1, dtype=dtype, device="cpu") for _ in range(2))
        target.copy_(source)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


@cache
def _written(func: Any) -> tuple[str, ...]:
    names = []
    for arg in func._schema.arguments:
        if arg.alias_info is not None and arg.alias_info.is_write:
            names.append(arg.name)
    return tuple(names)


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors += _tensors(arg, {})
    return tensors


def _on_meta(arg: Any) -> Any:
    is_dense = isinstance(arg, torch.Tensor) and arg.layout == torch.strided and not arg.is_nested
    if is_dense and arg.device.type != "meta":
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if isinstance(arg, (list, tuple)):
        return [_on_meta(item) for item in arg]
    return arg


# Operators as expressions


_Value = Callable[[torch.Tensor], Expression]


def _call_expression(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, value: _Value
) -> Expression:
    """Return the value of ``func(*args, **kwargs)``; `out` is its result, for its shape and
    dtype.
    """
    name = str(func).partition(".")[2]
    base = name.partition(".")[0]
    if base in _SAME:
        return value(args[0])
    if base == "_to_copy":
        source = value(args[0])
        return source if out.dtype == args[0].dtype else _cast(source, out.dtype)
    if base in _UNKNOWN:
        return opaque()
    if base in _FILLS:
        return _full(tuple(out.shape), _FILLS[base], out.dtype)
    if base in _FILL_ARGUMENT:
        return _filled(args[_FILL_ARGUMENT[base]], out, value)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return opaque(*(value(arg) for arg in args if isinstance(arg, torch.Tensor)))
    if name in _RESHAPES:
        return Op("aten.reshape.default", (value(args[0]), tuple(out.shape)))
    if name == "slice.Tensor":
        return _slice_expression(args, kwargs, value)
    if base == "as_strided":
        return opaque(value(args[0]))  # the caller derives it from the memory if it can
    options = []
    for key, arg in kwargs.items():
        if key not in _PLACEMENT:
            options.append((key, _argument(arg, value)))
    return Op(str(func), tuple(_argument(arg, value) for arg in args), tuple(options))


def _filled(fill: Any, out: torch.Tensor, value: _Value) -> Expression:
    """Return a tensor like `out` in which each element is `fill`, a number or a tensor."""
    shape = tuple(out.shape)
    if not isinstance(fill, torch.Tensor):
        return _full(shape, fill, out.dtype)
    source = value(fill)
    if fill.dtype != out.dtype:
        source = _cast(source, out.dtype)
    return Op("aten.expand.default", (source, shape))


def _slice_expression(args: Sequence[Any], kwargs: Mapping[str, Any], value: _Value) -> Expression:
    """Return a slice with the dimension counted from the front, and bounds inside of it."""
    defaults = {"dim": 0, "start": None, "end": None, "step": 1}
    given = defaults | dict(zip(("self", "dim", "start", "end", "step"), args)) | dict(kwargs)
    source = given["self"]
    dim = given["dim"] % max(source.dim(), 1)
    bounds = slice(given["start"], given["end"], given["step"])
    start, end, step = bounds.indices(source.shape[dim])
    arguments = (value(source), dim, start, max(start, end))
    return Op("aten.slice.Tensor", arguments if step == 1 else (*arguments, step))


def _argument(arg: Any, value: _Value) -> Argument:
    if isinstance(arg, torch.Tensor):
        return value(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(_argument(item, value) for item in arg)
    for kind, cls in (
        ("dtype", torch.dtype),
        ("layout", torch.layout),
        ("memory_format", torch.memory_format),
    ):
        if isinstance(arg, cls):
            return Special(kind, str(arg).removeprefix("torch."))
    if isinstance(arg, (type(None), bool, int, float, str, complex)):
        return _scalar_argument(arg)
    return opaque()


def _scalar_argument(value: Any) -> Any:
    return Special("complex", repr(value)) if isinstance(value, complex) else value


def _dtype_option(dtype: torch.dtype) -> tuple[tuple[str, Special]]:
    return (("dtype", Special("dtype", str(dtype).removeprefix("torch."))),)


def _cast(source: Expression, dtype: torch.dtype) -> Expression:
    return Op("aten._to_copy.default", (source,), _dtype_option(dtype))


def _full(shape: Shape, fill: Any, dtype: torch.dtype) -> Expression:
    return Op("aten.full.default", (shape, _scalar_argument(fill)), _dtype_option(dtype))


def _literal(tensor: torch.Tensor) -> Expression:
    """Return a constant with its values; opaque if they cannot be read or are too many."""
    if type(tensor) not in _CLASSES or tensor.device.type == "meta":
        return opaque()
    if tensor.is_quantized or tensor.numel() > _LITERAL_LIMIT:
        return opaque()
    shape, values = tuple(tensor.shape), tensor.detach().cpu().reshape(-1).tolist()
    if len(set(map(repr, values))) < 2:  # by repr: 0.0 and -0.0 are equal, and not the same
        return _full(shape, values[0] if values else 0, tensor.dtype)
    dtype = _dtype_option(tensor.dtype)
    items = []
    for value in values:
        items.append(Op("aten.scalar_tensor.default", (_scalar_argument(value),), dtype))
    stacked = Op("aten.stack.default", (tuple(items),))
    return stacked if len(shape) == 1 else Op("aten.reshape.default", (stacked, shape))


@cache
def _functional(func: Any) -> Any:
    """Return the operator that computes what the in-place or ``out=`` operator writes; None if
    torch has none.
    """
    namespace, _, rest = str(func).partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
    if packet is None:
        return None
    types = [str(arg.type) for arg in func._schema.arguments if not arg.is_out]
    names = [
        overload,
        overload.removesuffix("_out").removesuffix("out") or "default",
        "default",
        *packet.overloads(),
    ]
    for name in dict.fromkeys(names):
        candidate = getattr(packet, name, None) if name in packet.overloads() else None
        if candidate is None or candidate._schema.is_mutable:
            continue
        if [str(arg.type) for arg in candidate._schema.arguments] == types:
            return candidate
    return None


# Questions about tensors that are not operators


class _Questions(TorchFunctionMode):
    """Answer what code asks about tensors besides their values, so that meta tensors look like real
    ones.

    Addresses are 0 on meta, and a hook that finds shared tensors by ``data_ptr()`` would take all
    for one.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            self.recorder.note_read(args[:1])
        elif func == torch.Tensor.data_ptr and args[0].device.type == "meta":
            tensor = args[0]
            return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
        elif func in _PLACE:
            return _PLACE[func](device_for_real(args[0]))
        elif func == torch.Tensor.type and len(args) == 1 and not kwargs:
            place = device_for_real(args[0]).type
            prefix = "torch." if place == "cpu" else f"torch.{place}."
            return func(*args).replace("torch.meta.", prefix)
        return func(*args, **(kwargs or {}))


_READS = frozenset(
    {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}
)
_PLACE: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what the block runs, without its prints and warnings; meta tensors and storages look
    like real ones.
    """
    with _storages_have_addresses(), prints_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recorder, _Questions(recorder):
            yield


# Blocks that need it now: in several threads, or a block inside of another one.
_BLOCKS: list[object] = []
_LOCK = threading.Lock()


@contextlib.contextmanager
def _storages_have_addresses() -> Iterator[None]:
    """Give storages on meta an address, until the last of all blocks ends."""
    storages: Any = torch.UntypedStorage
    with _LOCK:
        if not _BLOCKS:
            storages.data_ptr = _data_ptr
        _BLOCKS.append(storages)
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                del storages.data_ptr


def _data_ptr(storage: Any) -> int:
    if storage.device.type == "meta":
        return int(storage._cdata)
    return int(_INHERITED(storage))


_INHERITED: Callable[[Any], int] = torch.UntypedStorage.data_ptr
