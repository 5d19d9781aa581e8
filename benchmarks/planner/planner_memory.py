"""Accuracy of the planner's memory formulas for Kielo's own training, against `kielo rehearse`.

    python benchmarks/planner/planner_memory.py  # 35 layouts of small models with wide layers, and a table
    python benchmarks/planner/planner_memory.py --long  # also the shipped 70B on 4 and on 2 LUMI nodes

Writes results/planner_memory.json; --json prints it. Both sides count tensors alone, with a processor's
attention (`workload_row(on_processor=True)`, `MemoryBytes.peak("rehearsed")`). Of a pipeline the first
and the last rank are rehearsed and the higher peak counts. One thread; zero-bubble schedules vary by some per
cent.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kielo.plan.workload import Workload, workload_row
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.read import read_recipe
from kielo.resolve.memory import MemoryBytes, memory_bytes
from kielo.resolve.memory_row import StepSize, TrainOptions
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.state_bytes import state_bytes
from kielo.resolve.text import imagined_text
from kielo.verify.rehearse import heaviest_phase, rehearse

RESULTS = Path(__file__).parents[1] / "results" / "planner_memory.json"
_SMALL = {
    "model.vocab_size": 32000, "model.hidden_size": 4096, "model.intermediate_size": 11008,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 32, "model.num_key_value_heads": 8, "model.tie_word_embeddings": "false",
    "dataset.sequence_length": 2048, "train.micro_batch_sequences": 1, "train.precision": "bf16",
}  # fmt: skip
_GPT2 = "model.model_type=gpt2 model.num_key_value_heads=32 model.intermediate_size=16384"
# (ranks, micro-batches, overrides): the keys without their section where that is layout's.
CASES = [
    (1, 2, ""),
    (1, 1, ""),
    (8, 4, ""),
    (8, 4, "zero=2"),
    (8, 2, "zero=3"),
    (8, 1, "zero=3"),
    (16, 2, "zero=3 recompute=full model.vocab_size=4096 model.num_hidden_layers=6"),
    (16, 2, "zero=2 recompute=full model.vocab_size=4096 model.num_hidden_layers=6"),
    (1, 3, "train.precision=fp32"),
    (2, 3, "zero=2 train.precision=fp32 recompute=attention"),
    (8, 3, "tensor=8"),
    (8, 1, "tensor=8"),
    (8, 3, "tensor=4 zero=3"),
    (8, 3, "tensor=8 sequence_parallel=false recompute=full"),
    (4, 4, "tensor=4 model.tie_word_embeddings=true"),
    (16, 4, "tensor=8 zero=3 recompute=operators dataset.sequence_length=8192"),
    (8, 2, "tensor=2 zero=2 recompute=full recompute_every_layers=2 dataset.sequence_length=4096"),
    (8, 4, "replicate=4 shard=2 train.micro_batch_sequences=2 recompute=attention"),
    (
        8,
        4,
        f"tensor=4 recompute=operators train.micro_batch_sequences=2 dataset.sequence_length=1024 {_GPT2}",
    ),
    (8, 4, f"model.tie_word_embeddings=true {_GPT2}"),
    (4, 2, "model.model_type=qwen3 model.num_key_value_heads=4 tensor=2 train.micro_batch_sequences=2"),
    (2, 2, "context=2 dataset.sequence_length=4096"),
    (4, 2, "context=2 context_attention=ulysses dataset.sequence_length=8192 zero=3"),
    (8, 8, "pipeline=4 zero=3 model.num_hidden_layers=16"),
    (4, 8, "pipeline=4 model.num_hidden_layers=10 recompute=full model.tie_word_embeddings=true"),
    (4, 4, "pipeline=4 train.precision=fp32 model.num_hidden_layers=8 recompute=full"),
    (
        16,
        8,
        "tensor=8 pipeline=2 dataset.sequence_length=4096 model.num_hidden_layers=8 model.vocab_size=128256",
    ),
    (
        16,
        8,
        "tensor=4 pipeline=2 zero=3 recompute=full dataset.sequence_length=8192 model.num_hidden_layers=8",
    ),
    (4, 4, "pipeline=4 pipeline_schedule=gpipe model.num_hidden_layers=8 recompute=full"),
    (
        4,
        8,
        "pipeline=2 tensor=2 pipeline_schedule=interleaved_1f1b model.num_hidden_layers=8 "
        "recompute=operators",
    ),
    (
        16,
        6,
        "pipeline=2 tensor=4 zero=3 pipeline_schedule=interleaved_1f1b pipeline_stages_per_rank=5 "
        "recompute=norms+activations model.num_hidden_layers=20 model.vocab_size=4096",
    ),
    (
        8,
        10,
        "pipeline=4 tensor=2 pipeline_schedule=interleaved_1f1b recompute=norms+activations "
        "model.num_hidden_layers=9 model.model_type=bloom model.num_key_value_heads=32 "
        "model.intermediate_size=16384",
    ),
    (4, 8, "pipeline=2 tensor=2 pipeline_schedule=interleaved_zero_bubble model.num_hidden_layers=8"),
    (8, 8, "pipeline=2 tensor=4 zero=2 pipeline_schedule=zbv model.num_hidden_layers=8"),
    (4, 8, "pipeline=2 tensor=2 pipeline_schedule=dualpipev model.num_hidden_layers=8"),
]
# (nodes, overrides) of estonian_llama31_70b: one sequence a micro-batch, as many of them as pipeline ranks.
LONG = [(4, "recompute=full"), (4, "recompute=none"), (2, "pipeline=2 recompute=full")]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    started = time.monotonic()
    rows = [
        _row(f"{ranks} ranks, {many} micro-batches: {more}", small(ranks, many, more))
        for ranks, many, more in CASES
    ]
    if options.long:
        rows += [
            _row(f"70B, {nodes} nodes: {overrides}", _seventy(nodes, overrides)) for nodes, overrides in LONG
        ]
    errors = [abs(row["error"]) for row in rows]
    result = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(), "processor_cores": os.cpu_count(),
        "seconds": round(time.monotonic() - started, 1), "configurations": len(rows),
        "median_absolute_error": statistics.median(errors), "largest_absolute_error": max(errors),
        "largest_static_error": max(abs(row["static_error"]) for row in rows), "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if options.json else text(result))


def text(result: dict[str, Any]) -> str:
    """Returns the table for people, in GB of 10^9 bytes."""
    width = max(len(row["configuration"]) for row in result["rows"])
    lines = [f"{'configuration':{width}} {'rehearsed':>10} {'planned':>9} {'error':>7} {'static':>7}"]
    for row in result["rows"]:
        lines.append(
            f"{row['configuration']:{width}} {row['rehearsed'] / 1e9:10.2f} {row['planned'] / 1e9:9.2f} "
            f"{row['error']:+7.1%} {row['static_error']:+7.2%}"
        )
    lines.append(
        f"{result['configurations']} configurations: median error {result['median_absolute_error']:.1%}, "
        f"largest {result['largest_absolute_error']:.1%}; static within "
        f"{result['largest_static_error']:.2%}; {result['seconds']} s"
    )
    return "\n".join(lines)


def planned_bytes(resolved: Resolved, on_processor: bool = True) -> MemoryBytes:
    """Returns the planner's bytes of a resolved recipe, for the phase that a rehearsal takes."""
    identity, placement = resolved.identity, resolved.placement
    index = heaviest_phase(resolved)
    phase = placement.phases[index]
    row = workload_row(
        identity.model, placement.layout, accelerator("mi250x_gcd"), cluster("lumi_g"),
        StepSize(
            identity.phases[index].sequence_length, phase.micro_batch_sequences, phase.micro_batches_per_step
        ),
        TrainOptions(identity.train.precision, loss_chunk_tokens=placement.train.loss_chunk_tokens),
        on_processor,
    )  # fmt: skip
    return memory_bytes(Workload.of([row]))


