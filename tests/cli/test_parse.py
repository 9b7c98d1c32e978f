"""The values of a command line reach the command as typer converts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.cli import params, parser
from ckpttool.core.options import Argument, Option
from ckpttool.core.values import dataclass

WORDS = [
    "a.pt",
    "x=y",
    "",
    "-",
    "-1",
    "0",
    "0.5",
    "1e-05",
    "inf",
    "nan",
    "1_0",
    " 1",
    "٣",
    "a b",
    "\udcff",
    "true",
    "a\tb",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """An option of each type."""

    like: Annotated[Any, Option("--like CKPT", "")] = None
    rule: Annotated[Sequence[str] | None, Option("--rule RULE", "")] = None
    rtol: Annotated[float, Option("--rtol N", "", least=0)] = 0.0
    depth: Annotated[int | None, Option("--depth N", "", least=0)] = None
    all: Annotated[bool, Option("-a, --all", "")] = False
    out: Annotated[str | None, Option("-o, --output OUT", "")] = None


PLAIN = {
    "ckpt": "a.pt",
    **{name: getattr(Options(), name) for name in ("like", "rule", "rtol", "depth", "all", "out")},
}


received: dict[str, Any] = {}


def command(ckpt: Annotated[str, Argument("CKPT", "")], options: Options) -> None:
    received.clear()
    received.update(
        {"ckpt": ckpt, **{name: getattr(options, name) for name in PLAIN if name != "ckpt"}}
    )


@pytest.fixture(autouse=True, scope="module")
def command_line() -> Iterator[None]:
    """Add the command ``try`` to the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(params.COMMANDS, "try", (__name__, ""))
        yield


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.pt", {}),
        ("a.pt --all --rtol 1e-05 --depth=12", {"all": True, "rtol": 1e-05, "depth": 12}),
        ("-a --rule x=>y a.pt --rule=z", {"all": True, "rule": ["x=>y", "z"]}),
        ("-oout.pt a.pt --like -x", {"out": "out.pt", "like": "-x"}),
        ("-ao out.pt -- -b.pt", {"ckpt": "-b.pt", "all": True, "out": "out.pt"}),
        ("a.pt --rtol 1 --rtol 2", {"rtol": 2.0}),
        ("-q a.pt --max-memory 1M", {}),
    ],
)
def test_values_have_the_types_of_the_options(line: str, expected: Mapping[str, Any]) -> None:
    assert parser.run(["try", *line.split()]) == 0
    assert received == {**PLAIN, **expected}
    assert {name: type(value) for name, value in received.items() if name in expected} == {
        name: type(value) for name, value in expected.items()
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["--like", "--rule", "-o", "--rtol", "--depth"]),
            st.sampled_from(WORDS) | st.text(),
        ),
        max_size=3,
    )
)
def test_values_are_those_of_typer(options: list[tuple[str, str]]) -> None:
    """typer's own conversion needs pydantic, also for texts."""
    line = ["try", "a.pt", *(word for option in options for word in option)]
    outcomes = []
    for conversion in (parser._Conversion, lambda param, is_text: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parser, "_Conversion", conversion)
            try:
                parser.run(line)
                outcomes.append(repr(sorted(received.items())))
            except CkptError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
