"""The language-model loss: head, cross-entropy and z-loss in one autograd function, so full logits never exist.

Data in: hidden states [n, d], the head's weight [v, d], labels [n]; data out: one fp32 number, the sum over counted
labels divided by a divisor that the caller has counted over all ranks and micro-batches. Gradients are made chunk
by chunk in the forward pass, while a chunk's logits are there (the idea of Liger Kernel, Hsu et al. 2024,
arXiv:2410.10989). Shape letters: n = tokens, d = hidden size, v = vocabulary, c = tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100


def chunked_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, divisor: Tensor, z_loss: float = 0.0, chunk_tokens: int = 2048
) -> Tensor:
    """Σ over counted labels of (cross-entropy + z_loss × log² Z) / divisor, in nats, a scalar in fp32.

    hidden [..., d], head_weight [v, d] (any one precision), labels [...] with -100 where nothing is counted,
    divisor a scalar tensor (the global count of counted labels, so that gradients are equal for every layout).
    At most `chunk_tokens` × v logits exist at one time. log Z is the log of the softmax's sum; its square keeps
    logits from drifting (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, section 5). The softmax is in fp32; the
    weight's gradient is summed over the chunks in fp32. Can be differentiated once.
    """
    needs_gradients = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    return _ChunkedLoss.apply(
        hidden.flatten(0, -2), head_weight, labels.flatten(), divisor, z_loss, chunk_tokens, needs_gradients
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        labels_n: Tensor,
        divisor: Tensor,
        z_loss: float,
        chunk_tokens: int,
        needs_gradients: bool,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        hidden_gradient = weight_gradient = None
        if needs_gradients:
            hidden_gradient = torch.empty_like(hidden_nd)
            weight_gradient = torch.zeros_like(weight_vd, dtype=torch.float32)
        for start in range(0, len(hidden_nd), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            hidden_cd = hidden_nd[chunk]
            chunk_loss, logits_gradient_cv = _chunk(
                torch.mm(hidden_cd, weight_vd.t()), labels_n[chunk], divisor, z_loss, needs_gradients
            )
            loss += chunk_loss
            if needs_gradients:
                torch.mm(logits_gradient_cv, weight_vd, out=hidden_gradient[chunk])
                _add_product(weight_gradient, logits_gradient_cv.t(), hidden_cd)
        ctx.gradients = (hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight_vd.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scales what the forward pass left. In place: a copy of a 128k vocabulary's gradient is gigabytes."""
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss can be differentiated once; its gradients are already used up")
        hidden_gradient, weight_gradient = ctx.gradients
        ctx.gradients = None
        hidden_gradient.mul_(loss_gradient)
        weight_gradient.mul_(loss_gradient)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return (
            hidden_gradient if needs_hidden else None,
            weight_gradient.to(ctx.weight_dtype) if needs_weight else None,
            *(None,) * 5,
        )


def _chunk(
    logits_cv: Tensor, labels_c: Tensor, divisor: Tensor, z_loss: float, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """(the chunk's share of the loss, the loss's gradient to the logits in the logits' precision)."""
    counted_c = labels_c != IGNORED_LABEL
    targets_c1 = labels_c.masked_fill(~counted_c, 0).unsqueeze(1)
    weights_c = counted_c / divisor.float()
    log_probabilities_cv = torch.log_softmax(logits_cv, dim=-1, dtype=torch.float32)
    target_log_probabilities_c = log_probabilities_cv.gather(1, targets_c1).squeeze(1)
    token_losses_c = -target_log_probabilities_c
    z_slopes_c = torch.zeros_like(token_losses_c)
    if z_loss:
        # log Z = logit − log probability, of any word; the target's is at hand.
        log_z_c = logits_cv.gather(1, targets_c1).squeeze(1).float() - target_log_probabilities_c
        token_losses_c = token_losses_c + z_loss * log_z_c.square()
        z_slopes_c = 2 * z_loss * log_z_c
    loss = torch.dot(token_losses_c, weights_c)
    if not needs_gradients:
        return loss, None
    # d/dlogits = (1 + 2 z log Z) · p − onehot(target), written over what is no longer needed.
    gradient_cv = log_probabilities_cv.exp_().mul_(((1 + z_slopes_c) * weights_c).unsqueeze(1))
    gradient_cv.scatter_add_(1, targets_c1, -weights_c.unsqueeze(1))
    return loss, gradient_cv if logits_cv.dtype == torch.float32 else logits_cv.copy_(gradient_cv)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in fp32 whatever the factors' precision."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
