"""What a store does by itself, and what is asked again: copies within S3, requests that fail, headers side by side."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load, save

import ckpttool
from ckpttool.checkpoint import Span
from ckpttool.errors import CkptError
from ckpttool.io import compose
from ckpttool.io.pieces import Crc, Piece
from ckpttool.io.remote import errors
from ckpttool.io.write_remote import write
from remote_servers import web_server

pytest.importorskip("s3fs", reason="the driver of s3:// is not installed")
MIB = 1 << 20


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    for variable, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    fs = fsspec.filesystem("s3")
    name = f"bucket-{zlib.crc32(request.node.name.encode()):x}"
    fs.mkdir(name)
    return fs, name


class Received:
    """The bytes of the bodies of requests, as the store's server counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication

        self.nbytes = 0
        plain = DomainDispatcherApplication.__call__

        def counted(application: Any, environ: Any, answer: Any) -> Any:
            self.nbytes += int(environ.get("CONTENT_LENGTH") or 0)
            return plain(application, environ, answer)

        monkeypatch.setattr(DomainDispatcherApplication, "__call__", counted)


# Copies within the store


def test_a_rename_in_the_bucket_sends_a_header(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, name = bucket
    state = {f"a.{i}": torch.randn(MIB) for i in range(12)}
    fs.pipe_file(f"{name}/a.safetensors", save(state))
    received = Received(monkeypatch)
    ckpttool.remap(f"s3://{name}/a.safetensors", f"s3://{name}/b.safetensors", rule=["a.{x} => layers.{x}.weight"])
    assert compose.LEAST <= received.nbytes < compose.LEAST + MIB
    have = load(fs.cat_file(f"{name}/b.safetensors"))
    assert have.keys() == {f"layers.{i}.weight" for i in range(12)}
    assert all(torch.equal(have[f"layers.{i}.weight"], state[f"a.{i}"]) for i in range(12))


@pytest.mark.parametrize("ending", ["pt", "index"])
def test_other_formats_are_right_too(bucket: Any, tmp_path: Path, ending: str) -> None:
    fs, name = bucket
    state = {"big": torch.randn(6 * MIB), "small": torch.arange(5), "second": torch.randn(5 * MIB)}
    torch.save(state, tmp_path / "a.pt")
    fs.put_file(str(tmp_path / "a.pt"), f"{name}/a.pt")
    out = f"s3://{name}/b.pt" if ending == "pt" else f"s3://{name}/folder/"
    ckpttool.remap(f"s3://{name}/a.pt", out, rule=["{x} => m.{x}"], verify=True)
    if ending == "pt":
        fs.get_file(f"{name}/b.pt", str(tmp_path / "b.pt"))
        have = torch.load(tmp_path / "b.pt")
    else:
        ckpttool.remap(out, str(tmp_path / "b.safetensors"))
        have = load((tmp_path / "b.safetensors").read_bytes())
    assert have.keys() == {f"m.{key}" for key in state}
    assert all(torch.equal(have[f"m.{key}"], value) for key, value in state.items())


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_the_pieces_in_parts_that_the_store_takes(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random pieces over two objects: the parts are their bytes, in order, each but the last as long as needed."""
    _, name = bucket
    monkeypatch.setattr(compose, "LEAST", 50)
    monkeypatch.setattr(compose, "_WORTH", 80)
    monkeypatch.setattr(compose, "_SENT", 120)
    monkeypatch.setattr(compose, "_COPIED", 300)
    random = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most, (1,), generator=random))

    content = {f"s3://{name}/{own}": bytes(number(256) for _ in range(2000)) for own in "ab"}
    pieces, expected = [], b""
    for _ in range(number(8) + 1):
        path, start, length = sorted(content)[number(2)], number(1000), number(1000)
        expected += content[path][start : start + length]
        if number(2):
            pieces.append(Piece(Span(path, start, length), Crc() if not number(6) else None))
        else:
            pieces.append(Piece(content[path][start : start + length]))
    monkeypatch.setattr(compose, "stream", lambda run: iter([of(piece, content) for piece in run]))
    made = compose.plan(pieces, f"s3://{name}/out")
    if made is None:
        return
    parts = list(made.parts())
    got = [part if isinstance(part, bytes) else of(Piece(part), content) for part in parts]
    assert b"".join(got) == expected
    assert all(len(part) >= 50 for part in got[:-1])
    assert made.copied == sum(part.length for part in parts if isinstance(part, Span))
    assert made.sent + made.copied == len(expected)
    assert not [piece for piece in pieces if piece.crc is not None and piece.data in parts]


def of(piece: Piece, content: dict[str, bytes]) -> bytes:
    if isinstance(piece.data, bytes):
        return piece.data
    assert isinstance(piece.data, Span)
    return content[piece.data.path][piece.data.offset : piece.data.offset + piece.data.length]


@pytest.mark.parametrize("large", [False, True])
def test_without_force_what_came_meanwhile_stays(bucket: Any, large: bool) -> None:
    fs, name = bucket
    fs.pipe_file(f"{name}/source", os.urandom(MIB) * 24)
    fs.pipe_file(f"{name}/out", b"of somebody else")
    pieces = [Piece(b"head"), *([Piece(Span(f"s3://{name}/source", 0, 24 * MIB))] if large else [])]
    assert (compose.plan(pieces, f"s3://{name}/out") is not None) == large
    with pytest.raises(CkptError, match="another process has written it meanwhile"):
        write(pieces, f"s3://{name}/out", replace=False)
    assert fs.cat_file(f"{name}/out") == b"of somebody else"
    assert not fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads")


def test_a_source_that_changed_is_not_copied(bucket: Any) -> None:
    fs, name = bucket
    url = f"s3://{name}/a.safetensors"
    fs.pipe_file(f"{name}/a.safetensors", save({"a": torch.zeros(6 * MIB)}))
    source = ckpttool.open_checkpoint(url)
    fs.pipe_file(f"{name}/a.safetensors", save({"a": torch.ones(6 * MIB)}))
    with pytest.raises(CkptError):
        ckpttool.remap(source, f"s3://{name}/b.safetensors", rule=["a => b"])
    assert fs.ls(name, refresh=True, detail=False) == [f"{name}/a.safetensors"]
    assert not fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads")


# Requests that fail


@pytest.mark.parametrize("failure", [503, 429, 500, "reset", "cut", "short"])
def test_what_may_pass_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int | str) -> None:
    monkeypatch.setattr(errors, "_WAITS", (0.01,) * 4)
    state = {f"a.{i}": torch.randn(3 * MIB // 4) for i in range(4)}
    with web_server({"/a.safetensors": save(state)}) as server:
        url = f"{server.url}/a.safetensors"
        ckpttool.open_checkpoint(url)
        server.failures = [failure] * 2
        ckpttool.remap(url, str(tmp_path / "b.safetensors"), rule=["a.{x} => b.{x}"])
        have = load((tmp_path / "b.safetensors").read_bytes())
        assert all(torch.equal(have[f"b.{i}"], state[f"a.{i}"]) for i in range(4))
        server.failures = [failure] * 20
        with pytest.raises(CkptError):
            ckpttool.open_checkpoint(url)
        server.failures = []


@pytest.mark.parametrize("status", [403, 404, 501])
def test_what_does_not_pass_is_said_at_once(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(errors, "_WAITS", (60,))
    with web_server({"/a.safetensors": save({"a": torch.ones(2)})}) as server:
        server.failures = [status] * 2  # to both ways of asking for the size
        with pytest.raises(CkptError):
            ckpttool.open_checkpoint(f"{server.url}/a.safetensors")


# Headers of many shards


@pytest.mark.parametrize("own", ["", "model.safetensors.index.json"])
def test_headers_of_many_shards_are_asked_for_side_by_side(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    fs, name = bucket
    shards = {f"model-{i:05}-of-00100.safetensors": {f"a.{i}": torch.ones(2)} for i in range(100)}
    fs.pipe({f"{name}/m/{own}": save(state) for own, state in shards.items()})
    index = {"weight_map": {key: own for own, state in shards.items() for key in state}}
    fs.pipe_file(f"{name}/m/model.safetensors.index.json", json.dumps(index).encode())
    calls: list[int] = []
    plain = fs.cat_ranges

    def counted(paths: list[str], *rest: Any, **more: Any) -> Any:
        calls.append(len(paths))
        return plain(paths, *rest, **more)

    monkeypatch.setattr(fs, "cat_ranges", counted)
    assert len(ckpttool.open_checkpoint(f"s3://{name}/m/{own}").sections[0].tensors) == 100
    assert sorted(calls) == [1, 36, 64]
