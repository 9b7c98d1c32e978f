"""MODEL operands: code, a names file, a program, or an object of the caller's."""

from __future__ import annotations

import ast
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.containers import strict_json
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Section,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Ref, is_opaque, refs, without_cast
from ckpttool.core.limits import limits
from ckpttool.core.names import SCHEMA, SERIALIZED, Names
from ckpttool.core.optimizer_state import with_filled
from ckpttool.core.options import ModelOptions, OptimizerOptions, call_of, expand_options
from ckpttool.core.plan import Dropped, Output, Plan, compose, module_renames
from ckpttool.core.text import plural, shell
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import current
from ckpttool.evaluate.apply import apply
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.registry import program_format
from ckpttool.io import progress, sources
from ckpttool.kinds.lists import with_names_of_lists
from ckpttool.kinds.table import with_kinds
from ckpttool.naming import wrappers
from ckpttool.naming.convert import holds as holds_keys
from ckpttool.naming.convert import read
from ckpttool.naming.match import NameTables, match
from ckpttool.naming.versions import with_versions
from ckpttool.operands.checkpoint import model_section, saved_state_dicts, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import OptimizerKeywords
    from ckpttool.tracing.build_model import LoadedModel
    from ckpttool.tracing.loading import Load, Verdict
    from ckpttool.tracing.model_code import ModelCode


# the form of keys that a model loads, and does not save: as a load hook reads them
LOAD_HOOK = "load-hook"


def is_names_file(operand: object) -> bool:
    """Return True for the path of a file that `trace` wrote."""
    if not isinstance(operand, str) or not operand.endswith(".json") or not os.path.isfile(operand):
        return False
    with open(operand, "rb") as file:
        return SCHEMA.rpartition("/")[0].encode() in file.read(limits().json_bytes)


def read_names(path: str) -> Names:
    """Return the names in the file. Raise `CkptError` with all of its faults."""
    return Names.from_json(
        strict_json.read_file(path, "write a names file with `ckpttool trace MODEL -o names.json`"),
        path,
    )


