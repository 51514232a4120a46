"""Token shards on disk: opened as memory maps, checked, read as one array of documents."""

import json
import mmap
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from nagnet.data.corpus import Document
from nagnet.data.manifest import (
    HELD_OUT_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    UNFINISHED_FILE,
    Manifest,
    Shard,
    digest_of_file,
)
from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError


class ShardedTokens:
    """The tokens of a prepared folder, read from disk as they are needed.

    Attributes:
        folder: The prepared folder.
        manifest: What it says of itself.
        bos_id: The id that begins each document.
        vocab_size: All ids are below it.
        n_tokens: Number of tokens.
        n_documents: Number of documents.
        content_hash: SHA-256 (hex) of tokens and documents, from the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Map the files and compare their sizes with the manifest; no tokens are read.

        Raises:
            UserError: If a file is missing or has another size; it is named.
        """
        self.folder, self.manifest = folder, manifest
        self.bos_id, self.vocab_size = manifest.bos_id, manifest.vocab_size
        self.n_tokens, self.n_documents = manifest.totals.tokens, manifest.totals.documents
        self.content_hash = manifest.content_hash
        self._shards = [map_shard(folder, shard, np.dtype(manifest.dtype)) for shard in manifest.shards]
        self._starts = [0, *accumulate(shard.tokens for shard in manifest.shards)]

    @property
    def offsets(self) -> np.ndarray:
        """Where each document begins, over all shards, int64 ``[n_documents + 1]``; read on first use.

        Raises:
            UserError: If a documents file contradicts its shard; it is named.
        """
        return self._offsets

    @cached_property
    def _offsets(self) -> np.ndarray:
        parts = [np.zeros(1, dtype=np.int64)]
        for shard, (_, documents), start in zip(self.manifest.shards, self._shards, self._starts, strict=False):
            offsets = documents[0]
            if offsets[0] != 0 or offsets[-1] != shard.tokens or np.any(np.diff(offsets) < 1):
                raise _corrupt(self.folder / shard.documents_file, "its offsets do not fit the tokens")
            parts.append(offsets[1:] + start)
        return np.concatenate(parts)

    def span(self, start: int, stop: int) -> np.ndarray:
        """Read consecutive tokens of one document.

        Args:
            start: First token, counted over all shards.
            stop: One after the last; within the same document.

        Returns:
            uint16 or uint32 ``[stop - start]``.

        Raises:
            UserError: If an id is outside the vocabulary; the shard is named.
        """
        number = bisect_right(self._starts, start) - 1
        tokens = self._shards[number][0][start - self._starts[number] : stop - self._starts[number]]
        if tokens.max(initial=0) >= self.vocab_size:
            file = self.folder / self.manifest.shards[number].tokens_file
            raise _corrupt(file, f"it holds id {tokens.max()} of a vocabulary of {self.vocab_size}")
        return tokens

    def verify(self) -> None:
        """Read every file and compare it with its hash, and the tokens with their documents.

        Raises:
            UserError: If something differs; the file is named.
        """
        for file, expected in (
            (TOKENIZER_FILE, self.manifest.tokenizer_sha256),
            (HELD_OUT_FILE, self.manifest.held_out_sha256),
        ):
            _check_hash(self.folder / file, expected)
        for shard, (tokens, documents) in zip(self.manifest.shards, self._shards, strict=True):
            verify_shard(self.folder, shard)
            file = self.folder / shard.tokens_file
            if tokens.max() >= self.vocab_size:
                raise _corrupt(file, f"it holds id {tokens.max()} of a vocabulary of {self.vocab_size}")
            begins = np.flatnonzero(tokens == self.bos_id)
            if not np.array_equal(begins, documents[0, :-1]):
                raise _corrupt(file, "its documents do not begin where BOS is")


def open_shards(folder: str | Path, verify: bool = False) -> ShardedTokens:
    """Open a folder that ``nagnet data prepare`` wrote.

    Manifest and file sizes are checked, which is quick however large the shards are.

    Args:
        folder: The prepared folder.
        verify: Also read every file and compare it with its hash.

    Returns:
        The tokens.

    Raises:
        UserError: If the folder is missing or unfinished, the manifest is missing or malformed, or a file is
            missing, truncated or corrupt; it is named.
    """
    folder = Path(folder)
    tokens = ShardedTokens(folder, _read_manifest(folder))
    if verify:
        tokens.verify()
    return tokens


def held_out_documents(folder: str | Path) -> list[Document]:
    """Read the held-out documents of a prepared folder, in the order of the source.

    Raises:
        UserError: If the folder is not complete, or the file differs from its hash.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    path = folder / HELD_OUT_FILE
    _check_hash(path, manifest.held_out_sha256)
    with open(path, encoding="utf-8", newline="\n") as lines:
        return [Document(**json.loads(line)) for line in lines]


def prepared_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that the shards of a folder were made with.

    Raises:
        UserError: If the folder is not complete, or its tokenizer is another one.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    if (tokenizer.content_hash, tokenizer.vocab_size) != (manifest.tokenizer_hash, manifest.vocab_size):
        raise _corrupt(folder / TOKENIZER_FILE, "it is not the tokenizer of the shards")
    return tokenizer


def map_shard(folder: Path, shard: Shard, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Map the two files of a shard: tokens ``[tokens]``, documents int64 ``[2, documents + 1]``.

    Raises:
        UserError: If one is missing or has another size; it is named.
    """
    path = folder / shard.tokens_file
    expected = shard.tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            raise _corrupt(path, f"it has {size} bytes, the manifest says {expected}")
        tokens = np.frombuffer(_map_file(path), dtype=dtype.newbyteorder("<"))
        path = folder / shard.documents_file
        documents = np.load(path, mmap_mode="r", allow_pickle=False)
        whole = path.stat().st_size == documents.offset + documents.nbytes
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; restore it or prepare again") from error
    except (ValueError, EOFError, AttributeError) as error:  # the last for a file of another kind
        raise _corrupt(path, str(error)) from error
    if not whole or documents.dtype != np.int64 or documents.shape != (2, shard.documents + 1):
        raise _corrupt(path, f"it does not list {shard.documents} documents")
    return tokens, np.asarray(documents)


def _map_file(path: Path) -> mmap.mmap:
    """Map a file for reading here and there."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Else the kernel reads far more than a document around each; nine times slower from a cold disk.
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def verify_shard(folder: Path, shard: Shard) -> None:
    """Compare the two files of a shard with their hashes.

    Raises:
        UserError: If one is missing or differs; it is named.
    """
    _check_hash(folder / shard.tokens_file, shard.tokens_sha256)
    _check_hash(folder / shard.documents_file, shard.documents_sha256)


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; make one with nagnet data prepare")
    if (folder / UNFINISHED_FILE).exists() and not (folder / MANIFEST_FILE).exists():
        raise UserError(f"{folder} is not finished; run the same nagnet data prepare command again")
    return Manifest.read(folder)


def _check_hash(path: Path, expected: str) -> None:
    try:
        found = digest_of_file(path).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; restore it or prepare again") from error
    if found != expected:
        raise _corrupt(path, f"its SHA-256 is {found[:12]}..., the manifest says {expected[:12]}...")


def _corrupt(path: Path, what: str) -> UserError:
    return UserError(f"{path} is corrupt: {what}; restore it or prepare the folder again")
