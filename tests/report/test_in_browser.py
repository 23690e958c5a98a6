"""The page in headless Chromium: at a phone's width and a desk's, in light and in dark."""

import html
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from pagefault import report as report_module
from pagefault.report import report_of_campaign

STYLE = Path(report_module.__file__).parent / "templates" / "report.css"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (apt-get install chromium)")

# What a page looks like once it is laid out. A desktop's Chromium makes no window as narrow as a
# phone, so the page lies in a frame of that width.
MEASURE = """
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  const wide = node => node.getBoundingClientRect().right > frame.clientWidth + 1;
  const outside = [...page.body.querySelectorAll("*")].filter(wide);
  const boxes = [...page.querySelectorAll(".scroll")];
  for (const details of page.querySelectorAll("details")) details.open = true;
  const style = name => page.defaultView.getComputedStyle(page.querySelector(name));
  document.title = JSON.stringify({
    width: page.documentElement.clientWidth,
    content: page.documentElement.scrollWidth,
    opened: page.body.scrollWidth,
    outside: outside.filter(node => !node.closest(".scroll")).map(node => node.outerHTML),
    scrolling: boxes.filter(box => box.scrollWidth > box.clientWidth).length,
    text: page.body.innerText,
    background: style("body").backgroundColor,
    wrong: style("td.wrong").backgroundColor,
    chart: page.querySelector("svg").getBoundingClientRect().width,
  });
};
"""


def measured(page, width, scheme, folder):
    """Return what a browser says of a page in a frame, and what it wrote to its console."""
    frame = (
        f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{html.escape(page)}">'
    )
    path = folder / f"{width}-{scheme}.html"
    path.write_text(
        f'<!doctype html><html style="color-scheme: {scheme}"><meta charset="utf-8">'
        f"<title></title><script>{MEASURE}</script><body>{frame}</iframe></body></html>"
    )
    process = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={max(width, 500)},900", "--virtual-time-budget=5000"),
            *(f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>(.*?)</title>", process.stdout, re.DOTALL)
    assert title is not None, process.stderr
    assert title[1], process.stderr
    console = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(title[1])), console


@pytest.fixture(scope="module")
def views(campaign, tmp_path_factory):
    """What the browser says, by width and scheme."""
    page = report_of_campaign(**campaign("clamped", "wrong stride", "wide")).html()
    folder = tmp_path_factory.mktemp("browser")
    return {
        (width, scheme): measured(page, width, scheme, folder)
        for width, scheme in product(WIDTHS, SCHEMES)
    }


each_view = pytest.mark.parametrize(("width", "scheme"), [*product(WIDTHS, SCHEMES)])


@needs_browser
@each_view
def test_the_page_fits_its_width(views, width, scheme):
    seen, _ = views[width, scheme]
    assert seen["width"] <= width
    assert seen["content"] <= seen["width"]
    assert seen["opened"] <= seen["width"]
    assert seen["outside"] == []


@needs_browser
@each_view
def test_the_browser_has_nothing_to_complain_of(views, width, scheme):
    _, console = views[width, scheme]
    assert console == []


@needs_browser
@each_view
def test_findings_can_be_read(views, width, scheme):
    seen, _ = views[width, scheme]
    for text in ("3 findings", "found 24", "should be 0", "pagefault repro", "never reached"):
        assert text in seen["text"]
    assert 200 < seen["chart"] <= width


@needs_browser
def test_a_wide_grid_scrolls_in_its_own_box(views):
    assert views[390, "light"][0]["scrolling"] >= 1


@needs_browser
def test_the_schemes_differ(views):
    light, dark = views[390, "light"][0], views[390, "dark"][0]
    assert light["background"] == "rgb(247, 247, 245)"
    assert dark["background"] == "rgb(18, 21, 24)"
    assert light["wrong"] != dark["wrong"]


@needs_browser
def test_a_page_that_is_too_wide_and_complains_would_be_seen(campaign, tmp_path):
    page = report_of_campaign(**campaign("clamped")).html()
    spoilt = page.replace("<main>", '<main><img src="x"><div style="width: 2000px">wide</div>')
    seen, console = measured(spoilt, 390, "light", tmp_path)
    assert seen["content"] > seen["width"]
    assert any("wide" in node for node in seen["outside"])
    assert any("Content Security Policy" in line for line in console)


def palette(scheme):
    """Return the colours of a scheme, by name."""
    light, dark = STYLE.read_text().split("@media (prefers-color-scheme: dark)")
    block = light if scheme == "light" else dark[: dark.index("* {")]
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


def luminance(colour):
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_definition():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


TEXT_ON = [
    *product(("text", "muted", "accent"), ("page", "surface", "sunk")),
    *product(("bad", "good", "doubt"), ("page", "surface")),
    *((name, f"{name}-back") for name in ("bad", "doubt", "read", "written", "source")),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("text", "back"), TEXT_ON, ids=lambda name: name)
def test_text_stands_out_from_what_is_behind_it(scheme, text, back):
    colours = palette(scheme)
    assert contrast(colours[text], colours[back]) >= 4.5


def test_every_colour_has_a_place_in_both_schemes():
    assert palette("light").keys() == palette("dark").keys()
    used = set(re.findall(r"var\(--([a-z-]+)\)", STYLE.read_text()))
    assert used == palette("light").keys()
