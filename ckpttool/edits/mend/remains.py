"""What no command mends, in sentences: how much it is, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.formats.ranks.files import one_rank
from ckpttool.formats.remarks import PLACEHOLDER
from ckpttool.naming.wrappers.chain import ADAPTERS
from ckpttool.operands.checkpoint import model_section
from ckpttool.queries.diff.computed import COMPUTED, MENDED
from ckpttool.queries.diff.elsewhere import MENDED_BY
from ckpttool.queries.diff.result import KIND, OBJECT, Diff, Entry
from ckpttool.words import plural, some

_FEW = 3
_ADAPTER = (
    "the left holds an adapter alone, no model: load it onto its base with PeftModel.from_pretrained(base, FOLDER), "
    "and save merge_and_unload() for a model without adapters"
)

# Status of what remains -> what it is called, what is so with it, and what to do instead.
_SAID: dict[str, tuple[str, str, str]] = {
    "missing": (
        "key",
        "that no name of the left leads to",
        "take what is absent from a checkpoint that has it, or load with strict=False and initialise it; what is there "
        "under other names gets these by --rule 'FROM => TO'",
    ),
    "shape": (
        "tensor",
        "of another shape, which no rename mends",
        "build the model as it was when this was saved (--model-kwargs), or cut, pad or reshape them yourself",
    ),
    "dtype": (
        "tensor",
        "of another dtype",
        "--ignore-dtype takes that for no difference, as loading converts; `cast` in a file of rules does it now",
    ),
    "value": ("tensor", "with other values, which no rename mends", "these are two states of training, or two models"),
    "unexpected": (
        "key",
        "without a place on the right",
        "no fix is suggested, since it would have to lose values; --rule 'FROM => TO' renames what is there under "
        "another name",
    ),
    "renamed": ("key", "under another name", "--rule 'FROM => TO' gives it the name that it has on the right"),
    "transformed": (
        "key",
        "computed when the model is saved",
        "load the checkpoint into the model, and save its state_dict()",
    ),
    "alias": (
        "second name",
        "of a tensor, on one side only",
        "remap --model MODEL writes all names that the model ties",
    ),
    COMPUTED: ("key", *MENDED),
    OBJECT: ("object", "with another content, which no rename mends", "it is carried whole: take it from the right"),
}
_DIFFERING = ("shape", "dtype", "value")


def sentences(left: Checkpoint, before: Diff, after: Diff) -> tuple[str, ...]:
    """Why `after`, which is `before` where nothing helped, is not the same: a sentence for each cause."""
    if one_rank(left):
        return ()  # the diff has said so, and that says it all
    if after is before and is_adapter(model_section(left)):
        return (_ADAPTER,)
    return tuple(_said(cause, entries) for cause, entries in _by_cause(after))


def _by_cause(diff: Diff) -> Iterator[tuple[str, Sequence[Entry]]]:
    found: dict[str, list[Entry]] = {}
    for entry in diff.entries:
        if entry.status != "same":
            found.setdefault(_cause(entry), []).append(entry)
    yield from ((cause, found[cause]) for cause in (*_SAID, *MENDED_BY) if cause in found)


def _cause(entry: Entry) -> str:
    """The status, or what is so with values that are there in another place or order, or as others."""
    if COMPUTED in entry.reason:
        return COMPUTED
    if entry.status in _DIFFERING and entry.reason.startswith(OBJECT):
        return OBJECT
    found = (words for words in MENDED_BY if entry.status == "value" and words in entry.reason)
    return next(found, entry.status)


def _said(cause: str, entries: Sequence[Entry]) -> str:
    noun, is_so, instead = _SAID[cause] if cause in _SAID else ("tensor", *MENDED_BY[cause])
    if any(PLACEHOLDER in entry.reason for entry in entries):
        is_so, instead = "without its values", PLACEHOLDER
    if any(KIND in entry.reason for entry in entries):
        is_so, instead = "of another kind", "read it where its class is known, and save plain tensors"
    keys = [(entry.right or entry.left)[0] for entry in entries]
    return f"{plural(len(keys), noun)} {is_so} ({some(keys, _FEW)}): {instead}"


def is_adapter(section: Section) -> bool:
    """Whether all tensors are those of adapters (LoRA and its like), without the layers that they adapt."""
    keys = [entry.key for entry in section.tensors]
    return bool(keys) and all(any(part.startswith(ADAPTERS) for part in key.split(".")) for key in keys)
