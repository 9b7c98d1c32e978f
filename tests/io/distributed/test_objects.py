"""Splitting an object between ranks: the shares are valid upload parts and make up the object in order."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.core.errors import CkptError
from ckpttool.distributed import objects
from ckpttool.distributed.files import Item
from ckpttool.distributed.job import Job
from ckpttool.io import compose, progress, sources, write_remote
from ckpttool.io.pieces import Crc, Held, Link, Piece, Pieces, nbytes_of

pytest.importorskip("s3fs", reason="the driver of s3:// is not installed")
SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))
OUT, MB = "s3://bucket/out.pt", 1 << 20


def random_pieces(chance: random.Random) -> list[Piece]:
    """Return random pieces: literal, copied from disk or from the same store, computed, and checksums."""
    pieces: list[Piece] = [Piece(b"head" * chance.randrange(100))]
    crcs: list[Crc] = []
    for number in range(chance.randint(1, 30)):
        count = int(10 ** chance.uniform(1, chance.choice([6, 8, 10])))
        kind = chance.randrange(5)
        if kind == 0:
            crcs.append(Crc())
            pieces.append(Piece(Lazy(count, list), crc=crcs[-1]))
        elif kind == 1 and crcs:
            needs = tuple(chance.sample(crcs, chance.randint(1, len(crcs))))
            pieces.append(Piece(Lazy(4 * len(needs), list), needs=needs))
        elif kind == 2:
            pieces.append(Piece(Span(f"s3://bucket/{number}.pt", 7, count)))
        else:
            pieces.append(Piece(Span("local.pt", chance.randrange(5000), count)))
    return pieces


def merged_ranges(pieces: Pieces) -> Iterator[tuple[object, int, int]]:
    """Yield the pieces as ranges of paths or objects, with adjacent ones merged."""
    last: tuple[object, int, int] | None = None
    for piece in pieces:
        data = piece.data
        path: object = data.path if isinstance(data, Span) else id(data)
        begin = data.offset if isinstance(data, Span) else 0
        if last is not None and last[0] == path and last[2] == begin:
            last = path, last[1], begin + piece.nbytes
            continue
        if last is not None:
            yield last
        last = path, begin, begin + piece.nbytes
    if last is not None:
        yield last


def test_shares_are_valid_parts_of_the_object() -> None:
    many = late = copied = 0
    for seed in range(SEEDS):
        pieces = random_pieces(random.Random(seed))
        shares: list[Item] = list(vars(objects)["_items"]("out.pt", pieces, OUT))
        runs: list[Pieces] = [[Piece(one.data)] if isinstance(one.data, Span) else one.data for one in shares]
        whole = [piece for run in runs for piece in run if piece.nbytes]
        assert [*merged_ranges(whole)] == [*merged_ranges([piece for piece in pieces if piece.nbytes])], seed
        sizes = [size for one in shares for size in one.sizes]
        assert sum(sizes) == nbytes_of(pieces), seed
        assert all(size >= compose.LEAST for size in sizes[:-1]), seed
        assert all(size <= 5 << 30 for size in sizes), seed
        assert len(sizes) <= 10_000, seed
        assert [at for one in shares for at in range(one.first, one.first + len(one.sizes))] == [
            *range(1, len(sizes) + 1)
        ]
        for one, run in zip(shares, runs):
            crc_ids = {id(piece.crc) for piece in run if piece.crc is not None}
            assert one.late == any(id(crc) not in crc_ids for piece in run for crc in piece.needs), seed
            assert [id(crc) for crc in one.crcs] == [id(piece.crc) for piece in run if piece.crc is not None], seed
        many, late = many + (len(shares) > 8), late + any(one.late for one in shares)
        copied += any(isinstance(one.data, Span) for one in shares)
    assert min(many, late, copied) > SEEDS / 20, (many, late, copied)


# Uploads

PARTS = 20_000  # bytes; the last part of SOURCE has 4,000
SOURCE = os.urandom(9 * PARTS + 4_000)


@pytest.fixture
def small_shares(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST", PARTS)


def objects_of(tmp_path: Path, broken: bool = False) -> dict[str, Pieces | Link]:
    """Return two large objects and an index; the first ends with a checksum, the second raises if `broken`."""
    (tmp_path / "source").write_bytes(SOURCE)
    crc = Crc()

    def values() -> list[bytes]:
        if broken:
            raise CkptError("torn", hint="none")
        return [SOURCE[:PARTS]]

    first = [
        Piece(Lazy(PARTS, lambda: [SOURCE[:PARTS]]), crc=crc),
        Piece(Span(str(tmp_path / "source"), 0, 4 * PARTS)),
        Piece(Lazy(4, lambda: [crc.value.to_bytes(4, "big")]), needs=(crc,)),
    ]
    second = [Piece(Span(str(tmp_path / "source"), 5, 3 * PARTS)), Piece(Lazy(PARTS, values))]
    return {"first": first, "second": second, "index": [Piece(b"{}")]}


WHOLE = {
    "first": SOURCE[:PARTS] + SOURCE[: 4 * PARTS] + zlib.crc32(SOURCE[:PARTS]).to_bytes(4, "big"),
    "second": SOURCE[5 : 3 * PARTS + 5] + SOURCE[:PARTS],
    "index": b"{}",
}


def run(bucket: Any, files: dict[str, Pieces | Link], plan: object = "plan", held: Held | None = None) -> int:
    """Upload and complete the files on one rank, and return the number of parts that it sent."""
    _, name = bucket
    out, sent = f"s3://{name}/m", [0]
    urls = {own: f"{out}/{own}" for own in files}
    plain = compose.Upload._put

    def counted(upload: compose.Upload, *args: Any) -> Any:
        sent[0] += 1
        return plain(upload, *args)

    sources.forget_all()
    with (
        patch.object(compose.Upload, "_put", counted),
        objects.sent(Job(0, 1, HashStore(), ("remap",)), files, urls, out, plan, verify=held is not None) as uploaded,
    ):
        write_remote.write_folder(uploaded, out, (), replace=True, home=out)
        if held is not None:
            objects.note(held, files, uploaded)
    sources.forget_all()
    return sent[0]


def content(bucket: Any) -> dict[str, bytes]:
    fs, name = bucket
    fs.invalidate_cache()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(name)}


def uploads(bucket: Any) -> list[str]:
    return sorted(
        one["Key"] for one in bucket[0].call_s3("list_multipart_uploads", Bucket=bucket[1]).get("Uploads", ())
    )


def interrupt_run(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: object) -> None:
    """Interrupt a run while it sends the fifth share."""
    plain, seen = objects._Sender._send, list[int]()

    def ending(task: Any, number: int) -> Any:
        seen.append(number)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return plain(task, number)

    with monkeypatch.context() as inside:
        inside.setattr(objects._Sender, "_send", ending)
        with pytest.raises(KeyboardInterrupt):
            run(bucket, objects_of(tmp_path), plan)


@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("plan", ["plan", None])
def test_failed_upload_is_removed_and_killed_one_is_resumed(
    bucket: Any, tmp_path: Path, plan: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan, a killed upload cannot be resumed, so its objects are removed too."""
    with pytest.raises(CkptError, match="torn"):
        run(bucket, objects_of(tmp_path, broken=True), plan)
    assert (content(bucket), uploads(bucket)) == ({}, [])
    interrupt_run(bucket, tmp_path, monkeypatch, plan)
    left = [] if plan is None else ["m/first", "m/second"]
    assert uploads(bucket) == left
    assert len(content(bucket)) == (plan is not None)  # the record of the uploads
    sent = run(bucket, objects_of(tmp_path), plan)
    assert (content(bucket), uploads(bucket)) == (WHOLE, [])
    assert (sent < run(bucket, objects_of(tmp_path), plan)) == (plan is not None)


