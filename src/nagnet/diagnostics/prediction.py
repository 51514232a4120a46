"""How sure a model is of each token, before its answer is known. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import check_tokens
from nagnet.diagnostics.probe import measuring
from nagnet.ops import reference


@dataclass(frozen=True)
class Confidence:
    """Confidence of each prediction, before its answer is known; all float32 or wider [B, T].

    Attributes:
        scale: exp(s_N), the RMS of the stream at the end.
        entropy: of the predicted distribution, nats.
        max_probability: of the likeliest token.
    """

    scale: Tensor
    entropy: Tensor
    max_probability: Tensor


def confidence(model: Any, tokens: Tensor) -> Confidence:
    """Measures how sure ``model`` is of each next token.

    Args:
        model: a `nagnet.Decoder`; it runs in evaluation mode without gradients and is left as it was.
        tokens: [B, T] integers.

    Returns:
        exp(s_N), entropy in nats and largest probability, [B, T].

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    return predict(model, tokens)[0]


def predict(model: Any, tokens: Tensor) -> tuple[Confidence, Tensor]:
    """Confidence [B, T] and logits [B, T, V]."""
    with measuring(model):
        direction, log_norm = model.trunk(tokens).split()
        logits = model.readout(direction, log_norm)
        log_p = torch.log_softmax(logits, dim=-1)
        scale = log_norm.to(reference.compute_dtype(log_norm)).exp()
        entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
        return Confidence(scale, entropy, log_p.amax(dim=-1).exp()), logits
