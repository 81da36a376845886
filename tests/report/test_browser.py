"""The page in a real browser: nothing goes wrong, plots are drawn, tables sort, it fits a phone and prints.

Needs chromium (Debian: `apt-get install chromium`); without one these tests are skipped.
"""

from collections.abc import Sequence
from html import escape, unescape
import json
import math
from pathlib import Path
import re
import shutil
import subprocess
from typing import Any

import pytest

from qspec.readable import number
from qspec.report.document import Bar, Bars, Document, Dots, Plot, Point, Series, Stack, Table
from qspec.report.page import document, write
from qspec.report.pairs import comparison
from qspec.report.render.plots import Drawn
from tests.example_results import example
from tests.report.test_pairs import pairs
from tests.schema.test_speed_rows import study

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (400, 800, 1400)
Frames = Sequence[tuple[str, int]]
"""Names of pages, and widths in pixels."""
PROBE = r"""
<script>
addEventListener("load", () => {
  const found = {width: innerWidth, needed: document.documentElement.scrollWidth};
  found.plots = [...document.querySelectorAll("svg.plot")].map(plot => plot.getBoundingClientRect().width);
  found.outside = [...document.querySelectorAll(".point")].filter(point => {
    const [inner, outer] = [point.getBoundingClientRect(), point.ownerSVGElement.getBoundingClientRect()];
    return inner.left < outer.left - 6 || inner.right > outer.right + 6 || inner.bottom > outer.bottom + 6;
  }).length;
  const boxes = nodes => [...nodes].map(node => node.getBoundingClientRect()).filter(box => box.width);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const charts = [...document.querySelectorAll("svg.plot")];
  found.overlaps = charts.map(chart => {
    const texts = boxes(chart.querySelectorAll("text"));
    return texts.filter((a, i) => texts.slice(i + 1).some(b => meet(a, b))).length;
  }).reduce((a, b) => a + b, 0);
  found.cut = boxes(document.querySelectorAll("svg.plot text"))
    .filter(box => box.left < 0 || box.right > innerWidth).length;
  found.clipped = [...document.querySelectorAll(".whisker path")].filter(line => {
    const [inner, outer] = [line.getBoundingClientRect(), line.ownerSVGElement.getBoundingClientRect()];
    return inner.left < outer.left - 1 || inner.right > outer.right + 1;
  }).length;
  const wide = [...document.querySelectorAll(".wide")].filter(
    box => !box.closest("details:not([open])") && box.scrollWidth > box.clientWidth);
  found.scrolling = wide.length;
  found.loose = wide.filter(box => getComputedStyle(box).overflowX !== "auto").length;
  const tick = text => /^[-\d.,e]+( [kMG]?B)?$/.test(text.textContent);
  found.scales = charts.filter(chart => [...chart.querySelectorAll("text")].filter(tick).length < 2).length;
  found.links = [...document.querySelectorAll(".files a")].map(link => link.getAttribute("href"));
  found.dark = getComputedStyle(document.body).backgroundColor;
  const table = [...document.querySelectorAll("table")].find(t => t.tHead.textContent.includes("TTFT"));
  if (table) {
    const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
    const column = [...table.tHead.rows[0].cells].findIndex(head => head.textContent === "tokens/s");
    const button = table.tHead.rows[0].cells[column].querySelector("button");
    button.click();
    found.ascending = names();
    button.click();
    found.descending = names();
    found.sorted = table.tHead.rows[0].cells[column].getAttribute("aria-sort");
  }
  const filters = [...document.querySelectorAll("input.filter")];
  const filter = filters.find(one => one.nextElementSibling.textContent.includes("library 3"));
  if (filter) {
    filter.value = "Library 3";
    filter.dispatchEvent(new Event("input"));
    found.filtered = [...filter.nextElementSibling.querySelectorAll("tbody tr")].filter(row => !row.hidden).length;
  }
  const point = document.querySelector(".point");
  point.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
  found.tip = [document.querySelector("#tip").hidden, document.querySelector("#tip").textContent, point.dataset.tip];
  const all = top.document.documentElement.dataset;
  all.found = JSON.stringify({...JSON.parse(all.found || "{}"), [window.name]: found});
});
</script>
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"needs a browser, none of {', '.join(NAMES)} is installed")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    results = example()
    more = {f"library {i}": f"1.{i}" for i in range(9)}
    results = results.model_copy(update={"environment": results.environment | more})
    single, several = write(document(results, study()), folder / "one"), write(comparison(pairs(5)), folder / "several")
    return {"one": single, "several": several, "wild": write(wild(), folder / "wild")}


def wild() -> Document:
    """Numbers that spread: intervals over decades and below zero, endless ones, long names, many columns."""
    ratios = (Bar("one prompt", 2.71, "2.71×", (0.00176, 2577683.0)), Bar("other", 1.1, "1.10×", (0.9, 1.3)))
    long = "a long label that wraps over several lines of a phone"
    below = (Bar(long, 1.2, "1.20× (0.9 to 1.3; 4 prompts)", (-0.5, 3)), Bar("endless", 1.0, "1.00×", (-1e9, math.inf)))
    bars = (Bar("x", 4000, "4,000", (100, 12000)), Bar("z", -20, "-20", (-50, 3)), Bar("none", math.nan, "–"))
    sizes = (Bar("q_proj", 5.3e7, "53 MB"), Bar("lm_head", 1.1e9, "1.1 GB"))
    decades = tuple(Point(f"p{i}", 2.0**i, 10.0 ** (i - 6), y_interval=(10.0 ** (i - 7), 10.0**i)) for i in range(8))
    rates = tuple(Point(f"p{i}", i + 1.0, 1e6 * (i + 1), y_interval=(8e5, 2e7)) for i in range(8))
    far = (Point("far", 0.0626, 1.61, y_interval=(1.2, 2.0)), Point("near", 1.5, 1.4, (1.2, 1.8), (1.3, 1.5)))
    pairs = tuple(Point(f"smollm2-135m-int8-{i}", 1 + i / 40, 0.99 - i * i / 4000, None, (0.9, 1.0)) for i in range(9))
    cells = tuple((f"row {row}", *(number(row * i * 1234.5) for i in range(1, 24))) for row in range(10))
    return Document(
        "Wild",
        "numbers that spread",
        (
            Dots("Decades", ratios, 1.0, "speedup"),
            Dots("Below zero", below, 1.0, "speedup"),
            Bars("Bars", bars, axis="tokens/s"),
            Bars("Bytes", sizes, axis="bytes"),
            Stack("Shares", ("draft", "verify", "other"), (("a", (0.2, 0.7, 0.1)), ("b", (0.01, 0.98, 0.01)))),
            Plot("Decades", "tokens", "KL, nats", (Series("a", decades, joined=True),), log_x=True),
            Plot("Large", "batch", "tokens/s", (Series("a", rates, joined=True),)),
            Plot("Predicted", "predicted", "measured", (Series("a", far),), guide="diagonal"),
            Plot("Front", "speed over original", "score kept, higher is better", (Series("a", pairs),), named=True),
            Table("Wide", tuple(f"column {i}" for i in range(24)), cells),
        ),
    )


def run(chromium: str, page: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    always = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    logged = ("--enable-logging=stderr", "--virtual-time-budget=5000")
    command = [chromium, *always, *logged, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)


def probe(chromium: str, pages: dict[str, Path], tmp_path: Path, frames: Frames, *options: str) -> dict[str, Any]:
    """What pages became, by name and width (in frames: windows have a least one); fails on all that a console says."""
    inner = {
        name: page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>") for name, page in pages.items()
    }
    html = "".join(
        f'<iframe name="{name} {width}" srcdoc="{escape(inner[name])}" style="width: {width}px; border: 0"></iframe>'
        for name, width in frames
    )
    whole = tmp_path / "probed.html"
    whole.write_text(f"<!doctype html><meta charset=utf-8><body>{html}</body>", encoding="utf-8")
    done = run(chromium, whole, tmp_path, "--window-size=1300,1000", "--dump-dom", *options)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, "no probe ran to its end"
    data: dict[str, Any] = json.loads(unescape(found[1]))
    assert len(data) == len(frames), "a probe did not run to its end"
    return data


@pytest.fixture(scope="module")
def seen(chromium: str, pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every page at every width, in one start of the browser."""
    return probe(chromium, pages, tmp_path_factory.mktemp("seen"), [(name, w) for name in pages for w in WIDTHS])


