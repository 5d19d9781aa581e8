"""A rehearsal as text: rows for tables, and sentences, from the dictionaries of `rehearse.rehearse`."""

from collections.abc import Sequence
from typing import Any

_PHASES = ("forward", "backward", "update")
NOTES = (
    "what this is: torch's fake process group and fake tensors; kernels are the CPU's, whose attention "
    "stores what a GPU's flash attention does (keys and values of grouped heads are repeated for it). "
    "Fragments of the allocator and the kernels' working memory are added by a formula; buffers of the "
    "communication library are in what the card takes off the usable memory. Layers are not compiled: a "
    "run that compiles them holds less, as fused operators store no results in between."
)


def headline(rehearsal: dict[str, Any]) -> str:
    place = ", ".join(f"{axis} {number}" for axis, number in rehearsal["coordinates"].items()) or "alone"
    layout = " × ".join(f"{axis} {size}" for axis, size in rehearsal["axes"].items()) or "one rank"
    stages = "; ".join(
        f"stage {stage}: " + (f"layers {layers[0]} to {layers[1]}" if layers else "no layers")
        for stage, layers in rehearsal["stages"].items()
    )
    wanted, run = rehearsal["micro_batches_per_step"], rehearsal["rehearsed_micro_batches"]
    shortened = "" if wanted == run else f", {run} of them run"
    number = "1 micro-batch" if wanted == 1 else f"{wanted} micro-batches"
    return (
        f"{rehearsal['name']}: rank {rehearsal['rank']} of {rehearsal['world_size']:,} ({place}) of "
        f"{layout}; {stages}\n{number} of {rehearsal['micro_batch_sequences']} × "
        f"{rehearsal['sequence_length']} tokens a step{shortened}; recompute {rehearsal['recompute']}, zero "
        f"{rehearsal['zero']}; torch {rehearsal['torch']}, {rehearsal['seconds']:.0f} s"
    )


def memory(rehearsal: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Returns titles and rows: the most bytes at one time of each phase of the step, by kind."""
    peaks = rehearsal["peaks"]
    kinds = sorted(
        {kind for peak in peaks.values() for kind in peak["kinds"]}, key=lambda kind: -_largest(peaks, kind)
    )
    shown = [kind for kind in kinds if _largest(peaks, kind) >= 1e6] or kinds
    phases = [phase for phase in _PHASES if phase in peaks]
    rows = [(kind, *(_gigabytes(peaks[phase]["kinds"].get(kind, 0)) for phase in phases)) for kind in shown]
    total = ("peak", *(_gigabytes(peaks[phase]["bytes"]) for phase in phases))
    return ("GB at the peak of", *phases), [*rows, total]


def summary(rehearsal: dict[str, Any]) -> str:
    held, computed = rehearsal["state_bytes"], rehearsal["computed_state_bytes"]
    said = (
        "the same" if held == computed else ", ".join(f"{what} {size:,}" for what, size in computed.items())
    )
    flops = ", ".join(f"{count:.4g} of {what}" for what, count in rehearsal["flops"].items())
    return (
        "bytes between steps: " + ", ".join(f"{what} {size:,}" for what, size in held.items())
        + f"; computed from the tensor-parallel plan: {said}\n"
        f"FLOPs of a step: {sum(rehearsal['flops'].values()):.5g} ({flops})"
    )  # fmt: skip


def collectives(rehearsal: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    rows = [
        (row["axis"], row["operation"], f"{row['count']:,}", _gigabytes(row["bytes"]))
        for row in rehearsal["collectives"]
    ]
    return ("axis", "collective", "times a step", "GB of whole buffers"), rows


def verdict(rehearsals: Sequence[dict[str, Any]]) -> str:
    """Returns one sentence about the rank that needs most, by the definition of `resolve/memory.py`."""
    worst = max(rehearsals, key=lambda rehearsal: rehearsal["needed_bytes"])
    needed, usable = worst["needed_bytes"], worst["usable_bytes"]
    said = (
        f"most memory: {_gigabytes(worst['peak_bytes'])} GB of tensors on rank {worst['rank']} "
        f"(stage {', '.join(worst['stages'])}), in the {worst['peak_phase']} phase; "
        f"{_gigabytes(needed)} GB with the allocator's share and workspaces"
    )
    if usable is None:
        return f"{said}; the card of {worst['accelerator']} does not say how much there is"
    room = f"{_gigabytes(abs(usable - needed))} GB {'are left' if worst['fits'] else 'too much'}"
    fits = "fits" if worst["fits"] else "does not fit"
    return f"{said}, of {_gigabytes(usable)} usable on {worst['accelerator']}: it {fits}, {room}"


def host_verdict(rehearsals: Sequence[dict[str, Any]]) -> str:
    """Returns one sentence about the memory of a node itself, by the rank that needs most of it."""
    worst = max(rehearsals, key=lambda rehearsal: rehearsal["host_bytes_per_node"])
    size, usable = worst["host_bytes_per_node"], worst["usable_host_bytes_per_node"]
    room = f"{_gigabytes(abs(usable - size))} GB {'are left' if size <= usable else 'too much'}"
    return (
        f"host memory: {_gigabytes(size)} GB a node, if all its ranks are as rank {worst['rank']}, for the "
        f"copies that a save makes (on CPUs for all of the above too); a node has {_gigabytes(usable)} GB: "
        f"it {'fits' if size <= usable else 'does not fit'}, {room}"
    )


def _largest(peaks: dict[str, Any], kind: str) -> int:
    return max(peak["kinds"].get(kind, 0) for peak in peaks.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f}"
