"""Benchmark of saves: seconds that one stops training, and seconds until it is published.

    python benchmarks/checkpoints/checkpoint.py --gb 1.5  # 1 and 2 ranks
    python benchmarks/checkpoints/checkpoint.py --gb 0.2 --ranks 1

Each rank holds --gb GB of fp32 tensors on the CPU, as many as a model and its moments have, saves them
several times and does small steps (a matrix product each) until the save is published. The bar for what
training may be stopped is 0.2 s + bytes per rank / 1 GB/s. Writes results/checkpoint_cpu.json.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
import torch.multiprocessing
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from kielo.artifact.checkpoint_inspection import newest_complete
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.ranks.world import World, end_world, make_host_group, start_world

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from machine import machine

TENSORS, COLUMNS = 300, 1024
BAR_SECONDS, BAR_BYTES_PER_SECOND = 0.2, 1e9


def main() -> None:
    options = _options()
    cases = [_case(ranks, options) for ranks in options.ranks]
    result = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("kielo", "torch")},
        "folder_file_system": _file_system(options.folder),
        "bar_seconds": f"{BAR_SECONDS} + bytes per rank / {BAR_BYTES_PER_SECOND:.0e}",
        "cases": cases,
        "passed": all(case["longest_blocked_seconds"] <= case["bar_seconds"] for case in cases),
    }
    path = Path(options.to) / "checkpoint_cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if options.json else _table(result) + f"\nwritten to {path}")


def _case(ranks: int, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (ranks, _free_port(), Path(folder), options)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    blocked = [max(times) for times in zip(*(rank["blocked_seconds"] for rank in found))]
    bytes_per_rank = max(rank["bytes"] for rank in found)
    return {
        "ranks": ranks,
        "bytes_per_rank": bytes_per_rank,
        "bar_seconds": round(BAR_SECONDS + bytes_per_rank / BAR_BYTES_PER_SECOND, 3),
        "reserve_seconds": round(max(rank["reserve_seconds"] for rank in found), 3),
        "first_blocked_seconds": blocked[0],
        "later_blocked_seconds": blocked[1:],
        "longest_blocked_seconds": max(blocked),
        "published_after_seconds": found[0]["published_after_seconds"],
        "steps_meanwhile": found[0]["steps_meanwhile"],
        "step_seconds_meanwhile": found[0]["step_seconds_meanwhile"],
        "step_seconds_alone": found[0]["step_seconds_alone"],
    }


def _rank(rank: int, ranks: int, port: int, folder: Path, options: argparse.Namespace) -> None:
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in launcher.items()})
    torch.set_num_threads(1)
    world = start_world(60, "cpu")
    tensors = _tensors(world, options.gb)
    alerts: list[str] = []
    checkpointer = Checkpointer(
        folder / "checkpoints",
        group=make_host_group(world, "checkpoint", 60),
        on_alert=lambda step, message: alerts.append(message),
    )
    began = time.perf_counter()
    checkpointer.reserve(tensors)
    row: dict = {
        "reserve_seconds": time.perf_counter() - began,
        "bytes": sum(tensor.to_local().nbytes for tensor in tensors.values()),
        "step_seconds_alone": round(_steps(lambda: True, at_least=20)[1], 5),
        "blocked_seconds": [],
        "published_after_seconds": [],
        "steps_meanwhile": [],
        "step_seconds_meanwhile": [],
    }
    for save in range(options.saves):
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.to_local().fill_(float(save))
        torch.distributed.barrier()
        began = time.perf_counter()
        checkpointer.save(save, tensors, {})
        row["blocked_seconds"].append(round(time.perf_counter() - began, 4))
        manifest = folder / "checkpoints" / f"step_{save:08d}" / "manifest.json"
        steps, seconds = _steps(lambda manifest=manifest: manifest.exists() or bool(alerts))
        row["published_after_seconds"].append(round(time.perf_counter() - began, 3))
        row["steps_meanwhile"].append(steps)
        row["step_seconds_meanwhile"].append(round(seconds, 5))
        checkpointer.settle()
    checkpointer.close()
    if rank == 0 and newest_complete(folder / "checkpoints")[0] is None:
        raise RuntimeError("the last checkpoint is not whole")
    (folder / f"{rank}.json").write_text(json.dumps(row))
    end_world()


def _tensors(world: World, gb: float) -> dict[str, DTensor]:
    rows = round(gb * 1e9 / 4 / COLUMNS / TENSORS)
    mesh = init_device_mesh("cpu", (world.size,))
    shards = {f"model/{number}": torch.rand(rows, COLUMNS) for number in range(TENSORS)}
    return {name: DTensor.from_local(shard, mesh, [Shard(0)]) for name, shard in shards.items()}


def _steps(is_over, at_least: int = 1) -> tuple[int, float]:
    """Returns the number of small steps until `is_over`, and the median seconds of one."""
    weight, seconds = torch.rand(512, 512), []
    while len(seconds) < at_least or not is_over():
        began = time.perf_counter()
        torch.mm(weight, weight)
        seconds.append(time.perf_counter() - began)
    return len(seconds), statistics.median(seconds)


def _table(result: dict) -> str:
    lines = []
    for case in result["cases"]:
        later = ", ".join(f"{seconds:.3f}" for seconds in case["later_blocked_seconds"])
        published = ", ".join(f"{seconds:.1f}" for seconds in case["published_after_seconds"])
        lines += [
            f"{case['ranks']} rank(s), {case['bytes_per_rank'] / 1e9:.2f} GB each, on "
            f"{result['folder_file_system']}",
            f"  memory made at the start in {case['reserve_seconds']:.3f} s",
            f"  training stopped for   {case['first_blocked_seconds']:.3f} s, then {later} s (bar "
            f"{case['bar_seconds']} s)",
            f"  published after        {published} s, with {case['steps_meanwhile']} steps meanwhile",
            f"  a step takes           {1e3 * case['step_seconds_alone']:.1f} ms alone, "
            f"{', '.join(f'{1e3 * seconds:.1f}' for seconds in case['step_seconds_meanwhile'])} ms meanwhile "
            "(median)",
        ]
    return "\n".join([*lines, "within the bar" if result["passed"] else "OVER THE BAR"])


def _file_system(folder: str | None) -> str:
    """Returns the file system's type, e.g. "ext4", if the system reports it."""
    place, mounts = Path(folder or tempfile.gettempdir()).resolve(), Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    fields = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    around = [(len(field[1]), field[2]) for field in fields if place.is_relative_to(field[1])]
    return max(around)[1] if around else "unknown"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.5, help="bytes of each rank, in 1e9")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="where to write checkpoints; default: the system's temporary folder")
    parser.add_argument(
        "--to", default=str(Path(__file__).parents[1] / "results"), help="folder of the result"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    needed = 4 * options.gb * 1e9 * max(options.ranks)  # two kept, one under way, and some air
    free = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
    if needed > free:
        parser.error(f"about {needed:.1e} bytes are needed, {free:.1e} are free; choose another --folder")
    return options


if __name__ == "__main__":
    main()
