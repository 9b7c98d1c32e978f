"""Keys matched with a model's names: wrappers taken out on evidence, and what could be two names is a problem."""

from __future__ import annotations

import pytest

from ckpttool.naming.match import match, unlike

CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    # keys, names, what matches
    "equal": (["a.w"], ["a.w"], {"a.w": "a.w"}),
    "a wrapper around all": (["module.a.w"], ["a.w"], {"module.a.w": "a.w"}),
    "two wrappers": (["module._orig_mod.a.w"], ["a.w"], {"module._orig_mod.a.w": "a.w"}),
    "in any order": (["_orig_mod.module.a.w"], ["a.w"], {"_orig_mod.module.a.w": "a.w"}),
    "around some": (["a._orig_mod.w", "b.w"], ["a.w", "b.w"], {"a._orig_mod.w": "a.w", "b.w": "b.w"}),
    "an attribute that holds all": (["net.a.w", "net.b.w"], ["a.w", "b.w"], {"net.a.w": "a.w", "net.b.w": "b.w"}),
    "an attribute that holds some": (["net.a.w", "b.w"], ["a.w", "b.w"], {"b.w": "b.w"}),
    "all names below a prefix": (["m.a.w", "m.b", "x.b"], ["a.w", "b"], {"m.a.w": "a.w", "m.b": "b"}),
    "below a prefix of several segments": (["m.n.a", "m.n.b", "m.x"], ["a", "b"], {"m.n.a": "a", "m.n.b": "b"}),
    "below a prefix that is also a name's": (["m.m.a", "m.b", "x"], ["m.a", "b"], {"m.m.a": "m.a", "m.b": "b"}),
    "wrapped, below a prefix": (["m._orig_mod.a", "m.b", "x.b"], ["a", "b"], {"m._orig_mod.a": "a", "m.b": "b"}),
    "not all names below it": (["m.a", "x.b"], ["a", "b"], {}),
    "below two prefixes": (["m.a", "n.a"], ["a"], {}),
    "below a prefix, and a name itself": (["m.a", "m.b", "a"], ["a", "b"], {"a": "a"}),
    "the user's own module": (["module.w"], ["module.w"], {"module.w": "module.w"}),
    "the user's own, wrapped": (["module.module.w"], ["module.w"], {"module.module.w": "module.w"}),
    "another name": (["x.w"], ["a.w", "b.w"], {}),
    "a key that is all wrapper": (["module"], ["a"], {}),
    "the tensor itself is called so": (["a.module"], ["a"], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_matches(name: str) -> None:
    keys, names, expected = CASES[name]
    found = match(keys, {name: name for name in names})
    assert found.names == expected
    assert set(found.unmatched) == set(keys) - set(expected)
    assert set(found.missing) == set(names) - set(expected.values())
    assert found.complete == (len(keys) == len(expected) == len(names))


def test_a_complete_match_has_no_faults() -> None:
    """And the fewer faults, of whichever kind, the better."""
    readings = [
        match(["a", "b"], {"a": "a", "b": "b"}),
        match(["a"], {"a": "a", "b": "b"}),
        match(["a", "x", "y"], {"a": "a"}),
        match(["module.a", "_orig_mod.a", "x", "y"], {"a": "a"}),
        match(["a"], dict.fromkeys("abcdef", "")),
    ]
    assert [reading.complete for reading in readings] == [True, False, False, False, False]
    scores = [reading.score for reading in readings]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    twice = match(["module.a", "_orig_mod.a"], {"a": "a"})
    assert not twice.complete
    assert not twice.unmatched
    assert not twice.missing


def test_peft_segments_are_removed_by_the_evidence_of_all_keys() -> None:
    keys = [f"base_model.model.fc.{part}.weight" for part in ("base_layer", "lora_A.default", "lora_B.default")]
    found = match(keys, {"fc.weight": "fc.weight", "fc.bias": "fc.bias"})
    assert found.names == {keys[0]: "fc.weight"}
    assert found.wrapped == {"base_model": 1, "model": 1, "base_layer": 1}
    assert match(["base_model.fc.base_layer.weight"], {"fc.weight": "fc.weight"}).names == {}


def test_canonical_names_match_too() -> None:
    found = match(["a.w"], {"a._orig_mod.w": "a.w"})
    assert found.names == {"a.w": "a._orig_mod.w"}
    assert found.complete


def test_a_name_is_not_below_itself() -> None:
    assert unlike([""], ["b"], [""], ["b"]) == {}
    assert unlike(["b", "c"], ["a.b", "a.c"], ["b", "c"], ["a.b", "a.c"]) == {"b": "a.b", "c": "a.c"}


def test_names_that_may_be_absent() -> None:
    found = match(["a"], {"a": "a", "b": "b", "c": "c"}, optional=["b"])
    assert found.missing == ("c",)


def test_a_key_that_could_be_two_names() -> None:
    found = match(["module.x._orig_mod.w"], {"module.x.w": "module.x.w", "x._orig_mod.w": "x._orig_mod.w"})
    assert [str(problem) for problem in found.problems] == [
        "could be module.x.w or x._orig_mod.w @ module.x._orig_mod.w"
    ]
    assert not found.complete


def test_two_keys_that_are_one_name() -> None:
    found = match(["module.a", "_orig_mod.a"], {"a": "a"})
    assert [str(problem) for problem in found.problems] == ["module.a and _orig_mod.a are both this name @ a"]


def test_removed_segments_are_counted() -> None:
    found = match(["module.a", "module._orig_mod.b"], {"a": "a", "b": "b"})
    assert found.wrapped == {"module": 2, "_orig_mod": 1}


def test_hostile_keys_take_bounded_time() -> None:
    key = ".".join(["module"] * 5000)
    assert match([key], {"a": "a"}).unmatched == (key,)


def test_an_ambiguous_call_variant_is_not_matched() -> None:
    key = "module.x._orig_mod.f@1.w"
    found = match([key], {name: name for name in ("module.x.f.w", "x._orig_mod.f.w")})
    assert (found.unmatched, found.variants, found.names) == ((key,), {}, {})
    assert match([key], {"x.f.w": "x.f.w"}).names == {key: "x.f.w"}
    assert match([key], {"w": "w"}).unmatched == (key,)


def test_the_shortest_base_of_a_call_variant_is_used() -> None:
    keys = ["f.g.w", "f@1.g.w", "f@1.g@2.w"]
    assert match(keys, {name: name for name in keys[:2]}).variants == {keys[2]: keys[0]}


def test_a_counter_inside_of_an_averaged_model() -> None:
    """Without the segment two keys are one name: which of them it is nobody says."""
    keys = ["n_averaged", "module.n_averaged", "module.a"]
    found = match(keys, {name: name for name in ("n_averaged", "a")})
    assert not found.complete


def test_call_variants_below_a_wrapper_of_several_segments() -> None:
    keys = ["base_model.model.f.w", "base_model.model.f@1.w"]
    found = match(keys, {"f.w": "f.w"})
    assert (found.names, found.variants) == ({keys[0]: "f.w"}, {keys[1]: "f.w"})
    assert found.complete
