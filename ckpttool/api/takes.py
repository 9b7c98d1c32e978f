"""Functions that take the fields of an options' dataclass as keywords, and show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: type[Any]) -> Callable[[Function], Function]:
    """Shows the fields of the dataclass in the function's signature, in the place of ``**options``."""

    def decorate(function: Function) -> Function:
        own = [p for p in Signature.from_callable(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}
        more = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            for field in fields(options)
            if field.name not in taken
        ]
        function.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate
