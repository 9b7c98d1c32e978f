"""Notes on the keys of both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence

from ckpttool.containers.rank_shards import (
    is_of_ranks,
)
from ckpttool.core.checkpoint import Section
from ckpttool.core.strides import Shape
from ckpttool.core.text import Note, plural, some
from ckpttool.diffing.causes import FIELDS, Sides
from ckpttool.diffing.result import Entry
from ckpttool.kinds.adapters import Adapter, misfits, missing_modules
from ckpttool.kinds.quantized import quantized_weights

# Notes on the keys of both sides


def hidden_segments(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return notes on keys that differ from a key of the other side by one segment: a hook may hide
    it.

    It is a hint only: nobody knows without the model.
    """
    entries = list(entries)
    missing = [entry.right[0] for entry in entries if entry.status == "missing"]
    unexpected = [entry.left[0] for entry in entries if entry.status == "unexpected"]
    notes = []
    for side, longer, shorter in (
        (FIELDS[0], missing, unexpected),
        (FIELDS[1], unexpected, missing),
    ):
        for segment, count in _missing_segments(longer, shorter).items():
            text = (
                f"{plural(count, 'key')} in {side} without the segment `{{}}` of the other side: a"
                " state_dict hook may hide it (pass --model to know)"
            )
            notes.append(Note.about(text, "hidden-segment", segment))
    return tuple(notes)


def _missing_segments(longer: Sequence[str], shorter: Sequence[str]) -> Counter[str]:
    """Count the segments without which a longer key is one of the shorter ones."""
    keys = set(shorter)
    dots = {key.count(".") + 1 for key in shorter}
    counts: Counter[str] = Counter()
    for key in longer:
        hit = without_segment(key, keys) if key.count(".") in dots else None
        if hit is not None:
            counts[hit[1]] += 1
    return counts


def without_segment(key: str, keys: Container[str]) -> tuple[str, str] | None:
    """Return the one of `keys` that is this key without a segment, and the segment; None if there
    are none or more.
    """
    hits, start = {}, 0
    for segment in key.split("."):
        end = start + len(segment) + 1
        name = key[:start] + key[end:]
        if end > len(key):  # the last segment: the dot before it goes
            name = name[:-1]
        if name in keys:
            hits[name] = segment
        start = end
    return hits.popitem() if len(hits) == 1 else None


def adapter_notes(
    adapters: tuple[Adapter | None, Adapter | None],
    keys: tuple[Collection[str], Collection[str]],
    sides: Sides,
    sections: tuple[Section, Section] | None = None,
) -> tuple[str, ...]:
    """Return notes if only one side has an adapter; `sides` may be fields of `Note.about`. The
    shapes in the adapter and in its base are compared if the `sections` are given.
    """
    if (adapters[0] is None) == (adapters[1] is None):
        return ()
    adapted, base = (1, 0) if adapters[0] is None else (0, 1)
    adapter, other = adapters[adapted], sides[base]
    assert adapter is not None
    lost = missing_modules(adapter, keys[base])
    wrong: list[str] = []
    if sections is not None:
        wrong = misfits(adapter, _plain_shapes(sections[adapted]), _plain_shapes(sections[base]))
    notes = [
        Note.about(_about_adapter(adapter, sides, adapted, len(lost)), "adapter", adapter.title)
    ]
    for modules, problem in ((lost, "not"), (wrong, "of another shape")):
        if modules:
            words = f"{plural(len(modules), 'adapted module')} {problem} in {other}: {{}}"
            notes.append(Note.about(words, "adapter", some(modules)))
    return tuple(notes)


def _about_adapter(adapter: Adapter, sides: Sides, adapted: int, lost: int) -> str:
    """Return the words on the adapter of one side, with a field for its title; the other side does
    not have `lost` of its modules.
    """
    side, other = sides[adapted], sides[1 - adapted]
    total = len(adapter.modules)
    present = str(total - lost) if lost else "all"
    count, touched = plural(total, "module"), f"{present} of them are in {other}"
    if adapter.alone:
        return f"{side} is {{}} for {count}, {touched}; it does not have the weights of the model"
    words = f"{side} has {{}} next to {count}, {touched}"
    if adapted == 0:
        words += "; without it the weights are not the trained ones"
        if adapter.by_peft:
            words += (
                ": load the state dict into get_peft_model(MODEL, config), and save the"
                " state_dict() of what its merge_and_unload() returns"
            )
    return words


def _plain_shapes(section: Section) -> dict[str, Shape]:
    """Return the shapes of tensors that are whole, and not quantized: others may be packed."""
    packed = {weight.weight for weight in quantized_weights(section)}
    shapes = {}
    for entry in section.tensors:
        if entry.key not in packed and not is_of_ranks(entry):
            shapes[entry.key] = entry.shape
    return shapes
