"""Remaps that may fix a diff, the simplest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.text import dotted
from ckpttool.diffing.result import Diff
from ckpttool.fixes.question import DiffQuestion, model_path
from ckpttool.formats.registry import format_of
from ckpttool.naming.convert import ModelForm, read_keys
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import canonical_in
from ckpttool.operands.checkpoint import is_folder, model_section
from ckpttool.operands.reading import as_read
from ckpttool.remapping.options import RemapOptions
from ckpttool.ruleset.infer_rules import drops

Candidate = tuple[str, RemapOptions]  # a word for the output's name, and the options of the remap


def to_load(question: DiffQuestion) -> Iterator[Candidate]:
    """Yield remaps for a checkpoint that a model loads."""
    left, model = question.left, question.model
    assert left is not None
    assert model is not None
    by_model = RemapOptions(**question.model_options, to="serialized")
    # from_pretrained reads a folder, with one name of tied tensors
    if model.is_folder and is_folder(left.source):
        yield "pretrained", replace(by_model, to="pretrained")
    for options in (*own_keys(left, by_model), *own_keys(left, RemapOptions())):
        yield "serialized", options
    yield from _without_second_names(left, question.diff, by_model, RemapOptions())
    for prefixes in list(question.prefixes):
        yield from _select(left, prefixes, RemapOptions(to="serialized"))
    yield from _inferred_renames(question)


def to_load_model(question: DiffQuestion) -> Iterator[Candidate]:
    """Yield remaps for a file whose optimizer state fits and whose model does not."""
    assert question.left is not None
    for options in own_keys(question.left, RemapOptions(**question.model_options)):
        yield "serialized", options
        yield "serialized", replace(options, optimizer=question.options.optimizer)


def own_keys(left: Checkpoint, options: RemapOptions) -> Iterator[RemapOptions]:
    """Yield `options` with the keys that the model saves, for all state dicts, or else for the one
    in question.
    """
    choices: list[str | None] = [None]
    if len(left.state_dicts) > 1:
        path = model_path(left)
        choices += [path] if path else []
    for sections in choices:
        yield replace(options, to="serialized", sections=sections)
        if options.model is not None:
            yield replace(options, to="serialized", sections=sections, from_="runtime")


def to_compare(question: DiffQuestion) -> Iterator[Candidate]:
    """Yield remaps for a checkpoint that should have the keys of another one."""
    (left, right), diff = question.two, question.diff
    forms = [RemapOptions(**question.model_options, to=to) for to in _forms_of(question)]
    like = RemapOptions(like=right if right.in_memory else right.source)
    options_of_names = [*forms, like]
    if forms or _may_change_names(question):
        for options in options_of_names:
            yield options.to or "renamed", options
        options_of_names.append(RemapOptions())
    yield from _without_second_names(left, diff, *options_of_names)
    for prefixes in list(question.prefixes):
        yield from _select(left, prefixes, like)
    yield from _inferred_renames(question)


def _forms_of(question: DiffQuestion) -> list[str]:
    """Return the form of right's names if a model is named, and all other forms."""
    if question.model is None:
        return []
    right = question.two[1]
    section = model_section(right)
    form = read_keys(NameTables(question.model.names()), section).form
    if as_read(question.model, section, right.source).pretrained:
        form = str(ModelForm.PRETRAINED)
    return list(dict.fromkeys((form, "serialized", "runtime", "exported")))


def _may_change_names(question: DiffQuestion) -> bool:
    """Return whether ``--like`` may change something.

    It is refused if no name is common. If all common names are equal, it changes nothing, and a
    format that is written the same again stays as it is, except for module versions that left lost.
    """
    left, right = question.two
    same_names = []
    for entry in question.diff.entries:
        if entry.left and entry.right:
            same_names.append(entry.left == entry.right)
    if not same_names:
        return False
    lost_versions = not model_section(left).modules and bool(model_section(right).modules)
    kind = format_of(left)
    is_kept = kind.sharded or (bool(kind.endings) and not kind.folder)
    return lost_versions or not is_kept or not all(same_names)


def _inferred_renames(question: DiffQuestion) -> Iterator[Candidate]:
    """Yield the renames of tensors that are likely the same, by their order, tree and shapes."""
    few = None if question.rules is None else question.rules.few
    if few is not None and few.rule:
        yield "renamed", few


def _without_second_names(
    source: Checkpoint, diff: Diff, *options: RemapOptions
) -> Iterator[Candidate]:
    """Yield remaps that drop second names that only the left has: their values stay under another
    name.
    """
    extra: list[str] = []
    for entry in diff.entries:
        if entry.status == "alias" and not entry.right:
            extra += entry.left
    if not extra:
        return
    path = model_section(source).path
    dropped = {*extra, *(dotted(path, key) for key in extra)}
    keys: set[str] = set()
    paths: set[str] = set()
    for section in source.sections:
        keys.update(section.keys)
        paths.update(dotted(section.path, key) for key in section.keys)
    kept = keys.difference(extra)
    if not kept:
        return
    texts = drops(extra, {*kept, *(paths - dropped), *source.others})
    for remap in options if texts else ():
        yield remap.to or "without", replace(remap, drop=texts)


def _select(source: Checkpoint, prefixes: list[str], options: RemapOptions) -> Iterator[Candidate]:
    """Yield remaps that select the names of the other side if the checkpoint has them below one
    prefix (``net.``).
    """
    if len(prefixes) != 1 or not prefixes[0]:
        return
    prefix = prefixes[0]
    word = prefix.rpartition(".")[2]
    yield word, RemapOptions(select=prefix)
    yield word, replace(options, select=prefix)
    written = set()  # the prefix as the keys have it, with the segments of wrappers
    for key, name in canonical_in(model_section(source)).items():
        if name.startswith(f"{prefix}."):
            written.add(key.removesuffix(name.removeprefix(prefix)))
    if len(written) == 1:  # a rule keeps what is not below it
        yield word, RemapOptions(rule=(f"{written.pop()}.{{x*}} => {{x*}}",))
