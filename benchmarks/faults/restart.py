"""Benchmark of a restart: a rank of 8 is killed; seconds until the ranks have ended, and until the next step.

    python benchmarks/faults/restart.py  # 8 gloo ranks, rank 5 is killed, then rank 0
    python benchmarks/faults/restart.py --ranks 2 --victims 1

A small run is trained by `kielo train --ranks N` once undisturbed, and once for each victim, which gets
SIGKILL in the step after a checkpoint. All times are of this process, as it reads the run's output: `killed`
is 0, `ended` the line that says that the ranks are started again, `next_step` the first step's line after it.
The weights and moments at the end must have the bits of the undisturbed run. The bar is 30 s from the kill to
the next step. Writes results/restart.json.
"""

import argparse
import json
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from kielo.checkpoint.read_checkpoint import read_tensors

BAR_SECONDS = 30.0
STEPS, SAVED_EVERY, KILLED_AFTER = 30, 5, 11
LIMIT_SECONDS = 900.0
AGAIN = "The ranks are restarted"
RECIPE = f"""
name = "restart"
language = "et"
folder = "run"

[corpus]
sources = "text.txt"
workers = 1
line_language_threshold = 0.0
document_language_threshold = 0.0

[tokenizer]
vocab_size = 320

[dataset]
sequence_length = 32
heldout_share = 0.2
max_epochs = 1000

[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2

[train]
tokens = {STEPS * 512}
tokens_per_step = 512
precision = "fp32"
heldout_every_steps = {STEPS}
log_every_steps = 1
tensorboard = false

[checkpoint]
every_steps = {SAVED_EVERY}
"""
WORDS = ["kevad", "tuul", "meri", "õhtu", "valge", "lumi", "laul", "mets", "tee", "sõna", "kodu", "aeg"]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "packed"
        pack(packed)
        whole = _copy(packed, "undisturbed")
        _, step_seconds, _ = _train(whole, options.ranks, None)
        cases = [_case(packed, whole, options.ranks, victim, step_seconds) for victim in options.victims]
    result = {
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(options.load, 1),
        },
        "versions": {name: version(name) for name in ("kielo", "torch")},
        "ranks": options.ranks,
        "undisturbed_step_seconds": round(step_seconds, 2),
        "bar_seconds": BAR_SECONDS,
        "cases": cases,
        "passed": all(
            case["next_step_seconds"] <= BAR_SECONDS and case["has_the_same_bits"] for case in cases
        ),
    }
    path = Path(options.to) / "restart.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if options.json else f"{_table(result)}\nwritten to {path}")


def _case(packed: Path, whole: Path, ranks: int, victim: int, step_seconds: float) -> dict:
    """Returns the times of one run of which a rank was killed, and whether its end has the same bits."""
    folder = _copy(packed, f"killed_{victim}")
    times, _, steps = _train(folder, ranks, victim)
    return {
        "victim": victim,
        "killed_after_step": KILLED_AFTER,
        "ended_seconds": round(times["ended"] - times["killed"], 2),
        "next_step_seconds": round(times["next_step"] - times["killed"], 2),
        "restart_seconds": round(times["next_step"] - times["ended"] - step_seconds, 2),
        "steps_lost": KILLED_AFTER - steps + 1,
        "has_the_same_bits": _same_bits(whole, folder),
    }


def _train(folder: Path, ranks: int, victim: int | None) -> tuple[dict[str, float], float, int]:
    """Trains to the end. Returns the times, the median seconds of a step, and the first step after a restart.

    Kills the rank `victim` once the line of step `KILLED_AFTER` is read, if one is given.
    """
    times: dict[str, float] = {}
    step_times: dict[int, float] = {}
    first_again = 0
    with _started(folder, ranks) as (process, lines):
        for at, line in _until_end(lines):
            step = _step_of(line)
            if AGAIN in line:
                times["ended"] = at
            elif step is not None and "ended" in times:
                if "next_step" not in times:
                    times["next_step"], first_again = at, step
            elif step is not None:
                step_times[step] = at
                if victim is not None and step == KILLED_AFTER:
                    times["killed"] = time.monotonic()
                    os.kill(_rank_process(process.pid, victim), signal.SIGKILL)
    if process.returncode != 0 or (victim is not None and "next_step" not in times):
        raise SystemExit(f"kielo train ended with {process.returncode}, after {sorted(times)}")
    seconds = [step_times[step] - step_times[step - 1] for step in step_times if step - 1 in step_times]
    return times, statistics.median(seconds), first_again


@contextmanager
def _started(folder: Path, ranks: int) -> Iterator[tuple[subprocess.Popen, queue.Queue]]:
    """Starts the training; gives it and a queue of (time, line) of both its streams, None at the end."""
    command = [sys.executable, "-m", "kielo", "train", "restart.toml", "--ranks", str(ranks)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[tuple[float, str] | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put((time.monotonic(), line.rstrip()))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            process.kill()  # its ranks save and end
        process.wait()


def _until_end(lines: queue.Queue) -> Iterator[tuple[float, str]]:
    last = ""
    while True:
        try:
            found = lines.get(timeout=LIMIT_SECONDS)
        except queue.Empty:
            raise SystemExit(f"no line for {LIMIT_SECONDS:g} s; the last: {last}") from None
        if found is None:
            return
        last = found[1]
        yield found


def _step_of(line: str) -> int | None:
    """Returns 12 for `step 12/30  loss …`; None for other lines."""
    if not line.startswith("step ") or "loss" not in line:
        return None
    return int(line.split()[1].partition("/")[0])


def _rank_process(launcher: int, rank: int) -> int:
    """Returns the process of a rank: ranks are the children, in order, of the one that forks them."""
    (template,) = children(launcher)
    return children(template)[rank]


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in text.split()]


def pack(folder: Path) -> None:
    """Writes the recipe and text of 400 documents, and packs it."""
    folder.mkdir()
    (folder / "restart.toml").write_text(RECIPE, encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    documents = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (60,), generator=generator).tolist())
        for _ in range(400)
    ]
    (folder / "text.txt").write_text("\n".join(documents) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "kielo", "run", "restart.toml", "--to", "pack"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _copy(packed: Path, name: str) -> Path:
    folder = packed.parent / name
    shutil.copytree(packed, folder)
    return folder


def _same_bits(whole: Path, other: Path) -> bool:
    one, two = (
        read_tensors(folder / "run" / "train" / "checkpoints" / f"step_{STEPS:08d}")
        for folder in (whole, other)
    )
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _table(result: dict) -> str:
    rows = [
        f"{result['ranks']} ranks on {result['machine']['cores']} cores, a step takes "
        f"{result['undisturbed_step_seconds']} s; bar: {BAR_SECONDS:g} s from the kill to the next step",
        *(
            f"rank {case['victim']} killed: the ranks have ended after {case['ended_seconds']} s, the next "
            f"step is done after {case['next_step_seconds']} s, {case['steps_lost']} steps were lost, "
            f"{'the same bits' if case['has_the_same_bits'] else 'OTHER BITS'}"
            for case in result["cases"]
        ),
    ]
    return "\n".join([*rows, "passed" if result["passed"] else "NOT passed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--victims", type=int, nargs="+", default=[5, 0])
    parser.add_argument("--to", default=str(Path(__file__).parents[1] / "results"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    return options


if __name__ == "__main__":
    main()
