"""The language-model loss: head, cross-entropy and z-loss in one autograd function, without full logits.

In: hidden states [n, d], the head's weight [v, d], its optional bias [v], labels [n]. Out: one fp32 number,
the sum over counted labels divided by a divisor that the caller has counted over all ranks and micro-batches.
Gradients are made chunk by chunk in the forward pass, while a chunk's logits exist (the idea of Liger Kernel,
Hsu et al. 2024, arXiv:2410.10989).

If the head's rows are split over the tensor axis, each rank makes the logits of its own rows, and a chunk's
softmax is combined from three numbers a token and rank (the idea of Megatron-LM, Shoeybi et al. 2019,
arXiv:1909.08053, section 3). Shape letters: n = tokens, d = hidden size, v = vocabulary (this rank's rows of
it), c = tokens of one chunk, t = ranks of the tensor axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import cross_entropy

from kielo.parallel.fp8 import Fp8Head
from kielo.recipe.sections import Fp8
from kielo.resolve.activation_bytes import LEAST_CHUNK_TOKENS
from kielo.resolve.software import chosen_backend

IGNORED_LABEL = -100


@dataclass(frozen=True)
class LossOptions:
    """Options of `chunked_loss`.

    z_loss: the weight of log² Z, which keeps logits from drifting (PaLM, Chowdhery et al. 2022,
    arXiv:2204.02311, section 5). log Z is the log of the softmax's sum. At most `chunk_tokens` × v logits
    exist at one time. group: the tensor axis if it has more than one rank, with a part of the head's rows on
    each. vocab_size: the number of tokens, None for one token a row. Further rows (over all ranks) are
    padding, without a share in log Z and with a gradient of exactly 0. A label that is padding makes the loss
    infinite. softcap: logits first become cap × tanh(logit / cap), in their own precision as in Hugging
    Face's Gemma (Gemma 2, Gemma Team 2024, arXiv:2408.00118, section 2). fp8: logits and the gradient to
    hidden states are FP8 products.

    keeps_gradients: the loss can be differentiated several times, always by the same factor, for pipeline
    schedules that split the backward. compiles: torch.compile fuses the operations on a chunk's logits, which
    halves their memory traffic on a GPU. varies: the number of tokens changes between calls, so the compiled
    code is for any number from the first call on. Else torch compiles again at the first change, in the
    middle of a run.
    """

    z_loss: float = 0.0
    chunk_tokens: int = LEAST_CHUNK_TOKENS
    group: dist.ProcessGroup | None = None
    vocab_size: int | None = None
    softcap: float | None = None
    keeps_gradients: bool = False
    compiles: bool = False
    varies: bool = False
    fp8: Fp8 | None = None


def chunked_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    divisor: Tensor,
    options: LossOptions | None = None,
    head_bias: Tensor | None = None,
) -> Tensor:
    """Σ over counted labels of (cross-entropy + z_loss × log² Z) / divisor, in nats, a scalar in fp32.

    hidden [..., d], head_weight [v, d] (any precision), labels [...] with -100 for labels that do not count,
    divisor a scalar tensor (the global count of counted labels, so that gradients are equal for every
    layout). head_bias [v] is added to the logits, in the precision of both, and laid out as the weight. The
    softmax is in fp32. The gradients of weight and bias are summed over the chunks in fp32.

    With `group`, head_weight is this rank's rows, plain [v, d] or a DTensor with Shard(0) on that axis alone:
    rank r has ids r × v … (r + 1) × v - 1. hidden, labels (ids of the whole vocabulary) and divisor are the
    same on all ranks of the group, and so is the loss, to the bit. Call backward on each rank's own loss, not
    on a sum over the ranks. The gradient to hidden is only the part of this rank's rows: the caller, who
    gathered hidden along the sequence, sums and scatters the parts in one collective. A label outside the
    vocabulary makes the loss infinite. Raises ValueError for a DTensor with another layout.
    """
    options = options or LossOptions()
    if options.group is not None and options.group.size() == 1:
        options = replace(options, group=None)
    weight_vd = _own_rows(head_weight, options.group)
    bias_v = None if head_bias is None else _own_rows(head_bias, options.group)
    given = [tensor for tensor in (hidden, weight_vd, bias_v) if tensor is not None]
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return _ChunkedLoss.apply(
        hidden.flatten(0, -2), labels.flatten(), divisor, needs_gradients, options, weight_vd, bias_v
    )


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    options: LossOptions | None = None,
    head_bias: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of each label in nats, fp32, of the labels' shape; 0 for labels without loss.

    Arguments and errors are as in `chunked_loss`. At most `chunk_tokens` × v logits exist at one time.
    """
    options = options or LossOptions()
    group = options.group
    weight_vd = _own_rows(head_weight, group)
    bias_v = None if head_bias is None else _own_rows(head_bias, group)
    hidden_nd, labels_n = hidden.flatten(0, -2), labels.flatten()
    losses_n = torch.zeros(len(labels_n), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(labels_n), options.chunk_tokens):
        chunk = slice(start, start + options.chunk_tokens)
        is_counted_c = labels_n[chunk] != IGNORED_LABEL
        labels_c = labels_n[chunk].masked_fill(~is_counted_c, 0)
        logits_cv = _own_logits(hidden_nd[chunk], weight_vd, bias_v, options)
        if group is None or group.size() == 1:
            chunk_losses_c = cross_entropy(logits_cv.float(), labels_c, reduction="none")
        else:
            own_3c, _ = _own_sums(logits_cv, labels_c - group.rank() * logits_cv.shape[1])
            all_t3c = own_3c.new_empty(group.size(), *own_3c.shape)
            dist.all_gather(list(all_t3c.unbind(0)), own_3c, group=group)
            maxima_tc, sums_tc, targets_tc = all_t3c.unbind(1)
            maxima_c = maxima_tc.amax(0)
            sums_c = (sums_tc * (maxima_tc - maxima_c).exp()).sum(0)
            chunk_losses_c = sums_c.log() + (maxima_c - targets_tc.amax(0))
        losses_n[chunk] = chunk_losses_c.masked_fill(~is_counted_c, 0.0)
    return losses_n.view(labels.shape)


