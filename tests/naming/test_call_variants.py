"""`foo@1.w` is `foo.w` only if a model or the bytes show it, for outputs and entries."""

from __future__ import annotations

import pytest

from ckpttool.core.checkpoint import Lazy, Section, Storage, TensorEntry
from ckpttool.core.expression import Op, Ref
from ckpttool.core.plan import Output
from ckpttool.naming.match import (
    aliases,
    base_names,
    drop_variants,
    split_call,
    with_variants,
    without_variants,
)


def section(**values: int) -> Section:
    """Return tensors of one element; ``f_1`` means ``f@1``."""

    def entry(name: str, value: int) -> TensorEntry:
        key = f"{name.replace('_', '@')}.w"
        return TensorEntry(key, "uint8", (1,), (1,), 0, Storage(Lazy(1, lambda: [bytes([value])])))

    return Section(
        "model", "state_dict", tuple(entry(name, value) for name, value in values.items())
    )


def output(key: str, source: str | Op | None = None) -> Output:
    return Output("model", key, source if isinstance(source, Op) else Ref(source or key))


@pytest.mark.parametrize(
    ("segment", "parts"),
    [
        *(("f@2", ("f", 2)), ("f", ("f", 0)), ("f@0", ("f@0", 0))),
        ("f@1@2", ("f@1", 2)),
        ("@1", ("@1", 0)),
        ("f@x", ("f@x", 0)),
    ],
)
def test_split_call(segment: str, parts: tuple[str, int]) -> None:
    assert split_call(segment) == parts


def test_base_names_are_ordered_and_bounded() -> None:
    assert list(base_names("a@1.b@2.w")) == ["a.b.w", "a.b@2.w", "a@1.b.w"]
    assert list(base_names("a.w@1")) == []  # the last segment is the tensor
    assert len(list(base_names(".".join(["f@1"] * 20 + ["w"])))) == 2**8 - 1


def test_a_variant_with_the_bytes_of_its_base_is_an_alias() -> None:
    assert aliases(section(f=1, f_1=1, f_2=2, g_1=1)) == {"f@1.w": "f.w"}


def test_drop_variants_drops_equal_values_and_reports_others() -> None:
    dropped, problems = drop_variants(
        {"f@1.w": "f.w", "f@2.w": "f.w"}, {"f.w": "f.w"}, section(f=1, f_1=1, f_2=2)
    )
    assert [(one.section, one.key, one.reason) for one in dropped] == [
        ("model", "f@1.w", "a call variant of f.w")
    ]
    assert [str(problem) for problem in problems] == [
        "a call variant of f.w with another value @ f@2.w"
    ]


def test_without_variants_keeps_only_bases() -> None:
    entries, alias_of = (
        section(f=1, f_1=1, f_2=2, g=1),
        {"f.w": "f.w", "f@1.w": "f.w", "f@2.w": "f.w", "g@1.w": "g@1.w"},
    )
    outputs = [output(key) for key in ("f@1.w", "f.w", "f@2.w", "g.w")]
    kept, dropped, problems = without_variants(outputs, alias_of, entries)
    assert [one.key for one in kept] == ["f.w", "g.w"]
    assert [one.key for one in dropped] == ["f@1.w"]
    assert [str(problem) for problem in problems] == [
        "a call variant of f.w with another value @ f@2.w"
    ]
    runtime = [output("f.w"), output("f@1.w", "f.w"), output("g.w"), output("g@1.w")]
    kept, dropped, problems = without_variants(runtime, alias_of, section(f=1, g=1, g_1=1))
    # the model has another tensor at `g@1.w`
    assert [one.key for one in kept] == ["f.w", "g.w", "g@1.w"]
    assert (dropped, problems) == ([], [])  # no key of the file is dropped
    computed = Op("aten.neg.default", (Ref("f.w"),))
    for source, fits in (
        (computed, True),
        (Op("aten.neg.default", (Ref("g.w"),)), False),
        ("f.w", False),
    ):
        kept, _, problems = without_variants(
            [output("f.w", computed), output("f@1.w", source)], alias_of, entries
        )
        assert ([one.key for one in kept], not problems) == (["f.w"], fits)


def test_with_variants_adds_all_variants() -> None:
    alias_of = {"f@1.w": "f.w", "f.w": "f.w", "f@2.w": "f.w", "g@1.w": "g@1.w", "h@1.w": "h.w"}
    expanded = with_variants([output("f.w", "x"), output("g.w"), output("f@2.w", "y")], alias_of)
    assert [(one.key, one.source) for one in expanded] == [
        *(("f.w", Ref("x")), ("f@1.w", Ref("x")), ("g.w", Ref("g.w")), ("f@2.w", Ref("y"))),
    ]
