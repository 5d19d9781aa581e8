"""Context parallelism: each rank of the context axis holds a part of every sequence. Models change in place.

Only attention sees other positions, so only inner attention and its mask are replaced. The sequence is cut
into 2c blocks and rank r holds blocks r and 2c-1-r, one early and one late: causal attention is the same work
on every rank (the head-tail split of Llama 3's context parallelism; Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2).

Two forms, with the same results:
    all_gather   queries stay, keys and values come from all ranks (the same paper); any number of heads
    ulysses      heads are exchanged for sequence (Jacobs et al. 2023, arXiv:2309.14509); heads must divide

Sums over ranks are taken in the order of the ranks, so results repeat bit by bit if the kernels' results do.
Shape letters: b = batch, s = whole sequence, c = ranks, h = heads, g = key and value heads, k = head_dim; q,
k and v are [b, h or g, s/c, k]. Under tensor parallelism h and g are the heads of one tensor rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kielo.models.blocks.attention import InnerAttention, Mask, MaskMaker
from kielo.models.blocks.decoder import Decoder
from kielo.models.blocks.dropout import WeightNoise
from kielo.parallel import lower_right_attention
from kielo.parallel.mesh import Mesh
from kielo.recipe.amounts import multiples_around
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout


def context_positions(sequence_length: int, ranks: int, rank: int) -> Tensor:
    """Return the positions that `rank` holds, in its order: int64 [sequence_length / ranks] on the CPU."""
    if ranks == 1:
        return torch.arange(sequence_length)
    if sequence_length % (2 * ranks):
        lengths = " or ".join(str(length) for length in multiples_around(sequence_length, 2 * ranks))
        raise KieloError(
            f"a sequence of {sequence_length} tokens does not split into {2 * ranks} equal blocks, two for "
            f"each of layout.context = {ranks} ranks. Fix: a sequence_length of {lengths}"
        )
    blocks = torch.arange(sequence_length).view(2 * ranks, -1)
    return torch.cat((blocks[rank], blocks[-1 - rank]))


def apply_context_parallel(model: Decoder, mesh: Mesh, layout: Layout) -> None:
    """Replace `model.make_masks` and each layer's `attention.inner`, in place."""
    if layout.context == 1:
        return
    group = mesh["context"].get_group()
    mask_maker, inner = _FORMS[layout.context_attention]
    model.make_masks = mask_maker(group, model.make_masks)
    layers: list[Any] = list(model.layers.values())
    for layer in layers:
        layer.attention.inner = inner(group, layer.attention.inner)


class ContextMaskMaker(MaskMaker):
    """Base of both forms: it gathers the document numbers of whole sequences, and checks positions."""

    def __init__(self, group: dist.ProcessGroup, whole: MaskMaker) -> None:
        super().__init__(whole.windows, whole.needs_distance, whole.is_capped, whole.is_causal)
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._lengths_checked: set[int] = set()

    def whole_documents(self, documents_bs: Tensor) -> Tensor:
        """Gather document numbers: this rank's part [b, s/c] → [b, s] in the order of the sequence."""
        return in_sequence_order(_all_gather(documents_bs, self.group), dim=1)

    def places(self, documents_bs: Tensor, positions_s: Tensor | None) -> Tensor:
        """Return the places of this rank's tokens in their documents, which begin on any rank: [b, s/c]."""
        return super().places(self.whole_documents(documents_bs), None)[:, positions_s]

    def checked_positions(self, positions_s: Tensor | None) -> Tensor:
        """Return the positions.

        Raise ValueError if they are not `context_positions`, an error without a sign. Only the first forward
        of each length compares them, because the host waits for the device.
        """
        if positions_s is None:
            raise ValueError("a context rank holds a part of the sequence: forward needs its positions_s")
        length = positions_s.numel() * self.ranks
        if length in self._lengths_checked:
            return positions_s
        expected = context_positions(length, self.ranks, self.rank)
        if not torch.equal(positions_s.cpu(), expected):
            raise ValueError(f"positions_s are not context_positions({length}, {self.ranks}, {self.rank})")
        self._lengths_checked.add(length)
        return positions_s


class GatherMaskMaker(ContextMaskMaker):
    """Masks of this rank's queries against all keys: in blocks on a GPU, dense on the CPU."""

    def forward(
        self, documents_bs: Tensor | None, positions_s: Tensor | None, length: int, device: torch.device
    ) -> dict[int | None, Mask]:
        """Return window → mask. A `visible` is [b or 1, 1, s/c, s], keys in the order of the sequence."""
        positions_s = self.checked_positions(positions_s)
        whole_length = length * self.ranks
        all_documents = None if documents_bs is None else self.whole_documents(documents_bs)
        if self.makes_blocks(device):
            return self.in_blocks(all_documents, whole_length, device, positions_s)
        places_s = torch.arange(whole_length, device=positions_s.device)
        return self.masks(positions_s, places_s, documents_bs, all_documents)


