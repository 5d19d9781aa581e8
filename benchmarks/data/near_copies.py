"""MinHash signatures beside datatrove's own, on the same documents: MB/s on one core, and planted copies.

    kielo run demo_estonian --to corpus
    python benchmarks/data/near_copies.py runs/demo_estonian/corpus/documents --language et

Needs spaCy and NLTK, by which datatrove finds words and runs of them (`make bench-peers`). Both sides have
FineWeb2's settings, begin with the text, and end with the hashes of bands: of Kielo on disk, of datatrove in
memory. Beside the documents are copies with 1 % of the words replaced. A copy is found if it shares a band
with its document. Writes results/near_copies.json. Bar: 12 MB/s.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

from kielo.artifact.documents import read_documents
from kielo.corpus.hash_buckets import read_bucket
from kielo.corpus.near_copies import BAND_HASHES, PUBLISHED, SIGNED, SignatureWriter
from kielo.corpus.step import split_document
from kielo.recipe.quality_limits import limits_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import machine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "near_copies.json"
TURNS, CHANGED, LEAST_WORDS = 3, 0.01, 50
Bands = list[frozenset[Any]]  # of each document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", type=Path)
    parser.add_argument("--language", default="et")
    options = parser.parse_args()
    whole = [one["text"] for path in sorted(options.documents.iterdir()) for one in read_documents(path)]
    whole = list(dict.fromkeys(text for text in whole if len(text.split()) >= LEAST_WORDS))
    texts = whole + copies(whole)
    size = sum(len(text.encode()) for text in texts)
    rates, found = {}, {}
    for name in PUBLISHED:
        seconds, bands = best(lambda texts, name=name: own(texts, name), texts, TURNS)
        rates[name], found[name] = size / 1e6 / seconds, share_found(bands)
    theirs = datatrove_of(limits_of([options.language]).name)
    theirs(texts[:1])  # loads spaCy
    seconds, bands = best(theirs, texts, 1)
    rates["datatrove"], found["datatrove"] = size / 1e6 / seconds, share_found(bands)
    table = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("datatrove", "numpy", "rensa", "spacy")},
        "language": options.language,
        "documents": len(texts),
        "megabytes": round(size / 1e6, 2),
        "megabytes_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "times_datatrove": round(rates["fineweb2"] / rates["datatrove"], 1),
        "copies_found": {name: round(share, 4) for name, share in found.items()},
    }
    RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table, indent=1))


def copies(texts: Sequence[str]) -> list[str]:
    """Return a copy of each text, in which some words have become words of other texts."""
    drawn = random.Random(1)
    others = [word for text in texts[:200] for word in text.split() if word.isalpha()]
    found = []
    for text in texts:
        words = text.split(" ")
        for place in drawn.sample(range(len(words)), max(1, round(CHANGED * len(words)))):
            words[place] = drawn.choice(others)
        found.append(" ".join(words))
    return found


def own(texts: Sequence[str], name: str) -> tuple[float, Bands]:
    how = PUBLISHED[name]
    with tempfile.TemporaryDirectory() as place:
        begun = time.process_time()
        with SignatureWriter(Path(place), how, "first", 1) as writer:
            for number, text in enumerate(texts):
                writer.add(split_document(text, "", "", (0, number), {}), True)
        seconds = time.process_time() - begun
        keys, places = read_bucket(Path(place), BAND_HASHES, 0)
        signed = np.load(Path(place) / SIGNED)
    bands: list[set[Any]] = [set() for _ in texts]
    owners = signed[(places // np.uint64(how.bands)).astype(np.int64)]
    for key, owner in zip(keys.tolist(), owners.tolist(), strict=True):
        bands[owner].add(key)
    return seconds, list(map(frozenset, bands))


def datatrove_of(language: str) -> Callable[[Sequence[str]], tuple[float, Bands]]:
    with tempfile.TemporaryDirectory() as place:
        step = MinhashDedupSignature(place, MinhashConfig(), language)
    # datatrove 0.10.1 hands over strings, which xxhash refuses from 4 on.
    step._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())

    def signed(texts: Sequence[str]) -> tuple[float, Bands]:
        begun, found = time.process_time(), []
        for text in texts:
            shingles = step.get_shingles(text)
            found.append(step.get_signature(shingles) if shingles.size else [])
        seconds = time.process_time() - begun
        return seconds, [frozenset(enumerate(map(tuple, bands))) for bands in found]

    return signed


def best(
    sign: Callable[[Sequence[str]], tuple[float, Bands]], texts: Sequence[str], turns: int
) -> tuple[float, Bands]:
    """Return the fewest processor seconds of some turns, and the bands of each document."""
    found = [sign(texts) for _ in range(turns)]
    return min(seconds for seconds, _ in found), found[0][1]


def share_found(bands: Bands) -> float:
    originals, copied = bands[: len(bands) // 2], bands[len(bands) // 2 :]
    return sum(bool(one & other) for one, other in zip(originals, copied, strict=True)) / len(copied)


if __name__ == "__main__":
    main()
