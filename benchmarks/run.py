"""Times ckpttool as whole processes against `cp` and against what one would do otherwise, in turns, in one run.

    python benchmarks/run.py [--gib 1] [--runs 5] [--folder build/bench]

Prints a Markdown table: the ratio is the median of the ratios of paired runs, with the least and the greatest of them;
memory is the largest resident set of the process, as the operating system counted it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CKPTTOOL = str(BIN / "ckpttool")
TENSORS = 290  # as many as a 7-billion-parameter Llama has


@dataclass(frozen=True)
class Run:
    seconds: float
    rss_mib: float


@dataclass(frozen=True)
class Case:
    """`ours` against `theirs`, both as command lines; `out` is removed before each run."""

    work: str
    ours: list[str]
    against: str
    theirs: list[str]


def run(command: list[str], folder: Path) -> Run:
    """One whole process, from start to exit. Ends the benchmark where it fails.

    The last output is removed right before: its memory is free, and taken again by the new one, the same for all.
    """
    os.sync()  # what the last run left to be written is not charged to this one
    for left in folder.glob("out*"):
        left.unlink()
    start = time.perf_counter()
    pid = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"failed: {shlex.join(command)}")
    return Run(seconds, usage.ru_maxrss / 1024)


def measure(case: Case, folder: Path, runs: int) -> str:
    """A row of the table."""
    run(case.theirs, folder), run(case.ours, folder)  # both warm: page cache, compiled bytecode
    pairs = [(run(case.ours, folder), run(case.theirs, folder)) for _ in range(runs)]
    ratios = sorted(ours.seconds / theirs.seconds for ours, theirs in pairs)
    seconds = statistics.median(ours.seconds for ours, _ in pairs)
    rss = max(ours.rss_mib for ours, _ in pairs)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return f"| {case.work} | {case.against} | {ratio} | {seconds:.2f} s | {rss:.0f} MiB |"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def shell(command: str) -> list[str]:
    return ["/bin/sh", "-c", command]


def make_files(folder: Path, gib: float) -> None:
    """A model of `TENSORS` weights as safetensors and torch zip, its exported program, and indexes of many keys."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    class Tower(nn.Module):
        def __init__(self, side: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(TENSORS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    side = int((gib * 2**30 / TENSORS / 4) ** 0.5)
    torch.manual_seed(0)
    model = Tower(side).eval()
    state = model.state_dict()
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")
    torch.export.save(torch.export.export(model, (torch.zeros(1, side),)), folder / "model.pt2")
    many = {f"layers.{i // 10}.block.{i % 10}.weight": torch.zeros(1) for i in range(100_000)}
    torch.save({key: many[key] for key in list(many)[:10_000]}, folder / "many.pt")
    save_file(many, folder / "many.safetensors")


def cases(folder: Path) -> list[Case]:
    st, pt, prog = (str(folder / name) for name in ("model.safetensors", "model.pt", "model.pt2"))
    rule = ["--rule", "layers.{i}.{rest*} => blocks.{i}.{rest*}"]
    found = []
    for name, source, ending in (("safetensors", st, "safetensors"), ("torch zip", pt, "pt")):
        out = str(folder / f"out.{ending}")
        ours = [CKPTTOOL, "remap", source, "-o", out, *rule]
        found += [
            Case(f"rename, {name}, `--no-fsync`", [*ours, "--no-fsync"], "`cp`", ["/bin/cp", source, out]),
            Case(f"rename, {name}", ours, "`cp` and `sync`", shell(f"cp {source} {out} && sync {out}")),
        ]
    out = str(folder / "out.safetensors")
    found += [
        Case(
            "rename, safetensors, `--no-fsync`",
            [CKPTTOOL, "remap", st, "-o", out, *rule, "--no-fsync"],
            "`load_file`, `save_file`",
            python(
                "from safetensors.torch import load_file, save_file;"
                f"save_file({{k.replace('layers', 'blocks'): v for k, v in load_file({st!r}).items()}}, {out!r})"
            ),
        ),
        Case(
            "rename, torch zip, `--no-fsync`",
            [CKPTTOOL, "remap", pt, "-o", str(folder / "out.pt"), *rule, "--no-fsync"],
            "`torch.load(mmap=True)`, `torch.save`",
            python(
                f"import torch; s = torch.load({pt!r}, mmap=True);"
                f"torch.save({{k.replace('layers', 'blocks'): v for k, v in s.items()}}, {str(folder / 'out.pt')!r})"
            ),
        ),
        Case(
            "torch zip to safetensors, `--no-fsync`",
            [CKPTTOOL, "remap", pt, "-o", out, "--no-fsync"],
            "`cp`",
            ["/bin/cp", pt, out],
        ),
        Case(
            "safetensors to torch zip, `--no-fsync`",
            [CKPTTOOL, "remap", st, "-o", str(folder / "out.pt"), "--no-fsync"],
            "`cp`",
            ["/bin/cp", st, str(folder / "out.pt")],
        ),
        Case(
            "swap-weights, `--no-fsync`",
            [CKPTTOOL, "swap-weights", prog, pt, "-o", str(folder / "out.pt2"), "--no-fsync"],
            "`cp` of the program",
            ["/bin/cp", prog, str(folder / "out.pt2")],
        ),
        Case(
            "swap-weights, `--no-fsync`",
            [CKPTTOOL, "swap-weights", prog, pt, "-o", str(folder / "out.pt2"), "--no-fsync"],
            "`torch.export.load`, `load_state_dict`, `save`",
            python(
                f"import torch; p = torch.export.load({prog!r}); s = torch.load({pt!r}, mmap=True);"
                "[p.state_dict[k].data.copy_(v) for k, v in s.items()];"
                f"torch.export.save(p, {str(folder / 'out.pt2')!r})"
            ),
        ),
        Case(
            "inspect, torch zip, 10,000 tensors",
            [CKPTTOOL, "inspect", str(folder / "many.pt")],
            "`torch.load(mmap=True)`",
            python(f"import torch; torch.load({str(folder / 'many.pt')!r}, mmap=True)"),
        ),
        Case(
            "diff, safetensors, 100,000 keys",
            [CKPTTOOL, "diff", str(folder / "many.safetensors"), str(folder / "many.safetensors")],
            "`import torch`",
            python("import torch"),
        ),
        Case("`--help`", [CKPTTOOL, "--help"], "`import torch`", python("import torch")),
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model's file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()  # files are made in a process of their own: its memory is not inherited by those that are measured
    if pid == 0:
        make_files(args.folder, args.gib)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("the files could not be made")
    print(f"A model of {args.gib:g} GiB in {TENSORS} tensors; {args.runs} runs of each, in turns; page cache warm.\n")
    print("| work | against | ratio: median (least-greatest) | time | memory |\n| --- | --- | --- | --- | --- |")
    for case in cases(args.folder):
        print(measure(case, args.folder, args.runs), flush=True)


if __name__ == "__main__":
    main()
