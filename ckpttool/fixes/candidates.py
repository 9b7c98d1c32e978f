"""Commands that may fix a diff, the simplest first."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.keys import dotted
from ckpttool.core.text import plural, shell, some
from ckpttool.diffing.names import compare_with_code, is_of_keys
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff
from ckpttool.diffing.run import run as run_diff
from ckpttool.fixes.rules_file import INFERRED, Suggested, by_file, needs_file
from ckpttool.fixes.trial import Attempt, Question, command, untried
from ckpttool.naming.convert import ModelForm, read
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, as_read, read_names, saved_by
from ckpttool.operands.output import free, operand, outputs
from ckpttool.remapping import run as remap
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap import swap
from ckpttool.swap.swap import Misfit, SwapOptions

_MOST = 24  # --drop options on one command line


class Keys:
    """Keys, asked which of them a pattern names."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self._keys)

    @cached_property
    def _segments(self) -> set[str]:
        return set(chain.from_iterable(key.split(".") for key in self._keys))

    @cached_property
    def _last(self) -> set[str]:
        return {key.rpartition(".")[2] for key in self._keys}

    def below(self, way: str) -> Iterator[str]:
        """``way.{rest*}``, where ``rest`` may be no segment at all."""
        if way in self._keys:
            yield way
        for at in range(bisect_left(self._ordered, f"{way}."), len(self._ordered)):
            if not self._ordered[at].startswith(f"{way}."):
                break
            yield self._ordered[at]

    def inside(self, segment: str) -> Iterator[str]:
        """``{module*}.segment.{rest*}``."""
        return (key for key in self._keys if segment in key.split(".")) if segment in self._segments else iter(())

    def ending(self, segment: str) -> Iterator[str]:
        """``{module*}.segment``."""
        return (key for key in self._keys if key.rpartition(".")[2] == segment) if segment in self._last else iter(())

    def exactly(self, key: str) -> Iterator[str]:
        """The key by itself."""
        return iter((key,) if key in self._keys else ())


Pattern = tuple[str, Callable[[Keys], Iterator[str]]]  # as it is written, and the keys that it names


