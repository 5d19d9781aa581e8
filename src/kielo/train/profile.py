"""The time of a step by part: a torch.profiler trace → seconds of attention, matrices, the rest, and idle.

Parts are differences of unions of intervals, in the order of `PARTS`, so that simultaneous work counts once,
a collective counts only if nothing else runs, and all parts add up to the step. (torch's `key_averages()`
counts overlaps twice and knows no idle time.) The loop marks two ranges with `record_function`: HEAD_AND_LOSS
and OPTIMISER.
"""

import gzip
import json
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from kielo.artifact.durable import bring_to_disk, make_folder, name_durably
from kielo.artifact.manifest import write_json_atomically

HEAD_AND_LOSS, OPTIMISER = "head_and_loss", "optimiser"
# Of simultaneous parts the first in this order counts. A profile also has "idle" and "step".
PARTS = (HEAD_AND_LOSS, OPTIMISER, "attention", "matrices", "memory_bound", "communication")
FOLDER = "profile"  # in the train stage's folder
_STEP = "ProfilerStep#"  # torch.profiler's own name for a step's range

_COMMUNICATION = re.compile(r"nccl|rccl|gloo|c10d", re.IGNORECASE)
# Inductor names kernels after the operators that it fused, so the prefix decides: only templates (tem) are
# attention or matrix products.
_FUSED = re.compile(r"triton_(?!tem)")
_ATTENTION_KERNEL = re.compile(
    r"flash|fmha|sdpa|flex_|attention|attn_|bwd_kernel_(dk|dq|fuse)|bwd_preprocess", re.IGNORECASE
)
_MATRIX_KERNEL = re.compile(
    r"gemm|gemv|cutlass|nvjet|xmma|cublas|wgmma|scaled_mm|splitk|Cijk_|triton_tem", re.IGNORECASE
)
_ATTENTION_OPERATOR = re.compile(r"scaled_dot_product|flash_attention|flex_attention|varlen_attn")
_MATRIX_OPERATOR = re.compile(
    r"::_?(scaled_)?(add|b|baddb)?(mm|mv)(_|$)|::(_?mkl\w*_linear|_linear_pointwise|dot$)"
)
# These ranges include the Python between operators, which computes nothing.
_NOT_WORK = re.compile(r"ProfilerStep#|Torch-Compiled Region|TorchDynamo")

_Interval = tuple[float, float]  # from, to; microseconds


def parts_of(trace: dict[str, Any]) -> dict[str, float]:
    """Return seconds per step of each of `PARTS`, of "idle" and of the whole "step", from a parsed trace.

    With events of a GPU: from the first kernel that the traced steps launched to the end of the last kernel.
    A kernel launched inside one of the two ranges belongs to it, other kernels are sorted by name. Without:
    the operators on the CPU, during the steps. Raises ValueError without a step.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [_span(event) for event in annotations if event["name"].startswith(_STEP)]
    if not steps:
        raise ValueError(f"the trace has no ranges {_STEP}N: it was made without steps")
    host = min(steps)[0], max(end for _, end in steps)
    ranges = _Ranges(annotations)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    window, work = _on_gpu(events, kernels, ranges, host) if kernels else (host, _on_cpu(events, ranges))
    return _shared_out(work, window, len(steps))


def _on_gpu(
    events: list[dict], kernels: list[dict], ranges: "_Ranges", host: _Interval
) -> tuple[_Interval, dict[str, list[_Interval]]]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    work, of_steps = defaultdict(list), []
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        part = _part(kernel["name"], _ATTENTION_KERNEL, _MATRIX_KERNEL)
        if part != "communication" and launch is not None:
            part = ranges.around(launch) or part
        work[part].append(_span(kernel))
        if launch is not None and host[0] <= launch["ts"] <= host[1]:
            of_steps.append(_span(kernel))
    if not of_steps:
        raise ValueError("the trace has no kernel that a traced step launched")
    return (min(of_steps)[0], max(end for _, end in of_steps)), work


def _on_cpu(events: list[dict], ranges: "_Ranges") -> dict[str, list[_Interval]]:
    """Return each part's intervals. Nested operators may overlap: `_shared_out` sorts that out."""
    work = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and not _NOT_WORK.match(event["name"]):
            by_name = _part(event["name"], _ATTENTION_OPERATOR, _MATRIX_OPERATOR)
            work[ranges.around(event) or by_name].append(_span(event))
    return work


def _part(name: str, attention: re.Pattern[str], matrices: re.Pattern[str]) -> str:
    if _COMMUNICATION.search(name):
        return "communication"
    if _FUSED.match(name):
        return "memory_bound"
    if attention.search(name):
        return "attention"
    return "matrices" if matrices.search(name) else "memory_bound"


