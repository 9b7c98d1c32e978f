"""Suggested rules: after the commands that `diff` prints are run unchanged, names and shapes are
the same.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import real_models
from ckpttool.fixes.commands import PART
from ckpttool.fixes.rules_file import suggest
from ckpttool.live.model import section_of
from ckpttool.naming.evidence import Inference, Pair, SideTensors, Tensor
from ckpttool.naming.pairing import infer
from command import Done, Run, fixes_in, notes_in
from places import TESTS
from renamed_models import (
    MORE,
    PAIRS,
    bert_model,
    gpt2,
    lightning,
    meta_llama,
    named,
    phi3,
    plain,
    split_gpt,
)

torch.set_num_threads(1)
PAGE = TESTS / "rules" / "suggested.md"
START, END = "<!-- suggested rules -->\n", "<!-- end of the rules -->\n"
Build = Callable[[], nn.Module]
State = dict[str, torch.Tensor]


Compare = Callable[..., Done]


@pytest.fixture
def compare(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Return a function that saves two states in the working directory and returns their diff."""
    monkeypatch.chdir(tmp_path)

    def compare(left: State | Build, right: State | Build, *options: str) -> Done:
        for side, name in ((left, "left.pt"), (right, "right.pt")):
            torch.save(side().state_dict() if callable(side) else side, name)
        return run("diff", "left.pt", "right.pt", *options, "--format", "json")

    return compare


def run_fixes(found: Done, run: Run) -> str:
    """Run the printed commands in order; return the file that the last one writes."""
    for line in fixes_in(found.data):
        words = shlex.split(line)
        done = run(*words[1:])
        assert done.status == (1 if words[1] == "diff" else 0), done.err
    return words[words.index("-o") + 1]


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize(
    ("left", "right"),
    [*PAIRS.values(), *MORE],
    ids=lambda build: build.__name__ if callable(build) else str(build),
)
def test_printed_commands_give_the_names_and_shapes_of_the_right(
    left: Build, right: Build, ending: str, tmp_path: Path, run: Run
) -> None:
    """safetensors does not keep the order: rules that depend on it are not suggested, and the
    others still work.
    """
    paths = [tmp_path / f"{name}.{ending}" for name in ("left", "right")]
    for build, path in zip((left, right), paths):
        state = {key: value.clone() for key, value in build().state_dict().items()}
        torch.save(state, path) if ending == "pt" else save_file(state, path)
    found = run("diff", *paths, "--format", "json")
    assert found.status == 1
    after = run("diff", run_fixes(found, run), paths[1], "--format", "json")
    summary = after.data["summary"].keys()
    if ending == "pt":
        assert summary <= {"same", "unexpected"}  # keys that right lacks are kept
        assert after.status == (1 if "unexpected" in summary else 0)
    else:
        remaining = {
            key
            for entry in after.data["entries"]
            if entry["status"] == "missing"
            for key in entry["right"]
        }
        ambiguous = {key for one in found.data["ambiguous"] for key in one["right"]}
        assert remaining <= ambiguous
        assert not {"shape", "dtype"} & summary


def page(compare: Compare) -> str:
    """Return the rules of every pair, as written by `diff --suggest`."""
    parts = []
    for title, (left, right) in PAIRS.items():
        Path("rules.toml").unlink(missing_ok=True)
        assert compare(left, right, "--suggest", "rules.toml").status == 1
        rules = Path("rules.toml").read_text().split("\n\n", 1)[1]
        parts.append(f"### {title}\n\n```toml\n{rules}```\n\n")
    return "".join(parts)


