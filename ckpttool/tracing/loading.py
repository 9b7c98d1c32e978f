"""The verdict of ``load_state_dict(checkpoint, strict=True)``, and what loading reads, found by
running it.

It runs on tensors without data, and is recorded. If these cannot replace the file's (sparse,
quantized, subclasses, dtypes that few operators know), or if it costs next to nothing, it runs once
more with the file's own values and without a recorder: that verdict is the answer.

verdict_on_section             the answer for a section of a file
├── _find_answer               a recorded load of the same keys, dtypes and shapes
├── record_load                else a new one, on tensors without data if possible
│   └── recorded_verdict
└── _verdict_with_values       then a load of the values, if they may decide
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref, is_constant, parts
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import CannotBuild, LoadedModel
from ckpttool.tracing.hooks import Watcher, quiet
from ckpttool.tracing.instances import (
    FILLINGS,
    Listed,
    check_memory,
    code_failed,
    copied_state,
    dtype_name,
    failure_of_loading,
    feeders,
    filled,
    is_cheap,
    is_dtensor,
    is_plain,
    is_special,
    listed,
    load_strictly,
    metadata_of,
    on_meta_or_real,
    others,
    same,
    tensors_in,
    values_of,
)
from ckpttool.tracing.memory import opaque, place_of
from ckpttool.tracing.recorder import Recorder, ValuesAsked, recording
from ckpttool.tracing.safe_state_dict import needs_values, stored, versions_of
from ckpttool.tracing.user_code import as_exception, attempt, describe

_TORCH_SAYS = "Error(s) in loading state_dict for"
_MISSING, _UNEXPECTED = "Missing key(s) in state_dict: ", "Unexpected key(s) in state_dict: "
_UNWRITTEN = Op("unwritten")  # the value of a runtime tensor before loading
_INTEGERS = {
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
} | {torch.bool}
_HIGHEST_VERSION = 7  # of a module that is tried; each costs a load


class DtypeChange(NamedTuple):
    """A runtime tensor that loading converts, from the dtype of the loaded value (`key`, if it is
    one key).
    """

    fqn: str
    key: str | None
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of strict loading.

    Attributes:
        ok: It succeeds.
        missing: Keys that the model expects and the file does not have.
        unexpected: Keys that the file has and the model does not expect.
        errors: Torch's own messages besides these two lists.
        dtype_changes: Tensors whose dtype loading converts.
        reads: Runtime FQN -> its value after loading, over the file's keys; None if the file does
            not reach it.
        assigns: It is refused, but ``assign=True``, which replaces the model's tensors by the
            file's, succeeds.
        doubtful: It was found on tensors without data, and real tensors may refuse it.
        by_values: The model's code looked at values, or made some outside of torch: for other
            values `reads` may differ.
        special: Runtime tensors of another kind (quantized, subclasses): only with values it is
            known whether they keep one.
        altered: Keys whose values tensors of another kind do not keep.
        replaced: Keys whose values loading replaces by others, as far as that was tried.
        unknown: Keys of objects that no safe loader creates: whether torch loads these is not
            known.
    """

    ok: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    errors: tuple[str, ...]
    dtype_changes: tuple[DtypeChange, ...]
    reads: Mapping[str, Expression | None]
    assigns: bool = False
    doubtful: bool = False
    by_values: bool = False
    special: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# key -> dtype and shape, in the order of the keys
Outline = Mapping[str, tuple[str, Shape]]


