"""The state dict that `torch.load` would return: the tensors and objects of a section, created from
inert nodes.

A file's pickle is never executed. An object is created only if the safe loader,
``torch.load(weights_only=True)``, would create it too: torch's tensors and Python's containers, and
the classes that the model's own code has declared safe (``torch.serialization.add_safe_globals``).
Every other object is `Unknown`, and so is the effect of loading it.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import ABSENT, Call, Global, Persistent, PickledSet
from ckpttool.containers.tensors import Carried, Storages, typed_storage
from ckpttool.core.checkpoint import AnyEntry, ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.io.pieces import read_all
from ckpttool.tracing.user_code import logs_as_warnings

_DEEPEST = 200  # containers and calls inside each other: code may have raised Python's own limit
# torch pickles with protocol 2, which has the modules' old names
_PYTHON_2 = {"__builtin__": "builtins"}


class Unknown:
    """Replaces an object of the checkpoint that is not created here; `what` describes it."""

    def __init__(self, what: str) -> None:
        self.what = what


class NotMade(Exception):
    """The object of a node cannot be created here; the text describes it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A section as torch would hand it over.

    `unknown` are the entries that could not be created, with the reason; `state` holds an `Unknown`
    for each of them.
    """

    state: OrderedDict[str, Any]
    unknown: tuple[Problem, ...] = ()


def needs_values(section: Section) -> bool:
    """Return whether the section holds tensors that are not dense, which tensors on meta cannot
    replace.
    """
    return any(entry.layout != "strided" for entry in section.tensors)


def stored(section: Section, real: bool) -> Stored:
    """Return the section's state dict, with its tensors' values or on meta; tensors in extra state
    are always real.

    Raises `CkptError` if the file does not hold what its entries say.
    """
    state: OrderedDict[str, Any] = OrderedDict()
    weights, others = Maker(real), Maker(True)
    unknown: list[Problem] = []
    entries: tuple[AnyEntry, ...] = (*section.tensors, *section.extras)
    with logs_as_warnings():
        for entry in entries:
            is_extra_state = entry.key.rpartition(".")[2] == "_extra_state"
            is_weight = isinstance(entry, TensorEntry) and not is_extra_state
            maker = weights if is_weight else others
            try:
                state[entry.key] = maker.value(entry)
            except NotMade as reason:
                state[entry.key] = Unknown(str(reason))
                unknown.append(Problem(str(reason), entry.key))
    versions = versions_of(section)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return Stored(state, tuple(unknown))


def versions_of(section: Section) -> OrderedDict[str, Any] | None:
    """Return the section's ``_metadata``; None if it has none."""
    if section.modules is None:
        return None
    versions: OrderedDict[str, Any] = OrderedDict()
    for path, payload in section.modules.items():
        pairs = pairs_of(payload)
        versions[path] = payload if pairs is None else dict(pairs)
    return versions


