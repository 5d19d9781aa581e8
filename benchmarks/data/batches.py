"""Speed of the data order and the batches on one core: packed shards to arrays, in tokens a second.

    python benchmarks/data/batches.py  # about a minute; writes results/batches_cpu.json

A folder of made tokens is packed in a temporary place and read once, so that it lies in the page cache. Then
every step is asked for in turn, one thread on one core, as rank 0 of 1 and, for the plain case, of 64. Both
seconds of the clock and of the processor are counted; on a busy machine only the second say something.
`--feed` adds what the training loop's feed does with the arrays (cutting into micro-batches, counting
labels), which needs torch.

Bar: 20 million tokens a second for sequences of 512 and longer, without document numbers.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# before numpy and torch are loaded
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np

from kielo.artifact.manifest import write_stage
from kielo.artifact.token_shards import TokenShardWriter
from kielo.dataset.batches import Batches

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import processor

RESULTS = Path(__file__).resolve().parents[1] / "results" / "batches_cpu.json"
BAR = 20e6
LENGTHS, LONGEST = (512, 2048, 8192), 8192
TOKENS_PER_STEP = 131_072
MEAN_DOCUMENT = 700  # tokens; web text has some hundreds to a thousand
TURNS = 5
SMALL_VOCABULARY, LARGE_VOCABULARY = 50_000, 128_256  # two bytes a token, and four


def main() -> None:
    options = _options()
    core = _on_one_core()
    with tempfile.TemporaryDirectory() as place:
        rows = []
        for vocabulary in (SMALL_VOCABULARY, LARGE_VOCABULARY):
            folder = Path(place) / f"tokens_{vocabulary}"
            pack(folder, vocabulary, options.megabytes)
            for case in cases(vocabulary):
                rows.append(case | measured(folder, case, options))
                print(_line(rows[-1]), flush=True)
    result = {
        "date": date.today().isoformat(), "python": platform.python_version(), "numpy": np.__version__,
        "machine": {"cpu": processor(), "cores_used": 1, "core": core}, "megabytes": options.megabytes,
        "bar_tokens_per_second": BAR,
        "passed": all(row["processor_tokens_per_second"] >= BAR for row in rows if not row["documents"]),
        "rows": rows,
    }  # fmt: skip
    Path(options.to).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(result, indent=1)
        if options.json
        else f"passed: {result['passed']}; written to {options.to}"
    )


def cases(vocabulary: int) -> list[dict[str, Any]]:
    """Returns the cases of one folder; the larger vocabulary only where a difference could show."""
    lengths = LENGTHS if vocabulary == SMALL_VOCABULARY else LENGTHS[:1]
    found = [
        {
            "vocabulary": vocabulary,
            "sequence_length": length,
            "sources": sources,
            "documents": documents,
            "ranks": 1,
        }
        for length in lengths
        for sources in (1, 4)
        for documents in (False, True)
    ]
    # 4 sequences a rank: what each call costs shows here.
    return found + [found[0] | {"ranks": 64, "sequence_length": lengths[-1], "sources": 4}]


def pack(folder: Path, vocabulary: int, megabytes: int) -> None:
    """Packs four sources of unequal size, random tokens in documents of random length, `megabytes` in all."""
    generator = np.random.default_rng(1)
    tokens = megabytes * 1_000_000 // (2 if vocabulary < 65_500 else 4)
    with write_stage(folder, "tokens", 1, {}, {}) as stage:
        counts = {}
        for name, share in zip("abcd", (0.4, 0.3, 0.2, 0.1)):
            lengths = generator.geometric(1 / MEAN_DOCUMENT, int(tokens * share / MEAN_DOCUMENT))
            with TokenShardWriter(stage.folder / name, vocabulary) as writer:
                for length in lengths:
                    writer.add(generator.integers(1, vocabulary, length))
            counts[name] = {"tokens": int(lengths.sum()), "documents": len(lengths), "bytes": 1}
        stage.counts.update({"heldout": {"tokens": 0}, "sources": counts})
    for file in sorted(folder.glob("*.bin")):
        file.read_bytes()  # into the page cache


def measured(folder: Path, case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians of `TURNS` turns of `options.seconds` each; turns continue where the last stopped."""
    length, ranks = case["sequence_length"], case["ranks"]
    sequences = TOKENS_PER_STEP // length * (1 if ranks == 1 else ranks // 4)
    phase = SimpleNamespace(
        number=1, first_step=1, last_step=10**9, first_sample=0, order_first_sample=0, sequence_length=length,
        sequences_per_step=sequences,
        mixture={name: 1.0 + place for place, name in enumerate("abcd"[: case["sources"]])}, offsets={},
        packing="one_stream",
    )  # fmt: skip
    batches = Batches(folder, 1, phase, LONGEST, 0, case["documents"])

    def step(number: int) -> int:
        return batches.step(number, 0, ranks).inputs.size

    figures = {"sequences_per_step_and_rank": sequences // ranks} | rates(step, options.seconds)
    if options.feed and ranks == 1:
        figures["with_feed"] = rates(_fed(batches), options.seconds)
    return figures


def rates(step: Callable[[int], int], seconds: float) -> dict[str, Any]:
    """Returns medians of tokens a second, with the lowest and highest of the turns.

    `step` takes a step's number and returns its tokens.
    """
    step(1)
    number, wall, processor = 2, [], []
    for _ in range(TURNS):
        done, started, processor_started = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < seconds:
            done += step(number)
            number += 1
        wall.append(done / (time.perf_counter() - started))
        processor.append(done / (time.process_time() - processor_started))
    return {
        "tokens_per_second": round(statistics.median(wall)),
        "processor_tokens_per_second": round(statistics.median(processor)),
        "processor_range": [round(min(processor)), round(max(processor))],
    }


def _fed(batches: Batches) -> Callable[[int], int]:
    """Returns a step of the training loop's feed on the CPU, which reads in a thread of its own."""
    import torch

    from kielo.train.feed import Feed

    torch.set_num_threads(1)
    feed = Feed(lambda step: batches.step(step, 0, 1), 4, 10**9, torch.device("cpu"))
    return lambda step: sum(batch.inputs_bs.numel() for batch in feed.take(step).micro_batches)


def _on_one_core() -> int | None:
    """Pins this process to one core and returns it, or None where the system cannot do that."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def _line(row: dict[str, Any]) -> str:
    documents = "with documents" if row["documents"] else "plain"
    fed = (
        f", {row['with_feed']['processor_tokens_per_second'] / 1e6:.0f} with the feed"
        if "with_feed" in row
        else ""
    )
    return (
        f"vocabulary {row['vocabulary']:>7,}, length {row['sequence_length']:>5}, {row['sources']} sources, "
        f"{documents:14s} {row['sequences_per_step_and_rank']:>3} sequences of rank 0 of {row['ranks']}: "
        f"{row['tokens_per_second'] / 1e6:6.1f} million tokens/s of the clock, "
        f"{row['processor_tokens_per_second'] / 1e6:6.1f} of the processor{fed}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=300, help="size of each folder's tokens; default: 300"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help=f"of each of {TURNS} turns; default: 0.5")
    parser.add_argument("--feed", action="store_true", help="measure the training loop's feed on top")
    parser.add_argument(
        "--to", default=str(RESULTS), metavar="FILE", help="where the result is written; default: results/"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
