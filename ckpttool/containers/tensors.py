"""Tensors as torch pickles them: nodes to entries, and entries to nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import Any

from ckpttool.containers.nodes import content_of, walk
from ckpttool.containers.objects import described
from ckpttool.containers.pickle_read import Call, Global, Persistent, PickledSet
from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Described, Payload, Storage, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.limits import Memory
from ckpttool.core.strides import Shape, contiguous_stride, distance_to_last
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import content_of_storage, fingerprint

MAX_DIMS, MOST = 64, 1 << 63  # torch's own limits, of dimensions and of each
_MAX_WRAPPERS = 8  # a Parameter of a subclass of ...; torch writes fewer
# A small pickle can put the same nodes at any number of places. So many nodes are looked at when a
# file is read, and so many more for each byte of its pickle. (A node takes at least a byte, and is
# looked at a few times.)
_LOOKS, _LOOKS_A_BYTE = 2_000_000, 16


@dataclass(slots=True, eq=False)
class Storages:
    """The storages of one file by their key in its pickle: `find(key, nbytes)` looks one up, once.

    `carried` are the payloads of tensors by the id of their node: one node is one tensor. `reached`
    are the keys of the storages that these tensors are made of. `dtypes` are the dtypes of the
    references to a storage, and ``uint8`` of one without: torch takes the first one's for all, and
    so writes no others. `memory` is what the index of the file may take, `pickled` are the bytes of
    its pickle. `untyped`: a reference names no dtype.
    """

    find: Callable[[str, int], Storage]
    by_key: dict[str, Storage] = field(default_factory=dict)
    carried: dict[int, Carried] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    looked_at: int = 0
    dtypes: dict[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=lambda: Memory(0))
    pickled: int = 0
    untyped: bool = False

    def get(self, key: str, nbytes: int) -> Storage:
        """Return the storage under `key`, which holds `nbytes` by the pickle."""
        storage = self.by_key.get(key)
        if storage is None:
            storage = self.by_key[key] = self.find(key, nbytes)
        elif nbytes > storage.nbytes:
            raise malformed(f"storage {key} is {storage.nbytes} bytes, not {nbytes}")
        return storage

    def look(self, count: int) -> None:
        """Count nodes that are looked at, perhaps again. Raises `CkptError` for many more than the
        file has.
        """
        self.looked_at += count
        if self.looked_at > _LOOKS + _LOOKS_A_BYTE * self.pickled:
            raise malformed("its objects share too many parts")

    def content(self, node: Any) -> bytes | None:
        """Return a digest of the content of a storage or a dense tensor; None for any other
        node.
        """
        if type(node) is Persistent:
            dtype, storage = typed_storage(node, self)
            return content_of_storage(storage) + dtype.encode()
        if not is_tensor(node):
            return None
        entry = entry_of("", node, self)
        return None if entry.storage is None else repr(fingerprint(entry)).encode()


unnamed = partial(TensorEntry, "")  # makes the entry of a tensor that has no name yet


def _packed(entry: TensorEntry, layout: str, nbytes: int | None = None) -> TensorEntry:
    """Return the tensor as one whose values are not a strided block of bytes."""
    nbytes = entry.nbytes if nbytes is None else nbytes
    return replace(entry, storage=None, layout=layout, packed_bytes=nbytes)


# Layout -> the parts of such a tensor that a block of values does not have.
_LOST = {
    "quantized": "the scale and the zero point of its values",
    "sparse_coo": "the indices of its values",
    "nested": "the shapes of its parts",
}


@dataclass(frozen=True, slots=True, eq=False)
class Carried(Payload):
    """The payload of an entry: its node, the storages that the node refers to, and the tensor that
    it rebuilds.
    """

    node: Any
    storages: Storages
    rebuilt: TensorEntry | None = None

    def describes(self, entry: TensorEntry) -> bool:
        return self.rebuilt is not None and self.rebuilt.geometry == entry.geometry

    def content(self) -> bytes | None:
        """Return the content; for a Parameter, of the tensor in it."""
        return content_of(bare(self.node), self.storages.content)

    def lost(self, entry: TensorEntry) -> str:
        if entry.layout == "subclass":
            return f"its class {kind(entry)}, and what each tensor in it is for"
        return _LOST.get(entry.layout, "how its values are made of what is stored")

    def described(self) -> Described:
        return described(self.node)

    def resolved(self, entry: TensorEntry) -> TensorEntry:
        if entry.layout not in _FLAGS:
            return entry
        from ckpttool.evaluate import torch_eval

        node = bare(self.node)
        dtype, storage = typed_storage(node.args[0], self.storages)
        flags = node.args[6]
        if node.func.name == "_rebuild_tensor_v3":
            dtype, flags = _dtype(node.args[6]), node.args[7]
        view = _view(dtype, storage, node.args[1:4])
        value: Expression = Ref(entry.key)
        for flag, operator in _FLAGS.items():
            if flags.get(flag):
                value = Op(operator, (value,))
        return torch_eval.entry_of(entry.key, value, {entry.key: view.under(entry.key)})


def malformed(message: str) -> CkptError:
    return CkptError(
        f"not as torch.save writes it: {message}",
        hint="the file is damaged, or needs a newer ckpttool: pip install -U ckpttool",
    )


def is_tensor(node: Any) -> bool:
    return (
        type(node) is Call
        and type(node.func) is Global
        and node.func.name in _REBUILD
        and is_torch(node.func)
    )


_FLAGS = {"conj": "aten.conj_physical.default", "neg": "aten.neg.default"}


def is_dense(entry: TensorEntry) -> bool:
    """Return whether the tensor is strided and of torch's own class, perhaps lazily conjugated or
    negated.
    """
    return entry.layout == "strided" or entry.layout in _FLAGS


def kind(entry: TensorEntry) -> str:
    """Return the kind of tensor, by which loading distinguishes them: the layout, or the name of a
    subclass.
    """
    if not isinstance(entry.payload, Carried):
        return entry.layout
    if entry.layout == "subclass":
        for arg in bare(entry.payload.node).args:
            if type(arg) is Global and not is_tensor(Call(arg, ())):
                return str(arg)
    return entry.layout


def bare(node: Any) -> Any:
    for _ in range(_MAX_WRAPPERS):
        if is_tensor(node) and is_parameter(node):
            node = node.args[0]
    return node


def is_torch(name: Global) -> bool:
    """Return whether the name belongs to torch, whose classes are trusted to be what their names
    say.
    """
    return name.module == "torch" or name.module.startswith("torch.")


def entry_of(key: str, node: Call, storages: Storages) -> TensorEntry:
    """Return the index entry of a tensor's node. Raises `CkptError` if its geometry does not fit
    its storage.
    """
    carried = storages.carried.get(id(node))
    if carried is None:
        rebuilt = _rebuilt(key, node, storages)
        carried = storages.carried[id(node)] = Carried(node, storages, rebuilt)
        if rebuilt.storage is None:
            references = (part for part in walk(node, storages.look) if type(part) is Persistent)
            storages.reached.update(map(storage_key, references))
    tensor = carried.rebuilt
    assert tensor is not None
    where = (tensor.offset, tensor.storage, tensor.layout, tensor.packed_bytes, carried)
    # `replace` would take five times as long
    return TensorEntry(key, tensor.dtype, tensor.shape, tensor.stride, *where)


def _rebuilt(key: str, node: Call, storages: Storages) -> TensorEntry:
    try:
        return _read(node, storages, 0)
    except CkptError as error:
        problem = error
    except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        problem = malformed(f"the arguments of {node.func}: {error}")
    raise CkptError(problem.message, hint=problem.hint, problems=[Problem(problem.message, key)])


# Reading. One function for each rebuild function of torch; it gets the arguments, the storages, and
# the depth.


def _read(node: Any, storages: Storages, depth: int) -> TensorEntry:
    if not is_tensor(node) or depth > _MAX_WRAPPERS:
        raise malformed(f"{type(node).__name__} where a tensor has to be")
    return _REBUILD[node.func.name](node.args, storages, depth)


def _tensor(args: Any, storages: Storages, depth: int) -> TensorEntry:
    dtype, storage = typed_storage(args[0], storages)
    return _flagged(_view(dtype, storage, args[1:4]), args[6:])


def _tensor_v3(args: Any, storages: Storages, depth: int) -> TensorEntry:
    _, storage = typed_storage(args[0], storages)
    return _flagged(_view(_dtype(args[6]), storage, args[1:4]), args[7:])


_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}  # elements of quantized tensors that share a byte


def _view(dtype: str, storage: Storage, args: Any) -> TensorEntry:
    offset, size, stride = args
    shape, stride = sizes_of(size), sizes_of(stride)
    if type(offset) is not int or offset < 0 or len(shape) != len(stride):
        raise malformed(f"offset {offset!r}, shape {shape}, strides {stride}")
    last = offset + distance_to_last(shape, stride)
    available = storage.nbytes // dtypes.itemsize(dtype) * _PER_BYTE.get(dtype, 1)
    if 0 not in shape and last >= available:
        raise malformed(f"a tensor reaches element {last} of a storage of {available}")
    return unnamed(dtype, shape, stride, offset, storage)


def _flagged(view: TensorEntry, metadata: Any) -> TensorEntry:
    """Return the tensor as packed if it is lazily conjugated or negated: its bytes are not its
    values.
    """
    flags = metadata[0] if metadata else {}
    for flag in _FLAGS:
        if flags.get(flag):
            return _packed(view, flag)
    return view


_PLAIN_TYPES = ("Tensor", "Parameter", "Buffer")


def _from_type(args: Any, storages: Storages, depth: int) -> TensorEntry:
    func, kind, inner = args[:3]
    call = Call(func, inner)
    parts = _inner(args[2:], storages, depth)
    nbytes = sum(part.nbytes for part in parts)
    if is_tensor(call):
        tensor = _read(call, storages, depth + 1)
        if is_torch(kind) and kind.name in _PLAIN_TYPES:
            return tensor
        return _packed(tensor, "subclass", max(tensor.nbytes, nbytes))
    # a class with its own function: of its geometry only the dtype is known
    dtype = parts[0].dtype if parts else "float32"
    options = inner[0] if type(inner) is tuple and inner else None
    if type(options) is dict and is_tensor(options.get("values")):
        # of a jagged tensor, next to its offsets
        dtype = _read(options["values"], storages, depth + 1).dtype
    return unnamed(dtype, (), (), 0, None, "subclass", nbytes)


def resized(node: Any, shape: Shape) -> Any:
    """Return the node of a wrapper subclass with another shape; None for any other node."""
    func, _, inner, *_ = node.args
    if getattr(func, "name", "") != "_rebuild_wrapper_subclass" or type(inner) is not tuple:
        return None
    new_inner = (*inner[:2], shape, contiguous_stride(shape), *inner[4:])
    copy = Call(node.func, (*node.args[:2], new_inner, *node.args[3:]), node.how)
    copy.state = node.state
    return copy


def _sparse(args: Any, storages: Storages, depth: int) -> TensorEntry:
    kind, data = args
    layout = kind.args[0] if type(kind) is Call else kind.name
    is_coo = len(data) == 3 or type(data[3]) is bool
    if is_coo:
        _, values, size = data[:3]
    else:  # indices of rows and of columns
        _, _, values, size = data[:4]
    dtype = _read(values, storages, depth + 1).dtype
    nbytes = _nbytes_in(data, storages, depth)
    layout = layout.removeprefix("torch.")
    return unnamed(dtype, sizes_of(size), (), 0, None, layout, nbytes)


def _quantized(args: Any, storages: Storages, depth: int) -> TensorEntry:
    dtype, storage = typed_storage(args[0], storages)
    view = _view(dtype, storage, args[1:4])
    nbytes = -(-view.nbytes // _PER_BYTE.get(dtype, 1))
    return _packed(view, "quantized", nbytes + _nbytes_in(args[4], storages, depth))


def _nested(args: Any, storages: Storages, depth: int) -> TensorEntry:
    """The sizes of a nested tensor are a tensor themselves; the shape here is the number of its
    components.
    """
    dtype = _read(args[0], storages, depth + 1).dtype
    sizes = _read(args[1], storages, depth + 1)
    nbytes = _nbytes_in(args, storages, depth)
    return unnamed(dtype, sizes.shape[:1], (), 0, None, "nested", nbytes)


def _device(args: Any, storages: Storages, depth: int) -> TensorEntry:
    """A tensor of a device without storages (XLA): a CPU tensor or a numpy array that is moved when
    it is loaded.
    """
    data = args[0]
    dtype = _dtype(args[1])
    if is_tensor(data):
        shape = _read(data, storages, depth + 1).shape
    else:  # numpy.ndarray.__setstate__ takes version, shape, dtype, order, bytes
        shape = sizes_of(data.state[1])
    nbytes = prod(shape) * dtypes.itemsize(dtype)
    return unnamed(dtype, shape, (), 0, None, "device", nbytes)


_REBUILD: dict[str, Callable[[Any, Storages, int], TensorEntry]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": lambda args, storages, depth: _read(args[0], storages, depth + 1),
    "_rebuild_parameter_with_state": lambda args, storages, depth: _read(
        args[0], storages, depth + 1
    ),
    "_rebuild_from_type": _from_type,
    "_rebuild_from_type_v2": _from_type,
    "_rebuild_wrapper_subclass": lambda args, *_: unnamed(
        _dtype(args[1]), sizes_of(args[2]), sizes_of(args[3]), args[4], None, "subclass"
    ),
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_sparse_csr_tensor": _sparse,
    "_rebuild_qtensor": _quantized,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_meta_tensor_no_storage": lambda args, *_: unnamed(
        _dtype(args[0]), sizes_of(args[1]), sizes_of(args[2]), 0, None, "meta"
    ),
    "_rebuild_device_tensor_from_cpu_tensor": _device,
    "_rebuild_device_tensor_from_numpy": _device,
    "_rebuild_xla_tensor": _device,
    "UninitializedParameter": lambda *_: unnamed("float32", (), (), 0, None, "uninitialized"),
    "UninitializedBuffer": lambda *_: unnamed("float32", (), (), 0, None, "uninitialized"),
}


_INNERMOST = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")


def _inner(node: Any, storages: Storages, depth: int) -> list[TensorEntry]:
    """Return the tensors of plain bytes in `node`."""
    tensors = []
    for part in walk(node, storages.look):
        if is_tensor(part) and part.func.name in _INNERMOST:
            tensors.append(_read(part, storages, depth + 1))
    return tensors


def _nbytes_in(node: Any, storages: Storages, depth: int) -> int:
    return sum(part.nbytes for part in _inner(node, storages, depth))


def storage_key(node: Any) -> str:
    """Return the key in a reference ``("storage", class, key, location, number of elements)``; else
    `CkptError`.
    """
    if type(node) is Persistent and type(node.id) is tuple and len(node.id) >= 5:
        word, kind, key, _, numel = node.id[:5]
        is_counted = type(numel) is int and numel >= 0
        if word == "storage" and type(kind) is Global and type(key) is str and is_counted:
            return key
    raise malformed("a storage reference")


def typed_storage(node: Any, storages: Storages) -> tuple[str, Storage]:
    key = storage_key(node)
    kind, numel = node.id[1].name, node.id[4]
    if kind == "UntypedStorage":
        dtype = "uint8"
    elif kind in dtypes.BY_STORAGE:
        dtype = dtypes.BY_STORAGE[kind].name
    else:
        raise malformed(f"a storage of class {kind}")
    first_dtype = storages.dtypes.setdefault(key, dtype)
    if first_dtype != dtype:
        raise malformed(f"storage {key} is one of {first_dtype} and of {dtype}")
    storages.reached.add(key)
    return dtype, storages.get(key, numel * dtypes.itemsize(dtype))


def _dtype(node: Any) -> str:
    if not is_torch(node) or node.name not in dtypes.BY_NAME:
        raise malformed(f"{node!s} where a dtype has to be")
    return str(node.name)


def sizes_of(node: Any) -> Shape:
    """Return the sizes of a ``torch.Size``, a list or a tuple. Raises `CkptError` for sizes that
    torch refuses.
    """
    sizes = node
    if type(node) is Call and node.func == Global("torch", "Size"):
        sizes = node.args[0]
    if type(sizes) not in (tuple, list) or len(sizes) > MAX_DIMS:
        raise malformed(f"{type(sizes).__name__} where sizes have to be")
    for size in sizes:
        if type(size) is int and 0 <= size < MOST:
            continue
        # writing a large number would take long
        if any(map(_is_huge, sizes)):
            raise malformed("sizes that no tensor has")
        raise malformed(f"sizes {sizes!r}")
    return tuple(sizes)


def _is_huge(size: Any) -> bool:
    return type(size) is int and abs(size) >= MOST


@dataclass(slots=True, eq=False)
class Rebuilder:
    """Makes the nodes of tensors for one file; every storage keeps one key, every global is named
    once.

    `words` are the strings of the file's own references: a pickle names one object once, and equal
    ones again. `kept` are the dtypes by which nodes of other files, or of this one as it was, refer
    to storages, by their id; `apart` are second storages of the same bytes, for tensors of other
    dtypes: torch takes all references to a storage for the first.
    """

    keys: dict[int, str] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    globals: dict[str, Global] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    kept: dict[int, str] = field(default_factory=dict)
    apart: dict[tuple[int, str], Storage] = field(default_factory=dict)

    def node(self, entry: TensorEntry, mixed: bool = False) -> Call:
        """Return the node of a strided tensor on the CPU. `mixed`: tensors of other dtypes use the
        same storage.
        """
        assert entry.storage is not None
        row, storage = dtypes.BY_NAME[entry.dtype], entry.storage
        kept = self.kept.get(id(storage))
        if kept is not None and kept not in ("uint8", entry.dtype):
            storage = self.apart.setdefault((id(storage), entry.dtype), Storage(storage.data))
            kept, mixed = None, False
        if kept is not None:
            is_typed = kept == entry.dtype
        else:
            is_typed = row.storage is not None and not mixed and not storage.nbytes % row.itemsize
        reference = self.reference(storage, row if is_typed else None)
        args = (reference, entry.offset, entry.shape, entry.stride, False, self._hooks())
        if is_typed:
            return Call(self._global("torch._utils", "_rebuild_tensor_v2"), args)
        dtype = self._global("torch", entry.dtype)
        return Call(self._global("torch._utils", "_rebuild_tensor_v3"), (*args, dtype))

    def reference(self, storage: Storage, row: dtypes.DType | None) -> Persistent:
        """Return the reference to a storage of the file, typed by `row` of the table or untyped."""
        if row is not None and row.storage:
            kind = self._global("torch", row.storage)
        else:
            kind = self._global("torch.storage", "UntypedStorage")
        numel = storage.nbytes // (row.itemsize if row else 1)
        word, location = self._word("storage"), self._word("cpu")
        return Persistent((word, kind, self.key(storage), location, numel))

    def key(self, storage: Storage) -> str:
        """Return the key of the storage's record in the file: its own, or the first free number."""
        key = self.keys.get(id(storage))
        if key is None:
            number = len(self.taken)
            while str(number) in self.taken:
                number += 1
            key = str(number)
            self.adopt(storage, key)
        return key

    def adopt(self, storage: Storage, key: str) -> None:
        self.keys[id(storage)] = key
        self.storages[key] = storage
        self.taken.add(key)

    def keep(self, storages: Storages) -> None:
        """Note the dtypes by which nodes that are kept, or moved from another file, refer to
        storages.
        """
        for key, storage in storages.by_key.items():
            if key in storages.dtypes:
                self.kept[id(storage)] = storages.dtypes[key]

    def learn(self, storages: Storages) -> None:
        """Take over the keys and words of the file whose tree is changed."""
        for key, storage in storages.by_key.items():
            self.adopt(storage, key)
        references = (carried.node.args[:1] for carried in storages.carried.values())
        first = next(filter(None, references), (None,))[0]
        if type(first) is Persistent:
            for part in reversed(first.id):
                if type(part) is str:
                    self.words[part] = part

    def _word(self, word: str) -> str:
        return self.words.setdefault(word, word)

    def parameter(self, data: Any, requires_grad: bool) -> Call:
        """Return the node of a Parameter of the tensor that the node `data` makes, as torch does
        for subclasses too.
        """
        rebuild = self._global("torch._utils", "_rebuild_parameter")
        return Call(rebuild, (data, requires_grad, self._hooks()))

    def _hooks(self) -> Call:
        return Call(self._global("collections", "OrderedDict"), ())

    def _global(self, module: str, name: str) -> Global:
        return self.globals.setdefault(f"{module}.{name}", Global(module, name))

    def transplant(self, carried: Carried) -> Any:
        """Return a copy of a node of another file, its storage references changed to this file's
        keys.
        """

        def moved(reference: Persistent) -> Persistent:
            _, storage = typed_storage(reference, carried.storages)
            word, kind, _, *rest = reference.id
            kind = self._global(kind.module, kind.name)
            return Persistent((word, kind, self.key(storage), *rest))

        return _with_references(carried.node, moved)


