"""What one `diff` is asked for: every option once, under its name on the command line and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from ckpttool.core.errors import CkptError
from ckpttool.core.options import OptimizerOptions, option, several
from ckpttool.core.values import dataclass
from ckpttool.diffing.result import STATUSES
from ckpttool.io import progress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckpttool.core.checkpoint import Checkpoint, TensorEntry
    from ckpttool.diffing.sections import Values
    from ckpttool.evaluate.compare import Difference


def statuses_in(text: str) -> frozenset[str]:
    """The statuses of differences in ``missing,shape``. Raises `CkptError` for a word that is none of them."""
    known = STATUSES[1:]
    words = [word.strip() for word in text.split(",")]
    strange = [word for word in words if word not in known]
    if strange:
        raise CkptError(f"{strange[0]!r} is no status of a difference", hint=f"they are {', '.join(known)}")
    return frozenset(words)


@dataclass(frozen=True, kw_only=True)
class DiffOptions(OptimizerOptions):
    """All options of a diff that say what is compared."""

    values: Annotated[bool, option("--values", help="Compare the bytes of the tensors too.")] = False
    rtol: Annotated[float, option("--rtol", least=0, help="Relative tolerance of --values.")] = 0.0
    atol: Annotated[float, option("--atol", least=0, help="Absolute tolerance of --values.")] = 0.0
    ignore_dtype: Annotated[bool, option("--ignore-dtype", help="Another dtype is no difference.")] = False
    whole: Annotated[bool, option("--whole", help="What stands beside the models counts as well.")] = False

    fail_on: Annotated[
        str | None,
        option("--fail-on", metavar="STATUS,...", check=statuses_in, help="Status 1 for these differences only."),
    ] = None
    ignore: Annotated[
        Sequence[str] | None,
        option("--ignore", metavar="LINE", help="'STATUS PATTERN # REASON': no status 1 for it. Repeatable."),
    ] = None
    ignore_file: Annotated[
        str | None, option("--ignore-file", metavar="FILE", help="Such lines in a file, kept in the repository.")
    ] = None
    fail_on_unused: Annotated[bool, option("--fail-on-unused", help="Status 1 for lines that ignore nothing.")] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", several(self.ignore))

    @property
    def says_what_fails(self) -> bool:
        """Whether some differences are to be accepted."""
        return bool(self.fail_on or self.ignore or self.ignore_file)

    @property
    def scope(self) -> str:
        """How exactly values are compared, or the option that compares them."""
        if self.rtol or self.atol:
            return f"within rtol {self.rtol:g}, atol {self.atol:g}"
        return "" if self.values else "--values"

    @property
    def comparison(self) -> Values | None:
        """What compares two tensors of one dtype and shape, where values are asked for."""
        if not (self.values or self.rtol or self.atol):
            return None
        from ckpttool.evaluate.compare import difference

        def compared(left: TensorEntry, right: TensorEntry) -> Difference | None:
            with progress.part(left.nbytes + right.nbytes):
                return difference(left, right, self.rtol, self.atol)

        return compared

    def comparing(self, *sides: Checkpoint | None) -> AbstractContextManager[None]:
        """Inside, these are compared: a piece of work where their values are."""
        if self.comparison is None:
            return nullcontext()
        return progress.doing(
            "comparing values", sum(own.nbytes for one in sides if one is not None for own in one.sections)
        )