@torch.no_grad()
def whole_logits(
    hidden: Tensor, head_weight: Tensor, options: LossOptions, head_bias: Tensor | None = None
) -> Tensor:
    """Return the logits [..., vocab_size] in fp32, the same on all ranks of `options.group`."""
    group = options.group
    bias_v = None if head_bias is None else _own_rows(head_bias, group)
    own = _own_logits(hidden.flatten(0, -2), _own_rows(head_weight, group), bias_v, options).float()
    if group is not None and group.size() > 1:
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        own = torch.cat(parts, dim=-1)
    return own[:, : options.vocab_size].unflatten(0, hidden.shape[:-1])


def _own_logits(hidden_nd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, options: LossOptions) -> Tensor:
    """Return the logits of this rank's rows [n, v], −∞ in rows that pad the vocabulary."""
    logits_nv = torch.mm(hidden_nd, weight_vd.t())
    if bias_v is not None:
        logits_nv.add_(bias_v)
    if options.softcap is not None:
        logits_nv = options.softcap * logits_nv.div_(options.softcap).tanh_()
    if options.vocab_size is not None:
        first_row = 0 if options.group is None else options.group.rank() * len(weight_vd)
        logits_nv[:, max(options.vocab_size - first_row, 0) :] = -torch.inf
    return logits_nv


