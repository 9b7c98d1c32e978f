"""Cases: a command of ckpttool, other ways to the same result, and a check of its output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CKPTTOOL = str(Path(sys.executable).parent / "ckpttool")
RULE = ("--rule", "layers.{i}.{rest*} => blocks.{i}.{rest*}")
SHARDS = 8
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Case:
    """`ours` and what a user would run `instead`, called `name`; both exit with `status`.

    `copied` is a file of the size of the output, for `cp`; None for a command that writes nothing.
    `check` loads what `ours` has written.
    """

    work: str
    ours: list[str]
    name: str
    instead: list[str]
    copied: Path | None = None
    check: Callable[[], bool] = lambda: True
    status: int = 0

    @property
    def words(self) -> str:
        """Both command lines: they name the files that are needed."""
        return " ".join([*self.ours, *self.instead])


def python(code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import torch; from torch.distributed.checkpoint import format_utils\n{code}",
    ]


def shell(command: str) -> list[str]:
    """A command line of the shell; options that are appended to it are its ``$@``."""
    return ["/bin/sh", "-c", command, "sh"]


def cases(folder: Path, gib: float) -> Iterator[Case]:
    """Yield the cases, over the files that `data.make` makes in the folder."""
    model, shard = folder / "model.safetensors", int(gib * 2**30 / SHARDS)
    # What a user would run, by format: `s` is the state_dict.
    load = {
        "safetensors": f"from safetensors.torch import load_file; s = load_file('{model}')\n",
        "pt": f"s = torch.load('{folder / 'model.pt'}', mmap=True)\n",
        "dcp": f"format_utils.dcp_to_torch_save('{folder / 'model.dcp'}', '{folder / 'out.tmp'}')\n"
        f"s = torch.load('{folder / 'out.tmp'}', mmap=True)\n",
    }
    save = {
        "safetensors": "from safetensors.torch import save_file; save_file(s,"
        f" '{folder / 'out.safetensors'}')",
        "pt": f"torch.save(s, '{folder / 'out.pt'}')",
        "dcp": f"torch.distributed.checkpoint.save(s, checkpoint_id='{folder / 'out.dcp'}',"
        " no_dist=True)",
        "shards": "from huggingface_hub import save_torch_state_dict; import os;"
        f" os.mkdir('{folder / 'out.shards'}')\n"
        f"save_torch_state_dict(s, '{folder / 'out.shards'}', max_shard_size={shard})",
    }
    rename = "s = {k.replace('layers', 'blocks'): v for k, v in s.items()}\n"

    for source in ("safetensors", "pt", "dcp"):
        out = folder / f"out.{source}"
        ours = [CKPTTOOL, "remap", str(folder / f"model.{source}"), "-o", str(out), *RULE]
        instead = python(load[source] + rename + save[source])
        yield Case(
            f"rename, {source}",
            ours,
            "load and save",
            instead,
            model,
            _holds(out, "blocks", folder),
        )
    for source, target in (
        ("pt", "safetensors"),
        ("safetensors", "pt"),
        ("dcp", "safetensors"),
        ("dcp", "pt"),
    ):
        out = folder / f"out.{target}"
        ours = [CKPTTOOL, "remap", str(folder / f"model.{source}"), "-o", str(out)]
        instead, name = python(load[source] + save[target]), "load and save"
        if (source, target) == ("dcp", "pt"):
            instead, name = (
                python(load["dcp"].partition("\n")[0].replace("out.tmp", "out.pt")),
                "`dcp_to_torch_save`",
            )
        yield Case(
            f"{source} to {target}", ours, name, instead, model, _holds(out, "layers", folder)
        )
    out = folder / "out.shards"
    ours = [CKPTTOOL, "convert", str(model), "-o", f"{out}/", "--max-shard-size", f"{shard}B"]
    instead = python(load["safetensors"] + save["shards"])
    yield Case(
        f"{SHARDS} shards", ours, "load and save", instead, model, _holds(out, "layers", folder)
    )

    program, out = folder / "model.pt2", folder / "out.pt2"
    ours = [CKPTTOOL, "swap-weights", str(program), str(folder / "model.pt"), "-o", str(out)]
    instead = python(
        f"p = torch.export.load('{program}')\n{load['pt']}"
        f"[p.state_dict[k].data.copy_(v) for k, v in s.items()]; torch.export.save(p, '{out}')"
    )
    yield Case(
        "swap-weights", ours, "load, copy and save", instead, program, _holds(out, "layers", folder)
    )

    for name in ("safetensors", "pt"):  # there and back, so that each run finds the same file
        path, original = folder / f"placed.{name}", folder / f"model.{name}"
        edit = (
            f"{CKPTTOOL} remap {path} --in-place --rule '{RULE[1]}' \"$@\" && {CKPTTOOL} undo"
            f' {path} "$@"'
        )
        ours = shell(f"[ -e {path} ] || cp {original} {path}; {edit}")
        instead = python(load[name] + rename + save[name])
        yield Case(f"rename in place and undo, {name}", ours, "load and save", instead, original)

    one, same, other, many = (
        str(folder / f"{name}.safetensors") for name in ("model", "same", "other", "many")
    )
    values, torch = [CKPTTOOL, "diff", "--values", one], [sys.executable, "-c", "import torch"]
    yield Case("diff --values, the same", [*values, same], "`cmp`", ["/usr/bin/cmp", one, same])
    yield Case(
        "diff --values, one row differs",
        [*values, other],
        "`cmp`",
        ["/usr/bin/cmp", one, other],
        status=1,
    )
    ours = [CKPTTOOL, "inspect", str(folder / "many.pt")]
    yield Case(
        "inspect, pt, 10,000 tensors",
        ours,
        "`torch.load`",
        python(f"torch.load('{ours[-1]}', mmap=True)"),
    )
    yield Case(
        "diff, safetensors, 100,000 keys", [CKPTTOOL, "diff", many, many], "`import torch`", torch
    )
    yield from _large(folder)
    yield Case("`--help`", [CKPTTOOL, "--help"], "`import torch`", torch)


HERE = Path(__file__).resolve().parent
TORCH = """
import sys; sys.path.insert(0, {here!r})
import large
from safetensors import safe_open
with torch.device("meta"):
    model = large.build()