def test_page_shows_the_suggested_rules(compare: Compare) -> None:
    """Update with ``UPDATE_DOCS=1 make test ARGS=tests/rules/test_suggest.py``."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("its ViT has other names since transformers 5")
    before, _, rest = PAGE.read_text().partition(START)
    shown, _, after = rest.partition(END)
    if os.environ.get("UPDATE_DOCS"):
        shown = page(compare)
        PAGE.write_text(f"{before}{START}{shown}{END}{after}")
    assert len(PAIRS) >= 8
    assert shown == page(compare)


# Tensors that must not be paired


def inferred(left: State, right: State, ordered: bool = True) -> Inference:
    mine, theirs = (
        SideTensors(
            tuple(
                Tensor(key, str(value.dtype)[6:], tuple(value.shape))
                for key, value in state.items()
            ),
            ordered,
        )
        for state in (left, right)
    )
    return infer(
        mine,
        theirs,
        {key: key for key in left if key in right and left[key].shape == right[key].shape},
    )


def zeros(**shapes: tuple[int, ...]) -> State:
    return {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}


def test_order_is_ignored_if_the_format_does_not_keep_it() -> None:
    left, right = (
        zeros(a__weight=(4, 4), b__weight=(4, 4)),
        zeros(x__weight=(4, 4), y__weight=(4, 4)),
    )
    assert [(p.left, p.right) for p in inferred(left, right).pairs] == [
        (("a.weight",), ("x.weight",)),
        (("b.weight",), ("y.weight",)),
    ]
    found = inferred(left, right, ordered=False)
    assert found.pairs == ()
    assert [(set(one.left), set(one.right)) for one in found.ambiguous] == [(set(left), set(right))]


def test_common_names_take_precedence_over_the_order() -> None:
    """BART defines key, value and query in this order, BERT query, key and value."""
    left = {
        f"layers.{n}.attn.{name}_proj.weight": torch.zeros(4, 4) for n in range(2) for name in "kvq"
    }
    right = {
        f"h.{n}.{name}.weight": torch.zeros(4, 4)
        for n in range(2)
        for name in ("query", "key", "value")
    }
    pairs = {pair.left[0]: pair.right[0] for pair in inferred(left, right).pairs}
    assert pairs == {
        f"layers.{n}.attn.{name[0]}_proj.weight": f"h.{n}.{name}.weight"
        for n in range(2)
        for name in ("query", "key", "value")
    }


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (zeros(a__weight=(4,)), zeros(b__bias=(4,))),  # a scale is not a bias
        # scalars match everywhere
        *((zeros(a__weight=shape), zeros(b__weight=shape)) for shape in ((), (1,))),
        (zeros(a__weight=(4, 4), b__weight=(4, 4)), zeros(c__weight=(4, 4))),  # which of the two?
        (
            {**zeros(a__weight=(4, 4)), "n": torch.zeros(3)},
            {"b.weight": torch.zeros(4, 4).long(), "n": torch.zeros(3)},
        ),
        (
            zeros(enc__n__weight=(4,), enc__w=(2, 3)),
            zeros(dec__n__weight=(4,), enc__w=(2, 3), dec__w=(9, 9)),
        ),
    ],
)
def test_unrelated_or_ambiguous_tensors_are_not_paired(left: State, right: State) -> None:
    assert inferred(left, right).pairs == ()


def test_head_is_not_paired_with_a_pooler() -> None:
    """Both are a [32, 32] `dense` outside all layers; all counterparts of the other side are below
    `bert`.
    """
    right = real_models.transformers.BertModel(
        real_models.transformers.BertConfig(**real_models.SIZES)
    )
    pairs = inferred(real_models.bert().state_dict(), right.state_dict()).pairs
    assert {pair.left[0] for pair in pairs} == {f"bert.{pair.right[0]}" for pair in pairs}
    assert len(pairs) == len(bert_model().state_dict())


def test_segment_that_looks_like_a_template_number() -> None:
    left = zeros(
        **{f"layers__{n}__{odd}__w": (2, 3) for n in range(2) for odd in ("#", "\\#", "x#y")}
    )
    right = {f"net.#.{key}": value for key, value in left.items()}
    found = inferred(left, right)
    assert {(pair.left[0], pair.right[0]) for pair in found.pairs} == {
        (key, f"net.#.{key}") for key in left
    }
    assert {pair.evidence for pair in found.pairs} == {"the same name below `net.#`"}


def test_unrelated_models_are_not_paired() -> None:
    assert inferred(meta_llama().state_dict(), lightning().state_dict()).pairs == ()


@settings(max_examples=int(os.environ.get("CKPTTOOL_SEEDS", "40")))
@given(st.data())
def test_values_pair_tensors_with_meaningless_names(data: st.DataObject) -> None:
    """Tensors of one shape have meaningless names, in any order; values give the right pairs."""
    from ckpttool.evaluate.apply import Digests

    count = data.draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    left = {f"m{at}.weight": torch.rand(3, 3, generator=generator) for at in range(count)}
    order = data.draw(st.permutations(list(left)))
    right = {f"other.x{at}.weight": left[key] for at, key in enumerate(order)}
    mine, theirs = (
        SideTensors(
            tuple(Tensor(key, "float32", (3, 3)) for key in state),
            digest=Digests(section_of(state).by_key()).of,
        )
        for state in (left, right)
    )
    pairs = infer(mine, theirs).pairs
    assert {pair.left[0]: pair.right[0] for pair in pairs} == {
        key: f"other.x{at}.weight" for at, key in enumerate(order)
    }


# Values


def test_values_show_the_order_of_parts(compare: Compare, run: Run) -> None:
    """A fused tensor holds value, query and key in this order; names alone would suggest q, k,
    v.
    """
    parts = {
        f"layers.0.{name}_proj.weight": torch.rand(rows, 3) for name, rows in zip("qkv", (4, 2, 2))
    }
    whole = torch.cat([parts[f"layers.0.{name}_proj.weight"] for name in "vqk"])
    found = compare(parts, {"layers.0.qkv.weight": whole}, "--values")
    assert found.status == 1
    assert found.data["suggested"][0]["evidence"] == "the same values, parts in this order"
    assert torch.equal(torch.load(run_fixes(found, run))["layers.0.qkv.weight"], whole)


def test_square_weight_of_gpt2_is_transposed_like_the_others(compare: Compare, run: Run) -> None:
    """`attn.c_proj` is square: only its values and the similar weight in `mlp` show that it must be
    transposed.
    """
    source = gpt2().state_dict()
    written = torch.load(run_fixes(compare(source, split_gpt), run))
    assert torch.equal(written["blocks.1.attn.out.weight"], source["h.1.attn.c_proj.weight"].t())
    assert torch.equal(written["blocks.1.ff.down.weight"], source["h.1.mlp.c_proj.weight"].t())
    assert torch.equal(
        written["blocks.0.attn.k.weight"], source["h.0.attn.c_attn.weight"].t().chunk(3)[1]
    )


# The command


def test_few_renames_are_options(compare: Compare) -> None:
    (line,) = fixes_in(compare(plain, named).data)
    assert shlex.split(line)[3:-2] == [
        "--rule",
        "0.{x*} => fc1.{x*}",
        "--rule",
        "2.{x*} => fc2.{x*}",
    ]


def test_prefix_is_removed_and_its_sibling_kept(compare: Compare, run: Run) -> None:
    found = compare(lightning, plain)
    (line,) = fixes_in(found.data)
    assert shlex.split(line)[3:-2] == ["--rule", "net.{x*} => {x*}"]
    assert PART in notes_in(found.data)
    assert "loss.weight" in torch.load(run_fixes(found, run))


def test_remaining_keys_are_reported(compare: Compare) -> None:
    state = plain().state_dict()
    found = compare(
        {f"bert.{key}": value for key, value in state.items()},
        {**state, "head.weight": torch.zeros(5, 2)},
    )
    assert any(
        note.startswith("1 key missing from left (head.weight)") for note in notes_in(found.data)
    )


def test_rules_are_suggested_though_many_keys_remain(compare: Compare, run: Run) -> None:
    words = ("q_proj", "k_proj", "v_proj", "embed_tokens", "wpe")
    left = {f"model.{word}.weight": torch.ones(3, 4) for word in words}
    right = {f"{word}.net.{n}.weight": torch.ones(3, 4) for n, word in enumerate(words)}
    remaining = {f"heads.{n}.new.weight": torch.ones(n + 5) for n in range(60)}
    found = compare(left, {**right, **remaining})
    assert right.keys() == torch.load(run_fixes(found, run)).keys()


def test_different_dtypes_are_reported(compare: Compare, run: Run) -> None:
    left = {f"a.{n}.w": torch.rand(2, n + 1) for n in range(3)}
    found = compare(left, {key.replace("a", "b"): value.half() for key, value in left.items()})
    assert "the suggested rules do not change dtypes and values, and some differ" in notes_in(
        found.data
    )
    assert {value.dtype for value in torch.load(run_fixes(found, run)).values()} == {torch.float32}


def test_notes_on_rules_are_not_printed_next_to_a_command_without_rules(compare: Compare) -> None:
    state = plain().state_dict()
    found = compare(state, {f"module.{key}": value.half() for key, value in state.items()})
    assert ["--like" in line for line in fixes_in(found.data)] == [True]
    assert not any("suggested rules" in note for note in notes_in(found.data))


@pytest.mark.parametrize("side", ["left", "right"])
def test_transposed_parts_of_different_sizes(side: str) -> None:
    """As for grouped queries in a `Conv1D`: sizes are along the joined dimension."""
    rows = {"q": 4, "k": 2, "v": 2}
    parts = {f"l.{name}.weight": torch.rand(3, size) for name, size in rows.items()}
    whole = {"l.qkv.weight": torch.cat(list(parts.values()), 1).t()}
    left, right = (parts, whole) if side == "left" else (whole, parts)
    pair = Pair(tuple(left), tuple(right), "said", transposed=side)
    found = suggest([pair], {}, section_of(left), section_of(right))
    assert found is not None
    assert "sizes = [4, 2, 2]" in found.text()


@pytest.mark.parametrize(
    ("ends", "rules"),
    [
        (("weight", "bias"), 1),
        # other suffixes need a rule each, and unrelated keys are unchanged
        (("kernel", "offset"), 2),
        (("",), 1),
    ],
)
def test_a_weight_and_its_bias_are_split_by_one_rule(ends: tuple[str, ...], rules: int) -> None:
    def state(*names: str) -> State:
        return {
            ".".join(filter(None, (name, end))): torch.rand(6 // len(names), 2)
            for name in names
            for end in ends
        }

    left, right = state("l.0.qkv"), state("l.1.q", "l.1.k", "l.1.v")
    if "weight" not in ends:
        left["l.0.qkv.zero"] = right["l.0.qkv.zero"] = torch.zeros(1)
    pairs = [
        Pair(
            (whole,),
            tuple(name for name in right if name.rpartition(".")[2] == whole.rpartition(".")[2]),
            "said",
        )
        if ends[0]
        else Pair((whole,), tuple(right)[:3], "said")
        for whole in left
        if "zero" not in whole
    ]
    found = suggest(
        pairs, {key: key for key in left if key in right}, section_of(left), section_of(right)
    )
    assert found is not None
    assert found.text().count("split = ") == rules


ODD = ["a\x7f", "b\u202e", "c😀\x01", 'd"\\', "e\u200b😀"]


def test_names_with_control_characters_are_escaped() -> None:
    """They are valid TOML and contain no control characters."""
    left = {f"{key}.w": torch.zeros(at + 1) for at, key in enumerate(ODD)}
    right = {f"new.{key}": value for key, value in left.items()} | {"f.w": torch.zeros(9)}
    pairs = [Pair((key,), (f"new.{key}",), "said") for key in left]
    found = suggest(
        pairs, {"f.v": "f.w"}, section_of({**left, "f.v": torch.zeros(9)}), section_of(right)
    )
    assert found is not None
    assert found.text().replace("\n", "").isprintable()
    odd = suggest(
        pairs[:1],
        {},
        section_of(dict(list(left.items())[:1])),
        section_of({f"new.{ODD[0]}.w": torch.zeros(1)}),
    )
    assert odd is not None
    assert odd.text().replace("\n", "").isprintable()


def test_another_file_is_not_overwritten(compare: Compare, run: Run) -> None:
    found = compare(phi3, real_models.llama)
    assert (found.status, found.data["identical"]) == (1, False)
    assert {"missing", "unexpected"} <= found.data["summary"].keys()
    assert found.data["suggested"]  # suggestions do not change the result
    for _ in range(2):  # the same content the second time
        assert run("diff", "left.pt", "right.pt", "--suggest", "rules.toml").status == 1
    Path("rules.toml").write_text("mine")
    done = run("diff", "left.pt", "right.pt", "--suggest", "rules.toml")
    assert (done.status, "has other content" in done.err) == (2, True)
    assert Path("rules.toml").read_text() == "mine"


def test_nothing_to_suggest(compare: Compare) -> None:
    found = compare(meta_llama, plain, "--suggest", "rules.toml")
    assert found.status == 1
    assert any("no rules are suggested" in note for note in notes_in(found.data))
    assert not Path("rules.toml").exists()


MODELS = """from torch import nn


def net(first, second):
    def block():
        return nn.ModuleDict({first: nn.Linear(3, 5), second: nn.Linear(5, 3)})

    return nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(2)), "head": nn.Linear(3, 7)})


def split(*names):
    return nn.ModuleDict({**{name: nn.Linear(4, 4) for name in names}, "proj": nn.Linear(4, 2)})


def attention():
    return net("wq", "wo")


def projections():
    return net("q_proj", "o_proj")


def short():
    return split("q", "k", "v")


def long():
    return split("query", "key", "value")


def fused():
    return nn.ModuleDict({"qkv": nn.Linear(4, 12), "proj": nn.Linear(4, 2)})
"""


def build(name: str) -> nn.Module:
    space: dict[str, Any] = {}
    exec(MODELS, space)
    model: nn.Module = space[name]()
    return model


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    ("old", "new"),
    [("attention", "projections"), ("short", "long"), ("long", "fused"), ("fused", "long")],
)
def test_rules_file_converts_a_checkpoint_to_a_model(run: Run, old: str, new: str) -> None:
    torch.save({"model": (saved := build(old)).state_dict(), "epoch": 1}, "a.pt")
    words = ("diff", "a.pt", "--model", f"models.py:{new}", "--format", "json")
    before, found = run(*words).data, run(*words, "--suggest", "rules.toml")
    assert (found.status, Path("rules.toml").read_text()) == (1, found.data["rules"])
    assert found.data["entries"] == before["entries"]
    # rules that are printed without a file
    for option, rule in pairwise(shlex.split(" ".join(fixes_in(before)))):
        assert option != "--rule" or rule in found.data["rules"]
    assert not any("missing from left" in note for note in notes_in(found.data))
    out = torch.load(run_fixes(found, run))["model"]
    build(new).load_state_dict(out)  # strict
    flat = [
        torch.cat([value.flatten() for value in state.values()]).sort().values
        for state in (saved.state_dict(), out)
    ]
    assert torch.equal(*flat)


@pytest.mark.usefixtures("_models")
def test_commands_that_write_a_rules_file_are_printed(run: Run) -> None:
    """They are printed if the rules fix at least half, with what is left, and can be pasted."""
    torch.save((saved := build("long")).state_dict(), "a.pt")
    found = run("diff", "a.pt", "--model", "models.py:fused", "--format", "json")
    assert (found.status, found.data.get("rules")) == (1, None)
    assert shlex.split(fixes_in(found.data)[0])[-2:] == ["--suggest", "a.rules.toml"]
    path = run_fixes(found, run)
    out = torch.load(path)
    build("fused").load_state_dict(out)  # strict
    assert torch.equal(
        out["qkv.bias"], torch.cat([saved[name].bias for name in ("query", "key", "value")])
    )
    assert run("diff", path, "--model", "models.py:fused").status == 0
    assert "--model" not in Path("a.rules.toml").read_text()
    assert "RIGHT" not in Path("a.rules.toml").read_text()
    torch.save({**saved.state_dict(), "other": torch.ones(9)}, "more.pt")
    found = run("diff", "more.pt", "--model", "models.py:fused", "--format", "json")
    assert not any(fix["complete"] for fix in found.data["fix"])
    assert "1 key not in right (other)" in " ".join(notes_in(found.data))
    out = torch.load(run_fixes(found, run))
    assert torch.equal(out.pop("other"), torch.ones(9))
    build("fused").load_state_dict(out)


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    ("state", "note"),
    [
        (
            {"q.weight": torch.ones(4, 4), "q.bias": torch.ones(4)},
            "the suggested rules do not write 6 keys",
        ),
        (
            {**build("short").state_dict(), "other": torch.ones(9)},
            "the suggested rules do not change 1 key of left: other",
        ),
        ({"other": torch.ones(9)}, "rules.toml was not written"),
    ],
)
def test_problems_that_a_rules_file_does_not_fix_are_reported(
    run: Run, state: State, note: str
) -> None:
    torch.save(state, "a.pt")
    done = run(
        "diff", "a.pt", "--model", "models.py:long", "--suggest", "rules.toml", "--format", "json"
    )
    assert done.status == 1
    assert any(note in text for text in notes_in(done.data))
    assert Path("rules.toml").exists() == ("not written" not in note)


def test_suggest_needs_two_checkpoints_or_a_model(run: Run) -> None:
    for words in ([], ["--model", "m.py:build"], ["a.pt", "b.pt", "--model", "m.py:build"]):
        done = run("diff", *words, "--suggest", "rules.toml")
        assert (done.status, "--suggest needs two checkpoints, or a model and one" in done.err) == (
            2,
            True,
        )


def other_order(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows like transformers' conversion scripts do for Llama's queries and keys."""
    return w.view(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


ROPE = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}


