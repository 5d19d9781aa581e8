"""Check: each rank may use the cores that the cluster's card gives its device, or at least one core alone."""

import os
from collections.abc import Sequence

from kielo.verify.preflight.job import Finding, Job


def measure(job: Job) -> dict[str, list[int] | int]:
    return {"local_rank": job.world.local_rank, "cores": sorted(os.sched_getaffinity(0))}


def judge(found: Sequence[dict], job: Job) -> list[Finding]:
    """Compare with the card's binding. Without it, check that the ranks of a node have a core each."""
    binding = job.cluster.jobs.cpu_bind if job.cluster.jobs else ""
    expected = cores_of_binding(binding) if binding and job.world.device.type == "cuda" else []
    findings = []
    for rank, one in enumerate(found):
        number, cores = one["local_rank"], set(one["cores"])
        if number < len(expected) and not cores <= expected[number]:
            findings.append(
                Finding(
                    rank,
                    f"may use the cores {in_ranges(cores)}; the card {job.cluster.name} gives local rank "
                    f"{number} {in_ranges(expected[number])}: start it with --cpu-bind={binding}",
                )
            )
    for ranks in job.ranks_of_nodes().values():
        shared = set().union(*(found[rank]["cores"] for rank in ranks))
        if len(shared) < len(ranks):
            message = f"the {len(ranks)} ranks of its node share {len(shared)} cores ({in_ranges(shared)})"
            # Ranks on a person's own machine are for trying a layout out.
            findings.append(Finding(ranks[0], message, is_refusal=job.world.device.type == "cuda"))
    return findings


def cores_of_binding(binding: str) -> list[set[int]]:
    """Return the cores of each local rank in srun's binding "mask_cpu:0xfe,…" or "map_cpu:1,…".

    Empty for bindings that leave the choice to Slurm.
    """
    kind, _, entries = binding.partition(":")
    if kind.endswith("map_cpu"):
        return [{int(entry)} for entry in entries.split(",")]
    if kind.endswith("mask_cpu"):
        masks = [int(entry, 16) for entry in entries.split(",")]
        return [{core for core in range(mask.bit_length()) if mask >> core & 1} for mask in masks]
    return []


def summarise(found: Sequence[dict], job: Job) -> str:
    counts = sorted({len(one["cores"]) for one in found})
    return f"{' to '.join(map(str, sorted({counts[0], counts[-1]})))} cores a rank"


def in_ranges(cores: set[int]) -> str:
    """Return the cores as a text: {1, 2, 3, 16} → "1-3,16"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
