"""Files next to the weights: which follow a rename, and which are copied."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from shlex import quote
from typing import Any, TypeVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Ref
from ckpttool.core.plan import Plan
from ckpttool.core.schema import TEXT, TEXTS, list_of, record, row
from ckpttool.core.values import dataclass
from ckpttool.formats import strict_json
from ckpttool.formats.detect_folder import companions, locate, optimizers_in
from ckpttool.io.files import is_dir, names_in, opened, size
from ckpttool.io.paths import is_url, join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.naming.wrappers import Adapter, adapter_of
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import Target, same_folder
from ckpttool.ruleset.patterns import compiled

Candidate = TypeVar("Candidate")
NAME = "adapter_config.json"

_TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# What PEFT puts inside of an adapted module: `modules_to_save` finds these too, by the ends of their names.
_INSIDE = ("base_layer", "lora_dropout", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "default")
_TOKENS = ".token_adapter."  # PEFT's module around an embedding of which only some rows are trained
_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Renamed:
    """The effect of a rename on an adapter's keys, as names of its base.

    `modules`: old path -> new path of each adapted module. `tensors`: the same for the base's own tensors in the file.
    `old_base` and `base` are the tensors of the two bases in their order, None if they are not known.
    """

    modules: Mapping[str, str]
    tensors: Mapping[str, str]
    old_base: Sequence[str] | None = None
    base: Sequence[str] | None = None

    @property
    def paths(self) -> frozenset[str] | None:
        """Every module of the new base that holds a tensor, directly or further inside."""
        if self.base is None:
            return None
        return frozenset(path for name in self.base for path in _parents(name))


def follow(config: Mapping[str, Any], renamed: Renamed) -> tuple[dict[str, Any], list[Problem]]:
    """Return the configuration under the new names, and the fields that cannot follow."""
    wrong = [field for field in config if not _as_peft_writes_it(field, config[field])]
    if wrong:
        return dict(config), [_problem(field, config[field], "PEFT writes no such value") for field in wrong]
    if {**renamed.modules, **renamed.tensors} == {name: name for name in (*renamed.modules, *renamed.tensors)}:
        return dict(config), []
    try:
        return _follow(config, renamed)
    except ValueError as error:
        return dict(config), [_problem("target_modules", config.get("target_modules"), f"a bad expression: {error}")]


def _as_peft_writes_it(field: str, value: object) -> bool:
    names = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if field in ("target_modules", "exclude_modules", "layers_pattern"):
        return value is None or isinstance(value, str) or names
    if field in ("modules_to_save", "target_parameters"):
        return value is None or names
    if field == "layers_to_transform":
        numbers = isinstance(value, list) and all(isinstance(one, int) for one in value)
        return value is None or isinstance(value, int) or numbers
    return True


def _follow(config: Mapping[str, Any], renamed: Renamed) -> tuple[dict[str, Any], list[Problem]]:
    new, problems = dict(config), list[Problem]()
    problems += _modules_to_save(config, new, renamed)
    parameters, found = _target_parameters(config, new, renamed)
    problems += found
    problems += _target_modules(config, new, renamed, {name.rpartition(".")[0] for name in parameters})
    places = {**renamed.modules, **parameters}
    for field, value in config.items():
        if field.endswith("_pattern") and isinstance(value, Mapping) and value:
            problems += _pattern(field, value, new, places)
    known = {*_TARGETS, "modules_to_save", "target_parameters", *(f for f in config if f.endswith("_pattern"))}
    for field in config.keys() - known:
        problems += _other(field, config[field], new, renamed)
    return new, problems


def _targets(config: Mapping[str, Any], path: str) -> bool:
    """Whether PEFT puts an adapter on the module (`peft.tuners.tuners_utils.check_target_module_exists`)."""
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _named(excluded, path):
        return False
    if any(_matches(rf"(.*\.)?{saved}(\..*)?", path) for saved in config.get("modules_to_save") or ()):
        return False
    if isinstance(wanted, str) or wanted is None or path in wanted:
        return wanted is not None and _named(wanted, path)
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if not _named(wanted, path) or layers is None or layers == []:
        return _named(wanted, path)
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns or [None]
    begins = (r".*?\.[^.]*" if one is None else rf"(?:.*?\.)??{one}" for one in patterns)
    matches = (compiled(rf"{begin}\.(?P<idx>\d+)\..*").fullmatch(path) for begin in begins)
    first = next((match for match in matches if match), None)
    return first is not None and int(first["idx"]) in ([layers] if isinstance(layers, int) else layers)


def _named(wanted: str | Iterable[str], path: str) -> bool:
    if isinstance(wanted, str):
        return _matches(wanted, path)
    return any(path == one or path.endswith(f".{one}") for one in wanted)


def _matches(expression: str, path: str) -> bool:
    return compiled(expression).fullmatch(path) is not None


def _target_modules(
    config: Mapping[str, Any], new: dict[str, Any], renamed: Renamed, by_parameter: Collection[str]
) -> list[Problem]:
    """Sets `target_modules`, and with it the fields that narrow it."""
    if config.get("target_modules") is None:
        return []
    wanted = [now for old, now in renamed.modules.items() if old not in by_parameter or _targets(config, old)]
    listed = {"target_modules": wanted, **{field: None for field in _TARGETS[1:] if field in config}}
    short: list[str] = []  # each name as short as it was
    for name in [] if isinstance(config["target_modules"], str) else config["target_modules"]:
        parts = name.count(".") + 1
        short += [".".join(now.split(".")[-parts:]) for old, now in renamed.modules.items() if _named([name], old)]
    short = wanted if isinstance(config["target_modules"], str) else list(dict.fromkeys(short))
    candidates = [new, new | {"target_modules": short}, new | listed]
    if renamed.paths is None:  # whether a short name is one of other modules too is not known
        candidates = [one for one in candidates if one is new or one["target_modules"] == wanted]
    found = _first_exact(candidates, _targets, wanted, renamed.paths)
    if found is None:
        return [_problem("target_modules", config["target_modules"], "no list of paths finds the same modules")]
    new.update({field: found[field] for field in listed})
    return []


def _modules_to_save(config: Mapping[str, Any], new: dict[str, Any], renamed: Renamed) -> list[Problem]:
    """Sets `modules_to_save`, whose names PEFT looks for at the ends of paths, also within a segment."""
    old: Sequence[str] = config.get("modules_to_save") or ()
    places, problems = _saved(old, renamed)
    wanted = list(dict.fromkeys(places.values()))
    absent = [one for one in old if not any(path.endswith(one) for path in places)]
    if not places:
        return problems
    every = {*(renamed.paths or ()), *(f"{path}.{name}" for path in renamed.modules.values() for name in _INSIDE)}
    candidates = (list(old), [*wanted, *absent])
    names = _first_exact(candidates, lambda names, path: any(map(path.endswith, names)), wanted, every)
    if names is None:
        return [*problems, _problem("modules_to_save", old, f"{' and '.join(wanted)} would not be the only match")]
    new["modules_to_save"] = names
    return problems


def _saved(names: Iterable[str], renamed: Renamed) -> tuple[dict[str, str], list[Problem]]:
    """Return old path -> new path of the modules that are saved completely; problems for those without one new path."""
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for old, now in renamed.tensors.items():
        for path in _parents(old):
            if not any(map(path.endswith, names)):
                continue
            rest = old[len(path) :]
            place = now.removesuffix(rest)
            if place == now or found.setdefault(path, place) != place:
                problems.append(_problem("modules_to_save", path, f"{old} is {now} now"))
            break  # the outermost module is saved
    return found, problems


def _target_parameters(
    config: Mapping[str, Any], new: dict[str, Any], renamed: Renamed
) -> tuple[dict[str, str], list[Problem]]:
    """Sets `target_parameters`; old name -> new name of each parameter of an adapted module that it names."""
    old: Sequence[str] = config.get("target_parameters") or ()
    found: dict[str, str] = {}
    for one in old:
        module, _, leaf = one.rpartition(".")
        paths = [path for path in renamed.modules if not module or _named([module], path)]
        found |= {f"{path}.{leaf}": f"{renamed.modules[path]}.{leaf}" for path in paths}
    wanted, base = list(found.values()), renamed.base
    if base is not None and not set(wanted) <= set(base):
        absent = [name for name in wanted if name not in base]
        return found, [_problem("target_parameters", old, f"the new base has no {', '.join(absent)}")]
    if not old:
        return found, []
    names = _first_exact((list(old), wanted), _named, wanted, base)
    if names is None:
        return found, [_problem("target_parameters", old, "no list of names finds the same parameters")]
    new["target_parameters"] = names
    return found, _nested(old, found, renamed)


def _nested(value: object, found: Mapping[str, str], renamed: Renamed) -> list[Problem]:
    """PEFT nests the adapters of one module's parameters in the order in which the module registers these."""
    if renamed.old_base is None or renamed.base is None:
        return []
    modules = dict.fromkeys(name.rpartition(".")[0] for name in found)
    for module in modules:
        own = [name for name in renamed.old_base if name in found and _parent(name) == module]
        if sorted(own, key=lambda name: renamed.base.index(found[name])) != own:  # type: ignore[union-attr]
            return [_problem("target_parameters", value, f"in the new base {module} has them in another order")]
    return []


