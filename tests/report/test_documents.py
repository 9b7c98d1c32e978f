"""Golden texts for results with every kind of entry, so that each count, side and reason is
checked.
"""

from __future__ import annotations

import pytest

from ckpttool import Checkpoint, Checks, Diff, Plan, Problem, Remap
from ckpttool.checks import Checked
from ckpttool.core.expression import LOADED, Op, Ref
from ckpttool.core.names import Hook
from ckpttool.core.optimizer_state import ID, OptimizerState
from ckpttool.core.plan import Dropped, ModelRun, Output
from ckpttool.core.text import Info
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import HARMLESS, Asks, Entry, Fix
from ckpttool.naming.evidence import Ambiguous, Inference, Pair
from ckpttool.optimizers.identify import Basis, ParamMap
from ckpttool.optimizers.request import OptimizerRemap
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
DIFF = Diff(
    *("a.pt", "b.pt", False, ENTRIES, (Fix("ckpttool remap"),), ("a note",), INFERRED),
    names=("a.pt", "b.pt"),
)


def text(document: Document) -> str:
    return render("text", document, {})


CAUSES = """\
a.pt and b.pt differ: 6 likely renames, 3 renamed keys, 1 computed value, 8 tensors of another shape, 3 tensors with other values
reason: different shape of many (4 keys)
fix (not tried): ckpttool remap
details: --all lists every key; `ckpttool explain doubtful-ids` says more about the reason

likely renames: 2 pairs, inferred: the only one of its shape
  a.{0-1}.w -> b.{0-1}.w
likely renames: 1 pair, inferred: the only one of its shape; stored transposed in b.pt
  a.2.w -> b.2.w
likely renames: 1 pair, inferred: end to end
  q.0 + k.0 -> qk.0
likely renames: 2 pairs, inferred: the same name but for a prefix
  x.y -> z.y
  x.u -> z.u

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

Ambiguous matches
  left         right        why
  m (+1 more)  o (+1 more)  of one shape

warning: a note

left   a.pt
right  b.pt
keys   1 same, 6 likely renames, 3 renamed keys, 1 computed value, 8 tensors of another shape, 3 tensors with other values
"""


# What a report shows of several keys, and what it shows of each key with --all
FULL = {
    "details: --all lists every key; `": "details: `",
    "  x.u -> z.u\n\n": "  x.u -> z.u\n\nEvery key\nsame: 1 key\n  w\n",
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
RELEVANT_DIFFERS = (
    "left and right differ: 1 key only in right, 1 tensor of another shape, 1 tensor of another"
    " dtype"
)


MISSING_KEY = Entry("missing", (), ("m",), Cause(Code.MISSING))
MORE_KEYS = (
    *(Entry("unexpected", (f"u.{at}",), ()) for at in range(2)),
    *(Entry("missing", (), (f"m.{at}",)) for at in range(4)),
)
RENAMED = tuple(Entry("renamed", (f"a.{at}",), (f"b.{at}",)) for at in range(3))
NAMES = ("a.pt", "m.py:M")


def asked(asks: Asks, entries: tuple[Entry, ...], failure: str = "") -> Diff:
    return Diff("a", "b", False, entries, names=NAMES, asks=asks, other_failure=failure)


@pytest.mark.parametrize(
    ("diff", "verdict"),
    [
        (Diff("a", "b", True, ENTRIES[:2]), "left and right have the same keys"),
        (
            Diff("a", "b", True, HALF, harmless=HARMLESS_HERE, asks="load", names=NAMES),
            "a.pt loads into m.py:M; 1 harmless difference",
        ),
        (
            Diff("a", "b", True, (), compared={"keys": True, "shapes": True, "values": True}),
            "left and right have the same keys, shapes and values",
        ),
        (Diff("a", "b", False, RELEVANT), f"{RELEVANT_DIFFERS}; 1 ignored"),
        (Diff("a", "b", False, RELEVANT, accepted=False), f"{RELEVANT_DIFFERS}; 1 ignored"),
        (
            Diff("a", "b", False, RELEVANT, accepted=True),
            f"{RELEVANT_DIFFERS}; accepted (1 ignored, 2 not in --fail-on)",
        ),
        (
            Diff("a", "b", False, RELEVANT[1:2], accepted=True),
            "left and right differ: 1 key only in right; accepted (1 ignored)",
        ),
        (
            Diff("a", "b", False, RELEVANT[:1], accepted=True),
            "left and right differ: 1 tensor of another shape; accepted (1 not in --fail-on)",
        ),
        (
            Diff("a", "b", False, HALF, harmless=HARMLESS_HERE, other_failure="the versions"),
            "left and right differ: the versions",
        ),
        (Diff("a", "b", False, ()), "left and right differ"),
        (
            asked("load", MORE_KEYS),
            "a.pt lacks 4 keys of m.py:M and has 2 that it does not know",
        ),
        (asked("load", (MISSING_KEY,)), "a.pt lacks 1 key of m.py:M"),
        (asked("load", MORE_KEYS[:1]), "a.pt has 1 key that m.py:M does not know"),
        (asked("load", RENAMED), "a.pt has all 3 keys of m.py:M under other names"),
        (
            asked("load", (*RENAMED, both("same", "c"), *HALF)),
            "a.pt has 3 keys of m.py:M under other names and 1 tensor of another dtype",
        ),
        (asked("load", HALF), "a.pt has 1 tensor of another dtype than m.py:M"),
        (asked("load", (), "does not load into m.py:M"), "a.pt does not load into m.py:M"),
        (
            asked("names", (*RENAMED[:1], both("same", "c"))),
            "m.py:M saves 1 of its 2 keys under another name than at runtime",
        ),
        (
            asked("drift", (MISSING_KEY, *RENAMED)),
            "m.py:M has changed since a.pt: 3 changed names, 1 new key",
        ),
        (
            asked("optimizer", (both("order", "p"),)),
            "the optimizer state of a.pt does not fit m.py:M: 1 parameter at another position",
        ),
        (
            asked("optimizer", (), "does not load into m.py:M"),
            "the optimizer state of a.pt does not load into m.py:M",
        ),
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
left and right differ: 1 key only in left, 4 keys only in right; 4 ignored
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
keys   1 key only in left, 4 keys only in right
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
2 of 3 files have problems: a.json, b.pt

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
    assert of_check.check_document(Checks(files[2:])).verdict == "no problems found in c.toml"


REMAP = """\
would write b.pt: 2 keys renamed, 2 computed, 3 left out, optimizer state of 2 parameters by name

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
        OptimizerRemap(
            "optimizer",
            "id",
            "fqn",
            2,
            ids=ParamMap(OptimizerState(ID, (), {}), {}, Basis.PARAM_NAMES),
        ),
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
