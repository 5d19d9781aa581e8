"""Kielo's own step, on the parts that `train/build.py` assembles for one rank, compiled like its recipes."""

from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from contenders.contender import OPTIMISER, Contender, LeftOut, Work, learning_rate, next_tokens
from kielo.parallel.gradient_clipping import clip_gradients
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import build_mesh
from kielo.resolve.resolved import Resolved
from kielo.train.build import laid_out
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.forward_backward import forward_backward_of
from kielo.train.guard import Guard
from kielo.train.optimiser import build_optimiser


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
        materialise(model, work.device, work.value)
        self._forward_backward = forward_backward_of(
            model,
            identity.train.z_loss,
            placement.train.loss_chunk_tokens,
            mesh,
            placement.layout,
            identity.train.precision,
        )
        self._clip = partial(clip_gradients, model, mesh, identity.train.max_gradient_norm)
        self._guard = Guard(work.device, identity.train)
        self._optimiser = build_optimiser(model, identity.train)

    def step(self, number: int) -> Tensor:
        work = self.work
        micro_batches = [
            MicroBatch(tokens_bs, next_tokens(tokens_bs), None)
            for tokens_bs in work.micro_batch_tokens(number)
        ]
        sequences = work.micro_batches * work.micro_batch_sequences
        counted = torch.full((), sequences * (work.sequence_length - 1), device=work.device)
        loss = self._forward_backward(StepBatch(number, (), micro_batches, counted))
        with record_function(OPTIMISER):
            skip = self._guard.check(loss, self._clip())
            self._optimiser.step(learning_rate(work), skip)
            self._optimiser.zero_grad()
        self._guard.stop_if_diverged(number)
        return loss