with safe_open({path!r}, "pt") as file:
    shapes = {{key: file.get_slice(key).get_shape() for key in file.keys()}}
state = {{key: torch.empty(shape, device="meta") for key, shape in shapes.items()}}
sys.exit(bool(model.load_state_dict(state, strict=False)[0]))
"""
SCRIPT = """
import glob, json, struct, sys
def outlines(folder):
    found = {}
    for path in sorted(glob.glob(folder + "/*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        found.update((key, (row["dtype"], row["shape"])) for key, row in header.items())
    return found
left, right = map(outlines, sys.argv[1:])
print(sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys()))
sys.exit(left != right)
"""


def _large(folder: Path) -> Iterator[Case]:
    """Yield a large definition against the steps of torch, and many keys against a script."""
    model = f"{HERE / 'large.py'}:build"
    good, wrong = str(folder / "large.safetensors"), str(folder / "large.wrong.safetensors")
    steps = {path: python(TORCH.format(here=str(HERE), path=path)) for path in (good, wrong)}
    name = "build, read the header, load"
    yield Case(
        "diff, 45,000 tensors, loads", [CKPTTOOL, "diff", "--model", model, good], name, steps[good]
    )
    ours = [CKPTTOOL, "diff", "--model", model, wrong]
    yield Case("diff, 45,000 tensors, two wrong keys", ours, name, steps[wrong], status=1)
    yield Case("trace, 45,000 tensors", [CKPTTOOL, "trace", model], name, steps[good])

    keys, renamed = str(folder / "large.keys"), str(folder / "large.renamed")
    script = [sys.executable, "-c", SCRIPT]
    name, same = "a script of ten lines", [*script, keys, keys]
    yield Case("diff, 89,000 keys, the same", [CKPTTOOL, "diff", keys, keys], name, same)
    ours = [CKPTTOOL, "diff", keys, renamed]
    yield Case("diff, 89,000 keys, all renamed", ours, name, [*script, keys, renamed], status=1)
    yield Case("inspect, 89,000 keys", [CKPTTOOL, "inspect", keys], name, same)
    ours = [
        CKPTTOOL,
        "remap",
        keys,
        "-o",
        f"{folder / 'out.keys'}/",
        "--rule",
        "model.layers.{x*} => net.blocks.{x*}",
    ]
    yield Case("rename, 89,000 keys in 163 shards", ours, name, same)


def _holds(out: Path, prefix: str, folder: Path) -> Callable[[], bool]:
    """Return a check that `out` holds the model's tensors, bit for bit, under names that begin with
    the prefix.
    """

    def check() -> bool:
        import torch
        from safetensors import safe_open

        found = _loaded(out)
        with safe_open(folder / "model.safetensors", "pt") as source:
            named = {key: key.replace("layers", prefix) for key in list(source.keys())}
            if set(found) != set(named.values()):
                return False
            return all(
                torch.equal(found[new], source.get_tensor(key)) for key, new in named.items()
            )

    return check


def _loaded(out: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if out.suffix == ".pt2":
        return dict(torch.export.load(out).state_dict)
    if out.suffix == ".safetensors":
        return load_file(out)
    if out.suffix == ".shards":
        return {
            key: value
            for part in out.glob("*.safetensors")
            for key, value in load_file(part).items()
        }
    if out.suffix == ".dcp":
        dcp_to_torch_save(out, out.with_name("out.tmp"))
        out = out.with_name("out.tmp")
    return dict(torch.load(out, mmap=True))