class _ContextAttention(InnerAttention):
    def __init__(self, group: dist.ProcessGroup, whole: InnerAttention) -> None:
        super().__init__(whole.scale, whole.softcap, whole.alibi)
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)


class GatherAttention(_ContextAttention):
    """Attention of local queries to gathered keys and values; backward sums their gradients over all ranks.

    Each of the two blocks uses no keys after its own end (an encoder's all), so the work is equal. A layer's
    keys and values are whole from forward to backward: 2·b·g·s·k numbers.
    """

    def forward(
        self, q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, mask: Mask, noise: WeightNoise | None = None
    ) -> Tensor:
        parts = _GatherParts.apply(torch.stack((k_bgsk, v_bgsk)), self.group)
        keys, values = in_sequence_order(parts, dim=3).unbind()
        if mask.blocks is not None or not mask.is_causal:
            return self.attend(q_bhsk, keys, values, mask, noise)
        is_plain = mask.visible is None and self.softcap is None and lower_right_attention.has_kernel(q_bhsk)
        block = q_bhsk.shape[2] // 2
        halves = (
            (slice(0, block), (self.rank + 1) * block),
            (slice(block, 2 * block), (2 * self.ranks - self.rank) * block),
        )
        outputs = []
        for rows, end in halves:
            inputs = q_bhsk[:, :, rows], keys[:, :, :end], values[:, :, :end]
            if is_plain:
                outputs.append(lower_right_attention.attend_to_all(*inputs, self.scale))
            else:
                outputs.append(self.attend(*inputs, _part(mask, rows, end, q_bhsk.device)))
        return torch.cat(outputs, dim=2)


def _part(mask: Mask, rows: slice, end: int, device: torch.device) -> Mask:
    if mask.visible is not None:
        return mask.part(rows, slice(0, end))
    queries = rows.stop - rows.start
    visible = torch.ones(queries, end, dtype=torch.bool, device=device).tril(end - queries)
    return Mask(visible[None, None])


class UlyssesMaskMaker(ContextMaskMaker):
    """Masks of whole sequences, as on one device."""

    def forward(
        self, documents_bs: Tensor | None, positions_s: Tensor | None, length: int, device: torch.device
    ) -> dict[int | None, Mask]:
        self.checked_positions(positions_s)
        all_documents = None if documents_bs is None else self.whole_documents(documents_bs)
        return super().forward(all_documents, None, length * self.ranks, device)


class UlyssesAttention(_ContextAttention):
    """Attention with a part of the heads over whole sequences, between two all-to-alls."""

    def forward(
        self, q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, mask: Mask, noise: WeightNoise | None = None
    ) -> Tensor:
        # Consecutive heads stay together, so queries are on the rank of the keys that they share.
        by_rank = [heads.unflatten(1, (self.ranks, -1)) for heads in (q_bhsk, k_bgsk, v_bgsk)]
        sizes = [heads.shape[2] for heads in by_rank]
        parts_cbhsk = _Exchange.apply(torch.cat(by_rank, dim=2).movedim(1, 0), self.group)
        q, k, v = in_sequence_order(parts_cbhsk, dim=2).split(sizes, dim=1)
        heads = slice(self.rank * q.shape[1], (self.rank + 1) * q.shape[1])
        if noise is not None:  # its queries are now the whole sequence's
            places = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
            noise = noise._replace(positions_q=places)
        out_bhsk = self.attend(q, k, v, mask, noise, heads)
        heads_cbhsk = _Exchange.apply(in_rank_order(out_bhsk, self.ranks, dim=2), self.group)
        return heads_cbhsk.movedim(0, 1).flatten(1, 2)


# torch 2.13 warns of the name that 2.10 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_FORMS = {
    "all_gather": (GatherMaskMaker, GatherAttention),
    "ulysses": (UlyssesMaskMaker, UlyssesAttention),
}


def in_sequence_order(parts: Tensor | Sequence[Tensor], dim: int) -> Tensor:
    """Join the ranks' parts: [c, ..., s/c, ...] → [..., s, ...]; dim: the sequence's dim in the result."""
    halves = [part.chunk(2, dim) for part in parts]
    early, late = zip(*halves, strict=True)
    return torch.cat(early + late[::-1], dim)


def in_rank_order(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """Split a sequence into the ranks' parts: [..., s, ...] → [c, ..., s/c, ...]."""
    blocks = whole.chunk(2 * ranks, dim)
    return torch.stack([torch.cat((blocks[rank], blocks[-1 - rank]), dim) for rank in range(ranks)])


class _Exchange(torch.autograd.Function):
    """An all-to-all of [c, ...]: slice i goes to rank i, slice i of the result is from rank i."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


class _GatherParts(torch.autograd.Function):
    """An all-gather: [...] → [c, ...]. Backward sums in the order of the ranks, bf16 in fp32."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group).sum(0), None


def _all_to_all(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    # A view: dynamo of torch 2.11 drops the gradient of a function that returns the buffer it wrote to.
    return received.view_as(received)


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    gathered = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    _all_gather_single(gathered, part.contiguous(), group=group)
    return gathered.view(ranks, *part.shape)
