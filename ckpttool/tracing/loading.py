"""What ``load_state_dict(checkpoint, strict=True)`` says, found out by running it.

It is run on tensors without data, and recorded. Where these cannot stand for the file's (sparse, quantized, subclasses,
dtypes that few operators know), or where it costs next to nothing, it is run once more with the file's own values and
nothing of ours in between: what that says is the answer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import Expression, Op, Ref, is_constant, parts
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import CannotBuild, LoadedModel, describe
from ckpttool.tracing.hooks import Watcher, quiet
from ckpttool.tracing.recorder.memory import opaque
from ckpttool.tracing.recorder.recorder import NeedsValues, Recorder
from ckpttool.tracing.runtime import (
    CodeFailed,
    check_memory,
    dtype_name,
    failure,
    failure_of_loading,
    is_cheap,
    listed,
    load_strictly,
    on_meta_or_real,
    recording,
    tensors_in,
)
from ckpttool.tracing.safe_state_dict import needs_values, stored

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
    reach it. `assigns`: what it refuses it takes with ``assign=True``, which puts the file's tensors in the place of
    the model's. `doubtful`: it was found on tensors without data, in a way that these do not answer for. `by_values`:
    the model's code looked at values, or made some outside of torch: for other values `reads` may be others.
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


def load_verdict(model: LoadedModel, section: Section) -> Verdict:
    """Loads the section's tensors into a fresh instance, without data where these can stand for the file's.

    Raises `CkptError` where real tensors are needed and do not fit in memory, where the file does not hold what its
    entries say, and where the answer depends on an object that is not made here (`stored`).
    """
    need = 2 * sum(entry.nbytes for entry in section.tensors)
    if model.materialize or needs_values(section):
        check_memory(model, need, f"{model.operand} has to load tensors with their values")
        return _truth(model, section, _recorded(model, section, True))
    verdict = on_meta_or_real(model, lambda real: _recorded(model, section, real), need)
    if verdict.doubtful:
        check_memory(model, need, f"whether {model.operand} loads it cannot be told without values")
        return _truth(model, section, verdict)
    with contextlib.suppress(CannotBuild):
        return _truth(model, section, verdict) if is_cheap(model, need) else verdict
    return verdict


def _recorded(model: LoadedModel, section: Section, real: bool) -> Verdict:
    given = stored(section, real)
    verdict = loaded(model.build(real), given.state, real)
    if given.unknown and not verdict.missing and not verdict.unexpected:
        raise undecided(model, given.unknown)
    return verdict


def undecided(model: LoadedModel, unknown: Sequence[Problem]) -> CkptError:
    """The error for objects of the file that are not made here."""
    return CkptError(
        f"whether {model.operand} loads it depends on {plural(len(unknown), 'object')} that no safe loader makes",
        hint="torch.serialization.add_safe_globals([CLASS]) where the model is defined says that they may be made",
        problems=unknown,
    )


def _truth(model: LoadedModel, section: Section, recorded: Verdict) -> Verdict:
    """`recorded`, as torch decides it when nobody looks on."""
    instance, state = model.build(True), stored(section, True).state
    lists = _Lists(instance)
    failed = failure_of_loading(instance, state)
    missing, unexpected, errors = lists.read(failed)
    beside = bool(errors) and not (missing or unexpected)
    return replace(
        recorded,
        ok=failed is None,
        missing=missing,
        unexpected=unexpected,
        errors=errors,
        assigns=beside and failure_of_loading(model.build(True), stored(section, True).state, assign=True) is None,
    )


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
    failed: Exception | None = None
    try:
        with recording(recorder):
            load_strictly(instance, state)
            if recorder.blind:
                raise NeedsValues
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        failed = failure(error)
        if not real and (recorder.blind or not _is_torchs_answer(error)):
            where = f" in {watcher.failed}" if watcher.failed else ""
            raise CodeFailed(
                f"load_state_dict fails{where}: {describe(error)}", hint="fix it there: torch fails the same way"
            ) from error
    with quiet():
        missing, unexpected, errors = lists.read(failed)
        return Verdict(
            ok=failed is None,
            missing=missing,
            unexpected=unexpected,
            errors=errors,
            dtype_changes=_changes(instance, recorder),
            reads={item.fqn: _over_keys(recorder.value(item.tensor)) for item in listed(instance)},
            doubtful=recorder.doubtful,
            by_values=bool(recorder.reads) or (real and recorder.outside),
        )


def _is_torchs_answer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_TORCH_SAYS)


def _over_keys(value: Expression) -> Expression | None:
    if is_constant(value):
        return None
    return opaque(value) if UNWRITTEN in parts(value) else value


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

        def run(
            state_dict: Any,
            prefix: Any,
            local_metadata: Any,
            strict: Any,
            missing_keys: Any,
            unexpected_keys: Any,
            error_msgs: Any,
        ) -> Any:
            self.found = missing_keys, unexpected_keys, error_msgs
            return method(state_dict, prefix, local_metadata, strict, *self.found)

        object.__setattr__(root, "_load_from_state_dict", run)

    def read(self, failed: Exception | None) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        text = str(failed) if failed is not None else ""
        if failed is not None and not text.startswith(_TORCH_SAYS):
            return (), (), (describe(failed),)
        if self.found is None:
            missing, unexpected, errors = _quoted(text, _MISSING), _quoted(text, _UNEXPECTED), text.split("\n\t")[1:]
        else:
            missing, unexpected, errors = self.found
        return tuple(missing), tuple(unexpected), tuple(e for e in errors if not e.startswith((_MISSING, _UNEXPECTED)))


def _quoted(text: str, start: str) -> list[str]:
    line = next((line.strip() for line in text.split("\n\t") if line.strip().startswith(start)), "")
    return re.findall(r'"(.*?)"', line)
