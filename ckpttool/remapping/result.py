"""The result of a remap, and the JSON object that describes it."""

from __future__ import annotations

from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.expression import BY_CODE
from ckpttool.core.optimizer_state import FORMS
from ckpttool.core.plan import PLAN, Plan
from ckpttool.core.schema import (
    COUNT,
    TEXT,
    TEXTS,
    list_of,
    notes_as,
    nullable,
    one_of,
    record,
    row,
    unless_empty,
)
from ckpttool.core.text import dotted, human_bytes, shell
from ckpttool.core.values import dataclass, public
from ckpttool.io.undo import Written
from ckpttool.naming.model_change import ModelChange
from ckpttool.optimizers.request import OptimizerRemap
from ckpttool.remapping.companions import COMPANIONS, Companions
from ckpttool.remapping.write import COST, VERIFIED, Cost, Verified


@dataclass(frozen=True, slots=True)
class Undo:
    """How to undo an in-place edit: the command, and the bytes that are kept on the disk until
    then.
    """

    command: str
    nbytes: int

    @classmethod
    def of(cls, path: str, nbytes: int) -> Undo:
        """Return the command that undoes the edit of `path`."""
        return cls(shell("ckpttool", "undo", path), nbytes)

    def __str__(self) -> str:
        if not self.nbytes:
            return self.command
        return f"{self.command} (until then {human_bytes(self.nbytes)} of old content are kept)"


UNDO = record(Undo, {"command": TEXT, "bytes": COUNT}, called={"bytes": "nbytes"})


@public
@dataclass(frozen=True, slots=True)
class Filled:
    """Tensors that `--fill-from` took from one checkpoint.

    Attributes:
        source: The checkpoint.
        keys: The keys that were missing, below the paths of their sections.
        unused: The number of its tensors that the result has from elsewhere.
    """

    source: str
    keys: tuple[str, ...]
    unused: int


