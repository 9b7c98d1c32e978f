"""Options of the library's functions and of the commands: type, metavar and help, declared once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature
from numbers import Real
from typing import Annotated, Any, TypeVar, Union

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import spent
from ckpttool.core.text import a
from ckpttool.core.values import dataclass

Function = TypeVar("Function", bound=Callable[..., Any])


Choices = Union[Iterable[str], Callable[[], Iterable[str]]]

# Groups of options: common ones, options about CKPT, options about OUT
COMMON, IS, BECOMES = "Common options", "Input", "Conversion"


class Option:
    """Marks a field as an option: ``Annotated[str | None, Option("-o, --output FILE", "The file to
    write.")]``.

    The first text has its `flags` and the `metavar` of its value, as in the help; `group` is its
    heading there. `least` is the smallest number that it takes; `check` is called with a value, and
    raises `CkptError` for an invalid one. `choices` are values that a shell completes. It `repeats`
    on the command line, also if a keyword takes one object.
    """

    def __init__(
        self,
        spelled: str,
        help: str,
        group: str = "Options",
        *,
        least: float | None = None,
        check: Callable[[Any], object] | None = None,
        choices: Choices | None = None,
        repeats: bool = False,
    ) -> None:
        words = spelled.split(" ")
        self.flags = tuple(word.rstrip(",") for word in words if word.startswith("-"))
        self.metavar = None if words[-1].startswith("-") else words[-1]
        self.spelled, self.help, self.group = spelled, help, group
        self.least, self.check, self.choices = least, check, choices
        self.repeats = repeats


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument: the metavar of its value, its help, and values that a shell
    completes.
    """

    metavar: str
    help: str
    choices: Choices | None = None


def expand_options(
    options: type[Any] | None = None, only: Collection[str] | None = None
) -> Callable[[Function], Function]:
    """Show the fields of the dataclass, or `only` these, in the function's signature instead of
    ``**options``.

    A call with another keyword raises TypeError, with the closest known name, and a value of a kind
    that the parameter does not take raises `CkptError`. The function gets an `os.PathLike` as text,
    also in a list.
    """

    def decorate(function: Function) -> Function:
        kinds: dict[str, str] = {}  # the annotation of each parameter
        parameters: dict[str, Parameter] = {}
        for parameter in Signature.from_callable(function).parameters.values():
            if parameter.kind is not Parameter.VAR_KEYWORD:
                parameters[parameter.name] = parameter
        for field in fields(options) if options is not None else ():
            if field.name not in parameters and (only is None or field.name in only):
                option = Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
                parameters[field.name] = option
                annotated = _ANNOTATED.match(str(field.type))
                kinds[field.name] = annotated[1] if annotated else ""
        for parameter in parameters.values():
            kinds.setdefault(parameter.name, str(parameter.annotation))

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in parameters:
                    text = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(text + _did_you_mean(name, parameters))
            spent.clear()
            texts = {name: _as_text(value) for name, value in keywords.items()}
            values = [_as_text(value) for value in args]
            for name, value in (*zip(parameters, values), *texts.items()):
                _check_kind(function.__name__, name, value, kinds[name])
            if _ON_COMMAND_LINE.get():
                return function(*values, **texts)
            token = _ON_COMMAND_LINE.set(True)  # calls inside of this one leave the text to it
            try:
                return function(*values, **texts)
            except CkptError as error:
                error.rewrite(in_python)
                raise
            finally:
                _ON_COMMAND_LINE.reset(token)

        checked.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


_ANNOTATED = re.compile(r"Annotated\[\s*(.*?),\s*Option\(", re.DOTALL)
_TEXTS = (list, tuple, set, frozenset)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    if isinstance(value, _TEXTS):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


# Annotation of a parameter, without None -> the check of a value, and words for such values
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "a text or a path"),
    "Sequence[str]": (_are_texts, "a text or a list of texts"),
    "str | Sequence[str]": (_are_texts, "a text or a list of texts"),
    "bool": (_is_flag, "True or False"),
    "float": (_is_number, "a number"),
    "Progress": (callable, "a function"),
}


