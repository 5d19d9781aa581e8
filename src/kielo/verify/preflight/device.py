"""Check: every device multiplies and copies as fast as its fellows, and computes right numbers.

A device that computes wrongly without an error is rare and ruins a run. So all devices multiply the same
matrices, and compare the result with the fp64 product, the first time and after seconds of work.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from kielo.verify.preflight.job import Finding, Job, Sizes, spread

# Of the median of all devices of its kind. GPUs: a proposal; LUMI's own tests allow 5 to 10 %. Processors
# share caches and memory with other work.
SLOWEST = {"cuda": 0.93, "cpu": 0.2}
# Of the card's peak: all are far below where clocks or power are capped. The best products that were measured
# on A100, H100, GH200 and MI300X reach 0.51 to 0.87 (Bekman, ml-engineering: MAMF); the MI250X is not known.
LEAST_OF_PEAK = 0.3
# In units of `rounding_errors`. A product that is rounded once has 0.5. Equal bits cannot be expected: a
# library may split the sum into blocks, round each block's sum to bf16, and add them in any order (atomics).
# Eight such roundings, all in one direction, are 4.
MOST_ROUNDINGS = 4.0
_NOT_A_NUMBER = 1e9  # roundings, for a product with NaN or infinity
MOST_USED = 0.2  # of the device's memory, before this job has used much of it


class Measured(TypedDict):
    name: str
    product_tflops: float
    copy_gb_per_second: float
    product_roundings: float
    later_product_roundings: float
    used_share: float


def measure(job: Job) -> Measured:
    """Return the rates of this rank's device, errors of its product, and the share of its memory in use."""
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
    right_product = left.double() @ right.double()
    errors = [rounding_errors(product, right_product) for product in (first, last)]
    del first, last, right_product
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _best_seconds(lambda: target.copy_(source), sizes.copies, sizes.rounds, device)
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "product_tflops": work / seconds / 1e12,
        "copy_gb_per_second": 2 * sizes.copy_bytes * sizes.copies / copying / 1e9,
        "product_roundings": errors[0],
        "later_product_roundings": errors[1],
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


def rounding_errors(product: Tensor, expected: Tensor) -> float:
    """Return the largest error of an element of a product [n, n], in roundings.

    A rounding is the step between two numbers of the product's precision, of the element or of the usual
    element (root mean square), whichever is larger: sums that cancel were rounded when they were larger. The
    fp32 sum of n numbers adds √n steps of fp32, as a random walk does.
    """
    usual = expected.square().mean().sqrt()
    step = torch.finfo(product.dtype).eps * expected.abs().clamp(min=usual)
    step += math.sqrt(len(product)) * torch.finfo(torch.float32).eps * usual
    error = ((product.double() - expected).abs() / step).max().item()
    return error if math.isfinite(error) else _NOT_A_NUMBER


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
    """Find devices whose product differs from the fp64 product by more than rounding."""
    return [
        Finding(
            rank,
            f"a matrix product {when} differs from the fp64 product by {roundings:.3g} roundings, "
            f"at most {MOST_ROUNDINGS:g} are expected: the device computes wrongly",
        )
        for rank, one in enumerate(found)
        for when, roundings in _products(one).items()
        if roundings > MOST_ROUNDINGS
    ]


def _products(one: Measured) -> dict[str, float]:
    return {"at first": one["product_roundings"], "after seconds of work": one["later_product_roundings"]}


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
    error = max(error for one in found for error in _products(one).values())
    return f"products {products}, copies {copies}, errors of at most {error:.2g} roundings"
