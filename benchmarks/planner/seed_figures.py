"""Device-hours of published projects: as they say, as planned in their layouts, and by Kielo's best layout.

    python benchmarks/planner/seed_figures.py  # writes docs/device_hours.md and results/seed_figures.json

`seed_runs.csv` has the layouts, with what was assumed. A project's hours are those that it says, or follow
from the speed that it says. The difference to Kielo's best is a sum: what the plan of the project's own
layout does not explain, and steps from that plan to Kielo's, one after the other: recomputation, kernels
(with the engine's constants), pipeline, other traffic and shapes. One thread; no randomness.
"""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from published_runs import PublishedRun, read_published_runs

from kielo.cli.ideas import STAND_INS
from kielo.plan.choose_layout import own
from kielo.plan.cost import cost
from kielo.plan.efficiency import Efficiency, fitted
from kielo.plan.failures import rate_of
from kielo.plan.planned_layout import PlannedLayout, workload
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload
from kielo.recipe.read import read_recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("seed_runs.csv")
RESULT = ROOT / "benchmarks" / "results" / "seed_figures.json"
PAGE = ROOT / "docs" / "device_hours.md"
# Lost without loader processes, by four of them, on LUMI (spyysalo/lumi-llm-scaling, table of num-workers).
STALLS = 1 - 22.1 / 22.8
_RECOMPUTATION = ("layers_again", "attention_again", "operators_again", "norms_again", "activations_again")
_KERNELS = (
    *("engine", "kernel", "unfused_loss", "unfused_norms", "whole_logits", "whole_gradients"),
    *("apart_accumulation", "deterministic", "weight_bytes", "gradient_bytes", "optimiser_bytes", "dropout"),
    *("compute_bytes", "gathered_bytes", "reduce_bytes", "update_traffic_bytes", "update_flops"),
)
_PIPELINE = ("bubble", "pipeline_traffic")
_PARTS = ("recomputation", "kernels", "pipeline", "shapes", "starts and saves")
_MODULE, _GCD, _GPU = "module-hours (2 GCDs)", "GCD-hours", "GPU-hours"


@dataclass(frozen=True)
class Seed:
    """A project: rows of the table, what it says, and Kielo's run in the same shape."""

    title: str
    rows: tuple[str, ...]
    tokens: tuple[float, ...]
    recipes: tuple[tuple[str | None, tuple[str, ...]], ...]  # shipped recipe or None, keys
    says: str  # in words
    unit: str
    layout: str = "published"  # or assumed
    hours: float = 0.0  # in `unit`; 0: by `tflops`
    tflops: float = 0.0  # TFLOP/s of a device
    is_printed: bool = False  # TFLOP/s as Megatron-DeepSpeed prints them, 12 hidden² a layer
    times: int = 1  # runs
    is_bound: bool = False  # the project says "less than"


def _shape(**keys: Any) -> tuple[None, tuple[str, ...]]:
    """Returns keys of a recipe without a file: `model_type`, `layers`, ..., and keys of [train]."""
    names = {
        "model_type": "model.model_type", "hidden": "model.hidden_size", "ffn": "model.intermediate_size",
        "layers": "model.num_hidden_layers", "heads": "model.num_attention_heads",
        "kv_heads": "model.num_key_value_heads", "vocabulary": "tokenizer.vocab_size",
        "sequence": "dataset.sequence_length", "tokens": "train.tokens", "step": "train.tokens_per_step",
    }  # fmt: skip
    sets = [f"{names[key]}={json.dumps(value)}" for key, value in keys.items()]
    return None, (*sets, 'cluster="lumi_g"', "dataset.max_epochs=1000")


def _fingpt(layers: int, hidden: int, heads: int, sequences: int) -> tuple[None, tuple[str, ...]]:
    return _shape(
        model_type="bloom", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocabulary=131_072,
        sequence=2048, tokens=300_000_000_000, step=2048 * sequences,
    )  # fmt: skip


