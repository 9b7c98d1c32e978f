"""The fix that a diff suggests, and what no command fixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.text import Info, plural, some
from ckpttool.diffing.result import KIND, OBJECT, Diff, Entry, Remedy
from ckpttool.diffing.sections import COMPUTED, MENDED, MENDED_BY
from ckpttool.fixes import candidates
from ckpttool.fixes.candidates import Way, with_a_model
from ckpttool.fixes.rules_file import INFERRED, OF_RULES, PART, Suggested, needs_file, through_file
from ckpttool.fixes.trial import PLACEHOLDERS, Attempt, Question, command, try_remap, untried
from ckpttool.formats.ranks.files import one_rank
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.remarks import PLACEHOLDER
from ckpttool.naming.wrappers import ADAPTERS
from ckpttool.operands.checkpoint import model_section, open_operand, split
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import operand, outputs
from ckpttool.remapping.options import RemapOptions

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


FOREIGN = "no fix is suggested, since the new model has no place for these keys, and their values would be lost"
UNMENDED = (
    "no remap makes this state fit: load the model alone, and start the optimizer afresh; the file is left as it is"
)


def optimizer_fix(question: Question, diff: Diff, remedy: Remedy) -> Diff:
    """`diff` with the command that fixes it: tried, unless it names what only the user knows; else a note."""
    assert question.left is not None
    path, picked = split(question.left.source)
    whole = question.left if picked is None else open_operand(path)
    if remedy.foreign_keys:
        lost = f"{FOREIGN}: {some(remedy.foreign_keys)}"
        return replace(diff, notes=(*diff.notes, lost))
    if remedy.way != "afresh":
        word, options = _way(question, remedy)
        if set(PLACEHOLDERS).intersection(v for v in vars(options).values() if isinstance(v, str)):
            named = operand(path, whole.format)
            return replace(diff, fix=(command("remap", (named,), replace(options, out=next(outputs(named, word)))),))
        found = try_remap(replace(question, left=whole, picked=picked), options, word, question.remaining(diff))
        if found is not None:
            return replace(diff, fix=(found.command,))
    return replace(diff, notes=(*diff.notes, UNMENDED))


def _lacks_keys(question: Question) -> bool:
    """Return whether the model has keys that the file may lack under any name."""
    assert question.left is not None
    if question.model is None or not question.left.state_dicts:
        return False
    return len(question.model.names().serialized) > max(len(one.keys) for one in question.left.state_dicts)


def _way(question: Question, remedy: Remedy) -> Way:
    """The word for the output's name, and the remap, with placeholders for what the question does not name."""
    asked, made = question.options, None if question.model is None else question.model.optimizer
    model: dict[str, Any] = {"model": asked.model, "model_kwargs": asked.model_kwargs, "materialize": asked.materialize}
    model = {"model": "MODEL"} if asked.model is None else model
    form = remedy.form
    old = {True: made, False: "OLD_OPTIMIZER", None: None}[remedy.same_groups]
    ways: Mapping[str, tuple[str, dict[str, Any]]] = {
        "by_name": ("ordered", {**model, "optimizer": made, "optimizer_keys": form}),
        "regroup": ("mapped", {**model, "to_optimizer": made}),
        "old_model": (
            "mapped",
            {
                "model": "OLD",
                "optimizer": None if made is None else old,
                "to_model": asked.model,
                "to_model_kwargs": asked.model_kwargs,
                "materialize": asked.materialize,
                "to_optimizer": made,
                "partial": _lacks_keys(question),
            },
        ),
        "like_right": (form or "ordered", {**model, "to_optimizer": made or "OPTIMIZER", "optimizer_keys": form}),
        "keys_by_model": (form or "", {**model, "optimizer": made, "optimizer_keys": form}),
        "keys": (form or "", {"optimizer_keys": form}),
    }
    word, fields = ways[remedy.way]
    return word, RemapOptions(**fields)


_NOT_BY_NAMES = {"shape", "dtype", "value"}
DROPPED = Info("--drop leaves out second names only: their values are in the output, under another name")
UNREAD = "values of tensors without a partner by name were not compared: diff --values of the output does"
_UNPAIRED = ("missing", "transformed")
OWN_NAMES = Info("swap-weights gives the program all of the weights, and leaves it the names that it has")


def answered(question: Question, diff: Diff, suggests: bool = False) -> Diff:
    """Return the diff with fixes, and a note on those that could not be tried.

    `suggests`: give the rules that lead to a model's keys too, even if a command needs no file for them.
    """
    found = _answered(question, diff, suggests)
    return replace(found, notes=(*found.notes, *untried(found.fix)))


def _answered(question: Question, diff: Diff, suggests: bool) -> Diff:
    """`diff`, the answer, with commands that mend it. Suggested rules in a file mend what nothing else mends whole."""
    if question.left is None or question.right is None:
        done = suggest(question, diff)
        if suggests or not done.fix:
            ruled = _with_rules(done, diff, question.left, question.model)
            return ruled if suggests else _by_rules(done, ruled, question)
        return done
    suggested = Suggested(diff, question.left, question.right)
    done = suggest(question, diff, suggested)
    if diff.inferred is None:
        return done
    ruled = suggested.told(values=question.options.comparison is not None)
    if needs_file(ruled) and (not done.fix or PART in done.notes):
        return replace(ruled, notes=(*ruled.notes, *([INFERRED] if diff.inferred.pairs else [])))
    more = tuple(note for note in ruled.notes if note not in (*done.notes, PART))  # not of the rules' command
    return replace(done, rules=ruled.rules, notes=(*done.notes, *more))


