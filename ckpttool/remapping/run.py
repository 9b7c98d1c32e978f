"""All of `remap`: from options to a written checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import LOADED, SAVED
from ckpttool.core.keys import dotted
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.optimizer_state import ID
from ckpttool.core.options import expand_options
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.plan import Plan
from ckpttool.core.text import Info, plural, shell, some
from ckpttool.evaluate.apply import Runner
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats import strict_json
from ckpttool.formats.compat import check_in_place, fit, loses_versions, losses
from ckpttool.formats.detect_folder import note_on
from ckpttool.formats.huggingface import parse_size
from ckpttool.formats.pickle_write import dangerous_written
from ckpttool.formats.torch.pickled_code import entries_with_code
from ckpttool.io import progress as io_progress
from ckpttool.io import sources
from ckpttool.io.edit_in_place import Written
from ckpttool.io.pieces import Edited, Files, Piece
from ckpttool.naming.adapters import adapter_of
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.match import NameTables, match
from ckpttool.operands.checkpoint import (
    Ckpt,
    model_section,
    open_checkpoint,
    open_operand,
    open_with_values,
    saved_state_dicts,
    split,
)
from ckpttool.operands.model import ModelOperand, as_read, operand_of
from ckpttool.operands.output import Target, target_for
from ckpttool.operands.sections import of_one_model, read_for_model
from ckpttool.remapping.companions import Companions, companions_of
from ckpttool.remapping.optimizer import OptimizerRequest
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import Remap, by_plan, with_optimizers
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.refusals import (
    already_there,
    changes_content,
    changes_form,
    check_code,
    copied,
    is_as_saved,
    refuse_unchanged,
)
from ckpttool.remapping.sharding.gather import made_whole, put_together
from ckpttool.remapping.steps import RemapRequest
from ckpttool.remapping.undo import undo, undo_of
from ckpttool.remapping.write import Decided, Writer, cost_of, recover_source
from ckpttool.rules.patterns import Renaming, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ckpttool.io.progress import Progress
    from ckpttool.keywords import RemapKeywords, WriteKeywords
    from ckpttool.rules.steps import Step as RuleStep


@expand_options(RemapOptions)
def remap(
    ckpt: Ckpt, out: str | None = None, *, progress: Progress | None = None, **options: Unpack[RemapKeywords]
) -> Remap:
    """Rewrite the keys, optimizer ids and format of a checkpoint, and write OUT if it is named.

    `progress` is called with a title and a number of bytes, and gives a context manager of a function that is told how
    many bytes are done. Raises `Refused`, all problems at once, if something would be lost, collide or have to be
    guessed, and `CkptError` if something cannot be read or written.
    """
    sources.begin_call()
    chosen = RemapOptions(out=out, **options)
    if chosen.like is not None and not isinstance(chosen.like, str):
        chosen = replace(chosen, like=open_checkpoint(chosen.like))
    chosen.check(ckpt if isinstance(ckpt, str) else None)
    if chosen.undo:
        return undone(ckpt, chosen)
    if chosen.in_place and not chosen.dry_run and isinstance(ckpt, str):
        recover_source(ckpt)
    with io_progress.shown(progress):
        return run(open_with_values(ckpt), chosen)


# The options of a remap that say how the output is written.
WRITTEN = ("force", "dry_run", "verify", "no_fsync", "keep_aliases", "max_shard_size", "torch_format", "link")


@expand_options(RemapOptions, only=WRITTEN)
def write(checkpoint: Checkpoint, out: str, **options: Unpack[WriteKeywords]) -> None:
    """Write a checkpoint, as `open_checkpoint` or `remap` returned it, to the file or folder OUT, all or nothing.

    Raises `CkptError` if OUT exists (`force` overwrites it), `Refused` if its format cannot hold the checkpoint.
    """
    sources.begin_call()
    chosen = RemapOptions(out=out, **options)
    chosen.check(None)
    run(open_with_values(checkpoint), chosen, may_copy=True)


def run(source: Checkpoint, options: RemapOptions, *, may_copy: bool = False) -> Remap:
    """Return what `options` make of `source`, written if they name an output and do not ask for a dry run.

    Raises `Refused`, all problems at once, if the remap would lose, collide, guess, or change nothing (unless it
    `may_copy`), and `CkptError` if an operand cannot be read or OUT cannot be written. Then nothing is written.
    """
    writer = Writer(
        split(source.source)[0],
        options.force,
        options.in_place,
        not options.no_fsync,
        options.verify,
        options.link,
        keep=not options.no_undo,
    )
    target = _checked_target(source, options, writer)
    model = operand_of(options)
    done = replace(
        made(source, options, model),
        source=source.source,
        output=options.target(source.source) or "",
        dry_run=options.dry_run,
    )
    if done.missing and not (options.partial or options.to_ranks):  # rank files are checked with their parts
        raise _missing(done.missing, _to_operand(options, model) or model)
    if options.to_ranks and model is not None:
        return _write_ranks(options, writer, model, done)
    if not (may_copy or done.changes_content or options.copy):
        shard_size = _shard_size(options)
        is_new = target is not None and changes_form(source, target, done, shard_size)
        if not is_new and is_as_saved(source):
            already = already_there(options)
            if already is None or options.in_place:
                refuse_unchanged(source, options)
            done = replace(done, notes=(*done.notes, Info(f"{already}: nothing renamed")))
    return done if target is None else _write(source, options, writer, target, done, model)


def _checked_target(source: Checkpoint, options: RemapOptions, writer: Writer) -> Target | None:
    """Where the output goes, after all checks that need no work yet; None where it is the ranks' files, or nothing."""
    out = options.target(source.source)
    if out is None or options.to_ranks:
        return None
    target = target_for(out, source, _shard_size(options), options.torch_format)
    if options.in_place:
        check_in_place(source, target.format)
    if not options.dry_run:
        like = options.like.source if isinstance(options.like, Checkpoint) else options.like
        writer.check(target, *(split(name)[0] for name in (like,) if isinstance(name, str)))
    return target


