"""Compare names: a model against itself, a names file, or a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Expression, Op, Ref, substitute
from ckpttool.core.keys import is_flat
from ckpttool.core.names import NAMED_EXTRA_STATE, RUNTIME, SERIALIZED, Hook, Names, RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import GROUPS
from ckpttool.core.text import Info, shell
from ckpttool.diffing.result import (
    EITHER_WAY,
    FLAT,
    KIND,
    NO_VALUES,
    OBJECT,
    ONLY_LEFT,
    ONLY_RIGHT,
    TIED,
    Diff,
    Entry,
    only_left,
    only_right,
    segment_change,
    segment_reason,
)
from ckpttool.diffing.sections import Values, compare, compare_pair, leftover, renamed, unpairable
from ckpttool.evaluate.apply import Digests
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.remarks import PLACEHOLDER, is_placeholder
from ckpttool.naming.call_variants import aliases, base_name
from ckpttool.naming.convert import other_versions, read, with_keys
from ckpttool.naming.match import NameTables
from ckpttool.naming.pairing.search import infer
from ckpttool.naming.pairing.values import Inference, Side
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, saved_by
from ckpttool.optimizers.identify import Parameters

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict


_DEFINED = frozenset({"torch_zip", "torch_legacy", "torchscript", "pt2", "memory"})  # keys in the order of definition
_OPEN = frozenset({"missing", "unexpected", "shape"})


def known(entries: Iterable[Entry]) -> dict[str, str]:
    """Keys of the left -> keys of the right that are one tensor's by name, but for those of another shape."""
    both = (entry for entry in entries if len(entry.left) == len(entry.right) == 1)
    return {e.left[0]: e.right[0] for e in both if e.status != "shape" or e.reason == KIND}


def suggestions(left: Checkpoint, right: Checkpoint, entries: Sequence[Entry], values: bool) -> Inference:
    """Pairs of what `entries` leave open; with `values` also by what the tensors hold, which is read for it."""
    if not _OPEN & {entry.status for entry in entries}:
        return Inference()
    seconds = {key for entry in entries if entry.status == "alias" for key in (*entry.left, *entry.right)}
    mine, theirs = (
        _side(one, model_section(one), seconds | out, values) for one, out in zip((left, right), unpairable(entries))
    )
    return infer(mine, theirs, known(entries))


def _side(checkpoint: Checkpoint, section: Section, left_out: set[str], values: bool) -> Side:
    tensors = [entry for entry in section.tensors if entry.key not in left_out and not is_placeholder(entry)]
    return Side(tensors, checkpoint.format in _DEFINED, Digests(section.by_key()) if values else None)


_NOTHING = Inference()
_SHIFTED = "the optimizer's id of a parameter: torch gives state to parameters by it"
_GONE, _ADDED = "no longer a parameter of the optimizer", "a parameter that the optimizer had not"
_RUNTIME = "a runtime name, under a key that stays: exported programs and optimizers that go by names have it"


def compare_with_code(old: Names, path: str, model: ModelOperand) -> Diff:
    """What of `old`, read from `path`, the model's code has changed: keys, runtime names, optimizer ids.

    Identical where a checkpoint that the old code wrote is, but for its values, one that the new code writes. Raises
    `CkptError` where the file has ids of an optimizer, and the operand has none.
    """
    new = model.names()
    if old.optimizer_class is not None and new.optimizer_class is None:
        words = shell("ckpttool", "diff", path, *model.words, "--optimizer")
        raise CkptError(
            f"{path} has the ids of an optimizer ({old.optimizer_class}), and none is named to compare them with",
            hint=f"{words} OPTIMIZER",
        )
    left, right = saved_by(old), saved_by(new)
    keys = tuple(_as_made(compare(model_section(left), model_section(right)), old, new))
    inferred = suggestions(left, right, keys, False)
    renamed = [(was, now) for was, now in _renames(old, new).items() if was != now]
    runtime = (Entry("renamed", (was,), (now,), _RUNTIME) for was, now in renamed)
    entries = (*keys, *runtime, *_ids(old, new, keys, _renames(old, new, inferred)))
    identical = all(entry.status in EITHER_WAY for entry in entries) and old.optimizer_class == new.optimizer_class
    notes = tuple(_notes(old, new, entries, model))
    sides = f"{path} (what checkpoints have)", f"{model.title} (what its code writes)"
    beyond = "another class of optimizer" if old.optimizer_class != new.optimizer_class else ""
    compared = {
        **dict.fromkeys(("keys", "shapes", "dtypes"), True),
        "values": False,
        "aliases": True,
        "metadata": False,
        "optimizers": old.optimizer_class is not None,
    }
    shown = Diff(*sides, identical, entries, notes=notes, inferred=inferred, harmless=EITHER_WAY, beyond=beyond)
    return replace(shown, compared=compared, scope=NO_VALUES)


