"""Wrappers (DDP, FSDP, torch.compile, ...) and adapters (LoRA, ...): recognize what they add to
names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint, Section, once_per_section
from ckpttool.core.errors import CkptError, Refused, same_problem
from ckpttool.core.expression import Op, Special
from ckpttool.core.text import dotted, may_mention
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class Wrapper:
    """`segment` is the child's name inside the wrapper, `classes` the wrapper's classes as
    ``module.qualname``.

    `telling`: the segment alone shows the wrapper; other segments need the evidence of all names.
    `hides`: the wrapper's hooks remove the segment from the keys of ``state_dict()``.
    """

    segment: str
    classes: tuple[str, ...]
    title: str
    telling: bool = True
    hides: bool = False


TABLE = (
    Wrapper(
        "module",
        ("torch.nn.parallel.distributed.DistributedDataParallel",),
        "DistributedDataParallel",
    ),
    Wrapper("module", ("torch.nn.parallel.data_parallel.DataParallel",), "DataParallel"),
    # also has a buffer `n_averaged`
    Wrapper("module", ("torch.optim.swa_utils.AveragedModel",), "AveragedModel"),
    Wrapper("_orig_mod", ("torch._dynamo.eval_frame.OptimizedModule",), "torch.compile"),
    Wrapper(
        "_checkpoint_wrapped_module",
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",),
        "activation checkpoint",
        hides=True,
    ),
    Wrapper(
        "_fsdp_wrapped_module",
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",),
        "FSDP1",
        hides=True,
    ),
    Wrapper(
        "_fpw_module",
        (
            "torch.distributed.fsdp.flatten_params_wrapper.FlattenParamsWrapper",
            "fairscale.nn.misc.flatten_params_wrapper.FlattenParamsWrapper",
        ),
        "FlattenParamsWrapper",
        hides=True,
    ),
    Wrapper("base_model", ("peft.peft_model.PeftModel",), "PEFT", telling=False),
    Wrapper("model", ("peft.tuners.tuners_utils.BaseTuner",), "PEFT", telling=False),
    Wrapper(
        "base_layer", ("peft.tuners.tuners_utils.BaseTunerLayer",), "a PEFT adapter", telling=False
    ),
    Wrapper(
        "original_module",
        ("peft.utils.other.AuxiliaryTrainingWrapper",),
        "PEFT's modules_to_save",
        telling=False,
    ),
)

BY_CLASS: dict[str, Wrapper] = {}
for _row in TABLE:
    BY_CLASS.update(dict.fromkeys(_row.classes, _row))
SEGMENTS = frozenset(row.segment for row in TABLE if row.telling)
_HIDDEN = frozenset(row.segment for row in TABLE if row.hides)
# also a usual name for a user's own module: believed at the root only
_AMBIGUOUS = frozenset({"module"})
COUNTER = "n_averaged"  # AveragedModel's buffer next to the module it wraps
PEFT_ROOT = ("base_model", "model")  # PeftModel holds a tuner, the tuner holds the user's model
# The start of PEFT's names for modules next to a `base_layer`; each tuner has its own. Those that
# could be a user's own names are written out.
ADAPTERS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "oft_",
    "boft_",
    "vera_",
    "vblora_",
    "randlora_",
    "hra_",
    "delora_",
    "adamss_",
    "beft_",
    "c3a_",
    "deft_P",
    "deft_R",
    "fourierft_",
    "frod_",
    "glora_",
    "gralora_",
    "hira_",
    "lily_A",
    "lily_B",
    "lily_router",
    "ln_tuning_",
    "miss_block",
    "osf_svd_params",
    "peanut_A",
    "peanut_B",
    "peanut_encoders",
    "peanut_decoders",
    "poly_lora_",
    "poly_router",
    "psoft_",
    "pvera_",
    "road_theta",
    "road_alpha",
    "shira_",
    "supertuning_",
    "tinylora_",
    "trainable_tokens_",
    "unilora_",
    "waveft_",
)
# some key of a wrapped model has one of them
_MARKS = (*SEGMENTS, PEFT_ROOT[0], "base_layer", "original_module")

# FORM's word -> the prefix of every key that state_dict() writes. FSDP2 adds no segment; the hooks
# of activation checkpoint wrappers and of FSDP1 remove theirs when saving, and add it when loading.
WORDS: dict[str, str] = {
    "ddp": "module",
    "dp": "module",
    "compile": "_orig_mod",
    "ac": "",
    "fsdp": "",
    "fsdp1": "",
    "fsdp2": "",
    "fully_shard": "",
    "fpw": "_fpw_module",
    "averaged": "module",
    "lightning": "model",
    "peft": ".".join(PEFT_ROOT),
}
_WORD_OF = {
    "module": "ddp",
    "_orig_mod": "compile",
    "_checkpoint_wrapped_module": "ac",
    "_fsdp_wrapped_module": "fsdp",
    "_fpw_module": "fpw",
}


# Paths of wrappers


def strip(fqn: str, wrapper_paths: Collection[str]) -> str:
    """Return the canonical name: `fqn` without wrapper segments.

    `wrapper_paths` are dotted paths whose last segment is a wrapper's (``blocks.0._orig_mod``).
    """
    if not wrapper_paths:
        return fqn
    kept, path = [], ""
    for segment in fqn.split("."):
        path = f"{path}.{segment}" if path else segment
        if path not in wrapper_paths:
            kept.append(segment)
    return ".".join(kept)


def stripped(keys: Iterable[str], paths: Collection[str]) -> dict[str, str]:
    """Return the canonical name of each key; a key of wrappers' segments only stays."""
    return {key: strip(key, paths) or key for key in keys}


