"""Requests to a store: copies within S3, checksums, retries, and concurrent reads of headers."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from hashlib import md5
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save, save_file

import ckpttool
from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.evaluate.torch_eval import load as load_entry
from ckpttool.io import compose, remote
from ckpttool.io.compose import Upload
from ckpttool.io.pieces import Crc, Piece, Pieces
from ckpttool.io.remote import BLOCK
from ckpttool.io.write_remote import write
from ckpttool.remapping.write import Verified
from command import Run
from places import ROOT
from remote_servers import Received, web_server

pytest.importorskip("s3fs", reason="the driver of s3:// is not installed")
KIB, MIB = 1 << 10, 1 << 20


# Number of bytes fetched


def as_safetensors(state: dict[str, torch.Tensor], folder: Path) -> tuple[str, int]:
    save_file(state, folder / "a.safetensors")
    return "a.safetensors", 8 + int.from_bytes((folder / "a.safetensors").read_bytes()[:8], "little")


def as_zip(state: dict[str, torch.Tensor], folder: Path) -> tuple[str, int]:
    torch.save(state, folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt") as file:
        directory = (folder / "a.pt").stat().st_size - file.start_dir
        return "a.pt", directory + file.getinfo("a/data.pkl").file_size


def as_legacy(state: dict[str, torch.Tensor], folder: Path) -> tuple[str, int]:
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    return "old.pt", (folder / "old.pt").stat().st_size - sum(8 + tensor.nbytes for tensor in state.values())


def as_shards(state: dict[str, torch.Tensor], folder: Path) -> tuple[str, int]:
    as_safetensors(state, folder)
    ckpttool.convert(str(folder / "a.safetensors"), f"{folder}/shards/", max_shard_size="2MB")
    (index,) = (folder / "shards").glob("*.json")
    headers = [8 + int.from_bytes(p.read_bytes()[:8], "little") for p in (folder / "shards").glob("*.safetensors")]
    return "shards", index.stat().st_size + sum(headers)


def as_dcp(state: dict[str, torch.Tensor], folder: Path) -> tuple[str, int]:
    objects = {f"{i}": ["an object", i] for i in range(20)}
    dcp.save({**state, **objects}, checkpoint_id=folder / "a.dcp")
    places = dcp.FileSystemReader(folder / "a.dcp").read_metadata().storage_data
    nbytes = sum(place.length for index, place in places.items() if index.fqn in objects)
    return "a.dcp", (folder / "a.dcp" / ".metadata").stat().st_size + nbytes


MEASURED = "2.13."  # the torch release that benchmarks/README.md was measured with
FORMS = {
    "safetensors": as_safetensors,
    "torch zip": as_zip,
    "before torch 1.6": as_legacy,
    "sharded safetensors": as_shards,
    "DCP": as_dcp,
}
BLOCKS = {"safetensors": 1, "torch zip": 1, "before torch 1.6": 2}  # that may be fetched in addition to headers


@pytest.mark.parametrize("form", FORMS)
def test_inspect_fetches_little_more_than_the_headers(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The server sends at most 10% more than the headers, as benchmarks/README.md shows.

    Other formats may fetch 1 block more. Pickles from before torch 1.6 do not state their length, so 2 are allowed.
    """
    fs, name = bucket
    monkeypatch.chdir(tmp_path)  # DCP stores the name of its folder
    filename, nbytes = FORMS[form]({f"layers.{i}.weight": torch.full((256, 8), float(i)) for i in range(1000)}, Path())
    fs.put(str(tmp_path / filename), f"{name}/{filename}", recursive=True)
    received = Received(monkeypatch)
    result = ckpttool.inspect(f"s3://{name}/{filename}")
    assert len(result.checkpoint.sections[0].tensors) == 1000
    files = len([*(tmp_path / filename).iterdir()]) if (tmp_path / filename).is_dir() else 1
    row = f"| {form} | {files} | {nbytes:,} | {received.requests} | {received.sent:,} |"
    assert received.sent <= 1.1 * nbytes + BLOCKS.get(form, 0) * BLOCK
    if torch.__version__.startswith(MEASURED):  # tensor metadata of DCP and torch zip differs between releases
        assert row in (ROOT / "benchmarks/README.md").read_text()


