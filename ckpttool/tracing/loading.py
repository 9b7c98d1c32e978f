"""What ``load_state_dict(checkpoint, strict=True)`` would say, found out by running it on tensors without data."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool.checkpoint import Section, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.expression import Argument, Expression, Op, Ref, Special, refs
from ckpttool.tracing.hooks import Watcher, quiet
from ckpttool.tracing.load_model import LoadedModel, describe, says_meta
from ckpttool.tracing.recorder.memory import opaque
from ckpttool.tracing.recorder.recorder import NeedsValues, Recorder
from ckpttool.tracing.runtime import CodeFailed, dtype_name, listed, on_meta_or_real, recording, tensors_in

_TORCH_SAYS = "Error(s) in loading state_dict for"
_MISSING, _UNEXPECTED = "Missing key(s) in state_dict: ", "Unexpected key(s) in state_dict: "
UNWRITTEN = Op("unwritten")  # what a runtime tensor holds before loading


class DtypeChange(NamedTuple):
    """A runtime tensor that loading converts: from the dtype of what is loaded (`key`, if it is one key) to its own."""

    fqn: str
    key: str | None
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What strict loading says. `ok`: it succeeds. `errors` are torch's own messages beside the two lists of keys.

    `reads` says for each runtime FQN what it would hold, over checkpoint keys; None where the checkpoint does not
    reach it.
    """

    ok: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    errors: tuple[str, ...]
    dtype_changes: tuple[DtypeChange, ...]
    reads: Mapping[str, Expression | None]


def load_verdict(model: LoadedModel, section: Section) -> Verdict:
    """Loads tensors of the section's keys, dtypes, shapes and strides, without data, into a fresh instance.

    Raises `CkptError` where the model's loading code needs real tensors and they do not fit in memory.
    """
    need = sum(entry.nbytes for entry in section.tensors)
    return on_meta_or_real(model, lambda real: _verdict(model, section, real), need)


def _verdict(model: LoadedModel, section: Section, real: bool) -> Verdict:
    return loaded(model.build(real), _state(section, real), real)


def loaded(instance: nn.Module, state: Mapping[str, Any], real: bool) -> Verdict:
    """Loads `state` strictly into `instance`, which is changed. Raises `CodeFailed` where that cannot run on meta."""
    recorder = Recorder()
    for key, value in state.items():
        for tensor in tensors_in(value):
            recorder.name(tensor, Ref(key) if tensor is value else opaque(Ref(key)))
    for item in listed(instance):
        recorder.name(item.tensor, UNWRITTEN)
    watcher = Watcher(instance, recorder)
    lists = _Lists(instance)
    _shield_extra_state(instance)
    failed: Exception | None = None
    try:
        with recording(recorder):
            instance.load_state_dict(state, strict=True)
            if recorder.blind:
                raise NeedsValues
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        failed = error if isinstance(error, Exception) else RuntimeError(f"exits: {error}")
        if not real and (recorder.blind or not _is_torchs_answer(error)):
            where = f" in {watcher.failed}" if watcher.failed else ""
            raise CodeFailed(
                f"load_state_dict fails{where}: {describe(error)}", hint="fix it there: torch fails the same way"
            ) from error
    with quiet():
        return _read(instance, recorder, lists, failed)


def _is_torchs_answer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_TORCH_SAYS) and not says_meta(str(error))


def _reads(instance: nn.Module, recorder: Recorder) -> dict[str, Expression | None]:
    found = {item.fqn: recorder.value(item.tensor) for item in listed(instance)}
    return {fqn: _over_keys(value) for fqn, value in found.items()}


def _over_keys(value: Expression) -> Expression | None:
    if not any(True for _ in refs(value)):
        return None
    return opaque(value) if _holds(value, UNWRITTEN) else value


def _holds(value: Argument, part: Expression) -> bool:
    if isinstance(value, Op):
        return value == part or _holds(value.args, part) or any(_holds(v, part) for _, v in value.kwargs)
    return isinstance(value, tuple) and any(_holds(item, part) for item in value)


def _read(instance: nn.Module, recorder: Recorder, lists: _Lists, failed: Exception | None) -> Verdict:
    missing, unexpected, errors = lists.read(failed)
    return Verdict(
        ok=failed is None,
        missing=missing,
        unexpected=unexpected,
        errors=errors,
        dtype_changes=_changes(instance, recorder),
        reads=_reads(instance, recorder),
    )


