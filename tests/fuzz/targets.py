"""One target for each reader: a function of bytes that returns a value or raises `CkptError`, and
its seeds.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch import nn

import in_folders
from ckpttool import CkptError, Names, Plan
from ckpttool.cli.app import main
from ckpttool.containers import pickle_read, strict_json
from ckpttool.containers.zip_read import read_archive
from ckpttool.core.expression import ARGUMENT
from ckpttool.core.limits import Limits, limited, with_memory
from ckpttool.core.schema import check
from ckpttool.formats.dcp_metadata import parse as parse_metadata
from ckpttool.formats.hf_index import read_index
from ckpttool.formats.opening import open_checkpoint
from ckpttool.io import sources
from ckpttool.naming import wrappers
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.options import parse_size
from ckpttool.ruleset import parse as rules_file
from ckpttool.ruleset.patterns import matches, parse

DATA = Path(__file__).parents[1] / "data"
# nobody else writes to the inputs, so a reader need not wait until a change would be visible
sources._TICK = 0
LIMITS = Limits(rules_seconds=1, json_bytes=1 << 20)
_FOLDER = Path(
    tempfile.mkdtemp(prefix="ckpttool-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
)
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


@dataclass(frozen=True)
class Target:
    """A reader, its seeds, and a dictionary of tokens."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()

    def run(self, data: bytes) -> bool:
        """Return True if the reader accepts the input; any exception other than `CkptError` is a
        bug.
        """
        with limited(LIMITS):
            try:
                self.read(data)
            except CkptError as error:
                refusal = error
            else:
                return True
        assert refusal.message
        return False


def _of_file(read: Callable[[str], object], name: str) -> Callable[[bytes], object]:
    path = _FOLDER / name

    def run(data: bytes) -> object:
        path.write_bytes(data)
        return read(str(path))

    return run


def _strict_json(data: bytes) -> object:
    try:
        return strict_json.loads(data.decode())
    except ValueError as error:
        raise CkptError(str(error) or "no JSON", hint="") from None


def _of_json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda data: read(_strict_json(data))


def _rule(data: bytes) -> object:
    rule, _, key = data.decode("utf-8", "replace").partition("\n")
    try:
        matches(rule.partition("=>")[0].strip(), key)
    finally:
        renamed = parse(rule).apply(key)
    return renamed


def _command_line(data: bytes) -> object:
    """Run the command line: any arguments give an exit status of 0, 1 or 2, and never a
    traceback.
    """
    words = data.decode("utf-8", "replace").split("\0")[:12]
    if any(
        word.startswith(("-o", "--output", "--report", "--in-place", "--out")) for word in words
    ):
        return None  # the fuzzer must not write files
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    assert status in (0, 1, 2), status
    assert "Traceback" not in err.getvalue()
    assert "internal error" not in err.getvalue(), err.getvalue()
    return status


def _options(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    for read in (lambda: with_memory(text), lambda: parse_size(text), lambda: wrappers.parse(text)):
        try:
            read()
        except CkptError:
            continue
    return None


# Seeds


def _saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@cache
def _training() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "note": {"a": [1, None]},
    }


def _torch_files() -> list[bytes]:
    return [_saved(_training()), _saved({"w": torch.ones(2, 2)[0]}), _saved(torch.ones(3))]


def _legacy_files() -> list[bytes]:
    return [
        _saved(_training(), _use_new_zipfile_serialization=False),
        (DATA / "legacy-torch-2.5.1.pt").read_bytes(),
    ]


def _pickles() -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(_torch_files()[0])) as archive:
        torchs = archive.read("archive/data.pkl")
    values = [{"a": [1, 2.5, "x", b"y", (None, True)], 3: {1, 2}}, 2**70, frozenset([1])]
    return [torchs, *(pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4))]


