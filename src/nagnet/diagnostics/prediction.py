"""How sure a model is of each token, before its answer is known. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import check_tokens
from nagnet.diagnostics.probe import measuring
from nagnet.nn.readout import Readout
from nagnet.ops import reference

LOGITS_AT_ONCE = 2**23  # 32 MB, of which three copies exist


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
    with measuring(model):
        return read_confidence(model.readout, *model.trunk(tokens).split())


def read_confidence(readout: Readout, direction: Tensor, log_norm: Tensor) -> Confidence:
    """Confidence of predictions made from a direction [B, T, d] and a log norm [B, T].

    Logits of a few hundred tokens exist at a time. Call it within `measuring`.
    """
    rows, lane = direction.flatten(0, 1), log_norm.flatten()
    size = max(1, LOGITS_AT_ONCE // len(readout.weight))
    parts = []
    for part, s in zip(rows.split(size), lane.split(size), strict=True):
        log_p = torch.log_softmax(readout(part, s), dim=-1)
        parts.append((torch.special.entr(log_p.exp()).sum(dim=-1), log_p.amax(dim=-1).exp()))
    entropy, max_probability = (torch.cat(values).view(log_norm.shape) for values in zip(*parts, strict=True))
    return Confidence(log_norm.to(reference.compute_dtype(log_norm)).exp(), entropy, max_probability)
