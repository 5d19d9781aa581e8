"""Seconds of the corpus stage by size of text, memory of each worker, and core-hours for large corpora.

    python benchmarks/data/corpus_size.py FOLDER [GIGABYTES ...] [--identifier NAME] [--near NAME]

The text is synthetic and the same at each call: documents of random words, of which known shares are exact
copies, near copies (2 % of the words replaced) or begin with a line of many documents. After each size
results/corpus_size.json has its figures, and sizes that it has with the same settings are not measured again
without --again. Memory is the peak of each process in /proc. Growth and core-hours are by processor seconds
of this machine, which other programs disturb less than a clock. Texts and corpora stay in FOLDER. With
--remove this script removes its own.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import date
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.corpus_tasks import CorpusTasks, tasks_folder
from kielo.recipe.sections import Corpus, Recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import machine, peak_bytes

RESULTS = Path(__file__).resolve().parents[1] / "results" / "corpus_size.json"
SIZES = (0.3, 1.0, 3.0, 10.0)
LARGE = {"22 GB": 22e9, "1 TB": 1e12, "4 TB": 4e12}
FILES, SEED = 16, 1
EXACT, NEAR, CHANGED, REPEATED = 0.05, 0.05, 0.02, 0.1  # shares of documents, of words, of documents
MOST_DOCUMENTS_OF_CHUNK, BYTES_OF_DOCUMENT = 2000, 4150  # on average
DISK = 2.4  # bytes that text and stage have on disk at most, for a byte of text
MOST_MEMORY, SECONDS_BETWEEN_LOOKS = 1 << 30, 0.2
MUCH_FASTER = 1.1  # growth of the seconds for a byte that is not the machine's


class SyntheticText:
    """Documents of words, as numbers of tokens: a token is a word with what follows it, as JSON has it."""

    WORDS, REPEATED_LINES, DRAWN = 50_000, 1000, 1 << 20

    def __init__(self, documents_of_chunk: int, seed: int = SEED):
        self.documents, self.seed = documents_of_chunk, seed

    @cached_property
    def _words(self) -> list[str]:
        draw = np.random.default_rng([self.seed, 0])
        consonants, vowels = list("kstlmnrpvdghjb"), list("aeiuoõäöü")
        weights = np.array([6, 5, 5, 4, 2, 1, 1, 1, 1]) / 26
        lengths = draw.integers(1, 5, self.WORDS)
        first = draw.choice(consonants, (self.WORDS, 4))
        second = draw.choice(vowels, (self.WORDS, 4), p=weights)
        ends = draw.choice(["", "s", "n", "d", "l", "st"], self.WORDS)
        syllables = np.char.add(first, second)
        return ["".join(some[:n]) + end for some, n, end in zip(syllables, lengths, ends, strict=True)]

    @cached_property
    def _tokens(self) -> np.ndarray:
        """Words in a line, at its begin, at its end and at the document's end, then begins of documents."""
        words = self._words
        lines = np.random.default_rng([self.seed, 1]).choice(words, (self.REPEATED_LINES, 9))
        tokens = [f"{word} " for word in words] + [f"{word.capitalize()} " for word in words]
        tokens += [f"{word}.\\n" for word in words] + [f'{word}."}}\n' for word in words]
        tokens += ['{"text": "', *('{"text": "' + " ".join(line) + ".\\n" for line in lines)]
        return np.array([token.encode() for token in tokens], object)

    @cached_property
    def _drawn(self) -> np.ndarray:
        """Numbers of words, by Zipf's law."""
        weights = 1 / np.arange(2.7, self.WORDS + 2.7)
        draw = np.random.default_rng([self.seed, 2])
        return draw.choice(self.WORDS, self.DRAWN, p=weights / weights.sum()).astype(np.int32)

    def _fresh(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a chunk's own documents, and how many each document has."""
        number = self.documents
        if chunk:
            number -= round(EXACT * number) + round(NEAR * number)
        draw = np.random.default_rng([self.seed, 3, chunk])
        lines = draw.integers(3, 24, number)
        words = draw.integers(5, 81, int(lines.sum()))
        line_ends = np.cumsum(words)
        tokens = self._drawn[draw.integers(0, self.DRAWN, int(line_ends[-1]))]
        tokens[line_ends - words] += self.WORDS
        tokens[line_ends - 1] += 2 * self.WORDS
        last = np.cumsum(lines) - 1
        ends = line_ends[last]
        tokens[ends - 1] += self.WORDS
        sizes = np.diff(ends, prepend=0)
        begin = np.full(number, 4 * self.WORDS, np.int32)
        has_line = draw.random(number) < REPEATED
        begin[has_line] += draw.integers(1, self.REPEATED_LINES + 1, int(has_line.sum()), dtype=np.int32)
        return np.insert(tokens, ends - sizes, begin), sizes + 1

    def chunk(self, chunk: int) -> tuple[bytes, dict[str, int]]:
        """Return the documents of a chunk as JSON lines, and how many of them are copies of earlier ones."""
        draw = np.random.default_rng([self.seed, 4, chunk])
        tokens, sizes = self._fresh(chunk)
        exact, near = (round(share * self.documents) if chunk else 0 for share in (EXACT, NEAR))
        if copies := exact + near:
            others, of_others = self._fresh(int(draw.integers(chunk)))
            chosen = draw.choice(len(of_others), copies, replace=False)
            copied, of_copies = _taken(others, of_others, chosen), of_others[chosen]
            is_changed = (draw.random(len(copied)) < CHANGED) & (copied < 4 * self.WORDS)
            is_changed[: int(of_copies[:exact].sum())] = False
            new = self._drawn[draw.integers(0, self.DRAWN, int(is_changed.sum()))]
            copied[is_changed] += new - copied[is_changed] % self.WORDS
            tokens, sizes = np.concatenate([tokens, copied]), np.concatenate([sizes, of_copies])
        order = draw.permutation(self.documents)
        text = b"".join(self._tokens[_taken(tokens, sizes, order)].tolist())
        return text, {"documents": self.documents, "exact_copies": exact, "near_copies": near}


@lru_cache(maxsize=1)
def _text(documents_of_chunk: int) -> SyntheticText:
    return SyntheticText(documents_of_chunk)


def _taken(tokens: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the tokens of documents in an order."""
    begins, chosen = np.cumsum(sizes) - sizes, sizes[order]
    moved = np.repeat(begins[order] - (np.cumsum(chosen) - chosen), chosen)
    return tokens[moved + np.arange(len(moved))]


def write_file(folder: Path, chunks: int, documents_of_chunk: int, number: int) -> dict[str, int]:
    """Write a file of some chunks. Return its counts."""
    text, total = _text(documents_of_chunk), dict[str, int]()
    with (folder / f"{number:02d}.jsonl").open("wb") as file:
        for chunk in range(number * chunks, (number + 1) * chunks):
            content, counts = text.chunk(chunk)
            file.write(content)
            total = {name: total.get(name, 0) + count for name, count in counts.items()}
    return total


def write_text(folder: Path, num_bytes: float, processes: int = 2) -> dict[str, int]:
    """Write FILES files, unless they are there whole. Return the counts of documents and of copies."""
    planted = folder.with_name(f"{folder.name}.json")
    if planted.is_file():
        return json.loads(planted.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    of_file = round(num_bytes / FILES / BYTES_OF_DOCUMENT)
    chunks = -(-of_file // MOST_DOCUMENTS_OF_CHUNK)
    write = partial(write_file, folder, chunks, of_file // chunks)
    if processes == 1:
        counts = list(map(write, range(FILES)))
    else:
        with ProcessPoolExecutor(processes) as pool:
            counts = list(pool.map(write, range(FILES)))
    total = {name: sum(one[name] for one in counts) for name in counts[0]}
    planted.write_text(json.dumps(total) + "\n", encoding="utf-8")
    return total


class PeaksOfWorkers(threading.Thread):
    """The peak bytes of each worker process, read from /proc while they live."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[int, int] = {}
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_LOOKS):
            for path in Path("/proc/self/task").glob("*/children"):
                with suppress(OSError):
                    for process in map(int, path.read_text().split()):
                        self._look_at(process)

    def _look_at(self, process: int) -> None:
        with suppress(OSError, IndexError):
            place = Path("/proc") / str(process)
            if b"spawn_main" in (place / "cmdline").read_bytes():  # a worker of the pool
                status = (place / "status").read_text()
                self.peaks[process] = int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def end(self) -> list[int]:
        self._is_over.set()
        self.join()
        return sorted(self.peaks.values(), reverse=True)


class Rounds:
    """The seconds of each round of tasks, and the bytes of the tasks on disk after it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_bytes = 0
        self._run = CorpusTasks.run_round

    def __enter__(self) -> "Rounds":
        def timed(tasks: CorpusTasks, round: str, pool: Any) -> None:
            began = time.monotonic()
            self._run(tasks, round, pool)
            self.seconds[round] = _rounded(time.monotonic() - began)
            files = (path for path in tasks.work.rglob("*") if path.is_file())
            self.num_bytes = max(self.num_bytes, sum(path.stat().st_size for path in files))

        CorpusTasks.run_round = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *problem: object) -> None:
        CorpusTasks.run_round = self._run  # type: ignore[method-assign]


def measure(folder: Path, gigabytes: float, workers: int, keys: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    planted = write_text(folder / f"text {gigabytes:g}", gigabytes * 1e9)
    written = time.monotonic() - began
    # Synthetic words are no language, so the thresholds are 0; the identifier runs nevertheless.
    thresholds = {"line_language_threshold": 0, "document_language_threshold": 0}
    corpus = Corpus(sources=str(folder / f"text {gigabytes:g}"), workers=workers, **keys, **thresholds)
    recipe = Recipe(name="size", language="et", corpus=corpus)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    peaks, began, before = PeaksOfWorkers(), time.monotonic(), sum(os.times()[:4])
    peaks.start()
    with Rounds() as rounds:
        made = run_corpus(recipe, folder / f"corpus {gigabytes:g}", folder / "raw", True)
    seconds, of_workers = time.monotonic() - began, peaks.end()
    processor_seconds = sum(os.times()[:4]) - before
    size, kept = made.counts["bytes_in"], made.counts["documents_kept"]
    return {
        "gigabytes": round(size / 1e9, 3),
        "seconds": _rounded(seconds),
        "processor_seconds": _rounded(processor_seconds),
        "megabytes_per_processor_second": round(size / 1e6 / processor_seconds, 3),
        "seconds_of_rounds": rounds.seconds,
        "gib_of_workers": [round(peak / 2**30, 3) for peak in of_workers],
        "gib_of_parent": round(peak_bytes() / 2**30, 3),
        "gigabytes_of_tasks": round(rounds.num_bytes / 1e9, 3),
        "documents": planted["documents"],
        "planted_copies": planted["exact_copies"] + planted["near_copies"],
        "documents_dropped": made.counts["documents_in"] - kept,
        "seconds_to_write_text": _rounded(written),
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 1)


def remove(folder: Path, gigabytes: float) -> None:
    """Remove what this script made for a size."""
    corpus = folder / f"corpus {gigabytes:g}"
    for place in (corpus, tasks_folder(corpus), folder / f"text {gigabytes:g}"):
        shutil.rmtree(place, ignore_errors=True)
    (folder / f"text {gigabytes:g}.json").unlink(missing_ok=True)


def refuse_leftovers(folder: Path, gigabytes: float, is_removed: bool) -> None:
    """Refuse what an earlier call left, whose tasks would not be done again, and a disk without room."""
    corpus = folder / f"corpus {gigabytes:g}"
    left = [place for place in (corpus, tasks_folder(corpus)) if place.exists()]
    has_text = (folder / f"text {gigabytes:g}.json").is_file()  # which only this script writes
    if left and not is_removed:
        sys.exit(f"{left[0]}: is there already. Fix: --remove, which removes it")
    for place in [*left, folder / f"text {gigabytes:g}"]:
        if place.exists() and not has_text:
            sys.exit(f"{place}: this script did not make it, or was ended. Fix: another folder")
    for place in left:
        shutil.rmtree(place)
    needed, free = (DISK - has_text) * gigabytes * 1e9, shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(f"{folder}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free. Fix: free space")


def summary(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whether seconds grow no faster than bytes, and core-hours from the rate of the largest size."""
    sizes = sorted(sizes, key=lambda one: one["gigabytes"])
    per_byte = [one["processor_seconds"] / one["gigabytes"] for one in sizes]
    largest = max(peak for one in sizes for peak in one["gib_of_workers"])
    return {
        "processor_seconds_per_gigabyte": [round(one, 1) for one in per_byte],
        "growth": round(per_byte[-1] / per_byte[0], 3),
        "grows_no_faster": per_byte[-1] <= MUCH_FASTER * per_byte[0],
        "gib_of_largest_worker": largest,
        "is_within_memory": largest * 2**30 <= MOST_MEMORY,
        "core_hours": {name: round(size / 1e9 * per_byte[-1] / 3600, 1) for name, size in LARGE.items()},
    }


def known_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of sizes that were measured with these settings."""
    with suppress(OSError, ValueError):
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        if found["settings"] == settings:
            return {name: one for name, one in found["sizes"].items() if "processor_seconds" in one}
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("gigabytes", type=float, nargs="*", default=SIZES)
    parser.add_argument("--identifier", default="py3langid", help="corpus.language_identifier")
    parser.add_argument("--near", default="hplt", help="corpus.near_copies: none, hplt or fineweb2")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--again", action="store_true", help="measure also sizes that the results have")
    parser.add_argument("--remove", action="store_true", help="remove each size's text and corpus")
    options = parser.parse_args()
    keys = {"language_identifier": options.identifier, "near_copies": options.near}
    settings = keys | {"workers": options.workers, "machine": machine()}
    sizes = {} if options.again else known_sizes(settings)
    options.folder.mkdir(parents=True, exist_ok=True)
    for gigabytes in options.gigabytes:
        if f"{gigabytes:g}" not in sizes:
            refuse_leftovers(options.folder, gigabytes, options.remove)
            sizes[f"{gigabytes:g}"] = measure(options.folder, gigabytes, options.workers, keys)
            print(json.dumps(sizes[f"{gigabytes:g}"]), flush=True)
            packages = ("numpy", "rensa", "zstandard")
            found = {
                "date": date.today().isoformat(),
                "python": platform.python_version(),
                "versions": {name: version(name) for name in packages},
                "settings": settings,
                "sizes": sizes,
                **summary(list(sizes.values())),
            }
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if options.remove:
            remove(options.folder, gigabytes)
    print(json.dumps(summary(list(sizes.values())), indent=1))


if __name__ == "__main__":
    main()
