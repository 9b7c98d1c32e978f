"""How the cost of a command grows with keys, bytes and ranks.

    python benchmarks/growth.py [FOLDER] [--keys 1000000] [--gib 4] [--ranks 4]

prints time, CPU and memory by bytes and by ranks, and CPU seconds by number of keys, with
exponents, next to scripts that parse the header with `json`; draws docs/growth.svg if all counts of
keys are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from math import log, log10
from pathlib import Path
from statistics import linear_regression

from cases import CKPTTOOL, ENVIRONMENT, RULE

COUNTS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_COLORS = {"inspect": "#2563eb", "remap": "#dc2626", "diff": "#16a34a", "diff, renamed": "#9333ea"}
_BY_HAND = {
    "inspect": "for k, v in read(sys.argv[1]).items(): print(k, v['dtype'], v['shape'])",
    "remap": "h = read(sys.argv[1]); t = json.dumps({k.replace('layers', 'blocks'): v for k, v in"
    " h.items()}).encode();"
    "open(sys.argv[2], 'wb').write(struct.pack('<Q', len(t)) + t + open(sys.argv[1],"
    " 'rb').read()[-4 * len(h):])",
    "diff": "a, b = read(sys.argv[1]), read(sys.argv[2]);"
    "print([k for k in {**a, **b} if a.get(k, {}).get('shape') != b.get(k, {}).get('shape')])",
    # Of a rename that is known: what it leaves undone.
    "diff, renamed": "a, b = read(sys.argv[1]), read(sys.argv[2]);"
    "a = {k.replace('layers', 'blocks'): v for k, v in a.items()};"
    "print([k for k in {**a, **b} if a.get(k, {}).get('shape') != b.get(k, {}).get('shape')])",
}
_READ = (
    "import json, struct, sys\n"
    "def read(p):\n    f = open(p, 'rb'); return json.loads(f.read(struct.unpack('<Q',"
    " f.read(8))[0]))\n"
)
Series = dict[str, list[tuple[int, float]]]  # by work; the first is of one key, which is start-up


def by_keys(folder: Path, most: int) -> Series:
    """Return CPU seconds for each count of keys by work: ``inspect`` for ours, ``inspect by hand``
    for the script.
    """
    found: Series = {}
    for count in (1, *(count for count in COUNTS if count <= most)):
        path, other, out = (
            _file(folder, count),
            _file(folder, count, "blocks"),
            str(folder / "out.safetensors"),
        )
        lines = {
            "inspect": (["inspect", path], ()),
            "remap": (["remap", path, "-o", out, *RULE], (out,)),
            "diff": (["diff", path, path], (path,)),
            "diff, renamed": (["diff", path, other, "--exit-zero"], (other,)),
        }
        for work, (words, more) in lines.items():
            found.setdefault(work, []).append((count, _least([CKPTTOOL, *words], folder)))
            by_hand = [sys.executable, "-c", _READ + _BY_HAND[work], path, *more]
            found.setdefault(f"{work} by hand", []).append((count, _least(by_hand, folder)))
    return found


def _file(folder: Path, count: int, layers: str = "layers") -> str:
    path = folder / f"{layers}-{count}.safetensors"
    keys = (f"{layers}.{i // 10}.block.{i % 10}.weight" for i in range(count))
    infos = {
        key: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, key in enumerate(keys)
    }
    text = json.dumps(infos).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * count))
    return str(path)


def _least(command: list[str], folder: Path) -> float:
    """Return the least CPU seconds of three runs."""
    return min(_run(command, folder)[1] for _ in range(3))


def _run(command: list[str], folder: Path) -> tuple[float, float, int]:
    """Return seconds, CPU seconds (with child processes) and the peak memory (MiB) of one run."""
    for left in folder.glob("out*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    quiet = [(os.POSIX_SPAWN_OPEN, to, os.devnull, os.O_WRONLY, 0) for to in (1, 2)]
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, ENVIRONMENT, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"failed: {command}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10


def by_bytes_and_ranks(folder: Path, gib: float, most: int) -> None:
    """Rename files up to so many GiB in one process, and cast the largest one to bf16 on up to
    `most` ranks.
    """
    path, rules, out = (
        folder / "large.safetensors",
        folder / "cast.toml",
        str(folder / "out.safetensors"),
    )
    rules.write_text('[[rule]]\ncast = "*"\ndtype = "bfloat16"\n')
    for size in (gib / 16, gib / 4, gib):
        _zeros(path, int(size * 2**24))
        print(
            f"rename, {size:g} GiB: %.2f s, CPU %.2f s, %d MiB"
            % _run([CKPTTOOL, "remap", str(path), "-o", out, *RULE], folder)
        )
    for ranks in (count for count in (1, 2, 4, 8) if count <= most):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "-m",
            "ckpttool",
        ]
        cast = ["remap", str(path), "-o", str(folder / "out.dcp"), "--rules", str(rules)]
        print(
            f"cast, {gib:g} GiB, {ranks} ranks: %.2f s, CPU %.2f s, %d MiB"
            % _run([*torchrun, *cast], folder)
        )
    path.unlink()


def _zeros(path: Path, side: int) -> None:
    """Write 16 fp32 tensors of `side` bytes each, in a sparse file."""
    places = {f"layers.{i}.weight": [i * side * 4, (i + 1) * side * 4] for i in range(16)}
    infos = {
        key: {"dtype": "F32", "shape": [side], "data_offsets": at} for key, at in places.items()
    }
    text = json.dumps(infos).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 64 * side)


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the seconds beyond start-up over the keys, both as logarithms, by least
    squares.

    Counts whose work is less than a fifth of the start-up are left out: runs differ by more.
    """
    (_, start), *rest = points
    work = [(log(count), log(seconds - start)) for count, seconds in rest if seconds > 1.2 * start]
    return linear_regression(*zip(*work)).slope if len(work) > 1 else float("nan")


