"""Seconds of the corpus stage by size of text, memory of its workers, and core-hours on LUMI-C.

    python benchmarks/data/corpus_size.py FOLDER [GIGABYTES ...]     (default 0.3 1 3 10)

The text is synthetic: sentences of the language's own words, with a tenth of repeated documents and of
repeated lines. It is not deleted. Core-hours are for this machine's cores: LUMI-C's are not measured.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.cards import language
from kielo.recipe.sections import Corpus, Recipe

SIZES = (0.3, 1.0, 3.0, 10.0)
LARGE = {"22 GB": 22e9, "1 TB": 1e12, "4 TB": 4e12}
FILES = 16


def write_text(folder: Path, num_bytes: float) -> None:
    """Write FILES files of documents, a document a line of JSON."""
    letters = language("et").letters
    generator = random.Random(1)
    words = ["".join(generator.choices(letters, k=generator.randint(2, 10))) for _ in range(50_000)]
    folder.mkdir(parents=True)
    before: list[str] = []
    for number in range(FILES):
        with (folder / f"{number:02d}.jsonl").open("w", encoding="utf-8") as file:
            while file.tell() < num_bytes / FILES:
                lines = [
                    " ".join(generator.choices(words, k=generator.randint(5, 30))).capitalize() + "."
                    for _ in range(generator.randint(3, 30))
                ]
                if before and generator.random() < 0.1:
                    lines.insert(0, generator.choice(before).split("\n")[0])
                text = generator.choice(before) if before and generator.random() < 0.1 else "\n".join(lines)
                if len(before) < 10_000:
                    before.append(text)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def measure(folder: Path, gigabytes: float, workers: int = 2, **keys: object) -> dict[str, float]:
    text = folder / f"text {gigabytes:g}"
    if not text.exists():
        write_text(text, gigabytes * 1e9)
    # Synthetic words are no language, so the thresholds are 0; the identifier runs nevertheless.
    keys = {"line_language_threshold": 0, "document_language_threshold": 0} | keys
    corpus = Corpus(sources=str(text), workers=workers, **keys)
    began = time.monotonic()
    made = run_corpus(
        Recipe(name="size", language="et", corpus=corpus),
        folder / f"corpus {time.time_ns()}",
        folder / "raw",
        False,
    )
    return {
        "gigabytes": made.counts["bytes_in"] / 1e9,
        "seconds": round(time.monotonic() - began, 1),
        "largest_worker_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "this_process_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main(folder: str, *sizes: str) -> None:
    workers = 2
    for size in map(float, sizes or SIZES):
        found = measure(Path(folder), size, workers)
        rate = found["gigabytes"] * 1e9 / found["seconds"] / workers
        print(json.dumps(found | {"megabytes_a_second_and_core": round(rate / 1e6, 2)}), flush=True)
    for name, num_bytes in LARGE.items():
        print(f"{name}: {num_bytes / rate / 3600:,.0f} core-hours")


if __name__ == "__main__":
    main(*sys.argv[1:])
