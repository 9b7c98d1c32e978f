"""``ckpttool remap``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ckpttool.cli.operands import Materialize, Model, ModelKwargs, Optimizer, load_names, read_json
from ckpttool.cli.output import Format, Reports, emit, write_report
from ckpttool.cli.ranks import Units, WorldSize, put_together, write_ranks
from ckpttool.cli.ranks import check as check_ranks
from ckpttool.cli.writing import DryRun, Force, HowLinked, NoFsync, Out, Verify, check_target, prove, write_target
from ckpttool.convert import check_in_place, fit, losses
from ckpttool.errors import CkptError
from ckpttool.formats.shards import parse_size
from ckpttool.gather_optimizer import with_gathered_optimizers
from ckpttool.naming.chain import parse as parse_chain
from ckpttool.naming.forms import SERIALIZED
from ckpttool.naming.names import Names
from ckpttool.naming.optimizer import FORMS as KEYS
from ckpttool.operand import model_section, open_operand, split
from ckpttool.plan import Plan
from ckpttool.remap import FORMS, Way, by_plan, remap, to_json, with_optimizers
from ckpttool.remap_optimizer import Wanted
from ckpttool.rules import parse
from ckpttool.rules_file import read as read_rules
from ckpttool.scatter import FORM as FSDP_FLAT
from ckpttool.scatter import scatter
from ckpttool.steps import Renames
from ckpttool.target import target_for
from ckpttool.values import fingerprints

NO_OPTIMIZERS = "a plan holds no changes of optimizers"


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
        str | None, typer.Option("--save-plan", metavar="FILE", help="Write the plan as JSON.")
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
    from ckpttool.report.remap import document

    out = _output(ckpt, out, in_place, dry_run or save_plan is not None)
    _check(model, to, was, [*(rule or ()), *([rules_file] if rules_file else ())], plan, reverse)
    _check_narrowing(model, select, keep_prefix, trainable_only, plan)
    _check_like(like, to)
    _check_optimizers(model, optimizer, to_optimizer, optimizer_keys, plan or save_plan)
    check_ranks(to, model, world_size, units, out)
    source = open_operand(ckpt)
    shard_size = None if max_shard_size is None else parse_size(max_shard_size)
    target = None if out is None else target_for(out, source, shard_size)
    if in_place and target is not None:
        check_in_place(source, target.format)
    if target is not None and not dry_run:
        check_target(target, split(ckpt)[0], force=force, in_place=in_place)
    names = None
    if plan is not None:
        done = by_plan(source, Plan.from_json(read_json(plan, "write one with --save-plan"), plan))
    else:
        names = None if model is None else load_names(model, model_kwargs, materialize, optimizer)
        gathered = put_together(source, names, units, to, save_plan is not None)
        rules = tuple(parse(text, reverse=reverse) for text in rule or ())
        steps = () if rules_file is None else read_rules(rules_file, reverse=reverse, rules=rules)
        to_names = _to_names(model, to_model, to_optimizer, model_kwargs, materialize)
        wanted = Wanted(optimizer_keys, names, to_names, (Renames(steps),) if steps else rules, FORMS.get(to or ""))
        asked = (to, was, like, to_model, select, gathered)
        alone = all(one is None for one in asked) and not trainable_only and wanted.changes
        section = None if like is None else model_section(open_operand(like))
        form = SERIALIZED if to == FSDP_FLAT else to
        way = Way(None if alone else names, form, was, to_names if to_model is not None else None, section)
        way = replace(way, rules=() if steps else rules, steps=steps)
        way = replace(way, select=select, keep_prefix=keep_prefix, trainable_only=trainable_only)
        done = remap(source if gathered is None else gathered.checkpoint, way, drop or ())
        if gathered is not None and names is not None:
            done = with_gathered_optimizers(done, gathered, names)
        done = with_optimizers(done, wanted)
        if save_plan is not None and done.optimizers:
            raise CkptError(NO_OPTIMIZERS, hint="write them to OUT, or take the model alone: CKPT::model")
    if to == FSDP_FLAT and names is not None:
        ranks = scatter(done.result, names, units or (), world_size or 0)
        if out is not None and not dry_run:
            write_ranks(ranks, out, force=force, fsync=not no_fsync, verify=verify)
        done = replace(done, to=to, notes=(*source.notes, *done.notes))
    elif target is not None:
        fitted = fit(done.result, target.format, keep_aliases=keep_aliases)
        done = replace(done, notes=(*source.notes, *done.notes, *losses(done.result, target.format)))
        content = target.lay_out(fitted, shard_size)
        if not dry_run:
            expected = fingerprints(fitted) if verify and in_place else fitted
            write_target(target, content, fsync=not no_fsync, link=link)
            if verify:
                prove(str(out), expected)
    data = {**to_json(done, ckpt, out or ""), **({"plan": done.plan.to_json()} if dry_run else {})}
    if save_plan is not None:
        from ckpttool.report import json

        write_report(save_plan, json.render(done.plan.to_json()))
    shown = partial(document, done, ckpt, out, dry_run=dry_run, verified=verify)
    emit(shown, lambda: data, format, report)


def _check_narrowing(
    model: str | None, select: str | None, keep_prefix: bool, trainable_only: bool, plan: str | None
) -> None:
    if keep_prefix and select is None:
        raise CkptError("--keep-prefix without --select", hint="--select PREFIX names the submodule")
    if trainable_only and model is None:
        raise CkptError("--trainable-only asks the model which parameters are frozen", hint="pass --model MODEL")
    if plan is not None and (select is not None or trainable_only):
        raise CkptError("--plan stands alone: it says all that is to be done", hint="leave --select and the like out")


def _check_like(like: str | None, to: str | None) -> None:
    if like is not None and to is not None:
        raise CkptError("--like and --to both say which names OUT gets", hint="leave one of them out")


def _to_names(
    model: str | None, to_model: str | None, to_optimizer: str | None, kwargs: str, materialize: bool
) -> Names | None:
    """The names of what is to load the output: another model, or another optimizer of the same."""
    target = to_model or model
    if target is None or (to_model is None and to_optimizer is None):
        return None
    return load_names(target, kwargs if to_model is None else "{}", materialize, to_optimizer)


def _check_optimizers(
    model: str | None, optimizer: str | None, to_optimizer: str | None, keys: str | None, plan: str | None
) -> None:
    if keys is not None and keys not in KEYS:
        raise CkptError(f"--optimizer-keys {keys}: no such form", hint=f"the forms are {', '.join(KEYS)}")
    for option, given in (("--optimizer", optimizer), ("--to-optimizer", to_optimizer)):
        if given is not None and model is None:
            raise CkptError(f"{option} is called with a model", hint="pass --model MODEL too")
    if plan is not None and (keys is not None or to_optimizer is not None):
        raise CkptError(NO_OPTIMIZERS, hint="write them to OUT: leave the plan out")


def _output(ckpt: str, out: str | None, in_place: bool, optional: bool) -> str | None:
    if in_place and out is not None:
        raise CkptError("--in-place and -o OUT exclude each other", hint="choose one")
    if in_place:
        if split(ckpt)[1] is not None:
            raise CkptError(
                "--in-place would leave only one section of the file", hint="name the file without ::SECTION"
            )
        return ckpt
    if out is None and not optional:
        raise CkptError("no output named", hint="-o OUT, --in-place, or --dry-run to see the plan")
    return out


def _check(
    model: str | None, to: str | None, was: str | None, rule: Sequence[str] | None, plan: str | None, reverse: bool
) -> None:
    """Options that do not go together, or name a form that is none."""
    if to is not None and to not in (*FORMS, FSDP_FLAT):
        parse_chain(to)
    if was is not None and was not in FORMS:
        parse_chain(was)
    for option, form in (("--to", to), ("--from", was)):
        if form is not None and form in FORMS and form != SERIALIZED and model is None:
            raise CkptError(f"{option} {form} needs the model's names", hint="pass --model MODEL")
    if plan is not None and (model is not None or rule):
        raise CkptError("--plan stands alone: it says all that is to be done", hint="leave --model and the rules out")
    if reverse and not rule:
        raise CkptError(
            "--reverse without --rule or --rules", hint="--to runtime and --to serialized are each other's reverse"
        )
