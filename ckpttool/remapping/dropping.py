"""Leave entries, sections and files out, but no part of what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.optimizer_state import GROUPS, STATE
from ckpttool.core.plan import Dropped
from ckpttool.core.text import dotted, plural, shell
from ckpttool.kinds.quantized import quantized_weights
from ckpttool.ruleset.patterns import names_entry

_STATE = (f"{STATE}.", f"{GROUPS}.")


def drop(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Checkpoint, list[Dropped]]:
    """Return the checkpoint without the entries, sections and other contents that a pattern names,
    and a list of these.

    A pattern is matched with the key, and with the dotted way from the file's root. Raise `Refused`
    for a pattern that names nothing, since it was meant to name something, and as `check_whole`
    does.
    """
    dropped: list[Dropped] = []
    idle = set(patterns)

    def hit(section: str, key: str) -> bool:
        used = [text for text in patterns if names_entry(text, section, key)]
        if not used:
            return False
        idle.difference_update(used)
        dropped.append(Dropped(section, key, f"--drop {used[0]}"))
        return True

    sections = []
    for section in checkpoint.sections:
        if section.path and hit("", section.path):
            continue
        tensors = tuple(entry for entry in section.tensors if not hit(section.path, entry.key))
        extras = tuple(entry for entry in section.extras if not hit(section.path, entry.key))
        rest = replace(section, tensors=tensors, extras=extras)
        # an optimizer without state has its hyperparameters still
        if rest.entries or section.kind != "other":
            sections.append(rest)
    left = _kept(replace(checkpoint, sections=tuple(sections)), lambda path: not hit("", path))
    if idle:
        raise Refused(
            f"{len(idle)} of {len(patterns)} --drop patterns match nothing",
            hint=f"`{checkpoint.inspect_call}` lists what is there",
            problems=[Problem("matches nothing", text) for text in patterns if text in idle],
        )
    check_whole(checkpoint, dropped)
    return left, dropped


def _kept(checkpoint: Checkpoint, keep: Callable[[str], bool]) -> Checkpoint:
    """Return the checkpoint with the contents outside of its sections to `keep`, by their paths."""
    return replace(
        checkpoint,
        others=tuple(filter(keep, checkpoint.others)),
        unreached=tuple(storage for storage in checkpoint.unreached if keep(storage.path)),
        other_files=tuple(filter(keep, checkpoint.other_files)),
    )


def check_whole(checkpoint: Checkpoint, dropped: Collection[Dropped]) -> None:
    """Raise `Refused` if the dropped keys are a part of an optimizer's state, or of a quantized
    weight.

    torch may load such a state and start again for some parameters. Entries outside of ``state``
    and ``param_groups`` may go.
    """
    gone: dict[str, set[str]] = {}
    for drop in dropped:
        gone.setdefault(drop.section, set()).add(drop.key)
    _check_optimizers(checkpoint, gone)
    _check_quantized_weights(checkpoint, gone)


def _check_optimizers(checkpoint: Checkpoint, gone: Mapping[str, Collection[str]]) -> None:
    """Raise `Refused` if a part of an optimizer's state is among the keys that are `gone` from each
    section.
    """
    torn: list[Section] = []
    problems: list[Problem] = []
    for section in checkpoint.optimizers:
        here = gone.get(section.path, ())
        keys = [entry.key for entry in section.entries if entry.key in here]
        of_state = [key for key in keys if key.startswith(_STATE)]
        if of_state:
            torn.append(section)
        problems += [Problem("would go", dotted(section.path, key)) for key in of_state]
    if not torn:
        return
    titles = ", ".join(section.title for section in torn)
    entries = sum(len(section.entries) for section in torn)
    counts = f"{len(problems)} of {plural(entries, 'entry')} of {titles}"
    hint = "drop no key of the optimizer"
    if all(section.path for section in torn):
        options: list[str] = []
        for section in torn:
            options += ["--drop", section.path]
        hint = f"remove all of the optimizer state: {shell(*options)}; or {hint}"
    raise Refused(
        f"--drop would remove a part of the optimizer state, {counts}: torch may load the"
        " rest, and start again",
        hint=hint,
        problems=problems,
    )


def _check_quantized_weights(checkpoint: Checkpoint, gone: Mapping[str, Collection[str]]) -> None:
    """Raise `Refused` if some of a quantized weight's entries are among the keys that are
    `gone`.
    """
    problems: list[Problem] = []
    for section in checkpoint.state_dicts:
        here = gone.get(section.path)
        if not here:
            continue
        for weight in quantized_weights(section):
            stays = [key for key in weight.keys if key not in here]
            text = f"would go, and {', '.join(stays)} would stay"
            for key in weight.keys if stays else ():
                if key in here:
                    problems.append(Problem(text, dotted(section.path, key), "quantized"))
    if problems:
        raise Refused(
            "--drop would remove a part of a quantized weight",
            hint="drop all of its entries, or none",
            problems=problems,
        )
