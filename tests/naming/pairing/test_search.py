"""One network under the names of two projects, drawn at random: every pair is the right one, from either side."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from ckpttool.naming import evidence
from ckpttool.naming.evidence import Inference, Side, Tensor
from ckpttool.naming.pairing import infer

Shape = tuple[int, ...]
WIDTH, HALF, HIDDEN, VOCAB = 8, 4, 12, 20
ATTENTION = {"query": (WIDTH, WIDTH), "key": (HALF, WIDTH), "value": (HALF, WIDTH), "attention output": (WIDTH, WIDTH)}
FEED_FORWARD = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
NORMS = ("attention's norm", "feed-forward's norm")


@dataclass(frozen=True)
class Spelled:
    """A project's names: the role of a tensor in its layer -> key, and key -> shape, in the order of definition."""

    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]

    def turned(self) -> Spelled:
        """With its linear layers as (in, out), as GPT-2's `Conv1D` keeps them."""
        linear = {key.removesuffix("bias") + "weight" for key in self.shapes if key.endswith(".bias")}
        return Spelled(self.keys, {key: one[::-1] if key in linear else one for key, one in self.shapes.items()})

    def side(self, chance: random.Random | None = None) -> Side:
        """With `chance` in an order of no meaning, as safetensors has them."""
        tensors = [Tensor(key, "float32", shape) for key, shape in self.shapes.items()]
        if chance is not None:
            chance.shuffle(tensors)
        return Side(tuple(tensors), ordered=chance is None)


CROSS = ("cross_attn", "encoder_attn", "multihead_attn", "attn2")


def spelled(chance: random.Random, layers: int, biased: bool, decodes: bool = False) -> Spelled:
    """Layers of attention and feed-forward; with `decodes` two stacks of them, the second with a cross-attention."""
    names = {part: chance.choice(own) for part, own in {**evidence.CERTAIN, **evidence.RELATIVE}.items()}
    root = chance.choice(["", "model.", "net.decoder."])
    scale = chance.choice(["weight", "scale", "gamma"])
    fused = [] if decodes else [parts for parts in (("query", "key", "value"), ("gate", "up")) if chance.random() < 0.3]
    joined = {part for parts in fused for part in parts}
    modules = {chance.choice(("attn", "self_attn", "mixer")): ATTENTION, chance.choice(("mlp", "ff")): FEED_FORWARD}
    stacks = {chance.choice(("layers", "h", "blocks")): modules}
    if decodes:
        stacks = {f"{chance.choice(('encoder', 'enc'))}.layers": modules}
        stacks[f"{chance.choice(('decoder', 'dec'))}.h"] = {**modules, chance.choice(CROSS): ATTENTION}
    keys, shapes = {"embedding": f"{root}{names['token embedding']}.weight"}, dict[str, Shape]()
    shapes[keys["embedding"]] = (VOCAB, WIDTH)
    for place, (stack, own) in enumerate(stacks.items()):
        for layer in range(layers):
            at = f"{root}{stack}.{layer}"
            for number, (module, parts) in enumerate(own.items()):
                for part, shape in parts.items():
                    name = names[part] if part not in joined else "qkv_proj" if part in ATTENTION else "gate_up_proj"
                    for kind, one in {"weight": shape, **({"bias": shape[:1]} if biased else {})}.items():
                        key = keys[f"{place} {layer} {number} {part} {kind}"] = f"{at}.{module}.{name}.{kind}"
                        shapes[key] = (shapes.get(key, (0,))[0] + one[0], *one[1:])
            for part in NORMS:
                shapes[keys.setdefault(f"{place} {layer} {part}", f"{at}.{names[part]}.{scale}")] = (WIDTH,)
    keys["norm"], keys["head"] = (
        f"{root}{chance.choice(['norm', 'ln_f'])}.{scale}",
        chance.choice(["lm_head", "output"]),
    )
    keys["head"] += ".weight"
    shapes[keys["norm"]], shapes[keys["head"]] = (WIDTH,), (VOCAB, WIDTH)
    return Spelled(keys, shapes)


Pairs = set[tuple[tuple[str, ...], tuple[str, ...]]]


def right_ones(left: Spelled, right: Spelled) -> Pairs:
    """Keys of one role, parts of a fused tensor together; a key with one name on both sides is not a pair."""
    wholes: dict[str, tuple[list[str], list[str]]] = {}
    for role, mine in left.keys.items():
        theirs = right.keys[role]
        shared = mine if list(left.keys.values()).count(mine) > 1 else theirs
        own, other = wholes.setdefault(shared, ([], []))
        own += [mine] if mine not in own else []
        other += [theirs] if theirs not in other else []
    return {(tuple(own), tuple(other)) for own, other in wholes.values() if own != other}


