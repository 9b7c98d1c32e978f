"""Files modeled on picklescan's and fickling's own tests, and on the advisories about them.

The oracles are the verdicts of both scanners (tests/data/scanners.tsv, compared with the scanners
if installed), and for archives torch itself. `CKPTTOOL_SUITES=all` also tests every name on the
scanners' lists.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from command import Run
from places import ROOT

ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
DANGEROUS, UNKNOWN = "dangerous", "unknown"


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def imported(module: str, name: str) -> bytes:
    return b"\x80\x04" + text(module) + text(name) + b"\x93."


def call(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93" + text("id") + b"\x85R"


def torch_file(path: Path, pickled: bytes) -> Path:
    """Write a torch file with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", data)
    return path


def folder_with(folder: Path, name: str, data: bytes) -> Path:
    """Write a folder with weights and this file."""
    folder.mkdir()
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    (folder / name).write_bytes(data)
    return folder


# Names

with (ROOT / "tests/data/scanners.tsv").open() as rows:
    NAMES = [tuple(row) for row in csv.reader(rows, delimiter="\t")][1:]
# Names that a scanner calls dangerous and we call unknown; `check` fails for both.
MILDER = {
    "functools.partial": "it calls nothing, and the wrapped function is a separate import",
    "torch.storage._load_from_bytes": "the pickle in the bytes is read, and its imports are listed",
    **dict.fromkeys(
        ("torch.jit", "torch.compile"), "only some functions of torch.jit load or compile"
    ),
    **dict.fromkeys(
        (
            "test",
            "code",
            "platform",
            "logging",
            "operator",
            "_operator",
            "functools",
            "filecmp",
            "difflib",
        ),
        "the module has harmless names too, or a user's folder may have its name",
    ),
    **dict.fromkeys(
        ("builtins", "__builtin__", "__builtins__"), "the module has harmless names too"
    ),
    **dict.fromkeys(("eval", "exec", "compile"), "no module has this name"),
}


def our_verdict(run: Run, folder: Path, module: str, name: str) -> str:
    """Return the worst verdict for a torch file that imports the name; `check` must agree."""
    path = torch_file(folder / "x.pt", imported(module, name))
    found = [one["verdict"] for one in run("inspect", path, "--format", "json").data["imports"]]
    worst = DANGEROUS if DANGEROUS in found else UNKNOWN if UNKNOWN in found else "harmless"
    assert run("check", path).status == (0 if worst == "harmless" else 1)
    return worst


@pytest.mark.parametrize("scanner", ["picklescan", "fickling"])
def test_names_from_a_scanners_tests(
    scanner: str, run: Run, tmp_path: Path, record_property: Any
) -> None:
    rows = [(module, name, theirs) for who, module, name, theirs in NAMES if who == scanner]
    record_property("part", scanner)
    record_property("cases", len(rows))
    wrong = {}
    for module, name, theirs in rows:
        ours = our_verdict(run, tmp_path, module, name)
        milder = f"{module}.{name}" in MILDER and ours == UNKNOWN
        if (theirs == DANGEROUS and ours != DANGEROUS and not milder) or (
            theirs == "innocuous" and ours == DANGEROUS
        ):
            wrong[module, name] = theirs, ours
    assert wrong == {}


def picklescan_says(data: bytes) -> str:
    scanner = pytest.importorskip("picklescan.scanner")
    levels = [one.safety.value for one in scanner.scan_pickle_bytes(io.BytesIO(data), "x").globals]
    return next((level for level in (DANGEROUS, "suspicious") if level in levels), "innocuous")


def fickling_says(data: bytes) -> str:
    analysis = pytest.importorskip("fickling.analysis")
    pickled = importlib.import_module("fickling.fickle").Pickled.load(data)
    return (
        DANGEROUS
        if analysis.check_safety(pickled).severity > analysis.Severity.LIKELY_SAFE
        else "innocuous"
    )


