"""Pipeline parallelism: each rank of the pipeline axis has one or more stages, runs of consecutive layers.

Schedules and the sending of activations are torch's own (torch.distributed.pipelining): GPipe (Huang et al.
2018, arXiv:1811.06965), 1F1B and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473), zero bubble
and ZB-V (Qi et al. 2023, arXiv:2401.10241), DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437). Here a model is
cut, on the meta device, into stages that are laid out like whole models, and tied embeddings are kept one.

Shape letters: b = batch, s = this rank's part of the sequence, d = hidden size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kielo.parallel.materialise import local
from kielo.parallel.torch_pipelining import Schedule, make_schedule
from kielo.recipe.sections import Layout
from kielo.resolve.stages import layer_numbers, stages_of_rank

if TYPE_CHECKING:
    from kielo.parallel.mesh import Mesh


class Stages(nn.Module):
    """The stages of one rank as one model: `parts[i]` is stage `numbers[i]` of `num_stages`.

    Names are those of the whole model. With tied embeddings the last stage's head is a copy that no one
    optimises, saves or counts: `copy_tied` takes the embedding's values, `add_tied_gradient` gives it the
    gradient back.
    """

    def __init__(
        self, parts: Sequence[nn.Module], numbers: Sequence[int], num_stages: int, axis: DeviceMesh
    ) -> None:
        super().__init__()
        self.parts, self.numbers, self.num_stages = nn.ModuleList(parts), tuple(numbers), num_stages
        self.axis, self.config = axis, parts[0].config
        self._is_tied = bool(self.config.tie_word_embeddings)

    @property
    def first(self) -> nn.Module | None:
        """The stage that takes tokens, where this rank has it."""
        return self.parts[0] if self.numbers[0] == 0 else None

    @property
    def last(self) -> nn.Module | None:
        """The stage that has the head, where this rank has it."""
        return self.parts[-1] if self.numbers[-1] == self.num_stages - 1 else None

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            for name, parameter in part.named_parameters(*args, **options):
                if not (self._is_tied and name == "head.weight"):
                    yield name, parameter

    def tie(self) -> None:
        """What is tied lies on two stages, so there is nothing to make one."""

    def reset_buffers(self, device: torch.device | str) -> None:
        for part in self.parts:
            part.reset_buffers(device)

    @torch.no_grad()
    def copy_tied(self) -> None:
        """Before the first forward after the weights have moved: the head's values are the embedding's."""
        if self._is_tied:
            embed, head = self._vocabulary()
            self._pass_on(embed, head, Tensor.copy_)

    @torch.no_grad()
    def add_tied_gradient(self) -> None:
        """After the last backward of a step: the embedding has the gradient of both uses, unless it is
        frozen.
        """
        if not self._is_tied:
            return
        embed, head = (None if weight is None else weight.grad for weight in self._vocabulary())
        self._pass_on(head, embed, Tensor.add_)
        if self.last is not None:
            self.last.head.weight.grad = None

    def _vocabulary(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """(the embedding, the head), where this rank has them: the same rows of both."""
        embed = None if self.first is None else self.first.embed.weight
        return embed, None if self.last is None else self.last.head.weight

    def _pass_on(
        self, source: Tensor | None, target: Tensor | None, put: Callable[[Tensor, Tensor], Any]
    ) -> None:
        """`put(target, values of source)`. They are on the first and the last rank of the axis; of a V both
        on the first.
        """
        source, target = (None if tensor is None else local(tensor) for tensor in (source, target))
        group, other = self.axis.get_group(), self.axis.size() - 1 - self.axis.get_local_rank()
        device = self.axis.device_type  # where communicators work; offloaded weights are elsewhere
        if source is not None and target is not None:
            put(target, source)
        elif source is not None:
            dist.send(source.to(device).contiguous(), group=group, group_dst=other)
        elif target is not None:
            values = torch.empty_like(target, device=device)
            dist.recv(values, group=group, group_src=other)
            put(target, values.to(target.device))


def cut(model: nn.Module, stage: int, num_stages: int, layers: range) -> nn.Module:
    """Leave only what `stage` runs of `model` (best on meta), in place; its layers keep their numbers."""
    if stage > 0:
        model.embed = model.position_table = model.embed_norm = None
    if stage < num_stages - 1:
        model.norm = model.head = None
    for number in list(model.layers):
        if int(number) not in layers:
            del model.layers[number]
    return model


def into_stages(
    model: nn.Module, mesh: "Mesh", layout: Layout, lay_out_part: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """`model` (on meta) → this rank's stages, each laid out by `lay_out_part`."""
    axis = mesh["pipeline"]
    ranges = layer_numbers(layout.pipeline_layers)
    numbers = stages_of_rank(
        layout.pipeline_schedule, axis.size(), axis.get_local_rank(), len(ranges) // axis.size()
    )
    parts = [
        lay_out_part(cut(copy.deepcopy(model), number, len(ranges), ranges[number])) for number in numbers
    ]
    return Stages(parts, numbers, len(ranges), axis)


def schedule_of(
    stages: Stages,
    name: str,
    micro_batches: int,
    tokens_bs: Tensor,
    hidden_bsd: Tensor,
    output_bsd: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> Schedule:
    """torch's schedule `name` over this rank's stages, for that many micro-batches a step.

    For one micro-batch, on meta: the first stage takes `tokens_bs`, stages hand on `hidden_bsd`, the last one
    gives `output_bsd`, and `loss(output, labels)` is a scalar. Stages compute on `device`.
    """
    examples = [
        (
            tokens_bs if number == 0 else hidden_bsd,
            output_bsd if number == stages.num_stages - 1 else hidden_bsd,
        )
        for number in stages.numbers
    ]
    group = stages.axis.get_group()
    return make_schedule(
        name, stages.parts, stages.numbers, stages.num_stages, examples, micro_batches, loss, group, device
    )
