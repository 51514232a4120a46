"""What a folder of token shards says of itself: manifest.json, read and written strictly."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from nagnet.data.encoding import token_dtype
from nagnet.errors import UserError

MANIFEST_FILE = "manifest.json"
HELD_OUT_FILE = "held_out.jsonl"
TOKENIZER_FILE = "tokenizer.json"
UNFINISHED_FILE = "unfinished.json"  # in place of the manifest, until the last shard is there
FORMAT_VERSION = 1

_HASH_BLOCK_BYTES = 1 << 20
RecordType = TypeVar("RecordType")


@dataclass(frozen=True)
class Shard:
    """One shard: tokens of whole documents, and where each document begins.

    Attributes:
        tokens_file: File of raw little-endian token ids.
        documents_file: ``.npy``, int64 ``[2, documents + 1]``: offsets in tokens, and in bytes of text.
        tokens: Number of ids, one BOS for each document included.
        documents: Number of documents.
        bytes: UTF-8 bytes of their texts.
        tokens_sha256: SHA-256 (hex) of the tokens file.
        documents_sha256: SHA-256 (hex) of the documents file.
    """

    tokens_file: str
    documents_file: str
    tokens: int
    documents: int
    bytes: int
    tokens_sha256: str
    documents_sha256: str

    @staticmethod
    def file_names(number: int) -> tuple[str, str]:
        """The names of a shard's tokens file and documents file."""
        return f"shard-{number:05d}.bin", f"shard-{number:05d}.documents.npy"


@dataclass
class Totals:
    """Counts of everything read so far.

    Attributes:
        documents: Documents in the shards.
        tokens: Tokens in the shards, one BOS for each document included.
        bytes: UTF-8 bytes of the text in the shards.
        held_out_documents: Documents held out.
        held_out_bytes: UTF-8 bytes of their text.
        long_lines: Kept documents with a line of 1 MB or more.
        dropped: Dropped documents by reason.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    held_out_documents: int = 0
    held_out_bytes: int = 0
    long_lines: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def kept_documents(self) -> int:
        """Documents that are not dropped."""
        return self.documents + self.held_out_documents

    @property
    def kept_bytes(self) -> int:
        """UTF-8 bytes of the text that is not dropped."""
        return self.bytes + self.held_out_bytes


@dataclass(frozen=True)
class Manifest:
    """All that is known of a prepared folder; written last, so a folder with a manifest is complete.

    Attributes:
        version: Of the format.
        dtype: Type of the ids in the tokens files: ``uint16`` or ``uint32``, little-endian.
        vocab_size: All ids are below it.
        bos_id: The id that begins each document.
        tokenizer_hash: ``Tokenizer.content_hash``.
        tokenizer_sha256: SHA-256 (hex) of ``tokenizer.json``.
        held_out_sha256: SHA-256 (hex) of ``held_out.jsonl``.
        source: What was read, in words.
        fingerprint: Of the source.
        arguments: What the folder was prepared with.
        totals: Counts.
        shards: In order.
    """

    version: int
    dtype: str
    vocab_size: int
    bos_id: int
    tokenizer_hash: str
    tokenizer_sha256: str
    held_out_sha256: str
    source: str
    fingerprint: str
    arguments: Mapping[str, Any]
    totals: Totals
    shards: tuple[Shard, ...]

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of what training sees: tokens, their borders, BOS and vocabulary."""
        hashes = [(shard.tokens_sha256, shard.documents_sha256) for shard in self.shards]
        key = json.dumps([self.dtype, self.vocab_size, self.bos_id, self.tokenizer_hash, hashes])
        return hashlib.sha256(key.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        return json.dumps({"format": "nagnet-shards", **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder.

        Raises:
            UserError: If it is missing, malformed or contradicts itself; the file is named.
        """
        path = folder / MANIFEST_FILE
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing; prepare the folder with nagnet data prepare") from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{path} is malformed ({error}); prepare the folder again") from error
        try:
            if not isinstance(values, dict) or values.pop("format", None) != "nagnet-shards":
                raise ValueError("it is not of the format nagnet-shards")
            if values.get("version") != FORMAT_VERSION:
                raise ValueError(f"its version is {values.get('version')!r}, this program reads {FORMAT_VERSION}")
            values["totals"] = parse_record(Totals, values.get("totals"))
            values["shards"] = tuple(parse_record(Shard, shard) for shard in values.get("shards") or ())
            manifest = parse_record(cls, values)
            manifest._check()
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is malformed ({error}); prepare the folder again") from error
        return manifest

    def _check(self) -> None:
        """Raise ValueError where the manifest contradicts itself."""
        if self.dtype != token_dtype(self.vocab_size).name:
            raise ValueError(f"ids of a vocabulary of {self.vocab_size} are not {self.dtype}")
        if not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(f"bos_id {self.bos_id} is outside the vocabulary of {self.vocab_size}")
        if not self.shards:
            raise ValueError("it lists no shards")
        for number, shard in enumerate(self.shards):
            if (shard.tokens_file, shard.documents_file) != Shard.file_names(number):
                raise ValueError(f"shard {number} is called {shard.tokens_file!r}")
        for name in ("tokens", "documents", "bytes"):
            total = sum(getattr(shard, name) for shard in self.shards)
            if total != getattr(self.totals, name):
                raise ValueError(f"its shards have {total} {name}, its totals say {getattr(self.totals, name)}")


def parse_record(kind: type[RecordType], values: Any) -> RecordType:
    """Make a dataclass from parsed JSON; names and plain types must be exactly those of its fields.

    Raises:
        ValueError: If they are not.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is not an object")
    expected = {entry.name: entry.type for entry in fields(kind)}  # type: ignore[arg-type]
    if values.keys() != expected.keys():
        raise ValueError(f"{kind.__name__} lacks or adds {', '.join(sorted(values.keys() ^ expected.keys()))}")
    for name, value in values.items():
        if expected[name] in (int, str) and type(value) is not expected[name]:
            raise ValueError(f"{name} is {value!r}")
        if expected[name] is int and value < 0:
            raise ValueError(f"{name} is negative")
    return kind(**values)


def digest_of_file(path: Path, n_bytes: int | None = None) -> "hashlib._Hash":
    """Return the SHA-256 of a file, or of its first ``n_bytes``, to be read or continued."""
    digest = hashlib.sha256()
    left = path.stat().st_size if n_bytes is None else n_bytes
    with open(path, "rb") as file:
        while block := file.read(min(left, _HASH_BLOCK_BYTES)):
            digest.update(block)
            left -= len(block)
    return digest