SCANNERS: dict[str, Callable[[bytes], str]] = {
    "picklescan": picklescan_says,
    "fickling": fickling_says,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scanner", SCANNERS)
def test_recorded_verdicts_match_the_scanner(scanner: str) -> None:
    for who, module, name, verdict in NAMES:
        if who == scanner:
            assert (module, name, SCANNERS[who](imported(module, name))) == (module, name, verdict)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scanner", SCANNERS)
def test_every_name_on_a_scanners_list(
    scanner: str, run: Run, tmp_path: Path, record_property: Any
) -> None:
    if not ALL:
        pytest.skip("runs only with CKPTTOOL_SUITES=all")
    names: set[tuple[str, str]] = set()
    if scanner == "picklescan":
        listed = pytest.importorskip("picklescan.scanner")._unsafe_globals
        for module, some in listed.items():
            names |= {
                (module, name)
                for name in (["any"] if some == "*" else [some] if isinstance(some, str) else some)
            }
    else:
        imports = pytest.importorskip("fickling.analysis").UnsafeImportsML
        names |= {(module, "any") for module in imports.UNSAFE_MODULES}
        names |= {
            (module, "any") for module in importlib.import_module("fickling.fickle").UNSAFE_IMPORTS
        }
        names |= {
            (module, name) for module, some in imports.UNSAFE_IMPORTS.items() for name in some
        }
    record_property("part", scanner)
    record_property("cases", len(names))
    found = {
        (module, name): our_verdict(run, tmp_path, module, name) for module, name in sorted(names)
    }
    milder = {one for one, verdict in found.items() if verdict != DANGEROUS}
    assert {found[one] for one in milder} <= {UNKNOWN}
    assert {one for one in milder if one[0] not in MILDER and ".".join(one) not in MILDER} == set()


# Pickles that no pickler writes

EVIL = call("os", "system")
LAST = b"\x80\x02" + EVIL + b"."
MAGIC, VERSION = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
INNOCENT = {
    "plain, protocol 0": pickle.dumps(["a", "b", "c"], 0),
    "plain, protocol 3": pickle.dumps(["a", "b", "c"], 3),
    "plain, protocol 4": pickle.dumps(["a", "b", "c"], 4),
    "plain, in frames": pickle.dumps(["a" * 100_000, "b"], 5),
    "a list in itself": b"\x80\x02]q\0h\0a.",
    "an array of objects": pickle.dumps(np.array([1, "a", None], dtype=object)),
    "an array of numbers": pickle.dumps(np.arange(4.0)),
    "a call whose result is dropped": b"\x80\x04"
    + text("collections")
    + text("OrderedDict")
    + b"\x93)R0N.",
}
HOSTILE = {
    "a global of text lines": b"cos\nsystem\n(S'id'\ntR.",
    "an instance": b"(S'id'\nios\nsystem\n.",
    "an object": b"(cos\nsystem\nS'id'\no.",
    "names in the memo": b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(Vid\ntR.",
    "names as Python 2 strings": b"S'os'\nS'system'\n\x93S'id'\n\x85R.",
    "a chain of built-in functions": (
        b"c__builtin__\nglobals\n(tRp1\n0c__builtin__\ncompile\n(S'x=1'\nS''\nS'exec'\ntRp2\n0c__builtin__\neval\n"
        b"(g2\ng1\ntRp3\n0c__builtin__\napply\n(g3\n(g1\nS'x'\nltRp4\n0g4\n."
    ),
    "attribute getter": (
        b"\x80\x04" + text("operator") + text("attrgetter") + b"\x93" + text("system") + b"\x85R"
        + text("builtins") + text("__import__") + b"\x93" + text("os") + b"\x85R\x85R" + text("id") + b"\x85R."
    ),
    "dotted name below a harmless module": b"\x80\x04" + call("pathlib", "os.system") + b".",
    "dropped by POP": b"\x80\x04(" + text("smtplib") + text("SMTP") + b"\x93" + text("localhost") + b"o0N.",
    "before a name that is not memoized": b"\x80\x04" + EVIL + b"0" + text("os") + b"\x94h\x03h\x00\x93K\x42.",
    "before a name that is a number": b"\x80\x04" + EVIL + b"0J\x2a\0\0\0\x94h\0h\0\x93K\x42.",
    "before an invalid opcode": b"\x80\x04" + EVIL + b"\xff.",
    "before the end of the file": b"\x80\x04" + EVIL,
    "without an end": b"cbuiltins\nexec\n(X\x10\0\0\0open('x').read()tRX.",
    "after several headers": b"\x80\x02\x80\x03\x80\x04" + EVIL + b".",
    "in the second pickle": pickle.dumps(["a"]) + b"\x80\x04" + EVIL + b".",
    "in the third pickle": pickle.dumps(["a"]) * 2 + b"\x80\x04" + EVIL + b".",
    "before bytes that are not a pickle": b"\x80\x04" + EVIL + b".\xde\xad\xbe\xef",
    "a state for a module": b"ctorch\n_utils\n}" + text("_rebuild_tensor") + b"c__builtin__\nexec\nsb.",
    "a file of torch.save whose first pickle is a call": (
        b"\x80\x02c__builtin__\neval\n" + text("0x1950A86A20F9469CFC6C") + b"\x85R." + VERSION + LAST
    ),
    "a file of torch.save whose first number is a harmless call": (
        b"\x80\x02c__builtin__\nint\n" + text("119547037146038801333356") + b"\x85R." + VERSION + LAST
    ),
    "number in another encoding": b"\x80\x02\x8b\x0a\0\0\0" + MAGIC[4:] + VERSION + LAST,
    "a frame that ends in an opcode": b"\x80\x04\x95\x03" + bytes(7) + b"\x8c\x14" + b"A" * 20 + b".",
    "a frame after the end": MAGIC[:2] + b"\x95\x40" + bytes(7) + MAGIC[2:] + VERSION + b"}." + LAST,
    "bytes inside bytes": (
        b"\x80\x04" + text("pickle") + text("loads") + b"\x93C\x14" + b"cos\nsystem\n(S'id'\ntR." + b"\x85R."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*INNOCENT, *HOSTILE])
def test_pickles(name: str, run: Run, tmp_path: Path) -> None:
    """Try each pickle inside a torch file, as a separate file, and next to weights."""
    data = INNOCENT.get(name) or HOSTILE[name]
    expected = 0 if name in INNOCENT else 1
    for done in (
        run("check", torch_file(tmp_path / "x.pt", data)),
        run("check", folder_with(tmp_path / "folder", "own.pkl", data)),
    ):
        assert (done.status, done.err) == (expected, "")
    (tmp_path / "own.pkl").write_bytes(data)
    assert run("inspect", tmp_path / "own.pkl").status == 2
    out = tmp_path / "out.pt"
    copied = run("remap", tmp_path / "x.pt", "-o", out, "--rule", "nothing => something")
    assert copied.status in (0, 1, 2)
    if expected:
        assert (copied.status, out.exists()) != (0, True)


NOT_PICKLES = {
    "an image": b"\x89PNG\r\n\x1a\n",
    "text": b"cmod\n\xf8\n",
    "7z": b"7z\xbc\xaf\x27\x1c" + bytes(40),
    "numpy array": b"\x93NUMPY\1\0" + bytes(40),
}


@pytest.mark.parametrize("name", NOT_PICKLES)
def test_files_that_are_not_pickles(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(NOT_PICKLES[name])
    done = run("inspect", tmp_path / "x.pt")
    assert (done.status, done.err.startswith("error: ")) == (2, True)
    assert run("check", tmp_path / "x.pt").status == 1
    done = run("check", folder_with(tmp_path / "folder", "own.pkl", NOT_PICKLES[name]))
    assert (done.status, "(unreadable pickle)" in done.out) == (1, True)


# Pickles above for which a scanner's verdict differs from `check`, with the reason.
SCANNER_DIFFERENCES = {
    "picklescan": {
        "dotted name below a harmless module": "suspicious: it checks only the module, pathlib",
        "dropped by POP": "suspicious: it does not list smtplib",
        "a frame that ends in an opcode": "no import is visible; Python reads other opcodes",
    },
    "fickling": {
        "an array of objects": "it allows numpy only in a different mode",
        "an array of numbers": "it allows numpy only in a different mode",
        "a call whose result is dropped": "it considers such a call dangerous",
        "in the second pickle": "it reads the first one",
        "in the third pickle": "it reads the first one",
        "number in another encoding": "it reads the first pickle",
        "a frame after the end": "it reads the first pickle",
        "a frame that ends in an opcode": "same reason as picklescan",
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scanner", SCANNERS)
def test_scanner_verdicts_on_these_pickles(scanner: str, record_property: Any) -> None:
    record_property("part", scanner)
    record_property("cases", len(INNOCENT) + len(HOSTILE))
    others = set()
    for name, data in (INNOCENT | HOSTILE).items():
        try:
            is_refused = SCANNERS[scanner](data) == DANGEROUS
        except Exception:  # fickling raises for a pickle that it cannot read
            is_refused = True
        if is_refused == (name in INNOCENT):
            others.add(name)
    assert others == set(SCANNER_DIFFERENCES[scanner])


# Archives, with torch as the oracle


def members(value: object) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


GOOD, OTHER = members({"w": torch.ones(2)}), members({"other": torch.zeros(3)})
PICKLE, STORAGE = "archive/data.pkl", "archive/data/0"


def archive(*pairs: tuple[str, bytes], at: int = 0, comment: bytes = b"") -> bytes:
    """Build a zip archive that begins at offset `at` of a file."""
    buffer = io.BytesIO(bytes(at))
    buffer.seek(at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        with zipfile.ZipFile(buffer, "a" if at else "w") as file:
            for name, data in pairs:
                file.writestr(zipfile.ZipInfo(name), data)
            file.comment = comment
    return buffer.getvalue()[at:]


def with_field(in_directory: bool, offset: int, code: str, value: int) -> bytes:
    """Return the good archive with one changed header field of its pickle."""
    data = bytearray(archive(*GOOD.items()))
    name = PICKLE.encode()
    start = data.rindex(name) - 46 if in_directory else data.index(name) - 30
    struct.pack_into(code, data, start + offset, value)
    return bytes(data)


def with_end(comment_length: int) -> bytes:
    """Return the good archive with another in its comment, whose end record has this comment
    length.
    """
    good = archive(*GOOD.items())
    other = bytearray(archive(*OTHER.items(), at=len(good)))
    struct.pack_into("<H", other, len(other) - 2, comment_length)
    return good[:-2] + struct.pack("<H", len(other)) + bytes(other)


FLAGS = {f"flags 0x{value:x}": ("<H", 6, 8, value) for value in (0x1, 0x20, 0x40, 0x800, 0x2000)}
FIELDS = FLAGS | {
    **{f"method {value}": ("<H", 8, 10, value) for value in (8, 12, 99)},
    **{f"CRC {value}": ("<I", 14, 16, value) for value in (0, 1)},
    **{f"compressed size {value}": ("<I", 18, 20, value) for value in (0, 1, 0xFFFFFFFF)},
    **{f"size {value}": ("<I", 22, 24, value) for value in (0, 1, 0xFFFFFFFF)},
    **{f"length of the name {value}": ("<H", 26, 28, value) for value in (1, 15, 17)},
    **{f"length of the extra field {value}": ("<H", 28, 30, value) for value in (1, 4)},
}
ARCHIVES = {
    "unchanged": archive(*GOOD.items()),
    "with a comment": archive(*GOOD.items(), comment=b"a comment"),
    "two pickles": archive((PICKLE, OTHER[PICKLE]), *GOOD.items()),
    "two pickles, other pickle last": archive(*GOOD.items(), (PICKLE, OTHER[PICKLE])),
    "two pickles, one in capitals": archive(("archive/DATA.PKL", OTHER[PICKLE]), *GOOD.items()),
    "two pickles, one in capitals, last": archive(
        *GOOD.items(), ("archive/DATA.PKL", OTHER[PICKLE])
    ),
    "two storages, one in capitals": archive(
        *GOOD.items(), ("archive/DATA/0", struct.pack("<2f", 7, 8))
    ),
    "a pickle in capitals only": archive(
        *((n.replace("data.pkl", "DATA.PKL"), d) for n, d in GOOD.items())
    ),
    "a byte order in capitals": archive(
        *((name, data) for name, data in GOOD.items() if "byteorder" not in name),
        ("archive/BYTEORDER", b"big"),
    ),
    "two folders": archive(
        *GOOD.items(), *((name.replace("archive", "a"), data) for name, data in OTHER.items())
    ),
    "another folder first": archive(("a/version", b"3\n"), *GOOD.items()),
    "another folder last": archive(*GOOD.items(), ("a/version", b"3\n")),
    "a record without a folder": archive(*GOOD.items(), ("readme", b"x")),
    "a pickle without a folder": archive(("data.pkl", OTHER[PICKLE]), *GOOD.items()),
    "pickle in a subfolder": archive(*GOOD.items(), ("archive/x/data.pkl", OTHER[PICKLE])),
    "bytes behind the end": archive(*GOOD.items()) + b"xyz",
    "preceded by another archive": archive(*OTHER.items())
    + archive(*GOOD.items(), at=len(archive(*OTHER.items()))),
    "another archive in the comment": with_end(0),
    "another archive in the comment, wrong length": with_end(5),
    "pickle marked as a folder": with_field(True, 38, "<I", 0x10),
    "cut in half": archive(*GOOD.items())[:300],
    **{
        f"{name} in the record": with_field(False, own, code, value)
        for name, (code, own, _, value) in FIELDS.items()
    },
    **{
        f"{name} in the directory": with_field(True, at, code, value)
        for name, (code, _, at, value) in FIELDS.items()
    },
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(name: str, run: Run, tmp_path: Path) -> None:
    """Check that `inspect` shows the tensors that torch loads, or refuses the file."""
    path, out = tmp_path / "x.pt", tmp_path / "out.safetensors"
    path.write_bytes(ARCHIVES[name])
    copied = run("convert", path, "-o", out)
    assert copied.status in (0, 2)
    assert run("inspect", path).status == copied.status
    if name == "unchanged":
        assert copied.status == 0
    if copied.status:
        assert copied.err.startswith("error: ")
        return
    try:
        theirs = torch.load(path)
    except Exception:
        return
    ours = {one["key"] for one in run("inspect", path, "--format", "json").data["tensors"]}
    assert ours == set(theirs)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in load_file(out).items())


@pytest.mark.parametrize(
    "name", ["archive/config.p", "archive/notes.txt", "archive/data/x.bin", "archive/constants"]
)
@pytest.mark.parametrize(
    "shape", ["a global of text lines", "names in the memo", "before an invalid opcode"]
)
def test_pickles_in_other_records_are_checked(
    name: str, shape: str, run: Run, tmp_path: Path
) -> None:
    """``torch.load(pickle_file=NAME)`` would read it."""
    path = tmp_path / "x.pt"
    path.write_bytes(archive(*GOOD.items(), (name, HOSTILE[shape])))
    done = run("check", path)
    assert (done.status, "os.system" in done.out, name in done.out) == (1, True, True)
    assert run("remap", path, "-o", tmp_path / "out.pt", "--rule", "w => v").status == 1
    path.write_bytes(archive(*GOOD.items(), (name, b"hello world")))
    assert run("check", path).status == 0


MADE = b"\x80\x04" + call("os", "mkdir") + b"."  # makes the folder `id`
# Python runs these; our reader stops before the call.
UNREADABLE = {
    "a number in an unusual form": b"I010\n0" + MADE,
    "a large number as a key": b"}\x8a\x0a" + b"\x01" * 10 + b"K\x01s0" + MADE,
    "an item set in a list": b"]K\x01aK\0K\x02s0" + MADE,
    "more open marks than the limit": b"(" * 10_001 + b"1" * 10_001 + MADE,
}


@pytest.mark.parametrize("shape", UNREADABLE)
def test_pickles_in_other_records_that_cannot_be_read_are_not_safe(
    shape: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("x.pt")
    path.write_bytes(archive(*GOOD.items(), ("archive/config.p", UNREADABLE[shape])))
    torch.load(path, weights_only=False, pickle_file="config.p")
    assert Path("id").is_dir()
    check_is_not_looked_into(run, path, "archive/config.p")


def check_is_not_looked_into(run: Run, path: Path, record: str, *args: str) -> None:
    done = run("check", path, *args)
    assert (
        done.status,
        f"not looked into: what the pickle runs when it is loaded is unknown ({record}" in done.out,
    ) == (
        1,
        True,
    )
    for done in (
        run("inspect", path, *args),
        run("remap", path, "-o", "out.pt", "--rule", "w => v", *args),
    ):
        assert (done.status, f"not looked into: {record}: " in done.err) == (0, True)


@pytest.mark.parametrize(
    "name",
    ["archive/config.p", "archive/extra/x.bin", "archive/code/model.py", "archive/constants"],
)
@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_pickle_in_another_record_larger_than_the_limit_is_not_safe(
    name: str, is_compressed: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, limit = Path("x.pt"), ("--max-memory", "4K")
    with zipfile.ZipFile(path, "w") as file:
        for own, data in {
            **GOOD,
            name: b"\x80\x04B\0\x20\0\0" + bytes(8192) + b"0" + EVIL + b".",
        }.items():
            method = zipfile.ZIP_DEFLATED if own == name and is_compressed else zipfile.ZIP_STORED
            file.writestr(zipfile.ZipInfo(own), data, method)
    check_is_not_looked_into(run, path, name, *limit)
    done = run("check", path, *limit)
    assert "--max-memory 8K raises it" in done.out
    done = run("check", path)
    assert (done.status, "a dangerous import" in done.out) == (1, True)
    assert run("remap", path, "-o", tmp_path / "other.pt", "--rule", "w => v").status == 1


def saved_before_1_6(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


LOADED_BYTES = {
    "a file of an old torch": MAGIC + VERSION + pickle.dumps({}, 2) + MADE,
    "an archive": archive(*{**GOOD, PICKLE: MADE}.items()),
    "an archive with the pickle in capitals": archive(
        *((name, data) for name, data in GOOD.items() if name != PICKLE), ("archive/DATA.PKL", MADE)
    ),
    "a number in an unusual form": b"I010\n0" + MADE,
}


@pytest.mark.parametrize("shape", LOADED_BYTES)
@pytest.mark.parametrize("calls_before", [0, 5])
def test_bytes_that_a_pickle_loads_are_checked(
    shape: str, calls_before: int, run: Run, tmp_path: Path
) -> None:
    harmless = saved_before_1_6(torch.ones(1).untyped_storage())
    loads = [
        text("torch.storage")
        + text("_load_from_bytes")
        + b"\x93B"
        + struct.pack("<I", len(data))
        + data
        + b"\x85R0"
        for data in [harmless] * calls_before + [LOADED_BYTES[shape]]
    ]
    path = torch_file(tmp_path / "x.pt", b"\x80\x04" + b"".join(loads) + b"N.")
    done = run("check", path, "--allow", "torch.storage._load_from_bytes")
    assert (done.status, "os.mkdir" in done.out or "not looked into" in done.out) == (1, True)
    harmless_path = torch_file(tmp_path / "harmless.pt", b"\x80\x04" + b"".join(loads[:-1]) + b"N.")
    assert run("check", harmless_path, "--allow", "torch.storage._load_from_bytes").status == 0


@pytest.mark.parametrize(
    "shape", ["a file of an old torch", "an archive", "an archive with the pickle in capitals"]
)
@pytest.mark.parametrize("in_capitals", [False, True])
def test_sample_inputs_of_a_program_are_checked(
    shape: str,
    in_capitals: bool,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch.export.load reads them with weights_only=False if it must."""
    monkeypatch.chdir(tmp_path)
    path = Path("x.pt2")
    torch.export.save(torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)), path)
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    inputs = next(name for name in records if "sample_inputs" in name or "example_inputs" in name)
    del records[inputs]
    name = inputs.replace("inputs/model.pt", "INPUTS/MODEL.PT") if in_capitals else inputs
    path.write_bytes(archive(*records.items(), (name, LOADED_BYTES[shape])))
    with caplog.at_level("ERROR", "torch._export.serde.serialize"), suppress(Exception):
        torch.export.load(path)
    assert Path("id").is_dir()
    done = run("check", path)
    assert (done.status, "os.mkdir" in done.out) == (1, True)


# Polyglot files


def test_legacy_torch_file_that_is_also_a_tar_is_refused(run: Run, tmp_path: Path) -> None:
    """torch.load tries tar first, and its members differ from the pickles at the start of the
    file.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in {
            "x" * 90: b"",
            "storages": pickle.dumps(0, 2) + pickle.dumps([], 2),
            "tensors": pickle.dumps(0, 2),
            "pickle": pickle.dumps({"other": 1}, 2),
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    whole = bytearray(buffer.getvalue())
    start = MAGIC + VERSION + b"\x80\x02}T"
    # the rest of the tar is a string that is popped
    start += struct.pack("<I", len(whole) - len(start) - 4)
    whole[: len(start)] = start
    whole[148:156] = b"%06o\0 " % (sum(whole[:148]) + 8 * 32 + sum(whole[156:512]))
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1)}, buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    for _ in range(3):
        pickle.load(buffer)
    path = tmp_path / "x.pt"
    path.write_bytes(bytes(whole) + b"0." + buffer.read())
    assert torch.load(path, weights_only=False) == {"other": 1}
    done = run("inspect", path)
    assert (done.status, "also a tar archive" in done.err) == (2, True)
    assert run("check", path).status == 1


def test_safetensors_file_followed_by_an_archive(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1)}, path)
    path.write_bytes(path.read_bytes() + archive(*OTHER.items(), at=path.stat().st_size))
    assert run("inspect", path).status == 2


@pytest.mark.parametrize(
    "text", ['{"architecture": "net", "classes": 3}', "This is a checkpoint of the first run", ""]
)
def test_text_in_another_record_is_not_a_pickle(text: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "net.pt"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("net/notes.txt", text)
    torch.load(path)
    assert run("check", path).status == 0
