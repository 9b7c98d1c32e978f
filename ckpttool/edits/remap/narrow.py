"""Narrows a plan: to one submodule, or to what is trained. What is left out is dropped with its reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckpttool import expression as ex
from ckpttool.errors import Refused
from ckpttool.names import RUNTIME
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.wrappers.table import strip
from ckpttool.plan import Dropped, Output, Plan


def trained(plan: Plan, tables: NameTables, form: str) -> Plan:
    """The plan without what is made of frozen parameters only, as torch's ``ignore_frozen_params``; buffers stay.

    `form` says which names the plan's keys are: ``serialized`` or ``runtime``.
    """
    frozen = {t.fqn for t in tables.names.runtime if t.kind == "parameter" and not t.trainable}

    def is_trained(output: Output) -> bool:
        source = None if form == RUNTIME else tables.saved.get(output.key)
        made_of = {output.key} if source is None else set(ex.refs(source))
        return not made_of <= frozen

    return _only(plan, [output for output in plan.outputs if is_trained(output)], "the parameter is frozen")


def select(plan: Plan, paths: Collection[str], prefix: str) -> tuple[Plan, dict[str, str]]:
    """The plan of the submodule `prefix` alone, under the names that it has; and key -> the submodule's own name.

    `prefix` leaves out the segments of wrappers, which stand at `paths`, or has them all. The wrappers around parts of
    the submodule, and around itself, are in its own names. Raises `Refused` where nothing is below `prefix`.
    """
    keys = [output.key for output in plan.outputs]
    own = {key: rest for key in keys if (rest := _below(key, paths, prefix))}
    own = own or {key: key.removeprefix(prefix + ".") for key in keys if key.startswith(prefix + ".")}
    if not own:
        heads = dict.fromkeys(strip(key, paths).partition(".")[0] for key in keys)
        raise Refused(
            f"no key is below {prefix!r}",
            hint=f"--select takes the dotted path of a submodule; there are {', '.join(list(heads)[:8])}",
        )
    return _only(plan, [output for output in plan.outputs if output.key in own], f"not below {prefix}"), own


def _below(key: str, paths: Collection[str], prefix: str) -> str:
    """What follows `prefix` in the key; empty where the key is not below it."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if strip(".".join(parts[:depth]), paths) == prefix:
            return ".".join(parts[depth:])
    return ""


def _only(plan: Plan, outputs: list[Output], reason: str) -> Plan:
    """The plan with these of its outputs; sources that no other output reads are dropped."""
    used = {(output.section, key) for output in outputs for key in ex.refs(output.source)}
    gone = dict.fromkeys((output.section, key) for output in plan.outputs for key in ex.refs(output.source))
    dropped = tuple(Dropped(*place, reason) for place in gone if place not in used)
    return replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))