def _check_kind(function: str, name: str, value: Any, annotation: str) -> None:
    """Raise `CkptError` if the parameter does not take values of this kind."""
    takes, words = _KINDS.get(annotation.removesuffix(" | None"), (None, ""))
    if isinstance(value, str) and "\0" in value:
        raise CkptError(f"{name} of {function}() has a null byte", hint="check the text")
    if takes is None or takes(value):
        return
    if value is None and annotation.endswith(" | None"):
        return
    kind = a(value)
    if isinstance(value, _TEXTS):
        kind += " of other objects"
    raise CkptError(
        f"{name} of {function}() is {words}, not {kind}",
        hint=f"see help(ckpttool.{function}) for what each argument is",
    )


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Whether a command line gets the errors, or a function that speaks for the functions that it calls.
_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("on_command_line", default=False)


@contextmanager
def on_command_line() -> Iterator[None]:
    """Leave the flags in the texts of errors: in Python they are keywords."""
    token = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(token)


_SHELL = re.compile(r"`[^`]*`|\b(?:ckpttool|git) [a-z].*?(?=;|$)")  # a command for a shell
_VALUE = r"""'[^']*'|"[^"]*"|[A-Z][A-Z_.]*\b|[^\s;,()]*[.:*/_][^\s;,()]*(?<!:)|\w+(?=$|;|: )"""
_FLAG = re.compile(rf"(?<![\w-])(?:--([a-z][a-z-]*[a-z])|-o\b)(?:[ =]({_VALUE}))?")
_FLAGS_WITHOUT_VALUE = {
    *("materialize", "force", "partial", "cast", "constants", "keep_constants", "in_place"),
    *("ignore_dtype", "values", "whole", "dry_run", "verify", "reverse", "trainable_only"),
    *("keep_aliases", "keep_pickled_code", "no_fsync", "fail_on_unused"),
}
_OTHER_NAMES = {"output": "out", "from": "from_", "program": "name"}
_ALL = re.compile(r"(?<![\w-])--(?:all|format json)\b")  # results have a method instead
# a command without its first word, as in `remap --model MODEL`
_SHORT = re.compile(r"`(check|convert|diff|explain|fix|inspect|remap|swap-weights|trace) ([^`]+)`")
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def in_python(text: str) -> str:
    """Return the text with keywords instead of flags, except in commands for a shell."""
    parts, begin = list[str](), 0
    for command in _SHELL.finditer(text):
        if command[0].startswith("`") and not command[0].startswith("`ckpttool "):
            continue
        parts += [_with_keywords(text[begin : command.start()]), command[0]]
        begin = command.end()
    return "".join((*parts, _with_keywords(text[begin:])))


def _with_keywords(text: str) -> str:
    text = _SHORT.sub(_as_call, _ALL.sub("to_json()", text))
    return _FLAG.sub(_as_keyword, text)


def _as_call(command: re.Match[str]) -> str:
    arguments = _WORD.findall(_FLAG.sub(_as_keyword, command[2]))
    return f"`{command[1].replace('-', '_')}({', '.join(arguments)})`"


def _as_keyword(flag: re.Match[str]) -> str:
    name = (flag[1] or "output").replace("-", "_")
    if name == "max_memory":  # no function has it
        return flag[0].removeprefix("--")
    value = flag[2] or ""
    if name in _FLAGS_WITHOUT_VALUE:
        value = "True" + (f" {value}" if value else "")
    elif value and not value.isupper() and value[0] not in "'\"":
        value = repr(value)
    return f"{_OTHER_NAMES.get(name, name)}={value}"


def _as_text(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, os.PathLike) for item in value):
        return list(map(_as_text, value))
    return value


