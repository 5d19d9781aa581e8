"""Benchmark of ready token files: seconds and memory to describe and open 100 GB of them.

`python benchmarks/data/open_tokens.py` writes results/open_tokens.json. The files are sparse: nothing but the
indexes takes room on the disk. Each case runs in a process of its own, whose peak memory is what Linux
counts; "again" is a start of training, which has the description and compares sizes and times. Seconds of the
processor are those of describing: other work on the machine does not change them much.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import peak_bytes

RESULTS = Path(__file__).parents[1] / "results" / "open_tokens.json"
TOTAL_BYTES = 100 * 10**9
DOCUMENT_TOKENS = 10_000
LENGTH, ROWS = 4096, 64
LIMIT_SECONDS, LIMIT_BYTES = 2, 200e6
# format, files
CASES = {
    "2,000 Megatron pairs": ("megatron", 2000),
    "1 Megatron pair": ("megatron", 1),
    "2,000 flat .npy": ("npy", 2000),
    "2,000 .ds": ("ds", 2000),
    "10,000 .ds": ("ds", 10_000),
}


def write_sparse(folder: Path, kind: str, number: int) -> None:
    """Writes `number` files of equal size with documents of equal length."""
    from kielo.artifact.token_shards import CODES, HEADER, MAGIC, VERSION

    tokens = TOTAL_BYTES // 2 // number // DOCUMENT_TOKENS * DOCUMENT_TOKENS
    documents = tokens // DOCUMENT_TOKENS
    suffix = {"megatron": ".bin"}.get(kind, f".{kind}")
    for file in range(number):
        path = folder / f"{file:05}{suffix}"
        with open(path, "wb") as data:
            data.truncate(2 * tokens)
        if kind == "megatron":
            head = HEADER.pack(MAGIC, VERSION, CODES[np.dtype(np.uint16)], documents, documents + 1)
            lengths = np.full(documents, DOCUMENT_TOKENS, "<i4")
            pointers = np.arange(documents, dtype="<i8") * 2 * DOCUMENT_TOKENS
            numbers = np.arange(documents + 1, dtype="<i8")
            content = head + lengths.tobytes() + pointers.tobytes() + numbers.tobytes()
            path.with_suffix(".idx").write_bytes(content)
        elif kind == "ds":
            ends = np.arange(1, documents + 1, dtype="<u8") * DOCUMENT_TOKENS
            path.with_name(path.name + ".index").write_bytes(ends.tobytes())


def opened(folder: Path, kind: str) -> dict[str, Any]:
    """Describes, opens and reads one step's sequences from all over the set; returns seconds and bytes."""
    from kielo.artifact.token_set import TokenSet
    from kielo.artifact.token_sources import check_unchanged, find_token_files

    before = peak_bytes()
    started, processor = time.perf_counter(), time.process_time()
    found = find_token_files("web", str(folder), 2)
    described, processor = time.perf_counter(), time.process_time() - processor
    check_unchanged("web", found.folder, found.files, found.times_ns)
    stream = TokenSet(found.folder, found.files, sum(file.tokens for file in found.files), 0)
    numbers = np.linspace(0, stream.num_whole_sequences(LENGTH) - 1, ROWS).astype(np.int64)
    ready = time.perf_counter()
    stream.sequences(numbers, LENGTH)
    if kind != "npy":  # of a sparse flat file every token would end a document
        stream.borders(numbers * LENGTH, np.full(ROWS, LENGTH))
    read = time.perf_counter()
    return {
        "files": len(found.files),
        "bytes": sum(file.bytes for file in found.files),
        "describe_seconds": round(described - started, 3),
        "describe_processor_seconds": round(processor, 3),
        "again_seconds": round(ready - described, 3),
        "first_batch_seconds": round(read - ready, 3),
        "peak_bytes": peak_bytes(),
        "peak_bytes_before": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", nargs=2, metavar=("FOLDER", "FORMAT"), help="one case, in this process")
    options = parser.parse_args()
    if options.of:
        return print(json.dumps(opened(Path(options.of[0]), options.of[1])))
    cases = {}
    for name, (kind, number) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_sparse(Path(folder), kind, number)
            command = [sys.executable, __file__, "--of", folder, kind]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        row = cases[name] = json.loads(answer)
        seconds = row["describe_seconds"] + row["again_seconds"] + row["first_batch_seconds"]
        row["is_within"] = seconds < LIMIT_SECONDS and row["peak_bytes"] < LIMIT_BYTES
        print(name, row, flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    content = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "cases": cases}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
