"""Compare an adapter without its base model with what PEFT loads onto a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint, Kind, Section, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError
from ckpttool.core.strides import Shape
from ckpttool.core.text import Note, plural, some
from ckpttool.diffing.result import HARMLESS, STATUSES, Diff, kinds_by_side, outlines, statuses_of
from ckpttool.diffing.sections import compare, without_dtypes
from ckpttool.kinds import adapters
from ckpttool.operands.model import ModelOperand

if TYPE_CHECKING:
    from ckpttool.tracing.adapters import AdapterLoad

_QUESTION = "; the question is whether PEFT loads it into get_peft_model(MODEL, config)"


def adapter_alone(checkpoint: Checkpoint, section: Section) -> Kind | None:
    """Return the kind of a section that is an adapter in PEFT's naming, without its base model."""
    for kind in checkpoint.kinds_of(section):
        adapter = kind.facts
        if isinstance(adapter, adapters.Adapter) and adapter.alone and adapter.naming.by_peft:
            return kind
    return None


def load(model: ModelOperand, checkpoint: Checkpoint, section: Section, kind: Kind) -> Diff | None:
    """Return whether PEFT loads the adapter onto the model, and the keys that differ.

    None if the file has no ``adapter_config.json`` and the model no adapter: there is no such
    question. Raise `CkptError` if the model is a list of names, or PEFT is not installed.
    """
    config = checkpoint.adapter_config
    if not model.is_definition:
        if config is None:
            return None
        raise CkptError(
            f"names cannot tell if {model.title} takes the adapter: PEFT's answer needs its code",
            hint="pass the model's code: --model package.module:attr, or file.py:attr",
        )
    from ckpttool.tracing.adapters import is_peft_model, load_adapter

    definition = model.definition()
    if config is None and not is_peft_model(definition):
        return None
    answer = load_adapter(definition, section, config)
    saved = _section_of(answer.saved)
    entries = without_dtypes(compare(section, saved))
    is_same = statuses_of(entries) <= {"same"}
    return Diff(
        checkpoint.source,
        f"{model.title} (the adapter that PEFT loads onto it)",
        identical=answer.ok,
        entries=entries,
        notes=tuple(_notes(answer, config or {}, is_shown=not is_same)),
        harmless=frozenset(STATUSES) if answer.ok else HARMLESS,
        asks="adapter",
        compared={"keys": True, "shapes": True, "dtypes": False, "values": False},
        outlines=(outlines(section), outlines(saved)),
        kinds=kinds_by_side(left=(replace(kind, text=kind.text + _QUESTION),)),
        section=section.path,
        names=(checkpoint.source, model.called),
    )


def _section_of(saved: Mapping[str, tuple[str, Shape]]) -> Section:
    tensors: list[TensorEntry] = []
    for key, (dtype, shape) in saved.items():
        tensors.append(in_row_major(key, dtype, shape, None))
    return Section("", "state_dict", tuple(tensors))


def _notes(answer: AdapterLoad, config: Mapping[str, Any], *, is_shown: bool) -> list[str]:
    """Return what PEFT says, unless entries show it, and which values it does not load although it
    loads the adapter.
    """
    notes: list[str] = []
    if answer.error and not is_shown:
        notes.append(Note(f"PEFT: {answer.error}", "adapter"))
    for what, keys in (("missing", answer.missing), ("unexpected", answer.unexpected)):
        if keys and not is_shown:
            notes.append(Note(f"PEFT: {len(keys)} {what} adapter keys: {keys[0]}", "adapter"))
    if not answer.ok:
        return notes
    biases: list[str] = []
    others: list[str] = []
    for key in answer.unloaded:
        is_bias = key.rpartition(".")[2] == "bias"
        (biases if is_bias else others).append(key)
    if biases:
        setting = json.dumps(config.get("bias"))
        notes.append(
            Note(
                f"biases were trained with this adapter (bias: {setting}), and the file lacks"
                f" {plural(len(biases), 'bias')}: {some(biases)}; PEFT keeps what the base model"
                " has",
                "adapter",
            )
        )
    if others:
        notes.append(
            Note(
                f"PEFT saves {plural(len(others), 'key')} more for such an adapter:"
                f" {some(others)}; without them it keeps the values of a new adapter",
                "adapter",
            )
        )
    return notes
