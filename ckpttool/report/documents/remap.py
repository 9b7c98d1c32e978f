"""The documents of `remap`, `swap-weights` and `undo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.core.expression import BY_CODE, cast_dtype, refs
from ckpttool.core.optimizer_state import FLAT, FQN, ID
from ckpttool.core.plan import Output, Plan
from ckpttool.core.text import dotted, number, plural, some, title_of
from ckpttool.report.collapse import patterns
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Inline,
    Keys,
    Pairing,
    Paragraph,
    Table,
    facts,
    filled,
    key_group,
    noted,
    shortened,
)

if TYPE_CHECKING:
    from ckpttool.optimizers.request import OptimizerRemap
    from ckpttool.remapping.result import Filled, Remap
    from ckpttool.remapping.undo import Undone
    from ckpttool.ruleset.parse import Preset
    from ckpttool.swap.result import Swap

_ROWS = 20
_FEW = 10  # lines of changed keys once they are written
# changed keys that are collapsed for these lines: more would take memory, and few are shown
_COLLAPSED = 2_000
_BY = {ID: "id", FQN: "name", FLAT: "name, in flat keys"}
_VERDICTS = {
    "equal": "kept, equal to the model's",
    "different": "kept, the model has another",
    "from_model": "taken from the model",
    "not_compared": "kept, not compared",
}


def document(outcome: Remap, command: str = "remap") -> Document:
    """Return what a remap did, or would do; `command` is its title."""
    blocks: list[Block] = [_summary(outcome)]
    blocks.append(_changes(outcome.plan, _ROWS if outcome.dry_run else _FEW))
    if outcome.dry_run:
        blocks.append(Paragraph("dry run: nothing was written"))
    blocks.append(shortened(_dropped(outcome.plan), _ROWS, "--format json"))
    blocks += noted(outcome.notes)
    return Document(f"{command} {outcome.source}", _written(outcome), True, filled(blocks))


def _summary(outcome: Remap) -> Facts:
    """Return the sources of the values, the files, and the cost."""
    form = outcome.form
    if form and outcome.source_form:
        form = f"{outcome.source_form} -> {form}"
    pairs: list[tuple[str, Inline]] = [
        ("source", Cell(outcome.source, "key")),
        ("output", Cell(outcome.output, "key")),
        ("form", form or ""),
        ("sections", ", ".join(map(title_of, outcome.sections))),
    ]
    for run, keys in outcome.plan.by_code:
        code = f"{run.model}.{BY_CODE[run.way]}()"
        pairs.append(("computed", f"{plural(len(keys), 'tensor')} by running {code}"))
    for other in outcome.filled:
        pairs.append((f"from {other.source}", _from_other(other)))
    for state in outcome.optimizers:
        pairs.append((f"optimizer {state.section}".strip(), _moved(state)))
    pairs += [
        ("other files", str(outcome.companions or "")),
        ("cost", str(outcome.cost or "")),
        ("to be written" if outcome.dry_run else "written", str(outcome.written or "")),
        ("undo", str(outcome.undo or "")),
        ("verified", str(outcome.verified or "")),
    ]
    return facts(*pairs)


def _moved(state: OptimizerRemap) -> str:
    """Return ``id -> fqn, 12 parameters, identified by ...``."""
    text = f"{state.was} -> {state.to}, {plural(state.params, 'parameter')}"
    if state.ids is not None:
        text += f", identified by {state.ids.identified_by}"
    return text


def _from_other(filled: Filled) -> str:
    """Return which keys a checkpoint gave."""
    count = plural(len(filled.keys), "key")
    text = f"{count}: {some(filled.keys, _ROWS)}"
    if filled.unused:
        text += f"; {plural(filled.unused, 'other key')} not used"
    return text


def _written(outcome: Remap) -> str:
    """Return what was written, or would be: ``wrote OUT: 38 keys renamed, 2 left out``."""
    source, out, changes = outcome.source, outcome.output, _counted(outcome)
    already = f"{source} already loads into {outcome.loads_into}"
    if out == source:
        if not changes:
            return f"{already}: nothing was changed"
        return f"{'would change' if outcome.dry_run else 'changed'} {source} in place: {changes}"
    if not out:
        return f"not written: {source} with {changes or 'no changes'}"
    if not changes and not outcome.changes_content:
        has = "would have" if outcome.dry_run else "has"
        same = f"{out} {has} the same tensors as {source}, in {outcome.format}"
        return f"{same}; {already}" if outcome.loads_into else same
    if not changes:
        changes = f"{plural(len(outcome.plan.outputs), 'tensor')} of {source}"
    wrote = "would write" if outcome.dry_run else "wrote"
    if outcome.loads_into:
        return f"{wrote} {out}, which loads into {outcome.loads_into}: {changes}"
    return f"{wrote} {out}: {changes}"


def _counted(outcome: Remap) -> str:
    """Return how many keys were renamed, cast, computed and left out, and what became of
    optimizers.
    """
    casts = Counter[str]()
    for output in outcome.plan.outputs:
        dtype = cast_dtype(output.source)
        if dtype:
            casts[dtype] += 1
    counts = outcome.counts
    kinds = {
        "renamed": counts["renamed"],
        **{f"cast to {dtype}": count for dtype, count in casts.items()},
        "computed": counts["transformed"] - casts.total(),
        "taken from others": sum(len(filled.keys) for filled in outcome.filled),
        "left out": len(outcome.plan.dropped),
        "missing": len(outcome.missing),
    }
    phrases: list[str] = []
    for kind, count in kinds.items():
        if count:
            keys = number(count) if phrases else plural(count, "key")
            phrases.append(f"{keys} {kind}")
    if counts["second_names"]:
        phrases.append(f"{plural(counts['second_names'], 'second name')} added")
    params = 0
    for state in outcome.optimizers:
        if state.was != state.to or not phrases:
            params += state.params
    if params:
        to = outcome.optimizers[0].to
        by = _BY.get(to, to)
        phrases.append(f"optimizer state of {plural(params, 'parameter')} by {by}")
    return ", ".join(phrases)


def planned(plan: Plan) -> Document:
    """Return what a plan renames, computes and leaves out."""
    outputs = plural(len(plan.outputs), "output")
    verdict = f"{outputs}, {len(plan.dropped)} left out"
    dropped = shortened(_dropped(plan), _ROWS, "to_json()")
    return Document("plan", verdict, True, filled([_changes(plan, _ROWS), dropped]))


def undone(outcome: Undone) -> Document:
    verdicts = {
        "undone": "is as it was before the last edit in place",
        "rolled back": "is as it was before an edit that was interrupted",
    }
    verdict = f"{outcome.path} {verdicts[outcome.way]}"
    return Document(f"undo {outcome.path}", verdict, True)


def _if_any(count: int) -> str:
    """Return the number as text; nothing for 0, which `facts` leaves out."""
    return number(count) if count else ""


def swapped(outcome: Swap) -> Document:
    """Return what a swap did, or would do."""
    plan = Plan(tuple(Output("", fqn, source) for fqn, source in outcome.sources.items()))
    second_names, computed = len(plan.second_names), len(plan.computed)
    changed = sum(not output.is_unchanged for output in plan.outputs)
    summary = facts(
        ("program", Cell(outcome.source, "key")),
        ("weights", Cell(outcome.weights, "key")),
        ("output", Cell(outcome.output, "key")),
        ("key form", outcome.form),
        ("renamed", _if_any(changed - second_names - computed)),
        ("second names", _if_any(second_names)),
        ("computed", _if_any(computed)),
        ("computed by load_state_dict()", _if_any(len(outcome.by_code))),
        ("constants kept", _if_any(len(outcome.constants))),
        ("not replaced", ", ".join(outcome.kept)),
        ("cost", str(outcome.cost or "")),
        ("verified", str(outcome.verified or "")),
    )
    constants = []
    for constant in outcome.compared:
        verdict = _VERDICTS[constant.verdict]
        if constant.reason:
            verdict += f": {constant.reason}"
        constants.append((constant.name, verdict))
    ignored = [(key,) for key in outcome.ignored]
    key, title = Column("key", "key"), "Checkpoint entries that programs do not have"
    columns = (Column("constant", "key"), Column("value"))
    blocks: list[Block] = [summary]
    for table in (
        Table("Constants of the program", columns, tuple(constants)),
        Table(title, (key,), tuple(ignored)),
    ):
        blocks.append(shortened(table, _ROWS, "--format json"))
    blocks += noted(outcome.notes)
    if outcome.cost is not None:
        blocks.append(Paragraph("dry run: nothing was written"))
    title = f"swap-weights {outcome.source} {outcome.weights}"
    return Document(title, _swapped(outcome), True, filled(blocks))


def _swapped(outcome: Swap) -> str:
    """Return ``wrote OUT: PROGRAM with 92 weights of NEW``."""
    weights = f"{plural(len(outcome.sources), 'weight')} of {outcome.weights}"
    if not outcome.output:
        return f"{weights} fit {outcome.source}"
    wrote = "wrote" if outcome.cost is None else "would write"
    already = ", which it had already" if outcome.unchanged else ""
    return f"{wrote} {outcome.output}: {outcome.source} with {weights}{already}"


def presets_document(presets: Sequence[Preset]) -> Document:
    rows = []
    for preset in presets:
        call = ""
        if preset.sizes:
            sizes = ", ".join(f"{name}=N" for name in preset.sizes)
            call = f"{preset.name}({sizes})"
        rows.append((preset.name, preset.about, call))
    columns = (Column("name", "key"), Column("from, to"), Column("with its sizes", "key"))
    table = Table("Presets", columns, tuple(rows))
    answer = f"{plural(len(presets), 'preset')}: --rules NAME applies one"
    return Document("rules", answer, True, (table,))


def _changes(plan: Plan, most: int) -> Keys:
    """Return the changed keys and the second names, repeated layers on one line: at most so many
    lines of each.
    """
    second_names = {output.place for output in plan.second_names}
    changed: list[Pairing] = []
    added: list[Pairing] = []
    for output in plan.outputs:
        if not output.is_unchanged:
            keys = tuple(dict.fromkeys(refs(output.source)))
            (added if output.place in second_names else changed).append((keys, (output.key,), ""))
    groups = []
    for title, pairs in (("Changes", changed), ("Second names added", added)):
        if pairs:
            heading = f"{title}: {plural(len(pairs), 'key')}"
            hidden = "more keys (--format json)"
            groups.append(key_group(heading, pairs, most, hidden, first=_COLLAPSED))
    return Keys("", tuple(groups))


def _dropped(plan: Plan) -> Table:
    reasons: dict[str, list[str]] = {}
    for drop in plan.dropped:
        keys = reasons.setdefault(drop.reason, [])
        keys.append(dotted(drop.section, drop.key))
    rows = []
    for reason, keys in reasons.items():
        for pattern in patterns(keys):
            rows.append((pattern, reason))
    title = f"Left out: {plural(len(plan.dropped), 'key')}"
    return Table(title, (Column("key", "key"), Column("why")), tuple(rows))
