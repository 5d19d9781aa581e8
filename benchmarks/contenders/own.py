"""Kielo's own step, on the parts that `train/build.py` assembles for one rank, compiled where its recipes
are.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.profiler import record_function

from contenders.contender import OPTIMISER, Contender, LeftOut, Work, learning_rate, next_tokens
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import build_mesh
from kielo.resolve.resolved import Resolved
from kielo.train.build import build_step, laid_out
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.guard import Guard
from kielo.train.loop import optimiser_step


def build(work: Work) -> Contender:
    return Own(work, work.resolved)


def build_compiled(work: Work) -> Contender:
    """With layout.compile = true, which is the default on GPUs only."""
    resolved = work.resolved
    return Own(
        work,
        resolved.model_copy(update={"placement": resolved.placement.model_copy(update={"compile": True})}),
    )


def build_fp8(work: Work) -> Contender:
    if work.precision == "fp32":
        raise LeftOut("FP8 is beside bf16; --precision bf16 has it")
    return Own(work, work.resolved_fp8)


class Own(Contender):
    def __init__(self, work: Work, resolved: Resolved) -> None:
        super().__init__(work)
        identity, placement = resolved.identity, resolved.placement
        if placement.compile:
            self.note = "each layer compiled"
        if identity.precision == "fp8":
            scaling = f"{identity.fp8.scaling} scaling" + (", emulated" if identity.fp8.emulate else "")
            self.note = f"{self.note}; {scaling}".lstrip("; ")
        mesh = build_mesh(work.world, placement)
        model = laid_out(identity, placement, mesh, identity.precision)
        materialise(model, work.device, work.value)
        guard = Guard(work.device, identity.max_skipped_steps_in_a_row)
        step = build_step(model, mesh, identity, placement, identity.precision, guard)
        self._step = replace(step, clip=record_function(OPTIMISER)(step.clip))

    def step(self, number: int) -> Tensor:
        work = self.work
        pieces = [MicroBatch(tokens_bs, next_tokens(tokens_bs), None) for tokens_bs in work.pieces(number)]
        sequences = work.micro_batches * work.micro_batch_sequences
        counted = torch.full((), sequences * (work.sequence_length - 1), device=work.device)
        batch = StepBatch(number, (), pieces, counted)
        loss, _ = optimiser_step(self._step, batch, learning_rate(work))
        self._step.guard.stop_if_diverged(number)
        return loss
