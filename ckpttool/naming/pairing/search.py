"""Pair tensors by evidence, the strongest first; ambiguous matches are left alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, permutations, product

from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.values import dataclass
from ckpttool.naming.pairing import evidence
from ckpttool.naming.pairing.evidence import Modules, Order, Stacks, Trees, fit, hanging, inserted, straight, turned
from ckpttool.naming.pairing.values import (
    SAME_NAME,
    Ambiguous,
    Group,
    Inference,
    Outlined,
    Pair,
    Side,
    Template,
    groups,
    shown,
    template,
)

DEPTHS = (3, 2, 1, 0)  # layer numbers that are generalised: models have up to three
# What an inference may cost: a comparison of two groups `COST`, a step one for each tensor that is left. Real models
# need far less; thousands of tensors of one shape under unrelated names would take hours, and find nothing.
COST = 8
_MOST = 5_000_000
_MOST_EACH = 20  # more for each tensor

Class = tuple[list[Group], list[Group]]
Apart = Callable[[Group], Hashable]


class BudgetExceeded(Exception):
    """The search has cost what it may."""


class Unpaired:
    """`left` and `right` are the tensors by their keys; who takes some out says that they have `changed`. `count` is
    how many there are in all, with those that pair by their names; `place` is that of a key among all of its side.
    """

    def __init__(
        self, left: dict[str, Outlined], right: dict[str, Outlined], count: int, place: Callable[[int, str], int]
    ) -> None:
        self.left, self.right = left, right
        self._place = place
        self._budget = _MOST + _MOST_EACH * count
        self._whole: list[list[Group] | None] = [None, None]
        self._grouped: dict[tuple[int, int], list[tuple[Hashable, Group]]] = {}
        self._stale = [False, False]

    def spend(self, cost: int) -> None:
        """Raises `Enough` where all has cost too much."""
        self._budget -= cost
        if self._budget < 0:
            raise BudgetExceeded

    def changed(self) -> None:
        """Tensors were taken out."""
        self._grouped.clear()
        self._stale = [True, True]

    def groups(self, side: int) -> list[Group]:
        """What is left of a side (0 or 1), as `values.groups` groups it."""
        found, open_ = self._whole[side], (self.left, self.right)[side]
        if found is None:
            found = groups(open_.values())
        elif self._stale[side]:
            found = self._in_order(side, filter(None, (group.among(open_) for group in found)))
        self._whole[side], self._stale[side] = found, False
        return found

    def at_depth(self, side: int, depth: int) -> list[tuple[Hashable, Group]]:
        """The same with the first `depth` layer numbers generalised only, each with its signature."""
        if (side, depth) not in self._grouped:
            found = self._in_order(side, (one for group in self.groups(side) for one in group.at_depth(depth)))
            self._grouped[side, depth] = [(group.signature, group) for group in found]
        return self._grouped[side, depth]

    def _in_order(self, side: int, found: Iterable[Group]) -> list[Group]:
        groups = list(found)
        return groups if len(groups) < 2 else sorted(groups, key=lambda one: self._place(side, one.first.key))

    def classes(self, apart: Apart) -> Iterator[Class]:
        """Groups of both sides with tensors of one shape in the same layers, and alike in what keeps them `apart`."""
        for depth in DEPTHS:
            found: dict[Hashable, Class] = {}
            for signature, group in self.at_depth(0, depth):
                found.setdefault((signature, apart(group)), ([], []))[0].append(group)
            for signature, group in self.at_depth(1, depth) if found else ():
                own = found.get((signature, apart(group)))
                if own is not None:
                    own[1].append(group)
            yield from ((a, b) for a, b in found.values() if b)


def kind(group: Group) -> str:
    """As `words.kind`."""
    return evidence.tensor_kind(group.path)


def certain(group: Group) -> str:
    """As `words.certain_part`."""
    return evidence.certain_part(group.path)


def part(group: Group) -> str:
    """As `words.part`."""
    return evidence.part(group.path)


def only(
    lefts: Sequence[Group], rights: Sequence[Group], linked: Callable[[Group, Group], bool]
) -> Iterator[tuple[Group, Group]]:
    """Those that are linked with each other and no other; after a second link no third is looked for."""
    for left in lefts:
        hits = list(islice((right for right in rights if linked(left, right)), 2))
        if len(hits) == 1 and len(list(islice((one for one in lefts if linked(one, hits[0])), 2))) == 1:
            yield left, hits[0]


May = Callable[[Group, Group], bool]


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor and its parts, in every layer."""

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    evidence: str


