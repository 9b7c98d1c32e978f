"""Rules are applied quickly, even for hostile patterns and keys: with nonlinear matching, tests
here would not end.
"""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool import CkptError, Refused
from ckpttool.core.limits import spent
from ckpttool.ruleset.patterns import Regex, matches, parse, pattern_of
from ckpttool.ruleset.tensor_ops import shown
from surroundings import limited

LONG = ".".join(["a"] * 3000)


@pytest.mark.parametrize(
    "text", ["{a*}.{b*}.{c*}.{d*}.q => q", "{a*}.x.{b*}.x.{c*}.x.{d*}.q => q", "{a*}.{a*}.q => q"]
)
def test_variables_of_many_segments_are_matched_in_linear_time(text: str) -> None:
    assert parse(text).apply(LONG) is None


@pytest.mark.parametrize(
    "text",
    [
        "a " * 50_000,
        "a" + " " * 50_000 + "b",
        "a [" + "1, " * 50_000,
        "a [" * 50_000,
        "[ " * 50_000,
    ],
)
def test_text_that_is_not_a_tensor_is_rejected_in_linear_time(text: str) -> None:
    assert shown(text) is None


def test_repeated_variables_terminate() -> None:
    with pytest.raises((CkptError, Refused)):
        parse("{a*}.{b*}.{c*}.{a*}.{b*}.{c*}.x.q => q").apply(f"{LONG}.q.{LONG}.x.q")


def test_time_is_linear_in_the_length_of_a_key() -> None:
    assert parse("{a*}.x.{b*} => {b*}.{a*}").apply(".".join(["a"] * 200_000 + ["x"])) == ".".join(
        ["a"] * 200_000
    )
    assert not matches("*a" * 30 + "*b", "a" * 2000)


NESTED = ["(a+)+$", "(a|a)*$", "(.*a){20}$", "(a*)*b", "(a|aa)+$", r"(\w+\s?)+$"]
SLOW = "(a|aa)+$"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    spent.clear()


@pytest.mark.parametrize(
    ("text", "in_a_thread"), [*((text, False) for text in NESTED), (SLOW, True)]
)
def test_endless_regular_expression_is_answered_or_stopped(text: str, in_a_thread: bool) -> None:
    def match() -> bool:
        with limited(rules_seconds=1):
            return matches(f"re:{text}", "a" * 60 + "!")

    refused = None
    try:
        with ThreadPoolExecutor(1) as threads:
            assert not (threads.submit(match).result() if in_a_thread else match())
    except CkptError as error:
        refused = error
    assert refused is None or "the limit rules_seconds is 1" in refused.message


def test_time_limit_is_per_call() -> None:
    with limited(rules_seconds=1):
        with pytest.raises(CkptError, match="takes too long"):
            list(map(partial(matches, f"re:{SLOW}"), ["a" * 24 + "!"] * 10_000))
        with pytest.raises(CkptError, match="takes too long"):
            matches(f"re:{SLOW}", "aa")
        with pytest.raises(CkptError, match="takes too long"):
            ckpttool.remap({"a" * 100 + "!": torch.ones(1)}, drop=f"re:{SLOW}")
        done = ckpttool.remap({"aa": torch.ones(1), "b": torch.ones(1)}, drop=f"re:{SLOW}")
        assert done.dropped == ["aa"]


def test_host_programs_timer_is_kept() -> None:
    """Every match used to clear a host program's alarm."""
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert matches("re:a+", "aa")
        assert 990 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# Random expressions with repeated groups that can match nothing; `re` is the oracle.
ATOMS = st.sampled_from(
    ["a", "b", ".", r"\w", r"\d", "[ab]", "[^a]", r"\.", r"\b", "{a}", "a{", "[{]", r"\{", "{,1}x"]
)
REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{,2}"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        inner.map("({})".format),
        inner.map("(?={})".format),
        st.tuples(inner, REPEATS).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(EXPRESSIONS, st.lists(st.text("ab.{}1x,", max_size=4), max_size=4))
def test_expressions_match_like_pythons_re(text: str, keys: list[str]) -> None:
    try:
        compiled = re.compile(text)
    except re.error:
        return
    for key in keys:
        found, own = Regex(text).fullmatch(key), compiled.fullmatch(key)
        assert (found and found.groups()) == (own and own.groups())


@pytest.mark.parametrize(
    "text", ["a{99999999999999999999}", "(" * 5000, "*", "(?P<1>a)", "a{2,1}", "[[:alpha:]]+"]
)
def test_an_invalid_regular_expression_is_reported(text: str) -> None:
    with pytest.raises(CkptError, match="not a regular expression"):
        parse(f"re:{text} => b").apply("a")
    with pytest.raises(CkptError, match="not a regular expression"):
        matches(f"re:{text}", "a")


TOKENS = st.lists(
    st.sampled_from(["a", "b", "{x}", "{y}", "{s*}", "{t*}", "{u*}"]), min_size=1, max_size=5
)
KEYS = st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=6)


@settings(max_examples=200)
@given(TOKENS, KEYS)
def test_ways_match_a_brute_force_search(tokens: list[str], segments: list[str]) -> None:
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
        if all(
            values.setdefault(t, p) == p if t in names else p == (t,) for t, p in zip(tokens, parts)
        ):
            found.add(frozenset(values.items()))
    full = {token.strip("{*}"): token for token in names}
    ours = [
        frozenset((full[name], tuple(segments[place])) for name, place in bound.items())
        for bound in pattern_of(tokens).ways(segments)
    ]
    assert len(ours) == len(set(ours))
    assert set(ours) == found
