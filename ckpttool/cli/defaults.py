"""Options that the command line leaves out: from the environment (``CKPTTOOL_MODEL``) and from pyproject.toml.

The command line comes first, then the environment, then ``[tool.ckpttool.COMMAND]``, then ``[tool.ckpttool]``. click's
own environment variables split a list at spaces, and stop at the first mistake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

from ckpttool.cli.params import COMMANDS, Command, load
from ckpttool.cli.pyproject import PYPROJECT, table
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import shell, visible
from ckpttool.core.values import dataclass

_PREFIX = "CKPTTOOL_"
_OTHERS = {"CKPTTOOL_DEBUG", "CKPTTOOL_LOG", PYPROJECT}
# What one run reads, writes or overwrites has no default.
_EACH_RUN = {*("force", "in_place", "manifest", "no_defaults", "out", "save_plan", "suggest", "update")}
# They belong together: if MODEL comes from another place, the others do not apply to it.
_MODEL = ("model", "materialize", "optimizer")
_NEAR = 0.9  # how similar a variable must be to an option to count as misspelled: other programs have variables too
# Command -> whether it needs a MODEL; other commands take one only from their own table.
_NEEDS_MODEL: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "trace": lambda given: True,
    "explain": lambda given: True,
    "convert": lambda given: False,
    "diff3": lambda given: False,
    "fix": lambda given: True,
    "check": lambda given: any(path.endswith(".json") for path in given["files"]),
    "diff": lambda given: len(given["operands"] or ()) < 2,
    "remap": lambda given: _requests_names(given),
    "swap-weights": lambda given: given["from_"] is not None,
}


def _requests_names(given: Mapping[str, Any]) -> bool:
    """Whether a remap requests something that only a model's names can say."""
    from ckpttool.core.names import FSDP_FLAT
    from ckpttool.naming.convert import WORDS
    from ckpttool.remapping.options import is_plan

    if given["rules"] is not None and is_plan(given["rules"]):
        return False  # a plan has all names

    by_name = ("trainable_only", "optimizer", "to_optimizer")
    forms = [(given[name] or "").partition("(")[0] for name in ("to", "from_")]
    return any(form in (*WORDS, FSDP_FLAT) for form in forms) or any(given[name] for name in by_name)


@dataclass(frozen=True, slots=True)
class Default:
    """The value of an option that the command line leaves out, the `place` that it comes from, and its name there.

    None as the value removes the defaults of other places. `own`: it is for this command, and not for all.
    """

    value: Any
    place: str
    name: str
    own: bool = False


def find_defaults(context: Any, usage_error: type[Exception]) -> dict[str, Default]:
    """Return the defaults of the context's command by parameter. Raise `CkptError` with every mistake of a place."""
    words = _may_have(context.command.name)
    options = {words[param.name]: param for param in context.command.params if param.name in words}
    found: dict[str, Default] = {}
    for read in (_of_pyproject, _of_environment):
        place, layers, problems = read(context.command.name, options)
        for layer in layers:
            if "model" in layer:
                found = {name: default for name, default in found.items() if name not in _MODEL}
            for word, default in layer.items():
                try:
                    value = _converted(context, options[word], default.value)
                    found[options[word].name] = replace(default, value=value)
                except (CkptError, usage_error) as error:
                    problems.append(Problem(error.message.rstrip("."), default.name))  # type: ignore[attr-defined]
        if problems:
            hint = "fix it, or pass --no-defaults; the command line has the same options (ckpttool COMMAND --help)"
            raise CkptError(f"defaults that cannot be taken from {place}", hint=hint, problems=problems)
    return {name: default for name, default in found.items() if default.value is not None}


def _converted(context: Any, param: Any, value: Any) -> Any:
    """Return the value as typer converts and checks it; for a repeatable option, each line of a text is a value."""
    if value in ("", []):
        return None
    values = [value]
    if param.multiple:
        values = value.splitlines() if isinstance(value, str) else value if isinstance(value, list) else [value]
    if any(isinstance(each, (list, dict)) for each in values):
        raise CkptError(f"{value!r:.60} is not one value", hint="")
    is_flag = getattr(param, "is_flag", False)
    texts = [each if isinstance(each, bool) and is_flag else str(each) for each in values]
    converted = param.process_value(context, texts if param.multiple else texts[0])
    return list(converted) if param.multiple else converted  # a tuple by older typer


