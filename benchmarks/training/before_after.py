"""A decoder's step in two versions of Kielo, side by side, and the bytes that each rehearses.

    mkdir before && git archive COMMIT src benchmarks | tar -x -C before
    python benchmarks/training/before_after.py before . --shape tiny --precision fp32 --pairs 20

Each version runs in a process of its own, from its own `src` and `benchmarks`, as the contender "kielo" of
`step.py`: the same weights, tokens and settings. They take turns, every other round in the opposite order,
and one waits while the other computes. A ratio above 1 means that the second version is faster; it is the
median over rounds with a 95 % bootstrap interval, of the process's own seconds on a CPU (OMP_NUM_THREADS=1),
so that other work on the machine counts less. The losses are compared to the bit. Rehearsals go through
`python -m kielo rehearse` of each version after that, and all their bytes, FLOPs and collectives are
compared. At last `kielo --help` and a training of one step start in turn, each over the text that its version
has packed; their seconds include all their processes. Writes
results/before_after_<shape>_<precision>_cpu.json.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from ratios import interval

RESULTS = Path(__file__).parents[1] / "results"
_SEED = 1
REHEARSALS = {
    "demo, one rank": ["demo_estonian", "--ranks", "1"],
    "demo, documents, tensor 2 and pipeline 2": [
        "demo_estonian", "--ranks", "8", "--set", "layout.tensor=2", "--set", "layout.pipeline=2",
        "--set", "dataset.mask_documents=true",
    ],
    "demo as a gpt2, tensor 2": [
        "demo_estonian", "--ranks", "2", "--set", "layout.tensor=2", "--set", "model.model_type=gpt2",
        "--set", "model.num_key_value_heads=4",
    ],
    "Llama-3.1-70B, TP8 × PP4, 32 ranks": ["estonian_llama31_70b", "--nodes", "4"],
}  # fmt: skip
_OF_THE_RUN = ("seconds", "version", "date")  # words in keys whose values differ from run to run


def work(options: argparse.Namespace) -> None:
    """Builds the contender of the version on the path; for each line, a turn, answered by its figures."""
    import contenders
    import torch
    from contenders.contender import Work
    from step_shapes import SHAPES, resolved_of

    try:
        from kielo.ranks.world import end_world, start_world
    except ImportError:  # versions before 2026-11-27
        from kielo.parallel.world import end_world, start_world
    from kielo.train.precision import settle_matrix_products

    world = start_world(60, "cpu")
    torch.set_num_threads(1)
    settle_matrix_products(options.precision)
    shape = SHAPES[options.shape]
    layers = options.layers or shape.layers
    resolved = resolved_of(options.shape, layers, options.precision, "cpu", "cpu", "fp32")
    phase = resolved.placement.phases[0]
    size = phase.micro_batch_sequences * phase.micro_batches_per_step, shape.sequence_length
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = resolved.identity.model.vocab_size
    tokens = torch.randint(0, vocabulary, (options.pairs + 2, *size), generator=generator)
    kielo = contenders.builder("kielo")(Work(resolved, resolved, world, tokens, False))
    for line in sys.stdin:
        number, begun = int(line), time.process_time()
        kielo.turn(range(number, number + 1), number)
        seconds = time.process_time() - begun
        print(json.dumps({"seconds": seconds, "loss": kielo.losses[-1].item()}), flush=True)
    end_world()


class Version:
    """A version's process. rows: its turns."""

    def __init__(self, folder: str) -> None:
        self.folder, self.rows = Path(folder).resolve(), list[dict[str, float]]()
        self._process: subprocess.Popen | None = None

    def begin(self, options: argparse.Namespace) -> None:
        # -P: not the modules beside this file, but those of the version
        command = [sys.executable, "-P", __file__, "--work", "--shape", options.shape]
        command += ["--precision", options.precision, "--pairs", str(options.pairs)]
        command += ["--layers", str(options.layers)]
        self._process = subprocess.Popen(
            command, env=self.variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def variables(self) -> dict[str, str]:
        # The last one has the contenders of versions before 2026-11-27.
        folders = ("src", "benchmarks/training", "benchmarks")
        path = os.pathsep.join(str(self.folder / folder) for folder in folders)
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def turn(self, number: int) -> None:
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder}: its process ended; see above")
        self.rows.append(json.loads(line))

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def pack(self, folder: Path) -> Path:
        """Packs the demo's text into a new run in `folder`; returns it."""
        run = folder / f"run_{self.folder.name or 'after'}_{id(self)}"
        self._kielo(["run", "demo_estonian", *_one_step(run), "--to", "pack"])
        return run

    def start(self, run: Path, copy: Path) -> dict[str, float]:
        """Returns the CPU seconds of `kielo --help`, and of one step of training on a copy of `run`."""
        shutil.copytree(run, copy)
        seconds = {
            "help": self._kielo(["--help"]),
            "train": self._kielo(["train", "demo_estonian", *_one_step(copy)]),
        }
        shutil.rmtree(copy)
        return seconds

    def _kielo(self, arguments: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "kielo", *arguments]
        done = subprocess.run(command, env=self.variables(), capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise SystemExit(f"{self.folder}: {' '.join(command)}: {done.stderr}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def rehearsed(self, arguments: list[str]) -> Any:
        """Returns the figures of a rehearsal, without those that are of this run of it."""
        command = [sys.executable, "-m", "kielo", "rehearse", *arguments, "--json"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, env=self.variables(), capture_output=True, text=True, cwd=folder, timeout=1200
            )
        if done.returncode:
            raise SystemExit(f"{self.folder}: {' '.join(command)}: {done.stderr}")
        return _without_times(json.loads(done.stdout))


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yields the path of each figure that is not the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other)):
            yield from _differences(*pair, f"{path}.{number}".lstrip("."))
    elif one != other:
        yield f"{path}: {one} and {other}"


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_times(one) for key, one in value.items() if not any(word in key for word in _OF_THE_RUN)
    }


