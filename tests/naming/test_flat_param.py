"""At which parameter a flat parameter and the model part ways."""

from __future__ import annotations

import pytest

from ckpttool.naming.flat import Slot, misfit

OWN = (Slot(("a",), (4,), 0), Slot(("b", "tied"), (2, 2), 4))


@pytest.mark.parametrize(("own", "numel", "padded", "said"), [
    (OWN, 8, False, None),
    (OWN, 9, True, None),
    (OWN, 9, False, "need 8: after its last parameter, b [2, 2], 1 are left"),
    (OWN, 12, True, "need 8: after its last parameter, b [2, 2], 4 are left"),
    (OWN, 4, True, "need 8: b [2, 2] would be elements 4 to 8"),
    (OWN, 3, False, "need 8: a [4] would be elements 0 to 4"),
    ((), 0, False, None),
    ((), 3, False, "need 0: 3 are left"),
])  # fmt: skip
def test_misfit(own: tuple[Slot, ...], numel: int, padded: bool, said: str | None) -> None:
    """By three ranks, which share 9 elements."""
    found = misfit(own, numel, 3, padded)
    assert found == (None if said is None else f"holds {numel} elements, and the model's parameters {said}")
