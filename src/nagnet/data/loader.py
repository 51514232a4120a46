"""Token arrays of whole documents, and batches that depend on nothing but seed, step and rank."""

import hashlib
import io
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nagnet.data.corpus import Document, hash_documents
from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.ops.loss import IGNORED_TARGET

logger = logging.getLogger(__name__)

_DOCUMENTS_PER_CALL = 256


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of many documents in one array, each document beginning with BOS.

    Attributes:
        tokens: uint16 (uint32 for a vocabulary above 65,536) ``[n_tokens]``; may be a memory map.
        offsets: int64 ``[n_documents + 1]``; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
        bos_id: The id that begins each document.
        vocab_size: All ids are below it.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    bos_id: int
    vocab_size: int

    def __post_init__(self) -> None:
        """Check that the arrays belong together.

        Raises:
            UserError: If they do not, or an id is outside the vocabulary.
        """
        offsets, n_tokens = self.offsets, len(self.tokens)
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != n_tokens or np.any(np.diff(offsets) < 1):
            raise UserError(f"document offsets do not fit the {n_tokens} tokens; encode the documents again")
        smallest, largest = int(self.tokens.min()), int(self.tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise UserError(
                f"token ids from {smallest} to {largest} exceed the vocabulary of {self.vocab_size}; "
                "encode the documents again with this tokenizer"
            )
        if np.any(self.tokens[offsets[:-1]] != self.bos_id):
            raise UserError(f"a document does not begin with BOS ({self.bos_id}); encode the documents again")

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_dir: str | Path | None = None
) -> PackedTokens:
    """Encode documents into one array, BOS before each of them.

    Args:
        documents: In the order wanted.
        tokenizer: Its ids fill the array.
        cache_dir: Folder to keep the arrays in, by the hashes of documents and tokenizer; None for no cache.
            A damaged cache file is replaced.

    Returns:
        The tokens, in the order of the documents.

    Raises:
        UserError: If there are no documents.
    """
    if not documents:
        raise UserError("there are no documents to encode; give a corpus that holds text")
    if cache_dir is None:
        return _encode(documents, tokenizer)
    key = f"{hash_documents(documents)}:{tokenizer.content_hash}"
    path = Path(cache_dir) / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    if path.exists():
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                tokens, offsets = arrays["tokens"], arrays["offsets"]
            return PackedTokens(tokens, offsets, tokenizer.bos_id, tokenizer.vocab_size)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("cached tokens %s are damaged (%s); encoding again", path, error)
    packed = _encode(documents, tokenizer)
    buffer = io.BytesIO()
    np.savez(buffer, tokens=packed.tokens, offsets=packed.offsets)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        logger.warning("cannot write %s (%s); the tokens are not cached", path, error.strerror)
    return packed


