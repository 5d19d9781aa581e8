"""Benchmark of learning a vocabulary: byte-pair encoding of 32,768 tokens from 100 MB of text.

`python benchmarks/data/train_tokenizer.py FOLDER` writes results/train_tokenizer.json. The text is the
LibreOffice help of Debian in six languages, each line of it once, as pack_stage.py has it, whose FOLDER this
is; and then the same documents with other letters in place of theirs, until there are 100 MB. Such a copy has
words of its own, as text of further languages has. A vocabulary is learned as by `kielo run --only
tokenizer`, from the files of a corpus to the tokenizer in memory, in a process of its own for each turn. A
turn with a quarter of the text shows how memory grows with it; `tokenizer.max_sample_bytes` bounds the text.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pack_stage

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import peak_bytes

RESULTS = Path(__file__).parents[1] / "results" / "train_tokenizer.json"
TEXT_BYTES = 100_000_000
BAR_SECONDS = 60
# Letters that take each other's place: vowels, and the others.
ALPHABETS = ("aeiouyäöüõåæøáéíóú", "bcdfghjklmnpqrstvwxz")


def prepare(folder: Path) -> Path:
    """Makes FOLDER/learned_from, the corpus; returns its path."""
    from kielo.artifact.documents import DocumentWriter
    from kielo.artifact.manifest import read_manifest, write_stage

    corpus = folder / "learned_from"
    if read_manifest(corpus) is None:
        with write_stage(corpus, "corpus", 1, {}, {}) as stage:
            number = size = 0
            with DocumentWriter(stage.folder / "documents" / "00000.jsonl.zst") as writer:
                for number, text in enumerate(varied_texts(folder), 1):
                    writer.add({"id": str(number), "text": text, "source": "text", "metadata": {}})
                    size += len(text.encode())
                    if size >= TEXT_BYTES:
                        break
            stage.counts.update(documents_kept=number, bytes_kept=size)
    return corpus


def varied_texts(folder: Path) -> Iterator[str]:
    """Yields each text of the help, then again and again with the letters of each alphabet moved on."""
    from kielo.artifact.documents import read_documents

    pack_stage.prepare(folder, "small")
    for turn in count():
        moved = {
            ord(old): new
            for alphabet in (*ALPHABETS, *map(str.upper, ALPHABETS))
            for old, new in zip(alphabet, alphabet[turn % len(alphabet) :] + alphabet)
        }
        for document in read_documents(folder / "small" / "corpus" / "documents"):
            yield document["text"].translate(moved)


def measure(corpus: Path, sample_bytes: int) -> dict[str, Any]:
    """Learns a vocabulary; returns seconds, seconds of processor, and bytes of memory at the peak."""
    from kielo.recipe.sections import Tokenizer
    from kielo.tokenizer.train import TrainingSample, train_on

    settings = Tokenizer(vocab_size=pack_stage.VOCABULARY, max_sample_bytes=sample_bytes)
    wanted = pack_stage.recipe().model_copy(update={"tokenizer": settings})
    before, started, processor = peak_bytes(), time.perf_counter(), time.process_time()
    tokenizer = train_on(TrainingSample(wanted, corpus, {"text"}), wanted)
    return {
        "sample_megabytes": sample_bytes / 1e6,
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": peak_bytes(),
        "peak_bytes_before": before,
        "vocabulary": tokenizer.get_vocab_size(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="keeps the text, which is fetched once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prepare", action="store_true", help="make the text, and measure nothing")
    parser.add_argument("--sample-bytes", type=int, help="one measurement, in this process")
    options = parser.parse_args()
    corpus = prepare(options.folder)
    if options.prepare:
        return
    if options.sample_bytes:
        return print(json.dumps(measure(corpus, options.sample_bytes)))
    from kielo.artifact.manifest import installed_versions

    rows = []
    for sample_bytes in [TEXT_BYTES // 4] + options.turns * [TEXT_BYTES]:
        command = [sys.executable, __file__, str(options.folder), "--sample-bytes", str(sample_bytes)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
        rows.append(json.loads(answer.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    quarter, *whole = rows
    seconds = [row["seconds"] for row in whole]
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "versions": installed_versions(),
        "measured": "byte-pair encoding learned from 100 MB of text, from the files of a corpus to the "
        "tokenizer in memory",
        "vocabulary": pack_stage.VOCABULARY,
        "seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "bar_seconds": BAR_SECONDS,
        "is_within_bar": statistics.median(seconds) <= BAR_SECONDS,
        "peak_gigabytes": {
            "of a quarter of the text": quarter["peak_bytes"] / 1e9,
            "of all": statistics.median(row["peak_bytes"] for row in whole) / 1e9,
        },
        "turns": rows,
    }
    print(json.dumps({key: content[key] for key in ("seconds", "is_within_bar", "peak_gigabytes")}, indent=1))
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
