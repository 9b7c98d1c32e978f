"""Compare names: a model against itself, a names file, or a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Expression, Op, Ref, substitute
from ckpttool.core.names import RUNTIME, SERIALIZED, Hook, Names, RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import GROUPS
from ckpttool.core.text import Info, Note, is_flat, shell
from ckpttool.diffing.causes import Cause, Code, segment_change, wrapper_cause
from ckpttool.diffing.one_model import components, other_keys
from ckpttool.diffing.result import EITHER_WAY, NO_VALUES, Diff, Entry, only_left, only_right
from ckpttool.diffing.sections import (
    compare,
    shape_or_dtype,
    under_another_name,
    unpairable,
)
from ckpttool.evaluate.apply import Digests
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import is_placeholder
from ckpttool.naming.convert import read
from ckpttool.naming.evidence import Ambiguous, Inference, Pair, Side, Tensor
from ckpttool.naming.match import NameTables, aliases, base_name
from ckpttool.naming.pairing import infer
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, saved_by
from ckpttool.optimizers.identify import Parameters

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict

Objects = dict[str, Union[TensorEntry, ExtraEntry]]
P = TypeVar("P", Pair, Ambiguous)


# Likely renames


def known(entries: Iterable[Entry]) -> dict[str, str]:
    """Map keys of the left to keys of the right that name the same tensor, except if the shape
    differs.
    """
    both = (entry for entry in entries if len(entry.left) == len(entry.right) == 1)
    return {e.left[0]: e.right[0] for e in both if e.status != "shape" or e.has(Code.KIND)}


def suggestions(
    left: Checkpoint, right: Checkpoint, entries: Sequence[Entry], values: bool
) -> Inference:
    """Pair the keys that `entries` leave open; with `values` the tensors are read and compared too.

    Segments of wrappers are not evidence: the keys are paired without them.
    """
    if {"missing", "unexpected", "shape"}.isdisjoint(entry.status for entry in entries):
        return Inference()
    second_names = {
        key for entry in entries if entry.status == "alias" for key in (*entry.left, *entry.right)
    }
    sides, names = [], []
    for checkpoint, parts in zip((left, right), unpairable(entries)):
        section, left_out = model_section(checkpoint), second_names | parts
        by_key = section.by_key()
        bare = canonical_keys(by_key)
        if len(set(bare.values())) < len(bare):
            bare = {key: key for key in bare}
        tensors = [
            entry
            if bare[entry.key] == entry.key
            else Tensor(bare[entry.key], entry.dtype, entry.shape)
            for entry in section.tensors
            if entry.key not in left_out and not is_placeholder(entry)
        ]
        digests = Digests({bare[key]: entry for key, entry in by_key.items()}) if values else None
        sides.append(Side(tensors, format_of(checkpoint).holds.order, digests))
        names.append(bare)
    mine, theirs = names
    paired = infer(
        sides[0],
        sides[1],
        {mine.get(key, key): theirs.get(other, other) for key, other in known(entries).items()},
    )
    if all(key == name for bare in names for key, name in bare.items()):
        return paired
    written = [{name: key for key, name in bare.items()} for bare in names]

    def with_keys_of(one: P) -> P:
        left, right = (
            tuple(of[name] for name in side) for of, side in zip(written, (one.left, one.right))
        )
        return replace(one, left=left, right=right)

    return Inference(
        tuple(map(with_keys_of, paired.pairs)), tuple(map(with_keys_of, paired.ambiguous))
    )


# A names file against the model's code


_NOT_KEYS = (Code.RUNTIME_NAME, Code.OPTIMIZER_ID, Code.PARAM_REMOVED, Code.PARAM_ADDED)


def compare_with_code(old: Names, path: str, model: ModelOperand) -> Diff:
    """Compare `old`, read from `path`, with the model's code: keys, runtime names, optimizer ids.

    Identical if a checkpoint that the old code wrote has the keys, shapes and ids of one that the
    new code writes. Raises `CkptError` if the file has optimizer ids and the operand has no
    optimizer.
    """
    new = model.names()
    if old.optimizer_class is not None and new.optimizer_class is None:
        command = shell("ckpttool", "diff", path, *model.words, "--optimizer")
        raise CkptError(
            f"{path} has the ids of an optimizer ({old.optimizer_class}): name the optimizer to"
            " compare them with",
            hint=f"{command} OPTIMIZER",
        )
    left, right = saved_by(old), saved_by(new)
    keys = tuple(_with_sources(compare(model_section(left), model_section(right)), old, new))
    inferred = suggestions(left, right, keys, False)
    runtime = [
        Entry("renamed", (was,), (now,), Cause(Code.RUNTIME_NAME))
        for was, now in _runtime_names(old, new).items()
        if was != now
    ]
    entries = (*keys, *runtime, *_optimizer_ids(old, new, keys, _runtime_names(old, new, inferred)))
    other_class = old.optimizer_class != new.optimizer_class
    notes: list[str] = []
    if other_class:
        text = (
            f"the optimizer is {new.optimizer_class}; it was {old.optimizer_class or 'not named'}"
        )
        notes.append(Note(text, "optimizer-class"))
    if model.is_definition and any(entry.status not in EITHER_WAY for entry in entries):
        from ckpttool.tracing.loading import load_verdict

        try:
            if load_verdict(model.definition(), model_section(left)).ok:
                notes.append(
                    Info(
                        "load_state_dict(strict=True) of the new code accepts the old keys",
                        "old-keys",
                    )
                )
            else:
                text = (
                    "load_state_dict(strict=True) of the new code rejects checkpoints with the"
                    " old keys"
                )
                notes.append(Note(text, "old-keys"))
        except CkptError as error:
            notes.append(
                Note(
                    f"could not check if the new code loads the old keys: {error.message}",
                    "old-keys",
                )
            )
    return Diff(
        f"{path} (keys in checkpoints)",
        f"{model.title} (keys from its code)",
        identical=all(entry.status in EITHER_WAY for entry in entries) and not other_class,
        entries=entries,
        notes=tuple(notes),
        inferred=inferred,
        harmless=EITHER_WAY,
        other_failure="different optimizer class" if other_class else "",
        asks="drift",
        names=(path, model.title),
        compared={
            **dict.fromkeys(("keys", "shapes", "dtypes"), True),
            "values": False,
            "aliases": True,
            "metadata": False,
            "optimizers": old.optimizer_class is not None,
        },
        scope=NO_VALUES,
    )


def renamable(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of state_dict keys that rules can rename: no runtime names, optimizer ids
    or computed keys.
    """
    return [
        entry for entry in entries if entry.status != "transformed" and not entry.has(*_NOT_KEYS)
    ]