def test_assumed_offsets_are_checked_before_tensors_are_read(bucket: Any, tmp_path: Path) -> None:
    """If local headers or element counts contradict the assumed layout, torch would read other bytes."""
    fs, name = bucket
    state = {f"{i}": torch.full((64,), float(i)) for i in range(4)}
    for form, at, change in (("torch zip", 28, b"\x05"), ("before torch 1.6", 0, b"\x3f")):
        filename, _ = FORMS[form](state, tmp_path)
        data = bytearray((tmp_path / filename).read_bytes())
        begin = data.index(b"data/2") - 30 - len("a/") if at else data.index(bytes(state["2"].numpy())) - 8
        data[begin + at : begin + at + 1] = change
        fs.pipe_file(f"{name}/{filename}", bytes(data))
        url = f"s3://{name}/{filename}"
        assert len(ckpttool.inspect(url).checkpoint.sections[0].tensors) == 4
        with pytest.raises(CkptError, match=r"contradict|as long as|truncated"):
            ckpttool.inspect(url, stats=True)
        with pytest.raises(CkptError, match=r"contradict|as long as|truncated"):
            ckpttool.remap(url, f"s3://{name}/b.safetensors")
        assert not fs.exists(f"{name}/b.safetensors")


# Copies within the store


def test_rename_within_a_bucket_sends_only_the_header(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, name = bucket
    state = {f"a.{i}": torch.randn(MIB) for i in range(6)}  # 24 MiB
    fs.pipe_file(f"{name}/a.safetensors", save(state))
    received = Received(monkeypatch)
    ckpttool.remap(f"s3://{name}/a.safetensors", f"s3://{name}/b.safetensors", rule=["a.{x} => layers.{x}.weight"])
    assert compose.LEAST <= received.nbytes < compose.LEAST + MIB
    result = load(fs.cat_file(f"{name}/b.safetensors"))
    assert result.keys() == {f"layers.{i}.weight" for i in range(6)}
    assert all(torch.equal(result[f"layers.{i}.weight"], state[f"a.{i}"]) for i in range(6))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("ending", ["pt", "index"])
def test_torch_zip_is_copied_within_the_bucket(bucket: Any, tmp_path: Path, ending: str) -> None:
    fs, name = bucket
    state = {"big": torch.randn(6 * KIB), "small": torch.arange(5), "second": torch.randn(5 * KIB)}
    torch.save(state, tmp_path / "a.pt")
    fs.put_file(str(tmp_path / "a.pt"), f"{name}/a.pt")
    out = f"s3://{name}/b.pt" if ending == "pt" else f"s3://{name}/folder/"
    ckpttool.remap(f"s3://{name}/a.pt", out, rule=["{x} => m.{x}"], verify=True)
    if ending == "pt":
        fs.get_file(f"{name}/b.pt", str(tmp_path / "b.pt"))
        result = torch.load(tmp_path / "b.pt")
    else:
        ckpttool.remap(out, str(tmp_path / "b.safetensors"))
        result = load((tmp_path / "b.safetensors").read_bytes())
    assert result.keys() == {f"m.{key}" for key in state}
    assert all(torch.equal(result[f"m.{key}"], value) for key, value in state.items())


def test_planned_parts_are_the_pieces_in_order(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For random pieces of two objects; all parts but the last reach the minimum length."""
    _, name = bucket
    for constant, value in (("LEAST", 50), ("_WORTH", 80), ("_SENT", 120), ("_COPIED", 300)):
        monkeypatch.setattr(compose, constant, value)
    content = {f"s3://{name}/{key}": Random(key).randbytes(2000) for key in "ab"}
    monkeypatch.setattr(compose, "stream", lambda run: iter([bytes_of(piece, content) for piece in run]))
    planned = 0
    for seed in range(60):
        chance, pieces, expected = Random(seed), [], b""
        for _ in range(chance.randint(1, 8)):
            path, start, length = chance.choice(sorted(content)), chance.randrange(1000), chance.randrange(1000)
            expected += content[path][start : start + length]
            if chance.randrange(2):
                pieces.append(Piece(Span(path, start, length), Crc() if not chance.randrange(6) else None))
            else:
                pieces.append(Piece(content[path][start : start + length]))
        plan = compose.plan(pieces, f"s3://{name}/out")
        if plan is None:
            continue
        planned += 1
        parts = list(plan.parts())
        actual = [part if isinstance(part, bytes) else bytes_of(Piece(part), content) for part in parts]
        assert b"".join(actual) == expected, seed
        assert all(len(part) >= 50 for part in actual[:-1]), seed
        assert plan.copied == sum(part.length for part in parts if isinstance(part, Span))
        assert plan.sent + plan.copied == len(expected)
        assert not [piece for piece in pieces if piece.crc is not None and piece.data in parts]
    assert planned > 50


def test_other_stores_and_many_small_pieces_are_not_copied(bucket: Any) -> None:
    out, long = f"s3://{bucket[1]}/out", compose._WORTH

    def runs(*urls: str) -> int:
        plan = compose.plan([Piece(Span(url, 2 * at * long, long)) for at, url in enumerate(urls)], out)
        assert plan is not None
        return len(plan.runs)

    here = f"s3://{bucket[1]}/a"
    assert runs(here, here, "memory://elsewhere/a", here) == 4
    assert runs("memory://elsewhere/a", "memory://elsewhere/a") == 1
    assert runs(*[here] * (compose._MOST_RUNS - 1)) == compose._MOST_RUNS - 1
    assert runs(*[here] * compose._MOST_RUNS) == 1


def bytes_of(piece: Piece, content: dict[str, bytes]) -> bytes:
    if isinstance(piece.data, bytes):
        return piece.data
    assert isinstance(piece.data, Span)
    return content[piece.data.path][piece.data.offset : piece.data.offset + piece.data.length]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_conditional", [True, False])
@pytest.mark.parametrize("large", [False, True])
def test_object_created_meanwhile_is_kept_without_force(
    bucket: Any, monkeypatch: Any, large: bool, is_conditional: bool
) -> None:
    """This also holds for a driver that does not know conditional puts and drops unknown arguments."""
    fs, name = bucket
    if not is_conditional:
        plain = fs.call_s3
        monkeypatch.setattr(type(fs), "_pipe_file", lambda self, path, data: None)
        monkeypatch.setattr(
            type(fs), "call_s3", lambda self, *what, IfNoneMatch=None, **arguments: plain(*what, **arguments)
        )
    fs.pipe_file(f"{name}/source", os.urandom(24 * KIB))
    fs.pipe_file(f"{name}/out", b"of another process")
    pieces = [Piece(b"head"), *([Piece(Span(f"s3://{name}/source", 0, 24 * KIB))] if large else [])]
    assert (compose.plan(pieces, f"s3://{name}/out") is not None) == large
    with pytest.raises(CkptError, match="another process has written it meanwhile"):
        write(pieces, f"s3://{name}/out", replace=False)
    assert fs.cat_file(f"{name}/out") == b"of another process"
    assert not fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads")


@pytest.mark.usefixtures("small_parts")
def test_changed_source_is_not_copied(bucket: Any) -> None:
    fs, name = bucket
    url = f"s3://{name}/a.safetensors"
    fs.pipe_file(f"{name}/a.safetensors", save({"a": torch.zeros(6 * KIB)}))
    source = ckpttool.open_checkpoint(url)
    fs.pipe_file(f"{name}/a.safetensors", save({"a": torch.ones(6 * KIB)}))
    with pytest.raises(CkptError):
        ckpttool.remap(source, f"s3://{name}/b.safetensors", rule=["a => b"])
    assert fs.ls(name, refresh=True, detail=False) == [f"{name}/a.safetensors"]
    assert not fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads")


@pytest.mark.usefixtures("small_parts")
def test_named_version_of_an_object_is_copied(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With versioning enabled in the bucket and in the driver, the older version can be copied."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"version_aware": True})
    fs = fsspec.filesystem("s3", version_aware=True)
    name = bucket[1]
    fs.call_s3("put_bucket_versioning", Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    old, new = os.urandom(200_000), os.urandom(200_000)
    for data in (old, new):
        fs.pipe_file(f"{name}/a", data)
    versions = fs.call_s3("list_object_versions", Bucket=name)["Versions"]
    (older,) = (one["VersionId"] for one in versions if not one["IsLatest"])
    url, out = f"s3://{name}/a?versionId={older}", f"s3://{name}/b"
    pieces = [Piece(Span(url, 0, 200_000))]
    plan = compose.plan(pieces, out)
    assert plan is not None
    assert plan.copied == 200_000
    write(pieces, out)
    assert fs.cat_file(f"{name}/b") == old


@pytest.mark.usefixtures("small_parts")
def test_resumed_upload_sends_changed_parts_again(bucket: Any) -> None:
    fs, name = bucket
    upload = compose.begin(f"s3://{name}/out", verify=True)
    data, sent = os.urandom(compose.LEAST), list[bool]()
    for there, body in ((None, bytes(len(data))), ({"PartNumber": 1, "ETag": '"another"'}, data), (None, data)):
        had = upload.there().get(1)
        part = upload.put(1, body, there if there or had is None else {"PartNumber": 1, "ETag": had[1]})
        sent.append(upload.there().get(1) != had)
        assert part == {"PartNumber": 1, "ETag": f'"{md5(body).hexdigest()}"', "MD5": md5(body).hexdigest()}
    assert sent == [True, True, False]
    upload.parts.append(part)
    upload.complete(replace=False)
    assert fs.cat_file(f"{name}/out") == data
    assert upload.is_proved(len(data))
    fs.rm_file(f"{name}/out")
    remote.forget(upload.url)
    assert not upload.is_proved(len(data))


# Verified by the store's own checksums

BIG = {f"a.{i}": torch.arange(i, 16 * KIB + i, dtype=torch.float32) for i in range(12)}  # 768 KiB


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Return a safetensors file that contains `BIG`."""
    save_file(BIG, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("out", ["b.safetensors", "b.pt", "folder/"])
@pytest.mark.parametrize("in_bucket", [True, False])
@pytest.mark.usefixtures("small_parts")
def test_output_proved_by_store_checksums_is_not_read_back(
    bucket: Any, big: Path, monkeypatch: pytest.MonkeyPatch, out: str, in_bucket: bool
) -> None:
    """Only headers of the output are read; a source in the bucket is read once, to compute its MD5."""
    fs, name = bucket
    fs.put_file(str(big), f"{name}/a.safetensors")
    source = f"s3://{name}/a.safetensors" if in_bucket else str(big)
    received = Received(monkeypatch)
    if out == "folder/":
        done = ckpttool.convert(source, f"s3://{name}/{out}", verify=True, max_shard_size="300kB")
    else:
        done = ckpttool.remap(source, f"s3://{name}/{out}", rule=["{x*} => m.{x*}"], verify=True)
    assert done.verified == Verified(768 * KIB, 0)
    assert received.sent <= (900 if in_bucket else 100) * KIB
    result = ckpttool.open_checkpoint(f"s3://{name}/{out}")
    assert all(torch.equal(load_entry(e), BIG[e.key.removeprefix("m.")]) for e in result.sections[0].tensors)


@pytest.mark.usefixtures("small_parts")
def test_computed_values_are_verified_by_checksum(bucket: Any, big: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "cast.toml").write_text('[[rule]]\ncast = "a.*"\ndtype = "bfloat16"\n')
    out = f"s3://{bucket[1]}/b.safetensors"
    args = ("remap", big, "-o", out, "--rules", tmp_path / "cast.toml", "--verify")
    assert json.loads(run(*args, "--format", "json").out)["verified"] == {"by_checksum": 384 * KIB, "read": 0}
    out = run(*args, "--force").out
    assert "every tensor of the output: 384.0 KiB by checksums of its store, 0 bytes read back and compared" in out


@pytest.mark.parametrize("case", ["damaged", "other tags", "replaced"])
@pytest.mark.usefixtures("small_parts")
def test_output_without_matching_checksums_is_read_back(
    bucket: Any, big: Path, monkeypatch: pytest.MonkeyPatch, run: Run, case: str
) -> None:
    """The store holds other bytes, its ETags are not MD5s, or another process replaced the object."""
    from moto.s3.models import FakeKey, FakeMultipart

    fs, name = bucket
    plain, finish = FakeMultipart.set_part, Upload.complete
    if case == "damaged":
        monkeypatch.setattr(FakeMultipart, "set_part", lambda self, at, v: plain(self, at, v[:-1] + bytes([v[-1] ^ 1])))
    elif case == "other tags":
        monkeypatch.setattr(FakeKey, "etag", property(lambda self: f'"{md5(self.value + b"key").hexdigest()}"'))
    else:

        def completed(upload: Upload, *, replace: bool) -> None:
            finish(upload, replace=replace)
            fs.pipe_file(f"{name}/b.safetensors", save({f"b.{i}": torch.zeros(16 * KIB) for i in range(12)}))

        monkeypatch.setattr(Upload, "complete", completed)
    args = ("remap", big, "-o", f"s3://{name}/b.safetensors", "--rule", "a.{x} => b.{x}")
    status, out, err = run(*args, "--verify", "--format", "json")
    if case == "other tags":
        assert json.loads(out)["verified"] == {"by_checksum": 0, "read": 768 * KIB}
        return
    assert status == 2
    assert f"error: s3://{name}/b.safetensors is not what was planned" in err
    assert "other bytes in the output @ b." in err


@pytest.fixture
def crcs(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make moto keep a CRC-64/NVME of every multipart object, as S3 does."""
    pytest.importorskip("botocore", "1.36", reason="botocore is too old to request CRC-64/NVME")
    pytest.importorskip("awscrt", reason="awscrt, which computes CRC-64/NVME, is not installed")
    fs, _ = bucket
    plain = fs.call_s3

    def with_crc(method: str, **arguments: Any) -> Any:
        more = {"ChecksumAlgorithm": "CRC64NVME"} if method == "create_multipart_upload" else {}
        return plain(method, **arguments, **more)

    monkeypatch.setattr(fs, "call_s3", with_crc)


@pytest.mark.parametrize("form", ["safetensors", "torch zip"])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.usefixtures("small_parts", "crcs")
def test_copied_data_is_verified_by_crc_without_reading(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, damaged: bool
) -> None:
    _, name = bucket
    filename, _ = FORMS[form](BIG, tmp_path)
    write([Piece(Span(str(tmp_path / filename), 0, (tmp_path / filename).stat().st_size))], f"s3://{name}/{filename}")
    if damaged:
        from moto.s3.models import FakeMultipart

        plain = FakeMultipart.set_part
        flipped = lambda self, at, value: plain(self, at, value[:-9] + bytes([value[-9] ^ 1]) + value[-8:])  # noqa: E731
        monkeypatch.setattr(FakeMultipart, "set_part", flipped)
        with pytest.raises(CkptError, match=r"is not what was planned|damaged|CRC"):
            ckpttool.remap(f"s3://{name}/{filename}", f"s3://{name}/b-{filename}", rule=["a.{x} => b.{x}"], verify=True)
        return
    received = Received(monkeypatch)
    done = ckpttool.remap(f"s3://{name}/{filename}", f"s3://{name}/b-{filename}", rule=["a.{x} => b.{x}"], verify=True)
    assert done.verified == Verified(768 * KIB, 0)
    assert received.sent <= 250 * KIB  # local headers, and records without data descriptors for their CRCs
    result = ckpttool.open_checkpoint(f"s3://{name}/b-{filename}")
    assert all(torch.equal(load_entry(e), BIG["a" + e.key[1:]]) for e in result.sections[0].tensors)


@pytest.mark.usefixtures("small_parts", "crcs")
def test_crcs_prove_a_copied_range(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both objects have other bytes before and after the range; a single changed bit is noticed."""
    fs, name = bucket
    for seed in range(8):
        random = Random(seed)
        before, span, after = (random.randbytes(size) for size in (random.randrange(99), 40_000, random.randrange(99)))
        head, tail = random.randbytes(8000), random.randbytes(random.randrange(99))
        wrong = bytearray(head + span + tail)
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        for key, data in (("source", before + span + after), ("same", head + span + tail), ("other", bytes(wrong))):
            write([Piece(data)], f"s3://{name}/{key}")
        runs: list[Pieces | Span] = [[Piece(head)], Span(f"s3://{name}/source", len(before), len(span)), [Piece(tail)]]
        assert compose.is_copied(runs, f"s3://{name}/same"), seed
        assert not compose.is_copied(runs, f"s3://{name}/other"), seed
    with monkeypatch.context() as patched:
        patched.setattr(compose, "_MOST", len(head) - 1)  # too many bytes would have to be read
        assert not compose.is_copied(runs, f"s3://{name}/same")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "awscrt.checksums", None)
        assert not compose.is_copied(runs, f"s3://{name}/same")
    assert not compose.is_copied([*runs, *runs[1:2]], f"s3://{name}/same")
    fs.pipe_file(f"{name}/same", head + span + tail)  # rewritten: another ETag and no CRC
    assert not compose.is_copied(runs, f"s3://{name}/same")
    remote.forget(f"s3://{name}/same")
    assert not compose.is_copied(runs, f"s3://{name}/same")


# Failed requests


@pytest.mark.parametrize("failure", [503, 429, 500, "reset", "cut", "short"])
def test_transient_failure_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int | str) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.01,) * 4)
    state = {f"a.{i}": torch.randn(5 * MIB // 16) for i in range(4)}
    with web_server({"/a.safetensors": save(state)}) as server:
        url = f"{server.url}/a.safetensors"
        ckpttool.open_checkpoint(url)
        server.failures = [failure] * 2
        ckpttool.remap(url, str(tmp_path / "b.safetensors"), rule=["a.{x} => b.{x}"])
        result = load((tmp_path / "b.safetensors").read_bytes())
        assert all(torch.equal(result[f"b.{i}"], state[f"a.{i}"]) for i in range(4))
        server.failures = [failure] * 20
        with pytest.raises(CkptError):
            ckpttool.open_checkpoint(url)
        server.failures = []


@pytest.mark.parametrize("status", [403, 404, 501])
def test_permanent_failure_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(remote, "_WAITS", (60,))
    with web_server({"/a.safetensors": save({"a": torch.ones(2)})}) as server:
        server.failures = [status] * 2  # for both requests for the size
        with pytest.raises(CkptError):
            ckpttool.open_checkpoint(f"{server.url}/a.safetensors")


# Headers of many shards


def test_headers_of_many_shards_are_fetched_concurrently(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, name = bucket
    shards = {f"model-{i:05}-of-00100.safetensors": {f"a.{i}": torch.ones(2)} for i in range(100)}
    fs.pipe({f"{name}/m/{filename}": save(state) for filename, state in shards.items()})
    index = {"weight_map": {key: filename for filename, state in shards.items() for key in state}}
    fs.pipe_file(f"{name}/m/model.safetensors.index.json", json.dumps(index).encode())
    calls: list[int] = []
    plain = fs.cat_ranges

    def counted(paths: list[str], *rest: Any, **more: Any) -> Any:
        calls.append(len(paths))
        return plain(paths, *rest, **more)

    monkeypatch.setattr(fs, "cat_ranges", counted)
    for filename in ("", "model.safetensors.index.json"):
        calls.clear()
        assert len(ckpttool.open_checkpoint(f"s3://{name}/m/{filename}").sections[0].tensors) == 100
        assert sorted(calls) == [1, 36, 64]
        remote.forget(f"s3://{name}/m")
