"""The files next to the weights in a folder: which still describe the output, and what becomes of the others."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from shlex import quote

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.remap import adapter_config
from ckpttool.edits.remap.adapter_config import Renamed, changes, follow
from ckpttool.errors import Refused
from ckpttool.expression import Ref
from ckpttool.formats.containers import json_text
from ckpttool.formats.recognise_folder import companions, locate, optimizers_in
from ckpttool.io.files import is_dir, names_in, opened, size
from ckpttool.io.paths import is_url, join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.json_schema import TEXT, TEXTS, list_of, record, row
from ckpttool.naming.adapters import Adapter, adapter_of
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import Target, same_folder
from ckpttool.plan import Plan
from ckpttool.values import dataclass

_CONFIG = "config.json"
_DESCRIBES_NAMES = re.compile(r"config\.json|\w*quant\w*_config\.json")  # whose loaders want the keys that were there


@dataclass(frozen=True, slots=True)
class Companions:
    """What becomes of the files next to the weights.

    `files`: name in OUT -> path of the file to copy, or its new content. `left_out`: name -> why it is not in OUT.
    `before`: the old content of what is rewritten.
    """

    files: Mapping[str, str | bytes] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    before: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def copied(self) -> tuple[str, ...]:
        return tuple(name for name, content in self.files.items() if isinstance(content, str))

    @property
    def rewritten(self) -> tuple[str, ...]:
        return tuple(name for name, content in self.files.items() if isinstance(content, bytes))

    def __str__(self) -> str:
        parts = (("copied", self.copied), ("rewritten", self.rewritten), ("not copied", tuple(self.left_out)))
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


COMPANIONS = record(
    Companions,
    {
        "copied": TEXTS,
        "rewritten": TEXTS,
        "left_out": list_of(row({"name": TEXT, "reason": TEXT})),
    },
    called={"left_out": lambda found: list(found.left_out.items())},
)


def companions_of(
    source: Checkpoint,
    plan: Plan,
    target: Target,
    bases: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    described: bool = False,
    beside: Sequence[str] = (),
) -> Companions:
    """Return what goes along with the weights of `source`, whose keys `plan` changes, to `target`.

    `bases` are the tensors of the models before and after, if they are known. `described`: the keys of the output are
    those that ``config.json`` describes, whatever they were. `beside` are the files of `Checkpoint.beside` that are
    not dropped. Raises `Refused` if an adapter's configuration cannot
    follow into the folder of the output.
    """
    path, section = split(source.source)
    if section is not None or source.format == "memory":
        return Companions()
    folder = path if is_dir(path) else parent(path)
    to_folder = path == folder and target.folder is not None
    stays = to_folder and target.folder is not None and same_folder(path, target.folder)
    found: dict[str, str] = {}
    left_out: dict[str, str] = {}
    if to_folder and not stays:
        found = companions(path)
        found |= {name: join(path, name) for name in beside}
        left_out = _others(path, source, found)
    files: dict[str, str | bytes] = {**found}
    before: dict[str, bytes] = {}
    notes: list[str] = []
    changed = not described and not keeps_names(source, plan)
    stale = [name for name in (names_in(path) if stays else found) if _DESCRIBES_NAMES.fullmatch(name) and changed]
    for name in stale:
        if stays:
            notes.append(f"the keys changed, and {join(path, name)} did not: check that it describes the new keys")
            continue
        del files[name]
        left_out[name] = "it describes the keys of CKPT, and OUT has others"
        copy = f"cp {quote(found[name])} {quote(join(target.folder or '', name))}"
        notes.append(f"not copied: {name}, which describes the keys of {path}. If OUT's keys fit it, run `{copy}`")
    if changed and not stays:
        notes += [
            f"{name} is copied unchanged: its ids keep the parameter order of the model that saved them"
            for name in optimizers_in(list(found))
        ]
    adapter = adapter_of([output.source.key for output in plan.outputs if isinstance(output.source, Ref)])
    if adapter is not None and adapter_config.NAME in (names_in(folder) if is_dir(folder) else ()):
        text, new = _adapter_config(join(folder, adapter_config.NAME), adapter, plan, bases, to_folder, notes)
        if to_folder and new is not None:
            files[adapter_config.NAME], before[adapter_config.NAME] = new, text
    elif adapter is not None:
        notes += _ends_that_changed(_renamed(adapter, plan).modules)
    return Companions(files, left_out, tuple(notes), before)


def keeps_names(source: Checkpoint, plan: Plan) -> bool:
    """Whether every key of `source` that is not left out is a key of the output too, with its own tensor."""
    own = {output.key for output in plan.outputs}
    kept = {output.key for output in plan.outputs if output.source == Ref(output.key)}
    return own == kept


def _others(folder: str, source: Checkpoint, found: Collection[str]) -> dict[str, str]:
    """What else is in the folder, which is not copied, and why."""
    weights = locate(folder).path
    part = {name_of(weights)} if weights != folder else set()
    shards = getattr(source.container, "shards", {})
    part |= set(shards) if isinstance(shards, Mapping) else set()
    left: dict[str, str] = {}
    for name in names_in(folder):
        if name in found or name in part or name.endswith((".distcp", ".metadata")):
            continue
        if not is_url(folder) and is_dir(join(folder, name)):
            left[name] = "a folder"
        elif name.startswith("."):
            left[name] = "a hidden file"
        elif weights != folder:
            left[name] = "other weights"
    return left


def _renamed(
    adapter: Adapter, plan: Plan, bases: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
) -> Renamed:
    now = {output.source.key: output.key for output in plan.outputs if isinstance(output.source, Ref)}
    modules: dict[str, str] = {}
    for path, keys in adapter.modules.items():
        for key in keys:
            rest = adapter.inside(key)[len(path) :]
            modules.setdefault(path, adapter.inside(now[key]).removesuffix(rest))
    tensors = {adapter.inside(key): adapter.inside(now[key]) for key in adapter.rest}
    return Renamed(modules, tensors, *bases)


def _adapter_config(
    path: str,
    adapter: Adapter,
    plan: Plan,
    bases: tuple[Sequence[str] | None, Sequence[str] | None],
    to_folder: bool,
    notes: list[str],
) -> tuple[bytes, bytes | None]:
    """The text of the file, and the new one if it changes and goes into the output; else a note says what to change."""
    config = json_text.read_file(path, "copy it again")
    with opened(path) as file:
        text = file.read(size(path))
    if not isinstance(config, dict):
        notes.append(f"{path} is not an object, as PEFT writes it: it was not compared with the new keys")
        return text, None
    new, problems = follow(config, _renamed(adapter, plan, bases))
    if problems and to_folder:
        raise Refused(
            f"{path} names modules of the old base, and cannot follow the keys",
            hint="name the weights alone as CKPT and a file as OUT, and write the configuration for it by hand",
            problems=problems,
        )
    told = [*([changes(config, new)] if new != config else []), *(f"{one.key}: {one.problem}" for one in problems)]
    if told and not to_folder:
        notes.append(
            f"{path} is not changed, and names modules of the old base. It has to say {'; '.join(told)}. "
            "With the folder as CKPT and a folder as OUT it is rewritten"
        )
    if new == config:
        return text, None
    end = b"\n" if text.endswith(b"\n") else b""
    return text, json.dumps(new, indent=2, ensure_ascii=False).encode() + end


def _ends_that_changed(modules: Mapping[str, str]) -> list[str]:
    ends = {(old.rpartition(".")[2], new.rpartition(".")[2]) for old, new in modules.items()}
    changed = ", ".join(f"{old} is {new} now" for old, new in sorted(ends) if old != new)
    return [f"target_modules in the adapter's adapter_config.json: {changed}"] if changed else []
