"""Adapters (LoRA, IA3, ...): additions to the layers of a model, perhaps without the model.

PEFT writes ``base_model.model.PATH.lora_A.weight`` to an adapter's own file, and
``PATH.lora_A.NAME.weight`` next to ``PATH.base_layer.weight`` to a complete state dict; diffusers
``PATH.lora.down.weight``; kohya's scripts ``PATH.lora_down.weight``, with underscores in the path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from ckpttool.core.checkpoint import Kind, Section, once_per_section
from ckpttool.core.strides import Shape
from ckpttool.core.text import may_mention, plural, shape_text
from ckpttool.core.values import dataclass
from ckpttool.naming.wrappers import ADAPTERS, PEFT_ROOT, canonical_keys

Shapes = Mapping[str, Shape]
# PEFT's name of each method, by the first word of the segment that it adds
_METHODS = {
    "lora": "LoRA",
    "ia3": "IA3",
    "hada": "LoHa",
    "lokr": "LoKr",
    "oft": "OFT",
    "boft": "BOFT",
    "vera": "VeRA",
    "vblora": "VB-LoRA",
    "randlora": "RandLora",
    "hra": "HRA",
    "delora": "DeLoRA",
    "adamss": "AdaMSS",
    "beft": "BEFT",
    "c3a": "C3A",
    "deft": "DEFT",
    "fourierft": "FourierFT",
    "frod": "FRoD",
    "glora": "GLoRA",
    "gralora": "GraLoRA",
    "hira": "HiRA",
    "lily": "Lily",
    "ln": "LayerNorm tuning",
    "miss": "MiSS",
    "osf": "OSF",
    "peanut": "PEANuT",
    "poly": "Poly",
    "psoft": "PSOFT",
    "pvera": "PVeRA",
    "road": "RoAd",
    "shira": "SHiRA",
    "supertuning": "SuperTuning",
    "tinylora": "TinyLoRA",
    "trainable": "trainable tokens",
    "unilora": "UniLoRA",
    "waveft": "WaveFT",
}
_SPELLED_OUT = ("HRA",)  # "an HRA adapter"
_PAIRS = (["lora", "down"], ["lora", "up"])  # two segments, as in ``to_q.lora.down.weight``
# next to a low-rank pair, directly in the module's path
_NEXT_TO_PAIR = frozenset({"alpha", "dora_scale"})
_KOHYA = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_")


NAME = "adapter"
CONFIG = "adapter_config.json"  # PEFT's, next to the weights
STEM = "adapter_model"  # the start of the name that PEFT gives to the weights


class Naming(NamedTuple):
    """A convention for an adapter's keys. `loader` is the code that reads such a file.

    `starts` are the beginnings of keys (any if empty), `parts` are in every key of a low-rank
    pair. `by_peft`: PEFT reads it.
    """

    title: str
    loader: str
    starts: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    by_peft: bool = False

    def has_part(self, key: str) -> bool:
        return any(part in key for part in self.parts)


_PEFT_LOADER = "PeftModel.from_pretrained(BASE, FOLDER)"
_DIFFUSERS_LOADER = "load_lora_weights(FILE) of a pipeline of diffusers"
_COMPONENTS = (
    *("unet.", "transformer.", "transformer_2.", "prior."),
    *("text_encoder.", "text_encoder_2.", "text_encoder_3."),
)
PEFT = Naming("PEFT's", _PEFT_LOADER, (f"{PEFT_ROOT[0]}.",), by_peft=True)
# the first that fits
NAMINGS = (
    PEFT,
    Naming("kohya's", _DIFFUSERS_LOADER, _KOHYA, (".lora_down.", ".lora_up.")),
    Naming("kohya's", _DIFFUSERS_LOADER, _KOHYA),
    Naming("diffusers'", _DIFFUSERS_LOADER, _COMPONENTS),
    Naming("diffusers'", "load_attn_procs(FILE) of a model of diffusers", (), ("lora.",)),
    Naming("loralib's", "load_state_dict(strict=False) of the adapted model", (), ("lora_",)),
    Naming("PEFT's", _PEFT_LOADER, by_peft=True),  # without its root
)


def naming_of(keys: Collection[str]) -> Naming:
    """Return the convention that all keys of the adapter follow."""
    for naming in NAMINGS:
        if naming.starts and not all(key.startswith(naming.starts) for key in keys):
            continue
        if naming.parts and not all(naming.has_part(key) for key in keys):
            continue
        return naming
    return NAMINGS[-1]


def recognize(section: Section) -> Kind | None:
    adapter = adapter_in(section)
    if adapter is None:
        return None
    count = plural(len(adapter.modules), "module")
    if not adapter.alone:
        text = f"is a model with {adapter.title} next to {count}"
        if adapter.by_peft:
            text += ": get_peft_model(MODEL, config) has such a state dict"
        return Kind(NAME, section.path, text, adapter)
    return _alone(section, adapter, f"{adapter.title} for {count}")


def by_config(section: Section, peft_type: str) -> Kind:
    """Return the kind of a section that PEFT's configuration calls an adapter, though its keys do
    not show it: a prompt, or a method that adds no modules.
    """
    method = peft_type.lower().replace("_", " ")
    adapter = Adapter((method,), {}, tuple(section.keys))
    return _alone(section, adapter, adapter.title)


def _alone(section: Section, adapter: Adapter, title: str) -> Kind:
    naming = adapter.naming
    text = f"is {title}, without its base model, in {naming.title} naming: {naming.loader} loads it"
    if not naming.by_peft:
        text += ", PEFT does not"
    return Kind(NAME, section.path, text, adapter)


@dataclass(frozen=True, slots=True)
class Adapter:
    """`kinds` as ``LoRA``; `modules`: path of an adapted module -> the adapter's keys there. `rest`
    are other keys: of the base, and of modules that were trained with the adapter.
    """

    kinds: tuple[str, ...]
    modules: Mapping[str, tuple[str, ...]]
    rest: tuple[str, ...]

    @property
    def alone(self) -> bool:
        """Whether the weights of the adapted modules are absent."""
        weights: set[str] = set()
        for path in self.modules:
            weights |= {f"{path}.weight", f"{path}.base_layer.weight"}
        return weights.isdisjoint(map(self.inside, self.rest))

    @property
    def by_peft(self) -> bool:
        """Whether PEFT saved it, next to the weights of the model."""
        root = ".".join(PEFT_ROOT)
        return not self.alone and any(key.startswith(f"{root}.") for key in self.rest)

    @property
    def naming(self) -> Naming:
        """The convention that the keys of the adapter follow."""
        return naming_of(list(chain.from_iterable(self.modules.values())))

    def inside(self, key: str) -> str:
        """Return the key as the model itself has it, without PEFT's root."""
        return _without_root(key.split("."))

    @property
    def title(self) -> str:
        """``a LoRA adapter``."""
        kinds = " and ".join(self.kinds)
        article = "an" if kinds.startswith((*"aeioAEIO", *_SPELLED_OUT)) else "a"
        return f"{article} {kinds} adapter"


