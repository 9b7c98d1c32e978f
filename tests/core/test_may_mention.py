"""`may_mention` looks for words in many keys."""

from __future__ import annotations

import pytest

from ckpttool.core.text import may_mention
from ckpttool.kinds.adapters import adapter_of


@pytest.mark.parametrize(
    ("keys", "is_there"),
    [
        (["a.0.w", "a.17.w"], False),
        (["a.0.w", "a.17.ia3_l.w"], True),
        (["a.0.w", "a.17.lora_A.w"], True),
        (["a\nlora_A", "ü.lora_A"], True),
        ([], False),
    ],
)
def test_a_word_is_found_in_any_key(keys: list[str], is_there: bool) -> None:
    assert may_mention(keys, ("lora_", "ia3_")) == is_there


def test_another_digit_may_be_the_word_and_is_no_adapter() -> None:
    keys = ["a.0.ia7_l.weight"]
    assert may_mention(keys, ("ia3_",))
    assert adapter_of(keys) is None
    assert adapter_of(["a.0.ia3_l.weight"]) is not None
