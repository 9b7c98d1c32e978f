"""``make fuzz TIME=600``: fuzz every reader for its share of the time, and print a table of the
results.

With ``--guided`` atheris chooses inputs by coverage; otherwise they are mutated at random. An input
on which a reader crashes or is slow is kept in the folder ``found``: turn it into a test with its
name.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import results
from mutate import mutated

if "--guided" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["ckpttool"]):
        from targets import TARGETS, Target
else:
    from targets import TARGETS, Target

FOUND = Path("found")
SLOW = 2.0  # seconds of CPU time; a slower input is kept too
_MEASURED = 100  # memory is measured for one input in this many, because that is slow


@dataclass
class Tally:
    """Counts of inputs of a target, and the time and memory of its slowest and its largest input
    (seconds, bytes).
    """

    inputs: int = 0
    taken: int = 0
    slowest: float = 0.0
    largest: int = 0
    faults: set[str] = field(default_factory=set)


def fuzz(name: str, seconds: float, most: int, seed: int) -> Tally:
    """Run mutated seeds of the target until `seconds` have passed, or for `most` inputs."""
    target = TARGETS[name]
    chance, tally, seeds = random.Random(seed), Tally(), target.seeds()
    for data in seeds:
        target.run(data)
    gc.freeze()  # do not traverse the many objects of torch again
    end = time.monotonic() + seconds
    while time.monotonic() < end and tally.inputs < most:
        try_one(name, target, mutated(seeds, target.words, chance), tally)
    return tally


def try_one(name: str, target: Target, data: bytes, tally: Tally) -> None:
    """Run the target on one input, and keep the input if the target crashes or is slow."""
    measured = tally.inputs % _MEASURED == 0
    if measured:
        tracemalloc.start()
    start = time.process_time()
    try:
        tally.taken += target.run(data)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        _keep(
            name,
            data,
            f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"[:200],
            tally,
        )
    taken = time.process_time() - start
    if measured:
        tally.largest = max(tally.largest, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    elif taken > SLOW:
        _keep(name, data, f"{taken:.1f} seconds", tally)
    tally.slowest = max(tally.slowest, 0.0 if measured else taken)
    tally.inputs += 1


def _keep(name: str, data: bytes, why: str, tally: Tally) -> None:
    fault = why.partition(": ")[0]
    if fault in tally.faults:
        return
    tally.faults.add(fault)
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{name.replace(' ', '-')}-{sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    print(f"{name}: {why}: kept as {path}", file=sys.stderr, flush=True)


def guided(name: str, target: Target, seconds: float) -> None:
    """Fuzz the target with atheris, which ends the process."""
    folder = FOUND.parent / f".corpus-{name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (folder / f"seed-{number}").write_bytes(data)
    options = [
        sys.argv[0],
        f"-max_total_time={int(seconds)}",
        "-max_len=65536",
        "-timeout=30",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [*options, f"-artifact_prefix={name.replace(' ', '-')}-", str(folder)], target.run
    )
    atheris.Fuzz()


def main(args: Sequence[str]) -> int:
    """Return 1 if a reader crashed or was slow on an input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--time", type=float, default=600, help="seconds in all")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="limit for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="readers to fuzz in parallel")
    parser.add_argument("--guided", action="store_true", help="fuzz one target with atheris")
    options = parser.parse_args(args)
    names = options.target or list(TARGETS)
    if options.guided:
        guided(names[0], TARGETS[names[0]], options.time)
    faults = 0
    print(f"{'reader':<18}{'inputs':>12}{'taken':>10}{'slowest':>11}{'memory':>12}{'faults':>8}")
    fuzz_one = partial(
        fuzz,
        seconds=options.time * options.jobs / (len(names) + 1),
        most=options.inputs,
        seed=options.seed,
    )
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for name, tally in zip(names, pool.map(fuzz_one, names)):
            faults += len(tally.faults)
            memory = f"{tally.largest / 2**20:.1f} MiB"
            times = f"{tally.slowest * 1000:.1f} ms"
            print(
                f"{name:<18}{tally.inputs:>12,}{tally.taken:>10,}{times:>11}{memory:>12}{len(tally.faults):>8}",
                flush=True,
            )
            failures = sorted(f"{name}: {fault}" for fault in tally.faults)
            sizes = {
                "slowest, ms": round(tally.slowest * 1000, 1),
                "memory, MiB": round(tally.largest / 2**20, 1),
            }
            results.add(name, tally.inputs, failures, taken=tally.taken, **sizes)
    if options.target is None:
        seconds = options.time / (len(names) + 1)
        command = [sys.executable, str(Path(__file__).with_name("operators.py")), str(seconds), "0"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        counts = json.loads(done.stdout) if done.returncode == 0 else {}
        print("operators", counts or f"ended with {done.returncode}")
        results.add(
            "operators",
            sum(counts.values()),
            [] if counts else [f"operators: exit status {done.returncode}"],
        )
        faults += done.returncode != 0
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