class _Ranges:
    def __init__(self, annotations: Iterable[dict]):
        found = defaultdict(list)
        for event in annotations:
            if event["name"] in (HEAD_AND_LOSS, OPTIMISER):
                found[event.get("pid"), event.get("tid")].append((*_span(event), event["name"]))
        self._by_thread = {thread: sorted(ranges) for thread, ranges in found.items()}

    def around(self, event: dict) -> str | None:
        ranges = self._by_thread.get((event.get("pid"), event.get("tid")), [])
        place = bisect_right(ranges, (event["ts"], float("inf"))) - 1
        return ranges[place][2] if place >= 0 and event["ts"] <= ranges[place][1] else None


def _shared_out(work: dict[str, list[_Interval]], window: _Interval, steps: int) -> dict[str, float]:
    """Return seconds per step: what each part's intervals add to the union of the parts before it."""
    parts: dict[str, float] = {}
    so_far: list[_Interval] = []
    covered = 0.0
    for part in PARTS:
        so_far = _union(so_far + work.get(part, []), window)
        total = sum(end - begin for begin, end in so_far)
        parts[part], covered = (total - covered) / 1e6 / steps, total
    step = (window[1] - window[0]) / 1e6 / steps
    return parts | {"idle": step - covered / 1e6 / steps, "step": step}


def _union(intervals: list[_Interval], window: _Interval) -> list[_Interval]:
    union: list[_Interval] = []
    for begin, end in sorted(intervals):
        begin, end = max(begin, window[0]), min(end, window[1])
        if begin >= end:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union


def _span(event: dict) -> _Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


class Profile:
    """A recording of steps `first_step` … of a run, on request.

    Each rank writes `profile/trace_rankN.json.gz`, and rank 0 `profile/profile.json`, into the train stage's
    `folder`. `steps` is the number of recorded steps, or 0. Work outside the run's speed enters `paused`.
    """

    def __init__(
        self,
        folder: Path | str,
        first_step: int,
        steps: int,
        device: torch.device,
        tell: Callable[[str], None] = print,
        paused: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._folder, self._first_step, self._device = Path(folder) / FOLDER, first_step, device
        self._left, self._steps, self._tell, self._paused = steps, steps, tell, paused
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._profiler: torch.profiler.profile | None = None

    def step(self, step: int) -> None:
        """Advance the recording after a step. The step before `first_step`, if still to come, warms up."""
        if not self._left or step < self._first_step - 2:
            return
        if self._profiler is None:
            with self._paused():
                self._profiler = self._begun()
            self._first_step, self._left = step + 2, self._steps + 1  # with the step that warms up
            return
        self._left -= 1
        with self._paused() if not self._left else nullcontext():
            if self._left in (0, self._steps) and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # so that the recording is between idle moments
            self._profiler.step()
            if not self._left:
                self._profiler.stop()
                self._profiler = None  # frees the trace

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler, self._left = None, 0
            if self._rank == 0:
                self._tell(f"no profile: the run ended before {self._steps} steps were recorded")

    def _begun(self) -> torch.profiler.profile:
        """Begin torch's profiler, over one step that warms it up and `steps` that count."""
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda"),
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._write_or_tell,
        )
        profiler.start()
        return profiler

    def _write_or_tell(self, profiler: torch.profiler.profile) -> None:
        if self._left:  # a run that ends too early stops the profiler
            return
        try:
            self._write(profiler)
        except (OSError, ValueError) as problem:  # a failed profile must not end the run
            self._tell(f"no profile of rank {self._rank}: {problem}")

    def _write(self, profiler: torch.profiler.profile) -> None:
        make_folder(self._folder)
        trace_file = self._folder / f"trace_rank{self._rank}.json.gz"
        # Written aside first, so that a half-written file never has the trace's name. torch compresses .gz.
        aside = trace_file.with_name(f".{os.getpid()}.{trace_file.name}")
        try:
            profiler.export_chrome_trace(str(aside))
            bring_to_disk(aside)
            name_durably(aside, trace_file)
        finally:
            aside.unlink(missing_ok=True)
        if self._rank:
            return
        with gzip.open(trace_file, "rt", encoding="utf-8") as stream:
            parts = parts_of(json.load(stream, strict=False))
        about = {
            "first_step": self._first_step,
            "steps": self._steps,
            "device": self._device.type,
            "torch": torch.__version__,
        }
        write_json_atomically(self._folder / "profile.json", about | {"seconds_per_step": parts})
        self._tell(line(parts, self._steps) + f". Trace: {trace_file} (open in https://ui.perfetto.dev)")


def line(parts: dict[str, float], steps: int) -> str:
    """Return e.g. "10 steps: 1.23 s each: matrices 61 %, attention 20 %, …, idle 2.1 %"."""
    step = max(parts["step"], 1e-12)
    busy = sorted((part for part in PARTS if parts[part] / step >= 5e-4), key=lambda part: -parts[part])
    of_step = {part: 100 * parts[part] / step for part in (*busy, "idle")}
    shares = [f"{part.replace('_', ' ')} {x:.{0 if x >= 10 else 1}f} %" for part, x in of_step.items()]
    return f"{steps} steps: {parts['step']:.3g} s each: " + ", ".join(shares)