class Load(NamedTuple):
    """A recorded load of a state dict, all of whose values are dense tensors if its `outline` is
    known.

    `custom` are the modules whose code is not torch's; `versioned`: such code read the `versions`
    of modules. `real`: the tensors had values. `instance` has loaded it on meta, and can load
    another one: it is unchanged.
    """

    verdict: Verdict
    outline: Outline | None
    versions: Mapping[str, object] | None
    custom: Collection[str]
    versioned: bool
    real: bool
    instance: nn.Module | None

    def answers(self, section: Section) -> bool:
        """Return whether loading the section must have the same verdict.

        For code that is not torch's the keys must also have the same order, and the modules the
        versions that it read.
        """
        if section.extras:  # code of the model may depend on these objects
            return False
        outline = {entry.key: (entry.dtype, entry.shape) for entry in section.tensors}
        if self.outline != outline or self.verdict.by_values or self.verdict.special:
            return False
        if self.versioned and versions_of(section) != self.versions:
            return False
        return not self.custom or [*self.outline] == [*outline]


def record_load(instance: nn.Module, state: OrderedDict[str, Any], real: bool) -> Load:
    """Load `state` strictly into `instance`; both are changed. Raises as `recorded_verdict`."""
    custom = modules_with_loading_code(instance)
    runs_code = custom or any(module._load_state_dict_post_hooks for module in instance.modules())
    outline, versions = _outline_of(state), copy.copy(metadata_of(state))
    read = _note_versions(state)
    verdict = recorded_verdict(instance, state, real)
    is_unchanged = not real and not runs_code and not verdict.special
    spare = instance if is_unchanged else None
    return Load(verdict, outline, versions, custom, bool(read), real, spare)


def _outline_of(state: Mapping[str, object]) -> Outline | None:
    outline = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return None
        outline[key] = (dtype_name(value.dtype), tuple(value.shape))
    return outline


def verdict_on_section(
    model: LoadedModel,
    section: Section,
    *,
    reads_values: bool = True,
    loads: list[Load] | None = None,
) -> Verdict:
    """Load the section's tensors into a fresh instance, without data if that can replace the
    file's.

    With `reads_values`, a small model also loads the values if they may decide. `loads` are
    recorded loads of the model, which are not repeated; new ones without data are appended.

    Raises `CkptError` if real tensors are needed and do not fit in memory, if the file does not
    hold what its entries say, and if the answer depends on an object that is not created here
    (`stored`).
    """
    loads = [] if loads is None else loads

    def record(real: bool) -> Load:
        source = stored(section, real)
        unchanged = [load.instance for load in loads if load.instance is not None]
        instance = unchanged[0] if unchanged and not real else model.build(real)
        load = record_load(instance, source.state, real)
        if source.unknown and not load.verdict.missing and not load.verdict.unexpected:
            raise undecided_error(model, source.unknown)
        if source.unknown:
            unknown = tuple(problem.key for problem in source.unknown)
            load = load._replace(verdict=replace(load.verdict, unknown=unknown))
        if not real:
            loads.append(load)
        return load

    # the file's values, and the tensors of the instance
    need = 2 * sum(entry.nbytes for entry in section.tensors)
    if model.materialize or needs_values(section):
        check_memory(model, need, f"{model.operand} has to load tensors with their values")
        return _verdict_with_values(model, section, record(True).verdict)
    load = _find_answer(loads, section) or on_meta_or_real(model, record, need)
    verdict = load.verdict
    if verdict.doubtful or verdict.special:
        check_memory(model, need, f"whether {model.operand} loads it cannot be told without values")
        return _verdict_with_values(model, section, verdict)
    if reads_values and (load.real or _depends_on_values(verdict, section)):
        with contextlib.suppress(CannotBuild):
            if is_cheap(model, need):
                return _verdict_with_values(model, section, verdict)
    return verdict


def _verdict_with_values(model: LoadedModel, section: Section, verdict: Verdict) -> Verdict:
    """Return the verdict with what torch decides about the file's values, without a recorder."""
    instance = model.build(True)
    state = stored(section, True).state
    with _catching_lists(instance) as lists:
        failed = failure_of_loading(instance, state)
    missing, unexpected, errors = _errors_of(failed, lists)
    assigns = bool(errors) and not missing and not unexpected
    if assigns:
        same_state = stored(section, True).state
        assigns = failure_of_loading(model.build(True), same_state, assign=True) is None
    is_ok = failed is None
    return replace(
        verdict,
        ok=is_ok,
        missing=missing,
        unexpected=unexpected,
        errors=errors,
        assigns=assigns,
        altered=tuple(_altered(instance, state, verdict.reads)) if is_ok else (),
        replaced=tuple(_replaced(instance, state, verdict.reads)) if is_ok else (),
    )


