"""Compare two state dicts key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.containers.rank_shards import (
    are_copies,
    is_of_ranks,
    parts_of,
    rank_pairs,
    ranks_agree,
)
from ckpttool.containers.tensors import is_dense, kind
from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.names import Hook
from ckpttool.core.tables import by_key, present
from ckpttool.core.text import Note, plural, some
from ckpttool.diffing.causes import FIELDS, NAMES, Cause, Code, Sides, wrapper_cause
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.evaluate.compare import Difference, same_objects
from ckpttool.formats.remarks import is_placeholder
from ckpttool.kinds.adapters import Adapter, misfits, missing_modules
from ckpttool.kinds.parts import joined_alike, joined_dimension
from ckpttool.kinds.quantized import BY_TORCH, parts_by_torch, quantized_weights
from ckpttool.naming.match import aliases, unlike
from ckpttool.naming.wrappers import evidence_in

# Say how the values of two tensors differ, after the conversion to the right's dtype.
Values = Callable[[TensorEntry, TensorEntry], Difference | None]


def compare(left: Section, right: Section, values: Values | None = None) -> tuple[Entry, ...]:
    """Compare two state dicts key by key; `values` compares the values too.

    Names that differ by the segments of wrappers only are one tensor, if there is only one way to
    pair them.
    """
    left_entries, right_entries = left.by_key(), right.by_key()
    entries: list[Entry] = []
    only_in_left = []
    for key, entry in left_entries.items():
        if key in right_entries:
            entries.append(compare_pair(entry, right_entries[key], values))
        else:
            only_in_left.append(key)
    only_in_right = [key for key in right_entries if key not in left_entries]
    if not only_in_left and not only_in_right:
        return tuple(entries)
    paths = evidence_in(left).paths, evidence_in(right).paths
    pairs = unlike(paths, only_in_left, only_in_right)
    for key, other in pairs.items():
        cause = wrapper_cause(key, other)
        entries.append(renamed(left_entries[key], right_entries[other], cause, values))
    paired = set(pairs.values())
    only_in_left = [key for key in only_in_left if key not in pairs]
    only_in_right = [key for key in only_in_right if key not in paired]
    entries += leftover(only_left, left, only_in_left, {*right_entries, *pairs})
    entries += leftover(only_right, right, only_in_right, {*left_entries, *paired})
    return tuple(entries)


def compare_pair(left: Any, right: Any, values: Values | None = None) -> Entry:
    """Compare one tensor or object, under one key or two."""
    key = (left.key,)
    keys = key, key if left.key == right.key else (right.key,)
    if values is None and _have_same_outline(left, right):
        return Entry("same", *keys)
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return _compare_tensors(left, right, keys, values)
    if type(left) is type(right):
        return _compare_objects(left, right, values)
    return Entry("shape", *keys, Cause(Code.OBJECT_ONE_SIDE))


def _compare_tensors(
    left: TensorEntry,
    right: TensorEntry,
    keys: tuple[tuple[str, ...], tuple[str, ...]],
    values: Values | None,
) -> Entry:
    if not _are_of_one_kind(left, right):
        detail = f"{kind(left)} instead of {kind(right)}"
        return Entry("shape", *keys, Cause(Code.KIND), None, detail)
    split = _split_on_both(left, right, *keys) or _split(right, left.shape, Code.SPLIT_RIGHT, *keys)
    if split is not None:
        return split
    difference = shape_or_dtype(left, right.dtype, right.shape, *keys)
    if difference is not None and difference.status == "shape":
        return difference
    of_ranks = rank_pairs(left, right)
    if values is not None or of_ranks:
        difference = _compare_values(left, right, of_ranks, values) or difference
    return difference or Entry("same", *keys)


def _have_same_outline(left: Any, right: Any) -> bool:
    """Return whether both are whole dense tensors of one dtype and shape, as almost all are."""
    return (
        isinstance(left, TensorEntry)
        and isinstance(right, TensorEntry)
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.layout == right.layout == "strided"
        and not (is_of_ranks(left) or is_of_ranks(right))
    )


def _are_of_one_kind(left: TensorEntry, right: TensorEntry) -> bool:
    if is_dense(left) and is_dense(right):
        return True
    return kind(left) == kind(right) or right.layout == "meta"


def _compare_values(
    left: TensorEntry,
    right: TensorEntry,
    of_ranks: Iterable[tuple[TensorEntry | None, TensorEntry | None]],
    values: Values | None,
) -> Entry | None:
    """Return how the values differ, of the tensors or of what the ranks hold of them; None if they
    do not. Without `values` the shapes and dtypes of all ranks are compared.
    """
    keys = (left.key,), (right.key,)
    dtypes = left.dtype, right.dtype
    code = Code.VALUE
    for part, other in chain([(left, right)], of_ranks):
        if part is None or other is None or part.shape != other.shape:
            return Entry("shape", *keys, Cause(Code.RANK_SHAPE))
        cause = Cause(code)
        if part.dtype != other.dtype:
            if (part.dtype, other.dtype) != dtypes:
                return Entry("shape", *keys, Cause(Code.RANK_SHAPE))
            cause = Cause(Code.DTYPE, dtypes).and_also(Cause(Code.CONVERTED))
        if values is None:
            continue
        if part.dtype != other.dtype and not (_is_plain(part) and _is_plain(other)):
            return Entry("value", *keys, Cause(Code.DTYPE, dtypes).and_also(Cause(Code.UNREAD)))
        differs = values(part, other)
        if differs is not None:
            entry = Entry("value", *keys, cause, None, differs.text, differs.spread or None)
            return replace(entry, change=differs.change)
        code = Code.RANK_VALUE
    return None


def _is_plain(entry: TensorEntry) -> bool:
    return bool(entry.storage) and entry.dtype in PLAIN


def shape_or_dtype(
    left: TensorEntry, dtype: str, shape: tuple[int, ...] | None, *keys: tuple[str, ...]
) -> Entry | None:
    """Return the entry of a tensor that differs in shape or dtype from what is expected; a shape of
    None is any.
    """
    if shape is not None and left.shape != shape:
        split = _split(left, shape, Code.SPLIT_LEFT, *keys)
        if split is not None:
            return split
        code = Code.PLACEHOLDER if is_placeholder(left) else Code.SHAPE
        detail = f"{list(left.shape)} instead of {list(shape)}"
        return Entry("shape", keys[0], keys[1], Cause(code), None, detail)
    if left.dtype != dtype:
        return Entry("dtype", keys[0], keys[1], Cause(Code.DTYPE, (left.dtype, dtype)))
    return None


def _split(
    entry: TensorEntry, whole: tuple[int, ...], code: Code, *keys: tuple[str, ...]
) -> Entry | None:
    """Return the entry of a tensor whose parts on the ranks are a tensor of the `whole` shape
    together; None if they are not.
    """
    if entry.shape == whole or not is_of_ranks(entry):
        return None
    shapes = _shapes_of_parts(entry)
    if joined_dimension(shapes, whole) is None or are_copies(entry):
        return None
    detail = f"{_counted(shapes)}, together {list(whole)}"
    return Entry("shape", keys[0], keys[1], Cause(code, (len(shapes),)), None, detail)


def _split_on_both(left: TensorEntry, right: TensorEntry, *keys: tuple[str, ...]) -> Entry | None:
    """Return the entry of a tensor that other numbers of ranks have in parts; None if it is not
    one.
    """
    if left.shape == right.shape or not is_of_ranks(left) or not is_of_ranks(right):
        return None
    shapes, others = _shapes_of_parts(left), _shapes_of_parts(right)
    whole = joined_alike(shapes, others)
    if whole is None or are_copies(left) or are_copies(right):
        return None
    cause = Cause(Code.SPLIT_BOTH, (len(shapes), len(others)))
    detail = f"{_counted(shapes)} and {_counted(others)}, together {list(whole)}"
    return Entry("shape", keys[0], keys[1], cause, None, detail)


def _shapes_of_parts(entry: TensorEntry) -> list[tuple[int, ...]]:
    return [part.shape for part in parts_of(entry) if part is not None]


def _counted(shapes: list[tuple[int, ...]]) -> str:
    """Return ``2 parts [8, 8]``."""
    others = "" if len(set(shapes)) == 1 else " and others"
    return f"{len(shapes)} parts {list(shapes[0])}{others}"


def _compare_objects(left: ExtraEntry, right: ExtraEntry, values: Values | None) -> Entry:
    """Compare two objects that are not tensors: the tensors inside them, and with `values`
    everything else.
    """
    keys = (left.key,), (right.key,)
    unlike = _compare_inside(left, right, values)
    if unlike is not None:
        return unlike
    if values is None:
        return Entry("extra_state", *keys, Cause(Code.OBJECT_UNREAD))
    if same_objects(left, right):
        return Entry("same", *keys)
    return Entry("value", *keys, Cause(Code.OBJECT_VALUE))


def _compare_inside(left: ExtraEntry, right: ExtraEntry, values: Values | None) -> Entry | None:
    """Return how the tensors inside two objects differ: the first that differs in more than its
    dtype, else the first with another dtype. Loading converts no tensors inside objects.
    """
    keys = (left.key,), (right.key,)
    left_parts = by_key(left.tensors)
    right_parts = by_key(right.tensors)
    other_dtype = None
    for key in {**left_parts, **right_parts}:
        path = f"{left.key}.{key}"
        if key not in left_parts or key not in right_parts:
            side = "left" if key in left_parts else "right"
            detail = f"{path}: only in {side}"
            return Entry("shape", *keys, Cause(Code.OBJECT_TENSORS), None, detail)
        part, other = left_parts[key], right_parts[key]
        entry = compare_pair(part, other, values if part.dtype == other.dtype else None)
        if entry.cause is None:
            continue
        status, cause = entry.status, Cause(Code.OBJECT_TENSOR).and_also(entry.cause)
        detail = f"{path}: {entry.detail}" if entry.detail else path
        if status != "dtype":
            return Entry(status, *keys, cause, None, detail)
        if values is not None:
            status, cause = "value", cause.and_also(Cause(Code.UNREAD))
        if other_dtype is None:
            other_dtype = Entry(status, *keys, cause, None, detail)
    return other_dtype


def renamed(
    left: Any,
    right: Any,
    cause: Cause | None,
    values: Values | None = None,
    hook: Hook | None = None,
) -> Entry:
    """Compare one tensor under two names."""
    return under_another_name(compare_pair(left, right, values), cause, hook)


def under_another_name(entry: Entry, cause: Cause | None, hook: Hook | None) -> Entry:
    """Return the entry of a tensor under two names; a difference in shape, dtype or values comes
    before the rename.
    """
    if entry.status in ("same", "extra_state") or entry.cause is None:
        return Entry("renamed", entry.left, entry.right, cause, hook)
    return replace(entry, cause=entry.cause.and_also(cause), hook=hook)


def without_dtypes(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries if dtypes do not count: a tensor with another dtype and another name is
    only renamed.
    """
    return tuple(map(_only_renamed, entries))


