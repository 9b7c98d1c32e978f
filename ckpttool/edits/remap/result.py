"""What a remap makes of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.cost import COST, VERIFIED, Cost, Verified
from ckpttool.edits.remap.optimizer import OptimizerRemap
from ckpttool.edits.remap.ruled import Ruled
from ckpttool.expression import Ref
from ckpttool.io.edit_in_place import Written
from ckpttool.json_schema import COUNT, TEXT, TEXTS, list_of, nullable, object_of, one_of, record
from ckpttool.optimizer_state import FORMS
from ckpttool.plan import Plan
from ckpttool.values import dataclass

SCHEMA = "ckpttool.remap/1"


@dataclass(frozen=True, slots=True)
class Remap:
    """What a remap makes of its source. `result` is the checkpoint to be written.

    `source_form` and `form` are the forms that the keys were in and are in, as words, or None. `ruled` is what a file
    of rules did to the model. `sections` are the state dicts that were changed together, where these are several.
    `written` says how a file that was to be changed in place was written, `verified` how the output is known to be
    right, `cost` what a dry run found it to take.
    """

    result: Checkpoint
    plan: Plan
    source_form: str | None = None
    form: str | None = None
    notes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRemap, ...] = ()
    ruled: Ruled | None = None
    sections: tuple[str, ...] = ()
    written: Written | None = None
    verified: Verified | None = None
    cost: Cost | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many outputs are renamed, transformed and unchanged."""
        renamed = sum(isinstance(o.source, Ref) and o.source.key != o.key for o in self.plan.outputs)
        transformed = len(self.plan.computed)
        unchanged = len(self.plan.outputs) - renamed - transformed
        return {"renamed": renamed, "transformed": transformed, "unchanged": unchanged}

    def to_json(self, source: str, output: str, plan: Plan | None = None) -> Mapping[str, object]:
        """The `remap` object of the contract; with the `plan`, as of a dry run."""
        return {
            "schema": SCHEMA,
            "source": source,
            "output": output,
            "from": self.source_form,
            "to": self.form,
            **self.counts,
            "dropped": [".".join(filter(None, (d.section, d.key))) for d in self.plan.dropped],
            "sections": list(self.sections),
            "by_code": [{"way": run.way, "model": run.model, "keys": keys} for run, keys in self.plan.by_code],
            "optimizer": _to_json(self.optimizers),
            "notes": list(self.notes),
            **({} if self.written is None else {"written": self.written.to_json()}),
            **({} if self.verified is None else {"verified": VERIFIED.write(self.verified)}),
            **({} if self.cost is None else {"cost": COST.write(self.cost)}),
            **({} if plan is None else {"plan": plan.to_json()}),
        }


def _to_json(done: Sequence[OptimizerRemap]) -> Mapping[str, Any] | None:
    """The `optimizer` object of the contract; `sections` has one for each optimizer of the file."""
    if not done:
        return None
    first, params = done[0], sum(one.params for one in done)
    return {"from": first.was, "to": first.to, "params": params, "sections": _SECTIONS.write(done)}


_FORM = one_of(*FORMS)
_SECTIONS = list_of(
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
OPTIMIZER = nullable(object_of({"from": _FORM, "to": _FORM, "params": COUNT, "sections": _SECTIONS}))
