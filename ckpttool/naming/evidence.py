"""Evidence that two tensors are the same: words in names, modules around them, order, and
transposed shapes.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.expression import Expression
from ckpttool.core.strides import Shape
from ckpttool.core.tables import owners
from ckpttool.core.text import NUMBER as NUMBER_SEGMENT
from ckpttool.core.text import Info, split_at_numbers
from ckpttool.core.values import dataclass

# any layer number in a template; `template` escapes segments of a key that read like it
NUMBER = "#"
SAME_NAME = Info("the same name", "same-name")  # evidence by names alone has this code

Template = tuple[str, ...]
# of a value over one side's keys; None if it has none
Digest = Callable[[Expression], "bytes | None"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """The outline of a tensor, without an index."""

    key: str
    dtype: str
    shape: Shape


Outlined = Union[Tensor, TensorEntry]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the left that is likely one of the right. Several tensors on one side are the
    parts of the tensor on the other side, end to end along dimension 0, in this order. `transposed`
    is the side whose tensors are stored transposed: ``left``, ``right``, or neither.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    evidence: str
    transposed: str = ""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors that no evidence pairs: several could match, or only the shapes agree."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Inference:
    """Pairs, and ambiguous tensors. A key is in one pair at most, and if so, in none of
    `ambiguous`.
    """

    pairs: tuple[Pair, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()


@dataclass(frozen=True, slots=True)
class SideTensors:
    """One side's tensors. `ordered`: they are in the order in which the model defines them."""

    tensors: Sequence[Outlined]
    ordered: bool = True
    digest: Digest | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors whose names differ in layer numbers only. There may be as many groups as tensors.

    `path` is their name with `NUMBER` for all layer numbers. `fixed` are the last numbers, joined
    by dots, if they are the same for all tensors. `many` maps the other numbers to tensors; None if
    there are none, but only the `first`.
    """

    path: Template
    fixed: str
    first: Outlined
    many: Mapping[str, Outlined] | None

    @property
    def members(self) -> Mapping[str, Outlined]:
        """The tensors by the numbers in which they differ, joined by dots."""
        return {"": self.first} if self.many is None else self.many

    @property
    def template(self) -> Template:
        """Their name, with `NUMBER` for the numbers in which they differ."""
        if not self.fixed:
            return self.path
        numbers = self.fixed.split(".")
        segments = list(self.path)
        for index in range(len(segments) - 1, -1, -1):
            if numbers and segments[index] == NUMBER:
                segments[index] = numbers.pop()
        return tuple(segments)

    @property
    def signature(self) -> Hashable:
        """A value that is equal for groups with tensors of the same shapes in the same layers.

        All floating-point dtypes count as the same: checkpoints are cast.
        """
        if self.many is None:
            return _outline(self.first)
        layers: dict[Hashable, list[str]] = {}
        for numbers, tensor in self.many.items():
            layers.setdefault(_outline(tensor), []).append(numbers)
        return frozenset((outline, frozenset(numbers)) for outline, numbers in layers.items())

    def at_depth(self, depth: int) -> Iterator[Group]:
        """Yield groups of the tensors that differ in the first `depth` numbers only.

        Of ``layers.#.experts.#.w``, depth 1 has a group for each expert: its tensors in all layers.
        """
        count = self.path.count(NUMBER)
        if count == depth:
            yield self
        if self.many is None or depth >= count:
            return
        if depth == 0:
            for numbers, tensor in self.many.items():
                yield Group(self.path, numbers, tensor, None)
            return
        members_by_fixed: dict[str, dict[str, Outlined]] = {}
        for joined, tensor in self.many.items():
            split = joined.split(".")
            varying, fixed = ".".join(split[:depth]), ".".join(split[depth:])
            members = members_by_fixed.setdefault(fixed, {})
            members[varying] = tensor
        for fixed, members in members_by_fixed.items():
            yield _group(self.path, fixed, members)

    def among(self, keys: Container[str]) -> Group | None:
        """Return the group of those tensors that have one of the keys, or None."""
        members = {
            numbers: tensor for numbers, tensor in self.members.items() if tensor.key in keys
        }
        if len(members) == len(self.members):
            return self
        return _group(self.path, self.fixed, members) if members else None


def _group(path: Template, fixed: str, members: dict[str, Outlined]) -> Group:
    first = next(iter(members.values()))
    return Group(path, fixed, first, None if members.keys() == {""} else members)


def _outline(tensor: Outlined) -> Hashable:
    return "float" in tensor.dtype, tensor.shape


def groups(tensors: Iterable[Outlined]) -> list[Group]:
    """Group the tensors by their names without any layer number, in the order of each group's first
    tensor.
    """
    members: dict[Template, dict[str, Outlined]] = {}
    for tensor in tensors:
        path, numbers = template(tensor.key)
        members.setdefault(path, {})[numbers] = tensor
    return [_group(path, "", group) for path, group in members.items()]


def template(key: str) -> tuple[Template, str]:
    """Return the key's segments with `NUMBER` for layer numbers, and these numbers, joined by
    dots.
    """
    if NUMBER in key:
        key = ".".join(map(_escaped, key.split(".")))
    texts = split_at_numbers(key)
    name = f".{NUMBER}".join(texts[::2])
    return _segments(name[1:]), ".".join(texts[1::2])


@lru_cache(maxsize=1 << 16)  # most keys have the segments of another
def _segments(text: str) -> Template:
    return tuple(text.split("."))


def shown(path: Template) -> str:
    """Return the template as a name, with ``{n}`` for layer numbers."""
    return ".".join(map(_shown_segment, path))


def _escaped(segment: str) -> str:
    return f"\\{segment}" if segment.lstrip("\\") == NUMBER else segment


def _shown_segment(segment: str) -> str:
    if segment == NUMBER:
        return "{n}"
    return segment[1:] if segment.lstrip("\\") == NUMBER else segment


# Words

# Part -> segments, in lower case, that mean it and nothing else, in any context.
CERTAIN: dict[str, tuple[str, ...]] = {
    "query": (
        "q",
        "wq",
        "q_proj",
        "query",
        "q_lin",
        "to_q",
        "query_proj",
        "query_layer",
        "q_proj_weight",
    ),
    "key": ("k", "wk", "k_proj", "key", "k_lin", "to_k", "key_proj", "key_layer", "k_proj_weight"),
    "value": (
        "v",
        "wv",
        "v_proj",
        "value",
        "v_lin",
        "to_v",
        "value_proj",
        "value_layer",
        "v_proj_weight",
    ),
    "token embedding": (
        "tok_embeddings",
        "embed_tokens",
        "wte",
        "word_embeddings",
        "token_embedding",
        "tokens_embed",
    ),
    "position embedding": (
        "wpe",
        "position_embeddings",
        "positions_embed",
        "position_embedding",
        "pos_embed",
    ),
}
# Parts whose words have other meanings elsewhere (`w1` of two and of three matrices): believed only
# if each tensor of one shape has one, and no two have the same.
RELATIVE: dict[str, tuple[str, ...]] = {
    "attention output": ("o", "wo", "o_proj", "out_proj", "output_proj", "out_lin"),
    "gate": ("gate_proj", "w1", "gate", "wi_0"),
    "up": ("up_proj", "w3", "up", "wi_1"),
    "down": ("down_proj", "w2", "down"),
    "attention's norm": (
        *(
            "input_layernorm",
            "attention_norm",
            "attn_norm",
            "sa_norm",
            "ln_1",
            "norm1",
            "layernorm_before",
        ),
        *("self_attn_layer_norm", "sa_layer_norm", "attn_ln"),
    ),
    "feed-forward's norm": (
        *("post_attention_layernorm", "ffn_norm", "mlp_norm", "ln_2", "norm2", "layernorm_after"),
        *("final_layer_norm", "output_layer_norm", "mlp_ln"),
    ),
}
HEAD = "head"  # outside of all layers; the first of two segments says it (`output.weight`)
_HEAD_WORDS = frozenset({"lm_head", "output", "head", "embed_out"})
# An attention to another sequence: its query is not the query of the layer's other attention.
_CROSS = frozenset(
    {"cross_attn", "encoder_attn", "multihead_attn", "crossattention", "encdecattention", "attn2"}
)
# Parts that layers keep in one tensor, in their usual order.
_ATTENTION = (("query", "key", "value"), ("key", "value"))
_OF_CROSS = "cross-attention's "
_CROSS_ATTENTION = (
    (f"{_OF_CROSS}query", f"{_OF_CROSS}key", f"{_OF_CROSS}value"),
    (f"{_OF_CROSS}key", f"{_OF_CROSS}value"),
)
FUSED = (*_ATTENTION, ("gate", "up"), *_CROSS_ATTENTION)
_FUSED_WORDS = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj", "to_kv", "gate_up")
# Last word of a tensor's name -> its kind. A scale is not taken for a bias, whatever their shapes.
_KINDS = {
    **dict.fromkeys(("weight", "scale", "gamma", "kernel"), "weight"),
    **dict.fromkeys(("bias", "beta"), "bias"),
    "mean": "mean",
    "var": "variance",
    "variance": "variance",
    "tracked": "count",
    "averaged": "count",
}
KINDS = frozenset({"", *_KINDS.values()})
_CERTAIN = owners(CERTAIN)
_PARTS = owners(RELATIVE) | _CERTAIN
_cached = lru_cache(maxsize=1 << 16)  # each step asks about each group


@_cached
def kind_of(path: Template) -> str:
    """Return ``weight``, ``bias``, ...; empty if the name does not say."""
    return _KINDS.get(path[-1].lower().rpartition("_")[2], "")


@_cached
def certain_part(path: Template) -> str:
    """Return ``query``, ``key``, ... if a segment names it, else an empty text."""
    return _innermost(path, _CERTAIN)


@_cached
def part_of(path: Template) -> str:
    """Return the part, also if only a word of `RELATIVE` names it, else an empty text."""
    if len(path) == 2 and path[0].lower() in _HEAD_WORDS:
        return HEAD
    return _innermost(path, _PARTS)


def _innermost(path: Template, table: Mapping[str, str]) -> str:
    words = [segment.lower() for segment in path]
    for word in reversed(words):
        if word in table:
            part = table[word]
            return part if _CROSS.isdisjoint(words) else f"{_OF_CROSS}{part}"
    return ""


def is_fused(path: Template) -> bool:
    name = ".".join(path).lower()
    return any(word in name for word in _FUSED_WORDS)


def inserted(left: Template, right: Template) -> str:
    """Return the one segment that only the longer of two names has; empty if they differ by
    more.
    """
    short, long = sorted((left, right), key=len)
    if len(long) - len(short) != 1:
        return ""
    for depth, segment in enumerate(long):
        if long[:depth] + long[depth + 1 :] == short:
            return segment
    return ""


# Shapes


def fit(left: Outlined, right: Outlined) -> bool:
    """Return whether the two have one shape, or one is a matrix with the other's shape
    transposed.
    """
    return left.shape == right.shape or (len(left.shape) == 2 and left.shape == right.shape[::-1])


def transposed(tensors: Iterable[Outlined]) -> frozenset[str]:
    """Return the weights that their biases show to be stored as (in, out); none if a bias shows the
    other order.

    A square weight is one of them if all other weights of modules with its module's name are.
    """
    tensors = list(tensors)
    outputs = {}  # key of the weight next to a bias -> the bias's length
    for tensor in tensors:
        if len(tensor.shape) == 1 and tensor.key.endswith(".bias"):
            outputs[f"{tensor.key[:-4]}weight"] = tensor.shape[0]
    if not outputs:
        return frozenset()
    oblong, square = set(), set()
    for tensor in tensors:
        out = outputs.get(tensor.key)
        if out is None or len(tensor.shape) != 2 or out not in tensor.shape:
            continue
        first, last = tensor.shape
        if first == last:
            square.add(tensor.key)
        elif last == out:
            oblong.add(tensor.key)
        else:
            return frozenset()
    modules = {key.split(".")[-2] for key in oblong}
    square = {key for key in square if key.split(".")[-2] in modules}
    return frozenset(oblong | square)


def straight(side: SideTensors, keys: frozenset[str]) -> SideTensors:
    """Return the side with the shapes of these tensors as (out, in)."""
    if not keys:
        return side
    tensors: list[Outlined] = []
    for tensor in side.tensors:
        if tensor.key in keys:
            tensors.append(Tensor(tensor.key, tensor.dtype, tensor.shape[::-1]))
        else:
            tensors.append(tensor)
    return SideTensors(tuple(tensors), side.ordered, side.digest)


def exchangeable(tensors: Iterable[Outlined]) -> tuple[tuple[str, ...], ...]:
    """Return keys of tensors that have one shape in the same layers, a tuple for each shape,
    without biases.

    Whole layers could be exchanged too, in every model: these are not reported.
    """
    by_shape: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for group in groups(tensors):
        if kind_of(group.path) in ("weight", "") and group.first.shape:
            layer = group.path
            while layer and layer[-1] != NUMBER:
                layer = layer[:-1]
            by_shape[group.signature, layer].append(group)
    return tuple(keys_of(same) for same in by_shape.values() if len(same) > 1)


def keys_of(several: Iterable[Group]) -> tuple[str, ...]:
    """Return the keys of all tensors of the groups."""
    keys: list[str] = []
    for group in several:
        keys += [tensor.key for tensor in group.members.values()]
    return tuple(keys)


def _number_places(path: Template) -> list[int]:
    return [index for index, segment in enumerate(path) if segment == NUMBER]


# Modules

_LONGEST_PREFIX = 6  # segments of a prefix
Prefixes = tuple[Template, Template]


def common_trees(
    lefts: Sequence[Group], rights: Sequence[Group]
) -> Iterator[tuple[Prefixes, Group, Group]]:
    """Yield two prefixes, and two groups with one name below them. Below two modules, one segment
    is not enough.

    ``encoder.layers.#.w`` and ``net.layers.#.w`` have the prefixes `encoder` and `net`, and also
    the longer `encoder.layers` and `net.layers`.
    """
    rests = set()  # the names of the left below each of their prefixes
    for left in lefts:
        for _, rest in _splits(left.path):
            if len(rest) > 1 or rest == left.path:
                rests.add(rest)
    below: dict[Template, list[tuple[Template, Group]]] = {}
    at_root: dict[Template, list[tuple[Template, Group]]] = {}
    for right in rights:
        if len(right.path) == 1:
            at_root[right.path] = [((), right)]
        for prefix, rest in _splits(right.path):
            if rest in rests:
                below.setdefault(rest, []).append((prefix, right))
    for left in lefts:
        for left_prefix, rest in _splits(left.path):
            is_enough = len(rest) > 1 or not left_prefix
            matches = (below if is_enough else at_root).get(rest, ())
            for right_prefix, right in matches:
                yield (left_prefix, right_prefix), left, right


def _splits(path: Template) -> Iterator[tuple[Template, Template]]:
    """Yield each prefix of the path with the rest below it."""
    for depth in range(min(len(path), _LONGEST_PREFIX)):
        yield path[:depth], path[depth:]


def best_tree(trees: Mapping[Prefixes, Sequence[tuple[Group, Group]]]) -> Prefixes | None:
    """Return the prefixes that explain most tensors, the shortest of these; None if others explain
    as many.
    """
    fits: dict[tuple[Group, Group], int] = {}
    ranks: dict[Prefixes, tuple[int, int]] = {}  # the best tree has the smallest
    for prefixes, pairs in trees.items():
        count = 0
        for pair in pairs:
            if pair not in fits:
                fits[pair] = _count_fitting(*pair)
            count += fits[pair]
        if count:
            left, right = prefixes
            ranks[prefixes] = -count, len(left) + len(right)
    if not ranks:
        return None
    first, *others = sorted(ranks, key=ranks.__getitem__)
    if others and ranks[first] == ranks[others[0]] and _overlap(trees[first], trees[others[0]]):
        return None
    return first


def _count_fitting(left: Group, right: Group) -> int:
    """Return in how many layers the tensors of the two groups have one shape, perhaps
    transposed.
    """
    count = 0
    for numbers, tensor in left.members.items():
        other = right.members.get(numbers)
        if other is not None and fit(tensor, other):
            count += 1
    return count


def _overlap(pairs: Sequence[tuple[Group, Group]], others: Sequence[tuple[Group, Group]]) -> bool:
    """Return whether the two trees explain a tensor of the same side."""
    paths: set[tuple[int, Template]] = set()
    for left, right in pairs:
        paths |= {(0, left.path), (1, right.path)}
    for left, right in others:
        if (0, left.path) in paths or (1, right.path) in paths:
            return True
    return False


class Paths:
    """What pairs say about the modules above them: stacks of layers, and whole trees."""

    def __init__(self, same_keys: Mapping[str, str]) -> None:
        # of each side: module -> the modules of the other side that are its place there
        self._homes: tuple[defaultdict[Template, set[Template]], ...]
        self._homes = defaultdict(set), defaultdict(set)
        self._paired: set[tuple[Template, Template]] = set()
        self._modules: defaultdict[Template, set[Template]] = defaultdict(set)  # of pairs
        # answers since the last new tree
        self._contradictions: dict[tuple[Template, Template], bool] = {}
        for left, right in same_keys.items():
            path, _ = template(left)
            if left != right:
                self.pair(path, template(right)[0])
            # all modules above a key of both sides are the same
            elif (path, path) not in self._paired:
                self.pair(path, path)
                for depth in range(1, len(path)):
                    self.tree(path[:depth], path[:depth])

    def pair(self, left: Template, right: Template) -> None:
        """Add a pair of tensors, in some layer."""
        if (left, right) in self._paired:
            return
        self._paired.add((left, right))
        self._modules[left[:-1]].add(right[:-1])
        left_places, right_places = _number_places(left), _number_places(right)
        if len(left_places) == len(right_places):
            for left_place, right_place in zip(left_places, right_places):
                self.tree(left[: left_place + 1], right[: right_place + 1])

    def tree(self, left: Template, right: Template) -> None:
        """Add a pair of modules: the same names are below both."""
        if right not in self._homes[0][left]:
            self._homes[0][left].add(right)
            self._homes[1][right].add(left)
            self._contradictions.clear()

    def homes(self, path: Template, side: int) -> Collection[Template]:
        """Return what `Modules.homes` returns, of a name and modules without any layer number."""
        return self._modules.get(path[:-1], ()) if side == 0 else (path[:-1],)

    def contradict(self, left: Template, right: Template) -> bool:
        """Return whether the modules above these two are known to be others."""
        answer = self._contradictions.get((left, right))
        if answer is None:
            answer = _strays(left, right, self._homes[0]) or _strays(right, left, self._homes[1])
            self._contradictions[left, right] = answer
        return answer

    def is_same(self, path: Template) -> bool:
        """Return whether both sides have the module under this name."""
        return path in self._homes[0].get(path, ())


def _strays(path: Template, other: Template, homes: Mapping[Template, set[Template]]) -> bool:
    """Return whether a module above `path` has known places on the other side, none of which is
    above `other`.
    """
    for depth in range(len(path)):
        places = homes.get(path[:depth])
        if places and not any(other[: len(place)] == place for place in places):
            return True
    return False


class Modules:
    """Which modules hold the two tensors of a pair. Only modules of tensors that are still open are
    looked at.

    Pairs are taken in at the first question: most diffs ask none, and these tables are large.
    """

    def __init__(
        self, same_keys: Mapping[str, str], left: Collection[str], right: Collection[str]
    ) -> None:
        self._open = left, right
        # keys of pairs that are not in `_homes` yet
        self._new: list[Iterable[tuple[str, str]]] = [same_keys.items()] if same_keys else []
        self._homes: tuple[defaultdict[str, set[str]], ...] = defaultdict(set), defaultdict(set)

    def add(self, pairs: Iterable[Pair]) -> None:
        """Add pairs of tensors."""
        for pair in pairs:
            self._new.append(product(pair.left, pair.right))

    def homes(self, key: str, side: int) -> Collection[str]:
        """Return the modules of the right that hold a pair with this key's module; of a key of the
        right its own.
        """
        self._take_in()
        return self._homes[0].get(_module(key), ()) if side == 0 else (_module(key),)

    def part(self, left: str, right: str) -> bool:
        """Return whether the module of one of these two holds a pair, but with another module."""
        homes = self.homes(left, 0)
        return bool(homes or _module(right) in self._homes[1]) and _module(right) not in homes

    @cached_property
    def _near(self) -> tuple[set[str], set[str]]:
        left, right = self._open
        return {_module(key) for key in left}, {_module(key) for key in right}

    def _take_in(self) -> None:
        if not self._new:
            return
        left_modules, right_modules = self._near
        for left_key, right_key in chain.from_iterable(self._new):
            left, right = _module(left_key), _module(right_key)
            if left in left_modules:
                self._homes[0][left].add(right)
            if right in right_modules:
                self._homes[1][right].add(left)
        self._new.clear()


def _module(key: str) -> str:
    return key.rpartition(".")[0]


# Order


class Order:
    """The places of one side's tensors; computed when they are needed."""

    def __init__(self, side: SideTensors) -> None:
        self._side = side

    @cached_property
    def place(self) -> dict[str, int]:
        """Key -> its place."""
        return {tensor.key: at for at, tensor in enumerate(self._side.tensors)}

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Module -> the place of the first layer below it."""
        # the text before the first number -> the place of the first key with it
        first: dict[str, int] = {}
        for key, at in self.place.items():
            number = NUMBER_SEGMENT.search(key)
            if number is not None:
                first.setdefault(key[: number.start()], at)
        layers: dict[str, int] = {}
        for text, at in first.items():
            segments = text.split(".")[:-1]
            for depth in range(len(segments)):
                layers.setdefault(".".join(segments[:depth]), at)
        return layers

    def is_meaningful(self, groups: Sequence[Group]) -> bool:
        """Return whether the file keeps the order, or the names differ in a number that grows:
        ``fc1``, ``fc2``.
        """
        if self._side.ordered:
            return True
        names = [re.split(r"(\d+|\.)", ".".join(group.template)) for group in groups]
        if len(set(map(len, names))) > 1:
            return False
        varying = [column for column in zip(*names) if len(set(column)) > 1]
        if len(varying) != 1 or not all(map(str.isdecimal, varying[0])):
            return False
        numbers = list(map(int, varying[0]))
        return numbers == sorted(numbers)

    def neighbors(self, group: Group) -> str:
        """Return whether a tensor outside of all layers is ``before`` or ``after`` them; empty if
        that is unknown.

        A state dict has a module's parameters before its children, so their order says nothing.
        """
        path = tuple(group.first.key.split("."))
        if not self._side.ordered or not kind_of(path) or any(map(str.isdecimal, path)):
            return ""
        for depth in range(len(path) - 1, -1, -1):
            first_layer = self._layers.get(".".join(path[:depth]))
            if first_layer is not None:
                return "before" if self.place[group.first.key] < first_layer else "after"
        return ""