def _pattern(field: str, old: Mapping[str, Any], new: dict[str, Any], places: Mapping[str, str]) -> list[Problem]:
    """Sets a field of values by module, such as `rank_pattern` (`peft.utils.other.get_pattern_key`)."""
    if not all(isinstance(value, (int, float)) for value in old.values()):
        return _other(field, old, new, Renamed(places, {}))
    wanted = {now: value for was, now in places.items() if (value := _by_pattern(old, was)) is not None}
    whole: dict[str, Any] = {f"^{re.escape(path)}": value for path, value in wanted.items()}
    for names in (old, wanted, whole):
        if all(_by_pattern(names, now) == wanted.get(now) for now in places.values()):
            new[field] = dict(names)
            return []
    return [_problem(field, old, "no list of paths gives the same values")]


def _by_pattern(patterns: Mapping[str, Any], path: str) -> Any:
    key = next((one for one in patterns if _matches(rf"(.*\.)?({one})", path)), path)
    return patterns.get(key)


def _other(field: str, value: Any, new: dict[str, Any], renamed: Renamed) -> list[Problem]:
    """Ends of paths in a list, or as keys of an object, follow; anything else that names a module is a problem."""
    places = {**renamed.modules, **{_parent(old): _parent(now) for old, now in renamed.tensors.items()}}
    stale = [
        one
        for one in _texts(value)
        if any(_named([one], old) and not _named([one], now) for old, now in places.items())
    ]
    if not stale:
        return []
    if isinstance(value, (list, Mapping)) and all(isinstance(one, str) for one in value):
        found = {one: [now for old, now in places.items() if old.endswith(one)] for one in value}
        every = [now for names in found.values() for now in names]
        others = (renamed.paths or frozenset()).difference(every)
        if all(found.values()) and not any(path.endswith(one) for path in others for one in every):
            both = value.items() if isinstance(value, Mapping) else ((one, None) for one in value)
            made = {now: own for one, own in both for now in found[one]}
            new[field] = made if isinstance(value, Mapping) else list(made)
            return []
    return [_problem(field, value, f"it names {', '.join(stale)}, which is called something else now")]


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _first_exact(
    candidates: Iterable[Candidate],
    finds: Callable[[Candidate, str], bool],
    wanted: Collection[str],
    every: Collection[str] | None,
) -> Candidate | None:
    """Return the first candidate that finds all `wanted`, and of `every` other name none."""
    others = set(every or ()).difference(wanted)
    for one in candidates:
        if all(finds(one, name) for name in wanted) and not any(finds(one, name) for name in others):
            return one
    return None


