"""The one table of wrappers: which segment each class puts into every name below it. Needs no torch.

A segment is a wrapper's only where a live module of that class says so (`tracing.runtime.wrapper_paths`), or the
evidence of a whole file does; a user's own module may be called ``module`` or ``_orig_mod``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpttool.values import dataclass


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
