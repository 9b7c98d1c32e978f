"""``ckpttool diff``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.checkpoint import Section
from ckpttool.cli.options import All, Materialize, Model, ModelKwargs, Optimizer
from ckpttool.cli.output import Format, Reports, emit
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import difference
from ckpttool.io.paths import is_url, join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.names import Names
from ckpttool.naming.optimizers.forms import form_of
from ckpttool.operands.checkpoint import model_section, open_operand, split
from ckpttool.operands.model import is_definition, load_definition, load_names, options
from ckpttool.queries.diff.keys import Values, compare
from ckpttool.queries.diff.names import NON_PERSISTENT, compare_load, compare_names, compare_through, loads
from ckpttool.queries.diff.optimizer import (
    compare_optimizers,
    compare_with_optimizer,
    differing_optimizers,
    optimizer_alone,
    optimizer_section,
)
from ckpttool.queries.diff.reasons import hidden_segments
from ckpttool.queries.diff.result import HARMLESS, Diff, Entry
from ckpttool.words import shell


def command(
    operands: Annotated[list[str] | None, typer.Argument(metavar="[LEFT RIGHT | CKPT]", help="Checkpoints.")] = None,
    model: Model = None,
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    optimizer: Optimizer = None,
    values: Annotated[bool, typer.Option("--values", help="Compare the bytes of the tensors too.")] = False,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance of --values.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance of --values.")] = 0.0,
    ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Another dtype is no difference.")] = False,
    all: All = False,
    format: Format = "text",
    report: Reports = None,
) -> int:
    """What differs, why, and the command that mends it.

    LEFT is what you have, RIGHT what is expected. With --model alone: what state_dict() writes against the runtime
    names. With --model and CKPT: CKPT against what the model loads; status 0 exactly where a strict load succeeds.
    CKPT::optimizer, or --optimizer: the state of optimizers, by the names of their parameters where these are known.
    """
    from ckpttool.report.documents.diff import document

    paths, chosen = operands or [], [] if model is None else options(model, model_kwargs, materialize)
    if len(paths) == 2:
        names = None if model is None else load_names(model, model_kwargs, materialize, optimizer)
        chosen += [] if optimizer is None else ["--optimizer", optimizer]
        how = partial(difference, rtol=rtol, atol=atol) if values or rtol or atol else None
        result = _checkpoints(paths[0], paths[1], names, how, ignore_dtype, chosen)
    elif model is not None and optimizer is not None and len(paths) == 1:
        result = _optimizer(load_names(model, model_kwargs, materialize, optimizer), paths[0], optimizer, chosen)
    elif model is not None and len(paths) == 1 and not values:
        result = _load(model, model_kwargs, materialize, paths[0], ignore_dtype, chosen)
    elif model is not None and not paths:
        result = _names(load_names(model, model_kwargs, materialize), chosen)
    else:
        raise CkptError("nothing to compare", hint="ckpttool diff LEFT RIGHT, or ckpttool diff --model MODEL [CKPT]")
    emit(lambda: document(result, all=all), result.to_json, format, report)
    return 0 if result.identical else 1


def _names(names: Names, chosen: list[str]) -> Diff:
    """A model alone: its serialized keys against its runtime names."""
    entries = compare_names(names)
    lost = any(e.status == "not_serialized" and e.reason != NON_PERSISTENT for e in entries)
    identical = not lost and all(entry.status in HARMLESS for entry in entries)
    fix = () if identical else (shell("ckpttool", "remap", "CKPT", *chosen, "--to", "exported", "-o", "OUT"),)
    if any(entry.status in ("renamed", "transformed") for entry in entries):
        fix = (shell("ckpttool", "swap-weights", "PROGRAM.pt2", "CKPT", *chosen, "-o", "OUT.pt2"), *fix)
    notes = (
        () if names.roundtrips else tuple(f"does not load what it saves: {text}" for text in names.roundtrip_problems)
    )
    return Diff(f"{names.model} (serialized)", f"{names.model} (runtime)", identical, entries, fix, notes)


def _load(model: str, kwargs: str, materialize: bool, ckpt: str, ignore_dtype: bool, chosen: list[str]) -> Diff:
    """A checkpoint against what the model loads; for a model's code the answer is torch's own."""
    section = model_section(open_operand(ckpt))
    names, verdict = load_names(model, kwargs, materialize), None
    if is_definition(model):
        from ckpttool.tracing.trace import load_verdict

        verdict = load_verdict(load_definition(model, kwargs, materialize), section)
    entries = compare_load(names, section, verdict)
    fits = loads(entries) if verdict is None else verdict.ok
    converts = any(e.status == "dtype" for e in entries) if verdict is None else bool(verdict.dtype_changes)
    identical = fits and (ignore_dtype or not converts)
    notes = [f"torch: {text}" for text in (() if verdict is None else verdict.errors)]
    found = sum(entry.status in ("same", "renamed", "dtype", "shape") and bool(entry.left) for entry in entries)
    if not found:
        notes.insert(0, f"0 of {len(section.tensors)} tensors matched: loading with strict=False would load nothing")
    fix = []
    if not identical and any(entry.status == "renamed" for entry in entries):
        fix.append(shell("ckpttool", "remap", ckpt, *chosen, "--to", "serialized", "-o", _beside(ckpt, "serialized")))
    return Diff(ckpt, f"{model} (what it loads)", identical, entries, tuple(fix), tuple(notes))


def _optimizer(names: Names, ckpt: str, optimizer: str, chosen: list[str]) -> Diff:
    """A saved optimizer against the one that is to load it."""
    source = open_operand(ckpt)
    section = optimizer_section(source)
    if section is None:
        raise CkptError(f"{ckpt} holds no optimizer, or several", hint="name one: CKPT::optimizer")
    entries, notes = compare_with_optimizer(section, names)
    identical = all(entry.status in HARMLESS for entry in entries)
    to = [word.replace("--model", "--to-model") for word in chosen[:2]]
    words = ["--model", "OLD_MODEL", *to, "--to-optimizer", optimizer, "-o", _beside(ckpt, "mapped")]
    fix = () if identical else (shell("ckpttool", "remap", split(ckpt)[0], *words),)
    return Diff(ckpt, f"{optimizer} (of {names.model})", identical, entries, fix, notes)


def _optimizers(
    left: str, right: str, sections: tuple[Section, Section], names: Names | None, how: Values | None, chosen: list[str]
) -> Diff:
    """Two saved optimizers."""
    entries, notes = compare_optimizers(*sections, names, how)
    identical = all(entry.status in HARMLESS for entry in entries)
    forms = form_of(sections[0]), form_of(sections[1])
    out = _beside(left, forms[1])
    command = shell("ckpttool", "remap", split(left)[0], *chosen, "--optimizer-keys", forms[1], "-o", out)
    return Diff(left, right, identical, entries, (command,) if forms[0] != forms[1] else (), notes)


def _checkpoints(
    left: str, right: str, names: Names | None, how: Values | None, ignore_dtype: bool, chosen: list[str]
) -> Diff:
    """Two checkpoints, read through a model where one is given."""
    first, second = open_operand(left), open_operand(right)
    saved = optimizer_alone(first), optimizer_alone(second)
    if saved[0] is not None and saved[1] is not None:
        return _optimizers(left, right, (saved[0], saved[1]), names, how, chosen)
    mine, theirs = model_section(first), model_section(second)
    entries = compare(mine, theirs, how) if names is None else compare_through(names, mine, theirs, how)
    harmless = HARMLESS | {"dtype"} if ignore_dtype else HARMLESS
    identical = all(entry.status in harmless for entry in entries)
    hidden = () if names is not None else hidden_segments(entries)
    notes = (*hidden, *differing_optimizers(first, second, names))
    fix = _mends(left, right, first.format, second.format, entries, hidden)
    return Diff(left, right, identical, entries, fix, notes)


def _mends(
    left: str, right: str, left_format: str, right_format: str, entries: Sequence[Entry], notes: Sequence[str]
) -> tuple[str, ...]:
    """Commands that bring the left checkpoint's keys to those of the right one."""
    differs = any(entry.status in ("renamed", "missing", "unexpected", "transformed") for entry in entries)
    if not differs:
        return ()
    model = ["--model", "MODEL"] if notes else []
    if right_format == "pt2":
        return (shell("ckpttool", "swap-weights", right, left, *model, "-o", _beside(right, "swapped")),)
    if left_format == "pt2":
        return (shell("ckpttool", "swap-weights", left, right, *model, "-o", _beside(left, "swapped")),)
    if not any(entry.status in ("missing", "unexpected", "transformed") for entry in entries):
        return (shell("ckpttool", "remap", left, "--like", right, "-o", _beside(left, "renamed")),)
    return (
        shell("ckpttool", "remap", left, "--model", "MODEL", "--to", "serialized", "-o", _beside(left, "serialized")),
    )


def _beside(operand: str, word: str) -> str:
    """A name for the output next to the source: ``train.pt::model`` -> ``train.serialized.pt``."""
    whole = split(operand)[0]
    path = Path(name_of(whole.rstrip("/")) if is_url(whole) else whole)
    beside = str(path.with_name(f"{path.stem}.{word}{path.suffix}"))
    return join(parent(whole.rstrip("/")), beside) if is_url(whole) else beside
