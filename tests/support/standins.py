"""Edit DeepSpeed files with torch if DeepSpeed is not installed: objects of its classes are
preserved.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


class StandIn:
    """Keep the constructor arguments of an object, and pickle as that object."""

    def __init__(self, *args: Any) -> None:
        self.made_of = args

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            vars(self).get("made_of", ()),
            {k: v for k, v in vars(self).items() if k != "made_of"} or None,
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("deepspeed"):
            return super().find_class(module, name)
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            sys.modules.setdefault(path, ModuleType(path))
        home = sys.modules[module]
        if not hasattr(home, name):
            setattr(home, name, type(name, (StandIn,), {"__module__": module}))
        return getattr(home, name)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the content of the file."""
    with patch.dict(sys.modules):
        module = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)
        content = torch.load(path, pickle_module=module, weights_only=False)
        change(content)
        torch.save(content, path)
