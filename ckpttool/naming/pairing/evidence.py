"""Evidence that two tensors are the same: vocabulary, order, shapes, neighbors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, product

from ckpttool.core.keys import NUMBER as NUMBER_SEGMENT
from ckpttool.naming.pairing.values import NUMBER, Group, Outlined, Pair, Side, Template, Tensor, groups, template


def turned(tensors: Iterable[Outlined]) -> frozenset[str]:
    """The weights that the biases beside them show to be stored as (in, out); none where a bias shows the other order.

    A square weight, which no bias can tell, is taken for one where all others under its module's name are.
    """
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    biases = {f"{key[:-4]}weight": shape[0] for key, shape in shapes.items() if len(shape) == 1 and key[-5:] == ".bias"}
    flat = {key: out for key, out in biases.items() if len(shapes.get(key, ())) == 2}
    found = {key for key, out in flat.items() if shapes[key][1] == out != shapes[key][0]}
    if any(shapes[key][0] == out != shapes[key][1] for key, out in flat.items()):
        return frozenset()
    names = {_own_name(key) for key in found}
    square = {key for key, out in flat.items() if shapes[key] == (out, out) and _own_name(key) in names}
    return frozenset(found | square)


def straight(side: Side, keys: frozenset[str]) -> Side:
    """The side with the shapes of these tensors as (out, in)."""
    if not keys:
        return side
    straight = (Tensor(one.key, one.dtype, one.shape[::-1]) if one.key in keys else one for one in side.tensors)
    return Side(tuple(straight), side.ordered, side.digest)


def _own_name(key: str) -> str:
    """The name of the module that holds the tensor, without the way to it."""
    return key.split(".")[-2]


_LONGEST_PREFIX = 6  # segments that a tree may hang below


def inserted(one: Template, other: Template) -> str:
    """The segment that the longer of two names has and the shorter has not; empty where they differ by more."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) != 1:
        return ""
    return next((part for at, part in enumerate(long) if long[:at] + long[at + 1 :] == short), "")


def fit(left: Outlined, right: Outlined) -> bool:
    """Whether the two have one shape, or one that is the other's transposed."""
    return left.shape == right.shape or (len(left.shape) == 2 and left.shape == right.shape[::-1])


def hanging(lefts: Sequence[Group], rights: Sequence[Group]) -> Iterator[tuple[Template, Template, Group, Group]]:
    """Two prefixes, and two groups that have one name but for these; below two modules that is more than a segment."""
    asked = {rest for group in lefts for _, rest in _split(group.path) if rest[1:] or rest == group.path}
    below: dict[Template, list[tuple[Template, Group]]] = {}
    for group in rights:
        for prefix, rest in _split(group.path):
            if rest in asked:
                below.setdefault(rest, []).append((prefix, group))
    alone = {group.path: [((), group)] for group in rights if not group.path[1:]}
    for mine in lefts:
        for own, rest in _split(mine.path):
            for prefix, theirs in (below if rest[1:] or not own else alone).get(rest, ()):
                yield own, prefix, mine, theirs


def _split(path: Template) -> Iterator[tuple[Template, Template]]:
    """What a tree may hang below, and the rest of the name."""
    return ((path[:depth], path[depth:]) for depth in range(min(len(path), _LONGEST_PREFIX)))


class Trees:
    """Two prefixes -> the groups below them that have one name but for these."""

    def __init__(self) -> None:
        self.found: dict[tuple[Template, Template], list[tuple[Group, Group]]] = {}
        self._likes: dict[tuple[Group, Group], int] = {}

    def add(self, left: Template, right: Template, mine: Group, theirs: Group) -> None:
        """Two groups that have one name below these prefixes."""
        self.found.setdefault((left, right), []).append((mine, theirs))

    def best(self) -> tuple[Template, Template] | None:
        """The prefixes that explain most tensors, of those the shortest; None where others do so as well."""
        count = {at: sum(map(self._like, own)) for at, own in self.found.items()}
        ranked = sorted(count, key=lambda at: (-count[at], len(at[0]) + len(at[1])))
        if not ranked or not count[ranked[0]]:
            return None
        ties = len(ranked) > 1 and count[ranked[0]] == count[ranked[1]] and self._tie(*ranked[:2])
        return None if ties else ranked[0]

    def _like(self, two: tuple[Group, Group]) -> int:
        """How many tensors of the one, layer by layer, have a like in the other."""
        if two not in self._likes:
            mine, theirs = (group.members for group in two)
            self._likes[two] = sum(at in theirs and fit(one, theirs[at]) for at, one in mine.items())
        return self._likes[two]

    def _tie(self, best: tuple[Template, Template], second: tuple[Template, Template]) -> bool:
        """Whether two explanations, one as short as the other, are about some tensors that are the same."""
        sides = ({(side, pair[side].path) for pair in self.found[at] for side in (0, 1)} for at in (best, second))
        return sum(map(len, best)) == sum(map(len, second)) and bool(set.intersection(*sides))


