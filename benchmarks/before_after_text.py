"""Cleaning and packing of a run's text in two versions of Kielo, side by side.

    mkdir before && git archive COMMIT src | tar -x -C before
    python benchmarks/before_after_text.py before . runs/demo_estonian --pairs 10

Each version makes the corpus from the raw text of a finished run, and packs it with that run's tokenizer, in
processes of its own, from its own `src`. They take turns, every other round in the opposite order. A ratio
above 1 means that the second version is faster: the median over rounds of seconds of the processors (user and
system, workers included; for a byte of raw text, and for a token) with a 95 % bootstrap interval. Writes
results/before_after_text.json.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
_BOOTSTRAP, _SEED = 10_000, 1


def seconds_of(version: Path, run: Path, stage: str) -> float:
    """Returns the processors' seconds of one stage of the run, made anew."""
    shutil.rmtree(run / {"corpus": "corpus", "pack": "tokens"}[stage], ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(version.resolve() / "src"), "OMP_NUM_THREADS": "1"}
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "kielo", "run", str(run), "--only", stage], cwd=run.parent, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{version}: {stage}: {done.stderr}")
    after = os.times()
    return (after.children_user - before.children_user) + (after.children_system - before.children_system)


def workplace(above: Path, number: int, run: Path) -> Path:
    """A run folder with the raw text, the recipe and the tokenizer of `run`."""
    folder = above / str(number) / run.name
    folder.mkdir(parents=True)
    for name in ("raw", "tokenizer"):
        shutil.copytree(run / name, folder / name)
    text = (run / "recipe.toml").read_text(encoding="utf-8")
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    return folder


def per_unit(run: Path, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds for a megabyte of raw text, and for a million tokens."""
    tokens = json.loads((run / "tokens" / "manifest.json").read_text())["counts"]["sources"]
    raw = sum(path.stat().st_size for path in (run / "raw").rglob("*") if path.is_file())
    return {
        "corpus": seconds["corpus"] / raw * 1e6,
        "pack": seconds["pack"] / sum(of["tokens"] for of in tokens.values()) * 1e6,
    }


def interval(ratios: list[float]) -> list[float]:
    draws = np.random.default_rng(_SEED).choice(ratios, (_BOOTSTRAP, len(ratios)))
    return [round(float(bound), 4) for bound in np.percentile(np.median(draws, axis=1), (2.5, 97.5))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    versions = {"before": options.before, "after": options.after}
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: workplace(Path(folder), number, options.run) for number, name in enumerate(versions)}
        for pair in range(options.pairs + 1):
            row = {}
            for name in list(versions)[:: 1 if pair % 2 else -1]:
                seconds = {
                    stage: seconds_of(versions[name], runs[name], stage) for stage in ("corpus", "pack")
                }
                row[name] = per_unit(runs[name], seconds)
            if pair:  # the first one reads files and compiles bytecode
                rows.append(row)
                print(json.dumps(row))
    ratios = {
        stage: [row["before"][stage] / row["after"][stage] for row in rows] for stage in ("corpus", "pack")
    }
    found = {
        stage: {"ratio": round(float(np.median(of)), 4), "interval": interval(of)}
        for stage, of in ratios.items()
    }
    print(json.dumps(found))
    content = {
        "date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count(),
        "run": options.run.name, "pairs": rows, "ratios": found,
    }  # fmt: skip
    (RESULTS / "before_after_text.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
