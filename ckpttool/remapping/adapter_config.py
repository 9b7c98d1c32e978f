"""PEFT's `adapter_config.json` after a rename: copied, rewritten name by name, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpttool.core.errors import Problem
from ckpttool.core.text import is_list_of_text
from ckpttool.naming.wrappers import PEFT_ROOT
from ckpttool.ruleset.patterns import compiled

ADAPTER_CONFIG = "adapter_config.json"

_UNCHANGED: tuple[object, ...] = (None, [], {}, "", "all-linear")
_ABOUT_FILES = ("auto_mapping", "base_model_name_or_path", "revision")
_BEYOND_KEYS = ("exclude_modules", "layers_to_transform", "target_parameters")
_SHOWN = 200  # characters of a value in a message


def follow(
    config: Mapping[str, Any], keys: Sequence[tuple[str, str]], new_base: Iterable[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the configuration for renamed keys, and the fields that may find other modules then.

    `keys` are pairs of old and new key. `new_base` are the tensors of the new base, if known.
    """
    modules = moved_modules(keys)
    new_config = dict(config)
    if all(path == new_path for path, new_path in modules.items()):
        return new_config, []
    paths = _modules_around(_in_base(new_key) for _, new_key in keys)
    every_path = paths | _modules_around(new_base)
    problems = []
    for field, value in config.items():
        if value in _UNCHANGED or field in _ABOUT_FILES:
            continue
        reason = ""
        if field in _BEYOND_KEYS:
            reason = "it depends on modules or parameters whose new names the file does not show"
        elif field in _LISTS and not is_list_of_text(value):
            reason = "an expression may match other modules of the new base"
        elif field in _LISTS:
            new_config[field], reason = _renamed(value, _LISTS[field], modules, every_path)
        elif _has_number_for_each_module(field, value):
            names, reason = _renamed(list(value), _by_expression, modules, paths)
            new_config[field] = dict(zip(names, value.values()))
        else:
            texts = list(_texts(value))
            for matches in (_by_segments, _by_ending, _as_part):
                reason = reason or _difference(texts, texts, matches, modules, every_path)
        if reason:
            problems.append(Problem(f"{shown(value)}: {reason}", field))
    return new_config, problems


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _has_number_for_each_module(field: str, value: Any) -> bool:
    if not field.endswith("_pattern") or not isinstance(value, dict):
        return False
    return all(isinstance(number, (int, float)) for number in value.values())


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value:
            yield from _texts(part)
        if isinstance(value, dict):
            yield from _texts(list(value.values()))


# The ways in which PEFT finds modules by a name


def _by_segments(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _by_ending(name: str, path: str) -> bool:
    return path.endswith(name)


def _by_expression(name: str, path: str) -> bool:
    try:
        return compiled(rf"(.*\.)?({name})").fullmatch(path) is not None
    except ValueError:  # PEFT cannot read it either
        return False


def _as_part(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


Matches = Callable[[str, str], bool]
_LISTS: Mapping[str, Matches] = {
    "target_modules": _by_segments,
    "feedforward_modules": _by_segments,
    "modules_to_save": _by_ending,
}


# What names find before and after


def _renamed(
    names: list[str], matches: Matches, modules: Mapping[str, str], paths: Collection[str]
) -> tuple[list[str], str]:
    """Return the names if they find the same modules, or else the new path of each; or a reason.

    A new path of one segment is refused: other paths may end with it.
    """
    reason = _difference(names, names, matches, modules, paths)
    new_names = [modules.get(name, "") for name in names]
    are_full = all("." in name for name in new_names)
    if reason and are_full and not _difference(names, new_names, matches, modules, paths):
        return new_names, ""
    return names, reason


def _difference(
    names: Iterable[str],
    new_names: Iterable[str],
    matches: Matches,
    modules: Mapping[str, str],
    paths: Collection[str],
) -> str:
    """Return a difference between what a name and its new name find, or an empty text."""
    for name, new_name in zip(names, new_names):
        old_found = [path for path in modules if matches(name, path)]
        new_found = {path for path in paths if matches(new_name, path)}
        for path in old_found:
            if modules[path] not in new_found:
                return f"{name} finds {path}, which is {modules[path] or 'split'} now"
        for path in sorted(new_found.difference(modules[path] for path in old_found)):
            return f"{new_name} would find {path} too"
    return ""


# Paths


def moved_modules(keys: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return old path -> new path of each module around a key, from pairs of old and new key.

    The new path is empty if there are several, or if it cannot be told from names inside.
    """
    modules: dict[str, str] = {}
    for old_key, new_key in keys:
        path = _in_base(old_key)
        new_path = new_name = _in_base(new_key)
        while "." in path:
            path, _, last = path.rpartition(".")
            new_path, _, new_last = new_path.rpartition(".")
            new_path = new_path if last == new_last else ""
            stays = new_name.startswith(f"{path}.")
            place = new_path or (path if stays else "")
            if modules.setdefault(path, place) != place:
                modules[path] = ""
    return modules


def _modules_around(names: Iterable[str]) -> set[str]:
    paths: set[str] = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            paths.add(name)
    return paths


def _in_base(key: str) -> str:
    return key.removeprefix(".".join(PEFT_ROOT) + ".")
