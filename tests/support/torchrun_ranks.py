"""The ranks of a job as torchrun starts them, but forked from a process that has torch: in a second, not in ten.

Run as a program under torchrun, it is the command line, but that the second rank is killed at its second unit, once.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ckpttool.io import pieces, write

_PRELOADED = ["torch.distributed.rendezvous", "ckpttool.cli.app", "ckpttool.evaluate.torch_eval", __name__]


@dataclass(frozen=True)
class Rank:
    """What a rank said, its exit status, and how many bytes of tensors it has `read` and `written` (None: it died)."""

    status: int | None
    out: str
    err: str
    read: int | None
    written: int | None

    @property
    def said(self) -> tuple[int | None, str]:
        """The status, and all that was said."""
        return self.status, self.out + self.err


@dataclass(frozen=True)
class Fault:
    """Rank `rank` dies by SIGKILL when it is to write its unit number `at` (from 0); the others wait for it.

    Without `at` it lives, and no disk of it can be read.
    """

    rank: int
    at: int | None = None


def run_ranks(
    folder: Path,
    size: int,
    *args: object,
    fault: Fault | None = None,
    all_die: bool = False,
    last: Mapping[str, str] | None = None,
) -> list[Rank]:
    """What each of `size` ranks said and did at the command line, run in `folder`. Where one dies the others are ended.

    With `all_die` these die too. `last` is the environment of the last rank beside that of all.
    """
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    argv = [*map(str, args)]
    ranks: list[Any] = []
    for rank in range(size):
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
        named |= {"MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": True}
        environment = {name: str(value) for name, value in named.items()}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        environment |= (last or {}) if rank == size - 1 else {}
        ranks.append(context.Process(target=_rank, args=(folder, environment, argv, fault)))
        ranks[-1].start()
    for rank in reversed(ranks):
        rank.join(60)
        if rank.exitcode == -signal.SIGKILL:  # as torchrun does it
            for other in ranks:
                other.kill() if all_die else other.terminate()
    told = [{path.name[:-2]: path.read_text() for path in folder.glob(f"*.{rank}")} for rank in range(size)]
    for path in folder.glob("*.[0-9]"):
        path.unlink()
    moved = [json.loads(own.get("moved", "[null, null]")) for own in told]
    return [Rank(process.exitcode, own["out"], own["err"], *counts) for process, own, counts in zip(ranks, told, moved)]


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
    read, written = _counted(pieces.SpanReader, "_fill", 1), _counted(vars(write)["_Blocks"], "_put", 1, 0)
    status = main(argv)
    sys.stdout.flush()
    Path(folder, f"moved.{environment['RANK']}").write_text(json.dumps([sum(read), sum(written)]))
    os._exit(status)


def _unreadable(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _counted(kind: type, name: str, at: int, pause: float = 0.03) -> list[int]:
    """Bytes of the argument number `at` of each call of the method from now on, which pauses: all ranks get a share."""
    counts, method = list[int](), getattr(kind, name)

    def called(*args: Any) -> None:
        counts.append(len(args[at]))
        time.sleep(pause)
        method(*args)

    setattr(kind, name, called)
    return counts


@dataclass
class _Death:
    """Kills the process when it is called once more than `left` times, and makes the file `mark` before."""

    left: int
    mark: Path | None = None

    def __call__(self) -> None:
        if not self.left:
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def _outlive(mark: Path) -> None:
    """Waits until the other rank dies, which is to find enough that is still to be done; not for ever."""
    end = time.monotonic() + 5
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.1)


def before_each_unit(call: Callable[[], object]) -> None:
    """Calls it whenever this process is to write a unit, or to send a share."""
    from ckpttool.distributed import files, objects

    for place, name in ((vars(files)["_Writer"], "_write"), (vars(objects)["_Sender"], "_send")):
        setattr(place, name, _after(call, getattr(place, name)))


def _after(call: Callable[[], object], work: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        call()
        return work(*args)

    return called


if __name__ == "__main__":
    from ckpttool.cli.app import process

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_each_unit(partial(time.sleep, 0.1) if os.environ["RANK"] == "0" else _Death(1))
    sys.exit(process())
