"""The mark of a form: recorded in a file whose keys, shapes and dtypes fit both of a model's forms with other values.

Only such files carry it. safetensors have it in ``__metadata__``, torch files among the module paths of ``_metadata``,
where ``load_state_dict`` looks up the modules that a model has and ignores all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.names import RUNTIME, SERIALIZED

MARK = "ckpttool.form"


def read_form(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the marks of the file in `Section.form`, and nowhere else."""
    form = _known(checkpoint.metadata.get(MARK))
    metadata = {name: value for name, value in checkpoint.metadata.items() if name != MARK}
    sections = tuple(_taken_off(section, form) for section in checkpoint.sections)
    marked = sections != checkpoint.sections or metadata != checkpoint.metadata
    return replace(checkpoint, sections=sections, metadata=metadata) if marked else checkpoint


def _taken_off(section: Section, form: str | None) -> Section:
    if section.modules is not None and MARK in section.modules:
        mark = section.modules[MARK]
        form = _known(mark.get("form") if isinstance(mark, Mapping) else None)
        section = replace(section, modules={path: v for path, v in section.modules.items() if path != MARK})
    return section if form is None else replace(section, form=form)


def _known(form: object) -> str | None:
    return next((known for known in (SERIALIZED, RUNTIME) if known == form), None)


def write_form(checkpoint: Checkpoint, *, in_metadata: bool) -> Checkpoint:
    """`checkpoint` with each section's form where its file will keep it; `in_metadata`: in ``__metadata__``."""
    forms = [section.form for section in checkpoint.sections if section.form is not None]
    if not forms:
        return checkpoint
    if in_metadata:
        return replace(checkpoint, metadata={**checkpoint.metadata, MARK: forms[0]})
    sections = tuple(
        s if s.form is None else replace(s, modules={**(s.modules or {}), MARK: {"form": s.form}})
        for s in checkpoint.sections
    )
    return replace(checkpoint, sections=sections)
