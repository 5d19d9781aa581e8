"""All that Kielo needs of torch.distributed.pipelining beyond its documented surface, by version.

Tested with torch 2.13. Stages are made static: shapes are given, and no forward is run to find them out,
which torch does since 2.12 when both input and output examples are there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from kielo.recipe.errors import KieloError

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
# Measured: ZBV fails at start-up on 2.10.
_NEEDS_VERSION = {"zbv": (2, 11), "dualpipev": (2, 11)}


class Schedule(Protocol):
    def step(self, *args: Any, target: Tensor | None, losses: list[Tensor], **kwargs: Any) -> Any: ...


def make_schedule(
    name: str,
    parts: Sequence[nn.Module],
    numbers: Sequence[int],
    num_stages: int,
    examples: Sequence[tuple[Tensor, Tensor]],
    micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Schedule:
    """KieloError, naming the version, for a schedule that this torch does not run."""
    needed = _NEEDS_VERSION.get(name)
    if needed is not None and needed > VERSION:
        raise KieloError(
            f"layout.pipeline_schedule = {name!r} needs torch {'.'.join(map(str, needed))} or newer; this is "
            f"{torch.__version__}. What would work: 1f1b, interleaved_1f1b or interleaved_zero_bubble"
        )
    stages = [
        PipelineStage(part, number, num_stages, device, input_args=given, output_args=made, group=group)
        for part, number, (given, made) in zip(parts, numbers, examples)
    ]
    made = getattr(torch_schedules, TORCH_CLASSES[name])
    is_single = issubclass(made, torch_schedules.PipelineScheduleSingle)
    # Losses are divided by the global count of tokens already; torch's default would divide gradients once
    # more.
    return made(
        stages[0] if is_single else stages, n_microbatches=micro_batches, loss_fn=loss, scale_grads=False
    )


@contextmanager
def without_peers() -> Iterator[None]:
    """While it lasts, schedules begin without the messages by which neighbours agree on shapes: a rehearsed
    rank has no neighbours, and all shapes are given. KieloError, naming the version, where torch begins in
    another way.
    """
    base = torch_schedules._PipelineSchedule
    if not hasattr(base, "_warmup_p2p"):
        raise KieloError(
            f"torch {torch.__version__} cannot rehearse layout.pipeline > 1; what would work: torch 2.13, or "
            "layout.pipeline = 1"
        )
    from torch.distributed.pipelining._utils import InferenceMode

    def begin(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    before, base._warmup_p2p = base._warmup_p2p, begin
    try:
        yield
    finally:
        base._warmup_p2p = before
