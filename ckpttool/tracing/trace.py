"""From a model definition to its `Names`: record its saving and loading, and see whether it can
read what it writes.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref, is_constant, is_opaque, refs, substitute
from ckpttool.core.names import (
    NAMED_EXTRA_STATE,
    ON_PLACE,
    SPECIAL,
    LoadedTensor,
    Names,
    SerializedKey,
)
from ckpttool.core.tables import by_key, first_names, sources_of
from ckpttool.core.text import Note, dotted, some
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing.build_model import CannotBuild, LoadedModel
from ckpttool.tracing.hooks import has_saving_code
from ckpttool.tracing.instances import (
    CONSTANT,
    Filling,
    check_memory,
    copied_state,
    dtype_name,
    failure_of_loading,
    filled,
    is_cheap,
    is_plain,
    listed,
    metadata_of,
    on_meta_or_real,
    same,
    shape_of,
    values_of,
)
from ckpttool.tracing.loading import (
    Load,
    Verdict,
    reads_for_other_values,
    record_load,
    versions_asked_for,
)
from ckpttool.tracing.memory import Geometry, StorageView
from ckpttool.tracing.saving import Saved, save, save_once
from ckpttool.tracing.simplify import Simplifier
from ckpttool.tracing.user_code import attempt, describe

_UNKNOWN = "cannot be told whether it is given back: {}"
_INEXACT = "loading does not give the saved value back exactly"
_UNTRIED = "whether load_state_dict() reads them back for other values was not tried"
_ROOT = "(root)"
# elements of the tensors that are filled with random values to compare both ways
_PROBE_LIMIT = 50_000_000
# elements, and for fewer elements the number of random values that are tried
_FEW, _ROUNDS = 1024, 16

# Fillings of the instance that saves and the instance that loads; a change of sign shows in one
# element too.
_SEEDS: tuple[tuple[Filling, Filling], ...] = ((11, 12), (-11, 14))
_LARGE: tuple[tuple[Filling, Filling], ...] = ((101, 12), (-101, 14))  # a bound on values shows
# If the keys depend on values: one value everywhere, and the constructor's, into and out of random
# ones.
_EVERY = (*_SEEDS, *product((*CONSTANT, "own"), (12,)), *product((11,), CONSTANT))


def roundtrip_problems(model: LoadedModel, saved: Saved, verdict: Verdict) -> tuple[Problem, ...]:
    """Return every way in which loading what was saved does not give the same model again.

    `verdict` is of the model's own keys. Expressions answer first; a doubt is settled by trying it,
    if there is memory for that. An unsettled doubt is a problem of the kind ``unknown``.
    """
    problems = tuple(_by_expressions(saved, verdict))
    if not problems and not saved.varying:
        return ()
    try:
        check_memory(model, 0, "")
        failed, differing = _try_fillings(model, _EVERY if saved.varying else _SEEDS)
        if failed is None:
            _, of_large = _try_fillings(model, _LARGE)  # the model's code may refuse these
            differing |= of_large
    except CkptError:  # not enough memory, or the model builds on meta only
        if not saved.varying:
            return problems
        return (*problems, Problem(_UNTRIED, _ROOT, "unknown"))
    certain = tuple(problem for problem in problems if problem.kind != "unknown")
    if failed is not None:
        refused = f"load_state_dict refuses what state_dict wrote: {failed}"
        return certain or (Problem(refused, _ROOT),)
    by_fqn = by_key(certain)
    for problem in certain:
        if problem.kind == "inexact":  # for other values
            differing.add(problem.key)
    settled = []
    for tensor in saved.runtime:
        if tensor.fqn in differing and tensor.first_name in saved.fed:
            settled.append(by_fqn.get(tensor.fqn, Problem(_INEXACT, tensor.fqn, "inexact")))
    return tuple(settled)


# Try it


def _try_fillings(
    model: LoadedModel, fillings: Iterable[tuple[Filling, Filling]]
) -> tuple[str | None, set[str]]:
    """Save an instance and load it into one with other values, for each pair of fillings.

    Return what that raises (or None), and the FQNs that did not come back. Raises `CannotBuild`.
    """
    differing: set[str] = set()
    for filling, other in fillings:
        source, target = filled(model, filling), filled(model, other)
        for item in listed(target):  # change integers, to see which are not loaded
            tensor = item.tensor
            plain = type(tensor) is torch.Tensor and is_plain(tensor) and not tensor.is_quantized
            if plain and tensor.dtype in (torch.int64, torch.int32) and 0 not in tensor.stride():
                tensor += 1
        expected = values_of(source)
        failed = _pass_on(source, target)
        if failed is not None:
            return describe(failed), set()
        actual = values_of(target)
        for fqn, value in expected.items():
            if fqn not in actual or not same(value, actual[fqn]):
                differing.add(fqn)
    return None, differing


def brought_back(model: LoadedModel, fqns: Iterable[str]) -> frozenset[str]:
    """Return the tensors whose random values another instance gets by loading. Raises
    `CannotBuild`.
    """
    source, target = (filled(model, seed) for seed in _SEEDS[0])
    expected, before = values_of(source), values_of(target)
    if _pass_on(source, target) is not None:
        return frozenset()
    actual = values_of(target)
    came_back = set[str]()
    for fqn in fqns:
        if fqn not in expected or fqn not in actual:
            continue
        if same(expected[fqn], actual[fqn]) and not same(expected[fqn], before[fqn]):
            came_back.add(fqn)
    return frozenset(came_back)


def _pass_on(source: nn.Module, target: nn.Module) -> Exception | None:
    """Load what `source` saves into `target`; return what saving or strict loading raises."""
    state = attempt(lambda: _through_a_file(source.state_dict()))
    return state if isinstance(state, Exception) else failure_of_loading(target, state)


def _through_a_file(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict after `torch.save` and `torch.load`; a copy if a file cannot hold it as
    it is.
    """
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except RuntimeError:  # views of one tensor in several dtypes
        items = []
        for key, value in state.items():
            items.append((key, value.clone() if isinstance(value, torch.Tensor) else value))
        copied: Any = type(state)(items)  # type: ignore[call-arg]
        if metadata_of(state) is not None:
            copied._metadata = metadata_of(state)
        return copied
    file.seek(0)
    # written by this process just now
    result: Mapping[str, Any] = torch.load(file, weights_only=False)
    return result


