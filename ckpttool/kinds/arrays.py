"""State dicts of NumPy arrays, as in the model zoos of detectron2 and of converters from other
frameworks.
"""

from __future__ import annotations

from ckpttool.core.checkpoint import Kind, Section
from ckpttool.core.text import plural

NAME = "arrays"


def recognize(section: Section) -> Kind | None:
    if section.packed_as != "arrays":
        return None
    text = (
        f"is {plural(len(section.tensors), 'NumPy array')}, which load_state_dict() does not"
        " accept: they are read as tensors"
    )
    return Kind(NAME, section.path, text)
