"""How an object is dealt out to ranks: shares that a store takes as parts, which are the object, in its order."""

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


def drawn(chance: random.Random) -> list[Piece]:
    """Pieces of an object: literal, copied from a disk or from the same store, computed, with checksums of others."""
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


def spread(pieces: Pieces) -> Iterator[tuple[object, int, int]]:
    """What the pieces say, as ranges: of files by their paths, of anything else by itself."""
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


def test_shares_are_the_object_in_parts_that_a_store_takes() -> None:
    many = late = copied = 0
    for seed in range(SEEDS):
        pieces = drawn(random.Random(seed))
        shares: list[Item] = list(vars(objects)["_items"]("out.pt", pieces, OUT))
        runs: list[Pieces] = [[Piece(one.data)] if isinstance(one.data, Span) else one.data for one in shares]
        whole = [piece for run in runs for piece in run if piece.nbytes]
        assert [*spread(whole)] == [*spread([piece for piece in pieces if piece.nbytes])], seed
        sizes = [size for one in shares for size in one.sizes]
        assert sum(sizes) == nbytes_of(pieces), seed
        assert all(size >= compose.LEAST for size in sizes[:-1]), seed
        assert all(size <= 5 << 30 for size in sizes), seed
        assert len(sizes) <= 10_000, seed
        assert [at for one in shares for at in range(one.first, one.first + len(one.sizes))] == [
            *range(1, len(sizes) + 1)
        ]
        for one, run in zip(shares, runs):
            own = {id(piece.crc) for piece in run if piece.crc is not None}
            assert one.late == any(id(crc) not in own for piece in run for crc in piece.needs), seed
            assert [id(crc) for crc in one.crcs] == [id(piece.crc) for piece in run if piece.crc is not None], seed
        many, late = many + (len(shares) > 8), late + any(one.late for one in shares)
        copied += any(isinstance(one.data, Span) for one in shares)
    assert min(many, late, copied) > SEEDS / 20, (many, late, copied)


# In a bucket

PARTS = 20_000  # bytes, four thousand of them in the last
SOURCE = os.urandom(9 * PARTS + 4_000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a thousandth of what S3 takes, here and there."""
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", compose.LEAST >> 10)
    for own in ("LEAST", "_SENT", "_WORTH", "_COPIED"):
        monkeypatch.setattr(compose, own, getattr(compose, own) >> 10)
    monkeypatch.setattr(objects, "MOST", PARTS)


def object_of(tmp_path: Path, broken: bool = False) -> dict[str, Pieces | Link]:
    """Two objects, one of which ends with a checksum of its values; the second may not come to its end."""
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
    """One rank sends the files, and completes them; how many parts it sent."""
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
        objects.sent(Job(0, 1, HashStore(), ("remap",)), files, urls, out, plan, verify=held is not None) as made,
    ):
        write_remote.write_folder(made, out, (), replace=True, home=out)
        if held is not None:
            objects.note(held, files, made)
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


def killed(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: object) -> None:
    """A run ends by a signal while it sends the fifth share."""
    plain, seen = objects._Sender._send, list[int]()

    def ending(task: Any, number: int) -> Any:
        seen.append(number)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return plain(task, number)

    with monkeypatch.context() as inside:
        inside.setattr(objects._Sender, "_send", ending)
        with pytest.raises(KeyboardInterrupt):
            run(bucket, object_of(tmp_path), plan)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("plan", ["plan", None])
def test_what_cannot_be_sent_leaves_nothing_and_what_is_killed_is_there_for_the_next_run(
    bucket: Any, tmp_path: Path, plan: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan nobody goes on, so that nothing is left then either."""
    with pytest.raises(CkptError, match="torn"):
        run(bucket, object_of(tmp_path, broken=True), plan)
    assert (content(bucket), uploads(bucket)) == ({}, [])
    killed(bucket, tmp_path, monkeypatch, plan)
    left = [] if plan is None else ["m/first", "m/second"]
    assert uploads(bucket) == left
    assert len(content(bucket)) == (plan is not None)  # what names the uploads
    sent = run(bucket, object_of(tmp_path), plan)
    assert (content(bucket), uploads(bucket)) == (WHOLE, [])
    assert (sent < run(bucket, object_of(tmp_path), plan)) == (plan is not None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("way", ["another plan", "another object", "another name", "no record", "ended", "half"])
def test_what_is_not_of_the_same_plan_is_not_gone_on_with(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fs, name = bucket
    killed(bucket, tmp_path, monkeypatch, "another" if way == "another plan" else "plan")
    (record,) = content(bucket)
    told = json.loads(fs.cat_file(f"{name}/m/{record}"))
    if way == "another object":
        upload = fs.call_s3("create_multipart_upload", Bucket=name, Key="m/other")
        told["first"] |= {"Key": "m/other", "UploadId": upload["UploadId"]}
    elif way == "another name":
        told = {"third": told["first"], "second": told["second"]}
    elif way == "ended":
        for place in told.values():
            fs.call_s3("abort_multipart_upload", **place)
    fs.pipe_file(f"{name}/m/{record}", json.dumps(told if way != "no record" else [5]).encode())
    if way == "half":
        compose.Upload(f"s3://{name}/m/second", told["second"]).put(1, b"another" * 5_000)
    run(bucket, object_of(tmp_path), held=(held := Held()) if way == "half" else None)
    found = content(bucket)
    assert found == WHOLE
    if way == "half":  # a part of the right number that is not the right one: all are looked at
        assert {*held.objects} == {f"s3://{name}/m/{own}" for own in ("first", "second")}
    if way != "no record":
        assert uploads(bucket) == (["m/first"] if way == "another object" else [])


@pytest.mark.usefixtures("small")
def test_every_byte_that_is_sent_is_counted_once(bucket: Any, tmp_path: Path) -> None:
    done = list[int]()
    with progress.shown(lambda title, total: nullcontext(done.append)), progress.doing("out", None, "written"):
        run(bucket, object_of(tmp_path))
    assert sum(done) == sum(map(len, WHOLE.values()))


@pytest.mark.usefixtures("small")
def test_what_the_tags_of_the_store_do_not_prove_is_not_noted(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(compose.Upload, "is_proved", lambda upload, nbytes: upload.url.endswith("first"))
    run(bucket, object_of(tmp_path), held=held)
    assert [*held.objects] == [f"s3://{bucket[1]}/m/first"]
