"""Every renderer against an exact text, and against hostile keys."""

from __future__ import annotations

import json
import re
import unicodedata
from html.parser import HTMLParser

import pytest

from ckpttool import CkptError, Problem
from ckpttool.core.text import human_bytes, number, plural, shape_text, shell, visible
from ckpttool.report import BY_ENDING, FORMATS, format_of, render
from ckpttool.report.collapse import collapse, first_pattern
from ckpttool.report.document import (
    Cell,
    Column,
    Commands,
    Document,
    Facts,
    Finding,
    Listing,
    Named,
    Paragraph,
    Problems,
    Table,
    shortened,
)
from ckpttool.report.renderers.text import Terminal

COLUMNS = (
    Column("key", "key"),
    Column("dtype", "dtype"),
    Column("shape", "shape"),
    Column("size", "number"),
)
DIFF = Document(
    "diff a.pt b.pt",
    "1 key is missing",
    False,
    (
        Facts((("left", Cell("a.pt", "key")), ("keys", "3"))),
        Table(
            "Differences",
            COLUMNS,
            (
                ("w.weight", "float32", "[12, 6]", "288 bytes"),
                ("b", "bfloat16", "[]", Cell("2 bytes", "warn")),
            ),
            "... 33 more (--all)",
        ),
        Paragraph("hooks rename 2 keys"),
        Paragraph("dtypes are not compared", "warning"),
        Problems((Problem("missing", "w.bias"),)),
        Commands("fix", ("ckpttool remap a.pt -o b.pt",)),
    ),
)

PLAIN = """\
1 key is missing

left  a.pt
keys  3

Differences
  key       dtype     shape         size
  w.weight  float32   [12, 6]  288 bytes
  b         bfloat16  []         2 bytes
  ... 33 more (--all)

hooks rename 2 keys

warning: dtypes are not compared

error: missing @ w.bias

fix: ckpttool remap a.pt -o b.pt
"""

MARKDOWN = """\
## diff a.pt b.pt

❌ **1 key is missing**

| | |
| --- | --- |
| left | `a.pt` |
| keys | 3 |

### Differences

| key | dtype | shape | size |
| --- | --- | --- | ---: |
| `w.weight` | `float32` | `[12, 6]` | 288 bytes |
| `b` | `bfloat16` | `[]` | *2 bytes* |

... 33 more (--all)

hooks rename 2 keys

> [!WARNING]
> dtypes are not compared

- **error:** missing @ `w.bias`

fix

```shell
ckpttool remap a.pt -o b.pt
```
"""

GITHUB = f"""\
::error title=1 key is missing::ckpttool remap a.pt -o b.pt
::error title=1 key is missing::missing @ w.bias
::warning title=1 key is missing::dtypes are not compared
::group::diff a.pt b.pt
{PLAIN}::endgroup::
"""

HTML_BODY = """\
<header><div><h1>diff a.pt b.pt</h1><p class="verdict bad">1 key is missing</p></div></header>
<main>
<div class="scroll"><table>
<tr><th>left</th><td class="key">a.<wbr>pt</td></tr>
<tr><th>keys</th><td>3</td></tr>
</table></div>
<h2>Differences</h2>
<div class="scroll"><table class="stacked">
<thead><tr><th>key</th><th>dtype</th><th>shape</th><th class="number">size</th></tr></thead>
<tr><td class="key" data-title="key">w.<wbr>weight</td><td class="dtype" data-title="dtype">float32</td>\
<td class="shape" data-title="shape">[12, 6]</td><td class="number" data-title="size">288 bytes</td></tr>
<tr><td class="key" data-title="key">b</td><td class="dtype" data-title="dtype">bfloat16</td>\
<td class="shape" data-title="shape">[]</td><td class="warn" data-title="size">2 bytes</td></tr>
</table></div>
<footer>... 33 more</footer>
<p>hooks rename 2 keys</p>
<p><strong class="warning">warning:</strong> dtypes are not compared</p>
<ul>
<li><strong class="error">error:</strong> missing @ <span class="key">w.<wbr>bias</span></li>
</ul>
<h2>fix</h2>
<div class="code"><pre>ckpttool remap a.pt -o b.pt</pre></div>
</main>
"""