def drawn(series: Series) -> str:
    """Return a diagram of the series with logarithmic axes, each with its exponent; scripts are
    dashed.
    """

    def at(count: float, seconds: float) -> str:
        x = 70 + 430 * log(count / COUNTS[0]) / log(COUNTS[-1] / COUNTS[0])
        return f"{x:.1f},{300 - 68 * (log10(seconds) + 2):.1f}"

    lines = []
    for power in range(-2, 3):
        x, y = at(COUNTS[0], 10.0**power).split(",")
        lines.append(
            f'<path d="M70 {y}H500" stroke="#8884"/><text x="62" y="{y}"'
            f' text-anchor="end">{10.0**power:g} s</text>'
        )
    for count in COUNTS:
        x = at(count, 1).split(",")[0]
        lines.append(f'<text x="{x}" y="322" text-anchor="middle">{count:,}</text>')
    lowest = 0.0  # of the labels so far, which do not overlap
    for name, points in sorted(series.items(), key=lambda one: -one[1][-1][1]):
        work, by_hand = name.removesuffix(" by hand"), name.endswith("by hand")
        dashes = ' stroke-dasharray="5 4"' if by_hand else ""
        path = " ".join(at(*point) for point in points[1:])
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{_COLORS[work]}"'
            f' stroke-width="2"{dashes}/>'
        )
        lowest = max(float(at(*points[-1]).split(",")[1]), lowest + 15)
        lines.append(
            f'<text x="508" y="{lowest:.1f}" style="fill:{_COLORS[work]}">{name},'
            f" n^{exponent(points):.2f}</text>"
        )
    style = "text{font:12px sans-serif;dominant-baseline:middle;fill:#666}"
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 350" role="img">'
        f"<title>CPU seconds by number of keys</title><style>{style}</style>\n{body}\n"
        '<text x="285" y="342" text-anchor="middle">keys</text></svg>\n'
    )


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=root / "build" / "bench")
    parser.add_argument("--keys", type=int, default=COUNTS[-1], help="greatest number of keys")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the largest file")
    parser.add_argument("--ranks", type=int, default=4, help="greatest number of ranks")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    # First, since the peak memory of a process includes that of the one that starts it.
    by_bytes_and_ranks(args.folder, args.gib, args.ranks)
    series = by_keys(args.folder, args.keys)
    for name, points in series.items():
        print(
            f"{name:16} n^{exponent(points):.3f} ",
            *(f"{count:,}: {seconds:.2f} s" for count, seconds in points),
        )
    if args.keys >= COUNTS[-1]:
        (root / "docs" / "growth.svg").write_text(drawn(series))


if __name__ == "__main__":
    main()