class Stacks:
    """Repeated layers and whole trees. Grows with every pair; `known` are keys of the left -> keys of the right."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._homes: tuple[defaultdict[Template, set[Template]], ...] = defaultdict(set), defaultdict(set)
        self._paired: set[tuple[Template, Template]] = set()

    def pair(self, mine: Template, theirs: Template) -> None:
        """Tensors of these names were found to be one, in some layer."""
        if (mine, theirs) in self._paired:
            return
        self._paired.add((mine, theirs))
        ours, others = _numbers(mine), _numbers(theirs)
        if len(ours) == len(others):
            for at, there in zip(ours, others):
                self.tree(mine[: at + 1], theirs[: there + 1])

    def tree(self, left: Template, right: Template) -> None:
        """All that is below `left` is below `right`, under the same names."""
        self._homes[0][left].add(right)
        self._homes[1][right].add(left)

    def contradict(self, left: Template, right: Template) -> bool:
        """Whether what is known of the modules on their way says that these two are not one tensor."""
        self._look()
        return _strays(left, right, self._homes[0]) or _strays(right, left, self._homes[1])

    def is_same(self, path: Template) -> bool:
        """Whether both sides have the module under this name."""
        self._look()
        return path in self._homes[0].get(path, ())

    def _look(self) -> None:
        """Takes in what is known by name; of a key of both sides all modules on its way are the same."""
        known, self._known = self._known, {}
        if not known:
            return
        for path in {template(mine)[0] for mine, theirs in known.items() if mine == theirs}:
            self.pair(path, path)
            for depth in range(1, len(path)):
                self.tree(path[:depth], path[:depth])
        for mine, theirs in known.items():
            if mine != theirs:
                self.pair(template(mine)[0], template(theirs)[0])


class Modules:
    """What holds a pair directly. `known` are keys of the left -> keys of the right, `pairs` grows with what is found,
    `left` and `right` shrink to what is open.

    Told apart are modules that held something open when the last step began: of others it does not ask.
    """

    def __init__(
        self, known: Mapping[str, str], pairs: Sequence[Pair], left: Iterable[str], right: Iterable[str]
    ) -> None:
        self._known, self._pairs, self._open = known, pairs, (left, right)
        self._homes: tuple[defaultdict[str, set[str]], ...] = defaultdict(set), defaultdict(set)
        self._near: tuple[set[str], set[str]] | None = None
        self._begun = self._seen = 0

    def begin(self) -> None:
        """A step begins."""
        self._near, self._begun = None, len(self._pairs)

    def share(self, left: str, right: str) -> bool:
        """Whether the modules that hold these two keys hold a pair already."""
        self._look()
        return _module(right) in self._homes[0].get(_module(left), ())

    def part(self, left: str, right: str) -> bool:
        """Whether a module that holds one of these two holds pairs already, with others than the other's."""
        shared = self.share(left, right)
        return not shared and (_module(left) in self._homes[0] or _module(right) in self._homes[1])

    def _look(self) -> None:
        """Takes in the pairs that are new."""
        if self._near is not None and self._seen == len(self._pairs):
            return
        if self._near is None:
            recent = self._pairs[self._begun :]
            taken = (key for pair in recent for key in pair.left), (key for pair in recent for key in pair.right)
            self._near = _modules(chain(self._open[0], taken[0])), _modules(chain(self._open[1], taken[1]))
        known, self._known = self._known, {}
        found, self._seen = self._pairs[self._seen :], len(self._pairs)
        for mine, theirs in chain(known.items(), _keys(found)):
            left, right = _module(mine), _module(theirs)
            if left in self._near[0]:
                self._homes[0][left].add(right)
            if right in self._near[1]:
                self._homes[1][right].add(left)