def test_the_page_works_on_a_desktop(seen: dict[str, Any]):
    """Would catch a script that fails, a table that sorts text, a filter or a tooltip that does nothing."""
    found = seen["one 1400"]
    assert len(found["plots"]) == sum(isinstance(block, Drawn) for block in document(example(), study()).blocks)
    assert min(found["plots"]) > 300
    assert found["ascending"] == ["original", "quantized", "quantized + draft"]
    assert found["descending"] == ["quantized + draft", "quantized", "original"]
    assert found["sorted"] == "descending"
    assert found["filtered"] == 1
    hidden, shown, said = found["tip"]
    assert (hidden, shown) == (False, said)


def test_the_page_fits_a_phone_in_the_dark(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a page that scrolls sideways, plots that do not shrink, and dark mode that stays bright."""
    found = probe(chromium, pages, tmp_path, [("one", 390)], "--force-dark-mode")["one 390"]
    assert found["needed"] <= found["width"] == 390
    assert max(found["plots"]) <= found["width"]
    assert found["dark"] == "rgb(18, 22, 27)"


@pytest.mark.parametrize("name", ["one", "several", "wild"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_covered(name: str, width: int, seen: dict[str, Any]):
    """Would catch labels printed over each other, intervals drawn out of their row, and tables that widen the page."""
    found = seen[f"{name} {width}"]
    assert found["needed"] <= found["width"] == width
    for fault in ("outside", "overlaps", "cut", "clipped", "loose", "scales"):
        assert found[fault] == 0, fault
    if name == "wild":
        assert found["scrolling"] == 1  # 24 columns, in a box of their own


def test_the_page_leads_to_its_numbers(seen: dict[str, Any], pages: dict[str, Path]):
    """Would catch links to files that are not there."""
    for name, page in pages.items():
        links = seen[f"{name} 800"]["links"]
        assert {"report.csv", "report.json"} <= set(links)
        assert all((page.parent / link).is_file() for link in links)


def test_several_pairs_are_drawn(seen: dict[str, Any]):
    """Would catch a comparison whose plots are empty."""
    assert len(seen["several 1400"]["plots"]) == 2


def test_the_page_prints(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a page that prints blank, or whose tables run off the paper into dozens of sheets."""
    paper = tmp_path / "report.pdf"
    run(chromium, pages["one"], tmp_path, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
