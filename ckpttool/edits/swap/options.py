"""What one `swap-weights` is asked for: every option once, under its name on the command line and in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckpttool.errors import CkptError
from ckpttool.naming import model_form
from ckpttool.options import ModelOptions, OutputOptions, option


@dataclass(frozen=True, kw_only=True)
class SwapOptions(ModelOptions, OutputOptions):
    """All options of a swap."""

    name: Annotated[str | None, option("--program", metavar="NAME", help="Which one, where PROGRAM holds several.")] = (
        None
    )
    from_: Annotated[str | None, option("--from", metavar="FORM", help="NEW's form; default: recognised.")] = None
    cast: Annotated[bool, option("--cast", help="Convert weights of another dtype to the program's.")] = False
    constants: Annotated[
        bool, option("--constants", help="Swap constants too: lifted tensors and non-persistent buffers in NEW.")
    ] = False

    def check(self) -> None:
        """Raises `CkptError` for options that do not go together, or that name a form that is none."""
        if self.in_place and self.out is not None and not self.dry_run:
            raise CkptError("--in-place and -o OUT exclude each other", hint="-o OUT")
        if self.from_ is not None and self.from_ not in model_form.WORDS:
            raise CkptError(f"--from {self.from_}: no such form", hint=f"the forms are {', '.join(model_form.WORDS)}")
