"""The options of a swap."""

from __future__ import annotations

from typing import Annotated

from ckpttool.core.errors import CkptError
from ckpttool.core.options import IS, ModelOptions, Option, OutputOptions
from ckpttool.core.values import dataclass
from ckpttool.naming import convert
from ckpttool.naming.convert import Form


@dataclass(frozen=True, kw_only=True)
class SwapOptions(ModelOptions, OutputOptions):
    """All options of a swap."""

    name: Annotated[
        str | None, Option("--program NAME", "Which one, where PROGRAM holds several.")
    ] = None
    from_: Annotated[
        str | None,
        Option("--from FORM", "NEW's naming; default: recognized.", IS, choices=convert.form_names),
    ] = None
    cast: Annotated[
        bool, Option("--cast", "Convert weights of another dtype to the program's.")
    ] = False
    constants: Annotated[
        bool,
        Option(
            "--constants",
            "Swap constants too (lifted tensors, unsaved buffers): from NEW, or else from MODEL.",
        ),
    ] = False
    keep_constants: Annotated[
        bool,
        Option("--keep-constants", "Keep the program's constants, even if MODEL has other values."),
    ] = False

    @property
    def source_form(self) -> Form | None:
        """The form of NEW's keys, if the user names one. Raises `CkptError` for an unknown form."""
        return None if self.from_ is None else convert.parse_form(self.from_)

    def check(self) -> None:
        if self.constants and self.keep_constants:
            raise CkptError(
                "--constants and --keep-constants exclude each other", hint="choose one"
            )
        if self.from_ is not None:
            convert.parse_form(self.from_)
