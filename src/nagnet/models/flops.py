"""FLOPs of a decoder, counted from its config. A multiply-add counts 2; training counts 3 x forward.

Counted: every parameter but the embedding table once per token (matrices, modulators, the scalars of the rules),
and the two products of attention. Not counted, for any arm: norms, softmax, activations and the elementwise part
of the residual update.

A token that skips a sublayer (`nagnet.nn.skip`) still costs its keys and values, its gain and the readout. The scores
of a skipped query count as those of a mean one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.mlp import MLPS

Convention = Literal["causal", "full"]
TRAINING_FACTOR = 3


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part: ``total``, ``embedding``, ``readout`` (0 if tied), ``residual`` (of the rule), ``blocks``."""
    return dict(_parameter_counts(config))


def counted_parameters(config: ModelConfig) -> int:
    """Parameters that take part in a product for every token, which FLOPs and tokens per parameter count.

    All but the embedding table, whose rows are looked up; a tied table counts, as it is the readout too.
    """
    counts = parameter_counts(config)
    return counts["total"] - (0 if config.tie_embeddings else counts["embedding"])


@functools.lru_cache(maxsize=64)  # building a model of many blocks takes tenths of a second, even without its storage
def _parameter_counts(config: ModelConfig) -> dict[str, int]:
    with torch.device("meta"):
        model = Decoder(config)
    counts = {
        "embedding": model.embedding.weight.numel(),
        "readout": sum(p.numel() for p in model.readout.parameters() if p is not model.embedding.weight),
        "residual": sum(p.numel() for p in model.stream.parameters()),
        "blocks": sum(p.numel() for p in model.blocks.parameters()),
    }
    return {"total": sum(counts.values())} | counts


def mean_context(seq_len: int, window: int, convention: Convention) -> float:
    """Mean number of keys a query is multiplied with: over the causal triangle, or ``full`` as if it saw them all."""
    span = min(window, seq_len) if window > 0 else seq_len
    if convention == "full":
        return float(span)
    return (span * (span + 1) / 2 + (seq_len - span) * span) / seq_len


def _scores_per_token(config: ModelConfig, seq_len: int, convention: Convention) -> list[float]:
    """FLOPs of the two products of attention in each block, per token."""
    windows = config.sliding_windows or (0,)
    width = config.n_heads * config.head_dim
    return [
        4 * width * mean_context(seq_len, windows[layer % len(windows)], convention) for layer in range(config.n_layers)
    ]


def forward_flops_per_token(
    config: ModelConfig, seq_len: int, convention: Convention = "causal", run_rates: Sequence[float] | None = None
) -> int:
    """FLOPs of one forward pass per token, averaged over a sequence of ``seq_len`` tokens and rounded.

    Args:
        convention: ``causal`` counts the scores that causal attention needs, ``full`` the whole square
            (the walkthrough's).
        run_rates: share of tokens that run each sublayer, attention and MLP of each block in turn; None: all.
    """
    whole = 2 * counted_parameters(config) + sum(_scores_per_token(config, seq_len, convention))
    if run_rates is None:
        return round(whole)
    parts = zip(run_rates, skippable_flops_per_token(config, seq_len, convention), strict=True)
    return round(whole - sum((1.0 - rate) * flops for rate, flops in parts))


def training_flops_per_token(
    config: ModelConfig, seq_len: int, convention: Convention = "causal", run_rates: Sequence[float] | None = None
) -> int:
    """FLOPs of one training step per token: 3 x forward, whose arguments these are."""
    return TRAINING_FACTOR * forward_flops_per_token(config, seq_len, convention, run_rates)


def skippable_parameters(config: ModelConfig) -> list[int]:
    """Matrix parameters that a skipping token does without: queries and output of attention, then the MLP, by block."""
    attention = 2 * config.d_model * config.n_heads * config.head_dim
    n_matrices = MLPS[config.mlp].n_matrices
    return [size for d_ff in config.mlp_widths for size in (attention, n_matrices * config.d_model * d_ff)]


def skippable_flops_per_token(config: ModelConfig, seq_len: int, convention: Convention = "causal") -> list[float]:
    """Forward FLOPs that one token saves by skipping each sublayer, attention and MLP of each block in turn."""
    flops = [2.0 * size for size in skippable_parameters(config)]
    for layer, scores in enumerate(_scores_per_token(config, seq_len, convention)):
        flops[2 * layer] += scores
    return flops


class SkipRates(NamedTuple):
    """What was skipped, as shares in [0, 1].

    Attributes:
        sublayer_tokens: of all tokens' sublayers. parameters: of the matrix parameters in blocks, times tokens.
        flops: of the forward FLOPs of the full depth, readout included: the only one that time can follow.
    """

    sublayer_tokens: float
    parameters: float
    flops: float


def skip_rates(
    config: ModelConfig, run_rates: Sequence[float], seq_len: int, convention: Convention = "causal"
) -> SkipRates:
    """The three skip rates; arguments as `forward_flops_per_token`."""
    skipped = [1.0 - rate for rate in run_rates]
    saved = sum(rate * size for rate, size in zip(skipped, skippable_parameters(config), strict=True))
    keys_and_values = config.n_layers * 2 * config.d_model * config.n_kv_heads * config.head_dim
    whole = forward_flops_per_token(config, seq_len, convention)
    executed = forward_flops_per_token(config, seq_len, convention, run_rates)
    return SkipRates(
        sum(skipped) / len(skipped),
        saved / (sum(skippable_parameters(config)) + keys_and_values),
        1.0 - executed / whole,
    )