def _own_rows(head_weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's rows of weight or bias, plain. The gradient of a DTensor keeps its placement."""
    if not isinstance(head_weight, DTensor):
        return head_weight
    num_ranks = 1 if group is None else group.size()
    fitting = [(Shard(0),), (Replicate(),)] if num_ranks == 1 else [(Shard(0),)]
    if head_weight.placements not in fitting or head_weight.device_mesh.size() != num_ranks:
        raise ValueError(
            f"the head's weight is placed as {head_weight.placements} on {head_weight.device_mesh}. The loss "
            f"over {num_ranks} rank(s) of the tensor axis takes Shard(0) on a mesh of that axis alone"
        )
    return head_weight.to_local(grad_placements=head_weight.placements)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        labels_n: Tensor,
        divisor: Tensor,
        needs_gradients: bool,
        options: LossOptions,
        *head: Tensor | None,
    ) -> Tensor:
        """Compute the loss. `head` is weight_vd, and bias_v or None."""
        weight_vd, bias_v = head
        if weight_vd is None:
            raise ValueError("a head has a weight")
        z_loss, softcap, group = options.z_loss, options.softcap, options.group
        num_tokens = len(weight_vd)  # of this rank's rows; the rows after them are padding
        if options.vocab_size is not None:
            first_row = 0 if group is None else group.rank() * num_tokens
            num_tokens = min(max(options.vocab_size - first_row, 0), num_tokens)
        fp8 = None if options.fp8 is None else Fp8Head(weight_vd, options.fp8)
        chunk_on_one_rank = _compiled(_chunk, chosen_backend()) if options.compiles else _chunk
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        # needs_input_grad ignores no_grad. A frozen input costs neither its matmul nor its memory.
        needs = ctx.needs_input_grad
        needs_hidden, needs_weight, needs_bias = (needs_gradients and needs[place] for place in (0, 5, 6))
        hidden_gradient = torch.empty_like(hidden_nd) if needs_hidden else None
        # the first chunk's product writes it
        weight_gradient = torch.empty_like(weight_vd, dtype=torch.float32) if needs_weight else None
        bias_gradient = None
        if bias_v is not None and needs_bias:
            bias_gradient = torch.zeros_like(bias_v, dtype=torch.float32)
        for start in range(0, max(len(hidden_nd), 1), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            hidden_cd = hidden_nd[chunk]
            counted_c = labels_n[chunk] != IGNORED_LABEL
            labels_c = labels_n[chunk].masked_fill(~counted_c, 0)
            weights_c = counted_c / divisor.float()
            logits_cv = torch.mm(hidden_cd, weight_vd.t()) if fp8 is None else fp8.logits(hidden_cd)
            if bias_v is not None:
                logits_cv.add_(bias_v)
            if softcap is not None:
                tanh_cv = logits_cv.div_(softcap).tanh_()
                logits_cv = softcap * tanh_cv
            if num_tokens < logits_cv.shape[1]:
                # the product includes the padding, because a GPU multiplies an even width faster
                logits_cv[:, num_tokens:] = -torch.inf
            if options.varies:
                _for_any_number(logits_cv, labels_c, weights_c)
            if group is None:
                parts = chunk_on_one_rank(logits_cv, labels_c, weights_c, z_loss, needs_gradients)
            else:
                parts = _chunk_over_ranks(logits_cv, labels_c, weights_c, needs_gradients, options, group)
            chunk_loss, logits_gradient_cv = parts
            loss += chunk_loss
            if logits_gradient_cv is None:
                continue
            if softcap is not None:
                logits_gradient_cv = torch.ops.aten.tanh_backward(logits_gradient_cv, tanh_cv)
            if hidden_gradient is not None and fp8 is None:
                torch.mm(logits_gradient_cv, weight_vd, out=hidden_gradient[chunk])
            elif hidden_gradient is not None and fp8 is not None:
                hidden_gradient[chunk] = fp8.hidden_gradient(logits_gradient_cv)
            if weight_gradient is not None:
                _add_product(weight_gradient, logits_gradient_cv.t(), hidden_cd, is_first=start == 0)
            if bias_gradient is not None:
                bias_gradient += logits_gradient_cv.sum(0, dtype=torch.float32)
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        ctx.weight_dtype, ctx.keeps_gradients = weight_vd.dtype, options.keeps_gradients
        ctx.is_scaled = False
        return loss

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward pass in place: a copy for a 128k vocabulary takes gigabytes."""
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss can be differentiated once. Its gradients are used up")
        hidden_gradient, weight_gradient, bias_gradient = ctx.gradients
        if not ctx.is_scaled:
            if hidden_gradient is not None:
                hidden_gradient.mul_(loss_gradient)
            if weight_gradient is not None:
                weight_gradient = _scaled(weight_gradient, loss_gradient, ctx.weight_dtype)
            if bias_gradient is not None:
                bias_gradient = _scaled(bias_gradient, loss_gradient, ctx.weight_dtype)
            ctx.is_scaled = True
        gradients = (hidden_gradient, weight_gradient, bias_gradient)
        ctx.gradients = gradients if ctx.keeps_gradients else None
        return hidden_gradient, None, None, None, None, weight_gradient, bias_gradient


def _chunk(
    logits_cv: Tensor, labels_c: Tensor, weights_c: Tensor, z_loss: float, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the chunk's share of the loss, and its gradient to the logits in the logits' precision."""
    targets_c1 = labels_c.unsqueeze(1)
    log_probabilities_cv = torch.log_softmax(logits_cv, dim=-1, dtype=torch.float32)
    target_log_probabilities_c = log_probabilities_cv.gather(1, targets_c1).squeeze(1)
    log_z_c = None
    if z_loss:
        # log Z = logit − log probability of a row that is not padding, as the first row never is
        log_z_c = logits_cv[:, 0].float() - log_probabilities_cv[:, 0]
    loss, slopes_c = _loss_and_slopes(-target_log_probabilities_c, log_z_c, weights_c, z_loss)
    if not needs_gradients:
        return loss, None
    if torch.compiler.is_compiling():
        return loss, _fused_gradient(log_probabilities_cv.exp(), slopes_c, labels_c, weights_c, logits_cv)
    return loss, _gradient(log_probabilities_cv.exp_(), slopes_c, targets_c1, weights_c, logits_cv)


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)