def _find_answer(loads: Sequence[Load], section: Section) -> Load | None:
    """Return the load whose verdict is also the verdict on the section."""
    for load in loads:
        if load.answers(section):
            return load
    return None


def _depends_on_values(verdict: Verdict, section: Section) -> bool:
    """Return whether a load of the values may say more: why torch refuses it, or which values
    loading replaces.
    """
    has_other_reason = not verdict.ok and not verdict.missing and not verdict.unexpected
    if verdict.by_values or verdict.errors or has_other_reason:
        return True
    for entry in section.tensors:
        if entry.key in verdict.reads and verdict.reads[entry.key] is None:
            return True
    return False


def undecided_error(model: LoadedModel, unknown: Sequence[Problem]) -> CkptError:
    """Return the error for objects of the file that are not created here."""
    return CkptError(
        f"whether {model.operand} loads it depends on {plural(len(unknown), 'object')} that no"
        " safe loader makes",
        hint="call torch.serialization.add_safe_globals([CLASS]) in the model's file to allow these"
        " classes",
        problems=unknown,
    )


def _altered(
    instance: nn.Module, state: Mapping[str, Any], reads: Mapping[str, Expression | None]
) -> Iterator[str]:
    """Yield the keys whose values the instance, which has loaded `state`, does not keep in tensors
    of another kind.
    """
    for item in listed(instance):
        source = reads.get(item.fqn)
        value = state.get(source.key) if isinstance(source, Ref) else None
        if not isinstance(source, Ref) or not isinstance(value, torch.Tensor):
            continue
        if is_special(value) or is_special(item.tensor):
            kept = attempt(partial(_is_kept, value, item.tensor))
            if kept is not True:  # nor if the class cannot copy it back
                yield source.key


def _replaced(
    instance: nn.Module, state: Mapping[str, Any], reads: Mapping[str, Expression | None]
) -> Iterator[str]:
    """Yield the keys of tensors that loading sets to another value than `state` has."""
    for item in listed(instance):
        value = state.get(item.fqn)
        is_set_by_code = item.fqn in reads and reads[item.fqn] is None
        if not is_set_by_code or not isinstance(value, torch.Tensor):
            continue
        if attempt(partial(_is_kept, value, item.tensor)) is not True:
            yield item.fqn


def _is_kept(value: torch.Tensor, held: torch.Tensor) -> bool:
    """Return whether `held` is a copy of `value`; if their classes differ, whether copying back
    gives `value`.

    Another dtype of a dense `value` is not an alteration: it is listed as a conversion.
    """
    if is_lazy(value):  # nothing to copy
        return is_lazy(held)
    value, held = value.detach(), held.detach()
    if type(value) is type(held):
        return same(value, held) and _context(value) == _context(held)
    if not is_special(value):
        value = value.to(held.dtype)
    return same(torch.empty_like(value).copy_(held), value)


def _context(tensor: torch.Tensor) -> str:
    """Return what a wrapper subclass holds besides tensors, as text: equal attributes may be
    different objects.
    """
    return repr(tensor.__tensor_flatten__()[1]) if is_traceable_wrapper_subclass(tensor) else ""


def _is_special_unless_dtensor(tensor: torch.Tensor) -> bool:
    return is_special(tensor) and not is_dtensor(tensor)


