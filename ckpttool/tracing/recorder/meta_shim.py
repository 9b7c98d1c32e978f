"""What code asks about tensors besides their values: answered so that a meta tensor does not give itself away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ckpttool.tracing.recorder.recorder import Recorder


class Questions(TorchFunctionMode):
    """Answers what code asks about tensors besides their values, so that meta tensors do not give themselves away.

    Addresses are 0 on meta, and a hook that finds shared tensors by ``data_ptr()`` would take all for one.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self.recorder.read(args[:1])
        elif func == torch.Tensor.data_ptr and args[0].device.type == "meta":
            tensor = args[0]
            return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
        elif func == _IS_META:
            return False
        return func(*args, **(kwargs or {}))


_READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


@contextlib.contextmanager
def storages_told_apart() -> Iterator[None]:
    """On meta every storage lies at address 0, and code that finds shared ones by it would take all for one."""
    storages: Any = torch.UntypedStorage
    plain = storages.data_ptr  # of a class that it is derived from

    def data_ptr(storage: Any) -> int:
        return storage._cdata if storage.device.type == "meta" else plain(storage)

    storages.data_ptr = data_ptr
    try:
        yield
    finally:
        del storages.data_ptr
