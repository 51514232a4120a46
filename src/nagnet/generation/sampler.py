"""Drawing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.models.initialization import named_generator
from nagnet.typing import Float, Int


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Limits apply to the distribution after the temperature, in the order given here.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token, whatever the rest says.
        top_k: this many likeliest tokens; None or 0: all.
        top_p: the fewest likeliest tokens that have this probability together (arXiv 1904.09751); 1: all.
        min_p: tokens at least this likely relative to the likeliest (arXiv 2407.01082); 0: all.
        seed: of the draws. Each sequence draws from a generator of its own, by seed and place in the batch.

    Raises:
        UserError: for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}; give 0 (the likeliest token) or a positive number")
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; give a probability above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}; give a share from 0 to 1")

    def generators(self, names: Sequence[str]) -> list[torch.Generator]:
        """One source of random numbers a sequence, by its name."""
        return [named_generator(self.seed, name) for name in names]


def log_probabilities(logits: Float[Tensor, "b v"], excluded: Tensor | None = None) -> Float[Tensor, "b v"]:
    """The model's own log probabilities in nats, float64 on the CPU.

    Args:
        logits: [B, V]. excluded: bool [V], tokens that do not exist: probability 0, for the others too.

    Raises:
        UserError: if a logit is not finite.
    """
    wide = logits.double().cpu()
    if not bool(torch.isfinite(wide).all()):
        raise UserError("the model's logits are not finite (NaN or infinite); its parameters are damaged or diverged")
    if excluded is not None:
        wide = wide.masked_fill(excluded, -torch.inf)
    return torch.log_softmax(wide, dim=-1)


def draw(
    log_probs: Float[Tensor, "b v"], sampling: Sampling, generators: Sequence[torch.Generator]
) -> Int[Tensor, " b"]:
    """Draws a token for each row of `log_probabilities` [B, V], one uniform number from its generator each.

    Returns:
        int64 [B]. At temperature 0 no generator is used.
    """
    if sampling.temperature == 0:
        return log_probs.argmax(dim=-1)
    probabilities = torch.softmax(log_probs / sampling.temperature, dim=-1)
    probabilities = _limited(probabilities, sampling)
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
    cumulative = probabilities.cumsum(dim=-1)
    # The first token at which the sum passes the number: so never one of probability 0.
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _limited(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] with those outside the limits at 0, not summing to 1 any more."""
    vocab_size = probabilities.shape[-1]
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    if top_k < vocab_size or sampling.top_p < 1:
        kept, indices = probabilities.topk(top_k, dim=-1)  # sorted; of equal ones, just so many
        if sampling.top_p < 1:
            before = kept.cumsum(dim=-1) - kept
            kept = kept.masked_fill(before >= sampling.top_p * kept.sum(dim=-1, keepdim=True), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, indices, kept)
    if sampling.min_p > 0:
        likeliest = probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * likeliest, 0.0)
    return probabilities
