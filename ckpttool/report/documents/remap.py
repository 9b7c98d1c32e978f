"""The documents of `remap`, `swap-weights` and `undo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.core.expression import BY_CODE, Ref, refs
from ckpttool.core.plan import Plan
from ckpttool.core.text import dotted, number, plural
from ckpttool.report.collapse import collapse
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Keys,
    Note,
    Table,
    facts,
    filled,
    key_group,
    noted,
    shortened,
)

if TYPE_CHECKING:
    from ckpttool.remapping.plan import Remap
    from ckpttool.remapping.write import Undone
    from ckpttool.ruleset.parse import Preset
    from ckpttool.swap.swap import Swap

_ROWS = 20
_FEW = 10  # lines of changed keys once they are written
# changed keys that are collapsed for these lines: more would take memory, and few are shown
_COLLAPSED = 2_000
_VERDICTS = {
    "equal": "kept, equal to the model's",
    "different": "kept, the model has another",
    "from_model": "taken from the model",
    "not_compared": "kept, not compared",
}


def document(done: Remap, command: str = "remap") -> Document:
    """Return what a remap did, or would do; `command` is its title."""
    verdict = ", ".join(f"{number(count)} {what}" for what, count in done.counts.items() if count)
    if not verdict:
        verdict = "optimizer state only" if done.result.optimizers else "no tensors"
    computed = (
        ("computed", f"{plural(len(keys), 'tensor')} by running {run.model}.{BY_CODE[run.way]}()")
        for run, keys in done.plan.by_code
    )
    blocks: list[Block] = [
        facts(
            ("source", Cell(done.source, "key")),
            ("output", Cell(done.output, "key")),
            ("form", " -> ".join(filter(None, (done.form and done.source_form, done.form)))),
            ("sections", ", ".join(path or "(root)" for path in done.sections)),
            *computed,
            *(
                (
                    f"optimizer {one.section}".strip(),
                    f"{one.was} -> {one.to}, {plural(one.params, 'parameter')}"
                    + ("" if one.evidence is None else f", identified by {one.evidence}"),
                )
                for one in done.optimizers
            ),
            ("other files", str(done.companions or "")),
            ("cost", str(done.cost or "")),
            ("to be written" if done.dry_run else "written", str(done.written or "")),
            ("undo", str(done.undo or "")),
            ("verified", str(done.verified or "")),
        )
    ]
    blocks.append(_changes(done.plan, _ROWS if done.dry_run else _FEW))
    if done.dry_run:
        blocks.append(Note("dry run: nothing was written"))
    blocks.append(shortened(_dropped(done.plan), _ROWS, "--format json"))
    blocks += noted(done.notes)
    return Document(command, verdict, True, filled(blocks))


def planned(plan: Plan) -> Document:
    """Return what a plan renames, computes and leaves out."""
    blocks: list[Block] = [_changes(plan, _ROWS), shortened(_dropped(plan), _ROWS, "to_json()")]
    return Document(
        "plan",
        f"{plural(len(plan.outputs), 'output')}, {len(plan.dropped)} left out",
        True,
        filled(blocks),
    )


def undone(done: Undone) -> Document:
    verdicts = {
        "undone": "undid the last edit in place",
        "rolled back": "rolled back an interrupted edit",
    }
    return Document("undo", verdicts[done.way], True, (facts(("path", Cell(done.path, "key"))),))


def swapped(done: Swap) -> Document:
    """Return what a swap did, or would do."""
    renamed = sum(
        isinstance(source, Ref) and source.key != fqn for fqn, source in done.sources.items()
    )
    computed = sum(not isinstance(source, Ref) for source in done.sources.values())
    blocks: list[Block] = [
        facts(
            ("program", Cell(done.source, "key")),
            ("weights", Cell(done.weights, "key")),
            ("output", Cell(done.output, "key")),
            ("key form", done.form),
            ("renamed", number(renamed)),
            ("computed", number(computed)),
            ("computed by load_state_dict()", number(len(done.by_code)) if done.by_code else ""),
            ("constants kept", number(len(done.constants))),
            ("not replaced", ", ".join(done.kept)),
            ("cost", str(done.cost or "")),
            ("verified", str(done.verified or "")),
        )
    ]
    rows = tuple(
        (one.name, f"{_VERDICTS[one.verdict]}{': ' if one.reason else ''}{one.reason}")
        for one in done.compared
    )
    columns = (Column("constant", "key"), Column("value"))
    blocks.append(
        shortened(Table("Constants of the program", columns, rows), _ROWS, "--format json")
    )
    ignored = tuple((key,) for key in done.ignored)
    table = Table("Checkpoint entries that programs do not have", (Column("key", "key"),), ignored)
    blocks.append(shortened(table, _ROWS, "--format json"))
    blocks += noted(done.notes)
    dry_run = done.cost is not None
    if dry_run:
        blocks.append(Note("dry run: nothing was written"))
    verdict = f"{plural(len(done.sources), 'weight')} {'fit' if dry_run else 'swapped'}"
    verdict += ", all values unchanged" if done.unchanged else ""
    return Document("swap-weights", verdict, True, filled(blocks))


def presets_document(presets: Sequence[Preset]) -> Document:
    rows = tuple(
        (
            one.name,
            one.about,
            f"{one.name}({', '.join(f'{name}=N' for name in one.sizes)})" if one.sizes else "",
        )
        for one in presets
    )
    columns = (Column("name", "key"), Column("from, to"), Column("with its sizes", "key"))
    return Document(
        "rules", plural(len(presets), "preset"), True, (Table("Presets", columns, rows),)
    )


def _changes(plan: Plan, most: int) -> Keys:
    """Return the changed keys, repeated layers on one line: at most so many lines."""
    changed = [
        (tuple(dict.fromkeys(refs(o.source))), (o.key,), "")
        for o in plan.outputs
        if not o.is_unchanged
    ]
    if not changed:
        return Keys("", ())
    title, hidden = f"Changes: {plural(len(changed), 'key')}", "more keys (--format json)"
    return Keys("", (key_group(title, changed, most, hidden, first=_COLLAPSED),))


def _dropped(plan: Plan) -> Table:
    reasons: dict[str, list[str]] = {}
    for drop in plan.dropped:
        reasons.setdefault(drop.reason, []).append(dotted(drop.section, drop.key))
    rows = [
        (group.pattern, reason)
        for reason, keys in reasons.items()
        for group in collapse((k, None) for k in keys)
    ]
    return Table(
        f"Left out: {plural(len(plan.dropped), 'key')}",
        (Column("key", "key"), Column("why")),
        tuple(rows),
    )