def _for_any_number(*tensors: Tensor, dim: int = 0) -> None:
    """Make torch.compile write code for any size of `dim`, which counts tokens."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _chunk_over_ranks(
    logits_cv: Tensor,
    labels_c: Tensor,
    weights_c: Tensor,
    needs_gradients: bool,
    options: LossOptions,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor | None]:
    """Return the whole loss and the gradient to these logits, which are of this rank's rows only."""
    own_sums, loss_of_all = _own_sums, _loss_of_all
    if options.compiles:
        backend = chosen_backend()
        own_sums, loss_of_all = _compiled(_own_sums, backend), _compiled(_loss_of_all, backend)
    targets_c = labels_c - group.rank() * logits_cv.shape[1]
    if options.varies:
        _for_any_number(targets_c)
    own_3c, exponentials_cv = own_sums(logits_cv, targets_c)
    # One collective a chunk, of 12 bytes a token and rank, is small beside the chunk's matmuls. A single
    # collective for all chunks would need every chunk's logits computed twice.
    all_t3c = own_3c.new_empty(group.size(), *own_3c.shape)
    dist.all_gather(list(all_t3c.unbind(0)), own_3c, group=group)
    sums = _Sums(own_3c[0], all_t3c, exponentials_cv)
    if options.varies:
        _for_any_number(sums.own_maxima_c)
        _for_any_number(all_t3c, dim=2)
    return loss_of_all(logits_cv, targets_c, weights_c, sums, options.z_loss, needs_gradients)


class _Sums(NamedTuple):
    """Numbers of a chunk's softmax over ranks.

    own_maxima_c: this rank's largest logits. all_t3c: each rank's largest logit, sum of exponentials and
    target's logit. exponentials_cv: exp(logit − own maximum) in fp32, or None in compiled code.
    """

    own_maxima_c: Tensor
    all_t3c: Tensor
    exponentials_cv: Tensor | None


