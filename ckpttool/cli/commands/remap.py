"""``ckpttool remap``."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Annotated

import typer

from ckpttool.checkpoint import Checkpoint
from ckpttool.cli.commands.remap_options import NO_OPTIMIZERS, Asked
from ckpttool.cli.options import Materialize, Model, ModelKwargs, Optimizer
from ckpttool.cli.output import Force, Format, Reports, check_new, check_texts, emit, write_text
from ckpttool.cli.ranks import Units, WorldSize, put_together, write_ranks
from ckpttool.cli.ranks import check as check_ranks
from ckpttool.cli.writing import DryRun, HowLinked, NoFsync, Out, Verify, check_target, prove, write_target
from ckpttool.cli.writing import Wanted as HowWritten
from ckpttool.edits.remap.optimizer import Wanted
from ckpttool.edits.remap.plan import FORMS, Remap, Way, by_plan, remap, to_json, with_optimizers
from ckpttool.edits.rules.patterns import Rule, parse
from ckpttool.edits.rules.steps import Renames, Step
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats.fit import check_in_place, fit, losses
from ckpttool.formats.huggingface.plan_shards import parse_size
from ckpttool.names import FSDP_FLAT, SERIALIZED, Names
from ckpttool.operands.checkpoint import model_section, open_operand, split
from ckpttool.operands.model import ModelOperand, parse_kwargs, read_json
from ckpttool.operands.output import Target, target_for
from ckpttool.optimizer_state import FORMS as KEYS
from ckpttool.plan import Plan


def command(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="The checkpoint to read; CKPT::SECTION takes one section.")
    ],
    out: Out = None,
    model: Model = None,
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    to: Annotated[str | None, typer.Option("--to", metavar="FORM", help=f"{', '.join(FORMS)}.")] = None,
    was: Annotated[str | None, typer.Option("--from", metavar="FORM", help="Default: recognised.")] = None,
    select: Annotated[
        str | None, typer.Option("--select", metavar="PREFIX", help="One submodule, under its own names.")
    ] = None,
    keep_prefix: Annotated[bool, typer.Option("--keep-prefix", help="--select keeps the names as they are.")] = False,
    trainable_only: Annotated[bool, typer.Option("--trainable-only", help="Leave frozen parameters out.")] = False,
    rule: Annotated[list[str] | None, typer.Option("--rule", metavar="RULE", help="'FROM => TO'. Repeatable.")] = None,
    rules_file: Annotated[
        str | None, typer.Option("--rules", metavar="FILE", help="Rules in a TOML file; they also split, join, ...")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Apply the rules from TO to FROM.")] = False,
    drop: Annotated[list[str] | None, typer.Option("--drop", metavar="PATTERN", help="Leave out. Repeatable.")] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="CKPT", help="Take over that checkpoint's form.")
    ] = None,
    to_model: Annotated[
        str | None, typer.Option("--to-model", metavar="MODEL", help="The model that is to load OUT.")
    ] = None,
    optimizer: Optimizer = None,
    to_optimizer: Annotated[
        str | None, typer.Option("--to-optimizer", metavar="OPTIMIZER", help="The optimizer that is to load OUT.")
    ] = None,
    optimizer_keys: Annotated[
        str | None,
        typer.Option("--optimizer-keys", metavar="|".join(KEYS), help="How optimizers call their parameters."),
    ] = None,
    plan: Annotated[str | None, typer.Option("--plan", metavar="FILE", help="Carry out a saved plan.")] = None,
    save_plan: Annotated[
        str | None,
        typer.Option("--save-plan", metavar="FILE", callback=check_new, help="Write the plan as JSON."),
    ] = None,
    keep_aliases: Annotated[
        bool, typer.Option("--keep-aliases", help="To safetensors: keep one name of a tensor, record the others.")
    ] = False,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Shard afresh, as in 5GB.")
    ] = None,
    units: Units = None,
    world_size: WorldSize = None,
    link: HowLinked = "copy",
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace CKPT itself, atomically.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    no_fsync: NoFsync = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """Rewrite the keys, optimizer ids and format of a checkpoint.

    The ending of OUT decides the format; a folder becomes what CKPT is, or sharded safetensors. What would lose,
    collide or have to be guessed is refused, and nothing is written.
    """
    from ckpttool.report.documents.remap import document

    given = locals()
    asked = Asked(**{field.name: given[field.name] for field in fields(Asked)})
    asked.check()
    check_ranks(to, model, world_size, units, asked.target)
    source = open_operand(ckpt)
    target = _checked_target(asked, source)
    names = None if model is None else ModelOperand(model, parse_kwargs(model_kwargs), materialize, optimizer).names()
    done = _made(asked, source, names)
    check_texts((save_plan, *(report or ())), asked.target)
    if to == FSDP_FLAT and names is not None:
        done = _write_ranks(asked, source, names, done)
    elif target is not None:
        done = _write(asked, source, target, done)
    data = {**to_json(done, ckpt, asked.target or ""), **({"plan": done.plan.to_json()} if dry_run else {})}
    if save_plan is not None:
        from ckpttool.report.renderers import json

        write_text(save_plan, json.render(done.plan.to_json()), force=force)
    shown = partial(document, done, ckpt, asked.target, dry_run=dry_run, verified=verify)
    emit(shown, lambda: data, format, report, force=force)


def _checked_target(asked: Asked, source: Checkpoint) -> Target | None:
    """Where the output goes, after all checks that need no work yet; None where it is the ranks' files, or nothing."""
    if asked.target is None or asked.to == FSDP_FLAT:
        return None
    target = target_for(asked.target, source, _shard_size(asked))
    if asked.in_place:
        check_in_place(source, target.format)
    if not asked.dry_run:
        check_target(target, split(asked.ckpt)[0], force=asked.force, in_place=asked.in_place)
    return target


