"""The commands that mend what a diff found, as lines that can be pasted into a shell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.table import FORMATS
from ckpttool.io.paths import is_url, join, name, parent
from ckpttool.operands.checkpoint import split
from ckpttool.operands.model import ModelOperand
from ckpttool.queries.diff.result import TIED, Entry
from ckpttool.words import shell

Commands = tuple[str, ...]


def names(model: ModelOperand, entries: Iterable[Entry]) -> Commands:
    """For a model whose serialized keys are not its runtime names; which checkpoint is meant is not known here."""
    remap = _remap("CKPT", *model.words, "--to", "exported", out="OUT")
    if not any(entry.status in ("renamed", "transformed") for entry in entries):
        return (remap,)
    return shell("ckpttool", "swap-weights", "PROGRAM.pt2", "CKPT", *model.words, "-o", "OUT.pt2"), remap


def load(model: ModelOperand, checkpoint: Checkpoint, entries: Sequence[Entry]) -> Commands:
    """For a checkpoint that the model does not load, or not without losing values."""
    source = checkpoint.source
    tied = any(entry.status == "missing" and entry.reason.startswith(TIED) for entry in entries)
    lost = [word for entry in entries if entry.status == "value" for word in ("--drop", entry.left[0])]
    if not tied and not lost and not any(entry.status == "renamed" for entry in entries):
        return ()
    out = beside(source, "serialized")
    if (tied or lost) and not FORMATS[checkpoint.format].aliases:  # the names have to be somewhere
        out = str(Path(out).with_suffix(".pt"))
    return (_remap(source, *model.words, *lost, "--to", "serialized", out=out),)


def optimizer(model: ModelOperand, ckpt: str) -> Commands:
    """For an optimizer's state that another optimizer is to load."""
    to = [word.replace("--model", "--to-model") for word in model.words[:2]]
    new = model.optimizer if isinstance(model.optimizer, str) else "OPTIMIZER"
    words = ("--model", "OLD_MODEL", *to, "--to-optimizer", new)
    return (_remap(split(ckpt)[0], *words, out=beside(ckpt, "mapped")),)


def optimizers(left: str, form: str, wanted: str, model: ModelOperand | None) -> Commands:
    """For an optimizer in one form, where the other is in another."""
    if form == wanted:
        return ()
    words = [] if model is None else [*model.words]
    if model is not None and isinstance(model.optimizer, str):
        words += ["--optimizer", model.optimizer]
    return (_remap(split(left)[0], *words, "--optimizer-keys", wanted, out=beside(left, wanted)),)


def checkpoints(left: Checkpoint, right: Checkpoint, entries: Sequence[Entry], hidden: bool) -> Commands:
    """What brings the left checkpoint's keys to those of the right one; `hidden`: a hook seems to hide segments."""
    statuses = {entry.status for entry in entries}
    if not statuses & {"renamed", "missing", "unexpected", "transformed"}:
        return _second_names(left.source, entries)
    model = ["--model", "MODEL"] if hidden else []
    for program, weights in ((right, left), (left, right)):
        if program.format == "pt2":
            path, new = program.source, weights.source
            return (shell("ckpttool", "swap-weights", path, new, *model, "-o", beside(path, "swapped")),)
    source = left.source
    if not statuses & {"missing", "unexpected", "transformed"}:
        return (_remap(source, "--like", right.source, out=beside(source, "renamed")),)
    return (_remap(source, "--model", "MODEL", "--to", "serialized", out=beside(source, "serialized")),)


def _second_names(source: str, entries: Iterable[Entry]) -> Commands:
    """For second names of tensors that only one side has: one that is too many is dropped, one that lacks is tied."""
    seconds = [entry for entry in entries if entry.status == "alias"]
    if any(entry.right for entry in seconds):
        return (_remap(source, "--model", "MODEL", "--to", "serialized", out=beside(source, "serialized")),)
    drops = [word for entry in seconds for word in ("--drop", entry.left[0])]
    return (_remap(source, *drops, out=beside(source, "without")),) if drops else ()


def beside(operand: str, word: str) -> str:
    """A name for the output next to the source: ``train.pt::model`` -> ``train.serialized.pt``."""
    whole = split(operand)[0]
    path = Path(name(whole.rstrip("/")) if is_url(whole) else whole)
    made = str(path.with_name(f"{path.stem}.{word}{path.suffix}"))
    return join(parent(whole.rstrip("/")), made) if is_url(whole) else made


def _remap(ckpt: str, *words: str, out: str) -> str:
    return shell("ckpttool", "remap", ckpt, *words, "-o", out)
