"""A model that sees the future has no loss worth knowing: a test to run on a model before it is scored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nagnet.errors import UserError

SEED = 0
TOLERANCE = 1000.0  # in units of the last place of the largest logit: kernels may round by what they process


def change_points(length: int) -> list[int]:
    """Positions from which on tokens are changed: around powers of two, the middle, and the last one."""
    around = {2**k + offset for k in range(length.bit_length()) for offset in (-1, 0)}
    return sorted(point for point in around | {length // 2, length - 1} if 0 < point < length)


@torch.no_grad()
def check_causality(
    logits: Callable[[Tensor], Tensor], vocab_size: int, length: int, device: torch.device | str = "cpu"
) -> None:
    """Changes all tokens from some position on, at several positions, and compares the logits before it.

    Args:
        logits: the model, from ids int64 [1, T] to logits [1, T, V].
        vocab_size: ids are drawn below it. length: T, best the longest that will be scored.

    Raises:
        UserError: if an earlier logit changes by more than 1,000 units of the last place of the largest logit, or is
            not finite.
    """
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab_size, (1, length), generator=generator)
    before = logits(ids.to(device))
    if not torch.isfinite(before).all():
        raise UserError("the model's logits are not finite; it has diverged, and there is nothing to score")
    allowed = TOLERANCE * torch.finfo(before.dtype).eps * before.abs().max()
    for point in change_points(length):
        changed = ids.clone()
        shift = torch.randint(1, max(2, vocab_size), (1, length - point), generator=generator)
        changed[:, point:] = (changed[:, point:] + shift) % vocab_size
        difference = (logits(changed.to(device))[0, :point] - before[0, :point]).abs().amax(dim=-1)
        seen = (~(difference <= allowed)).nonzero()  # NaN is a change too
        if len(seen):
            raise UserError(
                f"the model is not causal: changing tokens from position {point} on changes the logits at "
                f"{int(seen[0])} by {difference[seen[0]].item():.3g}; it is not scored, since it sees what it should "
                "predict"
            )
