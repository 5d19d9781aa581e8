"""Check: every device multiplies and copies as fast as its fellows, and computes the same numbers.

A device that computes wrongly without an error is rare and ruins a run. So all devices multiply the same
matrices, and devices of one kind must get the same bits, the first time and after seconds of work.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import xxhash
from torch import Tensor

from kielo.verify.preflight.job import Finding, Job, Sizes, spread

# Of the median of all devices of its kind. GPUs: a proposal; LUMI's own tests allow 5 to 10 %. Processors
# share caches and memory with other work.
SLOWEST = {"cuda": 0.93, "cpu": 0.2}
# Of the card's peak: all are far below where clocks or power are capped. The best products that were measured
# on A100, H100, GH200 and MI300X reach 0.51 to 0.87 (Bekman, ml-engineering: MAMF); the MI250X is not known.
LEAST_OF_PEAK = 0.3
MOST_USED = 0.2  # of the device's memory, before this job has used much of it


class Measured(TypedDict):
    name: str
    product_tflops: float
    copy_gb_per_second: float
    product_hash: str
    is_repeatable: bool
    used_share: float


def measure(job: Job) -> Measured:
    device, sizes = job.world.device, job.sizes
    used = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = 1 - free / total
    left, right = matrices(sizes, device)
    first = multiply(left, right)
    work = 2 * sizes.matrix**3 * sizes.products
    seconds = _best_seconds(lambda: multiply(left, right), sizes.products, sizes.rounds, device)
    last = multiply(left, right)
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _best_seconds(lambda: target.copy_(source), sizes.copies, sizes.rounds, device)
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "product_tflops": work / seconds / 1e12,
        "copy_gb_per_second": 2 * sizes.copy_bytes * sizes.copies / copying / 1e9,
        "product_hash": digest(first),
        "is_repeatable": torch.equal(first, last),
        "used_share": used,
    }


def matrices(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two matrices of normal numbers, the same on every rank; bf16 on GPUs, fp32 on CPUs."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (sizes.matrix, sizes.matrix)
    left, right = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return left, right


def multiply(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def digest(tensor: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.cpu().view(torch.uint8).numpy().data)


def processor_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")


def _best_seconds(action: Callable[[], object], times: int, rounds: int, device: torch.device) -> float:
    """Return the seconds of the fastest round of `times` actions. The first round warms up.

    On CPUs they are seconds of the processor, because other work shares its time.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(rounds):
        started = clock()
        for _ in range(times):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - started)
    return min(seconds[1:])


def judge(found: Sequence[Measured], job: Job) -> list[Finding]:
    return [*_slow(found, job), *_wrong(found), *_occupied(found)]


def _slow(found: Sequence[Measured], job: Job) -> list[Finding]:
    findings, least = [], SLOWEST[job.world.device.type]
    for what, rates, unit in (
        ("matrix products", [one["product_tflops"] for one in found], "TFLOP/s"),
        ("copies in its memory", [one["copy_gb_per_second"] for one in found], "GB/s"),
    ):
        median = statistics.median(rates)
        of_median = f"of the median of all ranks, {median:.3g}; {least:.0%} is expected"
        findings += [
            Finding(rank, f"{what}: {rate:.3g} {unit}, {rate / median:.0%} {of_median}")
            for rank, rate in enumerate(rates)
            if rate < least * median
        ]
    peak = job.device_card.peak_tflops.get("bf16") if job.device_card else None
    if peak and job.world.device.type == "cuda":
        of_peak = f"of the card's {peak:g}; at least {LEAST_OF_PEAK:.0%} is expected"
        findings += [
            Finding(
                rank,
                f"matrix products: {one['product_tflops']:.3g} TFLOP/s in bf16, {of_peak}: see its clock, "
                "power and heat",
            )
            for rank, one in enumerate(found)
            if one["product_tflops"] < LEAST_OF_PEAK * peak
        ]
    return findings


def _wrong(found: Sequence[Measured]) -> list[Finding]:
    """Find devices with another product than most devices of their kind, or than their own of seconds ago."""
    findings = [
        Finding(rank, "the same product gave other bits after seconds of work: the device computes wrongly")
        for rank, one in enumerate(found)
        if not one["is_repeatable"]
    ]
    for name in {one["name"] for one in found}:
        alike = {rank: one["product_hash"] for rank, one in enumerate(found) if one["name"] == name}
        usual, count = Counter(alike.values()).most_common(1)[0]
        said = (
            f"its product of the same matrices has other bits than on {count} of {len(alike)} devices of its "
            f"kind ({name}): the device computes wrongly"
        )
        findings += [Finding(rank, said) for rank, its_hash in alike.items() if its_hash != usual]
    return findings


def _occupied(found: Sequence[Measured]) -> list[Finding]:
    said = "of the device's memory is in use before training begins. Does another process use it?"
    return [
        Finding(rank, f"{one['used_share']:.0%} {said}")
        for rank, one in enumerate(found)
        if one["used_share"] > MOST_USED
    ]


def summarise(found: Sequence[Measured], job: Job) -> str:
    products = spread([one["product_tflops"] for one in found], "TFLOP/s")
    copies = spread([one["copy_gb_per_second"] for one in found], "GB/s")
    hashes = len({(one["name"], one["product_hash"]) for one in found})
    same = "equal results" if hashes == len({one["name"] for one in found}) else f"{hashes} different results"
    return f"products {products}, copies {copies}, {same}"
