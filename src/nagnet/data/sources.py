"""Where text comes from: files, folders and data sets, read in a fixed order and from any point on."""

import codecs
import errno
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from nagnet.data.tables import SHORT_NAMES, HubName, hub_stream, parquet_stream
from nagnet.data.text import BYTE_ORDER_MARK, cut_into_pieces, decode, files_of_folder, text_of_json_line
from nagnet.errors import UserError

HUB_PREFIX = "hf:"
STANDARD_LIBRARY = "stdlib"

_BLOCK_BYTES = 1 << 20
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Item = tuple[str, str | None, str]  # name, text, and where there is none the reason


class Cursor(NamedTuple):
    """A point in a source, made of what JSON can hold.

    Attributes:
        part: Index of the part.
        state: Where the part can begin to read; None for its start.
        skip: Records of the part to pass over after that.
    """

    part: int = 0
    state: Any = None
    skip: int = 0


class Record(NamedTuple):
    """One text of a source, or the place of one that is dropped.

    Attributes:
        name: Name that no other record of the source has.
        text: The text, with more in it than white space; None where it is dropped.
        reason: Why: ``empty``, ``null``, ``not_utf8``, ``binary``, ``not_json``, ``no_text``, ``unreadable``.
        cursor: Reading from here on begins with this record.
    """

    name: str
    text: str | None
    reason: str
    cursor: Cursor


class Part(Protocol):
    """A file or a stream of tables."""

    def read(self, state: Any) -> Iterable[tuple[Any, Iterable[Item]]]:
        """Yield (state, items that a read from this state begins with), from a state or, if None, the start."""
        ...


@dataclass(frozen=True)
class Source:
    """Texts in a fixed order.

    Attributes:
        description: What it is, in words.
        fingerprint: Changes when the files do (their names, sizes and times), or the commit of a data set.
        parts: Files and streams, in order.
        n_bytes: About how many bytes of text there are; None if unknown.
        revision: The commit of a data set on the hub; None for files.
    """

    description: str
    fingerprint: str
    parts: Sequence[Part]
    n_bytes: int | None
    revision: str | None = None

    def read(self, start: Cursor | None = None) -> Iterator[Record]:
        """Yield the records in order, from a cursor or the beginning.

        Raises:
            UserError: If what is read is damaged, or cannot be reached any more.
        """
        first, state, skip = start or Cursor()
        for index in range(first, len(self.parts)):
            for group, items in self.parts[index].read(state):
                for number, item in enumerate(items):
                    if skip:
                        skip -= 1
                    else:
                        yield Record(*item, cursor=Cursor(index, group, number))
            state = None


class _TextFile(NamedTuple):
    """A file that is one document."""

    name: str
    path: Path

    def read(self, state: Any) -> Iterator[tuple[Any, list[Item]]]:
        try:
            with _open_file(self.path) as file:
                text, reason = decode(file.read())
        except OSError:
            text, reason = None, "unreadable"
        yield None, [(self.name, text, reason)]


class _JsonLines(NamedTuple):
    """A file with a document on each line; a state is the offset and the number of a line."""

    name: str
    path: Path
    column: str

    def read(self, state: Any) -> Iterator[tuple[Any, list[Item]]]:
        try:
            file = _open_file(self.path)
        except OSError:
            yield None, [(self.name, None, "unreadable")]
            return
        offset, number = state or (0, 1)
        with file:
            file.seek(offset)
            for line in file:
                start, offset = offset, offset + len(line)
                text = line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line
                item = (f"{self.name}#{number:04d}", *text_of_json_line(text.removesuffix(b"\n"), self.column))
                yield (start, number), [item]
                number += 1


class _Pieces(NamedTuple):
    """A text file of its own, cut in pieces that are the documents."""

    name: str
    path: Path

    def read(self, state: Any) -> Iterator[tuple[Any, Iterator[Item]]]:
        with open(self.path, encoding="utf-8-sig", newline="\n") as file:
            yield None, self._items(file)

    def _items(self, lines: Iterable[str]) -> Iterator[Item]:
        for number, piece in enumerate(cut_into_pieces(lines), start=1):
            kept = bool(piece.strip())
            yield f"{self.name}#{number:04d}", piece if kept else None, "" if kept else "empty"


