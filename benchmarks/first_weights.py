"""Cost of the first weights of Llama 3 8B on one rank: all of them, and the eighth that one rank of 8 makes.

    python benchmarks/first_weights.py           # half a minute; writes results/first_weights_cpu.json

The matrices of one layer are made, one after another, and their seconds are multiplied by what the whole
model has more of parameters. Seconds are of the processor, one thread, since other work on the machine
changes those of the clock. In each round every way has its turn; a ratio is the median of the rounds' ratios,
with the smallest and the largest. Bytes are the largest growth of the process's resident memory (Linux,
glibc), for the layer's largest matrix.

"drawn whole with torch" is what Kielo did before: `normal_` of the whole parameter on every rank.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_shapes import whole_model

from kielo.models import families
from kielo.models.llama.model import initial_value
from kielo.models.piece import Box
from kielo.recipe.sections import Model

RESULTS = Path(__file__).resolve().parent / "results" / "first_weights_cpu.json"
RANKS = 8
ROUNDS = 5
BEFORE = "drawn whole with torch"
BY_COLUMNS = ("o.weight", "down.weight")  # what tensor parallelism splits by columns


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    model = whole_model("llama_8b")
    one_layer = model.model_copy(update={"num_hidden_layers": 1})
    with torch.device("meta"):
        parameters = families.build_model(one_layer).named_parameters()
        shapes = {name: p.shape for name, p in parameters if name.startswith("layers.") and p.dim() == 2}
    all_parameters = families.module(model.model_type, "tables").parameters(model)
    times = all_parameters / sum(shape.numel() for shape in shapes.values())
    ways = _ways(one_layer)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for _ in range(options.rounds):
        for way, make in ways.items():
            spent, peak = _cost(make, shapes)
            seconds[way].append(spent * times)
            peaks[way] = max(peaks[way], peak)
    rows = [_row(way, seconds, peaks[way]) for way in ways]
    for row in rows:
        print(json.dumps(row))
    result = {
        "date": date.today().isoformat(), "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__, "machine": {"cpu": _cpu(), "threads": 1}, "rounds": options.rounds,
        "parameters": all_parameters, "made_and_multiplied_by": round(times, 2), "ranks": RANKS, "rows": rows,
    }  # fmt: skip
    options.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _ways(model: Model) -> dict[str, Callable[[str, torch.Size], Any]]:
    def whole(name: str, shape: torch.Size) -> Box:
        return tuple(slice(0, size) for size in shape)

    def by_rows(name: str, shape: torch.Size) -> Box:
        return (slice(0, -(-shape[0] // RANKS)), *whole(name, shape)[1:])

    def as_tensor_parallel(name: str, shape: torch.Size) -> Box:
        if name.endswith(BY_COLUMNS):
            return slice(0, shape[0]), slice(0, shape[1] // RANKS)
        return by_rows(name, shape)

    def of_box(box: Callable[[str, torch.Size], Box]) -> Callable[[str, torch.Size], Any]:
        return lambda name, shape: initial_value(name, shape, model, 1, box(name, shape))

    return {
        BEFORE: lambda name, shape: torch.empty(shape).normal_(0.0, 0.02),
        "all parameters": of_box(whole),
        "an eighth, by rows (FSDP)": of_box(by_rows),
        "an eighth, by rows and columns (tensor)": of_box(as_tensor_parallel),
    }


def _cost(make: Callable[[str, torch.Size], Any], shapes: Mapping[str, torch.Size]) -> tuple[float, int]:
    """Returns the processor's seconds of all shapes, and the largest growth of resident memory."""
    spent, peak = 0.0, 0
    for name, shape in shapes.items():
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or freed memory that is taken again would not count
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
        before, began = _resident("VmRSS"), time.process_time()
        make(name, shape)
        spent += time.process_time() - began
        peak = max(peak, _resident("VmHWM") - before)
    return spent, peak


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _row(way: str, seconds: Mapping[str, list[float]], peak: int) -> dict[str, Any]:
    ratios = [before / now for before, now in zip(seconds[BEFORE], seconds[way])]
    return {
        "way": way,
        "processor_seconds": round(statistics.median(seconds[way]), 2),
        "processor_seconds_range": [round(min(seconds[way]), 2), round(max(seconds[way]), 2)],
        "times_faster": round(statistics.median(ratios), 2),
        "times_faster_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "peak_bytes": peak,
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--to", type=Path, default=RESULTS, metavar="FILE", help="where the result is written"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
