"""What is measured: a command of ckpttool against another way to the same end, and what shows that it was reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CKPTTOOL = str(Path(sys.executable).parent / "ckpttool")
RULE = ("--rule", "layers.{i}.{rest*} => blocks.{i}.{rest*}")


@dataclass(frozen=True)
class Case:
    """`ours` against `theirs`: command lines that exit with `status`. `check` looks at what ours has written."""

    work: str
    ours: list[str]
    against: str
    theirs: list[str]
    check: Callable[[], bool] = lambda: True
    status: int = 0

    @property
    def words(self) -> str:
        """Both command lines: the files that they name are those that are used."""
        return " ".join([*self.ours, *self.theirs])


def python(code: str) -> list[str]:
    """A command line that runs the code."""
    return [sys.executable, "-c", code]


def shell(command: str) -> list[str]:
    """A command line of the shell."""
    return ["/bin/sh", "-c", command]


def cases(folder: Path) -> Iterator[Case]:
    """All of them, over the files that `data.make` made in the folder."""
    yield from _copies(folder)
    yield from _conversions(folder)
    yield from _swaps(folder)
    yield from _in_place(folder)
    yield from _questions(folder)


def _copies(folder: Path) -> Iterator[Case]:
    for name, ending, load in (("safetensors", "safetensors", _safetensors), ("torch zip", "pt", _torch)):
        source, out = folder / f"model.{ending}", folder / f"out.{ending}"
        ours = [CKPTTOOL, "remap", str(source), "-o", str(out), *RULE]
        check = _holds(load, out, "blocks", folder)
        yield from _against_cp(f"rename, {name}", ours, source, check)
        ours = [*ours, "--no-fsync"]
        saved = {
            "safetensors": "from safetensors.torch import load_file, save_file;"
            f"save_file({{k.replace('layers', 'blocks'): v for k, v in load_file('{source}').items()}}, '{out}')",
            "pt": f"import torch; s = torch.load('{source}', mmap=True);"
            f"torch.save({{k.replace('layers', 'blocks'): v for k, v in s.items()}}, '{out}')",
        }[ending]
        yield Case(f"rename, {name}, `--no-fsync`", ours, "loading and saving", python(saved), check)


def _against_cp(work: str, ours: list[str], copied: Path, check: Callable[[], bool]) -> Iterator[Case]:
    """Brought to the disk, and left to the page cache, beside a copy of a file of that size."""
    out = copied.with_name("out.copy")
    yield Case(work, ours, "`cp` and `sync`", shell(f"cp {copied} {out} && sync {out}"), check)
    yield Case(f"{work}, `--no-fsync`", [*ours, "--no-fsync"], "`cp`", ["/bin/cp", str(copied), str(out)], check)


def _conversions(folder: Path) -> Iterator[Case]:
    ways = (("pt", "safetensors"), ("safetensors", "pt"), ("dcp", "safetensors"), ("dcp", "pt"))
    for source, target in ways:
        path, out = folder / f"model.{source}", folder / f"out.{target}"
        ours = [CKPTTOOL, "remap", str(path), "-o", str(out)]
        check = _holds(_safetensors if target == "safetensors" else _torch, out, "layers", folder)
        yield from _against_cp(f"{source} to {target}", ours, folder / "model.safetensors", check)
    convert = f"from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as go; go('{path}', '{out}')"
    yield Case("dcp to pt, `--no-fsync`", [*ours, "--no-fsync"], "`dcp_to_torch_save`", python(convert), check)


def _swaps(folder: Path) -> Iterator[Case]:
    program, new, out = folder / "model.pt2", folder / "model.pt", folder / "out.pt2"
    ours = [CKPTTOOL, "swap-weights", str(program), str(new), "-o", str(out)]
    check = _holds(_program, out, "layers", folder)
    yield from _against_cp("swap-weights", ours, program, check)
    by_torch = (
        f"import torch; p = torch.export.load('{program}'); s = torch.load('{new}', mmap=True);"
        f"[p.state_dict[k].data.copy_(v) for k, v in s.items()]; torch.export.save(p, '{out}')"
    )
    yield Case("swap-weights, `--no-fsync`", [*ours, "--no-fsync"], "loading, copying, saving", python(by_torch), check)


def _in_place(folder: Path) -> Iterator[Case]:
    """There and back, so that each run finds what the one before it found."""
    for name, ending in (("safetensors", "safetensors"), ("torch zip", "pt"), ("exported program", "pt2")):
        path = folder / f"placed.{ending}"
        there = f"{CKPTTOOL} remap {path} --in-place --rule 'layers.{{i}}.{{r*}} => blocks.{{i}}.{{r*}}'"
        yield Case(
            f"rename in place and undo, {name}",
            shell(f"[ -e {path} ] || cp {folder / f'model.{ending}'} {path}; {there} && {CKPTTOOL} undo {path}"),
            "`cp`",
            ["/bin/cp", str(folder / f"model.{ending}"), str(folder / "out.copy")],
        )


def _questions(folder: Path) -> Iterator[Case]:
    one, same, other = (str(folder / f"{name}.safetensors") for name in ("model", "same", "other"))
    many, torch = str(folder / "many.safetensors"), python("import torch")
    yield Case(
        "diff --values, the same", [CKPTTOOL, "diff", "--values", one, same], "`cmp`", ["/usr/bin/cmp", one, same]
    )
    differ = [CKPTTOOL, "diff", "--values", one, other]
    yield Case("diff --values, one row differs", differ, "`cmp`", shell(f"cmp {one} {other}"), status=1)
    load = python(f"import torch; torch.load('{folder / 'many.pt'}', mmap=True)")
    yield Case(
        "inspect, torch zip, 10,000 tensors", [CKPTTOOL, "inspect", str(folder / "many.pt")], "`torch.load`", load
    )
    yield Case("diff, safetensors, 100,000 keys", [CKPTTOOL, "diff", many, many], "`import torch`", torch)
    yield Case("`--help`", [CKPTTOOL, "--help"], "`import torch`", torch)


def _holds(load: Callable[[Path], Any], out: Path, prefix: str, folder: Path) -> Callable[[], bool]:
    """Whether what was written holds the model's tensors, bit for bit, under names that begin with the prefix."""

    def check() -> bool:
        import torch
        from safetensors import safe_open

        found = load(out)
        with safe_open(folder / "model.safetensors", "pt") as source:
            keys = list(source.keys())
            named = {key: key.replace("layers", prefix) for key in keys}
            if set(found) != set(named.values()):
                return False
            return all(torch.equal(found[new], source.get_tensor(key)) for key, new in named.items())

    return check


def _safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _torch(path: Path) -> Any:
    import torch

    return torch.load(path, mmap=True)


def _program(path: Path) -> Any:
    import torch

    return torch.export.load(path).state_dict
