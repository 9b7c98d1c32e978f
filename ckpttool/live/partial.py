"""Load the tensors of a checkpoint that a live model can take, and say which are left."""

from __future__ import annotations

from dataclasses import replace

from torch.nn import Module

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.tables import shapes_of
from ckpttool.core.text import plural, some
from ckpttool.core.values import dataclass
from ckpttool.live.model import FSDP1, FSDP2, instances, section_of
from ckpttool.naming.convert import ModelForm, read_keys
from ckpttool.naming.match import match
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import remap
from ckpttool.remapping.steps import Request
from ckpttool.remapping.through_models import names_for_load


@dataclass(frozen=True, slots=True)
class Part:
    """A state dict that a strict load takes: tensors of a file, and for `missing` keys the values
    that the model has.

    `loaded` are the keys from the file; `mismatched` have another shape in the file, and
    `unexpected` are keys of the file that the model does not have.
    """

    section: Section
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    unexpected: tuple[str, ...]


def fitting_part(section: Section, model: Module, operand: ModelOperand) -> Part:
    """Return the part that fits `model` by name and shape; `operand` gives the model's names. Raise
    `Refused` if nothing fits.
    """
    if instances(model, FSDP1) or instances(model, FSDP2):
        raise CkptError(
            "partial=True does not load into a sharded module",
            hint="load before the module is sharded",
        )
    names = read_keys(operand.tables, section).match.names
    matched = tuple(entry for entry in section.tensors if entry.key in names)
    unexpected = tuple(key for key in section.keys if key not in names)
    shapes = shapes_of(operand.names().serialized)
    kept: list[TensorEntry] = []
    mismatched: list[str] = []
    for entry in _serialized(replace(section, tensors=matched, extras=()), operand).tensors:
        if shapes.get(entry.key) in (None, entry.shape):
            kept.append(entry)
        else:
            mismatched.append(entry.key)
    if not kept:
        raise Refused(
            f"no tensor fits {operand.title} by name and shape",
            hint=f"the file has {plural(len(section.keys), 'key')}: {some(section.keys)}",
        )
    loaded = tuple(entry.key for entry in kept)
    lacking = match(loaded, *names_for_load(operand.tables, ModelForm.SERIALIZED)).missing
    live = section_of(model.state_dict())
    kept += [entry for entry in live.tensors if entry.key in lacking]
    objects = tuple(extra for extra in live.extras if extra.key in lacking)
    complete = replace(section, path="", tensors=tuple(kept), extras=objects)
    missing = tuple(key for key in lacking if key not in mismatched)
    return Part(complete, loaded, missing, tuple(mismatched), unexpected)


def _serialized(section: Section, operand: ModelOperand) -> Section:
    """Return the section under the keys that the model saves."""
    if not section.tensors:
        return section
    request = Request(RemapOptions(to=str(ModelForm.SERIALIZED)), "", saved=operand)
    result = remap(Checkpoint.of(section), request).result
    return result.section(section.path)
