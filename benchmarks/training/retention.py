"""Learning and forgetting: an English model continued in Estonian, with and without English replay.

    python benchmarks/training/retention.py --to /tmp/retention [--tokens 614400] [--base runs/demo_english]

`demo_english` trains the base model, unless --base names its finished run. Two continuations follow, as
demo_new_language: of Estonian alone, and with 30 % English from the base model's own training text. Both are
scored on English documents that the base model never saw. `kielo evaluate --watch --once` scores the base
model and all checkpoints. Every figure comes from the scores in its history: bits per byte of both languages,
and drift, the share of the model's own text that is in other languages than Estonian (--texts continuations;
0 measures none). Writes results/retention_cpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from kielo.artifact.score_history import ScoredCheckpoint, comparable, read_history

RESULTS = Path(__file__).parents[1] / "results"
RECIPE = """
extends = "demo_estonian"
name = "{name}"

[[corpus.sources]]
name = "estonian"
debian_package = "libreoffice-help-et"
max_documents = 20000
{replay}
[model]
weights = "hf:{base}/hf"
transplant = "mean"

[train]
learning_rate = 2e-3
warmup_share = 0.05
tokens = {tokens}

[checkpoint]
every_steps = 50
keep_every_steps = 50

[[evaluate.texts]]
name = "unseen_english"
path = "{base}/tokens/heldout.jsonl.zst"
language = "en"
"""
REPLAY = """
[[corpus.sources]]
name = "english"
path = "{base}/corpus/documents"
language = "en"

[dataset]
mixture = {{ estonian = 0.7, english = 0.3 }}
"""


def kielo(folder: Path, *words: str) -> None:
    print("kielo", *words, flush=True)
    subprocess.run([sys.executable, "-m", "kielo", *words], cwd=folder, check=True)


def train(folder: Path, name: str, replay: str, base: Path, options: argparse.Namespace) -> Path:
    recipe = folder / f"{name}.toml"
    replay = replay.format(base=base)
    recipe.write_text(RECIPE.format(name=name, replay=replay, base=base, tokens=options.tokens))
    sets = [word for one in options.sets for word in ("--set", one)]
    kielo(folder, "run", str(recipe), "--to", "train", *sets)
    kielo(folder, "evaluate", f"runs/{name}", "--watch", "--once")
    kielo(folder, "report", f"runs/{name}")
    return folder / "runs" / name


def figures(rows: list[ScoredCheckpoint]) -> dict[str, dict[str, Any]]:
    """Returns the first row's figures (the base model's) and the last checkpoint's, by set."""
    found: dict[str, dict[str, Any]] = {}
    for when, row in (("base", rows[0]), ("first", rows[1]), ("last", rows[-1])):
        assert row.scores is not None and row.is_base == (when == "base")
        bits = {one.name: round(one.bits_per_byte, 4) for one in row.scores.sets}
        bits.setdefault("estonian", round(row.scores.bits_per_byte.model, 4))
        of = found[when] = {"tokens": row.tokens, "bits_per_byte": bits}
        if fluency := row.scores.fluency:
            shares = {code: round(share, 4) for code, share in fluency.languages.items()}
            of |= {"drift": round(1 - shares.get("et", 0.0), 4), "writes": shares}
            of["repeated"] = round(fluency.repeated, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--tokens", type=int, default=614_400)
    parser.add_argument("--base", type=Path, help="finished run of demo_english")
    parser.add_argument("--texts", type=int, default=20, help="continuations in which drift is measured")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="for both continuations")
    options = parser.parse_args()
    options.sets = [f"evaluate.fluency_texts={options.texts}", *options.sets]
    folder = options.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = (options.base or folder / "runs" / "demo_english").resolve()
    if options.base is None:
        kielo(folder, "run", "demo_english", "--to", "export")
    runs = {"without_replay": "", "with_replay": REPLAY}
    results = {}
    for name, replay in runs.items():
        run = train(folder, name, replay, base, options)
        results[name] = figures(comparable(read_history(run)))
        print(json.dumps(results[name], indent=1), flush=True)
    kielo(folder, "report", *(f"runs/{name}" for name in runs))
    show(results)
    refuse(results)
    content = {"tokens": options.tokens, "date": date.today().isoformat(), "processors": os.cpu_count()}
    (RESULTS / "retention_cpu.json").write_text(json.dumps(content | {"runs": results}, indent=1) + "\n")


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print a line for each run and time: bits per byte of both languages, and drift."""
    print(f"{'run':16}{'tokens':>10}{'Estonian':>10}{'English':>10}{'drift':>9}{'repeated':>10}")
    for name, times in results.items():
        for of in times.values():
            bits = of["bits_per_byte"]
            line = f"{name:16}{of['tokens']:10,}{bits['estonian']:10.3f}{bits['unseen_english']:10.3f}"
            drift = f"{100 * of['drift']:7.1f} %{100 * of['repeated']:8.1f} %" if "drift" in of else ""
            print(f"{line}{drift}", flush=True)


def refuse(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Raise AssertionError if Estonian does not fall, English does not rise, or drift does not fall."""
    for name, of in results.items():
        base, last = of["base"], of["last"]
        before, after = base["bits_per_byte"], last["bits_per_byte"]
        assert after["estonian"] < before["estonian"], f"{name}: Estonian does not fall"
        assert after["unseen_english"] > before["unseen_english"], f"{name}: English does not rise"
        assert "drift" not in base or last["drift"] < base["drift"], f"{name}: drift does not fall"
    english = [of["last"]["bits_per_byte"]["unseen_english"] for of in results.values()]
    assert english[1] < english[0], "replay did not keep more English"
    print("Estonian and drift fall in both runs. English rises, and less with replay")


if __name__ == "__main__":
    main()
