"""The options of `diff` that say what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Op, Ref, Special
from ckpttool.core.options import OptimizerOptions, Option, several
from ckpttool.core.values import dataclass
from ckpttool.diffing.result import STATUSES
from ckpttool.io import progress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckpttool.core.checkpoint import Checkpoint, TensorEntry
    from ckpttool.diffing.pairs import Values
    from ckpttool.evaluate.compare import Difference


def statuses_in(text: str | Sequence[str]) -> frozenset[str]:
    """Return the statuses in ``missing,shape``, or in several such texts. Raises `CkptError` for an
    unknown one.
    """
    differences = STATUSES[1:]
    texts = several(text) or ()
    statuses = set()
    for part in texts:
        for word in part.split(","):
            status = word.strip()
            if status not in differences:
                hint = f"use one of {', '.join(differences)}"
                raise CkptError(f"unknown status {status!r}", hint=hint)
            statuses.add(status)
    return frozenset(statuses)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How tensors are compared."""

    values: Annotated[bool, Option("--values", "Compare the bytes of the tensors too.")] = False
    rtol: Annotated[
        float, Option("--rtol N", "Relative tolerance of --values.", "Advanced", least=0)
    ] = 0.0
    atol: Annotated[
        float, Option("--atol N", "Absolute tolerance of --values.", "Advanced", least=0)
    ] = 0.0
    ignore_dtype: Annotated[bool, Option("--ignore-dtype", "Ignore dtype differences.")] = False

    @property
    def scope(self) -> str:
        """How exactly values are compared, or the option that compares them."""
        if self.rtol or self.atol:
            return f"within rtol {self.rtol:g}, atol {self.atol:g}"
        return "" if self.values else "--values"

    @property
    def comparison(self) -> Values | None:
        """How the values of two tensors are compared, after the conversion that loading does; None
        if they are not.
        """
        if not (self.values or self.rtol or self.atol):
            return None
        from ckpttool.evaluate.apply import entry_of
        from ckpttool.evaluate.compare import difference

        def compare(left: TensorEntry, right: TensorEntry) -> Difference | None:
            if left.dtype != right.dtype:
                dtype = Special("dtype", right.dtype)
                cast = Op("aten._to_copy.default", (Ref(left.key),), (("dtype", dtype),))
                left = entry_of("", cast, {left.key: left})
            with progress.part(left.nbytes + right.nbytes):
                return difference(left, right, self.rtol, self.atol)

        return compare

    def comparing(self, *checkpoints: Checkpoint | None) -> AbstractContextManager[None]:
        """Return a context in which the values of these checkpoints are compared, as one task with
        progress.
        """
        if self.comparison is None:
            return nullcontext()
        nbytes = 0
        for checkpoint in filter(None, checkpoints):
            nbytes += sum(section.nbytes for section in checkpoint.sections)
        return progress.doing("comparing values", nbytes)


@dataclass(frozen=True, kw_only=True)
class DiffOptions(OptimizerOptions, CompareOptions):
    """All options of a diff that say what is compared."""

    whole: Annotated[bool, Option("--whole", "Also compare optimizer state and other entries.")] = (
        False
    )

    fail_on: Annotated[
        Sequence[str] | None,
        Option(
            "--fail-on STATUS,...",
            "Status 1 for these differences only. Repeatable.",
            "What fails",
            check=statuses_in,
            choices=STATUSES[1:],
        ),
    ] = None
    ignore: Annotated[
        Sequence[str] | None,
        Option(
            "--ignore LINE", "'STATUS PATTERN # REASON': accept these. Repeatable.", "What fails"
        ),
    ] = None
    ignore_file: Annotated[
        Sequence[str] | None,
        Option("--ignore-file FILE", "File with lines as in --ignore. Repeatable.", "What fails"),
    ] = None
    fail_on_unused: Annotated[
        bool,
        Option("--fail-on-unused", "Status 1 if an ignore line matches nothing.", "What fails"),
    ] = False

    def __post_init__(self) -> None:
        for name in ("fail_on", "ignore", "ignore_file"):
            object.__setattr__(self, name, several(getattr(self, name)))

    @property
    def says_what_fails(self) -> bool:
        """Whether some differences are accepted."""
        return bool(self.fail_on or self.ignore or self.ignore_file)
