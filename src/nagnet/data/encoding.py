"""Texts to token arrays, in this process or in several, always in the order they came."""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError

_BATCHES_AHEAD = 2  # for each process, so that it need not wait for the next and memory stays bounded


class Batch(Protocol):
    """What holds texts to encode."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts."""
        ...


BatchType = TypeVar("BatchType", bound=Batch)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer of 2 or 4 bytes, little-endian, that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode texts, BOS before each.

    Args:
        tokenizer: Its vocabulary decides the type of the arrays.
        texts: Any text.

    Returns:
        Token ids of each text, uint16 or uint32 ``[1 + tokens of the text]``.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    return [np.array([tokenizer.bos_id, *ids], dtype=dtype) for ids in tokenizer.encode_batch(texts)]


def encode_batches(
    batches: Iterable[BatchType], tokenizer_file: Path, workers: int
) -> Iterator[tuple[BatchType, list[np.ndarray]]]:
    """Encode the texts of batches; what comes out does not depend on the number of processes.

    Args:
        batches: Read only a few ahead of what is taken.
        tokenizer_file: What ``Tokenizer.save`` wrote.
        workers: Processes that encode; with 1 it is done in this one.

    Yields:
        Each batch, in order, with the tokens of its texts.

    Raises:
        UserError: If the tokenizer cannot be read, or a process dies.
    """
    tokenizer = Tokenizer.load(tokenizer_file)
    if workers == 1:
        for batch in batches:
            yield batch, encode_texts(tokenizer, batch.texts)
        return
    # Not forked: a copy of a process with threads can hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (str(tokenizer_file),))
    waiting = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode_in_worker, batch.texts)))
            if len(waiting) > _BATCHES_AHEAD * workers:
                first, encoded = waiting.popleft()
                yield first, encoded.result()
        for first, encoded in waiting:
            yield first, encoded.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenizes died, perhaps for want of memory; run again with fewer --workers, "
            "finished shards are kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer_file: str) -> None:
    """Prepare a process that encodes."""
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    _worker_tokenizer = Tokenizer.load(tokenizer_file)


def _end_with_parent() -> None:
    """End this process when its parent is gone, even killed: it would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(texts: Sequence[str]) -> list[np.ndarray]:
    return encode_texts(_worker_tokenizer, texts)
