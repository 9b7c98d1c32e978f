"""Quantized weights: a tensor in low precision, and the entries next to it that its values are
computed with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Kind, Section, TensorEntry, once_per_section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Ref
from ckpttool.core.plan import Output
from ckpttool.core.tables import by_key
from ckpttool.core.text import plural, prefix_of, some
from ckpttool.core.values import dataclass

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_OF_TORCH = "quantized"  # the layout of a tensor that has its own scales
BY_TORCH = "torch.ao.quantization"
# the entries of a module in which torch packs all parameters: ``fc._packed_params._packed_params``
_PACKED = ("_packed_params", "_all_weight_values")
# ``0.weight.quant_state.bitsandbytes__nf4``, next to ``0.weight``
_BITSANDBYTES_4BIT = ".quant_state.bitsandbytes__"
# of quanto: ``0.weight._data``, or packed ``0.weight._data._data``, next to ``0.weight._scale``
_DATA = "._data"
_QUANTO_PARTS = ("._scale", "._shift")


class Scheme(NamedTuple):
    """How a library writes a quantized weight.

    `leaf` is the last segment of the weight's key (any if empty), `dtypes` are the dtypes of the
    weight (any if empty). The other parts are next to it: `suffixes` are added to the leaf,
    `siblings` are complete last segments. `needed` is the sibling without which
    the other names say nothing.
    """

    title: str
    leaf: str
    dtypes: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    needed: str = ""


# One of the other parts is enough: activation scales and zero points are optional everywhere.
SCHEMES = (
    Scheme("FP8", "", FLOAT8, ("_scale", "_scale_inv", "_scale_2")),
    Scheme("FP8", "weight", FLOAT8, (), ("input_scale", "scale_weight", "scale_input")),
    Scheme(
        "scaled integers",
        "weight",
        ("int8", "uint8"),
        ("_scale", "_scale_2", "_zero_point"),
        ("input_scale",),
    ),
    Scheme("EETQ", "weight", ("int8",), ("_scales",)),
    Scheme("HIGGS", "weight", ("int16",), (), ("scales", "tables", "tables2")),
    Scheme("AQLM", "codes", (), (), ("codebooks", "scales"), "codebooks"),
    Scheme("QuIP#", "Qidxs", (), (), ("Wscale", "SU", "SV", "codebook_id"), "SU"),
    Scheme(
        "VPTQ",
        "indices",
        (),
        (),
        (
            "centroids.weight",
            "res_centroids.weight",
            "outlier_indices",
            "outlier_centroids.weight",
            "weight_scale",
            "weight_bias",
            "perm",
        ),
        "centroids.weight",
    ),
    Scheme("bitsandbytes, 8 bit", "weight", ("int8",), (), ("SCB", "weight_format")),
    Scheme("GPTQ", "qweight", (), (), ("g_idx",)),
    Scheme("AWQ", "qweight", (), (), ("qzeros", "scales")),
    Scheme(
        "compressed-tensors",
        "weight_packed",
        (),
        (),
        (
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
            "scale_packed",
            "meta",
        ),
    ),
    Scheme("MLX", "weight", ("uint32",), (), ("scales", "biases")),
    Scheme(
        "HQQ",
        "W_q",
        (),
        (),
        (
            "scale",
            "zero",
            "shape",
            "nbits",
            "group_size",
            "axis",
            "packing",
            "unpack_view_dtype",
            "view_as_float",
            "quant_scale",
            "quant_zero",
            "compute_dtype",
            "offload_meta",
            "encoded_state_dict",
            "stores_quant_config",
            "channel_wise",
            "optimize",
            "round_zero",
        ),
    ),
)
# A weight has one of these dtypes, or one of these leaves.
_DTYPES = frozenset(chain.from_iterable(scheme.dtypes for scheme in SCHEMES))
_NEEDED = {scheme.title: scheme.needed for scheme in SCHEMES if scheme.needed}
_LEAVES = tuple(scheme.leaf for scheme in SCHEMES if not scheme.dtypes)
# leaf of a quantized weight -> leaf of the same weight in a model that is not quantized
_PLAIN = dict.fromkeys(("qweight", "weight_packed", "W_q", "codes", "Qidxs", "indices"), "weight")
_BLOCKS, _SCALES = "_blocks", "_scales"  # of MXFP4: ``down_proj_blocks`` and ``down_proj_scales``


NAME = "quantized"


def recognize(section: Section) -> Kind | None:
    weights = quantized_weights(section)
    by_torch = Counter(entry.dtype for entry in _all_tensors(section) if entry.layout == _OF_TORCH)
    if not weights and not by_torch:
        return None
    by_scheme: dict[str, list[QuantizedWeight]] = {}
    for weight in weights:
        by_scheme.setdefault(weight.scheme, []).append(weight)
    counts = []
    for scheme, group in by_scheme.items():
        counts.append(_described(scheme, group))
    for dtype, count in by_torch.items():
        counts.append(f"by {BY_TORCH}, {plural(count, 'weight')} of {dtype}")
    text = f"is quantized: {'; '.join(counts)}"
    together = tuple(weight.keys for weight in weights)
    return Kind(name=NAME, section=section.path, text=text, facts=tuple(weights), together=together)


def _all_tensors(section: Section) -> Iterator[TensorEntry]:
    """Yield the tensors of a state dict, and those inside of its other entries."""
    yield from section.tensors
    for extra in section.extras:
        yield from extra.tensors


def _described(scheme: str, weights: Sequence[QuantizedWeight]) -> str:
    parts: dict[str, None] = {}
    for weight in weights:
        parts.update(dict.fromkeys(weight.part_names))
    names = some([f"`{part}`" for part in parts])
    return f"{scheme}, {plural(len(weights), 'weight')} with {names}"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The keys of one quantized weight: `weight` holds the numbers, `others` what its values are
    computed with.
    """

    scheme: str
    weight: str
    others: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """All of its keys, the weight first."""
        return (self.weight, *self.others)

    @property
    def plain(self) -> str:
        """The key of the weight in a model that is not quantized."""
        if self.weight.endswith(_DATA):
            return _without_data(self.weight)
        module, dot, leaf = self.weight.rpartition(".")
        return module + dot + _PLAIN.get(leaf, leaf.removesuffix(_BLOCKS))

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the other entries, next to the weight or inside of it."""
        module, dot, _ = self.weight.rpartition(".")
        names: dict[str, None] = {}
        for key in self.others:
            _, _, name = key.rpartition(".")
            for path in (f"{self.weight}.", f"{module}{dot}"):
                if path and key.startswith(path):
                    name = key.removeprefix(path)
                    break
            names[name] = None
        return tuple(names)

    def other_after_rename(self, other: str, new_weight: str) -> str | None:
        """Return the name of one of the `others` if the weight is called `new_weight`; None if
        nobody knows it.
        """
        if other.startswith(f"{self.weight}."):
            return new_weight + other.removeprefix(self.weight)
        if self.weight.endswith(_DATA):
            return _without_data(new_weight) + other.removeprefix(_without_data(self.weight))
        module, dot, leaf = self.weight.rpartition(".")
        new_module, new_dot, new_leaf = new_weight.rpartition(".")
        other_leaf = other.removeprefix(module + dot)
        if leaf == new_leaf:
            new_other = other_leaf
        elif leaf.endswith(_BLOCKS) and new_leaf.endswith(_BLOCKS):
            new_other = new_leaf.removesuffix(_BLOCKS) + _SCALES
        elif other_leaf.startswith(leaf):
            new_other = new_leaf + other_leaf.removeprefix(leaf)
        else:
            return None
        return new_module + new_dot + new_other


def _without_data(key: str) -> str:
    """Return the key of a weight of quanto in a model that is not quantized."""
    return key.removesuffix(_DATA).removesuffix(_DATA)


def parts_by_torch(section: Section, keys: Iterable[str]) -> Iterator[str]:
    """Yield which of the keys, of this section or of another, are parts of weights that torch
    quantized in the section.

    If torch packs the parameters of a module, these are all of its keys: nothing is left under the
    names that the module has if it is not quantized.
    """
    weights: set[str] = set()
    packed: set[str] = set()
    for weight in _keys_by_torch(section):
        module = _module_of(weight)
        if weight.rpartition(".")[0] == module:
            name = prefix_of(module)
            weights.update((weight, f"{name}scale", f"{name}zero_point"))
        else:
            packed.add(module)
    if not weights and not packed:
        return
    for key in keys:
        if key in weights or _module_of(key) in packed:
            yield key


def _keys_by_torch(section: Section) -> Iterator[str]:
    """Yield the keys of tensors that have their own scales, and of objects with such tensors."""
    for entry in section.tensors:
        if entry.layout == _OF_TORCH:
            yield entry.key
    for extra in section.extras:
        if any(tensor.layout == _OF_TORCH for tensor in extra.tensors):
            yield extra.key


def _module_of(key: str) -> str:
    """Return the path of the module that has the parameter, or packs it."""
    path = key.split(".")[:-1]
    for segment in _PACKED:
        if segment in path:
            path = path[: path.index(segment)]
    return ".".join(path)


@once_per_section
def quantized_weights(section: Section) -> Sequence[QuantizedWeight]:
    """Return the quantized weights of a state dict, by the names and dtypes of their parts."""
    # weight -> scheme and other parts; the first scheme that fits is the weight's
    schemes: dict[str, str] = {}
    others: dict[str, dict[str, None]] = {}
    for scheme, weight, part in chain(_parts_by_key(section.keys), _parts_by_scheme(section)):
        schemes.setdefault(weight, scheme)
        others.setdefault(weight, {})[part] = None
    if not schemes:
        return []
    entries = by_key(section.tensors)
    weights = []
    for weight, scheme in schemes.items():
        quantized = QuantizedWeight(scheme, weight, tuple(others[weight]))
        weights.append(_with_granularity(quantized, entries))
    return weights


def _parts_by_key(keys: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield scheme, weight and part where the keys alone tell it."""
    for scheme, parts_by_weight in (
        ("bitsandbytes, 4 bit", _parts_in_4bit(keys)),
        ("quanto", _parts_of_quanto(keys)),
    ):
        for weight, parts in parts_by_weight.items():
            for part in parts:
                yield scheme, weight, part