@public
@dataclass(frozen=True, slots=True)
class Remap:
    """The result of a remap.

    Attributes:
        result: The checkpoint to write.
        plan: The plan of the change.
        source_form: The form that the keys were in, in words; None if it is not known.
        form: The form that was requested for the keys, in words; None without one.
        notes: Remarks on the change.
        optimizers: What happens to each optimizer state.
        ruled: The change that the rules make to the model.
        model: The change that the complete remap makes to the model; None if `--select` narrows it.
        narrowed: The same change if tensors of the model are left out.
        sections: The paths of the state dicts that changed together, if there are several.
        written: How a file named by `--in-place` was written, or would be.
        undo: How to undo the in-place edit.
        verified: How the output was checked.
        cost: The bytes that a dry run found it to read, write and hold.
        companions: What happens to the other files of a folder.
        source: The operand CKPT.
        output: The operand OUT.
        dry_run: True if only the plan was made and nothing was written.
        changes_content: False if the result has the names, values and order of the source: only
            its format may differ.
        missing: Keys of the model that the result lacks, below the paths of their sections.
        format: The title of the output's format.
        loads_into: The model that `fix` wrote the output for.
        filled: What other checkpoints gave it.
    """

    result: Checkpoint
    plan: Plan
    source_form: str | None = None
    form: str | None = None
    notes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRemap, ...] = ()
    ruled: ModelChange | None = None
    model: ModelChange | None = None
    narrowed: ModelChange | None = None
    sections: tuple[str, ...] = ()
    written: Written | None = None
    undo: Undo | None = None
    verified: Verified | None = None
    cost: Cost | None = None
    companions: Companions | None = None
    source: str = ""
    output: str = ""
    dry_run: bool = False
    changes_content: bool = True
    missing: tuple[str, ...] = ()
    format: str = ""
    loads_into: str = ""
    filled: tuple[Filled, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many outputs are renamed, second names, transformed and unchanged."""
        unchanged = sum(output.is_unchanged for output in self.plan.outputs)
        second_names = len(self.plan.second_names)
        transformed = len(self.plan.computed)
        return {
            "renamed": len(self.plan.outputs) - unchanged - second_names - transformed,
            "second_names": second_names,
            "transformed": transformed,
            "unchanged": unchanged,
        }

    @property
    def model_paths(self) -> tuple[str, ...]:
        """The paths of the state dicts that were changed, the model's own first."""
        if self.sections:
            return self.sections
        for effect in (self.model, self.narrowed):
            if effect is not None:
                return (effect.section.path,)
        return ()

    @property
    def dropped(self) -> list[str]:
        """The keys that are left out, below the paths of their sections."""
        return [dotted(gone.section, gone.key) for gone in self.plan.dropped]

    def to_json(self) -> dict[str, Any]:
        """The `remap` object of the contract."""
        return dict(REMAP.write(self))


def _together(outcome: Remap) -> tuple[object, ...] | None:
    if not outcome.optimizers:
        return None
    first = outcome.optimizers[0]
    params = sum(optimizer.params for optimizer in outcome.optimizers)
    return first.was, first.to, params, outcome.optimizers


def changes_content(source: Checkpoint, outcome: Remap) -> bool:
    """Return whether the result holds something else than `source`: other names, values, entries or
    order.
    """
    plan, result = outcome.plan, outcome.result
    if plan.dropped or plan.runs or not all(output.is_unchanged for output in plan.outputs):
        return True
    if result.sections is source.sections:
        return False
    if len(result.sections) != len(source.sections):
        return True
    return not all(map(_same, source.sections, result.sections))


def _same(left: Section, right: Section) -> bool:
    if left is right:
        return True
    return _described(left) == _described(right) and left.mapping == right.mapping


def _described(section: Section) -> tuple[object, ...]:
    modules = list(section.modules or ())
    place = section.path, section.kind, section.form, section.packed_as
    return (*place, modules, section.keys)


_COUNTED = ("renamed", "second_names", "transformed", "unchanged")
_FORM = one_of(*FORMS)
_OPTIMIZERS = list_of(
    record(
        OptimizerRemap,
        {
            "section": TEXT,
            "from": _FORM,
            "to": _FORM,
            "params": COUNT,
            "evidence": nullable(TEXT),
            "new": TEXTS,
            "dropped": TEXTS,
        },
        called={"from": "was"},
    )
)
_WRITTEN = record(Written, {"bytes": COUNT}, called={"bytes": "nbytes"})
REMAP = record(
    Remap,
    {
        **dict.fromkeys(("source", "output"), TEXT),
        **dict.fromkeys(("from", "to"), nullable(TEXT)),
        **dict.fromkeys(_COUNTED, COUNT),
        **dict.fromkeys(("dropped", "missing", "sections"), TEXTS),
        "by_code": list_of(row({"way": one_of(*BY_CODE), "model": TEXT, "keys": TEXTS})),
        "optimizer": nullable(
            row({"from": _FORM, "to": _FORM, "params": COUNT, "sections": _OPTIMIZERS})
        ),
        "notes": notes_as("remap"),
    },
    {
        "written": _WRITTEN,
        "undo": UNDO,
        "verified": VERIFIED,
        "cost": COST,
        "companions": COMPANIONS,
        "filled": unless_empty(
            list_of(record(Filled, {"source": TEXT, "keys": TEXTS, "unused": COUNT}))
        ),
        "plan": PLAN,
    },
    called={
        "from": "source_form",
        "to": "form",
        "renamed": lambda outcome: outcome.counts["renamed"],
        "second_names": lambda outcome: outcome.counts["second_names"],
        "transformed": lambda outcome: outcome.counts["transformed"],
        "unchanged": lambda outcome: outcome.counts["unchanged"],
        "by_code": lambda outcome: [
            (run.way, run.model, keys) for run, keys in outcome.plan.by_code
        ],
        "optimizer": _together,
        "plan": lambda outcome: outcome.plan if outcome.dry_run else None,
    },
    title="ckpttool.remap/1",
)
