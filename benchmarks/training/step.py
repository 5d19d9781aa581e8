"""One training step (forward, backward, clip, AdamW): Kielo's and its peers', side by side in one process.

    python benchmarks/training/step.py --shape tiny --precision fp32 --pairs 20
    python benchmarks/training/step.py --shape llama_8b --precision bf16 --contenders kielo,kielo-fp8,trainer
    python benchmarks/training/step.py --shape llama_8b --precision bf16 --contenders trainer --join

All start from the same weights, take the same random tokens in as many micro-batches, with the same settings
of the optimiser, and are as shipped (`contenders/`). They go in rounds, every other one in the opposite
order, so that whatever else the machine does falls on all. Where their states fit the device together they
lie there together and go on from round to round; else each is built, warmed, timed and taken down again in
its turn. A contender that is not installed or fails is listed with its reason. The losses printed beside the
times show that it was the same work.

With --join one contender has the process for itself, so that one which fails or hangs takes no other along.
Its figures are added to the file, after each of its turns; rounds of different processes are not paired in
time. It ends with 3 if the contender has no figures.

A ratio above 1 means that Kielo is faster; it is the median over rounds of the peer's seconds by Kielo's of
the same round, with a 95 % bootstrap interval. TFLOP/s are model FLOPs, by one formula for all
(`step_shapes.flops_of`). Writes results/step_<shape>_<precision>[_bf16_moments]_<device>.json.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import contenders
import numpy as np
import torch
from contenders.contender import Contender, LeftOut, Work
from step_bars import bars_of, idle_share
from step_shapes import GPU_TOKENS_PER_STEP, SHAPES, flops_of, layers_that_fit, resolved_of, state_bytes

from kielo.ranks.process_settings import settings_of_device, settle_allocator
from kielo.ranks.world import end_world, start_world
from kielo.recipe.cards import accelerator_of_device
from kielo.recipe.errors import KieloError
from kielo.train.precision import settle_matrix_products

RESULTS = Path(__file__).parents[1] / "results"
OWN = ("kielo", "kielo-compiled", "kielo-fp8")
CPU_CONTENDERS = ("kielo", "trainer", "transformers", "litgpt", "olmo-core")
GPU_CONTENDERS = (
    "kielo",
    "kielo-fp8",
    *CPU_CONTENDERS[1:],
    "torchtitan",
    "torchtitan-fp8",
    "megatron",
    "megatron-fp8",
)
_BOOTSTRAP, _SEED = 10_000, 1
_BUILDING_SECONDS = 15.0  # of a contender whose compiled code is there, at most
_PROFILE_SECONDS = 20.0
# What figures of one file have in common, beside the versions and the GPU.
_SAME_WORK = (
    "shape", "precision", "moments", "accelerator", "layers", "micro_batches_per_step",
    "tokens_per_step", "steps_per_turn", "warm_up",
)  # fmt: skip


class Bench:
    """The rounds of one shape. `rows`: contender → seconds of its turns and other figures; `left_out`:
    reasons.
    """

    def __init__(
        self, work: Work, names: tuple[str, ...], options: argparse.Namespace, started: float
    ) -> None:
        self.work, self.names, self.options = work, names, options
        self.rows: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self.losses: dict[str, list[float]] = {}
        self._contenders: dict[str, Contender] = {}
        self._ends = started + (options.seconds_limit or float("inf"))

    def run_together(self) -> None:
        """Runs all contenders in turns on one device.

        The Trainer's own loop leads if it takes part: it lets the others have their turns before its own.
        """
        for name in self.names:
            self._build(name)
        order = self._order(self.options.warm_up + self.options.pairs)
        leader = next((name for name in self._contenders if name.startswith("trainer")), None)
        turns = [steps for name, steps in self._schedule(order) if name == leader]
        schedule = self._schedule(order)

        def others() -> None:
            for name, steps in schedule:
                if name == leader:
                    return
                self._turn(name, steps, steps.start)

        if leader is not None:
            try:
                self.rows[leader]["seconds"] = self._contenders[leader].lead(turns, others)
            except Exception as error:
                self._leave_out(leader, error)
        others()
        for name, contender in self._contenders.items():
            del self.rows[name]["seconds"][: self.options.warm_up]
            self.losses[name] = [loss.item() for loss in contender.losses]
            self._measure_parts(name)

    def run_one_by_one(self, note: Callable[[], None]) -> None:
        """Builds, warms, times and removes each contender in turn; compiled code is kept on disk.

        Calls `note` after each turn, so that measurements are saved even if the process is ended.
        """
        another = 0.0
        for number, names in enumerate(self._order(self.options.pairs)):
            if number and time.monotonic() + another > self._ends:
                print(
                    f"stopped after {number} rounds: another would outlast --seconds-limit", file=sys.stderr
                )
                break
            begun = time.monotonic()
            for name in names:
                if not number and time.monotonic() > self._ends:
                    self.left_out[name] = "no time was left for it within --seconds-limit"
                    continue
                self._alone(name, is_first=number == 0)
                note()
            another = time.monotonic() - begun if number else self._later_round()

    def run_alone(self, note: Callable[[], None]) -> None:
        """Run the turns of one contender, which has the process for itself; call `note` after each."""
        (name,), is_on_gpu = self.names, self.work.device.type == "cuda"
        self._build(name)
        if name not in self._contenders:
            return
        contender, taken = self._contenders[name], []

        def goes_on(seconds: float) -> bool:
            taken.append(seconds)
            print(
                f"  {name}: {seconds / self.options.steps_per_turn:.4f} s a step", file=sys.stderr, flush=True
            )
            self.rows[name]["seconds"] = taken[self.options.warm_up :]
            self.losses[name] = [loss.item() for loss in contender.losses]
            if is_on_gpu:
                self.rows[name]["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            note()
            return time.monotonic() + seconds < self._ends

        turns = [self._steps_of(number) for number in range(self.options.warm_up + self.options.pairs)]
        try:
            contender.turns(turns, goes_on)
        except Exception as error:
            self._leave_out(name, error)
            return
        if time.monotonic() + _PROFILE_SECONDS < self._ends:
            self._measure_parts(name)
        elif self.options.parts:
            self.rows[name]["parts_missing"] = "no time was left for it within --seconds-limit"

    def _later_round(self) -> float:
        """Estimates seconds of a round without compilation from the first one."""
        share = (self.options.warm_up + self.options.steps_per_turn) / self.options.steps_per_turn
        return sum(row["seconds"][-1] * share + _BUILDING_SECONDS for row in self.rows.values())

    def _alone(self, name: str, is_first: bool) -> None:
        if name in self.left_out:
            return
        is_on_gpu = self.work.device.type == "cuda"
        self._build(name)
        if is_on_gpu:
            torch.cuda.reset_peak_memory_stats()
        first = self.options.warm_up
        self._turn(name, range(0, first + self.options.steps_per_turn), first)
        if name in self._contenders:
            if is_on_gpu:
                self.rows[name]["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            self.losses[name] = [loss.item() for loss in self._contenders[name].losses]
            if is_first:
                self._measure_parts(name)
        self._take_down(name)

    def _build(self, name: str) -> None:
        try:
            self._contenders[name] = contenders.builder(name)(self.work)
        except Exception as error:
            self._leave_out(name, error)
            return
        self.rows.setdefault(name, {"note": self._contenders[name].note, "seconds": []})

    def _turn(self, name: str, steps: range, first_timed: int) -> None:
        if name not in self._contenders:
            return
        try:
            seconds = self._contenders[name].turn(steps, first_timed)
        except Exception as error:
            self._leave_out(name, error)
            return
        self.rows[name]["seconds"].append(seconds)
        each = seconds / (steps.stop - first_timed)
        print(f"  {name}: {each:.4f} s a step", file=sys.stderr, flush=True)

    def _measure_parts(self, name: str) -> None:
        contender = self._contenders[name]
        is_asked_for = self.options.parts == "all" or self.options.parts == "own" and name in OWN
        # the Trainer's steps are its own loop's
        if not is_asked_for or type(contender).step is Contender.step:
            return
        from step_parts import step_parts

        steps = 3 if self.work.micro_batches < 8 else 1  # a trace of many micro-batches is long enough
        try:
            self.rows[name]["parts"] = step_parts(lambda: contender.step(0), steps, self.work.device)
        except Exception as error:
            self.rows[name]["parts_missing"] = _reason(error)

    def _leave_out(self, name: str, error: Exception) -> None:
        """Removes a contender that fails from all rounds and frees its memory."""
        if not isinstance(error, LeftOut | ImportError):
            traceback.print_exception(error, file=sys.stderr)
        self.left_out[name] = _reason(error)
        self.rows.pop(name, None)
        error.__traceback__ = None  # its frames hold the model
        self._take_down(name)

    def _take_down(self, name: str) -> None:
        contender = self._contenders.pop(name, None)
        if contender is not None:
            contender.close()
        gc.collect()
        if self.work.device.type == "cuda":
            torch.compiler.reset()  # it holds on to what it compiled, and to that only so often
            torch.cuda.empty_cache()

    def _order(self, rounds: int) -> list[tuple[str, ...]]:
        return [self.names if number % 2 == 0 else self.names[::-1] for number in range(rounds)]

    def _schedule(self, order: list[tuple[str, ...]]) -> Iterator[tuple[str, range]]:
        for number, names in enumerate(order):
            for name in names:
                yield name, self._steps_of(number)

    def _steps_of(self, number: int) -> range:
        steps = self.options.steps_per_turn
        return range(number * steps, (number + 1) * steps)


def main() -> None:
    options = _options()
    started = time.monotonic()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = tuple(options.contenders.split(",")) if options.contenders else _usual(device)
    for name in names:
        if name not in contenders.NAMES:
            raise KieloError(f"--contenders: {name}; there are {', '.join(contenders.NAMES)}")
        if options.moments == "bf16" and name not in OWN:
            raise KieloError(f"--moments bf16: {name} has none. Fix: {', '.join(OWN)}")
    if options.join and len(names) != 1:
        raise KieloError("--join: it takes one contender. Fix: --contenders NAME")
    choice = "_bf16_moments" if options.moments == "bf16" else ""
    path = Path(options.to) / f"step_{options.shape}_{options.precision}{choice}_{device}.json"
    if options.skip_done and _is_done(path, names, options):
        print(f"{path}: done already, with these versions")
        return
    if device == "cuda":
        settle_allocator(settings_of_device())
    world = start_world(60, device)
    if options.threads:
        torch.set_num_threads(options.threads)
    settle_matrix_products(options.precision)
    there = json.loads(path.read_text(encoding="utf-8")) if options.join and path.exists() else None
    if there is not None:
        # A device that is a little fuller may hold a layer fewer.
        options.layers = options.layers or there["layers"]
    work, layers = _work(options, world)
    is_together = not (options.one_by_one or options.join) and _fits_together(work, names, options.moments)
    bench = Bench(work, names, options, started)
    print(_headline(options, work, layers, is_together), file=sys.stderr, flush=True)

    def write() -> dict[str, Any]:
        result = _result(options, bench, layers, is_together)
        if there is not None:
            result = _joined(there, result, path)
        _compare(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result

    if there is not None:
        _joined(there, _result(options, bench, layers, is_together), path)  # refuses before it computes
    if is_together:
        bench.run_together()
    elif options.join:
        bench.run_alone(write)
    else:
        bench.run_one_by_one(write)
    end_world()
    result = write()
    print(json.dumps(result, indent=1) if options.json else table(result) + f"\nwritten to {path}")
    if options.join and names[0] not in result["contenders"]:
        sys.exit(3)


def _usual(device: str) -> tuple[str, ...]:
    return GPU_CONTENDERS if device == "cuda" else CPU_CONTENDERS


def _work(options: argparse.Namespace, world: Any) -> tuple[Work, int]:
    device = world.device
    is_on_gpu = device.type == "cuda"
    shape = SHAPES[options.shape]
    if shape.is_for_gpu and not is_on_gpu and not options.layers:
        raise KieloError(f"--shape {options.shape} is for a GPU. Fix: --shape tiny, or --layers 1 for a try")
    free = torch.cuda.mem_get_info(device)[0] if is_on_gpu else float("inf")
    layers = options.layers or layers_that_fit(options.shape, free, options.moments)
    name = torch.cuda.get_device_name(device) if is_on_gpu else "cpu"
    precisions = (options.precision, "fp8")
    resolved, resolved_fp8 = (
        resolved_of(options.shape, layers, one, device.type, name, options.moments) for one in precisions
    )
    phase = resolved.placement.phases[0]
    sequences = phase.micro_batch_sequences * phase.micro_batches_per_step
    tokens = torch.randint(
        0,
        resolved.identity.model.vocab_size,
        (options.steps_per_turn * (options.warm_up + options.pairs), sequences, shape.sequence_length),
        generator=torch.Generator().manual_seed(_SEED),
    )
    if is_on_gpu:
        tokens = tokens.pin_memory()
    compiles = {"auto": is_on_gpu, "always": True, "never": False}[options.compile_peers]
    return Work(resolved, resolved_fp8, world, tokens, compiles), layers


def _fits_together(work: Work, names: tuple[str, ...], moments: str) -> bool:
    if work.device.type == "cpu":
        return True
    free = torch.cuda.mem_get_info(work.device)[0]
    # Activations and logits of the one whose turn it is: as much as it holds, or a tenth of the device.
    each = state_bytes(work.model, moments)
    return len(names) * each + max(2 * each, free / 10) < 0.8 * free


def _result(options: argparse.Namespace, bench: Bench, layers: int, is_together: bool) -> dict[str, Any]:
    work, shape = bench.work, SHAPES[options.shape]
    flops = flops_of(options.shape, layers)
    peaks = work.resolved.placement.peak_tflops
    tokens = shape.tokens_per_step * options.steps_per_turn
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "shape": options.shape,
        "precision": options.precision,
        "moments": options.moments,
        "device": work.device.type,
        "accelerator": work.resolved.placement.accelerator,
        "layers": layers,
        **flops,
        "sequence_length": shape.sequence_length,
        "micro_batches_per_step": work.micro_batches,
        "micro_batch_sequences": work.micro_batch_sequences,
        "tokens_per_step": shape.tokens_per_step,
        "steps_per_turn": options.steps_per_turn,
        "warm_up": options.warm_up,
        "are_on_the_device_together": is_together,
        "has_a_process_each": options.join,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "machine": _machine(work.device),
        "versions": _versions(bench.names),
        "contenders": {},
        "left_out": bench.left_out,
        "ratios": {},
    }
    for name in bench.names:
        if not bench.rows.get(name, {}).get("seconds"):
            continue
        row = bench.rows[name]
        median = float(np.median(row["seconds"]))
        tflops = tokens * flops["flops_per_token"] / median / 1e12
        quartiles = np.percentile(row["seconds"], [25, 75]) / options.steps_per_turn
        result["contenders"][name] = {
            "note": row["note"],
            "tokens_per_second": round(tokens / median, 1),
            "tflops": round(tflops, 3),
            "mfu_by_bf16_peak": round(tflops / peaks["bf16"], 4) if "bf16" in peaks else None,
            "whole_model_tokens_per_second": round(tflops * 1e12 / flops["whole_model_flops_per_token"], 1),
            "seconds_per_step": round(median / options.steps_per_turn, 5),
            "quartiles_of_seconds": [round(float(quartile), 5) for quartile in quartiles],
            "peak_memory_bytes": row.get("peak_memory_bytes"),
            "parts": row.get("parts"),
            **({"parts_missing": row["parts_missing"]} if "parts_missing" in row else {}),
            "seconds_of_turns": [round(seconds, 5) for seconds in row["seconds"]],
            "losses": bench.losses[name],
        }
    return result


def _joined(there: dict[str, Any], result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the result with what the file has of other contenders. Raise KieloError if the work differs."""
    differing = [key for key in _SAME_WORK if there.get(key) != result[key]]
    differing += ["gpu"] * (there["machine"].get("gpu") != result["machine"].get("gpu"))
    versions = there["versions"]
    differing += [name for name, number in result["versions"].items() if versions.get(name, number) != number]
    if differing:
        raise KieloError(f"{path}: it has another {', another '.join(differing)}. Fix: --to another folder")
    rows = there["contenders"] | result["contenders"]
    left_out = {name: why for name, why in there["left_out"].items() if name not in rows}
    return result | {
        "versions": versions | result["versions"],
        "contenders": {name: rows[name] for name in contenders.NAMES if name in rows},
        "left_out": left_out | {name: why for name, why in result["left_out"].items() if name not in rows},
    }