def saved_by(names: Names) -> Checkpoint:

    def entry(key: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
        length = prod(shape) * itemsize(dtype)
        return in_row_major(key, dtype, shape, Storage(Lazy(length, lambda: [bytes(length)])))

    tensors = tuple(entry(saved.key, saved.dtype, saved.shape or ()) for saved in names.serialized)
    section = Section("", "state_dict", tensors, tuple(map(ExtraEntry, names.extra_state)))
    return Checkpoint("CKPT", "torch_zip", 0, (section,))


HF = "hf:"  # hf:FOLDER is the model that the config.json in the folder describes


@dataclass(frozen=True)
class ModelOperand:
    """A MODEL with its optimizer. Its names are read once.

    `model` is ``package.module:attr`` or ``file.py:attr``, perhaps with arguments
    (``file.py:attr(layers=4)``), the path of a names file or of a program (``prog.pt2::NAME``), a
    `Names`, or an object: a module, a class, a factory, an exported program. `materialize` builds
    it with real weights. `optimizer` is an OPTIMIZER operand, or a function of the model.
    `pretrained`: use the names that ``save_pretrained`` writes instead of the names of
    ``state_dict()``. `option` is its name on the command line.
    """

    model: Any
    materialize: bool = False
    optimizer: Any = None
    pretrained: bool = False
    option: str = "--model"

    @property
    def is_definition(self) -> bool:
        """Whether the model is code, which can be run, and not a list of names."""
        if isinstance(self.model, str):
            path = split(self.model)[0]
            return not path.endswith(".json") and program_format(path) is None
        return not isinstance(self.model, Names)

    @property
    def code(self) -> ModelOperand | None:
        """The operand itself if the model is code; None if it is a list of names."""
        return self if self.is_definition else None

    def names(self) -> Names:
        """Return the names: traced, or read from a names file or a program; with the optimizer's
        ids if one is given.

        Only code needs torch. Raise `CkptError` for any other operand.
        """
        return self._names

    @cached_property
    def tables(self) -> NameTables:
        return NameTables(self._names)

    def with_optimizer(self, optimizer: Any) -> ModelOperand:
        """Return the same model, whose names are read once, with another optimizer, or none."""
        if optimizer == self.optimizer:
            return self
        other = replace(self, optimizer=optimizer)
        other.__dict__.update(_bare=self._bare, _loads=self._loads, _verdicts=self._verdicts)
        if "_definition" in vars(self):
            other.__dict__["_definition"] = self._definition
        return other

    @cached_property
    def _names(self) -> Names:
        if self.optimizer is None:
            return self._bare
        if not self.is_definition:
            raise CkptError(
                f"--optimizer needs the model's code, and {self.title} is a file of names",
                hint="`ckpttool trace MODEL --optimizer O -o names.json` writes a names file that"
                " has the ids",
            )
        from ckpttool.tracing.build_optimizer import load_optimizer, with_optimizer

        return self._once(
            lambda: with_optimizer(self._bare, self.definition(), load_optimizer(self.optimizer)),
            self.optimizer,
        )

    @cached_property
    def _bare(self) -> Names:
        """The names without the ids of the optimizer."""
        if not self.is_definition:
            if self.pretrained:
                raise CkptError(
                    f"{self.title} lists no names of from_pretrained", hint="name the model's code"
                )
            if isinstance(self.model, Names):
                return self.model
            path, program = split(self.model)
            kind = program_format(path)
            if kind is None:
                return read_names(self.model)
            return kind.program_names(path, program)
        return self._once(self._traced, None)

    def _traced(self) -> Names:
        begun = time.monotonic()
        from ckpttool.tracing.trace import trace_with_load

        names, load = trace_with_load(self.definition())
        self._loads.append(load)
        command = shell("ckpttool", "trace", *self.words[1:], "-o", "names.json")
        progress.counts.traced[command] = time.monotonic() - begun
        if not self.pretrained:
            return names
        from ckpttool.tracing.pretrained import by_transformers

        return by_transformers(names)

    def _once(self, ask: Callable[[], Names], optimizer: Any) -> Names:
        """Return the names, with the ids of `optimizer` if it is given. With several ranks, the
        model's code runs on the first one, which tells the others.
        """
        job = current()
        if job is None:
            return ask()
        key = f"names {[self.model, self.materialize, self.pretrained, optimizer]}"
        names, read = job.of_first(key, lambda: (ask().to_json(), sources.others_read()))
        for path in read:
            sources.note_read(path)
        return Names.from_json(names, self.title)

    @property
    def is_folder(self) -> bool:
        """Whether it is ``hf:FOLDER``, whose checkpoints from_pretrained loads."""
        return isinstance(self.model, str) and self.model.startswith(HF)

    @cached_property
    def by_pretrained(self) -> ModelOperand:
        """The same model under the names of from_pretrained."""
        return replace(self, pretrained=True, optimizer=None)

    @cached_property
    def _call(self) -> tuple[Any, dict[str, Any]]:
        """The model without its arguments, and these."""
        if isinstance(self.model, str) and not os.path.exists(self.model):
            return call_of(self.model)
        return self.model, {}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments for a factory. Raise `CkptError` if the operand has some that cannot be
        read.
        """
        return self._call[1]

    def definition(self) -> LoadedModel:
        """Return the model's definition. Raise `CkptError` if it is not found, or is not a
        model.
        """
        return self._definition

    @cached_property
    def _definition(self) -> LoadedModel:
        from ckpttool.tracing.build_model import load, of_object
        from ckpttool.tracing.pretrained import as_pretrained, of_folder

        if not isinstance(self.model, str):
            definition = of_object(self.model, self.arguments, self.materialize)
        elif os.path.exists(self.model):
            raise _no_attribute(self.model)
        elif self.is_folder:
            definition = of_folder(self._call[0], self.arguments, self.materialize)
        else:
            definition = load(self._call[0], self.arguments, self.materialize, self.option)
        return as_pretrained(definition) if self.pretrained else definition

    @cached_property
    def run(self) -> ModelCode:
        """The model's own code, as plans run it: an `evaluate.apply.Runner`."""
        from ckpttool.tracing.model_code import ModelCode

        return ModelCode(self.definition())

    def constants(
        self, names: Sequence[str], state_dict: Section | None
    ) -> Mapping[str, TensorEntry | str]:
        """Return the values of tensors outside of the state dict after the model has loaded
        `state_dict`, or why they are not known.
        """
        from ckpttool.tracing.model_code import values_of_constants

        return values_of_constants(self.definition(), names, state_dict)

    def initial_states(
        self, groups: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
        """Return the state that the optimizer creates for parameters without state, by FQN, and why
        it is not known; see `tracing.initial_state`. `groups` has their hyperparameters.
        """
        from ckpttool.tracing.build_optimizer import load_optimizer
        from ckpttool.tracing.initial_state import initial_states

        def ask() -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
            return initial_states(self.definition(), load_optimizer(self.optimizer), groups)

        job = current()
        if job is None:
            return ask()
        states, unknown = job.of_first(f"initial states {self.optimizer} {sorted(groups)}", ask)
        return {fqn: with_filled(state) for fqn, state in states.items()}, unknown

    def verdict(self, section: Section, *, reads_values: bool = True) -> Verdict:
        """Return what torch says of a strict load of the section, found once for the same entries
        and versions.

        Raise the errors of `load_verdict`.
        """
        from ckpttool.tracing.loading import load_verdict

        key = int(reads_values), id(section.modules), *map(id, section.entries)
        if key not in self._verdicts:
            verdict = load_verdict(
                self.definition(), section, reads_values=reads_values, loads=self._loads
            )
            self._verdicts[key] = section, verdict
        return self._verdicts[key][1]

    def with_needed_versions(self, section: Section) -> Section:
        """Return the section with the module versions of the model, if it lost its own and loads
        only with them.

        If it loads without them too, they may change what is loaded, so it stays as it is.
        """
        if section.modules or not self.is_definition or self.pretrained:
            return section
        names = self.names()
        modules = {path: {"version": version} for path, version in (names.versions or {}).items()}
        keys = dict.fromkeys([*(key.key for key in names.serialized), *names.extra_state])
        changed = with_versions(section, modules, keys)
        if changed is section or self.verdict(section, reads_values=False).ok:
            return section
        return changed if self.verdict(changed, reads_values=False).ok else section

    @cached_property
    def _loads(self) -> list[Load]:
        """The loads that were recorded: of what the model saves, if its names were traced here, and
        of files.
        """
        return []

    @cached_property
    def _verdicts(self) -> dict[tuple[int, ...], tuple[Section, Verdict]]:
        return {}  # a section is kept, so that its ids are not used again

    def by_loading(self, section: Section) -> Plan | None:
        """Return the plan from keys that the model loads, and does not save, to its runtime names.

        Load hooks accept the keys of earlier versions of a model. The result is None if the keys
        are the model's own, and if a strict load fails (except for second names of tied weights).
        Raise `Refused` if the load succeeds and does not use some of the keys, or depends on
        values.
        """
        if not self.is_definition or self.pretrained:
            return None
        if not read(self.tables, section).match.unmatched:
            return None
        job = current()
        if job is None:
            return self._by_loading(section)
        entries = [(entry.key, entry.dtype, entry.shape) for entry in section.tensors]
        import hashlib  # loads OpenSSL

        text = repr([self.model, self.materialize, section.path, entries])
        digest = hashlib.sha256(text.encode()).hexdigest()

        def ask() -> dict[str, Any] | None:
            plan = self._by_loading(section)
            return None if plan is None else plan.to_json()

        plan = job.of_first(f"loads {digest}", ask)
        return None if plan is None else Plan.from_json(plan)

    def _by_loading(self, section: Section) -> Plan | None:
        canonical = wrappers.canonical_in(section)
        if len(set(canonical.values())) < len(canonical):
            return None
        path = section.path
        modules = module_renames(path, section.modules or (), canonical)
        unwrapped = Plan(
            tuple(Output(path, name, Ref(key)) for key, name in canonical.items()), modules=modules
        )
        is_wrapped = any(key != name for key, name in canonical.items())
        bare = apply(unwrapped, Checkpoint.of(section)).section(path) if is_wrapped else section
        try:
            verdict = self.verdict(bare)
        except CkptError:
            return None
        needed = set(verdict.missing) - set(self.tables.spare_keys)
        if not verdict.ok and (verdict.errors or verdict.unexpected or needed):
            return None
        keys = bare.by_key()
        reads = self._read_by_loading(verdict, keys)
        self._check_decided(verdict, reads, keys)
        used = {key for value in reads.values() for key in refs(value)}
        twins = _twins(bare, used)
        unused = [key for key in keys if key not in used and key not in twins]
        if unused:
            words = [word for key in unused for word in ("--drop", key)]
            raise Refused(
                f"{self.title} loads the checkpoint and does not use {plural(len(unused), 'key')}"
                " of it",
                hint=f"leave them out: {shell('ckpttool', 'remap', 'CKPT', *words, '-o', 'PART')}",
                problems=[Problem("not used", key) for key in unused],
            )
        for fqn, value in reads.items():
            if fqn in twins and value == Ref(twins[fqn]):
                reads[fqn] = Ref(fqn)
        place = {key: number for number, key in enumerate(keys)}

        def first_place(read: tuple[str, Expression]) -> int:
            places = [place[key] for key in refs(read[1])]
            return min(places, default=len(place))

        outputs = [Output(path, *read) for read in sorted(reads.items(), key=first_place)]
        dropped = []
        for key, other in twins.items():
            if reads.get(key) != Ref(key):
                reason = f"the model takes it for a copy of {other}"
                dropped.append(Dropped(path, key, reason))
        return compose(unwrapped, Plan(tuple(outputs), tuple(dropped)))

    def _read_by_loading(
        self, verdict: Verdict, keys: Mapping[str, object]
    ) -> dict[str, Expression]:
        """Return what loading gives each runtime tensor, and the entries that are not tensors."""
        reads: dict[str, Expression] = {}
        for fqn, value in verdict.reads.items():
            if value is not None and fqn in self.tables.first:
                reads[fqn] = without_cast(value)
        for key in self.tables.runtime_names:
            if key in keys and key not in self.tables.first:
                reads[key] = Ref(key)
        return reads

    def _check_decided(
        self, verdict: Verdict, reads: Mapping[str, Expression], keys: Iterable[str]
    ) -> None:
        """Raise `Refused` if what loading gives depends on values."""
        depends = verdict.by_values or verdict.doubtful or verdict.special
        if not depends and not any(map(is_opaque, reads.values())):
            return
        problems = []
        for key in keys:
            if key not in self.tables.saved:
                problems.append(Problem("not a key that the model saves", key))
        raise Refused(
            f"{self.title} loads keys that it does not save, and the result depends on their"
            " values",
            hint="let it load them, and save that: model.load_state_dict(torch.load(CKPT)); "
            "torch.save(model.state_dict(), OUT)",
            problems=problems,
        )

    @property
    def title(self) -> str:
        """The operand as the user wrote it; the name of an object."""
        if isinstance(self.model, Names):
            return self.model.model
        if isinstance(self.model, str):
            return self.model
        return str(getattr(self.model, "__name__", type(self.model).__name__))

    @property
    def called(self) -> str:
        """The model in a sentence: its title, or "the model of" a file that is not its code."""
        return self.title if self.is_definition else f"the model of {self.title}"

    @property
    def words(self) -> tuple[str, ...]:
        """The same operand as words of a command line, for the commands that a report proposes.

        An object of the caller has no such words: they say ``MODEL``.
        """
        words = ("--model", self.model if isinstance(self.model, str) else "MODEL")
        return (*words, "--materialize") if self.materialize else words


def _twins(section: Section, used: Collection[str]) -> dict[str, str]:
    """Return the tensors that are not `used` and have the value of one that is: tied weights."""
    by_outline = defaultdict[object, list[TensorEntry]](list)
    for entry in section.tensors:
        if entry.key in used:
            by_outline[entry.dtype, entry.shape].append(entry)
    twins = {}
    for entry in section.tensors:
        if entry.key not in used:
            for other in by_outline[entry.dtype, entry.shape]:
                if same_values(entry, other):
                    twins[entry.key] = other.key
                    break
    return twins


def _no_attribute(path: str) -> CkptError:
    if os.path.isfile(os.path.join(path, "config.json")):
        return CkptError(
            f"{path} is a folder, and not a model's code",
            hint=f"the model that its config.json describes: --model {shell(f'{HF}{path}')}",
        )
    if not path.endswith(".py"):
        return CkptError(
            f"{path} is not a model",
            hint=f"name a checkpoint without --model; see `{shell('ckpttool', 'inspect', path)}`",
        )
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (SyntaxError, ValueError):
        body = []
    attributes = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            attributes.append(f"{path}:{node.name}")
    hint = "as in file.py:build"
    if attributes:
        hint = f"name what builds the model: {', '.join(attributes)}"
    return CkptError(f"{path} is a file of code: name the model in it", hint=hint)


@expand_options(OptimizerOptions)
def trace(model: Any, **options: Unpack[OptimizerKeywords]) -> Names:
    """Return every name of every tensor of a model, and with `optimizer` the ids of its parameters.

    Args:
        model: A module, a function or class that builds one, ``file.py:build``, a names file, or an
            exported program.
        **options: `optimizer` makes the optimizer of the model's parameters; `materialize` builds
            the model with real weights instead of on the meta device.

    Returns:
        The runtime names, the keys of ``state_dict()``, and how each is made of the other.

    Raises:
        CkptError: The model's own code fails, or there is no such model.

    Example::

        names = ckpttool.trace("model.py:build")
        for entry in names.serialized:
            print(entry.key, entry.shape, entry.source)
    """
    return ModelOperand(model, options.get("materialize", False), options.get("optimizer")).names()


def operand_of(options: ModelOptions) -> ModelOperand | None:
    if options.model is None or isinstance(options.model, ModelOperand):
        return options.model
    optimizer = options.optimizer if isinstance(options, OptimizerOptions) else None
    if isinstance(optimizer, Mapping):  # each is the optimizer of a section
        optimizer = None
    return ModelOperand(options.model, options.materialize, optimizer)


def as_read(model: ModelOperand, section: Section, source: str) -> ModelOperand:
    """Return `model` with the names that fit the section's keys: its own, or the names of
    from_pretrained.

    If both fit equally well, its own names are used; but not for ``hf:FOLDER``, and not for files
    next to a ``config.json`` if a name has different values in the two.
    """
    if not model.is_definition or model.pretrained:
        return model
    tables = model.tables
    path = split(source)[0]
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    has_config = os.path.isfile(os.path.join(folder, "config.json"))
    if not has_config and not model.is_folder and holds_keys(tables, section):
        return model
    from ckpttool.tracing.pretrained import is_pretrained

    if not is_pretrained(model.definition()):
        return model
    pretrained = model.by_pretrained.tables
    # runtime names are no reason for a folder: from_pretrained ignores buffers that are not saved
    form = SERIALIZED if model.is_folder else None
    as_pretrained, score = read(pretrained, section, form), read(tables, section, form).match.score
    if as_pretrained.match.score > score:
        return model.by_pretrained
    if model.is_folder and untied_keys(tables, section):  # from_pretrained does not tie these
        return model.by_pretrained
    saved = tables.saved
    differ = any(saved.get(key, source) != source for key, source in pretrained.saved.items())
    fits_both = as_pretrained.form == SERIALIZED and as_pretrained.match.score == score
    preferred = model.is_folder or (has_config and differ)
    return model.by_pretrained if fits_both and preferred else model


def untied_keys(tables: NameTables, section: Section) -> list[tuple[str, str]]:
    """Return pairs of keys that the model ties, and for which the section has different values."""
    entries = section.by_key()
    first: dict[str, str] = {}
    pairs = []
    for key, source in tables.saved.items():
        if isinstance(source, Ref) and key in entries:
            twin = first.setdefault(source.key, key)
            if twin != key and not same_values(entries[twin], entries[key]):
                pairs.append((twin, key))
    return pairs


Fit = tuple[int, int]
Likeness = Mapping[str, "tuple[int, ...] | None"]  # canonical name -> shape; None for other entries


def read_for_model(checkpoint: Checkpoint, model: ModelOperand | None) -> Checkpoint:
    """Return the checkpoint as the model's names show it: which dicts are state dicts, and how the
    tensors of lists are called.
    """
    if model is None:
        return checkpoint
    checkpoint = _with_dicts_of(model, checkpoint)
    if any(section.is_list for section in checkpoint.state_dicts):
        return with_names_of_lists(checkpoint, model.names(), saved_state_dicts(checkpoint))
    return checkpoint


def _with_dicts_of(model: ModelOperand, checkpoint: Checkpoint) -> Checkpoint:
    """Read each dict as a state dict if it has more of the model's keys than any dict inside or
    around it.

    A dict that has none of these keys stays as it was read.
    """
    if checkpoint.readings is None:
        return checkpoint
    tables = model.tables
    names = {*tables.serialized_names, *tables.runtime_names}
    fits: dict[str, Fit] = {}
    for path, keys in checkpoint.readings.dicts.items():
        if not names.isdisjoint(keys):
            fits[path] = _fit(tables, keys)
    others = dict(fits)
    for section in checkpoint.state_dicts if fits else ():
        others[section.path] = _fit(tables, list(section.by_key()))

    def is_best(path: str) -> bool:
        for other, fit in others.items():
            if (_is_inside(other, path) or _is_inside(path, other)) and fit >= fits[path]:
                return False
        return True

    chosen = list(filter(is_best, fits))
    return with_kinds(checkpoint.read_as(chosen)) if chosen else checkpoint


def of_one_model(
    checkpoint: Checkpoint, named: str | None = None, names: Names | None = None
) -> tuple[Section, ...]:
    """Return the sections that change together, the model's own first: all that hold the model, or
    those in `named`.

    `named` are dotted paths separated by commas; `names` are the model's, if it is known. Raise
    `CkptError` if a path is not a state dict, and without paths if the state dicts hold several
    models, or if the file has no state dict.
    """
    if named is not None:
        return _named(checkpoint, [path.strip() for path in named.split(",")])
    tables = None if names is None else NameTables(names)
    try:
        first = model_section(checkpoint, tables)
    except CkptError:
        if not checkpoint.state_dicts:
            raise
        first = checkpoint.state_dicts[0]
        is_model = tables is not None and holds_keys(tables, first)
        sections = (first, *same_model(checkpoint, first, names if is_model else None))
        if len(sections) != len(checkpoint.state_dicts):
            raise
        return sections  # whichever it is, all of them are changed
    return (first, *same_model(checkpoint, first, names))


def same_model(
    checkpoint: Checkpoint, section: Section, names: Names | None = None
) -> tuple[Section, ...]:
    """Return the other state dicts with the same names and shapes, with any wrappers around them.

    If the model's `names` are known, also return state dicts that hold the complete model in
    another form. A list of tensors has no names of its own: it changes only if it is named.
    """
    others = []
    for other in checkpoint.state_dicts:
        if other.path != section.path and not other.is_list:
            others.append(other)
    if not others:
        return ()
    lightning = wrappers.is_lightning(checkpoint)
    tables = None if names is None else NameTables(names)
    likeness = _likeness(section, lightning)
    if not likeness:
        return ()

    def is_same(other: Section) -> bool:
        if _likeness(other, lightning) == likeness:
            return True
        return tables is not None and holds_keys(tables, _without_counters(other))

    return tuple(filter(is_same, others))


def left_as_they_are(checkpoint: Checkpoint, changed: Sequence[Section]) -> list[str]:
    """Return notes on state dicts that are not among the `changed` ones, but share half of the
    names with one.
    """
    lightning, paths = wrappers.is_lightning(checkpoint), [section.path for section in changed]
    others = [section for section in checkpoint.state_dicts if section.path not in paths]
    changed_names = set(_likeness(changed[0], lightning)) if others else set()
    notes = []
    for other in others:
        names = set(_likeness(other, lightning))
        shared = len(names & changed_names)
        if not shared or 2 * shared < min(len(names), len(changed_names)):
            continue
        both = ",".join((*paths, other.path))
        notes.append(
            f"{other.title} has {shared} of the {len(changed_names)} names of "
            f"{changed[0].title} and stays as it is (--sections '{both}' takes it too)"
        )
    return notes


def _named(checkpoint: Checkpoint, paths: Sequence[str]) -> tuple[Section, ...]:
    have = {section.path: section for section in checkpoint.state_dicts}
    unknown = [path for path in paths if path not in have]
    if unknown:
        titles = ", ".join(section.title for section in have.values()) or "none"
        raise CkptError(
            f"{checkpoint.source} has no state dict {', '.join(map(repr, unknown))}",
            hint=f"its state dicts are: {titles}",
        )
    return tuple(have[path] for path in dict.fromkeys(paths))


def _without_counters(section: Section) -> Section:
    counters = wrappers.counters([entry.key for entry in section.tensors])
    return replace(
        section, tensors=tuple(entry for entry in section.tensors if entry.key not in counters)
    )


def _likeness(section: Section, lightning: bool) -> Likeness:
    names = wrappers.canonical_keys(section.by_key(), lightning=lightning)
    shapes = {entry.key: entry.shape for entry in section.tensors}
    entries = _without_counters(section).by_key()
    return {name: shapes.get(key) for key, name in names.items() if key in entries}


def _fit(tables: NameTables, keys: Sequence[str]) -> Fit:
    """Return how many of the keys the model loads, and how many are its runtime names."""
    serialized = match(keys, tables.serialized_names).names
    return len(serialized), len(match(keys, tables.runtime_names).names)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