def _shard_size(asked: Asked) -> int | None:
    return None if asked.max_shard_size is None else parse_size(asked.max_shard_size)


def _made(asked: Asked, source: Checkpoint, names: Names | None) -> Remap:
    """What is to be written: a saved plan carried out, or the one that the options ask for."""
    if asked.plan is not None:
        return by_plan(source, Plan.from_json(read_json(asked.plan, "write one with --save-plan"), asked.plan))
    gathered = put_together(source, names, asked.units, asked.to, asked.save_plan is not None)
    rules = tuple(parse(text, reverse=asked.reverse) for text in asked.rule or ())
    steps = _steps(asked, rules)
    to_names = _to_names(asked)
    renaming = (Renames(steps),) if steps else rules
    wanted = Wanted(asked.optimizer_keys, names, to_names, renaming, FORMS.get(asked.to or ""))
    way = Way(
        names=None if gathered is None and _is_about_optimizers(asked, wanted) else names,
        to=SERIALIZED if asked.to == FSDP_FLAT else asked.to,
        was=asked.was,
        to_names=to_names if asked.to_model is not None else None,
        like=None if asked.like is None else model_section(open_operand(asked.like)),
        rules=() if steps else rules,
        steps=steps,
        select=asked.select,
        keep_prefix=asked.keep_prefix,
        trainable_only=asked.trainable_only,
    )
    done = remap(source if gathered is None else gathered.checkpoint, way, asked.drop or ())
    if gathered is not None and names is not None:
        from ckpttool.edits.ranks.gather_optimizer import with_gathered_optimizers

        done = with_gathered_optimizers(done, gathered, names)
    done = with_optimizers(done, wanted)
    if asked.save_plan is not None and done.optimizers:
        raise CkptError(NO_OPTIMIZERS, hint="write them to OUT, or take the model alone: CKPT::model")
    return done


def _steps(asked: Asked, rules: tuple[Rule, ...]) -> tuple[Step, ...]:
    """The steps of the file of rules, with those of the command line; none where there is no file."""
    if asked.rules_file is None:
        return ()
    from ckpttool.edits.rules.file import read

    return read(asked.rules_file, reverse=asked.reverse, rules=rules)


def _is_about_optimizers(asked: Asked, wanted: Wanted) -> bool:
    """Whether the model is named for its optimizer's sake only, and its own keys are to stay as they are."""
    about_keys = (asked.to, asked.was, asked.like, asked.to_model, asked.select)
    return wanted.changes and not asked.trainable_only and all(option is None for option in about_keys)


def _to_names(asked: Asked) -> Names | None:
    """The names of what is to load the output: another model, or another optimizer of the same."""
    target = asked.to_model or asked.model
    if target is None or (asked.to_model is None and asked.to_optimizer is None):
        return None
    kwargs = parse_kwargs(asked.model_kwargs) if asked.to_model is None else {}
    return ModelOperand(target, kwargs, asked.materialize, asked.to_optimizer).names()


def _write(asked: Asked, source: Checkpoint, target: Target, done: Remap) -> Remap:
    """Writes the output, unless it is a dry run; what was made, with notes on what the output does not hold."""
    fitted = fit(done.result, target.format, keep_aliases=asked.keep_aliases)
    content = target.lay_out(fitted, _shard_size(asked))
    if not asked.dry_run:
        expected = fingerprints(fitted) if asked.verify and asked.in_place else fitted
        write_target(target, content, _how(asked))
        if asked.verify:
            prove(target.path, expected)
    return replace(done, notes=(*source.notes, *done.notes, *losses(done.result, target.format)))


def _how(asked: Asked) -> HowWritten:
    path, _ = split(asked.ckpt)
    return HowWritten(path, asked.force, asked.in_place, not asked.no_fsync, asked.verify, asked.link)


def _write_ranks(asked: Asked, source: Checkpoint, names: Names, done: Remap) -> Remap:
    """Cuts what was made into the files of ranks and writes these, unless it is a dry run."""
    from ckpttool.edits.ranks.scatter import scatter

    ranks = scatter(done.result, names, asked.units or (), asked.world_size or 0)
    if asked.target is not None and not asked.dry_run:
        write_ranks(ranks, asked.target, _how(asked))
    return replace(done, to=asked.to, notes=(*source.notes, *done.notes))
