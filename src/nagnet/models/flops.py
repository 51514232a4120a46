"""FLOPs of a decoder, counted from its config. A multiply-add counts 2; training counts 3 x forward.

Counted: every parameter but the embedding table once per token (matrices, modulators, the scalars of the rules),
and the two products of attention. Not counted, for any arm: norms, softmax, activations and the elementwise part
of the residual update.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

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


def forward_flops_per_token(config: ModelConfig, seq_len: int, convention: Convention = "causal") -> int:
    """FLOPs of one forward pass per token, averaged over a sequence of ``seq_len`` tokens and rounded.

    Args:
        convention: ``causal`` counts the scores that causal attention needs, ``full`` the whole square
            (the walkthrough's).
    """
    windows = config.sliding_windows or (0,)
    width = config.n_heads * config.head_dim
    attention = sum(
        4 * width * mean_context(seq_len, windows[layer % len(windows)], convention) for layer in range(config.n_layers)
    )
    return round(2 * counted_parameters(config) + attention)


def training_flops_per_token(config: ModelConfig, seq_len: int, convention: Convention = "causal") -> int:
    """FLOPs of one training step per token: 3 x forward."""
    return TRAINING_FACTOR * forward_flops_per_token(config, seq_len, convention)
