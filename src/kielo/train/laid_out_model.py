"""A model without optimiser over the ranks of a job, whose results are whole and the same on all ranks.

Evaluation and proofs use it. Shape letters: b = rows, s = tokens of a row, v = vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kielo.models.blocks.decoder import Decoder
from kielo.parallel.fsdp import forward_only
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import Mesh, build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.pipeline_parallel import Stages
from kielo.ranks.world import World
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Resolved, filled
from kielo.train.build import laid_out, positions_of_rank
from kielo.train.feed import MicroBatch
from kielo.train.forward_backward import ForwardBackward, forward_backward_of
from kielo.train.precision import settle_matrix_products


@dataclass(frozen=True)
class LaidOutModel:
    """A model over the ranks, all of which call it with the same batch."""

    model: nn.Module
    forward_backward: ForwardBackward
    mesh: Mesh

    @staticmethod
    def of(resolved: Resolved, world: World, precision: Precision) -> "LaidOutModel":
        """Build the run's model in its placement, without values."""
        identity, placement = resolved.identity, resolved.placement
        model, mesh = built(resolved, world, precision)
        chunk_tokens = filled(placement.train.loss_chunk_tokens)
        passes = forward_backward_of(model, mesh, identity.train, chunk_tokens, placement.layout, precision)
        return LaidOutModel(model, passes, mesh)

    def logits(self, tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        """Return the logits [b, s, v] in fp32."""
        return self._on_ranks(tokens_bs, documents_bs, None, self.forward_backward.logits)

    def losses(self, tokens_bs: Tensor, documents_bs: Tensor | None, labels_bs: Tensor) -> Tensor:
        """Return the nats of each label [b, s] in fp32."""
        return self._on_ranks(tokens_bs, documents_bs, labels_bs, self.forward_backward.token_losses)

    @torch.inference_mode(False)  # FSDP2 keeps what it gathers, and inference tensors cannot be written again
    def _on_ranks(
        self,
        tokens_bs: Tensor,
        documents_bs: Tensor | None,
        labels_bs: Tensor | None,
        compute: Callable[[MicroBatch], Tensor],
    ) -> Tensor:
        rows, length = tokens_bs.shape
        rank, ranks = data_rank(self.mesh), data_ranks(self.mesh)
        parts = self.mesh["context"].size()
        multiple = self.mesh["tensor"].size() * (2 * parts if parts > 1 else 1)  # which the layout takes
        more = -rows % ranks, -length % multiple
        positions_s = positions_of_rank(length + more[1], self.mesh)
        columns_s = torch.arange(length + more[1]) if positions_s is None else positions_s
        columns_s = columns_s.to(tokens_bs.device)

        def own(whole_bs: Tensor) -> Tensor:
            return _padded(whole_bs, *more)[rank::ranks][:, columns_s]

        own_documents = None if documents_bs is None else own(documents_bs)
        micro_batch = MicroBatch(
            own(tokens_bs),
            own(tokens_bs if labels_bs is None else labels_bs),
            own_documents,
            positions_s=None if positions_s is None else columns_s,
        )
        with forward_only(self.model):
            part = compute(micro_batch)
            # Without the rows that fill up a batch, whose whole logits are many bytes on many ranks.
            whole = part.new_zeros(rows, length + more[1], *part.shape[2:])
            whole[rank::ranks, columns_s] = part[: len(range(rank, rows, ranks))]
            return sum_over_data(whole, self.mesh)[:, :length]


def built(resolved: Resolved, world: World, precision: Precision) -> tuple[Decoder | Stages, Mesh]:
    """Return the run's model over the ranks, without values, and their mesh.

    Layers are not compiled, because rows have many lengths.
    """
    identity, placement = resolved.identity, resolved.placement
    layout = placement.layout.model_copy(update={"compile": False})
    settle_matrix_products(precision)
    mesh = build_mesh(world, layout)
    plain = placement.model_copy(update={"layout": layout})
    model = laid_out(identity, plain, mesh, precision)
    return materialise(model, world.device, None, is_offloaded=layout.cpu_offload), mesh


def _padded(whole_bs: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last column, which no earlier position sees, and the last row, whose result is not taken."""
    wide = torch.cat([whole_bs, whole_bs[:, -1:].expand(-1, columns)], dim=1)
    return torch.cat([wide, wide[-1:].expand(rows, -1)])
