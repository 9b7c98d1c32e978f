"""Pair tensors by evidence, the strongest first. Ambiguous matches are left alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import permutations, product
from math import prod
from typing import NamedTuple

from ckpttool.core.expression import Op, Ref
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_key
from ckpttool.core.text import Info
from ckpttool.core.values import many_objects
from ckpttool.naming.evidence import (
    SAME_NAME,
    Ambiguous,
    Digest,
    Inference,
    Outlined,
    Pair,
    SideTensors,
)
from ckpttool.naming.modules import Modules, Paths, Prefixes, best_tree, common_trees
from ckpttool.naming.order import Order
from ckpttool.naming.shapes import fit, straight, transposed
from ckpttool.naming.templates import Group, Template, groups, keys_of, shown, template
from ckpttool.naming.vocabulary import (
    FUSED,
    HEAD,
    KINDS,
    certain_part,
    inserted,
    is_fused,
    kind_of,
    part_of,
)

_DEPTHS = (3, 2, 1, 0)  # layer numbers that are generalized: models have up to three
# The budget of an inference: a comparison of two groups costs `_COST`, a step 1 for each tensor
# that is left. Real models need far less; thousands of tensors of one shape under unrelated names
# would take hours, and find nothing.
_COST = 8
_MOST = 5_000_000
_MOST_EACH = 20  # more for each tensor
_SAME_VALUES = "the same values"


class BudgetExceeded(Exception):
    """The search costs too much."""


class Way(NamedTuple):
    """Pair two groups with tensors of one shape in the same layers if they, and no others, share a
    key.

    `keys` gives the keys of a group of the left (side 0) or right (1). Only groups with the same
    `label`, which their names tell, are compared. `names`: as `keys`, of groups without any layer
    number; groups are compared only if such groups share one. `weak`: no name confirms the pair, so
    nothing in the names may contradict it. `sure`: pair them even if the modules above contradict.
    """

    keys: Callable[[Group, int], Iterable[Hashable]]
    evidence: Callable[[Group, Group], str]
    label: Callable[[Group], Hashable] = lambda group: kind_of(group.path)
    names: Callable[[Group, int], Iterable[Hashable]] | None = None
    weak: bool = False
    sure: bool = False


def _one_longer(group: Group, side: int) -> set[Hashable]:
    """Return keys that two names share if they differ in one segment that only the longer name
    has.
    """
    name = group.template
    keys: set[Hashable] = {(side, name)}
    for depth, segment in enumerate(name):
        if segment:
            keys.add((1 - side, name[:depth] + name[depth + 1 :]))
    return keys


def _part_keys(group: Group, side: int) -> list[bool]:
    return [True] if certain_part(group.path) else []


def _shape_keys(group: Group, side: int) -> list[bool]:
    return [True] if group.first.shape not in ((), (1,)) else []


def _kind_keys(group: Group, side: int) -> list[int]:
    """Return keys that two groups of matrices share unless the names of both say the kind of
    tensor: the key of one side only has no counterpart.
    """
    if len(group.first.shape) < 2:
        return []
    return [side] if kind_of(group.path) else [0, 1]


def _shape(left: Group, right: Group) -> str:
    return f"the only ones of shape {list(left.first.shape)}"


# A module that holds another, or a hook that hides it. Other layers may have the shorter name on
# both sides.
BY_NAME = Way(
    _one_longer,
    lambda a, b: Info(
        f"{SAME_NAME} but for the segment `{inserted(a.template, b.template)}`", SAME_NAME.code
    ),
    names=_one_longer,
    sure=True,
)
BY_PART = Way(
    _part_keys,
    lambda a, b: f"both are the {certain_part(a.path)} by name",
    label=lambda group: (kind_of(group.path), certain_part(group.path)),
    names=_part_keys,
)
BY_SHAPE = Way(
    _shape_keys,
    lambda a, b: f"{_shape(a, b)} in each layer" if len(a.members) > 1 else _shape(a, b),
    weak=True,
)
# why tensors that could be each other stay open
INDISTINGUISHABLE = "one shape, and no name or order tells them apart"
ONLY_SHAPES_AGREE = (
    "only their shapes agree: neither names nor order say that they are the same tensor"
)
BY_SHAPE_ALONE = Way(  # if a name does not say the kind of tensor
    _kind_keys,
    _shape,
    label=lambda group: None,
    weak=True,
)


def _dtype_and_kinds(group: Group, side: int) -> list[Hashable]:
    """Return the dtype with the kind of tensor; with every kind, if the name does not say it."""
    kind = kind_of(group.path)
    kinds = [kind] if kind else KINDS
    return [(group.first.dtype, kind) for kind in kinds]


BY_ELIMINATION = Way(  # the last tensor of each side
    _dtype_and_kinds,
    lambda a, b: "the only ones without a partner, of one shape",
    label=lambda group: None,
    weak=True,
)


def infer(
    left: SideTensors, right: SideTensors, same_keys: Mapping[str, str] | None = None
) -> Inference:
    """Pair the two sides' tensors. `same_keys` maps keys of the left to keys of the right that are
    the same tensor.
    """
    turned = transposed(left.tensors), transposed(right.tensors)
    if bool(turned[0]) == bool(turned[1]):  # both sides are, or neither
        turned = frozenset(), frozenset()
    search = _Search(straight(left, turned[0]), straight(right, turned[1]), same_keys or {}, turned)
    by_module = Way(
        search.modules_of_partners,
        lambda a, b: "other tensors of its module are paired",
        names=search.paths_of_partners,
    )
    ways: list[Callable[[], bool]] = [  # the strongest evidence first
        search.by_content,
        search.by_tree,
        partial(search.unique, BY_NAME),
        partial(search.unique, BY_PART),
        partial(search.unique, by_module),
        search.by_fused_parts,
        search.by_relative_parts,
        partial(search.unique, BY_SHAPE),
        search.by_order,
        partial(search.unique, BY_SHAPE_ALONE),
        search.by_elimination,
    ]
    with many_objects():
        try:
            # after each success begin again with the strongest evidence
            while any(map(search.try_way, ways)):
                pass
            return search.result()
        except BudgetExceeded:
            return search.result(is_complete=False)


class _Search:
    """`left` and `right` are the tensors without a partner. A way pairs some, and returns whether
    it did.
    """

    def __init__(
        self,
        left: SideTensors,
        right: SideTensors,
        same_keys: Mapping[str, str],
        turned: tuple[frozenset[str], frozenset[str]],
    ) -> None:
        self.sides = left, right
        self.turned = turned
        self.has_given_pairs = bool(same_keys)
        self.left = by_key(left.tensors)
        self.right = by_key(right.tensors)
        self.orders = Order(left), Order(right)
        self.budget = _MOST + _MOST_EACH * (len(self.left) + len(self.right))
        self.pairs: list[Pair] = []
        self.weak: set[int] = set()  # the pairs that no name confirms
        self._groups: list[list[Group] | None] = [None, None]
        # names of groups that have paired tensors
        self._stale: tuple[set[Template], set[Template]] = set(), set()
        self._by_depth: dict[tuple[Group, int], list[tuple[Hashable, Group]]] = {}
        transposed_too = self._remove_given(same_keys)
        context = same_keys if self.left and self.right else {}
        self.paths = Paths(context)
        self.modules = Modules(context, self.left, self.right)
        for left_key, right_key in transposed_too:
            self._take((left_key,), (right_key,), SAME_NAME)

    def _tensors(self, side: int) -> dict[str, Outlined]:
        """Return the open tensors of the left (side 0) or right (1)."""
        return self.left if side == 0 else self.right

    def _remove_given(self, same_keys: Mapping[str, str]) -> list[tuple[str, str]]:
        """Remove tensors whose partner is given, and return the given pairs that differ by a
        transposition.

        Given pairs of other shapes stay: their tensors may have other partners.
        """
        if not same_keys:
            return []
        transposed_too = []
        lefts, rights = dict(self.left), dict(self.right)
        for left_key, right_key in same_keys.items():
            left, right = lefts.get(left_key), rights.get(right_key)
            if left is None or right is None:
                continue
            if self._transposed((left_key,), (right_key,)):
                transposed_too.append((left_key, right_key))
            elif left.shape == right.shape:
                self.left.pop(left_key, None)
                self.right.pop(right_key, None)
        return transposed_too

    def spend(self, cost: int) -> None:
        self.budget -= cost
        if self.budget < 0:
            raise BudgetExceeded

    def try_way(self, way: Callable[[], bool]) -> bool:
        self.spend(len(self.left) + len(self.right))
        return bool(self.left and self.right) and way()

    # Groups of the open tensors

    def groups(self, side: int) -> list[Group]:
        """Group the open tensors of a side (0 or 1) by their names without any layer number."""
        open_groups, stale = self._groups[side], self._stale[side]
        if open_groups is None:
            open_groups = groups(self._tensors(side).values())
        elif stale:
            open_groups = self._without_paired(open_groups, side)
            for group, depth in list(self._by_depth):
                if group.path in stale:
                    del self._by_depth[group, depth]
        self._groups[side] = open_groups
        stale.clear()
        return open_groups

    def _without_paired(self, old: Sequence[Group], side: int) -> list[Group]:
        """Return the groups without the tensors that were paired since, in the order of the side's
        tensors.
        """
        tensors, stale = self._tensors(side), self._stale[side]
        still_open = []
        for group in old:
            rest = group.among(tensors) if group.path in stale else group
            if rest is not None:
                still_open.append(rest)
        place = self.orders[side].place
        if len(still_open) > 1:
            still_open.sort(key=lambda group: place[group.first.key])
        return still_open

    def at_depth(
        self, side: int, depth: int, names: Container[Template] | None = None
    ) -> list[tuple[Hashable, Group]]:
        """Group them (or those with `names`) without the first `depth` layer numbers, each group
        with its signature.
        """
        signed: list[tuple[Hashable, Group]] = []
        for group in self.groups(side):
            if names is None or group.path in names:
                signed += self._signed(group, depth)
        place = self.orders[side].place
        if len(signed) > 1:
            signed.sort(key=lambda pair: place[pair[1].first.key])
        return signed

    def _signed(self, group: Group, depth: int) -> list[tuple[Hashable, Group]]:
        """Return what `at_depth` returns, of one group without any layer number."""
        parts = self._by_depth.get((group, depth))
        if parts is None:
            parts = [(part.signature, part) for part in group.at_depth(depth)]
            self._by_depth[group, depth] = parts
        return parts

    def classes(
        self,
        label: Callable[[Group], Hashable],
        names: Sequence[Container[Template] | None] = (None, None),
    ) -> Iterator[tuple[list[Group], list[Group]]]:
        """Yield groups of both sides with tensors of one shape in the same layers, and with the
        same label.
        """
        for depth in _DEPTHS:
            by_class: dict[Hashable, tuple[list[Group], list[Group]]] = {}
            for signature, group in self.at_depth(0, depth, names[0]):
                lefts, _ = by_class.setdefault((signature, label(group)), ([], []))
                lefts.append(group)
            if not by_class:
                continue
            for signature, group in self.at_depth(1, depth, names[1]):
                both = by_class.get((signature, label(group)))
                if both is not None:
                    both[1].append(group)
            for lefts, rights in by_class.values():
                if rights:
                    yield lefts, rights

    # Keys of a way: they change as tensors are paired

    def modules_of_partners(self, group: Group, side: int) -> Collection[str]:
        return self.modules.homes(group.first.key, side) if kind_of(group.path) else ()

    def paths_of_partners(self, group: Group, side: int) -> Collection[Template]:
        return self.paths.homes(group.path, side) if kind_of(group.path) else ()

    # Ways to pair

    def by_content(self) -> bool:
        """Pair tensors if exactly one of each side has these bytes."""
        left_digest, right_digest = self.sides[0].digest, self.sides[1].digest
        if left_digest is None or right_digest is None:
            return False
        left_by_value = _by_value(self.left.values(), self.right.values(), left_digest)
        right_by_value = _by_value(self.right.values(), self.left.values(), right_digest)
        taken = False
        for value, left_keys in left_by_value.items():
            right_keys = right_by_value.get(value, ())
            if len(left_keys) == len(right_keys) == 1:
                self._take(tuple(left_keys), tuple(right_keys), _SAME_VALUES)
                taken = True
        return taken

    def by_tree(self) -> bool:
        """Pair the same tree of names below another module: the two prefixes that explain most
        tensors.

        left                     right               prefixes
        encoder.layers.0.weight  layers.0.weight     `encoder` and the root
        encoder.layers.0.bias    layers.0.bias
        """
        trees: dict[Prefixes, list[tuple[Group, Group]]] = {}
        for prefixes, left, right in common_trees(self.groups(0), self.groups(1)):
            self.spend(_COST)
            if self._may_be_tree(prefixes, left, right):
                trees.setdefault(prefixes, []).append((left, right))
        best = best_tree(trees)
        if best is None:
            return False
        evidence = SAME_NAME
        below = " and ".join(f"`{shown(path)}`" for path in best if path)
        if below:
            evidence = Info(f"{SAME_NAME} below {below}", SAME_NAME.code)
        for left, right in trees[best]:
            pairs = self._pairs_that_fit(left, right, evidence)
            if pairs:
                self._add(pairs, [(left.path, right.path)])
        if len(trees[best]) > 1:
            self.paths.tree(*best)
        return True

    def _may_be_tree(self, prefixes: Prefixes, left: Group, right: Group) -> bool:
        """Return whether the two groups, with one name below the prefixes, are evidence for
        them.
        """
        left_prefix, right_prefix = prefixes
        # below two modules, one segment says too little
        if left_prefix and right_prefix and len(left.path) - len(left_prefix) == 1:
            return False
        if any(prefix and self.paths.is_same(prefix) for prefix in prefixes):
            return False
        return not self.paths.contradict(left.path, right.path)

    def _pairs_that_fit(self, left: Group, right: Group, evidence: str) -> list[Pair]:
        """Pair the open tensors in the same layers of two groups if one's shape is the other's,
        perhaps transposed.
        """
        pairs = []
        for numbers, a in left.members.items():
            b = right.members.get(numbers)
            if b is None or a.key not in self.left or b.key not in self.right or not fit(a, b):
                continue
            side = self._transposed((a.key,), (b.key,)) if a.shape == b.shape else "left"
            pairs.append(Pair((a.key,), (b.key,), evidence, side))
        return pairs

    def unique(self, way: Way) -> bool:
        """Pair groups that share a key with each other, and with no other group.

        left  keys    right  keys
        a     1, 2    x      1       a and x are paired
        b     3       y      3       b could be y or z, so none of them is
                      z      3
        """
        taken = False
        for lefts, rights in self.classes(way.label, self._names_with_shared_keys(way)):
            left_by_key, right_by_key = _by_key(way, lefts, 0), _by_key(way, rights, 1)
            pairs = []
            for left in lefts:
                right = self._only_partner(way, left, 0, right_by_key)
                if right is not None and self._only_partner(way, right, 1, left_by_key) is not None:
                    pairs.append((left, right))
            for left, right in pairs:
                taken |= self._take_groups(left, right, way.evidence(left, right), way.weak)
        return taken

    def _only_partner(
        self, way: Way, group: Group, side: int, others: Mapping[Hashable, Sequence[Group]]
    ) -> Group | None:
        """Return the group of the other side with a key of this group; None if there is none, or
        more than one.
        """
        is_allowed = self._agree if way.weak else self._may
        partner = None
        for key in way.keys(group, side):
            for other in others.get(key, ()):
                self.spend(_COST)
                left, right = (group, other) if side == 0 else (other, group)
                if other is partner or not (way.sure or is_allowed(left, right)):
                    continue
                if partner is not None:
                    return None
                partner = other
        return partner

    def _names_with_shared_keys(
        self, way: Way
    ) -> tuple[set[Template] | None, set[Template] | None]:
        """Return each side's names, without any layer number, that share one of `way.names`; None
        if there are none.
        """
        if way.names is None:
            return None, None
        left_by_key = self._names_by_key(way, way.names, 0)
        right_by_key = self._names_by_key(way, way.names, 1)
        lefts: set[Template] = set()
        rights: set[Template] = set()
        for key in left_by_key.keys() & right_by_key.keys():
            lefts |= left_by_key[key]
            rights |= right_by_key[key]
        return lefts, rights

    def _names_by_key(
        self, way: Way, keys: Callable[[Group, int], Iterable[Hashable]], side: int
    ) -> Mapping[Hashable, set[Template]]:
        names: defaultdict[Hashable, set[Template]] = defaultdict(set)
        for group in self.groups(side):
            for key in keys(group, side):
                names[way.label(group), key].add(group.path)
        return names

    def by_relative_parts(self) -> bool:
        """Pair tensors of one shape that all have different parts by name, the same parts on both
        sides.
        """
        taken = False
        for lefts, rights in self.classes(lambda group: kind_of(group.path)):
            left = {part_of(group.path): group for group in lefts}
            right = {part_of(group.path): group for group in rights}
            if "" in left or left.keys() != right.keys():
                continue
            if len(left) < len(lefts) or len(right) < len(rights):  # a part is there twice
                continue
            for part, group in left.items():
                taken |= self._take_groups(group, right[part], f"both are the {part} by name")
        return taken

    def by_order(self) -> bool:
        """Pair tensors of one shape in the order of the models, if there are as many on both
        sides.
        """
        taken = False
        for lefts, rights in self.classes(lambda group: kind_of(group.path)):
            left_parts, right_parts = _by_certain_part(lefts), _by_certain_part(rights)
            by_part = False
            for part, part_lefts in left_parts.items():
                by_part |= self._take_in_order(part_lefts, right_parts.get(part, []))
            taken |= by_part or self._take_in_order(lefts, rights)
        return taken

    def _take_in_order(self, lefts: Sequence[Group], rights: Sequence[Group]) -> bool:
        lefts = [group for group in lefts if self._are_open(self.left, group)]
        rights = [group for group in rights if self._are_open(self.right, group)]
        count = len(lefts)
        if count != len(rights) or count < 2:
            return False
        left_order, right_order = self.orders
        if not (left_order.is_meaningful(lefts) and right_order.is_meaningful(rights)):
            return False
        if not all(map(self._agree, lefts, rights)):
            return False
        shape = list(lefts[0].first.shape)
        evidence = f"one of {count} of shape {shape}, in the same order"
        taken = False
        for left, right in zip(lefts, rights):
            taken |= self._take_groups(left, right, evidence, weak=True)
        return taken

    def by_elimination(self) -> bool:
        """Pair the only tensors of both sides without a partner, if others have one."""
        if not self.has_given_pairs and not self.pairs:
            return False
        return len(self.left) == len(self.right) == 1 and self.unique(BY_ELIMINATION)

    # One tensor for several

    def by_fused_parts(self) -> bool:
        """Pair several tensors with one of the other side: query, key and value; gate and up.

        whole                        row of parts of the other side
        attn.qkv.weight  [3n, n]     attn.q.weight, attn.k.weight, attn.v.weight, each [n, n]
        """
        taken = False
        names = [self._fusible(side) for side in (0, 1)]
        for depth in _DEPTHS:
            for side, (of_wholes, of_parts) in enumerate(names):
                if not of_wholes:
                    continue
                wholes = [group for _, group in self.at_depth(side, depth, of_wholes)]
                parts = [group for _, group in self.at_depth(1 - side, depth, of_parts)]
                for whole, row, evidence in self._fused(wholes, parts, side):
                    taken |= self._take_fused(whole, row, evidence, side)
        return taken

    def _fusible(self, side: int) -> tuple[set[Template], set[Template]]:
        """Return the names, without any layer number, of a side's tensors, and of parts of the
        other side that may be their parts by name and shape.
        """
        by_shape: defaultdict[Hashable, set[Template]] = defaultdict(set)
        for group in self.groups(side):
            kind = kind_of(group.path)
            for shape in _shapes([group]):
                by_shape[kind, shape].add(group.path)
        wholes: set[Template] = set()
        parts: set[Template] = set()
        for (_, kind), by_part in _homes(self.groups(1 - side)).items():
            for row in FUSED:
                shapes = [_shapes(by_part.get(part, ())) for part in row]
                sums: Iterable[Hashable] = by_shape  # too many to add up: any shape may be a sum
                if prod(map(len, shapes)) <= len(self.left) + len(self.right):
                    sums = {(kind, shape) for shape in _sums(shapes)}
                names: set[Template] = set()
                for kind_and_shape in sums:
                    names |= by_shape.get(kind_and_shape, set())
                if names:
                    wholes |= names
                    for several in by_part.values():
                        parts.update(group.path for group in several)
        return wholes, parts

    def _fused(
        self, wholes: Sequence[Group], parts: Sequence[Group], side: int
    ) -> Iterator[tuple[Group, tuple[Group, ...], str]]:
        """Yield each group of one side that exactly one row of parts of the other side makes up,
        with this row.
        """
        rows = list(_rows(parts))
        if not rows:
            return
        by_shapes: defaultdict[Hashable, list[Group]] = defaultdict(list)
        for whole in wholes:
            shapes = frozenset((numbers, part.shape) for numbers, part in whole.members.items())
            by_shapes[kind_of(whole.path), shapes].append(whole)
        hits = []
        for names, row in rows:
            fits = []
            for whole in by_shapes.get(_sum_of_shapes(row), ()):
                left, right = (whole, row[0]) if side == 0 else (row[0], whole)
                if self._may(left, right):
                    fits.append(whole)
            fits = [whole for whole in fits if is_fused(whole.template)] or fits
            if len(fits) == 1:
                evidence = f"shapes add up, parts in the field's order {', '.join(names)}"
                hits.append((fits[0], row, evidence))
        count = Counter(whole for whole, _, _ in hits)
        for hit in hits:
            if count[hit[0]] == 1:
                yield hit

    def _take_fused(self, whole: Group, row: Sequence[Group], evidence: str, side: int) -> bool:
        wholes, parts_of_rows = self._tensors(side), self._tensors(1 - side)
        if not self._are_open(wholes, whole) or not self._are_open(parts_of_rows, *row):
            return False
        for numbers, tensor in whole.members.items():
            parts = tuple(group.members[numbers] for group in row)
            parts, text = self._by_values(tensor, parts, evidence, side)
            keys = tuple(part.key for part in parts)
            if side == 0:
                self._take((tensor.key,), keys, text)
            else:
                self._take(keys, (tensor.key,), text)
        return True

    def _by_values(
        self, whole: Outlined, parts: tuple[Outlined, ...], evidence: str, side: int
    ) -> tuple[tuple[Outlined, ...], str]:
        """Return the parts in the order in which they have the values of the whole, and the
        evidence for it.

        Values without digests, and values of transposed tensors, are not compared.
        """
        whole_digest, part_digest = self.sides[side].digest, self.sides[1 - side].digest
        if whole_digest is None or part_digest is None or any(self.turned):
            return parts, evidence
        for order in permutations(parts):
            if _have_values(whole, order, whole_digest, part_digest):
                return order, "the same values, parts in this order"
        return parts, f"{evidence}; the values differ"

    # What the ways have in common

    def _may(self, left: Group, right: Group) -> bool:
        """Return whether the modules around the two allow the pair. A head by name may be outside
        of the other tree.
        """
        self.spend(_COST)
        if self.paths.contradict(left.path, right.path):
            return part_of(left.path) == part_of(right.path) == HEAD
        # else they are in other modules than their neighbors
        has_kinds = kind_of(left.path) and kind_of(right.path)
        return not (has_kinds and self.modules.part(left.first.key, right.first.key))

    def _agree(self, left: Group, right: Group) -> bool:
        """Return whether the modules, the names and the places of the two allow the pair."""
        if not self._may(left, right):
            return False
        left_order, right_order = self.orders
        left_place, right_place = left_order.neighbors(left), right_order.neighbors(right)
        if left_place and right_place and left_place != right_place:
            return False
        left_part, right_part = part_of(left.path), part_of(right.path)
        return left_part == right_part or not left_part or not right_part

    @staticmethod
    def _are_open(tensors: Container[str], *groups: Group) -> bool:
        for group in groups:
            for tensor in group.members.values():
                if tensor.key not in tensors:
                    return False
        return True

    def _take_groups(self, left: Group, right: Group, evidence: str, weak: bool = False) -> bool:
        """Pair two groups, layer by layer, unless one of their tensors has a partner."""
        if not self._are_open(self.left, left) or not self._are_open(self.right, right):
            return False
        pairs = []
        for numbers, tensor in left.members.items():
            left_keys, right_keys = (tensor.key,), (right.members[numbers].key,)
            side = self._transposed(left_keys, right_keys)
            pairs.append(Pair(left_keys, right_keys, evidence, side))
        first = len(self.pairs)
        if weak:
            self.weak.update(range(first, first + len(pairs)))
        self._add(pairs, [(left.path, right.path)])
        return True

    def _take(self, left: tuple[str, ...], right: tuple[str, ...], evidence: str) -> None:
        """Pair single tensors, or several on one side."""
        side = "" if evidence == _SAME_VALUES else self._transposed(left, right)
        paths = []
        for left_key, right_key in product(left, right):
            paths.append((template(left_key)[0], template(right_key)[0]))
        self._add([Pair(left, right, evidence, side)], paths)

    def _add(self, pairs: Sequence[Pair], paths: Iterable[tuple[Template, Template]]) -> None:
        """Add pairs of tensors with these names, without any layer number."""
        for pair in pairs:
            for key in pair.left:
                del self.left[key]
            for key in pair.right:
                del self.right[key]
        for left, right in paths:
            self.paths.pair(left, right)
            self._stale[0].add(left)
            self._stale[1].add(right)
        self.modules.add(pairs)
        self.pairs += pairs

    def _transposed(self, left: Iterable[str], right: Iterable[str]) -> str:
        """Return the side that is stored transposed. Of the parts of one tensor all are if one
        is.
        """
        if not self.turned[0].isdisjoint(left):
            return "left"
        return "" if self.turned[1].isdisjoint(right) else "right"

    def result(self, is_complete: bool = True) -> Inference:
        """Return the pairs in the order of the left. Pairs by shape alone count only if most of a
        side is paired.
        """
        is_explained = len(self.pairs) > min(len(self.left), len(self.right))
        by_first: dict[str, Pair] = {}
        ambiguous = []
        for index, pair in enumerate(self.pairs):
            if index in self.weak and not is_explained:
                reason = "only their shapes agree, and most keys have no partner"
                ambiguous.append(Ambiguous(pair.left, pair.right, reason))
            else:
                by_first[pair.left[0]] = pair
        place = self.orders[0].place
        pairs = tuple(by_first[key] for key in sorted(by_first, key=place.__getitem__))
        if is_complete:
            return Inference(pairs, (*ambiguous, *self._still_ambiguous()))
        reason = (
            f"not looked for further among {len(self.left):,} and {len(self.right):,} tensors:"
            " too many are alike"
        )
        rest = Ambiguous(tuple(self.left), tuple(self.right), reason)
        return Inference(pairs, (*ambiguous, rest))

    def _still_ambiguous(self) -> Iterator[Ambiguous]:
        """Yield the open tensors that could be each other, each key once."""
        seen: set[str] = set()
        for lefts, rights in self.classes(lambda group: kind_of(group.path)):
            left, right = keys_of(lefts), keys_of(rights)
            if not seen.isdisjoint((*left, *right)):
                continue
            if any(self._may(a, b) for a, b in product(lefts, rights)):
                seen.update(left, right)
                is_choice = len(lefts) > 1 or len(rights) > 1
                yield Ambiguous(left, right, INDISTINGUISHABLE if is_choice else ONLY_SHAPES_AGREE)


def _by_certain_part(several: Iterable[Group]) -> Mapping[str, list[Group]]:
    by_part: defaultdict[str, list[Group]] = defaultdict(list)
    for group in several:
        by_part[certain_part(group.path)].append(group)
    return by_part


def _shapes(several: Iterable[Group]) -> set[Shape]:
    shapes: set[Shape] = set()
    for group in several:
        shapes.update(tensor.shape for tensor in group.members.values())
    return shapes


def _by_value(
    tensors: Iterable[Outlined], others: Iterable[Outlined], digest: Digest
) -> dict[Hashable, list[str]]:
    """Return the keys by dtype, shape and digest, of tensors whose dtype and shape the other side
    has too.
    """
    outlines = {(tensor.dtype, tensor.shape) for tensor in others}
    by_value: defaultdict[Hashable, list[str]] = defaultdict(list)
    for tensor in tensors:
        outline = tensor.dtype, tensor.shape
        value = digest(Ref(tensor.key)) if outline in outlines else None
        if value is not None:
            by_value[outline, value].append(tensor.key)
    return by_value


def _have_values(
    whole: Outlined, parts: Sequence[Outlined], whole_digest: Digest, part_digest: Digest
) -> bool:
    """Return whether the parts, in this order, have the values of the whole."""
    start = 0
    for part in parts:
        rows = Op("aten.narrow.default", (Ref(whole.key), 0, start, part.shape[0]))
        if whole_digest(rows) != part_digest(Ref(part.key)):
            return False
        start += part.shape[0]
    return True


def _by_key(way: Way, candidates: Iterable[Group], side: int) -> Mapping[Hashable, list[Group]]:
    by_key: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for group in candidates:
        for key in way.keys(group, side):
            by_key[key].append(group)
    return by_key


def _homes(parts: Sequence[Group]) -> Mapping[tuple[Template, str], Mapping[str, list[Group]]]:
    """Return the groups by the module that has the parts and the kind of tensor, and then by the
    part.
    """
    homes: dict[tuple[Template, str], dict[str, list[Group]]] = {}
    for group in parts:
        part = part_of(group.path)
        home = _home(group.template, part) if part else ()
        by_part = homes.setdefault((home, kind_of(group.path)), {})
        by_part.setdefault(part, []).append(group)
    return homes


def _home(path: Template, part: str) -> Template:
    """Return the path above the innermost segment that names the part."""
    for depth in range(len(path) - 1, -1, -1):
        named = part_of(path[depth : depth + 1])
        if named and part.endswith(named):
            return path[:depth]
    return ()


def _rows(parts: Sequence[Group]) -> Iterator[tuple[tuple[str, ...], tuple[Group, ...]]]:
    """Yield groups in one module that are, by name, the parts of a tensor that layers may keep
    fused.
    """
    for by_name in _homes(parts).values():
        alone = {name: several[0] for name, several in by_name.items() if len(several) == 1}
        for names in FUSED:
            if alone.keys() >= set(names):
                yield names, tuple(alone[name] for name in names)
                break


def _sums(parts: Iterable[Iterable[Shape]]) -> Iterator[Shape]:
    """Yield the shapes of tensors whose parts have, each, one of these shapes."""
    for shapes in product(*parts):
        columns = {shape[1:] for shape in shapes}
        if all(shapes) and len(columns) == 1:
            height = sum(shape[0] for shape in shapes)
            yield (height, *columns.pop())


def _sum_of_shapes(row: Sequence[Group]) -> Hashable:
    """Return the kind and the shapes, layer by layer, of the tensor with these parts; None if there
    is none.
    """
    first = row[0]
    if any(group.members.keys() != first.members.keys() for group in row):
        return None
    shapes = []
    for numbers, tensor in first.members.items():
        columns, height = tensor.shape[1:], 0
        for group in row:
            part = group.members[numbers]
            if not part.shape or part.dtype != tensor.dtype or part.shape[1:] != columns:
                return None
            height += part.shape[0]
        shapes.append((numbers, (height, *columns)))
    return kind_of(first.path), frozenset(shapes)
