"""The plan of a load: what a model gets from keys that it loads, and does not save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.expression import Expression, Ref, is_opaque, refs, without_cast
from ckpttool.core.plan import Dropped, Output, Plan, compose, module_renames
from ckpttool.core.tables import positions
from ckpttool.core.text import plural, shell
from ckpttool.distributed.job import current
from ckpttool.evaluate.apply import apply
from ckpttool.evaluate.compare import same_values
from ckpttool.naming import wrappers
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import NameTables
from ckpttool.operands.model import ModelOperand

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict

# the form of keys that a model loads, and does not save: as a load hook reads them
LOAD_HOOK = "load-hook"


def by_loading(model: ModelOperand, section: Section) -> Plan | None:
    """Return the plan from keys that the model loads, and does not save, to its runtime names.

    Load hooks accept the keys of earlier versions of a model. The result is None if the keys
    are the model's own, and if a strict load fails (except for second names of tied weights).
    Raise `Refused` if the load succeeds and does not use some of the keys, or depends on
    values.
    """
    if not model.is_definition or model.pretrained:
        return None
    if not read_keys(model.tables, section).match.unmatched:
        return None
    job = current()
    if job is None:
        return _plan_of(model, section)
    import hashlib  # loads OpenSSL

    entries = [(entry.key, entry.dtype, entry.shape) for entry in section.tensors]
    text = repr([model.model, model.materialize, section.path, entries])
    digest = hashlib.sha256(text.encode()).hexdigest()

    def ask() -> dict[str, Any] | None:
        plan = _plan_of(model, section)
        return None if plan is None else plan.to_json()

    plan = job.of_first(f"loads {digest}", ask)
    return None if plan is None else Plan.from_json(plan)


def _plan_of(model: ModelOperand, section: Section) -> Plan | None:
    path, unwrapped = section.path, _unwrapped(section)
    if unwrapped is None:
        return None
    bare = section
    if not all(output.is_unchanged for output in unwrapped.outputs):
        bare = apply(unwrapped, Checkpoint.of(section)).section(path)
    try:
        verdict = model.verdict(bare)
    except CkptError:
        return None
    needed = set(verdict.missing).difference(model.tables.spare_keys)
    if not verdict.ok and (verdict.errors or verdict.unexpected or needed):
        return None
    keys = list(bare.by_key())
    reads = _reads(model.tables, verdict, keys)
    _check_decided(model, verdict, reads, keys)
    used = set(chain.from_iterable(map(refs, reads.values())))
    twins = _twins(bare, used)
    taken = used.union(twins)
    _check_used(model, [key for key in keys if key not in taken])
    for fqn, value in reads.items():
        if fqn in twins and value == Ref(twins[fqn]):
            reads[fqn] = Ref(fqn)
    dropped = []
    for key, other in twins.items():
        if reads.get(key) != Ref(key):
            dropped.append(Dropped(path, key, f"the model takes it for a copy of {other}"))
    return compose(unwrapped, Plan(_in_order(path, reads, keys), tuple(dropped)))


def _unwrapped(section: Section) -> Plan | None:
    """Return the plan that takes wrappers off the keys; None if two keys become one."""
    canonical = wrappers.canonical_in(section)
    if len(set(canonical.values())) < len(canonical):
        return None
    outputs = [Output(section.path, name, Ref(key)) for key, name in canonical.items()]
    modules = module_renames(section.path, section.modules or (), canonical)
    return Plan(tuple(outputs), modules=modules)


def _reads(tables: NameTables, verdict: Verdict, keys: Iterable[str]) -> dict[str, Expression]:
    """Return what loading gives each runtime tensor, and the entries that are not tensors."""
    reads: dict[str, Expression] = {}
    for fqn, value in verdict.reads.items():
        if value is not None and fqn in tables.first:
            reads[fqn] = without_cast(value)
    present = set(keys)
    for key in tables.runtime_names:
        if key in present and key not in tables.first:
            reads[key] = Ref(key)
    return reads


def _check_decided(
    model: ModelOperand, verdict: Verdict, reads: Mapping[str, Expression], keys: Iterable[str]
) -> None:
    """Raise `Refused` if what loading gives depends on values."""
    depends = verdict.by_values or verdict.doubtful or verdict.special
    if not depends and not any(map(is_opaque, reads.values())):
        return
    problems = []
    for key in keys:
        if key not in model.tables.saved:
            problems.append(Problem("not a key that the model saves", key))
    raise Refused(
        f"{model.title} loads keys that it does not save, and the result depends on their values",
        hint="let it load them, and save that: model.load_state_dict(torch.load(CKPT)); "
        "torch.save(model.state_dict(), OUT)",
        problems=problems,
    )


def _check_used(model: ModelOperand, unused: Sequence[str]) -> None:
    """Raise `Refused` if the load does not use some keys."""
    if not unused:
        return
    words: list[str] = []
    for key in unused:
        words += ["--drop", key]
    line = shell("ckpttool", "remap", "CKPT", *words, "-o", "PART")
    count = plural(len(unused), "key")
    raise Refused(
        f"{model.title} loads the checkpoint and does not use {count} of it",
        hint=f"leave them out: {line}",
        problems=same_problem("not used", unused),
    )


def _in_order(
    path: str, reads: Mapping[str, Expression], keys: Iterable[str]
) -> tuple[Output, ...]:
    """Return the outputs in the order of the first key that each is made of."""
    place = positions(keys)

    def first_place(output: Output) -> int:
        places = [place[key] for key in refs(output.source)]
        return min(places, default=len(place))

    outputs = [Output(path, fqn, value) for fqn, value in reads.items()]
    return tuple(sorted(outputs, key=first_place))


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
