"""Inspection: what is in one checkpoint, read off its index. The value behind `ckpttool inspect`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.evaluate.statistics import Statistics, statistics
from ckpttool.io.together.deal import Question, answers
from ckpttool.keys import is_flat
from ckpttool.naming.adapters import Adapter, adapter_of
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.flat_param import flat_params
from ckpttool.naming.wrappers.chain import infer, is_lightning, segments
from ckpttool.optimizer_state import OptimizerState, Param
from ckpttool.values import dataclass
from ckpttool.words import plural, some

SCHEMA = "ckpttool.inspect/1"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint and what can be told from its names alone.

    `wrappers` are the segments that wrappers added to the keys of each section (``module``, ``_orig_mod``, ...), and
    `aliases` the keys of each section that name a tensor a second time, with its first name; both by section path.
    `statistics`, where they were asked for, are those of every dense tensor, by section path and key.
    """

    checkpoint: Checkpoint
    wrappers: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, Mapping[str, str]]
    statistics: Mapping[tuple[str, str], Statistics] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader found odd, and what the values show."""
        return (*self.checkpoint.notes, *_of_one_rank(self.checkpoint), *_odd(self.statistics or {}))

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
            "adapters": [
                {
                    "section": path,
                    "kinds": list(adapter.kinds),
                    "modules": list(adapter.modules),
                    "tensors": sum(map(len, adapter.modules.values())),
                    "alone": adapter.alone,
                }
                for path, adapter in self.adapters.items()
            ],
            "optimizers": [_optimizer(path, state) for path, state in self.optimizers.items()],
            "metadata": dict(checkpoint.metadata),
            "notes": list(self.notes),
            "unreached": [
                {"path": found.path, "bytes": found.storage.nbytes, "referred": found.is_referred}
                for found in checkpoint.unreached
            ],
        }

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters among the keys of state dicts, by section path."""
        states = (section for section in self.checkpoint.sections if section.kind == "state_dict")
        found = ((section.path, adapter_of(section.keys)) for section in states)
        return {path: adapter for path, adapter in found if adapter is not None}

    @property
    def optimizers(self) -> dict[str, OptimizerState]:
        """The optimizers that are in one of torch's forms, by section path."""
        return {
            section.path: state
            for section in self.checkpoint.sections
            if section.kind == "optimizer" and (state := _state(section)) is not None
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
                **self._statistics(section, entry.key),
            }
            for entry in section.all_tensors()
        ]

    def _statistics(self, section: Section, key: str) -> dict[str, Any]:
        if self.statistics is None:
            return {}
        found = self.statistics.get((section.path, key))
        return {"stats": None if found is None else found.to_json()}


def names_in_file(state: OptimizerState) -> dict[Param, str]:
    """What the file itself calls an optimizer's parameters: in its keys, or in the ``param_names`` of its groups."""
    return {
        param: name
        for group in state.groups
        for param, name in zip(group.params, group.param_names or group.params)
        if isinstance(name, str)
    }


def _optimizer(path: str, state: OptimizerState) -> dict[str, Any]:
    names = names_in_file(state)
    groups = [{"params": list(g.params), "names": [names.get(param) for param in g.params]} for g in state.groups]
    return {"section": path, "form": state.form, "groups": groups}


def _state(section: Section) -> OptimizerState | None:
    from ckpttool.naming.optimizers.forms import read  # few files hold an optimizer

    try:
        return read(section)
    except CkptError:
        return None


def inspect(checkpoint: Checkpoint, *, stats: bool = False) -> Inspection:
    """The inspection of `checkpoint`. Wrappers are recognised by the evidence of a section's keys.

    With `stats` every dense tensor is read, in chunks. Raises `CkptError` where one cannot be read.
    """
    return Inspection(
        checkpoint,
        {section.path: _wrappers(section, checkpoint.others) for section in checkpoint.sections},
        {section.path: aliases(section) for section in checkpoint.sections},
        _all_statistics(checkpoint) if stats else None,
    )


def _all_statistics(checkpoint: Checkpoint) -> dict[tuple[str, str], Statistics]:
    """Those of every dense tensor; what has several names is read once."""
    title = f"reading the values of {checkpoint.source}"
    dense = [(section.path, entry) for section in checkpoint.sections for entry in section.tensors if entry.storage]
    asked = {entry.identity: Question(entry.key, entry.nbytes, partial(_asked, entry)) for _, entry in dense}
    found = answers(title, asked)
    return {(path, entry.key): Statistics(**found[entry.identity]) for path, entry in dense}


def _asked(entry: TensorEntry) -> dict[str, Any]:
    return asdict(statistics(entry))


def _is_zero(own: Statistics) -> bool:
    """Whether all of several elements are 0; a counter at its start is nothing odd."""
    return own.minimum == own.maximum == 0 and not own.nan and not own.inf and (own.zeros or 0) > 1


def _of_one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    entries = [entry for section in checkpoint.sections for entry in section.entries]
    if not any(is_flat(entry.key) or isinstance(entry, ExtraEntry) or entry.layout != "strided" for entry in entries):
        return ()
    from ckpttool.formats.ranks.files import one_rank  # with all that puts ranks together

    return one_rank(checkpoint)


def _odd(found: Mapping[tuple[str, str], Statistics]) -> Iterator[str]:
    """Sentences on values that are rarely meant."""
    for what, hits in (
        ("NaN", [at for at, own in found.items() if own.nan]),
        ("infinite values", [at for at, own in found.items() if own.inf]),
        ("nothing but zeros", [at for at, own in found.items() if _is_zero(own)]),
    ):
        if hits:
            yield f"{plural(len(hits), 'tensor')} with {what}: {some(['.'.join(filter(None, at)) for at in hits])}"


def _wrappers(section: Section, others: Collection[str]) -> tuple[str, ...]:
    if section.kind != "state_dict":
        return ()
    return tuple(segments(infer(section.keys, lightning=is_lightning(others, section.path)).paths))
