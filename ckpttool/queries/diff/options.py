"""What one `diff` is asked for: every option once, under its name on the command line and in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ckpttool.options import OptimizerOptions, option

if TYPE_CHECKING:
    from ckpttool.queries.diff.keys import Values


@dataclass(frozen=True, kw_only=True)
class DiffOptions(OptimizerOptions):
    """All options of a diff that say what is compared."""

    values: Annotated[bool, option("--values", help="Compare the bytes of the tensors too.")] = False
    rtol: Annotated[float, option("--rtol", least=0, help="Relative tolerance of --values.")] = 0.0
    atol: Annotated[float, option("--atol", least=0, help="Absolute tolerance of --values.")] = 0.0
    ignore_dtype: Annotated[bool, option("--ignore-dtype", help="Another dtype is no difference.")] = False

    @property
    def comparison(self) -> Values | None:
        """What compares two tensors of one dtype and shape, where values are asked for."""
        if not (self.values or self.rtol or self.atol):
            return None
        from functools import partial

        from ckpttool.evaluate.compare import difference

        return partial(difference, rtol=self.rtol, atol=self.atol)
