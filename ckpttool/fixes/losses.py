"""Find tensors and entries that a remap leaves out."""

from __future__ import annotations

from collections.abc import Collection

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.expression import refs
from ckpttool.core.text import dotted
from ckpttool.fixes.question import model_path
from ckpttool.naming.match import aliases_with_variants
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.result import Remap


def left_out(result: Remap) -> tuple[str, ...]:
    """Return the paths of what the remap leaves out, without the counters of AveragedModels."""
    dropped = [drop for drop in result.plan.dropped if drop.why != "counter"]
    return tuple(dotted(drop.section, drop.key) for drop in dropped)


def loses(
    source: Checkpoint, result: Remap, model: ModelOperand | None, code: tuple[str, ...]
) -> bool:
    """Return True if the output does not have the values of a tensor of the source, under any name.

    Entries that run `code` when they are loaded are not counted.

    Not lost are the counter of AveragedModel in the state dict in question, non-persistent buffers,
    attributes of pickled modules, and keys that the model's saving computes from other tensors: its
    code creates them again.
    """
    paths = {section.path for section in source.sections}
    dropped = _needed(source, result, paths, code)
    if not dropped:
        return False
    created_again = []
    for tensor in () if model is None else model.names().runtime:
        if not tensor.persistent:
            created_again.append(f".{tensor.fqn}")
    suffixes = tuple(created_again)
    for path, keys in dropped.items():
        first = aliases_with_variants(source.section(path)) if path in paths else {}
        names: dict[str, set[str]] = {}  # under which each tensor is read, by the first one
        for output in result.plan.outputs:
            if output.section == path:
                for key in refs(output.source):
                    names.setdefault(first.get(key, key), set()).add(key)
        for key in keys:
            others = names.get(first.get(key, key), set()) - {key}
            if not others and not f".{key}".endswith(suffixes):
                return True
    return False


def _needed(
    source: Checkpoint, result: Remap, paths: Collection[str], code: tuple[str, ...]
) -> dict[str, list[str]]:
    """Return the keys of each section that are left out and that no code creates again."""
    path_of_model = model_path(source)
    dropped: dict[str, list[str]] = {}
    for drop in result.plan.dropped:
        is_again = drop.why == "made_again" and drop.section in paths
        is_counter = drop.why == "counter" and drop.section == path_of_model
        if is_again or is_counter or drop.why == "attribute":
            continue
        if dotted(drop.section, drop.key) not in code:
            dropped.setdefault(drop.section, []).append(drop.key)
    return dropped
