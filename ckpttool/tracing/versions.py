"""Whether loading asks for the versions of modules (``_metadata``): the same tensors under others are then others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ckpttool.errors import CkptError
from ckpttool.tracing.load_model import LoadedModel
from ckpttool.tracing.loading import Verdict, loaded
from ckpttool.tracing.runtime import copied_state, metadata_of

_MOST = 8  # versions that are tried


def versions_asked_for(
    model: LoadedModel, state: Mapping[str, Any], verdict: Verdict, real: bool
) -> dict[str, Any] | None:
    """Module path -> version in `state`, which the model saved and loads as `verdict` says, where code is that may ask.

    None where it loads the same whatever the versions are, or does not load at all.
    """
    own = metadata_of(state)
    if own is None or not verdict.ok:
        return None
    versions = {path: payload.get("version") for path, payload in own.items() if isinstance(payload, Mapping)}
    for other in _under_other_versions(state, versions):
        instance = model.build(real)
        asking = _with_own_code(instance)
        if not asking:
            return None
        found = {path: version for path, version in versions.items() if path in asking} or versions
        try:
            again = loaded(instance, other, real)
        except CkptError:  # what an old version had is not there
            return found
        if not again.ok:
            return found
        if again.reads != verdict.reads:  # which random numbers bring about too
            return found if loaded(model.build(real), copied_state(state), real).reads == verdict.reads else None
    return None


def _under_other_versions(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[OrderedDict[str, Any]]:
    """The state dict without versions, then under every other one up to the next."""
    made = copied_state(state)
    del made._metadata  # type: ignore[attr-defined]
    yield made
    highest = max((version for version in own.values() if isinstance(version, int)), default=0)
    for version in range(1, min(highest + 2, _MOST)):
        if set(own.values()) != {version}:
            made = copied_state(state)
            made._metadata = OrderedDict((path, {"version": version}) for path in own)  # type: ignore[attr-defined]
            yield made


def _with_own_code(model: nn.Module) -> set[str]:
    """The paths of modules whose loading runs other code than `nn.Module`'s, which asks for no version."""
    return {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if module._load_state_dict_pre_hooks
        or getattr(module._load_from_state_dict, "__func__", None) is not nn.Module._load_from_state_dict
        or (not path and type(module).load_state_dict is not nn.Module.load_state_dict)
    }