def _problem(field: str, value: Any, why: str) -> Problem:
    return Problem(f"{_shown(value)} cannot be rewritten: {why}", field)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(name: str) -> list[str]:
    """The modules around a tensor, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


_CONFIG = "config.json"
_DESCRIBES_NAMES = re.compile(r"config\.json|\w*quant\w*_config\.json")  # whose loaders want the keys that were there


@dataclass(frozen=True, slots=True)
class Companions:
    """What happens to the files next to the weights.

    `files`: name in OUT -> path of the file to copy, or its new content. `left_out`: name -> why it is not in OUT.
    `before`: the old content of what is rewritten.
    """

    files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    before: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

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
    other_files: Sequence[str] = (),
) -> Companions:
    """Return what goes along with the weights of `source`, whose keys `plan` changes, to `target`.

    `bases` are the tensors of the models before and after, if they are known. `described`: the keys of the output are
    described by ``config.json``. `other_files` are the other files of the checkpoint that remain. Raise `Refused`
    if an adapter's configuration cannot follow into the folder of the output.
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
        found |= {name: join(path, name) for name in other_files}
        left_out = _others(path, source, found)
    files: dict[str, str | bytes] = {**found}
    before: dict[str, bytes] = {}
    notes: list[str] = []
    keeps_names = {o.key for o in plan.outputs} == {o.key for o in plan.outputs if o.is_unchanged}
    changed = not described and not keeps_names
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
    keys = [output.source.key for output in plan.outputs if isinstance(output.source, Ref)]
    adapter = adapter_of(keys)
    if (adapter is not None or changed) and NAME in (names_in(folder) if is_dir(folder) else ()):
        text, new = _adapter_config(join(folder, NAME), keys, plan, bases, to_folder, notes)
        if to_folder and new is not None:
            files[NAME], before[NAME] = new, text
    elif adapter is not None:
        modules = _renamed(adapter, plan).modules
        ends = {(old.rpartition(".")[2], new.rpartition(".")[2]) for old, new in modules.items()}
        changes = ", ".join(f"{old} is {new} now" for old, new in sorted(ends) if old != new)
        notes += [f"target_modules in the adapter's adapter_config.json: {changes}"] if changes else []
    return Companions(files, left_out, tuple(notes), before)


