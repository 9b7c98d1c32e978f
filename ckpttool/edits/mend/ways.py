"""The ways to mend that are worth a try, the simplest first; which of them works, only a try tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.mend.attempt import Question
from ckpttool.edits.mend.patterns import common_way, drops
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.edits.rules.mend import Suggested
from ckpttool.keys import dotted
from ckpttool.naming.forms import read
from ckpttool.naming.model_form import ModelForm
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.wrappers.chain import canonical_keys
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.names_file import saved_by
from ckpttool.queries.diff.options import DiffOptions
from ckpttool.queries.diff.result import Diff
from ckpttool.queries.diff.run import run

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
    return Suggested(run(left, right, DiffOptions()), left, right)


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
