"""The page in a real browser: nothing goes wrong, plots are drawn, tables sort, it fits a phone and prints.

Needs chromium (Debian: `apt-get install chromium`); without one these tests are skipped.
"""

from html import escape, unescape
import json
from pathlib import Path
import re
import shutil
import subprocess
from typing import Any

import pytest

from qspec.report.page import document, write
from qspec.report.pairs import comparison
from tests.example_results import example
from tests.report.test_pairs import pairs
from tests.schema.test_speed_rows import study

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = """
<script>
addEventListener("load", () => {
  const found = {width: innerWidth, needed: document.documentElement.scrollWidth};
  found.plots = [...document.querySelectorAll("svg.plot")].map(plot => plot.getBoundingClientRect().width);
  found.outside = [...document.querySelectorAll(".point")].filter(point => {
    const [inner, outer] = [point.getBoundingClientRect(), point.ownerSVGElement.getBoundingClientRect()];
    return inner.left < outer.left - 6 || inner.right > outer.right + 6 || inner.bottom > outer.bottom + 6;
  }).length;
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
  top.document.documentElement.dataset.found = JSON.stringify(found);
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
    return {"one": single, "several": several}


def run(chromium: str, page: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    always = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    logged = ("--enable-logging=stderr", "--virtual-time-budget=5000")
    command = [chromium, *always, *logged, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)


def probe(chromium: str, page: Path, tmp_path: Path, width: int, *options: str) -> dict[str, Any]:
    """What the page became at a width (in a frame: windows have a least one); fails on all that a console says."""
    copy = tmp_path / "probed.html"
    inner = page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    frame = f'<iframe srcdoc="{escape(inner)}" style="width: {width}px; height: 900px; border: 0"></iframe>'
    copy.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}</body>", encoding="utf-8")
    done = run(chromium, copy, tmp_path, "--window-size=1300,1000", "--dump-dom", *options)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, "the probe did not run to its end"
    data: dict[str, Any] = json.loads(unescape(found[1]))
    return data


def test_the_page_works_on_a_desktop(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a script that fails, a table that sorts text, a filter or a tooltip that does nothing."""
    found = probe(chromium, pages["one"], tmp_path, 1200)
    assert len(found["plots"]) == 14
    assert min(found["plots"]) > 300
    assert found["outside"] == 0
    assert found["needed"] <= found["width"]
    assert found["ascending"] == ["original", "quantized", "quantized + draft"]
    assert found["descending"] == ["quantized + draft", "quantized", "original"]
    assert found["sorted"] == "descending"
    assert found["filtered"] == 1
    hidden, shown, said = found["tip"]
    assert (hidden, shown) == (False, said)


def test_the_page_fits_a_phone_in_the_dark(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a page that scrolls sideways, plots that do not shrink, and dark mode that stays bright."""
    found = probe(chromium, pages["one"], tmp_path, 390, "--force-dark-mode")
    assert found["width"] == 390
    assert found["needed"] <= found["width"]
    assert max(found["plots"]) <= found["width"]
    assert found["outside"] == 0
    assert found["dark"] == "rgb(18, 22, 27)"


def test_several_pairs_are_drawn(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a comparison whose plots are empty."""
    found = probe(chromium, pages["several"], tmp_path, 1200)
    assert len(found["plots"]) == 2
    assert found["outside"] == 0


def test_the_page_prints(chromium: str, pages: dict[str, Path], tmp_path: Path):
    """Would catch a page that prints blank, or whose tables run off the paper into dozens of sheets."""
    paper = tmp_path / "report.pdf"
    run(chromium, pages["one"], tmp_path, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