def _safetensors() -> list[bytes]:
    state = {
        "a": torch.ones(2, 3),
        "b.c": torch.zeros(1, dtype=torch.bfloat16),
        "e": torch.empty(0),
    }
    return [save(state, {"format": "pt"}), save({})]


def _programs() -> list[bytes]:
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return [buffer.getvalue(), *(path.read_bytes() for path in sorted(DATA.glob("tagger-*.pt2")))]


def _scripts() -> list[bytes]:
    return [(DATA / "script-torch-2.5.1.pt").read_bytes()]


def _metadata() -> list[bytes]:
    folder = Path(tempfile.mkdtemp(dir=_FOLDER)) / "dcp"
    dcp.save(
        {"w": torch.ones(4), "n": 3, "x": {"y": [torch.ones(2, 2)]}}, checkpoint_id=str(folder)
    )
    return [(folder / ".metadata").read_bytes()]


_PLAN = {
    "schema": "ckpttool.plan/1",
    "outputs": [
        {
            "section": "",
            "key": "x",
            "from": {"op": "aten.cat.default", "args": [[{"ref": "a"}], 0], "kwargs": {}},
        },
        {"section": "m", "key": "y", "from": {"ref": "a"}},
        {
            "section": "",
            "key": "z",
            "from": {"op": "aten._to_copy.default", "kwargs": {"dtype": {"dtype": "int8"}}},
        },
    ],
    "dropped": [{"section": "", "key": "c", "reason": "r"}],
    "modules": [{"section": "", "old": "m", "new": "n"}],
}
_INDEX = {"metadata": {"total_size": 8}, "weight_map": {"x": "a.safetensors"}}
_RULES = """
[[rule]]
rename = ["a.{x*} => b.{x*}", 're:(.*)_old => \\1']
[[rule]]
split = "qkv.{x}"
into = ["q.{x}", "k.{x}"]
dim = -1
sizes = [1, 2]
[[rule]]
join = ["g.{x}", "u.{x}"]
into = "gu.{x}"
[[rule]]
reshape = "w"
shape = [2, -1]
from_shape = [-1]
[[rule]]
cast = "*.bias"
dtype = "bfloat16"
from = ["float32"]
[[rule]]
permute = "p"
dims = [1, 0]
[[rule]]
transpose = "t"
[[rule]]
drop = "re:d.*"
"""


def _json(*values: object) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(value).encode() for value in values]


def _expression(value: Any) -> object:
    check(ARGUMENT, value, "not an expression", "write one")
    return ARGUMENT.read(value)


def _names() -> list[bytes]:
    return [
        json.dumps(ModelOperand(lambda: nn.Sequential(nn.Linear(1, 1))).names().to_json()).encode()
    ]


def _commands() -> list[bytes]:
    (_FOLDER / "c.pt").write_bytes(_saved({"w": torch.ones(2)}))
    path = str(_FOLDER / "c.pt")
    lines = [
        ["inspect", path, "--format", "json"],
        ["diff", path, path, "--all", "--values"],
        ["remap", path, "--dry-run", "--rule", "w => v", "--drop", "x", "--max-memory", "3"],
        ["explain", "w", "--model", "x.json"],
        ["trace", "m.py:f(n=1)"],
        ["swap-weights", path, path, "--dry-run"],
    ]
    return ["\0".join(line).encode() for line in lines]


