"""How one model's runtime names and serialized keys relate, as far as the plans between its forms need it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ckpttool import expression as ex
from ckpttool.expression import Expression, Ref
from ckpttool.names import Hook, Names, RuntimeTensor
from ckpttool.naming.wrappers.table import strip, stripped_paths
from ckpttool.values import dataclass

Likeness = tuple[str, "tuple[int, ...] | None"]  # dtype and shape


@dataclass(frozen=True)
class NameTables:
    """The tables of one model's names; each is made when it is first asked for."""

    names: Names

    @cached_property
    def tensors(self) -> dict[str, RuntimeTensor]:
        """FQN -> the tensor."""
        return {tensor.fqn: tensor for tensor in self.names.runtime}

    @cached_property
    def first(self) -> dict[str, str]:
        """FQN -> the first FQN of the same tensor."""
        return {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in self.names.runtime}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """First FQN -> every FQN of that tensor, in runtime order."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, first in self.first.items():
            groups[first].append(fqn)
        return dict(groups)

    @cached_property
    def saved(self) -> dict[str, Expression | None]:
        """Serialized key -> what it is of runtime tensors."""
        return {s.key: s.source for s in self.names.serialized}

    @cached_property
    def hooks(self) -> dict[str, Hook | None]:
        """Serialized key -> the hook that renames or computes it."""
        return {s.key: s.hook for s in self.names.serialized}

    @cached_property
    def keys_of(self) -> dict[str, list[str]]:
        """First FQN -> the serialized keys that are this tensor under another name, or its own."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, source in self.saved.items():
            if isinstance(source, Ref):
                keys[source.key].append(key)
        return dict(keys)

    @cached_property
    def fqn_of(self) -> dict[str, str]:
        """Serialized key -> FQN, for the keys that are a runtime tensor renamed; each FQN has one key at most."""
        pairs = [pair(fqns, self.keys_of.get(first, ())) for first, fqns in self.groups.items()]
        return {key: fqn for group in pairs for fqn, key in group.items()}

    @cached_property
    def forms_agree(self) -> bool:
        """Whether a key that is both a serialized key and an FQN has the same value as both."""
        return all(
            source == Ref(self.first[key])
            for key, source in self.saved.items()
            if source is not None and key in self.first
        )

    def runtime_values(self, present: Iterable[str]) -> dict[str, Expression]:
        """Each FQN as an expression over the serialized keys in `present`; without those that they do not give.

        A key that saving only renames is that tensor; any other is what the model's own loading makes of the keys.
        """
        have = set(present)
        values: dict[str, Expression] = {fqn: Ref(key) for key, fqn in self.fqn_of.items() if key in have}
        known = {self.first[fqn] for fqn in values}
        for loaded in self.names.load:
            first = self.first.get(loaded.fqn)  # loading may make tensors that the model has not before
            if first is None or first in known:
                continue
            if loaded.source is not None and have.issuperset(ex.refs(loaded.source)):
                values[loaded.fqn] = loaded.source
                known.add(first)
        return values

    # What `match` is given: the names of each form, and those that a checkpoint may do without.

    @cached_property
    def serialized_names(self) -> dict[str, str]:
        """Every serialized key with its canonical name: what wrappers added to it is taken out."""
        paths = stripped_paths((tensor.fqn, tensor.canonical) for tensor in self.names.runtime)
        return {key: strip(key, paths) for key in (*self.saved, *self.names.extra_state)}

    @cached_property
    def runtime_names(self) -> dict[str, str]:
        """Every FQN with its canonical name, and the keys that stand for no runtime tensor under their own."""
        found = {tensor.fqn: tensor.canonical for tensor in self.names.runtime}
        for key in (*(key for key, source in self.saved.items() if source is None), *self.names.extra_state):
            found.setdefault(key, key)
        return found

    @cached_property
    def spare_keys(self) -> list[str]:
        """Serialized keys that may be absent: second names of one tensor, and all that is no tensor."""
        count: Counter[Expression] = Counter()
        seconds = []
        for key, source in self.saved.items():
            if source is not None and not ex.is_opaque(source):  # of what cannot be followed nobody knows
                count[source] += 1
                seconds += [key] if count[source] > 1 else []
        return [*seconds, *self.names.extra_state]

    @cached_property
    def spare_fqns(self) -> list[str]:
        """FQNs that may be absent: second names, and all that ``state_dict()`` does not hold as a tensor."""
        spare = [t.fqn for t in self.names.runtime if t.alias_of is not None or not t.persistent]
        made = [key for key, source in self.saved.items() if source is None]
        return [*spare, *made, *self.names.extra_state, *self.names.not_serialized]

    @cached_property
    def serialized_likeness(self) -> Mapping[str, Likeness]:
        """Serialized key -> dtype and shape."""
        return {s.key: (s.dtype, s.shape) for s in self.names.serialized}

    @cached_property
    def runtime_likeness(self) -> Mapping[str, Likeness]:
        """FQN -> dtype and shape."""
        return {t.fqn: (t.dtype, t.shape) for t in self.names.runtime}


def pair(fqns: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Which is which among the names of one tensor on two sides: equal names first, the rest in order."""
    own = set(keys)
    pairs = {fqn: fqn for fqn in fqns if fqn in own}
    rest = [fqn for fqn in fqns if fqn not in pairs]
    pairs.update(zip(rest, [key for key in keys if key not in pairs]))
    return pairs