def recorded_verdict(instance: nn.Module, state: Mapping[str, Any], real: bool) -> Verdict:
    """Load `state` strictly into `instance`, which is changed. Raises `CodeFailed` if that cannot
    run on meta.
    """
    recorder = Recorder()
    for key, value in state.items():
        for tensor in tensors_in(value):
            recorder.name(tensor, Ref(key) if tensor is value else opaque(Ref(key)))
    for item in listed(instance):
        recorder.name(item.tensor, _UNWRITTEN)
    watcher = Watcher(instance, recorder)
    failed: Exception | None = None
    try:
        with _catching_lists(instance) as lists, recording(recorder):
            load_strictly(instance, state)
            if recorder.blind:
                raise ValuesAsked
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        failed = as_exception(error)
        is_verdict = isinstance(error, RuntimeError) and str(error).startswith(_TORCH_SAYS)
        if not real and (recorder.blind or not is_verdict):
            raise code_failed("load_state_dict", watcher, error) from error
    with quiet():
        missing, unexpected, errors = _errors_of(failed, lists)
        items = listed(instance)
        special = [item.fqn for item in items if _is_special_unless_dtensor(item.tensor)]
        return Verdict(
            ok=failed is None,
            missing=missing,
            unexpected=unexpected,
            errors=errors,
            reads=_reads(recorder, items),
            dtype_changes=_dtype_changes(recorder, items),
            doubtful=recorder.doubtful,
            by_values=bool(recorder.reads) or (real and recorder.outside),
            special=tuple(special),
        )


def _reads(recorder: Recorder, items: Sequence[Listed]) -> dict[str, Expression | None]:
    """Return the value of each runtime tensor after loading, over keys; None for others."""
    reads: dict[str, Expression | None] = {}
    for item in items:
        value = recorder.value(item.tensor)
        if is_constant(value):
            reads[item.fqn] = None
        else:
            reads[item.fqn] = opaque(value) if _UNWRITTEN in parts(value) else value
    return reads


def _dtype_changes(recorder: Recorder, items: Sequence[Listed]) -> tuple[DtypeChange, ...]:
    """Return the conversions, under the name that the key has, or the tensor's first.

    A copy into a part of a tensor counts for all tensors of that storage.
    """
    names: dict[object, list[str]] = {}
    for item in items:
        for place in (item.token, place_of(item.token)):
            names.setdefault(place, []).append(item.fqn)
    changes: dict[DtypeChange, None] = {}
    for conversion in recorder.conversions:
        fqns = names.get(conversion.token) or names.get(place_of(conversion.token))
        if not fqns:
            continue
        key = conversion.value.key if isinstance(conversion.value, Ref) else None
        fqn = key if key is not None and key in fqns else fqns[0]
        source, target = dtype_name(conversion.source), dtype_name(conversion.target)
        changes[DtypeChange(fqn, key, source, target)] = None
    return tuple(changes)