def _parts_by_scheme(section: Section) -> Iterator[tuple[str, str, str]]:
    """Yield scheme, weight and part where names and dtypes fit one of `SCHEMES`."""
    keys: set[str] = set()
    possible_parts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for entry in section.tensors:
        if entry.dtype not in _DTYPES and not entry.key.endswith(_LEAVES):
            continue
        keys = keys or set(section.keys)
        module, dot, leaf = entry.key.rpartition(".")
        leaf_and_dtype = leaf, entry.dtype
        if leaf_and_dtype not in possible_parts:
            possible_parts[leaf_and_dtype] = list(_possible_parts(leaf, entry.dtype))
        for scheme, name in possible_parts[leaf_and_dtype]:
            part = module + dot + name
            if part in keys and keys.issuperset(_needed(scheme, module + dot)):
                yield scheme, entry.key, part


def _needed(title: str, module: str) -> tuple[str, ...]:
    """Return the key without which the other names of a scheme say nothing; most need none."""
    name = _NEEDED.get(title)
    return () if name is None else (module + name,)


def _parts_in_4bit(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys of weights that bitsandbytes packed into 4 bits, with the keys next to
    each.
    """
    parts: dict[str, list[str]] = {}
    for key in keys:
        if _BITSANDBYTES_4BIT in key:
            parts[key.partition(_BITSANDBYTES_4BIT)[0]] = []
    if not parts:
        return {}
    for key in keys:
        weight, mark, _ = key.partition(_BITSANDBYTES_4BIT)
        if not mark:
            weight = key.rpartition(".")[0]
        if weight in parts:
            parts[weight].append(key)
    return parts


def _parts_of_quanto(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys of weights that quanto quantized, with the keys next to each."""
    weights = [key for key in keys if key.endswith(_DATA)]
    if not weights:
        return {}
    all_keys = set(keys)
    parts = {}
    for weight in weights:
        names = [_without_data(weight) + part for part in _QUANTO_PARTS]
        present = [name for name in names if name in all_keys]
        if present:
            parts[weight] = present
    return parts


def _with_granularity(
    weight: QuantizedWeight, entries: Mapping[str, TensorEntry]
) -> QuantizedWeight:
    """Return the weight; the scheme of FP8 says how many values share a scale."""
    if weight.scheme != "FP8":
        return weight
    for key in weight.others:
        scale = entries.get(key)
        if scale is None or "scale" not in key or ".input_" in f".{key}":
            continue
        is_block = key.endswith("_scale_inv") and len(scale.shape) > 1
        if not is_block and scale.numel == 1:
            return replace(weight, scheme="FP8, a scale for each tensor")
        if not is_block and entries[weight.weight].shape[:1] == (scale.numel,):
            return replace(weight, scheme="FP8, a scale for each channel")
        return replace(weight, scheme="block FP8")
    return weight


def _possible_parts(leaf: str, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield the scheme and the name of each other part that a weight with this name may have."""
    for scheme in SCHEMES:
        if scheme.leaf in ("", leaf) and (not scheme.dtypes or dtype in scheme.dtypes):
            for suffix in scheme.suffixes:
                yield scheme.title, leaf + suffix
            for name in scheme.siblings:
                yield scheme.title, name
    if leaf.endswith(_BLOCKS) and dtype == "uint8":
        yield "MXFP4", leaf.removesuffix(_BLOCKS) + _SCALES


def problems_of_parts(section: Section, outputs: Sequence[Output]) -> list[Problem]:
    """Return what would separate the parts of quantized weights, or change their numbers without
    their scales.

    `outputs` are the outputs of a plan for the section.
    """
    weights = quantized_weights(section)
    if not weights:
        return []
    entries = section.by_key()
    names: dict[str, set[str]] = {}
    computed: dict[str, list[Output]] = {}
    for output in outputs:
        if isinstance(output.source, Ref):
            names.setdefault(output.source.key, set()).add(output.key)
            continue
        for key in ex.refs(output.source):
            computed.setdefault(key, []).append(output)
    problems: list[Problem] = []
    for weight in weights:
        problems += _problems_of_casts(weight, computed)
        problems += _problems_of_scales(weight, computed, entries)
        problems += _problems_of_names(weight, names)
    return problems


def _problems_of_casts(
    weight: QuantizedWeight, computed: Mapping[str, Sequence[Output]]
) -> Iterator[Problem]:
    """Yield the parts that are cast without the others: only all parts together have a value."""
    scaled = []  # outputs that are made of the numbers and their scales
    for output in computed.get(weight.weight, ()):
        if set(weight.others).intersection(ex.refs(output.source)):
            scaled.append(output)
    for key in weight.keys:
        reason = f"it belongs to {weight.weight}"
        if key == weight.weight:
            reason = f"its values need {' and '.join(weight.others)}"
        for output in computed.get(key, ()):
            if output not in scaled and ex.CAST in ex.operators(output.source):
                text = f"cannot be cast: {reason} ({weight.scheme})"
                yield Problem(text, key, "quantized")
                break


def _problems_of_scales(
    weight: QuantizedWeight, computed: Mapping[str, Sequence[Output]], entries: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield the scales that stay as they are while a rule changes the numbers."""
    if weight.weight not in computed:
        return
    for other in weight.others:
        entry = entries[other]
        if other not in computed and isinstance(entry, TensorEntry) and entry.numel > 1:
            text = (
                f"a rule changes {weight.weight}, and not the scales that belong to it"
                f" ({weight.scheme})"
            )
            yield Problem(text, other, "quantized")


def _problems_of_names(weight: QuantizedWeight, names: Mapping[str, set[str]]) -> Iterator[Problem]:
    """Yield the parts whose new names do not follow the new name of the weight."""
    new_names = names.get(weight.weight, set())
    if len(new_names) != 1:
        return
    (new_weight,) = new_names
    for other in weight.others:
        expected = weight.other_after_rename(other, new_weight)
        for name in sorted(names.get(other, ())):
            if name != expected:
                text = (
                    f"would be renamed to {name}, but its weight to {new_weight} ({weight.scheme})"
                )
                yield Problem(text, other, "quantized")
