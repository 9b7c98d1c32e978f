"""The table of docs/wrappers.md is what the real wrappers do.

Where it changed for a good reason: ``UPDATE_DOCS=1 make test ARGS=tests/test_docs_wrappers.py``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckpttool.cli.app import main
from ckpttool.naming.wrappers import canonical_keys, infer, is_lightning
from ckpttool.operands.checkpoint import model_section, open_operand
from ckpttool.tracing.instances import listed, runtime_tensors
from places import DATA, DOCS
from wrapped_ranks import BLOCKS, CHAINS, PLAIN, Net, Wrapped, filename, net, tensors

PAGE = DOCS / "wrappers.md"
COLUMNS = ("wrapped", "at runtime", "key of `state_dict()`", "recognised as", "canonical", "written by", "torch's name")
HEAD = f"| {' | '.join(COLUMNS)} |\n"
TENSOR = "block.0.weight"
LIGHTNING = DATA / "lightning-2.6.6.ckpt"


def yes(answer: bool) -> str:
    return "yes" if answer else "no"


def row(wrapper: str, cells: Sequence[str]) -> str:
    return f"| {wrapper} | {' | '.join(cells)} |\n"


def named(names: Iterable[str]) -> str:
    """The one of the names that is the tensor's, in whatever wrappers."""
    (found,) = [key for key, name in canonical_keys(names).items() if name == TENSOR]
    return f"`{found}`"


def ranks_row(wrapped: Wrapped, form: str) -> str:
    told = wrapped.names[form]
    seen = infer(told["keys"]).form
    canonical = [told["canonical"], canonical_keys(told["keys"]).values()]
    written = torch.load(wrapped.folder / "loads" / f"{filename(form)}.pt")
    fits = sorted(written) == sorted(told["keys"]) and not wrapped.failures[form]
    option = f"`--to {shlex.quote(form)}`" if form in CHAINS else "`--like`"
    return row(
        f"`{form}`",
        [
            named(told["runtime"]),
            named(told["keys"]),
            f"`{seen}`" if seen else "nothing to take out",
            yes(all(tensors(names) == sorted(PLAIN) for names in canonical)),
            option if fits else "no",
            "the same" if tensors(told["torch"]) == sorted(PLAIN) else named(told["torch"]),
        ],
    )


def peft_row(folder: Path) -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(0), LoraConfig(target_modules=["block.0"]))
    source, plain, back = (str(folder / f"{name}.pt") for name in ("peft", "peft-plain", "peft-back"))
    torch.save(model.state_dict(), source)
    assert main(["remap", source, "--to", "serialized", "-o", plain]) == 0
    assert main(["remap", plain, "--to", "peft", "-o", back]) == 0
    model.load_state_dict(torch.load(back))
    keys = list(model.state_dict())
    live = [tensor.canonical for tensor in runtime_tensors(model, listed(model))]
    adapters = {f"block.0.lora_{half}.default.weight" for half in "AB"}
    return row(
        "PEFT, `block.0` with LoRA",
        [
            named(name for name, _ in model.named_parameters()),
            named(keys),
            f"`{infer(keys).form}`",
            yes(all({*names} - adapters == {*PLAIN} for names in (live, canonical_keys(keys).values()))),
            "`--to peft`",
            named(get_model_state_dict(model)),
        ],
    )


def lightning_row(folder: Path) -> str:
    source = open_operand(str(LIGHTNING))
    section = model_section(source)
    lightning = is_lightning(source)
    names = canonical_keys(section.by_key(), lightning=lightning)
    (key,) = [key for key, name in names.items() if name == TENSOR]
    form = infer(section.by_key(), lightning=lightning).form
    out = folder / "lightning.ckpt"
    assert main(["remap", str(LIGHTNING), "--to", "lightning", "-o", str(out)]) == 0
    holder = torch.nn.Module()
    holder.model = Net()
    holder.load_state_dict(torch.load(out)["state_dict"])
    same = tensors(names.values()) == sorted(PLAIN)
    wrapper = "Lightning, attribute `net`"
    return row(
        wrapper, [f"`{key}`", f"`{key}`", f"`{form}`", yes(same), "`--to lightning` (attribute `model`)", "none"]
    )


def test_the_table_is_what_the_real_wrappers_do(wrapped: Wrapped, tmp_path: Path) -> None:
    rows = [ranks_row(wrapped, form) for form in CHAINS + BLOCKS]
    table = HEAD + "| --- " * len(COLUMNS) + "|\n" + "".join([*rows, peft_row(tmp_path), lightning_row(tmp_path)])
    page = PAGE.read_text()
    start = page.index(HEAD)
    end = page.index("\n\n", start) + 1
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page[:start] + table + page[end:])
    else:
        assert page[start:end] == table
