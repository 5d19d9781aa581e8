"""The memory of evaluating and verifying a large model in its own layout, beside its training.

    python benchmarks/evaluation/memory.py [RECIPE] [--ranks N] [--stages N ...] [--only WORK ...]

A rank of each pipeline stage is rehearsed: a training step, evaluation's forward passes over windows of text
and over questions of tasks, and parity's step of Kielo's side. The bytes that `kielo evaluate` and
`kielo verify parity` count before they load anything are beside them.

Ends with an error if evaluation or parity needs more than training, or more than was counted by `TOLERANCE`.
Writes results/evaluation_memory.json, and keeps what was not asked for.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch

from kielo.evaluate.score_on_ranks import bytes_of_scoring
from kielo.recipe.read import read_recipe, run_folder
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.text import imagined_text
from kielo.verify.parity_size import RanksOptions, bytes_of_sides
from kielo.verify.rehearse import rehearse
from kielo.verify.rehearse_scoring import PRECISIONS, evaluation_work

RESULT = Path(__file__).parents[1] / "results" / "evaluation_memory.json"
TOLERANCE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="estonian_llama31_70b")
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--card", default="mi250x_gcd")
    parser.add_argument("--stages", type=int, nargs="*", help="pipeline ranks; default: all")
    parser.add_argument("--only", nargs="*", help="of training, text, tasks, parity: as in the result")
    parser.add_argument("--parity-length", type=int, default=1024, help="tokens of parity's sequences")
    options = parser.parse_args()
    recipe = read_recipe(options.recipe).recipe
    resolved = resolve(
        recipe, run_folder(recipe), options.ranks, "cuda", options.card, text=imagined_text(recipe)
    )
    layout = resolved.placement.layout
    name = f"{options.recipe}, {options.ranks} × {options.card}"
    before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    counted = counted_bytes(resolved, options.parity_length)
    content = {
        "layout": {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "shard", "replicate")},
        "tokens": resolved.identity.longest_sequence_length,
        "tokens_of_parity": options.parity_length,
        "counted": counted,
    }
    rows: dict[str, dict[str, int]] = before.get(name, {}).get("stages", {})
    work = evaluation_work(resolved, options.parity_length)
    work = {"training": lambda rank: rehearse(resolved, rank)["needed_bytes"], **work}
    for stage in options.stages if options.stages is not None else range(layout.pipeline):
        row = rows.setdefault(str(stage), {})
        for what in options.only or work:
            row[what] = work[what](rank_of_stage(layout, stage))
            print(f"pipeline rank {stage}, {what}: {row[what] / 1e9:.2f} GB", flush=True)
            made = {"torch": torch.__version__, "date": date.today().isoformat(), "stages": rows}
            RESULT.write_text(json.dumps(before | {name: content | made}, indent=1) + "\n")
        refuse(row, counted)


def counted_bytes(resolved: Resolved, parity_length: int) -> dict[str, int]:
    found = {}
    for precision in PRECISIONS:
        for what, asks_tasks in (("text", False), ("tasks", True)):
            found[f"{what} in {precision}"] = bytes_of_scoring(
                resolved, resolved.placement.layout, precision, asks_tasks
            )
        options = RanksOptions(precision=precision, sequence_length=parity_length).fitting(resolved)
        sides = bytes_of_sides(resolved, options)
        found[f"parity in {precision}"] = sides["Kielo"]
        found[f"transformers' side of parity in {precision}"] = sides["transformers"]
    return found


def refuse(row: dict[str, int], counted: dict[str, int]) -> None:
    """Raise AssertionError if something needs more than the training, or more than was counted."""
    for what, size in row.items():
        assert size <= row.get("training", size), f"{what}: {size:,} bytes, training {row['training']:,}"
        assert size <= (1 + TOLERANCE) * counted.get(what, size), (what, size, counted[what])


if __name__ == "__main__":
    main()
