"""Convergence of FP8 against bf16: real text in bf16, in FP8, with the head too, and with a change to FP8.

    python benchmarks/training/fp8_convergence.py --shape small --tokens runs/demo_estonian  # CPU: minutes
    python benchmarks/training/fp8_convergence.py --shape llama_1b --tokens runs/demo_estonian  # FP8 on a GPU
    python benchmarks/training/fp8_convergence.py ... --seconds-limit 500  # the same command resumes
    python benchmarks/training/fp8_convergence.py ... --run bf16  # this run alone; figures after three

--tokens: a run folder with finished `tokens` and `tokenizer` stages (`kielo run RECIPE --to pack` makes one),
or its `tokens`. The vocabulary is that of the tokens: of the named shape only the body is as it is called.
Runs are Kielo's own training, a process each, with rows under --folder and checkpoints under --scratch; a run
that is finished is not trained again, one that was stopped resumes from its checkpoint.

Bars: held-out and training loss (mean of the last ten steps) of FP8 within 0.3 % of bf16's, without the head
and (`train.fp8.head`) with it, and of both the cosine of FP8's and bf16's gradients of the same batch at
least 0.99 at the start, the middle and the end; after the change no ten steps' mean loss more than 2 % above
that of the same steps in bf16. To benchmarks/results/fp8_convergence_SHAPE_DEVICE.json.
"""

import argparse
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import installed_versions, write_json_atomically
from kielo.artifact.metrics import (
    METRICS_NAME,
    Fp8GradientProbe,
    HeldOutLoss,
    PrecisionVerdict,
    Row,
    TrainingStep,
    of_kind,
    read_metrics,
)
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import text_of_run

RESULTS = Path(__file__).resolve().parents[1] / "results"
RUNS = ("bf16", "fp8", "fp8_head", "bf16_to_fp8")
_IN_FP8 = ("fp8", "fp8_head")  # from the first step on
LOSS_BAR, COSINE_BAR, SPIKE_BAR = 0.003, 0.99, 0.02
WINDOW = 10  # steps whose mean loss is one figure


@dataclass(frozen=True)
class Shape:
    device: str
    model: dict[str, Any]
    sequence_length: int
    tokens_per_step: int
    steps: int
    learning_rate: float
    train: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    # Llama-3.2-1B's layers (Meta 2024, the published config.json).
    "llama_1b": Shape(
        "cuda",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True},
        2048, 16_384, 500, 3e-4, {"micro_batch_sequences": 8},
    ),
    "small": Shape(
        "cpu",
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32},
        256, 1024, 300, 2e-3, {"micro_batch_sequences": 4},
    ),
}  # fmt: skip


def main() -> int:
    options = _options()
    shape = SHAPES[options.shape]
    tokens = options.tokens.parent if options.tokens.name == "tokens" else options.tokens
    folder = options.folder or Path("runs") / f"fp8_convergence_{options.shape}"
    scratch = options.scratch or folder
    steps = options.steps or shape.steps
    if options.only:
        return _train(_resolved(options.shape, tokens, scratch, options.only, steps), folder / options.only)
    until = time.monotonic() + options.seconds_limit
    for name in [options.run] if options.run else RUNS:
        done = folder / name / METRICS_NAME
        if not done.exists() and not _run_apart(name, options, folder, until):
            print(f"{name}: stopped before its end; the same command goes on with it", flush=True)
            return 75
    there = [name for name in RUNS if (folder / name / METRICS_NAME).exists()]
    missing = [name for name in RUNS if name not in (*there, "fp8_head")]
    if missing:
        print(f"{options.run}: finished; figures are made once there are {', '.join(missing)}", flush=True)
        return 0
    rows = {name: read_metrics(folder / name / METRICS_NAME) for name in there}
    figures = measure(rows, steps)
    resolved = _resolved(options.shape, tokens, scratch, "bf16", steps)
    trained = sum(resolved.identity.phases[0].mixture.values())
    document = {
        "date": date.today().isoformat(), "versions": installed_versions(), "machine": _machine(shape.device),
        "shape": options.shape, "model": resolved.identity.model.model_dump(mode="json", exclude_none=True),
        "parameters": resolved.placement.parameters, "steps": steps, "tokens_per_step": shape.tokens_per_step,
        "epochs": round(steps * shape.tokens_per_step / trained, 1), "is_emulated": shape.device == "cpu",
        **figures,
        "rows": {name: [row.model_dump(exclude_unset=True) for row in of] for name, of in rows.items()},
    }  # fmt: skip
    write_json_atomically(options.to / f"fp8_convergence_{options.shape}_{shape.device}.json", document)
    _print(document)
    return 0 if all(bar["passed"] for bar in figures["bars"]) else 1


