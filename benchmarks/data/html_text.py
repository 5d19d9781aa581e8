"""MB of HTML a second on one core: Kielo's pages to text, selectolax alone, and trafilatura.

    python benchmarks/data/html_text.py [--language et] [--pages 1500] [--results FILE]

Pages: the LibreOffice help in a language (a Debian package, MPL-2.0, fetched with apt-get), and the same
pages without the mark of their article, whose whole bodies are text. trafilatura, which also decides what the
main text of a page is, takes every tenth page. Bar: 60 MB/s. The floor is selectolax alone: its parser, its
`text()` without lines of blocks, and its HTML of the parsed page, in which Kielo finds the lines. resiliparse
(pip install resiliparse; left out where it is missing) finds lines of blocks in C++, on the same parser.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import trafilatura
from selectolax.lexbor import LexborHTMLParser

from kielo.artifact.manifest import write_json_atomically
from kielo.corpus.download import fetch_debian_package
from kielo.corpus.html_text import page_text
from kielo.recipe.sections import Source

RESULTS = Path(__file__).parents[1] / "results" / "html_text.json"
PEERS = ("selectolax, text()", "selectolax, parsed and serialised", "resiliparse", "trafilatura")
SKIPPED = ("script", "style", "pre", "nav", "template", "noscript", "svg", "head")


class Lines(HTMLParser):
    """The text of a page by the parser of Python's standard library: its least work."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in SKIPPED

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in SKIPPED

    def handle_data(self, data: str) -> None:
        if self.depth <= 0:
            self.parts.append(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--language", default="et")
    parser.add_argument("--pages", type=int, default=1500)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = f"libreoffice-help-{arguments.language}"
        origin = fetch_debian_package(Source(name="help", debian_package=package), Path(folder))
        paths = sorted(Path(folder).rglob("*.html"))[: arguments.pages]
        pages = [path.read_text(encoding="utf-8") for path in paths]
    bodies = [page.replace('id="DisplayArea"', "") for page in pages]
    rates = {
        "kielo, article": rate(page_text, pages),
        "kielo, whole body": rate(page_text, bodies),
        "selectolax, parsed": rate(LexborHTMLParser, bodies),
        "selectolax, text()": rate(lambda page: LexborHTMLParser(page).text(), bodies),
        "selectolax, parsed and serialised": rate(lambda page: LexborHTMLParser(page).html, bodies),
        "html.parser": rate(Lines, bodies),
        "trafilatura": rate(trafilatura.extract, bodies[::10]),
    }
    packages = {name: version(name) for name in ("kielo", "selectolax", "trafilatura")}
    with suppress(ImportError):
        from resiliparse.extract.html2text import extract_plain_text

        rates["resiliparse"] = rate(lambda page: extract_plain_text(page, list_bullets=False), bodies)
        packages["resiliparse"] = version("resiliparse")
    result = {
        "measured": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "versions": packages | {"python": platform.python_version()},
        "text": origin,
        "pages": len(pages),
        "megabytes": round(sum(len(page.encode()) for page in pages) / 1e6, 1),
        "megabytes_per_second": rates,
        "whole_body_by": {
            peer: round(rates["kielo, whole body"] / rates[peer], 2) for peer in PEERS if peer in rates
        },
    }
    write_json_atomically(arguments.results, result)
    print(json.dumps(result, indent=1))


def rate(read: Callable[[str], object], pages: Sequence[str]) -> float:
    """Return MB/s of processor time, the best of five passes."""
    size, best = sum(len(page.encode()) for page in pages), float("inf")
    for _ in range(5):
        began = time.process_time()
        for page in pages:
            read(page)
        best = min(best, time.process_time() - began)
    return round(size / 1e6 / best, 1)


if __name__ == "__main__":
    main()