def fused(wholes: Sequence[Group], parts: Sequence[Group], may: May) -> Iterator[Fused]:
    """The wholes of one side that exactly one set of parts of the other makes up.

    `may` says whether what is known of the modules around them allows a whole and a part.
    """
    rows = list(_rows(parts))
    kinds: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for whole in wholes if rows else ():
        kinds[kind(whole), frozenset((at, one.shape) for at, one in whole.members.items())].append(whole)
    for names, row in rows:
        fits = [whole for whole in kinds.get(_sums(row), ()) if may(whole, row[0])]
        fits = [whole for whole in fits if evidence.is_fused(whole.template)] or fits
        if len(fits) == 1:
            members = fits[0].members.items()
            pairs = tuple((one.key, tuple(part.members[at].key for part in row)) for at, one in members)
            yield Fused(pairs, f"shapes add up, parts in the field's order {', '.join(names)}")


def _rows(parts: Sequence[Group]) -> Iterator[tuple[tuple[str, ...], tuple[Group, ...]]]:
    """Groups beside each other that are, by name, the parts of something that layers may keep in one tensor."""
    homes: defaultdict[tuple[Template, str], dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for group in parts:
        path, name = group.template, part(group)
        home = next((path[:at] for at in _part_at(path, name)), ()) if name else ()
        homes[home, kind(group)][name].append(group)
    for by_name in homes.values():
        for names in evidence.FUSED:
            rows = [by_name.get(name, []) for name in names]
            if all(len(row) == 1 for row in rows):
                yield names, tuple(row[0] for row in rows)
                break


def _part_at(path: Template, name: str) -> Iterator[int]:
    """Where in the path the segment stands that says the part."""
    return (at for at in range(len(path) - 1, -1, -1) if name.endswith(evidence.part(path[at : at + 1]) or "?"))


def _sums(row: Sequence[Group]) -> Hashable:
    """The kind and the shapes, layer by layer, of the tensor that these are the parts of; None where of none."""
    first = row[0]
    if any(part.members.keys() != first.members.keys() for part in row):
        return None
    shapes = []
    for at, one in first.members.items():
        own = [part.members[at] for part in row]
        if not all(part.shape and (part.dtype, part.shape[1:]) == (one.dtype, one.shape[1:]) for part in own):
            return None
        shapes.append((at, (sum(part.shape[0] for part in own), *one.shape[1:])))
    return kind(first), frozenset(shapes)


_SAME_VALUES = "the same values"


def infer(left: Side, right: Side, known: Mapping[str, str] | None = None) -> Inference:
    """Pairs of the two sides' tensors. `known`: keys of the left -> keys of the right that are the same tensor's."""
    ways = turned(left.tensors), turned(right.tensors)
    if bool(ways[0]) == bool(ways[1]):  # both are, or neither is
        ways = frozenset(), frozenset()
    search = _Search(straight(left, ways[0]), straight(right, ways[1]), known or {}, ways)
    steps = (
        *(search.by_content, search.by_tree, search.by_name, search.by_part, search.by_module, search.by_parts),
        *(search.by_relative_parts, search.by_segment, search.by_shape, search.by_order, search.by_shape_alone),
        search.by_elimination,
    )
    try:
        while any(search.step(step) for step in steps):
            pass
        return search.result()
    except BudgetExceeded:
        return search.result(whole=False)


class _Search:
    """`left` and `right` are the tensors that have no partner yet. A step pairs what its evidence tells, and says
    whether that was anything.
    """

    def __init__(
        self, left: Side, right: Side, known: Mapping[str, str], ways: tuple[frozenset[str], frozenset[str]]
    ) -> None:
        self.sides, self.ways, self.known = (left, right), ways, bool(known)
        self.left, self.right, turned_too = self._not_known(known)
        self.orders = orders = Order(left), Order(right)
        count = len(left.tensors) + len(right.tensors)
        self.open = Unpaired(self.left, self.right, count, lambda side, key: orders[side].place[key])
        self.pairs: list[Pair] = []
        self.weak: set[int] = set()  # those of the pairs that no name bears out
        self.stacks, self.modules = Stacks(known), Modules(known, self.pairs, self.left, self.right)
        for mine, theirs in turned_too:
            self._take((mine,), (theirs,), SAME_NAME)

    def _not_known(
        self, known: Mapping[str, str]
    ) -> tuple[dict[str, Outlined], dict[str, Outlined], list[tuple[str, str]]]:
        """The tensors of each side without those that are one by name; and which of these have to be transposed.

        One whose shape is another is still to be paired.
        """
        left, right = ({one.key: one for one in side.tensors} for side in self.sides)
        turned_too, gone, others = list[tuple[str, str]](), set[str](), set[str]()
        for mine, theirs in known.items():
            one, other = left.get(mine), right.get(theirs)
            if one is None or other is None:
                continue
            if self._transposed((mine,), (theirs,)):
                turned_too.append((mine, theirs))
            elif one.shape == other.shape:
                gone.add(mine)
                others.add(theirs)
        open_left = {key: one for key, one in left.items() if key not in gone}
        return open_left, {key: one for key, one in right.items() if key not in others}, turned_too

    def step(self, way: Callable[[], bool]) -> bool:
        """One step. Raises `Enough` where all has cost too much."""
        self.open.spend(len(self.left) + len(self.right))
        self.modules.begin()
        return bool(self.left and self.right) and way()

    # Steps

    def by_content(self) -> bool:
        """Tensors of which exactly one of each side has these bytes."""
        if self.sides[0].digest is None or self.sides[1].digest is None:
            return False
        mine, theirs = self._by_digest(self.left, self.right, 0), self._by_digest(self.right, self.left, 1)
        hits = [(mine[at][0], theirs[at][0]) for at in mine if len(mine[at]) == len(theirs.get(at, ())) == 1]
        for left, right in hits:
            self._take((left,), (right,), _SAME_VALUES)
        return bool(hits)

    def _by_digest(
        self, mine: dict[str, Outlined], theirs: dict[str, Outlined], side: int
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
        trees = Trees()
        for left, right, mine, theirs in hanging(self.open.groups(0), self.open.groups(1)):
            self.open.spend(COST)
            rest = len(mine.path) - len(left)
            if not self.stacks.contradict(mine.path, theirs.path) and self._hangs(left, right, rest):
                trees.add(left, right, mine, theirs)
        best = trees.best()
        return best is not None and self._hang(*best, trees.found[best])

    def _hangs(self, left: Template, right: Template, rest: int) -> bool:
        """Whether a tree may hang below these two: names of one segment say too little, and a module that both sides
        have is no other.
        """
        return (rest > 1 or not left or not right) and not (
            (left and self.stacks.is_same(left)) or (right and self.stacks.is_same(right))
        )

    def _hang(self, left: Template, right: Template, trees: list[tuple[Group, Group]]) -> bool:
        below = " and ".join(f"`{shown(path)}`" for path in (left, right) if path)
        evidence = f"{SAME_NAME} below {below}" if below else SAME_NAME
        for mine, theirs in trees:
            both = ((one, theirs.members[at]) for at, one in mine.members.items() if at in theirs.members)
            found = [
                Pair((one.key,), (other.key,), evidence, self._way(one, other))
                for one, other in both
                if fit(one, other) and one.key in self.left and other.key in self.right
            ]
            if found:
                self._found(found)
                self.stacks.pair(mine.path, theirs.path)
        if len(trees) > 1:
            self.stacks.tree(left, right)
        return True

    def _way(self, left: Outlined, right: Outlined) -> str:
        """Which of two that fit is stored transposed."""
        return "left" if left.shape != right.shape else self._transposed((left.key,), (right.key,))

    def by_name(self) -> bool:
        """Names that differ by one segment: a module that holds another, or a hook that hides it."""
        return self._unique(
            lambda a, b: abs(len(a.path) - len(b.path)) == 1 and bool(inserted(a.template, b.template)),
            lambda a, b: f"{SAME_NAME} but for the segment `{inserted(a.template, b.template)}`",
            sure=True,  # also where other layers have the shorter name on both sides
        )

    def by_part(self) -> bool:
        """Tensors of one shape whose names say the same part of a layer: query, key, value, embedding."""
        return self._unique(lambda a, b: bool(certain(a)), _the_part, apart=lambda a: (kind(a), certain(a)))

    def by_module(self) -> bool:
        """A weight and a bias go together."""
        return self._unique(
            lambda a, b: self.modules.share(a.first.key, b.first.key) and kind(a) == kind(b) != "",
            lambda a, b: "other tensors of its module are paired",
        )

    def by_relative_parts(self) -> bool:
        """Tensors of one shape that all have a part of their own by name, the same parts on both sides."""
        taken = False
        for lefts, rights in self.open.classes(kind):
            mine, theirs = ({part(group): group for group in side} for side in (lefts, rights))
            if "" in mine or mine.keys() != theirs.keys() or len(mine) < len(lefts) or len(theirs) < len(rights):
                continue
            for name, group in mine.items():
                taken |= self._take_groups(group, theirs[name], f"both are the {name} by name")
        return taken

    def by_segment(self) -> bool:
        """Tensors of one shape whose modules have the same name of their own."""
        return self._unique(
            lambda a, b: len(a.path) > 1,
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
            return not (kind(left) and kind(right)) and len(left.first.shape) > 1

        return self._unique(
            linked, lambda a, b: f"the only ones of shape {list(a.first.shape)}", weak=True, apart=lambda a: None
        )

    def by_elimination(self) -> bool:
        """The only tensor on each side that has no partner, if others have one: there is one way to pair them."""

        def linked(left: Group, right: Group) -> bool:
            one, other = left.first, right.first
            kinds = {kind(left), kind(right)} - {""}
            return (one.shape, one.dtype) == (other.shape, other.dtype) and len(kinds) < 2

        if len(self.left) != 1 or len(self.right) != 1 or not (self.known or self.pairs):
            return False
        return self._unique(
            linked, lambda a, b: "the only ones without a partner, of one shape", weak=True, apart=lambda a: None
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
            for hit in fused(*self._two(depth), self._may):
                taken |= self._take_fused(hit, 0)
            for hit in fused(*self._two(depth)[::-1], lambda a, b: self._may(b, a)):
                taken |= self._take_fused(hit, 1)
        return taken

    def _two(self, depth: int) -> tuple[list[Group], list[Group]]:
        left, right = ([group for _, group in self.open.at_depth(side, depth)] for side in (0, 1))
        return left, right

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
        if self.stacks.contradict(left.path, right.path):
            return part(left) == part(right) == evidence.HEAD
        kinds = kind(left) and kind(right)  # else they stand in other modules than what they belong to
        return not (kinds and self.modules.part(left.first.key, right.first.key))

    def _agree(self, left: Group, right: Group) -> bool:
        """As `_may`, and nothing in the names or in their places speaks against it either."""
        parts = part(left), part(right)
        places = [side.beside_layers(group) for side, group in zip(self.orders, (left, right))]
        return self._may(left, right) and all(not all(two) or two[0] == two[1] for two in (parts, places))

    def _is_left(self, group: Group) -> bool:
        return all(one.key in self.left or one.key in self.right for one in group.members.values())

    def _take_groups(self, left: Group, right: Group, evidence: str, weak: bool = False) -> bool:
        """Pairs two groups, layer by layer; no pair where an earlier one has taken a tensor of theirs."""
        if not (self._is_left(left) and self._is_left(right)):
            return False
        pairs = [
            Pair((one.key,), (other.key,), evidence, self._transposed((one.key,), (other.key,)))
            for one, other in ((one, right.members[at]) for at, one in left.members.items())
        ]
        if weak:
            self.weak.update(range(len(self.pairs), len(self.pairs) + len(pairs)))
        self._found(pairs)
        self.stacks.pair(left.path, right.path)
        return True

    def _take_fused(self, hit: Fused, side: int) -> bool:
        keys = [key for whole, parts in hit.pairs for key in (whole, *parts)]
        if not all(key in self.left or key in self.right for key in keys):
            return False
        for whole, parts in hit.pairs:
            evidence, parts = self._told(whole, parts, side, hit.evidence)
            left, right = ((whole,), parts) if side == 0 else (parts, (whole,))
            self._take(left, right, evidence)
        return True

    def _told(self, whole: str, parts: tuple[str, ...], side: int, evidence: str) -> tuple[str, tuple[str, ...]]:
        """The parts in the order that their values tell, and how it is known; else as they were."""
        if self.sides[0].digest is None or self.sides[1].digest is None or any(self.ways):
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

    def _take(self, left: tuple[str, ...], right: tuple[str, ...], evidence: str) -> None:
        """Pairs what stands alone, or has several on one side."""
        way = "" if evidence == _SAME_VALUES else self._transposed(left, right)
        self._found([Pair(left, right, evidence, way)])
        for mine, theirs in product(left, right):
            self.stacks.pair(template(mine)[0], template(theirs)[0])

    def _found(self, pairs: Sequence[Pair]) -> None:
        self.open.changed()
        for pair in pairs:
            for key in pair.left:
                del self.left[key]
            for key in pair.right:
                del self.right[key]
        self.pairs += pairs

    # The end

    def result(self, whole: bool = True) -> Inference:
        """The pairs, in the order of the left; with those that rest on shapes alone where most of a side is paired.
        What is left when the search was given up stands in one `Ambiguous` that says so.
        """
        explained = len(self.pairs) > min(len(self.left), len(self.right))
        weak = set[int]() if explained else self.weak
        kept = [pair for at, pair in enumerate(self.pairs) if at not in weak]
        pairs = tuple(sorted(kept, key=lambda pair: self.orders[0].place[pair.left[0]]))
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
