"""Try a fix on the index: are the two the same afterwards?"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from ckpttool.containers.nodes import entries_with_code
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import refs
from ckpttool.core.text import dotted
from ckpttool.core.values import dataclass
from ckpttool.diffing.checkpoints import OF_PROGRAMS, program_and_weights
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.renames import suggestions
from ckpttool.diffing.result import (
    HARMLESS,
    Diff,
    Entry,
    Fix,
    Outline,
    Outlines,
    alike,
    names_outlines,
    outlines,
)
from ckpttool.diffing.run import run
from ckpttool.diffing.sections import compare, explain_computed
from ckpttool.fixes.rules_file import Rules, suggested
from ckpttool.kinds.packed import ATTRIBUTE
from ckpttool.naming.convert import MADE_AGAIN
from ckpttool.naming.match import aliases, prefixes
from ckpttool.naming.wrappers import canonical_in, canonical_keys
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, operand_of, saved_by
from ckpttool.operands.output import command, outputs, target_for
from ckpttool.remapping import run as remap
from ckpttool.remapping.loads import loaded_by, loading
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import NO_COUNTER
from ckpttool.swap import swap
from ckpttool.swap.swap import SwapOptions


@dataclass(frozen=True)
class DiffQuestion:
    """A diff with its operands and options, to ask the same about other checkpoints. `model` is
    read once.

    `optimizer_path` is the section of the only optimizer in question, if a command changes the
    complete file. `opened` are left and right as a command without the model reads them, if that
    differs.
    """

    left: Checkpoint | None
    right: Checkpoint | None
    options: DiffOptions
    model: ModelOperand | None
    diff: Diff
    optimizer_path: str | None = None
    opened: tuple[Checkpoint | None, Checkpoint | None] | None = None

    @property
    def two(self) -> tuple[Checkpoint, Checkpoint]:
        """The two checkpoints of a question about two."""
        assert self.left is not None
        assert self.right is not None
        return self.left, self.right

    @property
    def model_options(self) -> dict[str, Any]:
        """The options that name the model."""
        options = self.options
        return {"model": options.model, "materialize": options.materialize}

    @property
    def outlines(self) -> tuple[Outlines, ...]:
        """The tensors of the right, or of the model in both of its forms."""
        if self.right is not None:
            return (outlines(model_section(self.right)),)
        assert self.model is not None
        return names_outlines(self.model.names())

    @cached_property
    def prefixes(self) -> tuple[list[str], ...]:
        """The prefixes of left below which it has the most names of right, or of the model in both
        of its forms.
        """
        assert self.left is not None
        wanted: tuple[set[str], ...] = ()
        if self.right is not None:
            wanted = ({*canonical_in(model_section(self.right)).values()},)
        else:
            assert self.model is not None
            tables = self.model.tables
            for names in ({*tables.serialized_names.values()}, {*tables.runtime_names.values()}):
                wanted = (*wanted, {*canonical_keys(names).values()})
        keys = {*canonical_in(model_section(self.left)).values()}
        return tuple(prefixes(keys, names) for names in wanted)

    @cached_property
    def parts(self) -> list[str]:
        """The prefixes of left below which it has the names of right, if there are several: a
        choice is a guess.

        If the shapes below some of them are those of right, only these.
        """
        if self.left is None or not self.left.state_dicts:
            return []
        several = next((many for many in self.prefixes if len(many) > 1 and "" not in many), [])
        if not several:
            return []
        section = model_section(self.left)
        keys = {name: key for key, name in canonical_in(section).items()}
        tensors = outlines(section)
        expected: dict[str, Outline] = {}
        for side in reversed(self.outlines):
            expected.update(side)
        shapes = {name: expected[key].shape for key, name in canonical_keys(expected).items()}

        def fits(prefix: str) -> bool:
            for name, shape in shapes.items():
                tensor = tensors.get(keys.get(f"{prefix}.{name}", ""))
                if tensor is not None and tensor.shape != shape:
                    return False
            return True

        return list(filter(fits, several)) or several

    @cached_property
    def rules(self) -> Rules | None:
        """The rules that lead from the left's names to the names of the right, or to the keys that
        the model saves.
        """
        assert self.left is not None
        if self.right is not None:
            return suggested(self.diff.entries, self.diff.inferred, self.left, self.right)
        return self.rules_from(self.left)

    def rules_from(self, left: Checkpoint) -> Rules | None:
        """Return the rules that lead from the names of this checkpoint instead of left."""
        right = self.right
        if right is None:
            assert self.model is not None
            right = saved_by(self.model.names())
        entries = explain_computed(compare(model_section(left), model_section(right)))
        return suggested(entries, suggestions(left, right, entries, False), left, right)

    def ask_again(
        self, left: Checkpoint, right: Checkpoint | None, *, reads_values: bool = False
    ) -> Diff:
        """Ask the same question about other checkpoints, without suggestions.

        Values that were compared are compared again only if it `reads_values`: a rename does not
        change them.
        """
        if self.optimizer_path is not None and self.right is not None:
            left = replace(left, sections=(replace(left.section(self.optimizer_path), path=""),))
        elif self.optimizer_path is not None:
            sections = (
                s for s in left.sections if s.kind != "optimizer" or s.path == self.optimizer_path
            )
            left = replace(left, sections=tuple(sections))
        if reads_values:
            with self.options.comparing(left, right):
                return run(left, right, self.options, self.model, infers=False)
        options = replace(self.options, values=False, rtol=0.0, atol=0.0)
        return run(left, right, options, self.model, infers=False)

    @property
    def has_unread_values(self) -> bool:
        """Whether values are compared, and some were not because their tensors have no counterpart
        by name.
        """
        unpaired = any(entry.status in ("missing", "transformed") for entry in self.diff.entries)
        return self.options.comparison is not None and unpaired

    def remaining(self, diff: Diff) -> int:
        """Return how much a remap could fix: a name counts more than a shape or dtype, and values
        do not count.
        """
        harmless = HARMLESS | diff.harmless
        of_one_name = {"shape": 1, "dtype": 1, "value": 1 if self.right is None else 0}
        total = 0
        for group in alike(diff.entries):
            if group[0].is_one_of(harmless):
                continue
            count = of_one_name.get(group[0].status, 2)
            total += sum(count if entry.left == entry.right else 2 for entry in group)
        return total

    def different_values(self, diff: Diff) -> list[Entry]:
        """Return the tensors of two checkpoints with different values, under one name or two."""
        return (
            []
            if self.right is None
            else [entry for entry in diff.entries if entry.status == "value"]
        )


@dataclass(frozen=True, slots=True)
class TriedFix:
    """A command that works, as its options, and the answer after it has run.

    `stateless` are parameters that it leaves out of an optimizer, with their state, `left_out` are
    the paths of tensors and other entries of the state dict that it leaves out. `part`: the operand
    is a section of left. `code` are the paths of entries that it leaves out because loading them
    would run code.
    """

    verb: str
    operands: tuple[str, ...]
    options: RemapOptions | ConvertOptions | SwapOptions
    after: Diff
    stateless: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    part: bool = False
    code: tuple[str, ...] = ()

    @property
    def fix(self) -> Fix:
        """The command line."""
        line = command(self.verb, self.operands, self.options)
        is_applied = self.after.identical and self.verb != "swap-weights" and not self.stateless
        options = self.options if is_applied else None
        source = self.operands[0] if self.part else ""
        return Fix(line, complete=self.after.identical, tried=True, options=options, source=source)

    @property
    def drops(self) -> bool:
        """Whether it leaves tensors out."""
        return isinstance(self.options, RemapOptions) and not set(self.options.drop or ()) <= set(
            self.code
        )

    @property
    def infers(self) -> bool:
        """Whether its rules are inferred from names and shapes."""
        return isinstance(self.options, RemapOptions) and bool(self.options.rule)


def try_remap(
    question: DiffQuestion,
    options: RemapOptions,
    word: str,
    most: int | None = None,
    *,
    loses_state: bool = False,
    loses_keys: bool = False,
    code: tuple[str, ...] = (),
) -> TriedFix | None:
    """Return the remap of the left checkpoint with these options; None if it is refused, if no
    format can hold the result, if it loses something, or if `most` differences or more are left.
    With `loses_state` it may leave parameters of an optimizer out, with `loses_keys` keys of the
    state dict. Entries that would run code when the output is loaded are dropped too; `code` are
    the paths that are dropped already.

    `options` are as printed; what is read already is reused. `word` is part of the output's name,
    whose ending may change to the ending of a format that holds more.
    """
    (source, right), model = question.opened or (question.left, question.right), None
    if options.model is not None:
        source, right = question.left, question.right
    assert source is not None
    if options.model is not None:
        assert question.model is not None
        model = question.model.with_optimizer(options.optimizer)
    read = replace(options, dry_run=True, model=model, like=None if options.like is None else right)
    try:
        model = operand_of(read)
        to_model = loading_model(read, model)
        result = plan_remap(source, read, model, to_model)
    except CkptError:
        return None
    stateless = tuple(chain(*(optimizer.dropped for optimizer in result.optimizers)))
    if stateless and not loses_state:
        return None
    if not loses_keys and _loses(source, result, question.model, code):
        return None
    dropped = [drop for drop in result.plan.dropped if drop.reason != NO_COUNTER]
    left_out = tuple(dotted(drop.section, drop.key) for drop in dropped)
    for out in outputs(source.source, word):
        try:
            target = target_for(out, source)
            fitted = remap.fitted(result, target, read, to_model or model)
            fitted = replace(fitted, source=out, format=target.format.name)
            after = question.ask_again(fitted, question.right)
            if not after.identical and most is not None:
                # A key that is missing may be one of those left out.
                drops_missing = options.drop and any(
                    entry.status == "missing" for entry in after.entries
                )
                if drops_missing or question.remaining(after) >= most:
                    return None
            if after.identical and question.has_unread_values:
                after = question.ask_again(fitted, question.right, reads_values=True)
        except CkptError:
            continue
        missing = result.missing
        # else the model of the question loads it
        if not after.identical or question.right is not None:
            loads = loading(result, read, loaded_by(read, model, to_model))
            missing = missing if loads is None else loads.missing
        creates = any(optimizer.move.created for optimizer in result.optimizers if optimizer.move)
        printed = replace(options, out=out, partial=bool(missing) or creates)
        try:
            write_options = replace(read, out=out, partial=printed.partial)
            remap.run(source, write_options, model=model, planned=result, lays_out=False)
        except CkptError:
            paths = dict.fromkeys(path for path, _ in entries_with_code(fitted))
            with_code = tuple(path for path in paths if path not in code)
            if with_code:
                more = replace(options, drop=(*(options.drop or ()), *with_code))
                return try_remap(
                    question,
                    more,
                    word,
                    most,
                    loses_state=loses_state,
                    loses_keys=loses_keys,
                    code=(*code, *with_code),
                )
            continue
        return TriedFix("remap", (source.source,), printed, after, stateless, left_out, code=code)
    return None


def try_cast(question: DiffQuestion, dtype: str) -> TriedFix | None:
    """Return the conversion of the left checkpoint to one dtype; None if it is refused, or if
    anything differs after it.
    """
    source = question.left if question.opened is None else question.opened[0]
    assert source is not None
    reads_values = question.options.comparison is not None
    for out in outputs(source.source, dtype):
        options = ConvertOptions(dtype=dtype, out=out)
        dry = replace(options, dry_run=True)
        try:
            result = remap.run(source, dry.as_remap, conversion=dry).result
            after = question.ask_again(result, question.right, reads_values=reads_values)
        except CkptError:
            continue
        if after.identical:
            return TriedFix("convert", (source.source,), options, after)
    return None


def try_swap(question: DiffQuestion, options: SwapOptions) -> TriedFix | CkptError:
    """Return the swap with these options, or why it is refused."""
    left, right = question.two
    program, weights = program_and_weights(left, right)
    read = replace(options, dry_run=True, model=None if options.model is None else question.model)
    try:
        swapped = swap.run(program.source, weights, read).program
    except CkptError as error:
        return error
    out = next(outputs(program.source, "swapped"))
    swapped = replace(swapped, source=out)
    after = question.ask_again(*((swapped, weights) if program is left else (weights, swapped)))
    if question.options.comparison is not None and question.model is not None:
        # the swap gives the program the values, which are not read again
        harmless = after.harmless | OF_PROGRAMS
        if all(entry.is_one_of(harmless) for entry in after.entries):
            after = replace(after, identical=True, harmless=harmless)
    return TriedFix(
        "swap-weights", (program.source, weights.source), replace(options, out=out), after
    )


def model_path(checkpoint: Checkpoint) -> str | None:
    """Return the path of the model's state dict, None if the file has none or if it is unclear
    which it is.
    """
    try:
        return model_section(checkpoint).path
    except CkptError:
        return None


def _loses(
    source: Checkpoint, result: Remap, model: ModelOperand | None, code: tuple[str, ...]
) -> bool:
    """Return True if the output does not have the values of a tensor of the source, under any name.

    Entries that run `code` when they are loaded are not counted.

    Not lost are the counter of AveragedModel in the state dict in question, non-persistent buffers,
    attributes of pickled modules, and keys that the model's saving computes from other tensors: its
    code creates them again.
    """
    paths, path_of_model = {section.path for section in source.sections}, model_path(source)
    dropped: dict[str, list[str]] = {}  # the keys of each section
    for drop in result.plan.dropped:
        is_again = drop.reason == MADE_AGAIN and drop.section in paths
        is_counter = drop.reason == NO_COUNTER and drop.section == path_of_model
        is_needless = is_again or is_counter or drop.reason == ATTRIBUTE
        if not is_needless and dotted(drop.section, drop.key) not in code:
            dropped.setdefault(drop.section, []).append(drop.key)
    if not dropped:
        return False
    created_again = []
    for tensor in () if model is None else model.names().runtime:
        if not tensor.persistent:
            created_again.append(f".{tensor.fqn}")
    for path, keys in dropped.items():
        first = aliases(source.section(path)) if path in paths else {}
        names: dict[str, set[str]] = {}  # under which each tensor is read, by the first one
        for output in result.plan.outputs:
            for key in refs(output.source) if output.section == path else ():
                names.setdefault(first.get(key, key), set()).add(key)
        for key in keys:
            others = names.get(first.get(key, key), set()) - {key}
            if not others and not f".{key}".endswith(tuple(created_again)):
                return True
    return False
