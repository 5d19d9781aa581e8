"""Accuracy of a card made from one run, for other shapes and layouts of the same machine.

    python benchmarks/planner/planner_measured.py  # about six minutes on two cores that do nothing else
    python benchmarks/planner/planner_measured.py --keep DIR  # keeps runs in DIR, does not train them again

One run of Kielo, whose phases differ in sequence length, micro-batch and micro-batches, is what `kielo plan
calibrate` gets. Then others are trained, of other hidden sizes, layers, vocabularies and layouts, and their
median seconds a step are laid beside what `kielo.plan` predicts with the card. All run on two ranks of one
thread each: a rank that has both cores to itself is another device. Tokens are random numbers, so nothing is
downloaded. Steps during which other processes took more than a tenth of the cores do not count; a run with
too few steps left is trained again. Writes results/planner_measured_cpu.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from planned_beside_measured import Comparison, compare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kielo.artifact.manifest import write_stage
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShardWriter
from kielo.plan.calibrate import Machine, measure, read_machine, write_machine
from kielo.recipe.errors import KieloError

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

RESULTS = Path(__file__).parents[1] / "results" / "planner_measured_cpu.json"
RANKS, WORDS, DOCUMENTS, TOKENS_A_DOCUMENT = 2, 512, 4000, 1000
MOST_OTHERS = 0.1  # share of the cores during a step
ENOUGH = 6  # steps of each kind, beyond those that `measure` takes for warm-up


@dataclass(frozen=True)
class StepKind:
    """A phase: `steps` of `micro_batches` times `micro_batch` sequences of `length` tokens on a data rank."""

    length: int
    micro_batch: int
    micro_batches: int
    steps: int


@dataclass(frozen=True)
class Training:
    """`model`: keys of [model]; `layout`: of [layout], what is left of the ranks is shard."""

    name: str
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    step_kinds: Sequence[StepKind]

    @property
    def data_ranks(self) -> int:
        return RANKS // int(np.prod([self.layout.get(axis, 1) for axis in ("tensor", "pipeline", "context")]))


def _model(hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip


# Every kind of step twice, some minutes apart: a machine that others share is not the same machine a minute
# later.
MEASURING = Training("measuring", _model(256, 4, 4, 4, 4096), {}, 2 * [
    StepKind(256, 1, 1, 40), StepKind(256, 1, 4, 22), StepKind(1024, 1, 1, 20), StepKind(64, 1, 8, 24),
    StepKind(256, 4, 1, 22),
])  # fmt: skip
OTHERS = [
    Training("deeper and narrower", _model(128, 8, 4, 2, 2048), {}, [StepKind(256, 2, 2, 28)]),
    Training("wider, two micro-batches", _model(512, 3, 8, 4, 2048), {}, [StepKind(256, 1, 2, 25)]),
    Training("large vocabulary", _model(192, 4, 3, 3, 12288), {}, [StepKind(512, 1, 2, 25)]),
    Training("recompute full", _model(320, 4, 5, 5, 4096), {"recompute": "full"}, [StepKind(256, 2, 2, 16)]),
    Training("pipeline 2", _model(320, 6, 5, 5, 2048), {"pipeline": 2}, [StepKind(256, 1, 8, 18)]),
    Training("tensor 2", _model(512, 4, 8, 8, 4096), {"tensor": 2}, [StepKind(512, 2, 1, 18)]),
    Training("zero 3", _model(384, 4, 6, 6, 4096), {"zero": 3}, [StepKind(512, 2, 1, 18)]),
]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        text = _text(folder / "text")
        runs = {
            training.name: _trained(training, folder, text, options.trials)
            for training in (MEASURING, *OTHERS)
        }
        card = folder / "my_machine.toml"
        write_machine(measure([runs[MEASURING.name]["metrics"]]), card)
        machine = read_machine(card)
        rows = [_row(training, runs[training.name], machine) for training in (MEASURING, *OTHERS)]
    result = {
        "date": date.today().isoformat(), "machine": machine(), "ranks": RANKS,
        "threads_per_rank": (os.cpu_count() or 1) // RANKS,
        "versions": {name: version(name) for name in ("kielo", "torch", "numpy")},
        "card": {"peak_tflops": machine.accelerator.peak_tflops,
                 "memory_gb_per_second": machine.accelerator.memory_bandwidth_tb_per_second * 1e3,
                 "link_gb_per_second": machine.accelerator.link_gb_per_second, "interval": machine.spread},
        "worst_error_of_others": max(
            (abs(kind["error"]) for row in rows[1:] for kind in row["step_kinds"]), default=None
        ),
        "runs": rows,
    }  # fmt: skip
    print(_report(result))
    Path(options.to).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.to}")


def _row(training: Training, run: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    step_kinds = [
        {"sequence_length": found.sequence_length, "micro_batch": found.micro_batch,
            "micro_batches": found.micro_batches,
         "measured_seconds": round(found.measured_seconds, 5),
         "planned_seconds": round(found.planned_seconds, 5),
         "error": round(found.planned_seconds / found.measured_seconds - 1, 4),
         "parts": {name: round(part, 5) for name, part in found.parts.items()}}
        for found in _compared(machine, run["metrics"])
    ]  # fmt: skip
    return {
        "name": training.name, "model": dict(training.model),
        "layout": dict(training.layout) or {"shard": RANKS},
        "disturbed_share": round(run["disturbed"], 3), "step_kinds": step_kinds,
    }  # fmt: skip


def _compared(machine: Machine, metrics: Path) -> list[Comparison]:
    """Compares a run with the card; nothing if others left too few steps undisturbed."""
    try:
        return compare(machine, metrics)
    except KieloError as error:
        print(error, file=sys.stderr)
        return []


def _trained(training: Training, folder: Path, text: Path, trials: int) -> dict[str, Any]:
    """Returns {"metrics": file of undisturbed steps, "disturbed": share of steps} of the best trial."""
    kept = folder / training.name.replace(" ", "_").replace(",", "")
    for trial in range(trials):
        if (kept / "steps.json").is_file() and _fewest(kept, training) >= ENOUGH:
            break
        attempt = folder / f"{kept.name}_{trial}"
        shutil.rmtree(attempt, ignore_errors=True)
        _train(training, attempt, text)
        print(
            f"{training.name}: {_disturbed(attempt):.0%} of the steps were disturbed",
            file=sys.stderr,
            flush=True,
        )
        if not (kept / "steps.json").is_file() or _fewest(attempt, training) > _fewest(kept, training):
            shutil.rmtree(kept, ignore_errors=True)
            attempt.rename(kept)
    return {"metrics": kept / "train" / METRICS_NAME, "disturbed": _disturbed(kept)}


def _fewest(folder: Path, training: Training) -> int:
    """Returns the undisturbed steps of the kind that has fewest, without its first two."""
    rows = of_kind(read_metrics(folder / "train" / METRICS_NAME), TrainingStep)
    ends = np.cumsum([kind.steps for kind in training.step_kinds])
    firsts = ends - [kind.steps for kind in training.step_kinds] + 1
    steps = [row.step for row in rows]
    return min(
        sum(first + 2 <= step <= end for step in steps) for first, end in zip(firsts.tolist(), ends.tolist())
    )


def _disturbed(folder: Path) -> float:
    steps = json.loads((folder / "steps.json").read_text())
    return steps["disturbed"] / steps["all"]


def _train(training: Training, folder: Path, text: Path) -> None:
    """Runs `kielo train --ranks 2` on the text's tokens; removes disturbed rows from its metrics.jsonl."""
    folder.mkdir(parents=True)
    for part in ("tokens", "tokenizer"):
        (folder / part).symlink_to(text / part)
    recipe, metrics = folder / "recipe.toml", folder / "train" / METRICS_NAME
    recipe.write_text(_recipe(training, folder), encoding="utf-8")
    command = [sys.executable, "-m", "kielo", "train", str(recipe), "--ranks", str(RANKS)]
    with (
        open(folder / "output.txt", "w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        watch = Watch(metrics, process.pid)
        watch.start()
    watch.end.set()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{training.name}: {(folder / 'output.txt').read_text()[-4000:]}")
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    quiet = [line for number, line in enumerate(lines) if watch.others_share(number) <= MOST_OTHERS]
    metrics.write_text("".join(quiet), encoding="utf-8")
    (folder / "steps.json").write_text(json.dumps({"all": len(lines), "disturbed": len(lines) - len(quiet)}))
    shutil.rmtree(folder / "train" / "checkpoints", ignore_errors=True)


class Watch(threading.Thread):
    """Record of the cores' use at each row of a metrics file: by all processes, and under `process`."""

    def __init__(self, metrics: Path, process: int) -> None:
        super().__init__()
        self._metrics, self._process, self.end = metrics, process, threading.Event()
        # rows that are there, wall clock, busy and own seconds
        self._marks: list[tuple[int, float, float, float]] = []

    def run(self) -> None:
        size, ranks = 0, []
        while not self.end.wait(0.02):
            now = self._metrics.stat().st_size if self._metrics.is_file() else 0
            if now > size:
                size, ranks = now, ranks or _under(self._process)
                rows = self._metrics.read_bytes().count(b"\n")
                self._marks.append((rows, time.monotonic(), _busy_seconds(), sum(map(_own_seconds, ranks))))

    def others_share(self, row: int) -> float:
        """Returns the others' share of the cores before `row` (from 0) since the last; 1 if unknown."""
        pairs = [
            (before, mark) for before, mark in zip(self._marks, self._marks[1:]) if before[0] <= row < mark[0]
        ]
        if not pairs:
            return 1.0
        wall, busy, own = (after - before for before, after in zip(pairs[0][0][1:], pairs[0][1][1:]))
        return max(0.0, busy - own) / wall / (os.cpu_count() or 1)


def _recipe(training: Training, folder: Path) -> str:
    longest = max(kind.length for kind in training.step_kinds)
    tables = {
        "[[corpus.sources]]": {"name": "numbers", "path": "none.txt"},
        "[tokenizer]": {"vocab_size": WORDS},
        "[dataset]": {"sequence_length": longest, "max_epochs": 1000},
        "[model]": training.model,
        "[layout]": training.layout,
        "[train]": {"precision": "fp32", "log_every_steps": 1, "heldout_every_steps": 10**6,
            "heldout_sequences": 2,
                    "tensorboard": False, "learning_rate": 1e-4},
        "[checkpoint]": {"every_steps": 10**6, "keep_newest": 2},
    }  # fmt: skip
    lines = [
        f'name = "{folder.name}"',
        'language = "et"',
        'cluster = "laptop"',
        f"folder = {json.dumps(str(folder))}",
    ]
    for name, keys in tables.items():
        lines += [name, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    for kind in training.step_kinds:
        tokens = kind.length * kind.micro_batch * kind.micro_batches * training.data_ranks
        lines += [
            "[[phases]]",
            f"tokens = {tokens * kind.steps}",
            f"tokens_per_step = {tokens}",
            # fmt: skip
            f"sequence_length = {kind.length}",
            f"micro_batch_sequences = {kind.micro_batch}",
        ]
    return "\n".join(lines) + "\n"


def _text(folder: Path) -> Path:
    """Writes packed random tokens and a tokenizer with so many words."""
    if (folder / "tokenizer" / "tokenizer.json").is_file():
        return folder
    generator = np.random.default_rng(1)
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        counts = {}
        for name, documents in (("numbers", DOCUMENTS), ("heldout", 40)):
            with TokenShardWriter(stage.folder / name, WORDS) as writer:
                for _ in range(documents):
                    writer.add(np.append(generator.integers(1, WORDS, TOKENS_A_DOCUMENT - 1), 0))
            counts[name] = {"tokens": documents * TOKENS_A_DOCUMENT, "documents": documents, "bytes": 1}
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})
    (folder / "tokenizer").mkdir(exist_ok=True)
    words = {"<|endoftext|>": 0} | {f"word{number}": number for number in range(1, WORDS)}
    Tokenizer(WordLevel(words, unk_token="word1")).save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder.absolute()


def _busy_seconds() -> float:
    """Returns seconds of all cores since the machine started, by all processes."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def _own_seconds(process: int) -> float:
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _under(process: int) -> list[int]:
    """Returns the process and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found


def _report(result: Mapping[str, Any]) -> str:
    lines = [
        f"{'run':28}{'sequence':>9}{'micro-batch':>13}{'measured':>11}{'planned':>11}{'error':>8}{'disturbed':>11}"
    ]
    for row in result["runs"]:
        for kind in row["step_kinds"]:
            size = f"{kind['micro_batches']} × {kind['micro_batch']}"
            lines.append(
                f"{row['name']:28}{kind['sequence_length']:>9}{size:>13}{kind['measured_seconds']:>9.3f} "
                f"s{kind['planned_seconds']:>9.3f} "
                f"s{kind['error']:>8.1%}{row['disturbed_share']:>11.0%}"
            )
        if not row["step_kinds"]:
            lines.append(f"{row['name']:28} too few undisturbed steps")
    return "\n".join([*lines, f"largest error of the others: {_percent(result['worst_error_of_others'])}"])


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", help="folder for the runs; default: one that is deleted at the end")
    parser.add_argument("--to", default=str(RESULTS), help="file of the result")
    parser.add_argument("--trials", type=int, default=3, help="of a run that others disturb")
    return parser.parse_args()


if __name__ == "__main__":
    main()
