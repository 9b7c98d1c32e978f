"""Describe what is in a checkpoint, from its index."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.pickle_imports import in_order
from ckpttool.core.text import Info, number, plural
from ckpttool.distributed.job import Question, answers
from ckpttool.evaluate.compare import Statistics, statistics
from ckpttool.formats.opening import unsafe_in_folder
from ckpttool.inspection.result import Inspection
from ckpttool.naming.match import aliases_with_variants
from ckpttool.naming.wrappers import evidence_in, is_lightning, segments
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint, split
from ckpttool.ruleset.patterns import names_entry


@expand_options()
def inspect(ckpt: Ckpt, *, stats: bool = False, filter: str | None = None) -> Inspection:
    """Return what is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers; with
    `stats` its values.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        stats: Read every dense tensor, in chunks: minimum, maximum, mean, zeros, NaNs, a digest.
        filter: A pattern, like `drop` of `remap`, that names the tensors to look at; a note says
            how many there are in all.

    Returns:
        The index and what was found in it; ``print(...)`` shows the report of the command line.

    Raises:
        CkptError: Something cannot be read.

    Example::

        inspection = ckpttool.inspect("train.pt", stats=True)
        for tensor in inspection.tensors():
            print(tensor.name, tensor.entry.shape, tensor.stats.maximum)
    """
    checkpoint = open_checkpoint(ckpt)
    if isinstance(ckpt, str) and split(ckpt)[1] is None:
        others = unsafe_in_folder(ckpt, checkpoint)
        checkpoint = replace(checkpoint, imports=in_order((*checkpoint.imports, *others)))
    if filter is not None:
        checkpoint = _filtered(checkpoint, filter)
    lightning = is_lightning(checkpoint)
    wrappers: dict[str, tuple[str, ...]] = {}
    second_names = {}
    for section in checkpoint.sections:
        wrappers[section.path] = ()
        if section.kind == "state_dict":
            paths = evidence_in(section, lightning=lightning).paths
            wrappers[section.path] = tuple(segments(paths))
        second_names[section.path] = aliases_with_variants(section)
    if not stats:
        return Inspection(checkpoint, wrappers, second_names)

    def read(entry: TensorEntry) -> dict[str, Any]:
        return asdict(statistics(entry))

    # By identity: a tensor with several names is read once.
    questions = {}
    for section in checkpoint.sections:
        for entry in section.all_tensors():
            if entry.storage:
                question = Question(entry.key, entry.nbytes, partial(read, entry))
                questions[entry.identity] = question
    values = answers(f"reading the values of {checkpoint.source}", questions)
    by_identity = {identity: Statistics(**value) for identity, value in values.items()}
    return Inspection(checkpoint, wrappers, second_names, by_identity)


def _filtered(checkpoint: Checkpoint, pattern: str) -> Checkpoint:
    """Return the checkpoint with the entries that match the pattern, and with matching tensors
    inside other entries.
    """
    sections, count, count_of_all = [], 0, 0
    for section in checkpoint.sections:
        named = _named_entries(section, pattern)
        sections.append(named)
        count += len(named.all_tensors())
        count_of_all += len(section.all_tensors())
    of_all = plural(count_of_all, "tensor")
    if not count:
        hint = f"`{checkpoint.inspect_call}` lists what is there"
        raise CkptError(f"{pattern!r} names none of {of_all}", hint=hint)
    note = Info(f"only what {pattern!r} names: {number(count)} of {of_all}", "filter")
    return replace(checkpoint, sections=tuple(sections), notes=(*checkpoint.notes, note))


def _named_entries(section: Section, pattern: str) -> Section:
    """Return the section with the entries that match; of another entry, the tensors inside of
    it.
    """
    extras = []
    for extra in section.extras:
        if names_entry(pattern, section.path, extra.key):
            extras.append(extra)
            continue
        tensors = []
        for tensor, entry in zip(extra.tensors, extra.inside()):
            if names_entry(pattern, section.path, entry.key):
                tensors.append(tensor)
        if tensors:
            extras.append(replace(extra, tensors=tuple(tensors)))
    named = [entry for entry in section.tensors if names_entry(pattern, section.path, entry.key)]
    return replace(section, tensors=tuple(named), extras=tuple(extras))
