"""The loss of predicting each next token, for a micro-batch or for the output of the last pipeline stage."""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from kielo.parallel.mesh import Mesh
from kielo.parallel.tensor_parallel import gather_sequence
from kielo.train.feed import MicroBatch
from kielo.train.loss import IGNORED_LABEL, LossOptions, chunked_loss
from kielo.train.profile import HEAD_AND_LOSS

_SHARES = 16  # of a micro-batch's tokens, that the head takes 1 to 16 of


@dataclass(frozen=True)
class NextToken:
    """Computes this rank's share of the loss, a scalar in fp32, by `chunked_loss`.

    tensor_axis: the ranks that each hold a part of the vocabulary; None: this one holds it all. For
    keeps_gradients and compiles see `LossOptions`. splits_sequence: does the tensor axis split the model's
    output along the sequence. picks_counted: the head multiplies little more than the tokens whose labels
    count, which are few in masked-token training.
    """

    z_loss: float
    chunk_tokens: int
    tensor_axis: DeviceMesh | None = None
    keeps_gradients: bool = False
    compiles: bool = False
    splits_sequence: bool = False
    picks_counted: bool = False

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, divisor: Tensor) -> Tensor:
        hidden_bsd = self.gathered(
            model(
                micro_batch.inputs_bs,
                micro_batch.documents_bs,
                micro_batch.positions_s,
                micro_batch.dropout_keys_b2,
            )
        )
        return self.of_hidden(model, hidden_bsd, micro_batch.labels_bs, divisor, micro_batch.counted)

    def gathered(self, hidden_bsd: Tensor) -> Tensor:
        """Returns the model's output, whole along the sequence and plain, on each rank of the tensor axis."""
        if self.tensor_axis is None:
            return hidden_bsd
        return gather_sequence(hidden_bsd, self.tensor_axis, self.splits_sequence)

    def of_hidden(
        self,
        model: nn.Module,
        hidden_bsd: Tensor,
        labels_bs: Tensor,
        divisor: Tensor,
        counted: int | None = None,
    ) -> Tensor:
        """Computes the loss of gathered hidden states. counted: at least as many labels as count, or None."""
        if self.picks_counted and counted is not None:
            hidden_bsd, labels_bs = pick_counted(hidden_bsd, labels_bs, counted)
        options = LossOptions(
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
        # The head is read only now: FSDP2 makes it whole in the forward and keeps it so until the backward.
        with record_function(HEAD_AND_LOSS):
            head = model.head
            return chunked_loss(hidden_bsd, head.weight, labels_bs, divisor, options, head.bias)


def pick_counted(hidden_bsd: Tensor, labels_bs: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """Returns hidden states [c, d] and labels [c]: those that count, in their order, then some that do not.

    counted: at least as many as count. c is that, rounded up to a sixteenth of all tokens, so that few shapes
    occur. The host does not wait for the device, which alone knows where the labels are.
    """
    labels_n = labels_bs.flatten()
    unit = math.ceil(len(labels_n) / _SHARES)
    rows = max(1, math.ceil(counted / unit)) * unit
    places_c = (labels_n == IGNORED_LABEL).byte().argsort(stable=True)[:rows]
    return hidden_bsd.flatten(0, -2).index_select(0, places_c), labels_n.index_select(0, places_c)


def tensor_axis(mesh: Mesh) -> DeviceMesh | None:
    """Returns the tensor axis for `NextToken`: None where it has one rank."""
    axis = mesh.of_parameters("tensor")
    return axis if axis.size() > 1 else None
