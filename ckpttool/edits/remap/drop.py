"""What of a checkpoint is left out on request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section
from ckpttool.edits.rules.patterns import matches
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.keys import dotted
from ckpttool.optimizer_state import GROUPS, STATE
from ckpttool.plan import Dropped
from ckpttool.words import Info, number, plural, shell

_STATE = (f"{STATE}.", f"{GROUPS}.")
_BITSANDBYTES = ".quant_state.bitsandbytes__"  # ``0.weight.quant_state.bitsandbytes__nf4``, next to ``0.weight.absmax``


def drop(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Checkpoint, list[Dropped]]:
    """`checkpoint` without the entries, sections and other contents that a pattern names, and what these were.

    A pattern is matched with the key, and with the dotted way from the file's root. Raises `Refused` for a pattern that
    names nothing, since it was meant to name something, and as `check_whole` does.
    """
    dropped: list[Dropped] = []
    idle = set(patterns)

    def hit(section: str, key: str) -> bool:
        used = [text for text in patterns if _names(text, section, key)]
        idle.difference_update(used)
        if used:
            dropped.append(Dropped(section, key, f"--drop {used[0]}"))
        return bool(used)

    sections = []
    for section in checkpoint.sections:
        if section.path and hit("", section.path):
            continue
        tensors = tuple(entry for entry in section.tensors if not hit(section.path, entry.key))
        extras = tuple(entry for entry in section.extras if not hit(section.path, entry.key))
        rest = replace(section, tensors=tensors, extras=extras)
        if rest.entries or section.kind != "other":  # an optimizer without state has its hyperparameters still
            sections.append(rest)
    others = tuple(path for path in checkpoint.others if not hit("", path))
    unreached = tuple(found for found in checkpoint.unreached if not hit("", found.path))
    beside = tuple(name for name in checkpoint.beside if not hit("", name))
    if idle:
        raise Refused(
            f"{len(idle)} of {len(patterns)} --drop patterns match nothing",
            hint=f"`ckpttool inspect {checkpoint.source}` lists what is there",
            problems=[Problem("matches nothing", text) for text in patterns if text in idle],
        )
    check_whole(checkpoint, dropped)
    left = replace(checkpoint, sections=tuple(sections), others=others, unreached=unreached, beside=beside)
    return left, dropped


def check_whole(checkpoint: Checkpoint, dropped: Collection[Dropped]) -> None:
    """Raise `Refused` if the dropped keys are a part of an optimizer's state, or of a quantized weight.

    torch may load such a state and start again for some parameters. Entries outside of ``state`` and ``param_groups``
    may go.
    """
    gone: dict[str, set[str]] = {}
    for one in dropped:
        gone.setdefault(one.section, set()).add(one.key)
    torn = {section: _state_keys(section, gone.get(section.path, set())) for section in checkpoint.optimizers}
    torn = {section: keys for section, keys in torn.items() if keys}
    if torn:
        titles = ", ".join(section.title for section in torn)
        counts = (
            f"{sum(map(len, torn.values()))} of {plural(sum(len(one.entries) for one in torn), 'entry')} of {titles}"
        )
        hint = "drop no key of the optimizer"
        if all(section.path for section in torn):
            options = shell(*(word for section in torn for word in ("--drop", section.path)))
            hint = f"remove all of the optimizer state: {options}; or {hint}"
        raise Refused(
            f"--drop would remove a part of the optimizer state, {counts}: torch may load the rest, and start again",
            hint=hint,
            problems=[Problem("would go", dotted(one.path, key)) for one, keys in torn.items() for key in keys],
        )
    apart = [
        Problem(f"would go, and {', '.join(kept)} would stay", dotted(section.path, key))
        for section in checkpoint.state_dicts
        for parts in _quantized(section)
        if 0 < len(kept := [key for key in parts if key not in gone.get(section.path, set())]) < len(parts)
        for key in parts
        if key not in kept
    ]
    if apart:
        raise Refused(
            "--drop would remove a part of a quantized weight",
            hint="drop all of its entries, or none",
            problems=apart,
        )


def _state_keys(section: Section, gone: Collection[str]) -> list[str]:
    return [entry.key for entry in section.entries if entry.key in gone and entry.key.startswith(_STATE)]


def _quantized(section: Section) -> list[list[str]]:
    """The keys of each weight of which the file holds bitsandbytes' record."""
    weights = [key.partition(_BITSANDBYTES)[0] for key in section.keys if _BITSANDBYTES in key]
    return [[key for key in section.keys if key == own or key.startswith(f"{own}.")] for own in weights]


def only(checkpoint: Checkpoint, pattern: str) -> Checkpoint:
    """The tensors and extra entries that the pattern names, and a note on how many it does not name.

    Of an extra entry that it does not name those tensors inside that it does. Raises `CkptError` where it names none.
    """

    def kept(section: Section) -> Section:
        tensors = tuple(entry for entry in section.tensors if _names(pattern, section.path, entry.key))
        extras = tuple(_narrowed(pattern, section.path, extra) for extra in section.extras)
        return replace(section, tensors=tensors, extras=tuple(extra for extra in extras if extra is not None))

    sections = tuple(kept(section) for section in checkpoint.sections)
    count, found = (sum(len(one.all_tensors()) for one in own) for own in (checkpoint.sections, sections))
    if not found:
        hint = f"`ckpttool inspect {checkpoint.source}` lists what is there"
        raise CkptError(f"{pattern!r} names none of {plural(count, 'tensor')}", hint=hint)
    note = Info(f"only what {pattern!r} names: {number(found)} of {plural(count, 'tensor')}")
    return replace(checkpoint, sections=sections, notes=(*checkpoint.notes, note))


def _narrowed(pattern: str, section: str, extra: ExtraEntry) -> ExtraEntry | None:
    if _names(pattern, section, extra.key):
        return extra
    inside = zip(extra.tensors, extra.inside())
    tensors = tuple(own for own, whole in inside if _names(pattern, section, whole.key))
    return replace(extra, tensors=tensors) if tensors else None


def _names(pattern: str, section: str, key: str) -> bool:
    return matches(pattern, key) or (bool(section) and matches(pattern, dotted(section, key)))


def without(checkpoint: Checkpoint, paths: Collection[str]) -> Checkpoint:
    """`checkpoint` without the sections and other contents at these dotted paths."""
    sections = tuple(section for section in checkpoint.sections if section.path not in paths)
    others = tuple(path for path in checkpoint.others if path not in paths)
    unreached = tuple(found for found in checkpoint.unreached if found.path not in paths)
    beside = tuple(name for name in checkpoint.beside if name not in paths)
    return replace(checkpoint, sections=sections, others=others, unreached=unreached, beside=beside)