_JSON_WORDS = (
    *(b"null", b"true", b"-1", b"1e999", b"{}", b"[]", b'""', b'{"ref":"a"}'),
    *(b"9" * 30, b'"\\ud800"', b"[" * 50, b"[" * 20_000),
)
_RULE_WORDS = (
    b"{x*}",
    b"{x}",
    b" => ",
    b"re:",
    b"(a+)+",
    b"\\1",
    b".",
    b"*",
    b"[!",
    b"{0,9}",
    b"(?P<x>",
    b"a.a.a.a",
)
_PICKLE_WORDS = (
    *(
        b"(",
        b"t.",
        b"\x85",
        b"}",
        b"]",
        b"ccollections\nOrderedDict\n",
        b"R",
        b"b",
        b"\x8a\xff",
        b"Q",
        b"h\0",
    ),
)
_LINE_WORDS = (
    b"missing",
    b"dtype,",
    b" # why",
    b"\n",
    b"re:(a+)+$",
    b"{x*}.{y*}.z",
    b"[!",
    b"\0",
    b"# ",
)
_TOML_WORDS = (
    *(b"[tool.ckpttool]", b"[[a]]", b"a.a.a.a", b"[" * 50, b"a = " + b"[" * 20_000, b"{a={"),
    *(b"1e999", b"9" * 30, b'"""', b" = ", b"\n"),
)
_OPTION_WORDS = (
    b"--rules",
    b"--to",
    b"--from",
    b"--like",
    b"--rtol",
    b"::model",
    b"s3://",
    b"\0",
    b"=",
)

_undo_journal, _undo_seeds = in_folders.undo_journal(_FOLDER / "edits")
_STATES = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

TARGETS: dict[str, Target] = {
    "json": Target(_strict_json, _json(_PLAN, [1, 2.5, None]), _JSON_WORDS),
    "expression": Target(_of_json(_expression), _json(_PLAN["outputs"][0]["from"]), _JSON_WORDS),
    "plan": Target(_of_json(Plan.from_json), _json(_PLAN), _JSON_WORDS),
    "names": Target(_of_json(lambda value: Names.from_json(value, "f")), _names, _JSON_WORDS),
    "index": Target(_of_file(read_index, "x.index.json"), _json(_INDEX), _JSON_WORDS),
    "rules": Target(
        _of_file(rules_file.read_rules, "r.toml"), lambda: [_RULES.encode()], _RULE_WORDS
    ),
    "rule": Target(
        _rule, lambda: [b"a.{x*}.b => {x*}\na.c.b", b"re:(.*)_(\\d+) => \\2\nw_3"], _RULE_WORDS
    ),
    "options": Target(
        _options, lambda: [b"json_bytes=4G", b"5GB", b"fsdp/compile@layers.{i}"], _RULE_WORDS
    ),
    "pickle": Target(pickle_read.loads, _pickles, _PICKLE_WORDS),
    "dcp metadata": Target(lambda data: parse_metadata(data, "f"), _metadata, _PICKLE_WORDS),
    "zip": Target(
        _of_file(read_archive, "a.zip"),
        _torch_files,
        (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"\xff" * 4),
    ),
    "safetensors": Target(_of_file(open_checkpoint, "s.safetensors"), _safetensors, _JSON_WORDS),
    "torch": Target(_of_file(open_checkpoint, "t.pt"), _torch_files, _PICKLE_WORDS),
    "torch before 1.6": Target(_of_file(open_checkpoint, "l.pt"), _legacy_files, _PICKLE_WORDS),
    "torchscript": Target(_of_file(open_checkpoint, "script.pt"), _scripts, _PICKLE_WORDS),
    "program": Target(_of_file(open_checkpoint, "p.pt2"), _programs, _JSON_WORDS),
    "rank files": Target(
        in_folders.rank_file(_FOLDER / "ranks"), in_folders.rank_files, _PICKLE_WORDS
    ),
    **{
        f"deepspeed {stage}": Target(
            in_folders.deepspeed(_FOLDER / f"zero-{stage}", stage, name),
            in_folders.deepspeed_file(stage, name),
            _PICKLE_WORDS,
        )
        for stage, name in ((1, "mp_rank_00_model_states.pt"), (2, _STATES), (3, _STATES))
    },
    "edit journal": Target(_undo_journal, _undo_seeds, _JSON_WORDS),
    "ignore file": Target(
        in_folders.ignore_file(_FOLDER / "i.txt"), lambda: [in_folders.IGNORED], _LINE_WORDS
    ),
    "command line": Target(_command_line, _commands, _OPTION_WORDS),
}
