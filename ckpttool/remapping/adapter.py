"""An adapter without its model (LoRA and similar): its keys follow the modules that it adapts.

PEFT names the modules by their paths in the model (`base_model.model.PATH.lora_A.weight`), and not
by serialized keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, TensorEntry, in_row_major
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural
from ckpttool.kinds.adapters import Adapter, adapter_of, path_and_rest
from ckpttool.naming.match import NameTables
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_files import saved_by
from ckpttool.remapping.steps import Draft, apply_rules

if TYPE_CHECKING:
    from ckpttool.ruleset.steps import Step as RuleStep

_HINT = (
    "rules for the base move its modules (`ckpttool diff OLD NEW --suggest rules.toml`, then"
    " --rules rules.toml); "
    "if modules are cut or joined, merge the adapter into its base first (merge_and_unload() of"
    " PEFT)"
)
# name of a tensor of the new base -> its expression over the old base
Sources = Mapping[str, Expression]


def to_other_base(
    draft: Draft, old: NameTables, new: NameTables, code: ModelOperand | None
) -> Draft:
    """Move an adapter from the modules of one model to the modules of another that loads what the
    first one saves.

    If it loads none of it, move it to the modules of the same names. `code` is the other model
    itself: its loading may accept keys that it does not write. Raise `Refused`, all problems at
    once, if a module has no single place there.
    """
    saved: dict[str, Expression] = {}
    for key, saved_source in old.saved.items():
        if saved_source is not None:
            saved[key] = saved_source
    for key, fqn in old.fqn_of.items():
        saved[key] = Ref(fqn)
    loaded = new.runtime_values(saved)
    if code is not None:
        from ckpttool.tracing.loading import verdict_on_section

        reads = verdict_on_section(code.definition(), saved_by(old.names).section("")).reads
        for fqn, source in reads.items():
            if source is not None and any(ex.refs(source)):
                loaded[fqn] = source
    sources: dict[str, Expression] = {}
    for fqn, source in loaded.items():
        sources[fqn] = ex.substitute(source, saved.__getitem__)
    if not sources:
        sources = {fqn: Ref(fqn) for fqn in old.first if fqn in new.first}
    return _follow(draft, sources, old.names.model)


def apply_rules_of_base(draft: Draft, steps: Sequence[RuleStep]) -> Draft:
    """Apply rules for the keys of the base; if they match the adapter's own keys, apply them to
    these.

    Raise `Refused`, all problems at once, if the rules do not rename a module as a whole.
    """
    from ckpttool.ruleset.steps import state_of

    def sources_of(section: Section) -> Sources:
        state, _ = state_of(steps, section, whole=False)
        return {key: value.source for key, value in state.items()}

    def touches(section: Section) -> bool:
        return sources_of(section) != {key: Ref(key) for key in section.by_key()}

    section, adapter = draft.evaluated(), adapter_of(draft.keys)
    base = None if adapter is None or touches(section) else _base(section, adapter)
    if base is None or not touches(base):
        return apply_rules(draft, steps)
    return _follow(draft, sources_of(base), "the rules")


def _follow(draft: Draft, sources: Sources, who: str) -> Draft:
    """Rename the adapter's keys as the modules and tensors of its base are renamed."""
    tensors: defaultdict[str, list[str]] = defaultdict(list)
    modules: defaultdict[str, dict[str, None]] = defaultdict(dict)
    broken: dict[str, str] = {}  # module -> why it is not moved as a whole
    for new, source in sources.items():
        olds = list(dict.fromkeys(ex.refs(source)))
        for old in olds:
            if isinstance(source, Ref):
                tensors[old].append(new)
                modules[_parent(old)][_parent(new)] = None
            else:
                broken[_parent(old)] = f"{new} is computed from {', '.join(olds)}"

    def new_module(path: str) -> str | Problem:
        if path in broken:
            return Problem(f"its module is not one of the new model: {broken[path]}", path)
        places = list(modules.get(path, ()))
        if len(places) == 1:
            return places[0]
        text = f"its tensors go to {' and '.join(places)}" if places else "no such module"
        return Problem(text, path)

    def new_tensor(name: str) -> str | Problem:
        """Return the new name of a tensor of the base, which was trained with the adapter."""
        places = tensors.get(name, [])
        if len(places) == 1:
            return places[0]
        path, rest = path_and_rest(name, modules)
        module = new_module(path)
        return module if isinstance(module, Problem) else f"{module}.{rest}"

    adapter = adapter_of(draft.keys)
    assert adapter is not None
    names: dict[str, str] = {}
    problems: list[Problem] = []
    for path, keys in adapter.modules.items():
        module = new_module(path)
        if isinstance(module, Problem):
            problems.append(module)
        else:
            for key in keys:
                names[key] = _with_part(key, path, module)
    for key in adapter.rest:
        name = adapter.inside(key)
        tensor = new_tensor(name)
        if isinstance(tensor, Problem):
            problems.append(replace(tensor, key=key))
        else:
            names[key] = _with_part(key, name, tensor)
    if problems:
        raise Refused(
            f"{adapter.title} cannot follow its base by {who}: {plural(len(problems), 'problem')}",
            hint=_HINT,
            problems=problems,
        )
    return draft.renamed(names)


def _with_part(key: str, old: str, new: str) -> str:
    """Return the key with `new` for its part `old`; PEFT's root before it stays."""
    at = key.index(old)
    return key[:at] + new + key[at + len(old) :]


def _base(section: Section, adapter: Adapter) -> Section:
    """Return the weights of the adapted modules and the other tensors of the base in the file,
    without data.
    """
    entries = section.by_key()
    tensors: dict[str, TensorEntry] = {}
    for path, keys in adapter.modules.items():
        name = f"{path}.weight"
        shape = _shape_of_weight([entries[key] for key in keys])
        tensors[name] = in_row_major(name, "float32", shape, None)
    for key in adapter.rest:
        entry = entries.get(key)
        if isinstance(entry, TensorEntry):
            name = adapter.inside(key)
            tensors[name] = entry.under(name)
    return replace(section, tensors=tuple(tensors.values()), extras=())


def _shape_of_weight(factors: Iterable[object]) -> Shape:
    """Return the shape of the weight that the factors ``lora_A`` [rank, in] and ``lora_B``
    [out, rank] belong to.
    """
    inputs = outputs = None
    for factor in factors:
        if not isinstance(factor, TensorEntry) or len(factor.shape) != 2:
            continue
        first, second = factor.shape
        if inputs is None and ".lora_A." in f"{factor.key}.":
            inputs = second
        if outputs is None and ".lora_B." in f"{factor.key}.":
            outputs = first
    return (1,) if inputs is None or outputs is None else (outputs, inputs)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