def _shard_size(options: RemapOptions) -> int | None:
    return None if options.max_shard_size is None else parse_size(options.max_shard_size)


def _to_operand(options: RemapOptions, model: ModelOperand | None) -> ModelOperand | None:
    """What is to load the output: another model, or the same with another optimizer."""
    if options.to_model is not None:
        kwargs, made = options.to_model_kwargs, options.to_optimizer
        return ModelOperand(options.to_model, kwargs, options.materialize, made, option="--to-model")
    if options.to_optimizer is None or model is None:
        return None
    return model.with_optimizer(options.to_optimizer)


def made(source: Checkpoint, options: RemapOptions, model: ModelOperand | None) -> Remap:
    """What `options`, of which the model is read, make of `source`, whatever is to hold it. Raises as `run` does."""
    if options.plan is not None:
        plan = Plan.from_json(strict_json.read_file(options.plan, "write one with --save-plan"), options.plan)
        read = source.read_for(plan.reads)
        done = by_plan(read, plan, _runners(plan, model, _to_operand(options, model)))
        changed = changes_content(read, done)
        return replace(done, notes=(*source.notes, *done.notes), changes_content=changed)
    source = made_whole(read_for_model(source, model))
    names = None if model is None else model.names()
    gathered = put_together(source, names, () if options.to_ranks else options.units or ())
    if gathered is not None and options.save_plan is not None:
        raise CkptError("a plan cannot put rank files together", hint="write the checkpoint: -o OUT, without a plan")
    asked, wanted = _request(source, options, model)
    whole = source if gathered is None else gathered.checkpoint
    read_as = None
    if gathered is None and _is_about_optimizers(source, options, wanted):
        by_names = options.optimizer_keys not in (None, ID) and source.state_dicts
        unwrapped = asked.names if by_names else None  # as the names of torch.distributed.checkpoint are
        asked = replace(asked, names=None, to_names=None, code=None, to_code=None, unwrapped=unwrapped)
    elif model is not None:
        loads = None if options.to_model is None or options.has_rules else _to_operand(options, model)
        read_as, leads_to = _named_by(whole, model, loads, options)  # with rules, these are the way to the new model
        asked = replace(asked, names=read_as.names(), to_names=None if leads_to is None else leads_to.names())
        asked = replace(asked, code=_code(read_as), to_code=_code(leads_to))
    done = remap_index(whole, asked, options.drop or ())
    if read_as is not None and read_as.pretrained:
        done = replace(done, source_form=str(ModelForm.PRETRAINED))
    if gathered is not None and names is not None:
        from ckpttool.remapping.sharding.gather_optimizer import with_gathered_optimizers

        done = with_gathered_optimizers(done, gathered, names)
    loads = None if options.to_model is None else _to_operand(options, model)
    if loads is not None and asked.rule_steps and asked.names is not None:
        done = replace(done, missing=_not_reached(done, asked, loads))
    elif done.missing and read_as is not None and gathered is None:
        done = replace(done, missing=_needed(done, asked, loads or read_as))
    if done.missing:
        said = f"missing {plural(len(done.missing), 'key')} of the model: {some(done.missing, 20)}"
        done = replace(done, notes=(*done.notes, said))
    if done.result.beside != source.beside:  # some of these files are dropped
        notes = (note for note in source.notes if note not in note_on(source.beside))
        source = replace(source, notes=(*notes, *note_on(done.result.beside)))
    done = with_optimizers(replace(done, notes=(*source.notes, *done.notes)), wanted)
    return replace(done, changes_content=gathered is not None or changes_content(source, done))


