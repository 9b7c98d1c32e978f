"""Untrusted files: pickle imports are reported and not copied, and the memory for unpickling is
bounded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import pkgutil
import resource
import shlex
import struct
import subprocess
import sys
import zipfile
import zlib
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool.core.pickle_imports import DANGEROUS, KNOWN, OWN, UNKNOWN, verdict
from command import Run
from files import change_archive


class Runs:
    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.function, self.args


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def archive(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """Write a torch file with this pickle (protocol and STOP are added) and one storage of a
    float.
    """
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", b"\x80\x04" + pickled + b".")
        for name, data in {"byteorder": b"little", "data/0": bytes(4), "version": b"3\n"}.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    + b"K\x01tQK\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)  # fmt: skip
STATE = b"}" + text("w") + TENSOR + b"s"


INSIDE = b"cos\nsystem\n(S'id'\ntR."  # pickle bytes for embedding in another pickle
SHAPES = {
    "GLOBAL": b"cposix\nsystem\n" + text("id") + b"\x85R",
    "INST": b"(" + text("id") + b"iposix\nsystem\n",
    "OBJ": b"(cposix\nsystem\n" + text("id") + b"o",
    "STACK_GLOBAL": text("posix") + text("system") + b"\x93" + text("id") + b"\x85R",
    "memo": text("posix")
    + b"q\x000"
    + text("system")
    + b"q\x010"
    + b"h\x00h\x01\x93"
    + text("id")
    + b"\x85R",
    "NEWOBJ": b"cposix\nsystem\n" + text("id") + b"\x85\x81",
    "popped": b"cposix\nsystem\n" + text("id") + b"\x85R0N",
    "python 2": b"ccommands\ngetoutput\n" + text("id") + b"\x85R",
    "through torch": text("torch") + text("os.system") + b"\x93" + text("id") + b"\x85R",
    "through getattr": b"c__builtin__\ngetattr\nctorch\nos\n"
    + text("system")
    + b"\x86R"
    + text("id")
    + b"\x85R",
    "pickle in a pickle": b"cpickle\nloads\nC" + bytes([len(INSIDE)]) + INSIDE + b"\x85R",
    "storage in bytes": b"ctorch.storage\n_load_from_bytes\nC"
    + bytes([len(INSIDE)])
    + INSIDE
    + b"\x85R",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_dangerous_import_is_listed_first_with_its_offset_and_call(
    tmp_path: Path, run: Run, shape: str
) -> None:
    body = (
        b"("
        + text("m")
        + STATE
        + text("args")
        + b"cargparse\nNamespace\n)\x81"
        + text("x")
        + SHAPES[shape]
        + b"d"
    )
    path = archive(tmp_path / "evil.pth", body)
    listed = run("inspect", path, "--format", "json").data["imports"]
    bad = [one for one in listed if one["verdict"] == DANGEROUS]
    assert bad
    assert listed[: len(bad)] == bad
    assert any("id" in call for one in bad for call in one["calls"])
    data = b"\x80\x04" + body
    assert all(one["member"].startswith("archive/data.pkl") for one in bad)
    own = [one for one in bad if one["member"] == "archive/data.pkl"]
    assert all(data[one["offset"] : one["offset"] + 1] in (b"c", b"i", b"\x93") for one in own)
    assert own or shape == "storage in bytes"
    shown = run("inspect", path).out
    assert shown.index(bad[0]["name"]) < shown.index("argparse.Namespace") < shown.index("Sections")
    assert [one.verdict for one in ckpttool.inspect(str(path)).checkpoint.imports] == [
        o["verdict"] for o in listed
    ]


def test_check_fails_on_dangerous_or_unknown_imports_and_prints_how_to_allow_them(
    tmp_path: Path, run: Run
) -> None:
    value = {"m": {"w": torch.ones(1)}, "x": Runs(os.system, "id"), "a": argparse.Namespace(b=1)}
    torch.save(value, tmp_path / "evil.pth")
    done = run("check", tmp_path / "evil.pth", "--format", "json")
    assert done.status == 1
    (file,) = done.data["files"]
    assert [problem["key"] for problem in file["problems"]] == [
        "posix.system",
        "argparse.Namespace",
    ]
    assert "posix.system('id')" in file["problems"][0]["problem"]
    printed = shlex.split(file["hint"].partition(": ")[2])
    assert run(*printed[1:]).status == 0
    torch.save({"w": torch.ones(1), "n": np.float64(2), "p": Path("a")}, tmp_path / "good.pth")
    assert run("check", tmp_path / "good.pth").status == 0


def test_long_calls_are_cut(tmp_path: Path, run: Run) -> None:
    calls = [Runs(os.system, *("x" * 90,) * count) for count in (1, 3)]
    torch.save({"w": torch.ones(1), "x": calls}, tmp_path / "evil.pth")
    (bad,) = [
        one
        for one in run("inspect", tmp_path / "evil.pth", "--format", "json").data["imports"]
        if one["calls"]
    ]
    whole = [f"posix.system({', '.join([repr('x' * 90)] * count)})" for count in (1, 3)]
    assert bad["calls"] == [whole[0], whole[1][:200] + "..."]


def test_damaged_pickle_reports_calls_before_the_damage(tmp_path: Path, run: Run) -> None:
    done = run("check", archive(tmp_path / "evil.pth", SHAPES["GLOBAL"] + b"\xff"))
    assert (done.status, "posix.system" in done.out) == (1, True)


def test_every_pickle_of_a_legacy_file_is_checked(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "old.pt").read_bytes()
    protocol = pickle.dumps(1001, 2)
    evil = b"\x80\x02cposix\nsystem\n" + text("id") + b"\x85R0M\xe9\x03."
    (tmp_path / "old.pt").write_bytes(data.replace(protocol, evil, 1))
    assert "posix.system" in run("check", tmp_path / "old.pt").out


def programs(folder: Path) -> tuple[Path, Path]:
    """Return an exported program, and the same program with code in its sample inputs."""
    program, evil = folder / "p.pt2", folder / "evil.pt2"
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), program)
    buffer = io.BytesIO()
    torch.save(((Runs(os.getcwd),), {}), buffer)

    def with_code(name: str, data: bytes) -> bytes:
        is_input = "sample_inputs/" in name or name.endswith("example_inputs.pt")
        return buffer.getvalue() if is_input else data

    change_archive(program, with_code, evil)
    return program, evil


def test_dcp_items_and_program_records_are_checked(tmp_path: Path, run: Run) -> None:
    dcp.save({"w": torch.ones(2), "x": Runs(os.getcwd)}, checkpoint_id=tmp_path / "d")
    assert run("check", tmp_path / "d").status == 1
    assert "posix.getcwd" in run("inspect", tmp_path / "d").out
    program, evil = programs(tmp_path)
    assert run("check", program).status == 0
    assert "posix.getcwd" in run("check", evil).out


@pytest.mark.parametrize("name", ["extra/MORE.PKL", "more.pickle"])
def test_other_records_of_a_program_that_are_called_pickles_are_checked(
    tmp_path: Path, run: Run, name: str
) -> None:
    """`torch.load(pickle_file=...)` runs them."""
    program, _ = programs(tmp_path)
    with zipfile.ZipFile(program, "a") as file:
        file.writestr(
            f"{file.namelist()[0].partition('/')[0]}/{name}", pickle.dumps(Runs(os.getcwd))
        )
    assert "posix.getcwd" in run("check", program).out
    refused = run("swap-weights", program, program, "-o", tmp_path / "out.pt2")
    assert (refused.status, "--keep-pickled-code" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("nt", "system", DANGEROUS),
        ("subprocess", "Popen", DANGEROUS),
        ("importlib", "import_module", DANGEROUS),
        ("runpy", "run_path", DANGEROUS),
        ("webbrowser", "open", DANGEROUS),
        ("uuid", "_find_mac_near_keyword", DANGEROUS),
        ("uuid", "UUID", KNOWN),
        ("trace", "CoverageResults", DANGEROUS),
        ("_pyrepl.pager", "pipe_pager", DANGEROUS),
        ("fickling.hook", "remove_hook", DANGEROUS),
        ("ckpttool", "remap", DANGEROUS),
        ("shutil", "rmtree", DANGEROUS),
        ("ctypes", "CDLL", DANGEROUS),
        ("torch.hub", "load", DANGEROUS),
        ("torch", "load", DANGEROUS),
        ("torch.fx.graph_module", "reduce_graph_module", DANGEROUS),
        ("builtins", "__import__", DANGEROUS),
        ("operator", "attrgetter", DANGEROUS),
        ("torch.nn", "Module.__init__.__globals__.get", DANGEROUS),
        ("pathlib", "Path.write_text", DANGEROUS),
        ("pathlib", "PosixPath", KNOWN),
        ("copy_reg", "_reconstructor", KNOWN),
        ("torch.nn.modules.linear", "Linear", OWN),
        ("torch.ao.quantization.fx.graph_module", "GraphModule", UNKNOWN),
        ("torch.distributed._shard.checkpoint._async_process_executor", "TCPStore", UNKNOWN),
        ("torch.distributed._shard.checkpoint.metadata", "Metadata", OWN),
        ("torch.distributed.checkpoint.metadata", "Metadata", OWN),
        ("torch.utils.data.dataset", "Subset", UNKNOWN),
        ("mymodel", "Net", UNKNOWN),
        ("mymodel", "Net.Part", UNKNOWN),
        ("pathlib", "Path.unlink", DANGEROUS),
    ],
)
def test_verdict_of_an_import(module: str, name: str, expected: str) -> None:
    assert verdict(module, name) == expected


MODULES = [
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch.serialization",
    "torch.storage",
    "torch._utils",
]
MODULES += [
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.distributed.tensor",
    "torch.nn.utils.prune",
]
MODULES += [
    "torch.ao.quantization.observer",
    "torch.nn.parallel.data_parallel",
    "torch.optim.lr_scheduler",
    "collections",
]


@pytest.mark.parametrize("module", MODULES)
def test_torch_names_trusted_as_own_are_defined_in_torch(module: str) -> None:
    """A re-exported name of a module that can run code is not trusted as torch's own."""
    bad = (
        "os",
        "sys",
        "subprocess",
        "pickle",
        "importlib",
        "inspect",
        "shutil",
        "tempfile",
        "threading",
        "io",
    )
    for name, value in vars(import_module(module)).items():
        if verdict(module, name) in (OWN, KNOWN):
            assert type(value) is not type(os), name
            assert str(getattr(value, "__module__", "")).partition(".")[0] not in bad, name