JSON = r"""{
  "schema": "ckpttool.diff/1",
  "identical": false,
  "summary": {
    "same": 2,
    "shape": 1
  },
  "entries": [
    {"status": "same", "left": ["a"]},
    {"status": "shape", "left": ["b"]}
  ],
  "fix": [],
  "a": "é \u001b\u009b\u202e\ud800\udb40\udc41 [red]"
}
"""

TERMINAL = """\
\x1b[31m1 key is missing\x1b[0m

\x1b[1mDifferences\x1b[0m
  \x1b[1mkey\x1b[0m  \x1b[1msize\x1b[0m
  \x1b[36ma.w\x1b[0m     1

\x1b[1;31merror: \x1b[0mmissing @ a.b

\x1b[1mfix: ckpttool remap a.pt -o b.pt --model model.py:Model --to runtime\x1b[0m
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("text", PLAIN), ("markdown", MARKDOWN), ("github", GITHUB)]
)
def test_golden(name: str, expected: str) -> None:
    assert render(name, DIFF, {}) == expected


def test_golden_html() -> None:
    page = render("html", DIFF, {})
    head, rest = page.split("</style>\n")
    body, script = rest.split("<script>")
    origin = re.search(r'<p class="origin">ckpttool \S+ &middot; \d{4}-\d\d-\d\d</p>', body)
    assert origin
    assert body.replace(origin[0], "") == HTML_BODY
    assert script.endswith("</script>\n</html>\n")
    assert head.startswith('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n')
    assert "<title>diff a.pt b.pt</title>" in head
    assert "color-scheme: light dark" in head
    assert not re.search(
        r"https?://(?!www.w3.org/2000/svg\b)|@import|url\(|<link|src=|innerHTML|eval\(", page
    )


def test_golden_terminal() -> None:
    document = Document(
        "diff a.pt b.pt",
        "1 key is missing",
        False,
        (
            Table("Differences", (Column("key", "key"), Column("size", "number")), (("a.w", "1"),)),
            Problems((Problem("missing", "a.b"),)),
            Commands("fix", ("ckpttool remap a.pt -o b.pt --model model.py:Model --to runtime",)),
        ),
    )
    assert render("text", document, {}, Terminal(40)) == TERMINAL
    assert render("text", document, {}, Terminal(40, color=False)) == re.sub(
        "\x1b\\[[0-9;]*m", "", TERMINAL
    )


def test_terminal_without_colors_has_the_lines_of_plain_text() -> None:
    shown = render("text", DIFF, {}, Terminal(100, color=False))
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in PLAIN.splitlines()
    ]


def test_golden_json() -> None:
    data = {
        "schema": "ckpttool.diff/1",
        "identical": False,
        "summary": {"same": 2, "shape": 1},
        "entries": [{"status": "same", "left": ["a"]}, {"status": "shape", "left": ["b"]}],
        "fix": [],
        "a": "é \x1b\x9b\u202e\ud800\U000e0041 [red]",
    }
    text = render("json", DIFF, data)
    assert text == JSON
    assert json.loads(text) == data


HOSTILE = [
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\r\nb\x00c\x7f",
    "\u202egnp.txt\u2066\u200b\ufeff",
    "\ud800 lone",
    "[red]not red[/red] :smile: [link=http://x]y[/link]",
    "a|b`c``d`",
    "`",
    "</td></pre><script>alert('&')</script>",
    "%0A::error::100%",
    "::add-mask::x",
    "##[error]x",
    "\u2028::error::x",
    "```\n# title",
    "",
    "ключ.重み",
]


def hostile_document(key: str) -> Document:
    """Return a document with the key in every field of every block."""
    return Document(
        key,
        key,
        False,
        (
            Facts(((key, key),)),
            Table(
                key,
                (Column(key), Column(key, "key")),
                ((key, key), (Cell(key, "ok"), Cell(key, "number"))),
                key,
            ),
            Paragraph(key),
            Paragraph(key, "warning"),
            Problems((Problem(key, key),)),
            Commands(key, (key,)),
        ),
        Listing(
            (key, key),
            {"value": "bad", "same": "ok"},
            lambda: [
                Finding(
                    "value",
                    (Named(key, key, "[1]", 4),),
                    (Named(f"{key}.x"),),
                    key,
                    key,
                    ((-3, 1),),
                ),
                Finding("same", (Named(key),), (Named(key),)),
                Finding("value", (), (Named(key),)),
            ],
            frozenset({"same"}),
        ),
    )


def is_control_character(char: str) -> bool:
    return char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
@pytest.mark.parametrize("name", FORMATS)
def test_output_with_hostile_keys_has_no_control_characters(name: str, key: str) -> None:
    text = render(name, hostile_document(key), {"keys": [key], key: 1})
    assert not list(filter(is_control_character, text))
    text.encode()


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_terminal_shows_hostile_keys_escaped(key: str) -> None:
    document = Document("", key, True, (Table("keys", (Column("key", "key"),), ((key,),)),))
    shown = render("text", document, {}, Terminal(200))
    assert [line.rstrip() for line in re.sub("\x1b\\[[0-9;]*m", "", shown).splitlines()] == [
        visible(key).rstrip(),
        "",
        "keys",
        "  key",
        f"  {visible(key)}".rstrip(),
    ]
    plain = render("text", document, {}, Terminal(200, color=False))
    assert not list(filter(is_control_character, plain))


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_plain_text_does_not_break_keys(key: str) -> None:
    long = key + "x" * 500
    document = Document(
        "t",
        "v",
        True,
        (Table("keys", (Column("key", "key"), Column("n", "number")), ((long, "1"),)),),
    )
    assert f"  {visible(long)}  " in render("text", document, {})
    assert len(render("text", document, {}).splitlines()) == 5


@pytest.mark.parametrize("width", [1, 10, 20, 60])
def test_narrow_terminal_does_not_truncate(width: int) -> None:
    key = ".".join(f"layer{index}" for index in range(20))
    document = Document(
        "t",
        "v",
        True,
        (Table("T", COLUMNS, ((key, "float8_e4m3fnuz", "[1, 2, 3]", "288 bytes"),)),),
    )
    shown = render("text", document, {}, Terminal(width, color=False))
    assert "float8_e4m3fnuz" in shown
    assert "288bytes" in re.sub(r"\s", "", shown)
    assert key in re.sub(r"\s", "", shown) or width == 60
    if width == 60:
        assert "".join(line[2:].split("  ")[0].strip() for line in shown.splitlines()[4:]) == key


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_github_runs_no_command_from_a_key(key: str) -> None:
    """The runner executes lines that begin with `::` after blanks, and `##[` anywhere."""
    commands = re.compile(r"\s*::(error|warning|notice|group|endgroup)[ :]")
    lines = render("github", hostile_document(key), {}).split("\n")
    found = [match[1] for line in lines if (match := commands.match(line))]
    assert found == ["error", "error", "warning", "group", "endgroup"]
    assert not any(line.lstrip().startswith("::") and not commands.match(line) for line in lines)
    assert not any("##[" in line for line in lines)


def test_github_escapes_data_and_properties() -> None:
    document = Document("title", "a: 1, 2\n%", True, (Paragraph("100%: a, b", "warning"),))
    assert render("github", document, {}).splitlines()[:2] == [
        "::warning title=a%3A 1%2C 2\\n%25::100%25: a, b",
        "::notice title=a%3A 1%2C 2\\n%25::a: 1, 2\\n%25",
    ]


@pytest.mark.parametrize(
    ("count", "summary"), [(9, None), (10, "... 2 more, listed in the log of this step")]
)
def test_github_shows_at_most_ten_annotations_and_lists_the_rest(
    count: int, summary: str | None
) -> None:
    problems = tuple(Problem("missing", f"k{index}") for index in range(count))
    lines = render("github", Document("t", "v", False, (Problems(problems),)), {}).splitlines()
    annotations = [line for line in lines if line.startswith("::error")]
    assert len(annotations) == 10
    assert summary is None or annotations[-1].endswith(f"::{summary}")
    assert [line for line in lines if line.startswith("error: missing @ k")] == [
        f"error: {p}" for p in problems
    ]


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_html_text_roundtrips(key: str) -> None:
    class Reader(HTMLParser):
        tags: list[str] = []  # noqa: RUF012
        text = ""

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.tags = [*self.tags, tag]

        def handle_data(self, data: str) -> None:
            self.text += f"{data}\n"

    reader = Reader(convert_charrefs=True)
    reader.feed(render("html", hostile_document(key), {}))
    assert reader.tags.count("script") == 2
    (listing,) = [
        json.loads(line) for line in reader.text.splitlines() if line.startswith('{"sides":')
    ]
    shown = visible(key)
    assert listing["sides"] == [shown, shown]
    assert listing["outlines"] == [[shown, "[1]", 4], ["", "", None]]
    assert listing["whys"] == ([shown, ""] if key else [""])
    assert listing["rows"] == [
        [0, 0, [shown], [0], [f"{shown}.x"], [1], shown, [[-3, 1]]],
        [1, int(key != ""), [shown], [1]],
        [0, int(key != ""), [], [], [shown], [1]],
    ]
    assert visible(key) in reader.text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a|b", r"`a\|b`"),
        ("a`b", "``a`b``"),
        ("`a``b", "``` `a``b ```"),
        ("a\nb", r"`a\nb`"),
        ("", ""),
        ("@you", "`@you`"),
    ],
)
def test_markdown_keys_stay_in_their_cell(key: str, expected: str) -> None:
    document = Document("t", "v", True, (Table("T", (Column("key", "key"),), ((key,),)),))
    assert render("markdown", document, {}).splitlines()[-1] == f"| {expected} |"


def test_markdown_text_is_escaped() -> None:
    text = render(
        "markdown",
        Document("t", "*a* _b_ snake_case <i> [x](y) #1 ~~c~~ $d$ a|b \\ &lt;", True),
        {},
    )
    assert text.splitlines()[2] == (
        "✅ **\\*a\\* \\_b\\_ snake_case \\<i\\> \\[x\\](y) \\#1 \\~\\~c\\~\\~ \\$d\\$ a\\|b \\\\"
        " \\&lt;**"
    )


def test_markdown_fences_are_longer_than_fences_in_the_content() -> None:
    text = render("markdown", Document("t", "v", True, (Commands("c", ("```", "x")),)), {})
    assert text.endswith("````shell\n```\nx\n````\n")


def test_file_extension_selects_the_format() -> None:
    assert {path: format_of(path) for path in ("a/b.json", "x.MD", "r.html", "r.txt")} == {
        "a/b.json": "json",
        "x.MD": "markdown",
        "r.html": "html",
        "r.txt": "text",
    }
    assert set(BY_ENDING.values()) < set(FORMATS)
    for path in ("report", "report.pdf", ".json", "a.json/b"):
        with pytest.raises(CkptError) as caught:
            format_of(path)
        assert ".json" in caught.value.hint


def test_unknown_format_is_an_error_that_lists_the_formats() -> None:
    with pytest.raises(CkptError) as caught:
        render("yaml", DIFF, {})
    assert caught.value.hint == "use one of text, json, markdown, github, html, junit"


def test_shortened_reports_how_many_are_left_out() -> None:
    table = Table("T", (Column("k"),), tuple((str(index),) for index in range(1043)))
    assert shortened(table, 40).footer == "... 1,003 more (--all)"
    assert len(shortened(table, 40).rows) == 40
    assert shortened(table, 1043) is table
    assert shortened(table, None) is table


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1,023.9 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (5 * 1024**4, "5.0 TiB"),
        (2**70, "1,024.0 EiB"),
        (2**63 - 1, "7.9 EiB"),
    ],
)
def test_human_bytes(n: int, expected: str) -> None:
    assert human_bytes(n) == expected


def test_text_helpers() -> None:
    assert [plural(n, "tensor") for n in (0, 1, 2000)] == ["0 tensors", "1 tensor", "2,000 tensors"]
    assert [plural(2, word) for word in ("alias", "entry", "key", "prefix")] == [
        "2 aliases",
        "2 entries",
        "2 keys",
        "2 prefixes",
    ]
    assert number(1234567) == "1,234,567"
    assert [shape_text(shape) for shape in ((12, 6), (), (3,), None)] == [
        "[12, 6]",
        "[]",
        "[3]",
        "?",
    ]
    assert visible("a\x1b\t\u202eé\\") == "a\\x1b\\t\\u202eé\\"


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("a.pt", "a.pt"),
        ("a b", "'a b'"),
        ("{x} => y", "'{x} => y'"),
        ("it's\n\\", "$'it\\'s\\n\\\\'"),
    ],
)
def test_shell_quotes_special_characters(arg: str, expected: str) -> None:
    assert shell("ckpttool", arg) == f"ckpttool {expected}"


def patterns(*keys: str) -> list[str]:
    return [group.pattern for group in collapse((key, "f32") for key in keys)]


def test_collapse_merges_exact_grids() -> None:
    assert patterns(*(f"layers.{i}.w" for i in range(32))) == ["layers.{0-31}.w"]
    assert patterns("l.0.w", "l.0.b", "l.1.w", "l.1.b") == ["l.{0-1}.w", "l.{0-1}.b"]
    assert patterns(*(f"l.{i}.e.{j}.w" for i in range(3) for j in range(8))) == [
        "l.{0-2}.e.{0-7}.w"
    ]
    assert patterns("l.0.e.0", "l.0.e.1", "l.1.e.0") == ["l.0.e.{0-1}", "l.1.e.0"]
    assert patterns(*(f"l.{i}.w" for i in (0, 4, 8, 12))) == ["l.{0,4,8,12}.w"]
    assert patterns(*(f"l.{i}.w" for i in range(0, 40, 4))) == ["l.{0,4,8,...,36}.w"]
    assert patterns(*(f"l.{i}.w" for i in (5, 0, 1, 2, 9, 10))) == ["l.{0-2,5,9-10}.w"]


def test_first_pattern_counts_the_remaining_keys() -> None:
    keys = ["l.0.w", "l.1.w", "l.0.w", "b", "c", "m.0", "m.1"]
    more = {
        0: "-",
        3: "l.{0-1}.w",
        4: "l.{0-1}.w (+1 more)",
        5: "l.{0-1}.w (+2 more)",
        7: "l.{0-1}.w (+4 more)",
    }
    assert {n: first_pattern(keys[:n]) for n in more} == more


def test_collapse_does_not_merge_different_keys() -> None:
    assert patterns("l.0.w", "l.w", "0.l.w") == ["l.0.w", "l.w", "0.l.w"]
    assert patterns("l.1.w", "l.01.w", "l.-1.w", "l.1²3.w") == [
        "l.1.w",
        "l.01.w",
        "l.-1.w",
        "l.1²3.w",
    ]
    assert [g.pattern for g in collapse([("l.0.w", "f32"), ("l.1.w", "bf16")])] == [
        "l.0.w",
        "l.1.w",
    ]


def test_collapse_counts_repeated_keys() -> None:
    assert [(g.pattern, len(g.keys)) for g in collapse((key, None) for key in ("a.0", "a.0"))] == [
        ("a.0", 2)
    ]
    assert patterns("a.0", "a.0", "a.1", "a.1") == ["a.{0-1}"]
    assert patterns("a.0.0", "a.0.0", "a.0.1", "a.1.0") == ["a.0.{0-1}", "a.1.0"]


def test_collapse_keeps_every_key_and_leaves_hostile_ones_unmerged() -> None:
    keys = [".".join("1" if i == j else "0" for j in range(300)) for i in range(300)]
    groups = list(collapse((key, None) for key in [*keys, "a.0", "a.999999999", "a.2"]))
    assert sorted(key for group in groups for key in group.keys) == sorted(
        [*keys, "a.0", "a.999999999", "a.2"]
    )
    assert groups[-1].pattern == "a.{0,2,999999999}"