@dataclass(slots=True, eq=False)
class Maker:
    """Create the objects of one file's nodes; one object in the file is one object here.

    The payload of an entry is a node of a torch file, the name of a record, or an object of a state
    dict in memory. `keep` holds the nodes and storages whose ids are keys.
    """

    real: bool
    objects: dict[int, Any] = field(default_factory=dict)
    tensors: dict[object, torch.Tensor] = field(default_factory=dict)
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)

    def value(self, entry: AnyEntry) -> Any:
        payload = entry.payload
        if isinstance(entry, ExtraEntry):
            if isinstance(payload, Carried):
                return self._carried(payload)
            if isinstance(payload, str):
                raise NotMade("an object in a separate record")
            return entry.value if payload is None else payload
        if isinstance(payload, Carried) and payload.describes(entry):
            return self._carried(payload)
        # `live.model` keeps tensors that are not dense
        in_memory = getattr(payload, "tensor", None)
        if isinstance(in_memory, torch.Tensor):
            return in_memory.detach()
        if entry.identity not in self.tensors:
            self.tensors[entry.identity] = self._tensor(entry)
        return self.tensors[entry.identity].detach()

    def _carried(self, payload: Carried) -> Any:
        """Create the object without torch's warnings that its kind is deprecated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.create(payload.node, payload.storages)

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CkptError(
                f"this torch has no dtype {entry.dtype!r}: {entry.key}", hint="use a newer torch"
            )
        if entry.storage is None:
            raise NotMade(f"a tensor of another kind ({entry.layout})")
        storage = self.storage(entry.storage)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, entry.offset, entry.shape, entry.stride)

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        if id(storage) not in self.memory:
            self.keep.append(storage)
            if self.real and storage.nbytes:
                data = torch.frombuffer(read_all(storage.data), dtype=torch.uint8)
            else:
                device = "cpu" if self.real else "meta"
                data = torch.empty(storage.nbytes, dtype=torch.uint8, device=device)
            self.memory[id(storage)] = data.untyped_storage()
        return self.memory[id(storage)]

    def create(self, node: Any, storages: Storages, depth: int = 0) -> Any:
        """Return the object of `node`. Raises `NotMade` if only unpickling could create it."""
        if node is None or type(node) in (bool, int, float, str, bytes, bytearray):
            return node
        if depth > _DEEPEST:
            raise NotMade("an object that is nested too deep")
        if id(node) not in self.objects:
            self.keep.append(node)
            try:
                self._make(node, storages, lambda part: self.create(part, storages, depth + 1))
            except (NotMade, CkptError):
                raise
            except Exception as error:  # a class that is declared safe may raise anything
                raise NotMade(f"an object that cannot be made: {error}") from error
        return self.objects[id(node)]

    def _make(self, node: Any, storages: Storages, part: Callable[[Any], Any]) -> None:
        """Create the object of a node. A container is noted before its items, which may refer to
        it.
        """
        kind, at = type(node), id(node)
        if kind is list:
            self.objects[at] = []
            self.objects[at].extend(map(part, node))
        elif kind is dict:
            self.objects[at] = {}
            self.objects[at].update((part(key), part(value)) for key, value in node.items())
        elif kind is tuple:
            self.objects[at] = tuple(map(part, node))
        elif kind is PickledSet:
            self.objects[at] = (frozenset if node.frozen else set)(map(part, node.items))
        elif kind is Global:
            value = _safe(node) or _tensor_class(node)
            if value is None:
                raise NotMade(f"an object of {node}")
            self.objects[at] = value
        elif kind is Persistent:
            dtype, storage = typed_storage(node, storages)
            self.objects[at] = torch.storage.TypedStorage(
                wrap_storage=self.storage(storage), dtype=getattr(torch, dtype), _internal=True
            )
        elif kind is Call:
            self._call(node, part)
        else:
            raise NotMade("a string of Python 2")

    def _call(self, node: Call, part: Callable[[Any], Any]) -> None:
        """Create the object of a call, and change it as the pickle does, in the way of the safe
        loader.
        """
        if type(node.func) is not Global:
            raise NotMade("a pickled object")
        function = _safe(node.func)
        if function is None or node.kwargs or node.setter is not None or node.items is not None:
            raise NotMade(f"an object of {node.func}")
        args = part(tuple(node.args))
        if function is io.BytesIO:  # it is created empty, and its state is its content
            self.objects[id(node)] = io.BytesIO(part(node.state)[0])
            return
        if node.how in ("NEWOBJ", "NEWOBJ_EX"):
            result = function.__new__(function, *args)
        else:
            result = function(*args)
        self.objects[id(node)] = result
        for key, value in (node.pairs or {}).items():
            result[part(key)] = part(value)
        if node.state is ABSENT:
            return
        state = part(node.state)
        if hasattr(result, "__setstate__"):
            result.__setstate__(state)
            return
        # The state of a class with slots is two dicts, each of which may be None.
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            result.__dict__.update(attributes)
        for name, value in (slots or {}).items():
            setattr(result, name, value)


def _safe(name: Global) -> Any:
    """Return the function or class with this name that the safe loader calls; None if there is
    none.
    """
    path = f"{_PYTHON_2.get(name.module, name.module)}.{name.name}"
    if path in _torchs_list():
        return _torchs_list()[path]
    if name.module.startswith("torch.distributed."):
        with suppress(ImportError):  # a torch that was built without it
            import_module("torch.distributed.tensor")  # declares what DTensors need
    # by the model's code, torchao, DTensor and others
    for declared in torch.serialization.get_safe_globals():
        value, full = declared if isinstance(declared, tuple) else (declared, None)
        if path == (full or f"{value.__module__}.{value.__qualname__}"):
            return value
    return None


@cache
def _torchs_list() -> Mapping[str, Any]:
    """Return torch's own list of what its safe loader calls, and the plain containers of Python
    that it leaves out.
    """
    from torch._weights_only_unpickler import _get_allowed_globals

    more = {
        "_io.BytesIO": io.BytesIO,
        "builtins.dict": dict,
        "builtins.frozenset": frozenset,
        "torch.nn.parameter.UninitializedParameter": nn.UninitializedParameter,
        "torch.nn.parameter.UninitializedBuffer": nn.UninitializedBuffer,
    }
    return {**_get_allowed_globals(), **more}


def _tensor_class(name: Global) -> type | None:
    """Return a tensor subclass that the model's code has imported, if unpickling it runs no code of
    the class.
    """
    cls = getattr(sys.modules.get(name.module), name.name, None)
    if isinstance(cls, type) and issubclass(cls, torch.Tensor):
        return cls if cls.__setstate__ is torch.Tensor.__setstate__ else None
    return None
