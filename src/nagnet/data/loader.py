"""Token arrays of whole documents, and batches that depend on nothing but seed, step and rank."""

import hashlib
import io
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nagnet.data.corpus import Document, hash_documents
from nagnet.data.encoding import encode_texts
from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.files import write_atomically
from nagnet.ops.loss import IGNORED_TARGET

logger = logging.getLogger(__name__)

_DOCUMENTS_PER_CALL = 256


class TokenSource(Protocol):
    """Tokens of many documents, numbered as if in one array, each document beginning with BOS.

    ``PackedTokens`` holds them in memory, ``nagnet.data.shards.ShardedTokens`` reads them from disk.
    """

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        ...

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """Where each document begins, and the end, int64 ``[n_documents + 1]``."""
        ...

    @property
    def bos_id(self) -> int:
        """The id that begins each document."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) that is another one when the tokens are."""
        ...

    def span(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start:stop``, which lie in one document; unsigned integers ``[stop - start]``."""
        ...


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of many documents in one array in memory, each document beginning with BOS.

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

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of tokens, offsets, BOS and vocabulary; computed once."""
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        digest = hashlib.sha256(f"{self.tokens.dtype.name}:{self.bos_id}:{self.vocab_size}:".encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        digest.update(np.ascontiguousarray(self.offsets).data)
        return digest.hexdigest()

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return tokens ``start:stop``."""
        return self.tokens[start:stop]


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
    parts: list[np.ndarray] = []
    # In groups, since the library's encodings take far more memory than the ids.
    for start in range(0, len(documents), _DOCUMENTS_PER_CALL):
        group = documents[start : start + _DOCUMENTS_PER_CALL]
        parts.extend(encode_texts(tokenizer, [document.text for document in group]))
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return PackedTokens(np.concatenate(parts), offsets, tokenizer.bos_id, tokenizer.vocab_size)


class _Epoch(NamedTuple):
    """The order of one epoch: documents in the stream, and rows of the stream.

    Attributes:
        documents: Index of each document, in stream order, uint32 or int64 ``[n_documents]``.
        positions: First token of each document in the stream, and the end, int64 ``[n_documents + 1]``.
        rows: Order in which the rows of the stream are handed out, uint32 or int64 ``[rows_per_epoch]``.
    """

    documents: np.ndarray
    positions: np.ndarray
    rows: np.ndarray


class BatchLoader:
    """Batches as a pure function of seed, step and rank, so resuming needs the step number only.

    In each epoch the documents are concatenated in an order drawn from (seed, epoch). The stream is cut into
    rows of ``seq_len + 1`` tokens that overlap by one, so each token but the first is a target once; fewer
    than ``seq_len`` tokens at the end are left out. The rows are handed out in an order drawn likewise, since
    neighbours would fill a batch with one long document. A batch may hold the last rows of one epoch and the
    first of the next. A target that is BOS is -100: where a document ends is no part of its text.

    The order of an epoch is drawn when its first row is read, and takes 12 bytes a document and 4 bytes a row,
    besides the 8 bytes a document of the offsets: for 10 million documents of 700 tokens and rows of 1,024,
    230 MB in all, 40 MB more while it is drawn, and a few seconds.

    Attributes:
        rows_per_epoch: Number of rows in each epoch.
    """

    def __init__(
        self,
        packed: TokenSource,
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
        n_tokens = packed.n_tokens
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
            UserError: If the step is negative, or an id in the batch is outside the vocabulary.
        """
        if step < 0:
            raise UserError(f"step {step} is negative; steps count from 0")
        first = (step * self._world_size + self._rank) * self._batch_size
        epochs, rows = np.divmod(np.arange(first, first + self._batch_size), self.rows_per_epoch)
        read = np.empty((self._batch_size, self._seq_len + 1), dtype=np.int64)
        # Only the epochs of this batch are kept: the next one needs the same, or the last of them.
        self._epochs = {int(epoch): self._epoch(int(epoch)) for epoch in np.unique(epochs)}
        for target, epoch, row in zip(read, epochs.tolist(), rows.tolist(), strict=True):
            order = self._epochs[epoch]
            self._fill(target, order, int(order.rows[row]) * self._seq_len)
        tokens = torch.from_numpy(read)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()  # a single row shares memory otherwise
        targets[targets == self._packed.bos_id] = IGNORED_TARGET
        return inputs, targets

    def _fill(self, target: np.ndarray, order: _Epoch, position: int) -> None:
        """Copy the stream of an epoch from a position on, document by document, into ``target`` int64 ``[n]``."""
        offsets, positions = self._packed.offsets, order.positions
        index = int(np.searchsorted(positions, position, side="right")) - 1
        filled = 0
        while filled < len(target):
            inside = position + filled - int(positions[index])
            length = min(int(positions[index + 1]) - int(positions[index]) - inside, len(target) - filled)
            source = int(offsets[order.documents[index]]) + inside
            target[filled : filled + length] = self._packed.span(source, source + length)
            filled += length
            index += 1

    def _epoch(self, epoch: int) -> _Epoch:
        """The order of an epoch, a function of (seed, epoch); the loader keeps it only to save time."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        random = np.random.default_rng([self._seed, epoch])
        documents = _permutation(random, self._packed.n_documents)
        positions = np.zeros(self._packed.n_documents + 1, dtype=np.int64)
        np.cumsum(np.diff(self._packed.offsets)[documents], out=positions[1:])
        return _Epoch(documents, positions, _permutation(random, self.rows_per_epoch))


def _permutation(random: np.random.Generator, n: int) -> np.ndarray:
    """What ``random.permutation(n)`` returns, in half the memory where 32 bits are enough."""
    order = np.arange(n, dtype=np.uint32 if n <= 2**32 else np.int64)
    random.shuffle(order)
    return order
