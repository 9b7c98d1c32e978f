"""The differences that a fix leaves, and advice on them."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.core.codes import CODES
from ckpttool.core.tables import present
from ckpttool.core.text import Info, Note, plural, some
from ckpttool.diffing.causes import OBJECTS, Code
from ckpttool.diffing.result import HARMLESS, Entry, Unfixed, alike
from ckpttool.fixes.commands import FEW
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.rules_file import Rules, renamed, with_file
from ckpttool.fixes.trial import TriedFix
from ckpttool.remapping.options import RemapOptions

# Code -> what the keys are; its row says what to do.
_UNFIXED: dict[str, tuple[str, str]] = {
    "quantized": ("key", "of quantized weights"),
    "missing": ("key", "missing from {left}"),
    "tied": ("second name", "missing from {left}, of a tensor that is there"),
    "split-tensor": ("tensor", "split between ranks"),
    "shape": ("tensor", "of a different shape, which no rename fixes"),
    "dtype": ("tensor", "of a different dtype"),
    "value": ("tensor", "with different values, which no rename fixes"),
    "unread-value": ("tensor", "with values that were not compared"),
    "tied-value": ("tensor", "with two values under its names"),
    "lost-value": ("key", "whose values loading does not read"),
    "unexpected": ("key", "not in {right}"),
    "renamed": ("key", "under another name"),
    "transformed": ("key", "computed when the model is saved"),
    "alias": ("second name", "on one side only"),
    "part": ("key", "of parameters that one side computes from others"),
    "object": ("object", "with different content, which no rename fixes"),
    "rotary-order": ("tensor", "with rows in the other rotary-embedding order"),
    "row-order": ("tensor", "with rows in a different order"),
    "transposed": ("tensor", "transposed"),
    "moved": ("tensor", "with values that {right} has under other names"),
    "placeholder": ("tensor", "without values"),
    "kind": ("tensor", "of a different kind"),
}


def unfixed_by(question: DiffQuestion, best: TriedFix | None) -> tuple[Unfixed, ...]:
    """Return the differences that are left after the best fix, if there is one, by their codes."""
    entries: Sequence[Entry] = question.diff.entries
    if best is not None:  # a rename does not change values that differ
        entries = () if best.after.identical else best.after.entries
        entries = (*entries, *question.different_values(question.diff))
    accepted = (HARMLESS | question.diff.harmless) - {"alias"}
    keys: dict[str, list[str]] = {code: [] for code in _UNFIXED}
    for group in alike(entries):
        if group[0].is_one_of(accepted):
            continue
        keys_of_code = keys.setdefault(_code(group[0]), [])
        for entry in group:
            names = entry.right or entry.left or ("",)
            keys_of_code.append(names[0])
    return tuple(Unfixed(code, tuple(names)) for code, names in keys.items() if names)


def advice_on(
    question: DiffQuestion, unfixed: Sequence[Unfixed], rules: Rules | None = None
) -> list[Note]:
    """Return the sentences about keys that are left, if there is something to do about them.
    `rules` are not applied yet.
    """
    advice = [_advice(group) for group in unfixed]
    keys = {group.code: group.keys for group in unfixed}
    if "missing" in keys and "unexpected" in keys:
        advice.append(_other_names(question, keys["missing"], rules))
    return present(advice)


def _other_names(question: DiffQuestion, missing: Sequence[str], rules: Rules | None) -> Note:
    """Return the command that shows likely renames if the rules write missing keys, else the remap
    by the user's own rules.
    """
    left, right, model = question.left, question.right, question.model
    assert left is not None
    if rules is None or set(rules.remaining).issuperset(missing):
        line = renamed(left.source, RemapOptions(rule=("FROM => TO",)))
        return Info(f"for tensors that only have another name, run `{line}`", "other-names")
    words: Sequence[str] = ()
    if right is not None:
        words = (right.source,)
    elif model is not None:
        words = model.words
    line, _ = with_file(left.source, *words, options=RemapOptions())
    return Info(f"to see likely pairs, run `{line}`", "other-names")


def _advice(unfixed: Unfixed) -> Note | None:
    """Return the sentence about keys that are left, None if there is nothing to do about them."""
    if unfixed.code not in _UNFIXED:
        return None
    advice = CODES[unfixed.code].fix.rstrip(".")
    advice = f"{advice[0].lower()}{advice[1:]}"
    keys = some(unfixed.keys, FEW)
    return Note.about(f"{_counted(unfixed)} ({{}}): {{}}", unfixed.code, keys, advice)


def described(unfixed: Unfixed) -> Note:
    """Return which keys are left, without advice."""
    return Note.about(f"{_counted(unfixed)} ({{}})", unfixed.code, some(unfixed.keys, FEW))


def _counted(unfixed: Unfixed) -> str:
    noun, what = _UNFIXED.get(unfixed.code, ("key", ""))
    return f"{plural(len(unfixed.keys), noun)} {what or unfixed.code}"


def _code(entry: Entry) -> str:
    """Return the code that says best what could fix the entry."""
    if entry.cause is None:
        return entry.status
    if entry.status in ("shape", "dtype", "value") and entry.cause.code in OBJECTS:
        return "object"
    if entry.has(Code.QUANTIZED):
        return "quantized"
    for code in reversed(entry.cause.codes):
        if code in _UNFIXED:
            return code
    return entry.status