# By expressions


def _by_expressions(saved: Saved, verdict: Verdict) -> Iterator[Problem]:
    yield from _refused_keys(saved, verdict)
    sources = sources_of(saved.serialized)
    fed = set(refs(tuple(sources.values())))
    simplifier = Simplifier(_leaves(saved))
    for tensor in saved.runtime:
        fqn, first = tensor.fqn, tensor.first_name
        if first not in fed or fqn in verdict.missing:
            continue
        if fqn not in verdict.reads:
            yield Problem("saved, and gone from the model that has loaded it", fqn)
            continue
        value = verdict.reads[fqn]
        if value is None:
            yield Problem("saved, but not loaded again", fqn)
        elif not isinstance(value, Ref) or sources.get(value.key) != Ref(first):
            problem = _difference(value, Ref(first), sources, simplifier)
            if problem is not None:
                yield replace(problem, key=fqn)


def _refused_keys(saved: Saved, verdict: Verdict) -> Iterator[Problem]:
    """Yield what strict loading finds wrong with the keys that were saved."""
    tensors = {entry.key for entry in saved.serialized}
    for key in verdict.missing:
        yield Problem("load_state_dict expects a key that state_dict does not write", key)
    for key in verdict.unexpected:
        is_named_extra_state = key in tensors and key.rpartition(".")[2] == "_extra_state"
        unexpected = "state_dict writes a key that load_state_dict does not expect"
        yield Problem(NAMED_EXTRA_STATE if is_named_extra_state else unexpected, key)
    refused = "load_state_dict refuses what state_dict wrote"
    for text in verdict.errors:
        yield Problem(f"{refused}: {' '.join(text.split())}", _ROOT)
    if not verdict.ok and not (verdict.missing or verdict.unexpected or verdict.errors):
        yield Problem(refused, _ROOT)


