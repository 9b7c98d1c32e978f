"""Pair tensors by evidence, the strongest first. Ambiguous matches are left alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from math import prod
from typing import NamedTuple

from ckpttool.core.expression import Op, Ref
from ckpttool.core.text import Info
from ckpttool.core.values import many_objects
from ckpttool.naming.evidence import (
    FUSED,
    HEAD,
    KINDS,
    SAME_NAME,
    Ambiguous,
    Group,
    Inference,
    Modules,
    Order,
    Outlined,
    Pair,
    Paths,
    Prefixes,
    Side,
    Template,
    best_tree,
    certain_part,
    common_trees,
    fit,
    groups,
    inserted,
    is_fused,
    kind_of,
    part_of,
    shown,
    straight,
    template,
    transposed,
)

_DEPTHS = (3, 2, 1, 0)  # layer numbers that are generalised: models have up to three
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
    return {
        (side, name),
        *((1 - side, name[:at] + name[at + 1 :]) for at, segment in enumerate(name) if segment),
    }


def _has_part(group: Group, side: int) -> list[bool]:
    return [True] * bool(certain_part(group.path))


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
    _has_part,
    lambda a, b: f"both are the {certain_part(a.path)} by name",
    label=lambda group: (kind_of(group.path), certain_part(group.path)),
    names=_has_part,
)
BY_SHAPE = Way(
    lambda group, side: [True] * (group.first.shape not in ((), (1,))),
    lambda a, b: _shape(a, b) + (" in each layer" * (len(a.members) > 1)),
    weak=True,
)
BY_SHAPE_ALONE = Way(  # if a name does not say the kind of tensor
    lambda group, side: ([side] if kind_of(group.path) else [0, 1]) * (len(group.first.shape) > 1),
    _shape,
    label=lambda group: None,
    weak=True,
)
BY_ELIMINATION = Way(  # the last tensor of each side
    lambda group, side: [
        (group.first.dtype, kind)
        for kind in ([kind_of(group.path)] if kind_of(group.path) else KINDS)
    ],
    lambda a, b: "the only ones without a partner, of one shape",
    label=lambda group: None,
    weak=True,
)


def infer(left: Side, right: Side, known: Mapping[str, str] | None = None) -> Inference:
    """Pair the two sides' tensors. `known` maps keys of the left to keys of the right that are the
    same tensor.
    """
    turned = transposed(left.tensors), transposed(right.tensors)
    if bool(turned[0]) == bool(turned[1]):  # both sides are, or neither
        turned = frozenset(), frozenset()
    search = _Search(straight(left, turned[0]), straight(right, turned[1]), known or {}, turned)
    by_module = Way(
        lambda group, side: (
            search.modules.homes(group.first.key, side) if kind_of(group.path) else ()
        ),
        lambda a, b: "other tensors of its module are paired",
        names=lambda group, side: (
            search.paths.homes(group.path, side) if kind_of(group.path) else ()
        ),
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
        left: Side,
        right: Side,
        known: Mapping[str, str],
        turned: tuple[frozenset[str], frozenset[str]],
    ) -> None:
        self.sides, self.turned, self.has_known = (left, right), turned, bool(known)
        self.left, self.right = ({one.key: one for one in side.tensors} for side in self.sides)
        self.orders = Order(left), Order(right)
        self.budget = _MOST + _MOST_EACH * (len(self.left) + len(self.right))
        self.pairs: list[Pair] = []
        self.weak: set[int] = set()  # the pairs that no name confirms
        self._groups: list[list[Group] | None] = [None, None]
        # names of groups that have paired tensors
        self._stale: tuple[set[Template], set[Template]] = set(), set()
        self._by_depth: dict[tuple[Group, int], list[tuple[Hashable, Group]]] = {}
        transposed_too = []
        lefts, rights = (dict(self.left), dict(self.right)) if known else ({}, {})
        for a, b in known.items():
            one, other = lefts.get(a), rights.get(b)
            if one is None or other is None:
                continue
            if self._transposed((a,), (b,)):
                transposed_too.append((a, b))
            elif one.shape == other.shape:  # else they are still to be paired
                self.left.pop(a, None)
                self.right.pop(b, None)
        self.paths = Paths(known if self.left and self.right else {})
        self.modules = Modules(known if self.left and self.right else {}, self.left, self.right)
        for a, b in transposed_too:
            self._take((a,), (b,), SAME_NAME)

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
        found, tensors = self._groups[side], (self.left, self.right)[side]
        if found is None:
            found = groups(tensors.values())
        elif stale := self._stale[side]:
            still = (group.among(tensors) if group.path in stale else group for group in found)
            self._by_depth = {
                at: ones for at, ones in self._by_depth.items() if at[0].path not in stale
            }
            found = self._in_order(side, filter(None, still))
        self._groups[side] = found
        self._stale[side].clear()
        return found

    def at_depth(
        self, side: int, depth: int, names: Container[Template] | None = None
    ) -> list[tuple[Hashable, Group]]:
        """Group them (or those with `names`) without the first `depth` layer numbers, each group
        with its signature.
        """
        found: list[tuple[Hashable, Group]] = []
        for group in self.groups(side):
            if names is None or group.path in names:
                if (group, depth) not in self._by_depth:
                    self._by_depth[group, depth] = [
                        (one.signature, one) for one in group.at_depth(depth)
                    ]
                found += self._by_depth[group, depth]
        place = self.orders[side].place
        return sorted(found, key=lambda one: place[one[1].first.key]) if found[1:] else found

    def _in_order(self, side: int, found: Iterable[Group]) -> list[Group]:
        groups = list(found)
        return (
            sorted(groups, key=lambda one: self.orders[side].place[one.first.key])
            if groups[1:]
            else groups
        )

    def classes(
        self,
        label: Callable[[Group], Hashable],
        names: Sequence[Container[Template] | None] = (None, None),
    ) -> Iterator[tuple[list[Group], list[Group]]]:
        """Yield groups of both sides with tensors of one shape in the same layers, and with the
        same label.
        """
        for depth in _DEPTHS:
            found: dict[Hashable, tuple[list[Group], list[Group]]] = {}
            for signature, group in self.at_depth(0, depth, names[0]):
                found.setdefault((signature, label(group)), ([], []))[0].append(group)
            for signature, group in self.at_depth(1, depth, names[1]) if found else ():
                both = found.get((signature, label(group)))
                if both is not None:
                    both[1].append(group)
            yield from (both for both in found.values() if both[1])

    # Ways to pair

    def by_content(self) -> bool:
        """Pair tensors if exactly one of each side has these bytes."""
        if self.sides[0].digest is None or self.sides[1].digest is None:
            return False
        by_digest: tuple[dict[Hashable, list[str]], ...] = defaultdict(list), defaultdict(list)
        tensors = [*self.left.values()], [*self.right.values()]
        for side, found in enumerate(by_digest):
            outlines = {(one.dtype, one.shape) for one in tensors[1 - side]}
            digest = self.sides[side].digest
            for one in tensors[side]:
                if (
                    (one.dtype, one.shape) in outlines
                    and digest
                    and (value := digest(Ref(one.key))) is not None
                ):
                    found[one.dtype, one.shape, value].append(one.key)
        lefts, rights = by_digest
        hits = [
            (keys[0], rights[at][0])
            for at, keys in lefts.items()
            if len(keys) == len(rights.get(at, ())) == 1
        ]
        for left, right in hits:
            self._take((left,), (right,), _SAME_VALUES)
        return bool(hits)

    def by_tree(self) -> bool:
        """Pair the same tree of names below another module: the two prefixes that explain most
        tensors.
        """
        trees: dict[Prefixes, list[tuple[Group, Group]]] = {}
        for (left, right), one, other in common_trees(self.groups(0), self.groups(1)):
            self.spend(_COST)
            # one segment says too little
            is_long = len(one.path) - len(left) > 1 or not left or not right
            is_other = not any(prefix and self.paths.is_same(prefix) for prefix in (left, right))
            if is_long and is_other and not self.paths.contradict(one.path, other.path):
                trees.setdefault((left, right), []).append((one, other))
        best = best_tree(trees)
        if best is None:
            return False
        below = " and ".join(f"`{shown(path)}`" for path in best if path)
        evidence = Info(f"{SAME_NAME} below {below}", SAME_NAME.code) if below else SAME_NAME
        for one, other in trees[best]:
            both = [(a, other.members[at]) for at, a in one.members.items() if at in other.members]
            both = [
                (a, b) for a, b in both if fit(a, b) and a.key in self.left and b.key in self.right
            ]
            if both:
                sides = [
                    "left" if a.shape != b.shape else self._transposed((a.key,), (b.key,))
                    for a, b in both
                ]
                pairs = [
                    Pair((a.key,), (b.key,), evidence, side) for (a, b), side in zip(both, sides)
                ]
                self._add(pairs, [(one.path, other.path)])
        if len(trees[best]) > 1:
            self.paths.tree(*best)
        return True

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
        by_key: tuple[dict[Hashable, set[Template]], ...] = {}, {}
        for side, names in enumerate(by_key):
            for group in self.groups(side):
                for key in way.names(group, side):
                    names.setdefault((way.label(group), key), set()).add(group.path)
        lefts, rights = set[Template](), set[Template]()
        for key in by_key[0].keys() & by_key[1].keys():
            lefts |= by_key[0][key]
            rights |= by_key[1][key]
        return lefts, rights

    def by_relative_parts(self) -> bool:
        """Pair tensors of one shape that all have different parts by name, the same parts on both
        sides.
        """
        taken = False
        for lefts, rights in self.classes(lambda group: kind_of(group.path)):
            left, right = (
                {part_of(group.path): group for group in side} for side in (lefts, rights)
            )
            if (
                "" in left
                or left.keys() != right.keys()
                or len(left) < len(lefts)
                or len(right) < len(rights)
            ):
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
            by_part = False
            for part in dict.fromkeys(certain_part(group.path) for group in lefts):
                part_lefts = [group for group in lefts if certain_part(group.path) == part]
                part_rights = [group for group in rights if certain_part(group.path) == part]
                by_part |= self._take_in_order(part_lefts, part_rights)
            taken |= by_part or self._take_in_order(lefts, rights)
        return taken

    def _take_in_order(self, lefts: Sequence[Group], rights: Sequence[Group]) -> bool:
        lefts = [group for group in lefts if self._are_open(self.left, group)]
        rights = [group for group in rights if self._are_open(self.right, group)]
        if len(lefts) != len(rights) or len(lefts) < 2:
            return False
        if not all(order.is_meaningful(side) for order, side in zip(self.orders, (lefts, rights))):
            return False
        if not all(self._agree(a, b) for a, b in zip(lefts, rights)):
            return False
        evidence = f"one of {len(lefts)} of shape {list(lefts[0].first.shape)}, in the same order"
        taken = [self._take_groups(a, b, evidence, weak=True) for a, b in zip(lefts, rights)]
        return any(taken)

    def by_elimination(self) -> bool:
        """Pair the only tensors of both sides without a partner, if others have one."""
        if len(self.left) != 1 or len(self.right) != 1 or not (self.has_known or self.pairs):
            return False
        return self.unique(BY_ELIMINATION)

    # One tensor for several

    def by_fused_parts(self) -> bool:
        """Pair several tensors with one of the other side: query, key and value; gate and up."""
        taken = False
        names = [self._fusible(side) for side in (0, 1)]
        for depth in _DEPTHS:
            for side, (of_wholes, of_parts) in enumerate(names):
                if of_wholes:
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
            for one in group.members.values():
                by_shape[kind_of(group.path), one.shape].add(group.path)
        wholes, parts = set[Template](), set[Template]()
        for (_, kind), by_name in _homes(self.groups(1 - side)).items():
            for names in FUSED:
                row = [
                    {one.shape for group in by_name.get(name, ()) for one in group.members.values()}
                    for name in names
                ]
                is_short = prod(map(len, row)) <= len(self.left) + len(self.right)
                sums = {(kind, shape) for shape in _sums(row)} if is_short else by_shape.keys()
                found = set[Template]().union(*(by_shape[one] for one in sums if one in by_shape))
                if found:
                    wholes |= found
                    parts.update(group.path for groups in by_name.values() for group in groups)
        return wholes, parts

    def _fused(
        self, wholes: Sequence[Group], parts: Sequence[Group], side: int
    ) -> Iterator[tuple[Group, tuple[Group, ...], str]]:
        """Yield each group of one side that exactly one row of parts of the other side makes up,
        with this row.
        """
        rows = list(_rows(parts))
        shapes: defaultdict[Hashable, list[Group]] = defaultdict(list)
        for whole in wholes if rows else ():
            by_layer = frozenset((at, one.shape) for at, one in whole.members.items())
            shapes[kind_of(whole.path), by_layer].append(whole)
        hits = []
        for names, row in rows:
            fits = shapes.get(_sum_of_shapes(row), ())
            fits = [
                one
                for one in fits
                if (self._may(one, row[0]) if side == 0 else self._may(row[0], one))
            ]
            fits = [one for one in fits if is_fused(one.template)] or fits
            if len(fits) == 1:
                hits.append(
                    (fits[0], row, f"shapes add up, parts in the field's order {', '.join(names)}")
                )
        count = Counter(whole for whole, _, _ in hits)
        yield from (hit for hit in hits if count[hit[0]] == 1)

    def _take_fused(self, whole: Group, row: Sequence[Group], evidence: str, side: int) -> bool:
        mine, theirs = (self.left, self.right) if side == 0 else (self.right, self.left)
        if not (self._are_open(mine, whole) and self._are_open(theirs, *row)):
            return False
        for at, one in whole.members.items():
            parts = tuple(group.members[at] for group in row)
            text = evidence
            if (
                self.sides[0].digest is not None
                and self.sides[1].digest is not None
                and not any(self.turned)
            ):
                order = next(
                    (order for order in permutations(parts) if self._have_values(one, order, side)),
                    None,
                )
                parts = order or parts
                text = (
                    f"{evidence}; the values differ"
                    if order is None
                    else ("the same values, parts in this order")
                )
            keys = tuple(part.key for part in parts)
            if side == 0:
                self._take((one.key,), keys, text)
            else:
                self._take(keys, (one.key,), text)
        return True

    def _have_values(self, whole: Outlined, parts: Sequence[Outlined], side: int) -> bool:
        """Return whether the parts, in this order, have the values of the whole."""
        start = 0
        for part in parts:
            value = Op("aten.narrow.default", (Ref(whole.key), 0, start, part.shape[0]))
            of_whole, of_part = self.sides[side].digest, self.sides[1 - side].digest
            if of_whole is None or of_part is None or of_whole(value) != of_part(Ref(part.key)):
                return False
            start += part.shape[0]
        return True

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
        parts = part_of(left.path), part_of(right.path)
        places = [order.neighbors(group) for order, group in zip(self.orders, (left, right))]
        return self._may(left, right) and all(
            not all(two) or two[0] == two[1] for two in (parts, places)
        )

    @staticmethod
    def _are_open(tensors: Container[str], *groups: Group) -> bool:
        return all(one.key in tensors for group in groups for one in group.members.values())

    def _take_groups(self, left: Group, right: Group, evidence: str, weak: bool = False) -> bool:
        """Pair two groups, layer by layer, unless one of their tensors has a partner."""
        if not (self._are_open(self.left, left) and self._are_open(self.right, right)):
            return False
        both = [((one.key,), (right.members[at].key,)) for at, one in left.members.items()]
        if weak:
            self.weak.update(range(len(self.pairs), len(self.pairs) + len(both)))
        self._add(
            [Pair(*keys, evidence, self._transposed(*keys)) for keys in both],
            [(left.path, right.path)],
        )
        return True

    def _take(self, left: tuple[str, ...], right: tuple[str, ...], evidence: str) -> None:
        """Pair single tensors, or several on one side."""
        transposed = "" if evidence == _SAME_VALUES else self._transposed(left, right)
        paths = [(template(one)[0], template(other)[0]) for one, other in product(left, right)]
        self._add([Pair(left, right, evidence, transposed)], paths)

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
        weak = set[int]() if is_explained else self.weak
        kept = [pair for at, pair in enumerate(self.pairs) if at not in weak]
        by_first = {pair.left[0]: pair for pair in kept}
        pairs = tuple([by_first[one.key] for one in self.sides[0].tensors if one.key in by_first])
        reason = "only their shapes agree, and most keys have no partner"
        ambiguous = [
            Ambiguous(self.pairs[at].left, self.pairs[at].right, reason) for at in sorted(weak)
        ]
        if not is_complete:
            reason = (
                f"not looked for further among {len(self.left):,} and {len(self.right):,} tensors:"
                " too many are alike"
            )
            return Inference(
                pairs, (*ambiguous, Ambiguous(tuple(self.left), tuple(self.right), reason))
            )
        seen: set[str] = set()
        for lefts, rights in self.classes(lambda group: kind_of(group.path)):
            left, right = (
                tuple(one.key for group in side for one in group.members.values())
                for side in (lefts, rights)
            )
            if seen.isdisjoint((*left, *right)) and any(
                self._may(a, b) for a, b in product(lefts, rights)
            ):
                seen.update(left, right)
                ambiguous.append(
                    Ambiguous(left, right, "one shape, and no name or order tells them apart")
                )
        return Inference(pairs, tuple(ambiguous))


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
    homes: defaultdict[tuple[Template, str], dict[str, list[Group]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for group in parts:
        path, name = group.template, part_of(group.path)
        places = (
            at
            for at in range(len(path) - 1, -1, -1)
            if name.endswith(part_of(path[at : at + 1]) or "?")
        )
        homes[path[: next(places, 0)] if name else (), kind_of(group.path)][name].append(group)
    return homes


def _rows(parts: Sequence[Group]) -> Iterator[tuple[tuple[str, ...], tuple[Group, ...]]]:
    """Yield groups in one module that are, by name, the parts of a tensor that layers may keep
    fused.
    """
    for by_name in _homes(parts).values():
        for names in FUSED:
            row = [by_name.get(name, []) for name in names]
            if all(len(groups) == 1 for groups in row):
                yield names, tuple(groups[0] for groups in row)
                break


def _sums(parts: Iterable[Iterable[tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of tensors whose parts have, each, one of these shapes."""
    for shapes in product(*parts):
        if all(shapes) and len({shape[1:] for shape in shapes}) == 1:
            yield sum(shape[0] for shape in shapes), *shapes[0][1:]


def _sum_of_shapes(row: Sequence[Group]) -> Hashable:
    """Return the kind and the shapes, layer by layer, of the tensor with these parts; None if there
    is none.
    """
    first, shapes = row[0], []
    if any(part.members.keys() != first.members.keys() for part in row):
        return None
    for at, one in first.members.items():
        parts = [part.members[at] for part in row]
        if not all(
            part.shape and (part.dtype, part.shape[1:]) == (one.dtype, one.shape[1:])
            for part in parts
        ):
            return None
        shapes.append((at, (sum(part.shape[0] for part in parts), *one.shape[1:])))
    return kind_of(first.path), frozenset(shapes)
