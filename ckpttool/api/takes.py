"""Functions that take the fields of an options' dataclass as keywords, list them, and refuse any other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, TypeVar

from ckpttool.core.limits import spent

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: type[Any] | None = None, only: Collection[str] | None = None) -> Callable[[Function], Function]:
    """Show the fields of the dataclass, or `only` these, in the function's signature instead of ``**options``.

    A call with any other keyword raises TypeError, with the closest name that there is.
    """

    def decorate(function: Function) -> Function:
        own = [p for p in Signature.from_callable(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}
        more = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            for field in (fields(options) if options is not None else ())
            if field.name not in taken and (only is None or field.name in only)
        ]
        known = [*taken, *(parameter.name for parameter in more)]

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in known:
                    raise TypeError(_unexpected(function.__name__, name, known))
            spent.clear()
            return function(*args, **keywords)

        checked.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _unexpected(function: str, name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches  # only for the message

    close = get_close_matches(name, known, 1)
    end = f"; did you mean {close[0]!r}?" if close else ""
    return f"{function}() got an unexpected keyword argument {name!r}{end}"