def test_equal_rows_are_not_reordered(compare: Compare) -> None:
    """Norms start as ones; a rule that permutes them would also permute a trained checkpoint's."""
    left = {
        f"layers.{n}.{name}.weight": torch.ones(12 + n)
        for n in range(3)
        for name in ("norm", "out_norm")
    }
    left |= {f"layers.{n}.w.weight": torch.rand(12, 5) for n in range(3)}
    right = {key.replace("layers", "h").replace("norm", "ln"): value for key, value in left.items()}
    rules = compare(left, right, "--values").data["rules"]
    assert "rename = " in rules
    assert "permute" not in rules


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize(("heads", "size", "back"), [(4, 8, False), (2, 6, True), (3, 16, False)])
def test_order_of_rotary_rows_is_one_rule_for_all_layers(
    heads: int, size: int, back: bool, renamed: bool, compare: Compare, run: Run
) -> None:
    """Queries have more heads than keys. A bias is permuted with its weight. Afterwards all bits
    are equal.
    """
    torch.manual_seed(heads)
    rows, width = {"wq": heads * size, "wk": size, "wv": size, "wo": 10}, heads * size
    left = {
        f"layers.{n}.attn.{name}.weight": torch.rand(rows[name], width + n)
        for n in range(3)
        for name in ROPE
    }
    left |= {f"layers.{n}.attn.wq.bias": torch.rand(rows["wq"]) for n in range(3)} | {
        "head.weight": torch.rand(7, 3)
    }
    count = {"wq": heads, "wk": 1}
    right = {
        key: other_order(w, count[at]) if (at := key.split(".")[-2]) in count else w
        for key, w in left.items()
    }
    if renamed:
        right = {
            ".".join(ROPE.get(part, part) for part in key.split(".")): w for key, w in right.items()
        }
    sides = (right, left) if back else (left, right)
    found = compare(*sides, "--values")
    assert found.status == 1
    written = torch.load(run_fixes(found, run))
    assert written.keys() == sides[1].keys()
    assert all(torch.equal(written[key], value) for key, value in sides[1].items())
    assert found.data["rules"].count("permute = ") == 1