class LoadErrors(NamedTuple):
    """What strict loading finds wrong, as in `Verdict`."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    errors: tuple[str, ...]


# the lists of missing and unexpected keys and of errors that torch fills; none if it did not begin
_Lists = list[tuple[list[str], list[str], list[str]]]


@contextlib.contextmanager
def _catching_lists(root: nn.Module) -> Iterator[_Lists]:
    """Catch the lists that torch fills while the block loads a state dict into `root`."""
    lists: _Lists = []
    before = vars(root).get("_load_from_state_dict")
    method = root._load_from_state_dict

    def run(
        state_dict: Any,
        prefix: Any,
        local_metadata: Any,
        strict: Any,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> Any:
        filled = missing_keys, unexpected_keys, error_msgs
        lists[:] = [filled]
        return method(state_dict, prefix, local_metadata, strict, *filled)

    object.__setattr__(root, "_load_from_state_dict", run)
    try:
        yield lists
    finally:
        if before is None:
            object.__delattr__(root, "_load_from_state_dict")
        else:
            object.__setattr__(root, "_load_from_state_dict", before)


def _errors_of(failed: Exception | None, lists: _Lists) -> LoadErrors:
    """Return the lists, or what `failed` says instead of them."""
    text = str(failed) if failed is not None else ""
    if failed is not None and not text.startswith(_TORCH_SAYS):
        return LoadErrors((), (), (describe(failed),))
    if lists:
        missing, unexpected, errors = lists[0]
    else:
        lines = text.split("\n\t")
        missing, unexpected = _keys_in(lines, _MISSING), _keys_in(lines, _UNEXPECTED)
        errors = lines[1:]
    errors = [line for line in errors if not line.startswith((_MISSING, _UNEXPECTED))]
    return LoadErrors(tuple(missing), tuple(unexpected), tuple(errors))


def _keys_in(lines: Iterable[str], start: str) -> list[str]:
    """Return the quoted keys of the first line that begins so."""
    for line in lines:
        if line.strip().startswith(start):
            return re.findall(r'"(.*?)"', line)
    return []


# Whether the values matter: on real tensors, code outside of torch turns them into constants


def reads_for_other_values(
    model: LoadedModel, state: Mapping[str, Any], verdict: Verdict
) -> dict[str, Expression | None]:
    """Return the `reads` of `verdict`, of loading `state` for real; opaque if they are others for
    other values.

    Raises `CkptError` if the model's own code fails.
    """
    reads = dict(verdict.reads)
    is_proven = False
    before = _after_loading(model, state)
    for seed in FILLINGS:
        other = attempt(lambda: _other_state(model, seed, state))  # noqa: B023  # it is called at once
        if isinstance(other, Exception):
            continue  # the model refuses these values
        again = recorded_verdict(model.build(True), copied_state(other), True)
        if not again.ok:
            continue
        is_proven = True
        after = _after_loading(model, other)
        varying = []
        for fqn, value in reads.items():
            second = again.reads.get(fqn)
            varies = value != second
            # it is not read, and must not depend on what is loaded
            if value is None and second is None:
                varies = fqn in before and not _is_same(fqn, before, after)
            if varies:
                varying.append(fqn)
        for fqn, keys in _keys_that_change(model, state, other, varying).items():
            reads[fqn] = opaque(reads[fqn], again.reads.get(fqn), *map(Ref, keys))
    if is_proven:
        return reads
    # No other values could be tried: only a tensor that is a key, or is left alone, is certain.
    every = [Ref(key) for key, value in state.items() if isinstance(value, torch.Tensor)]
    fresh = values_of(model.build(True))
    for fqn, value in reads.items():
        is_untouched = value is None and _is_same(fqn, fresh, before)
        if not is_untouched and not isinstance(value, Ref):
            reads[fqn] = opaque(*every)
    return reads


def _is_same(fqn: str, left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return fqn in left and fqn in right and same(left[fqn], right[fqn])


def _other_state(model: LoadedModel, seed: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of an instance with other values; integers that are still the same are
    changed too.
    """
    copied = copied_state(filled(model, seed).state_dict())
    for key, value in copied.items():
        plain = type(value) is torch.Tensor and is_plain(value)
        if plain and value.dtype in _INTEGERS and same(value, state.get(key, value)):
            copied[key] = others(value)
    return copied


