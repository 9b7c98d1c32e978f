"""Versions of modules (``_metadata``) that tell a model's loading how to read a file's values."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.checkpoint import Section
from ckpttool.errors import Problem, Refused
from ckpttool.names import SERIALIZED, Names
from ckpttool.naming.forms import Reading
from ckpttool.plan import module_renames
from ckpttool.words import plural


def versions_in(names: Names, section: Section, reading: Reading) -> Mapping[str, object]:
    """Module path -> the version that the section has of it, for the modules whose version `names` asks for."""
    modules = section.modules or {}
    moved = {m.old: m.new for m in module_renames(section.path, modules, dict(reading.match.names))}
    have = {moved.get(path, path): payload for path, payload in modules.items()}
    return {path: _version(have.get(path)) for path in names.versions or ()}


def other_versions(names: Names, section: Section, reading: Reading) -> list[Problem]:
    """Where the section has other versions of modules than the model saves, and loading asks for them.

    What names say of loading is said of the model's own versions.
    """
    have = versions_in(names, section, reading)
    return [
        Problem(f"{_called(have[path])}, and the model saves {_called(version)}", path or "(root)")
        for path, version in (names.versions or {}).items()
        if have[path] != version
    ]


def otherwise(left: Section, right: Section) -> list[str]:
    """The modules that both have, in other versions."""
    mine, theirs = left.modules or {}, right.modules or {}
    return [str(path) or "(root)" for path in mine if path in theirs and _version(mine[path]) != _version(theirs[path])]


def check_versions(names: Names, section: Section, reading: Reading) -> None:
    """Raises `Refused` where there are such: what that version's values are in the model's own is not known."""
    problems = other_versions(names, section, reading)
    if problems:
        load = "model.load_state_dict(torch.load(CKPT))" if reading.form == SERIALIZED else "load it by these names"
        raise Refused(
            f"{names.model} reads other versions of its modules otherwise: {plural(len(problems), 'module')}",
            hint=f"let the model load it, and save that anew: {load}; torch.save(model.state_dict(), OUT)",
            problems=problems,
        )


def _version(payload: object) -> object:
    return payload.get("version") if isinstance(payload, Mapping) else None


def _called(version: object) -> str:
    return "no version" if version is None else f"version {version}"
