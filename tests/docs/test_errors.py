"""docs/errors.md quotes messages as the package has them."""

import re

import pytest

from tests.house.checks import ROOT

ROWS = [
    line.split("|")[1].strip()
    for line in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "the message says" not in line
]


@pytest.fixture(scope="module")
def package() -> str:
    """All sources, with string literals that follow each other joined, and values of f-strings as `…`."""
    sources = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    joined = re.sub(r"[\"']\s*\n\s*[rf]*[\"']", "", "\n".join(sources))
    return re.sub(r"\{[^{}\n]*\}", "…", joined)


def test_the_page_has_ten() -> None:
    assert len(ROWS) == 10


@pytest.mark.parametrize("row", ROWS)
def test_a_quoted_message_exists(row: str, package: str) -> None:
    """Each part of it that is the same in every case."""
    (quoted,) = re.findall(r"`([^`]*)`", row)[:1]
    parts = [part for part in re.split(r"\s*…\s*", quoted) if part]
    assert parts and all(part in package for part in parts)
