"""Wrappers (DDP, FSDP, torch.compile, ...): the segments that they insert, recognised and removed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Op, Special
from ckpttool.core.keys import dotted
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class Wrapper:
    """`segment` is the child's name inside the wrapper, `classes` the wrapper's classes as ``module.qualname``.

    `telling`: who meets the segment in a name may take it for the wrapper's; others need the evidence of all names.
    `hides`: the wrapper's hooks take the segment out of the keys of ``state_dict()``.
    """

    segment: str
    classes: tuple[str, ...]
    title: str
    telling: bool = True
    hides: bool = False


TABLE = (
    Wrapper("module", ("torch.nn.parallel.distributed.DistributedDataParallel",), "DistributedDataParallel"),
    Wrapper("module", ("torch.nn.parallel.data_parallel.DataParallel",), "DataParallel"),
    Wrapper("module", ("torch.optim.swa_utils.AveragedModel",), "AveragedModel"),  # and a buffer `n_averaged` beside it
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
    Wrapper("base_layer", ("peft.tuners.tuners_utils.BaseTunerLayer",), "a PEFT adapter", telling=False),
    Wrapper("original_module", ("peft.utils.other.AuxiliaryTrainingWrapper",), "PEFT's modules_to_save", telling=False),
)

BY_CLASS = {name: row for row in TABLE for name in row.classes}
SEGMENTS = frozenset(row.segment for row in TABLE if row.telling)
HIDDEN = frozenset(row.segment for row in TABLE if row.hides)


def strip(fqn: str, wrapper_paths: Collection[str]) -> str:
    """The canonical name: `fqn` without the segments at which a wrapper stands.

    `wrapper_paths` are dotted paths whose last segment is the one that a wrapper put there (``blocks.0._orig_mod``).
    """
    if not wrapper_paths:
        return fqn
    kept, path = [], ""
    for segment in fqn.split("."):
        path = f"{path}.{segment}" if path else segment
        if path not in wrapper_paths:
            kept.append(segment)
    return ".".join(kept)


def stripped_paths(names: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The paths that `strip` took out of FQNs, given with their canonical names; also as they stand in the keys of
    ``state_dict()``, from which some wrappers take their segment.
    """
    paths: set[str] = set()
    for fqn, canonical in names:
        rest = canonical.split(".")
        parts = fqn.split(".") if fqn != canonical else []
        for depth in range(len(parts), 0, -1):  # from the tensor up: a wrapper is outside of what it wraps
            if rest and rest[-1] == parts[depth - 1]:
                rest.pop()
            else:
                paths.add(".".join(parts[:depth]))
    hidden = {path for path in paths if path.rpartition(".")[2] in HIDDEN}
    return frozenset(paths | {strip(path, hidden) for path in paths - hidden})


AMBIGUOUS = frozenset({"module"})  # users call their own modules so: believed at the root only, for all keys at once
COUNTER = "n_averaged"  # AveragedModel's buffer beside the module it wraps
PEFT_ROOT = ("base_model", "model")  # PeftModel holds a tuner, the tuner the user's model
# PEFT's names for what it puts beside a `base_layer`: a part of them is enough, each tuner has some of its own.
ADAPTERS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "vblora_", "randlora_", "hra_", "delora_")
LIGHTNING_MARK = "pytorch-lightning_version"  # stands in every checkpoint that a Lightning Trainer writes

