"""One random network with the names of two projects: all inferred pairs are right in both
directions.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool.naming import vocabulary
from ckpttool.naming.evidence import Inference, SideTensors, Tensor
from ckpttool.naming.pairing import infer
from command import Run, fixes_in

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "20"))
Shape = tuple[int, ...]
WIDTH, HALF, HIDDEN, VOCAB = 8, 4, 12, 20
ATTENTION = {
    "query": (WIDTH, WIDTH),
    "key": (HALF, WIDTH),
    "value": (HALF, WIDTH),
    "attention output": (WIDTH, WIDTH),
}
FEED_FORWARD = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
NORMS = ("attention's norm", "feed-forward's norm")


@dataclass(frozen=True)
class Project:
    """The names of a project: role -> key, key -> shape, and role -> shape, in the order of
    definition.
    """

    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]
    parts: Mapping[str, Shape] = field(default_factory=dict)

    def transposed(self) -> Project:
        """Return the project with linear weights of shape (in, out), like GPT-2's `Conv1D`."""
        linear = {
            key.removesuffix("bias") + "weight" for key in self.shapes if key.endswith(".bias")
        }
        return Project(
            self.keys,
            {key: one[::-1] if key in linear else one for key, one in self.shapes.items()},
        )

    def side(self, rng: random.Random | None = None) -> SideTensors:
        """Return the tensors, shuffled if `rng` is given (safetensors does not keep the order)."""
        tensors = [Tensor(key, "float32", shape) for key, shape in self.shapes.items()]
        if rng is not None:
            rng.shuffle(tensors)
        return SideTensors(tuple(tensors), ordered=rng is None)


CROSS = ("cross_attn", "encoder_attn", "multihead_attn", "attn2")


def random_project(
    rng: random.Random, layers: int, biased: bool, has_decoder: bool = False
) -> Project:
    """Return layers of attention and feed-forward; with a decoder, a second stack has
    cross-attention.
    """
    names = {
        part: rng.choice(words)
        for part, words in {**vocabulary.CERTAIN, **vocabulary.RELATIVE}.items()
    }
    root = rng.choice(["", "model.", "net.decoder."])
    scale = rng.choice(["weight", "scale", "gamma"])
    fused = (
        []
        if has_decoder
        else [parts for parts in (("query", "key", "value"), ("gate", "up")) if rng.random() < 0.3]
    )
    joined = {part for parts in fused for part in parts}
    modules = {
        rng.choice(("attn", "self_attn", "mixer")): ATTENTION,
        rng.choice(("mlp", "ff")): FEED_FORWARD,
    }
    stacks = {rng.choice(("layers", "h", "blocks")): modules}
    if has_decoder:
        stacks = {f"{rng.choice(('encoder', 'enc'))}.layers": modules}
        stacks[f"{rng.choice(('decoder', 'dec'))}.h"] = {**modules, rng.choice(CROSS): ATTENTION}
    keys, parts = {"embedding": f"{root}{names['token embedding']}.weight"}, dict[str, Shape]()
    parts["embedding"] = (VOCAB, WIDTH)
    for place, (stack, stack_modules) in enumerate(stacks.items()):
        for layer in range(layers):
            at = f"{root}{stack}.{layer}"
            for number, (module, parts_of) in enumerate(stack_modules.items()):
                for part, shape in parts_of.items():
                    name = (
                        names[part]
                        if part not in joined
                        else "qkv_proj"
                        if part in ATTENTION
                        else "gate_up_proj"
                    )
                    for kind, one in {
                        "weight": shape,
                        **({"bias": shape[:1]} if biased else {}),
                    }.items():
                        role = f"{place} {layer} {number} {part} {kind}"
                        keys[role], parts[role] = f"{at}.{module}.{name}.{kind}", one
            for part in NORMS:
                role = f"{place} {layer} {part}"
                keys[role], parts[role] = f"{at}.{names[part]}.{scale}", (WIDTH,)
    keys["norm"], parts["norm"] = f"{root}{rng.choice(['norm', 'ln_f'])}.{scale}", (WIDTH,)
    keys["head"], parts["head"] = f"{rng.choice(['lm_head', 'output'])}.weight", (VOCAB, WIDTH)
    shapes: dict[str, Shape] = {}
    for role, key in keys.items():
        shapes[key] = (shapes.get(key, (0,))[0] + parts[role][0], *parts[role][1:])
    return Project(keys, shapes, parts)


