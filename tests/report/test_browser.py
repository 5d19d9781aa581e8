"""The page as a person sees it: rendered by a real browser, headless Chromium, without network."""

import json
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from kielo.report.write import write_comparison, write_report
from tests.report import synthetic_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
SECTIONS = (
    "verdict",
    "bits-per-byte",
    "samples",
    "parity",
    "training",
    "corpus",
    "tokenizer",
    "export",
    "stages",
)
WIDTH, HEIGHT = 1000, 2400
PHONE = 390  # pixels; a window of Chromium has at least 500, so that pages are in a frame
DARK = "--blink-settings=preferredColorScheme=0"
RULES = (Path(__file__).parent / "page_rules.js").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


def browse(page: Path, profile: Path, *flags: str) -> str:
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=2000",
        f"--window-size={WIDTH},{HEIGHT}", *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def colours(picture: Path) -> Counter:
    """Every colour of the picture, 0 to 255 for each channel, and in how many pixels it is."""
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(np.uint32)
    # One number a pixel: rows of three are sorted in seconds.
    found, counts = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1], np.uint32), return_counts=True)
    return Counter(
        {
            (each >> 16, each >> 8 & 255, each & 255): count
            for each, count in zip(found.tolist(), counts.tolist())
        }
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run with space")
    synthetic_run.write_run(folder)
    return write_report(folder, synthetic_run.RECIPE, synthetic_run.STAGES)


@pytest.mark.parametrize(
    ("flags", "paper", "ink"),
    [
        ((), (0xFB, 0xFB, 0xF8), (0x1B, 0x21, 0x1D)),
        ((DARK,), (0x12, 0x16, 0x14), (0xE6, 0xEB, 0xE6)),
    ],
    ids=["light", "dark"],
)
def test_the_page_is_seen(page: Path, tmp_path: Path, flags: tuple, paper: tuple, ink: tuple) -> None:
    """Paper, text and the bars of the figures are on the screen in the colours of the reader's scheme."""
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", f"--screenshot={picture}", *flags)
    seen = colours(picture)
    assert sum(seen.values()) == WIDTH * HEIGHT
    assert len(seen) > 50
    assert seen.most_common(1)[0][0] == paper
    assert seen[ink] > 1000  # text
    accent = (0x2F, 0x7D, 0x4F) if not flags else (0x63, 0xBB, 0x86)
    assert seen[accent] > 5000  # the model's bar
    others = (0xA9, 0xB2, 0xAB) if not flags else (0x66, 0x71, 0x6A)
    assert seen[others] > 15_000  # the baselines' bars


def test_the_browser_keeps_every_section(page: Path, tmp_path: Path) -> None:
    """All sections and five figures are in the document as the browser built it;
    hostile text became no script.
    """
    document = browse(page, tmp_path / "profile", "--dump-dom")
    for name in SECTIONS:
        assert f'id="{name}"' in document, name
    assert document.count("<svg") == 2 * 5  # for a wide and a narrow screen
    assert "<script" not in document
    assert "&lt;script&gt;" in document


def answer(page: Path, folder: Path, script: str, changes: dict[str, str], width: int, *flags: str) -> Any:
    """Return what a script finds on a copy of the page with changes, in a frame of a width."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    for old, new in changes.items():
        assert old in html, old
        html = html.replace(old, new)
    told = f"<script>{script}\nparent.postMessage(JSON.stringify(answer), '*');</script></body>"
    (folder / "copy.html").write_text(html.replace("</body>", told), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f'<body><iframe src="copy.html" style="border: 0" width="{width}" height="900"></iframe>'
        "<script>onmessage = (message) => { document.body.dataset.answer = message.data; };</script>"
    )
    document = browse(frame, folder / "profile", "--dump-dom", *flags)
    return json.loads(unescape(re.search(r'data-answer="([^"]*)"', document)[1]))


@pytest.mark.parametrize(
    ("width", "flags"), [(PHONE, ()), (PHONE, (DARK,)), (1000, ())], ids=["phone", "dark", "wide"]
)
def test_every_page_is_accessible(page: Path, tmp_path: Path, width: int, flags: tuple) -> None:
    """Figures have text of 11 px or more, and nothing but tables and code is wider than the screen."""
    found = answer(page, tmp_path, RULES, {}, width, *flags)
    assert found["found"] == []
    assert found["texts"] > 200 and found["figures"] == 5
    assert found["width"] == width


def test_a_comparison_is_accessible(page: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthetic_run.write_run(other)
    runs = {page.parent: synthetic_run.RECIPE, other: synthetic_run.RECIPE}
    compared = write_comparison(runs, tmp_path / "compared.html")
    found = answer(compared, tmp_path, RULES, {}, PHONE)
    assert found["found"] == [] and found["figures"] == 1 and found["texts"] > 50


def test_the_rules_find_faults(page: Path, tmp_path: Path) -> None:
    """The script reports each fault that is planted into the page."""
    wide = '<p style="width: 700px">x</p><img src="x"><a href="x"></a><div id="stages">x</div>'
    changes = {
        ' lang="en"': "", "<h1>": "<h4>", "</h1>": "</h4>", 'role="img" ': "", ' scope="col"': "",
        ' tabindex="0"': "", "--quiet: #5a645d": "--quiet: #8a948d", "font-size: 11px": "font-size: 9px",
        "dt>": "dd>", "</main>": f"</main>{wide}",
    }  # fmt: skip
    found = answer(page, tmp_path, RULES, changes, PHONE)["found"]
    assert {fault.split(":")[0].split(" ")[0] for fault in found} == {
        "lang", "h1", "heading", "svg", "img", "th", "name", "dl", "id", "focus", "width", "region", "size",
        "contrast",
    }  # fmt: skip


def test_the_page_on_paper(page: Path, tmp_path: Path) -> None:
    """The rules for paper, applied to a dark screen: light colours, wide figures, nothing folded or cut."""
    on_paper = {"@media print": "@media all", "@media screen": "@media not all"}
    script = """const all = (query) => [...document.querySelectorAll(query)];
const folded = all("details:not([open]) td");
const answer = [getComputedStyle(document.body).color, all("svg.wide").every((one) => one.checkVisibility()),
  all("svg.narrow").some((one) => one.checkVisibility()), folded.length,
  folded.every((one) => one.checkVisibility({ contentVisibilityAuto: true })),
  all(".scroll, pre").every((one) => getComputedStyle(one).overflowX === "visible")];"""
    found = answer(page, tmp_path, script, on_paper, PHONE, DARK)
    assert found == ["rgb(27, 33, 29)", True, False, 8, True, True]
