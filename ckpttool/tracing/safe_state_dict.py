"""What `torch.load` would hand to ``load_state_dict``: the tensors and objects of a section, made of inert nodes.

A file's pickle is never executed. An object is made here only where the safe loader, ``torch.load(weights_only=True)``,
would make it too: torch's tensors and Python's containers, and the classes that the model's own code has declared safe
(``torch.serialization.add_safe_globals``). Every other one stays `Unknown`, and with it what loading makes of it.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache
from typing import Any

import torch
from torch import nn

from ckpttool.core.checkpoint import ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.formats.pickle_read import ABSENT, Call, Global, Persistent, PickledSet
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import Carried, Storages, typed_storage
from ckpttool.io.ranges import read_all
from ckpttool.tracing.output_capture import logs_as_warnings

_DEEPEST = 200  # containers and calls inside each other: code may have raised Python's own limit without end
_PYTHON_2 = {"__builtin__": "builtins"}  # torch pickles with protocol 2, which has the modules' old names


class Unknown:
    """Stands for an object of the checkpoint that is not made here; `what` says what it is, in words."""

    def __init__(self, what: str) -> None:
        self.what = what


class NotMade(Exception):
    """What a node stands for cannot be made here; the text says what it is."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A section as torch would hand it over.

    `unknown` are the entries that could not be made, with the reason; `state` holds an `Unknown` in their place.
    """

    state: Mapping[str, Any]
    unknown: tuple[Problem, ...] = ()


def needs_values(section: Section) -> bool:
    """Whether the section holds tensors that others on meta cannot stand for: all that are no dense block of values."""
    return any(entry.layout != "strided" for entry in section.tensors)


def stored(section: Section, real: bool) -> Stored:
    """The section's state dict, with its tensors' values or on meta; what is no model's tensor is always real.

    Raises `CkptError` where the file does not hold what its entries say.
    """
    state: OrderedDict[str, Any] = OrderedDict()
    weights, others = _Maker(real), _Maker(True)
    unknown: list[Problem] = []
    entries: tuple[TensorEntry | ExtraEntry, ...] = (*section.tensors, *section.extras)
    with logs_as_warnings():
        for entry in entries:
            is_weight = isinstance(entry, TensorEntry) and entry.key.rpartition(".")[2] != "_extra_state"
            try:
                state[entry.key] = (weights if is_weight else others).entry(entry)
            except NotMade as reason:
                state[entry.key] = Unknown(str(reason))
                unknown.append(Problem(str(reason), entry.key))
    if section.modules is not None:
        payloads = ((path, pairs_of(payload), payload) for path, payload in section.modules.items())
        versions = OrderedDict((path, payload if own is None else dict(own)) for path, own, payload in payloads)
        state._metadata = versions  # type: ignore[attr-defined]
    return Stored(state, tuple(unknown))


@dataclass(slots=True, eq=False)
class _Maker:
    """Makes what the nodes of one file stand for; what is one object in the file is one object here.

    The payload of an entry is a node of a torch file, the name of a record, or an object of a state dict in memory.
    `keep` holds on to the nodes and storages whose ids are keys.
    """

    real: bool
    made: dict[int, Any] = field(default_factory=dict)
    tensors: dict[object, torch.Tensor] = field(default_factory=dict)
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)

    def entry(self, entry: TensorEntry | ExtraEntry) -> Any:
        payload = entry.payload
        if isinstance(payload, Carried) and (isinstance(entry, ExtraEntry) or payload.describes(entry)):
            return self.node(payload.node, payload.storages)
        if isinstance(entry, ExtraEntry):
            if isinstance(payload, str):
                raise NotMade("an object in a record of its own")
            return entry.value if payload is None else payload
        held = getattr(payload, "tensor", None)  # as `live.section` has what is not dense
        if isinstance(held, torch.Tensor):
            return held.detach()
        if entry.identity not in self.tensors:
            self.tensors[entry.identity] = self.tensor(entry)
        return self.tensors[entry.identity].detach()

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A strided tensor on its storage, as its entry says."""
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CkptError(f"this torch has no dtype {entry.dtype!r}: {entry.key}", hint="use a newer torch")
        if entry.storage is None:
            raise NotMade(f"a tensor of another kind ({entry.layout})")
        place = self.storage(entry.storage)
        made = torch.empty(0, dtype=dtype, device=place.device)
        return made.set_(place, entry.offset, entry.shape, entry.stride)

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        if id(storage) not in self.memory:
            self.keep.append(storage)
            self.memory[id(storage)] = self._read(storage)
        return self.memory[id(storage)]

    def _read(self, storage: Storage) -> torch.UntypedStorage:
        if not self.real or not storage.nbytes:
            device = "cpu" if self.real else "meta"
            return torch.empty(storage.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        data = storage.data
        whole = read_all(data)
        return torch.frombuffer(whole, dtype=torch.uint8).untyped_storage()

    def node(self, node: Any, storages: Storages, depth: int = 0) -> Any:
        """What `node` stands for. Raises `NotMade` where only unpickling could tell."""
        if node is None or type(node) in (bool, int, float, str, bytes, bytearray):
            return node
        if depth > _DEEPEST:
            raise NotMade("an object that is nested too deep")
        if id(node) not in self.made:
            self.keep.append(node)
            try:
                self._make(node, storages, lambda part: self.node(part, storages, depth + 1))
            except (NotMade, CkptError):
                raise
            except Exception as error:  # whatever a class that is declared safe raises
                raise NotMade(f"an object that cannot be made: {error}") from error
        return self.made[id(node)]

    def _make(self, node: Any, storages: Storages, part: Callable[[Any], Any]) -> None:
        kind, at = type(node), id(node)
        if kind is list:
            self.made[at] = []
            self.made[at].extend(map(part, node))
        elif kind is dict:
            self.made[at] = {}
            self.made[at].update((part(key), part(value)) for key, value in node.items())
        elif kind is tuple:
            self.made[at] = tuple(map(part, node))
        elif kind is PickledSet:
            self.made[at] = (frozenset if node.frozen else set)(map(part, node.items))
        elif kind is Global:
            self.made[at] = _named(node)
        elif kind is Persistent:
            self.made[at] = self._typed(node, storages)
        elif kind is Call:
            self._call(node, part)
        else:
            raise NotMade("a string of Python 2")

    def _typed(self, node: Persistent, storages: Storages) -> torch.storage.TypedStorage:
        dtype, storage = typed_storage(node, storages)
        place = self.storage(storage)
        return torch.storage.TypedStorage(wrap_storage=place, dtype=getattr(torch, dtype), _internal=True)

    def _call(self, node: Call, part: Callable[[Any], Any]) -> None:
        """Makes the object of a call, and what the pickle does to it afterwards, as the safe loader would."""
        function = _safe(node.func) if type(node.func) is Global else None
        if function is None or node.kwargs or node.setter is not None or node.items is not None:
            raise NotMade(f"an object of {node.func}" if type(node.func) is Global else "a pickled object")
        args = part(tuple(node.args))
        if function is io.BytesIO:  # it is made empty, and its state is its content
            self.made[id(node)] = io.BytesIO(part(node.state)[0])
            return
        is_new = node.how in ("NEWOBJ", "NEWOBJ_EX")
        made = self.made[id(node)] = function.__new__(function, *args) if is_new else function(*args)
        for key, value in (node.pairs or {}).items():
            made[part(key)] = part(value)
        if node.state is not ABSENT:
            _set_state(made, part(node.state))


def _set_state(made: Any, state: Any) -> None:
    """As pickle does: of a class with slots the state is two dicts, either of which may be None."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        made.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _named(name: Global) -> Any:
    """What the safe loader takes `name` for, or a class that is only mentioned. Raises `NotMade` for all else."""
    found = _safe(name) or _tensor_class(name)
    if found is None:
        raise NotMade(f"an object of {name}")
    return found


def _safe(name: Global) -> Any:
    """The function or class of this name that the safe loader calls; None where there is none."""
    path = f"{_PYTHON_2.get(name.module, name.module)}.{name.name}"
    return _tables().get(path, _declared_safe().get(path))


@cache
def _tables() -> Mapping[str, Any]:
    """torch's own list of what its safe loader calls, and the plain containers of Python that it leaves out."""
    from torch._weights_only_unpickler import _get_allowed_globals

    own = {
        "_io.BytesIO": io.BytesIO,
        "builtins.dict": dict,
        "builtins.frozenset": frozenset,
        "torch.nn.parameter.UninitializedParameter": nn.UninitializedParameter,
        "torch.nn.parameter.UninitializedBuffer": nn.UninitializedBuffer,
    }
    return {**_get_allowed_globals(), **own}


def _declared_safe() -> Mapping[str, Any]:
    """What the model's code, torchao, DTensor and others have declared safe, by the name that a pickle gives it."""
    found = {}
    for one in torch.serialization.get_safe_globals():
        value, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        found[name] = value
    return found


def _tensor_class(name: Global) -> type | None:
    """A tensor subclass that the model's code has imported, and that runs no code of its own when it is unpickled."""
    found = getattr(sys.modules.get(name.module), name.name, None)
    if isinstance(found, type) and issubclass(found, torch.Tensor):
        return found if found.__setstate__ is torch.Tensor.__setstate__ else None
    return None
