"""The fast parser returns the same as typer, for every command and random command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from ckpttool.cli import by_typer
from ckpttool.cli.params import COMMANDS, Param, load, parse
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Option

LOADED = {name: load(name) for name in COMMANDS}
WORDS = [
    "a.pt",
    "x=y",
    "",
    "-",
    "--",
    "--help",
    "json",
    "text",
    "yaml",
    "r.md",
    "r.pdf",
    "-1",
    "0",
    "0.5",
    "1e-05",
    "inf",
]
WORDS += ["nan", "1_0", " 1", "٣", "ключ", "a b", "\udcff", "-o", "-oX", "--nope", "12", "1e999", "007", "true", "a\tb"]


class TyperParser:
    """The command `name` parsed by typer, which returns the values instead of running it."""

    def __init__(self, name: str) -> None:
        self.name, self.given = name, dict[str, Any]()

        def keep(given: Mapping[str, Any]) -> None:
            self.given = dict(given)

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(by_typer.typed(replace(LOADED[name], run=keep)))
        self.command = get_command(single)

    def __call__(self, args: list[str]) -> dict[str, Any] | str:
        """Return the values that typer passes to the command, or its error."""
        try:
            with self.command.make_context(self.name, list(args)) as context:
                self.command.invoke(context)
        except (CkptError, by_typer.UsageError, typer.Exit) as error:
            return f"{type(error).__name__}: {error}"
        return self.given


VALID = {str: ["a.pt", "ключ", "a b", "x=y", ""], int: ["0", "12"], float: ["0.5", "1e-05"], bool: [""]}


def command_lines(params: Sequence[Param]) -> st.SearchStrategy[list[str]]:
    """Return valid command lines with some invalid words, in any order."""
    texts = st.sampled_from(WORDS) | st.text(max_size=4)
    options = st.sampled_from([one for one in params if isinstance(one.mark, Option)])
    valid = options.flatmap(_valid)
    invalid = st.tuples(options.map(lambda one: one.mark.flags[0]), texts)
    odd = st.one_of(invalid.map(list), invalid.map(lambda pair: ["=".join(pair)]), texts.map(lambda word: [word]))
    needed = st.tuples(*(_valid(one) for one in params if one.is_required)).map(list)
    more = st.lists(valid, max_size=3) | st.lists(valid | odd, max_size=4)
    parts = st.tuples(needed | st.just([]), more).flatmap(lambda both: st.permutations([*both[0], *both[1]]))
    return parts.map(lambda parts: [word for part in parts for word in part])


def _valid(one: Param) -> st.SearchStrategy[list[str]]:
    texts = ["json", "text"] if one.name == "format" else ["r.md"] if one.name == "report" else VALID[one.kind]
    text = st.sampled_from(texts)
    if not isinstance(one.mark, Option):
        return text.map(lambda value: [value])
    flag = st.sampled_from(one.mark.flags)
    if one.kind is bool:
        return flag.map(lambda value: [value])
    return st.tuples(flag, text).map(list)


@pytest.mark.parametrize("name", LOADED)
def test_fast_parser_agrees_with_typer(name: str) -> None:
    params, typer_parser, parsed = LOADED[name].params, TyperParser(name), 0

    @settings(max_examples=120)
    @given(command_lines(params))
    def agree(args: list[str]) -> None:
        nonlocal parsed
        values = parse(LOADED[name], args)
        if values is not None:  # None: left to typer
            parsed += 1
            assert _plain(values) == _plain(typer_parser(args))

    agree()
    assert parsed > 10


def _plain(values: dict[str, Any] | str) -> Any:
    """Return the values with their types, since 1 == 1.0 == True, and with None for an empty list."""
    if isinstance(values, str):
        return values
    return {name: None if value in ([], ()) else (type(value), value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("line", "is_fast"),
    [
        ("inspect a.pt", True),
        ("inspect a.pt --format json --report r.md --report=r.json", True),
        ("diff a.pt b.pt --values --rtol 1e-05 --atol=0.5", True),
        ("diff --model model.py:build", True),
        ("remap a.pt -o b.pt --rule encoder.{x*}=>backbone.{x*} --drop head.* --to fsdp-sharded(world_size=4)", True),
        ("swap-weights p.pt2 new.pt -o o.pt2 --model model.py:build", True),
        ("inspect --help", False),
        ("inspect", False),
        ("inspect a.pt --format yaml", False),
        ("remap a.pt -ob.pt", False),
        ("diff a.pt b.pt --rtol -1", False),
        ("diff a.pt b.pt --values=1", False),
        ("inspect a.pt b.pt", False),
    ],
)
def test_usual_command_lines_do_not_need_typer(line: str, is_fast: bool) -> None:
    name, *args = line.split()
    assert (parse(LOADED[name], args) is not None) is is_fast
