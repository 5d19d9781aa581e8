"""Counts the start of a rank of 8 to 6,144: results/start_counts.json, and the table beside it in Markdown.

    python benchmarks/start/start_counts.py

Needs no GPU and about a minute. The recipe is lumi_140b_scaling: tensor 8 × pipeline 8 × data 1 to 96, and
on 8 ranks tensor 8 alone. Counted on the first two ranks, one in the middle and the last.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from counted_start import (
    NORMAL_NUMBERS_PER_SECOND,
    SECONDS_PER_PLANNED_PART,
    StartCounts,
    count_start,
    server_operations,
)

from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import imagined_text

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

RESULTS = Path(__file__).parents[1] / "results" / "start_counts.json"
PAGE = RESULTS.with_suffix(".md")
MARK = "start: written by benchmarks/start/start_counts.py"
SIZES = (8, 64, 512, 6144)


def job(size: int) -> Resolved:
    recipe = read_recipe("lumi_140b_scaling", ["layout.pipeline=1"] if size < 64 else []).recipe
    return resolve(recipe, "no_such_folder", size, "cuda", text=imagined_text(recipe))


def ranks_counted(size: int) -> tuple[int, ...]:
    return 0, 1, size // 2, size - 1


def count(size: int) -> list[StartCounts]:
    resolved = job(size)
    return [count_start(resolved, rank) for rank in ranks_counted(size)]


def table(found: dict[int, list[StartCounts]]) -> str:
    """Returns the table, of the most that one of the counted ranks has."""
    rows: dict[str, Callable[[list[StartCounts]], str]] = {
        "communicators of a rank: NCCL's": lambda of: str(max(len(one.communicators) for one in of)),
        "… and of two ranks, for a pipeline's messages": lambda of: str(max(one.pairs for one in of)),
        "ranks in the largest one": lambda of: f"{max(max(one.communicators) for one in of):,}",
        "sockets of NCCL's bootstrap": lambda of: str(max(one.nccl_sockets for one in of)),
        "sockets of the host group, ranks but 0": lambda of: f"{max(one.host_sockets for one in of[1:]):,}",
        "sockets of the host group, rank 0": lambda of: f"{of[0].host_sockets:,}",
        "store operations, ranks but 0": lambda of: f"{max(_operations(one) for one in of[1:]):,}",
        "store operations, rank 0": lambda of: f"{_operations(of[0]):,}",
        "store operations of all, divided by ranks": lambda of: f"{server_operations(of) / of[0].ranks:.0f}",
        "first weights that a rank owns, millions": lambda of: f"{_weights(of) / 1e6:,.0f}",
        "… seconds to draw them": lambda of: f"{_weights(of) / NORMAL_NUMBERS_PER_SECOND:,.1f}",
        "parts of tensors that a rank saves": lambda of: f"{max(one.parts for one in of):,}",
        "… of all ranks, which rank 0 plans": lambda of: f"{of[0].job_parts:,}",
        "… seconds of that plan": lambda of: f"{of[0].job_parts * SECONDS_PER_PLANNED_PART:,.1f}",
    }
    lines = [
        "| ranks | " + " | ".join(f"{size:,}" for size in found) + " |",
        "|---" + "|--:" * len(found) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(map(of, found.values())) + " |" for name, of in rows.items()]
    return "\n".join(lines)


def read() -> dict[int, list[StartCounts]]:
    """Returns the committed counts by number of ranks."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {
        int(size): [StartCounts(**one | {"communicators": tuple(one["communicators"])}) for one in rows]
        for size, rows in stored.items()
    }


def main() -> None:
    found = {size: count(size) for size in SIZES}
    stored = {str(size): [asdict(one) for one in of] for size, of in found.items()}
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    put_tables(PAGE, {MARK: table(found)})
    print(table(found))


def _operations(one: StartCounts) -> int:
    return sum(one.store_operations.values())


def _weights(of: list[StartCounts]) -> int:
    return max(one.weights for one in of)


if __name__ == "__main__":
    main()
