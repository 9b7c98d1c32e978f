"""What the command line leaves out: from the environment (``CKPTTOOL_MODEL``) and from pyproject.toml.

The command line comes first, then the environment, then ``[tool.ckpttool.COMMAND]``, then ``[tool.ckpttool]``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from inspect import Parameter
from typing import Any

from ckpttool.cli.fields import Taken
from ckpttool.cli.parse import Unusual, value_of
from ckpttool.cli.pyproject import PYPROJECT, table
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.options import Option
from ckpttool.core.text import shell, visible
from ckpttool.core.values import dataclass

_PREFIX = "CKPTTOOL_"
_KWARGS = "model-kwargs"  # the one option that may be a table
_OTHERS = {"CKPTTOOL_DEBUG", "CKPTTOOL_LOG", PYPROJECT}
# What one run reads, writes or overwrites is said where it is run.
_EACH_RUN = {
    "base",
    "force",
    "in_place",
    "manifest",
    "no_defaults",
    "out",
    "plan",
    "save_plan",
    "suggest",
    "undo",
    "update",
}
# They belong together: nothing of it goes with a MODEL that is named elsewhere.
_MODEL = ("model", "model_kwargs", "materialize", "optimizer")
_NEAR = 0.9  # how like an option a variable has to be to be one that is misspelt: others have theirs too
Words = Callable[[], Mapping[str, Collection[str]]]
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# Command -> whether it cannot do without a MODEL; others take one only from their own table.
_NEEDS_MODEL: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "trace": lambda given: True,
    "explain": lambda given: True,
    "check": lambda given: any(path.endswith(".json") for path in given["files"]),
    "diff": lambda given: len(given["operands"] or ()) < 2,
    "remap": lambda given: given["plan"] is None and _asks_names(given),
    "swap-weights": lambda given: given["from_"] is not None,
}
_BY_NAME = ("trainable_only", "optimizer", "to_optimizer", "world_size")


def _asks_names(given: Mapping[str, Any]) -> bool:
    """Whether a remap is asked for what only a model's names can say."""
    from ckpttool.naming.convert import WORDS

    return any(given[name] in WORDS for name in ("to", "from_")) or any(given[name] for name in _BY_NAME)


@dataclass(frozen=True, slots=True)
class Default:
    """A value that stands in for an option that is not given: where it is from, and what is there without it.

    `word` is the option's long word; `own`: it is said for this command, and not for all.
    """

    value: Any
    place: str
    instead: Any
    word: str
    own: bool = False


@dataclass(slots=True)
class _Faults:
    """What is wrong with the defaults of one place, all of it."""

    place: str
    problems: list[Problem] = field(default_factory=list)

    def check(self) -> None:
        """Raises `CkptError` with all of them."""
        if self.problems:
            hint = "mend it, or pass --no-defaults; the options are those of the command line (ckpttool COMMAND --help)"
            raise CkptError(f"defaults that cannot be taken from {self.place}", hint=hint, problems=self.problems)


def with_defaults(command: str, taken: Sequence[Taken], every: Words) -> list[Taken]:
    """All that a command takes, where nothing is given with a `Default` in its place.

    `every` gives each command's words for its options (``fail-on``). Raises `CkptError` with every mistake of a place.
    """
    options = {_word(one): one for one in taken if _can_have_one(one)}
    found: dict[str, Default] = {}
    for layer in (*_of_pyproject(command, options, every), _of_environment(options, every)):
        if "model" in layer:
            found = {name: default for name, default in found.items() if name not in _MODEL}
        found |= layer
    return [replace(one, default=found[one.name]) if one.name in found else one for one in taken]


def words_of(taken: Iterable[Taken]) -> set[str]:
    """The words of the options that may have a default: ``model``, ``fail-on``."""
    return {_word(one) for one in taken if _can_have_one(one)}


