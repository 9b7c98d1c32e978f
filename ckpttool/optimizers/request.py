"""The request to the optimizers of a remap, and the result for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Section
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import ID
from ckpttool.core.plan import OptimizerMove
from ckpttool.core.values import dataclass
from ckpttool.naming.model_change import ModelChange
from ckpttool.optimizers.identify import ParamMap

Called = Callable[[str], str]
# FQN -> hyperparameters; see `tracing.initial_state`
Create = Callable[
    [Mapping[str, Mapping[str, Any]]], tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]
]
OfSection = tuple[Names | None, Names | None, Create | None]


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """The form of the keys that the optimizers get, and the models that saved them and will load
    them.

    `names` are the names of the model (and the optimizer) that saved the checkpoint, `to_names` of
    the model that will load it. `form` ``serialized`` gives parameters the names of the model's
    keys; otherwise they get canonical names. `called` returns the new name that the rules give to a
    name; it is None without rules.

    `ruled` is the effect of the rules on the model, `model` the effect of the complete remap,
    `model_keys` its keys. `narrowed` is `model` if some of its tensors are left out: then
    parameters that have names follow their keys. `left_out` are the names of the parameters of an
    optimizer with ids whose tensors are left out; `owners` says then whose state the ids are.

    `state_dicts` are the state dicts of the file as it was saved, by
    `operands.checkpoint.saved_state_dicts`: the order of their keys is evidence for the ids.
    `old_model` is the same command with the model named that saved the file, `output` the file to
    write. `create` returns the state that the optimizer creates for parameters without any, if they
    get it. `of_sections` are `names`, `to_names` and `create` of the optimizers that are named by
    their sections. `by_section` are the requests of optimizers in a file of several models.
    """

    keys: str | None = None
    names: Names | None = None
    to_names: Names | None = None
    called: Called | None = None
    form: str | None = None
    ruled: ModelChange | None = None
    model: ModelChange | None = None
    narrowed: ModelChange | None = None
    owners: ParamMap | None = None
    left_out: frozenset[str] = frozenset()
    model_keys: Sequence[str] = ()
    state_dicts: Sequence[Section] = ()
    old_model: str | None = None
    output: str | None = None
    create: Create | None = None
    of_sections: Mapping[str, OfSection] = field(default_factory=dict)
    by_section: Mapping[str, OptimizerRequest] = field(default_factory=dict)

    def of(self, section: Section) -> OptimizerRequest:
        """Return the request with the names for the optimizer of a section."""
        if section.path in self.by_section:
            return self.by_section[section.path]
        if section.path not in self.of_sections:
            return self
        names, to_names, create = self.of_sections[section.path]
        return replace(self, names=names, to_names=to_names, create=create)


class OptimizerTask(NamedTuple):
    """The change of one optimizer. `where` is its place in the file, as messages call it, `was` the
    form of its keys in the file, `to` the form in which it is written.
    """

    request: OptimizerRequest
    where: str
    was: str
    to: str

    def with_request(self, request: OptimizerRequest) -> OptimizerTask:
        return self._replace(request=request)

    @property
    def keeps_ids(self) -> bool:
        """Whether ids are written and no other model loads them."""
        return self.to == ID and self.request.to_names is None


@dataclass(frozen=True, slots=True)
class OptimizerRemap:
    """The result for one optimizer.

    `new` are parameters without state, `dropped` are parameters whose state has no place in the new
    optimizer. `move` is the change as a plan records it. `loaded_by` are the names of the model
    that will load it, if that is known. `ids` are the parameters of its ids, if it had ids.
    """

    section: str
    was: str
    to: str
    params: int
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    move: OptimizerMove | None = field(default=None, compare=False)
    loaded_by: Names | None = field(default=None, compare=False)
    ids: ParamMap | None = field(default=None, compare=False, repr=False)

    @property
    def evidence(self) -> str | None:
        """What identified its ids, if it had ids."""
        return None if self.ids is None else self.ids.evidence
