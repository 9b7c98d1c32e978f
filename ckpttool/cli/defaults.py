"""Options that the command line leaves out: from the environment (``CKPTTOOL_MODEL``) and from pyproject.toml.

The command line comes first, then the environment, then ``[tool.ckpttool.COMMAND]``, then ``[tool.ckpttool]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from ckpttool.cli.params import COMMANDS, Command, Default, Param, Unusual, load, value_of
from ckpttool.cli.pyproject import PYPROJECT, table
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import shell, visible
from ckpttool.core.values import dataclass

_PREFIX = "CKPTTOOL_"
_OTHERS = {"CKPTTOOL_DEBUG", "CKPTTOOL_LOG", PYPROJECT}
# What one run reads, writes or overwrites has no default.
_EACH_RUN = {*("base", "force", "in_place", "manifest", "no_defaults", "out", "save_plan", "suggest", "update")}
# They belong together: if MODEL comes from another place, the others do not apply to it.
_MODEL = ("model", "materialize", "optimizer")
_NEAR = 0.9  # how similar a variable must be to an option to count as misspelled: other programs have variables too
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
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
    from ckpttool.core.names import RANK_FORMS
    from ckpttool.naming.convert import WORDS
    from ckpttool.remapping.options import is_plan

    if given["rules"] is not None and is_plan(given["rules"]):
        return False  # a plan has all names

    by_name = ("trainable_only", "optimizer", "to_optimizer")
    forms = [(given[name] or "").partition("(")[0] for name in ("to", "from_")]
    return any(form in (*WORDS, *RANK_FORMS) for form in forms) or any(given[name] for name in by_name)


@dataclass(slots=True)
class _Layer:
    """The defaults of one place by the names of their options, and everything that is wrong with the place.

    None instead of a default removes the option's defaults from other places.
    """

    place: str
    defaults: dict[str, Default | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, param: Param, value: Any, place: str, key: str, own: bool = False) -> None:
        """Add a default; a value that the option does not take is a problem under `key`."""
        try:
            texts = _texts(param, value)
            self.defaults[param.name] = Default(False if texts is None else value_of(param, texts), place, own)
        except CkptError as error:
            self.problems.append(Problem(error.message, key))
        except (Unusual, TypeError):
            self.problems.append(Problem(f"{value!r:.60} is not {_KINDS[param.kind]}", key))

    def check(self) -> None:
        if self.problems:
            hint = "fix it, or pass --no-defaults; the command line has the same options (ckpttool COMMAND --help)"
            raise CkptError(f"defaults that cannot be taken from {self.place}", hint=hint, problems=self.problems)


def with_defaults(command: Command) -> Command:
    """Return the command with the defaults of other places. Raise `CkptError` with every mistake of a place."""
    options = _options(command)
    defaults: dict[str, Default | None] = {}
    for layer in (*_of_pyproject(command.name, options), _of_environment(options)):
        if "model" in layer:
            defaults = {name: default for name, default in defaults.items() if name not in _MODEL}
        defaults |= layer
    found = {name: default for name, default in defaults.items() if default is not None}
    if not found:
        return command
    return replace(command, defaults=found, run=lambda given: command.run(_completed(command, found, given)))


def _completed(command: Command, defaults: Mapping[str, Default], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are given, and the defaults that apply to the others, which are reported on stderr."""
    used = {
        param.name: defaults[param.name] for param in command.params if param.name in defaults.keys() - given.keys()
    }
    words = {param.name: _word(param) for param in command.params}
    if "model" in words:
        plain = {param.name: None if param.is_required else param.default for param in command.params} | dict(given)
        needs = given.get("model") is None and _NEEDS_MODEL[command.name](plain)
        for name in _MODEL:
            if name in used and (given.get("model") is not None or not (needs or used[name].own)):
                del used[name]
    values = {**given, **{name: default.value for name, default in used.items()}}
    for name, default in used.items():
        if not values.get("quiet") and default.value is not False:
            each = default.value if isinstance(default.value, list) else [default.value]
            flag = f"--{words[name]}"
            line = [flag] if default.value is True else [word for value in each for word in (flag, str(value))]
            sys.stderr.write(f"default: {visible(f'{shell(*line)} ({default.place})')}\n")
    return values


def _options(command: Command) -> dict[str, Param]:
    """Return the options that may have a default, by their words: ``model``, ``fail-on``."""
    may = (param for param in command.params if param.name not in _EACH_RUN)
    return {_word(param): param for param in may if param.flags or param.name == "model"}


