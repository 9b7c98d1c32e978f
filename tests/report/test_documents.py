"""Golden texts for results with every kind of entry, so that each count, side and reason is
checked.
"""

from __future__ import annotations

import pytest

from ckpttool.checks import Checked, Checks
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Problem
from ckpttool.core.expression import LOADED, Op, Ref
from ckpttool.core.names import Hook
from ckpttool.core.plan import Dropped, ModelRun, Output, Plan
from ckpttool.core.text import Info
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import (
    HARMLESS,
    Diff,
    Entry,
    Fix,
)
from ckpttool.naming.evidence import Ambiguous, Inference, Pair
from ckpttool.remapping.optimizer import OptimizerRemap
from ckpttool.remapping.plan import Remap
from ckpttool.remapping.write import Cost
from ckpttool.report import render
from ckpttool.report.document import Document
from ckpttool.report.documents import diff as of_diff
from ckpttool.report.documents import names as of_check
from ckpttool.report.documents import remap as of_remap

HOOK = Hook("rename", "model.py", 7, "layers.0")


def because(reason: str) -> Cause:
    return Cause(Code.DOUBT, (reason,))


def both(
    status: str, key: str, reason: str = "", detail: str | None = None, ignored: str | None = None
) -> Entry:
    return Entry(
        status, (key,), (key,), because(reason) if reason else None, None, detail, None, ignored
    )


def shapes(name: str, *details: str) -> list[Entry]:
    return [
        both("shape", f"{name}.{at}", f"different shape of {name}", detail)
        for at, detail in enumerate(details)
    ]


ENTRIES = (
    both("same", "w"),
    both("alias", "tied", "a second name", "same as w"),
    Entry("renamed", ("layers.0.a",), ("layers.0.b",), because("state_dict hook"), HOOK),
    Entry("renamed", ("layers.1.a",), ("layers.1.b",), because("state_dict hook"), HOOK),
    Entry(
        "renamed",
        ("layers.2.a",),
        ("layers.2.b",),
        because("state_dict hook"),
        Hook("rename", "model.py", 9, "layers.2"),
    ),
    *shapes("one", "[1] instead of [2]", "[1] instead of [2]"),
    *shapes("two", "[1] instead of [2]", "[1] instead of [3]"),
    *shapes("many", "[1]", "[2]", "[3]", "[4]"),
    *(both("value", f"v.{at}", "different values", f"by {at}") for at in range(3)),
    Entry("transformed", ("q", "k"), ("qk",), because("computed: cat")),
)
PAIRS = (
    Pair(("a.0.w",), ("b.0.w",), "the only one of its shape"),
    Pair(("a.1.w",), ("b.1.w",), "the only one of its shape"),
    Pair(("a.2.w",), ("b.2.w",), "the only one of its shape", "right"),
    Pair(("q.0", "k.0"), ("qk.0",), "end to end"),
    Pair(("x.y",), ("z.y",), Info("the same name but for a prefix", "same-name")),
    Pair(("x.u",), ("z.u",), Info("the same name but for a prefix", "same-name")),
)
INFERRED = Inference(PAIRS, (Ambiguous(("m", "n"), ("o", "p"), "of one shape"),))
DIFF = Diff("a.pt", "b.pt", False, ENTRIES, (Fix("ckpttool remap"),), ("a note",), INFERRED)


def text(document: Document) -> str:
    return render("text", document, {})


