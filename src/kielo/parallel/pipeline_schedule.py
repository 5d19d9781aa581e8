"""Pipeline schedules of torch.distributed.pipelining, and the uses of its undocumented parts, by version.

Undocumented parts of its stages are in `pipeline_stage.py`.

`resolve/torch_versions.py` lists the versions that run each schedule. Stages are static: shapes are given,
and no forward is run to find them out, which torch does since 2.12 when both input and output examples
are given.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from kielo.parallel.pipeline_stage import LeanStage, ScatteringStage
from kielo.recipe.errors import KieloError
from kielo.resolve.stages import SCHEDULES
from kielo.resolve.torch_versions import schedule_complaint

TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Schedule(Protocol):
    def step(self, *args: Any, target: Tensor | None, losses: list[Tensor], **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of a pipeline schedule.

    name: a key of `TORCH_CLASSES`. micro_batches: their number in a step. loss: `loss(output, labels)` is
    a scalar. device: where the stages compute.
    """

    name: str
    micro_batches: int
    loss: Callable[[Tensor, Tensor], Tensor]
    device: torch.device


def make_schedule(
    options: ScheduleOptions,
    parts: Sequence[nn.Module],
    numbers: Sequence[int],
    num_stages: int,
    examples: Sequence[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
) -> Schedule:
    """Makes torch's schedule over `parts`, which are the stages `numbers` of `num_stages`.

    examples: (input, output) of each part for one micro-batch, on meta. Raises KieloError, naming the
    version, for a schedule that this torch does not run.
    """
    complaint = schedule_complaint(options.name, torch.__version__)
    if complaint is not None:
        raise KieloError(complaint)
    stages = [
        _stage_class(options.name, part)(
            part, number, num_stages, options.device, input_args=given, output_args=made, group=group
        )
        for part, number, (given, made) in zip(parts, numbers, examples)
    ]
    schedule_class = getattr(torch_schedules, TORCH_CLASSES[options.name])
    is_single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    # Losses are already divided by the global count of tokens; torch's default would divide gradients again.
    return schedule_class(
        stages[0] if is_single else stages,
        n_microbatches=options.micro_batches,
        loss_fn=options.loss,
        scale_grads=False,
    )


def _stage_class(schedule: str, part: nn.Module) -> type[LeanStage]:
    """Returns the class of a stage; ZeRO degrees 2 and 3 scatter gradients where the backward is whole."""
    is_scattered = part.zero >= 2 and not SCHEDULES[schedule].splits_backward
    return ScatteringStage if is_scattered else LeanStage


@contextmanager
def without_peers() -> Iterator[None]:
    """Makes schedules start without the messages by which neighbours agree on shapes.

    A rehearsed rank has no neighbours, and all shapes are given. torch before 2.13 asks neighbours only for
    shapes that are not given.
    """
    base = torch_schedules._PipelineSchedule
    if not hasattr(base, "_warmup_p2p"):
        yield
        return
    from torch.distributed.pipelining._utils import InferenceMode

    def begin(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    before, base._warmup_p2p = base._warmup_p2p, begin
    try:
        yield
    finally:
        base._warmup_p2p = before
