"""References to storages in the pickle of a torch file; invalid references are refused."""

from __future__ import annotations

import pytest

from ckpttool.core.errors import CkptError
from ckpttool.formats.pickle_read import Global, Persistent
from ckpttool.formats.torch.tensors import storage_key

FLOAT = Global("torch", "FloatStorage")


@pytest.mark.parametrize("numel", [0, 4])
@pytest.mark.parametrize("more", [(), (None,)])  # before torch 1.6 a view could follow
def test_the_storage_key_is_read(numel: int, more: tuple[None, ...]) -> None:
    assert storage_key(Persistent(("storage", FLOAT, "7", "cpu", numel, *more))) == "7"


@pytest.mark.parametrize(
    "node",
    [
        ("storage", FLOAT, "7", "cpu", 4),
        Persistent(["storage", FLOAT, "7", "cpu", 4]),
        Persistent(("storage", FLOAT, "7", "cpu")),
        Persistent(("module", FLOAT, "7", "cpu", 4)),
        Persistent(("storage", "FloatStorage", "7", "cpu", 4)),
        Persistent(("storage", FLOAT, 7, "cpu", 4)),
        Persistent(("storage", FLOAT, "7", "cpu", -1)),
        Persistent(("storage", FLOAT, "7", "cpu", True)),
        Persistent(("storage", FLOAT, "7", "cpu", 4.0)),
    ],
)
def test_an_invalid_reference_is_refused(node: object) -> None:
    with pytest.raises(CkptError) as error:
        storage_key(node)
    assert error.value.message == "not as torch.save writes it: a storage reference"
