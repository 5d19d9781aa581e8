"""Kielo's own step, on the parts that `train/build.py` assembles for one rank, compiled like its recipes."""

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
from kielo.train.loop import optimiser_step
from kielo.train.watch.checks import Guard


def build(work: Work) -> Contender:
    return Own(work, work.resolved)


def build_compiled(work: Work) -> Contender:
    """Builds it with layout.compile = true, which is the default on GPUs only."""
    placement = work.resolved.placement
    layout = placement.layout.model_copy(update={"compile": True})
    placement = placement.model_copy(update={"layout": layout})
    return Own(work, work.resolved.model_copy(update={"placement": placement}))


def build_fp8(work: Work) -> Contender:
    if work.precision == "fp32":
        raise LeftOut("FP8 is beside bf16; --precision bf16 has it")
    return Own(work, work.resolved_fp8)


class Own(Contender):
    def __init__(self, work: Work, resolved: Resolved) -> None:
        super().__init__(work)
        identity, placement = resolved.identity, resolved.placement
        if placement.layout.compile:
            self.note = "each layer compiled"
        if identity.train.precision == "fp8":
            fp8 = identity.train.fp8
            scaling = f"{fp8.scaling} scaling" + (", emulated" if fp8.emulate else "")
            self.note = f"{self.note}; {scaling}".lstrip("; ")
        mesh = build_mesh(work.world, placement.layout)
        model = laid_out(identity, placement, mesh, identity.train.precision)
        materialise(model, work.device, lambda name, shape, box: work.value(name, shape)[box])
        train, chunk_tokens = identity.train, placement.train.loss_chunk_tokens
        guard = Guard(work.device, train)
        step = build_step(model, mesh, train, placement.layout, chunk_tokens, train.precision, guard)
        self._step = replace(step, clip=record_function(OPTIMISER)(step.clip))

    def step(self, number: int) -> Tensor:
        work = self.work
        micro_batches = [
            MicroBatch(tokens_bs, next_tokens(tokens_bs), None)
            for tokens_bs in work.micro_batch_tokens(number)
        ]
        sequences = work.micro_batches * work.micro_batch_sequences
        counted = torch.full((), sequences * (work.sequence_length - 1), device=work.device)
        batch = StepBatch(number, (), micro_batches, counted)
        loss, _ = optimiser_step(self._step, batch, learning_rate(work))
        self._step.guard.was_bad()
        self._step.guard.stop_if_diverged(number)
        return loss
