"""Join the job of torchrun that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

from ckpttool.core.errors import CkptError
from ckpttool.distributed.job import Job

PATIENCE = 120.0  # seconds until all ranks have imported torch and joined


def join(command: Sequence[str]) -> Job:
    """Return this rank of the job, once all ranks are there. Raises `CkptError` if some are missing."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        whole, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives ranks that it restarts
        store = PrefixStore(f"ckpttool/{attempt}/{size}", whole)
        come = store.add("come", 1)
        until = time.monotonic() + PATIENCE
        while come < size and time.monotonic() < until:
            time.sleep(0.05)
            come = store.add("come", 0)
    except (RuntimeError, ValueError) as error:
        raise CkptError(f"the ranks do not find each other: {str(error).partition(chr(10))[0]}", hint=_ALONE) from error
    if come != size:
        raise CkptError(f"{come} processes take part in a job of {size} ranks", hint=_ALONE)
    return Job(rank, size, store, tuple(command))


_ALONE = "to run a command alone inside of a job of torchrun: env -u TORCHELASTIC_RUN_ID ckpttool …"
