"""Keys matched with the names of a model: wrappers are removed on evidence, and ambiguous keys are
problems.
"""

from __future__ import annotations

import pytest

from ckpttool.naming.match import base_names, match, pair_different_keys, split_call

CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    # keys, names, expected matches
    "equal": (["a.w"], ["a.w"], {"a.w": "a.w"}),
    "a wrapper around everything": (["module.a.w"], ["a.w"], {"module.a.w": "a.w"}),
    "two wrappers": (["module._orig_mod.a.w"], ["a.w"], {"module._orig_mod.a.w": "a.w"}),
    "in any order": (["_orig_mod.module.a.w"], ["a.w"], {"_orig_mod.module.a.w": "a.w"}),
    "a wrapper around some modules": (
        ["a._orig_mod.w", "b.w"],
        ["a.w", "b.w"],
        {"a._orig_mod.w": "a.w", "b.w": "b.w"},
    ),
    "a common prefix": (
        ["net.a.w", "net.b.w"],
        ["a.w", "b.w"],
        {"net.a.w": "a.w", "net.b.w": "b.w"},
    ),
    "a prefix of some keys": (["net.a.w", "b.w"], ["a.w", "b.w"], {"b.w": "b.w"}),
    "all names below a prefix": (
        ["m.a.w", "m.b", "x.b"],
        ["a.w", "b"],
        {"m.a.w": "a.w", "m.b": "b"},
    ),
    "below a prefix of several segments": (
        ["m.n.a", "m.n.b", "m.x"],
        ["a", "b"],
        {"m.n.a": "a", "m.n.b": "b"},
    ),
    "below a prefix that is also in a name": (
        ["m.m.a", "m.b", "x"],
        ["m.a", "b"],
        {"m.m.a": "m.a", "m.b": "b"},
    ),
    "wrapped, below a prefix": (
        ["m._orig_mod.a", "m.b", "x.b"],
        ["a", "b"],
        {"m._orig_mod.a": "a", "m.b": "b"},
    ),
    "not all names below the prefix": (["m.a", "x.b"], ["a", "b"], {}),
    "below two prefixes": (["m.a", "n.a"], ["a"], {}),
    "below a prefix, and a name itself": (["m.a", "m.b", "a"], ["a", "b"], {"a": "a"}),
    "a user's module named like a wrapper segment": (
        ["module.w"],
        ["module.w"],
        {"module.w": "module.w"},
    ),
    "a user's module with such a name, wrapped": (
        ["module.module.w"],
        ["module.w"],
        {"module.module.w": "module.w"},
    ),
    "another name": (["x.w"], ["a.w", "b.w"], {}),
    "a key that is only a wrapper segment": (["module"], ["a"], {}),
    "a tensor named like a wrapper segment": (["a.module"], ["a"], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_are_matched(name: str) -> None:
    keys, names, expected = CASES[name]
    result = match(keys, {name: name for name in names})
    assert result.names == expected
    assert set(result.unmatched) == set(keys) - set(expected)
    assert set(result.missing) == set(names) - set(expected.values())
    assert result.complete == (len(keys) == len(expected) == len(names))


def test_a_match_with_fewer_faults_has_a_higher_score() -> None:
    matches = [
        match(["a", "b"], {"a": "a", "b": "b"}),
        match(["a"], {"a": "a", "b": "b"}),
        match(["a", "x", "y"], {"a": "a"}),
        match(["module.a", "_orig_mod.a", "x", "y"], {"a": "a"}),
        match(["a"], dict.fromkeys("abcdef", "")),
    ]
    assert [candidate.complete for candidate in matches] == [True, False, False, False, False]
    scores = [candidate.score for candidate in matches]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    ambiguous = match(["module.a", "_orig_mod.a"], {"a": "a"})
    assert not ambiguous.complete
    assert not ambiguous.unmatched
    assert not ambiguous.missing


def test_peft_segments_are_removed_by_the_evidence_of_all_keys() -> None:
    keys = [
        f"base_model.model.fc.{part}.weight"
        for part in ("base_layer", "lora_A.default", "lora_B.default")
    ]
    result = match(keys, {"fc.weight": "fc.weight", "fc.bias": "fc.bias"})
    assert result.names == {keys[0]: "fc.weight"}
    assert result.wrapped == {"base_model": 1, "model": 1, "base_layer": 1}
    assert match(["base_model.fc.base_layer.weight"], {"fc.weight": "fc.weight"}).names == {}


def test_canonical_names_match_too() -> None:
    result = match(["a.w"], {"a._orig_mod.w": "a.w"})
    assert result.names == {"a.w": "a._orig_mod.w"}
    assert result.complete


def test_a_name_is_not_below_itself() -> None:
    assert pair_different_keys((set(), set()), [""], ["b"]) == {}
    assert pair_different_keys((set(), set()), ["b", "c"], ["a.b", "a.c"]) == {
        "b": "a.b",
        "c": "a.c",
    }


def test_optional_names_are_not_missing() -> None:
    result = match(["a"], {"a": "a", "b": "b", "c": "c"}, optional=["b"])
    assert result.missing == ("c",)


def test_a_key_that_matches_two_names_is_a_problem() -> None:
    result = match(
        ["module.x._orig_mod.w"], {"module.x.w": "module.x.w", "x._orig_mod.w": "x._orig_mod.w"}
    )
    assert [str(problem) for problem in result.problems] == [
        "could be module.x.w or x._orig_mod.w @ module.x._orig_mod.w"
    ]
    assert not result.complete


def test_two_keys_that_match_one_name_are_a_problem() -> None:
    result = match(["module.a", "_orig_mod.a"], {"a": "a"})
    assert [str(problem) for problem in result.problems] == [
        "several keys match this name: module.a, _orig_mod.a @ a"
    ]


def test_removed_segments_are_counted() -> None:
    result = match(["module.a", "module._orig_mod.b"], {"a": "a", "b": "b"})
    assert result.wrapped == {"module": 2, "_orig_mod": 1}


def test_hostile_keys_take_bounded_time() -> None:
    key = ".".join(["module"] * 5000)
    assert match([key], {"a": "a"}).unmatched == (key,)


def test_an_ambiguous_call_variant_is_not_matched() -> None:
    key = "module.x._orig_mod.f@1.w"
    result = match([key], {name: name for name in ("module.x.f.w", "x._orig_mod.f.w")})
    assert (result.unmatched, result.variants, result.names) == ((key,), {}, {})
    assert match([key], {"x.f.w": "x.f.w"}).names == {key: "x.f.w"}
    assert match([key], {"w": "w"}).unmatched == (key,)


def test_the_shortest_base_of_a_call_variant_is_used() -> None:
    keys = ["f.g.w", "f@1.g.w", "f@1.g@2.w"]
    assert match(keys, {name: name for name in keys[:2]}).variants == {keys[2]: keys[0]}


def test_two_counters_of_an_averaged_model_are_ambiguous() -> None:
    """Without the segment, both keys have the same name."""
    keys = ["n_averaged", "module.n_averaged", "module.a"]
    result = match(keys, {name: name for name in ("n_averaged", "a")})
    assert not result.complete


def test_call_variants_below_a_wrapper_of_several_segments_are_matched() -> None:
    keys = ["base_model.model.f.w", "base_model.model.f@1.w"]
    result = match(keys, {"f.w": "f.w"})
    assert (result.names, result.variants) == ({keys[0]: "f.w"}, {keys[1]: "f.w"})
    assert result.complete


def test_names_of_call_variants() -> None:
    """A base name is tried from the shortest and must exist."""
    assert split_call("foo@12") == ("foo", 12)
    for name in ("foo", "foo@", "foo@x", "@1", "foo@0", "foo@01"):
        assert split_call(name) == (name, 0)
    assert list(base_names("a@1.b@2.w")) == ["a.b.w", "a.b@2.w", "a@1.b.w"]
    assert list(base_names("a.w@1")) == []