@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("difference", ["another plan", "another object", "another name", "no record", "ended", "half"])
def test_upload_of_another_plan_is_not_resumed(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    fs, name = bucket
    interrupt_run(bucket, tmp_path, monkeypatch, "another" if difference == "another plan" else "plan")
    (record,) = content(bucket)
    record_content = json.loads(fs.cat_file(f"{name}/m/{record}"))
    if difference == "another object":
        upload = fs.call_s3("create_multipart_upload", Bucket=name, Key="m/other")
        record_content["first"] |= {"Key": "m/other", "UploadId": upload["UploadId"]}
    elif difference == "another name":
        record_content = {"third": record_content["first"], "second": record_content["second"]}
    elif difference == "ended":
        for place in record_content.values():
            fs.call_s3("abort_multipart_upload", **place)
    fs.pipe_file(f"{name}/m/{record}", json.dumps(record_content if difference != "no record" else [5]).encode())
    if difference == "half":
        compose.Upload(f"s3://{name}/m/second", record_content["second"]).put(1, b"another" * 5_000)
    run(bucket, objects_of(tmp_path), held=(held := Held()) if difference == "half" else None)
    found = content(bucket)
    assert found == WHOLE
    if difference == "half":  # a part with the right number and other bytes: all parts are checked
        assert {*held.objects} == {f"s3://{name}/m/{own}" for own in ("first", "second")}
    if difference != "no record":
        assert uploads(bucket) == (["m/first"] if difference == "another object" else [])


@pytest.mark.usefixtures("small_shares")
def test_progress_counts_every_sent_byte_once(bucket: Any, tmp_path: Path) -> None:
    done = list[int]()
    with progress.shown(lambda title, total: nullcontext(done.append)), progress.doing("out", None, "written"):
        run(bucket, objects_of(tmp_path))
    assert sum(done) == sum(map(len, WHOLE.values()))


@pytest.mark.usefixtures("small_shares")
def test_object_not_proved_by_its_tags_is_not_recorded(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(compose.Upload, "is_proved", lambda upload, nbytes: upload.url.endswith("first"))
    run(bucket, objects_of(tmp_path), held=held)
    assert [*held.objects] == [f"s3://{bucket[1]}/m/first"]
