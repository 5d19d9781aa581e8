"""One step's forward and backward passes: a batch → the step's loss, with gradients left on the parameters.

The loss is the sum over counted tokens divided by their number in the whole step, which is known *before* the
first backward. So gradients need only be summed, and the layout and micro-batch size change nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from kielo.models.blocks.decoder import Decoder, Head
from kielo.parallel.fsdp import COMPUTE_DTYPES, set_last_micro_batch
from kielo.parallel.mesh import Mesh, sum_over, sum_over_data
from kielo.parallel.pipeline_parallel import ExampleTensors, Stages, schedule_of
from kielo.parallel.pipeline_schedule import Schedule, ScheduleOptions
from kielo.parallel.tensor_parallel import gather_sequence
from kielo.ranks.communicator import pass_message
from kielo.recipe.sections import Layout, Precision, TrainIdentity
from kielo.resolve.stages import SCHEDULES, rank_of_each_stage
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.loss import IGNORED_LABEL, LossOptions, chunked_loss, token_losses, whole_logits
from kielo.train.profile import HEAD_AND_LOSS

_SHARES = 16  # the head takes 1 to 16 sixteenths of a micro-batch's tokens


@dataclass(frozen=True)
class NextToken:
    """The model's loss on a micro-batch: this rank's share, a scalar in fp32, by `chunked_loss`.

    tensor_axis: the ranks that each have a part of the vocabulary, or None. `LossOptions` has
    keeps_gradients, compiles. splits_sequence: the tensor axis splits the model's output along the sequence.
    picks_counted: the head multiplies little more than the counted tokens, which are few among masked tokens.
    """

    z_loss: float
    chunk_tokens: int
    tensor_axis: DeviceMesh | None = None
    keeps_gradients: bool = False
    compiles: bool = False
    splits_sequence: bool = False
    picks_counted: bool = False

    def __call__(self, model: Decoder, micro_batch: MicroBatch, divisor: Tensor) -> Tensor:
        of = micro_batch
        return self.of_hidden(model, self.hidden(model, of), of.labels_bs, divisor, of.counted)

    def hidden(self, model: Decoder, micro_batch: MicroBatch) -> Tensor:
        """Return the whole model's output [b, s, d], gathered."""
        of = micro_batch
        return self.gathered(model(of.inputs_bs, of.documents_bs, of.positions_s, of.dropout_keys_b2))

    def gathered(self, hidden_bsd: Tensor) -> Tensor:
        """Return the model's output, whole along the sequence and plain, on each rank of the tensor axis."""
        if self.tensor_axis is None:
            return hidden_bsd
        return gather_sequence(hidden_bsd, self.tensor_axis, self.splits_sequence)

    def of_hidden(
        self,
        model: Decoder,
        hidden_bsd: Tensor,
        labels_bs: Tensor,
        divisor: Tensor,
        counted: int | None = None,
    ) -> Tensor:
        """Compute the loss of gathered hidden states. `counted` is at least the number of counted labels."""
        if self.picks_counted and counted is not None:
            hidden_bsd, labels_bs = pick_counted(hidden_bsd, labels_bs, counted)
        options = self._of_loss(model)

        def loss(hidden_bsd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return chunked_loss(hidden_bsd, weight, labels_bs, divisor, options, bias)

        with record_function(HEAD_AND_LOSS):
            return _head_of(model)(hidden_bsd, loss)

    def token_losses(self, model: Decoder, hidden_bsd: Tensor, labels_bs: Tensor) -> Tensor:
        """Return the cross-entropy [b, s] of each label in nats, by chunks, of gathered hidden states."""
        options = self._of_loss(model)
        return _head_of(model)(
            hidden_bsd, lambda x, weight, bias: token_losses(x, weight, labels_bs, options, bias)
        )

    def logits(self, model: Decoder, hidden_bsd: Tensor) -> Tensor:
        """Return whole logits [b, s, vocab_size] in fp32 of gathered hidden states."""
        options = self._of_loss(model)
        return _head_of(model)(hidden_bsd, lambda x, weight, bias: whole_logits(x, weight, options, bias))

    def _of_loss(self, model: Decoder) -> LossOptions:
        return LossOptions(
            self.z_loss,
            self.chunk_tokens,
            group=None if self.tensor_axis is None else self.tensor_axis.get_group(),
            vocab_size=model.config.vocab_size,
            softcap=model.config.final_logit_softcapping,
            keeps_gradients=self.keeps_gradients,
            compiles=self.compiles,
            varies=self.picks_counted,
            fp8=getattr(model, "fp8_head", None),
        )


def _head_of(model: Decoder) -> Head:
    if model.head is None:
        raise ValueError("this stage of the model has no head")
    return model.head


def pick_counted(hidden_bsd: Tensor, labels_bs: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [c, d] and labels [c]: all that count in their order, then some that do not.

    c is `counted` (at least their number), rounded up to a sixteenth of all tokens, so that few shapes occur.
    The host does not wait for the device, which alone knows where the labels are.
    """
    labels_n = labels_bs.flatten()
    unit = math.ceil(len(labels_n) / _SHARES)
    rows = max(1, math.ceil(counted / unit)) * unit
    places_c = (labels_n == IGNORED_LABEL).byte().argsort(stable=True)[:rows]
    return hidden_bsd.flatten(0, -2).index_select(0, places_c), labels_n.index_select(0, places_c)


def tensor_axis(mesh: Mesh) -> DeviceMesh | None:
    """Return the tensor axis for `NextToken`, or None for one rank."""
    axis = mesh.of_parameters("tensor")
    return axis if axis.size() > 1 else None


class PipelineForwardBackward:
    """`PlainForwardBackward` through pipeline stages. Every pipeline rank gets the same numbers.

    torch's schedule orders micro-batches and stages, and what FSDP2 gathers and reduces. splits_sequence: the
    tensor axis splits hidden states, so stages exchange fewer columns than there are tokens.
    """

    def __init__(
        self,
        model: Stages,
        objective: NextToken,
        sum_over_data: Callable[[Tensor], Tensor],
        mesh: Mesh,
        schedule: str,
        splits_sequence: bool,
        compute_dtype: torch.dtype,
    ):
        self._model, self._objective, self._sum_over_data = model, objective, sum_over_data
        self._axis, self._schedule_name, self._compute_dtype = mesh["pipeline"], schedule, compute_dtype
        self._sequence_parts = mesh["tensor"].size() if splits_sequence else 1
        ranks = self._axis.size()
        self._rank_of_each_stage = rank_of_each_stage(schedule, ranks, model.num_stages // ranks)
        self._made: tuple[tuple[int, ...], Schedule] | None = None  # shapes, and the schedule for them
        self._divisor = torch.ones(())
        self._most_counted: int | None = None  # the most counted labels of a micro-batch of the step
        self.own_loss = torch.tensor(torch.nan)  # this rank's part of the last step's loss
        self._positions_s: Tensor | None = None
        for part in model.parts:
            part.register_forward_pre_hook(self._with_positions, with_kwargs=True)
        if model.last is not None:
            model.last.register_forward_hook(lambda module, inputs, output: objective.gathered(output))

    def __call__(self, batch: StepBatch) -> Tensor:
        micro_batches = batch.micro_batches
        self._divisor = self._sum_over_data(batch.counted_tokens).clamp(min=1).to(torch.float32)
        counts = [micro_batch.counted for micro_batch in micro_batches]
        known = [count for count in counts if count is not None]
        self._most_counted = max(known) if len(known) == len(counts) else None
        self._model.copy_tied()
        self._place(micro_batches[0])
        # torch's schedules take the whole step and split it again
        inputs: tuple[Tensor, ...] = ()
        labels = None
        if self._model.first is not None:
            inputs = (torch.cat([micro_batch.inputs_bs for micro_batch in micro_batches]),)
        if self._model.last is not None:
            labels = torch.cat([micro_batch.labels_bs for micro_batch in micro_batches])
        of_sequences = {
            name: torch.cat([getattr(micro_batch, name) for micro_batch in micro_batches])
            for name in ("documents_bs", "dropout_keys_b2")
            if getattr(micro_batches[0], name) is not None
        }
        losses: list[Tensor] = []
        self._schedule(micro_batches).step(
            *inputs, target=labels, losses=losses, return_outputs=False, **of_sequences
        )
        self._model.add_tied_gradient()
        loss = torch.zeros((), device=self._divisor.device)
        for part in losses:  # the last stage's
            loss += part.detach()
        self.own_loss = loss
        return sum_over(self._sum_over_data(loss), [self._axis])

    def score(self, micro_batch: MicroBatch, divisor: Tensor, z_loss: float) -> Tensor:
        """Return this data rank's share of the loss, with another z-loss, without gradients.

        It runs stage after stage, because torch's schedules do not take the sizes of held-out batches.
        """
        hidden_bsd = self._through_stages(micro_batch)
        loss = torch.zeros((), device=divisor.device)
        if self._model.last is not None:
            loss = replace(self._objective, z_loss=z_loss).of_hidden(
                self._model.last, hidden_bsd, micro_batch.labels_bs, divisor, micro_batch.counted
            )
        return sum_over(loss, [self._axis])

    def token_losses(self, micro_batch: MicroBatch) -> Tensor:
        """Return the cross-entropy of each label in nats, fp32, the same on all pipeline ranks."""
        hidden_bsd = self._through_stages(micro_batch)
        losses_bs = torch.zeros(micro_batch.labels_bs.shape, device=hidden_bsd.device)
        if self._model.last is not None:
            losses_bs = self._objective.token_losses(self._model.last, hidden_bsd, micro_batch.labels_bs)
        return sum_over(losses_bs, [self._axis])

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return whole logits [b, s, vocab_size] in fp32, the same on all pipeline ranks."""
        hidden_bsd, size = self._through_stages(micro_batch), self._model.config.vocab_size
        if self._model.last is not None:
            return sum_over(self._objective.logits(self._model.last, hidden_bsd), [self._axis])
        return sum_over(
            torch.zeros(*micro_batch.inputs_bs.shape, size, device=hidden_bsd.device), [self._axis]
        )

    def _through_stages(self, micro_batch: MicroBatch) -> Tensor:
        """Return the output of this rank's last stage, after all stages before it."""
        self._place(micro_batch)
        self._model.copy_tied()
        model, group, ranks = self._model, self._axis.get_group(), self._rank_of_each_stage
        hidden_bsd = micro_batch.inputs_bs  # of the first stage: tokens
        for part, number in zip(model.parts, model.numbers, strict=True):
            if number > 0 and ranks[number - 1] != group.rank():
                hidden_bsd = torch.empty(
                    self._hidden_shape(micro_batch), dtype=self._compute_dtype, device=hidden_bsd.device
                )
                pass_message(dist.irecv, hidden_bsd, group, ranks[number - 1])
            hidden_bsd = part(hidden_bsd, documents_bs=micro_batch.documents_bs)
            if number + 1 < model.num_stages and ranks[number + 1] != group.rank():
                pass_message(dist.isend, hidden_bsd.contiguous(), group, ranks[number + 1])
        return hidden_bsd

    def _place(self, micro_batch: MicroBatch) -> None:
        """Set the positions for all stages, whose hidden states may have fewer columns than tokens."""
        tokens_bs = micro_batch.inputs_bs
        self._positions_s = micro_batch.positions_s
        if self._positions_s is None:
            self._positions_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)

    def _with_positions(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # the schedule would split an argument like the batch
        return args, kwargs | {"positions_s": self._positions_s}

    def _hidden_shape(self, micro_batch: MicroBatch) -> tuple[int, int, int]:
        rows, columns = micro_batch.inputs_bs.shape
        return rows, columns // self._sequence_parts, self._model.config.hidden_size

    def _schedule(self, micro_batches: list[MicroBatch]) -> Schedule:
        shapes = (len(micro_batches), *micro_batches[0].inputs_bs.shape)
        if self._made is None or self._made[0] != shapes:
            tokens_bs = micro_batches[0].inputs_bs
            empty = partial(torch.empty, device="meta", dtype=self._compute_dtype, requires_grad=True)
            examples = ExampleTensors(
                tokens_bs=tokens_bs.to("meta"),
                hidden_bsd=empty(self._hidden_shape(micro_batches[0])),
                output_bsd=empty((*tokens_bs.shape, self._model.config.hidden_size)),
            )
            name, number = self._schedule_name, len(micro_batches)
            options = ScheduleOptions(name, number, self._loss, tokens_bs.device)
            self._made = shapes, schedule_of(self._model, options, examples)
        return self._made[1]

    def _loss(self, hidden_bsd: Tensor, labels_bs: Tensor) -> Tensor:
        if self._model.last is None:
            raise ValueError("this rank lacks the last stage, which computes the loss")
        return self._objective.of_hidden(
            self._model.last, hidden_bsd, labels_bs, self._divisor, self._most_counted
        )


class PlainForwardBackward:
    """The whole model on each micro-batch in turn. sum_over_data: over ranks with different tokens."""

    def __init__(self, model: Decoder, objective: NextToken, sum_over_data: Callable[[Tensor], Tensor]):
        self._model, self._objective, self._sum_over_data = model, objective, sum_over_data
        self.own_loss = torch.tensor(torch.nan)  # this rank's part of the last step's loss

    def __call__(self, batch: StepBatch) -> Tensor:
        """Return the loss in nats per counted token of all ranks, with the z-loss, fp32, on the device."""
        # a step of padding only has loss 0 and no gradient; a division by 0 would make it not finite
        divisor = self._sum_over_data(batch.counted_tokens).clamp(min=1).to(torch.float32)
        loss = torch.zeros((), device=divisor.device)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            set_last_micro_batch(self._model, number == len(batch.micro_batches))
            part = self._objective(self._model, micro_batch, divisor)
            part.backward()
            loss += part.detach()
        self.own_loss = loss
        return self._sum_over_data(loss)

    def score(self, micro_batch: MicroBatch, divisor: Tensor, z_loss: float) -> Tensor:
        return replace(self._objective, z_loss=z_loss)(self._model, micro_batch, divisor)

    def token_losses(self, micro_batch: MicroBatch) -> Tensor:
        """Return the cross-entropy of each label in nats, fp32."""
        hidden_bsd = self._objective.hidden(self._model, micro_batch)
        return self._objective.token_losses(self._model, hidden_bsd, micro_batch.labels_bs)

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return whole logits [b, s, vocab_size] in fp32."""
        return self._objective.logits(self._model, self._objective.hidden(self._model, micro_batch))


ForwardBackward = PlainForwardBackward | PipelineForwardBackward


def forward_backward_of(
    model: nn.Module,
    mesh: Mesh,
    train: TrainIdentity,
    loss_chunk_tokens: int,
    layout: Layout,
    precision: Precision,
) -> ForwardBackward:
    sum_over_ranks = partial(sum_over_data, mesh=mesh)
    goes_twice = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    splits_sequence = layout.tensor > 1 and bool(layout.sequence_parallel)
    is_compiled, is_masked = bool(layout.compile), train.objective == "masked_tokens"
    objective = NextToken(
        train.z_loss,
        loss_chunk_tokens,
        tensor_axis(mesh),
        goes_twice,
        is_compiled,
        splits_sequence,
        is_masked,
    )
    if isinstance(model, Decoder):
        return PlainForwardBackward(model, objective, sum_over_ranks)
    if not isinstance(model, Stages):
        raise TypeError(f"{type(model).__name__} is no model of kielo.models, nor stages of one")
    schedule, dtype = layout.pipeline_schedule, COMPUTE_DTYPES[precision]
    return PipelineForwardBackward(model, objective, sum_over_ranks, mesh, schedule, splits_sequence, dtype)