def keywords_of(options: Any) -> dict[str, Any]:
    """Return the options as keywords of the function that takes them."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def call_of(operand: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of ``NAME(heads=32, tie=True)``; other operands have no
    arguments.

    The arguments are literals: nothing is evaluated. Raise `CkptError` if they are anything else.
    """
    if not operand.endswith(")") or "(" not in operand:
        return operand, {}
    import ast

    hint = (
        "arguments have names, and values of Python as in 'model.py:build(layers=4,"
        ' name="small", sizes=[1, 2])\''
    )
    for parenthesis in re.finditer(r"(?!^)\(", operand):
        at = parenthesis.start()
        try:
            call = ast.parse(f"_{operand[at:]}", mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        if not isinstance(call, ast.Call) or call.args:
            break
        try:
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            break
        if None in arguments:  # **KEYWORDS
            break
        return operand[:at], {str(name): value for name, value in arguments.items()}
    raise CkptError(f"{operand} has no arguments that can be read", hint=hint)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return ``NAME(heads=32)``, which `call_of` reads; without arguments only the name."""
    if not arguments:
        return name
    shown = (f"{argument}={value!r}" for argument, value in arguments.items())
    return f"{name}({', '.join(shown)})"


def several(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the values of an option that may be repeated: in Python a string is one value, not its
    letters.
    """
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


class Optimizers(dict[str, Any]):
    """Optimizers by the sections that hold their state."""

    @property
    def words(self) -> list[str]:
        """The values of the option that names them."""
        return [f"{path}={optimizer}" for path, optimizer in self.items()]


# ``muon=opt.py:make``: the text before the sign is a section, not an operand
_OF_SECTION = re.compile(r"([^:()=]+)=(.+)")


def single_or_by_section(value: Any) -> Any:
    """Return one optimizer as it is, and several with the sections that hold their state. Raises
    `CkptError` if a section has two.
    """
    if isinstance(value, Mapping):
        return Optimizers(value)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        return value
    by_section: list[tuple[str, str]] = []
    for text in texts:
        match = _OF_SECTION.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            by_section.append((match[1], match[2]))
    if len(by_section) != len(texts):
        return texts[0] if len(texts) == 1 else tuple(texts)
    optimizers: dict[str, str] = {}
    for section, optimizer in by_section:
        if optimizers.setdefault(section, optimizer) != optimizer:
            raise CkptError(
                f"{section} has two optimizers: {optimizers[section]} and {optimizer}",
                hint="name one of them",
            )
    return Optimizers(optimizers)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Whose names: MODEL, and how it is built. In Python an object may take the place of a text."""

    model: Annotated[
        Any,
        Option(
            "--model MODEL",
            "The model: 'model.py:build(n=4)', names.json or a program.",
            IS,
        ),
    ] = None
    materialize: Annotated[
        bool,
        Option(
            "--materialize",
            "Build MODEL with real weights instead of on the meta device.",
            "Advanced",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(ModelOptions):
    """MODEL, and the optimizer of its parameters."""

    optimizer: Annotated[
        Any,
        Option(
            "--optimizer OPTIMIZER",
            "Its optimizer: 'model.py:make(lr=1)'.",
            IS,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The output: its path, and how to write it."""

    out: Annotated[
        str | None, Option("-o, --output OUT", "The file or folder to write.", "Output")
    ] = None
    force: Annotated[bool, Option("--force", "Overwrite files that exist.", COMMON)] = False
    dry_run: Annotated[
        bool, Option("--dry-run", "Say what would be written, and write nothing.", "Output")
    ] = False
    verify: Annotated[
        bool,
        Option("--verify", "Prove that OUT holds every tensor: read it back.", "Output"),
    ] = False
    keep_pickled_code: Annotated[
        bool,
        Option(
            "--keep-pickled-code",
            "Write dangerous pickle imports too, which run when OUT is loaded.",
            "Advanced",
        ),
    ] = False
    no_fsync: Annotated[
        bool, Option("--no-fsync", "Do not wait until the disk has the bytes.", COMMON)
    ] = False

    def target(self, source: str) -> str | None:
        """Return the path to write, or None if nothing is written."""
        return self.out


@dataclass(frozen=True, kw_only=True)
class EditOptions(OutputOptions):
    """The output, which may be the source itself."""

    in_place: Annotated[
        bool,
        Option(
            "--in-place",
            "Change the names in the source itself; `ckpttool undo` reverts it.",
            "Output",
        ),
    ] = False

    def target(self, source: str) -> str | None:
        """Return the path to write, or None if nothing is written."""
        return source if self.in_place else self.out


@dataclass(frozen=True, kw_only=True)
class FixOptions(OptimizerOptions, EditOptions):
    """All options of a fix."""
