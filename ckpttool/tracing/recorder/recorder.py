"""The recorder: runs while a model saves or loads, and knows of every tensor how it was computed from named ones.

Values are followed by memory (storage, offset, shape, stride, dtype), not by Python object: ``nn.Parameter(x)`` and
``.data`` bypass the dispatcher, but not the storage that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool.core.expression import Argument, Expression, Op, Special, refs
from ckpttool.tracing.build_model import says_meta
from ckpttool.tracing.recorder.memory import Memory, Token, inside, meet, opaque, token

Value = Callable[[torch.Tensor], Expression]

# An operator that gives its first argument's value again, perhaps in other memory.
SAME = frozenset({"detach", "alias", "clone", "contiguous", "lift_fresh", "lift", "lift_fresh_copy", "_pin_memory",
                  "resolve_conj", "resolve_neg", "detach_copy", "alias_copy", "_lazy_clone"})  # fmt: skip
# A view whose success depends on strides; `reshape` gives the same value for any.
_RESHAPES = frozenset(
    {"view.default", "_unsafe_view.default", "_reshape_alias.default", "reshape.default", "view_copy.default"}
)
# Filled tensors: where the fill value stands among the arguments, or the value itself.
_FILLS: Mapping[str, Any] = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1, "zero": 0,
}  # fmt: skip
_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})  # they read a shape only
_FILL_ARGUMENT: Mapping[str, int] = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1}
_PLACEMENT = frozenset({"device", "pin_memory", "layout", "non_blocking", "generator"})  # where, not what
_LITERAL_LIMIT = 4096  # elements; a constant made outside torch is written into the expression up to here


def call_expression(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, value: Value) -> Expression:
    """The value of ``func(*args, **kwargs)``; `out` is what it gave, for its shape and dtype."""
    name = str(func).partition(".")[2]
    base = name.partition(".")[0]
    if base in SAME or (base == "_to_copy" and out.dtype == args[0].dtype):
        return value(args[0])
    if base == "_to_copy":
        return cast_expression(value(args[0]), out.dtype)
    if base in _UNINITIALISED:
        return opaque()
    if base in _FILLS:
        return full_expression(tuple(out.shape), _FILLS[base], out.dtype)
    if base in _FILL_ARGUMENT:
        fill = args[_FILL_ARGUMENT[base]]
        if not isinstance(fill, torch.Tensor):
            return full_expression(tuple(out.shape), fill, out.dtype)
        same = value(fill) if fill.dtype == out.dtype else cast_expression(value(fill), out.dtype)
        return Op("aten.expand.default", (same, tuple(out.shape)))
    if base in _RANDOM_LIKE:
        return opaque()
    if torch.Tag.nondeterministic_seeded in func.tags:
        return opaque(*(value(arg) for arg in args if isinstance(arg, torch.Tensor)))
    if name in _RESHAPES:
        return Op("aten.reshape.default", (value(args[0]), tuple(out.shape)))
    if name == "slice.Tensor":
        return _slice(args, kwargs, value)
    if base == "as_strided":
        return opaque(value(args[0]))  # the caller derives it from the memory where it can
    return Op(
        str(func),
        tuple(argument(arg, value) for arg in args),
        tuple((key, argument(arg, value)) for key, arg in kwargs.items() if key not in _PLACEMENT),
    )


def argument(arg: Any, value: Value) -> Argument:
    """One argument of an operator as expression data; tensors through `value`."""
    if isinstance(arg, torch.Tensor):
        return value(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(argument(item, value) for item in arg)
    for kind, cls in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(arg, cls):
            return Special(kind, str(arg).removeprefix("torch."))
    if isinstance(arg, complex):
        return Special("complex", repr(arg))
    return arg if isinstance(arg, (type(None), bool, int, float, str)) else opaque()


def cast_expression(source: Expression, dtype: torch.dtype) -> Expression:
    """`source` converted to `dtype`."""
    return Op("aten._to_copy.default", (source,), (("dtype", _dtype(dtype)),))


def full_expression(shape: tuple[int, ...], fill: Any, dtype: torch.dtype) -> Expression:
    """A tensor with one value throughout."""
    fill = Special("complex", repr(fill)) if isinstance(fill, complex) else fill
    return Op("aten.full.default", (shape, fill), (("dtype", _dtype(dtype)),))


def literal(tensor: torch.Tensor) -> Expression:
    """A constant's values, written out; opaque where they cannot be read or are too many."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type == "meta" or tensor.is_quantized or tensor.numel() > _LITERAL_LIMIT:
        return opaque()
    shape, values = tuple(tensor.shape), tensor.detach().cpu().reshape(-1).tolist()
    if len(set(map(repr, values))) < 2:  # 0.0 and -0.0 are equal, and not the same
        return full_expression(shape, values[0] if values else 0, tensor.dtype)
    kind = (("dtype", _dtype(tensor.dtype)),)
    items = tuple(
        Op("aten.scalar_tensor.default", (Special("complex", repr(v)) if isinstance(v, complex) else v,), kind)
        for v in values
    )
    stacked = Op("aten.stack.default", (items,))
    return stacked if len(shape) == 1 else Op("aten.reshape.default", (stacked, shape))