def complete_values(
    name: str, command: Command, given: Mapping[str, Any], defaults: Mapping[str, Default]
) -> dict[str, Any]:
    """Return the values of all parameters: the `given` ones, and the defaults that apply, which are named on stderr."""
    values = {key: None if param.default is Parameter.empty else param.default for key, param in command.params.items()}
    values |= given
    used = dict(defaults)
    if "model" in values:
        others = {key: default.value for key, default in used.items() if key not in _MODEL}
        needed = "model" not in given and _NEEDS_MODEL[name](values | others)
        for key in _MODEL:
            if key in used and ("model" in given or not (needed or used[key].own)):
                del used[key]
    values |= {key: default.value for key, default in used.items()}
    for key, default in used.items():
        value = default.value
        if not values["quiet"] and value is not False:
            flag = f"--{_word(key, command.params[key].flags)}"
            each = value if isinstance(value, list) else [value]
            line = [flag] if value is True else [word for one in each for word in (flag, str(one))]
            sys.stderr.write(f"default: {visible(f'{shell(*line)} ({default.place})')}\n")
    return values


def _may_have(command: str) -> dict[str, str]:
    """Return the options of the command that may have a default, and their words: ``model``, ``fail-on``."""
    params = {name: param for name, param in load(command).params.items() if name not in _EACH_RUN}
    return {name: _word(name, param.flags) for name, param in params.items() if param.flags or name == "model"}


def _words() -> dict[str, Collection[str]]:
    """Return the words of the options of each command that may have a default."""
    return {name: _may_have(name).values() for name in COMMANDS}


def _word(name: str, flags: Iterable[str]) -> str:
    """Return the option's long word without its dashes; an argument's name."""
    return next((flag[2:] for flag in flags if flag.startswith("--")), name)


Layers = tuple[str, list[dict[str, Default]], list[Problem]]  # the place, its defaults by word, what is wrong with it


def _of_environment(command: str, options: Mapping[str, Any]) -> Layers:
    """Return the variables that are options; an empty variable removes the default of a file."""
    found = {word: os.environ.get(_variable(word)) for word in options}
    layer = {word: Default(text, _variable(word), _variable(word)) for word, text in found.items() if text is not None}
    others = {name for name in os.environ if name.startswith(_PREFIX)} - _OTHERS - set(map(_variable, options))
    known = {_variable(word) for words in _words().values() for word in words} if others else set()
    hints = {name: _did_you_mean(name, known, _NEAR) for name in sorted(others - known)}
    return (
        "the environment",
        [layer],
        [Problem(f"is not an option{hint}", name) for name, hint in hints.items() if hint],
    )


def _variable(word: str) -> str:
    return _PREFIX + word.upper().replace("-", "_")


def _of_pyproject(command: str, options: Mapping[str, Any]) -> Layers:
    """Return the defaults of the file: those for all commands, then the command's own."""
    path, everything = table()
    own = everything.get(command, {})
    general = {word: value for word, value in everything.items() if not isinstance(value, dict)}
    problems = []
    if not isinstance(own, dict) or set(everything) - set(general) - {command}:
        commands = _words()
        for word, value in everything.items():
            if word in commands and not isinstance(value, dict):
                problems.append(Problem("is not a table", f"tool.ckpttool.{word}"))
            elif word not in commands and isinstance(value, dict):
                problems.append(Problem(f"is not a command{_did_you_mean(word, commands)}", f"tool.ckpttool.{word}"))
    layers = []
    for values, name in ((general, "tool.ckpttool"), (own, f"tool.ckpttool.{command}")):
        layer: dict[str, Default] = {}
        for word, value in values.items() if isinstance(values, dict) else ():
            if word in options:
                value = _from_here(path, options[word].metavar, value)
                layer[word] = Default(value, f"{path} [{name}]", f"{name}.{word}", values is own)
            elif values is own or not any(word in known for known in _words().values()):
                known = options if values is own else {one for each in _words().values() for one in each}
                hint = _did_you_mean(word.replace("_", "-"), known)
                problems.append(Problem(f"is not an option that can have a default{hint}", f"{name}.{word}"))
        layers.append(layer)
    return path, layers, problems


def _did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean model?``, or nothing if no known word is that similar."""
    return "".join(f"; did you mean {near}?" for near in get_close_matches(word, list(known), 1, cutoff))


def _from_here(path: str, metavar: str | None, value: Any) -> Any:
    """Return the value with paths that are relative to the file made relative to the working folder."""
    if isinstance(value, list):
        return [_from_here(path, metavar, each) for each in value]
    if not isinstance(value, str) or metavar not in ("MODEL", "OPTIMIZER", "FILE", "CKPT"):
        return value
    is_module = metavar in ("MODEL", "OPTIMIZER") and not value.partition(":")[0].endswith((".py", ".json", ".pt2"))
    if not value or is_module or "://" in value:
        return value
    return os.path.relpath(os.path.join(os.path.dirname(path), value))
