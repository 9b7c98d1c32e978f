"""Pickled modules: what ``torch.save(model)`` writes, as in the files of ultralytics."""

from __future__ import annotations

from ckpttool.core.checkpoint import Checkpoint, Section

NAME = "pickled-module"


def recognize(checkpoint: Checkpoint, section: Section) -> tuple[str, object] | None:
    if not section.module_class:
        return None
    text = (
        f"is a pickled module ({section.module_class}), which load_state_dict() does not accept:"
        " its state dict is read, the module never runs"
    )
    return text, section.module_class