@cache
def functional(func: Any) -> Any:
    """The operator that computes what the in-place or ``out=`` operator `func` writes; None where torch has none."""
    namespace, _, rest = str(func).partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [str(arg.type) for arg in func._schema.arguments if not arg.is_out]
    names = [overload, overload.removesuffix("_out").removesuffix("out") or "default", "default", *packet.overloads()]
    for name in dict.fromkeys(names):
        found = getattr(packet, name, None) if name in packet.overloads() else None
        if found is None or found._schema.is_mutable:
            continue
        if [str(arg.type) for arg in found._schema.arguments] == wanted:
            return found
    return None


def _slice(args: Sequence[Any], kwargs: Mapping[str, Any], value: Value) -> Expression:
    names = dict(zip(("self", "dim", "start", "end", "step"), args)) | dict(kwargs)
    source = names["self"]
    dim = names.get("dim", 0) % max(source.dim(), 1)
    start, end, step = slice(names.get("start"), names.get("end"), names.get("step", 1)).indices(source.shape[dim])
    bounds = (dim, start, max(start, end)) + ((step,) if step != 1 else ())
    return Op("aten.slice.Tensor", (value(source), *bounds))


def _dtype(dtype: torch.dtype) -> Special:
    return Special("dtype", str(dtype).removeprefix("torch."))


# Questions about a tensor that are answered without reading its values.
_HARMLESS = frozenset({"is_pinned", "is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
                       "size", "stride", "storage_offset", "is_contiguous", "is_strides_like_format", "dim",
                       "numel"})  # fmt: skip
# Of other dtypes few operators know on any device, and meta says of more that they do.
_COMMON = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
                     torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # fmt: skip


_DEEPEST = 100  # operators inside each other; everything that walks expressions recurses
_LARGEST = 20_000  # nodes, those that occur twice counted twice


class NeedsValues(Exception):
    """Code asked for the values of a tensor that has none (meta)."""

    def __str__(self) -> str:
        return "it reads the values of tensors, which a model on the meta device has not"


