"""Benchmark of planning saves on rank 0: seconds an item, and how slow the training thread is meanwhile.

    python benchmarks/save_planning.py                     # 96 ranks with 300 parts each
    python benchmarks/save_planning.py --ranks 24 --rounds 3

One process has the parts of all ranks and makes the same index in three ways, alternating in every round:
`dcp`, each save by DCP's planner and its metadata, as it was before plans were kept; `plan`, our plan, made
once a layout; `later`, a save with the kept plan. Each includes the pickles that rank 0 receives and sends;
`dcp` and `later` include the index on the disk. An item is one part of one rank; its seconds are those of the
processor. The main thread repeats a small operation beside each and alone. Then one reader parses the whole
index, and one a 16th of its tensors. Writes results/save_planning.json.
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from kielo.artifact.checkpoint_folder import rank_file_name
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    Chunk,
    TensorEntry,
    chunk_key,
    entry_json,
    read_index,
    write_index,
)
from kielo.checkpoint.save_plan import HeldChunk, WholePlan, plan_all

ROWS, COLUMNS = 128, 12288


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    held, dcp = _held(options), [pickle.dumps(plan) for plan in _dcp_plans(options)]
    num_items = options.ranks * options.tensors
    own = [pickle.dumps(of_rank) for of_rank in held]
    _, whole = plan_all(held, {})
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways: dict[str, Callable[[], object]] = {
            "dcp": lambda: _save_with_dcp(dcp, folder),
            "plan": lambda: _plan(own),
            "later": lambda: _save_later(whole, folder),
        }
        for _ in range(options.rounds):
            alone = _operations_per_second(lambda: time.sleep(0.5))[1]
            row: dict[str, dict[str, float]] = {"alone": {"operations_per_second": round(alone)}}
            for way, action in ways.items():
                seconds, _ = _operations_per_second(action, beside=False)
                slow_seconds, rate = _operations_per_second(action)
                row[way] = {
                    "microseconds_per_item": round(1e6 * seconds / num_items, 2),
                    "microseconds_per_item_beside_training": round(1e6 * slow_seconds / num_items, 2),
                    "times_slower": round(alone / rate, 1),
                }
            rounds.append(row)
        reading = _reading(folder, options)
    result = {
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in ("kielo", "torch")},
        "cores": len(os.sched_getaffinity(0)),
        "ranks": options.ranks,
        "items": num_items,
        "ratios": {
            f"dcp / {way}": _interval([row["dcp"][key] / row[way][key] for row in rounds])
            for way in ("plan", "later")
            for key in ("microseconds_per_item",)
        },
        "times_slower": {way: _interval([row[way]["times_slower"] for row in rounds]) for way in ways},
        "microseconds_per_item": {
            way: _interval([row[way]["microseconds_per_item"] for row in rounds]) for way in ways
        },
        "pickled_bytes_per_item": {"dcp": _bytes(dcp, num_items), "plan": _bytes(own, num_items)},
        "index_bytes_per_item": round(sum(map(len, whole.entries.values())) / num_items),
        "reading": reading,
        "rounds": rounds,
    }
    path = Path(options.to) / "save_planning.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))


def _names(options: argparse.Namespace) -> list[str]:
    return [
        f"optimiser/layers.{number % 11}.attention.q.weight{number}/exp_avg_sq"
        for number in range(options.tensors)
    ]


def _held(options: argparse.Namespace) -> list[list[HeldChunk]]:
    whole = (ROWS * options.ranks, COLUMNS)
    return [
        [HeldChunk(name, "F32", whole, (rank * ROWS, 0), (ROWS, COLUMNS)) for name in _names(options)]
        for rank in range(options.ranks)
    ]


def _dcp_plans(options: argparse.Namespace) -> list[SavePlan]:
    size, properties = torch.Size([ROWS * options.ranks, COLUMNS]), TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(options.ranks):
        offset = torch.Size([rank * ROWS, 0])
        data = TensorWriteData(ChunkStorageMetadata(offset, torch.Size([ROWS, COLUMNS])), properties, size)
        items = [
            WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)
            for name in _names(options)
        ]
        plans.append(SavePlan(items))
    return plans


def _save_with_dcp(received: list[bytes], folder: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in received])
    for plan in plans:
        pickle.dumps(plan)
    results = [
        pickle.dumps([WriteResult(item.index, 1, (rank_file_name(rank), {})) for item in plan.items])
        for rank, plan in enumerate(plans)
    ]
    home = {result.index: result.storage_data[0] for of_rank in results for result in pickle.loads(of_rank)}
    write_index(folder, _index(), _dcp_entries(metadata, home))
    pickle.dumps(metadata)  # which DCP sends to all ranks


def _dcp_entries(metadata: Metadata, home: dict[MetadataIndex, str]) -> dict[str, str]:
    entries = {}
    for name, stored in metadata.state_dict_metadata.items():
        chunks = tuple(
            Chunk(
                tuple(box.offsets),
                tuple(box.sizes),
                home[MetadataIndex(name, box.offsets)],
                chunk_key(name, box.offsets),
            )
            for box in stored.chunks
        )
        entries[name] = entry_json(TensorEntry("F32", tuple(stored.size), chunks))
    return entries


def _plan(received: list[bytes]) -> None:
    written, _ = plan_all([pickle.loads(of_rank) for of_rank in received], {})
    for positions in written:
        pickle.dumps(positions)


def _save_later(whole: WholePlan, folder: Path) -> None:
    write_index(folder, replace(_index(), aliases=whole.aliases), whole.entries)


def _index() -> CheckpointIndex:
    return CheckpointIndex("0123456789abcdef", 100, {})


def _reading(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns seconds and chunks of a reader of all tensors and of one of a 16th of them."""
    rows = {}
    for reader, names in (("whole", None), ("a 16th", _names(options)[::16])):
        began = time.perf_counter()
        index = read_index(folder, names)
        rows[reader] = {
            "chunks_parsed": sum(len(entry.chunks) for entry in index.tensors.values()),
            "seconds": round(time.perf_counter() - began, 4),
        }
    return rows


def _operations_per_second(action: Callable[[], object], beside: bool = True) -> tuple[float, float]:
    """Returns the processor's seconds of `action`, and operations per second of the main thread beside it."""
    seconds: list[float] = []

    def run() -> None:
        began = time.thread_time()
        action()
        seconds.append(time.thread_time() - began)

    if not beside:
        run()
        return seconds[0], 0.0
    thread, values, count = threading.Thread(target=run), torch.zeros(64), 0
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():
        values.add_(1.0)
        count += 1
    rate = count / (time.perf_counter() - began)
    thread.join()
    return seconds[0], rate


def _interval(values: list[float]) -> dict[str, float]:
    median, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(median, 2), "least": round(least, 2), "most": round(most, 2)}


def _bytes(pickles: list[bytes], num_items: int) -> int:
    return round(sum(map(len, pickles)) / num_items)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=96)
    parser.add_argument("--tensors", type=int, default=300, help="parts of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--to", default=str(Path(__file__).parent / "results"), help="folder of the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