def _runtime_names(old: Names, new: Names, inferred: Inference | None = None) -> dict[str, str]:
    """Map old runtime names to new ones, for tensors whose key stays or is likely renamed."""
    now = {key.key: key for key in new.serialized}
    pairs = () if inferred is None else inferred.pairs
    likely = {
        pair.left[0]: pair.right[0] for pair in pairs if len(pair.left) == len(pair.right) == 1
    }
    names = {}
    for key in old.serialized:
        other = now.get(likely.get(key.key, key.key))
        if other is not None and isinstance(key.source, Ref) and isinstance(other.source, Ref):
            names[key.source.key] = other.source.key
    return names


def _with_sources(entries: tuple[Entry, ...], old: Names, new: Names) -> Iterator[Entry]:
    """Yield the entries; a key that hooks now compute in another way is not the same."""
    renames = _runtime_names(old, new)
    was, now = ({key.key: key for key in names.serialized} for names in (old, new))
    for entry in entries:
        key = entry.left[0] if entry.status == "same" else ""
        if key in was:
            source = was[key].source
            now_source = now[key].source
            if source is not None:
                source = substitute(source, lambda name: Ref(renames.get(str(name), str(name))))
            if source != now_source:
                yield Entry("transformed", (key,), (key,), Cause(Code.RECOMPUTED), now[key].hook)
                continue
        yield entry


