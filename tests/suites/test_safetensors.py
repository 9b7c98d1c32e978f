"""Files modeled on safetensors' own tests, and changed bytes as from its fuzzer.

The oracle is the installed reader. If it accepts a file, `inspect` lists the same tensors, or the
file has one of the faults in `STRICTER`. If it refuses a file, ckpttool does too.
`CKPTTOOL_SUITES=all` changes more bytes.
"""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import _TYPES, save

import ckpttool
from command import Run
from mutate import mutated
from surroundings import trust_file_times

CHANGED = 20_000 if os.environ.get("CKPTTOOL_SUITES") == "all" else 1_000

I32 = '{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}'
TEST = f'{{"test":{I32}}}'


def packed(header: str | bytes, nbytes: int = 16, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(range(nbytes))


def one(dtype: str, shape: str, begin: int, end: int) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def tensors(*infos: str) -> str:
    return "{" + ",".join(f'"t.{number}":{info}' for number, info in enumerate(infos)) + "}"


DTYPES = {code: str(dtype).removeprefix("torch.") for code, dtype in _TYPES.items()} | {
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
SIZES: dict[str, float] = {code: dtype.itemsize for code, dtype in _TYPES.items()} | {
    "F8_E8M0": 1,
    "F4": 0.5,
    "F6_E2M3": 0.75,
    "F6_E3M2": 0.75,
}
CASES = {
    "one tensor": packed(TEST),
    "metadata": packed(f'{{"__metadata__":{{"framework":"pt"}},"test":{I32}}}       '),
    "metadata only": packed('{"__metadata__":{"framework":"pt"}}     ', 0),
    "null metadata": packed(f'{{"__metadata__":null,"test":{I32}}}'),
    "metadata with a number": packed(f'{{"__metadata__":{{"a":1}},"test":{I32}}}'),
    "metadata with an object": packed(f'{{"__metadata__":{{"a":{{}}}},"test":{I32}}}'),
    "metadata list": packed(f'{{"__metadata__":[],"test":{I32}}}'),
    "metadata last": packed(f'{{"test":{I32},"__metadata__":{{"a":"b"}}}}'),
    "nothing": packed("{}", 0),
    "nothing, padded": packed("{}      ", 0),
    "blanks after the header": packed("{}\r \t\n", 0),
    "blanks before the header": packed("\t\n{}\r ", 0),
    "blanks before a tensor": packed(" " * 64 + TEST),
    "a page of blanks before a tensor": packed(" " * 8192 + TEST),
    "blanks only": packed(" " * 64, 0),
    "other blanks before the header": packed(f"\x0b{TEST}"),
    "zeros after the header": packed(f"{TEST}\0\0\0"),
    "a byte order mark": packed(f"\ufeff{TEST}"),
    "an empty file": b"",
    "seven bytes": bytes(7),
    "eight bytes": bytes(8),
    "no header": struct.pack("<Q", 60),
    "an empty header": packed("", 0),
    "a header that is too long": packed(TEST, length=0xFFFFFF000000003C),
    "a header of 100 MB and one byte": packed(TEST, length=100_000_001),
    "a header longer than the file": packed(TEST, length=200),
    "a header that ends early": packed(TEST, length=len(TEST) - 1),
    "a header that ends late": packed(TEST, length=len(TEST) + 1),
    "not UTF-8": packed(b"\xff", 0),
    "not UTF-8 in a name": packed(TEST.encode().replace(b"test", b"te\xffst")),
    "half of a surrogate pair": packed(TEST.replace("test", "\\ud800")),
    "a surrogate pair": packed(TEST.replace("test", "\\ud83d\\ude00")),
    "not JSON": packed("{", 0),
    "a list": packed("[]", 0),
    "a number": packed("1", 0),
    "a comma at the end": packed(f'{{"test":{I32},}}'),
    "a comment": packed(f"{{/**/{TEST[1:]}"),
    "two objects": packed("{}{}", 0),
    "deeply nested": packed('{"a":' * 200 + "1" + "}" * 200, 0),
    "bytes behind the data": packed(TEST) + b"extra_bogus_data_for_polyglot_file",
    "bytes missing": packed(TEST, 14),
    "no shape": packed(TEST.replace("[2,2]", "[]").replace("16", "4"), 4),
    "a size of zero": packed(tensors(one("I32", "[2,0]", 0, 0)), 0),
    "a size of zero between others": packed(
        tensors(one("I32", "[1]", 0, 4), one("F32", "[0,3]", 4, 4), one("I32", "[1]", 4, 8)), 8
    ),
    "a size of zero inside another": packed(tensors(one("I32", "[2]", 0, 8), one("F32", "[0]", 4, 4)), 8),
    "a size of zero behind the data": packed(tensors(one("I32", "[1]", 0, 4), one("F32", "[0]", 8, 8)), 4),
    "ten tensors over the same bytes": packed(tensors(*[I32] * 10)),
    "overlapping": packed(tensors(one("I32", "[2]", 0, 8), one("I32", "[2]", 4, 12)), 12),
    "a hole": packed(tensors(one("I32", "[1]", 0, 4), one("I32", "[1]", 8, 12)), 12),
    "first offset not zero": packed(tensors(one("I32", "[1]", 4, 8)), 8),
    "in another order": packed(tensors(one("I32", "[1]", 4, 8), one("I32", "[1]", 0, 4)), 8),
    "an end before the begin": packed(tensors(one("I32", "[1]", 4, 0)), 4),
    "too few bytes for the shape": packed(tensors(one("I32", "[2,2]", 0, 4)), 4),
    "too many bytes for the shape": packed(tensors(one("I32", "[2,2]", 0, 20)), 20),
    "a shape that overflows": packed(tensors(one("I32", "[2,18446744073709551614]", 0, 16))),
    "a number of bits that overflows": packed(tensors(one("I32", "[2,9223372036854775807]", 0, 16))),
    "a shape that overflows, and a zero": packed(tensors(one("I32", "[4294967296,4294967296,0]", 0, 0)), 0),
    "a size of 2**64": packed(tensors(one("I32", "[18446744073709551616]", 0, 16))),
    "a size below zero": packed(tensors(one("I32", "[-2,-2]", 0, 16))),
    "a size of 2.0": packed(tensors(one("I32", "[2.0,2]", 0, 16))),
    "a size in quotes": packed(tensors(one("I32", '["2",2]', 0, 16))),
    "a shape that is a number": packed(tensors(one("I32", "4", 0, 16))),
    "three offsets": packed(TEST.replace("[0,16]", "[0,16,16]")),
    "one offset": packed(TEST.replace("[0,16]", "[16]")),
    "an unknown dtype": packed(tensors(one("I33", "[4]", 0, 16))),
    "a lowercase dtype": packed(tensors(one("i32", "[4]", 0, 16))),
    "no dtype": packed('{"test":{"shape":[4],"data_offsets":[0,16]}}'),
    "the dtype twice": packed(f'{{"test":{{"dtype":"F32",{I32[1:]}}}'),
    "another field": packed(f'{{"test":{{"note":1.5,{I32[1:]}}}'),
    "another field that is a list": packed(f'{{"test":{{"note":[],{I32[1:]}}}'),
    "a tensor that is a list": packed('{"test":["I32",[2,2],[0,16]]}'),
    "a tensor that is null": packed('{"test":null}', 0),
    "a dtype that is an object": packed('{"test":{"dtype":{"I32":null},"shape":[2,2],"data_offsets":[0,16]}}'),
    "a name twice": packed(f'{{"test":{I32},"test":{I32}}}'),
    "a name twice, once empty": packed(f'{{"test":{one("I32", "[0]", 0, 0)},"test":{I32}}}'),
    "the metadata twice": packed(f'{{"__metadata__":{{}},"__metadata__":{{}},"test":{I32}}}'),
    "an empty name": packed(f'{{"":{I32}}}'),
    "a name with a zero": packed(f'{{"a\\u0000b":{I32}}}'),
    "a thousand tensors": packed(tensors(*(one("U8", "[1]", n, n + 1) for n in range(1000))), 0) + bytes(1000),
    **{f"{code} of a whole number of bytes": packed(tensors(one(code, "[8]", 0, round(8 * size))), round(8 * size))
       for code, size in SIZES.items()},
    **{f"{code} and a byte too many": packed(tensors(one(code, "[8]", 0, round(8 * size) + 1)), round(8 * size) + 1)
       for code, size in SIZES.items()},
    **{f"{code} that ends inside a byte": packed(tensors(one(code, "[1,3]", 0, 2)), 2)
       for code, size in SIZES.items() if size < 1},
    **{f"{code} with an odd last size": packed(tensors(one(code, "[8,1]", 0, round(8 * size))), round(8 * size))
       for code, size in SIZES.items() if size < 1},
}  # fmt: skip

# Files that the reference reader accepts and ckpttool refuses, with the reason.
STRICTER = {
    "another field that is a list": "unknown fields are kept only if they are plain values",
    "a tensor that is a list": "the format requires an object",
    "a dtype that is an object": "the format requires a string",
    "a name twice": "the format forbids it, and readers use different ones",
    "a name twice, once empty": "same as above",
}


def read_by_reference(path: Path, data: bytes) -> dict[str, tuple[Any, ...]] | None:
    """Return name -> dtype, shape and bytes of each tensor, or None if the reader refuses the
    file.
    """
    try:
        read = deserialize(data)
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == {name for name, _ in read}
    except (SafetensorError, OSError):
        return None
    found = {}
    for name, info in read:
        code, shape = info["dtype"], tuple(info["shape"])
        dtype = DTYPES[code] if code in DTYPES else "float6_" + code[3:].lower()
        if code == "F4" and shape[-1] % 2:
            dtype = "float4_e2m1fn"  # torch cannot hold this tensor
        elif code == "F4":
            shape = (*shape[:-1], shape[-1] // 2)  # torch's elements hold two values
        found[name] = dtype, shape, bytes(info["data"])
    return found


def read_by_ckpttool(path: Path, data: bytes) -> dict[str, tuple[Any, ...]] | None:
    try:
        checkpoint = ckpttool.inspect(str(path)).checkpoint
    except ckpttool.CkptError:
        return None
    found = {}
    for entry in checkpoint.sections[0].tensors:
        payload: Any = entry.payload  # elements are smaller than a byte
        span = entry.span or payload.span
        found[entry.key] = entry.dtype, entry.shape, data[span.offset : span.offset + span.length]
    return found


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, run: Run, tmp_path: Path) -> None:
    path, data = tmp_path / "x.safetensors", CASES[name]
    path.write_bytes(data)
    expected, found = read_by_reference(path, data), read_by_ckpttool(path, data)
    assert found == (None if name in STRICTER else expected)
    assert expected is not None or name not in STRICTER
    done = run("inspect", path, "--format", "json")
    if found is None:
        assert (done.status, done.err.startswith("error: ")) == (2, True)
        return
    listed = {
        one["key"]: (one["dtype"], tuple(one["shape"]), one["bytes"])
        for one in done.data["tensors"]
    }
    assert listed == {key: (dtype, shape, len(raw)) for key, (dtype, shape, raw) in found.items()}
    if found and list(found) != [""]:  # a rule cannot write an empty name
        renamed, back = tmp_path / "y.safetensors", tmp_path / "z.safetensors"
        assert run("remap", path, "-o", renamed, "--rule", "re:(.*) => new.\\1").status in (0, 1)
        if renamed.exists():
            assert run("remap", renamed, "-o", back, "--rule", "re:new[.](.*) => \\1").status == 0
            assert read_by_reference(back, back.read_bytes()) == expected


def seeds() -> list[bytes]:
    state = {
        "a": torch.ones(2, 3),
        "b.c": torch.zeros(1, dtype=torch.bfloat16),
        "e": torch.empty(0),
    }
    others = [data for data in CASES.values() if 40 < len(data) < 400]
    return [save(state, {"format": "pt"}), save({}), *others]


def is_accepted(data: bytes) -> bool:
    try:
        deserialize(data)
    except SafetensorError:
        return False
    return True


def is_stricter(data: bytes) -> bool:
    """Return whether the header has one of the faults in `STRICTER`."""
    faults = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        faults.append(len(value) < len(pairs))
        return value

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=members)
    for name, info in header.items():
        if name != "__metadata__":
            faults.append(not isinstance(info, dict) or not isinstance(info["dtype"], str))
            if isinstance(info, dict):
                others = (
                    value for field, value in info.items() if field not in ("shape", "data_offsets")
                )
                faults.append(any(isinstance(value, (dict, list)) for value in others))
    return any(faults)


def small_change(data: bytes, chance: random.Random) -> bytes:
    """Replace or insert a character in the header."""
    at = chance.randrange(8, max(9, 8 + int.from_bytes(data[:8], "little")))
    new = chance.choice(b' \t\n0123456789"{}[],:.-eE\\ntulF')
    more = chance.randrange(2)
    length = int.from_bytes(data[:8], "little") + more
    return length.to_bytes(8, "little") + data[8:at] + bytes([new]) + data[at + 1 - more :]


def test_changed_bytes(
    tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_file_times(monkeypatch)
    record_property("cases", CHANGED)
    path, chance, starts = tmp_path / "x.safetensors", random.Random(0), seeds()
    good = list(filter(is_accepted, starts))
    words = [
        b"null",
        b'"F32"',
        b"[0,16]",
        b'"shape"',
        b"0",
        b"18446744073709551616",
        b" ",
        b"{}",
        b'"x":1,',
        b"\\u0041",
    ]
    taken = 0
    for _ in range(CHANGED):
        data = (
            small_change(chance.choice(good), chance)
            if chance.random() < 0.5
            else mutated(starts, words, chance)
        )
        path.write_bytes(data)
        expected, found = read_by_reference(path, data), read_by_ckpttool(path, data)
        taken += expected is not None
        if found != expected:
            assert found is None, data
            assert is_stricter(data), data
    assert taken > CHANGED // 40