def _only_renamed(entry: Entry) -> Entry:
    if entry.status != "dtype" or entry.cause is None or not entry.has(*NAMES):
        return entry
    of_name = next(cause for cause in entry.cause.also if cause.code in NAMES)
    others = [replace(entry.cause, also=())]
    others += [cause for cause in entry.cause.also if cause is not of_name]
    return replace(entry, status="renamed", cause=of_name.and_also(*others))


def leftover(
    only: Callable[[str], Entry], section: Section, keys: Iterable[str], other_keys: Collection[str]
) -> list[Entry]:
    """Return the entries of keys that only one side has; a second name of a tensor that both have
    (one of the `other_keys`) is an alias.
    """
    first = aliases(section)
    if not first:
        return list(map(only, keys))
    # first name of a tensor -> all its names
    names: dict[str, set[str]] = {}
    for key, name in first.items():
        names.setdefault(name, {name}).add(key)
    entries = []
    for key in keys:
        entry = only(key)
        all_names = names.get(first.get(key, key), ())
        others = [name for name in all_names if name in other_keys]
        if others:
            detail = f"same as {min(others)}"
            entry = Entry("alias", entry.left, entry.right, Cause(Code.SECOND_NAME), None, detail)
        entries.append(entry)
    return entries


# Parameters that torch.nn.utils computes from parts