def test_the_only_candidate_is_not_called_a_choice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    left = {
        "pos_emb.weight": (12, 4),
        "h.0.fc.weight": (6, 4),
        "h.0.fc.bias": (6,),
        "norm.weight": (4,),
        "head.weight": (50, 4),
    }
    right = {
        "net.wte.weight": (50, 4),
        "net.wpe.weight": (12, 4),
        "net.h.0.fc.weight": (6, 4),
        "net.h.0.fc.bias": (6,),
        "net.ln_f.weight": (4,),
    }
    for name, shapes in {"left.pt": left, "right.pt": right}.items():
        torch.save({key: torch.ones(shape) for key, shape in shapes.items()}, name)
    (match,) = run("diff", "left.pt", "right.pt", "--format", "json").data["ambiguous"]
    assert (match["left"], match["right"]) == (["head.weight"], ["net.wte.weight"])
    assert "only their shapes agree" in match["reason"]
    two = {key: torch.ones(shape) for key, shape in left.items()}
    torch.save({**two, "other.weight": torch.zeros(50, 4)}, "left.pt")
    (match,) = run("diff", "left.pt", "right.pt", "--format", "json").data["ambiguous"]
    assert match["left"] == ["head.weight", "other.weight"]
    assert "tells them apart" in match["reason"]