def _encode(documents: Sequence[Document], tokenizer: Tokenizer) -> PackedTokens:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    parts, lengths = [], []
    # In groups, since the library's encodings take far more memory than the ids.
    for start in range(0, len(documents), _DOCUMENTS_PER_CALL):
        texts = [document.text for document in documents[start : start + _DOCUMENTS_PER_CALL]]
        for ids in tokenizer.encode_batch(texts):
            parts.append(np.array([tokenizer.bos_id, *ids], dtype=dtype))
            lengths.append(len(ids) + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return PackedTokens(np.concatenate(parts), offsets, tokenizer.bos_id, tokenizer.vocab_size)


class _Epoch(NamedTuple):
    """The order of one epoch: documents in the stream, and rows of the stream.

    Attributes:
        sources: First token of each document in the packed array, in stream order, int64 ``[n_documents]``.
        positions: First token of each document in the stream, int64 ``[n_documents]``.
        rows: Order in which the rows of the stream are handed out, int64 ``[rows_per_epoch]``.
    """

    sources: np.ndarray
    positions: np.ndarray
    rows: np.ndarray


class BatchLoader:
    """Batches as a pure function of seed, step and rank, so resuming needs the step number only.

    In each epoch the documents are concatenated in an order drawn from (seed, epoch). The stream is cut into
    rows of ``seq_len + 1`` tokens that overlap by one, so each token but the first is a target once; fewer
    than ``seq_len`` tokens at the end are left out. The rows are handed out in an order drawn likewise, since
    neighbours would fill a batch with one long document. A batch may hold the last rows of one epoch and the
    first of the next. A target that is BOS is -100: where a document ends is no part of its text.

    Attributes:
        rows_per_epoch: Number of rows in each epoch.
    """

    def __init__(
        self,
        packed: PackedTokens,
        batch_size: int,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Set up the loader; nothing is read yet.

        Args:
            packed: Documents to draw from.
            batch_size: Rows per batch on each rank.
            seq_len: Tokens per row.
            seed: Not negative; decides the order of documents and rows.
            rank: Which of the processes this is.
            world_size: Number of processes; together they read what one with their summed batch would.

        Raises:
            UserError: If a number is out of range, or there are fewer tokens than one batch takes.
        """
        if batch_size < 1 or seq_len < 1:
            raise UserError(f"batch_size {batch_size} and seq_len {seq_len} must both be at least 1")
        if seed < 0:
            raise UserError(f"seed {seed} is negative; give 0 or more")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} is not one of {world_size} processes; count ranks from 0")
        n_tokens = len(packed.tokens)
        self.rows_per_epoch = (n_tokens - 1) // seq_len
        if self.rows_per_epoch < batch_size * world_size:
            needed = batch_size * world_size * seq_len + 1
            raise UserError(
                f"the corpus has {n_tokens} tokens but one batch needs {needed} "
                f"({batch_size * world_size} rows of {seq_len}); give more text or lower one of them"
            )
        self._packed = packed
        self._batch_size, self._seq_len, self._seed = batch_size, seq_len, seed
        self._rank, self._world_size = rank, world_size
        self._epochs: dict[int, _Epoch] = {}  # a cache: each entry is a function of (seed, epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, that the first row of a step belongs to (over all ranks)."""
        return step * self._batch_size * self._world_size // self.rows_per_epoch

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of a step.

        Args:
            step: Step number, from 0.

        Returns:
            Inputs and targets, int64 ``[batch_size, seq_len]``; targets are inputs shifted by one, -100 where
            that is BOS.

        Raises:
            UserError: If the step is negative.
        """
        if step < 0:
            raise UserError(f"step {step} is negative; steps count from 0")
        first = (step * self._world_size + self._rank) * self._batch_size
        epochs, rows = np.divmod(np.arange(first, first + self._batch_size), self.rows_per_epoch)
        parts = [self._read(int(epoch), rows[epochs == epoch]) for epoch in np.unique(epochs)]
        tokens = torch.from_numpy(np.concatenate(parts))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()  # a single row shares memory otherwise
        targets[targets == self._packed.bos_id] = IGNORED_TARGET
        return inputs, targets

    def _read(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Gather rows of an epoch, int64 ``[len(rows), seq_len + 1]``."""
        order = self._epoch(epoch)
        positions = order.rows[rows][:, None] * self._seq_len + np.arange(self._seq_len + 1)
        documents = np.searchsorted(order.positions, positions, side="right") - 1
        sources = order.sources[documents] + positions - order.positions[documents]
        return self._packed.tokens[sources].astype(np.int64)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            offsets = self._packed.offsets
            random = np.random.default_rng([self._seed, epoch])
            documents = random.permutation(self._packed.n_documents)
            lengths = np.diff(offsets)[documents]
            rows = random.permutation(self.rows_per_epoch)
            # A batch touches at most two epochs, so only a neighbour is worth keeping.
            self._epochs = {other: kept for other, kept in self._epochs.items() if abs(other - epoch) == 1}
            self._epochs[epoch] = _Epoch(offsets[:-1][documents], np.cumsum(lengths) - lengths, rows)
        return self._epochs[epoch]