def _not_reached(done: Remap, asked: RemapRequest, loads: ModelOperand) -> tuple[str, ...]:
    """The keys of the model which is to load the output that the rules do not lead to."""
    tables = NameTables(loads.names())
    runtime = asked.model_form.names == RUNTIME
    names, spare = (
        (tables.runtime_names, tables.spare_fqns)
        if runtime
        else (tables.serialized_names, {*tables.spare_keys} - {*tables.names.extra_state})
    )
    sections = of_one_model(done.result, asked.sections)
    if any(adapter_of(section.keys) is not None for section in sections):
        return ()
    return tuple(dotted(section.path, key) for section in sections for key in match(section.keys, names, spare).missing)


def _needed(done: Remap, asked: RemapRequest, loads: ModelOperand) -> tuple[str, ...]:
    """The missing keys, without those that the model's own loading can do without: some are saved only at times."""
    whole = asked.select is None and asked.like is None and not asked.rule_steps and not asked.trainable_only
    if not (whole and asked.to in (None, ModelForm.SERIALIZED) and loads.is_definition) or loads.is_folder:
        return done.missing
    from ckpttool.tracing.loading import load_verdict

    needed = []
    for path in dict.fromkeys(done.plan.sections):
        own = [key for key in done.missing if key.startswith(f"{path}." if path else "")]
        section = done.result.section(path)
        if own and section.kind == "state_dict" and not load_verdict(loads.definition(), section).ok:
            needed += own
    return tuple(dict.fromkeys(needed))


def _missing(keys: Sequence[str], model: ModelOperand | None) -> Refused:
    title = "the model" if model is None else model.title
    return Refused(
        f"the output would lack {plural(len(keys), 'key')} of {title}: a strict load fails without them",
        hint="add --partial to write it without them (an encoder, an average of the parameters alone)",
        problems=[Problem("missing", key, "missing") for key in keys],
    )


