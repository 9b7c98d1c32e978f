"""MODEL operands: code, a names file, a program, or an object of the caller's."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names
from ckpttool.core.options import ModelOptions, OptimizerOptions, call_of, expand_options
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import current
from ckpttool.formats.registry import program_format
from ckpttool.io import progress, sources
from ckpttool.naming.match import NameTables
from ckpttool.naming.versions import with_versions
from ckpttool.operands.checkpoint import split
from ckpttool.operands.names_files import read_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import OptimizerKeywords
    from ckpttool.tracing.build_model import LoadedModel
    from ckpttool.tracing.loading import Load, Verdict
    from ckpttool.tracing.model_code import ModelCode


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
        """Return the same model with another optimizer, or none. Its names are read now and only
        once, which runs the model's code.
        """
        if optimizer == self.optimizer:
            return self
        other = replace(self, optimizer=optimizer)
        other.__dict__.update(
            _names_without_ids=self._names_without_ids, _loads=self._loads, _verdicts=self._verdicts
        )
        if "_definition" in vars(self):
            other.__dict__["_definition"] = self._definition
        return other

    @cached_property
    def _names(self) -> Names:
        if self.optimizer is None:
            return self._names_without_ids
        if not self.is_definition:
            raise CkptError(
                f"--optimizer needs the model's code, and {self.title} is a file of names",
                hint="`ckpttool trace MODEL --optimizer O -o names.json` writes a names file that"
                " has the ids",
            )
        from ckpttool.tracing.build_optimizer import load_optimizer, with_optimizer

        def ask() -> Names:
            optimizer = load_optimizer(self.optimizer, self.model)
            return with_optimizer(self._names_without_ids, self.definition(), optimizer)

        return self._once(ask, self.optimizer)

    @cached_property
    def _names_without_ids(self) -> Names:
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

    def verdict(self, section: Section, *, reads_values: bool = True) -> Verdict:
        """Return what torch says of a strict load of the section, found once for the same entries
        and versions.

        Raise the errors of `verdict_on_section`.
        """
        from ckpttool.tracing.loading import verdict_on_section

        key = int(reads_values), id(section.modules), *map(id, section.entries)
        if key not in self._verdicts:
            verdict = verdict_on_section(
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
        keys = dict.fromkeys(key.key for key in names.serialized)
        keys.update(dict.fromkeys(names.extra_state))
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
        **options: `optimizer` makes the optimizer of the model's parameters, or is the optimizer of
            a module; `materialize` builds the model with real weights instead of on the meta
            device.

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
