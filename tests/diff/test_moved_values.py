"""Values found under another name or in another order, and tensors that only their names
distinguish.
"""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
import real_models
from command import Run
from places import SUPPORT

torch.set_num_threads(1)
State = dict[str, torch.Tensor]


def reasons(left: State, right: State) -> dict[str, str]:
    """Return key -> the reason of a value difference, as `--values` reports it."""
    diff = ckpttool.diff(left, right, values=True)
    assert {entry.status for entry in diff.entries} <= {"same", "value"}
    return {entry.left[0]: entry.reason for entry in diff.entries if entry.status == "value"}


def test_swapped_layers_are_reported() -> None:
    layers = [{"w": torch.rand(3, 4), "b": torch.rand(3)} for _ in range(3)]
    left, right = (
        {
            f"layers.{at}.{name}": layers[n][name]
            for at, n in enumerate(order)
            for name in ("w", "b")
        }
        for order in ((0, 1, 2), (1, 0, 2))
    )
    assert reasons(left, right) == {
        **dict.fromkeys(
            ["layers.0.w", "layers.0.b"], "different values; left `layers.0` is right `layers.1`"
        ),
        **dict.fromkeys(
            ["layers.1.w", "layers.1.b"], "different values; left `layers.1` is right `layers.0`"
        ),
    }


def test_names_of_one_segment_are_reported_in_full() -> None:
    a, b = torch.rand(3), torch.rand(3)
    assert reasons({"x.w": a, "w": b}, {"x.w": b, "w": a}) == {
        "x.w": "different values; left `x.w` is right `w`",
        "w": "different values; left `w` is right `x.w`",
    }


def test_sparse_tensors_are_skipped(tmp_path: Path, run: Run) -> None:
    one = {"a": torch.ones(2), "s": torch.ones(2).to_sparse()}
    torch.save(one, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(2), "s": torch.zeros(2).to_sparse()}, tmp_path / "b.pt")
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--format", "json")
    assert done.status == 1
    assert [
        (entry["status"], entry["left"], entry["reason"]) for entry in done.data["entries"]
    ] == [
        ("value", ["a"], "different values"),
        ("value", ["s"], "different values"),
    ]


def test_only_dense_matrices_are_checked_for_rotary_order() -> None:
    w = torch.rand(6, 3)
    rotary = (
        "different values; rows in rotary order, heads of 6: adjacent pairs in {}, halves in {}"
    )
    assert reasons({"w": w}, {"w": permute(w, 1)}) == {"w": rotary.format("left", "right")}
    assert reasons({"w": permute(w, 1)}, {"w": w}) == {"w": rotary.format("right", "left")}
    sparse = w.to_sparse(), permute(w, 1).to_sparse()
    for left, right in (sparse, (torch.empty(6, 0), torch.empty(6, 0)), (w[0, 0], w[0, 1])):
        assert "rotary" not in str(reasons({"w": left}, {"w": right}))
    halves = {"w": w.half()}
    (entry,) = ckpttool.diff(halves, {"w": permute(w, 1)}, values=True, ignore_dtype=True).entries
    assert "rotary" not in entry.reason


def test_an_unchanged_tensor_is_not_a_source_of_moved_values() -> None:
    """All norms begin as ones: a trained norm was not moved from an untrained one."""
    left = {"a.w": torch.ones(3), "b.w": torch.ones(3), "c.w": torch.ones(3) * 2}
    assert reasons(left, {**left, "a.w": torch.rand(3)}) == {"a.w": "different values"}
    moved = {**left, "a.w": torch.rand(3), "c.w": torch.ones(3)}
    assert reasons(left, moved) == {
        "a.w": "different values; left `a` is right `c`",
        "c.w": "different values",
    }