def is_of_keys(entry: Entry) -> bool:
    """Whether the entry is about keys of a state dict, and not about runtime names or an optimizer's ids."""
    return entry.reason not in (_RUNTIME, _SHIFTED, _GONE, _ADDED)


def _renames(old: Names, new: Names, inferred: Inference = _NOTHING) -> dict[str, str]:
    """Runtime name -> the name it has now, for tensors whose key stays, or has likely another name."""
    now = {key.key: key for key in new.serialized}
    likely = {pair.left[0]: pair.right[0] for pair in inferred.pairs if len(pair.left) == len(pair.right) == 1}
    found = {}
    for key in old.serialized:
        other = now.get(likely.get(key.key, key.key))
        if other is not None and isinstance(key.source, Ref) and isinstance(other.source, Ref):
            found[key.source.key] = other.source.key
    return found


def _as_made(entries: tuple[Entry, ...], old: Names, new: Names) -> Iterator[Entry]:
    """The entries; keys that hooks compute otherwise than before are not the same."""
    renames = _renames(old, new)
    was, now = ({key.key: key for key in names.serialized} for names in (old, new))
    for entry in entries:
        key = entry.left[0] if entry.status == "same" else None
        if key in was and _source(was[key], renames) != now[key].source:
            yield Entry("transformed", (key,), (key,), "made of other tensors, or in another way", now[key].hook)
        else:
            yield entry


def _source(key: SerializedKey, renames: Mapping[str, str]) -> Expression | None:
    return None if key.source is None else substitute(key.source, lambda name: Ref(renames.get(name, name)))


def _ids(old: Names, new: Names, keys: tuple[Entry, ...], renames: Mapping[str, str]) -> Iterator[Entry]:
    """Parameters whose id is another one, and those that only one of the optimizers has."""
    if old.optimizer_class is None:
        new = replace(new, optimizer_class=None, optimizer=())
    was, now = ({param.fqn: (param.id, param.group) for param in names.ids} for names in (old, new))
    was = {renames.get(name, name): place for name, place in was.items()}
    changed = any(entry.status in ("missing", "unexpected") for entry in keys)
    known = set(Parameters(old).canonical) & set(Parameters(new).canonical)
    for name, place in was.items():
        if name not in now and (name in known or not changed):
            yield only_left(_key(place), _GONE, None, name)
        elif name in now and now[name] != place:
            yield Entry("order", (_key(place),), (_key(now[name]),), _SHIFTED, None, name)
    for name, place in now.items():
        if name not in was and (name in known or not changed):
            yield only_right(_key(place), _ADDED, None, name)


def _key(place: tuple[int, int]) -> str:
    return f"{GROUPS}.{place[1]}.params.{place[0]}"


def _notes(old: Names, new: Names, entries: tuple[Entry, ...], model: ModelOperand) -> Iterator[str]:
    if old.optimizer_class != new.optimizer_class:
        yield f"the optimizer is {new.optimizer_class}, and was {old.optimizer_class or 'not named'}"
    if not model.is_definition or all(entry.status in EITHER_WAY for entry in entries):
        return
    from ckpttool.tracing.loading import load_verdict

    try:
        ok = load_verdict(model.definition(), model_section(saved_by(old))).ok
    except CkptError as error:
        yield f"whether the new code loads the old keys was not tried: {error.message}"
        return
    yield (
        Info("load_state_dict(strict=True) of the new code takes the old keys")
        if ok
        else "load_state_dict(strict=True) of the new code refuses checkpoints with the old keys"
    )


