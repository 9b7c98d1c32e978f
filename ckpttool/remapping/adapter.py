"""An adapter without its model (LoRA and its like): its keys follow what becomes of the modules that it adapts.

PEFT names the modules by their paths in the model (`base_model.model.PATH.lora_A.weight`), and not by serialized keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, TensorEntry, in_row_major
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.naming.adapters import Adapter, adapter_of, path_and_rest
from ckpttool.naming.match import NameTables
from ckpttool.operands.model import ModelOperand, saved_by
from ckpttool.remapping.model_steps import ByModel, Counters, Draft, Step, ToModel
from ckpttool.remapping.steps import ByRuleSteps, RemapRequest

_HINT = (
    "rules for the base say where modules go (`ckpttool diff OLD NEW --suggest rules.toml`, then --rules rules.toml); "
    "where these are cut or joined, merge the adapter into its base first (merge_and_unload() of PEFT)"
)
Made = Mapping[str, Expression]  # name of a tensor of the new base -> what it is of the old one's


@dataclass(frozen=True, slots=True)
class ByBases:
    """From the modules of one model to those of another that loads what the first one saves, or has the same modules.

    `code` is the other model itself: its loading may take keys that it does not write.
    """

    old: NameTables
    new: NameTables
    code: ModelOperand | None

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused`, all problems at once, where a module has no one place in the new model."""
        return _followed(draft, _Moved.of(self._made()), self.old.names.model)

    def _made(self) -> Made:
        own: dict[str, Expression] = {key: source for key, source in self.old.saved.items() if source is not None}
        own.update((key, Ref(fqn)) for key, fqn in self.old.fqn_of.items())
        found = {**self.new.runtime_values(own), **self._loaded()}
        if found:
            return {fqn: ex.substitute(source, own.__getitem__) for fqn, source in found.items()}
        return {fqn: Ref(fqn) for fqn in self.old.first if fqn in self.new.first}

    def _loaded(self) -> Made:
        """What the other model's own loading makes of the keys that the first one saves."""
        if self.code is None:
            return {}
        from ckpttool.tracing.loading import load_verdict

        verdict = load_verdict(self.code.definition(), saved_by(self.old.names).section(""))
        return {fqn: source for fqn, source in verdict.reads.items() if source is not None and any(ex.refs(source))}


