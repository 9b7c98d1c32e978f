"""Add what a file lost and what torch's loading needs: module versions, and the step counters of
batch norms.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.expression import Op, Special
from ckpttool.core.names import SERIALIZED
from ckpttool.core.plan import Output
from ckpttool.core.tables import with_sections
from ckpttool.core.text import Info, dotted, plural, prefix_of, some
from ckpttool.evaluate.apply import entry_of
from ckpttool.naming.versions import with_versions
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Request

_STEPS = "num_batches_tracked"
_LAST_STATISTIC = "running_var"
_ZERO = Op("aten.full.default", ((), 0), (("dtype", Special("dtype", "int64")),))


def with_steps_of_norms(outcome: Remap) -> Remap:
    """Return the remap with the missing ``num_batches_tracked`` of batch norms that have their
    statistics.

    They are 0, as torch sets them for state dicts of the first version of BatchNorm, which had
    none.
    """
    missing = [key for key in outcome.missing if key.rpartition(".")[2] == _STEPS]
    if not missing:
        return outcome
    written = {output.place for output in outcome.plan.outputs}
    added = []
    for path in outcome.plan.sections:
        for key in missing:
            module = key.removeprefix(prefix_of(path)).rpartition(".")[0]
            if (path, dotted(module, _LAST_STATISTIC)) in written:
                added.append(Output(path, dotted(module, _STEPS), _ZERO))
    if not added:
        return outcome
    after = {}
    for output in added:
        statistic = output.key.removesuffix(_STEPS) + _LAST_STATISTIC
        after[output.section, statistic] = output
    outputs = []
    for output in outcome.plan.outputs:
        outputs.append(output)
        if output.place in after:
            outputs.append(after[output.place])
    sections = tuple(_with_steps(section, after) for section in outcome.result.sections)
    keys = [dotted(output.section, output.key) for output in added]
    restored = set(keys)
    count = plural(len(keys), "missing key")
    note = f"{count} set to 0, as torch does for older files: {some(keys)}"
    return replace(
        outcome,
        result=replace(outcome.result, sections=sections),
        plan=replace(outcome.plan, outputs=tuple(outputs)),
        missing=tuple(key for key in outcome.missing if key not in restored),
        notes=(*outcome.notes, note),
    )


def _with_steps(section: Section, after: dict[tuple[str, str], Output]) -> Section:
    tensors: list[TensorEntry] = []
    for entry in section.tensors:
        tensors.append(entry)
        output = after.get((section.path, entry.key))
        if output is not None:
            tensors.append(entry_of(output.key, output.source, {}))
    return replace(section, tensors=tuple(tensors))


def with_lost_versions(outcome: Remap, request: Request, loads: ModelOperand | None) -> Remap:
    """Return the remap with the module versions that the file lost, taken from --like or from the
    model.

    Those of the model are added only if it does not load the file without them: they may change
    what it loads.
    """
    if request.like is None and loads is None:
        return outcome
    restored = {}
    planned = set(outcome.plan.sections)
    for section in outcome.result.sections:
        if section.kind != "state_dict" or section.path not in planned or section.modules:
            continue
        changed = section
        if request.like is not None:
            changed = with_versions(section, request.like.modules, dict.fromkeys(request.like.keys))
        elif loads is not None and request.model_form.names == SERIALIZED:
            changed = loads.with_needed_versions(section)
        if changed is not section:
            restored[section.path] = changed
    if not restored:
        return outcome
    count = plural(sum(len(section.modules or ()) for section in restored.values()), "module")
    origin = "the checkpoint of --like" if request.like is not None else "the model"
    note = Info(
        f"the file lost its module versions (_metadata); the versions of {count} are from {origin}",
        "module-versions",
    )
    result = with_sections(outcome.result, restored)
    return replace(outcome, result=result, notes=(*outcome.notes, note))
