"""Read text into documents and split them into a training and a held-out part."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nagnet.data.sources import Source, local_source, standard_library_source
from nagnet.data.text import PIECE_AT_BLANK_LINE, has_long_line
from nagnet.errors import UserError

logger = logging.getLogger(__name__)

HELD_OUT_FRACTION = 0.05


@dataclass(frozen=True)
class Document:
    """One text, the unit that is shuffled, held out and scored.

    Attributes:
        name: Relative POSIX path of the file, with ``#0001`` and so on for a piece or line of it.
        text: The text; always encodable as UTF-8.
    """

    name: str
    text: str

    @property
    def n_bytes(self) -> int:
        """Length of the text in UTF-8, in bytes."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents for training and for evaluation, sorted by name.

    Attributes:
        train: Documents to train on.
        held_out: Documents to evaluate on; about 5 %, chosen by a hash of the name.
        source: Where the text comes from, in words.
        dropped: Number of dropped documents by reason: ``empty``, ``null``, ``not_utf8``, ``binary``,
            ``not_json``, ``no_text``, ``unreadable``.
        long_lines: Number of kept documents that contain a line of 1 MB or more.
        content_hash: SHA-256 (hex) over all names and texts; the same whatever order they were read in.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    source: str
    dropped: Mapping[str, int]
    long_lines: int
    content_hash: str

    @property
    def train_bytes(self) -> int:
        """UTF-8 bytes of the training documents."""
        return sum(document.n_bytes for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes of the held-out documents."""
        return sum(document.n_bytes for document in self.held_out)


def name_hash(name: str) -> int:
    """Return a 64-bit hash of a document name; the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def hash_documents(documents: Iterable[Document]) -> str:
    """Return the SHA-256 (hex) of names and texts, in the order given."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name.encode("utf-8", "surrogateescape"), document.text.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def split_documents(documents: Iterable[Document], source: str, dropped: Mapping[str, int] | None = None) -> Corpus:
    """Split documents into a training and a held-out part by a hash of their names.

    A document stays on its side when others are added or removed, and the order does not matter. Only when no
    name falls into the held-out 5 % (or all do) the one with the smallest (largest) hash changes sides.

    Args:
        documents: Documents with distinct names.
        source: Where they come from, in words; used in messages.
        dropped: Documents already dropped, by reason.

    Returns:
        The corpus; both parts hold at least one document.

    Raises:
        UserError: If there are fewer than two documents, so that nothing could be held out.
    """
    kept = sorted(documents, key=lambda document: document.name)
    counts = dict(dropped or {})
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    if not kept:
        raise UserError(
            f"{source} holds no text documents (dropped: {reasons or 'none'}); give UTF-8 text files or JSON "
            "lines with a string field `text`"
        )
    if len(kept) == 1:
        raise UserError(
            f"{source} holds one document only, so none can be held out; give more files, or a single text "
            f"file longer than {PIECE_AT_BLANK_LINE} characters, which is cut in pieces"
        )
    if counts:
        logger.warning("%s: dropped documents: %s", source, reasons)
    long_lines = sum(has_long_line(document.text) for document in kept)
    if long_lines:
        logger.warning("%s: %d documents with a line of 1 MB or more (kept)", source, long_lines)

    by_hash = sorted(kept, key=lambda document: name_hash(document.name))
    threshold = int(HELD_OUT_FRACTION * 2**64)
    n_held_out = sum(name_hash(document.name) < threshold for document in kept)
    n_held_out = min(max(n_held_out, 1), len(kept) - 1)
    held_out = {document.name for document in by_hash[:n_held_out]}
    return Corpus(
        train=tuple(document for document in kept if document.name not in held_out),
        held_out=tuple(document for document in kept if document.name in held_out),
        source=source,
        dropped=counts,
        long_lines=long_lines,
        content_hash=hash_documents(kept),
    )


def standard_library_corpus() -> Corpus:
    """Read the Python files of the running interpreter's standard library, without its tests.

    Returns:
        A corpus of 10 to 20 MB that every Python installation has, so no download is needed.

    Raises:
        UserError: If this Python has no standard library as files on disk.
    """
    source = standard_library_source()
    documents, dropped = _read_all(source)
    # Empty __init__.py files are part of every installation, so no warning about them is due.
    dropped.pop("empty", None)
    return split_documents(documents, source.description, dropped)


def read_corpus(path: str | Path) -> Corpus:
    """Read a file or a folder of text whole, as ``nagnet.data.sources.local_source`` describes.

    Empty, null and undecodable documents are dropped, counted and logged.

    Args:
        path: File or folder.

    Returns:
        The corpus.

    Raises:
        UserError: If the path is missing or unreadable, a single file is binary, or too little text is left.
    """
    source = local_source(Path(path))
    documents, dropped = _read_all(source)
    if not documents and dropped and set(dropped) <= {"binary", "not_utf8"}:
        raise UserError(f"all {sum(dropped.values())} files in {path} are binary; give a folder of UTF-8 text files")
    return split_documents(documents, source.description, dropped)


def read_documents(path: str | Path) -> tuple[Document, ...]:
    """Read a file or a folder of text whole, without holding anything out.

    Args:
        path: File or folder, as for ``read_corpus``.

    Returns:
        All documents, sorted by name.

    Raises:
        UserError: If the path is missing or unreadable, or holds no text.
    """
    source = local_source(Path(path))
    documents, dropped = _read_all(source)
    if not documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise UserError(f"{path} holds no text documents (dropped: {reasons or 'none'}); give UTF-8 text")
    if dropped:
        logger.warning("%s: dropped documents: %s", path, dict(dropped))
    return tuple(sorted(documents, key=lambda document: document.name))


def _read_all(source: Source) -> tuple[list[Document], Counter[str]]:
    """Return the documents of a source and the counts of dropped ones."""
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    for record in source.read():
        if record.text is None:
            dropped[record.reason] += 1
        else:
            documents.append(Document(record.name, record.text))
    return documents, dropped