_PARAMETRIZED = "parametrizations"
# Suffixes of the parts that always exist, and of optional ones; and what computes the parameter
# from them.
_SUFFIXES = (
    (("_g", "_v"), (), "weight norm"),
    (("_orig", "_mask"), (), "pruning"),
    (("_orig", "_u"), ("_v",), "spectral norm"),
)
_ENDS = tuple(needed[0] for needed, _, _ in _SUFFIXES)


def parts(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """Map the keys that are parts of a parameter to its name, and to what computes it from them."""
    parameters = {}
    for key in keys:
        if _PARAMETRIZED not in key and not key.endswith(_ENDS):
            continue
        segments = key.split(".")
        if _PARAMETRIZED in segments[:-2]:
            at = segments.index(_PARAMETRIZED)
            parameter = ".".join((*segments[:at], segments[at + 1]))
            parameters[key] = parameter, "a parametrization"
        for needed, optional, how in _SUFFIXES:
            name = key.removesuffix(needed[0])
            if name == key or not all(name + suffix in keys for suffix in needed):
                continue
            for suffix in (*needed, *optional):
                if name + suffix in keys:
                    parameters[name + suffix] = name, how
    return parameters


def explain_computed(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries; parts and parameters without a counterpart say that one is computed from
    the other.
    """
    unexpected, missing = _only(entries, "unexpected"), _only(entries, "missing")
    codes: dict[str, Cause] = {}  # by the only key of an entry
    for side, other in ((unexpected, missing), (missing, unexpected)):
        for part, (name, how) in parts(side).items():
            if name in other:
                codes[part] = Cause(Code.PART, (how,))
                codes[name] = Cause(Code.COMPUTED_FROM, (how,))
    if not codes:
        return tuple(entries)
    explained = []
    for entry in entries:
        if entry.status in ("unexpected", "missing"):
            key = (entry.left or entry.right)[0]
            entry = replace(entry, cause=codes.get(key, entry.cause))
        explained.append(entry)
    return tuple(explained)


def explain_quantized(
    entries: Sequence[Entry],
    left: Section,
    right: Section | None = None,
    values: Values | None = None,
) -> tuple[Entry, ...]:
    """Return the entries, with a cause for parts of quantized weights that differ: no cast and no
    rename converts these.

    A weight that only one side has quantized has other values there, whatever its dtype is. If
    `values` are compared, say that these were not.
    """
    keys = _keys_of_uneven_modules(entries)
    left_schemes = _schemes(left, keys)
    right_schemes = {} if right is None else _schemes(right, keys)
    if not left_schemes and not right_schemes:
        return tuple(entries)
    explained = []
    for entry in entries:
        schemes = [left_schemes.get(key) for key in entry.left]
        schemes += [right_schemes.get(key) for key in entry.right]
        if entry.status == "missing":  # the weight under the name that it has if not quantized
            schemes += [left_schemes.get(key) for key in entry.right]
        elif entry.status == "unexpected":
            schemes += [right_schemes.get(key) for key in entry.left]
        explained.append(_of_quantized(entry, schemes, reads_values=values is not None))
    return tuple(explained)


def _keys_of_uneven_modules(entries: Sequence[Entry]) -> list[str]:
    """Return all keys of the modules that have a key on one side only."""
    modules: set[str] = set()
    for entry in entries:
        if entry.status in ("missing", "unexpected"):
            modules.update(key.rpartition(".")[0] for key in (*entry.left, *entry.right))
    keys = []
    for entry in entries:
        for key in (*entry.left, *entry.right):
            if key.rpartition(".")[0] in modules:
                keys.append(key)
    return keys


def _of_quantized(entry: Entry, schemes: Sequence[str | None], *, reads_values: bool) -> Entry:
    """Return the entry, with its cause if a key is quantized; `schemes` has the scheme of each."""
    titles = present(schemes)
    if not titles or entry.cause is None or entry.has(Code.SCALED, Code.SCALED_VALUE):
        return entry
    cause = Cause(Code.QUANTIZED, (titles[0],))
    if entry.status == "value" and len(set(schemes)) > 1:
        cause = cause.and_also(Cause(Code.UNREAD))  # these numbers are not values
        return Entry("value", entry.left, entry.right, cause)
    if entry.status not in ("dtype", "shape", "missing", "unexpected"):
        return entry
    cause = cause.and_also(entry.cause)
    if entry.status != "dtype" or None not in schemes:
        return replace(entry, cause=cause)
    if reads_values:
        cause = cause.and_also(Cause(Code.UNREAD))
    return replace(entry, status="value", cause=cause)


def _schemes(section: Section, keys: Iterable[str]) -> dict[str, str]:
    """Map each key of a quantized weight to the title of its scheme. `keys` may be parts of weights
    that torch packs, which only their module shows.
    """
    schemes: dict[str, str] = {}
    for weight in quantized_weights(section):
        for key in (*weight.keys, weight.plain):
            schemes.setdefault(key, weight.scheme)
    for key in parts_by_torch(section, keys):
        schemes.setdefault(key, BY_TORCH)
    return schemes


def with_copies_of_ranks(entries: Iterable[Entry], section: Section) -> tuple[Entry, ...]:
    """Return the entries of a section that is loaded; a tensor of which the ranks hold different
    copies is not the same. Reads the copies.
    """
    differing: set[tuple[str, ...]] = set()
    for tensor in section.tensors:
        if is_of_ranks(tensor) and not ranks_agree(tensor):
            differing.add((tensor.key,))
    if not differing:
        return tuple(entries)
    checked = []
    for entry in entries:
        if entry.status == "same" and entry.left in differing:
            entry = Entry("value", entry.left, entry.right, Cause(Code.RANK_VALUE))
        checked.append(entry)
    return tuple(checked)


def unpairable(entries: Sequence[Entry]) -> tuple[set[str], set[str]]:
    """Return the keys of each side that cannot be renamed keys of the other: parts, if the other
    side has none.
    """
    unexpected, missing = _only(entries, "unexpected"), _only(entries, "missing")
    computed: set[str] = set()
    for key, entry in chain(unexpected.items(), missing.items()):
        if entry.has(Code.PART, Code.COMPUTED_FROM):
            computed.add(key)
    left_parts, right_parts = set(parts(unexpected)), set(parts(missing))
    if left_parts and right_parts:
        return computed, computed
    return computed | left_parts, computed | right_parts


def _only(entries: Iterable[Entry], status: str) -> dict[str, Entry]:
    by_key = {}
    for entry in entries:
        if entry.status == status:
            first, *_ = entry.left or entry.right
            by_key[first] = entry
    return by_key


# Notes on the keys of both sides


def hidden_segments(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return notes on keys that differ from a key of the other side by one segment: a hook may hide
    it.

    It is a hint only: nobody knows without the model.
    """
    entries = list(entries)
    missing = [entry.right[0] for entry in entries if entry.status == "missing"]
    unexpected = [entry.left[0] for entry in entries if entry.status == "unexpected"]
    notes = []
    for side, longer, shorter in (
        (FIELDS[0], missing, unexpected),
        (FIELDS[1], unexpected, missing),
    ):
        for segment, count in _missing_segments(longer, shorter).items():
            text = (
                f"{plural(count, 'key')} in {side} without the segment `{{}}` of the other side: a"
                " state_dict hook may hide it (pass --model to know)"
            )
            notes.append(Note.about(text, "hidden-segment", segment))
    return tuple(notes)


def _missing_segments(longer: Sequence[str], shorter: Sequence[str]) -> Counter[str]:
    """Count the segments without which a longer key is one of the shorter ones."""
    keys = set(shorter)
    dots = {key.count(".") + 1 for key in shorter}
    counts: Counter[str] = Counter()
    for key in longer:
        hit = without_segment(key, keys) if key.count(".") in dots else None
        if hit is not None:
            counts[hit[1]] += 1
    return counts


def without_segment(key: str, keys: Container[str]) -> tuple[str, str] | None:
    """Return the one of `keys` that is this key without a segment, and the segment; None if there
    are none or more.
    """
    hits, start = {}, 0
    for segment in key.split("."):
        end = start + len(segment) + 1
        name = key[:start] + key[end:]
        if end > len(key):  # the last segment: the dot before it goes
            name = name[:-1]
        if name in keys:
            hits[name] = segment
        start = end
    return hits.popitem() if len(hits) == 1 else None


def adapter_notes(
    adapters: tuple[Adapter | None, Adapter | None],
    keys: tuple[Collection[str], Collection[str]],
    sides: Sides,
    sections: tuple[Section, Section] | None = None,
) -> tuple[str, ...]:
    """Return notes if only one side has an adapter; `sides` may be fields of `Note.about`. The
    shapes in the adapter and in its base are compared if the `sections` are given.
    """
    if (adapters[0] is None) == (adapters[1] is None):
        return ()
    adapted, base = (1, 0) if adapters[0] is None else (0, 1)
    adapter, other = adapters[adapted], sides[base]
    assert adapter is not None
    lost = missing_modules(adapter, keys[base])
    wrong: list[str] = []
    if sections is not None:
        wrong = misfits(adapter, _plain_shapes(sections[adapted]), _plain_shapes(sections[base]))
    notes = [
        Note.about(_about_adapter(adapter, sides, adapted, len(lost)), "adapter", adapter.title)
    ]
    for modules, problem in ((lost, "not"), (wrong, "of another shape")):
        if modules:
            words = f"{plural(len(modules), 'adapted module')} {problem} in {other}: {{}}"
            notes.append(Note.about(words, "adapter", some(modules)))
    return tuple(notes)


def _about_adapter(adapter: Adapter, sides: Sides, adapted: int, lost: int) -> str:
    """Return the words on the adapter of one side, with a field for its title; the other side does
    not have `lost` of its modules.
    """
    side, other = sides[adapted], sides[1 - adapted]
    total = len(adapter.modules)
    present = str(total - lost) if lost else "all"
    count, touched = plural(total, "module"), f"{present} of them are in {other}"
    if adapter.alone:
        return f"{side} is {{}} for {count}, {touched}; it does not have the weights of the model"
    words = f"{side} has {{}} next to {count}, {touched}"
    if adapted == 0:
        words += "; without it the weights are not the trained ones"
        if adapter.by_peft:
            words += (
                ": load the state dict into get_peft_model(MODEL, config), and save the"
                " state_dict() of what its merge_and_unload() returns"
            )
    return words


def _plain_shapes(section: Section) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that are whole, and not quantized: others may be packed."""
    packed = {weight.weight for weight in quantized_weights(section)}
    shapes = {}
    for entry in section.tensors:
        if entry.key not in packed and not is_of_ranks(entry):
            shapes[entry.key] = entry.shape
    return shapes
