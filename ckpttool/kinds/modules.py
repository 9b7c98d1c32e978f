"""Pickled modules: what ``torch.save(model)`` writes, as in the files of ultralytics."""

from __future__ import annotations

from ckpttool.core.checkpoint import Kind, Section

NAME = "pickled-module"


def recognize(section: Section) -> Kind | None:
    if not section.module_class:
        return None
    text = (
        f"is a pickled module ({section.module_class}), which load_state_dict() does not accept:"
        " its state dict is read, the module never runs"
    )
    return Kind(NAME, section.path, text)