def _one_step(run: Path) -> list[str]:
    settings = ("train.tokens=16384", "train.warmup_share=0", f"folder={run}")
    return [part for setting in settings for part in ("--set", setting)]


def _ratio(one: list[float], other: list[float]) -> dict[str, Any]:
    ratios = np.array(one) / np.array(other)
    return {
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(bound), 4) for bound in interval(ratios)],
        "seconds_before": one,
        "seconds_after": other,
    }


def compared(before: Version, after: Version, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the turns, of which the first two are not counted; returns the ratio and how losses compare."""
    for version in (before, after):
        version.begin(options)
    for number in range(options.pairs + 2):
        for version in (before, after) if number % 2 else (after, before):
            version.turn(number)
    for version in (before, after):
        version.end()
    one, other = ([row["seconds"] for row in version.rows[2:]] for version in (before, after))
    return _ratio(one, other) | {
        "losses_are_equal": [row["loss"] for row in before.rows] == [row["loss"] for row in after.rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="*", help="of the version before, and of that after")
    parser.add_argument("--shape", default="tiny", choices=("tiny", "demo"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=0, help="default: the shape's")
    parser.add_argument(
        "--only", choices=("step", "rehearsals", "start"), help="other figures stay as they are"
    )
    parser.add_argument("--rehearsals", nargs="+", choices=REHEARSALS, help="default: all")
    parser.add_argument("--commits", nargs=2, default=("", ""), help="what the result calls the two")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    if len(options.folders) != 2:
        parser.error("give two folders, each with `src` and `benchmarks`")
    path = RESULTS / f"before_after_{options.shape}_{options.precision}_cpu.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result |= {
        "commits": list(options.commits), "shape": options.shape, "precision": options.precision,
        "python": platform.python_version(), "torch": version_of("torch"), "cpus": os.cpu_count(),
    }  # fmt: skip
    one, other = (Version(folder) for folder in options.folders)
    measure = {"step": _step, "rehearsals": _rehearsals, "start": _start}
    for name in [options.only] if options.only else measure:
        result[name] = measure[name](one, other, options)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _step(before: Version, after: Version, options: argparse.Namespace) -> dict[str, Any]:
    step = compared(before, after, options)
    print(
        f"after is {step['ratio']:.3f} × as fast as before ({step['interval'][0]:.3f} to "
        f"{step['interval'][1]:.3f}); losses are {'' if step['losses_are_equal'] else 'NOT '}equal",
        flush=True,
    )
    layers = options.layers or "the shape's"
    return {"date": date.today().isoformat(), "load": os.getloadavg()[0], "layers": layers} | step


def _rehearsals(before: Version, after: Version, options: argparse.Namespace) -> dict[str, Any]:
    names = options.rehearsals or list(REHEARSALS)
    with ThreadPoolExecutor(2 * len(names)) as pool:
        pairs = {
            name: [pool.submit(version.rehearsed, REHEARSALS[name]) for version in (before, after)]
            for name in names
        }
    found: dict[str, Any] = {"date": date.today().isoformat()}
    for name, (of_before, of_after) in pairs.items():
        one, other = of_before.result(), of_after.result()
        differences = list(_differences(one, other))
        found[name] = {
            "differences": differences,
            "before": one,
            "after": other if differences else "the same",
        }
        print(f"{name}: {', '.join(differences) or 'all figures are equal'}", flush=True)
    return found


def _start(before: Version, after: Version, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        runs = {version: version.pack(Path(folder)) for version in (before, after)}
        rows: dict[Version, list[dict[str, float]]] = {before: [], after: []}
        for number in range(options.pairs + 1):
            for version in (before, after) if number % 2 else (after, before):
                rows[version].append(version.start(runs[version], Path(folder) / "copy"))
    found: dict[str, Any] = {"date": date.today().isoformat()}
    for what in ("help", "train"):
        one, other = ([row[what] for row in rows[version][1:]] for version in (before, after))
        found[what] = _ratio(one, other)
        low, high = found[what]["interval"]
        print(
            f"{what}: after starts {found[what]['ratio']:.3f} × as fast ({low:.3f} to {high:.3f})", flush=True
        )
    return found


if __name__ == "__main__":
    main()
