"""The answer of `diff`: what differs between two namings or two checkpoints, and why.

Every key of each side stands in exactly one entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpttool.checkpoint import Section
from ckpttool.names import Hook, Names, hook_json
from ckpttool.naming.inference.values import Inference

SCHEMA = "ckpttool.diff/1"
HARMLESS = frozenset({"same", "alias", "not_serialized", "extra_state"})
# The reason of a missing key whose tensor is there under another name: a remap through the model mends it.
TIED = "tied: the model has it under several names, left under one of them (as save_pretrained saves it)"
# The reason of a difference in shape where it is not the sizes that differ.
KIND = "another kind of tensor"
STATUSES = (
    *("same", "renamed", "transformed", "order", "alias", "shape", "dtype", "value"),
    *("missing", "unexpected", "not_serialized", "extra_state"),
)


class Outline(Protocol):
    """What is told of a tensor beside its key; the shape is None where it hangs on values."""

    @property
    def dtype(self) -> str:
        """Torch's name without ``torch.``."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its sizes."""


Outlines = Mapping[str, Outline]


def outlines(section: Section) -> Outlines:
    """The tensors of a section, by key."""
    return {entry.key: entry for entry in section.tensors}


def names_outlines(names: Names) -> tuple[Outlines, Outlines]:
    """What a model saves, by key, and its own tensors, by FQN."""
    return {key.key: key for key in names.serialized}, {tensor.fqn: tensor for tensor in names.runtime}


@dataclass(frozen=True, slots=True)
class Entry:
    """One finding. `reason` is one sentence for all entries with the same cause; `detail` is this entry's own.

    `spread` is how far other values are apart, where that was measured: pairs of ``(exponent of 2, elements)``.
    """

    status: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str = ""
    hook: Hook | None = None
    detail: str | None = None
    spread: tuple[tuple[int, int], ...] = ()

    @property
    def why(self) -> str:
        """The reason, and by which hook."""
        hook = self.hook
        return self.reason if hook is None else f"{self.reason}: {hook.function} ({hook.file}:{hook.line})"


@dataclass(frozen=True, slots=True)
class Diff:
    """The answer of `diff`. `fix` are commands that can be pasted; `notes` are sentences about no single key.

    `inferred` is what may be one tensor under two names, where no model was there to ask: suggestions, on which
    `identical` does not rest; `rules` is the text of a rules file that carries them out. None where the question does
    not arise, and where there are no such rules. `exchangeable` are keys of one shape in the same layers, which only
    their names tell apart: a tuple for each shape. `outlines` are the tensors of each side by key, in its own order, as
    far as they are known.
    """

    left: str
    right: str
    identical: bool
    entries: tuple[Entry, ...]
    fix: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inferred: Inference | None = None
    rules: str | None = None
    exchangeable: tuple[tuple[str, ...], ...] = ()
    outlines: tuple[Outlines, Outlines] = field(default=({}, {}), compare=False, repr=False)

    @property
    def summary(self) -> dict[str, int]:
        """Status -> number of entries, in the order of `STATUSES`, without zeros."""
        count = Counter(entry.status for entry in self.entries)
        return {status: count[status] for status in STATUSES if count[status]}

    def to_json(self) -> dict[str, Any]:
        """The `diff` object of the contract."""
        return {
            "schema": SCHEMA,
            "left": self.left,
            "right": self.right,
            "identical": self.identical,
            "summary": self.summary,
            "entries": [_entry_json(entry) for entry in self.entries],
            "fix": list(self.fix),
            "notes": list(self.notes),
            **({"exchangeable": [list(keys) for keys in self.exchangeable]} if self.exchangeable else {}),
            **({} if self.inferred is None else {**_inferred_json(self.inferred), "rules": self.rules}),
        }


def _inferred_json(inferred: Inference) -> dict[str, Any]:
    return {
        "suggested": [
            {"left": list(p.left), "right": list(p.right), "evidence": p.evidence, "transposed": p.transposed or None}
            for p in inferred.pairs
        ],
        "ambiguous": [
            {"left": list(one.left), "right": list(one.right), "reason": one.reason} for one in inferred.ambiguous
        ],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "status": entry.status,
        "left": list(entry.left),
        "right": list(entry.right),
        "reason": entry.reason,
    }
    if entry.hook is not None:
        found["hook"] = hook_json(entry.hook)
    if entry.detail is not None:
        found["detail"] = entry.detail
    return found