def _with_rules(done: Diff, diff: Diff, left: Checkpoint | None, model: ModelOperand | None) -> Diff:
    """`done`, made of `diff`, with the rules that lead from the checkpoint's keys to the model's."""
    if left is None or model is None or not left.state_dicts or left.format == "pt2":
        return done
    ruled = candidates.suggested_for(left, model).told()
    if ruled.rules is None:
        return done
    undone = [note for note in ruled.notes if note == PART or note.startswith(OF_RULES)]
    notes = [note for note in (done if undone else diff).notes if note not in (PART, INFERRED)]
    return replace(done, rules=ruled.rules, notes=(*notes, *undone, INFERRED))


def _by_rules(done: Diff, ruled: Diff, question: Question) -> Diff:
    """Return `ruled` with the commands that write its rules and carry them out, or `done` if they leave something."""
    left, model = question.left, question.model
    if ruled.rules is None or left is None or model is None or done.remedy is not None or left.format == MEMORY.name:
        return done
    if any(note == PART or note.startswith(OF_RULES) for note in ruled.notes):
        return done
    return through_file(replace(ruled, rules=done.rules), left.source, *model.words)


def suggest(question: Question, diff: Diff, suggested: Suggested | None = None) -> Diff:
    """`diff` with commands that mend it, each tried, and a sentence for what none of them mends.

    `suggested` are the rules that two checkpoints suggest.
    """
    if diff.remedy is not None:
        return optimizer_fix(question, diff, diff.remedy)
    if question.left is None:
        from ckpttool.fixes.candidates import of_names

        return of_names(question, diff)
    if not question.left.state_dicts:
        return diff
    if question.options.optimizer is not None and question.right is None:  # the state fits, the model may not
        fixes = (try_remap(question, options, word) for word, options in candidates.next_to_state(question))
        whole = next((fix for fix in fixes if fix is not None and fix.after.identical), None)
        return diff if diff.identical or whole is None else replace(diff, fix=(whole.command,))
    swaps, notes = _swaps(question)
    if swaps and swaps[0].after.identical:
        return replace(diff, fix=(swaps[0].command,))
    best = _best(question, question.left, diff, suggested)
    best = None if swaps and best and best.drops else best  # the program takes what only a remap would drop
    found = [*swaps, *([best] if best else [])]
    swappable = bool(best and best.infers) and is_about_a_program(question)  # the program's own model knows better
    unknown = with_a_model(question, diff) if swappable or not found else ()
    notes += [OWN_NAMES] if swaps else []
    notes += [INFERRED] if best and best.infers else []
    notes += [DROPPED] if best and best.drops else []
    unpaired = question.options.comparison is not None and any(e.status in _UNPAIRED for e in diff.entries)
    notes += [UNREAD] if best and unpaired else []
    if not unknown and not swaps:
        notes += [PART] if best and not best.after.identical else []
        notes += sentences(question.left, diff, _left_over(question, diff, best))
    return replace(diff, fix=(*unknown, *(attempt.command for attempt in found)), notes=(*diff.notes, *notes))


def _left_over(question: Question, diff: Diff, best: Attempt | None) -> Diff:
    """What still differs once the best way is gone: values, which it was not asked about, as they do now."""
    if best is None:
        return diff
    names = () if best.after.identical else best.after.entries
    return replace(best.after, entries=(*names, *question.of_values(diff)))


def _best(question: Question, left: Checkpoint, diff: Diff, suggested: Suggested | None) -> Attempt | None:
    """The first way after which the two are the same; else the one that leaves the least to do, if it helps at all."""
    differing = {entry.status for entry in diff.entries} - {"same"}
    if any(entry.left != entry.right for entry in question.of_values(diff)):
        differing.add("renamed")  # the names can be mended where the values cannot
    if one_rank(left):
        return None  # what the other ranks hold, no command makes of it
    not_by_names = _NOT_BY_NAMES if question.right is not None else _NOT_BY_NAMES - {"value"}
    if differing and differing <= not_by_names and left.format != "rank_files":
        return None
    worth = (
        candidates.to_load(question, diff) if suggested is None else candidates.to_compare(question, diff, suggested)
    )
    best, least = None, question.remaining(diff)
    for word, options in worth:
        attempt = try_remap(question, options, word, least)
        if attempt is not None and attempt.after.identical:
            return attempt
        if attempt is not None:
            best, least = attempt, question.remaining(attempt.after)
    return best


def _swaps(question: Question) -> tuple[list[Attempt], list[str]]:
    if not is_about_a_program(question):
        return [], []
    from ckpttool.fixes.candidates import by_swap

    return by_swap(question)


def is_about_a_program(question: Question) -> bool:
    """Whether one of two checkpoints is an exported program."""
    left, right = question.left, question.right
    return left is not None and right is not None and "pt2" in (left.format, right.format)