_BLUUMI = _shape(
    model_type="bloom", layers=70, hidden=14336, heads=112, ffn=57344, vocabulary=250_880, sequence=2048,
    tokens=40_000_000_000, step=2_097_152,
)  # fmt: skip
_OF_70B = _shape(
    model_type="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128_000,
    sequence=4096, tokens=4_000_000_000_000, step=6_291_456,
)  # fmt: skip
_OF_100B = _shape(
    model_type="bloom", layers=80, hidden=10240, heads=80, ffn=40960, vocabulary=128_000, sequence=4096,
    tokens=4_000_000_000_000, step=6_291_456,
)  # fmt: skip
_DATAMIX = _shape(
    model_type="llama", layers=24, hidden=2048, heads=32, kv_heads=32, ffn=5440, vocabulary=262_144,
    sequence=2048, tokens=4_000_000_000_000, step=4_194_304,
)  # fmt: skip
_LTG = ("ltg_bert_base", ("phases=[]", "dataset.sequence_length=128", "train.tokens=131_072_000_000"))
_140B = ("lumi_140b_scaling", ())
_172B = ("llmjp_172b", ())
SEEDS = (
    Seed("Poro 34B, 1T tokens, 128 nodes (001)", ("poro-34b",), (1e12,), (("poro_34b", ()),),
         "~900k GPU-hours", _MODULE, hours=900_000),
    Seed("70B, 4T tokens, 256 nodes (001, an estimate)", ("lumi-70b",), (4e12,), (_OF_70B,),
         "~8M GPU-hours", _MODULE, "assumed", hours=8e6),
    Seed("100B, 4T tokens, 256 nodes (001, an estimate)", ("lumi-100b",), (4e12,), (_OF_100B,),
         "8M+ GPU-hours", _MODULE, "assumed", hours=8e6),
    Seed("FinGPT's seven sizes, 300B tokens each, with BLUUMI, 40B (001)",
         ("fingpt-186m", "fingpt-437m", "fingpt-881m", "fingpt-1.5b", "fingpt-2.8b", "fingpt-7.5b",
          "fingpt-13b", "bluumi-176b"), (3e11,) * 7 + (4e10,),
         (_fingpt(12, 768, 12, 256), _fingpt(24, 1024, 16, 256), _fingpt(24, 1536, 16, 256),
          _fingpt(24, 2064, 24, 512), _fingpt(32, 2560, 32, 512), _fingpt(32, 4096, 32, 1024),
          _fingpt(40, 5120, 40, 1024), _BLUUMI),
         "< 1M GPU-hours", _MODULE, "assumed", hours=1e6, is_bound=True),
    Seed("NorMistral 7B, 260B tokens, 64 nodes (001)", ("normistral-7b",), (2.6e11,), (("norwegian_7b", ()),),
         "< 7 days on 512 GCDs", _GCD, "assumed", hours=7 * 24 * 512, is_bound=True),
    Seed("LTG-BERT, 131B tokens, 16 nodes (001)", ("ltg-bert",), (131_072_000_000,), (_LTG,),
         "6 h on 128 GPUs", _GCD, hours=768),
    Seed("75 BERTs (001)", ("ltg-bert",), (131_072_000_000,), (_LTG,), "75 × 6 h on 128 GPUs", _GCD,
         hours=57_600, times=75),
    Seed("LLM-jp 172B, 2.07T tokens, 512 H100, BF16 (003)", ("llmjp-172b-bf16",), (2_072_490_541_056,),
         (_172B,), "400 TFLOP/s", _GPU, tflops=400),
    Seed("LLM-jp 172B, the same in FP8 (003)", ("llmjp-172b-fp8",), (2_072_490_541_056,),
         ((_172B[0], ('train.precision="fp8"',)),), "545 to 553 TFLOP/s", _GPU, tflops=549),
    Seed("140B, 100 steps, 48 nodes (004)", ("lumi-140b-48",), (393_216_000,), (_140B,),
         "161.2 TFLOP/s a module", _MODULE, tflops=80.6, is_printed=True),
    Seed("140B, 100 steps, 768 nodes (004)", ("lumi-140b-768",), (393_216_000,), (_140B,),
         "80 % of it", _MODULE, tflops=64.5, is_printed=True),
    Seed("OpenEuroLLM 2.15B, 4T tokens, 64 nodes, read as modules", ("datamix-2b",), (4e12,), (_DATAMIX,),
         "~165,000 GPU-hours", _MODULE, "assumed", hours=165_000),
    Seed("the same, read as GCDs", ("datamix-2b",), (4e12,), (_DATAMIX,),
         "~165,000 GPU-hours", _GCD, "assumed", hours=165_000),
)  # fmt: skip


