"""The versions of modules in a state dict's ``_metadata``: which of them torch's loading depends
on.

`Module.load_state_dict` hands each module its version, and the code of some modules reads older
state dicts in another way. The rows of torch's own modules are here; what other modules do with
their version is unknown without their code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum

from ckpttool.core.checkpoint import Section
from ckpttool.core.plan import module_renames
from ckpttool.core.strides import Shape
from ckpttool.core.tables import new_paths, shapes_of
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers

# name of an entry of a module, submodules included -> its shape
Shapes = Mapping[str, "Shape | None"]


class Effect(Enum):
    """What another version changes for a module with these entries."""

    NOTHING = "loading is the same"
    LOADING = "loading differs"
    UNKNOWN = "only the module's code knows"


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """A module whose version differs on two sides; None: it has no version there. `is_lost`: one
    side has no versions at all.
    """

    path: str
    left: object
    right: object
    effect: Effect
    is_lost: bool

    def __str__(self) -> str:
        if self.left == self.right:
            return f"{self.path or '(root)'} (other fields than the version)"
        left, right = version_text(self.left), version_text(self.right)
        return f"{self.path or '(root)'} ({left} and {right})"


def version_text(version: object) -> str:
    return "no version" if version is None else f"version {version}"


def other_versions_of(left: Section, right: Section) -> list[OtherVersion]:
    """Return the modules of other versions on the two sides; names of wrappers do not count.

    A module that only one side has is left out, unless the other side has no versions at all. To
    torch's own modules, no version is the same as version 1.
    """
    if left.modules == right.modules:
        return []
    lefts, rights = _versions(left), _versions(right)
    is_lost = not lefts or not rights
    differing = []
    for path in lefts or rights:
        if is_lost or path in rights:
            payloads = lefts.get(path, {}), rights.get(path, {})
            if payloads[0] != payloads[1]:
                differing.append((path, *payloads))
    if not differing:
        return []
    others = []
    shapes = _by_module(_shapes(left))
    for path, left_payload, right_payload in differing:
        effect = _effect(shapes.get(path, {}), left_payload, right_payload)
        versions = left_payload.get("version"), right_payload.get("version")
        if effect is not Effect.NOTHING or not {1, None}.issuperset(versions):
            others.append(OtherVersion(path, *versions, effect, is_lost))
    return others


def with_versions(section: Section, modules: Mapping[str, object] | None, like: Shapes) -> Section:
    """Return the section with the versions of `modules` if it has none: of all modules that have
    the keys of `like`.
    """
    if section.modules or not modules:
        return section
    actual = _by_module(dict.fromkeys(section.keys))
    expected = _by_module(dict.fromkeys(like))
    kept = {}
    for path, payload in modules.items():
        if actual.get(path) == expected.get(path):
            kept[path] = payload
    return replace(section, modules=kept) if kept else section


def _versions(section: Section) -> dict[str, Mapping[str, object]]:
    """Return the payload of each module, by its path without wrappers; the payload of a wrapper is
    its module's.
    """
    modules = section.modules or {}
    renames = module_renames("", modules, wrappers.canonical_in(section))
    moved = new_paths(renames)
    payloads = {}
    for path, payload in modules.items():
        if isinstance(path, str):
            payloads[moved.get(path, path)] = payload if isinstance(payload, Mapping) else {}
    return payloads


def _shapes(section: Section) -> dict[str, Shape | None]:
    shapes = shapes_of(section.tensors)
    return {name: shapes.get(key) for key, name in wrappers.canonical_in(section).items()}


def _by_module(shapes: Shapes) -> dict[str, dict[str, Shape | None]]:
    """Return the entries below each module, under their names in it."""
    below: dict[str, dict[str, Shape | None]] = {}
    for key, shape in shapes.items():
        path, name = key, ""
        while path:
            path, _, segment = path.rpartition(".")
            name = f"{segment}.{name}" if name else segment
            below.setdefault(path, {})[name] = shape
    return below


def _effect(shapes: Shapes, left: Mapping[str, object], right: Mapping[str, object]) -> Effect:
    effects = {_effect_of_version(shapes, {left.get("version"), right.get("version")})}
    for name in {*left, *right} - {"version"}:
        if left.get(name) == right.get(name):
            continue
        if name == "spectral_norm":
            effects.add(_effect_of_spectral_norm(shapes))
        else:
            effects.add(Effect.UNKNOWN)
    for effect in (Effect.LOADING, Effect.UNKNOWN):  # the stronger first
        if effect in effects:
            return effect
    return Effect.NOTHING


def _effect_of_version(shapes: Shapes, versions: set[object]) -> Effect:
    """Return what the two versions change for a module with these entries."""
    if not shapes or len(versions) == 1:
        return Effect.NOTHING
    if "min_val" in shapes or "min_vals" in shapes:  # observers of quantization, of several kinds
        is_complete = {"eps", "min_val", "max_val"} <= shapes.keys() and (0,) not in shapes.values()
        return Effect.NOTHING if is_complete and versions == {None, 3} else Effect.UNKNOWN
    if versions <= {None, 1}:
        return Effect.NOTHING
    children = {name.partition(".")[0] for name in shapes}
    if "_packed_params" in children:  # quantized linear layers: each version has other entries
        return Effect.LOADING
    if not versions <= {None, 1, 2}:
        return Effect.UNKNOWN
    # batch norms: since version 2, `num_batches_tracked` must be there
    if "running_mean" in shapes:
        return Effect.NOTHING if "num_batches_tracked" in shapes else Effect.LOADING
    # of the fused modules of quantization
    if "bn.running_mean" in shapes and "gamma" not in shapes:
        return Effect.NOTHING
    if _is_plain_norm(shapes):
        return Effect.NOTHING
    return Effect.UNKNOWN


def _is_plain_norm(shapes: Shapes) -> bool:
    """Return whether the entries are a norm without statistics."""
    if not shapes.keys() <= {"weight", "bias"}:
        return False
    return all(len(shape or ()) == 1 for shape in shapes.values())


def _effect_of_spectral_norm(shapes: Shapes) -> Effect:
    """Return what a version of `torch.nn.utils.spectral_norm` changes: since version 1 there is a
    ``weight_v``.
    """
    for name in _normalized(shapes):
        if f"{name}_v" not in shapes or name in shapes:
            return Effect.LOADING
    return Effect.NOTHING


def _normalized(shapes: Shapes) -> Iterator[str]:
    for key in shapes:
        name = key.removesuffix("_orig")
        if "." not in key and name != key and f"{name}_u" in shapes:
            yield name
