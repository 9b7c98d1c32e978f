"""The result of a swap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.containers.program import program_of
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.expression import Expression
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    TEXT,
    TEXTS,
    list_of,
    notes_as,
    nullable,
    one_of,
    record,
    unless_empty,
)
from ckpttool.core.values import dataclass, public
from ckpttool.remapping.write import COST, VERIFIED, Cost, Verified
from ckpttool.swap.weight_map import constants_of


class ComparedConstant(NamedTuple):
    """A tensor of the program that is not in NEW, compared with the model's; `reason` says why it
    is not equal.

    `verdict` is ``equal``, ``different`` (and unchanged), ``from_model`` (its new value) or
    ``not_compared``.
    """

    name: str
    verdict: str
    reason: str = ""


@public
@dataclass(frozen=True, slots=True)
class Swap:
    """The program with its new weights.

    Attributes:
        program: The index of the program as it is written.
        sources: FQN -> expression over the checkpoint's keys.
        form: The form of the checkpoint's keys.
        ignored: Entries of the checkpoint that no program holds.
        kept: Tensors of the program that no checkpoint of the model has: counters of
            AveragedModels, buffers that are not saved.
        compared: How each constant that is not in NEW compares with the model's.
        cost: The bytes that a dry run found it to read, write and hold.
        verified: How the output was checked.
        source: The operand PROGRAM.
        weights: The operand NEW.
        output: The operand OUT.
        unchanged: True if the program had all of these values before.
        notes: Remarks on the files that were read.
    """

    program: Checkpoint
    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]
    kept: tuple[str, ...] = ()
    compared: tuple[ComparedConstant, ...] = ()
    cost: Cost | None = None
    verified: Verified | None = None
    source: str = ""
    weights: str = ""
    output: str = ""
    unchanged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """The program's constants that are unchanged."""
        new = set(self.sources)
        new.update(const.name for const in self.compared if const.verdict == "from_model")
        return tuple(entry.key for entry in constants_of(self.program) if entry.key not in new)

    @property
    def by_code(self) -> tuple[str, ...]:
        """The weights that were computed by running the model's own loading on the checkpoint."""
        return tuple(fqn for fqn, source in self.sources.items() if any(ex.calls(source)))

    def values_json(self) -> dict[str, object]:
        return {fqn: ex.to_json(source) for fqn, source in self.sources.items()}

    @property
    def layout(self) -> str:
        file = program_of(self.program)
        return self.program.format if file is None else file.layout

    def to_json(self) -> dict[str, Any]:
        """Return the `swap-weights` object of the contract."""
        return dict(SWAP.write(self))


SWAP = record(
    Swap,
    {
        **dict.fromkeys(("program", "weights", "output"), TEXT),
        "swapped": COUNT,
        "unchanged": FLAG,
        **dict.fromkeys(("kept", "constants"), TEXTS),
        "constant_values": list_of(
            record(
                ComparedConstant,
                {
                    "name": TEXT,
                    "verdict": one_of("equal", "different", "from_model", "not_compared"),
                    "reason": nullable(unless_empty(TEXT)),
                },
            )
        ),
        **dict.fromkeys(("layout", "from"), TEXT),
        **dict.fromkeys(("ignored", "by_code"), TEXTS),
        "notes": notes_as("reader"),
    },
    {"verified": VERIFIED, "cost": COST},
    called={
        "program": "source",
        "constant_values": "compared",
        "swapped": lambda swapped: len(swapped.sources),
        "from": "form",
    },
    title="ckpttool.swap/1",
)