NON_PERSISTENT = "a non-persistent buffer"
Entries = dict[str, Union[TensorEntry, ExtraEntry]]
CALL_VARIANT = "a call variant of a tensor that both sides have"


def compare_names(names: Names) -> tuple[Entry, ...]:
    """The model alone: what ``state_dict()`` writes (left) against what the tensors are called at runtime (right)."""
    tables = NameTables(names)
    hooks = tables.hooks
    entries = [_pair(key, fqn, hooks.get(key)) for key, fqn in tables.fqn_of.items()]
    entries += _transformed(tables, hooks)
    for key, source in tables.saved.items():
        if source is None:
            entries.append(only_left(key, "a hook adds it: no runtime tensor feeds it", hooks[key]))
        elif isinstance(source, Ref) and key not in tables.fqn_of:
            entries.append(
                Entry("alias", (key,), (), "a second key of one tensor", hooks[key], f"same as {source.key}")
            )
    entries += [Entry("extra_state", (key,), (), "extra state: no tensor of a program") for key in names.extra_state]
    named = {fqn for entry in entries for fqn in entry.right}
    lost = {problem.key: str(problem) for problem in reversed(names.roundtrip_problems)}
    left_out = set(names.not_serialized)
    entries += [
        _unsaved(tensor, named, lost, tensor.fqn not in left_out) for tensor in names.runtime if tensor.fqn not in named
    ]
    return tuple(entries)


def _pair(key: str, fqn: str, hook: Hook | None) -> Entry:
    if key == fqn:
        return Entry("same", (key,), (fqn,))
    by = "state_dict hook" if hook is not None else "saving"
    return Entry("renamed", (key,), (fqn,), f"{by} {segment_change(fqn, key)}", hook)


def _transformed(tables: NameTables, hooks: Mapping[str, Hook | None]) -> list[Entry]:
    """Keys whose values are computed when the model is saved, together with the tensors that they are computed from."""
    taken = set(tables.fqn_of.values())
    computed = {key: source for key, source in tables.saved.items() if isinstance(source, Op)}
    entries = []
    for keys, fqns in _components({key: list(ex.refs(source)) for key, source in computed.items()}):
        source = computed[keys[0]]
        right = tuple(fqn for fqn in fqns if fqn not in taken)
        entries.append(Entry("transformed", tuple(keys), right, _computed(source), hooks[keys[0]]))
    return entries


def _computed(source: Expression) -> str:
    if ex.is_opaque(source):
        return "computed by code that is no tensor operator"
    names = (op.removeprefix("aten.").partition(".")[0] for op in ex.operators(source))
    return f"computed: {', '.join(dict.fromkeys(name for name in names if name != 'getitem'))}"


