"""Check: the clocks of the ranks agree. Leases, file times and logs are compared between nodes.

All ranks read their clocks when a barrier ends, which is within milliseconds. Each clock is compared with the
median of all.
"""

import statistics
import time
from collections.abc import Sequence

import torch.distributed as dist

from kielo.verify.preflight.job import CLOCK_ROUNDS, Finding, Job

# A proposal: no site publishes a limit. A lease of the run folder is taken over after minutes.
WARNING_SECONDS, REFUSAL_SECONDS = 1.0, 60.0


def measure(job: Job) -> list[float]:
    read = []
    for _ in range(CLOCK_ROUNDS):
        if job.world.size > 1:
            dist.barrier(group=job.host.group)
        read.append(time.time())
    return read


def judge(found: Sequence[list[float]], job: Job) -> list[Finding]:
    findings = []
    for rank, off in enumerate(offsets(found)):
        if abs(off) >= WARNING_SECONDS:
            direction = "fast" if off > 0 else "slow"
            findings.append(
                Finding(
                    rank,
                    f"its clock is {abs(off):.1f} s {direction}, against the median of all ranks; less than "
                    f"{WARNING_SECONDS:g} s is expected",
                    is_refusal=abs(off) >= REFUSAL_SECONDS,
                )
            )
    return findings


def offsets(found: Sequence[list[float]]) -> list[float]:
    """Return each rank's seconds ahead of the median of all, the least of the rounds.

    A rank that leaves one barrier late is not late in every barrier.
    """
    medians = [statistics.median(reads) for reads in zip(*found, strict=True)]
    return [
        min((read - median for read, median in zip(reads, medians, strict=True)), key=abs) for reads in found
    ]


def summarise(found: Sequence[list[float]], job: Job) -> str:
    return f"at most {max(map(abs, offsets(found))):.3f} s from the median"