def _others(folder: str, source: Checkpoint, found: Collection[str]) -> dict[str, str]:
    """Return the other files of the folder, which are not copied, with the reason."""
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
    tensors = {old.replace(_TOKENS, "."): new.replace(_TOKENS, ".") for old, new in tensors.items()}
    return Renamed(modules, tensors, *bases)


def _by_targets(config: Mapping[str, Any], keys: Iterable[str]) -> Adapter:
    """Return the adapter of a kind that no key shows: its modules are the targets of the configuration."""
    modules: dict[str, list[str]] = {}
    rest: list[str] = []
    known = all(_as_peft_writes_it(field, value) for field, value in config.items())
    for key in keys:
        parents = _parents(Adapter((), {}, ()).inside(key)) if known else ()
        try:
            path = next((path for path in parents if _targets(config, path)), None)
        except ValueError:  # a bad expression, of which `follow` tells
            path = None
        if path is None:
            rest.append(key)
        else:
            modules.setdefault(path, []).append(key)
    return Adapter((), {path: tuple(own) for path, own in modules.items()}, tuple(rest))


def _adapter_config(
    path: str,
    keys: Sequence[str],
    plan: Plan,
    bases: tuple[Sequence[str] | None, Sequence[str] | None],
    to_folder: bool,
    notes: list[str],
) -> tuple[bytes, bytes | None]:
    """Return the text of the file, and the new text if it changes. A note says what to change if it is not written."""
    config = strict_json.read_file(path, "copy it again")
    with opened(path) as file:
        text = file.read(size(path))
    if not isinstance(config, dict):
        notes.append(f"{path} is not an object, as PEFT writes it: it was not compared with the new keys")
        return text, None
    adapter = adapter_of(keys) or _by_targets(config, keys)
    new, problems = follow(config, _renamed(adapter, plan, bases))
    if not problems and not adapter.modules and config.get("target_modules"):
        problems = [_problem("target_modules", config.get("target_modules"), "no key is of a module that it names")]
    if problems and to_folder:
        raise Refused(
            f"{path} names modules of the old base, and cannot follow the keys",
            hint="name the weights alone as CKPT and a file as OUT, and write the configuration for it by hand",
            problems=problems,
        )
    changed = [f"{field} = {_shown(value)}" for field, value in new.items() if value != config.get(field)]
    told = [*([", ".join(changed)] if changed else []), *(f"{one.key}: {one.problem}" for one in problems)]
    if told and not to_folder:
        notes.append(
            f"{path} is not changed, and names modules of the old base. It has to say {'; '.join(told)}. "
            "With the folder as CKPT and a folder as OUT it is rewritten"
        )
    if new == config:
        return text, None
    end = b"\n" if text.endswith(b"\n") else b""
    return text, json.dumps(new, indent=2, ensure_ascii=False).encode() + end
