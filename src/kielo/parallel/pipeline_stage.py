"""Stages that hold less than torch's: buffers of messages that are under way, and shards of gradients.

torch's `PipelineStage` allocates a receive buffer for each micro-batch of the step when the schedule is made,
and keeps it; and it reduces gradients once, after the last micro-batch, so that their sum is whole on each
data-parallel rank whatever the ZeRO degree. What is overridden here is in torch 2.10, 2.11 and 2.13; of its
parameters only those of the two `_prepare_…_infra` differ, which are handed on as they come.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from kielo.parallel.fsdp import set_last_micro_batch


class LeanStage(PipelineStage):
    """A stage whose receive buffers have memory from the start of the receive until their use.

    Between uses a buffer is a tensor on meta, which keeps shape and type. An activation that a forward pass
    has taken lives until its backward pass, as that pass's input; a gradient until the end of its backward
    pass. Shapes must be given (static stages).
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
        # A schedule of several stages a rank keeps what it sent until the end of the step. torch before 2.13
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
        self, bwd_chunk_id: int, loss: torch.Tensor | None = None, full_backward: bool = True, **options: Any
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, **options)
        # The schedule keeps losses until the end of the step, and their graphs keep what was received.
        if full_backward and loss is not None and not loss._is_view():
            loss.detach_()

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Lets torch make its buffers on meta: it makes them on `device`, and nothing else of that call."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


class ScatteringStage(LeanStage):
    """A stage that reduces gradients after each backward pass, as FSDP2 does at ZeRO degrees 2 and 3.

    The sum over micro-batches is then a shard. Not for schedules that split the backward pass: torch runs its
    halves past the hooks by which FSDP2 sees a layer's gradients.
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
    """Replaces the buffers of torch's receives by uninitialised ones on `device`, unless they are there."""
    for receive in receives:
        buffer = getattr(receive, "buffer", None)  # the first stage's inputs have none
        if buffer is not None and buffer.device != torch.device(device):
            empty = torch.empty_like(buffer, device=device)
            receive.buffer = empty.requires_grad_(buffer.requires_grad)
