"""How CPU time grows with the number of keys, beside scripts that parse the header with `json`; drawn as SVG.

    python benchmarks/growth.py [FOLDER]

prints the seconds and the exponents, and draws docs/growth.svg.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Sequence
from math import log, log10
from pathlib import Path
from statistics import linear_regression

from cases import CKPTTOOL, RULE

COUNTS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_COLORS = {"inspect": "#2563eb", "remap": "#dc2626", "diff": "#16a34a", "diff, renamed": "#9333ea"}
_BY_HAND = {
    "inspect": "for k, v in read(sys.argv[1]).items(): print(k, v['dtype'], v['shape'])",
    "remap": "h = read(sys.argv[1]); t = json.dumps({k.replace('layers', 'blocks'): v for k, v in h.items()}).encode();"
    "open(sys.argv[2], 'wb').write(struct.pack('<Q', len(t)) + t + open(sys.argv[1], 'rb').read()[-4 * len(h):])",
    "diff": "a, b = read(sys.argv[1]), read(sys.argv[2]);"
    "print([k for k in {**a, **b} if a.get(k, {}).get('shape') != b.get(k, {}).get('shape')])",
    # Of a rename that is known: what it leaves undone.
    "diff, renamed": "a, b = read(sys.argv[1]), read(sys.argv[2]);"
    "a = {k.replace('layers', 'blocks'): v for k, v in a.items()};"
    "print([k for k in {**a, **b} if a.get(k, {}).get('shape') != b.get(k, {}).get('shape')])",
}
_READ = (
    "import json, struct, sys\n"
    "def read(p):\n    f = open(p, 'rb'); return json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))\n"
)
Series = dict[str, list[tuple[int, float]]]  # by work, the first of one key, which is start-up


def measured(folder: Path) -> Series:
    """Seconds of CPU by work, for each count of keys: ours as ``inspect``, by hand as ``inspect by hand``."""
    found: Series = {}
    for count in (1, *COUNTS):
        path, other, out = _file(folder, count), _file(folder, count, "blocks"), str(folder / "out.safetensors")
        lines = {
            "inspect": (["inspect", path], ()),
            "remap": (["remap", path, "-o", out, *RULE], (out,)),
            "diff": (["diff", path, path], (path,)),
            "diff, renamed": (["diff", path, other, "--exit-zero"], (other,)),
        }
        for work, (words, more) in lines.items():
            found.setdefault(work, []).append((count, _cpu([CKPTTOOL, *words], folder)))
            by_hand = [sys.executable, "-c", _READ + _BY_HAND[work], path, *more]
            found.setdefault(f"{work} by hand", []).append((count, _cpu(by_hand, folder)))
    return found


def _file(folder: Path, count: int, layers: str = "layers") -> str:
    path = folder / f"{layers}-{count}.safetensors"
    keys = (f"{layers}.{i // 10}.block.{i % 10}.weight" for i in range(count))
    infos = {key: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, key in enumerate(keys)}
    text = json.dumps(infos).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * count))
    return str(path)


def _cpu(command: list[str], folder: Path) -> float:
    """The least of three runs, user and system."""
    times = []
    for _ in range(3):
        for left in folder.glob("out*"):
            left.unlink()
        quiet = [(os.POSIX_SPAWN_OPEN, to, os.devnull, os.O_WRONLY, 0) for to in (1, 2)]
        _, status, usage = os.wait4(os.posix_spawn(command[0], command, os.environ, file_actions=quiet), 0)
        if status:
            sys.exit(f"failed: {command[:4]}")
        times.append(usage.ru_utime + usage.ru_stime)
    return min(times)


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The slope of the seconds beyond start-up over the keys, both as logarithms, by least squares.

    Counts of which the work is less than a fifth of the start-up are left out: it drowns in what runs differ by.
    """
    (_, start), *rest = points
    work = [(log(count), log(seconds - start)) for count, seconds in rest if seconds > 1.2 * start]
    return linear_regression(*zip(*work)).slope


def drawn(series: Series) -> str:
    """The series in a diagram whose two axes are logarithmic, each with its exponent; by hand is dashed."""

    def at(count: float, seconds: float) -> str:
        x = 70 + 430 * log(count / COUNTS[0]) / log(COUNTS[-1] / COUNTS[0])
        return f"{x:.1f},{300 - 68 * (log10(seconds) + 2):.1f}"

    lines = []
    for power in range(-2, 3):
        x, y = at(COUNTS[0], 10.0**power).split(",")
        lines.append(
            f'<path d="M70 {y}H500" stroke="#8884"/><text x="62" y="{y}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for count in COUNTS:
        x = at(count, 1).split(",")[0]
        lines.append(f'<text x="{x}" y="322" text-anchor="middle">{count:,}</text>')
    lowest = 0.0  # of the labels so far: none lies over another
    for name, points in sorted(series.items(), key=lambda one: -one[1][-1][1]):
        work, by_hand = name.removesuffix(" by hand"), name.endswith("by hand")
        dashes = ' stroke-dasharray="5 4"' if by_hand else ""
        path = " ".join(at(*point) for point in points[1:])
        lines.append(f'<polyline points="{path}" fill="none" stroke="{_COLORS[work]}" stroke-width="2"{dashes}/>')
        lowest = max(float(at(*points[-1]).split(",")[1]), lowest + 15)
        lines.append(
            f'<text x="508" y="{lowest:.1f}" style="fill:{_COLORS[work]}">{name}, n^{exponent(points):.2f}</text>'
        )
    style = "text{font:12px sans-serif;dominant-baseline:middle;fill:#666}"
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 350" role="img">'
        f"<title>CPU seconds by number of keys</title><style>{style}</style>\n{body}\n"
        '<text x="285" y="342" text-anchor="middle">keys</text></svg>\n'
    )


def main() -> None:
    """Measures, prints a table, and draws."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    series = measured(folder)
    for name, points in series.items():
        print(f"{name:16} n^{exponent(points):.3f} ", *(f"{count:,}: {seconds:.2f} s" for count, seconds in points))
    (root / "docs" / "growth.svg").write_text(drawn(series))


if __name__ == "__main__":
    main()