CAUSES = """\
diff
15 of 16 keys differ (6 likely renames)
reason: different shape of many (4 keys)
fix (not tried): ckpttool remap
details: --all lists every key; `ckpttool explain doubtful-ids` says more about the reason

renamed: 2 keys, state_dict hook: rename (model.py:7) [doubtful-ids]
  layers.{0-1}.a -> layers.{0-1}.b
renamed: 1 key, state_dict hook: rename (model.py:9) [doubtful-ids]
  layers.2.a -> layers.2.b
shape: 2 keys, different shape of one [doubtful-ids]
  one.{0-1}: [1] instead of [2]
shape: 2 keys, different shape of two [doubtful-ids]
  two.0: [1] instead of [2]
  two.1: [1] instead of [3]
shape: 4 keys, different shape of many [doubtful-ids]
  many.0: [1]
  many.1: [2]
  many.2: [3]
  many.3: [4]
value: 3 keys, different values [doubtful-ids]
  v.0: by 0
  v.1: by 1
  v.2: by 2
transformed: 1 key, computed: cat [doubtful-ids]
  q + k -> qk

Not counted as differences
alias: 1 key, a second name [doubtful-ids]
  tied: same as w

Likely renames (heuristic; does not affect the result)
2 pairs, the only one of its shape
  a.{0-1}.w -> b.{0-1}.w
1 pair, the only one of its shape; stored transposed in right
  a.2.w -> b.2.w
1 pair, end to end
  q.0 + k.0 -> qk.0
2 pairs, the same name but for a prefix
  x.y -> z.y
  x.u -> z.u

Ambiguous matches
  left         right        why
  m (+1 more)  o (+1 more)  of one shape

warning: a note

left   a.pt
right  b.pt
keys   1 same, 3 renamed, 1 transformed, 8 shape, 3 value
"""


# What a report shows of several keys, and what it shows of each key with --all
FULL = {
    "about the reason\n\n": "about the reason\n\nEvery key\nsame: 1 key\n  w\n",
    "layers.{0-1}.a -> layers.{0-1}.b": "layers.0.a -> layers.0.b\n  layers.1.a -> layers.1.b",
    "one.{0-1}: [1] instead of [2]": "one.0: [1] instead of [2]\n  one.1: [1] instead of [2]",
    "a.{0-1}.w -> b.{0-1}.w": "a.0.w -> b.0.w\n  a.1.w -> b.1.w",
    "  left         right        why\n  m (+1 more)  o (+1 more)  ": "  left   right  why\n  m + n"
    "  o + p  ",
}


def test_the_causes_of_a_diff() -> None:
    assert text(of_diff.document(DIFF)) == CAUSES
    every_key = CAUSES
    for short, full in FULL.items():
        assert short in every_key
        every_key = every_key.replace(short, full)
    assert text(of_diff.document(DIFF, all=True)) == every_key


HARMLESS_HERE = HARMLESS | {"dtype"}
HALF = (both("dtype", "h", "float16 instead of float32"),)
RELEVANT = (both("shape", "s"), both("missing", "m", ignored="new"), *HALF)


@pytest.mark.parametrize(
    ("diff", "verdict"),
    [
        (Diff("a", "b", True, ENTRIES[:2]), "no differences"),
        (
            Diff("a", "b", True, HALF, harmless=HARMLESS_HERE),
            "loads; 1 harmless difference",
        ),
        (Diff("a", "b", False, RELEVANT), "3 of 3 keys differ, 1 of them ignored"),
        (Diff("a", "b", False, RELEVANT, accepted=False), "3 of 3 keys differ, 1 of them ignored"),
        (
            Diff("a", "b", False, RELEVANT, accepted=True),
            "3 of 3 keys differ, accepted (1 ignored, 2 not in --fail-on)",
        ),
        (
            Diff("a", "b", False, RELEVANT[1:2], accepted=True),
            "1 of 1 key differs, accepted (1 ignored)",
        ),
        (
            Diff("a", "b", False, RELEVANT[:1], accepted=True),
            "1 of 1 key differs, accepted (1 not in --fail-on)",
        ),
        (
            Diff("a", "b", False, HALF, harmless=HARMLESS_HERE, other_failure="does not load"),
            "does not load",
        ),
        (Diff("a", "b", False, (), other_failure="does not load"), "does not load"),
        (Diff("a", "b", False, ()), "different"),
    ],
)
def test_verdict_counts_relevant_differences(diff: Diff, verdict: str) -> None:
    shown = of_diff.document(diff)
    assert (shown.verdict, shown.ok) == (verdict, diff.passes)


def test_tensors_that_differ_only_by_name_are_counted() -> None:
    same_shape = ("layers.0.wq", "layers.1.wq", "x"), ("e", "f", "g")
    entries = tuple(Entry("missing", (), (key,)) for key in ("x", "f"))
    shown = text(of_diff.document(Diff("a", "b", False, entries, exchangeable=same_shape)))
    assert "\n6 tensors have the same shape as a neighbor, so a swap would not be noticed" in shown
    assert "(for example layers.{0-1}.wq, x)\n" in shown