def _named_by(
    source: Checkpoint, model: ModelOperand, loads: ModelOperand | None, options: RemapOptions
) -> tuple[ModelOperand, ModelOperand | None]:
    """The model under the names that the keys are read by, and where they lead to other names, what has these.

    `loads` is another model that is to load the output. Raises `CkptError` where names of from_pretrained are asked
    for, and the model has none.
    """
    saved = model
    if options.source_form is ModelForm.PRETRAINED:
        saved = model.by_pretrained
    elif options.source_form is None:
        saved = as_read(model, of_one_model(source, options.sections, model.names())[0], source.source)
    to_pretrained, form = options.form is ModelForm.PRETRAINED, options.form
    target = loads or model
    if to_pretrained:
        target = target.by_pretrained
    as_they_are = (form is None and options.like is None) or (isinstance(form, ModelForm) and form.names == RUNTIME)
    on_the_way = saved.pretrained == to_pretrained or (as_they_are and not to_pretrained)
    return saved, None if loads is None and on_the_way else target


def _code(model: ModelOperand | None) -> ModelOperand | None:
    """The model itself, where it is code."""
    return model if model is not None and model.is_definition else None


def _runners(plan: Plan, model: ModelOperand | None, to_model: ModelOperand | None) -> dict[str, Runner]:
    """Whose code carries out the runs of a saved plan: of two models, the second is the one that saves."""
    ways = {run.way for run in plan.runs}
    if model is not None and not ways:
        raise CkptError("the plan needs no model: it says all that is to be done", hint="leave --model out")
    found = {LOADED: model, SAVED: to_model if LOADED in ways else model}
    return {way: operand.run for way, operand in found.items() if way in ways and operand is not None}


def _request(
    source: Checkpoint, options: RemapOptions, model: ModelOperand | None
) -> tuple[RemapRequest, OptimizerRequest]:
    """What is asked of the model's section, and of the optimizers."""
    steps = _rule_steps(options)
    names, to_model, form = None if model is None else model.names(), _to_operand(options, model), options.form
    to_names = None if to_model is None else to_model.names()
    asked = RemapRequest(
        names=names,
        to=form,
        source_form=options.source_form,
        like=_like(options, model),
        rule_steps=steps,
        select=options.select,
        keep_prefix=options.keep_prefix,
        trainable_only=options.trainable_only,
        sections=options.sections,
    )
    renaming = _renaming(steps) if steps else ()
    called = form.names if isinstance(form, ModelForm) and not options.to_ranks else None
    called = None if form is ModelForm.PRETRAINED else called
    beside, old_model = saved_state_dicts(source), _by_old_model(source, options)
    out = options.target(source.source)
    return asked, OptimizerRequest(
        options.optimizer_keys, names, to_names, renaming, called, beside=beside, old_model=old_model, output=out
    )


def _renaming(steps: tuple[RuleStep, ...]) -> tuple[Renaming, ...]:
    from ckpttool.rules.steps import Renames

    return (Renames(steps),)


def _by_old_model(source: Checkpoint, options: RemapOptions) -> str | None:
    """The same command with the model named that saved the checkpoint; None where the options name another model."""
    model, made = options.model, options.optimizer
    if not isinstance(model, str) or options.to_model is not None or options.to_optimizer is not None:
        return None
    new = ModelOperand(model, options.model_kwargs, options.materialize).words_of("--to-model")
    optimizers = ["--optimizer", str(made), "--to-optimizer", str(made)] if made is not None else []
    keys = [] if options.optimizer_keys is None else ["--optimizer-keys", options.optimizer_keys]
    rules = [word for rule in options.rule or () for word in ("--rule", rule)]
    rules += [] if options.rules is None else ["--rules", options.rules]
    rules += [word for size in options.size or () for word in ("--size", size)]
    rules += ["--reverse"] if options.reverse else []
    out = ["--in-place"] if options.in_place else ["-o", options.out or "OUT"]
    return shell("ckpttool", "remap", source.source, "--model", "OLD", *new, *optimizers, *keys, *rules, *out)


def _rule_steps(options: RemapOptions) -> tuple[RuleStep, ...]:
    """The rules of the file and of the command line: a rename means the same in both."""
    rules = tuple(parse(text, reverse=options.reverse) for text in options.rule or ())
    if options.rules is None:
        if not rules:
            return ()
        from ckpttool.rules.steps import Rename, Where

        return (Rename(Where("--rule"), rules),)
    from ckpttool.rules.parse import read
    from ckpttool.rules.tensor_ops import given_sizes

    return read(options.rules, reverse=options.reverse, rules=rules, sizes=given_sizes(options.size or ()))