def stripped_paths(names: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the wrapper paths in FQNs, given with their canonical names; also as they are in the
    keys of ``state_dict()``, from which some wrappers remove their segment.
    """
    paths: set[str] = set()
    for fqn, canonical in names:
        if fqn == canonical:
            continue
        rest = canonical.split(".")
        parts = fqn.split(".")
        # from the tensor up: a wrapper is outside of what it wraps
        for depth in range(len(parts), 0, -1):
            if rest and rest[-1] == parts[depth - 1]:
                rest.pop()
            else:
                paths.add(".".join(parts[:depth]))
    hidden = {path for path in paths if _last(path) in _HIDDEN}
    in_keys = {strip(path, hidden) for path in paths - hidden}
    return frozenset(paths | in_keys)


def _last(path: str) -> str:
    """Return the last segment of a path."""
    return path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Wrappers that the keys of a file show: around the whole model, and around single modules.

    `words` are the FORM's words of the former, the outermost first; `root` and `inside` are the
    paths of both.
    """

    words: tuple[str, ...]
    root: tuple[str, ...]
    inside: frozenset[str]

    @property
    def paths(self) -> frozenset[str]:
        """All paths, for `strip`."""
        return self.inside.union(self.root)

    def without_peft(self) -> Evidence:
        """Return the evidence of the other wrappers."""
        words = tuple(word for word in self.words if word != "peft")
        root = tuple(path for path in self.root if not _is_of_peft(path))
        inside = frozenset(path for path in self.inside if not _is_of_peft(path))
        return Evidence(words, root, inside)

    @property
    def form(self) -> str | None:
        """``compile(ddp)``; ``wrapped`` for wrappers around single modules; None without
        wrappers.
        """
        words = self.words
        if not SEGMENTS.isdisjoint(map(_last, self.inside)):
            words = (*words, "wrapped")
        return str(Chain(words)) if words else None


def _is_of_peft(path: str) -> bool:
    segments = path.split(".")
    if tuple(segments[-2:]) == PEFT_ROOT:
        return True
    return segments[-1] in (PEFT_ROOT[0], "base_layer", "original_module")


def infer(keys: Iterable[str], *, lightning: bool = False) -> Evidence:
    """Return the wrappers that the keys alone show.

    `lightning`: the keys are from a LightningModule. An attribute that all of them share is then
    the wrapper ``lightning``; otherwise it is the user's own module.
    """
    keys = list(keys)
    if not lightning and not may_mention(keys, _MARKS):
        return Evidence((), (), frozenset())
    children = _children(keys)
    words: list[str] = []
    root: list[str] = []
    while True:  # one wrapper around everything below `path` after the other
        path = root[-1] if root else ""
        below = children.get(path, set())
        segment = next(iter(below)) if len(below) == 1 else ""
        inner = dotted(path, segment)
        if below == {COUNTER, "module"}:
            words.append("averaged")
            root.append(dotted(path, "module"))
        elif segment in _WORD_OF:
            words.append(_WORD_OF[segment])
            root.append(inner)
        elif segment == PEFT_ROOT[0] and children.get(inner) == {PEFT_ROOT[1]}:
            words.append("peft")
            root += [inner, dotted(inner, PEFT_ROOT[1])]
        elif lightning and segment and not path and inner in children:
            words.append("lightning")
            root.append(inner)
        else:
            break
    inside: set[str] = set()
    for path, below in children.items():
        segment = _wrapper_among(below, "peft" in words)
        if segment:
            inside.add(dotted(path, segment))
    return Evidence(tuple(words), tuple(root), frozenset(inside.difference(root)))


def _wrapper_among(children: Collection[str], in_peft: bool) -> str:
    """Return the child of a module that shows the module to be a wrapper around it; empty if none
    does.
    """
    if "base_layer" in children and (in_peft or _has_adapter(children)):
        return "base_layer"
    if len(children) == 1:
        (segment,) = children
        return segment if segment in SEGMENTS - _AMBIGUOUS else ""
    if "original_module" in children and "modules_to_save" in children:
        return "original_module"
    return ""


def _has_adapter(segments: Iterable[str]) -> bool:
    return any(segment.startswith(ADAPTERS) for segment in segments)


def _children(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return module path -> the segments directly below it."""
    children: dict[str, set[str]] = {}
    for key in keys:
        path, dot, segment = key.rpartition(".")
        while path not in children and dot:  # all parents of a known path are known
            children[path] = {segment}
            path, dot, segment = path.rpartition(".")
        children.setdefault(path, set()).add(segment)
    return children


def recognize(keys: Iterable[str]) -> frozenset[str]:
    """Return the wrapper paths that the keys show, for `strip`."""
    return infer(keys).paths


def evidence_in(section: Section, *, lightning: bool = False) -> Evidence:
    """Return the wrappers that the keys of the section alone show, as `infer` does."""
    return infer(section.keys, lightning=True) if lightning else _evidence_in(section)


@once_per_section
def _evidence_in(section: Section) -> Evidence:
    return infer(section.keys)


def segments(paths: Iterable[str]) -> list[str]:
    """Return the wrapper segments at these paths, each once, the outermost first."""
    ordered = sorted(paths, key=lambda path: (path.count("."), path))
    return list(dict.fromkeys(path.rpartition(".")[2] for path in ordered))


def canonical_keys(keys: Iterable[str], *, lightning: bool = False) -> dict[str, str]:
    """Return key -> canonical name, by the evidence of the keys alone."""
    keys = list(keys)
    return _canonical(keys, infer(keys, lightning=lightning))


@once_per_section
def canonical_in(section: Section) -> Mapping[str, str]:
    """Return key -> canonical name, by the evidence of the section's keys alone."""
    return _canonical(section.keys, _evidence_in(section))


def _canonical(keys: Sequence[str], evidence: Evidence) -> dict[str, str]:
    paths = evidence.paths
    if not paths:
        return dict(zip(keys, keys))
    return stripped(keys, paths)


def is_lightning(checkpoint: Checkpoint) -> bool:
    """Return whether a Lightning Trainer wrote the file, or the file that a section was picked
    from.
    """
    if any(section.in_lightning for section in checkpoint.sections):
        return True
    has_mark = "pytorch-lightning_version" in checkpoint.others
    return has_mark and any(section.path == "state_dict" for section in checkpoint.sections)


def counters(keys: Collection[str]) -> list[str]:
    """Return the keys that are the counter of an AveragedModel."""
    candidates = [key for key in keys if key.rpartition(".")[2] == COUNTER]
    children = _children(keys) if candidates else {}
    return [key for key in candidates if "module" in children[key.rpartition(".")[0]]]


# Forms given by the user


@dataclass(frozen=True, slots=True)
class Chain:
    """A parsed FORM such as ``ddp(compile)``: the words from the outside in."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "(".join(self.words) + ")" * (len(self.words) - 1)

    @property
    def prefix(self) -> str:
        """The text before every canonical name, with its last dot; may be empty."""
        return "".join(WORDS[word] + "." for word in self.words if WORDS[word])

    @property
    def counter(self) -> str | None:
        """The key of AveragedModel's counter, or None if the chain has none."""
        if "averaged" not in self.words:
            return None
        return Chain(self.words[: self.words.index("averaged")]).prefix + COUNTER


def parse(form: str) -> Chain:
    """``ddp(compile)`` -> the chain. Raises `CkptError` for words that name no wrapper."""
    words = []
    rest: str | None = form.replace(" ", "")
    while rest is not None:
        match = re.fullmatch(r"([a-z_0-9]+)(?:\((.*)\))?", rest)
        if match is None or match[1] not in WORDS:
            raise CkptError(
                f"no such form: {form}",
                hint=f"serialized, runtime, exported, or a chain of {', '.join(WORDS)}, as in"
                " 'ddp(compile)'",
            )
        words.append(match[1])
        rest = match[2]
    return Chain(tuple(words))


def declared(form: Chain, keys: Collection[str]) -> Evidence:
    """Return the evidence if the user names the wrappers around the model. Raises `Refused` if keys
    contradict.
    """
    prefix, counter = form.prefix, form.counter
    odd = [key for key in keys if not key.startswith(prefix) and key != counter]
    if odd:
        raise Refused(
            f"{len(odd)} of {len(keys)} keys do not begin with {prefix}",
            hint="leave --from out: wrappers are recognized; `ckpttool inspect` shows which",
            problems=same_problem("not inside of it", odd),
        )
    root: list[str] = []
    for segment in prefix.split(".")[:-1]:
        root.append(dotted(root[-1] if root else "", segment))
    return Evidence(form.words, tuple(root), infer(keys).inside.difference(root))


def rewrap(
    canonical: Mapping[str, str], wanted: Chain, counted: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return key -> its name inside the chain, for keys with their canonical names; and the keys
    that have none there.

    `counted` are the keys of AveragedModels' counters. Raises `Refused` for ``peft`` if no adapters
    show which layers are adapted.
    """
    prefix, counter = wanted.prefix, wanted.counter
    inner = _adapted(canonical.values()) if "peft" in wanted.words else {}
    names = {}
    for key, name in canonical.items():
        if key not in counted:
            names[key] = prefix + inner.get(name, name)
    if not counted or counter is None:
        return names, list(counted)
    first, *others = counted
    names[first] = counter
    return names, others


def _adapted(names: Iterable[str]) -> dict[str, str]:
    """Return canonical name -> name under ``base_layer``, for the tensors of layers with an
    adapter.
    """
    parts = {name: name.split(".") for name in names}
    modules: set[str] = set()
    for path in parts.values():
        for depth, segment in enumerate(path):
            if segment.startswith(ADAPTERS):
                modules.add(".".join(path[:depth]))
    if not modules:
        raise Refused(
            "no layer in the file has an adapter, and PEFT's names depend on which have",
            hint="--like CKPT takes over the names of a checkpoint of the PEFT model",
            problems=same_problem("an adapted layer's, or not?", parts),
        )
    below_base = {}
    for name, path in parts.items():
        module = ".".join(path[:-1])
        if module in modules and not path[-1].startswith(ADAPTERS):
            below_base[name] = f"{module}.base_layer.{path[-1]}"
    return below_base


def new_counter(wanted: Chain, counted: Collection[str]) -> dict[str, Op]:
    """Return AveragedModel's counter if the chain needs one and the checkpoint has none: an average
    of one model.
    """
    if wanted.counter is None or counted:
        return {}
    int64 = ("dtype", Special("dtype", "int64"))
    return {wanted.counter: Op("aten.full.default", ((), 1), (int64,))}
