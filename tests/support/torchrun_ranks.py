"""Start the ranks of a job like torchrun, but forked from a process with torch imported, which is
ten times faster.

Run as a program under torchrun, it is the command line, except that the second rank is killed once,
at its first file.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ckpttool.io import fill, pieces

_PRELOADED = [
    "torch.distributed.rendezvous",
    "ckpttool.cli.app",
    "ckpttool.evaluate.torch_eval",
    __name__,
]


@dataclass(frozen=True)
class Rank:
    """Exit status and output of a rank, and how many bytes of tensors it `read` and has `written`
    (None: it died).
    """

    status: int | None
    out: str
    err: str
    read: int | None
    written: int | None

    @property
    def said(self) -> tuple[int | None, str]:
        """Return the status and the complete output."""
        return self.status, self.out + self.err


@dataclass(frozen=True)
class Fault:
    """Kill rank `rank` before it writes its file number `at` (from 0); the others wait for it.

    Without `at` it is not killed, but cannot read from disk.
    """

    rank: int
    at: int | None = None


def run_ranks(
    folder: Path,
    size: int,
    *args: object,
    fault: Fault | None = None,
    all_die: bool = False,
    last: Sequence[str] = (),
) -> list[Rank]:
    """Run the command line on `size` ranks in `folder` and return their results. If one dies the
    others are terminated.

    With `all_die` they are killed instead. `last` is added to the command line of the last rank.
    """
    from torch.distributed import TCPStore

    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    argv = [*map(str, args)]
    ranks: list[Any] = []
    for rank in range(size):
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
        named |= {
            "MASTER_PORT": store.port,
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        environment = {name: str(value) for name, value in named.items()}
        environment |= {
            name: value for name, value in os.environ.items() if name.startswith("AWS_")
        }
        words = [*argv, *last] if rank == size - 1 else argv
        ranks.append(context.Process(target=_rank, args=(folder, environment, words, fault)))
        ranks[-1].start()
    for rank in reversed(ranks):
        rank.join(60)
        if rank.exitcode == -signal.SIGKILL:  # like torchrun
            for other in ranks:
                other.kill() if all_die else other.terminate()
    outputs = [
        {path.name[:-2]: path.read_text() for path in folder.glob(f"*.{rank}")}
        for rank in range(size)
    ]
    for path in folder.glob("*.[0-9]"):
        path.unlink()
    moved = [json.loads(own.get("moved", "[null, null]")) for own in outputs]
    return [
        Rank(process.exitcode, own["out"], own["err"], *counts)
        for process, own, counts in zip(ranks, outputs, moved)
    ]


def _rank(folder: Path, environment: dict[str, str], argv: list[str], fault: Fault | None) -> None:
    from ckpttool.cli.app import main

    os.chdir(folder)
    os.environ.update(environment)
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{name}.{environment['RANK']}", os.O_WRONLY | os.O_CREAT), descriptor)
    if fault is not None and fault.at is None and str(fault.rank) == environment["RANK"]:
        vars(os)["preadv"] = _unreadable
    elif fault is not None and fault.at is not None:
        dies, mark = str(fault.rank) == environment["RANK"], Path(folder, "moved.never").absolute()
        before_each_unit(_Death(fault.at, mark) if dies else partial(_outlive, mark))
    read, written = (
        _counted(pieces.SpanReader, "_fill", 1),
        _counted(vars(fill)["_Blocks"], "_put", 1, 0),
    )
    status = main(argv)
    sys.stdout.flush()
    Path(folder, f"moved.{environment['RANK']}").write_text(json.dumps([sum(read), sum(written)]))
    os._exit(status)


def _unreadable(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _counted(kind: type, name: str, at: int, pause: float = 0.03) -> list[int]:
    """Count the bytes of argument `at` in each later call of the method, and pause so that all
    ranks get a share.
    """
    counts, method = list[int](), getattr(kind, name)

    def called(*args: Any) -> None:
        counts.append(len(args[at]))
        time.sleep(pause)
        method(*args)

    setattr(kind, name, called)
    return counts


@dataclass
class _Death:
    """Kill the process at the call after `left` calls; create the file `mark` first."""

    left: int
    mark: Path | None = None

    def __call__(self) -> None:
        if not self.left:
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def _outlive(mark: Path) -> None:
    """Wait until the other rank dies, so that work is left at that point; give up after a while."""
    end = time.monotonic() + 5
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.1)


def before_each_unit(call: Callable[[], object]) -> None:
    """Call it before this process writes a file of its share."""
    from ckpttool.distributed import files
    from ckpttool.io import write_remote

    for module, name in ((files, "_write"), (write_remote, "write")):
        setattr(module, name, _after(call, getattr(module, name)))


def _after(call: Callable[[], object], work: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **how: Any) -> Any:
        call()
        return work(*args, **how)

    return called


if __name__ == "__main__":
    from ckpttool.cli.app import process

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_each_unit(partial(time.sleep, 0.1) if os.environ["RANK"] == "0" else _Death(0))
    sys.exit(process())
