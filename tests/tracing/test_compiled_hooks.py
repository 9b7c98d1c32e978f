"""torch's compiler is imported only if the model's code uses it; compiled hooks are traced like
others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from torch_version import needs_torch

MODEL = """
import torch
from torch import nn

def joined(one, other):
    return one.t()

class Model(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)  # no random values on meta
        self.register_state_dict_post_hook(hook)

def hook(model, state, prefix, metadata):
    run = torch.compile(joined, backend="eager") if model.compiled else joined
    state[prefix + "both"] = run(state.pop(prefix + "a.weight"), state.pop(prefix + "b.weight"))
"""
TRACE = """
import json, sys
import ckpttool
for compiled in (0, 1):
    names = ckpttool.trace(f"model.py:Model(compiled={compiled})")
    print(json.dumps([str([(key.key, key.source) for key in names.serialized]), "torch._dynamo" in sys.modules]))
"""


def test_only_compiled_hooks_import_the_compiler(tmp_path: Path) -> None:
    needs_torch("2.13", "importing the compiler while operators are recorded")
    (tmp_path / "model.py").write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-c", TRACE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (plain, imported), (compiled, imported_by_compiled) = map(json.loads, done.stdout.splitlines())
    assert plain == compiled
    assert "aten.t.default" in plain
    assert (imported, imported_by_compiled) == (False, True)
