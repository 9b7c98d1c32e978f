"""How an object is dealt out to ranks: shares that a store takes as parts, which are the object, in its order."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from ckpttool.checkpoint import Lazy, Span
from ckpttool.io import compose
from ckpttool.io.pieces import Crc, Piece, Pieces, nbytes_of
from ckpttool.io.together import send
from ckpttool.io.together.send import Share

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
        shares: list[Share] = list(vars(send)["_shares"]("out.pt", pieces, OUT))
        runs: list[Pieces] = [[Piece(one.run)] if isinstance(one.run, Span) else one.run for one in shares]
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
        copied += any(isinstance(one.run, Span) for one in shares)
    assert min(many, late, copied) > SEEDS / 20, (many, late, copied)
