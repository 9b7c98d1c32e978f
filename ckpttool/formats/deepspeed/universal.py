"""DeepSpeed's universal checkpoints: each parameter whole, in a folder of its own (see its ``ds_to_universal.py``).

``NAME/fp32.pt`` is the weight, every other file beside it a state of its optimizer: a dict with the tensor as
``param``, or of ZeRO-3 the flat tensor alone, whose shape the model's file knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ckpttool.checkpoint import TensorEntry, contiguous_stride
from ckpttool.errors import CkptError, Problem
from ckpttool.formats.deepspeed.files import COPY, UNIVERSAL_REST, File, Files, read_file, zero_stage
from ckpttool.formats.deepspeed.partitions import Partitions, groups_of
from ckpttool.io.files import is_dir, names_in
from ckpttool.io.paths import join
from ckpttool.io.safe_path import safe_path
from ckpttool.values import dataclass

_WEIGHT, _ENDING = "fp32", ".pt"


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """The weights by name, and `states`: parameter -> name of a state -> its tensor. Of `cut` only the groups count."""

    cut: Partitions
    weights: Mapping[str, TensorEntry]
    states: Mapping[str, Mapping[str, TensorEntry]]
    files: tuple[File, ...]


def read_parameters(files: Files, root: str, notes: list[str]) -> Parameters:
    """The parameters in the folder `root`; `notes` get what is left out.

    Raises `CkptError`, all problems at once, where one is missing or does not fit.
    """
    cut = Partitions(zero_stage(files.optimizers[0]), len(files.models), groups_of(files), (), ())
    shapes = {name: shape for group in cut.groups for name, shape in group.items()}
    read: list[File] = []
    problems: list[Problem] = []
    found = {name: _of_parameter(root, name, shape, read, problems) for name, shape in shapes.items()}
    problems += [
        Problem(f"no file {_WEIGHT}{_ENDING} of it", name) for name, own in found.items() if _WEIGHT not in own
    ]
    if problems or not shapes:
        raise CkptError(f"{root} does not hold every parameter whole", hint=COPY, problems=problems)
    known = {*shapes, UNIVERSAL_REST, *files.models[0].tensors("module")}
    notes += [f"not carried: {join(root, name)} is of no parameter" for name in names_in(root) if name not in known]
    weights = {name: replace(own.pop(_WEIGHT), key=name) for name, own in found.items()}
    return Parameters(cut, weights, found, tuple(read))


def _of_parameter(
    root: str, param: str, shape: tuple[int, ...], read: list[File], problems: list[Problem]
) -> dict[str, TensorEntry]:
    """The tensors in the folder of one parameter by the names of their files."""
    folder = safe_path(root, param)
    if folder is None or not is_dir(folder):
        return {}
    found: dict[str, TensorEntry] = {}
    for name in names_in(folder):
        own = name.removesuffix(_ENDING)
        file = read_file(join(folder, name))
        read.append(file)
        entry = file.entry(f"state.{param}.{own}", file.items.get("param"))
        if entry.shape in (shape, (prod(shape),)):
            entry = replace(entry, shape=shape, stride=contiguous_stride(shape), payload=None)
        elif entry.shape != () or own == _WEIGHT:  # one value, as its step is, stays what it is
            problems.append(Problem(f"{name} is of shape {list(entry.shape)}, the parameter of {list(shape)}", param))
        found[own] = entry
    return found
