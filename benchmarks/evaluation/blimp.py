"""BLiMP by paradigm and term: a trained model beside the same model without training.

    python benchmarks/evaluation/blimp.py RUN --pairs blimp.zip [--of-a-paradigm 1000]

RUN is a finished run of a decoder, such as demo_english. A model without training prefers the sentence with
fewer tokens, which is more often the good sentence, and pairs of one paradigm share their words. So it is far
from 50 % in many paradigms, but it guesses in determiner_noun_agreement. Ends with an error unless the
trained model beats chance by four standard errors in all pairs and in that term, and unless no untrained
model does so in that term. Writes results/blimp_cpu.json.
"""

import argparse
import json
import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.minimal_pairs import pair_likelihoods
from kielo.evaluate.pair_files import Pair, read_pairs
from kielo.models.blocks.decoder import init_weights
from kielo.resolve.resolved import read

RESULT = Path(__file__).parents[1] / "results" / "blimp_cpu.json"
TERM = "determiner_noun_agreement"
ERRORS = 4  # standard errors from chance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--of-a-paradigm", type=int, default=1000, help="pairs, from the first")
    parser.add_argument("--seeds", type=int, default=2, help="number of untrained models")
    options = parser.parse_args()
    pairs = first_of_each(read_pairs(options.pairs), options.of_a_paradigm)
    resolved = read(options.run / "resolved.toml")
    contender = load_checkpoint(newest_checkpoint(options.run), resolved, options.run / "tokenizer")
    nats, tokens = pair_likelihoods(contender, pairs)
    right = {"trained": nats[:, 0] > nats[:, 1]}
    for seed in range(1, options.seeds + 1):
        with torch.no_grad():
            init_weights(contender.module, seed)
        nats, _ = pair_likelihoods(contender, pairs)
        right[f"untrained, seed {seed}"] = nats[:, 0] > nats[:, 1]
    fewer = (1 + np.sign(tokens[:, 1] - tokens[:, 0])) / 2
    groups, terms = (np.array([getattr(pair, of) for pair in pairs]) for of in ("group", "term"))
    rows = {name: shares(right, fewer, groups == name) for name in sorted(set(groups))}
    of_terms = {name: shares(right, fewer, terms == name) for name in sorted(set(terms))}
    of_terms["all pairs"] = shares(right, fewer, np.ones(len(pairs), bool))
    show(rows | of_terms, list(right))
    refuse(of_terms)
    content = {
        "run": options.run.name,
        "pairs_of_a_paradigm": options.of_a_paradigm,
        "date": date.today().isoformat(),
    }
    RESULT.write_text(json.dumps(content | {"paradigms": rows, "terms": of_terms}, indent=1) + "\n")


def first_of_each(pairs: Sequence[Pair], most: int) -> list[Pair]:
    seen: dict[str, int] = {}
    found = []
    for pair in pairs:
        seen[pair.group] = seen.get(pair.group, 0) + 1
        if seen[pair.group] <= most:
            found.append(pair)
    return found


def shares(right: dict[str, np.ndarray], fewer: np.ndarray, which: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {"pairs": int(which.sum()), "fewer_tokens": round(float(fewer[which].mean()), 4)}
    for name, is_right in right.items():
        share = float(is_right[which].mean())
        error = math.sqrt(share * (1 - share) / found["pairs"])
        found[name] = {"share": round(share, 4), "standard_error": round(error, 4)}
    return found


def show(rows: dict[str, dict[str, Any]], models: Sequence[str]) -> None:
    print(f"{'paradigm':58}{'pairs':>7}{'fewer':>8}", *(f"{name:>18}" for name in models))
    for name, row in rows.items():
        cells = (
            f"{100 * row[of]['share']:10.1f} ± {100 * row[of]['standard_error']:3.1f} %" for of in models
        )
        print(f"{name:58}{row['pairs']:7,}{100 * row['fewer_tokens']:6.1f} %", *cells)


def refuse(rows: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError if training is not what beats chance."""
    for row in (rows["all pairs"], rows[TERM]):
        assert is_above_chance(row["trained"]), row
    untrained = (of for name, of in rows[TERM].items() if name.startswith("untrained"))
    assert not any(map(is_above_chance, untrained)), rows[TERM]


def is_above_chance(of: dict[str, float]) -> bool:
    return of["share"] >= 0.5 + ERRORS * of["standard_error"]


if __name__ == "__main__":
    main()