def _keys(pairs: Iterable[Pair]) -> Iterator[tuple[str, str]]:
    return ((left, right) for pair in pairs for left, right in product(pair.left, pair.right))


def _modules(keys: Iterable[str]) -> set[str]:
    return set(map(_module, keys))


def _strays(one: Template, other: Template, known: Mapping[Template, set[Template]]) -> bool:
    for depth in range(len(one)):
        homes = known.get(one[:depth])
        if homes and not any(other[: len(home)] == home for home in homes):
            return True
    return False


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _numbers(path: Template) -> list[int]:
    return [at for at, segment in enumerate(path) if segment == NUMBER]


# Part -> whole segments, in lower case, that mean it and nothing else, whatever stands around them.
CERTAIN: dict[str, tuple[str, ...]] = {
    "query": ("q", "wq", "q_proj", "query", "q_lin", "to_q", "query_proj", "query_layer", "q_proj_weight"),
    "key": ("k", "wk", "k_proj", "key", "k_lin", "to_k", "key_proj", "key_layer", "k_proj_weight"),
    "value": ("v", "wv", "v_proj", "value", "v_lin", "to_v", "value_proj", "value_layer", "v_proj_weight"),
    "token embedding": ("tok_embeddings", "embed_tokens", "wte", "word_embeddings", "token_embedding", "tokens_embed"),
    "position embedding": ("wpe", "position_embeddings", "positions_embed", "position_embedding", "pos_embed"),
}
# Parts whose words mean other things elsewhere (`w1` of two and of three matrices): believed only where each tensor of
# one shape has one, and no two the same.
RELATIVE: dict[str, tuple[str, ...]] = {
    "attention output": ("o", "wo", "o_proj", "out_proj", "output_proj", "out_lin"),
    "gate": ("gate_proj", "w1", "gate", "wi_0"),
    "up": ("up_proj", "w3", "up", "wi_1"),
    "down": ("down_proj", "w2", "down"),
    "attention's norm": (
        *("input_layernorm", "attention_norm", "attn_norm", "sa_norm", "ln_1", "norm1", "layernorm_before"),
        *("self_attn_layer_norm", "sa_layer_norm", "attn_ln"),
    ),
    "feed-forward's norm": (
        *("post_attention_layernorm", "ffn_norm", "mlp_norm", "ln_2", "norm2", "layernorm_after"),
        *("final_layer_norm", "output_layer_norm", "mlp_ln"),
    ),
}
# What stands outside of all layers, by the first of two segments (`output.weight`).
HEAD = "head"
_OUTERMOST = frozenset({"lm_head", "output", "head", "embed_out"})
# An attention of this name attends to another sequence: its query is not that of the layer's other attention.
_CROSS = frozenset({"cross_attn", "encoder_attn", "multihead_attn", "crossattention", "encdecattention", "attn2"})
# Parts that layers keep in one tensor, in the order in which the field lays them end to end.
_ATTENTION = (("query", "key", "value"), ("key", "value"))
FUSED = (*_ATTENTION, ("gate", "up"), *(tuple(f"cross-attention's {name}" for name in names) for names in _ATTENTION))
FUSED_WORDS = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "to_kv", "gate_up")

# Kind -> last words of a tensor's own name. A scale is not taken for a bias, whatever their shapes.
KINDS: dict[str, tuple[str, ...]] = {
    "weight": ("weight", "scale", "gamma", "kernel"),
    "bias": ("bias", "beta"),
    "mean": ("mean",),
    "variance": ("var", "variance"),
    "count": ("tracked", "averaged"),
}

_CERTAIN = {word: part for part, words in CERTAIN.items() for word in words}
_PARTS = {word: part for part, words in RELATIVE.items() for word in words} | _CERTAIN
_KINDS = {word: kind for kind, words in KINDS.items() for word in words}


_kept = lru_cache(maxsize=1 << 16)  # a group's name is asked about at each step


