"""`Names`: every name of every tensor of one model, and how the names relate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.errors import Problem
from ckpttool.core.expression import EXPRESSION, Expression
from ckpttool.core.schema import (
    COUNT,
    DTYPE,
    FLAG,
    OBJECT,
    SHAPE,
    TEXT,
    TEXTS,
    Members,
    check_none,
    check_titled,
    list_of,
    notes_of_file,
    nullable,
    one_of,
    record,
)
from ckpttool.core.values import dataclass, public

SCHEMA = "ckpttool.names/1"
_HINT = "write one with `ckpttool trace MODEL -o names.json`"
SERIALIZED, RUNTIME = "serialized", "runtime"  # the two forms of a model's names
# the code of the note on tensors that may not keep the values that they load
SPECIAL = "special-tensors"
# the code of notes on keys that depend on the place of a module in the model
ON_PLACE = "key-depends-on-place"
# Of a buffer or parameter that is called so: torch expects the key only of modules that define
# set_extra_state().
NAMED_EXTRA_STATE = (
    "a tensor called _extra_state: state_dict() writes the key, and a strict load_state_dict()"
    " refuses it"
)
FSDP_FLAT = "fsdp-flat"  # the form of files in which FSDP1 saved flat parameters


@dataclass(frozen=True, slots=True)
class RuntimeTensor:
    """A tensor as ``named_parameters(remove_duplicate=False)`` /
    ``named_buffers(remove_duplicate=False)`` list it.

    Attributes:
        fqn: Its name in the module.
        canonical: The FQN without the segments that wrappers added.
        kind: ``parameter`` or ``buffer``.
        persistent: False for a buffer that ``state_dict()`` does not save.
        trainable: ``requires_grad``.
        dtype: Torch's name without ``torch.``.
        shape: Its sizes; None for an uninitialized (lazy) parameter.
        alias_of: The first FQN of the same tensor; None if this is the first.
    """

    fqn: str
    canonical: str
    kind: str
    persistent: bool
    trainable: bool
    dtype: str
    shape: tuple[int, ...] | None
    alias_of: str | None

    @property
    def first_name(self) -> str:
        """The first FQN of the same tensor."""
        return self.alias_of or self.fqn


@dataclass(frozen=True, slots=True)
class Hook:
    function: str
    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line}) on module {self.module or '(root)'}"


@dataclass(frozen=True, slots=True)
class SerializedKey:
    """A tensor of ``model.state_dict()``: its expression over runtime tensors (None: from none),
    and its hook.
    """

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    source: Expression | None
    hook: Hook | None


def first_parameters(runtime: Iterable[RuntimeTensor]) -> list[RuntimeTensor]:
    """Return the parameters in the order of ``model.parameters()``, each under its first name."""
    return [t for t in runtime if t.kind == "parameter" and t.alias_of is None]


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A runtime tensor after ``load_state_dict``, as an expression over serialized keys (None: no
    key reaches it).
    """

    fqn: str
    source: Expression | None


@dataclass(frozen=True, slots=True)
class OptimizerParam:
    """A parameter's position in ``optimizer.state_dict()``.

    Attributes:
        id: Its number in the state dict.
        fqn: Its name in the module.
        group: The index of its param group.
        state: The names of its state after one step; empty if that is not known.
    """

    id: int
    fqn: str
    group: int
    state: tuple[str, ...] = ()


@public
@dataclass(frozen=True, slots=True)
class Names:
    """All names of one model; `to_json` gives the contract's `trace` object.

    Attributes:
        model: The operand that named the model.
        torch: The version of torch that ran the model.
        runtime: The parameters and buffers, under all of their names.
        serialized: The tensors of ``state_dict()``.
        load: The runtime tensors after ``load_state_dict``.
        not_serialized: FQNs of tensors that feed no key of ``state_dict()``.
        extra_state: Keys of ``state_dict()`` that are not tensors.
        roundtrips: True if loading restores what saving wrote.
        roundtrip_problems: Tensors and keys that do not survive saving and loading.
        optimizer: The parameters of the optimizer, by id.
        modules: Module paths of the state dict's ``_metadata``; None if it has none.
        optimizer_class: The class of the optimizer; None without one.
        optimizer_groups: The hyperparameters of each param group, if they are plain values.
        notes: Facts that were not examined or could not be determined.
        versions: Versions of modules (``_metadata``) if loading depends on them, else None.
    """

    model: str
    torch: str
    runtime: tuple[RuntimeTensor, ...]
    serialized: tuple[SerializedKey, ...]
    load: tuple[LoadedTensor, ...]
    not_serialized: tuple[str, ...] = ()
    extra_state: tuple[str, ...] = ()
    roundtrips: bool = True
    roundtrip_problems: tuple[Problem, ...] = ()
    optimizer: tuple[OptimizerParam, ...] = ()
    modules: tuple[str, ...] | None = None
    optimizer_class: str | None = None
    optimizer_groups: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, Any] | None = None

    @property
    def ids(self) -> tuple[OptimizerParam, ...]:
        """The parameters by optimizer id: as the optimizer has them, else in ``model.parameters()``
        order.
        """
        if self.optimizer_class is not None:
            return self.optimizer
        parameters = enumerate(first_parameters(self.runtime))
        return tuple(OptimizerParam(index, tensor.fqn, 0) for index, tensor in parameters)

    def to_json(self) -> dict[str, Any]:
        """Return the `trace` object of the contract, which is the content of a names file."""
        return dict(NAMES.write(replace(self, optimizer=self.ids)))

    @staticmethod
    def from_json(value: Any, source: str) -> Names:
        """Read the result of `to_json`; `source` names the file in the error. Raises `CkptError` on
        anything else.
        """
        check_titled(NAMES, value, source, "a names file", _HINT)
        check_none(_unknown_names(value), f"{source} is not a names file", _HINT)
        names: Names = NAMES.read(value)
        # Without an optimizer the ids that are written are the order of the model's parameters.
        return names if names.optimizer_class is not None else replace(names, optimizer=())


