"""Text out of bytes: why a text is dropped, JSON lines, the pieces of a long file, files of a folder."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

LONG_LINE_BYTES = 1_000_000

# A single text file is cut at a blank line, else at a line end, else anywhere, once a piece
# has so many characters.
PIECE_AT_BLANK_LINE = 4_000
PIECE_AT_LINE_END = 16_000
PIECE_ANYWHERE = 64_000

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_LINE = re.compile(rf"[^\n]{{1,{PIECE_ANYWHERE}}}\n?|\n")


def decode(content: bytes) -> tuple[str | None, str]:
    """Return the text of a file, or None and the reason why it is none."""
    if b"\0" in content:
        return None, "binary"
    try:
        text = content.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError:
        return None, "not_utf8"
    return (text, "") if text.strip() else (None, "empty")


def text_of_json_line(line: bytes, column: str = "text") -> tuple[str | None, str]:
    """Return the field ``column`` of one JSON line, or None and the reason to drop it."""
    if not line.strip():
        return None, "empty"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "not_utf8"
    except (ValueError, RecursionError):
        return None, "not_json"
    if record is None or (isinstance(record, dict) and column in record and record[column] is None):
        return None, "null"
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        return None, "no_text"
    text = record[column]
    if not text.strip():
        return None, "empty"
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate such as "\ud800"
        return None, "not_utf8"
    return text, ""


def text_of_value(value: bytes | None) -> tuple[str | None, str]:
    """Return the text of one value of a table's column, or None and the reason to drop it."""
    if value is None:
        return None, "null"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None, "not_utf8"
    return (text, "") if text.strip() else (None, "empty")


def cut_into_pieces(lines: Iterable[str]) -> Iterator[str]:
    """Cut a text into pieces of roughly 4 kB that concatenate to it, at blank lines where there are any.

    Args:
        lines: The text in parts of whole lines, each with its line end, such as an open file gives, or whole.
    """
    piece: list[str] = []
    size = 0
    for line in (part for lines_ in lines for part in _LINE.findall(lines_)):
        piece.append(line)
        size += len(line)
        at_blank_line = size >= PIECE_AT_BLANK_LINE and not line.strip()
        if at_blank_line or size >= PIECE_AT_LINE_END:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def has_long_line(text: str) -> bool:
    """Tell whether a text has a line of 1 MB or more."""
    # A character takes four bytes at most, so nearly every text is done here.
    if len(text) < LONG_LINE_BYTES // 4:
        return False
    return any(len(line.encode()) >= LONG_LINE_BYTES for line in text.split("\n"))


def files_of_folder(root: Path, skipped_folders: Iterable[str] = (), suffix: str = "") -> list[tuple[str, Path]]:
    """List the files under a folder, hidden files and folders skipped.

    Args:
        root: The folder.
        skipped_folders: Names of folders to leave out, at any depth.
        suffix: Only files whose names end so.

    Returns:
        Relative POSIX name and path of each, sorted by name.
    """
    found: list[tuple[str, Path]] = []
    skipped = set(skipped_folders)
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        for file in files:
            if not file.startswith(".") and file.endswith(suffix):
                path = Path(folder, file)
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)