def inferred(left: Side, right: Side) -> Inference:
    shapes = {tensor.key: tensor.shape for tensor in right.tensors}
    return infer(left, right, {one.key: one.key for one in left.tensors if shapes.get(one.key) == one.shape})


def test_one_network_under_two_projects_names() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        layers, biased, decodes = chance.randint(1, 3), chance.random() < 0.5, chance.random() < 0.4
        left, right = (spelled(chance, layers, biased, decodes) for _ in range(2))
        wanted = right_ones(left, right)
        for shuffled in (None, chance):
            mine, theirs = left.side(shuffled), right.side(shuffled)
            found, back = inferred(mine, theirs), inferred(theirs, mine)
            assert {(pair.left, pair.right) for pair in found.pairs} == wanted, seed
            assert {(pair.right, pair.left) for pair in back.pairs} == wanted, seed
            assert not any(pair.transposed for pair in (*found.pairs, *back.pairs))
            assert not found.ambiguous


def test_linear_layers_that_one_project_keeps_transposed() -> None:
    """Their biases show it of those that are not square; what is one tensor on the other side is turned as a whole."""
    for seed in range(40):
        chance = random.Random(seed)
        left, right = (spelled(chance, 2, True) for _ in range(2))
        sides = left.turned().side(), right.side()
        found, back = inferred(*sides), inferred(*reversed(sides))
        oblong = {key for key, shape in left.turned().shapes.items() if left.shapes[key] != shape}
        pairs = {(pair.left, pair.right): pair.transposed for pair in found.pairs}
        assert pairs.keys() >= right_ones(left, right), seed
        assert {keys for keys, way in pairs.items() if not oblong.isdisjoint(keys[0])} <= {
            keys for keys, way in pairs.items() if way == "left"
        }, seed
        assert {(pair.right, pair.left): {"right": "left"}.get(pair.transposed, "") for pair in back.pairs} == pairs


def words_that_say_nothing(chance: random.Random, side: str, count: int) -> list[str]:
    """Paths of modules; some of them numbers that grow, as those of a `Sequential`."""
    if chance.random() < 0.3:
        return [f"{side}.{at}" for at in sorted(chance.sample(range(20), count))]
    return [f"{side}{word}" for word in chance.sample(["abel", "bran", "cleo", "dora", "ezra", "finn", "gwen"], count)]


