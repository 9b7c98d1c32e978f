"""`load`: a checkpoint into a live model, all or nothing; `save_names` and `check_names`: its names
in a unit test.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, Span, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.optimizer_state import ID, PARAM_NAMES, PARAMS, rebuilt
from ckpttool.core.options import expand_options
from ckpttool.core.text import a, code_of, listed, plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.causes import Code
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.run import run
from ckpttool.evaluate import torch_eval
from ckpttool.fixes.diff import diff as diff_with_fix
from ckpttool.fixes.fix import applicable
from ckpttool.fixes.optimizer import known_remap
from ckpttool.fixes.suggest import answered
from ckpttool.fixes.trial import DiffQuestion, try_remap
from ckpttool.io import sources
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Piece, comparing_checksums, map_span
from ckpttool.io.write import WriteOptions, preflight, write_file
from ckpttool.live.model import FSDP1, FSDP2, instances, placed
from ckpttool.live.partial import fitting_part
from ckpttool.live.swap import swap_weights
from ckpttool.operands.checkpoint import Ckpt, model_section, open_checkpoint, open_operand, pick
from ckpttool.operands.model import ModelOperand, read_for_model, trace
from ckpttool.operands.output import command
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model
from ckpttool.report.renderers import json
from ckpttool.tracing.build_model import CannotBuild, attempt, describe
from ckpttool.tracing.instances import copied_state, is_dtensor, load_strictly, wrapper_paths
from ckpttool.tracing.safe_state_dict import Maker, NotMade, stored

_EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import OptimizerKeywords


@public
@dataclass(frozen=True, slots=True)
class HyperparameterChange:
    """A hyperparameter of a param group that loading changed: `before` is the optimizer's, None if
    it had none.
    """

    group: int
    name: str
    before: Any
    after: Any


@public
@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` did.

    `section` is the path of the state dict in the file, None if only the optimizer was loaded;
    `tensors` counts the tensors of the model that got values; `fix` is the call or command of the
    remap that was applied on the way, None if the keys fit as they were; `optimizer` is the path of
    the optimizer's state, None if it was not loaded. `hyperparameters` are the changed ones: a
    saved param group brings its own, as in ``load_state_dict``; a group that no saved group equals
    keeps what the code sets. With ``partial=True``, `missing` are keys of the model that the file
    lacks, `mismatched` those that have another shape there, and `unexpected` are keys of the file
    that the model does not have: these tensors of the model are unchanged.
    """

    ckpt: str
    section: str | None
    tensors: int
    fix: str | None
    optimizer: str | None
    hyperparameters: tuple[HyperparameterChange, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return what was loaded, renamed, changed and left out, a line each."""
        parts = []
        if self.section is not None:
            section = f" ({self.section})" if self.section else ""
            parts.append(f"{plural(self.tensors, 'tensor')}{section}")
        if self.optimizer is not None:
            parts.append("the state of the optimizer")
        lines = [f"loaded from {self.ckpt}: {listed(parts)}"]
        if self.fix is not None:
            lines.append(f"its keys were renamed on the way, as {self.fix} does")
        for change in self.hyperparameters:
            where = f"param group {change.group}, {change.name}"
            lines.append(f"{where}: {change.after!r} instead of {change.before!r}")
        left_out = {
            f"missing from {self.ckpt}": self.missing,
            "of another shape": self.mismatched,
            "not in the model": self.unexpected,
        }
        for what, keys in left_out.items():
            if keys:
                lines.append(f"{plural(len(keys), 'key')} {what}: {some(keys)}")
        return "\n".join(lines)


@expand_options()
def load(
    ckpt: Ckpt,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    definition: Any = None,
    cast: bool = False,
    partial: bool = False,
    section: str | None = None,
    select: str | None = None,
) -> Loaded:
    """Load a checkpoint into a live model, and into its optimizer, whatever wrappers and containers
    are between them.

    Its keys may lack or have the segments of DDP, FSDP, `torch.compile` and Lightning, or be the
    names of an exported program: the remap that `diff` would suggest is applied, and only if a
    strict load succeeds after it. Nothing is inferred from shapes, and values that a load hook
    computes are refused. Optimizer state may be by ids or by names, in the order of this optimizer
    or another one; a file with an optimizer alone is loaded into `optimizer`. Values are written
    into the existing tensors. Those of local files are read through a memory map; remote ones are
    held in memory until all are there. Pickles are read and never run.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        model: The module. Every rank of a sharded module (`fully_shard`, FSDP1) calls `load`.
        optimizer: Its optimizer, if its state is loaded too.
        definition: The function, class or ``file.py:build`` operand that builds a sharded module
            before it is sharded.
        cast: Allow other dtypes.
        partial: Load what fits by name and shape; the result says what did not.
        section: The state dict of the file to load (``"ema"``).
        select: The submodule in it that `model` is (``"encoder"``).

    Returns:
        What was loaded, and the call that would write the same keys to a file.

    Raises:
        Refused: The checkpoint does not fit; all problems at once.
        CkptError: It cannot be read. If anything is raised, model and optimizer are unchanged.

    Example::

        loaded = ckpttool.load("train.pt", model, optimizer)
        print(loaded.fix)  # the call that would write the same keys to a file, or None
    """
    sources.begin_call()
    core = innermost(model)
    if definition is None and (instances(core, FSDP1) or instances(core, FSDP2)):
        raise CkptError(
            "a sharded module cannot be copied, and its state_dict hooks are not known",
            hint="pass definition=build, the function or class that builds the model before it is"
            " sharded",
        )
    operand = _operand_of(core if definition is None else definition)
    source = read_for_model(open_checkpoint(ckpt), operand)
    weights = _narrowed(source, ckpt, section, select)
    part, fix, state_dict, by_code = None, None, None, False
    if partial:
        part = fitting_part(model_section(weights), core, operand)
        weights = Checkpoint.of(part.section)
    if source.state_dicts or optimizer is None:
        state_dict, fix, by_code = _fitting_model(weights, operand, cast)
    path, state = None, None
    if optimizer is not None:
        path, state = _fitting_state(source, operand.with_optimizer(like(optimizer, core)), cast)
    before = _hyperparameters(optimizer)
    count = put(model, state_dict, operand, optimizer, state, cast, by_code)
    loaded_path = section
    if section is None and state_dict is not None:
        loaded_path = model_section(source).path
    changes = _changes(before, _hyperparameters(optimizer))
    loaded = Loaded(source.source, loaded_path, count, fix, path, changes)
    if part is None:
        return loaded
    return replace(
        loaded,
        tensors=len(part.loaded),
        missing=part.missing,
        mismatched=part.mismatched,
        unexpected=part.unexpected,
    )


def _narrowed(
    source: Checkpoint, ckpt: Ckpt, section: str | None, select: str | None
) -> Checkpoint:
    """Return the checkpoint with one section, and of this one submodule, if they are named."""
    if section is not None and isinstance(ckpt, str):
        source = open_operand(f"{ckpt}::{section}")
    elif section is not None:
        source = pick(source, section)
    if select is None:
        return source
    return plan_remap(source, RemapOptions(select=select), None, None).result


def _hyperparameters(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return the hyperparameters of each param group."""
    groups = []
    for group in [] if optimizer is None else optimizer.param_groups:
        options = dict(group)
        for name in (PARAMS, PARAM_NAMES):
            options.pop(name, None)
        groups.append(options)
    return groups


def _changes(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> tuple[HyperparameterChange, ...]:
    changes = []
    for index, (old, new) in enumerate(zip(before, after)):
        for name, value in new.items():
            if name not in old or not _is_same_option(old[name], value):
                changes.append(HyperparameterChange(index, name, old.get(name), value))
    return tuple(changes)


def _is_same_option(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        same_kind = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return same_kind and torch.equal(left.cpu(), right.cpu())
    return bool(left == right)


def _operand_of(model: Any) -> ModelOperand:
    """Return the model as an operand, to be built with real tensors if it cannot be built without
    values.
    """
    operand = ModelOperand(model)
    try:
        operand.names()
    except CannotBuild:
        real = ModelOperand(model, materialize=True)
        real.names()
        return real
    return operand


def _fitting_model(
    source: Checkpoint, model: ModelOperand, cast: bool
) -> tuple[Section, str | None, bool]:
    """Return a section that a strict load takes, the command that makes it, if there is one, and
    whether only the model's own code loads it: it lacks keys, or has other shapes.
    """
    options = DiffOptions(model=model, ignore_dtype=cast)
    diff, fix = run(source, None, options, model), None
    if not diff.identical:
        answer = answered(DiffQuestion(source, None, options, model, diff))
        try:
            fix = applicable(answer, command("diff", (source.source,), options), casts=False)
        except Refused as error:
            if not cast and any(entry.status == "dtype" for entry in diff.entries):
                error.hint = f"cast=True converts the dtypes; {error.hint}"
            elif any(entry.status == "missing" for entry in diff.entries):
                error.hint = f"partial=True loads what fits, and returns the rest; {error.hint}"
            raise
        source = open_operand(fix.source) if fix.source else source
        saved_by = None if fix.options.model is None else model
        source = plan_remap(source, fix.options, saved_by, None).result
        diff = run(source, None, options, model, infers=False)
    computed = [entry for entry in diff.entries if entry.has(Code.LOAD_HOOK_CHANGES)]
    if computed:
        problems = []
        for entry in computed:
            problems += [Problem(entry.why(), key, "opaque") for key in entry.left]
        raise Refused(
            f"only the model's own code loads {plural(len(computed), 'tensor')} of this file",
            hint="let the model load the state dict itself, with load_state_dict",
            problems=problems,
        )
    by_code = any(entry.status in ("missing", "shape", "unexpected") for entry in diff.entries)
    return model_section(source), None if fix is None else str(fix), by_code


def _fitting_state(
    source: Checkpoint, model: ModelOperand, cast: bool
) -> tuple[str, Mapping[Any, Any]]:
    """Return the path of the optimizer's state, and the state by the ids of the optimizer of
    `model`.
    """
    options = DiffOptions(model=model, optimizer=model.optimizer)
    diff = after = run(source, None, options, model)
    question = DiffQuestion(source, None, options, model, diff)
    if diff.remedy is None:
        remap = RemapOptions(model=model, optimizer=model.optimizer, optimizer_keys=ID)
    else:
        candidate = known_remap(question, diff.remedy)
        fix = None if candidate is None else try_remap(question, candidate[1], candidate[0])
        if candidate is None or fix is None or fix.after.remedy is not None:
            answer = answered(question)
            # `_fitting_model` fixes that
            notes = [note for note in answer.notes if code_of(note) != "other-sections"]
            hint = "; ".join((*answer.fix, *notes[-2:])) or "start the optimizer from scratch"
            message = f"the optimizer state of {source.source} does not fit this optimizer"
            raise Refused(
                message, hint=hint, problems=diff.problems((source.source, "the optimizer"))
            )
        remap, after = replace(candidate[1], optimizer_keys=ID), fix.after
    converts = [note for note in after.notes if code_of(note) == "converts"]
    if converts and not cast:
        hint = "cast=True converts them"
        raise Refused(
            f"the optimizer state of {source.source} has other dtypes: {converts[0]}", hint=hint
        )
    saved_by = model.with_optimizer(remap.optimizer)
    result = plan_remap(source, remap, saved_by, loading_model(remap, saved_by)).result
    (section,) = (section for section in result.sections if section.kind == "optimizer")
    assert section.mapping is not None
    return section.path, section.mapping


def save_names(model: Any, path: str, **options: Unpack[OptimizerKeywords]) -> None:
    """Write the names file of a model, as ``ckpttool trace MODEL -o PATH --force`` does.

    Args:
        model: Anything that `trace` takes.
        path: The file to write.
        **options: As for `trace`.

    Raises:
        CkptError: The model's own code fails, or the file cannot be written.

    Example::

        ckpttool.save_names(build(), "names.json")
    """
    text = json.render(trace(model, **options).to_json())
    preflight(path, (), force=True, in_place=True)
    write_file(
        [Piece(text.encode("utf-8", "backslashreplace"))],
        path,
        WriteOptions(replace=True, in_place=True),
    )


def check_names(model: Any, path: str, **options: Unpack[OptimizerKeywords]) -> None:
    """Compare a model with a names file: for a unit test.

    Args:
        model: Anything that `trace` takes.
        path: The file, which `save_names` wrote.
        **options: As for `trace`.

    Raises:
        Refused: Names have changed; every one is a problem.
        CkptError: There is no such file.

    Example::

        def test_names_of_checkpoints_stay():
            ckpttool.check_names(build(), "names.json")
    """
    again = f"ckpttool.save_names(model, {path!r})"
    if not os.path.exists(path):
        raise CkptError(f"{path} does not exist", hint=f"{again} writes it")
    diff = diff_with_fix(path, model=model, **options)
    if not diff.identical:
        problems = diff.problems((path, "the model"))
        count = sum(map(diff.is_difference, diff.entries))
        message = f"{plural(count, 'name')} of the model changed since {path} was written"
        if not count:
            message = f"the model is not as it was when {path} was written: {diff.other_failure}"
        raise Refused(
            message, hint=f"if checkpoints may change, {again} accepts it", problems=problems
        )


# Loading into a module, and into its optimizer


def innermost(module: Module) -> Module:
    """Return the module inside of the wrappers around all of it: DDP, `torch.compile`, FSDP1.

    An AveragedModel is another model, with a counter in its state dict. Raise `CkptError` if it is
    not a module.
    """
    if not isinstance(module, Module):
        raise CkptError(
            f"{a(module)} is not a module", hint="ckpttool.swap_weights puts weights into a program"
        )
    while not isinstance(module, AveragedModel):
        wrapped = [path for path in wrapper_paths(module) if "." not in path]
        if not wrapped:
            break
        module = module.get_submodule(wrapped[0])
    return module


def like(optimizer: Optimizer, model: Module) -> Callable[[Module], Optimizer]:
    """Return a function that makes such an optimizer, with a copy of its state, for a copy of
    `model`.

    The constructors of some optimizers create state that a step needs. Raise `CkptError` if the
    optimizer has parameters that the model does not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    strangers = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                problem = f"a parameter of shape {list(parameter.shape)}"
                strangers.append(Problem(problem, f"param_groups.{index}"))
    if strangers:
        raise CkptError(
            f"the optimizer has {plural(len(strangers), 'parameter')} that the model does not have",
            hint="pass the optimizer that was made of this model's parameters",
            problems=strangers,
        )

    def make(fresh: Module) -> Optimizer:
        twin = type(optimizer).__new__(type(optimizer))
        # Schedulers and profilers replace `step` in the instance, and hooks on steps are about the
        # real one.
        twin.__dict__.update(vars(optimizer))
        twin.__dict__.pop("step", None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in twin.__dict__:
                twin.__dict__[name] = type(twin.__dict__[name])()
        parameters = dict(fresh.named_parameters())
        twin.state = defaultdict(dict)
        for owner, values in optimizer.state.items():
            parameter = parameters[names[id(owner)]] if id(owner) in names else owner
            device = torch.device("cpu")
            if isinstance(parameter, torch.Tensor):
                device = parameter.device
            twin.state[parameter] = tree_map(partial(_copied, device=device), values)
        twin.param_groups = []
        for group in optimizer.param_groups:
            params = [parameters[names[id(parameter)]] for parameter in group["params"]]
            twin.param_groups.append({**group, "params": params})
        return twin

    return make


def _copied(value: Any, device: torch.device) -> Any:
    """Return a copy of a value of an optimizer's state; a step reads its counters, so single
    elements are real.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.numel() == 1 and device.type == "meta":
        device = torch.device("cpu")
    if type(value) is torch.Tensor:
        return value.detach().to(device, copy=True)
    clone = None if is_dtensor(value) else attempt(value.detach().clone)
    if isinstance(clone, torch.Tensor):
        return clone
    # sharded, or of a class that has no copies
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


def put(
    model: Module,
    section: Section | None,
    definition: ModelOperand,
    optimizer: Optimizer | None,
    state: Mapping[Any, Any] | None,
    cast: bool,
    by_code: bool = False,
) -> int:
    """Load the section, which `definition` loads, into `model`, and `state`, by ids, into
    `optimizer`. `by_code`: only the model's own code loads the section.

    Return how many tensors of the model got values. If anything is raised, both are unchanged.
    """
    if section is None:
        with _optimizer_state(model, optimizer, state):
            return 0
    maker, problems = Maker(True), list[Problem]()
    tensors: Any = OrderedDict()
    with comparing_checksums():
        for entry in section.tensors:
            if entry.storage is not None:
                tensors[entry.key] = mapped(entry)
            else:
                tensors[entry.key] = _created(entry, maker, problems)
        objects = {extra.key: _created(extra, maker, problems) for extra in section.extras}
    _check_created(problems)
    if section.modules is not None:
        tensors._metadata = section.modules
    only_extra_state = all(key.rpartition(".")[2] == _EXTRA_STATE for key in objects)
    # Quantized layers keep their weights in objects, which only their code loads; so is the shape
    # of lazy parameters.
    if by_code or not only_extra_state or any(map(is_lazy, innermost(model).parameters())):
        with (
            _own_loading(innermost(model), stored(section, True).state),
            _optimizer_state(model, optimizer, state),
        ):
            return len(section.tensors)
    with _extra_state(innermost(model), objects), _optimizer_state(model, optimizer, state):
        return len(swap_weights(model, tensors, definition, cast=cast, in_place=True).sources)


def _created(entry: TensorEntry | ExtraEntry, maker: Maker, problems: list[Problem]) -> Any:
    """Return the tensor or object that the safe loader of torch creates; add a problem if there is
    none.
    """
    try:
        return maker.value(entry)
    except NotMade as reason:
        kind = "kind" if isinstance(entry, TensorEntry) else "object"
        problems.append(Problem(f"{reason}, which no safe loader creates", entry.key, kind))
        return None


def _check_created(problems: Sequence[Problem]) -> None:
    if problems:
        raise Refused(
            f"only running code loads {plural(len(problems), 'object')} of this file",
            hint="if you trust the file: model.load_state_dict(torch.load(CKPT,"
            " weights_only=False)); or declare the classes as safe:"
            " torch.serialization.add_safe_globals([CLASS])",
            problems=problems,
        )


@contextmanager
def _own_loading(module: Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Let the module load the state dict itself; give it its old state if that or the block
    raises.
    """
    before = copied_state(module.state_dict())
    every = (*module.parameters(), *module.buffers())
    lazy = {tensor: type(tensor) for tensor in every if is_lazy(tensor)}
    try:
        load_strictly(module, state)
        yield
    except BaseException:
        for tensor, cls in lazy.items():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.__class__ = cls
        load_strictly(module, before)
        raise


def mapped(entry: TensorEntry) -> torch.Tensor:
    """Return the entry as a tensor in the memory of its file, if that is on this machine; else read
    or compute it.

    Raise `CkptError` if the file cannot be read.
    """
    data = None if entry.storage is None else entry.storage.data
    if not isinstance(data, Span) or is_url(data.path) or not entry.numel:
        return torch_eval.load(entry)
    size = itemsize(entry.dtype)
    begin = data.offset + entry.offset * size
    if begin % size:
        return torch_eval.load(entry)
    memory = map_span(Span(data.path, begin, (entry.end - entry.offset) * size))
    elements = torch.frombuffer(memory, dtype=getattr(torch, entry.dtype))
    return elements.as_strided(entry.shape, entry.stride)


@contextmanager
def _extra_state(module: Module, states: Mapping[str, Any]) -> Iterator[None]:
    """Give the modules their extra state; take it back if the block raises."""
    before: list[tuple[Module, Any]] = []
    try:
        for key, value in states.items():
            part = module.get_submodule(key.rpartition(".")[0])
            before.append((part, part.get_extra_state()))
            part.set_extra_state(value)
        yield
    except BaseException:
        for part, value in reversed(before):
            part.set_extra_state(value)
        raise


@contextmanager
def _optimizer_state(
    model: Module, optimizer: Optimizer | None, state: Mapping[Any, Any] | None
) -> Iterator[None]:
    """Load the state; take it back if the block raises. Parts for a sharded parameter are sharded
    as that is.
    """
    if optimizer is None or state is None:
        yield
        return
    if instances(model, FSDP1):
        raise CkptError(
            "the state of an optimizer under FSDP1 is cut like its flat parameters",
            hint="load the model with ckpttool, and the optimizer with"
            " FSDP.optim_state_dict_to_load",
        )
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    maker, problems = Maker(True), list[Problem]()

    def value(path: tuple[str, ...], part: Any) -> Any:
        if not isinstance(part, (TensorEntry, ExtraEntry)):
            return part
        if isinstance(part, ExtraEntry) or part.storage is None:
            return _created(part, maker, problems)
        tensor = torch_eval.load(part)
        if path[0] == "state" and path[1].isdecimal():
            parameter = parameters[int(path[1])]
            return placed(tensor, parameter) if tensor.shape == parameter.shape else tensor
        return tensor

    with comparing_checksums():
        loaded = rebuilt(state, value)
    _check_created(problems)
    before = {name: vars(optimizer).get(name) for name in ("state", "param_groups")}
    try:
        try:
            optimizer.load_state_dict(loaded)
        except Exception as error:
            hint = "start the optimizer from scratch, and load the model alone"
            raise Refused(
                f"torch does not load the optimizer state: {describe(error)}", hint=hint
            ) from error
        yield
    except BaseException:
        vars(optimizer).update(before)
        raise