class Recorder(TorchDispatchMode):
    """Every operator that runs under it is noted; `value(tensor)` then says how the tensor came about.

    `author` is set from outside to whose code is running. `reads` lists ``(author, names)`` for each time that code
    looked at values, `blind` that it asked for values that do not exist (and may have caught the error). `conversions`
    lists ``(token, from, to, source)`` for each copy into a tensor that changed the dtype. `doubtful` says that an
    operator ran on meta of which nobody knows whether it runs on values, `outside` that a tensor came
    about outside of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[int, Memory] = {}
        self.objects: dict[Token, tuple[torch.Tensor, Expression, Any]] = {}
        self.author: Any = None
        self.clock = 0
        self.writes: list[tuple[int, Token]] = []
        self.reads: list[tuple[Any, tuple[str, ...]]] = []
        self.blind = False
        self.doubtful = False
        self.outside = False
        self.bounds = _Bounds()
        self.conversions: list[tuple[Token, torch.dtype, torch.dtype, Expression]] = []

    def name(self, tensor: torch.Tensor, expression: Expression) -> None:
        """Says what `tensor` is before recording starts; the first name of a tensor stays."""
        mark = token(tensor)
        if not isinstance(mark[0], int):
            self.objects.setdefault(mark, (tensor, expression, None))
            for part in inside(tensor):
                self.name(part, opaque(expression))
            return
        memory = self._memory(tensor, mark[0])
        memory.roots.setdefault(mark[1], expression)

    def value(self, tensor: torch.Tensor) -> Expression:
        """How `tensor` was computed."""
        mark = token(tensor)
        if not isinstance(mark[0], int):
            found = self.objects.get(mark)
            return found[1] if found else opaque(*(self.value(part) for part in inside(tensor)))
        memory = self.memories.get(mark[0])
        if memory is None:
            self.outside = True
            memory = self._memory(tensor, mark[0])
            memory.roots[mark[1]] = literal(tensor)
        return memory.read(mark[1])

    def author_of(self, mark: Token) -> Any:
        """Whose code made the tensor, or wrote to it last."""
        if isinstance(mark[0], int):
            memory = self.memories.get(mark[0])
            return memory.author if memory else None
        found = self.objects.get(mark)
        return found[2] if found else None

    def written_since(self, clock: int) -> set[Any]:
        """The storages (or objects) that were written in place after `clock`."""
        return {_place(mark) for when, mark in self.writes if when > clock}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_made_of_others(func):  # in inference mode such an operator arrives whole
            with self:
                return func.decompose(*args, **kwargs)
        written = _written(func)
        if written:
            return self._in_place(func, args, kwargs, written)
        out = self._run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            mark = token(out)
            if not self._is_known(mark):
                self._note(out, mark, call_expression(func, args, kwargs, out, self.value))
        elif isinstance(out, (list, tuple)):
            self._note_each(func, args, kwargs, out)
        elif func.__name__.partition(".")[0] not in _HARMLESS:
            self.read(_tensors(args, kwargs))
        return out

    def _run(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        self.doubtful = self.doubtful or _is_doubtful(func, _tensors(args, kwargs))
        try:
            return func(*self._runnable(args, kwargs), **_moved(func, args, kwargs))
        except Exception as error:
            self.blind = self.blind or says_meta(str(error))
            raise

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that code looked at the values of `tensors`. Raises `NeedsValues` where they have none."""
        names: dict[str, None] = {}
        for tensor in tensors:
            names.update(dict.fromkeys(refs(self.value(tensor))))
            if self._is_unreal(tensor):
                self.blind = True
                raise NeedsValues
        if names:
            self.reads.append((self.author, tuple(names)))

    def _note_each(self, func: Any, args: Sequence[Any], kwargs: Any, out: Sequence[Any]) -> None:
        marks = [token(item) if isinstance(item, torch.Tensor) else None for item in out]
        if all(mark is None or self._is_known(mark) for mark in marks):
            return
        whole = call_expression(func, args, kwargs, out, self.value)
        for index, (item, mark) in enumerate(zip(out, marks)):
            if mark is not None:
                self._note(item, mark, Op("getitem", (whole, index)))

    def _is_known(self, mark: Token) -> bool:
        if not isinstance(mark[0], int):
            return mark in self.objects
        memory = self.memories.get(mark[0])
        return memory is not None and memory.known(mark[1]) is not None

    def _note(self, tensor: torch.Tensor, mark: Token, expression: Expression) -> None:
        expression = self.bounds.within(expression)
        if not isinstance(mark[0], int):
            self.objects[mark] = (tensor, expression, self.author)
            return
        memory = self.memories.get(mark[0])
        if memory is None:
            self._memory(tensor, mark[0]).roots[mark[1]] = expression
        elif isinstance(expression, Op) and expression.op == "opaque":
            memory.read(mark[1])
        else:
            memory.views[mark[1]] = expression

    def _memory(self, tensor: torch.Tensor, cdata: int) -> Memory:
        memory = self.memories.get(cdata)
        if memory is None:
            memory = self.memories[cdata] = Memory(tensor.untyped_storage(), author=self.author)
        return memory

    def _in_place(self, func: Any, args: Sequence[Any], kwargs: Any, written: tuple[str, ...]) -> Any:
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        given = dict(zip((arg.name for arg in func._schema.arguments), args)) | dict(kwargs)
        targets = _tensors([given.get(name) for name in written], {})
        for target in targets:
            _refuse_overlap(target)
        pure = functional(func)
        values = self._results(func, pure, args, kwargs, targets)
        out = self._run(func, args, kwargs)
        real = set(map(id, _tensors(self._runnable(args, kwargs), kwargs)))
        if any(id(target) not in real for target in targets):
            out = self._only_followed(func, targets)
        for target, value in zip(targets, values):
            self.write(target, value)
        return out

    def _only_followed(self, func: Any, targets: Sequence[torch.Tensor]) -> Any:
        """Real memory cannot take a value that does not exist: from now on its bytes mean nothing."""
        for target in targets:
            if isinstance(token(target)[0], int):
                self._memory(target, token(target)[0]).stale = True
        returns = len(func._schema.returns)
        return None if returns == 0 else targets[0] if returns == 1 else tuple(targets)

    def write(self, target: torch.Tensor, value: Expression) -> None:
        """Notes that `target` now holds `value`."""
        mark = token(target)
        self.clock += 1
        self.writes.append((self.clock, mark))
        if not isinstance(mark[0], int):
            self.objects[mark] = (target, value, self.author)
            return
        memory = self._memory(target, mark[0])
        memory.write(mark[1], self.bounds.within(value))
        for root, grown in memory.roots.items():
            memory.roots[root] = self.bounds.within(grown)
        memory.author = self.author

    def _results(
        self, func: Any, pure: Any, args: Any, kwargs: Any, targets: Sequence[torch.Tensor]
    ) -> list[Expression]:
        """What each target holds after the in-place call."""
        for target in targets:
            self.value(target)
        if func is torch.ops.aten.copy_.default:
            return [self._copied(targets[0], args[1])]
        if func.__name__.startswith("zero_"):
            return [full_expression(tuple(targets[0].shape), 0, targets[0].dtype)]
        given = _tensors(args, kwargs)
        inputs = [self.value(tensor) for tensor in given]
        places = Counter(map(_place, map(token, given)))
        in_turn = len(targets) > 1 and any(places[_place(token(target))] > 1 for target in targets)  # one reads another
        in_turn = in_turn or any(_is_read_meanwhile(target, given) for target in targets)
        if pure is None or in_turn or torch.Tag.nondeterministic_seeded in func.tags:
            return [opaque(*inputs) for _ in targets]
        pure_kwargs = {name: value for name, value in kwargs.items() if not _is_out(func, name)}
        meta_args, meta_kwargs = _on_meta(args), {k: _on_meta(v) for k, v in pure_kwargs.items()}
        try:
            out = pure(*meta_args, **meta_kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return [opaque(*inputs) for _ in targets]
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        if len(outs) != len(targets):
            return [opaque(*inputs) for _ in targets]
        whole = call_expression(pure, args, pure_kwargs, out, self.value)
        parts = [whole] if isinstance(out, torch.Tensor) else [Op("getitem", (whole, i)) for i in range(len(outs))]
        return [
            part if o.dtype == t.dtype else cast_expression(part, t.dtype) for part, o, t in zip(parts, outs, targets)
        ]

    def _copied(self, target: torch.Tensor, source: Any) -> Expression:
        if not isinstance(source, torch.Tensor):  # torch takes a number too
            return full_expression(tuple(target.shape), source, target.dtype)
        value = self.value(source)
        if torch.nn.parameter.is_lazy(source):
            return value
        if source.dtype != target.dtype:
            self.conversions.append((token(target), source.dtype, target.dtype, value))
            value = cast_expression(value, target.dtype)
        if source.shape != target.shape:
            value = Op("aten.expand.default", (value, tuple(target.shape)))
        return value

    def _reshape_in_place(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """``t_``, ``squeeze_``, …: the tensor sees the same memory differently; ``set_`` gives it other memory."""
        before = self.value(args[0])
        out = func(*args, **kwargs)
        mark = token(args[0])
        if not func.__name__.startswith(("set_", "resize_")) and not self._is_known(mark):
            self._note(args[0], mark, call_expression(functional(func), args, kwargs, args[0], lambda _: before))
        return out

    def _is_unreal(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return True
        mark = token(tensor)
        memory = self.memories.get(mark[0]) if isinstance(mark[0], int) else None
        return memory is not None and memory.stale

    def _runnable(self, args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
        """The arguments, all on meta where one of them has no values: torch refuses to mix devices."""
        devices = {self._is_unreal(t) for t in _tensors(args, kwargs)}
        return [_on_meta(arg) for arg in args] if len(devices) > 1 or (devices == {True}) else args


class _Bounds:
    """How large an expression may grow: code that loops over a tensor makes it deep, doubling wide. Remembers the size
    of every expression it has seen, so that each new one costs only its own arguments.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[Op, int, int]] = {}

    def within(self, expression: Expression) -> Expression:
        """`expression`, or where it is too large what it was computed from."""
        if isinstance(expression, Op):
            size, depth = self._measure(expression)
            if size > _LARGEST or depth > _DEEPEST:
                return opaque(expression)
        return expression

    def _measure(self, node: Argument) -> tuple[int, int]:
        if isinstance(node, tuple):
            sizes = [self._measure(item) for item in node]
            return sum(size for size, _ in sizes), max((depth for _, depth in sizes), default=0)
        if not isinstance(node, Op):
            return 1, 0
        known = self.known.get(id(node))
        if known is None:
            parts = [self._measure(arg) for arg in (*node.args, *(value for _, value in node.kwargs))]
            size, depth = sum(size for size, _ in parts) + 1, max((depth for _, depth in parts), default=0) + 1
            known = self.known[id(node)] = (node, size, depth)  # holding the node keeps its id its own
        return known[1:]


def _place(mark: Token) -> Any:
    """The address of the storage, or what else identifies a tensor that has none."""
    return mark[0] if isinstance(mark[0], int) else mark


def _is_read_meanwhile(target: torch.Tensor, given: Iterable[torch.Tensor]) -> bool:
    """Whether a part of what is written is read, and not as the target: then it matters what is written first."""
    mark = token(target)
    others = (other for other in map(token, given) if other[0] == mark[0] and other != mark)
    return isinstance(mark[0], int) and any(meet(other[1], mark[1]) for other in others)


def _is_doubtful(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether meta may accept what real tensors refuse: a computation in a dtype that few operators know."""
    dtypes = {tensor.dtype for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)}
    if dtypes <= _COMMON or not any(tensor.device.type == "meta" for tensor in tensors):
        return False
    moves = func is torch.ops.aten.copy_.default or func.is_view or func.__name__.partition(".")[0] in SAME
    return not moves or len(dtypes) > 1


@cache
def _is_made_of_others(func: Any) -> bool:
    return bool(func._can_decompose())


@cache
def _written(func: Any) -> tuple[str, ...]:
    return tuple(arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write)


def _refuse_overlap(target: torch.Tensor) -> None:
    """As torch does for tensors with values: one place in memory cannot take two of them (expanded buffers)."""
    if torch.nn.parameter.is_lazy(target):
        return
    if target.layout == torch.strided and any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride())):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def _is_out(func: Any, name: str) -> bool:
    return any(arg.name == name and arg.is_out for arg in func._schema.arguments)


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _tensors(arg, {})
    return found


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with `device` on meta where the input has no values: it cannot leave."""
    if "device" in kwargs and any(t.device.type == "meta" for t in _tensors(args, {})):
        return {**kwargs, "device": torch.device("meta")}
    return kwargs


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg.device.type != "meta" and arg.layout == torch.strided:
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if isinstance(arg, (list, tuple)):
        return [_on_meta(item) for item in arg]
    return arg