def test_meaningless_names_are_paired_by_shape_and_order() -> None:
    """Without an order only unique shapes are paired; a bias follows its weight."""
    for seed in range(200):
        chance = random.Random(seed)
        count = chance.randint(2, 7)
        shapes = [(chance.choice([3, 4, 5]), chance.choice([2, 3, 6])) for _ in range(count)]
        sides = []
        for names in (words_that_say_nothing(chance, side, count) for side in "yz"):
            sides.append(
                {f"{n}.{k}": s for n, one in zip(names, shapes) for k, s in (("weight", one), ("bias", one[:1]))}
            )
        truth = {((a,), (b,)) for a, b in zip(*sides) if a != b}
        mine, theirs = (Spelled({}, one) for one in sides)
        ordered = inferred(mine.side(), theirs.side())
        assert {(pair.left, pair.right) for pair in ordered.pairs} == truth, seed
        found = inferred(mine.side(chance), theirs.side(chance))
        pairs = {(pair.left, pair.right) for pair in found.pairs}
        assert pairs <= truth, seed
        told = {key for pair in found.pairs for key in pair.left} | {key for one in found.ambiguous for key in one.left}
        assert told >= {a for (a,), _ in truth}, seed
        alone = {at for at, one in enumerate(shapes) if shapes.count(one) == 1}
        keys = list(sides[0])
        if len(pairs) > len(truth) - len(pairs):
            assert pairs >= {pair for pair in truth if keys.index(pair[0][0]) // 2 in alone}, seed


def test_a_segment_that_only_some_layers_have() -> None:
    """Others of their modules have one name on both sides, which says nothing against it."""
    for seed in range(40):
        chance = random.Random(seed)
        modules, layers = chance.sample(["attn", "mlp", "norm", "conv"], chance.randint(1, 3)), chance.randint(1, 3)
        tails = [f"{module}.{number}.weight" for module in modules for number in range(2)]
        mine = [f"h.{layer}.{tail}" for layer in range(layers) for tail in tails]
        theirs = [key.replace(".", ".inner.", chance.randint(0, 1)) for key in mine]
        left, right = (Spelled({}, dict.fromkeys(keys, (4, 4))).side() for keys in (mine, theirs))
        found = inferred(left, right)
        assert {(pair.left, pair.right) for pair in found.pairs} == {
            ((a,), (b,)) for a, b in zip(mine, theirs) if a != b
        }


@pytest.mark.parametrize(
    "value",
    [
        ("float32", (4, 8)),
        ("bfloat16", (4, 8)),
        ("aaa", (4, 8)),
        ("float32", (4, 6)),
        ("float32", (4, 9)),
        ("float32", ()),
    ],
)
def test_parts_of_a_tensor_have_its_dtype_and_columns(value: tuple[str, Shape]) -> None:
    query, key, whole = (Tensor(f"{name}_proj.weight", "float32", (n, 8)) for name, n in zip("qkw", (8, 4, 16)))
    parts = (query, key, Tensor("v_proj.weight", *value))
    found = infer(Side(parts, ordered=True), Side((replace(whole, key="qkv_proj.weight"),), ordered=True), {})
    assert [pair.left for pair in found.pairs] == [tuple(p.key for p in parts)] * (value == ("float32", (4, 8)))


def tensors(**shapes: Shape) -> Side:
    return Side(tuple(Tensor(key.replace("_", "."), "float32", shape) for key, shape in shapes.items()))


def paired(left: Side, right: Side, known: Mapping[str, str] | None = None) -> Pairs:
    return {(pair.left, pair.right) for pair in infer(left, right, known).pairs}


def test_known_keys_that_are_not_tensors_stay_open() -> None:
    """Of ``b`` the right has something else than tensors, and ``c`` is not it."""
    left, right = tensors(a_w=(2, 3), b_w=(4, 5)), tensors(a_w=(2, 3), c_w=(4, 5))
    assert infer(left, right, {"a.w": "a.w", "b.w": "b.w"}) == Inference()
    assert infer(right, left, {"a.w": "a.w", "b.w": "b.w"}) == Inference()


def test_a_known_key_with_another_shape_stays_open() -> None:
    left, right = tensors(a_w=(2, 3), d_w=(7,)), tensors(a_w=(4, 5), a_v=(2, 3), d_w=(7,))
    assert paired(left, right, {"a.w": "a.w", "d.w": "d.w"}) == {(("a.w",), ("a.v",))}


def test_parts_of_other_layers_or_shapes_are_not_fused() -> None:
    """And of two tensors that the parts could make up neither is taken, but for one that says so by its name."""
    whole = {"h_0_x_weight": (12, 3)}
    parts = {f"m_0_{name}_weight": (4, 3) for name in ("q", "k", "v")}
    made = {(("h.0.x.weight",), ("m.0.q.weight", "m.0.k.weight", "m.0.v.weight"))}
    assert paired(tensors(**whole), tensors(**parts)) == made
    assert paired(tensors(**whole), tensors(**{**parts, "m_1_q_weight": (4, 3)})) == made
    assert not paired(tensors(**whole), tensors(**{**parts, "m_0_k_weight": (4, 2)}))
    assert not paired(tensors(**whole), tensors(**{**parts, "m_0_k_weight": ()}))
    two = {**whole, "h_0_y_weight": (12, 3)}
    assert not paired(tensors(**two), tensors(**parts))
    named = {**whole, "h_0_qkv_weight": (12, 3)}
    assert {left for left, _ in paired(tensors(**named), tensors(**parts))} == {("h.0.qkv.weight",)}


def test_a_deep_model_is_paired_completely() -> None:
    """Thousands of tensors have one shape; only tensors whose names can be linked are compared."""
    names = {"attn.q_proj": "attention.wq", "attn.o_proj": "attention.wo", "mlp.up_proj": "ff.w3", "norm2": "ffn_norm"}
    shapes = {"attn.q_proj": (8, 8), "attn.o_proj": (8, 8), "mlp.up_proj": (24, 8), "norm2": (8,)}
    keys = {
        f"model.layers.{layer}.{old}.weight": f"layers.{layer}.{new}.weight"
        for layer in range(2000)
        for old, new in names.items()
    }
    shape_of = {key: shapes[".".join(key.split(".")[3:-1])] for key in keys}
    left = Side([Tensor(key, "float32", shape_of[key]) for key in keys])
    right = Side([Tensor(name, "float32", shape_of[key]) for key, name in keys.items()])
    assert {(pair.left[0], pair.right[0]) for pair in infer(left, right).pairs} == set(keys.items())
