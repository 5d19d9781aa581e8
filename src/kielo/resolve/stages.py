"""Splits layers into pipeline stages, and stages among pipeline ranks: arithmetic, no torch.

A stage's cost is its model FLOPs; the last has the head, and the embedding costs nothing. Stages are on ranks
in a loop (rank r has r, r + p, …: Narayanan et al. 2021, arXiv:2104.04473) or in a V (rank r has r and 2p - 1
- r: Qi et al. 2023, arXiv:2401.10241), in which the first and the last stage share a rank.
"""

from itertools import pairwise
from typing import NamedTuple

from kielo.models.parameter_shapes import token_flops
from kielo.recipe.sections import CompleteModel, Layout


class Schedule(NamedTuple):
    stages_per_rank: int  # if the recipe has none
    is_v: bool
    splits_backward: bool  # gradients of inputs first, of weights later


SCHEDULES = {
    "gpipe": Schedule(1, False, False),
    "1f1b": Schedule(1, False, False),
    "interleaved_1f1b": Schedule(2, False, False),
    "interleaved_zero_bubble": Schedule(2, False, True),
    "zbv": Schedule(2, True, True),
    "dualpipev": Schedule(2, True, True),
}


def num_stages(layout: Layout) -> int:
    usual = SCHEDULES[layout.pipeline_schedule].stages_per_rank
    return layout.pipeline * (layout.pipeline_stages_per_rank or usual)


def layers_of_stages(model: CompleteModel, sequence_length: int, layout: Layout) -> tuple[int, ...]:
    """Return the layers of each stage, from the recipe or by cost. The rules have passed the layout."""
    if layout.pipeline == 1:
        return (model.num_hidden_layers,)
    if layout.pipeline_layers is not None:
        return layout.pipeline_layers
    head = 6 * model.vocab_size * model.hidden_size
    layer = (token_flops(model, sequence_length) - head) / model.num_hidden_layers
    return split_by_cost(model.num_hidden_layers, num_stages(layout), layer, head)


def stages_of_rank(schedule: str, ranks: int, rank: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the stages of pipeline rank `rank` of `ranks`, in the order of the model."""
    if SCHEDULES[schedule].is_v:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def rank_of_each_stage(schedule: str, ranks: int, stages_per_rank: int) -> list[int]:
    stages = [stages_of_rank(schedule, ranks, rank, stages_per_rank) for rank in range(ranks)]
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    return [owner[stage] for stage in range(len(owner))]


def split_by_cost(num_layers: int, stages: int, layer_cost: float, head_cost: float) -> tuple[int, ...]:
    """Return the layers of each stage, in order, so that the heaviest stage is as light as possible.

    Each stage but the last has at least one layer. The last stage has the head, but no layer if the head
    costs more. Of equal splits, choose fewer layers on later stages, which have the logits too. Raises
    ValueError if there are fewer layers than stages less one.
    """
    if num_layers < stages - 1 or stages < 1:
        raise ValueError(f"{num_layers} layers do not make {stages} stages")
    if stages == 1:
        return (num_layers,)
    splits = []
    for last in range(min(num_layers - (stages - 1), -(-num_layers // stages)) + 1):
        each, more = divmod(num_layers - last, stages - 1)
        splits.append((each + 1,) * more + (each,) * (stages - 1 - more) + (last,))
    return min(splits, key=lambda of: max(max(of[:-1]) * layer_cost, of[-1] * layer_cost + head_cost))


def layer_numbers(layout: Layout) -> list[range]:
    """Return the numbers of each stage's layers in a resolved layout."""
    if layout.pipeline_layers is None:
        raise ValueError("layout.pipeline_layers is not resolved")
    layers = layout.pipeline_layers
    starts = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def micro_batch_complaint(schedule: str, micro_batches: int, ranks: int, stages: int) -> str | None:
    """Return why torch's schedule cannot run this number of micro-batches, with the fix, or None."""
    if schedule in ("1f1b", "dualpipev") and micro_batches < stages:
        return (
            f"{schedule} needs at least one micro-batch a step for each stage, but there are {micro_batches} "
            f"for {stages}. Fix: {stages} micro-batches a step, by a smaller train.micro_batch_sequences or "
            "more tokens a step"
        )
    if schedule.startswith("interleaved") and not _makes_rounds(micro_batches, ranks):
        fewer, more = range(micro_batches, 0, -1), range(micro_batches, 2 * micro_batches + 1)
        below, above = (next(each for each in some if _makes_rounds(each, ranks)) for some in (fewer, more))
        return (
            f"{schedule} takes its micro-batches in equal rounds over layout.pipeline = {ranks} ranks, but "
            f"{micro_batches} do not make them. Fix: {below} or {above} micro-batches a step"
        )
    return None


def round_of_micro_batches(micro_batches: int, ranks: int) -> int:
    """Return the micro-batches that torch's interleaved schedules pass through a stage in turn.

    micro_batches: of a step, 0 for whole rounds over the ranks.
    """
    return micro_batches // max(1, micro_batches // ranks) or ranks


def _makes_rounds(micro_batches: int, ranks: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


# Chunks of a rank's part of the sequence with `layout.tensor_overlap`. More would hide more of a collective,
# but by the planner's formulas the smaller products cost more than that (benchmarks/results/planner.md).
CHUNKS = 2


def chunks_of(layout: Layout) -> int:
    """Return the chunks of a rank's part of the sequence; 1: collectives are not cut."""
    return CHUNKS if layout.tensor_overlap == "chunked" and layout.tensor > 1 else 1
