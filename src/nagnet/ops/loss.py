"""Cross entropy without the logits: formed for a few tokens at a time, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nagnet.errors import UserError
from nagnet.typing import Float, Int

IGNORED_TARGET = -100
CHUNK_LOGITS = 2**21  # logits held at a time, small enough for a last-level cache,
MIN_CHUNK_ROWS = 256  # but never fewer tokens than this: each chunk reads and writes the whole gradient of the rows


def _chunk_rows(vocab_size: int) -> int:
    return max(MIN_CHUNK_ROWS, CHUNK_LOGITS // vocab_size)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap tanh(logits / softcap)``, or the logits as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _softmax_losses_(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target [n], 0 where ignored; ``logits`` [n, V] become probabilities in place."""
    largest = logits.amax(dim=-1, keepdim=True)
    chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1)) - largest
    total = logits.sub_(largest).exp_().sum(dim=-1, keepdim=True)
    logits.div_(total)
    return torch.where(targets == IGNORED_TARGET, 0.0, (total.log() - chosen).squeeze(1))


class _SummedCrossEntropy(torch.autograd.Function):
    """The gradient is formed in the forward pass, while a chunk's logits are there, and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):
        rows = min(_chunk_rows(weight.shape[0]), max(1, hidden.shape[0]))
        losses = torch.empty_like(hidden[:, 0])
        with_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        grad_weight = torch.zeros_like(weight) if with_grad else None
        # One buffer for all chunks: fresh memory for each would cost more in page faults than the arithmetic.
        buffer = hidden.new_empty(rows, weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            h, t = hidden[part], targets[part]
            logits = torch.mm(h, weight.mT, out=buffer[: len(t)])
            slope = None
            if softcap is not None:
                logits.div_(softcap).tanh_()
                slope = 1.0 - logits.square()
                logits.mul_(softcap)
            losses[part] = _softmax_losses_(logits, t)
            if grad_hidden is None or grad_weight is None:
                continue
            logits[torch.arange(len(t), device=t.device), t.clamp(min=0)] -= 1.0
            logits.masked_fill_((t == IGNORED_TARGET).unsqueeze(1), 0.0)
            if slope is not None:
                logits.mul_(slope)
            torch.mm(logits, weight, out=grad_hidden[part])
            grad_weight.addmm_(logits.mT, h)
        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_sum, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_sum * grad_hidden, grad_sum * grad_weight, None, None


def _check_targets(targets: Tensor, vocab_size: int) -> Tensor:
    """Targets as int64; on a CPU, anything but -100 and 0..V-1 is refused (an accelerator would have to wait)."""
    if targets.device.type == "cpu":
        wrong = targets[(targets != IGNORED_TARGET) & ((targets < 0) | (targets >= vocab_size))]
        if wrong.numel():
            raise UserError(
                f"target {int(wrong[0])} is outside 0..{vocab_size - 1}; ignored targets are {IGNORED_TARGET}"
            )
    return targets.long()


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
    return _SummedCrossEntropy.apply(hidden, weight, _check_targets(targets, weight.shape[0]), softcap)


@torch.no_grad()
def score_targets(
    hidden: Float[Tensor, "n d"], weight: Float[Tensor, "v d"], targets: Int[Tensor, " n"], softcap: float | None = None
) -> tuple[Float[Tensor, " n"], Tensor]:
    """Loss in nats [n] (0 if ignored) and whether the target is the likeliest token, bool [n] (false if ignored)."""
    rows = _chunk_rows(weight.shape[0])
    losses, correct = [], []
    targets = _check_targets(targets, weight.shape[0])
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = capped(h @ weight.mT, softcap)
        correct.append(logits.argmax(dim=-1) == t)
        losses.append(_softmax_losses_(logits, t))
    return torch.cat(losses), torch.cat(correct)