def _difference(
    value: Expression,
    tensor: Ref,
    sources: Mapping[str, Expression | None],
    simplifier: Simplifier,
) -> Problem | None:
    """Return what is wrong with loading `value` (over keys) into `tensor`; None if it is the
    same.
    """

    def unknown(reason: str) -> Problem:
        return Problem(_UNKNOWN.format(reason), tensor.key, "unknown")

    def changed(text: str, kind: str = "other") -> Problem:
        return Problem(text, tensor.key, kind)

    constant = next((key for key in refs(value) if sources.get(key) is None), None)
    if constant is not None:
        return unknown(f"loaded from {constant}, which no tensor of the model is saved to")
    both_ways = substitute(value, lambda key: sources[key])
    if is_opaque(both_ways):
        return unknown("computed by code that is not a tensor operator")
    simple = simplifier.simplify(both_ways)
    if simple == tensor:
        return None
    if isinstance(simple, Ref):
        return changed(f"loading gives it the value of {simple.key}")
    # Compare both sides on random values, bit by bit; of few elements on many, since one may be
    # right by chance.
    assert isinstance(simple, Op)
    leaves = simplifier.leaves
    names = list(dict.fromkeys([tensor.key, *refs(simple)]))
    if any(name not in leaves for name in names):
        return unknown("values of its kind cannot be made up")
    if sum(_base(leaves[name]).numel() for name in names) > _PROBE_LIMIT:
        return unknown("too large to try out")
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS if leaves[tensor.key].numel() < _FEW else 1):
        values = _random_values({name: leaves[name] for name in names}, generator)
        try:
            back = evaluate(simple, values.__getitem__)
        except CkptError as error:
            return unknown(error.message)
        expected = values[tensor.key]
        if back.shape != expected.shape or back.dtype != expected.dtype:
            return changed("loading gives it another shape or dtype")
        if not same_bits(back, expected):
            return changed(_INEXACT, "inexact")
    return None


def _leaves(saved: Saved) -> dict[str, torch.Tensor]:
    """Return the runtime tensors without data; tensors that overlap in the model share a
    storage.
    """
    bases: dict[Any, torch.Tensor] = {}  # by storage and dtype
    views: dict[str, tuple[Any, Geometry]] = {}
    leaves = {}
    for tensor in saved.runtime:
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype) or tensor.dtype.startswith("q"):
            continue
        if tensor.shape is None:
            continue
        mark = saved.places[tensor.fqn]
        if not isinstance(mark, StorageView):
            leaves[tensor.fqn] = torch.empty(tensor.shape, dtype=dtype, device="meta")
            continue
        place, geometry = (mark.address, dtype), mark.geometry
        if place not in bases or bases[place].numel() < geometry.end:
            bases[place] = torch.empty(geometry.end, dtype=dtype, device="meta")
        views[tensor.fqn] = place, geometry
    for fqn, (place, geometry) in views.items():
        leaves[fqn] = bases[place].as_strided(geometry.shape, geometry.stride, geometry.offset)
    return leaves


