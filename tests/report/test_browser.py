"""The page as a person sees it: rendered by a real browser, headless Chromium, without network."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from kielo.report.write import write_report
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
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(np.uint8)
    found, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    return Counter({tuple(map(int, colour)): int(count) for colour, count in zip(found, counts, strict=True)})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run with space")
    synthetic_run.write_run(folder)
    return write_report(folder, synthetic_run.RECIPE, synthetic_run.STAGES)


@pytest.mark.parametrize(
    ("flags", "paper", "ink"),
    [
        ((), (0xFB, 0xFB, 0xF8), (0x1B, 0x21, 0x1D)),
        (("--blink-settings=preferredColorScheme=0",), (0x12, 0x16, 0x14), (0xE6, 0xEB, 0xE6)),
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
    assert document.count("<svg") == 5
    assert "<script" not in document
    assert "&lt;script&gt;" in document
