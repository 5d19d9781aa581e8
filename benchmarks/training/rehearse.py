"""Benchmark of rehearsals: their seconds, and a table of what fits.

`python benchmarks/training/rehearse.py` writes results/rehearse_cpu.json, and a table in results/rehearse.md.

Each runs in a process of its own through the command line; seconds are wall and processor time of the whole
command. `--only bars` or `--only fit` runs a part and `--only 500B` the bars that begin so; other figures
stay as they are.
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

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

RESULTS = Path(__file__).parents[1] / "results" / "rehearse_cpu.json"
PAGE = RESULTS.with_name("rehearse.md")
# Seed 004 says 500B and no more; these dimensions make 506 billion parameters.
_500B = [
    "model.hidden_size=20480", "model.intermediate_size=55296", "model.num_hidden_layers=116",
    "model.num_attention_heads=160", "model.num_key_value_heads=16", "model.vocab_size=131072",
    "dataset.sequence_length=4096",
    "layout.recompute=full",
]  # fmt: skip
BARS: dict[str, list[str]] = {
    "Llama-3.1-70B, TP8 × PP4, 32 ranks": ["estonian_llama31_70b", "--nodes", "4"],
    "140B, TP8 × PP8, 6,144 ranks": ["lumi_140b_scaling", "--nodes", "768"],
    "LLM-jp-172B, TP4 × PP16, 512 ranks": ["llmjp_172b", "--ranks", "512"],
    # 23,824 = 2⁴ × 1,489, a prime number: with TP8 all of LUMI leaves no other pipeline than 2. Steps of 12.2
    # M tokens.
    "500B, TP8 × PP2, 23,824 ranks, all of LUMI-G": [
        "lumi_140b_scaling", "--nodes", "2978", "--set", "layout.pipeline=2", "--set", "layout.zero=3",
        "--set", f"train.tokens_per_step={4096 * 1489 * 2}",
    ],
    "500B, TP8 × PP16, 23,808 ranks, LUMI-G without two nodes": [
        "lumi_140b_scaling", "--nodes", "2976", "--set", "layout.pipeline=16",
        "--set", f"train.tokens_per_step={4096 * 186 * 16}",
    ],
}  # fmt: skip
LIMIT_SECONDS, LIMIT_BYTES = 120, 8e9
# (nodes, pipeline, sequence length, recomputation); rank 0 has the most micro-batches under way.
FIT = [
    (2, 2, 4096, "full"), (4, 4, 4096, "full"), (4, 4, 4096, "attention"), (4, 4, 4096, "none"),
    (4, 4, 8192, "full"),
    (4, 4, 8192, "none"), (4, 4, 16384, "full"), (4, 4, 32768, "full"),
]  # fmt: skip


def rehearsed(arguments: list[str]) -> dict[str, Any]:
    """Returns the figures of one `kielo rehearse`, with the seconds of its process."""
    with tempfile.TemporaryFile("w+") as out:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kielo", "rehearse", *arguments, "--json"], stdout=out
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        if status:
            raise SystemExit(f"kielo rehearse {' '.join(arguments)} failed")
        out.seek(0)
        rehearsals = json.load(out)
    return {
        "command": "kielo rehearse " + " ".join(arguments),
        "seconds": round(seconds, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "rehearsals": rehearsals,
    }


def bar(name: str, arguments: list[str]) -> dict[str, Any]:
    sets = [word for key in _500B for word in ("--set", key)] if name.startswith("500B") else []
    row = rehearsed([*arguments, *sets])
    exact = all(entry["state_bytes"] == entry["computed_state_bytes"] for entry in row["rehearsals"])
    row["passed"] = row["seconds"] < LIMIT_SECONDS and row["max_rss_bytes"] < LIMIT_BYTES and exact
    print(
        f"{name}: {row['seconds']} s ({row['processor_seconds']} s of a processor), "
        # fmt: skip
        f"{row['max_rss_bytes'] / 1e9:.2f} GB, exact {exact}, passed {row['passed']}",
        flush=True,
    )
    return row


def fit(nodes: int, pipeline: int, sequence_length: int, recompute: str) -> dict[str, Any]:
    arguments = ["estonian_llama31_70b", "--nodes", str(nodes)]
    for key in (
        f"layout.pipeline={pipeline}",
        "layout.shard=1",
        f"layout.recompute={recompute}",
        # fmt: skip
        f"dataset.sequence_length={sequence_length}",
        f"train.tokens_per_step={sequence_length * pipeline}",
    ):
        arguments += ["--set", key]
    row = rehearsed(arguments)
    (entry,) = row.pop("rehearsals")
    row |= {
        key: entry[key]
        for key in ("peak_bytes", "needed_bytes", "usable_bytes", "fits", "peak_phase", "state_bytes")
    }
    row |= {"nodes": nodes, "sequence_length": sequence_length, "recompute": recompute}
    left = (entry["memory_bytes"] - entry["peak_bytes"]) / 1e9
    print(
        f"{nodes} nodes, {sequence_length}, {recompute}: {entry['peak_bytes'] / 1e9:.1f} GB, {left:+.1f} GB "
        "left",
        flush=True,
    )
    return row


def bars_table(bars: dict[str, dict[str, Any]]) -> str:
    lines = ["| job | seconds | of a processor | resident, GB |", "|---|--:|--:|--:|"]
    for name, row in bars.items():
        resident = row["max_rss_bytes"] / 1e9
        lines.append(f"| {name} | {row['seconds']:.1f} | {row['processor_seconds']:.1f} | {resident:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PART", default="")
    only = parser.parse_args().only
    result = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    result |= {"machine": platform.processor() or platform.machine(), "processor_cores": os.cpu_count()}
    if only != "fit":
        chosen = {
            name: arguments
            for name, arguments in BARS.items()
            if only in ("", "bars") or name.startswith(only)
        }
        result["bars"] = result.get("bars", {}) | {
            name: bar(name, arguments) for name, arguments in chosen.items()
        }
    if only in ("", "fit"):
        result["fit_70b"] = [fit(*case) for case in FIT]
    put_tables(PAGE, {"bars": bars_table(result["bars"])})
    RESULTS.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
