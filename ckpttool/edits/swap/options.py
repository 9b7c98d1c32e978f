"""What one `swap-weights` is asked for: every option once, under its name on the command line and in Python."""

from __future__ import annotations

from typing import Annotated

from ckpttool.errors import CkptError
from ckpttool.naming import model_form
from ckpttool.naming.model_form import Form
from ckpttool.options import ModelOptions, OutputOptions, option
from ckpttool.values import dataclass


@dataclass(frozen=True, kw_only=True)
class SwapOptions(ModelOptions, OutputOptions):
    """All options of a swap."""

    name: Annotated[str | None, option("--program", metavar="NAME", help="Which one, where PROGRAM holds several.")] = (
        None
    )
    from_: Annotated[str | None, option("--from", metavar="FORM", help="NEW's form; default: recognised.")] = None
    cast: Annotated[bool, option("--cast", help="Convert weights of another dtype to the program's.")] = False
    constants: Annotated[
        bool,
        option(
            "--constants", help="Swap constants too (lifted tensors, unsaved buffers): from NEW, or else from MODEL."
        ),
    ] = False
    keep_constants: Annotated[
        bool, option("--keep-constants", help="Keep the program's constants, even if MODEL has other values.")
    ] = False

    @property
    def source_form(self) -> Form | None:
        """The form of NEW's keys, where the user says it. Raises `CkptError` for a word that names none."""
        return None if self.from_ is None else model_form.parse(self.from_)

    def check(self) -> None:
        """Raises `CkptError` for options that do not go together, or that name a form that is none."""
        if self.in_place and self.out is not None and not self.dry_run:
            raise CkptError("--in-place and -o OUT exclude each other", hint="-o OUT")
        if self.no_undo and not self.in_place:
            raise CkptError("--no-undo is for --in-place", hint="pass --in-place, or leave it out")
        if self.constants and self.keep_constants:
            raise CkptError("--constants and --keep-constants exclude each other", hint="choose one")
        if self.from_ is not None:
            model_form.parse(self.from_)
