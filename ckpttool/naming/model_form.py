"""FORMs as the user writes them, parsed once: a form of the model's own names, or a chain of wrappers around them."""

from __future__ import annotations

from enum import Enum
from typing import Union

from ckpttool.names import RUNTIME, SERIALIZED
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.chain import Chain


class ModelForm(Enum):
    """A form of a model's own names, by the word for it."""

    SERIALIZED = "serialized"
    RUNTIME = "runtime"
    EXPORTED = "exported"
    UNFLATTENED = "unflattened"
    PRETRAINED = "pretrained"

    @property
    def names(self) -> str:
        """Which of the two lists of `Names` it takes its names from.

        An exported program has the runtime names since torch 2.6 (pytorch#137609). What ``save_pretrained`` writes has
        the names of a `Names` of its own.
        """
        return SERIALIZED if self in (ModelForm.SERIALIZED, ModelForm.PRETRAINED) else RUNTIME

    def __str__(self) -> str:
        return self.value

    @property
    def needs_model(self) -> bool:
        """Whether only the model can tell these names."""
        return self is not ModelForm.SERIALIZED


Form = Union[ModelForm, Chain]
WORDS = tuple(form.value for form in ModelForm)


def parse(word: str) -> Form:
    """``exported``, ``ddp(compile)`` -> the form. Raises `CkptError` for words that name none."""
    return ModelForm(word) if word in WORDS else chain.parse(word)
