"""Pipeline schedules and stages of torch.distributed.pipelining, with the uses of its undocumented parts.

`resolve/software.py` lists the versions of torch that run each schedule. Stages are static: shapes are given.
The overridden methods are in torch 2.10, 2.11 and 2.13, which differ only in the parameters of the two
`_prepare_…_infra`, handed on here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward

from kielo.models.blocks.decoder import Decoder
from kielo.parallel.fsdp import set_last_micro_batch
from kielo.recipe.errors import KieloError
from kielo.resolve.software import schedule_complaint
from kielo.resolve.stages import SCHEDULES


class LeanStage(PipelineStage):
    """A stage whose receive buffers have memory from the start of the receive until their use.

    torch's `PipelineStage` keeps a buffer for each micro-batch of the step. Here a buffer between uses is a
    tensor on meta. A received activation lives until its backward pass, and a gradient until the end of its
    own.
    """

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **options)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # A schedule of several stages a rank keeps sent tensors until the end of the step. torch before 2.13
        # sends outputs with their graphs, and those keep what was received.
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        for send in sends:
            send.tensor = send.tensor.detach()
        return sends

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _move(self.args_recv_info[fwd_chunk_id], "meta")
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _move(self.grad_recv_info[bwd_chunk_id], "meta")
        return received

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )
        # The schedule keeps losses until the end of the step, and their graphs keep what was received.
        if full_backward and loss is not None and not loss._is_view():
            loss.detach_()

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Let torch make its buffers on meta: the wrapped calls make only buffers on `device`."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


class ScatteringStage(LeanStage):
    """A stage that reduces gradients after each backward pass, as FSDP2 does at ZeRO degrees 2 and 3.

    So the sum over micro-batches is a shard, not whole as in torch's stage. Not for schedules that split the
    backward pass: torch runs its halves past the hooks by which FSDP2 sees a layer's gradients.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], None]:
        if backward_type != "full":
            raise ValueError(f"a backward pass of type {backward_type!r} cannot be reduced by itself")
        set_last_micro_batch(self.submod, last_backward)
        return stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        ), None


def _move(receives: Iterable[Any], device: torch.device | str) -> None:
    """Replace the buffers of torch's receives by uninitialised buffers on `device`, unless they are there."""
    for receive in receives:
        buffer = getattr(receive, "buffer", None)  # the first stage's inputs have none
        if buffer is not None and buffer.device != torch.device(device):
            empty = torch.empty_like(buffer, device=device)
            receive.buffer = empty.requires_grad_(buffer.requires_grad)


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
    """Options of a pipeline schedule: a key of `TORCH_CLASSES`, and `loss(output, labels)`, a scalar."""

    name: str
    micro_batches: int
    loss: Callable[[Tensor, Tensor], Tensor]
    device: torch.device


def make_schedule(
    options: ScheduleOptions,
    parts: Sequence[Decoder],
    numbers: Sequence[int],
    num_stages: int,
    examples: Sequence[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
) -> Schedule:
    """Make torch's schedule over stages. examples: (input, output) of each for one micro-batch, on meta."""
    complaint = schedule_complaint(options.name, torch.__version__)
    if complaint is not None:
        raise KieloError(complaint)
    stages = [
        _stage_class(options.name, part)(
            part, number, num_stages, options.device, input_args=given, output_args=made, group=group
        )
        for part, number, (given, made) in zip(parts, numbers, examples, strict=True)
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


def _stage_class(schedule: str, part: Decoder) -> type[LeanStage]:
    """Return the class of a stage; ZeRO degrees 2 and 3 scatter gradients if the backward is whole."""
    is_scattered = part.zero >= 2 and not SCHEDULES[schedule].splits_backward
    return ScatteringStage if is_scattered else LeanStage


@contextmanager
def without_peers() -> Iterator[None]:
    """Start schedules without messages about shapes, because a rehearsed rank has no neighbours."""
    base: Any = torch_schedules._PipelineSchedule
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