def _components(links: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """Groups of left names and the right names that they are linked with, such that no link leaves its group."""
    groups: list[tuple[list[str], list[str]]] = []
    home: dict[str, tuple[list[str], list[str]]] = {}  # right name -> its group
    for left, rights in links.items():
        group: tuple[list[str], list[str]] = ([left], list(dict.fromkeys(r for r in rights if r not in home)))
        for other in {id(home[r]): home[r] for r in rights if r in home}.values():
            group = (other[0] + group[0], other[1] + group[1])
            groups.remove(other)
        groups.append(group)
        home.update(dict.fromkeys(group[1], group))
    return groups


def _unsaved(tensor: RuntimeTensor, named: Collection[str], lost: Mapping[str, str], carried: bool) -> Entry:
    fqn, first = tensor.fqn, tensor.alias_of
    if first is not None and first in named:
        return Entry("alias", (), (fqn,), "a second name of one tensor", None, f"same as {first}")
    if carried:
        status = "missing" if tensor.persistent else "extra_state"  # a program wants the first among its weights
        return Entry(status, (), (fqn,), "saved inside of an entry that is no tensor")
    if not tensor.persistent:
        return Entry("not_serialized", (), (fqn,), NON_PERSISTENT)
    return Entry("not_serialized", (), (fqn,), "state_dict() leaves it out", None, lost.get(fqn))


def compare_load(names: Names, section: Section, verdict: Verdict | None) -> tuple[Entry, ...]:
    """A checkpoint (left) against the serialized keys that the model loads (right).

    `verdict` is what torch itself says of loading it; without one (a names file) the keys and shapes have to do.
    """
    have = section.by_key()
    want: dict[str, SerializedKey | None] = dict.fromkeys([*(s.key for s in names.serialized), *names.extra_state])
    want.update((s.key, s) for s in names.serialized)
    refused = () if verdict is None else verdict.unexpected
    entries = [_loaded(have[key], wanted, key in refused) for key, wanted in want.items() if key in have]
    mine = {key: entry for key, entry in have.items() if key not in want}
    theirs = dict.fromkeys(key for key in want if key not in have)
    entries += _other_form(NameTables(names), section, mine, theirs)
    entries += _call_variants(names, section, mine, theirs)
    entries += _accepted(mine, {t.fqn for t in names.runtime if not t.persistent}, verdict)
    entries += _absent(theirs, verdict, _twins(names, have))
    lost = _overwritten(names, section, verdict)
    return tuple(lost.get(entry.left, entry) if entry.status == "same" else entry for entry in entries)


def _twins(names: Names, have: Collection[str]) -> dict[str, str]:
    """Key of a tied tensor -> a key of the checkpoint that is the same tensor's."""
    held = {s.source: s.key for s in reversed(names.serialized) if s.key in have and isinstance(s.source, Ref)}
    return {s.key: held[s.source] for s in names.serialized if s.source in held and s.key not in have}


def _overwritten(names: Names, section: Section, verdict: Verdict | None) -> dict[tuple[str, ...], Entry]:
    """Keys that the model ties to another, where the file has other values there: loading keeps one of them."""
    have = section.by_key()
    groups: dict[Ref, list[str]] = {}
    for s in names.serialized:
        if s.key in have and isinstance(s.source, Ref):
            groups.setdefault(s.source, []).append(s.key)
    found: dict[tuple[str, ...], Entry] = {}
    for first, keys in groups.items():
        read = None if verdict is None else verdict.reads.get(first.key)
        last = read.key if isinstance(read, Ref) and read.key in keys else keys[-1]
        for key in keys:
            if not same_values(have[key], have[last]):
                reason = "tied, and the file has other values under another name of it: loading loses one of them"
                found[key,] = Entry("value", (key,), (key,), reason, None, f"loading keeps {last}")
    return found


def _loaded(entry: TensorEntry | ExtraEntry, want: SerializedKey | None, refused: bool) -> Entry:
    key = (entry.key,)
    if refused and want is not None:
        return only_left(entry.key, NAMED_EXTRA_STATE)
    if want is None:
        return Entry("extra_state", key, key, "extra state")
    if isinstance(entry, ExtraEntry):
        return Entry("shape", key, key, f"{OBJECT}, where the model has one")
    if want.shape is not None and entry.shape != want.shape:
        reason = PLACEHOLDER if is_placeholder(entry) else "another shape"
        return Entry("shape", key, key, reason, None, f"{list(entry.shape)} instead of {list(want.shape)}")
    if entry.dtype != want.dtype:
        return Entry("dtype", key, key, f"{entry.dtype} instead of {want.dtype}")
    return Entry("same", key, key)


def _other_form(tables: NameTables, section: Section, mine: Entries, theirs: dict[str, None]) -> list[Entry]:
    """Keys under another name of a tensor that the model loads (wrapped, runtime); takes them off both sides."""
    entries = []
    for form in (SERIALIZED, RUNTIME):
        names = read(tables, section, form).match.names
        for key, name in names.items():
            keys = [name] if form == SERIALIZED else tables.keys_of.get(tables.first.get(name, name), ())
            target = next((key for key in keys if key in theirs), None)
            if target is not None and key in mine:
                reason, hook = _why(key, name, target, form, tables.hooks)
                del mine[key], theirs[target]
                entries.append(Entry("renamed", (key,), (target,), reason, hook))
        if form == RUNTIME:
            entries += _computed_from(tables, {name: key for key, name in names.items()}, mine, theirs)
    return entries


def _computed_from(tables: NameTables, keys: dict[str, str], mine: Entries, theirs: dict[str, None]) -> list[Entry]:
    """Serialized keys that saving computes from runtime tensors that the checkpoint has instead (`keys`: by FQN)."""
    held = {tables.first[fqn]: key for fqn, key in reversed(keys.items()) if fqn in tables.first}
    links = {key: list(ex.refs(source)) for key in theirs if isinstance(source := tables.saved.get(key), Op)}
    entries = []
    for rights, fqns in _components(links):
        lefts = [held[fqn] for fqn in fqns if held.get(fqn) in mine]
        if lefts:
            source, hook = tables.saved[rights[0]], tables.hooks[rights[0]]
            assert source is not None
            reason = f"left has the runtime tensors; the keys are {_computed(source)}"
            entries.append(Entry("transformed", tuple(lefts), tuple(rights), reason, hook))
            for key in lefts:
                del mine[key]
            for key in rights:
                del theirs[key]
    return entries


def _call_variants(names: Names, section: Section, mine: Entries, theirs: dict[str, None]) -> list[Entry]:
    """Keys of an unflattened program that only one side has, of a tensor that both have; takes them off both lists."""
    have, twice = section.by_key(), aliases(section)
    sources = {s.key: s.source for s in names.serialized}
    entries = []
    for key in [key for key in mine if "@" in key and key in twice and twice[key] not in mine]:
        del mine[key]
        entries.append(Entry("alias", (key,), (), CALL_VARIANT, None, f"same as {twice[key]}"))
    for key in [key for key in theirs if sources.get(key) is not None]:
        base = base_name(key, have)
        if base is not None and base not in mine and sources.get(base) == sources[key]:
            del theirs[key]
            entries.append(Entry("alias", (), (key,), CALL_VARIANT, None, f"same as {base}"))
    return entries


def _why(key: str, name: str, target: str, form: str, hooks: Mapping[str, Hook | None]) -> tuple[str, Hook | None]:
    wrapped = "" if key == name else segment_reason(key, name)
    if form == SERIALIZED or name == target:
        return wrapped, None
    runtime = f"left has the runtime name; the state_dict hook {segment_change(name, target)}"
    return "; ".join(filter(None, (runtime, wrapped))), hooks.get(target)


def _accepted(keys: Iterable[str], unsaved: Collection[str], verdict: Verdict | None) -> list[Entry]:
    """Keys that the model does not write: unexpected, but where its load hooks take them."""
    unexpected = set(keys if verdict is None else verdict.unexpected)
    readers = {} if verdict is None else _readers(verdict)
    fits = verdict is not None and verdict.ok
    entries = []
    for key in keys:
        if key in readers:
            goes = f"goes to {', '.join(readers[key])}"
            entries.append(Entry("renamed", (key,), (), "a load hook takes it under this name", None, goes))
        elif key in unexpected or not fits:
            why = f"{ONLY_LEFT}: {NON_PERSISTENT} of the model, which is not saved" if key in unsaved else ONLY_LEFT
            entries.append(only_left(key, FLAT if is_flat(key) else why))
        else:
            entries.append(only_left(key, f"{ONLY_LEFT}; a load hook takes it away without an error"))
    return entries


def _readers(verdict: Verdict) -> dict[str, list[str]]:
    """Checkpoint key -> the runtime tensors that loading makes of it."""
    found: dict[str, list[str]] = {}
    for fqn, source in verdict.reads.items():
        for key in dict.fromkeys(() if source is None else ex.refs(source)):
            found.setdefault(key, []).append(fqn)
    return found


def _absent(keys: Iterable[str], verdict: Verdict | None, twins: Mapping[str, str]) -> list[Entry]:
    without = "; loading does without it" if verdict is not None and verdict.ok else ""
    return [
        only_right(key, f"{TIED}{without}", None, f"same as {twins[key]}")
        if key in twins
        else only_right(key, f"{ONLY_RIGHT}{without}")
        for key in keys
    ]


def loads(entries: Iterable[Entry]) -> bool:
    """Without the model's code: whether every key is there, with its shape, and no other."""
    return all(entry.status in ("same", "extra_state", "dtype") for entry in entries)


def compare_through(names: Names, left: Section, right: Section, values: Values | None = None) -> tuple[Entry, ...]:
    """Two checkpoints of one model, each in whatever form its keys are: both are read as its runtime tensors."""
    tables = NameTables(names)
    _check_versions(tables, left, right)
    mine, theirs = _tensors(tables, left), _tensors(tables, right)
    have, want = left.by_key(), right.by_key()
    entries: list[Entry] = []
    links: dict[str, list[str]] = {}
    paired: dict[str, None] = {}
    for fqn, source in mine.items():
        other = theirs.get(fqn)
        if isinstance(source, Ref) and isinstance(other, Ref):
            entries.append(_same_tensor(have[source.key], want[other.key], tables.hooks, values))
        elif source == other:  # computed of the same keys on both sides
            paired.update(dict.fromkeys(ex.refs(source)))
        elif other is not None:
            for key in ex.refs(source):
                links.setdefault(key, []).extend(ex.refs(other))
    entries += [compare_pair(have[key], want[key], values) for key in paired if key not in links]
    for lefts, rights in _components(links):
        entries.append(Entry("transformed", tuple(lefts), tuple(rights), "computed by a state_dict hook"))
    named_left = {key for entry in entries for key in entry.left}
    named_right = {key for entry in entries for key in entry.right}
    entries += leftover("unexpected", left, [key for key in have if key not in named_left], named_left)
    entries += leftover("missing", right, [key for key in want if key not in named_right], named_right)
    return tuple(entries)


def _check_versions(tables: NameTables, *sections: Section) -> None:
    """Raises `CkptError` where the two have modules of different versions, which loading reads otherwise."""
    if tables.names.versions is None:
        return
    saved = [(section, reading) for section in sections if (reading := read(tables, section)).form == SERIALIZED]
    others = [other_versions(tables.names, section, reading) for section, reading in saved]
    if any(others) and (len(saved) < len(sections) or others[0] != others[1]):
        raise CkptError(
            f"{tables.names.model} reads other versions of its modules otherwise, and the two have not the same",
            hint="let it load both, and save them anew: what is then in them can be compared",
            problems=[problem for own in others for problem in own],
        )


def _tensors(tables: NameTables, section: Section) -> dict[str, Expression]:
    """Each runtime FQN as an expression over the section's keys."""
    reading = read(tables, section)
    keys = {name: key for key, name in reading.match.names.items()}
    if reading.form == RUNTIME:
        return {name: Ref(key) for name, key in keys.items()}
    found: dict[str, Expression] = {fqn: with_keys(source, keys) for fqn, source in tables.runtime_values(keys).items()}
    extras = (*tables.names.extra_state, *(key for key, source in tables.saved.items() if source is None))
    return found | {name: Ref(keys[name]) for name in extras if name in keys}


def _same_tensor(
    left: TensorEntry | ExtraEntry,
    right: TensorEntry | ExtraEntry,
    hooks: Mapping[str, Hook | None],
    values: Values | None,
) -> Entry:
    if left.key == right.key:
        return compare_pair(left, right, values)
    hook = hooks.get(left.key) or hooks.get(right.key)
    reason = segment_reason(left.key, right.key)
    if hook is not None:
        saved, runtime = (left.key, right.key) if hooks.get(left.key) is not None else (right.key, left.key)
        reason = f"state_dict hook {segment_change(runtime, saved)}"
    return renamed(left, right, reason, values, hook)
