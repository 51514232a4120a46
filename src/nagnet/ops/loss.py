"""Cross entropy without the logits: formed for a few tokens at a time, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nagnet.typing import Float, Int

IGNORED_TARGET = -100
MAX_CHUNK_LOGITS = 2**23  # logits held at a time: 32 MiB in float32, about a last-level cache


def _chunk_rows(vocab_size: int) -> int:
    return max(1, MAX_CHUNK_LOGITS // vocab_size)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap tanh(logits / softcap)``, or the logits as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each target [n], 0 where ignored, and the log of the partition sum [n, 1]; logits [n, V]."""
    log_sum = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    return torch.where(targets == IGNORED_TARGET, 0.0, (log_sum - chosen).squeeze(1)), log_sum


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradient is formed in the forward pass, while a chunk's logits are there, and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):
        rows = _chunk_rows(weight.shape[0])
        losses = torch.empty_like(hidden[:, 0])
        with_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        grad_weight = torch.zeros_like(weight) if with_grad else None
        for h, t, loss, grad in zip(
            hidden.split(rows),
            targets.split(rows),
            losses.split(rows),
            (hidden if grad_hidden is None else grad_hidden).split(rows),
            strict=True,
        ):
            logits = capped(h @ weight.mT, softcap)
            values, log_sum = _losses(logits, t)
            loss.copy_(values)
            if grad_weight is None:
                continue
            slope = (logits - log_sum).exp_()
            slope[torch.arange(len(t), device=t.device), t.clamp(min=0)] -= 1.0
            if softcap is not None:
                slope *= 1.0 - (logits / softcap).square()
            slope.masked_fill_((t == IGNORED_TARGET).unsqueeze(1), 0.0)
            torch.mm(slope, weight, out=grad)
            grad_weight.addmm_(slope.mT, h)
        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_sum, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_sum * grad_hidden, grad_sum * grad_weight, None, None


def summed_cross_entropy(
    hidden: Float[Tensor, "n d"], weight: Float[Tensor, "v d"], targets: Int[Tensor, " n"], softcap: float | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, " n"]]:
    """Cross entropy of logits ``softcap tanh(hidden weight^T / softcap)``, at most a chunk of which exists at a time.

    Args:
        hidden: [n, d]; ``weight``: [V, d], both of one floating type; products run in it.
        targets: [n] integers, -100 where ignored.
        softcap: None for plain logits.

    Returns:
        Sum over the targets in nats (differentiable once), and each target's loss [n] (no gradient; 0 if ignored).
    """
    return _SummedCrossEntropy.apply(hidden, weight, targets.long(), softcap)


@torch.no_grad()
def score_targets(
    hidden: Float[Tensor, "n d"], weight: Float[Tensor, "v d"], targets: Int[Tensor, " n"], softcap: float | None = None
) -> tuple[Float[Tensor, " n"], Tensor]:
    """Loss in nats [n] (0 if ignored) and whether the target is the likeliest token, bool [n] (false if ignored)."""
    rows = _chunk_rows(weight.shape[0])
    losses, correct = [], []
    for h, t in zip(hidden.split(rows), targets.long().split(rows), strict=True):
        logits = capped(h @ weight.mT, softcap)
        losses.append(_losses(logits, t)[0])
        correct.append(logits.argmax(dim=-1) == t)
    return torch.cat(losses), torch.cat(correct)