def _has_no_other(mark: str) -> bool:
    others = [other for other in ADAPTERS if other != mark]
    return not any(other in mark for other in others)


# each key of an adapter has one of them
_MARKS = ("lora.", *filter(_has_no_other, ADAPTERS))


def adapter_of(keys: Iterable[str]) -> Adapter | None:
    """Return the adapter among the keys, or None."""
    keys = list(keys)
    if not may_mention(keys, _MARKS):  # most files have none
        return None
    modules: dict[str, list[str]] = {}
    kinds: dict[str, None] = {}
    others: list[str] = []
    for key in keys:
        segments = key.split(".")
        depth, kind = _place(segments)
        if kind:
            kinds[kind] = None
            modules.setdefault(_without_root(segments[:depth]), []).append(key)
        else:
            others.append(key)
    if not modules:
        return None
    rest = []
    for key in others:
        *above, name = key.split(".")
        path = _without_root(above)
        if name in _NEXT_TO_PAIR and path in modules:
            modules[path].append(key)
        else:
            rest.append(key)
    by_path = {path: tuple(keys) for path, keys in modules.items()}
    return Adapter(tuple(kinds), by_path, tuple(rest))


@once_per_section
def adapter_in(section: Section) -> Adapter | None:
    """Return the adapter among the keys of the section, or None."""
    return adapter_of(section.keys)