def measure(rows: dict[str, list[Row]], steps: int) -> dict[str, Any]:
    """Returns the figures of the bars, and the bars.

    rows: run → rows of its metrics.jsonl; of RUNS "fp8_head" may be missing.
    """
    in_fp8 = [name for name in _IN_FP8 if name in rows]
    losses = {name: {row.step: row.loss for row in of_kind(of, TrainingStep)} for name, of in rows.items()}
    heldout = {name: of_kind(of, HeldOutLoss)[-1].heldout_loss for name, of in rows.items()}
    last = {name: _mean(of, steps - WINDOW + 1) for name, of in losses.items()}
    cosines = {
        name: {row.step: row.fp8_gradient_cosine for row in of_kind(rows[name], Fp8GradientProbe)}
        for name in in_fp8
    }
    change = _change(steps)
    plain, changed = losses["bf16"], losses["bf16_to_fp8"]
    rises = {
        first: _mean(changed, first) / _mean(plain, first) - 1 for first in range(change, steps - WINDOW + 2)
    }
    at = max(rises, key=rises.get)
    before = max(abs(changed[step] / plain[step] - 1) for step in range(1, change))
    differences = {
        f"{what} of {name}": values[name] / values["bf16"] - 1
        for what, values in (("held-out loss", heldout), ("training loss", last))
        for name in rows if name != "bf16"
    }  # fmt: skip
    return {
        "heldout_loss": heldout, "training_loss": last, "differences": differences, "cosines": cosines,
        "change_at_step": change, "largest_rise": rises[at], "largest_rise_at_step": at,
        "largest_difference_before_the_change": before,
        "outcomes": [row.model_dump() for row in of_kind(rows["bf16_to_fp8"], PrecisionVerdict)],
        "bars": [
            *(bar for name in in_fp8 for bar in _bars_of(name, differences, cosines[name], steps)),
            {"name": "rise after the change", "value": rises[at], "bar": SPIKE_BAR,
                "passed": rises[at] <= SPIKE_BAR},
        ],
    }  # fmt: skip