Pairs = set[tuple[tuple[str, ...], tuple[str, ...]]]


def true_pairs(left: Project, right: Project) -> Pairs:
    """Return pairs of keys with the same role, with the parts of a fused tensor together, without
    equal keys.
    """
    fused: dict[str, tuple[list[str], list[str]]] = {}
    for role, left_key in left.keys.items():
        right_key = right.keys[role]
        shared = left_key if list(left.keys.values()).count(left_key) > 1 else right_key
        left_parts, right_parts = fused.setdefault(shared, ([], []))
        left_parts += [left_key] if left_key not in left_parts else []
        right_parts += [right_key] if right_key not in right_parts else []
    return {(tuple(one), tuple(other)) for one, other in fused.values() if one != other}


def infer_from(left: SideTensors, right: SideTensors) -> Inference:
    shapes = {tensor.key: tensor.shape for tensor in right.tensors}
    return infer(
        left, right, {one.key: one.key for one in left.tensors if shapes.get(one.key) == one.shape}
    )


def test_names_of_two_projects_are_paired_correctly() -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        layers, biased, has_decoder = rng.randint(1, 3), rng.random() < 0.5, rng.random() < 0.4
        left, right = (random_project(rng, layers, biased, has_decoder) for _ in range(2))
        expected = true_pairs(left, right)
        for shuffled in (None, rng):
            sides = left.side(shuffled), right.side(shuffled)
            result, reverse = infer_from(*sides), infer_from(*reversed(sides))
            assert {(pair.left, pair.right) for pair in result.pairs} == expected, seed
            assert {(pair.right, pair.left) for pair in reverse.pairs} == expected, seed
            assert not any(pair.transposed for pair in (*result.pairs, *reverse.pairs))
            assert not result.ambiguous


def test_transposed_linear_layers_are_recognised() -> None:
    """The bias shows it if a weight is not square; a fused tensor is transposed completely."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        left, right = (random_project(rng, 2, True) for _ in range(2))
        sides = left.transposed().side(), right.side()
        result, reverse = infer_from(*sides), infer_from(*reversed(sides))
        not_square = {
            key for key, shape in left.transposed().shapes.items() if left.shapes[key] != shape
        }
        pairs = {(pair.left, pair.right): pair.transposed for pair in result.pairs}
        assert pairs.keys() >= true_pairs(left, right), seed
        assert {keys for keys in pairs if not not_square.isdisjoint(keys[0])} <= {
            keys for keys, side in pairs.items() if side == "left"
        }, seed
        assert {
            (pair.right, pair.left): {"right": "left"}.get(pair.transposed, "")
            for pair in reverse.pairs
        } == pairs


def state_of(project: Project, roles: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors for these roles: each part has its own value."""
    values = {
        role: torch.full(shape, float(place))
        for place, (role, shape) in enumerate(project.parts.items())
    }
    keys = dict.fromkeys(project.keys[role] for role in roles)
    return {
        key: torch.cat([values[role] for role in roles if project.keys[role] == key])
        for key in keys
    }