def main() -> None:
    runs = {run.name.split("#")[0]: run for run in read_published_runs(TABLE)}
    recipes = {row: recipe for seed in SEEDS for row, recipe in zip(seed.rows, seed.recipes, strict=True)}
    best = {row: _best(row, runs[row], *recipe) for row, recipe in recipes.items()}
    found = [figures(seed, runs, best) for seed in SEEDS]
    RESULT.write_text(json.dumps({"best": best, "seeds": found}, indent=1) + "\n", encoding="utf-8")
    put_tables(PAGE, tables(found))
    print(PAGE.read_text(encoding="utf-8"))


def _best(row: str, run: PublishedRun, recipe: str | None, sets: tuple[str, ...]) -> dict[str, Any]:
    """Returns Kielo's fastest layout on the same nodes, with its cost and the columns of its step."""
    nodes = int(Workload.of([run.columns]).devices[0]) // 8
    to_plan = _to_plan(run, recipe, sets)
    # The search tries at most eight sequences a micro-batch. An encoder's own layout has more.
    several = [*search(to_plan, [nodes]).ranked[nodes], own(to_plan, nodes)]
    fitting = [one for one in several if isinstance(one, PlannedLayout) and one.fits]
    planned = min(fitting, key=lambda one: one.step_seconds)
    whole, failing = cost(planned), cost(planned, rate=rate_of(None, planned.run.site))
    work = workload(planned.run, [(planned.layout, planned.micro_batch, planned.phase)])
    columns = {field.name: float(getattr(work, field.name)[0]) for field in fields(work)}
    print(f"{row}: {planned.name}", file=sys.stderr)
    return {
        "layout": planned.name, "nodes": nodes, "columns": columns,
        "device_hours": whole.device_hours,
        "step_hours": whole.training_seconds * planned.devices / 3600,
        "lost_to_failures": failing.device_hours - whole.device_hours,
    }  # fmt: skip


def _to_plan(run: PublishedRun, recipe: str | None, sets: tuple[str, ...]) -> RunToPlan:
    """Returns the run to plan, on the network of the published run."""
    found = RunToPlan.of_recipe(read_recipe(recipe, [*sets], STAND_INS).recipe)
    node = Workload.of([run.columns])
    gbit = float(node.network_bandwidth[0] * node.node_devices[0]) * 8 / 1e9
    return replace(found, site=found.site.model_copy(update={"network_gbit_per_second_per_node": gbit}))


def figures(seed: Seed, runs: dict[str, PublishedRun], best: dict[str, Any]) -> dict[str, Any]:
    """Returns hours of a seed in its unit: what it says, as planned, Kielo's, and the parts between."""
    scale = seed.times / (2 if seed.unit == _MODULE else 1)
    sums: dict[str, float] = {}
    for row, tokens in zip(seed.rows, seed.tokens, strict=True):
        for name, hours in _hours_of_row(seed, row, tokens, runs[row], best[row]).items():
            sums[name] = sums.get(name, 0.0) + hours * scale
    said = sums["said"] if seed.tflops else seed.hours
    lost = {"failures": sums["failures"], "data stalls": STALLS * sums["planned"]}
    return {
        "title": seed.title, "says": seed.says, "unit": seed.unit, "layout": seed.layout, "said": said,
        "is_bound": seed.is_bound, "is_speed": bool(seed.tflops), "planned": sums["planned"],
        "best": sums["best"], "layouts": [best[row]["layout"] for row in seed.rows],
        "parts": {name: sums[name] for name in _PARTS}, "lost": lost,
        "open": said - sums["planned"] - (0 if seed.tflops else sum(lost.values())),
    }  # fmt: skip