@dataclass(frozen=True, slots=True)
class ByRulesOfBase:
    """By rules that are written for the keys of the base; where they match the adapter's own keys, these are meant."""

    rules: ByRuleSteps

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused`, all problems at once, where the rules do not rename a module as a whole."""
        section, adapter = draft.evaluated(), adapter_of(draft.keys)
        base = None if adapter is None or self._touches(section) else _base(section, adapter)
        if base is None or not self._touches(base):
            return self.rules.apply(draft)
        return _followed(draft, _Moved.of(self._made(base)), "the rules")

    def _touches(self, section: Section) -> bool:
        return self._made(section) != {key: Ref(key) for key in section.by_key()}

    def _made(self, section: Section) -> Made:
        from ckpttool.rules.steps import state_of

        state, _ = state_of(self.rules.steps, section, whole=False)
        return {key: value.source for key, value in state.items()}


def of_adapter(asked: RemapRequest, section: Section) -> list[Step]:
    """The steps of a remap as they are for `section`, where that holds an adapter."""
    steps = list(asked.steps())
    if adapter_of(section.keys) is None:
        return steps
    if asked.names is not None and asked.to_names is not None:
        rest = [step for step in steps if not isinstance(step, (ByModel, ToModel, Counters))]
        return [ByBases(NameTables(asked.names), NameTables(asked.to_names), asked.to_code), *rest]
    return [ByRulesOfBase(step) if isinstance(step, ByRuleSteps) else step for step in steps]


@dataclass(frozen=True, slots=True)
class _Moved:
    """Where tensors and modules went: old name -> new names. `broken`: module -> why it went nowhere as a whole."""

    tensors: Mapping[str, list[str]]
    modules: Mapping[str, list[str]]
    broken: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(made: Made) -> _Moved:
        tensors, modules = defaultdict[str, list[str]](list), defaultdict[str, dict[str, None]](dict)
        broken: dict[str, str] = {}
        for new, source in made.items():
            for old in dict.fromkeys(ex.refs(source)):
                if isinstance(source, Ref):
                    tensors[old].append(new)
                    modules[_parent(old)][_parent(new)] = None
                else:
                    broken[_parent(old)] = f"{new} is computed from {', '.join(dict.fromkeys(ex.refs(source)))}"
        return _Moved(tensors, {path: list(news) for path, news in modules.items()}, broken)

    def module(self, path: str) -> str | Problem:
        """Where the module is now, or why it is at no one place."""
        if path in self.broken:
            return Problem(f"its module is not one of the new model: {self.broken[path]}", path)
        places = self.modules.get(path, [])
        if len(places) == 1:
            return places[0]
        return Problem(f"its tensors go to {' and '.join(places)}" if places else "no such module", path)

    def tensor(self, name: str) -> str | Problem:
        """Where a tensor of the base itself is now, one that was trained beside the adapter."""
        places = self.tensors.get(name, [])
        if len(places) == 1:
            return places[0]
        path, rest = path_and_rest(name, self.modules)
        found = self.module(path)
        return found if isinstance(found, Problem) else f"{found}.{rest}"


def _followed(draft: Draft, moved: _Moved, who: str) -> Draft:
    adapter = adapter_of(draft.keys)
    assert adapter is not None
    names: dict[str, str] = {}
    problems: list[Problem] = []
    for path, keys in adapter.modules.items():
        found = moved.module(path)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            names.update((key, _moved(key, path, found)) for key in keys)
    for key in adapter.rest:
        name = adapter.inside(key)
        found = moved.tensor(name)
        if isinstance(found, Problem):
            problems.append(replace(found, key=key))
        else:
            names[key] = _moved(key, name, found)
    if problems:
        raise Refused(
            f"{adapter.title} cannot follow its base by {who}: {plural(len(problems), 'problem')}",
            hint=_HINT,
            problems=problems,
        )
    canonical = {new: draft.canonical.get(old, old) for old, new in names.items()}
    return replace(draft, plan=draft.renamed(names), canonical=canonical)


def _moved(key: str, old: str, new: str) -> str:
    """The key with what it begins with, up to the root of PEFT, as it is."""
    at = key.index(old)
    return key[:at] + new + key[at + len(old) :]


def _base(section: Section, adapter: Adapter) -> Section:
    """The weights of the adapted modules, and what of the base stands beside the adapter: without data."""
    shapes = {path: _shape(section, keys) for path, keys in adapter.modules.items()}
    weights = [in_row_major(f"{path}.weight", "float32", shape, None) for path, shape in shapes.items()]
    rest = [entry.under(adapter.inside(key)) for key, entry in section.by_key().items() if key in adapter.rest]
    tensors = {entry.key: entry for entry in (*weights, *(one for one in rest if isinstance(one, TensorEntry)))}
    return replace(section, tensors=tuple(tensors.values()), extras=())


def _shape(section: Section, keys: Iterable[str]) -> tuple[int, ...]:
    """The shape of the weight that the factors ``lora_A`` [rank, in] and ``lora_B`` [out, rank] belong to."""
    have = section.by_key()
    tensors = [entry for key in keys if isinstance(entry := have[key], TensorEntry) and len(entry.shape) == 2]
    down = [entry.shape[1] for entry in tensors if ".lora_A." in f"{entry.key}."]
    up = [entry.shape[0] for entry in tensors if ".lora_B." in f"{entry.key}."]
    return (up[0], down[0]) if up and down else (1,)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