def test_the_command_reports_swapped_norms(tmp_path: Path, run: Run) -> None:
    """torchtitan#1441: all names and shapes match, but the model generates nonsense."""
    left = {
        "layers.0.attention_norm.weight": torch.rand(8),
        "layers.0.ffn_norm.weight": torch.rand(8),
    }
    torch.save(left, tmp_path / "a.pt")
    torch.save(dict(zip(left, reversed(left.values()))), tmp_path / "b.pt")
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--format", "json")
    result = done.data
    assert done.status == 1
    assert {entry["reason"] for entry in result["entries"]} == {
        "different values; left `layers.0.attention_norm` is right `layers.0.ffn_norm`",
        "different values; left `layers.0.ffn_norm` is right `layers.0.attention_norm`",
    }
    assert all("8 of 8 elements differ" in entry["detail"] for entry in result["entries"])


def permute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute rows as the conversion scripts of transformers do for Llama's queries and keys."""
    rows, width = w.shape
    return w.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


@settings(max_examples=25)
@given(st.integers(1, 4), st.sampled_from([6, 8, 16]), st.booleans())
def test_permuted_rotary_rows_are_recognised_with_their_head_size(
    heads: int, size: int, back: bool
) -> None:
    w = torch.rand(heads * size, 5)
    sides = {"q": w}, {"q": permute(w, heads)}
    (reason,) = reasons(*(sides[::-1] if back else sides)).values()
    assert f"heads of {size}:" in reason
    names = ("right", "left") if back else ("left", "right")
    assert reason.endswith(f"adjacent pairs in {names[0]}, halves in {names[1]}")


def test_reordered_rows_and_a_transposed_matrix_are_recognised() -> None:
    w = torch.rand(6, 6)
    assert reasons({"w": w}, {"w": w.flip(0)}) == {
        "w": "different values; same rows in a different order"
    }
    assert reasons({"w": w}, {"w": w.t().contiguous()}) == {
        "w": "different values; each is the transpose of the other"
    }
    assert reasons({"w": w}, {"w": w + 1}) == {"w": "different values"}
    two = {"a": w, "b": w.clone(), "c": w + 1}  # two candidates
    assert reasons({"a": w + 1, "b": w + 2, "c": w}, two) == {
        "a": "different values; left `a` is right `c`",
        "b": "different values",
        "c": "different values",
    }


def test_tensors_whose_swap_would_not_be_noticed_are_listed(run: Run, tmp_path: Path) -> None:
    torch.save(real_models.llama().state_dict(), tmp_path / "llama.pt")
    model = f"{SUPPORT / 'real_models.py'}:llama"
    done = run("diff", "--model", model, tmp_path / "llama.pt", "--format", "json")
    result = done.data
    assert done.status == 0
    alike = [{key for key in keys if "layers.1" not in key} for keys in result["exchangeable"]]
    layer = "model.layers.0."
    assert {layer + "self_attn.q_proj.weight", layer + "self_attn.o_proj.weight"} in alike
    assert {layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"} in alike
    assert {"model.embed_tokens.weight", "lm_head.weight"} in alike
    same = run("diff", "--model", model, tmp_path / "llama.pt")
    # nothing was renamed
    assert (same.status, "would not be noticed" in same.out + same.err) == (0, False)
    state = {
        key.replace("input_layer", "in_layer"): value
        for key, value in real_models.llama().state_dict().items()
    }
    torch.save(state, tmp_path / "llama.pt")
    renamed = run("diff", "--model", model, tmp_path / "llama.pt")
    assert (
        renamed.status,
        "the same shape as a neighbor, so a swap would not be noticed" in renamed.out,
    ) == (1, True)


def test_a_tied_head_is_not_exchangeable(run: Run, tmp_path: Path) -> None:
    torch.save(real_models.tied_llama().state_dict(), tmp_path / "llama.pt")
    model = f"{SUPPORT / 'real_models.py'}:tied_llama"
    done = run("diff", "--model", model, tmp_path / "llama.pt", "--format", "json")
    assert done.status == 0
    assert not any("lm_head.weight" in keys for keys in done.data["exchangeable"])


def test_a_model_loads_with_exchangeable_tensors_swapped() -> None:
    model = real_models.llama()
    state = model.state_dict()
    alike = ckpttool.diff(state, model=model).exchangeable
    assert alike
    for first, *others in alike:
        for other in others:
            model.load_state_dict({**state, first: state[other], other: state[first]})
