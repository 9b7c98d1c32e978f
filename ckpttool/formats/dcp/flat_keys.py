"""Convert nested state dicts to flat keys and back, as torch.distributed.checkpoint does (`_nested_dict`, `_traverse`).

Mappings are always flattened, and lists that hold a tensor or a mapping. Any other object is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.formats.dcp.metadata import Path
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import is_tensor

_MAX_DEPTH = 200
_MAX_HOLES = 10_000  # missing items of a list


class _Branch(dict[Any, Any]):
    """A container: a dict or a list, which its steps will show."""


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return the state dict with these leaves. In a path, a string is a key of a dict and a number an index of a list.

    Raises `CkptError`, all problems at once, if paths contradict each other.
    """
    root, problems = _Branch(), []
    for path, leaf in leaves.items():
        branch = root
        for step in path[:-1]:
            if type(branch) is not _Branch:
                break
            branch = branch.setdefault(step, _Branch())
        if type(branch) is not _Branch or branch.setdefault(path[-1], leaf) is not leaf:
            problems.append(Problem("its path leads through another entry", _key(path)))
    state_dict = {} if problems else _resolved(root, (), problems)
    if problems or not isinstance(state_dict, dict):
        raise CkptError(
            "the keys of this checkpoint do not form a nested state dict",
            hint="save it again with torch.distributed.checkpoint",
            problems=problems,
        )
    return state_dict


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


def _optimizer(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Restore what flattening loses of an optimizer's state dict: an empty state, and ids that are numbers."""
    mapping = {"state": {}, **mapping}
    state = mapping["state"]
    groups = [group for group in mapping["param_groups"] if type(group) is dict and type(group.get("params")) is list]
    ids = {str(param): param for group in groups for param in group["params"] if type(param) is int}
    if ids and type(state) is dict:
        mapping["state"] = {ids.get(key, key): value for key, value in state.items()}
    return mapping


def flattened(root: Any) -> dict[str, tuple[Path, Any]]:
    """Return flat key -> the path and the node of each leaf of the state dict at the node `root`.

    Raises `Refused`, all problems at once, if torch cannot flatten it: other keys than text, or a key of two leaves.
    """
    leaves: dict[str, tuple[Path, Any]] = {}
    problems: list[Problem] = []
    for path, node in _leaves(root, (), {}, problems):
        key = _key(path)
        if key in leaves:
            problems.append(Problem("two entries have this flat key", key))
        leaves[key] = (path, node)
    if pairs_of(root) is None:
        problems.append(Problem("the file does not hold a dict", "(root)"))
    if problems:
        raise Refused(
            "torch.distributed.checkpoint cannot hold this",
            hint="rename the keys with --rule 'FROM => TO', or write a torch file (OUT ending in .pt)",
            problems=problems,
        )
    return leaves


def _leaves(node: Any, path: Path, terminal: dict[int, bool], problems: list[Problem]) -> Iterator[tuple[Path, Any]]:
    pairs = pairs_of(node)
    if len(path) > _MAX_DEPTH:
        problems.append(Problem("nested too deep", _key(path[:10])))
    elif pairs is not None:
        for name, value in pairs.items():
            if type(name) not in (str, int, float, bool, type(None)):
                problems.append(Problem("a dict key that is neither text nor a number", _key(path)))
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
        known[id(node)] = not any(is_tensor(part) or not _is_terminal(part, known, depth + 1) for part in node)
    return known[id(node)]


def _key(path: Path) -> str:
    return ".".join(map(str, path))
