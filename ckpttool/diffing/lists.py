"""Compare a list of tensors with the parameters of a model."""

from __future__ import annotations

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.text import Info, Note, plural, some
from ckpttool.diffing.load_notes import compared_by_loading
from ckpttool.diffing.result import Diff, kinds_by_side, outlines, statuses_of
from ckpttool.diffing.sections import compare, without_dtypes
from ckpttool.kinds.lists import parameters_of
from ckpttool.operands.model import ModelOperand


def load(model: ModelOperand, checkpoint: Checkpoint, section: Section, ignore_dtype: bool) -> Diff:
    """Compare a list of tensors with the model's parameters, in order."""
    names = model.names()
    params = Section("", "state_dict", tuple(parameters_of(names)))
    entries = compare(section, params)
    entries = without_dtypes(entries) if ignore_dtype else entries
    notes = list[str]()
    if len(section.tensors) != len(params.tensors):
        count, expected = len(section.tensors), len(params.tensors)
        text = f"{count} tensors in the list, and {expected} parameters in the model"
        notes.append(Note(text, "list"))
    buffers = [t.fqn for t in names.runtime if t.kind == "buffer" and t.persistent]
    if buffers:
        text = f"not in the list: {plural(len(buffers), 'buffer')} of the model ({some(buffers)})"
        notes.append(Info(text, "list"))
    parameters = f"the parameters of {model.called}"
    return Diff(
        checkpoint.source,
        f"{parameters}, in order",
        identical=statuses_of(entries) <= {"same"},
        entries=entries,
        notes=tuple(notes),
        compared=compared_by_loading(checkpoint, ignore_dtype) | {"keys": False},
        outlines=(outlines(section), outlines(params)),
        kinds=kinds_by_side(left=checkpoint.kinds_of(section)),
        section=section.path,
        names=(checkpoint.source, parameters),
    )
