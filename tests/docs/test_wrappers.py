"""The table in wrapped.md is measured on the real wrappers, and docs/wrappers.md has some of its
rows.

If a change is correct, update it with ``UPDATE_DOCS=1 make test ARGS=tests/docs/test_wrappers.py``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import ckpttool
from ckpttool.naming.wrappers import canonical_keys, infer, is_lightning
from ckpttool.operands.checkpoint import model_section
from ckpttool.tracing.instances import listed, runtime_tensors
from command import main
from places import DATA, DOCS, TESTS
from wrapped_ranks import BLOCKS, CHAINS, PLAIN, Net, Wrapped, filename, net, tensors

TABLE, PAGE = TESTS / "docs" / "wrapped.md", DOCS / "wrappers.md"
COLUMNS = ("wrapped", "at runtime", "key of `state_dict()`", "recognized as", "written by")
# Forms for which torch's get_model_state_dict keeps a segment
KEPT_BY_TORCH = {
    "dp", "averaged", "ac(compile)", "dp(compile)", "fsdp(compile)", "averaged(ddp)", "ddp(averaged)",
    "compile(averaged)", "block: ac(compile)",
}  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n"
TENSOR = "block.0.weight"
LIGHTNING = DATA / "lightning-2.6.6.ckpt"


def row(wrapper: str, cells: Sequence[str]) -> str:
    return f"| {wrapper} | {' | '.join(cells)} |\n"


def named(names: Iterable[str]) -> str:
    (key,) = [key for key, name in canonical_keys(names).items() if name == TENSOR]
    return f"`{key}`"


def ranks_row(wrapped: Wrapped, form: str) -> str:
    rank_names = wrapped.names[form]
    seen = infer(rank_names["keys"]).form
    canonical = [rank_names["canonical"], canonical_keys(rank_names["keys"]).values()]
    written = torch.load(wrapped.folder / "loads" / f"{filename(form)}.pt")
    fits = sorted(written) == sorted(rank_names["keys"]) and not wrapped.failures[form]
    assert all(tensors(names) == sorted(PLAIN) for names in canonical)
    assert (tensors(rank_names["torch"]) == sorted(PLAIN)) == (form not in KEPT_BY_TORCH)
    option = f"`--to {shlex.quote(form)}`" if form in CHAINS else "`--like`"
    return row(
        f"`{form}`",
        [
            named(rank_names["runtime"]),
            named(rank_names["keys"]),
            f"`{seen}`" if seen else "plain",
            option if fits else "no",
        ],
    )


def peft_row(folder: Path) -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(0), LoraConfig(target_modules=["block.0"]))
    source, plain, back = (
        str(folder / f"{name}.pt") for name in ("peft", "peft-plain", "peft-back")
    )
    torch.save(model.state_dict(), source)
    assert main(["remap", source, "--to", "serialized", "-o", plain]) == 0
    assert main(["remap", plain, "--to", "peft", "-o", back]) == 0
    model.load_state_dict(torch.load(back))
    keys = list(model.state_dict())
    live = [tensor.canonical for tensor in runtime_tensors(model, listed(model))]
    adapters = {f"block.0.lora_{half}.default.weight" for half in "AB"}
    assert all({*names} - adapters == {*PLAIN} for names in (live, canonical_keys(keys).values()))
    assert named(get_model_state_dict(model)) == named(keys)
    return row(
        "PEFT, `block.0` with LoRA",
        [
            named(name for name, _ in model.named_parameters()),
            named(keys),
            f"`{infer(keys).form}`",
            "`--to peft`",
        ],
    )


def lightning_row(folder: Path) -> str:
    source = ckpttool.open_checkpoint(str(LIGHTNING))
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
    assert tensors(names.values()) == sorted(PLAIN)
    cells = [f"`{key}`", f"`{key}`", f"`{form}`", "`--to lightning` (attribute `model`)"]
    return row("Lightning, attribute `net`", cells)


def test_table_equals_the_names_of_real_wrappers(wrapped: Wrapped, tmp_path: Path) -> None:
    rows = [ranks_row(wrapped, form) for form in CHAINS + BLOCKS]
    table = (
        HEAD
        + "| --- " * len(COLUMNS)
        + "|\n"
        + "".join([*rows, peft_row(tmp_path), lightning_row(tmp_path)])
    )
    intro, _, shown = TABLE.read_text().partition(HEAD)
    if os.environ.get("UPDATE_DOCS"):
        TABLE.write_text(intro + table)
    else:
        assert HEAD + shown == table
    page = PAGE.read_text()
    rows_of_page = page[page.index(HEAD) :].partition("\n\n")[0].splitlines()
    assert len(rows_of_page) > 10
    assert [row for row in rows_of_page if row not in table.splitlines()] == []
