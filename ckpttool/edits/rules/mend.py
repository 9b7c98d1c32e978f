"""The commands that bring one checkpoint's names to another's by inferred rules, and what they leave undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.rules.suggest import Suggestion, suggest
from ckpttool.io.paths import is_url, name
from ckpttool.operands.checkpoint import model_section
from ckpttool.queries.diff.mend import beside
from ckpttool.queries.diff.result import Diff
from ckpttool.queries.diff.suggestions import known
from ckpttool.words import plural, shell

_FEW = 3  # rules that are shown as options; more of them go into a file
_SHOWN = 5  # keys that a note names


def suggestion(diff: Diff, left: Checkpoint, right: Checkpoint) -> Suggestion | None:
    """The rules of what a diff inferred; None where there are none."""
    if diff.inferred is None:
        return None
    paired = {key for pair in diff.inferred.pairs for key in pair.left}
    same = {mine: theirs for mine, theirs in known(diff.entries).items() if mine not in paired}
    taken = [key for one in diff.inferred.ambiguous for key in one.left]
    return suggest(diff.inferred.pairs, same, model_section(left), model_section(right), taken)


def with_rules(diff: Diff, left: Checkpoint, right: Checkpoint, values: bool = False, file: str = "") -> Diff:
    """The diff with the commands that carry the suggested rules out, and with what they leave undone.

    `file` is where the rules were written already; `values`: the diff compared values.
    """
    found = suggestion(diff, left, right)
    if found is None or "pt2" in (left.format, right.format) or any("--like" in line for line in diff.fix):
        return diff
    source, out = left.source, beside(left.source, "renamed")
    if file:
        fix: tuple[str, ...] = (shell("ckpttool", "remap", source, "--rules", file, "-o", out),)
    else:
        options = _options(found)
        fix = (shell("ckpttool", "remap", source, *options, "-o", out),) if options else _by_file(diff, values, out)
    return replace(diff, fix=fix, notes=tuple(dict.fromkeys((*diff.notes, *_undone(found)))))


def _options(found: Suggestion) -> list[str]:
    """The rules as options of `remap`; none where they need a file."""
    plain = found.plain
    if plain is None or len(plain) > _FEW:
        return []
    return [word for text in plain for word in ("--rule", text)] + [w for key in found.drops for w in ("--drop", key)]


def _by_file(diff: Diff, values: bool, out: str) -> tuple[str, ...]:
    path = beside(diff.left, "rules")
    rules = (name(path) if is_url(path) else path).rpartition(".rules")[0] + ".rules.toml"
    compared = ["--values"] if values else []
    return (
        shell("ckpttool", "diff", diff.left, diff.right, *compared, "--suggest", rules),
        shell("ckpttool", "remap", diff.left, "--rules", rules, "-o", out),
    )


def _undone(found: Suggestion) -> list[str]:
    notes = []
    if found.remaining:
        keys = _named(found.remaining)
        notes.append(f"the suggested rules do not make {plural(len(found.remaining), 'key')} of the right: {keys}")
    if found.left_over:
        keys = _named(found.left_over)
        notes.append(f"the suggested rules leave {plural(len(found.left_over), 'key')} of the left as they are: {keys}")
    return notes


def _named(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (f", ... {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else "")
