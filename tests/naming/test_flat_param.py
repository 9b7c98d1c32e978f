"""The first model parameter that does not fit a flat parameter."""

from __future__ import annotations

import pytest

from ckpttool.naming.flat import Slot, misfit

SLOTS = (Slot(("a",), (4,), 0), Slot(("b", "tied"), (2, 2), 4))


@pytest.mark.parametrize(("slots", "numel", "padded", "message"), [
    (SLOTS, 8, False, None),
    (SLOTS, 9, True, None),
    (SLOTS, 9, False, "need 8: after its last parameter, b [2, 2], 1 are left"),
    (SLOTS, 12, True, "need 8: after its last parameter, b [2, 2], 4 are left"),
    (SLOTS, 4, True, "need 8: b [2, 2] would be elements 4 to 8"),
    (SLOTS, 3, False, "need 8: a [4] would be elements 0 to 4"),
    ((), 0, False, None),
    ((), 3, False, "need 0: 3 are left"),
])  # fmt: skip
def test_misfit_names_the_first_parameter_that_does_not_fit(
    slots: tuple[Slot, ...], numel: int, padded: bool, message: str | None
) -> None:
    """The flat parameter is padded for three ranks."""
    result = misfit(slots, numel, 3, padded)
    assert result == (
        None if message is None else f"holds {numel} elements, and the model's parameters {message}"
    )