def _own_sums(logits_cv: Tensor, targets_c: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return this rank's row of `_Sums.all_t3c`, and the exponentials. targets_c: rows, also outside."""
    is_here_c, targets_c1 = _here(logits_cv, targets_c)
    # −∞ if the target is another rank's, so that the maximum over the ranks is the target's logit
    target_logits_c = logits_cv.gather(1, targets_c1).squeeze(1).float().masked_fill(~is_here_c, -torch.inf)
    # finite even if all of this rank's rows are padding, because −∞ − −∞ is not a number
    own_maxima_c = logits_cv.amax(1).float().clamp(min=torch.finfo(torch.float32).min)
    exponentials_cv = _exponentials(logits_cv, own_maxima_c)
    own_3c = torch.stack([own_maxima_c, exponentials_cv.sum(1), target_logits_c])
    # compiled code computes them again, which is cheaper than writing and reading a chunk of fp32
    return own_3c, None if torch.compiler.is_compiling() else exponentials_cv


def _loss_of_all(
    logits_cv: Tensor, targets_c: Tensor, weights_c: Tensor, sums: _Sums, z_loss: float, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    own_maxima_c, all_t3c, exponentials_cv = sums
    maxima_tc, sums_tc, targets_tc = all_t3c.unbind(1)
    # every rank adds up the same numbers in the same order, so the loss is the same to the bit
    maxima_c = maxima_tc.amax(0)
    sums_c = (sums_tc * (maxima_tc - maxima_c).exp()).sum(0)
    log_sums_c = sums_c.log()
    cross_entropies_c = log_sums_c + (maxima_c - targets_tc.amax(0))
    loss, slopes_c = _loss_and_slopes(cross_entropies_c, maxima_c + log_sums_c, weights_c, z_loss)
    if not needs_gradients:
        return loss, None
    # one factor a token converts the exponentials from this rank's maximum to the group's
    factors_c = slopes_c * (own_maxima_c - maxima_c).exp() / sums_c
    if exponentials_cv is None:
        exponentials_cv = _exponentials(logits_cv, own_maxima_c)
        return loss, _fused_gradient(exponentials_cv, factors_c, targets_c, weights_c, logits_cv)
    is_here_c, targets_c1 = _here(logits_cv, targets_c)
    return loss, _gradient(exponentials_cv, factors_c, targets_c1, weights_c * is_here_c, logits_cv)


def _here(logits_cv: Tensor, targets_c: Tensor) -> tuple[Tensor, Tensor]:
    is_here_c = (targets_c >= 0) & (targets_c < logits_cv.shape[1])
    return is_here_c, targets_c.masked_fill(~is_here_c, 0).unsqueeze(1)


def _exponentials(logits_cv: Tensor, maxima_c: Tensor) -> Tensor:
    """Compute exp(logit − maximum) in fp32. Uncompiled, it reuses the memory of fp32 logits."""
    if torch.compiler.is_compiling():
        return (logits_cv.float() - maxima_c.unsqueeze(1)).exp()
    return logits_cv.float().sub_(maxima_c.unsqueeze(1)).exp_()


def _gradient(
    exponentials_cv: Tensor, factors_c: Tensor, targets_c1: Tensor, weights_c: Tensor, logits_cv: Tensor
) -> Tensor:
    """Compute factor × exponential − weight × onehot(target), in place or in narrower logits' memory.

    Without fusion a scatter is faster than a comparison of ids.
    """
    gradient_cv = exponentials_cv.mul_(factors_c.unsqueeze(1))
    gradient_cv.scatter_add_(1, targets_c1, -weights_c.unsqueeze(1))
    return gradient_cv if logits_cv.dtype == torch.float32 else logits_cv.copy_(gradient_cv)


def _fused_gradient(
    exponentials_cv: Tensor, factors_c: Tensor, targets_c: Tensor, weights_c: Tensor, logits_cv: Tensor
) -> Tensor:
    """Compute the same in compiled code: one loop compares ids, while a scatter needs a chunk of fp32."""
    ids_v = torch.arange(logits_cv.shape[1], dtype=torch.int32, device=logits_cv.device)
    is_target_cv = ids_v == targets_c.int().unsqueeze(1)
    targets_cv = torch.where(is_target_cv, weights_c.unsqueeze(1), 0.0)
    return (exponentials_cv * factors_c.unsqueeze(1) - targets_cv).to(logits_cv.dtype)


def _loss_and_slopes(
    cross_entropies_c: Tensor, log_z_c: Tensor | None, weights_c: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum over tokens, and slopes: d/dlogits = slope × p − weight × onehot(target)."""
    if not z_loss or log_z_c is None:
        return torch.dot(cross_entropies_c, weights_c), weights_c
    loss = torch.dot(cross_entropies_c + z_loss * log_z_c.square(), weights_c)
    return loss, (1 + 2 * z_loss * log_z_c) * weights_c


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Add left @ right to the fp32 `total`, or write it over `total` if it is the first product."""
    beta = 0 if is_first else 1  # 0 reads nothing of `total`
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.device.type == "cuda" and torch.version.hip is None:
        # cuBLAS adds bf16 products in fp32, from torch 2.10 on (pytorch/pytorch#167931)
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif is_first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `factor` × the fp32 `total` in `dtype`, on a GPU in one pass over memory."""
    if total.dtype != dtype and total.device.type == "cuda":
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))
    return total.mul_(factor).to(dtype)
