"""Nested state dicts and their flat keys, by the rules of torch.distributed.checkpoint (`_nested_dict`, `_traverse`).

Mappings are flattened always, lists where they hold a tensor or a mapping; all else is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.formats.dcp.metadata import Path
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import is_tensor

_MAX_DEPTH = 200
_MAX_HOLES = 10_000  # places of a list that nothing was saved for


class _Branch(dict[Any, Any]):
    """A container of which it is not yet known whether it is a dict or a list."""


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """The state dict whose leaves are at these paths: a string step is a key of a dict, a number an index of a list.

    Raises `CkptError`, all problems at once, for paths that contradict each other.
    """
    root, problems = _Branch(), []
    for path, leaf in leaves.items():
        if not _put(root, path, leaf):
            problems.append(Problem("the way to it leads through another entry", _key(path)))
    found = {} if problems else _resolved(root, (), problems)
    if problems or not isinstance(found, dict):
        raise CkptError(
            "the keys of this checkpoint make no nested state dict",
            hint="save it again with torch.distributed.checkpoint",
            problems=problems,
        )
    return found


def _put(root: _Branch, path: Path, leaf: Any) -> bool:
    where = root
    for step in path[:-1]:
        where = where.setdefault(step, _Branch())
        if type(where) is not _Branch:
            return False
    return where.setdefault(path[-1], leaf) is leaf


def _resolved(branch: Any, path: Path, problems: list[Problem]) -> Any:
    if type(branch) is not _Branch:
        return branch
    if len(path) > _MAX_DEPTH:
        problems.append(Problem("nested too deep", _key(path[:10])))
        return {}
    inside = {step: _resolved(child, (*path, step), problems) for step, child in branch.items()}
    if all(type(step) is str for step in inside):
        return _optimizer(inside) if type(inside.get("param_groups")) is list else inside
    if all(type(step) is int for step in inside) and min(inside) >= 0 and max(inside) < len(inside) + _MAX_HOLES:
        return [inside.get(index) for index in range(max(inside) + 1)]
    problems.append(Problem("neither a dict nor a list", _key(path)))
    return {}


def _optimizer(found: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state dict with what flattening takes away: an empty state, and ids that are numbers."""
    found = {"state": {}, **found}
    state = found["state"]
    groups = [group for group in found["param_groups"] if type(group) is dict and type(group.get("params")) is list]
    ids = {str(param): param for group in groups for param in group["params"] if type(param) is int}
    if ids and type(state) is dict:
        found["state"] = {ids.get(key, key): value for key, value in state.items()}
    return found


def flattened(root: Any) -> dict[str, tuple[Path, Any]]:
    """Flat key -> the path and the node of each leaf of the state dict that `root` makes.

    Raises `Refused`, all problems at once, for what torch cannot flatten: keys that are no words, two leaves of a key.
    """
    found: dict[str, tuple[Path, Any]] = {}
    problems: list[Problem] = []
    terminal: dict[int, bool] = {}
    for path, node in _leaves(root, (), terminal, problems):
        key = _key(path)
        if key in found:
            problems.append(Problem("two entries have this flat key", key))
        found[key] = (path, node)
    if pairs_of(root) is None:
        problems.append(Problem("the file holds no dict", "(root)"))
    if problems:
        raise Refused(
            "torch.distributed.checkpoint cannot hold this",
            hint="rename the keys with --rule 'FROM => TO', or write a torch file (OUT ending in .pt)",
            problems=problems,
        )
    return found


def _leaves(node: Any, path: Path, terminal: dict[int, bool], problems: list[Problem]) -> Iterator[tuple[Path, Any]]:
    pairs = pairs_of(node)
    if len(path) > _MAX_DEPTH:
        problems.append(Problem("nested too deep", _key(path[:10])))
    elif pairs is not None:
        for name, value in pairs.items():
            if type(name) not in (str, int, float, bool, type(None)):
                problems.append(Problem("a key of a dict that is no word", _key(path)))
            yield from _leaves(value, (*path, str(name)), terminal, problems)
    elif _is_terminal(node, terminal, 0):
        yield path, node
    else:
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, index), terminal, problems)


def _is_terminal(node: Any, known: dict[int, bool], depth: int) -> bool:
    if pairs_of(node) is not None:
        return False
    if type(node) is not list or depth > _MAX_DEPTH:
        return True
    if id(node) not in known:
        known[id(node)] = True  # a list inside itself
        known[id(node)] = not any(
            is_tensor(part) or (_is_container(part) and not _is_terminal(part, known, depth + 1)) for part in node
        )
    return known[id(node)]


def _is_container(node: Any) -> bool:
    return type(node) is list or pairs_of(node) is not None


def _key(path: Path) -> str:
    return ".".join(map(str, path))