def path_and_rest(name: str, modules: Collection[str]) -> tuple[str, str]:
    """``a.b.base_layer.weight`` -> (``a.b``, ``base_layer.weight``), if ``a.b`` is the longest of
    the modules.
    """
    path, _, rest = name.rpartition(".")
    while path and path not in modules:
        path, _, last = path.rpartition(".")
        rest = f"{last}.{rest}"
    return path, rest


def misfits(adapter: Adapter, shapes: Shapes, base: Shapes) -> list[str]:
    """Return the modules for which LoRA's update has another shape than the weight in `base`.

    `shapes` are the shapes of the adapter's tensors. A weight may be transposed, as in Conv1D of
    transformers.
    """
    weights = {adapter.inside(key): shape for key, shape in base.items()}
    wrong = []
    for path, keys in adapter.modules.items():
        update = _shape_of_update(keys, shapes)
        weight = weights.get(f"{path}.weight", ())
        if update is None or len(weight) != 2:
            continue
        if update not in (weight, weight[::-1]):
            wrong.append(f"{path} {shape_text(update)} instead of {shape_text(weight)}")
    return wrong


def _shape_of_update(keys: Iterable[str], shapes: Shapes) -> tuple[int, int] | None:
    """Return the shape of B x A, of the matrices that LoRA has for a linear module; None without
    them.
    """
    rows = columns = None
    for key in keys:
        segments, shape = key.split("."), shapes.get(key, ())
        if len(shape) != 2:
            continue
        if "lora_A" in segments:
            columns = shape[1]
        elif "lora_B" in segments:
            rows = shape[0]
    return None if rows is None or columns is None else (rows, columns)


def missing_modules(adapter: Adapter, base: Collection[str]) -> tuple[str, ...]:
    """Return the adapted modules that a model with these keys does not have."""
    names: set[str] = set()
    for key, canonical in canonical_keys(base).items():
        names |= {key.rpartition(".")[0], canonical.rpartition(".")[0]}
    # kohya writes a path with underscores, and a prefix
    flat = {name.replace(".", "_") for name in names}
    missing = []
    for path in adapter.modules:
        prefix = next((prefix for prefix in _KOHYA if path.startswith(prefix)), "")
        if path in names or path.removeprefix(prefix) in flat:
            continue
        # diffusers writes the part of the pipeline first
        component, dot, inner = path.partition(".")
        if component + dot not in _COMPONENTS or inner not in names:
            missing.append(path)
    return tuple(missing)


def _place(segments: list[str]) -> tuple[int, str]:
    """Return where the adapter's own segments begin, and its kind; the kind is empty for other
    keys.
    """
    for at, segment in enumerate(segments):
        if at and segments[at : at + 2] in _PAIRS:
            return at, "LoRA"
        prefix = next((prefix for prefix in ADAPTERS if segment.startswith(prefix)), "")
        if prefix and at:
            # PEFT nests the adapters of one module's parameters
            while at > 1 and segments[at - 1] == "base_layer":
                at -= 1
            return at, _METHODS[prefix.partition("_")[0]]
    return 0, ""


def _without_root(path: list[str]) -> str:
    depth = len(PEFT_ROOT)
    is_below_root = tuple(path[:depth]) == PEFT_ROOT
    return ".".join(path[depth:] if is_below_root else path)