_TENSOR: Members = {"dtype": DTYPE, "shape": nullable(SHAPE)}
_FROM: Members = {"from": nullable(EXPRESSION)}
_SOURCE = {"from": "source"}
HOOK = record(Hook, {"function": TEXT, "file": TEXT, "line": COUNT, "module": TEXT})
_RUNTIME = record(
    RuntimeTensor,
    {
        "fqn": TEXT,
        "canonical": TEXT,
        "kind": one_of("parameter", "buffer"),
        "persistent": FLAG,
        "trainable": FLAG,
        **_TENSOR,
        "alias_of": nullable(TEXT),
    },
)
_SERIALIZED = record(
    SerializedKey, {"key": TEXT, **_TENSOR, **_FROM, "hook": nullable(HOOK)}, called=_SOURCE
)
_PARAM = record(OptimizerParam, {"id": COUNT, "fqn": TEXT, "group": COUNT}, {"state": TEXTS})
NAMES = record(
    Names,
    {
        "model": TEXT,
        "torch": TEXT,
        "runtime": list_of(_RUNTIME, unique="fqn"),
        "serialized": list_of(_SERIALIZED, unique="key"),
        "load": list_of(record(LoadedTensor, {"fqn": TEXT, **_FROM}, called=_SOURCE), unique="fqn"),
        "not_serialized": TEXTS,
        "extra_state": TEXTS,
        "roundtrips": FLAG,
        "roundtrip_problems": list_of(replace(TEXT, read=Problem.parse, write=str)),
        "optimizer": list_of(_PARAM, unique="id"),
    },
    {
        "modules": nullable(TEXTS),
        "optimizer_class": nullable(TEXT),
        "notes": notes_of_file("model"),
        "optimizer_groups": list_of(OBJECT),
        "versions": nullable(OBJECT),
    },
    title=SCHEMA,
    is_file=True,
)


def _unknown_names(value: Any) -> Iterator[Problem]:
    """Yield a problem for every reference in a names file to a name that it does not have."""
    runtime = {tensor["fqn"] for tensor in value["runtime"]}
    keys = {entry["key"] for entry in value["serialized"]}
    keys.update(value["extra_state"])

    def check(names: Iterable[str], all_names: set[str], path: str) -> Iterator[Problem]:
        for name in names:
            if name not in all_names:
                yield Problem(f"{name!r:.100} is not a name in this file", path)

    for number, tensor in enumerate(value["runtime"]):
        first = tensor["alias_of"]
        if first is not None:
            yield from check([first], runtime, f"$.runtime[{number}].alias_of")
    for number, entry in enumerate(value["serialized"]):
        sources = _refs(entry["from"])
        yield from check(sources, runtime, f"$.serialized[{number}].from")
    for number, tensor in enumerate(value["load"]):
        path = f"$.load[{number}]"
        yield from check([tensor["fqn"]], runtime, f"{path}.fqn")
        yield from check(_refs(tensor["from"]), keys, f"{path}.from")
    group_count = len(value.get("optimizer_groups", ()))
    for number, param in enumerate(value["optimizer"]):
        path, group = f"$.optimizer[{number}]", param["group"]
        yield from check([param["fqn"]], runtime, f"{path}.fqn")
        if group_count and group >= group_count:
            yield Problem(f"there is no group {group}", f"{path}.group")


def _refs(value: Any) -> Iterator[str]:
    if value is not None:
        yield from ex.refs(EXPRESSION.read(value))
