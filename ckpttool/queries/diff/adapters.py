"""What a diff says of adapters: that a side is one, what it touches on the other side, and what matches nothing."""

from __future__ import annotations

from collections.abc import Collection

from ckpttool.naming.adapters import Adapter, adapter_of, missing_modules
from ckpttool.words import plural, some


def adapter_notes(left: Collection[str], right: Collection[str], names: tuple[str, str]) -> tuple[str, ...]:
    """Sentences on the adapters of two sides' keys; none where both have them, or neither. `names` are the sides'."""
    mine, theirs = adapter_of(left), adapter_of(right)
    if mine is not None and theirs is None:
        return _notes(mine, right, *names)
    if theirs is not None and mine is None:
        return _notes(theirs, left, *reversed(names))
    return ()


def _notes(adapter: Adapter, base: Collection[str], side: str, other: str) -> tuple[str, ...]:
    lost = missing_modules(adapter, base)
    count = plural(len(adapter.modules), "module")
    touched = f"{len(adapter.modules) - len(lost) if lost else 'all'} of them are in {other}"
    if adapter.alone:
        what = f"{side} is {adapter.title} for {count}, {touched}; it has no weights of the model itself"
        mend = (
            "PEFT's PeftModel.from_pretrained(BASE, FOLDER) adds it to its base, and merge_and_unload() merges the two"
        )
    else:
        what = f"{side} has {adapter.title} beside {count}, {touched}; without it the weights are not the trained ones"
        mend = "PEFT's merge_and_unload() merges it"
    notes = [f"{what}: {mend}"]
    if lost:
        notes.append(f"{plural(len(lost), 'adapted module')} not in {other}: {some(lost)}")
    return tuple(notes)
