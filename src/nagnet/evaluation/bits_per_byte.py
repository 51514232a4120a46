"""Bits per byte: how many bits a model needs per byte of the original text, whatever its tokenizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nagnet.data.corpus import Document, name_hash
from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.ops.loss import IGNORED_TARGET

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DocumentScores:
    """What a model assigned to each document, enough to compare two models document by document.

    Attributes:
        names: Document names.
        nats: Summed loss of the text tokens of each document, in nats, float64 ``[n_documents]``.
        n_bytes: UTF-8 bytes of each original text, int64 ``[n_documents]``.
        n_tokens: Scored tokens of each document, int64 ``[n_documents]``.
    """

    names: tuple[str, ...]
    nats: np.ndarray
    n_bytes: np.ndarray
    n_tokens: np.ndarray

    @property
    def bits_per_byte(self) -> float:
        """Total nats / (ln 2 x total bytes)."""
        return float(self.nats.sum() / (math.log(2) * self.n_bytes.sum()))

    @staticmethod
    def concatenate(parts: Sequence["DocumentScores"]) -> "DocumentScores":
        """Join the scores of several processes, sorted by document name."""
        names = [name for part in parts for name in part.names]
        order = sorted(range(len(names)), key=names.__getitem__)
        return DocumentScores(
            names=tuple(names[i] for i in order),
            nats=np.concatenate([part.nats for part in parts])[order],
            n_bytes=np.concatenate([part.n_bytes for part in parts])[order],
            n_tokens=np.concatenate([part.n_tokens for part in parts])[order],
        )


@dataclass(frozen=True)
class _Window:
    """Consecutive positions ``start:stop`` of one document, scored in one row."""

    document: int
    start: int
    stop: int


def evaluate_documents(
    score: Score,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    max_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DocumentScores:
    """Score every token of every document exactly once.

    A document is BOS and its tokens, cut into consecutive windows of at most ``seq_len`` predictions. Only
    the first window begins with BOS; a later one begins with the last token of the window before it and sees
    nothing earlier. Neither BOS nor the end of a document is a target, and padding is on the right.

    Args:
        score: From tokens and targets, int64 ``[B, T]`` on the CPU, targets -100 where ignored, to the loss
            of each target in nats ``[B, T]``, on any device. Values at ignored targets do not matter. Called
            without gradients.
        documents: Texts to score.
        tokenizer: The model's tokenizer.
        seq_len: Most tokens in a window.
        batch_size: Windows per call of ``score``; the result does not depend on it.
        max_bytes: Score only so many bytes: documents in the order of a hash of their names, up to the first
            that does not fit (at least one). None for all.
        progress: Called with (windows scored, windows in all) after each batch.

    Returns:
        Sums per document, in the order of ``documents``.

    Raises:
        UserError: If there is no text to score, a number is out of range, the tokens of a document do not stand for
            every byte of it, or ``score`` returns another shape.
    """
    if seq_len < 1 or batch_size < 1:
        raise UserError(f"seq_len {seq_len} and batch_size {batch_size} must both be at least 1")
    if max_bytes is not None:
        documents = documents_within(documents, max_bytes)
    n_bytes = np.array([document.n_bytes for document in documents], dtype=np.int64)
    if n_bytes.sum() == 0:
        raise UserError("there is no text to evaluate; give documents that are not empty")
    rows = [
        np.array([tokenizer.bos_id, *ids], dtype=np.int64)
        for ids in tokenizer.encode_batch([document.text for document in documents])
    ]
    _check_coverage(rows, documents, tokenizer)
    n_tokens = np.array([len(row) - 1 for row in rows], dtype=np.int64)
    windows = _cut_into_windows(n_tokens, seq_len)
    nats = np.zeros(len(documents), dtype=np.float64)
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        sums = _score_windows(score, rows, batch, padding=tokenizer.bos_id)
        np.add.at(nats, [window.document for window in batch], sums)
        if progress is not None:
            progress(first + len(batch), len(windows))
    return DocumentScores(tuple(document.name for document in documents), nats, n_bytes, n_tokens)


def bits_per_byte(losses: torch.Tensor, targets: torch.Tensor, token_bytes: np.ndarray) -> float:
    """Bits per byte of a batch from the losses of its tokens.

    Args:
        losses: Loss of each target in nats, any shape.
        targets: Token ids of the same shape; those below 0 and special tokens (no bytes) are not counted.
        token_bytes: UTF-8 bytes of each token, int64 ``[vocab_size]``.

    Returns:
        Summed nats / (ln 2 x summed bytes); NaN if no target has bytes.
    """
    ids = targets.reshape(-1).cpu().numpy()
    n_bytes = np.where(ids >= 0, token_bytes[np.maximum(ids, 0)], 0)
    nats = losses.detach().reshape(-1).cpu().double().numpy()[n_bytes > 0].sum()
    total = n_bytes.sum()
    return float(nats / (math.log(2) * total)) if total else math.nan


def documents_within(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Choose documents by the hash of their names until the next would exceed ``max_bytes``; keep their order.

    Args:
        documents: Texts to choose from.
        max_bytes: Most UTF-8 bytes in all; at least one document is chosen.
    """
    chosen: set[int] = set()
    total = 0
    for index in sorted(range(len(documents)), key=lambda i: name_hash(documents[i].name)):
        total += documents[index].n_bytes
        if chosen and total > max_bytes:
            break
        chosen.add(index)
    return [document for index, document in enumerate(documents) if index in chosen]


def _check_coverage(rows: Sequence[np.ndarray], documents: Sequence[Document], tokenizer: Tokenizer) -> None:
    """Refuse tokens that leave out a part of the text: bits per byte would count bytes that nobody predicted."""
    for row, document in zip(rows, documents, strict=True):
        covered = int(tokenizer.token_bytes[row].sum())
        if covered != document.n_bytes:
            raise UserError(
                f"the tokens of {document.name} stand for {covered} bytes of its {document.n_bytes}; the tokenizer "
                "loses text, so bits per byte would be wrong"
            )


def _cut_into_windows(n_tokens: np.ndarray, seq_len: int) -> list[_Window]:
    """Cut documents of so many tokens into windows of at most ``seq_len``, the longest windows first."""
    windows = [
        _Window(document, start, min(start + seq_len, n))
        for document, n in enumerate(n_tokens.tolist())
        for start in range(0, n, seq_len)
    ]
    # Almost all batches then have the full length, and rows of one batch need little padding.
    return sorted(windows, key=lambda window: window.start - window.stop)


def _score_windows(score: Score, rows: Sequence[np.ndarray], windows: Sequence[_Window], padding: int) -> np.ndarray:
    """Return the summed loss of each window in nats, float64 ``[len(windows)]``."""
    length = max(window.stop - window.start for window in windows)
    tokens = np.full((len(windows), length), padding, dtype=np.int64)
    targets = np.full((len(windows), length), IGNORED_TARGET, dtype=np.int64)
    for i, window in enumerate(windows):
        row, n = rows[window.document], window.stop - window.start
        tokens[i, :n] = row[window.start : window.stop]
        targets[i, :n] = row[window.start + 1 : window.stop + 1]
    with torch.no_grad():
        losses = score(torch.from_numpy(tokens), torch.from_numpy(targets))
    if tuple(losses.shape) != targets.shape:
        raise UserError(
            f"score returned losses of shape {tuple(losses.shape)} for targets of shape {targets.shape}; "
            "return one loss per target"
        )
    # float64 before summing: a float32 sum over a long window would depend on how it is batched.
    counted = np.where(targets != IGNORED_TARGET, losses.cpu().double().numpy(), 0.0)
    return counted.sum(axis=1)