# FORM's word -> what it puts before every key that state_dict() writes. FSDP2 adds no segment; the hooks of activation
# checkpoint wrappers and of FSDP1 take theirs out when saving, and put it in when loading.
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
_MARKS = (*SEGMENTS, PEFT_ROOT[0], "base_layer", "original_module")  # one of them stands in some key of a wrapped model
_CHAIN = re.compile(r"([a-z_0-9]+)(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class Chain:
    """A parsed FORM such as ``ddp(compile)``: the words from the outside in."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "(".join(self.words) + ")" * (len(self.words) - 1)

    @property
    def prefix(self) -> str:
        """What stands before every canonical name, with its last dot; empty where the chain adds nothing."""
        return _prefix(self.words)

    @property
    def counter(self) -> str | None:
        """The key of AveragedModel's counter, or None where the chain has none."""
        return _prefix(self.words[: self.words.index("averaged")]) + COUNTER if "averaged" in self.words else None


def _prefix(words: Iterable[str]) -> str:
    return "".join(WORDS[word] + "." for word in words if WORDS[word])


def parse(form: str) -> Chain:
    """``ddp(compile)`` -> the chain. Raises `CkptError` for words that name no wrapper."""
    words = []
    rest: str | None = form.replace(" ", "")
    while rest is not None:
        found = _CHAIN.fullmatch(rest)
        if found is None or found[1] not in WORDS:
            raise CkptError(
                f"no such form: {form}",
                hint=f"serialized, runtime, exported, or a chain of {', '.join(WORDS)}, as in 'ddp(compile)'",
            )
        words.append(found[1])
        rest = found[2]
    return Chain(tuple(words))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the keys of one file show of wrappers: those around the whole model, and those around single modules.

    `words` are the FORM's words of the former, the outermost first; `root` and `inside` the dotted paths at which the
    segments of both stand.
    """

    words: tuple[str, ...]
    root: tuple[str, ...]
    inside: frozenset[str]

    @property
    def paths(self) -> frozenset[str]:
        """For `table.strip`."""
        return self.inside.union(self.root)

    @property
    def form(self) -> str | None:
        """``compile(ddp)``; ``wrapped`` stands for wrappers around single modules; None where there are no wrappers."""
        blocks = any(path.rpartition(".")[2] in SEGMENTS for path in self.inside)
        words = [*self.words, "wrapped"] if blocks else list(self.words)
        return "(".join(words) + ")" * (len(words) - 1) if words else None


def infer(keys: Iterable[str], *, lightning: bool = False) -> Evidence:
    """Where wrappers stand, as far as the keys alone show it.

    `lightning`: the keys are those of a LightningModule. An attribute that all of them have in common is then the
    wrapper ``lightning``; anywhere else it is the user's own module.
    """
    keys = list(keys)
    text = "\n".join(keys)
    if not lightning and not any(mark in text for mark in _MARKS):
        return Evidence((), (), frozenset())
    children = _children(keys)
    words: list[str] = []
    root: list[str] = []
    while (step := _step(root[-1] if root else "", children, lightning)) is not None:
        words.append(step[0])
        root += step[1]
    inside = {dotted(path, segment) for path, below in children.items() for segment in _inside(below, "peft" in words)}
    return Evidence(tuple(words), tuple(root), frozenset(inside.difference(root)))


def declared(form: Chain, keys: Collection[str]) -> Evidence:
    """The evidence, where the user says which wrappers are around the whole model. Raises `Refused` on other keys."""
    odd = [key for key in keys if not key.startswith(form.prefix) and key != form.counter]
    if odd:
        raise Refused(
            f"{len(odd)} of {len(keys)} keys do not begin with {form.prefix}",
            hint="leave --from out: wrappers are recognised; `ckpttool inspect` shows which",
            problems=[Problem("not inside of it", key) for key in odd],
        )
    parts = form.prefix.split(".")[:-1]
    root = tuple(".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return Evidence(form.words, root, infer(keys).inside.difference(root))


def _step(path: str, children: Mapping[str, set[str]], lightning: bool) -> tuple[str, list[str]] | None:
    """The wrapper around everything below `path`: its word, and the paths of its segments."""
    below = children.get(path, set())
    if below == {COUNTER, "module"}:
        return "averaged", [dotted(path, "module")]
    if len(below) != 1:
        return None
    (segment,) = below
    inner = dotted(path, segment)
    if segment in _WORD_OF:
        return _WORD_OF[segment], [inner]
    if segment == PEFT_ROOT[0] and children.get(inner) == {PEFT_ROOT[1]}:
        return "peft", [inner, dotted(inner, PEFT_ROOT[1])]
    return ("lightning", [inner]) if lightning and not path and inner in children else None


def _inside(below: Collection[str], peft: bool) -> Iterable[str]:
    """Which of the segments below one path are a wrapper's around a single module."""
    if "base_layer" in below and (peft or any(segment.startswith(ADAPTERS) for segment in below)):
        return ("base_layer",)
    if len(below) == 1:
        return (segment for segment in below if segment in SEGMENTS - AMBIGUOUS)
    return ("original_module",) if {"original_module", "modules_to_save"} <= set(below) else ()


def is_lightning(checkpoint: Checkpoint) -> bool:
    """Return whether a Lightning Trainer wrote the file, or the file that a section was picked from."""
    if any(section.in_lightning for section in checkpoint.sections):
        return True
    return LIGHTNING_MARK in checkpoint.others and any(own.path == "state_dict" for own in checkpoint.sections)


def recognise(keys: Iterable[str]) -> frozenset[str]:
    """The dotted paths at which a wrapper stands: for `table.strip`."""
    return infer(keys).paths


def segments(paths: Iterable[str]) -> list[str]:
    """The wrapper segments at these paths, each once, the outermost first."""
    ordered = sorted(paths, key=lambda path: (path.count("."), path))
    return list(dict.fromkeys(path.rpartition(".")[2] for path in ordered))


def canonical_keys(keys: Iterable[str], *, lightning: bool = False) -> dict[str, str]:
    """Key -> canonical name, by the evidence of the keys alone."""
    keys = list(keys)
    paths = infer(keys, lightning=lightning).paths
    return {key: strip(key, paths) or key for key in keys}


def counters(keys: Collection[str]) -> list[str]:
    """The keys that are the counter of an AveragedModel."""
    found = [key for key in keys if key.rpartition(".")[2] == COUNTER]
    children = _children(keys) if found else {}
    return [key for key in found if "module" in children[key.rpartition(".")[0]]]


def rewrap(
    canonical: Mapping[str, str], wanted: Chain, counted: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Key -> its name inside the chain, for keys with their canonical names; and the keys that have none there.

    `counted` are the keys of AveragedModels' counters. Raises `Refused` for ``peft`` where no adapters say which layers
    they stand beside.
    """
    inner = _adapted(canonical.values()) if "peft" in wanted.words else {}
    names = {key: wanted.prefix + inner.get(name, name) for key, name in canonical.items()}
    if counted and wanted.counter is not None:
        names[counted[0]] = wanted.counter
        counted = counted[1:]
    gone = set(counted)
    return {key: name for key, name in names.items() if key not in gone}, list(counted)


def _adapted(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> the name under ``base_layer``, for the tensors of layers that have an adapter beside them."""
    parts = {name: name.split(".") for name in names}
    places = {
        ".".join(path[:depth]): None
        for path in parts.values()
        for depth, segment in enumerate(path)
        if segment.startswith(ADAPTERS)
    }
    if not places:
        raise Refused(
            "no layer in the file has an adapter, and PEFT's names depend on which have",
            hint="--like CKPT takes over the names of a checkpoint of the PEFT model",
            problems=[Problem("an adapted layer's, or not?", name) for name in parts],
        )
    return {
        name: f"{head}.base_layer.{path[-1]}"
        for name, path in parts.items()
        if (head := ".".join(path[:-1])) in places and not path[-1].startswith(ADAPTERS)
    }


def new_counter(wanted: Chain, counted: Collection[str]) -> dict[str, Op]:
    """AveragedModel's counter where the chain needs one and the checkpoint has none: it is the average of one model."""
    if wanted.counter is None or counted:
        return {}
    return {wanted.counter: Op("aten.full.default", ((), 1), (("dtype", Special("dtype", "int64")),))}


def _children(keys: Iterable[str]) -> dict[str, set[str]]:
    """Module path -> the segments that stand directly below it."""
    children: dict[str, set[str]] = {}
    for key in keys:
        path, dot, segment = key.rpartition(".")
        while path not in children and dot:  # a path that is known has all of its own way recorded
            children[path] = {segment}
            path, dot, segment = path.rpartition(".")
        children.setdefault(path, set()).add(segment)
    return children
