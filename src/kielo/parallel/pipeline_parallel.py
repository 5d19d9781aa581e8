"""Pipeline parallelism: each rank of the pipeline axis has one or more stages of consecutive layers.

Schedules and the sending of activations are torch's own (torch.distributed.pipelining): GPipe (Huang et al.
2018, arXiv:1811.06965), 1F1B and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473), zero bubble
and ZB-V (Qi et al. 2023, arXiv:2401.10241), DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437). Here a model is
cut, on the meta device, into stages that are parallelised like whole models, and tied embeddings stay equal.

Shape letters: b = batch, s = this rank's part of the sequence, d = hidden size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kielo.models.blocks.decoder import Decoder
from kielo.parallel.materialise import local
from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_schedule import Schedule, ScheduleOptions, make_schedule
from kielo.ranks.communicator import pass_message
from kielo.recipe.sections import Layout
from kielo.resolve.stages import layer_numbers, stages_of_rank


class Stages(nn.Module):
    """The stages of one rank as one model: `parts[i]` is stage `numbers[i]` of `num_stages`.

    Parameters have the names of the whole model. The last stage's tied head, and parameters of
    `Decoder.of_all_stages` on all stages but the first, are copies that are not optimised, saved or counted.
    `copy_tied` copies values to them, and `add_tied_gradient` adds up their gradients.
    """

    def __init__(
        self, parts: Sequence[Decoder], numbers: Sequence[int], num_stages: int, axis: DeviceMesh
    ) -> None:
        super().__init__()
        self.parts, self.numbers, self.num_stages = nn.ModuleList(parts), tuple(numbers), num_stages
        self.decoders = tuple(parts)  # a tuple's modules are not registered a second time
        self.axis, self.config = axis, parts[0].config
        self._is_tied = self.config.tie_word_embeddings

    @property
    def first(self) -> Decoder | None:
        """The stage that takes tokens, if this rank has it."""
        return self.decoders[0] if self.numbers[0] == 0 else None

    @property
    def last(self) -> Decoder | None:
        """The stage that has the head, if this rank has it."""
        return self.decoders[-1] if self.numbers[-1] == self.num_stages - 1 else None

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part, number in zip(self.decoders, self.numbers, strict=True):
            copies = part.of_all_stages if number > 0 else ()
            for name, parameter in part.named_parameters(*args, **options):
                if not (self._is_tied and name == "head.weight") and name not in copies:
                    yield name, parameter

    def tie(self) -> None:
        """Do nothing: embedding and head are on two stages, so they cannot be one tensor."""

    def reset_buffers(self, device: torch.device | str) -> None:
        for part in self.decoders:
            part.reset_buffers(device)

    @torch.no_grad()
    def copy_tied(self) -> None:
        """Copy values to the copies, before the first forward after a change."""
        for name in self.decoders[0].of_all_stages:
            self._copy_to_all(name)
        if self._is_tied:
            embed, head = self._vocabulary()
            self._pass_on(embed, head, Tensor.copy_)

    @torch.no_grad()
    def add_tied_gradient(self) -> None:
        """Add the copies' gradients to the first stage's, unless frozen, after the last backward."""
        for name in self.decoders[0].of_all_stages:
            self._sum_gradients(name)
        if not self._is_tied:
            return
        embed, head = (None if weight is None else weight.grad for weight in self._vocabulary())
        self._pass_on(head, embed, Tensor.add_)
        if self.last is not None and self.last.head is not None:
            self.last.head.weight.grad = None

    def _copy_to_all(self, name: str) -> None:
        """Copy the first stage's parameter to all others. The first stage is on the axis's first rank."""
        values = [local(part.get_parameter(name)) for part in self.decoders]
        sent = values[0].to(self.axis.device_type).contiguous()
        sent = sent.clone() if self.first is None else sent
        dist.broadcast(sent, group=self.axis.get_group(), group_src=0)
        for value in values if self.first is None else values[1:]:
            value.copy_(sent)

    def _sum_gradients(self, name: str) -> None:
        """Sum the parameter's gradients over all stages, into the first stage's gradient."""
        parameters = [part.get_parameter(name) for part in self.decoders]
        if not parameters[0].requires_grad:
            return
        total = torch.zeros_like(local(parameters[0]), device=self.axis.device_type)
        for parameter in parameters:
            if parameter.grad is not None:  # a stage without layers has none
                total += local(parameter.grad).to(total.device)
        dist.all_reduce(total, group=self.axis.get_group())
        gradient = parameters[0].grad
        if self.first is not None and gradient is not None:
            local(gradient).copy_(total)
        for parameter in parameters[0 if self.first is None else 1 :]:
            parameter.grad = None

    def _vocabulary(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (the embedding, the head), if this rank has them: the same rows of both."""
        embed = None if self.first is None else self.first.embed
        head = None if self.last is None else self.last.head
        return None if embed is None else embed.weight, None if head is None else head.weight

    def _pass_on(
        self, source: Tensor | None, target: Tensor | None, put: Callable[[Tensor, Tensor], Any]
    ) -> None:
        """Call `put(target, values of source)` between the first and the last rank, in a V on the first."""
        source, target = (None if tensor is None else local(tensor) for tensor in (source, target))
        group, other = self.axis.get_group(), self.axis.size() - 1 - self.axis.get_local_rank()
        device = self.axis.device_type  # of communicators; offloaded weights are elsewhere
        if source is not None and target is not None:
            put(target, source)
        elif source is not None:
            pass_message(dist.isend, source.to(device).contiguous(), group, other)
        elif target is not None:
            values = torch.empty_like(target, device=device)
            pass_message(dist.irecv, values, group, other)
            put(target, values.to(target.device))


def cut(model: Decoder, stage: int, num_stages: int, layers: range) -> Decoder:
    """Leave only the modules of `stage` in `model` (best on meta), in place. Layers keep their numbers."""
    if stage > 0:
        model.embed = model.position_table = model.embed_norm = None
    if stage < num_stages - 1:
        model.norm = model.transform = model.head = None
    for number in list(model.layers):
        if int(number) not in layers:
            del model.layers[number]
    return model


def into_stages(
    model: Decoder, mesh: Mesh, layout: Layout, parallelise_part: Callable[[Decoder], Decoder]
) -> Stages:
    """Cut `model` (on meta) into this rank's stages, each parallelised by `parallelise_part`."""
    axis = mesh["pipeline"]
    ranges = layer_numbers(layout)
    numbers = stages_of_rank(
        layout.pipeline_schedule, axis.size(), axis.get_local_rank(), len(ranges) // axis.size()
    )
    parts = [
        parallelise_part(cut(copy.deepcopy(model), number, len(ranges), ranges[number])) for number in numbers
    ]
    return Stages(parts, numbers, len(ranges), axis)


@dataclass(frozen=True)
class ExampleTensors:
    """Example tensors of a micro-batch, on meta: of the first stage, between stages, of the last stage."""

    tokens_bs: Tensor
    hidden_bsd: Tensor
    output_bsd: Tensor


def schedule_of(stages: Stages, options: ScheduleOptions, examples: ExampleTensors) -> Schedule:
    last, between = stages.num_stages - 1, examples.hidden_bsd
    inputs_and_outputs = [
        (between if number else examples.tokens_bs, between if number < last else examples.output_bsd)
        for number in stages.numbers
    ]
    group = stages.axis.get_group()
    return make_schedule(options, stages.decoders, stages.numbers, last + 1, inputs_and_outputs, group)