def drops(gone: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Patterns that match all keys of `gone` and none of `kept`; None where none do, or too many to be of use."""
    spared, all_gone = Keys(kept), Keys(dict.fromkeys(gone))
    found: list[str] = []
    rest = dict.fromkeys(gone)
    while rest:
        if len(found) == _MOST:
            return None
        reach: dict[str, list[str]] = {}
        for text, named in ways(next(iter(rest))):
            if next(named(spared), None) is None:
                reach[text] = [key for key in named(all_gone) if key in rest]
                if len(reach[text]) == len(rest):  # no other names more
                    break
        if not reach:  # what stays has the same name
            return None
        found.append(max(reach, key=lambda text: len(reach[text])))
        for key in reach[found[-1]]:
            del rest[key]
    return tuple(found)


def ways(key: str) -> Iterator[Pattern]:
    """Patterns for the key, the plainest first: a module, a segment wherever it stands, the key alone."""
    parts = key.split(".")
    if not re.search(r"^re:|[\[\]*?{}]", key):
        for depth in range(1, len(parts)):
            way = ".".join(parts[:depth])
            yield f"{way}.{{rest*}}", partial(Keys.below, way=way)
        for part in dict.fromkeys(parts[1:-1]):
            if not part.isdecimal():
                yield f"{{module*}}.{part}.{{rest*}}", partial(Keys.inside, segment=part)
        if len(parts) > 1 and not parts[-1].isdecimal():
            yield f"{{module*}}.{parts[-1]}", partial(Keys.ending, segment=parts[-1])
        yield key, partial(Keys.exactly, key=key)
    yield f"re:{re.escape(key)}", partial(Keys.exactly, key=key)


def common_way(keys: Collection[str], names: Collection[str]) -> str:
    """The dotted way below which most of the names stand among the keys; empty at the root, and where they do not."""
    count: Counter[str] = Counter()
    depths = {name.count(".") for name in names}
    for key in keys:
        at = 0
        for depth in range(key.count("."), -1, -1):  # of the rest of the key, from the whole of it on
            if depth in depths and key[at:] in names:
                count[key[: at - 1] if at else ""] += 1
            at = key.find(".", at) + 1
    (way, hits), *_ = count.most_common(1) or [("", 0)]
    return way if 2 * hits > len(names) else ""


CKPT = "CKPT"
_BOTH = "no rule brings an optimizer's state into another order: once the keys are renamed, this says what it needs"


def run(path: str, model: ModelOperand | None, options: DiffOptions) -> Diff:
    """The names file at `path` against the model's code, and the commands that rename a checkpoint with the old names.

    Raises `CkptError` where no model is named, or the options ask for values.
    """
    if model is None:
        hint = f"{shell('ckpttool', 'diff', path)} --model MODEL"
        raise CkptError(f"{path} is a names file, and no model is named that is to have these names", hint=hint)
    if options.comparison is not None:
        raise CkptError(f"--values: {path} is a names file, and has none", hint="leave --values out")
    old = read_names(path)
    diff = compare_with_code(old, path, model)
    shifted = any(entry.status == "order" for entry in diff.entries)
    ruled = Suggested(_of_keys(diff), saved_by(old), saved_by(model.names())).told()
    fix = ruled.fix
    if needs_file(ruled):
        rules = free(path.removesuffix(".json"), "rules", ".toml")
        fix = (shell("ckpttool", "diff", path, *model.words, "--suggest", rules), *migrates(ruled, rules).fix)
    notes = (*ruled.notes, *([INFERRED] if ruled.rules else []))
    optimizer = ("--optimizer", model.optimizer) if isinstance(model.optimizer, str) else ()
    if shifted and not fix:
        words = (
            "--model",
            path,
            "--to-model",
            model.words[1],
            *(("--to-optimizer", optimizer[1]) if optimizer else ()),
        )
        fix = (shell("ckpttool", "remap", CKPT, *words, "-o", free(CKPT, "migrated", ".pt")),)
    elif shifted:
        asked = shell("ckpttool", "diff", free(CKPT, "renamed", ".pt"), *model.words, *optimizer)
        notes = (*notes, f"{_BOTH}: {asked}")
    return replace(diff, rules=ruled.rules, fix=fix, notes=(*notes, *untried(fix)))


def migrates(diff: Diff, rules: str) -> Diff:
    """The diff with the command that carries out its rules, which are in the file `rules`."""
    return replace(diff, fix=by_file(replace(diff, left=CKPT), rules).fix)


def _of_keys(diff: Diff) -> Diff:
    """The diff of the keys in a state dict alone, for which there are rules."""
    return replace(diff, entries=tuple(e for e in diff.entries if e.status != "transformed" and is_of_keys(e)))


_MODEL = "MODEL"


def with_a_model(question: Question, diff: Diff) -> tuple[str, ...]:
    """Commands for two checkpoints of which only the model's code could tell how they relate; none where it is named.

    They are given where all that differs looks like a state_dict hook's work, or a rank's, with the same shapes.
    """
    if question.model is not None:
        return ()
    left, right = question.left, question.right
    assert left is not None
    assert right is not None
    source = operand(left.source, left.format)
    tied = bool(model_section(left).aliases() or model_section(right).aliases())
    if left.format == "rank_files" or _lacks_second_names(diff):
        return (_remap(source, "serialized", tied),)
    hidden = _hidden_on(model_section(left), model_section(right), diff)
    if hidden is None:
        return ()
    if "pt2" in (left.format, right.format):
        program, weights = (right, left) if right.format == "pt2" else (left, right)
        options = SwapOptions(model=_MODEL, out=next(outputs(program.source, "swapped")))
        return (command("swap-weights", (program.source, operand(weights.source, weights.format)), options),)
    return (_remap(source, "exported" if hidden == "left" else "serialized", tied),)


def _lacks_second_names(diff: Diff) -> bool:
    """Whether all that the left lacks are second names of tensors that it has: the model ties them."""
    lacking = any(entry.status == "alias" and not entry.left for entry in diff.entries)
    return lacking and {entry.status for entry in diff.entries} <= {"same", "alias", "extra_state"}


def _remap(source: str, to: str, tied: bool) -> str:
    """The command; where tensors are `tied`, into a torch file, which holds each of their names."""
    *_, out = outputs(source, to) if tied else (next(outputs(source, to)),)
    return command("remap", (source,), RemapOptions(model=_MODEL, to=to, out=out))


def _hidden_on(left: Section, right: Section, diff: Diff) -> str | None:
    """The side whose keys lack a segment that the other has, where that is all that differs; else None."""
    mine = [key for entry in diff.entries if entry.status == "unexpected" for key in entry.left]
    theirs = [key for entry in diff.entries if entry.status == "missing" for key in entry.right]
    others = {entry.status for entry in diff.entries} - {"same", "alias", "extra_state", "missing", "unexpected"}
    if others or not mine or len(mine) != len(theirs):
        return None
    if _all_hidden(left, mine, right, theirs):
        return "left"
    return "right" if _all_hidden(right, theirs, left, mine) else None


def _all_hidden(short: Section, shorter: list[str], long: Section, longer: list[str]) -> bool:
    have, want = short.by_key(), long.by_key()
    rest = set(shorter)
    for key in longer:
        hits = [name for name in _one_less(key) if name in rest]
        if len(set(hits)) != 1 or _likeness(have[hits[0]]) != _likeness(want[key]):
            return False
        rest.discard(hits[0])
    return True


def _one_less(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:i] + parts[i + 1 :]) for i in range(len(parts)))


def _likeness(entry: object) -> object:
    return (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None


_FEW = 3
LOST = (
    "{tensors} in no key that state_dict() writes ({names}), so no command brings them back from a checkpoint of this "
    "model: keep them by a hook of your own, or mend the hook that takes them out"
)


def of_names(question: Question, diff: Diff) -> Diff:
    """`diff` with the commands, where they work for what the model saves; which checkpoint is meant is not known."""
    assert question.model is not None
    names, asked = question.model.names(), question.options
    model = {"model": asked.model, "model_kwargs": asked.model_kwargs, "materialize": asked.materialize}
    try:
        made = remap.run(saved_by(names), RemapOptions(model=names, to="exported", partial=True), may_copy=True).result
    except CkptError as error:
        problems = "; ".join(map(str, error.problems[:_FEW]))
        why = f"no command brings this model's checkpoints to its runtime names: {error.message} ({problems})"
        return replace(diff, notes=(*diff.notes, why))
    have = made.section("").by_key()
    lost = [t.fqn for t in names.runtime if t.persistent and t.alias_of is None and t.fqn not in have]
    notes = diff.notes
    if lost:
        tensors = f"{plural(len(lost), 'tensor')} {'is' if len(lost) == 1 else 'are'}"
        notes = (*notes, LOST.format(tensors=tensors, names=some(lost, _FEW)))
    if not any(entry.status in ("renamed", "transformed") for entry in diff.entries):
        return replace(diff, notes=notes)
    swap = command("swap-weights", ("PROGRAM.pt2", "CKPT"), SwapOptions(**model, out="OUT.pt2"))
    renamed = command("remap", ("CKPT",), RemapOptions(**model, to="exported", out="OUT.pt"))
    return replace(diff, fix=(renamed,) if lost else (swap, renamed), notes=notes)


def by_swap(question: Question) -> tuple[list[Attempt], list[str]]:
    """The swap that works, of two checkpoints of which one is a program; else why none does."""
    left, right = question.left, question.right
    assert left is not None
    assert right is not None
    program, weights = (right, left) if right.format == "pt2" else (left, right)
    asked = question.options
    options = SwapOptions(model=asked.model, model_kwargs=asked.model_kwargs, materialize=asked.materialize)
    found = _tried(question, program, weights, options)
    for _ in range(2):  # constants, and then another dtype
        if isinstance(found, Misfit) and found.advice in ("constants", "cast"):
            constants, cast = options.constants or found.advice == "constants", found.advice == "cast"
            options = replace(options, constants=constants, cast=cast)
            found = _tried(question, program, weights, options)
    return ([found], []) if isinstance(found, Attempt) else ([], _refused(found, asked.model is not None))


def _refused(error: CkptError, final: bool) -> list[str]:
    """Why swap-weights would be refused, where that is the last word: without a model it is not."""
    if not final:
        return []
    first = "; ".join(map(str, error.problems[:3]))
    more = f"; and {plural(len(error.problems) - 3, 'problem')} more" if len(error.problems) > 3 else ""
    way = f"; {error.hint}" if isinstance(error, Misfit) and error.advice == "values" else ""
    return [f"swap-weights would be refused: {error.message} ({first}{more}){way}" if first else error.message]


def _tried(question: Question, program: Checkpoint, weights: Checkpoint, options: SwapOptions) -> Attempt | CkptError:
    """The swap that `options` ask for, or why it is refused."""
    read = replace(options, dry_run=True, model=None if options.model is None else question.model)
    try:
        made = swap.run(program.source, weights, read).program
    except CkptError as error:
        return error
    out = next(outputs(program.source, "swapped"))
    made = replace(made, source=out)
    sides = (made, weights) if program is question.left else (weights, made)
    line = command("swap-weights", (program.source, operand(weights.source, weights.format)), replace(options, out=out))
    return Attempt(line, question.of_names(*sides))


_AS_THEY_ARE = frozenset({"safetensors", "torch_zip"})  # formats of which a remap of nothing writes the same again
Way = tuple[str, RemapOptions]  # the word for the output's name, and what is asked for


def to_load(question: Question, diff: Diff) -> Iterator[Way]:
    """For a checkpoint that a model is to load."""
    assert question.left is not None
    assert question.model is not None
    names, by_model = question.model.names(), _by_model(question, "serialized")
    yield "serialized", by_model
    yield "serialized", replace(by_model, from_="runtime")
    yield "serialized", RemapOptions(to="serialized")
    tables = NameTables(names)
    yield from _without(question.left, diff, by_model, RemapOptions())
    for own in (tables.serialized_names, tables.runtime_names):
        yield from _part(question.left, set(own.values()), RemapOptions(to="serialized"))
    yield from _by_inference(suggested_for(question.left, question.model))


def suggested_for(left: Checkpoint, model: ModelOperand) -> Suggested:
    """The rules that lead from the checkpoint's keys to those that the model saves."""
    right = saved_by(model.names())
    return Suggested(run_diff(left, right, DiffOptions()), left, right)


def next_to_state(question: Question) -> Iterator[Way]:
    """For a file whose optimizer state fits, and whose model does not: bring the model's keys to what it loads."""
    by_model = _by_model(question, "serialized")
    for options in (by_model, replace(by_model, from_="runtime")):
        yield "serialized", options
        yield "serialized", replace(options, optimizer=question.options.optimizer)


def to_compare(question: Question, diff: Diff, suggested: Suggested) -> Iterator[Way]:
    """For a checkpoint that is to have another one's keys."""
    left, right = question.left, question.right
    assert left is not None
    assert right is not None
    base: list[RemapOptions] = []
    if question.model is not None:
        form = read(NameTables(question.model.names()), model_section(right)).form
        if as_read(question.model, model_section(right), right.source).pretrained:
            form = str(ModelForm.PRETRAINED)
        base += [_by_model(question, to) for to in dict.fromkeys((form, "serialized", "runtime", "exported"))]
    idle = not base and _takes_over_nothing(left, diff)
    base.append(RemapOptions(like=right if right.format == "memory" else right.source))
    for options in () if idle else base:
        yield options.to or "renamed", options
    yield from _without(left, diff, *base, *([] if idle and base else [RemapOptions()]))
    yield from _part(left, set(model_section(right).by_key()), *base[-1:])
    yield from _by_inference(suggested)


def _takes_over_nothing(left: Checkpoint, diff: Diff) -> bool:
    """Whether the names of the other checkpoint change none: the two have names in common, and no tensor has two."""
    both = [entry.left == entry.right for entry in diff.entries if entry.left and entry.right]
    return left.format in _AS_THEY_ARE and bool(both) and all(both)


def _by_inference(suggested: Suggested) -> Iterator[Way]:
    """Rules for names that are likely the same tensors', by their order, their trees and their shapes."""
    found = suggested.renames()
    if found is not None:
        rules, patterns = found
        yield "renamed", RemapOptions(rule=rules, drop=patterns or None)


def _by_model(question: Question, to: str) -> RemapOptions:
    asked = question.options
    return RemapOptions(model=asked.model, model_kwargs=asked.model_kwargs, materialize=asked.materialize, to=to)


def _without(source: Checkpoint, diff: Diff, *rest: RemapOptions) -> Iterator[Way]:
    """Without second names that only the left has: their values stay, under another name."""
    gone = [key for entry in diff.entries if entry.status == "alias" and not entry.right for key in entry.left]
    kept = {key for section in source.sections for key in section.by_key()} - set(gone)
    places = {dotted(s.path, key) for s in source.sections for key in s.by_key()} - set(gone)
    own = {dotted(model_section(source).path, key) for key in gone}
    patterns = drops(gone, {*kept, *(places - own), *source.others}) if gone and kept else None
    if patterns:
        for options in rest:
            yield options.to or "without", replace(options, drop=patterns)


def _part(source: Checkpoint, wanted: set[str], *rest: RemapOptions) -> Iterator[Way]:
    """The wanted names, which the checkpoint has below one way (``net.``), with or without others next to it."""
    keys = canonical_keys(model_section(source).by_key())
    names = canonical_keys(wanted)
    way = common_way(set(keys.values()), set(names.values()))
    if not way:
        return
    yield way.rpartition(".")[2], RemapOptions(select=way)
    for options in rest:
        yield way.rpartition(".")[2], replace(options, select=way)
    below = {key: name.removeprefix(way + ".") for key, name in keys.items() if name.startswith(way + ".")}
    prefixes = {key.removesuffix("." + below[key].removeprefix(way + ".")) for key in below}
    if len(prefixes) == 1:  # which keeps what is not below it
        yield way.rpartition(".")[2], RemapOptions(rule=(f"{prefixes.pop()}.{{x*}} => {{x*}}",))