def _bars_of(
    name: str, differences: dict[str, float], cosines: dict[int, float], steps: int
) -> list[dict[str, Any]]:
    """Returns the bars of a run that is in FP8 from its first step on."""
    worst = max(abs(differences[f"{what} of {name}"]) for what in ("held-out loss", "training loss"))
    lowest = min(cosines[step] for step in (1, steps // 2, steps))
    return [
        {"name": f"loss of {name} by bf16's", "value": worst, "bar": LOSS_BAR, "passed": worst <= LOSS_BAR},
        {"name": f"lowest cosine of gradients of {name}", "value": lowest, "bar": COSINE_BAR,
            "passed": lowest >= COSINE_BAR},
    ]  # fmt: skip


def _mean(losses: dict[int, float], first: int) -> float:
    return sum(losses[step] for step in range(first, first + WINDOW)) / WINDOW


def _change(steps: int) -> int:
    return steps // 2 + 1


def _recipe(name: str, run: str, steps: int) -> Recipe:
    shape = SHAPES[name]
    changes = [[_change(steps), "fp8"]] if run == "bf16_to_fp8" else []
    return Recipe(
        name=f"fp8_convergence_{name}",
        language="en",
        corpus={"sources": ["the text that was packed"]},
        # As often as it takes: what is compared is precision, not what is learned.
        dataset={"sequence_length": shape.sequence_length, "max_epochs": 1e6},
        model=shape.model,
        train={
            "tokens": steps * shape.tokens_per_step, "tokens_per_step": shape.tokens_per_step,
            "learning_rate": shape.learning_rate, "warmup_share": 0.1, "log_every_steps": 1,
            "heldout_every_steps": steps,
            "precision": "fp8" if run in _IN_FP8 else "bf16", "precision_changes": changes,
            "tensorboard": False,
            "fp8": {"emulate": shape.device == "cpu", "probe_every_steps": steps // 2,
                    "head": run == "fp8_head"},
        } | shape.train,
        checkpoint={"every_steps": steps, "keep_newest": 2},
    )  # fmt: skip


def _resolved(name: str, tokens: Path, folder: Path, run: str, steps: int) -> Resolved:
    recipe = _recipe(name, run, steps)
    resolved = resolve(recipe, tokens, 1, SHAPES[name].device, text=text_of_run(recipe, tokens))
    placement = resolved.placement.model_copy(update={"train_folder": str(folder / run / "train")})
    return resolved.model_copy(update={"placement": placement})


def _run_apart(name: str, options: argparse.Namespace, folder: Path, until: float) -> bool:
    """Trains it in a process of its own, which is asked to save and stop in time; True if it is finished."""
    left = until - time.monotonic() - options.grace_seconds
    if left <= 0:
        return False
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--only", name])
    try:
        code = process.wait(None if left == float("inf") else left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code not in (0, 75):
        raise SystemExit(f"{name}: the training process ended with {code}")
    return code == 0


def _train(resolved: Resolved, kept: Path) -> int:
    """Trains like `kielo train`, then keeps only the rows, in the folder `kept`.

    Three checkpoints of a billion parameters would take too much disk.
    """
    from kielo.ranks.process_settings import settings_of_device, settle_allocator
    from kielo.train.run import train  # torch is not needed by the process that waits

    if resolved.placement.device == "cuda":
        settle_allocator(settings_of_device())
    folder = Path(resolved.placement.train_folder)
    answer = train(resolved)
    if answer.outcome == "finished":
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / METRICS_NAME, kept / METRICS_NAME)
        shutil.rmtree(folder / "checkpoints")
    return answer.exit_code


def _machine(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name()


def _print(document: dict[str, Any]) -> None:
    print(
        f"{document['shape']} with the vocabulary of its tokens ({document['model']['vocab_size']:,}), "
        f"{document['parameters']:,} parameters, {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens ({document['epochs']} epochs), on "
        f"{document['machine']}{', FP8 emulated' * document['is_emulated']}"
    )
    for name, loss in document["heldout_loss"].items():
        print(f"{name}: held-out loss {loss:.5f}, last {WINDOW} steps {document['training_loss'][name]:.5f}")
    for name, cosines in document["cosines"].items():
        by_step = ", ".join(f"{step}: {cosine:.5f}" for step, cosine in cosines.items())
        print(f"cosines of {name} by step: {by_step}")
    for row in document["outcomes"]:
        print(f"change to {row['precision']} after step {row['step']}: {row['outcome']}")
    for bar in document["bars"]:
        print(
            f"bar: {bar['name']} {bar['value']:.5f} (bar {bar['bar']}): "
            f"{'passed' if bar['passed'] else 'FAILED'}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="run folder with finished tokens and tokenizer"
    )
    parser.add_argument("--folder", type=Path, help="default: runs/fp8_convergence_SHAPE")
    parser.add_argument("--scratch", type=Path, help="folder of checkpoints; default: --folder")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--run", choices=RUNS, help="train this run alone")
    parser.add_argument("--steps", type=int, help="default: the shape's")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"))
    parser.add_argument(
        "--grace-seconds", type=float, default=60, help="of them, to save in after a run is asked to stop"
    )
    parser.add_argument("--only", choices=RUNS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
