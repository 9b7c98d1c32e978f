"""The options that several commands take, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="package.module:attr, file.py:attr, a names file or a .pt2 program."),
]


ModelKwargs = Annotated[
    str, typer.Option("--model-kwargs", metavar="JSON", help="Arguments for MODEL's factory: '{\"layers\": 4}'.")
]


Materialize = Annotated[
    bool, typer.Option("--materialize", help="Build MODEL with real weights instead of on the meta device.")
]


Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="OPTIMIZER", help="file.py:make, a function of the model; or a class."),
]


All = Annotated[bool, typer.Option("--all", help="List every key instead of one line for each cause.")]