def test_modules_of_python_2_get_the_verdict_of_their_new_names() -> None:
    assert {
        old for old, new in IMPORT_MAPPING.items() if verdict(old, "any") != verdict(new, "any")
    } == set()
    assert {verdict(old, "any") for old in ("thread", "urllib2", "commands", "cPickle")} == {
        DANGEROUS
    }


HARMLESS = tuple(
    """
    typing. typing_extensions. abc. enum. collections. dataclasses. numbers. contextlib.Abstract
    torch.optim._multi_tensor. torch.types.Storage torch._prims_common.ELEMENTWISE torch._C._nn.
    torch._VariableFunctionsClass. torch.nn.functional.
    """.split()  # noqa: SIM905 - a list would have a line each
)


@pytest.mark.filterwarnings("ignore")
def test_reexported_class_of_another_package_is_not_torchs_own() -> None:
    """A pickle can name a class through any module that imports it. `CKPTTOOL_SUITES=all` imports
    all torch modules.
    """
    modules = [name for name in sys.modules if name.startswith("torch.")]
    if os.environ.get("CKPTTOOL_SUITES") == "all":
        modules = [
            one.name
            for one in pkgutil.walk_packages(torch.__path__, "torch.", onerror=lambda name: None)
        ]
    wrong = []
    for module in modules:
        if verdict(module, "AnyClass") != OWN or module.endswith("__main__"):
            continue
        try:
            values = vars(import_module(module))
        except Exception:  # it needs another package
            continue
        for name, value in values.items():
            home, own_name = (
                getattr(value, "__module__", None),
                getattr(value, "__qualname__", None),
            )
            if verdict(module, name) not in (OWN, KNOWN) or not home or not own_name:
                continue
            if verdict(home, own_name) not in (OWN, KNOWN) and not f"{home}.{own_name}".startswith(
                HARMLESS
            ):
                wrong.append((module, name, home))
    assert wrong == []