def _after_loading(model: LoadedModel, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the runtime tensors of a fresh instance that has loaded `state`; none if that
    fails.
    """
    instance = model.build(True)
    if failure_of_loading(instance, copied_state(state)) is not None:
        return {}
    return values_of(instance)


def _keys_that_change(
    model: LoadedModel, state: Mapping[str, Any], other: Mapping[str, Any], varying: Iterable[str]
) -> dict[str, list[str]]:
    """Return for each of the `varying` tensors the keys that change it if changed alone; all if
    trying costs much.
    """
    keys = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    if not is_cheap(model):
        return dict.fromkeys(varying, keys)
    before = _after_loading(model, state)

    def loaded_with(key: str) -> Mapping[str, torch.Tensor]:
        if key not in other:
            return before
        return _after_loading(model, {**state, key: other[key]})

    return feeders(keys, varying, before, loaded_with)


# Whether the versions matter


class _NotedVersions(dict[str, Any]):
    """The metadata of one module in a state dict. `read` gets its path once code looks at more than
    torch's own code does.
    """

    read: list[str] | None = None
    path = ""

    def _note(self, key: object = None) -> None:
        if self.read is not None and key != "assign_to_params_buffers":
            self.read.append(self.path)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._note()
        return super().__iter__()

    def keys(self) -> Any:
        self._note()
        return super().keys()

    def values(self) -> Any:
        self._note()
        return super().values()

    def items(self) -> Any:
        self._note()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._note()
        return super().copy()

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)


def _note_versions(state: OrderedDict[str, Any]) -> list[str]:
    """Let the state dict note the modules whose versions are read. Return the list of their paths,
    which grows while the state dict is loaded.
    """
    read: list[str] = []
    metadata = metadata_of(state)
    if metadata is None:
        return read
    noted: OrderedDict[str, Any] = OrderedDict()
    for path, payload in metadata.items():
        if type(payload) is not dict:
            read.append(path)  # nothing tells whether it is read
            noted[path] = payload
            continue
        versions = _NotedVersions(payload)
        versions.path, versions.read = path, read
        noted[path] = versions
    state._metadata = noted  # type: ignore[attr-defined]
    return read


def modules_with_loading_code(instance: nn.Module) -> set[str]:
    """Return the modules whose loading runs more code than `nn.Module` has, which reads no version
    itself.
    """
    paths = set()
    for path, module in instance.named_modules(remove_duplicate=False):
        method = getattr(module._load_from_state_dict, "__func__", None)
        is_overridden = method is not nn.Module._load_from_state_dict
        if not path and type(module).load_state_dict is not nn.Module.load_state_dict:
            is_overridden = True
        if is_overridden or module._load_state_dict_pre_hooks:
            paths.add(path)
    return paths


def versions_asked_for(
    model: LoadedModel, state: Mapping[str, Any], load: Load, real: bool
) -> dict[str, Any] | None:
    """Return module path -> version in `state` for the modules whose own code may have read it in
    this `load`.

    None if it loads the same whatever the versions are, or does not load at all.
    """
    metadata, verdict = metadata_of(state), load.verdict
    if metadata is None or not verdict.ok or not load.custom:
        return None
    versions = {}
    for path, payload in metadata.items():
        if isinstance(payload, Mapping):
            versions[path] = payload.get("version")
    of_custom = {path: version for path, version in versions.items() if path in load.custom}
    may_be_read = of_custom or versions
    for other in _under_other_versions(state, versions):
        try:
            again = recorded_verdict(model.build(real), other, real)
        except CkptError:  # a tensor of an old version is missing
            return may_be_read
        if not again.ok:
            return may_be_read
        if again.reads != verdict.reads:  # random numbers have this effect too
            repeated = recorded_verdict(model.build(real), copied_state(state), real)
            return may_be_read if repeated.reads == verdict.reads else None
    return None


def _under_other_versions(
    state: Mapping[str, Any], versions: Mapping[str, Any]
) -> Iterator[OrderedDict[str, Any]]:
    """Yield the state dict without versions, then with each version that it does not have, up to
    the one above its highest, and to `_HIGHEST_VERSION`.
    """
    copied = copied_state(state)
    del copied._metadata  # type: ignore[attr-defined]
    yield copied
    highest = max((version for version in versions.values() if isinstance(version, int)), default=0)
    for version in range(1, min(highest + 1, _HIGHEST_VERSION) + 1):
        if set(versions.values()) != {version}:
            copied = copied_state(state)
            copied._metadata = OrderedDict((path, {"version": version}) for path in versions)  # type: ignore[attr-defined]
            yield copied
