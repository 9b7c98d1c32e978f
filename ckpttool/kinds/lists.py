"""Lists of tensors: averages of a model's parameters, as torch_ema and diffusers save them.

A list has no names. Its tensors are the parameters in the order of ``model.parameters()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Kind, Section, TensorEntry
from ckpttool.core.names import RUNTIME, Names, first_parameters
from ckpttool.core.text import plural
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import NameTables
from ckpttool.optimizers.parameters import Parameters

NAME = "list"


def recognize(section: Section) -> Kind | None:
    if not section.is_list:
        return None
    text = (
        f"is a list of {plural(len(section.tensors), 'tensor')} without names, an average of"
        " parameters as torch_ema and EMAModel of diffusers save it: copy_to(model.parameters())"
        " loads it"
    )
    return Kind(NAME, section.path, text)


def with_names_of_lists(
    checkpoint: Checkpoint, names: Names, in_file: Iterable[Section]
) -> Checkpoint:
    """Return the checkpoint with the runtime names of the model's parameters for its lists.

    `in_file` are the state dicts of the file, which are in the order of the model that saved it. A
    list whose number of tensors or shapes differ from the parameters keeps its numbers, as does one
    next to a state dict: that is the model in question.
    """
    if not checkpoint.state_dicts or not all(s.is_list for s in checkpoint.state_dicts):
        return checkpoint
    params = parameters_of(names)
    saved = _in_saved_order(in_file, names, params)
    sections = []
    for section in checkpoint.sections:
        for order in (saved, params) if section.is_list else ():
            if [entry.shape for entry in section.tensors] == [entry.shape for entry in order]:
                pairs = zip(section.tensors, order)
                tensors = tuple(entry.under(param.key) for entry, param in pairs)
                section = replace(section, tensors=tensors, form=RUNTIME)
                break
        sections.append(section)
    return replace(checkpoint, sections=tuple(sections))


def parameters_of(names: Names) -> list[TensorEntry]:
    """Return the model's parameters by FQN, in the order of ``model.parameters()``."""
    params = []
    for tensor in first_parameters(names.runtime):
        shape = tensor.shape or ()
        params.append(TensorEntry(tensor.fqn, tensor.dtype, shape, (), 0, None))
    return params


def _in_saved_order(
    in_file: Iterable[Section], names: Names, params: Sequence[TensorEntry]
) -> list[TensorEntry]:
    """Return the parameters in the order of the model that saved the file, as far as a state dict
    in it shows.

    The model may register them in another order now.
    """
    canonical = Parameters(names).canonical
    by_canonical = {canonical[param.key]: param for param in params}
    tables = NameTables(names)
    for section in in_file:
        if section.is_list:
            continue
        reading = read_keys(tables, section)
        in_order: dict[str, TensorEntry] = {}
        for entry in section.tensors:
            name = canonical.get(reading.match.names.get(entry.key, ""), "")
            if name in by_canonical:
                in_order[name] = by_canonical[name]
        if len(in_order) == len(by_canonical):
            return list(in_order.values())
    return []
