"""What a file itself shows of the order in which the model that saved it registers its parameters.

An optimizer numbers parameters in the order of ``model.parameters()``, or of what its own code makes of it; and
``state_dict()`` writes keys in the order of registration. So a state dict beside ids tells whether the model that is
named registers its parameters as the one did that saved the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ckpttool import expression as ex
from ckpttool.checkpoint import Section
from ckpttool.errors import Problem
from ckpttool.names import SERIALIZED, Names
from ckpttool.naming.forms import read
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.naming.wrappers.chain import canonical_keys
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class SavedOrder:
    """The parameters that a state dict and the model both have: as the file lists them, and as the model does."""

    file: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def differing(self) -> tuple[Problem, ...]:
        """Each parameter of the model in whose place the file has another."""
        pairs = zip(self.model, self.file)
        return tuple(Problem(f"the file's model has {other} in its place", own) for own, other in pairs if own != other)


def saved_order(sections: Iterable[Section], names: Names, params: Collection[str]) -> SavedOrder | None:
    """The order of the canonical names `params` in the state dicts of a file; None where these show none.

    `sections` are state dicts whose keys stand as ``state_dict()`` gave them. One that lists the parameters otherwise
    than the model speaks against it, whatever others say; one that lacks some of them cannot speak for it.
    """
    orders = [_order(section, names, params) for section in sections]
    against = [order for order in orders if order.file != order.model]
    complete = [order for order in orders if len(order.file) == len(params) and params]
    return next(iter((*against, *complete)), None)


def _order(section: Section, names: Names, params: Collection[str]) -> SavedOrder:
    tables, canonical = NameTables(names), Parameters(names).canonical
    reading = read(tables, section)
    of_name: dict[str, tuple[str, ...]] = {fqn: (fqn,) for fqn in tables.tensors}
    if reading.form == SERIALIZED:
        of_name = {key: () if source is None else tuple(ex.refs(source)) for key, source in tables.saved.items()}
    name_of = reading.match.names
    file = [fqn for entry in section.tensors for fqn in of_name.get(name_of.get(entry.key, ""), ())]
    own = [fqn for fqns in of_name.values() for fqn in fqns]

    def parameters(fqns: Sequence[str]) -> list[str]:
        reached = dict.fromkeys(canonical[fqn] for fqn in fqns if fqn in canonical)
        return [name for name in reached if name in params]

    here = parameters(file)
    return SavedOrder(tuple(here), tuple(name for name in parameters(own) if name in set(here)))


def in_order_of(section: Section, names: Names, called: Callable[[str], str] | None = None) -> Section:
    """The state dict with its keys as the model's own ``state_dict()`` has them; what it has not stands behind.

    `called` says what each of the model's names has become, where they are others by now.
    """
    tables = NameTables(names)
    if called is None:
        reading = read(tables, section)
        name_of = reading.match.names
        order: Iterable[str] = tables.serialized_names if reading.form == SERIALIZED else tables.runtime_names
    else:
        name_of = canonical_keys(section.keys)
        forms = [list(map(called, own)) for own in (tables.serialized_names, tables.runtime_names)]
        order = max(forms, key=lambda own: len({*own} & {*name_of.values()}))
    rank = {name: place for place, name in enumerate(order)}
    places = [rank.get(name_of.get(entry.key, ""), len(rank)) for entry in section.tensors]
    ordered = sorted(zip(places, section.tensors), key=lambda pair: pair[0])
    return replace(section, tensors=tuple(entry for _, entry in ordered))


def same_key_order(left: Iterable[Section], right: Iterable[Section]) -> bool | None:
    """Whether two files list the keys of their models in one order; None where they have none in common."""
    theirs = [[entry.key for entry in section.tensors] for section in right]
    found = None
    for section in left:
        mine = [entry.key for entry in section.tensors]
        for keys in theirs:
            common = set(mine) & set(keys)
            if len(common) > 1:
                found = [key for key in mine if key in common] == [key for key in keys if key in common]
                if not found:
                    return False
    return found
