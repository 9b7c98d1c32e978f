"""Whether a model saves the same keys where it is a part of another, as under DDP; hooks with absolute keys do not."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ckpttool.errors import Problem
from ckpttool.tracing.load_model import LoadedModel

_PART = "part"  # any name will do
_HINT = "a state_dict hook looks for absolute keys, and breaks under DDP too"


def nested_problems(model: LoadedModel, keys: Collection[str]) -> tuple[Problem, ...]:
    """What becomes of the serialized `keys` of a fresh instance that is a child of another module; none where all is
    as it should be. Raises `CkptError` where the model cannot be built.
    """
    outer = nn.Module()
    outer.add_module(_PART, model.build())
    try:
        found = {key for key in outer.state_dict() if isinstance(key, str)}
    except Exception as error:  # whatever a hook raises
        return (Problem(f"is not saved at all as a part of another: {type(error).__name__}: {error}", "(root)"),)
    expected = {f"{_PART}.{key}" for key in keys}
    lost, other = sorted(expected - found), sorted(found - expected)
    instead = f"; {other[0].removeprefix(_PART + '.')} is there instead" if other else ""
    return tuple(
        Problem(f"is not saved under this key where the model is a part of another: {_HINT}{instead}", key)
        for key in (one.removeprefix(_PART + ".") for one in lost or other)
    )
