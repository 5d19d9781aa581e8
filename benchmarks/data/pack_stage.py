"""Benchmark of the pack stage against Megatron-LM's way: the same text, tokenizer, two workers, bytes.

`python benchmarks/data/pack_stage.py FOLDER` writes results/pack_stage.json. FOLDER keeps the text, which is
fetched once: the LibreOffice help of Debian in six languages (`small`) or twenty-six (`large`), each line of
it once. Megatron-LM's way is that of its tools/preprocess_data.py, written here from its description: a
`multiprocessing.Pool` encodes one document at a time, `imap` by 32, and megatron-core's own
`IndexedDatasetBuilder` writes. Its documents are encoded as its tokenizer class does, by transformers
(`megatron`), or by `tokenizers` alone, which is faster (`megatron_fast`). The clock of each side starts when
all its workers are ready, and stops when the last file is whole. Sides take turns, each in a process of its
own; whatever they write must be the same bytes. The result is the ratio of the tokens/s of each turn, as
geometric mean and median, with an interval of 95 %. See docs/text.md.
"""

import argparse
import html
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "pack_stage.json"
SMALL = ("et", "eu", "da", "fi", "sv", "en-us")
LARGE = (
    *SMALL, "de", "fr", "nl", "es", "it", "pl", "cs", "hu", "ru", "el", "pt", "tr", "ca", "gl", "sk", "sl",
    "vi", "id", "om", "en-gb",
)  # fmt: skip
WITHOUT_SPACES = ("ja", "zh-cn")
TEXTS = {"small": SMALL, "large": LARGE, "without spaces": WITHOUT_SPACES}
WORKERS, IMAP_DOCUMENTS = 2, 32
HELDOUT_SHARE = 0.002
VOCABULARY = 32_768
SIDES = ("kielo", "megatron", "megatron_fast")
LEAST_LINE, LEAST_DOCUMENT = 20, 100  # characters
_LINE_END = re.compile(r"</?(?:p|div|h\d|li|td|th|tr|br|title)\b[^>]*>", re.IGNORECASE)
_HIDDEN = re.compile(r"<(script|style|head)\b.*?</\1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_READY: Any = None  # of a worker of Megatron's way: its tokenizer and end-of-text


def recipe(language: str = "et") -> Any:
    from kielo.recipe.sections import Recipe

    return Recipe(
        name="bench",
        language=language,
        corpus={"sources": [{"name": "text", "path": "text.txt"}], "workers": WORKERS},
        tokenizer={"vocab_size": VOCABULARY},
        dataset={"heldout_share": HELDOUT_SHARE},
    )


def prepare(folder: Path, name: str) -> None:
    """Makes FOLDER/NAME: corpus and tokenizer, and the training documents as text.jsonl."""
    from kielo.artifact.documents import DocumentWriter, read_documents
    from kielo.artifact.manifest import read_manifest, write_stage
    from kielo.tokenizer.stage_inputs import is_heldout
    from kielo.tokenizer.train import train_tokenizer

    place = folder / name
    if read_manifest(place / "corpus") is None:
        with write_stage(place / "corpus", "corpus", 1, {}, {}) as stage:
            number = size = 0
            with DocumentWriter(stage.folder / "documents" / "00000.jsonl.zst") as writer:
                for number, text in enumerate(_texts(folder / "pages", TEXTS[name]), 1):
                    writer.add({"id": str(number), "text": text, "source": "text", "metadata": {}})
                    size += len(text.encode())
            stage.counts.update(documents_kept=number, bytes_kept=size)
    started = time.perf_counter()
    before = read_manifest(place / "tokenizer")
    train_tokenizer(recipe(), place / "corpus", place / "tokenizer")
    if before is None:
        print(f"{name}: the tokenizer took {time.perf_counter() - started:.1f} s", flush=True)
    if not (place / "text.jsonl").exists():
        with open(place / "aside", "w", encoding="utf-8") as file:
            for document in read_documents(place / "corpus" / "documents"):
                if not is_heldout(document["text"], HELDOUT_SHARE):
                    file.write(json.dumps({"text": document["text"]}, ensure_ascii=False) + "\n")
        (place / "aside").rename(place / "text.jsonl")


def _texts(pages: Path, languages: tuple[str, ...]) -> Iterator[str]:
    """Yields the text of each page that is left without the lines of all pages before it."""
    from kielo.corpus.download import fetch_debian_package
    from kielo.recipe.sections import Source

    seen: set[str] = set()
    for language in languages:
        if not (pages / language).exists():
            source = Source(name=language, debian_package=f"libreoffice-help-{language}")
            print(fetch_debian_package(source, pages / f"{language}.part"), flush=True)
            (pages / f"{language}.part").rename(pages / language)
        for path in sorted((pages / language).rglob("*.html")):
            page = _HIDDEN.sub(" ", path.read_text(encoding="utf-8"))
            page = html.unescape(_TAG.sub("", _LINE_END.sub("\n", page)))
            lines = [" ".join(line.split()) for line in page.split("\n")]
            kept = [line for line in lines if len(line) >= LEAST_LINE and line not in seen]
            seen.update(kept)
            if sum(map(len, kept)) >= LEAST_DOCUMENT:
                yield "\n".join(kept)


def measure(side: str, place: Path) -> dict[str, Any]:
    """Packs the text by one side; returns seconds, seconds of processor, and a hash of what was written."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        clock = _Clock(Path(folder) / "ready")
        if side == "kielo":
            prefix = _pack_with_kielo(place, Path(folder), clock)
        else:
            prefix = _pack_with_megatron(place, Path(folder), clock, side == "megatron_fast")
        from kielo.artifact.manifest import hash_file

        seconds, processor = clock.stopped()
        return {
            "side": side,
            "seconds": seconds,
            "processor_seconds": processor,
            "peak_bytes_of_a_process": max(
                resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            )
            * 1024,
            "bin": hash_file(f"{prefix}.bin"),
            "idx": hash_file(f"{prefix}.idx"),
            "tokens": os.path.getsize(f"{prefix}.bin") // 2,
        }


class _Clock:
    """Starts when all workers have said that they are ready; they wait for that."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        while len(workers := list(self.folder.glob("[0-9]*"))) < WORKERS:
            time.sleep(0.005)
        self._processor = _processor_seconds() + sum(_seconds_of(int(one.name)) for one in workers)
        self._started = time.perf_counter()
        (self.folder / "go").touch()

    def stopped(self) -> tuple[float, float]:
        """Returns (seconds, seconds of processor of all processes) since the start; workers have ended."""
        return time.perf_counter() - self._started, _processor_seconds() - self._processor


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _seconds_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    while not (folder / "go").exists():
        time.sleep(0.005)


def ready_packer(folder: Path, *arguments: Any) -> Any:
    """Loads a worker's packer, then waits for the others."""
    from kielo.dataset.document_packer import load_packer

    packer = load_packer(*arguments)
    _wait(folder)
    return packer


def _pack_with_kielo(place: Path, folder: Path, clock: _Clock) -> Path:
    import pack_stage  # by this name a worker finds it

    from kielo.dataset import token_parts
    from kielo.dataset.pack import pack

    token_parts.load_packer = partial(pack_stage.ready_packer, clock.folder)
    token_parts.LEAST_BYTES_FOR_WORKERS = 0
    pack(recipe(), place / "corpus", place / "tokenizer", folder / "tokens")
    return folder / "tokens" / "text"


def _pack_with_megatron(place: Path, folder: Path, clock: _Clock, is_fast: bool) -> Path:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    options = (place / "tokenizer", is_fast, clock.folder)
    with (
        open(place / "text.jsonl", encoding="utf-8") as lines,
        multiprocessing.Pool(WORKERS, _load, options) as pool,
    ):
        for ids, lengths, _ in pool.imap(_encode, lines, IMAP_DOCUMENTS):
            builder.add_document(ids, lengths)
        pool.close()
        pool.join()
    builder.finalize(f"{prefix}.idx")
    return prefix


def _load(folder: Path, is_fast: bool, ready: Path) -> None:
    global _READY
    from tokenizers import Tokenizer

    if is_fast:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        _READY = (lambda text: tokenizer.encode(text).ids), tokenizer.token_to_id("<|endoftext|>")
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        _READY = (lambda text: tokenizer(text).input_ids), tokenizer.eos_token_id
    _READY[0]("a")
    _wait(ready)


def _encode(line: str) -> tuple[list[int], list[int], int]:
    encode, end = _READY
    ids = encode(json.loads(line)["text"])
    ids.append(end)
    return ids, [len(ids)], len(line)


def compare(folder: Path, name: str, sides: Sequence[str], turns: int) -> dict[str, Any]:
    """Measures the sides in turns on one text."""
    prepare(folder, name)
    place, rows = folder / name, []
    for turn in range(turns):
        for side in sides if turn % 2 else reversed(sides):
            command = [sys.executable, __file__, str(folder), "--of", name, "--side", side]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
            rows.append({"turn": turn} | json.loads(answer.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    if len({(row["bin"], row["idx"]) for row in rows}) != 1:
        raise SystemExit(f"{name}: the sides wrote different bytes")
    size = json.loads((place / "corpus" / "manifest.json").read_text())["counts"]["bytes_kept"]
    of = {side: [row for row in rows if row["side"] == side] for side in sides}
    return {
        "text": name,
        "bytes": size,
        "tokens": rows[0]["tokens"],
        "median": {
            side: {
                "megabytes_per_second": size / 1e6 / _median(own, "seconds"),
                "tokens_per_second": rows[0]["tokens"] / _median(own, "seconds"),
                "processor_seconds": _median(own, "processor_seconds"),
                "peak_bytes_of_a_process": _median(own, "peak_bytes_of_a_process"),
            }
            for side, own in of.items()
        },
        "times_the_tokens_per_second": {
            f"of {other}": {
                "by the clock": _ratio(of[other], of["kielo"], "seconds"),
                "by processor seconds": _ratio(of[other], of["kielo"], "processor_seconds"),
            }
            for other in sides
            if other != "kielo"
        },
        "turns": rows,
    }


def _median(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def _ratio(others: list[dict[str, Any]], own: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Returns geometric mean and median of the turns' ratios; from, to: the interval of 95 % of the mean."""
    logs = [math.log(other[key] / one[key]) for other, one in zip(others, own, strict=True)]
    student = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}[len(logs)]
    mean, half = statistics.mean(logs), student * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "ratio": math.exp(mean),
        "from": math.exp(mean - half),
        "to": math.exp(mean + half),
        "median": math.exp(statistics.median(logs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="keeps the text, which is fetched once")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--turns", type=int, default=5, help="2 to 10")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=SIDES, help="kielo, and one more or both"
    )
    parser.add_argument("--of", choices=TEXTS, help="one measurement of a text, in this process")
    parser.add_argument("--side", choices=SIDES, help="of that measurement")
    options = parser.parse_args()
    if options.of:
        return print(json.dumps(measure(options.side, options.folder / options.of)))
    from kielo.artifact.manifest import installed_versions

    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.texts:
        content |= {
            "date": time.strftime("%Y-%m-%d"),
            "processors": os.cpu_count(),
            "machine": platform.machine(),
            "versions": installed_versions(),
            "workers": WORKERS,
            "measured": "tokens/s of Kielo's pack stage over those of Megatron-LM's way, in turns: from "
            "ready workers to whole files, the same bytes on both sides",
            name: compare(options.folder, name, options.sides, options.turns),
        }
        print(json.dumps(content[name]["times_the_tokens_per_second"], indent=1))
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
