"""A DeepSpeed checkpoint (ZeRO or universal) as an ordinary one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry, contiguous_stride
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass, many_objects
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.deepspeed.files import (
    COPY,
    UNIVERSAL_REST,
    File,
    Files,
    Partitions,
    flat,
    groups_of,
    is_plain,
    mapping,
    partitions_of,
    plain,
    read_file,
    read_files,
    sequence,
    zero_stage,
)
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import is_tensor, sizes_of
from ckpttool.io.files import is_dir, names_in
from ckpttool.io.paths import join, safe_path

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


# What describes the run and its partitions, and means nothing beside the gathered tensors.
_OWN = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
_OWN |= {"shared_params", "ds_config", "ds_version", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
_OWN |= {"checkpoint_parallel_dimensions"}


@many_objects()
def read(folder: str) -> Checkpoint:
    """The index of the checkpoint in `folder`, one step's. Raises `CkptError` where files are missing or do not fit."""
    files = read_files(folder)
    notes: list[str] = []
    whole = None if files.universal is None else read_parameters(files, files.universal, notes)
    cut, weights = partitions_of(files) if whole is None else (whole.cut, whole.weights)
    sections = [Section("model", "state_dict", *_model(files, cut, weights, notes))]
    optimizer = (
        _optimizer(files, cut, notes) if whole is None else _universal_optimizer(files.optimizers[0], whole, notes)
    )
    every = (*files.models, *files.optimizers, *(() if whole is None else whole.files))
    lost = [str(key) for key, value in files.models[0].items.items() if key not in _OWN and value is not None]
    if lost:
        notes.append(f"not carried: {', '.join(lost)} of {files.models[0].path}")
    return Checkpoint(
        folder,
        "deepspeed",
        sum(file.nbytes for file in every),
        tuple(sections + ([optimizer] if optimizer is not None else [])),
        notes=(
            f"ZeRO-{cut.stage} of {cut.world_size} ranks, gathered"
            if whole is None
            else f"a universal checkpoint of ZeRO-{cut.stage}",
            *notes,
        ),
    )


