"""The safetensors reader and writer, with the reference implementation as the oracle."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from ckpttool import Checkpoint, CkptError, Refused
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Section, Span, Storage, TensorEntry
from ckpttool.core.pickle_imports import Import
from ckpttool.formats import safetensors as st_format
from ckpttool.formats.safetensors import layout, layout_in_place, overlapping, read
from ckpttool.io.files import forget_and_check
from files import write_pieces

F32 = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
DTYPES = """
    bool float4_e2m1fn_x2 uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz
    int16 uint16 float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64
""".split()  # noqa: SIM905
DTYPES = [name for name in DTYPES if hasattr(torch, name)]


def packed(header: str | bytes, data: bytes = bytes(4), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def info(dtype: str, shape: str, offsets: str) -> str:
    return f'"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def put(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def reference_accepts(path: str) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except Exception:
        return False


def we_accept(path: str) -> bool:
    try:
        read(path)
    except CkptError:  # any other exception fails the test
        return False
    return True


def with_keys(checkpoint: Checkpoint, rename) -> Checkpoint:
    section = checkpoint.sections[0]
    tensors = tuple(replace(entry, key=rename(entry.key)) for entry in section.tensors)
    return replace(checkpoint, sections=(replace(section, tensors=tensors),))


def checkpoint_of(*tensors: TensorEntry, **changes) -> Checkpoint:
    return replace(
        Checkpoint("x", "torch_zip", 0, (Section("", "state_dict", tensors),)), **changes
    )


def computed(key: str, dtype: str, *shape: int, data: bytes = b"") -> TensorEntry:
    stride = tuple(torch.empty(shape).stride())
    return TensorEntry(key, dtype, shape, stride, 0, Storage(Lazy(len(data), lambda: [data])))


def all_dtypes() -> dict[str, torch.Tensor]:
    found = {
        n: torch.arange(48).to(torch.uint8).reshape(2, 3, 8).view(getattr(torch, n))
        for n in DTYPES
        if n != "bool"
    }
    found["bool"] = torch.tensor([[True, False], [False, True]])
    return found | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        'é⊕ "quoted"\n': torch.ones(1),
    }


# Reading


def test_every_dtype_matches_the_reference(tmp_path):
    path = put(tmp_path / "a.safetensors", save(all_dtypes(), {"format": "pt"}))
    checkpoint = read(path)
    assert (checkpoint.format, checkpoint.metadata) == ("safetensors", {"format": "pt"})
    (section,) = checkpoint.sections
    assert (section.path, section.kind) == ("", "state_dict")
    data = (tmp_path / "a.safetensors").read_bytes()
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(entry.key for entry in section.tensors)
        for entry in section.tensors:
            tensor = file.get_tensor(entry.key)
            assert (entry.dtype, entry.shape, entry.stride) == (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.stride(),
            )
            assert entry.payload is None
            raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
            assert data[entry.span.offset :][: entry.span.length] == raw


def test_keys_keep_the_order_of_the_header(tmp_path):
    info = {
        key: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]}
        for key, n in [("b", 2), ("a", 0), ("c", 1)]
    }
    path = put(tmp_path / "a.safetensors", packed(json.dumps(info), b"ACB"))
    assert [entry.key for entry in read(path).sections[0].tensors] == ["b", "a", "c"]
    assert [entry.span.offset for entry in read(path).sections[0].tensors] == [
        8 + len(json.dumps(info)) + n for n in (2, 0, 1)
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1\2\3", "3 bytes are too few"),
        (packed("{}", length=100_000_001), "claims 100000001 bytes"),
        (
            packed("{}", b"", length=100_000_000),
            "truncated: the header alone needs 100000008 bytes, it has 10",
        ),
        (
            packed(f'{{"a":{F32},"__metadata__":{F32.replace("0,4", "4,8")}}}', bytes(8)),
            "not a dict of strings",
        ),
        (packed("{}", length=2**63), "claims 9223372036854775808 bytes"),
        (packed("{}", b"", length=64), "truncated: the header alone needs 72 bytes, it has 10"),
        (packed(b'{"\xff":1}'), "not UTF-8"),
        (packed(f'\x0b{{"a":{F32}}}'), "does not begin with '{'"),
        (packed("", b""), "does not begin with '{'"),
        (packed("[]"), "does not begin with '{'"),
        (packed(f'{{"a":{F32}'), "not valid JSON"),
        (packed(f'{{"a":{F32}}}\0'), "not valid JSON"),
        (packed('{"a":' + "[" * 100_000), "not valid JSON: nested too deep"),
        (packed('{"a":' + "9" * 5000 + "}"), "not valid JSON"),
        (
            packed(f'{{"a":{F32},"__metadata__":{{}},"__metadata__":{{}}}}'),
            "'__metadata__' is there twice",
        ),
        (packed(f'{{"a":{F32},"a":{F32}}}'), "'a' is there twice"),
        (packed(f'{{"a":{F32},"__metadata__":{{"x":1}}}}'), "not a dict of strings"),
        (packed(f'{{"a":{F32},"__metadata__":["x"]}}'), "not a dict of strings"),
        (packed(f'{{"a":{F32}}}', bytes(3)), "truncated: its tensors need 4 bytes, 3 are there"),
        (packed(f'{{"a":{F32}}}', bytes(5)), "1 bytes after the last tensor belong to none"),
    ],
)
def test_a_broken_file_is_an_error(tmp_path, data, message):
    path = put(tmp_path / "a.safetensors", data)
    with pytest.raises(CkptError) as caught:
        read(path)
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ('"a":null', "not an object with dtype, shape and data_offsets @ a"),
        ('"a":{"dtype":"F32","shape":[1]}', "not an object with dtype, shape and data_offsets @ a"),
        (info('"Q9"', "[1]", "[0,4]"), "unknown dtype 'Q9' @ a"),
        (info('["F32"]', "[1]", "[0,4]"), "unknown dtype ['F32'] @ a"),
        (info('"F32"', "[1.0]", "[0,4]"), "its shape is not a list of sizes @ a"),
        (info('"F32"', "[-1]", "[0,4]"), "its shape is not a list of sizes @ a"),
        (info('"F32"', "[true]", "[0,4]"), "its shape is not a list of sizes @ a"),
        (info('"F32"', "[18446744073709551616]", "[0,4]"), "its shape is not a list of sizes @ a"),
        (info('"F32"', "[1]", "[0,4,4]"), "its data_offsets are not a begin and an end @ a"),
        (info('"F32"', "[1]", "[-0,4]"), "its data_offsets are not a begin and an end @ a"),
        (
            info('"F32"', "[1]", "[4,0]"),
            "F32 of shape [1] is 4 bytes, its data_offsets hold -4 @ a",
        ),
        (info('"F4"', "[7]", "[0,4]"), "F4 of shape [7] is 3.5 bytes, its data_offsets hold 4 @ a"),
        (info('"F32"', "[4294967296,4294967296,0]", "[0,0]"), "its size overflows @ a"),
        (
            info('"U8"', "[" + "18446744073709551615," * 9999 + "9]", "[0,1]"),
            "its size overflows @ a",
        ),
        (
            f'"a":{F32},"b":{F32}',
            "its data begins at byte 0, the data before it ends at byte 4 @ b",
        ),
        (
            info('"U8"', "[2]", "[2,4]"),
            "its data begins at byte 2, the data before it ends at byte 0 @ a",
        ),
        (info('"F32"', "[1]", '[0,4],"x":[]'), "it has fields that the format does not know @ a"),
    ],
)
def test_all_wrong_entries_are_reported(tmp_path, entries, problem):
    with pytest.raises(CkptError) as caught:
        read(put(tmp_path / "a.safetensors", packed("{" + entries + "}")))
    assert [str(found) for found in caught.value.problems] == [problem]


def test_sub_byte_tensors_are_copied(tmp_path):
    info = {
        "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "odd": {"dtype": "F4", "shape": [2, 1], "data_offsets": [3, 4]},
    }
    path = put(tmp_path / "a.safetensors", packed(json.dumps(info), b"\1\2\3\4"))
    checkpoint = read(path)
    assert [(e.key, e.dtype, e.layout, e.nbytes) for e in checkpoint.sections[0].tensors] == [
        ("six", "float6_e2m3", "packed", 3),
        ("odd", "float4_e2m1fn", "packed", 1),
    ]
    out = write_pieces(layout(with_keys(checkpoint, "my.{}".format)), tmp_path / "b.safetensors")
    back = layout(with_keys(read(out), lambda key: key[3:]))
    assert read(out).sections[0].tensors[0].key == "my.six"
    assert write_pieces(back, tmp_path / "c.safetensors")
    rewritten = write_pieces(
        layout(replace(checkpoint, container=None)), tmp_path / "d.safetensors"
    )
    assert reference_accepts(out)
    assert reference_accepts(rewritten)
    assert (tmp_path / "d.safetensors").read_bytes()[-4:] == b"\1\2\3\4"


def test_a_packed_tensor_that_torchao_lists_is_copied(tmp_path):
    text = json.dumps(
        {
            "__metadata__": {"tensor_names": '["w"]', "w": '{"_type": "Tensor"}'},
            "w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        }
    )
    checkpoint = read(put(tmp_path / "a.safetensors", packed(text, b"\1\2\3")))
    out = write_pieces(layout(replace(checkpoint, container=None)), tmp_path / "b.safetensors")
    assert [(e.key, e.layout) for e in read(out).sections[0].tensors] == [("w", "packed")]


def test_a_missing_file_or_a_directory_is_an_error(tmp_path):
    for path in (tmp_path / "none", tmp_path, "nu\0ll"):
        with pytest.raises(CkptError, match="cannot read"):
            read(str(path))


# Against the reference reader

VALID = (
    '{"__metadata__":{"format":"pt","k":"v"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},'
    '"é":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,7],"data_offsets":[12,12]},'
    '"f":{"dtype":"F4","shape":[2,4],"data_offsets":[12,16],"note":1.5}}   '
)
SNIPPETS = [
    *'{}[]:,"\\ \n\t0123456789-+.eE\0\x7f', "null", "true", "NaN", "-0", "1e999", "0.0", "\\u00e9", "\\ud800",
    "\\uD83D\\uDE00", "18446744073709551616", "4294967296", '"F32"', '"F6_E2M3"', '"C64"', '"shape"', '"__metadata__"',
    '"x":1,', '"w"', "é", '"data_offsets":[12,12]', '"shape":[0]', ',"x":"y"', "[0,0]", "[4,12]", "[12,16]",
]  # fmt: skip


@st.composite
def mutated_headers(draw) -> bytes:
    text = VALID
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(["", *SNIPPETS])) + text[at + cut :]
    raw = bytearray(text.encode())
    if draw(st.integers(0, 9)) == 0:
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


def stricter(header: bytes) -> bool:
    """Return True if the header breaks a rule that only our reader enforces (see the module)."""
    duplicates: list[str] = []

    def unique(pairs):
        names = [name for name, _ in pairs]
        duplicates.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    value = json.loads(header, object_pairs_hook=unique)
    infos = [info for name, info in value.items() if name != "__metadata__"]
    return (
        bool(duplicates)
        or any(not isinstance(info, dict) or not isinstance(info["dtype"], str) for info in infos)
        or any(
            isinstance(v, (dict, list))
            for info in infos
            for k, v in info.items()
            if k not in ("shape", "data_offsets")
        )
    )


@settings(
    max_examples=500, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=mutated_headers(),
    data=st.sampled_from([16, 16, 16, 12, 20]),
    shift=st.sampled_from([0, 0, 0, -1, 1]),
)
@example(header=VALID.encode(), data=16, shift=0)
@example(header=b"{}", data=0, shift=0)
@example(header=b'{"__metadata__":null}', data=0, shift=0)
@example(header=VALID.replace(":1.5", ":[[1.5]]").encode(), data=16, shift=0)
@example(header=VALID.replace("[0,7]", "[0,4294967296,4294967296]").encode(), data=16, shift=0)
@example(header=VALID.replace("[0,7]", "[4294967296,4294967296,0]").encode(), data=16, shift=0)
def test_mutated_headers_are_accepted_as_by_the_reference(tmp_path, header, data, shift):
    path = put(tmp_path / "a.safetensors", packed(header, bytes(data), len(header) + shift))
    accepted, expected = we_accept(path), reference_accepts(path)
    assert accepted == expected or (
        expected and stricter((header + bytes(data))[: len(header) + shift])
    )


# Writing


def test_a_new_layout_matches_the_reference_writer(tmp_path):
    tensors = all_dtypes()
    path = put(tmp_path / "a.safetensors", save(tensors, {"format": "pt"}))
    checkpoint = replace(read(path), container=None)
    section = checkpoint.sections[0]
    shuffled = replace(checkpoint, sections=(replace(section, tensors=section.tensors[::-1]),))
    for written in (checkpoint, shuffled):
        write_pieces(layout(written), tmp_path / "b.safetensors")
        assert (tmp_path / "b.safetensors").read_bytes() == (
            tmp_path / "a.safetensors"
        ).read_bytes()


def test_files_without_metadata_or_tensors_match_the_reference(tmp_path):
    write_pieces(layout(checkpoint_of()), tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == save({})
    write_pieces(
        layout(checkpoint_of(computed("x", "uint8", 3, data=b"abc"))), tmp_path / "a.safetensors"
    )
    assert (tmp_path / "a.safetensors").read_bytes() == save(
        {"x": torch.tensor(list(b"abc"), dtype=torch.uint8)}
    )


def test_an_unchanged_checkpoint_gives_the_same_file(tmp_path):
    raw = packed(
        f'{{ "b" : {F32},\n "\\u0061":'
        f' {{"data_offsets":[4,4],"shape":[0],"dtype":"F32","x":1}} }}'.ljust(160)
    )
    path = put(tmp_path / "a.safetensors", raw)
    write_pieces(layout(read(path)), tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == raw


@pytest.mark.parametrize("spare", [0, 8, 4096])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_rename_and_its_inverse_restore_the_bytes(tmp_path, spare, separators):
    """Also for files with another order of header and data, and with padding in the header."""
    info = {
        "z": {"dtype": "F32", "shape": [2], "data_offsets": [5, 13]},
        "__metadata__": {"b": "1", "a": "é"},
        "empty.1": {"dtype": "F32", "shape": [0], "data_offsets": [5, 5]},
        "empty.2": {"dtype": "I64", "shape": [3, 0], "data_offsets": [5, 5]},
        "ö": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
        "f": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [13, 16]},
        "n": {"shape": [4], "dtype": "F8_E5M2", "data_offsets": [1, 5], "extra": "kept"},
    }
    text = json.dumps(info, ensure_ascii=False, separators=separators).encode()
    raw = packed(text.ljust(-(-len(text) // 8) * 8 + spare), bytes(range(16)))
    path = put(tmp_path / "a.safetensors", raw)
    pieces = layout(with_keys(read(path), 'wrapped."{}"'.format))
    assert [type(piece.data) for piece in pieces] == [bytes, Span]
    out = write_pieces(pieces, tmp_path / "b.safetensors")
    assert reference_accepts(out)
    assert [e.key for e in read(out).sections[0].tensors] == [
        f'wrapped."{key}"' for key in info if key != "__metadata__"
    ]
    assert read(out).metadata == info["__metadata__"]
    write_pieces(layout(with_keys(read(out), lambda key: key[9:-1])), tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == raw


def test_swapped_names_move_with_their_tensors(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    checkpoint = read(str(tmp_path / "a.safetensors"))
    exchanged = with_keys(checkpoint, {"a": "b", "b": "a"}.get)
    section = exchanged.sections[0]
    reordered = replace(exchanged, sections=(replace(section, tensors=section.tensors[::-1]),))
    for written in (exchanged, reordered):
        out = write_pieces(layout(written), tmp_path / "b.safetensors")
        with safe_open(out, "pt") as file:
            assert file.get_tensor("a").tolist() == [1, 1]
            assert file.get_tensor("b").tolist() == [0, 0]


def test_an_unaligned_header_becomes_aligned(tmp_path):
    path = put(tmp_path / "a.safetensors", packed(f'{{"ab":{F32}}}'))
    out = write_pieces(layout(with_keys(read(path), str.upper)), tmp_path / "b.safetensors")
    assert reference_accepts(out)
    assert read(out).sections[0].tensors[0].span.offset % 8 == 0


def test_changes_other_than_names_give_a_new_layout(tmp_path):
    tensors = {
        "a": torch.arange(3.0),
        "b": torch.arange(4, dtype=torch.int64),
        "c": torch.tensor([True]),
    }
    path = put(tmp_path / "a.safetensors", save(tensors, {"k": "v"}))
    checkpoint = read(path)
    b, a, c = checkpoint.sections[0].tensors
    out = tmp_path / "b.safetensors"

    def written(*entries: TensorEntry, **changes) -> bytes:
        section = replace(checkpoint.sections[0], tensors=entries)
        write_pieces(layout(replace(checkpoint, sections=(section,), **changes)), out)
        return out.read_bytes()

    assert written(c, a) == save({"a": tensors["a"], "c": tensors["c"]}, {"k": "v"})
    assert written(a, b, c, metadata={}) == save(tensors)
    changed = computed("c", "float32", 2, data=struct.pack("<2f", 7, 8))
    assert written(a, b, changed) == save(tensors | {"c": torch.tensor([7.0, 8.0])}, {"k": "v"})
    half = replace(a, shape=(1,), stride=(1,), offset=2)
    assert written(half, b, c) == save(tensors | {"a": torch.tensor([2.0])}, {"k": "v"})


def test_all_unsupported_entries_are_reported(tmp_path):
    storage = Storage(Span("nowhere", 0, 64))
    tensors = (
        TensorEntry("coo", "float32", (2,), (), 0, None, "sparse_coo", 24),
        TensorEntry("c128", "complex128", (4,), (1,), 0, storage),
        TensorEntry("t", "float32", (2, 2), (1, 2), 0, Storage(Span("nowhere", 0, 16))),
        TensorEntry("part", "float32", (1,), (1,), 1, Storage(Lazy(8, list))),
        TensorEntry("head", "float32", (1,), (1,), 0, Storage(Lazy(8, list))),
        TensorEntry("f4", "float4_e2m1fn_x2", (), (), 0, Storage(Span("nowhere", 0, 1))),
        TensorEntry("tied", "complex128", (4,), (1,), 0, storage),
        TensorEntry("__metadata__", "uint8", (1,), (1,), 0, Storage(Span("nowhere", 0, 1))),
        TensorEntry("twice", "uint8", (1,), (1,), 0, Storage(Span("nowhere", 0, 1))),
        TensorEntry("twice", "uint8", (1,), (1,), 0, Storage(Span("nowhere", 0, 1))),
    )
    checkpoint = checkpoint_of(
        sections=(Section("", "state_dict", tensors, (ExtraEntry("_extra_state"),)),)
    )
    with pytest.raises(Refused) as caught:
        layout(checkpoint)
    assert [str(problem) for problem in caught.value.problems] == [
        "not a tensor @ _extra_state",
        "a sparse_coo tensor has no place in the format @ coo",
        "the format has no dtype complex128 @ c128",
        "a view of shape [2, 2] and stride [1, 2], not contiguous @ t",
        "a part of a storage that is still to be computed @ part",
        "a part of a storage that is still to be computed @ head",
        "the format has no float4_e2m1fn_x2 without dimensions @ f4",
        "the format has no dtype complex128 @ tied",
        "the name is taken by the format @ __metadata__",
        "the name is there twice @ twice",
        "shares its bytes with c128 @ tied",
    ]
    for sections in (
        (),
        (Section("model", "state_dict", ()),),
        (Section("", "state_dict", ()), Section("o", "other", ())),
    ):
        with pytest.raises(Refused) as caught:
            layout(checkpoint_of(sections=sections))
        assert caught.value.problems


@pytest.mark.parametrize(
    ("names", "is_torchao"),
    [(("torchao.x.Y",), True), (("x.torchao.Y", "torchaos.Y"), False), ((), False)],
)
def test_the_hint_for_tensors_of_torchao_uses_torchao(names, is_torchao):
    with pytest.raises(Refused) as caught:
        layout(
            checkpoint_of(
                computed("c", "complex128", 1),
                imports=tuple(Import(name, "unknown", "", "", 0) for name in names),
            )
        )
    assert ("with torchao: python -c" in caught.value.hint) == is_torchao


def test_an_escaped_metadata_key_is_recognized(tmp_path):
    text = f'{{"\\u005f_metadata__":{{"k":"v"}},"\\u0061":{F32}}}'
    checkpoint = read(put(tmp_path / "a.safetensors", packed(text)))
    assert checkpoint.metadata == {"k": "v"}
    out = write_pieces(layout(with_keys(checkpoint, str.upper)), tmp_path / "b.safetensors")
    assert (read(out).metadata, [e.key for e in read(out).sections[0].tensors]) == (
        {"k": "v"},
        ["A"],
    )
    assert reference_accepts(out)


def test_in_place_layout_allows_only_renames(tmp_path):
    checkpoint = read(
        put(tmp_path / "a.safetensors", save({"a": torch.ones(1), "b": torch.zeros(1)}, {"k": "v"}))
    )
    section = checkpoint.sections[0]
    assert layout_in_place(with_keys(checkpoint, str.upper)) is not None
    assert layout_in_place(replace(checkpoint, container=None)) is None
    assert layout_in_place(with_keys(checkpoint, {"a": "a", "b": "__metadata__"}.get)) is None
    assert (
        layout_in_place(
            replace(checkpoint, sections=(replace(section, tensors=section.tensors[:1]),))
        )
        is None
    )


def test_a_key_that_is_not_valid_text_is_refused():
    with pytest.raises(Refused, match="not text"):
        layout(checkpoint_of(computed("\ud800", "uint8", 1, data=b"x")))


def test_a_thousand_tensors_are_renamed_in_two_pieces(tmp_path):
    path = put(
        tmp_path / "a.safetensors",
        save({f"layers.{n}.weight": torch.ones(1) for n in range(1_000)}),
    )
    checkpoint = read(path)
    assert len(checkpoint.sections[0].tensors) == 1_000
    pieces = layout(with_keys(checkpoint, "module.{}".format))
    assert len(pieces) == 2


def write_header(checkpoint: Checkpoint) -> bytes:
    data = layout(replace(checkpoint, container=None))[0].data
    assert isinstance(data, bytes)
    return data


def test_a_header_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    path = put(tmp_path / "a.safetensors", save({"a": torch.ones(1)}))
    checkpoint = read(path)
    length = len(write_header(checkpoint)) - 8
    for most in (length, length - 1):
        monkeypatch.setattr(st_format, "MAX_HEADER", most)
        if most == length:
            assert len(write_header(checkpoint)) == 8 + length
            continue
        with pytest.raises(
            Refused, match=f"the header would be {length} bytes long, safetensors allows {most}"
        ):
            write_header(checkpoint)
    monkeypatch.setattr(st_format, "MAX_HEADER", 4096)
    with pytest.raises(Refused, match="allows 4096"):
        layout(with_keys(checkpoint, lambda key: key * 5000))


STORAGES = (Storage(Span("x", 0, 400)), Storage(Span("x", 0, 400)))


def entry(
    key: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, storage: int = 0
) -> TensorEntry:
    return TensorEntry(key, "float32", shape, stride, offset, STORAGES[storage])


def test_adjacent_tensors_and_other_storages_do_not_overlap():
    assert (
        overlapping(
            [entry("a", (4,), (1,), 0), entry("b", (4,), (1,), 4), entry("c", (4,), (1,), 0, 1)]
        )
        == {}
    )
    assert (
        overlapping(
            [entry("empty", (0,), (1,), 2), entry("a", (8,), (1,), 0), entry("0-dim", (), (), 8)]
        )
        == {}
    )
    assert (
        overlapping([TensorEntry("coo", "float32", (2,), (), 0, None, "sparse_coo", 8)] * 2) == {}
    )


def test_the_later_key_is_reported_with_the_earlier_one():
    assert overlapping([entry("tail", (4,), (1,), 6), entry("a", (8,), (1,), 0)]) == {"a": "tail"}
    assert overlapping([entry("column", (4,), (4,), 0), entry("row", (4,), (1,), 12)]) == {
        "row": "column"
    }
    wide = [entry("all", (99,), (1,), 0), entry("a", (2,), (1,), 0), entry("b", (2,), (1,), 50)]
    assert overlapping(wide) == {"a": "all", "b": "all"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(0, 1)), max_size=7))
def test_overlaps_match_a_comparison_of_every_pair(ranges):
    tensors = [
        entry(str(n), (size,), (1,), offset, storage)
        for n, (offset, size, storage) in enumerate(ranges)
    ]
    pairs = {
        (str(j), str(i))
        for j, (b, n, s) in enumerate(ranges)
        for i, (c, m, t) in enumerate(ranges[:j])
        if s == t and n and m and b < c + m and c < b + n
    }
    found = set(overlapping(tensors).items())
    assert found <= pairs
    assert bool(found) == bool(pairs)


NAMES = st.text(max_size=4) | st.sampled_from(
    ["a.0.weight", "__metadata__", 'q"', "b\\", "{", "dtype"]
)
SIZES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def headers(draw):
    """Draw valid headers with all kinds of names and whitespace, and sometimes an error."""
    infos, end = {}, 0
    if draw(st.booleans()):
        infos["__metadata__"] = draw(st.dictionaries(NAMES, NAMES, max_size=2) | st.none())
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        code, width = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("I64", 8), ("F8_E4M3", 1)]))
        shape = draw(SIZES)
        length = width
        for size in shape:
            length *= size
        infos[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + length]}
        end += length
    members = draw(st.permutations(list(infos.items())))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    text = json.dumps(dict(members), separators=separators, ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        at, what = (
            draw(st.integers(0, len(text))),
            draw(st.sampled_from(['"', ",", "}", "0", "-", "1", " ", "\\", "[", ""])),
        )
        text = text[:at] + what + text[at + draw(st.integers(0, 2)) :]
    return text + draw(st.sampled_from(["", "  ", "\n", "x"])), bytes(end)


@given(headers())
def test_the_fast_parser_matches_the_strict_one(tmp_path_factory, header):
    text, data = header
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    raw = text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert outcome(path, fast=True) == outcome(path, fast=False)


def outcome(path: Path, fast: bool):
    """Return keys, shapes, offsets and metadata, or the error and its problems."""
    kept = st_format._read_common_header
    if not fast:
        st_format._read_common_header = lambda text, data: None
    forget_and_check(str(path))
    try:
        read = st_format.read(str(path))
    except CkptError as error:
        return error.message, error.problems
    finally:
        st_format._read_common_header = kept
    tensors = [
        (e.key, e.dtype, e.shape, e.stride, e.storage and e.storage.data)
        for e in read.sections[0].tensors
    ]
    container: Any = read.container
    text = container.read()
    names = [json.loads(text[start:end]) for start, end in st_format.quoted_names(text)]
    assert names == [key for key, *_ in tensors]
    return tensors, read.metadata


def test_headers_of_common_writers_take_the_fast_path(tmp_path, monkeypatch):
    save_file(
        {f"layers.{i}.ä": torch.zeros(2, i) for i in range(9)},
        tmp_path / "m.safetensors",
        metadata={"a": '"'},
    )
    monkeypatch.setattr(st_format, "_read_any_header", None)
    assert len(st_format.read(str(tmp_path / "m.safetensors")).sections[0].tensors) == 9