def _is_about_optimizers(source: Checkpoint, options: RemapOptions, wanted: OptimizerRequest) -> bool:
    """Whether the model is named for its optimizer's sake only, and its own keys are to stay as they are."""
    has_model = bool(source.state_dicts)
    about_keys = (options.to, options.from_, options.like, options.to_model if has_model else None, options.select)
    return wanted.changes and not options.trainable_only and all(option is None for option in about_keys)


def fitted(done: Remap, target: Target, options: RemapOptions, model: ModelOperand | None) -> Checkpoint:
    """What was made as the output can hold it. Raises `Refused`, all problems at once, where it cannot."""
    loads = _to_operand(options, model) or model
    own = isinstance(options.form, ModelForm) and options.form.names != SERIALIZED  # goes through no loading of a model
    if loads is not None and not own and loses_versions(done.result, target.format):
        _check_versions(loads, f"{target.format.title} has", "choose an output that ends in .pt")
    return fit(done.result, target.format, keep_aliases=options.keep_aliases)


def _write(
    source: Checkpoint,
    options: RemapOptions,
    writer: Writer,
    target: Target,
    done: Remap,
    model: ModelOperand | None,
) -> Remap:
    """Writes the output, unless it is a dry run; what was made, with notes on what the output does not hold."""
    output = fitted(done, target, options, model)
    notes = (*done.notes, *losses(done.result, target.format))
    if options.max_shard_size is not None and not target.format.name.startswith("sharded"):
        notes = (*notes, f"--max-shard-size changes nothing: {target.path} has no shards (OUT/ is a folder of them)")
    beside = _companions(source, options, target, done, model)
    notes = (*notes, *beside.notes)
    done = replace(done, result=output, notes=notes, companions=beside if str(beside) else None)

    if options.dry_run:
        files, copies = _laid_out(options, target, output, beside), options.link == "copy" and not options.in_place
        edited = _edited(options, writer, target, output, beside)
        return _with_undo(replace(done, cost=cost_of(files, copies)), edited, writer, target, files)
    expected = fingerprints(output) if options.verify and options.in_place else output
    written = _edited(options, writer, target, output, beside)
    files = _laid_out(options, target, output, beside) if written is None or written.way == "copied" else {}
    done = _with_undo(done, written, writer, target, files)
    if files:
        writer.target(target, files, _of_values(done))
    if options.verify:
        done = replace(done, verified=writer.prove(target.path, expected))
    if written is not None and written.way == "edited" and done.plan.dropped:
        kept = "the file still holds the bytes of what was left out, until --in-place --compact --no-undo"
        notes = (*notes, Info(kept))
    return replace(done, notes=notes)


def _with_undo(done: Remap, written: Written | None, writer: Writer, target: Target, files: Files) -> Remap:
    """With how the source is `written` in place, if it is, and how that is taken back; `files` replace others."""
    if written is None:
        return done
    kept = written.kept if written.way == "edited" else writer.replaced(target, files)
    changes = written.way == "copied" or written.nbytes
    return replace(done, written=written, undo=undo_of(target.path, kept) if writer.keep and changes else None)


def _laid_out(options: RemapOptions, target: Target, output: Checkpoint, beside: Companions) -> Files:
    """The files of the output. Raises `Refused` if they would run code when they are loaded, unless that is asked for.

    What is laid out inside of a program is written later, so all that the program imports counts.
    """
    with dangerous_written() as names:
        files = target.lay_out(output, _shard_size(options), beside.files)
    names |= copied(output, files)
    if target.format.name == "pt2":
        names |= {one.name for one in dangerous(output.imports)}
    if not options.keep_pickled_code:
        check_code(output, names)
    return files