def _hours_of_row(
    seed: Seed, row: str, tokens: float, run: PublishedRun, mine: dict[str, Any]
) -> dict[str, float]:
    """Returns device-hours of one run: by speed as said, as planned, Kielo's, and each of `_PARTS`."""
    theirs = Workload.of([run.columns | {"causal": float(row != "ltg-bert")}])
    ours, efficiency = Workload.of([mine["columns"]]), fitted()[0]
    changed, chain = (), [theirs]
    for names in (_RECOMPUTATION, _KERNELS):
        changed += names
        chain.append(replace(theirs, **{name: getattr(ours, name) for name in changed}))
    planned, wide, plain, last = (_hours(work, efficiency, tokens) for work in (*chain, ours))
    pipeline = sum(plain[part] - last[part] for part in _PIPELINE)
    best = mine["step_hours" if seed.tflops else "device_hours"]
    return {
        "said": _hours_by_tflops(seed, theirs, tokens) if seed.tflops else 0.0,
        "planned": planned["total"], "best": best, "failures": mine["lost_to_failures"],
        "recomputation": planned["total"] - wide["total"], "kernels": wide["total"] - plain["total"],
        "pipeline": pipeline, "shapes": plain["total"] - last["total"] - pipeline,
        "starts and saves": last["total"] - best,
    }  # fmt: skip


def _hours(work: Workload, efficiency: Efficiency, tokens: float) -> dict[str, float]:
    """Returns device-hours of each part of all steps, and their "total"."""
    seconds = step_seconds(work, efficiency)
    hours = tokens / float((work.tokens_per_step / work.devices)[0]) / 3600  # of a second a step
    parts = {field.name: float(getattr(seconds, field.name)[0]) * hours for field in fields(seconds)}
    return parts | {"total": sum(parts.values())}


def _hours_by_tflops(seed: Seed, work: Workload, tokens: float) -> float:
    weights = float((work.layers * work.layer_parameters + work.vocabulary * work.hidden)[0])
    scores = float((work.layers * work.heads * work.head_dim * work.sequence)[0])
    flops = 6 * weights + 12 * scores
    if seed.is_printed:
        of_layers = 72 * work.layers * work.hidden**2 * (1 + work.sequence / (6 * work.hidden))
        flops = float((of_layers + 4.5 * work.vocabulary * work.hidden)[0])
    return tokens * flops / (seed.tflops * 1e12) / 3600


def tables(found: list[dict[str, Any]]) -> dict[str, str]:
    """Returns Markdown: hours of each project, and what the difference to Kielo's best is made of."""
    hours = [
        "| project (seed) | says | unit | says, hours | planned as published | Kielo's best | says / best |"
    ]
    hours += ["|---|---|---|--:|--:|--:|--:|"]
    parts = [
        "| project (seed) | not explained | failures (assumed) | data stalls (measured elsewhere) | "
        "recomputation | kernels | pipeline | traffic and shapes | starts and saves (assumed) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        sign = "< " if row["is_bound"] else ""
        layout = "" if row["layout"] == "published" else " (layout assumed)"
        ratio = row["said"] / row["best"]
        hours.append(
            f"| {row['title']} | {row['says']} | {row['unit']} | {sign}{_number(row['said'])} | "
            f"{_number(row['planned'])}{layout} | {_number(row['best'])} | {sign}{ratio:.2f} |"
        )
        lost = [_number(row["lost"][name]) for name in ("failures", "data stalls")]
        lost = ["–", "–"] if row["is_speed"] else lost
        cells = [sign + _signed(row["open"]), *lost, *(_signed(row["parts"][name]) for name in _PARTS)]
        parts.append(f"| {row['title']} | " + " | ".join(cells) + " |")
    best = ["| project (seed) | layout of Kielo's best |", "|---|---|"]
    best += [f"| {row['title']} | {', '.join(f'`{name}`' for name in row['layouts'])} |" for row in found]
    return {"hours": "\n".join(hours), "parts": "\n".join(parts), "best": "\n".join(best)}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 10_000 else f"{round(value, -2):,.0f}"


def _signed(value: float) -> str:
    return ("−" if round(value) < 0 else "+") + _number(abs(value))


if __name__ == "__main__":
    main()
