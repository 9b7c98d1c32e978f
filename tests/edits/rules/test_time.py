"""Rules answer soon, whoever wrote them and whatever keys they meet."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.edits.rules.notation import shown
from ckpttool.edits.rules.patterns import matches, parse
from ckpttool.edits.rules.regex import Regex, compiled
from ckpttool.edits.rules.segments import pattern_of, ways
from ckpttool.errors import CkptError, Refused
from ckpttool.limits import Limits, limited

LONG = ".".join(["a"] * 3000)
SOON = 2.0  # seconds; what is not linear takes minutes


@pytest.mark.parametrize("text", ["{a*}.{b*}.{c*}.{d*}.q => q", "{a*}.x.{b*}.x.{c*}.x.{d*}.q => q", "{a*}.{a*}.q => q"])
def test_variables_of_many_segments_are_matched_in_linear_time(text: str) -> None:
    start = time.monotonic()
    assert parse(text).apply(LONG) is None
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize(
    "text", ["a " * 50_000, "a" + " " * 50_000 + "b", "a [" + "1, " * 50_000, "a [" * 50_000, "[ " * 50_000]
)
def test_what_is_no_tensor_is_told_in_linear_time(text: str) -> None:
    start = time.monotonic()
    assert shown(text) is None
    assert time.monotonic() - start < SOON


def test_variables_that_stand_twice_end_too() -> None:
    start = time.monotonic()
    with pytest.raises((CkptError, Refused)):
        parse("{a*}.{b*}.{c*}.{a*}.{b*}.{c*}.x.q => q").apply(f"{LONG}.q.{LONG}.x.q")
    assert time.monotonic() - start < SOON


def test_a_long_key_costs_as_much_as_it_is_long() -> None:
    start = time.monotonic()
    assert parse("{a*}.x.{b*} => {b*}.{a*}").apply(".".join(["a"] * 200_000 + ["x"])) == ".".join(["a"] * 200_000)
    assert time.monotonic() - start < SOON


NESTED = ["(a+)+$", "(a|a)*$", "(.*a){20}$", "(a*)*b"]


@pytest.mark.parametrize("text", NESTED)
def test_a_regular_expression_that_never_ends_is_ended(text: str) -> None:
    start = time.monotonic()
    with limited(Limits(rules_seconds=1)), pytest.raises(CkptError, match="--limit rules_seconds=2") as refused:
        Regex(text).fullmatch("a" * 60 + "!")
    assert time.monotonic() - start < 1 + SOON
    assert refused.value.exit_status == 2


def test_many_slow_matches_have_one_limit() -> None:
    slow = Regex("(a+)+$")
    start = time.monotonic()
    with limited(Limits(rules_seconds=1)), pytest.raises(CkptError, match="takes too long"):
        list(map(slow.fullmatch, ["a" * 20 + "!"] * 10_000))
    assert time.monotonic() - start < 1 + SOON


def test_in_a_thread_the_time_is_not_limited_and_the_answer_is_the_same() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert [threads.submit(matches, "re:a+", key).result() for key in ("aa", "ab")] == [True, False]


@pytest.mark.parametrize("text", ["a{99999999999999999999}", "(" * 5000, "*", "(?P<1>a)", "a{2,1}"])
def test_what_is_no_regular_expression_is_said(text: str) -> None:
    with pytest.raises(CkptError, match="not a regular expression"):
        parse(f"re:{text} => b").apply("a")
    with pytest.raises(CkptError, match="not a regular expression"):
        matches(f"re:{text}", "a")


def test_a_shell_pattern_of_many_stars() -> None:
    start = time.monotonic()
    assert not matches("*a" * 30 + "*b", "a" * 2000)
    assert time.monotonic() - start < SOON
    compiled.cache_clear()


TOKENS = st.lists(st.sampled_from(["a", "b", "{x}", "{y}", "{s*}", "{t*}", "{u*}"]), min_size=1, max_size=5)
KEYS = st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(TOKENS, KEYS)
def test_the_ways_are_those_that_trying_out_all_of_them_finds(tokens: list[str], segments: list[str]) -> None:
    names = dict.fromkeys(token for token in tokens if token.startswith("{"))
    starred = [name for name in names if name.endswith("*}")]
    found = set()
    for lengths in product(range(len(segments) + 1), repeat=len(starred)):
        length = dict(zip(starred, lengths))
        sizes = [length.get(token, 1) for token in tokens]
        if sum(sizes) != len(segments):
            continue
        ends = [sum(sizes[: index + 1]) for index in range(len(tokens))]
        parts = [tuple(segments[end - size : end]) for end, size in zip(ends, sizes)]
        values: dict[str, tuple[str, ...]] = {}
        if all(values.setdefault(t, p) == p if t in names else p == (t,) for t, p in zip(tokens, parts)):
            found.add(frozenset(values.items()))
    full = {token.strip("{*}"): token for token in names}
    ours = [
        frozenset((full[name], tuple(segments[place])) for name, place in bound.items())
        for bound in ways(pattern_of(tokens), segments)
    ]
    assert len(ours) == len(set(ours))
    assert set(ours) == found