def _row(name: str, resolved: Resolved) -> dict[str, Any]:
    layout = resolved.placement.layout
    ranks = sorted({0, rank_of_stage(layout, layout.pipeline - 1)}) if layout.pipeline > 1 else [0]
    rehearsals = [rehearse(resolved, rank) for rank in ranks]
    highest = max(rehearsals, key=lambda rehearsal: rehearsal["peak_bytes"])
    # Of two ranks with nearly the same peak the planner may name the other.
    states = [state_bytes(resolved.identity.model, layout, rank).total for rank in ranks]
    planned = planned_bytes(resolved)
    peak, static = float(planned.peak("rehearsed")[0]), float(planned.static[0])
    return {
        "configuration": name, "rehearsed": highest["peak_bytes"], "planned": peak,
        "error": peak / highest["peak_bytes"] - 1,
        "static_error": min((static / state - 1 for state in states), key=abs),
        "rehearsed_kinds": highest["peaks"][highest["peak_phase"]]["kinds"],
        "planned_parts": {part: float(column[0]) for part, column in vars(planned).items()},
        "planned_reserved_on_gpu": float(planned_bytes(resolved, on_processor=False).peak("reserved")[0]),
    }  # fmt: skip


def small(ranks: int, micro_batches: int, overrides: str) -> Resolved:
    said = _SMALL | _said(overrides)
    split = (
        int(said.get("layout.tensor", 1))
        * int(said.get("layout.pipeline", 1))
        * int(said.get("layout.context", 1))
    )
    rows = int(said["train.micro_batch_sequences"]) * ranks // split * micro_batches
    return _resolved(
        "demo_estonian", said | {"train.tokens_per_step": int(said["dataset.sequence_length"]) * rows}, ranks
    )


def _seventy(nodes: int, overrides: str) -> Resolved:
    sets = {"layout.pipeline": 4, "layout.shard": 1} | _said(overrides)
    sets["train.tokens_per_step"] = 4096 * int(sets["layout.pipeline"])
    return _resolved("estonian_llama31_70b", sets, 8 * nodes)


def _said(overrides: str) -> dict[str, str]:
    pairs = (word.split("=") for word in overrides.split())
    return {key if "." in key else f"layout.{key}": value for key, value in pairs}


def _resolved(name: str, sets: dict[str, Any], ranks: int) -> Resolved:
    recipe = read_recipe(name, [f"{key}={value}" for key, value in sets.items()]).recipe
    return resolve(recipe, "no_such_folder", ranks, "cpu", text=imagined_text(recipe))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument("--long", action="store_true", help="the shipped 70B recipe too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