@pytest.mark.parametrize("seed", range(10))
def test_the_suggested_commands_convert_a_file(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """One of the files may lack layers, so layer numbers are not enough: no pair is wrong."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    layers = rng.randint(1, 3)
    kept = range(layers) if seed % 2 else sorted(rng.sample(range(layers), rng.randint(1, layers)))
    projects = [random_project(rng, layers, seed % 3 == 0) for _ in range(2)]
    states = []
    for project, numbers in zip(projects, rng.sample([range(layers), kept], 2)):
        roles = [
            role for role in project.keys if " " not in role or int(role.split()[1]) in numbers
        ]
        states.append(state_of(project, roles))
    for name, state in zip(("left", "right"), states):
        save_file(state, f"{name}.safetensors")
    found = run("diff", "left.safetensors", "right.safetensors", "--format", "json")
    assert found.status == 1
    for pair in found.data["suggested"]:
        left, right = (
            {role for role, key in project.keys.items() if key in pair[side]}
            for project, side in zip(projects, ("left", "right"))
        )
        assert left == right, pair
    if len(kept) == layers:
        for command in fixes_in(found.data):
            words = shlex.split(command)
            assert run(*words[1:]).status == (1 if words[1] == "diff" else 0)  # diff --suggest
        written = load_file(words[words.index("-o") + 1])
        assert written.keys() == states[1].keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in states[1].items())


def meaningless_names(rng: random.Random, side: str, count: int) -> list[str]:
    """Return module paths; some of them end in growing numbers, as in a `Sequential`, and not in
    those of the other.
    """
    if rng.random() < 0.3:
        return [f"{side}.{at}" for at in sorted(rng.sample(range(side == "z", 40, 2), count))]
    return [
        f"{side}{word}"
        for word in rng.sample(["abel", "bran", "cleo", "dora", "ezra", "finn", "gwen"], count)
    ]


def test_meaningless_names_are_paired_by_shape_and_order() -> None:
    """Without an order only unique shapes are paired; a bias follows its weight."""
    for seed in range(3 * SEEDS):
        rng = random.Random(seed)
        count = rng.randint(2, 7)
        shapes = [(rng.choice([3, 4, 5]), rng.choice([2, 3, 6])) for _ in range(count)]
        sides = []
        for names in (meaningless_names(rng, side, count) for side in "yz"):
            sides.append(
                {
                    f"{n}.{k}": s
                    for n, one in zip(names, shapes)
                    for k, s in (("weight", one), ("bias", one[:1]))
                }
            )
        truth = {((a,), (b,)) for a, b in zip(*sides) if a != b}
        left, right = (Project({}, one) for one in sides)
        ordered = infer_from(left.side(), right.side())
        assert {(pair.left, pair.right) for pair in ordered.pairs} == truth, seed
        result = infer_from(left.side(rng), right.side(rng))
        pairs = {(pair.left, pair.right) for pair in result.pairs}
        assert pairs <= truth, seed
        reported = {key for pair in result.pairs for key in pair.left} | {
            key for one in result.ambiguous for key in one.left
        }
        assert reported >= {a for (a,), _ in truth}, seed
        unique = {at for at, one in enumerate(shapes) if shapes.count(one) == 1}
        keys = list(sides[0])
        if len(pairs) > len(truth) - len(pairs):
            assert pairs >= {pair for pair in truth if keys.index(pair[0][0]) // 2 in unique}, seed


def test_a_segment_in_only_some_layers_is_recognised() -> None:
    """Modules with equal names on both sides do not contradict it."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        modules, layers = (
            rng.sample(["attn", "mlp", "norm", "conv"], rng.randint(1, 3)),
            rng.randint(1, 3),
        )
        tails = [f"{module}.{number}.weight" for module in modules for number in range(2)]
        left_keys = [f"h.{layer}.{tail}" for layer in range(layers) for tail in tails]
        right_keys = [key.replace(".", ".inner.", rng.randint(0, 1)) for key in left_keys]
        left, right = (
            Project({}, dict.fromkeys(keys, (4, 4))).side() for keys in (left_keys, right_keys)
        )
        result = infer_from(left, right)
        assert {(pair.left, pair.right) for pair in result.pairs} == {
            ((a,), (b,)) for a, b in zip(left_keys, right_keys) if a != b
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
    query, key, whole = (
        Tensor(f"{name}_proj.weight", "float32", (n, 8)) for name, n in zip("qkw", (8, 4, 16))
    )
    parts = (query, key, Tensor("v_proj.weight", *value))
    result = infer(
        SideTensors(parts, ordered=True),
        SideTensors((replace(whole, key="qkv_proj.weight"),), ordered=True),
        {},
    )
    assert [pair.left for pair in result.pairs] == [tuple(p.key for p in parts)] * (
        value == ("float32", (4, 8))
    )


def tensors(**shapes: Shape) -> SideTensors:
    return SideTensors(
        tuple(Tensor(key.replace("_", "."), "float32", shape) for key, shape in shapes.items())
    )


def paired(left: SideTensors, right: SideTensors, known: Mapping[str, str] | None = None) -> Pairs:
    return {(pair.left, pair.right) for pair in infer(left, right, known).pairs}


def test_known_keys_that_are_not_tensors_stay_open() -> None:
    """The known right ``b`` is not a tensor, so ``c`` is not paired with left ``b``."""
    left, right = tensors(a_w=(2, 3), b_w=(4, 5)), tensors(a_w=(2, 3), c_w=(4, 5))
    assert infer(left, right, {"a.w": "a.w", "b.w": "b.w"}) == Inference()
    assert infer(right, left, {"a.w": "a.w", "b.w": "b.w"}) == Inference()


def test_a_known_key_with_another_shape_stays_open() -> None:
    left, right = tensors(a_w=(2, 3), d_w=(7,)), tensors(a_w=(4, 5), a_v=(2, 3), d_w=(7,))
    assert paired(left, right, {"a.w": "a.w", "d.w": "d.w"}) == {(("a.w",), ("a.v",))}


def test_parts_of_other_layers_or_shapes_are_not_fused() -> None:
    """If the parts fit two tensors, neither is paired, unless the name of one decides."""
    whole = {"h_0_x_weight": (12, 3)}
    parts = {f"m_0_{name}_weight": (4, 3) for name in ("q", "k", "v")}
    fused_pair = {(("h.0.x.weight",), ("m.0.q.weight", "m.0.k.weight", "m.0.v.weight"))}
    assert paired(tensors(**whole), tensors(**parts)) == fused_pair
    assert paired(tensors(**whole), tensors(**{**parts, "m_1_q_weight": (4, 3)})) == fused_pair
    assert not paired(tensors(**whole), tensors(**{**parts, "m_0_k_weight": (4, 2)}))
    assert not paired(tensors(**whole), tensors(**{**parts, "m_0_k_weight": ()}))
    two = {**whole, "h_0_y_weight": (12, 3)}
    assert not paired(tensors(**two), tensors(**parts))
    named = {**whole, "h_0_qkv_weight": (12, 3)}
    assert {left for left, _ in paired(tensors(**named), tensors(**parts))} == {("h.0.qkv.weight",)}


def test_a_tensor_that_could_be_fused_from_two_layers_is_not_paired() -> None:
    """The other side may also have a different tensor with the same name."""
    parts = {f"h_{layer}_attn_{part}_weight": (2, 2) for layer in range(2) for part in "qkv"}
    whole, separate = tensors(weight=(6, 2)), tensors(**parts, weight=(4,))
    assert not paired(whole, separate)
    assert not paired(separate, whole)


def test_a_deep_model_is_paired_completely() -> None:
    """Hundreds of tensors have the same shape; only tensors with related names are compared."""
    names = {
        "attn.q_proj": "attention.wq",
        "attn.o_proj": "attention.wo",
        "mlp.up_proj": "ff.w3",
        "norm2": "ffn_norm",
    }
    shapes = {"attn.q_proj": (8, 8), "attn.o_proj": (8, 8), "mlp.up_proj": (24, 8), "norm2": (8,)}
    keys = {
        f"model.layers.{layer}.{old}.weight": f"layers.{layer}.{new}.weight"
        for layer in range(500)
        for old, new in names.items()
    }
    shape_of = {key: shapes[".".join(key.split(".")[3:-1])] for key in keys}
    left = SideTensors([Tensor(key, "float32", shape_of[key]) for key in keys])
    right = SideTensors([Tensor(name, "float32", shape_of[key]) for key, name in keys.items()])
    assert {(pair.left[0], pair.right[0]) for pair in infer(left, right).pairs} == set(keys.items())
