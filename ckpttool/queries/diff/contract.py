"""The names that deployed checkpoints have, against those that a model's code has now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttool.errors import CkptError
from ckpttool.expression import Expression, Ref, substitute
from ckpttool.names import Names, SerializedKey
from ckpttool.naming.inference.values import Inference
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_file import saved_by
from ckpttool.optimizer_state import GROUPS
from ckpttool.queries.diff.keys import compare
from ckpttool.queries.diff.result import EITHER_WAY, NO_VALUES, Diff, Entry, only_left, only_right
from ckpttool.queries.diff.suggestions import suggestions
from ckpttool.words import Info, shell

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