@_kept
def tensor_kind(segments: tuple[str, ...]) -> str:
    """``weight``, ``bias``, ...; empty where the name does not say."""
    return _KINDS.get(segments[-1].lower().rpartition("_")[2], "")


@_kept
def certain_part(segments: tuple[str, ...]) -> str:
    """``query``, ``key``, ...; empty where no segment says so."""
    return _innermost(segments, _CERTAIN)


@_kept
def part(segments: tuple[str, ...]) -> str:
    """As `certain_part`, and by the words that other tensors of the layer have to bear out."""
    if len(segments) == 2 and segments[0].lower() in _OUTERMOST:
        return HEAD
    return _innermost(segments, _PARTS)


def is_fused(segments: tuple[str, ...]) -> bool:
    """Whether the name says that several parts are in one tensor."""
    return any(word in segment.lower() for segment in segments for word in FUSED_WORDS)


def _innermost(segments: tuple[str, ...], table: dict[str, str]) -> str:
    lower = [segment.lower() for segment in segments]
    found = next((table[word] for word in reversed(lower) if word in table), "")
    return f"cross-attention's {found}" if found and not _CROSS.isdisjoint(lower) else found


def exchangeable(tensors: Iterable[Outlined]) -> tuple[tuple[str, ...], ...]:
    """Keys of tensors that have one shape in the same layers, a tuple for each shape; biases go with their weights.

    Layers themselves could be exchanged too, in every model: of that nothing is said.
    """
    found: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for group in groups(tensors):
        if tensor_kind(group.path) in ("weight", "") and len(group.first.shape) > 0:
            found[group.signature, _stack(group.path)].append(group)
    alike = (own for own in found.values() if len(own) > 1)
    return tuple(tuple(one.key for group in own for one in group.members.values()) for own in alike)


def _stack(path: Template) -> Template:
    """The layers that a tensor is in; empty for one outside of all."""
    last = max((at for at, segment in enumerate(path) if segment == NUMBER), default=-1)
    return path[: last + 1]


class Order:
    """The places of one side's tensors; looked up when one is asked for."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @cached_property
    def place(self) -> dict[str, int]:
        """Key -> its place."""
        return {tensor.key: at for at, tensor in enumerate(self._side.tensors)}

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Module -> the place of the first layer below it."""
        first: dict[str, int] = {}  # what stands before the first number -> the place of the first key that has it
        for key, at in self.place.items():
            number = NUMBER_SEGMENT.search(key)
            if number is not None:
                first.setdefault(key[: number.start()], at)
        found: dict[str, int] = {}
        for way, at in first.items():
            segments = way.split(".")[:-1]
            for depth in range(len(segments)):
                found.setdefault(".".join(segments[:depth]), at)
        return found

    def tells(self, groups: Sequence[Group]) -> bool:
        """Whether the order of the groups says anything: the file keeps it, or numbers in their names do."""
        return self._side.ordered or _numbered([group.template for group in groups])

    def beside_layers(self, group: Group) -> str:
        """Whether a module outside of all layers is defined ``before`` or ``after`` them; empty where nobody knows.

        Parameters of a module's own come first in a state dict, wherever they are used: their order says nothing.
        """
        path = tuple(group.first.key.split("."))
        if not self._side.ordered or not tensor_kind(path) or any(segment.isdecimal() for segment in path):
            return ""
        homes = (".".join(path[:depth]) for depth in range(len(path) - 1, -1, -1))
        layers = next((self._layers[home] for home in homes if home in self._layers), None)
        if layers is None:
            return ""
        return "before" if self.place[group.first.key] < layers else "after"


def _numbered(templates: Sequence[Template]) -> bool:
    """Whether the names differ in nothing but numbers that grow: ``fc1``, ``fc2``; ``0``, ``2``."""
    split = [[part for segment in path for part in _digits(segment)] for path in templates]
    if len({len(parts) for parts in split}) > 1:
        return False
    varying = [column for column in zip(*split) if len(set(column)) > 1]
    return (
        len(varying) == 1
        and all(part.isdecimal() for part in varying[0])
        and list(map(int, varying[0])) == sorted(map(int, varying[0]))
    )


def _digits(segment: str) -> list[str]:
    return [*re.split(r"(\d+)", segment), "."]