# Copying pickled code


@pytest.mark.parametrize("out", ["out.pt", "out.dcp"])
def test_code_is_not_copied_by_default(tmp_path: Path, run: Run, out: str) -> None:
    torch.save({"m": {"w": torch.ones(1)}, "x": Runs(os.getcwd)}, tmp_path / "evil.pth")
    command = ["remap", tmp_path / "evil.pth", "-o", tmp_path / out, "--rule", "w => v"]
    refused = run(*command)
    assert (refused.status, (tmp_path / out).exists()) == (1, False)
    assert "imports posix.getcwd @ x" in refused.err
    assert run(*command, "--dry-run").status == 1
    assert run(*command, "--keep-pickled-code").status == 0
    assert run("check", tmp_path / out).status == 1
    line = shlex.split(refused.err.partition("to leave it out: ckpttool ")[2].partition(";")[0])
    assert line[-4:] == ["--drop", "x", "-o", str(tmp_path / out)]
    assert run(*line, "--force").status == 0
    assert run("check", tmp_path / out).status == 0


@pytest.mark.parametrize(
    "words", [("convert", "--dtype", "float16"), ("fix", "--model", "net.py:build")]
)
def test_command_that_leaves_code_out_can_be_pasted(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """`convert` and `fix` have no --drop."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)\n")
    torch.save({"m": nn.Linear(2, 2).state_dict(), "x": Runs(os.getcwd)}, "evil.pt")
    refused = run(*words, "evil.pt", "-o", "out.pt")
    assert refused.status == 1
    lines = refused.err.partition("to leave it out: ")[2].partition(";")[0].split(" && ")
    for line in lines:
        assert run(*shlex.split(line)[1:]).status == 0, line
    assert run("check", "out.pt").status == 0
    dtypes = {tensor.dtype for tensor in torch.load("out.pt")["m"].values()}
    assert dtypes == {torch.float16 if "--dtype" in words else torch.float32}


def test_code_outside_the_chosen_section_is_not_copied(tmp_path: Path, run: Run) -> None:
    torch.save({"m": {"w": torch.ones(1)}, "x": Runs(os.getcwd)}, tmp_path / "evil.pth")
    assert (
        run(
            "remap", f"{tmp_path / 'evil.pth'}::m", "-o", tmp_path / "a.pt", "--rule", "w => v"
        ).status
        == 0
    )
    assert run("check", tmp_path / "a.pt").status == 0
    edit = ["remap", tmp_path / "evil.pth", "--in-place", "--rule", "w => v"]
    assert run(*edit).status == 1
    assert run(*edit, "--keep-pickled-code").status == 0


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "in place") for kind in ("zip", "dcp", "shards")),
        *((kind, "a copy") for kind in ("zip", "legacy", "dcp", "shards")),
    ],
)
def test_dropped_imports_do_not_cause_a_refusal(
    tmp_path: Path, run: Run, kind: str, way: str
) -> None:
    value = {"w": torch.ones(2), "x": Runs(os.getcwd)}
    path = tmp_path / ("m" if kind in ("dcp", "shards") else "m.pt")
    if kind == "dcp":
        dcp.save(value, checkpoint_id=path)
    elif kind == "shards":
        path.mkdir()
        names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        torch.save(value, path / names[0])
        torch.save({"v": torch.ones(2)}, path / names[1])
        index = {"metadata": {}, "weight_map": {"w": names[0], "x": names[0], "v": names[1]}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    end = {"dcp": ".dcp", "shards": "/"}.get(kind, ".pt")
    out = ["--in-place"] if way == "in place" else ["-o", f"{tmp_path}/out{end}"]
    assert run("check", path).status == 1
    refused = run("remap", path, "--rule", "w => u", *out)
    assert (refused.status, run("check", path).status) == (1, 1)
    assert run("remap", path, "--drop", "x", *out).status == 0
    assert run("check", path if way == "in place" else f"{tmp_path}/out{end}").status == 0


@pytest.mark.parametrize("twice", [False, True])
def test_popped_call_in_a_dcp_item_is_refused_until_the_item_is_dropped(
    tmp_path: Path, run: Run, twice: bool
) -> None:
    """The item's value does not show the call. If two items are equal, either may be kept, so both
    must be dropped.
    """
    items = {"model": {"w": torch.ones(2)}, "x": "a" * 200, **({"y": "a" * 200} if twice else {})}
    dcp.save(items, checkpoint_id=tmp_path / "d")
    (data,) = (tmp_path / "d").glob("*.distcp")
    old = pickle.dumps("a" * 200, 2)
    runs = b"\x80\x02" + SHAPES["popped"].removesuffix(b"N")
    new = runs + text("a" * (len(old) - len(runs) - 6)) + b"."
    content = data.read_bytes()
    assert content.count(old) == 1 + twice
    assert len(new) == len(old)
    was, now = (zlib.crc32(one).to_bytes(4, "little") for one in (old, new))
    data.write_bytes(content.replace(old, new).replace(was, now))
    assert "posix.system" in run("check", tmp_path / "d").out
    for out in (["--in-place"], ["-o", tmp_path / "out.dcp"]):
        done = run(
            "remap", tmp_path / "d", "--rule", "w => v", *out, *(["--drop", "x"] if twice else [])
        )
        assert (done.status, "posix.system" in done.err) == (1, True)
    dropped = ["--drop", "x", *(["--drop", "y"] if twice else [])]
    assert (
        run(
            "remap", tmp_path / "d", "--rule", "w => v", *dropped, "-o", tmp_path / "out.dcp"
        ).status
        == 0
    )


@pytest.mark.parametrize("place", ["sample_inputs", "weights"])
def test_swap_does_not_copy_code_by_default(tmp_path: Path, run: Run, place: str) -> None:
    """Code in the program is refused, code in the weights is not copied."""
    program = programs(tmp_path)[place == "sample_inputs"]
    model = {"model": nn.Linear(2, 2).state_dict()}
    torch.save({**model, "x": Runs(os.getcwd)} if place == "weights" else model, tmp_path / "w.pt")
    out = tmp_path / "out.pt2"
    command = ["swap-weights", program, f"{tmp_path / 'w.pt'}::model", "-o", out]
    if place == "sample_inputs":
        before = program.read_bytes()
        for words in (command, [*command, "--dry-run"]):
            refused = run(*words)
            assert (refused.status, out.exists(), "posix.getcwd" in refused.err) == (1, False, True)
            assert "--keep-pickled-code" in refused.err
        assert program.read_bytes() == before
        command.append("--keep-pickled-code")
    assert run(*command).status == 0
    assert run("check", out).status == (1 if place == "sample_inputs" else 0)


def test_swap_names_pickles_that_cannot_be_read(tmp_path: Path, run: Run) -> None:
    program, _ = programs(tmp_path)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    for path, folder in ((program, program.stem), (tmp_path / "w.pt", "w")):
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(f"{folder}/{folder}.pkl", b"\x80\x02cfoo\nbar\n\xff.")
    done = run(
        "swap-weights", program, tmp_path / "w.pt", "-o", tmp_path / "out.pt2", "--format", "json"
    )
    notes = json.loads(done.out)["notes"]
    assert {note["code"] for note in notes} == {"unknown-import"}
    assert [note["text"].split(": ")[1] for note in notes] == [
        "w/w.pkl",
        f"{program.stem}/{program.stem}.pkl",
    ]


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

N = 20_000
HOSTILE: dict[str, tuple[bytes, int]] = {
    "lists": (b"(" + b"]" * 3 * N + b"l", zipfile.ZIP_STORED),
    "sets": (b"(" + b"\x8f" * 3 * N + b"l", zipfile.ZIP_STORED),
    "calls": (b"cA\nB\nq\x000(" + b"h\x00)R" * N + b"l", zipfile.ZIP_STORED),
    "imports": (b"(" + b"".join(b"cA\nB%d\n" % n for n in range(N)) + b"l", zipfile.ZIP_STORED),
    "memo": (b"N" + b"\x94" * 3 * N, zipfile.ZIP_STORED),
    "dicts that could be sections": (
        b"(" + b"".join(text(f"k{n}") + b"}" + text("a") + b"K\x01s" for n in range(N)) + b"d", zipfile.ZIP_STORED
    ),
    "dicts in dicts under long keys": (
        TENSOR + b"q\x000" + text("a" * 50_000) + b"q\x010("
        + b"".join(text(f"k{n}") + b"}h\x01" * 190 + b"h\x00" + b"s" * 190 for n in range(30)) + b"d",
        zipfile.ZIP_STORED,
    ),
    "expanding lists": (b"(" + b"]" * 20_000_000 + b"l", zipfile.ZIP_DEFLATED),
    "expanding text": (text("a" * 100_000_000), zipfile.ZIP_DEFLATED),
}  # fmt: skip
NEXT_TO_A_MODEL = {"lists": ["inspect", "diff"], "calls": ["inspect", "remap"], "imports": ["diff"]}
COMMANDS = {
    "inspect": (),
    "diff": ("again",),
    "remap": ("--dry-run", "--rule", "w => v"),
    "check": (),
}
CHILD = """
import sys
from ckpttool.cli.app import main
status = main(sys.argv[1:])
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print("took", status, int(peak) * 1024, file=sys.stderr)
"""


def cost(*words: str) -> tuple[int, int, float, str]:
    """Run a command in a new process; return its exit status, peak memory in bytes, CPU seconds and
    output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    _, status, peak = done.stderr.splitlines()[-1].split()
    return int(status), int(peak), after.ru_utime - before.ru_utime, done.stdout + done.stderr


@LINUX
@pytest.mark.parametrize("shape", HOSTILE)
def test_memory_for_a_hostile_pickle_is_bounded_by_file_size(tmp_path: Path, shape: str) -> None:
    body, method = HOSTILE[shape]
    if shape in NEXT_TO_A_MODEL:
        body = b"(" + text("m") + STATE + text("x") + body + b"d"
    path = archive(tmp_path / "evil.pt", body, method)
    for command in COMMANDS if "dicts" in shape else NEXT_TO_A_MODEL.get(shape, ["inspect"]):
        rest = [str(path) if word == "again" else word for word in COMMANDS[command]]
        status, peak, _, output = cost(command, str(path), *rest)
        assert peak < 250e6 + 20 * path.stat().st_size, command
        assert status in (0, 1, 2)
        assert "Traceback" not in output
        if shape.startswith(("expanding", "dicts in dicts")):
            assert "the limit pickle_memory is" in output


@LINUX
@pytest.mark.parametrize("command", COMMANDS)
def test_shared_nesting_does_not_take_exponential_time(tmp_path: Path, command: str) -> None:
    path = archive(tmp_path / "evil.pt", STATE + b"q\x01" + b"0(h\x01h\x01lq\x01" * 40)
    rest = [str(path) if word == "again" else word for word in COMMANDS[command]]
    _, peak, seconds, _ = cost(command, str(path), *rest)
    assert seconds < 5
    assert peak < 250e6


# Rank files and DeepSpeed


def test_only_step_counters_must_agree_between_ranks(tmp_path: Path, run: Run) -> None:
    """Only complete words mark a counter: `criterion` and `writer` contain `iter` but are not
    counters.
    """
    names = {"criterion": "a", "writer": "log/0", "stepwise_lr": 1, "reiterate": 2}
    for rank in range(2):
        own = {name: f"{value}{rank}" for name, value in names.items()}
        torch.save({"model": {"w": torch.ones(2)}, "epoch": 3, **own}, tmp_path / f"rank_{rank}.pt")
    assert run("inspect", tmp_path / "rank_*.pt").status == 0
    for name in ("iter", "num_iters", "globalStep", "Epoch", "trainer.step"):
        for rank in range(2):
            torch.save({"model": {"w": torch.ones(2)}, name: rank}, tmp_path / f"rank_{rank}.pt")
        done = run("inspect", tmp_path / "rank_*.pt")
        assert (done.status, name in done.err) == (2, True)


def test_deepspeed_folder_without_a_stage_prints_the_command_to_run(
    tmp_path: Path, run: Run
) -> None:
    step = tmp_path / "global_step1"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step1")
    torch.save(
        {"module": {"w": torch.ones(2)}, "ds_version": "0.19"}, step / "mp_rank_00_model_states.pt"
    )
    state = {
        "optimizer_state_dict": {"base_optimizer_state": {}, "clip_grad": 1.0, "partition_count": 1}
    }
    torch.save(state, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    done = run("inspect", step)
    assert done.status == 2
    assert "it has no ZeRO stage" in done.err
    assert "base_optimizer_state, clip_grad" in done.err
    assert f"python -m deepspeed.utils.zero_to_fp32 {tmp_path} OUT" in done.err
    assert "deepspeed.checkpoint.ds_to_universal" in done.err
    assert "newer ckpttool" not in done.err


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state_0.pth"])
def test_dangerous_imports_in_trainer_files_are_listed(name: str, run: Run, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / name)
    assert "dangerous import" not in run("inspect", tmp_path).err
    assert run("check", tmp_path).status == 0
    torch.save({"args": Runs(os.system, "id")}, tmp_path / name)
    done = run("inspect", tmp_path)
    assert "1 dangerous import" in done.err
    assert str(tmp_path / name) in done.out
    assert [
        one["verdict"] for one in run("inspect", tmp_path, "--format", "json").data["imports"]
    ] == [DANGEROUS]
    done = run("check", tmp_path)
    assert done.status == 1
    assert f"{tmp_path / name}: " in done.out + done.err


_BELOW = [
    "1_Pooling/pytorch_model.bin",
    "checkpoint-500/optimizer.pt",
    "a/b/c/state.ckpt",
    ".cache/rng_state_0.pth",
    "onnx/tokenizer.joblib",
    "MODEL.PT",
    "sub/pickle",
    "archive",
]


@pytest.mark.parametrize("name", _BELOW)
def test_check_looks_into_subfolders_and_files_of_any_name(
    name: str, run: Run, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "loop").symlink_to("..")
    (tmp_path / "sub" / "notes.txt").write_text("PK is the start of an archive")
    with zipfile.ZipFile(tmp_path / "sub" / "code.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"args": argparse.Namespace(lr=0.1)}, path)
    assert run("check", tmp_path).status == 0
    value = {"args": Runs(os.system, "id")}
    if path.suffix in ("", ".joblib") and name != "archive":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path)
    done = run("check", tmp_path, "--format", "json")
    assert done.status == 1
    (file,) = done.data["files"]
    assert [problem["key"] for problem in file["problems"]] == ["posix.system"]
    assert str(path) in file["problems"][0]["problem"]


def test_check_follows_links_to_folders_once(run: Run, tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"args": Runs(os.system, "id")}, other / "own.pt")
    for name in ("first", "second"):
        (folder / name).symlink_to(other)
    done = run("check", folder, "--format", "json")
    assert done.status == 1
    assert len(done.data["files"][0]["problems"]) == 1


@pytest.mark.parametrize("name", ["training_args.bin", "scheduler.pt", "own.pkl"])
def test_other_files_with_dangerous_imports_are_not_copied(
    name: str, run: Run, tmp_path: Path
) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    command = ["remap", folder, "-o", f"{out}/", "--rule", "w => v"]
    value = {"args": Runs(os.system, "id")}
    (folder / name).write_bytes(pickle.dumps(value)) if name.endswith(".pkl") else torch.save(
        value, folder / name
    )
    refused = run(*command)
    assert (refused.status, out.exists()) == (1, False)
    assert "posix.system" in refused.out + refused.err
    assert name in refused.out + refused.err
    assert (
        run(
            "remap",
            folder / "model.safetensors",
            "-o",
            tmp_path / "alone.safetensors",
            *command[-2:],
        ).status
        == 0
    )
    assert run(*command, "--keep-pickled-code", "--force").status == 0
    assert (out / name).read_bytes() == (folder / name).read_bytes()
    torch.save({"args": argparse.Namespace(lr=0.1)}, folder / name)
    assert run(*command, "--force").status == 0


def test_what_the_safe_loader_of_torch_allows_is_torchs_own() -> None:
    """Each new version of torch may allow more: these names belong in the table of
    `pickle_imports`.
    """
    from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

    for module in (
        "distributed.tensor",
        "distributed.fsdp",
        "distributed.checkpoint",
        "nested",
        "_dynamo",
        "export",
    ):
        import_module(f"torch.{module}")
    allowed = {*_get_allowed_globals()}
    # not those of other tests
    allowed |= {path for path in _get_user_allowed_globals() if path.startswith("torch.")}
    refused = {path: verdict(*path.rpartition(".")[::2]) for path in allowed}
    assert {path: found for path, found in refused.items() if found not in (OWN, KNOWN)} == {}


def test_check_of_a_jagged_tensor(tmp_path: Path, run: Run) -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    torch.save(
        {"w": torch.nested.nested_tensor(parts, layout=torch.jagged)}, tmp_path / "jagged.pt"
    )
    torch.load(tmp_path / "jagged.pt", weights_only=True)
    assert run("check", tmp_path / "jagged.pt").status == 0
    (section,) = ckpttool.open_checkpoint(tmp_path / "jagged.pt").sections
    assert section.tensors[0].dtype == "float32"


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parent / "data").glob("dtensors-torch-*")), ids=str
)
def test_check_of_files_of_fully_shard(folder: Path, run: Run) -> None:
    """Every supported version of torch allows what its files import."""
    done = run("check", *sorted(folder.glob("*.pt")))
    assert (done.status, done.err) == (0, "")
