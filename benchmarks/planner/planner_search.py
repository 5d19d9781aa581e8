"""Speed of the planner's search, and errors of its closed forms against the simulated pipelines.

    python benchmarks/planner/planner_search.py  # one core; writes results/planner_search_cpu.json

Three figures: seconds for 10,000 layouts of one run (bar: 2 s on one core) with the best 50 simulated; how
far their closed forms are from the clock (bar: 2 %); and seconds of the whole command `kielo plan` as a user
types it (bar: 1 s), which must not load torch. Each time is the median of five.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from pipeline_closed_forms import closed_form_seconds

from kielo.models.families import complete
from kielo.plan.pipeline_simulation import simulated_seconds
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.read import read_recipe

RUNS = {
    "estonian_llama31_70b on LUMI-G, 128 nodes": ("estonian_llama31_70b", [], [128]),
    "estonian_llama31_70b on LUMI-G, 4 to 256 nodes": (
        "estonian_llama31_70b",
        [],
        [4, 8, 16, 32, 64, 128, 256],
    ),
    "llmjp_172b on H100, 64 nodes": ("llmjp_172b", ['cluster="dgx_h100"'], [64]),
    "lumi_140b_scaling on LUMI-G, 48 and 768 nodes": ("lumi_140b_scaling", [], [48, 768]),
}
COMMANDS = (
    "estonian_llama31_70b --nodes 64",
    "estonian_llama31_70b --nodes 4..256",
    "compare estonian_llama31_70b tp8pp4 tp8pp8 --nodes 16",
    "explain estonian_llama31_70b tp8pp4 --nodes 16",
)
RESULTS = Path(__file__).resolve().parents[1] / "results" / "planner_search_cpu.json"
TIMES = 5


def main() -> None:
    found = {
        "searches": [searched(name, *run) for name, run in RUNS.items()],
        "commands": [typed(arguments) for arguments in COMMANDS],
    }
    for row in found["searches"]:
        print(
            f"{row['run']}: {row['layouts']:,} layouts in {row['seconds']:.2f} s "
            f"({row['seconds_per_10000']:.2f} s for 10,000), {row['simulated']} simulated, "
            f"{row['within_two_per_cent']:.0%} of closed forms within 2 %, all within "
            f"{row['largest_difference']:.2%}"
        )
    for row in found["commands"]:
        print(f"kielo plan {row['arguments']}: {row['seconds']:.2f} s, torch loaded: {row['loads_torch']}")
    machine = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    RESULTS.write_text(json.dumps(machine | found, indent=1) + "\n", encoding="utf-8")


def searched(name: str, recipe_name: str, sets: list[str], nodes: list[int]) -> dict:
    recipe = read_recipe(recipe_name, sets).recipe
    run = RunToPlan.of(recipe, complete(recipe.model, recipe.dataset.sequence_length))
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        found = search(run, nodes)
        seconds.append(time.perf_counter() - begin)
    differences = [
        abs(closed_form_seconds(*clock) / simulated_seconds(*clock) - 1)
        for ranked in found.ranked.values()
        for planned in ranked
        if planned.stages
        for clock in [
            (planned.layout.pipeline_schedule, planned.stages, planned.layout.pipeline, planned.micro_batches)
        ]
    ]
    middle = statistics.median(seconds)
    return {
        "run": name, "layouts": found.looked_at, "seconds": middle,
        "seconds_per_10000": middle / found.looked_at * 1e4,
        "simulated": sum(map(len, found.ranked.values())),
        "largest_difference": max(differences, default=0.0),
        "within_two_per_cent": sum(difference <= 0.02 for difference in differences) / max(1,
            len(differences)),
    }  # fmt: skip


def typed(arguments: str) -> dict:
    """Times the command in a fresh process, then runs it once more to see if torch is among its modules."""
    command = [sys.executable, "-m", "kielo", "plan", *arguments.split()]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(TIMES + 1):  # the first compiles
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        seconds.append(time.perf_counter() - begin)
    seconds = seconds[1:]
    call = f"main({['plan', *arguments.split()]!r})"
    probe = f"import sys; from kielo.cli.main import main; {call}; print('torch' in sys.modules)"
    last = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True
    ).stdout.splitlines()[-1]
    return {"arguments": arguments, "seconds": statistics.median(seconds), "loads_torch": last == "True"}


if __name__ == "__main__":
    main()
