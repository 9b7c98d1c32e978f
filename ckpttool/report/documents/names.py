"""The documents of `trace` and `explain`: how a model's names relate, and one tensor under all its names."""

from __future__ import annotations

from ckpttool.names import Names
from ckpttool.queries.diff.names import compare_names
from ckpttool.queries.diff.result import Diff, names_outlines
from ckpttool.queries.explanation import Explanation
from ckpttool.report.document import Block, Cell, Document, Facts, Note, Problems, Table, facts, noted
from ckpttool.report.documents import diff as diff_report
from ckpttool.words import number, plural, shape_text


def document(names: Names, *, all: bool = False, written: str | None = None) -> Document:
    """What `trace` shows: counts, every cause for which a serialized key is not a runtime name, and the way back."""
    entries = compare_names(names)
    diff = Diff("serialized", "runtime", False, entries, outlines=names_outlines(names))
    shown = diff_report.document(diff, all=all)
    tables = [block for block in shown.blocks if isinstance(block, Table)]
    blocks: list[Block] = [Facts(_counts(names)), *tables]
    if names.roundtrips:
        blocks.append(Note("load_state_dict() reads back what state_dict() writes"))
    else:
        blocks.append(Note("load_state_dict() does not read back what state_dict() writes:", "warning"))
        blocks.append(Problems(names.roundtrip_problems, "warning"))
    blocks += noted(names.notes)
    if written is not None:
        blocks.append(Note(f"names file: {written}"))
    renamed = sum(entry.status in ("renamed", "transformed") for entry in entries)
    verdict = f"{plural(len(names.serialized), 'serialized key')}, {number(renamed)} of them not under the runtime name"
    return Document(f"trace {names.model}", verdict, names.roundtrips, tuple(blocks), shown.listing)


def _counts(names: Names) -> tuple[tuple[str, str], ...]:
    parameters = [t for t in names.runtime if t.kind == "parameter"]
    frozen = sum(not t.trainable for t in parameters)
    aliases = sum(t.alias_of is not None for t in names.runtime)
    return (
        ("parameters", f"{number(len(parameters))} ({number(frozen)} frozen)"),
        ("buffers", number(len(names.runtime) - len(parameters))),
        ("aliases", number(aliases)),
        ("serialized keys", number(len(names.serialized))),
        ("extra state", number(len(names.extra_state))),
        ("torch", names.torch),
    )


def explained(found: Explanation) -> Document:
    """What `explain` shows."""
    tensor = found.tensor
    kind = f"{'trainable' if tensor.trainable else 'frozen'} parameter" if tensor.kind == "parameter" else "buffer"
    optimizer = found.optimizer
    shown = facts(
        ("runtime", Cell(tensor.fqn, "key")),
        ("canonical", Cell(tensor.canonical, "key")),
        ("serialized", Cell(", ".join(found.serialized) or "not serialized", "key")),
        ("aliases", Cell(", ".join(found.aliases) or "none", "key")),
        ("another's name", Cell(", ".join(found.also), "key")),
        ("tensor", f"{tensor.dtype} {shape_text(tensor.shape)}, {kind}"),
        ("persistent", "" if tensor.persistent else "no"),
        ("optimizer id", "" if optimizer is None else f"{optimizer.id} (param group {optimizer.group})"),
        ("optimizer state", Cell(", ".join(found.states), "key")),
        ("renamed by", str(found.hook or "")),
    )
    verdict = plural(len({tensor.fqn, *found.serialized, *found.aliases}), "name")
    return Document(f"explain {found.name}", verdict, True, (shown,))
