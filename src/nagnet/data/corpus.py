"""Read text into documents and split them into a training and a held-out part."""

import hashlib
import json
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nagnet.errors import UserError

logger = logging.getLogger(__name__)

HELD_OUT_FRACTION = 0.05
LONG_LINE_BYTES = 1_000_000

# A single text file is cut at a blank line, else at a line end, else anywhere, once a piece
# has so many characters.
PIECE_AT_BLANK_LINE = 4_000
PIECE_AT_LINE_END = 16_000
PIECE_ANYWHERE = 64_000

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
    long_lines = sum(_has_long_line(document.text) for document in kept)
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
    root = Path(sysconfig.get_path("stdlib"))
    documents, dropped = _read_folder(root, skipped_folders=_NOT_LIBRARY, suffix=".py")
    if len(documents) < 2:
        raise UserError(f"no standard library sources under {root}; give a file or folder of text instead")
    # Empty __init__.py files are part of every installation, so no warning about them is due.
    dropped.pop("empty", None)
    return split_documents(documents, "the Python standard library", dropped)


def read_corpus(path: str | Path) -> Corpus:
    """Read a file or a folder of text.

    A folder gives one document per file that is UTF-8 text, recursively, hidden files and folders skipped.
    A ``.jsonl`` file, alone or in a folder, gives one document per line, from its field ``text``. A single
    file of another kind is cut into pieces of roughly 4 kB at blank lines, which concatenate to the file.
    Empty, null and undecodable documents are dropped, counted and logged. A byte order mark is left out.

    Args:
        path: File or folder.

    Returns:
        The corpus.

    Raises:
        UserError: If the path is missing or unreadable, a single file is binary, or too little text is left.
    """
    path = Path(path)
    if path.is_dir():
        documents, dropped = _read_folder(path)
        if not documents and dropped and set(dropped) <= {"binary", "not_utf8"}:
            n_files = sum(dropped.values())
            raise UserError(f"all {n_files} files in {path} are binary; give a folder of UTF-8 text files")
        return split_documents(documents, str(path), dropped)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a file or folder of text")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if path.suffix == ".jsonl":
        dropped = Counter()
        return split_documents(list(_json_documents(path.name, content, dropped)), str(path), dropped)
    text, reason = _decode(content)
    if text is None:
        raise UserError(f"{path} is not UTF-8 text ({reason}); convert it or give another file")
    pieces = _cut_into_pieces(text)
    documents = [
        Document(f"{path.name}#{number:04d}", piece) for number, piece in enumerate(pieces, start=1) if piece.strip()
    ]
    return split_documents(documents, str(path), +Counter(empty=len(pieces) - len(documents)))


def _read_folder(
    root: Path, skipped_folders: Iterable[str] = (), suffix: str = ""
) -> tuple[list[Document], Counter[str]]:
    """Read every text file under a folder; return the documents and the counts of dropped ones."""
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    skipped = set(skipped_folders)
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        for file in files:
            if file.startswith(".") or not file.endswith(suffix):
                continue
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            if not path.is_file():  # a broken link, or a pipe that would block
                dropped["unreadable"] += 1
                continue
            try:
                content = path.read_bytes()
            except OSError:
                dropped["unreadable"] += 1
                continue
            if path.suffix == ".jsonl":
                documents.extend(_json_documents(name, content, dropped))
                continue
            text, reason = _decode(content)
            if text is None:
                dropped[reason] += 1
            elif not text.strip():
                dropped["empty"] += 1
            else:
                documents.append(Document(name, text))
    return documents, dropped


def _json_documents(name: str, content: bytes, dropped: Counter[str]) -> Iterator[Document]:
    """Yield a document per line of a JSON lines file; count the dropped lines by reason."""
    lines = content.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        text, reason = _text_of_json_line(line)
        if text is None:
            dropped[reason] += 1
        else:
            yield Document(f"{name}#{number:04d}", text)


def _text_of_json_line(line: bytes) -> tuple[str | None, str]:
    """Return the field ``text`` of one JSON line, or None and the reason to drop it."""
    if not line.strip():
        return None, "empty"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "not_utf8"
    except (ValueError, RecursionError):
        return None, "not_json"
    if record is None or (isinstance(record, dict) and "text" in record and record["text"] is None):
        return None, "null"
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        return None, "no_text"
    text = record["text"]
    if not text.strip():
        return None, "empty"
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate such as "\ud800"
        return None, "not_utf8"
    return text, ""


def _decode(content: bytes) -> tuple[str | None, str]:
    """Return the text of a file, or None and the reason why it is none."""
    if b"\0" in content:
        return None, "binary"
    try:
        return content.removeprefix(_BYTE_ORDER_MARK).decode(), ""
    except UnicodeDecodeError:
        return None, "not_utf8"


def _cut_into_pieces(text: str) -> list[str]:
    """Cut a text into pieces of roughly 4 kB that concatenate to it, at blank lines where there are any."""
    pieces: list[str] = []
    piece: list[str] = []
    size = 0
    for line in re.findall(rf"[^\n]{{1,{PIECE_ANYWHERE}}}\n?|\n", text):
        piece.append(line)
        size += len(line)
        at_blank_line = size >= PIECE_AT_BLANK_LINE and not line.strip()
        if at_blank_line or size >= PIECE_AT_LINE_END:
            pieces.append("".join(piece))
            piece, size = [], 0
    if piece:
        pieces.append("".join(piece))
    return pieces


def _has_long_line(text: str) -> bool:
    """Tell whether a text has a line of 1 MB or more."""
    if len(text.encode()) < LONG_LINE_BYTES:
        return False
    return any(len(line.encode()) >= LONG_LINE_BYTES for line in text.split("\n"))
