"""Benchmark of best-fit packing: documents a second, and documents cut on real text.

`python benchmarks/data/packing.py [RUN/tokens ...]` writes results/packing.json. Speed: documents with
lengths as of web text (log-normal, median 500 tokens, 1,200 on average) are packed into sequences of 4,096;
each case runs in a process of its own, whose peak memory is what Linux counts. Each RUN/tokens gives a table
by source and sequence length. See docs/text.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import peak_bytes

RESULTS = Path(__file__).parents[1] / "results" / "packing.json"
DOCUMENTS = (10**6, 10**7, 10**8)
BLOCK_DOCUMENTS = 1 << 20
LENGTH, STEPS, SEQUENCES = 4096, 20, 256
REAL_LENGTHS = (256, 512, 1024, 2048, 4096)


class MadeUpShard:
    """Documents of random lengths; there are no tokens."""

    def __init__(self, num_documents: int):
        self._num_documents = num_documents

    def document_blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        chance, at = np.random.default_rng(1), 0
        for first in range(0, self._num_documents, BLOCK_DOCUMENTS):
            number = min(BLOCK_DOCUMENTS, self._num_documents - first)
            sizes = np.exp(chance.normal(np.log(500), 1.3, number)).astype(np.int64) + 1
            ends = at + np.cumsum(sizes)
            yield ends - sizes, ends
            at = int(ends[-1])


def speed(num_documents: int) -> dict[str, Any]:
    """Packs made-up documents and reads the pieces of some steps."""
    from kielo.artifact.manifest import hash_manifest, write_stage
    from kielo.dataset.pack_sequences import KIND, VERSION, pack_source
    from kielo.dataset.packed_sequences import FOLDER, PackedSequences

    with tempfile.TemporaryDirectory() as place:
        shard, run = MadeUpShard(num_documents), Path(place)
        started = time.perf_counter()
        for _ in shard.document_blocks():
            pass
        making = time.perf_counter() - started
        with write_stage(run / "tokens", "tokens", 1, {}, {}) as stage:
            stage.counts.update(sources={"web": {"tokens": 0}}, heldout={"tokens": 0})
        inputs = {"tokens": hash_manifest(run / "tokens")}
        started = time.perf_counter()
        with write_stage(run / FOLDER, KIND, VERSION, inputs, {"sequence_lengths": [LENGTH]}) as stage:
            counts = pack_source(shard, LENGTH, stage.folder, "web")
            stage.counts["sources"] = {"web": {str(LENGTH): counts.content()}}
        seconds = time.perf_counter() - started - 2 * making  # lengths are read twice
        on_disk = sum(path.stat().st_size for path in (run / FOLDER).iterdir())
        packed = PackedSequences(run / "tokens", "web", LENGTH, 1)
        sequence = np.random.default_rng(2).integers(0, packed.num_sequences, (STEPS, SEQUENCES))
        started = time.perf_counter()
        for step in sequence:
            packed.pieces(step, np.zeros(SEQUENCES, np.int64))
        reading = time.perf_counter() - started
    return {
        "documents": num_documents,
        "tokens": counts.sequences * LENGTH - counts.filling,
        "seconds": round(seconds, 2),
        "documents_per_second": round(num_documents / seconds),
        "peak_bytes": peak_bytes(),
        "bytes_on_disk": on_disk,
        "cut": counts.cut_documents / num_documents,
        "cut_in_one_stream": counts.cut_in_one_stream / num_documents,
        "filling": counts.filling / counts.sequences / LENGTH,
        "milliseconds_to_find_256_sequences": round(1000 * reading / STEPS, 3),
    }


def real(tokens_folder: Path) -> list[dict[str, Any]]:
    """Packs the sources of a tokens folder at several lengths, elsewhere."""
    from kielo.dataset.batches import open_shard, packed_counts
    from kielo.dataset.pack_sequences import pack_source

    rows = []
    for name in packed_counts(tokens_folder).sources:
        shard = open_shard(tokens_folder, name)
        for length in REAL_LENGTHS:
            with tempfile.TemporaryDirectory() as place:
                counts = pack_source(shard, length, Path(place), name)
            rows.append({"source": name, "sequence_length": length, **counts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="*", type=Path, help="folders that a pack stage wrote")
    parser.add_argument("--of", type=int, metavar="DOCUMENTS", help="one case of speed, in this process")
    options = parser.parse_args()
    if options.of:
        return print(json.dumps(speed(options.of)))
    cases = []
    for number in DOCUMENTS:
        command = [sys.executable, __file__, "--of", str(number)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
        cases.append(json.loads(answer))
        print(cases[-1], flush=True)
    texts = [row for folder in options.tokens for row in real(folder)]
    for row in texts:
        print(row)
    content = {"date": time.strftime("%Y-%m-%d"), "sequence_length": LENGTH, "speed": cases, "texts": texts}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