def _compare(result: dict[str, Any]) -> None:
    """Add the ratios and the bars."""
    rows = result["contenders"]
    for own in (name for name in OWN if name in rows):
        peers = [name for name in rows if name not in OWN]
        result["ratios"][own] = {
            peer: ratio(rows[peer]["seconds_of_turns"], rows[own]["seconds_of_turns"]) for peer in peers
        }
        for peer in peers:
            result["ratios"][own][peer]["max_relative_loss_difference"] = _difference(
                rows[own]["losses"], rows[peer]["losses"]
            )
    result["bars"] = bars_of(result)


def ratio(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Returns the median of paired ratios, its 95 % bootstrap interval (Efron 1979), and quartiles."""
    pairs = np.array([a / b for a, b in zip(theirs, ours)])
    draws = np.random.default_rng(_SEED).choice(pairs, size=(_BOOTSTRAP, len(pairs)))
    lower, upper = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "median": round(float(np.median(pairs)), 4),
        "lower_95": round(float(lower), 4),
        "upper_95": round(float(upper), 4),
        "quartiles": [round(float(quartile), 4) for quartile in np.percentile(pairs, [25, 75])],
        "pairs": len(pairs),
    }


def _difference(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a / b - 1) for a, b in zip(ours, theirs)), default=float("nan"))


def table(result: dict[str, Any]) -> str:
    """Returns the result for people."""
    rows, widest = result["contenders"], max(map(len, [*result["contenders"], "contender"]))
    lines = [
        f"{result['shape']}, {result['layers']} layers ({result['parameters'] / 1e6:,.1f} M parameters, "
        f"head {result['head_share_of_flops']:.1%} of FLOPs), {result['precision']}, moments in "
        f"{result['moments']}, "
        f"{result['machine'].get('gpu', result['machine']['cpu'])}, {result['tokens_per_step']:,} tokens a "
        f"step in {result['micro_batches_per_step']} micro-batches",
        f"  {'contender':{widest}}  {'tokens/s':>10}  {'TFLOP/s':>8}  {'MFU':>6}  {'s/step':>8}  "
        f"{'memory':>9}  {'loss':>9}  note",
    ]
    for name, row in rows.items():
        mfu = "" if row["mfu_by_bf16_peak"] is None else f"{row['mfu_by_bf16_peak']:.1%}"
        memory = "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.1f} GB"
        lines.append(
            f"  {name:{widest}}  {row['tokens_per_second']:>10,.0f}  {row['tflops']:>8.3g}  {mfu:>6}  "
            f"{row['seconds_per_step']:>8.4f}  {memory:>9}  {row['losses'][-1]:>9.5f}  {row['note']}"
        )
    if (
        result["tokens_per_step"] == GPU_TOKENS_PER_STEP
        and result["parameters"] != result["whole_model_parameters"]
    ):
        rates = ", ".join(f"{name} {row['whole_model_tokens_per_second']:,.0f}" for name, row in rows.items())
        lines.append(f"  tokens/s of the whole model at these TFLOP/s: {rates}")
    for own, ratios in result["ratios"].items():
        for peer, one in ratios.items():
            lines.append(
                f"  {own} is {one['median']:.3f} × as fast as {peer} (95 %: {one['lower_95']:.3f} to "
                f"{one['upper_95']:.3f}, {one['pairs']} pairs); losses differ by at most "
                f"{one['max_relative_loss_difference']:.1e}"
            )
    for name, row in rows.items():
        if row["parts"]:
            parts = ", ".join(
                f"{part} {seconds:.4f}" for part, seconds in row["parts"].items() if part != "step"
            )
            lines.append(f"  {name}, seconds of a step: {parts}; idle {idle_share(row):.1%}")
    lines += [f"  {name} is left out: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines + [bar["line"] for bar in result["bars"]])


def _headline(options: argparse.Namespace, work: Work, layers: int, is_together: bool) -> str:
    how = "together on the device" if is_together else "one after the other"
    kinds = f"{options.precision}, moments in {options.moments}"
    return f"{options.shape}, {layers} layers, {kinds}: contenders {how}"


def _reason(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    return (
        f"{type(error).__name__}: {error}".splitlines()[0] if not isinstance(error, LeftOut) else str(error)
    )


def _is_done(path: Path, names: tuple[str, ...], options: argparse.Namespace) -> bool:
    """Returns True if there is a result of these contenders, with as many rounds and the same versions."""
    if not path.exists():
        return False
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result.get("contenders", {})
    known = [*rows, *([] if options.join else result.get("left_out", {}))]
    rounds = min((len(rows[name]["seconds_of_turns"]) for name in names if name in rows), default=0)
    same = all(result.get("versions", {}).get(what) == number for what, number in _versions(names).items())
    return set(names) <= set(known) and rounds >= min(options.pairs, 2) and same


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for distribution in contenders.distributions(names):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found.setdefault(distribution, "")
    if torch.version.cuda or torch.version.hip:
        found["cuda" if torch.version.cuda else "rocm"] = torch.version.cuda or torch.version.hip
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    machine: dict[str, Any] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        card = accelerator_of_device(name)
        machine |= {
            "gpu": name,
            "gpu_memory_bytes": torch.cuda.mem_get_info(device)[1],
            "card": card and card.name,
        }
    return machine


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of all but contenders named -fp8"
    )
    parser.add_argument(
        "--moments",
        choices=["fp32", "bf16"],
        default="fp32",
        help="AdamW's (train.optimiser_state); bf16: Kielo's only, and as many layers more as that lets fit",
    )
    parser.add_argument("--contenders", metavar="A,B,…", help=f"of {', '.join(contenders.NAMES)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--layers", type=int, help="default: the shape's own, or as many as fit")
    parser.add_argument("--pairs", type=int, default=20, help="rounds that count")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=3,
        help="rounds before them; where contenders go one after the other, steps of each turn",
    )
    parser.add_argument("--steps-per-turn", type=int, default=1, help="steps that are timed as one")
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="build each in its turn even where all fit the device together",
    )
    parser.add_argument(
        "--join", action="store_true", help="one contender, whose figures are added to the file that is there"
    )
    parser.add_argument(
        "--compile-peers", choices=["auto", "always", "never"], default="auto", help="auto: on GPUs"
    )
    parser.add_argument(
        "--parts",
        nargs="?",
        choices=["own", "all"],
        const="own",
        help="profile a step, and print the seconds of its parts",
    )
    parser.add_argument("--seconds-limit", type=float, help="begin no round that would end later than this")
    parser.add_argument(
        "--skip-done", action="store_true", help="nothing to do where the result is there already"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's own choice")
    parser.add_argument("--to", default=str(RESULTS), help="folder of the result")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KieloError as error:
        sys.exit(f"error: {error}")
