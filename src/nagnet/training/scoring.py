"""Held-out documents scored by a model on its device, shared among the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nagnet.data.corpus import Document
from nagnet.data.tokenizer import Tokenizer
from nagnet.diagnostics.probe import measuring
from nagnet.evaluation.bits_per_byte import DocumentScores, Score, evaluate_documents
from nagnet.training.distributed import World, gather_from_ranks

ROWS = 16  # windows in a batch


def losses_of(model: Any) -> Score:
    """What is scored for bits per byte: the loss of each target."""
    return lambda tokens, targets: model.score(tokens, targets)[0]


def score_documents(
    model: nn.Module,
    score: Score,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    seq_len: int,
    device: torch.device,
    world: World,
    batch_size: int = ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> DocumentScores:
    """Scores documents in evaluation mode, uncompiled; every process of ``world`` must call this.

    Args:
        model: behind ``score``, which gets tokens and targets on ``device``.
        world: processes that share the documents, if there is one for each; all get the scores of all.
        seq_len, batch_size, progress: as for `evaluate_documents`.

    Returns:
        What one process alone would find, up to rounding in the model's number type.
    """
    shared = world.size > 1 and len(documents) >= world.size
    with measuring(model):
        scores = evaluate_documents(
            lambda tokens, targets: score(tokens.to(device), targets.to(device)),
            documents[world.rank :: world.size] if shared else documents,
            tokenizer,
            seq_len,
            batch_size,
            progress=progress,
        )
    return DocumentScores.concatenate(gather_from_ranks(scores)) if shared else scores