def _changes(instance: nn.Module, recorder: Recorder) -> tuple[DtypeChange, ...]:
    """One for each copy that converted, under the name that the key has, or the tensor's first.

    A copy into a part of a tensor counts for all tensors that lie in that storage: `token` begins with its address.
    """
    names: dict[object, list[str]] = {}
    for item in listed(instance):
        for place in (item.token, item.token[0]):
            names.setdefault(place, []).append(item.fqn)
    found = []
    for mark, source, target, value in recorder.conversions:
        key = value.key if isinstance(value, Ref) else None
        into = names.get(mark) or names.get(mark[0])
        if into:
            fqn = key if key in into else into[0]
            found.append(DtypeChange(str(fqn), key, dtype_name(source), dtype_name(target)))
    return tuple(dict.fromkeys(found))


class _Lists:
    """The lists of missing and unexpected keys and of errors that torch fills while it loads."""

    def __init__(self, root: nn.Module) -> None:
        self.found: tuple[list[str], list[str], list[str]] | None = None
        method = root._load_from_state_dict

        def run(state_dict: Any, prefix: Any, local_metadata: Any, strict: Any, *lists: Any) -> Any:
            if len(lists) == 3:
                self.found = lists
            return method(state_dict, prefix, local_metadata, strict, *lists)

        object.__setattr__(root, "_load_from_state_dict", run)

    def read(self, failed: Exception | None) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        text = str(failed) if failed is not None else ""
        if failed is not None and not text.startswith(_TORCH_SAYS):
            return (), (), (describe(failed),)
        if self.found is None:
            return _quoted(text, _MISSING), _quoted(text, _UNEXPECTED), _messages(text)
        missing, unexpected, errors = self.found
        return tuple(missing), tuple(unexpected), tuple(e for e in errors if not e.startswith((_MISSING, _UNEXPECTED)))


def _quoted(text: str, start: str) -> tuple[str, ...]:
    line = next((line.strip() for line in text.split("\n\t") if line.strip().startswith(start)), "")
    return tuple(re.findall(r'"(.*?)"', line))


def _messages(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split("\n\t")[1:] if not part.startswith((_MISSING, _UNEXPECTED)))


def _state(section: Section, real: bool) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict()
    made: dict[object, torch.Tensor] = {}
    for entry in section.tensors:
        if entry.identity not in made:
            made[entry.identity] = _tensor(entry, real)
        state[entry.key] = made[entry.identity].detach()
    for extra in section.extras:
        known = extra.value if extra.outline is None else extra.outline
        state[extra.key] = _UNKNOWN if known is None else _made(known, real)
    if section.modules is not None:
        versions = {path: dict(v) if isinstance(v, Mapping) else {} for path, v in section.modules.items()}
        state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return state


class _Unknown:
    """Stands for a pickled object of the checkpoint that is not looked into."""


_UNKNOWN = _Unknown()


def _made(outline: Any, real: bool) -> Any:
    """The value of an `ExtraEntry.outline`, with tensors without data."""
    if isinstance(outline, TensorEntry):
        return _tensor(outline, real)
    if isinstance(outline, Special):
        return getattr(torch, outline.name, _UNKNOWN)
    if isinstance(outline, dict):
        return {key: _made(part, real) for key, part in outline.items()}
    return type(outline)(_made(part, real) for part in outline) if isinstance(outline, (list, tuple)) else outline


def _tensor(entry: TensorEntry, real: bool) -> torch.Tensor:
    device = "cpu" if real else "meta"
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CkptError(f"this torch has no dtype {entry.dtype!r}: {entry.key}", hint="use a newer torch")
    if entry.layout == "sparse_coo":
        indices = torch.empty((len(entry.shape), 0), dtype=torch.int64, device=device)
        return torch.sparse_coo_tensor(indices, torch.empty(0, dtype=dtype, device=device), entry.shape)
    if entry.layout == "quantized" and real:
        return torch.quantize_per_tensor(torch.zeros(entry.shape), 1.0, 0, dtype)
    stride = entry.stride if len(entry.stride) == len(entry.shape) else None
    try:
        made = torch.empty(entry.shape, dtype=dtype, device=device)
        made = made if stride is None else torch.empty_strided(entry.shape, stride, dtype=dtype, device=device)
    except (RuntimeError, NotImplementedError):  # a dtype that torch has no plain tensors of (quantized, sub-byte)
        return torch.empty(entry.shape, device=device)
    return made.zero_() if real else made


def _shield_extra_state(root: nn.Module) -> None:
    """Keeps `set_extra_state` from values that are not known here; all others it gets as torch would give them."""
    for module in root.modules():
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            object.__setattr__(module, "set_extra_state", _shielded(module.set_extra_state))


def _shielded(method: Any) -> Any:
    def run(state: Any) -> Any:
        if isinstance(state, _Unknown):
            return None
        try:
            return method(state)
        except Exception:
            if isinstance(state, torch.Tensor):  # pickled bytes in a tensor, which has none here
                return None
            raise

    return run
