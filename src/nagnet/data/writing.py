"""Writes token shards and held-out documents, so that every file is whole or can be made whole again."""

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nagnet.data.manifest import (
    HELD_OUT_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    UNFINISHED_FILE,
    Shard,
    Totals,
    digest_of_file,
    parse_record,
)
from nagnet.data.shards import verify_shard
from nagnet.data.sources import Cursor
from nagnet.errors import UserError
from nagnet.files import write_atomically


class ShardWriter:
    """Writes one shard; its files appear when it is finished."""

    def __init__(self, folder: Path, number: int) -> None:
        """Begin a shard.

        Args:
            folder: Where to write.
            number: Its number, from 0.
        """
        self._folder = folder
        self._tokens_file, self._documents_file = Shard.file_names(number)
        self._part = folder / f".{self._tokens_file}.part"
        self._file: BinaryIO = open(self._part, "wb")  # noqa: SIM115 (open until the shard is full)
        self._digest = hashlib.sha256()
        self._lengths: list[int] = []
        self._bytes: list[int] = []
        self.tokens = 0

    def add(self, tokens: np.ndarray, n_bytes: int) -> None:
        """Append a document: its tokens, BOS first, and the UTF-8 bytes of its text."""
        content = tokens.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._lengths.append(len(tokens))
        self._bytes.append(n_bytes)
        self.tokens += len(tokens)

    def finish(self) -> Shard:
        """Make the files appear, the documents first: a tokens file never lacks its documents."""
        documents = np.zeros((2, len(self._lengths) + 1), dtype="<i8")
        np.cumsum(self._lengths, out=documents[0, 1:])
        np.cumsum(self._bytes, out=documents[1, 1:])
        buffer = io.BytesIO()
        np.save(buffer, documents, allow_pickle=False)
        content = buffer.getvalue()
        write_atomically(self._folder / self._documents_file, content)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._folder / self._tokens_file)
        return Shard(
            tokens_file=self._tokens_file,
            documents_file=self._documents_file,
            tokens=self.tokens,
            documents=len(self._lengths),
            bytes=int(documents[1, -1]),
            tokens_sha256=self._digest.hexdigest(),
            documents_sha256=hashlib.sha256(content).hexdigest(),
        )

    def discard(self) -> None:
        """Give up; nothing of the shard stays."""
        self._file.close()
        self._part.unlink(missing_ok=True)


class HeldOutWriter:
    """Appends held-out documents to ``held_out.jsonl``, from a point known to be good."""

    def __init__(self, folder: Path, size: int) -> None:
        """Open the file and cut off what was written after its first ``size`` bytes."""
        path = folder / HELD_OUT_FILE
        self._digest = digest_of_file(path, size) if size else hashlib.sha256()
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115 (open as long as documents come)
        self._file.truncate(size)
        self.size = size

    def add(self, name: str, text: str) -> None:
        """Append a document."""
        line = json.dumps({"name": name, "text": text}).encode() + b"\n"
        self._file.write(line)
        self._digest.update(line)
        self.size += len(line)

    def flush(self) -> str:
        """Make sure all is on disk; return the SHA-256 (hex) of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Checkpoint:
    """The state after a finished shard.

    Attributes:
        shard: That shard.
        cursor: Where in the source the next one begins.
        totals: Counts up to there.
        held_out_size: Bytes of the held-out file.
        held_out_sha256: SHA-256 (hex) of them.
    """

    shard: Shard
    cursor: Cursor
    totals: Totals
    held_out_size: int
    held_out_sha256: str


@dataclass(frozen=True)
class Unfinished:
    """A preparation that is under way, as kept in ``unfinished.json``.

    Attributes:
        arguments: What the folder is prepared with.
        fingerprint: Of the source.
        revision: Commit of a data set on the hub; empty for files.
        threshold: Of ``selection.Limits``.
        tokenizer_hash: ``Tokenizer.content_hash``.
        checkpoints: One for each finished shard.
    """

    arguments: dict[str, Any]
    fingerprint: str
    revision: str
    threshold: int
    tokenizer_hash: str
    checkpoints: tuple[Checkpoint, ...] = ()

    def save(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        write_atomically(folder / UNFINISHED_FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, folder: Path) -> "Unfinished":
        """Read the file.

        Raises:
            UserError: If it is damaged.
        """
        path = folder / UNFINISHED_FILE
        try:
            values = json.loads(path.read_bytes())
            values["checkpoints"] = tuple(_checkpoint(value) for value in values["checkpoints"])
            return parse_record(cls, values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); delete the folder and prepare it anew") from error


def verified(checkpoints: tuple[Checkpoint, ...], folder: Path) -> tuple[tuple[Checkpoint, ...], str]:
    """Find the checkpoints whose files are as they were written.

    Args:
        checkpoints: All of them, in order.
        folder: Where the files are.

    Returns:
        The checkpoints before the first damaged file, and what is wrong with that; empty if none is damaged.
    """
    for number, checkpoint in enumerate(checkpoints):
        try:
            verify_shard(folder, checkpoint.shard)
            held_out = digest_of_file(folder / HELD_OUT_FILE, checkpoint.held_out_size)
            if held_out.hexdigest() != checkpoint.held_out_sha256:
                raise UserError(f"{folder / HELD_OUT_FILE} is damaged")
        except (UserError, OSError) as error:
            return checkpoints[:number], str(error)
    return checkpoints, ""


def remove_leftovers(folder: Path) -> None:
    """Delete what writes that were cut short have left: their names begin with a dot."""
    for name in ("shard-", MANIFEST_FILE, TOKENIZER_FILE, UNFINISHED_FILE):
        for path in folder.glob(f".{name}*"):
            path.unlink()


def _checkpoint(values: Any) -> Checkpoint:
    values["shard"] = parse_record(Shard, values["shard"])
    values["totals"] = parse_record(Totals, values["totals"])
    values["cursor"] = Cursor(*values["cursor"])
    return parse_record(Checkpoint, values)
