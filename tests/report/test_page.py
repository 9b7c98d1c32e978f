"""The HTML report in a real browser: display, search and folding, by mouse and keyboard, without
console errors.

Skipped if no browser is installed; `make browser` requires one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from browser import Browser
from ckpttool.core.text import visible
from ckpttool.report import render
from ckpttool.report.document import Document, Finding, Listing, Named
from command import Run

ROWS = "[...document.querySelectorAll('#tree [data-at] .name')].map(name => name.title)"
ACTIVE = "document.querySelector('#tree [aria-selected=true] .name').title"
FOCUS = "document.activeElement.id || document.activeElement.type"
STATUS = "document.querySelector('output').textContent"
DETAILS = "document.getElementById('details').innerText"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a\u202eb\x00\x1b[31m",
    "__proto__.x",
    "..",
    "",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def report(browser: Browser, run: Run, tmp_path: Path) -> Iterator[Path]:
    """Diff eleven layers: one has other values, one is renamed, one has another dtype; assert an
    empty console.
    """
    left = {
        f"layers.{at}.{name}.weight": torch.full((4, 4), float(at))
        for at in range(11)
        for name in ("wq", "wk")
    }
    right = {
        key.replace("layers.3.", "_orig_mod.layers.3."): value.clone()
        for key, value in left.items()
    }
    right["layers.1.wq.weight"][0] += torch.tensor([1e-6, 1e-3, 0.5, float("nan")])
    right["layers.2.wk.weight"] = right["layers.2.wk.weight"].half()
    for name, state in (("left", left), ("right", right)):
        save_file(state, str(tmp_path / f"{name}.safetensors"))
    page = tmp_path / "diff.html"
    files = (str(tmp_path / f"{name}.safetensors") for name in ("left", "right"))
    assert run("diff", *files, "--values", "--report", str(page)).status == 1
    browser.console.clear()
    yield page
    assert browser.console == []


def test_only_differences_are_shown_at_first(browser: Browser, report: Path) -> None:
    browser.open(report)
    assert browser.ask(STATUS) == "4 of 22 keys"
    leaves = [row for row in browser.ask(ROWS) if row.endswith(".weight")]
    expected = ["layers.1.wq", "layers.2.wk", "_orig_mod.layers.3.wq", "_orig_mod.layers.3.wk"]
    assert sorted(leaves) == sorted(f"{name}.weight" for name in expected)
    browser.ask(
        "[...document.querySelectorAll('.chip')].find(chip =>"
        " chip.textContent.startsWith('same')).click()"
    )
    assert browser.ask(STATUS) == "22 of 22 keys"
    modules = [
        row for row in browser.ask(ROWS) if row.startswith("layers.") and row.count(".") == 1
    ]
    assert modules == [f"layers.{at}" for at in range(11) if at != 3]


def test_keyboard_search_and_details(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.press("/", *"wq 1.")
    assert browser.ask(FOCUS) == "search"
    assert browser.ask(STATUS) == "1 of 22 keys"
    browser.press("Enter")
    assert (browser.ask(FOCUS), browser.ask(ACTIVE)) == ("tree", "layers.1.wq.weight")
    assert "4 of 16 elements differ" in browser.ask(DETAILS)
    assert browser.ask("document.querySelectorAll('#details svg rect').length") == 3
    assert "1 element apart by no number" in browser.ask(DETAILS)
    browser.press("Enter")
    assert browser.ask(FOCUS) == "details"
    browser.press("Escape", "Escape")
    assert (browser.ask(FOCUS), browser.ask(STATUS)) == ("tree", "4 of 22 keys")
    assert browser.ask(ACTIVE) == "layers.1.wq.weight"


def test_optimizer_state_has_dtypes_and_shapes(browser: Browser, run: Run, tmp_path: Path) -> None:
    for name, dtype in (("left", torch.float32), ("right", torch.bfloat16)):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=dtype))
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / f"{name}.pt")
    page = tmp_path / "diff.html"
    assert run("diff", tmp_path / "left.pt", tmp_path / "right.pt", "--report", page).status == 1
    browser.open(page)
    rows = browser.ask(
        "[...document.querySelectorAll('#tree [data-at]')].map(row => row.innerText)"
    )
    (moment, *_) = [row.split() for row in rows if row.strip().startswith("exp_avg")]
    assert "→".join(["float32", "bfloat16"]) in "".join(moment)
    assert "[2,3]" in "".join(moment)


def test_arrows_fold_and_move(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.ask("document.getElementById('tree').focus()")
    browser.press("Home")
    first, all = browser.ask(ACTIVE), browser.ask(ROWS)
    browser.press("ArrowLeft")
    assert (
        browser.ask("document.querySelector('[aria-selected=true]').getAttribute('aria-expanded')")
        == "false"
    )
    assert len(browser.ask(ROWS)) < len(all)
    browser.press("ArrowRight", "ArrowRight")
    assert browser.ask(ROWS) == all
    assert browser.ask(ACTIVE) == all[1]
    browser.press("ArrowLeft", "ArrowLeft")
    assert browser.ask(ACTIVE) == first
    browser.press("End")
    assert browser.ask(ACTIVE) == all[-1]
    active = browser.ask("document.getElementById('tree').getAttribute('aria-activedescendant')")
    assert (
        browser.ask(f"document.getElementById('{active}').getAttribute('aria-selected')") == "true"
    )


def test_tree_can_show_the_names_of_either_side(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.ask(
        "[...document.querySelectorAll('button')].find(one => one.textContent == 'Names"
        " of: right').click()"
    )
    assert "layers.3.wq.weight" in browser.ask(ROWS)
    assert not any("_orig_mod" in row for row in browser.ask(ROWS))


# Commands with a line that lies under their Copy button
COVERED = """[...document.querySelectorAll('.code')].filter(code => {
    const text = document.createRange();
    text.selectNodeContents(code.querySelector('pre'));
    const button = code.querySelector('button').getBoundingClientRect();
    return [...text.getClientRects()].some(line =>
        line.right > button.left && line.left < button.right
        && line.bottom > button.top && line.top < button.bottom);
}).length"""


@pytest.mark.parametrize("width", [320, 400, 500, 800, 1280])
def test_page_fits_the_screen_width(browser: Browser, report: Path, width: int) -> None:
    browser.open(report, width=width)
    assert browser.ask("document.documentElement.scrollWidth") == width
    if width <= 500:
        assert browser.ask(COVERED) == 0
    wide = (
        "[...document.querySelectorAll('table, .row, #details')].filter(one => one.scrollWidth >"
        " one.clientWidth + 1)"
    )
    assert browser.ask(f"{wide}.length") == 0


def test_both_themes_can_be_chosen(browser: Browser, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(report, scheme="light")
    light = browser.ask(paper)
    browser.open(report, scheme="dark")
    dark = browser.ask(paper)
    seen = []
    for _ in range(2):
        browser.ask("document.querySelector('header button').click()")
        seen.append(browser.ask(paper))
    browser.ask("document.querySelector('header button').click()")
    assert light != dark
    assert seen == [light, dark]


def page_of(findings: list[Finding], folder: Path) -> Path:
    listing = Listing(("a", "b"), {"missing": "bad", "same": "ok"}, lambda: findings)
    page = folder / "page.html"
    page.write_text(
        render("html", Document("t", "v", False, listing=listing), {}), encoding="utf-8"
    )
    return page


def test_hostile_keys_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    browser.console.clear()
    browser.open(
        page_of(
            [Finding("missing", (), (Named(key, key, key),), key, key) for key in HOSTILE], tmp_path
        )
    )
    assert browser.ask(STATUS) == f"{len(HOSTILE)} of {len(HOSTILE)} keys"
    browser.ask(
        "[...document.querySelectorAll('button')].find(one => one.textContent == 'Unfold"
        " all').click()"
    )
    titles = browser.ask(
        "[...document.querySelectorAll('#tree [data-at]:not([aria-expanded]) .name')].map(one =>"
        " one.title)"
    )
    assert sorted(titles) == sorted(visible(key) for key in HOSTILE)
    assert browser.ask("document.querySelectorAll('img, script:not([id])').length") == 1
    assert browser.console == []


def test_foreign_script_does_not_run(browser: Browser, tmp_path: Path) -> None:
    page = page_of([], tmp_path)
    foreign = "<script>window.ran = 1</script><img src='http://192.0.2.1/x.png'></main>"
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", foreign), encoding="utf-8")
    browser.open(page)
    assert browser.ask("window.ran") is None
    assert len([line for line in browser.console if "Content Security Policy" in line]) == 2
    browser.console.clear()


def test_hundred_thousand_keys_are_fast(browser: Browser, tmp_path: Path) -> None:
    keys = [
        f"layers.{a}.experts.{b}.w{c}.weight"
        for a in range(100)
        for b in range(250)
        for c in range(4)
    ]
    page = page_of(
        [
            Finding(
                "same", (Named(key, "float32", "[4]", 16),), (Named(key, "float32", "[4]", 16),)
            )
            for key in keys
        ],
        tmp_path,
    )
    assert page.stat().st_size < 6_000_000
    began = time.monotonic()
    browser.open(page)
    assert browser.ask(STATUS) == "100,000 of 100,000 keys"
    assert time.monotonic() - began < 10
    typed = "box => { const at = performance.now(); box.value = 'experts.249.w3'; "
    typed += "box.dispatchEvent(new Event('input')); return performance.now() - at }"
    assert browser.ask(f"({typed})(document.querySelector('input'))") < 2000
    assert browser.ask(STATUS) == "100 of 100,000 keys"
    browser.press("/", "Escape")
    browser.ask(
        "[...document.querySelectorAll('button')].find(one => one.textContent == 'Unfold"
        " all').click()"
    )
    assert browser.ask("document.getElementById('tree').getAttribute('aria-rowcount')") == str(
        1 + 100 + 25_000 + 100_000 + 100_000
    )
    browser.press("End")
    assert browser.ask(ACTIVE) == keys[-1]
    assert browser.ask("document.querySelectorAll('[data-at]').length") < 100
