"""Whether the names of a model, without its code, tell if it loads a checkpoint."""

from __future__ import annotations

from ckpttool.containers.tensors import is_dense, kind
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.names import SERIALIZED, SPECIAL, Names
from ckpttool.core.text import code_of, plural
from ckpttool.formats.remarks import one_rank
from ckpttool.naming.convert import other_versions, read_keys
from ckpttool.naming.match import NameTables
from ckpttool.operands.model import ModelOperand

_PASS_CODE = "pass the model's code: --model package.module:attr, or file.py:attr"


def check_names_suffice(
    model: ModelOperand, names: Names, checkpoint: Checkpoint, section: Section
) -> None:
    """Raise `CkptError` if loading depends on kinds of tensors or module versions, which names do
    not describe.
    """
    subject = f"names cannot tell if {model.title} loads it"
    strange = []
    for tensor in section.tensors:
        if not is_dense(tensor):
            strange.append(Problem(f"a tensor of another kind ({kind(tensor)})", tensor.key))
    if strange:
        raise CkptError(
            f"{subject}: {plural(len(strange), 'tensor')} of another kind",
            hint="; ".join(one_rank(checkpoint)) or _PASS_CODE,
            problems=strange,
        )
    for note in names.notes:
        if code_of(note) == SPECIAL:
            raise CkptError(f"{subject}: its tensors are {note}", hint=_PASS_CODE)
    reading = read_keys(NameTables(names), section, SERIALIZED)
    others = other_versions(names, section, reading)
    if others:
        raise CkptError(
            f"{subject}: {plural(len(others), 'module')} of another version",
            hint=_PASS_CODE,
            problems=others,
        )