IGNORED = """\
diff
5 of 5 keys differ, 4 of them ignored
reason: missing from left (1 key)
details: --all lists every key; `ckpttool explain missing` says more about the reason

missing: 3 keys, missing from left
  head.{0-1}
  tail
unexpected: 1 key, not in right
  old
missing: 1 key, missing from left
  lost

Accepted differences
  status      entries  key         reason
  missing           2  head.{0-1}  new
  unexpected        1  old         new
  missing           1  tail        later

warning: unused ignore entry: shape x # y (f:1)

left   a.pt
right  b.pt
keys   4 missing, 1 unexpected
"""


_MISSING = Cause(Code.MISSING)


def test_ignored_differences_are_listed_with_reasons() -> None:
    entries = (
        *(Entry("missing", (), (f"head.{at}",), _MISSING, ignored="new") for at in range(2)),
        Entry("unexpected", ("old",), (), Cause(Code.UNEXPECTED), ignored="new"),
        Entry("missing", (), ("tail",), _MISSING, ignored="later"),
        Entry("missing", (), ("lost",), _MISSING),
    )
    found = Diff(
        "a.pt", "b.pt", False, entries, accepted=False, unused_ignores=("shape x # y (f:1)",)
    )
    assert text(of_diff.document(found)) == IGNORED
    assert "missing           2  head.0 + head.1  new\n" in text(of_diff.document(found, all=True))


CHECK = """\
check
2 of 3 files with problems

Files
  file    type        result
  a.json  names       2 problems
  b.pt    checkpoint  1 problem
  c.toml  rules       OK

error: a.json: is missing @ $.x
error: cannot be read @ a.json
error: b.pt: another @ k

hint: a.json: write it

warning: c.toml: not compared
"""


def test_checked_files() -> None:
    files = (
        Checked(
            "a.json",
            "names",
            (Problem("is missing", "$.x"), Problem("cannot be read", "a.json")),
            "write it",
        ),
        Checked("b.pt", "checkpoint", (Problem("another", "k"),)),
        Checked("c.toml", "rules", notes=("not compared",)),
    )
    assert text(of_check.check_document(Checks(files))) == CHECK
    assert of_check.check_document(Checks(files[2:])).verdict == "1 file checked: OK"


REMAP = """\
remap
2 renamed, 2 transformed, 1 unchanged

source               a.pt
output               b.pt
form                 runtime -> serialized
sections             model, (root)
computed             1 tensor by running model.py:build.load_state_dict()
optimizer optimizer  id -> fqn, 2 parameters, identified by param_names
optimizer            id -> id, 1 parameter
cost                 reads 1 byte, writes 2 bytes, holds no values

Changes: 4 keys
  old.{0-1} -> new.{0-1}
  q + k -> qk
  made

dry run: nothing was written

Left out: 3 keys
  key      why
  x.{0-1}  not wanted
  ema.y    no place

warning: a note
"""


def test_a_remap() -> None:
    plan = Plan(
        (
            Output("", "same", Ref("same")),
            *(Output("", f"new.{at}", Ref(f"old.{at}")) for at in range(2)),
            Output("", "qk", Op("aten.cat.default", ((Ref("q"), Ref("k")), 0))),
            Output("", "made", Op(LOADED, ("made",))),
        ),
        (
            Dropped("", "x.0", "not wanted"),
            Dropped("", "x.1", "not wanted"),
            Dropped("ema", "y", "no place"),
        ),
        runs=(ModelRun("", LOADED, "model.py:build", {}, {"made": Ref("r")}),),
    )
    optimizers = (
        OptimizerRemap("optimizer", "id", "fqn", 2, "param_names"),
        OptimizerRemap("", "id", "id", 1),
    )
    done = Remap(
        *(
            Checkpoint("a.pt", "torch_zip", 1, ()),
            plan,
            "runtime",
            "serialized",
            ("a note",),
            optimizers,
        ),
        sections=("model", ""),
        cost=Cost(1, 2, 0),
        source="a.pt",
        output="b.pt",
        dry_run=True,
    )
    assert text(of_remap.document(done)) == REMAP