def _random_values(
    tensors: Mapping[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random values for tensors without data, which share memory if those do."""
    storages: dict[int, torch.Tensor] = {}
    values = {}
    for name, tensor in tensors.items():
        base = _base(tensor)
        if id(base) not in storages:
            storages[id(base)] = _random_like(base, generator)
        storage, stride = storages[id(base)], tensor.stride()
        values[name] = storage.as_strided(tensor.shape, stride, tensor.storage_offset())
    return values


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    dtype, shape = tensor.dtype, tensor.shape
    if not dtype.is_floating_point and not dtype.is_complex:
        end = 2 if dtype == torch.bool else 100
        return torch.randint(0, end, shape, generator=generator).to(dtype)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    # so that a clamp shows too
    scale = torch.randint(-10, 11, shape, generator=generator).exp2()
    values = torch.randn(shape, dtype=kind, generator=generator)
    return (values * scale).to(dtype)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


_PART = "part"  # of another model; any name will do
_ABSOLUTE = "a state_dict hook looks for absolute keys, and breaks under DDP too"
_DEPENDS = "state_dict() writes some keys for some values of the tensors only: {keys}"
_NOT_LOOKED = (
    "on the meta device alone: whether its constructor makes other tensors for real was"
    " not looked at"
)
_UNLIKE = (
    "on the meta device the constructor creates other tensors, and there is not enough"
    " memory to build the model"
)
_SPECIAL = (
    "quantized or of another class, so loading may change values, which names do not tell: {names}"
)
# bytes; a smaller model is built for real if meta leaves a value unexplained
_WORTH_BUILDING = 1 << 30


class Traced(NamedTuple):
    """The names of a model, and the load of what it saves."""

    names: Names
    load: Load


def trace(model: LoadedModel) -> Names:
    """Return all names of the model's tensors, both ways. Raises `CkptError` if its own code
    fails.
    """
    return trace_with_load(model).names


def trace_with_load(model: LoadedModel) -> Traced:
    """Return the names as `trace` does, and the load that they were found with. Raises as
    `trace`.
    """
    model, instance, notes = _built_like_real(model)
    saved = _saved(model, instance)

    def load(real: bool) -> tuple[Load, dict[str, object] | None]:
        """Load fresh tensors of the serialized keys into a fresh instance."""
        state = (saved if saved.real == real else save(model, real)).state
        if instance is None or real or has_saving_code(instance):
            target = model.build(real)
        else:  # saving has not changed it
            target = instance
        recorded = record_load(target, copied_state(state), real)
        versions = versions_asked_for(model, state, recorded, real) if recorded.versioned else None
        if recorded.verdict.by_values:
            reads = reads_for_other_values(model, state, recorded.verdict)
            recorded = recorded._replace(verdict=replace(recorded.verdict, reads=reads))
        return recorded, versions

    load_of_saved_keys, versions = on_meta_or_real(model, load)
    verdict = load_of_saved_keys.verdict
    problems = (*_lost(model, saved), *roundtrip_problems(model, saved, verdict))
    certain = tuple(problem for problem in problems if problem.kind != "unknown")
    sources = sources_of(saved.serialized)
    loaded = []
    for fqn, value in verdict.reads.items():
        # If several keys hold the same tensor (tied weights), read each name from its own key.
        source = sources.get(fqn)
        if isinstance(value, Ref) and source is not None and source == sources.get(value.key):
            value = Ref(fqn)
        loaded.append(LoadedTensor(fqn, value))
    notes += _notes(saved, verdict, problems)
    for problem in _problems_as_submodule(model, instance, saved):
        notes += (Note(f"as a part of another model: {problem}", ON_PLACE),)
    metadata, fed = metadata_of(saved.state), saved.fed
    names = Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=(*saved.serialized, *saved.further),
        load=tuple(loaded),
        not_serialized=tuple(t.fqn for t in saved.runtime if t.first_name not in fed),
        extra_state=saved.extra_state,
        roundtrips=not certain,
        roundtrip_problems=tuple(Problem(problem.problem, problem.key) for problem in certain),
        modules=None if metadata is None else tuple(metadata),
        versions=versions,
        notes=notes,
    )
    return Traced(names, load_of_saved_keys)


def _notes(saved: Saved, verdict: Verdict, problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return what a user should know about the names, besides problems that are certain."""
    notes: list[str] = []
    if saved.varying:
        notes.append(_DEPENDS.format(keys=some(saved.varying)))
    if verdict.special:
        notes.append(Note(_SPECIAL.format(names=some(verdict.special)), SPECIAL))
    for problem in problems:
        if problem.kind == "unknown":
            notes.append(str(problem))
    return tuple(notes)


# The tensors that the constructor makes


def _built_like_real(model: LoadedModel) -> tuple[LoadedModel, nn.Module | None, tuple[str, ...]]:
    """Return the model, to be built for real from now on if on meta it has other tensors; an
    instance on meta if that is so, and notes.

    If the constructor can tell the difference, a cheap model is built for real and compared. For
    any other the constructor runs with tensors that say that they are on the CPU, and have no
    memory.
    """
    if model.materialize:
        return model, None, ()
    instance = None
    try:
        with _watch_device_questions() as questions:
            instance = model.build(False)
        if not questions.asked:  # it makes the same tensors on any device
            return model, instance, ()
        on_meta = _listing(instance)
        if is_cheap(model):
            real = _listing(model.build(True))
        else:
            from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), _PlainCopies():
                real = _listing(model.build(True))
    except CkptError:  # it cannot be built for real, or not at all
        return model, instance, (_NOT_LOOKED,)
    if on_meta == real:
        return model, instance, ()
    try:
        check_memory(model, 0, _UNLIKE)
    except CkptError as error:
        return model, instance, (error.message,)
    return replace(model, materialize=True), None, ()


class _DeviceQuestions(TorchFunctionMode):
    """Note whether code may see that it runs on meta: it asks for a device or an address, or torch
    refuses a call.
    """

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked = self.asked or func in _TELLING
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.asked = True
            raise


class _PlainCopies(TorchFunctionMode):
    """Let copy.deepcopy copy a fake tensor, and not the state of its mode too, which may crash
    Python (torch 2.13).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, tensor.requires_grad)
            memo[id(tensor)] = copied
        return memo[id(tensor)]


@contextmanager
def _watch_device_questions() -> Iterator[_DeviceQuestions]:
    questions, library, default = _DeviceQuestions(), cast(Any, torch), torch.get_default_device

    def get_default_device() -> torch.device:
        questions.asked = True
        return default()

    library.get_default_device = get_default_device
    try:
        with questions:
            yield questions
    finally:
        library.get_default_device = default


_TELLING: frozenset[Any] = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "is_cpu", "is_cuda", "is_meta")
        ),
        *(
            torch.Tensor.data_ptr,
            torch.Tensor.storage,
            torch.Tensor.untyped_storage,
            torch.Tensor.type,
            torch.Tensor.get_device,
        ),
        *(torch.Tensor.__repr__, torch.Tensor.__format__),
    ]
)


def _listing(model: nn.Module) -> list[tuple[object, ...]]:
    """Return names, dtypes, shapes, and which tensors are the same object; fake tensors have no
    address.
    """
    first: dict[int, str] = {}
    rows: list[tuple[object, ...]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        hidden = getattr(module, "_non_persistent_buffers_set", ())
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                fqn = dotted(path, name)
                alias = first.setdefault(id(tensor), fqn)
                dtype, shape = dtype_name(tensor.dtype), shape_of(tensor)
                rows.append((fqn, kind, name in hidden, alias, dtype, shape))
    return rows


# What saving writes


def _saved(model: LoadedModel, instance: nn.Module | None) -> Saved:
    """Save `instance`, which is on meta, or else a fresh one."""
    saved = on_meta_or_real(model, lambda real: save(model, real, None if real else instance))
    if saved.is_opaque and not saved.real and model.nbytes <= _WORTH_BUILDING:
        with suppress(CkptError):  # it builds on meta only: keep the result of meta
            saved = save(model, True)
    saved = replace(
        saved,
        serialized=_without_constants(saved.serialized),
        further=_without_constants(saved.further),
    )
    # Extra state may carry tensors outside of torch (as pickled bytes): expressions cannot tell
    # that.
    unfed = [fqn for fqn in first_names(saved.runtime) if fqn not in saved.fed]
    if saved.extra_state and unfed and is_cheap(model):
        with suppress(CannotBuild):
            saved = replace(saved, carried=saved.carried | brought_back(model, unfed))
    return saved


def _without_constants(keys: Iterable[SerializedKey]) -> tuple[SerializedKey, ...]:
    """Return the keys; those whose value depends on no tensor have no source."""
    result = []
    for key in keys:
        result.append(replace(key, source=None) if is_constant(key.source) else key)
    return tuple(result)


def _lost(model: LoadedModel, saved: Saved) -> list[Problem]:
    """Return each persistent tensor that no key holds, if another tensor took the key that it would
    have had.

    To find that key, save without the renamed tensors, then without all that are saved.
    """
    lost, kept, renamed = set[str](), set[str](), set[str]()
    for tensor in saved.runtime:
        is_unsaved = tensor.alias_of is None and tensor.fqn not in saved.fed
        if tensor.persistent and is_unsaved:
            lost.add(tensor.fqn)
        else:
            kept.add(tensor.fqn)
    if not lost:
        return []
    keys = by_key(saved.serialized)
    for entry in saved.serialized:
        if isinstance(entry.source, Ref) and entry.source.key != entry.key:
            renamed.add(entry.source.key)
    problems: dict[str, Problem] = {}
    for removed in (renamed, kept):
        for entry in _saved_without(model, saved, removed):
            if not isinstance(entry.source, Ref) or entry.key not in keys:
                continue
            fqn = entry.source.key
            if fqn in lost and fqn not in problems:
                problems[fqn] = _taken_key(fqn, keys[entry.key])
    return list(problems.values())


def _taken_key(fqn: str, taken: SerializedKey) -> Problem:
    """Return the problem of a tensor whose key another value took."""
    held = ", ".join(dict.fromkeys(refs(taken.source))) or "a constant"
    text = f"lost in saving: it and {held} are sent to one key, {taken.key}"
    if taken.hook:
        text += f", by {taken.hook}"
    return Problem(text, fqn)


def _saved_without(
    model: LoadedModel, saved: Saved, removed: Collection[str]
) -> tuple[SerializedKey, ...]:
    instance = model.build(saved.real)
    for tensor in saved.runtime:
        path, _, name = tensor.fqn.rpartition(".")
        if tensor.first_name in removed:
            with suppress(AttributeError):  # the names of some wrappers lead through no module
                module = instance.get_submodule(path)
                for table in (module._parameters, module._buffers):
                    table.pop(name, None)
    try:
        return save_once(instance, real=True).serialized
    except CkptError:
        return ()  # the hooks need what was removed


def _problems_as_submodule(
    model: LoadedModel, instance: nn.Module | None, saved: Saved
) -> tuple[Problem, ...]:
    """Return what is wrong with the keys if the model is a child of another module, as under DDP.

    Checked only if hooks touch the keys: without them a module's path is put before each key, and
    that is all. `instance` was saved already, and a fresh one may act differently.
    """
    if not any(key.hook is not None for key in saved.serialized):
        return ()
    if instance is not None and not saved.real and not _problems_inside_a_parent(instance, saved):
        return ()
    # hooks that read values cannot run on meta
    return _problems_inside_a_parent(model.build(saved.real), saved)


def _problems_inside_a_parent(instance: nn.Module, saved: Saved) -> tuple[Problem, ...]:
    """Return the keys of the instance that are lost, or other ones, if a parent saves it."""
    outer = nn.Module()
    outer.add_module(_PART, instance)
    try:
        keys = set(map(str, outer.state_dict()))
    except Exception as error:  # a hook may raise anything
        text = f"is not saved at all as a part of another: {type(error).__name__}: {error}"
        return (Problem(text, _ROOT),)
    prefix = f"{_PART}."
    expected = {prefix + entry.key for entry in saved.serialized}
    expected.update(prefix + name for name in saved.extra_state)
    lost, other = sorted(expected - keys), sorted(keys - expected)
    text = f"is not saved under this key where the model is a part of another: {_ABSOLUTE}"
    if other:
        text += f"; {other[0].removeprefix(prefix)} is there instead"
    return tuple(Problem(text, key.removeprefix(prefix)) for key in lost or other)