def _words() -> dict[str, Collection[str]]:
    """Return the words of the options of each command that may have a default."""
    return {name: _options(load(name)).keys() for name in COMMANDS}


def _word(param: Param) -> str:
    """Return the option's long word without its dashes; an argument's name."""
    return next((flag[2:] for flag in param.flags if flag.startswith("--")), param.name)


_KINDS = {bool: "true or false", int: "an integer from 0 on", float: "a number from 0 on", str: "a text"}


def _texts(param: Param, value: Any) -> list[str] | None:
    """Return the value as words of the command line; None for a flag that is not set. Raise TypeError for others."""
    values = value if param.many and isinstance(value, list) else [value]
    if param.kind is bool:
        if not isinstance(value, bool):
            raise TypeError
        return [""] if value else None
    kinds = {int: int, float: (int, float), str: str}[param.kind]
    if not all(isinstance(each, kinds) and not isinstance(each, bool) for each in values):  # type: ignore[arg-type]
        raise TypeError
    return [str(each) for each in values]


def _of_environment(options: Mapping[str, Param]) -> dict[str, Default | None]:
    layer = _Layer("the environment")
    variables = {_variable(word): param for word, param in options.items()}
    for variable in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        text, param = os.environ[variable], variables.get(variable)
        if param is not None and text:
            layer.add(param, _parsed(param, text), variable, variable)
        elif param is not None:  # an empty variable removes the default of a file
            layer.defaults[param.name] = None
        elif variable not in _OTHERS:
            known = {_variable(word) for names in _words().values() for word in names}
            hint = "" if variable in known else _did_you_mean(variable, known, _NEAR)
            layer.problems += [Problem(f"is not an option{hint}", variable)] if hint else []
    layer.check()
    return layer.defaults


def _parsed(param: Param, text: str) -> Any:
    """Return the text of a variable as the option's type; several values are on separate lines."""
    if param.kind is bool:
        return _FLAGS.get(text.lower(), text)
    if param.many:
        return text.splitlines()
    if param.kind is str:
        return text
    try:
        return param.kind(text)
    except ValueError:
        return text


def _variable(word: str) -> str:
    return _PREFIX + word.upper().replace("-", "_")


def _of_pyproject(command: str, options: Mapping[str, Param]) -> list[dict[str, Default | None]]:
    """Return the defaults of the file: those for all commands, then the command's own."""
    path, everything = table()
    own = everything.get(command, {})
    general = {word: value for word, value in everything.items() if not isinstance(value, dict)}
    problems: list[Problem] = []
    if not isinstance(own, dict) or set(everything) - set(general) - {command}:
        commands = _words()
        for word, value in everything.items():
            if word in commands and not isinstance(value, dict):
                problems.append(Problem("is not a table", f"tool.ckpttool.{word}"))
            elif word not in commands and isinstance(value, dict):
                problems.append(Problem(f"is not a command{_did_you_mean(word, commands)}", f"tool.ckpttool.{word}"))
    found = []
    for values, name in ((general, "tool.ckpttool"), (own, f"tool.ckpttool.{command}")):
        layer = _Layer(path, problems=problems)
        for word, value in values.items() if isinstance(values, dict) else ():
            if word in options:
                param = options[word]
                layer.add(param, _from_here(path, param, value), f"{path} [{name}]", f"{name}.{word}", values is own)
            elif values is own or not any(word in known for known in _words().values()):
                known = options if values is own else {one for each in _words().values() for one in each}
                hint = _did_you_mean(word.replace("_", "-"), known)
                problems.append(Problem(f"is not an option that can have a default{hint}", f"{name}.{word}"))
        found.append(layer.defaults)
    _Layer(path, problems=problems).check()
    return found


def _did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean model?``, or nothing if no known word is that similar."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {near}?" for near in get_close_matches(word, list(known), 1, cutoff))


def _from_here(path: str, param: Param, value: Any) -> Any:
    """Return the value with paths that are relative to the file made relative to the working folder."""
    if isinstance(value, list):
        return [_from_here(path, param, each) for each in value]
    metavar = param.mark.metavar
    if not isinstance(value, str) or metavar not in ("MODEL", "OPTIMIZER", "FILE", "CKPT"):
        return value
    is_module = metavar in ("MODEL", "OPTIMIZER") and not value.partition(":")[0].endswith((".py", ".json", ".pt2"))
    if is_module or "://" in value:
        return value
    return os.path.relpath(os.path.join(os.path.dirname(path), value))