def _model(
    files: Files, cut: Partitions, weights: Mapping[str, TensorEntry], notes: list[str]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """The state dict in the module's order: weights, what was frozen, buffers, and second names of shared weights.

    Behind it what is no tensor there.
    """
    first = files.models[0]
    module, objects = first.tensors("module"), first.objects("module")
    gathered = {**weights, **_frozen(files, cut)}
    buffers = [name for name in sequence(first.items, "buffer_names") if type(name) is str and name in module]
    whole = [name for name, entry in module.items() if cut.stage < 3 or entry.numel]  # ZeRO-3 leaves a placeholder
    own = {name: module[name] for name in (*whole, *buffers) if name not in gathered}
    found = {**own, **gathered}
    for name, other in mapping(first.items, "shared_params").items():
        shared = found.get(other) if type(other) is str else None
        found.pop(str(name), None)
        if shared is not None:
            found[str(name)] = replace(shared, key=str(name))
    unknown = [name for name in module if name not in found]
    if unknown:
        raise CkptError(
            f"{first.path}: of some entries of the module no partition holds the values",
            hint=COPY,
            problems=[Problem("neither a parameter, a buffer nor shared", name) for name in unknown],
        )
    taken: dict[str, TensorEntry | ExtraEntry] = {**own, **objects}
    for file in files.models[1:]:
        theirs: dict[str, TensorEntry | ExtraEntry] = {**file.tensors("module"), **file.objects("module")}
        differing = [name for name in taken if name not in theirs or not same_values(theirs[name], taken[name])]
        notes += [f"{name} differs between the ranks: rank 0's is taken" for name in differing]
    return tuple(found[name] for name in dict.fromkeys((*module, *found))), tuple(objects.values())


def _frozen(files: Files, cut: Partitions) -> dict[str, TensorEntry]:
    """Parameters that are not trained: whole in the model's file, with ZeRO-3 in equal parts."""
    fragments = [file.tensors("frozen_param_fragments") for file in files.models]
    if cut.stage < 3:
        return fragments[0]
    shapes = {str(k): sizes_of(v) for k, v in mapping(files.models[0].items, "frozen_param_shapes").items()}
    found: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        one = replace(cut, groups=({name: shape},))
        missing = [Problem("a rank has no part of it", name) for own in fragments if name not in own]
        if missing:
            raise CkptError(f"{files.models[0].path}: frozen parameters are not whole", hint=COPY, problems=missing)
        found |= one.gather([[flat(file, own[name])] for file, own in zip(files.models, fragments)])
    return found


# The optimizer


def _optimizer(files: Files, cut: Partitions, notes: list[str]) -> Section | None:
    """The optimizer's state by the names of its parameters; None, and a note, where its layout is not known."""
    key = "optimizer_state_dict" if cut.stage == 3 else "base_optimizer_state"
    states: list[Any] = []
    for file in files.optimizers:
        base = mapping(file.items, "optimizer_state_dict").get(key)
        if not _is_known(base, len(cut.groups)):
            notes.append(f"the optimizer is not read: {key} of {file.path} is not laid out as DeepSpeed does today")
            return None
        states.append(base)
    problems = [problem for at in range(len(cut.groups)) for problem in _differing(at, states, files.optimizers)]
    state: dict[str, dict[str, Any]] = {name: {} for shapes in cut.groups for name in shapes}
    flat_ids = [param for group in states[0]["param_groups"] for param in sequence(group, "params")]
    own_states = [[mapping(own["state"], param) for param in flat_ids] for own in states]
    for name in dict.fromkeys(str(name) for rank in own_states for own in rank for name in own):
        for param, value in _gathered(name, own_states, files.optimizers, cut, problems).items():
            state[param][name] = value
    if problems:
        raise CkptError(f"{files.optimizers[0].path}: the ranks' optimizers do not fit", hint=COPY, problems=problems)
    return _section(cut, states[0]["param_groups"], state, notes)


def _section(
    cut: Partitions, options: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> Section:
    """The optimizer's section: the options of each param group, and the state of each parameter."""
    groups: list[dict[str, Any]] = []
    for at, shapes in enumerate(cut.groups):
        own = {name: value for name, value in options[at].items() if name != "params"}
        lost = [name for name, value in own.items() if not is_plain(value)]
        notes += [f"not carried: {name} of param group {at}, which is no number and no word" for name in lost]
        groups.append({"params": list(shapes), **{k: plain(v) for k, v in own.items() if k not in lost}})
    tensors = tuple(v for own in state.values() for v in own.values() if isinstance(v, TensorEntry))
    return Section("optimizer", "optimizer", tensors, mapping={"state": state, "param_groups": groups})


def _universal_optimizer(rest: File, whole: Parameters, notes: list[str]) -> Section | None:
    """The optimizer's state of a universal checkpoint; None, and a note, where it has not the groups of the model."""
    base, cut = mapping(rest.items, "optimizer_state_dict"), whole.cut
    options = [pairs_of(group) for group in sequence(base, "param_groups")]
    known = [group for group in options if group is not None]
    if len(known) != len(cut.groups) or len(options) != len(known):
        notes.append(
            f"the optimizer is not read: {len(options)} param groups in {rest.path}, {len(cut.groups)} of shapes"
        )
        return None
    state: dict[str, dict[str, Any]] = {name: dict(own) for name, own in whole.states.items()}
    kept = mapping(mapping(base, "optimizer_state_dict"), "state")  # of ZeRO-3: rank 0's own, with its step
    for at, shapes in enumerate(cut.groups):
        for name, node in mapping(kept, at).items():
            value = rest.entry(str(name), node) if is_tensor(node) else plain(node)
            if isinstance(value, TensorEntry) and value.numel != 1:
                lost = any(name not in state[param] for param in shapes)
                notes += [f"not carried: {name} of {rest.path}, of one rank alone"] if lost else []
            else:
                for param in shapes:
                    state[param].setdefault(str(name), _own(value, param, str(name)))
    return _section(cut, known, state, notes)


def _is_known(base: Any, groups: int) -> bool:
    """Whether the state is laid out as an optimizer of as many param groups, each of flat parameters with numbers."""
    if type(base) is not dict or type(base.get("state")) is not dict or type(base.get("param_groups")) is not list:
        return False
    own = base["param_groups"]
    params = [group.get("params") for group in own if type(group) is dict]
    return len(own) == len(params) == groups and all(
        type(ids) is list and all(type(param) is int for param in ids) for ids in params
    )


def _differing(group: int, states: Sequence[Mapping[str, Any]], files: Sequence[File]) -> list[Problem]:
    """Hyperparameters of a param group that are not on all ranks the same."""
    own = [state["param_groups"][group] for state in states]
    return [
        Problem(f"{name} is {plain(other.get(name))!r}, and {plain(own[0].get(name))!r} on rank 0", file.path)
        for name in dict.fromkeys(name for one in own for name in one)
        for file, other in zip(files, own)
        if plain(other.get(name)) != plain(own[0].get(name))
    ]


def _gathered(
    name: str,
    states: Sequence[Sequence[Mapping[Any, Any]]],
    files: Sequence[File],
    cut: Partitions,
    problems: list[Problem],
) -> dict[str, Any]:
    """Parameter -> its value of the state `name`: its part of the flat ones, or the one that all ranks have."""
    values = [[own.get(name) for own in rank] for rank in states]
    entries = [
        [file.entry(name, value) if is_tensor(value) else None for value in rank] for file, rank in zip(files, values)
    ]
    flats = [[entry for entry in rank if entry is not None] for rank in entries]
    holds = [all(e.numel >= size and len(e.shape) == 1 for e, size in zip(*pair)) for pair in zip(flats, cut.sizes)]
    if all(len(own) == len(sizes) for own, sizes in zip(flats, cut.sizes)) and all(holds):
        return {param: replace(entry, key=f"state.{param}.{name}") for param, entry in cut.gather(flats).items()}
    one, number = entries[0][0], plain(values[0][0])
    if one is None:
        same = all(type(plain(v)) in (int, float, bool) and plain(v) == number for rank in values for v in rank)
    else:
        same = one.numel == 1 and all(e is not None and same_values(one, e) for rank in entries for e in rank)
    if not same:
        problems.append(Problem("has neither the shape of the partitions nor one value on all ranks", name))
        return {}
    value = number if one is None else one
    return {param: _own(value, param, name) for shapes in cut.groups for param in shapes}


def _own(value: Any, param: str, name: str) -> Any:
    """The same value, of each parameter its own."""
    return replace(in_own_storage(value), key=f"state.{param}.{name}") if isinstance(value, TensorEntry) else value
