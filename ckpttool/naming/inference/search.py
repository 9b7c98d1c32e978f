"""Pairs tensors by evidence, the strongest first, until nothing more is found. What ties is left alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product

from ckpttool.expression import Expression, Op, Ref
from ckpttool.naming.inference import words
from ckpttool.naming.inference.links import Links
from ckpttool.naming.inference.order import Order
from ckpttool.naming.inference.orientation import straight, turned
from ckpttool.naming.inference.parts import Fused, fused
from ckpttool.naming.inference.trees import fit, fits, inserted, ties
from ckpttool.naming.inference.unpaired import COST, DEPTHS, Apart, Enough, Unpaired, certain, kind, only
from ckpttool.naming.inference.values import (
    NUMBER,
    SAME_NAME,
    Ambiguous,
    Group,
    Inference,
    Pair,
    Side,
    Template,
    Tensor,
    template,
)

_SAME_VALUES = "the same values"
_LONGEST_PREFIX = 6  # segments that a tree may hang below


def infer(left: Side, right: Side, known: Mapping[str, str] | None = None) -> Inference:
    """Pairs of the two sides' tensors. `known`: keys of the left -> keys of the right that are the same tensor's."""
    ways = turned(left.tensors), turned(right.tensors)
    if bool(ways[0]) == bool(ways[1]):  # both are, or neither is
        ways = frozenset(), frozenset()
    search = _Search(straight(left, ways[0]), straight(right, ways[1]), known or {}, ways)
    steps = (
        *(search.by_content, search.by_tree, search.by_name, search.by_part, search.by_module, search.by_parts),
        *(search.by_relative_parts, search.by_segment, search.by_shape, search.by_order, search.by_shape_alone),
    )
    try:
        while any(search.step(step) for step in steps):
            pass
        return search.result()
    except Enough:
        return search.result(whole=False)


class _Search:
    """`left` and `right` are the tensors that have no partner yet. A step pairs what its evidence tells, and says
    whether that was anything.
    """

    def __init__(
        self, left: Side, right: Side, known: Mapping[str, str], ways: tuple[frozenset[str], frozenset[str]]
    ) -> None:
        self.sides, self.ways = (left, right), ways
        self.open = Unpaired(left.tensors, right.tensors)
        self.left, self.right = self.open.left, self.open.right
        self.place = {tensor.key: at for at, tensor in enumerate(left.tensors)}
        self.orders = Order(left), Order(right)
        self.links = Links()
        self.pairs: list[Pair] = []
        self.weak: set[int] = set()  # those of the pairs that no name bears out
        for mine, theirs in known.items():
            self._know(mine, theirs)

    def _know(self, mine: str, theirs: str) -> None:
        """One tensor by name; it is still to be paired where its shape is another, or has to become another."""
        if mine == theirs:
            self.links.same_key(mine)
        self.links.pair(mine, theirs)
        if mine in self.left and theirs in self.right:
            if self._transposed((mine,), (theirs,)):
                self._take(Pair((mine,), (theirs,), SAME_NAME))
            elif self.left[mine].shape == self.right[theirs].shape:
                del self.left[mine], self.right[theirs]

    def step(self, way: Callable[[], bool]) -> bool:
        """One step. Raises `Enough` where all has cost too much."""
        self.open.spend(len(self.left) + len(self.right))
        return way()

    # Steps

    def by_content(self) -> bool:
        """Tensors of which exactly one of each side has these bytes."""
        if self.sides[0].digest is None or self.sides[1].digest is None:
            return False
        mine, theirs = self._by_digest(self.left, self.right, 0), self._by_digest(self.right, self.left, 1)
        hits = [(mine[at][0], theirs[at][0]) for at in mine if len(mine[at]) == len(theirs.get(at, ())) == 1]
        for left, right in hits:
            self._take(Pair((left,), (right,), _SAME_VALUES))
        return bool(hits)

    def _by_digest(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], side: int
    ) -> defaultdict[Hashable, list[str]]:
        shapes = {(one.dtype, one.shape) for one in theirs.values()}
        found: defaultdict[Hashable, list[str]] = defaultdict(list)
        for tensor in mine.values():
            digest = self._digest(side, Ref(tensor.key)) if (tensor.dtype, tensor.shape) in shapes else None
            if digest is not None:
                found[tensor.dtype, tensor.shape, digest].append(tensor.key)
        return found

    def _digest(self, side: int, value: Expression) -> bytes | None:
        digest = self.sides[side].digest
        return None if digest is None else digest(value)

    def by_tree(self) -> bool:
        """The same tree below another module: the two prefixes that explain most keys."""
        mine, theirs = self.open.groups(0), self.open.groups(1)
        below = defaultdict[Template, list[tuple[Template, Group]]](list)
        for group in theirs:
            for depth in range(min(len(group.template), _LONGEST_PREFIX)):
                below[group.template[depth:]].append((group.template[:depth], group))
        roots = {group.template: [((), group)] for group in theirs}
        found: defaultdict[tuple[Template, Template], list[tuple[Group, Group]]] = defaultdict(list)
        for group in mine:
            for depth in range(min(len(group.template), _LONGEST_PREFIX)):
                own, rest = group.template[:depth], group.template[depth:]
                for prefix, other in (below if len(rest) > 1 or not own else roots).get(rest, ()):
                    self.open.spend(COST)
                    contradict = self.links.contradict(group.template, other.template)
                    if not contradict and self._hangs(own, prefix, len(rest)):
                        found[own, prefix].append((group, other))
        ranked = sorted(found, key=lambda at: (-fits(found[at]), len(at[0]) + len(at[1])))
        if not ranked or not fits(found[ranked[0]]) or ties(ranked, found):
            return False
        return self._hang(*ranked[0], found[ranked[0]])

    def _hangs(self, left: Template, right: Template, rest: int) -> bool:
        """Whether a tree may hang below these two: names of one segment say too little, and a module that both sides
        have is no other.
        """
        return (rest > 1 or not left or not right) and not (
            (left and self.links.is_same(left)) or (right and self.links.is_same(right))
        )

    def _hang(self, left: Template, right: Template, trees: list[tuple[Group, Group]]) -> bool:
        below = " and ".join(f"`{'.'.join(path).replace(NUMBER, '{n}')}`" for path in (left, right) if path)
        for mine, theirs in trees:
            for at in mine.members.keys() & theirs.members.keys():
                one, other = mine.members[at], theirs.members[at]
                if fit(one, other) and one.key in self.left and other.key in self.right:
                    way = "left" if one.shape != other.shape else ""
                    evidence = f"{SAME_NAME} below {below}" if below else SAME_NAME
                    self._take(Pair((one.key,), (other.key,), evidence, way))
        if len(trees) > 1:
            self.links.tree(left, right)
        return True

    def by_name(self) -> bool:
        """Names that differ by one segment: a module that holds another, or a hook that hides it."""
        return self._unique(
            lambda a, b: bool(inserted(a.template, b.template)),
            lambda a, b: f"{SAME_NAME} but for the segment `{inserted(a.template, b.template)}`",
            sure=True,  # also where other layers have the shorter name on both sides
        )

    def by_part(self) -> bool:
        """Tensors of one shape whose names say the same part of a layer: query, key, value, embedding."""
        return self._unique(lambda a, b: bool(certain(a)), _the_part, apart=lambda a: (kind(a), certain(a)))

    def by_module(self) -> bool:
        """A weight and a bias go together."""
        return self._unique(
            lambda a, b: (
                self.links.shares_module(a.first.key, b.first.key)
                and words.kind(a.template) == words.kind(b.template) != ""
            ),
            lambda a, b: "other tensors of its module are paired",
        )

    def by_relative_parts(self) -> bool:
        """Tensors of one shape that all have a part of their own by name, the same parts on both sides."""
        taken = False
        for lefts, rights in self.open.classes(kind):
            mine, theirs = ({words.part(group.template): group for group in side} for side in (lefts, rights))
            if "" in mine or mine.keys() != theirs.keys() or len(mine) < len(lefts) or len(theirs) < len(rights):
                continue
            for name, group in mine.items():
                taken |= self._take_groups(group, theirs[name], f"both are the {name} by name")
        return taken

    def by_segment(self) -> bool:
        """Tensors of one shape whose modules have the same name of their own."""
        return self._unique(
            lambda a, b: len(a.template) > 1,
            lambda a, b: "the same last segments and shape",
            apart=lambda a: (kind(a), a.template[-2:]),
        )

    def by_shape(self) -> bool:
        """The only two of a shape, in all layers alike."""
        return self._unique(
            lambda a, b: a.first.shape != () and a.first.shape != (1,),
            lambda a, b: f"the only ones of shape {list(a.first.shape)}" + (" in each layer" * (len(a.members) > 1)),
            weak=True,
        )

    def by_shape_alone(self) -> bool:
        """As `by_shape`, where a name does not say what kind of tensor it is."""

        def linked(left: Group, right: Group) -> bool:
            return not (words.kind(left.template) and words.kind(right.template)) and len(left.first.shape) > 1

        return self._unique(
            linked, lambda a, b: f"the only ones of shape {list(a.first.shape)}", weak=True, apart=lambda a: None
        )

    def by_order(self) -> bool:
        """As many of a shape on both sides, in the order in which the models define them."""
        taken = False
        for lefts, rights in self.open.classes(kind):
            before = taken
            for name in dict.fromkeys(map(certain, lefts)):
                mine, theirs = ([one for one in side if certain(one) == name] for side in (lefts, rights))
                taken |= self._take_in_order(mine, theirs)
            taken |= taken == before and self._take_in_order(lefts, rights)
        return taken

    def _take_in_order(self, lefts: Sequence[Group], rights: Sequence[Group]) -> bool:
        mine, theirs = ([group for group in side if self._is_left(group)] for side in (lefts, rights))
        if (
            len(mine) != len(theirs)
            or len(mine) < 2
            or not all(order.tells(own) for order, own in zip(self.orders, (mine, theirs)))
        ):
            return False
        if not all(self._agree(a, b) for a, b in zip(mine, theirs)):
            return False
        why = f"one of {len(mine)} of shape {list(mine[0].first.shape)}, in the same order"
        taken = [self._take_groups(a, b, why, weak=True) for a, b in zip(mine, theirs)]
        return any(taken)

    def by_parts(self) -> bool:
        """Several tensors that are one on the other side: query, key and value; gate and up."""
        taken = False
        for depth in DEPTHS:
            for hit in fused(self.open.groups(0, depth), self.open.groups(1, depth), self._may):
                taken |= self._take_fused(hit, 0)
            for hit in fused(self.open.groups(1, depth), self.open.groups(0, depth), lambda a, b: self._may(b, a)):
                taken |= self._take_fused(hit, 1)
        return taken

    # What steps have in common

    def _unique(
        self,
        linked: Callable[[Group, Group], bool],
        why: Callable[[Group, Group], str],
        weak: bool = False,
        apart: Apart = kind,
        sure: bool = False,
    ) -> bool:
        """Pairs the groups of a class that are linked with each other, and with no other group."""
        may = self._agree if weak else self._may

        def test(left: Group, right: Group) -> bool:
            self.open.spend(COST)
            return linked(left, right) and (sure or may(left, right))

        taken = False
        for lefts, rights in self.open.classes(apart):
            for a, b in list(only(lefts, rights, test)):
                taken |= self._take_groups(a, b, why(a, b), weak)
        return taken

    def _may(self, left: Group, right: Group) -> bool:
        """Whether nothing that is known of the modules around them speaks against the two. A head by name may stand
        outside of the tree in which all else is.
        """
        self.open.spend(COST)
        mine, theirs = template(left.first.key)[0], template(right.first.key)[0]
        if self.links.contradict(mine, theirs):
            return words.part(mine) == words.part(theirs) == words.HEAD
        kinds = words.kind(mine) and words.kind(theirs)  # else they stand in other modules than what they belong to
        return not (kinds and self.links.parts_modules(left.first.key, right.first.key))

    def _agree(self, left: Group, right: Group) -> bool:
        """As `_may`, and nothing in the names or in their places speaks against it either."""
        parts = words.part(left.template), words.part(right.template)
        places = [side.beside_layers(group) for side, group in zip(self.orders, (left, right))]
        return self._may(left, right) and all(not all(two) or two[0] == two[1] for two in (parts, places))

    def _is_left(self, group: Group) -> bool:
        return all(one.key in self.left or one.key in self.right for one in group.members.values())

    def _take_groups(self, left: Group, right: Group, evidence: str, weak: bool = False) -> bool:
        """Pairs two groups, layer by layer; no pair where an earlier one has taken a tensor of theirs."""
        if not (self._is_left(left) and self._is_left(right)):
            return False
        for at, tensor in left.members.items():
            self._take(Pair((tensor.key,), (right.members[at].key,), evidence), weak)
        return True

    def _take_fused(self, hit: Fused, side: int) -> bool:
        keys = [key for whole, parts in hit.pairs for key in (whole, *parts)]
        if not all(key in self.left or key in self.right for key in keys):
            return False
        for whole, parts in hit.pairs:
            evidence, parts = self._told(whole, parts, side, hit.evidence)
            left, right = ((whole,), parts) if side == 0 else (parts, (whole,))
            self._take(Pair(left, right, evidence))
        return True

    def _told(self, whole: str, parts: tuple[str, ...], side: int, evidence: str) -> tuple[str, tuple[str, ...]]:
        """The parts in the order that their values tell, and how it is known; else as they were."""
        if self.sides[0].digest is None or self.sides[1].digest is None or self.ways[0] or self.ways[1]:
            return evidence, parts
        tensors = self.left | self.right
        for order in permutations(parts):
            starts = [sum(tensors[part].shape[0] for part in order[:at]) for at in range(len(order))]
            slices = [(part, start, tensors[part].shape[0]) for part, start in zip(order, starts)]
            if all(self._is_slice(whole, one, side) for one in slices):
                return "the same values, parts in this order", order
        return f"{evidence}; the values differ", parts

    def _is_slice(self, whole: str, part: tuple[str, int, int], side: int) -> bool:
        key, start, size = part
        value = Op("aten.narrow.default", (Ref(whole), 0, start, size))
        return self._digest(side, value) == self._digest(1 - side, Ref(key))

    def _transposed(self, left: Iterable[str], right: Iterable[str]) -> str:
        """Of which side they are; parts of one tensor all are where one of them shows it."""
        return "left" if not self.ways[0].isdisjoint(left) else "right" if not self.ways[1].isdisjoint(right) else ""

    def _take(self, pair: Pair, weak: bool = False) -> None:
        way = "" if pair.evidence == _SAME_VALUES else self._transposed(pair.left, pair.right)
        pair = replace(pair, transposed=pair.transposed or way)
        self.open.changed()
        for key in pair.left:
            del self.left[key]
        for key in pair.right:
            del self.right[key]
        if weak:
            self.weak.add(len(self.pairs))
        self.pairs.append(pair)
        for left, right in product(pair.left, pair.right):
            self.links.pair(left, right)

    # The end

    def result(self, whole: bool = True) -> Inference:
        """The pairs, in the order of the left; with those that rest on shapes alone where most of a side is paired.
        What is left when the search was given up stands in one `Ambiguous` that says so.
        """
        explained = len(self.pairs) > min(len(self.left), len(self.right))
        weak = set[int]() if explained else self.weak
        told = (pair for at, pair in enumerate(self.pairs) if at not in weak)
        pairs = tuple(sorted(told, key=lambda pair: self.place[pair.left[0]]))
        doubted = tuple(
            Ambiguous(
                self.pairs[at].left, self.pairs[at].right, "only their shapes agree, and most keys have no partner"
            )
            for at in sorted(weak)
        )
        if not whole:
            why = f"not looked for further among {len(self.left):,} and {len(self.right):,} tensors: too many are alike"
            return Inference(pairs, (*doubted, Ambiguous(tuple(self.left), tuple(self.right), why)))
        return Inference(pairs, (*doubted, *self._ambiguous()))

    def _ambiguous(self) -> Iterator[Ambiguous]:
        seen: set[str] = set()
        for lefts, rights in self.open.classes(kind):
            mine, theirs = ([one.key for group in side for one in group.members.values()] for side in (lefts, rights))
            if seen.isdisjoint((*mine, *theirs)) and any(self._may(a, b) for a, b in product(lefts, rights)):
                seen.update(mine, theirs)
                yield Ambiguous(tuple(mine), tuple(theirs), "one shape, and no name or order tells them apart")


def _the_part(left: Group, right: Group) -> str:
    return f"both are the {certain(left)} by name"