def open_source(
    spec: str, column: str = "text", subset: str | None = None, split: str = "train", revision: str | None = None
) -> Source:
    """Find out what a user means by a source.

    Args:
        spec: ``stdlib`` (the Python standard library), a file or folder of text, ``.jsonl`` or ``.parquet``, or
            ``hf:NAME``, ``hf:OWNER/NAME`` or ``hf:OWNER/NAME/SUBSET`` for a data set on the Hugging Face hub, where
            NAME alone may be one of ``SHORT_NAMES``.
        column: Field or column that holds the text, of JSON lines and tables.
        subset: Configuration of a data set on the hub.
        split: Split of a data set on the hub.
        revision: Commit of a data set on the hub; None for the newest.

    Returns:
        The source; no text has been read.

    Raises:
        UserError: If there is no such thing, it cannot be read, or the hub does not answer.
    """
    if spec.startswith(HUB_PREFIX):
        data_set = _hub_name(spec, subset)
        stream, commit, n_bytes = hub_stream(data_set, split, column, revision)
        words = f"{data_set.name}{f' ({data_set.subset})' if data_set.subset else ''}, {split}, at {commit[:12]}"
        return Source(words, f"{data_set.name}@{commit}", [stream], n_bytes, commit)
    if subset is not None:
        raise UserError(f"--subset is for data sets on the hub, and {spec} is not one; write {HUB_PREFIX}NAME")
    return standard_library_source() if spec == STANDARD_LIBRARY else local_source(Path(spec), column)


def standard_library_source() -> Source:
    """The Python files of the running interpreter's standard library, without its tests.

    Raises:
        UserError: If this Python has no standard library as files on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = files_of_folder(root, skipped_folders=_NOT_LIBRARY, suffix=".py")
    if not files:
        raise UserError(f"no standard library sources under {root}; give a file or folder of text instead")
    return _of_files("the Python standard library", files, column="text")


def local_source(path: Path, column: str = "text") -> Source:
    """A file or a folder of text.

    A folder gives one document per file that is UTF-8 text, recursively, hidden files and folders skipped;
    a ``.jsonl`` file, alone or in a folder, one per line, from a field; a ``.parquet`` file one per row, from a
    column. A single file of another kind is cut into pieces of roughly 4 kB at blank lines, which
    concatenate to the file. A byte order mark is left out. Tables come last, the rest sorted by name.

    Raises:
        UserError: If the path is missing or unreadable, a single file is not text, or a parquet file is damaged.
    """
    if path.is_dir():
        return _of_files(str(path), files_of_folder(path), column)
    if not path.exists():
        known = f"; for the data set on the hub write {HUB_PREFIX}{path}" if str(path) in SHORT_NAMES else ""
        raise UserError(f"{path} does not exist; give a file or folder of text{known}")
    if path.suffix in (".jsonl", ".parquet"):
        _check_readable(path)
        return _of_files(str(path), [(path.name, path)], column)
    _check_text(path)
    return Source(str(path), _fingerprint([(path.name, path)]), [_Pieces(path.name, path)], path.stat().st_size)


def _of_files(description: str, files: Sequence[tuple[str, Path]], column: str) -> Source:
    """The source of files of one document each, JSON lines and, together at the end, parquet files."""
    parts: list[Part] = []
    tables: list[Path] = []
    n_bytes = 0
    for name, path in files:
        if path.suffix == ".parquet":
            tables.append(path)
            continue
        parts.append(_JsonLines(name, path, column) if path.suffix == ".jsonl" else _TextFile(name, path))
        n_bytes += path.stat().st_size if path.is_file() else 0
    if tables:
        stream, table_bytes = parquet_stream(tables, column)
        parts.append(stream)
        n_bytes += table_bytes
    return Source(description, _fingerprint(files), parts, n_bytes)


def _hub_name(spec: str, subset: str | None) -> HubName:
    """Read ``hf:OWNER/NAME/SUBSET``, where the owner or the subset may be missing, or a short name."""
    name = spec.removeprefix(HUB_PREFIX)
    if name in SHORT_NAMES:
        known = SHORT_NAMES[name]
        return HubName(known.name, subset or known.subset)
    words = name.split("/")
    if not all(words) or len(words) > 3 or (len(words) == 3 and subset is not None):
        raise UserError(
            f"{spec} is no data set on the hub; write {HUB_PREFIX}OWNER/NAME, {HUB_PREFIX}OWNER/NAME/SUBSET or "
            f"{HUB_PREFIX} and one of {', '.join(SHORT_NAMES)}"
        )
    return HubName("/".join(words[:2]), words[2] if len(words) == 3 else subset)


def _fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 (hex) of the names, sizes and times of change of files."""
    rows = []
    for name, path in files:
        try:
            status = path.stat()
            rows.append([name, status.st_size, status.st_mtime_ns])
        except OSError:
            rows.append([name, -1, -1])
    return hashlib.sha256(json.dumps(rows).encode("utf-8", "surrogateescape")).hexdigest()


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file; anything else (a pipe would block) is an OSError."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return open(path, "rb")


def _check_readable(path: Path) -> None:
    try:
        _open_file(path).close()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _check_text(path: Path) -> None:
    """Read a file once, so that one which is not text is refused before anything is made of it."""
    _check_readable(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    reason = None
    with open(path, "rb") as file:
        for block in chain(iter(lambda: file.read(_BLOCK_BYTES), b""), [b""]):
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                reason = "not_utf8"
            reason = "binary" if b"\0" in block else reason
            if reason:
                raise UserError(f"{path} is not UTF-8 text ({reason}); convert it or give another file")
