"""Inspection: what is in one checkpoint, read off its index. The value behind `ckpttool inspect`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.flat_param import flat_params
from ckpttool.naming.wrappers.chain import is_lightning, segments, weigh

SCHEMA = "ckpttool.inspect/1"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint and what can be told from its names alone.

    `wrappers` are the segments that wrappers added to the keys of each section (``module``, ``_orig_mod``, ...), and
    `aliases` the keys of each section that name a tensor a second time, with its first name; both by section path.
    """

    checkpoint: Checkpoint
    wrappers: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, Mapping[str, str]]

    def to_json(self) -> dict[str, Any]:
        """The `inspect` object of the contract, and beside it the entries that are no tensors and the metadata."""
        checkpoint = self.checkpoint
        return {
            "schema": SCHEMA,
            "source": checkpoint.source,
            "format": checkpoint.format,
            "bytes": checkpoint.nbytes,
            "sections": [self._section(section) for section in checkpoint.sections],
            "tensors": [tensor for section in checkpoint.sections for tensor in self._tensors(section)],
            "globals": list(checkpoint.globals),
            "extras": [{"section": s.path, "key": extra.key} for s in checkpoint.sections for extra in s.extras],
            "others": list(checkpoint.others),
            "flat_parameters": [
                {"section": section.path, "key": flat.key, "unit": flat.unit, "elements": flat.numel}
                for section in checkpoint.sections
                for flat in flat_params(section)
            ],
            "metadata": dict(checkpoint.metadata),
            "notes": list(checkpoint.notes),
            "unreached": [
                {"path": found.path, "bytes": found.storage.nbytes, "referred": found.is_referred}
                for found in checkpoint.unreached
            ],
        }

    def _section(self, section: Section) -> dict[str, Any]:
        return {
            "path": section.path,
            "kind": section.kind,
            "tensors": len(section.all_tensors()),
            "bytes": section.nbytes,
            "wrappers": list(self.wrappers[section.path]),
        }

    def _tensors(self, section: Section) -> list[dict[str, Any]]:
        aliases = self.aliases[section.path]
        inside = {entry.key: extra.key for extra in section.extras for entry in extra.inside()}
        return [
            {
                "section": section.path,
                "key": entry.key,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "alias_of": aliases.get(entry.key),
                **({"inside": inside[entry.key]} if entry.key in inside else {}),
            }
            for entry in section.all_tensors()
        ]


def inspect(checkpoint: Checkpoint) -> Inspection:
    """The inspection of `checkpoint`. Wrappers are recognised by the evidence of a section's keys."""
    return Inspection(
        checkpoint,
        {section.path: _wrappers(section, checkpoint.others) for section in checkpoint.sections},
        {section.path: aliases(section) for section in checkpoint.sections},
    )


def _wrappers(section: Section, others: Collection[str]) -> tuple[str, ...]:
    if section.kind != "state_dict":
        return ()
    return tuple(segments(weigh(section.by_key(), lightning=is_lightning(others, section.path)).paths))