def renumbered(root: Any, numbers: Mapping[str, str]) -> Any:
    def moved(reference: Persistent) -> Persistent:
        word, kind, key, *rest = reference.id
        return Persistent((word, kind, numbers[key], *rest))

    return _with_references(root, moved)


def is_parameter(node: Any) -> bool:
    return (
        type(node) is Call
        and type(node.func) is Global
        and node.func.name.startswith("_rebuild_parameter")
    )


def _with_references(root: Any, moved: Callable[[Persistent], Persistent]) -> Any:
    """Return a copy of the tree with other references to its storages."""
    copies: dict[int, Any] = {}  # by id of the node; a node that holds itself is there before

    def copied(node: Any, depth: int) -> Any:
        kind = type(node)
        if kind not in (tuple, list, dict, Call, PickledSet, Persistent):
            return node
        if id(node) in copies:
            return copies[id(node)]
        if depth > 200:
            raise malformed("an object is nested too deep to be moved to another file")
        depth += 1
        copy: Any
        if kind is Persistent:
            copy = moved(node)
        elif kind is tuple:
            copy = tuple([copied(part, depth) for part in node])
        elif kind is list:
            copy = copies[id(node)] = []
            copy.extend([copied(part, depth) for part in node])
        elif kind is dict:
            copy = copies[id(node)] = {}
            for key, value in node.items():
                new_key = copied(key, depth)
                copy[new_key] = copied(value, depth)
        elif kind is PickledSet:
            copy = PickledSet(copied(node.items, depth), node.frozen)
        else:
            func, args = copied(node.func, depth), copied(node.args, depth)
            copy = copies[id(node)] = Call(func, args, node.how, copied(node.kwargs, depth))
            copy.items, copy.pairs = copied(node.items, depth), copied(node.pairs, depth)
            copy.state, copy.setter = copied(node.state, depth), copied(node.setter, depth)
        copies[id(node)] = copy
        return copy

    return copied(root, 0)