def _companions(
    source: Checkpoint, options: RemapOptions, target: Target, done: Remap, model: ModelOperand | None
) -> Companions:
    """What becomes of the files next to the weights."""
    old, new = (
        None if operand is None else [tensor.canonical for tensor in operand.names().runtime]
        for operand in (model, _to_operand(options, model) if options.to_model is not None else None)
    )
    return companions_of(
        source, done.plan, target, (old, new), options.form is ModelForm.PRETRAINED, done.result.beside
    )


def _check_versions(model: ModelOperand, target: str, hint: str) -> None:
    """Raises `Refused` where `model`, which is to load the output, asks for versions, which `target` cannot hold."""
    versions = model.names().versions
    if versions is None:
        return
    raise Refused(
        f"{model.title} loads other values where module versions (_metadata) are absent, and {target} no place for "
        "them",
        hint=hint,
        problems=[Problem("saved with a version", path or "(root)") for path in versions],
    )


def _of_values(done: Remap) -> Decided | None:
    """What decides the values; None where a model's own code does."""
    return None if done.plan.runs else done.plan.to_json


def undone(ckpt: object, options: RemapOptions) -> Remap:
    """Gives a file or a folder back as it was before the last edit in place; what it holds now, as a remap of nothing.

    Raises `CkptError` where there is no way back.
    """
    if not isinstance(ckpt, str):
        raise CkptError("--undo gives a file back", hint="name the file or the folder")
    undo(ckpt, no_fsync=options.no_fsync)
    return replace(remap_index(open_operand(ckpt)), source=ckpt, output=ckpt, written=Written("undone"))


def _edited(
    options: RemapOptions, writer: Writer, target: Target, fitted: Checkpoint, beside: Companions
) -> Written | None:
    """Changes the source where it lies, if that is asked for and can be; None where it is not."""
    if not options.in_place:
        return None
    if options.copy or options.max_shard_size is not None:
        return Written("copied", reason="asked for")
    with dangerous_written() as names:
        files = target.lay_in_place(fitted)
    if files is not None and not options.keep_pickled_code:
        stays = dangerous(fitted.imports) if target.format.name == "pt2" else ()  # other pickles are all written
        check_code(fitted, names | {one.name for one in stays})
    if files is not None:
        new = {name: content for name, content in beside.files.items() if isinstance(content, bytes)}
        files = {**{name: Edited([Piece(text)], beside.before[name], text) for name, text in new.items()}, **files}
    return writer.edit(target, files, dry_run=options.dry_run)


def _write_ranks(options: RemapOptions, writer: Writer, model: ModelOperand, done: Remap) -> Remap:
    """Cuts what was made into the files of ranks and writes these, unless it is a dry run."""
    from ckpttool.remapping.sharding.shard import scatter

    names, units, world_size = model.names(), options.units or (), options.world_size or 0
    sections = of_one_model(done.result, options.sections, names)
    versions = any(section.modules is not None for section in sections)
    if versions:
        _check_versions(model, "rank files have", "write one torch file: --to serialized -o OUT.pt")
    models = [section.path for section in sections]
    if not options.keep_pickled_code:
        check_code(done.result, {name for _, name in entries_with_code(done.result)})
    ranks = scatter(done.result, models, options.to or "", names, units, world_size)
    if options.out is not None and not options.dry_run:
        done = replace(done, verified=writer.ranks(ranks, options.out, _of_values(done)))
    alike = [section.title for section in done.result.state_dicts if section.path not in models]
    notes: list[str] = [Info(f"not cut: every rank's file holds all of {', '.join(alike)}")] if alike else []
    notes += ["the module versions in _metadata are left out: FSDP1 has others, by what it wraps"] if versions else []
    return replace(done, form=options.to, notes=(*done.notes, *notes))


def _like(options: RemapOptions, model: ModelOperand | None) -> Section | None:
    if options.like is None:
        return None
    other = options.like if isinstance(options.like, Checkpoint) else open_operand(options.like)
    return model_section(read_for_model(other, model))
