"""The commands that mend what a diff found between optimizers, as lines that can be pasted into a shell."""

from __future__ import annotations

from pathlib import Path

from ckpttool.io.paths import is_url, join, name, parent
from ckpttool.operands.checkpoint import split
from ckpttool.operands.model import ModelOperand
from ckpttool.words import shell

Commands = tuple[str, ...]


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


def beside(operand: str, word: str) -> str:
    """A name for the output next to the source: ``train.pt::model`` -> ``train.serialized.pt``."""
    whole = split(operand)[0]
    path = Path(name(whole.rstrip("/")) if is_url(whole) else whole)
    made = str(path.with_name(f"{path.stem}.{word}{path.suffix}"))
    return join(parent(whole.rstrip("/")), made) if is_url(whole) else made


def _remap(ckpt: str, *words: str, out: str) -> str:
    return shell("ckpttool", "remap", ckpt, *words, "-o", out)
