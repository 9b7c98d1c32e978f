"""Options as type checkers see them: a TypedDict for each dataclass of options.

Generated from the dataclasses: UPDATE_KEYWORDS=1 make test ARGS=tests/api/test_keywords.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


class ModelKeywords(TypedDict, total=False):
    """How the model is built."""

    materialize: bool


class OptimizerKeywords(ModelKeywords, total=False):
    """How the model and its optimizer are built: options of `trace` and `explain`."""

    optimizer: Any


class CheckKeywords(OptimizerKeywords, total=False):
    """Options of `check`."""

    model: Any


class CompareKeywords(TypedDict, total=False):
    """How tensors are compared."""

    values: bool
    rtol: float
    atol: float
    ignore_dtype: bool


class DiffKeywords(CheckKeywords, CompareKeywords, total=False):
    """Options of `diff`."""

    whole: bool
    fail_on: str | Sequence[str] | None
    ignore: str | Sequence[str] | None
    ignore_file: str | Sequence[str] | None
    fail_on_unused: bool


class OutputKeywords(TypedDict, total=False):
    """How an output is written, and the model that is to load it."""

    model: Any
    force: bool
    dry_run: bool
    verify: bool
    keep_pickled_code: bool
    no_fsync: bool


class FixKeywords(OptimizerKeywords, OutputKeywords, total=False):
    """Options of `fix`."""

    in_place: bool


class RemapKeywords(OptimizerKeywords, OutputKeywords, total=False):
    """Options of `remap`."""

    in_place: bool
    optimizer: Any
    to: str | None
    like: Any
    to_model: Any
    to_optimizer: Any
    fill_from: Sequence[Any] | None
    using: Any
    optimizer_keys: str | None
    from_: str | None
    select: str | None
    trainable_only: bool
    rule: str | Sequence[str] | None
    rules: str | None
    reverse: bool
    partial: bool
    drop: str | Sequence[str] | None
    sections: str | None
    keep_aliases: bool


class ConvertKeywords(ModelKeywords, OutputKeywords, total=False):
    """Options of `convert`."""

    keep_aliases: bool
    max_shard_size: str | None
    dtype: str | None
    metadata: str | Sequence[str] | None


class SwapKeywords(ModelKeywords, OutputKeywords, total=False):
    """Options of `swap_weights` into a file."""

    name: str | None
    from_: str | None
    cast: bool
    constants: bool
    keep_constants: bool


class WriteKeywords(TypedDict, total=False):
    """Options of `write`."""

    force: bool
    dry_run: bool
    verify: bool
    no_fsync: bool
    keep_aliases: bool
    max_shard_size: str | None
