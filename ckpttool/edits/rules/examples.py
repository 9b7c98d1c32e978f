"""Examples in a rules file: tensors before and after its rules, which are tried when the file is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Section, TensorEntry, in_row_major
from ckpttool.edits.rules.notation import Shown, shown, words
from ckpttool.edits.rules.steps import Step, state_of
from ckpttool.errors import Refused
from ckpttool.values import dataclass

_FIELDS = {"before", "after", "sizes"}


@dataclass(frozen=True, slots=True)
class Example:
    """Tensors that the rules are given, what they make of them, and named sizes."""

    before: tuple[Shown, ...]
    after: tuple[Shown, ...]
    sizes: Mapping[str, int]

    @staticmethod
    def of(table: Mapping[str, Any]) -> Example:
        """The example of a table without faults."""
        before, after = (tuple(filter(None, map(shown, table[side]))) for side in ("before", "after"))
        return Example(before, after, table.get("sizes", {}))

    def reversed(self) -> Example:
        """The example of the way back."""
        return replace(self, before=self.after, after=self.before)


def faults_of(table: Any) -> list[str]:
    """What is wrong with one table ``[[example]]``."""
    if not isinstance(table, dict):
        return ["not a table"]
    found = [f"an example takes no {name!r}" for name in table if name not in _FIELDS]
    for side in ("before", "after"):
        texts = table.get(side)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            found.append(f"{side!r} is not a list of tensors, as in ['w [4, 2]']")
        else:
            found += [
                f"{text!r} in {side!r} is not a tensor, as in 'w [4, 2] bfloat16'" for text in texts if not _whole(text)
            ]
    sizes = table.get("sizes", {})
    if not isinstance(sizes, dict) or any(type(size) is not int or size < 1 for size in sizes.values()):
        found.append("'sizes' is not a table of positive integers")
    return found


def _whole(text: str) -> bool:
    one = shown(text)
    return one is not None and -1 not in (one.shape or ())


def failures(example: Example, steps: Sequence[Step]) -> list[str]:
    """In what the rules do not make of the example what it says, in words. A dtype that is not said may be any."""
    entries = tuple(_entry(one) for one in example.before)
    try:
        state, _ = state_of(steps, Section("", "state_dict", entries), whole=False)
    except Refused as error:
        return [str(problem) for problem in error.problems]
    wanted = {one.key: one for one in example.after}
    found = [f"the rules make no {key}" for key in wanted if key not in state]
    found += [f"the rules leave or make {key} too" for key in state if key not in wanted]
    found += [
        f"{key} is {words(state[key])}, not {words(_entry(one))}"
        for key, one in wanted.items()
        if key in state and not one.is_like(state[key])
    ]
    return found


def _entry(one: Shown) -> TensorEntry:
    shape = one.shape or ()
    return in_row_major(one.key, one.dtype or "float32", shape, None)
