"""The document of `swap-weights`."""

from __future__ import annotations

from ckpttool.edits.swap.swap import Swap
from ckpttool.expression import Ref
from ckpttool.report.document import Block, Cell, Column, Document, Facts, Note, Table, shortened
from ckpttool.words import number, plural

_ROWS = 20


def document(swapped: Swap, program: str, new: str, out: str | None, *, dry_run: bool, verified: bool) -> Document:
    """What a swap did, or would do."""
    renamed = sum(isinstance(source, Ref) and source.key != fqn for fqn, source in swapped.sources.items())
    computed = sum(not isinstance(source, Ref) for source in swapped.sources.values())
    pairs: list[tuple[str, str | Cell]] = [("program", Cell(program, "key")), ("weights", Cell(new, "key"))]
    if out is not None:
        pairs.append(("output", Cell(out, "key")))
    pairs += [
        ("keys read as", swapped.form),
        ("under another name", number(renamed)),
        ("computed", number(computed)),
        *([("by the model's own load_state_dict()", number(len(swapped.by_code)))] if swapped.by_code else []),
        ("constants kept", number(len(swapped.constants))),
    ]
    if swapped.kept:
        pairs.append(("kept as they are", ", ".join(swapped.kept)))
    if swapped.cost is not None:
        pairs.append(("it takes", str(swapped.cost)))
    if verified and not dry_run:
        pairs.append(("verified", "every weight of the output was read back and compared"))
    blocks: list[Block] = [Facts(tuple(pairs))]
    if swapped.ignored:
        rows = tuple((key,) for key in swapped.ignored)
        blocks.append(
            shortened(
                Table("In the checkpoint, and no part of any program", (Column("key", "key"),), rows),
                _ROWS,
                "--format json",
            )
        )
    if dry_run:
        blocks.append(Note("dry run: nothing was written"))
    verdict = f"{plural(len(swapped.sources), 'weight')} {'fit' if dry_run else 'swapped'}"
    return Document("swap-weights", verdict, True, tuple(blocks))
