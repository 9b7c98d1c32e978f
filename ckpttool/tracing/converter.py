"""A function from state dict to state dict as a plan: it runs under the recorder, on tensors
without data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ckpttool.core.checkpoint import Checkpoint, Section, Storage, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, is_opaque, operators, refs
from ckpttool.core.options import call_of
from ckpttool.core.plan import Dropped, Output, Plan, module_renames
from ckpttool.core.text import a, human_bytes, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.evaluate.ops import ROW_MAJOR, reason_not_allowed
from ckpttool.evaluate.torch_eval import storage_of
from ckpttool.tracing.coverage import unread_elements
from ckpttool.tracing.find_object import find_object
from ckpttool.tracing.instances import layout_of, memory_available
from ckpttool.tracing.memory import place_of, token
from ckpttool.tracing.recorder import Recorder, recording
from ckpttool.tracing.simplify import Simplifier
from ckpttool.tracing.user_code import raised_at, seeded, user_code

_FORM = "a function takes a state dict and returns one: file.py:to_hf"
_FEW = 8  # keys in a command that drops them

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Converter:
    """A function that converts the state dicts of `source`. `title` is what the user calls it;
    `materialize`: it runs on the values of the tensors.
    """

    title: str
    function: Callable[[dict[str, torch.Tensor]], Any]
    source: Checkpoint
    materialize: bool

    def plan(self, path: str, keys: Collection[str]) -> tuple[Plan, tuple[str, ...]]:
        """Return the plan of the function for a state dict, from which `--drop` has left `keys`,
        and a note on what it leaves out.

        Raise `Refused`, all problems at once, if it would lose or collide, and `CkptError` if the
        function fails.
        """
        section = self.source.section(path)
        _check_dense(section)
        inputs = self._inputs(section)
        first = {key: section.aliases().get(key, key) for key in inputs}
        recorder = Recorder()
        for key, tensor in inputs.items():
            recorder.name(tensor, Ref(key))
        pairs = self._run(dict(inputs), recorder)
        problems = list(_problems_of_pairs(pairs, recorder))
        if not problems:
            outputs = _outputs(path, pairs, inputs, first, recorder)
            problems = list(_problems_of_reading(outputs, first, keys))
        if problems:
            raise Refused(
                f"{self.title} does not convert {section.title}:"
                f" {plural(len(problems), 'problem')}",
                hint=_hint(problems),
                problems=problems,
            )
        read: set[str] = set()
        renames = {}
        for output in outputs:
            read.update(refs(output.source))
            if isinstance(output.source, Ref):
                renames[output.source.key] = output.key
        dropped = []
        for key in keys:
            if key not in read:
                dropped.append(Dropped(path, key, f"the same tensor as {first[key]}"))
        modules = module_renames(path, section.modules or (), renames)
        plan = Plan(tuple(outputs), tuple(dropped), modules)
        return plan, _parts_left_out(self.title, plan, inputs)

    def _inputs(self, section: Section) -> dict[str, torch.Tensor]:
        """Return the tensors of the section, which share storages as its entries do."""
        if self.materialize and section.nbytes > memory_available():
            raise CkptError(
                f"the tensors of {section.title} take {human_bytes(section.nbytes)}, and"
                f" {human_bytes(memory_available())} are available",
                hint=f"leave --materialize out if {self.title} reads no values",
            )
        storages: dict[int, torch.UntypedStorage] = {}
        inputs = {}
        for entry in section.tensors:
            assert entry.storage is not None
            place = id(entry.storage)
            if place not in storages:
                storages[place] = self._storage(entry.storage)
            inputs[entry.key] = _tensor(entry, storages[place])
        return inputs

    def _storage(self, storage: Storage) -> torch.UntypedStorage:
        if self.materialize:
            return storage_of(storage)
        return torch.empty(storage.nbytes, dtype=torch.uint8, device="meta").untyped_storage()

    def _run(self, state: dict[str, torch.Tensor], recorder: Recorder) -> list[tuple[Any, Any]]:
        """Return the names and values that the function gives."""
        try:
            with user_code(f"{self.title} fails"), seeded(0), recording(recorder):
                pairs = _pairs(self.function(state), self.title)
        except CkptError as error:
            if not recorder.blind:
                raise
            cause = error.__cause__
            place = None if cause is None else raised_at(cause.__traceback__)
            raise self._reads_values(place) from error
        if recorder.blind:
            raise self._reads_values(None)
        return pairs

    def _reads_values(self, place: str | None) -> CkptError:
        where = f" ({place})" if place else ""
        return CkptError(
            f"{self.title} reads the values of tensors{where}, and runs on tensors without data",
            hint="add --materialize to run it on the values, all in memory",
        )


def converter_of(using: Any, source: Checkpoint, materialize: bool) -> Converter:
    """Return the converter that the user names, or the function itself. Raise `CkptError` if it is
    not a function.
    """
    function, arguments, title = using, dict[str, Any](), getattr(using, "__name__", repr(using))
    if isinstance(using, str):
        title, arguments = call_of(using)
        function = find_object(title, _FORM)
    if not callable(function):
        raise CkptError(f"{title} is not a function but {a(function)}", hint=_FORM)
    return Converter(title, partial(function, **arguments), source, materialize)


def _check_dense(section: Section) -> None:
    """Raise `Refused` for entries that no function can get without their values."""
    problems = [Problem("not a tensor", extra.key) for extra in section.extras]
    for entry in section.tensors:
        if entry.storage is None:
            problems.append(Problem(f"not a dense tensor ({entry.layout})", entry.key))
    if problems:
        raise Refused(
            f"--using gets dense tensors only: {plural(len(problems), 'other entry')}",
            hint=f"leave them out in a command before: {_drops(problems)}",
            problems=problems,
        )


def _tensor(entry: TensorEntry, storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=getattr(torch, entry.dtype), device=storage.device)
    return tensor.set_(storage, entry.offset, entry.shape, entry.stride)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _pairs(result: Any, title: str) -> list[tuple[Any, Any]]:
    """Return the names and values of a state dict, or of an iterator of pairs."""
    if result is None:
        hint = "return the state dict at the end of the function, also if it is changed in place"
        raise CkptError(f"{title} returns None, not a state dict", hint=hint)
    if isinstance(result, Mapping):
        return list(result.items())
    if isinstance(result, Iterable) and not isinstance(result, (str, torch.Tensor)):
        pairs = list(result)
        if all(map(_is_pair, pairs)):
            return pairs
    raise CkptError(f"{title} returns {a(result)}, not a state dict", hint=_FORM)


def _problems_of_pairs(pairs: list[tuple[Any, Any]], recorder: Recorder) -> Iterator[Problem]:
    """Yield why a pair is not an output of a plan."""
    counts = Counter(name for name, _ in pairs)
    for name, count in counts.items():
        if count > 1:
            yield Problem(f"written {count} times", str(name))
    for name, value in pairs:
        if not isinstance(name, str):
            yield Problem(f"a name that is {a(name)}, not a text", str(name))
            continue
        if not isinstance(value, torch.Tensor):
            yield Problem(f"{a(value)}, not a tensor", name)
            continue
        layout = layout_of(value)
        if layout in ("strided", "meta"):
            yield from _problems_of_value(name, recorder.value(value))
        else:
            yield Problem(f"not a dense tensor ({layout})", name)


def _problems_of_value(name: str, source: Expression) -> Iterator[Problem]:
    if is_opaque(source):
        yield Problem("computed outside of torch's operators, random or not filled", name)
        return
    for operator in dict.fromkeys(operators(source)):
        reason = reason_not_allowed(operator)
        if reason is not None:
            yield Problem(reason, name)


def _outputs(
    path: str,
    pairs: list[tuple[str, torch.Tensor]],
    inputs: Tensors,
    first: Mapping[str, str],
    recorder: Recorder,
) -> list[Output]:
    """Return the outputs. Outputs that share no bytes get separate values."""
    key_of = {id(tensor): key for key, tensor in inputs.items()}
    input_places = {place_of(token(tensor)) for tensor in inputs.values()}
    simplifier = Simplifier(inputs)
    places: dict[Expression, Any] = {}
    outputs = []
    for name, tensor in pairs:
        source, place = recorder.value(tensor), place_of(token(tensor))
        key = key_of.get(id(tensor))
        if key is not None and source == Ref(first[key]):
            outputs.append(Output(path, name, Ref(key)))
            places[Ref(key)] = place
            continue
        simple = simplifier.simplify(source)
        assert isinstance(simple, (Ref, Op))
        if isinstance(simple, Op) and place in input_places:
            simple = _cloned(simple)
        while places.setdefault(simple, place) != place:
            simple = _cloned(simple)
        outputs.append(Output(path, name, simple))
    return outputs


def _cloned(source: Expression) -> Op:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def _problems_of_reading(
    outputs: list[Output], first: Mapping[str, str], keys: Collection[str]
) -> Iterator[Problem]:
    """Yield the tensors that no output reads, and tensors that `--drop` names although an output
    reads them.
    """
    read: dict[str, str] = {}
    for output in outputs:
        for key in refs(output.source):
            read[key] = read[first[key]] = output.key
    for key in first:
        if key in keys and first[key] not in read:
            yield Problem("no output reads it", key, "unread")
        if key not in keys and key in read:
            yield Problem(f"--drop names it, and {read[key]} reads it", key)


def _parts_left_out(title: str, plan: Plan, inputs: Tensors) -> tuple[str, ...]:
    """Return a note on the tensors that the outputs read only in part, as a slice does."""
    unread = unread_elements([output.source for output in plan.outputs], inputs)
    if not unread:
        return ()
    count = f"a part of {plural(len(unread), 'tensor')}"
    tensors = []
    for key in inputs:
        if key in unread:
            tensors.append(f"{key} ({unread[key]:,} of {inputs[key].numel():,} elements)")
    return (f"{title} leaves out {count}: {some(tensors)}",)


def _hint(problems: list[Problem]) -> str:
    if all(problem.kind == "unread" for problem in problems):
        return f"leave them out on purpose: {_drops(problems)}"
    return "fix the function: it returns each name once, with a tensor"


def _drops(problems: list[Problem]) -> str:
    words: list[str] = []
    for problem in problems[:_FEW]:
        words += ["--drop", str(problem.key)]
    line = shell(*words)
    return f"{line} ..." if len(problems) > _FEW else line