def chosen(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values with each `Default` that is taken, which stderr says, or what is there without it."""
    from_elsewhere = {name: value for name, value in given.items() if isinstance(value, Default)}
    if not from_elsewhere:
        return dict(given)
    plain = {name: value.instead if name in from_elsewhere else value for name, value in given.items()}
    left_out = set()
    if "model" in given:
        named = "model" not in from_elsewhere and given["model"] is not None
        needs = _NEEDS_MODEL[command](plain)
        left_out = {name for name in _MODEL if named or not (needs or getattr(given.get(name), "own", False))}
    used = {name: default for name, default in from_elsewhere.items() if name not in left_out}
    values = {**plain, **{name: default.value for name, default in used.items()}}
    if not values.get("quiet"):
        said = (one for one in used.values() if one.value is not None and one.value is not False)
        sys.stderr.writelines(f"default: {_said(one)}\n" for one in said)
    return values


def _said(default: Default) -> str:
    flag = f"--{default.word}"
    values = default.value if isinstance(default.value, list) else [default.value]
    words = [flag] if default.value is True else [word for value in values for word in (flag, str(value))]
    return visible(f"{shell(*words)} ({default.place})")


def _can_have_one(one: Taken) -> bool:
    return one.name not in _EACH_RUN and (isinstance(one.mark, Option) or one.name == "model")


def _word(one: Taken) -> str:
    """The option's long word without its dashes; an argument's name."""
    if not isinstance(one.mark, Option):
        return one.name
    return next(flag for flag in one.mark.flags if flag.startswith("--"))[2:]


def _made(one: Taken, value: Any, place: str, faults: _Faults, key: str, own: bool = False) -> dict[str, Default]:
    """The default of an option, under its name; none where the value is not one that it takes."""
    instead = None if one.default is Parameter.empty else one.default
    try:
        return {one.name: Default(value_of(one, _texts(one, value)), place, instead, _word(one), own)}
    except CkptError as error:
        faults.problems.append(Problem(error.message, key))
    except (Unusual, TypeError):
        faults.problems.append(Problem(f"{value!r:.60} is not {_KINDS[one.kind]}", key))
    return {}


_KINDS = {bool: "true or false", int: "an integer from 0 on", float: "a number from 0 on", str: "a text"}


def _texts(one: Taken, value: Any) -> list[str] | None:
    """The value as on the command line; None for a flag that is not set. Raises TypeError for other kinds."""
    values = value if one.many and isinstance(value, list) else [value]
    if one.kind is bool:
        if not isinstance(value, bool):
            raise TypeError
        return [""] if value else None
    wanted = {int: int, float: (int, float), str: str}[one.kind]
    if not all(isinstance(each, wanted) and not isinstance(each, bool) for each in values):  # type: ignore[arg-type]
        raise TypeError
    return [str(each) for each in values]


def _of_environment(options: Mapping[str, Taken], every: Words) -> dict[str, Default]:
    found: dict[str, Default] = {}
    faults = _Faults("the environment")
    names = {_variable(word): one for word, one in options.items()}
    for variable in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        text = os.environ[variable]
        if variable in names:
            one = names[variable]
            found |= _made(one, _read(one, text), variable, faults, variable) if text else _nothing(one, variable)
        elif variable not in _OTHERS:
            others = {_variable(word) for words in every().values() for word in words}
            said = "" if variable in others else _did_you_mean(variable, others, _NEAR)
            faults.problems += [Problem(f"is none{said}", variable)] if said else []
    faults.check()
    return found


def _nothing(one: Taken, variable: str) -> dict[str, Default]:
    """An empty variable takes the default of a file away."""
    instead = None if one.default is Parameter.empty else one.default
    return {one.name: Default(instead, variable, instead, _word(one))}


def _read(one: Taken, text: str) -> Any:
    """The text of a variable as what its option takes: of several values each stands on a line of its own."""
    if one.kind is bool:
        return _FLAGS.get(text.lower(), text)
    if one.many:
        return text.splitlines()
    if one.kind is str:
        return text
    try:
        return one.kind(text)
    except ValueError:
        return text


def _variable(word: str) -> str:
    return _PREFIX + word.upper().replace("-", "_")


def _of_pyproject(command: str, options: Mapping[str, Taken], every: Words) -> Iterator[dict[str, Default]]:
    """The defaults of the file: those for all commands, then the command's own."""
    path, everything = table()
    own = everything.get(command, {})
    general = {word: value for word, value in everything.items() if word == _KWARGS or not isinstance(value, dict)}
    faults = _Faults(path)
    if not isinstance(own, dict) or set(everything) - set(general) - {command}:
        faults.problems += _no_tables(everything, every())
    for layer, name in ((general, "tool.ckpttool"), (own, f"tool.ckpttool.{command}")):
        found: dict[str, Default] = {}
        for word, value in layer.items() if isinstance(layer, dict) else ():
            if word in options:
                beside, place = _beside(path, options[word], value), f"{path} [{name}]"
                found |= _made(options[word], beside, place, faults, f"{name}.{word}", layer is own)
            elif layer is own or not any(word in known for known in every().values()):
                known = options if layer is own else {known for words in every().values() for known in words}
                said = _did_you_mean(word.replace("_", "-"), known)
                faults.problems.append(Problem(f"is no option that can have a default{said}", f"{name}.{word}"))
        yield found
    faults.check()


def _no_tables(everything: Mapping[str, Any], commands: Mapping[str, Any]) -> Iterator[Problem]:
    for word, value in everything.items():
        if word in commands and not isinstance(value, dict):
            yield Problem("is not a table", f"tool.ckpttool.{word}")
        elif word not in commands and word != _KWARGS and isinstance(value, dict):
            yield Problem(f"is no command{_did_you_mean(word, commands)}", f"tool.ckpttool.{word}")


def _did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean model?``; nothing where no known word is that near."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {near}?" for near in get_close_matches(word, list(known), 1, cutoff))


def _beside(path: str, one: Taken, value: Any) -> Any:
    """The value with paths relative to the file made relative to the folder that the command runs in."""
    if one.name == "model_kwargs" and isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return [_beside(path, one, each) for each in value]
    metavar = one.mark.metavar
    if not isinstance(value, str) or metavar not in ("MODEL", "OPTIMIZER", "FILE", "CKPT"):
        return value
    is_module = metavar in ("MODEL", "OPTIMIZER") and not value.partition(":")[0].endswith((".py", ".json", ".pt2"))
    if is_module or "://" in value:
        return value
    return os.path.relpath(os.path.join(os.path.dirname(path), value))
