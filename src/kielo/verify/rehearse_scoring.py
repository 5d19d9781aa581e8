"""Evaluation and parity on one rank of a real job, at their real size, on this machine.

As in `rehearse.py` the other ranks do not exist and tensors have no memory. What runs is the model of
`kielo evaluate --ranks`, with its largest batches: windows of held-out text, whose logits exist by chunks, or
questions of tasks, whose logits are whole. Of parity it is the optimiser step of Kielo's side.
"""

from collections.abc import Callable
from functools import partial

import torch

from kielo.parallel.materialise import local, materialise
from kielo.parallel.mesh import build_mesh, data_ranks
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.memory import needed_bytes
from kielo.resolve.memory_row import MOST_TOKENS_PER_FORWARD, asked_tokens
from kielo.resolve.resolved import Resolved, filled
from kielo.train.build import laid_out
from kielo.train.forward_backward import forward_backward_of
from kielo.train.laid_out_model import LaidOutModel
from kielo.verify.parity_size import RanksOptions, step_of_parity
from kielo.verify.rank_watch import RankWatch
from kielo.verify.rehearse import parameters_of, refuse_unrehearsed, rehearse
from kielo.verify.screens import RehearsedScoring
from kielo.verify.torch_fakes import fake_tensors, fake_world, groups_of

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def rehearse_evaluation(resolved: Resolved, rank: int) -> dict[str, int]:
    """Return what `kielo evaluate` and `kielo verify parity` do on a rank → the bytes that it needs.

    Raise KieloError for an encoder.
    """
    if resolved.identity.train.objective == "masked_tokens":
        raise KieloError(
            'train.objective = "masked_tokens": one process scores an encoder, and no rank shares it. '
            "Fix: leave out --evaluation"
        )
    return {what: needed(rank) for what, needed in evaluation_work(resolved).items()}


def evaluation_work(resolved: Resolved, parity_length: int | None = None) -> dict[str, Callable[[int], int]]:
    """Return work → a function that rehearses it on a rank and returns the bytes that it needs.

    parity_length: tokens of parity's sequences, None for the run's longest.
    """

    def scoring(precision: Precision, asks_tasks: bool, rank: int) -> int:
        return rehearse_scoring(resolved, rank, precision, asks_tasks)["needed_bytes"]

    def parity(precision: Precision, rank: int) -> int:
        options = RanksOptions(precision=precision, sequence_length=parity_length).fitting(resolved)
        return rehearse(step_of_parity(resolved, options), rank)["needed_bytes"]

    work: dict[str, Callable[[int], int]] = {}
    for precision in PRECISIONS:
        work[f"text in {precision}"] = partial(scoring, precision, False)
        work[f"tasks in {precision}"] = partial(scoring, precision, True)
        work[f"parity in {precision}"] = partial(parity, precision)
    return work


def rehearse_scoring(
    resolved: Resolved, rank: int, precision: Precision, asks_tasks: bool
) -> RehearsedScoring:
    """Return the bytes of one rank in a forward pass of the run's longest sequences.

    asks_tasks: with the whole logits of questions. Raise KieloError as `rehearse` does.
    """
    identity, placement = resolved.identity, resolved.placement
    layout = placement.layout.model_copy(update={"compile": False})
    placement = placement.model_copy(update={"layout": layout})
    refuse_unrehearsed(placement, rank)
    length = identity.longest_sequence_length
    with fake_world(rank, placement.world_size, has_pipeline=layout.pipeline > 1) as world:
        mesh = build_mesh(world, layout)
        model = laid_out(identity, placement, mesh, precision)
        with fake_tensors(), RankWatch(*groups_of(mesh)) as watch:
            materialise(model, world.device, None)
            parameters = [local(parameter) for parameter in parameters_of(model)]
            watch.ledger.name(parameters, "parameters")
            watch.ledger.name(model.buffers(), "tables")
            chunk_tokens = filled(placement.train.loss_chunk_tokens)
            passes = forward_backward_of(model, mesh, identity.train, chunk_tokens, layout, precision)
            laid = LaidOutModel(model, passes, mesh)
            rows = data_ranks(mesh) * max(1, MOST_TOKENS_PER_FORWARD // length)
            if asks_tasks:
                rows = max(1, asked_tokens(identity.model, length) // length)
            for _ in range(2):  # in the first, torch computes how DTensors split
                watch.begin()
                tokens_bs = torch.zeros(rows, length, dtype=torch.int64)
                documents_bs = torch.zeros_like(tokens_bs) if identity.dataset.mask_documents else None
                if asks_tasks:
                    laid.logits(tokens_bs, documents_bs)
                else:
                    laid.losses(tokens_bs, documents_bs, tokens_bs)
            held = watch.ledger.bytes_of(parameters)
            peak = max(peak.bytes for peak in watch.ledger.peaks().values())
    return {
        "precision": precision,
        "rows": rows,
        "held_bytes": held,
        "peak_bytes": peak,
        "needed_bytes": int(needed_bytes(held, peak)),
    }
