"""MB/s of a core through the whole chain of the corpus stage, on text with one document a line.

    kielo run demo_estonian --to corpus
    python benchmarks/data/corpus_chain.py runs/demo_estonian/corpus/documents --language et

Each document becomes a line. The text is repeated with other numbers in it up to --megabytes, because copies
would be dropped early. Processor seconds are of all processes. Writes results/corpus_chain.json. Bar: 1.5
MB/s.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from kielo.artifact.documents import read_documents
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.sections import Corpus, Recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import processor

RESULTS = Path(__file__).resolve().parents[1] / "results" / "corpus_chain.json"
KEYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "lid176": {"language_identifier": "lid176"},
    "lid176, quality": {"language_identifier": "lid176", "quality": "fineweb2"},
    "lid176, quality, damage, encodings": {
        "language_identifier": "lid176",
        "quality": "fineweb2",
        "repair_encoding": True,
        "damage": ("spaced_letters", "loops", "capitals", "keyword_lists", "lost_diacritics"),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", type=Path)
    parser.add_argument("--language", default="et")
    parser.add_argument("--megabytes", type=float, default=15)
    options = parser.parse_args()
    texts = [one["text"] for path in sorted(options.documents.iterdir()) for one in read_documents(path)]
    lines, size = [], 0
    for turn in range(1000):
        for text in texts:
            line = f"({turn}) {text}".replace("\n", " ")
            lines.append(line)
            size += len(line.encode()) + 1
            if size >= options.megabytes * 1e6:
                break
        if size >= options.megabytes * 1e6:
            break
    rates = {name: rate(lines, size, options.language, keys) for name, keys in KEYS.items()}
    found = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "language": options.language,
        "documents": len(lines),
        "megabytes": round(size / 1e6, 2),
        "megabytes_per_second": rates,
    }
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1, ensure_ascii=False))


def rate(lines: list[str], size: int, language: str, keys: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place) / "lines.txt", Path(place) / "corpus"
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        corpus = Corpus(sources=str(source), workers=1, **keys)
        before = seconds()
        run_corpus(Recipe(name="chain", language=language, corpus=corpus), folder, Path(place) / "raw", False)
        return round(size / 1e6 / (seconds() - before), 2)


def seconds() -> float:
    of = os.times()
    return of.user + of.system + of.children_user + of.children_system


if __name__ == "__main__":
    main()