def _optimizer_ids(
    old: Names, new: Names, keys: Iterable[Entry], renames: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield parameters with another id, and parameters that only one optimizer has."""
    if old.optimizer_class is None:
        new = replace(new, optimizer_class=None, optimizer=())
    was, now = (
        {param.fqn: f"{GROUPS}.{param.group}.params.{param.id}" for param in names.ids}
        for names in (old, new)
    )
    was = {renames.get(name, name): key for name, key in was.items()}
    changed = any(entry.status in ("missing", "unexpected") for entry in keys)
    in_both = set(Parameters(old).canonical) & set(Parameters(new).canonical)
    for name, key in was.items():
        if name not in now and (name in in_both or not changed):
            yield only_left(key, Cause(Code.PARAM_REMOVED), None, name)
        elif name in now and now[name] != key:
            yield Entry("order", (key,), (now[name],), Cause(Code.OPTIMIZER_ID), None, name)
    for name, key in now.items():
        if name not in was and (name in in_both or not changed):
            yield only_right(key, Cause(Code.PARAM_ADDED), None, name)


# A model alone


def compare_names(names: Names) -> tuple[Entry, ...]:
    """Compare what the model's ``state_dict()`` writes (left) with its runtime names (right)."""
    tables = NameTables(names)
    hooks = tables.hooks
    entries = []
    for key, fqn in tables.fqn_of.items():
        if key == fqn:
            entries.append(Entry("same", (key,), (fqn,)))
        else:
            code = Code.SAVING if hooks.get(key) is None else Code.HOOK
            cause = Cause(code, (segment_change(fqn, key),))
            entries.append(Entry("renamed", (key,), (fqn,), cause, hooks.get(key)))

    # Keys with computed values, with the tensors that they are computed from
    taken = set(tables.fqn_of.values())
    computed = {key: source for key, source in tables.saved.items() if isinstance(source, Op)}
    for keys, fqns in components({key: list(ex.refs(source)) for key, source in computed.items()}):
        right = tuple(fqn for fqn in fqns if fqn not in taken)
        entries.append(
            Entry("transformed", tuple(keys), right, _computed(computed[keys[0]]), hooks[keys[0]])
        )
    for key, source in tables.saved.items():
        if source is None:
            entries.append(only_left(key, Cause(Code.ADDED_BY_HOOK), hooks[key]))
        elif isinstance(source, Ref) and key not in tables.fqn_of:
            entries.append(_alias((key,), (), source.key, hooks[key]))
    entries += [
        Entry("extra_state", (key,), (), Cause(Code.EXTRA_STATE)) for key in names.extra_state
    ]

    named = {fqn for entry in entries for fqn in entry.right}
    problems = {problem.key: str(problem) for problem in reversed(names.roundtrip_problems)}
    left_out = set(names.not_serialized)
    return (
        *entries,
        *(
            _without_key(t, named, problems, t.fqn in left_out)
            for t in names.runtime
            if t.fqn not in named
        ),
    )


def _alias(
    left: tuple[str, ...], right: tuple[str, ...], first: str, hook: Hook | None = None
) -> Entry:
    return Entry("alias", left, right, Cause(Code.SECOND_NAME), hook, f"same as {first}")


def _without_key(
    tensor: RuntimeTensor, named: Collection[str], problems: Mapping[str, str], left_out: bool
) -> Entry:
    """Return the entry of a runtime tensor that no key names."""
    fqn, first = tensor.fqn, tensor.alias_of
    if first is not None and first in named:
        return _alias((), (fqn,), first)
    if not left_out:
        # a program expects the first among its weights
        status = "missing" if tensor.persistent else "extra_state"
        return Entry(status, (), (fqn,), Cause(Code.INSIDE_OBJECT))
    if not tensor.persistent:
        return Entry("not_serialized", (), (fqn,), Cause(Code.NON_PERSISTENT))
    return Entry("not_serialized", (), (fqn,), Cause(Code.NOT_SAVED), None, problems.get(fqn))


def _computed(source: Expression) -> Cause:
    if ex.is_opaque(source):
        return Cause(Code.OPAQUE)
    names = (op.removeprefix("aten.").partition(".")[0] for op in ex.operators(source))
    return Cause(
        Code.COMPUTED, (", ".join(dict.fromkeys(name for name in names if name != "getitem")),)
    )


# A checkpoint and the model that loads it


def compare_load(
    names: Names, section: Section, verdict: Verdict | None, by_pretrained: bool = False
) -> tuple[Entry, ...]:
    """Compare a checkpoint (left) with the serialized keys that the model loads (right).

    `verdict` is what torch says about loading it; without one (a names file) keys and shapes
    decide. `by_pretrained`: it is the answer of from_pretrained, which ignores some keys.
    """
    have = section.by_key()
    want: dict[str, SerializedKey | None] = dict.fromkeys(
        [*(s.key for s in names.serialized), *names.extra_state]
    )
    want.update((s.key, s) for s in names.serialized)
    rejected = () if verdict is None else verdict.unexpected
    entries = [
        _loaded(have[key], expected, key in rejected)
        for key, expected in want.items()
        if key in have
    ]
    mine = {key: entry for key, entry in have.items() if key not in want}
    theirs = dict.fromkeys(key for key in want if key not in have)
    entries += _in_other_form(NameTables(names), section, mine, theirs, want)
    entries += _call_variants(names, section, mine, theirs)
    if verdict is not None:
        entries += _by_load_hook(names, verdict, mine, theirs)
    unsaved = {tensor.fqn for tensor in names.runtime if not tensor.persistent}
    entries += _only_in_file(mine, unsaved, verdict, by_pretrained)

    # Keys that the file does not have; a tied one may be there under another name.
    optional = Cause(Code.OPTIONAL) if verdict is not None and verdict.ok else None
    held: dict[object, str] = {
        s.source: s.key
        for s in reversed(names.serialized)
        if s.key in have and isinstance(s.source, Ref)
    }
    sources = {s.key: s.source for s in names.serialized}
    for key in theirs:
        other = held.get(sources.get(key))
        if other is None:
            entries.append(only_right(key, Cause(Code.MISSING).and_also(optional)))
        else:
            entries.append(
                only_right(key, Cause(Code.TIED).and_also(optional), None, f"same as {other}")
            )
    lost = ({} if verdict is None else _otherwise(names, have, verdict)) | _overwritten(
        names, section, verdict
    )
    altered = set() if verdict is None else {(key,) for key in verdict.altered}

    def with_loss(entry: Entry) -> Entry:
        if entry.status == "same" and entry.left in lost:
            return lost[entry.left]
        return (
            Entry("value", entry.left, entry.right, Cause(Code.ALTERED))
            if entry.left in altered
            else entry
        )

    return tuple(map(with_loss, entries))


def _tied(names: Names) -> dict[str, list[str]]:
    """Map each key that the model saves to the keys with the same value: itself, and its tied
    ones.
    """
    groups: dict[Expression | str, list[str]] = {}
    of: dict[str, list[str]] = {}
    for s in names.serialized:
        of[s.key] = groups.setdefault(
            s.key if s.source is None or ex.is_opaque(s.source) else s.source, []
        )
        of[s.key].append(s.key)
    return of


def _overwritten(
    names: Names, section: Section, verdict: Verdict | None
) -> dict[tuple[str, ...], Entry]:
    """Return entries of tied keys for which the file has different values: loading keeps one of
    them.
    """
    have = section.by_key()
    saved = {s.key: s.source for s in names.serialized}
    kept = keys_read(verdict)
    entries: dict[tuple[str, ...], Entry] = {}
    for first, group in _tied(names).items():
        keys, source = [key for key in group if key in have], saved[first]
        if first != group[0] or len(keys) < 2 or source is None:
            continue
        loaded = None if verdict is None else verdict.reads.get(next(ex.refs(source), ""))
        read = () if loaded is None else ex.refs(loaded)
        last = next((key for key in read if key in keys), keys[-1])
        for key in keys:
            if key not in kept and not same_values(have[key], have[last]):
                entries[key,] = Entry(
                    "value", (key,), (key,), Cause(Code.TIED_VALUE), None, f"loading keeps {last}"
                )
    return entries


def keys_read(verdict: Verdict | None) -> set[str]:
    """Return the keys that a runtime tensor has after loading."""
    reads = () if verdict is None else verdict.reads.values()
    return {key for value in reads if value is not None for key in ex.refs(value)}


def _loading(
    names: Names, verdict: Verdict
) -> Iterator[tuple[Expression | None, Expression, Expression | None]]:
    """Yield three expressions for each tensor of a known kind: its usual value, the expected one,
    and the file's.

    It usually gets the first, by loading the model's own state dict. Expected is the key that saves
    it, if there is one, else the usual value. The last is what loading this file gives it, None if
    the file does not reach it.
    """
    key_of = {s.source: s.key for s in reversed(names.serialized) if isinstance(s.source, Ref)}
    for tensor in names.load:
        if tensor.fqn in verdict.reads and tensor.fqn not in verdict.special:
            usual, here = (
                x and ex.without_cast(x) for x in (tensor.source, verdict.reads[tensor.fqn])
            )
            key = key_of.get(Ref(tensor.fqn))
            expected = usual if key is None else Ref(key)
            if expected is not None:
                yield usual, expected, here


def _otherwise(names: Names, have: Objects, verdict: Verdict) -> dict[tuple[str, ...], Entry]:
    """Return entries of keys that the model saves, and whose values it does not get by loading
    them.

    They are lost if loading takes other keys here, and not whenever the model loads its own state
    dict.
    """
    tied = _tied(names)
    used = keys_read(verdict)
    saved_fqn = {s.key: s.source.key for s in names.serialized if isinstance(s.source, Ref)}
    entries: dict[tuple[str, ...], Entry] = {}
    for usual, value, source in _loading(names, verdict):
        if source == value or (source is None and not verdict.ok):
            continue
        if (
            isinstance(source, Ref)
            and isinstance(value, Ref)
            and source.key in tied.get(value.key, ())
        ):
            continue
        others = other_keys(value, source)
        if others is not None and all(
            key in have and same_values(have[key], have[it]) for key, it in others.items()
        ):
            continue
        keys, taken = list(ex.refs(value)), [] if source is None else list(ex.refs(source))
        detail = f"it takes {', '.join(dict.fromkeys(taken))}" if {*taken} - {*keys} else None
        for key in (key for key in dict.fromkeys(keys) if key in have):
            if verdict.reads.get(saved_fqn.get(key, "")) == Ref(key):
                # its own tensor has it, and another one of the tied tensors has another key
                continue
            if any(
                it != key and it in taken and same_values(have[key], have[it])
                for it in tied.get(key, ())
            ):
                # its module is at several paths, and the file has the same for two of them
                continue
            if source == usual or key in used or (source is None and key not in verdict.replaced):
                entries[key,] = Entry(
                    "transformed", (key,), (key,), Cause(Code.LOAD_HOOK_CHANGES), None, detail
                )
            else:
                entries[key,] = Entry("value", (key,), (key,), Cause(Code.LOST_VALUE), None, detail)
    return entries


def _loaded(
    entry: TensorEntry | ExtraEntry, expected: SerializedKey | None, rejected: bool
) -> Entry:
    key = (entry.key,)
    if rejected and expected is not None:
        is_named = entry.key.rpartition(".")[2] == "_extra_state"
        return only_left(
            entry.key, Cause(Code.NAMED_EXTRA_STATE if is_named else Code.NOT_READ_BACK)
        )
    if expected is None:
        return Entry("extra_state", key, key, Cause(Code.EXTRA_STATE))
    if isinstance(entry, ExtraEntry):
        return Entry("shape", key, key, Cause(Code.OBJECT))
    return shape_or_dtype(entry, expected.dtype, expected.shape, key, key) or Entry(
        "same", key, key
    )


def _in_other_form(
    tables: NameTables,
    section: Section,
    mine: Objects,
    theirs: dict[str, None],
    want: Mapping[str, SerializedKey | None],
) -> list[Entry]:
    """Pair keys that name a tensor of the model in another form (wrapped, runtime), and remove them
    from both sides.
    """
    entries = []
    for form in (SERIALIZED, RUNTIME):
        names = read(tables, section, form).match.names
        for key, name in names.items():
            keys = (
                [name]
                if form == SERIALIZED
                else tables.keys_of.get(tables.first.get(name, name), ())
            )
            target = next((key for key in keys if key in theirs), None)
            if target is None or key not in mine:
                continue
            cause, hook = None if key == name else wrapper_cause(key, name), None
            if form == RUNTIME and name != target:
                cause = Cause(Code.RUNTIME_KEY, (segment_change(name, target),)).and_also(cause)
                hook = tables.hooks.get(target)
            del theirs[target]
            entry, expected = mine.pop(key), want[target]
            unlike = None
            if isinstance(entry, TensorEntry) and expected is not None:
                unlike = shape_or_dtype(entry, expected.dtype, expected.shape, (key,), (target,))
            entries.append(
                under_another_name(unlike or Entry("renamed", (key,), (target,)), cause, hook)
            )
        if form == RUNTIME:
            entries += _computed_from(
                tables, {name: key for key, name in names.items()}, mine, theirs
            )
    return entries


def _computed_from(
    tables: NameTables, keys: dict[str, str], mine: Objects, theirs: dict[str, None]
) -> list[Entry]:
    """Pair serialized keys with the runtime tensors of the file that saving computes them from
    (`keys`: by FQN).
    """
    held = {tables.first[fqn]: key for fqn, key in reversed(keys.items()) if fqn in tables.first}
    links = {
        key: list(ex.refs(source))
        for key in theirs
        if isinstance(source := tables.saved.get(key), Op)
    }
    entries = []
    for rights, fqns in components(links):
        lefts = [held[fqn] for fqn in fqns if held.get(fqn) in mine]
        source = tables.saved[rights[0]]
        if lefts and source is not None:
            cause = Cause(Code.RUNTIME_TENSORS).and_also(_computed(source))
            entries.append(
                Entry("transformed", tuple(lefts), tuple(rights), cause, tables.hooks[rights[0]])
            )
            for key in lefts:
                del mine[key]
            for key in rights:
                del theirs[key]
    return entries


def _call_variants(
    names: Names, section: Section, mine: Objects, theirs: dict[str, None]
) -> list[Entry]:
    """Return entries of an unflattened program's call variants of tensors that both have; removes
    them from both.
    """
    have, first = section.by_key(), aliases(section)
    sources = {s.key: s.source for s in names.serialized}
    cause = Cause(Code.CALL_VARIANT)
    entries = []
    for key in [key for key in mine if "@" in key and key in first and first[key] not in mine]:
        del mine[key]
        entries.append(Entry("alias", (key,), (), cause, None, f"same as {first[key]}"))
    for key in [key for key in theirs if sources.get(key) is not None]:
        base = base_name(key, have)
        if base is not None and base not in mine and sources.get(base) == sources[key]:
            del theirs[key]
            entries.append(Entry("alias", (), (key,), cause, None, f"same as {base}"))
    return entries


def _by_load_hook(
    names: Names, verdict: Verdict, mine: Objects, theirs: dict[str, None]
) -> list[Entry]:
    """Pair keys that a load hook accepts with the keys that the model saves, and remove them from
    both sides.
    """
    tied = _tied(names)
    links: dict[str, list[str]] = {}
    computed: set[str] = set()
    for _, value, source in _loading(names, verdict):
        others = other_keys(value, source)
        taken = [] if source is None else list(ex.refs(source))
        for key in ex.refs(value):
            lefts = [name for name in (taken if others is None else [others[key]]) if name in mine]
            for name in (name for name in tied.get(key, ()) if lefts and name in theirs):
                links.setdefault(name, []).extend(lefts)
                computed.update([name] if others is None else ())
    entries = []
    for keys, lefts in components(links):
        is_whole = len(keys) == len(lefts) == 1 and computed.isdisjoint(keys)
        entries.append(
            Entry(
                "renamed" if is_whole else "transformed",
                tuple(lefts),
                tuple(keys),
                Cause(Code.LOAD_HOOK),
            )
        )
        for key in lefts:
            del mine[key]
        for key in keys:
            del theirs[key]
    return entries


def _only_in_file(
    keys: Iterable[str], unsaved: Collection[str], verdict: Verdict | None, lists_all: bool
) -> list[Entry]:
    """Return entries of keys that the model does not write: unexpected, unless its load hooks
    accept them.

    If the verdict `lists_all` unexpected keys, the others are ignored also if the load fails.
    """
    unexpected = set(keys if verdict is None else verdict.unexpected)
    # checkpoint key -> the runtime tensors that loading makes from it
    readers: dict[str, list[str]] = {}
    for fqn, source in () if verdict is None else verdict.reads.items():
        for key in dict.fromkeys(() if source is None else ex.refs(source)):
            readers.setdefault(key, []).append(fqn)
    cause = Cause(Code.UNEXPECTED)
    entries = []
    for key in keys:
        if key in readers:
            target = f"goes to {', '.join(readers[key])}"
            entries.append(Entry("renamed", (key,), (), Cause(Code.LOAD_HOOK), None, target))
        elif key not in unexpected and lists_all:  # not a difference: others stop the load
            entries.append(only_left(key, Cause(Code.LOAD_HOOK_DROPS)))
        elif key not in unexpected and verdict is not None and verdict.ok:
            entries.append(only_left(key, cause.and_also(Cause(Code.LOAD_HOOK_DROPS))))
        elif is_flat(key):
            entries.append(only_left(key, Cause(Code.FLAT)))
        else:
            entries.append(
                only_left(
                    key, cause.and_also(Cause(Code.NON_PERSISTENT)) if key in unsaved else cause
                )
            )
    return entries


def loads(entries: Iterable[Entry]) -> bool:
    """Return True if every key is there with its shape, and no other: what is known without the
    model's code.
    """
    return all(
        entry.status in ("same", "extra_state", "dtype") and entry.left == entry.right
        for entry in entries
    )
