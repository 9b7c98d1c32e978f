"""PEFT's `adapter_config.json` after a rename: copied, rewritten name by name, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.core.errors import Problem
from ckpttool.core.text import is_list_of_text
from ckpttool.kinds.adapters import adapter_of
from ckpttool.naming.wrappers import PEFT_ROOT
from ckpttool.ruleset.patterns import compiled

ADAPTER_CONFIG = "adapter_config.json"

_UNCHANGED: tuple[object, ...] = (None, [], {}, "", "all-linear")
_ABOUT_FILES = ("auto_mapping", "base_model_name_or_path", "revision")
_TARGETS, _SAVED, _TOKENS = "target_modules", "modules_to_save", "trainable_token_indices"
_LONG = 2000  # characters of a list, which is an expression if it is longer
_LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")  # the first number of a path
# they have no effect on modules that `target_modules` names by their full paths, or are in the way
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
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


def with_full_names(
    config: Mapping[str, Any],
    fields: Collection[str],
    keys: Sequence[tuple[str, str]],
    new_base: Collection[str] = (),
) -> dict[str, Any]:
    """Return values for these fields that name each module by its complete new path, so that they
    find the same modules as before. A field is left out if nobody knows such a value.

    `keys` and `new_base` are those of `follow`.
    """
    modules = moved_modules(keys)
    adapter = adapter_of(old_key for old_key, _ in keys)
    adapted = dict(modules)
    if adapter is not None:
        adapted = {path: modules.get(path, "") for path in adapter.modules}
    paths = _modules_around(_in_base(new_key) for _, new_key in keys)
    base = _Base(paths | _modules_around(new_base), bool(new_base))
    narrowing = [field for field in _NARROWING if field in fields]
    values: dict[str, Any] = {}
    for field, value in config.items():
        if field == _TARGETS and (field in fields or narrowing):
            values[field] = base.expression_or_list(value, adapted, _by_segments)
        elif field not in fields:
            continue
        elif field == _SAVED:
            values[field] = base.listed(value, modules, _by_ending)
        elif field in _LISTS:
            values[field] = base.expression_or_list(value, adapted, _LISTS[field])
        elif field == _TOKENS and isinstance(value, dict):
            values[field] = base.mapped(value, modules, _by_ending)
        elif _has_number_for_each_module(field, value):
            values[field] = base.mapped(value, adapted, _by_expression)
    pasted = {field: value for field, value in values.items() if value}
    if _TARGETS in pasted:
        pasted.update(dict.fromkeys(narrowing))
    return pasted


class _Base(NamedTuple):
    """The paths of modules of the new base that are known. `is_complete`: it has no others."""

    paths: Collection[str]
    is_complete: bool

    def expression_or_list(
        self, names: object, modules: Mapping[str, str], matches: Matches
    ) -> str | list[str]:
        """Return what `listed` returns, as an expression if the list is very long."""
        new_paths = self.listed(names, modules, matches)
        if len(json.dumps(new_paths)) <= _LONG:
            return new_paths
        expression = _expression_for(new_paths)
        matching = {path for path in self.paths if _by_complete_expression(expression, path)}
        return expression if matching == set(new_paths) else new_paths

    def listed(self, names: object, modules: Mapping[str, str], matches: Matches) -> list[str]:
        """Return the new paths of the modules that names, or one expression, find; empty if that
        cannot be told. `modules` are old path -> new path.
        """
        matches_old = matches
        if isinstance(names, str):
            names, matches_old = [names], _by_complete_expression
        if not is_list_of_text(names):
            return []
        new_paths = []
        for path, new_path in modules.items():
            if any(matches_old(name, path) for name in names):
                new_paths.append(new_path)
        return new_paths if self._finds_only(new_paths, matches) else []

    def mapped(
        self, by_name: Mapping[str, Any], modules: Mapping[str, str], matches: Matches
    ) -> dict[str, Any]:
        """Return the values by the new paths of the modules that the names find, the first name
        first; empty if that cannot be told.
        """
        values: dict[str, Any] = {}
        for path, new_path in modules.items():
            name = next((name for name in by_name if matches(name, path)), None)
            if name is not None:
                values[new_path] = by_name[name]
        return values if self._finds_only(list(values), matches) else {}

    def _finds_only(self, new_paths: Collection[str], matches: Matches) -> bool:
        """Return True if these paths, taken as names, find each other and nothing else."""
        if "" in new_paths:
            return False
        if not self.is_complete and not all("." in path for path in new_paths):
            return False
        matching = set()
        for path in self.paths:
            if any(matches(new_path, path) for new_path in new_paths):
                matching.add(path)
        return matching == set(new_paths)


def _expression_for(paths: Iterable[str]) -> str:
    """Return an expression for these paths and no others; the numbers of layers are together."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        match = _LAYER.fullmatch(path)
        before, number, after = match.groups() if match else (path, "", "")
        numbers.setdefault((before, after), []).append(number)
    parts = []
    for (before, after), layers in numbers.items():
        number = f"({'|'.join(layers)})" if layers != [""] else ""
        parts.append(re.escape(before) + number + re.escape(after))
    return "|".join(parts)


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


def _by_complete_expression(expression: str, path: str) -> bool:
    try:
        return compiled(f"(?:{expression})").fullmatch(path) is not None
    except ValueError:
        return False


def _as_part(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


Matches = Callable[[str, str], bool]
_LISTS: Mapping[str, Matches] = {
    _TARGETS: _by_segments,
    "feedforward_modules": _by_ending,
    _SAVED: _by_ending,
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
