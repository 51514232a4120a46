"""Text in a terminal, each piece on a background as deep as its confidence ranks among those before it."""

from __future__ import annotations

import bisect
import io
import os
from collections.abc import Iterable
from typing import TextIO

BACKGROUNDS = (231, 195, 159, 123, 87, 51)  # of the 256 colours: white to cyan, all light enough for black letters
BLACK = 16
RESET = "\x1b[0m"


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours and whose user wants them (NO_COLOR, no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Shades:
    """Writes one text after another.

    The shade is a rank, since the scale of exp(s_N) differs from model to model: the share of the tokens of this text
    so far, prompt included, that were less confident.

    Args:
        stream: to write to. shaded: False writes the bare text.
    """

    def __init__(self, stream: TextIO, shaded: bool):
        self._stream, self._shaded = stream, shaded
        self._escapes = stream.isatty()
        self._seen: list[float] = []
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows a ? rather than failing

    def begin(self, prompt: str, confidences: Iterable[float]) -> None:
        """Writes a prompt without shades. confidences: of its tokens, to rank the later ones among."""
        self._seen = sorted(confidences)
        self._write(self._visible(prompt))

    def write(self, text: str, confidence: float) -> None:
        """Writes a piece of the continuation."""
        visible = self._visible(text)
        if self._shaded:
            start = f"\x1b[38;5;{BLACK};48;5;{self._background(confidence)}m"
            # A background that reaches over a line's end would fill the rest of the line.
            visible = "\n".join(f"{start}{line}{RESET}" if line else "" for line in visible.split("\n"))
        self._write(visible)

    def end(self) -> None:
        """Ends the line of a text."""
        self._write("\n")

    def _background(self, confidence: float) -> int:
        rank = bisect.bisect_left(self._seen, confidence)
        share = rank / len(self._seen) if self._seen else 0.0
        bisect.insort(self._seen, confidence)
        return BACKGROUNDS[min(int(share * len(BACKGROUNDS)), len(BACKGROUNDS) - 1)]

    def _visible(self, text: str) -> str:
        """A model may write what a terminal takes for a command: there control characters become U+FFFD."""
        if not self._escapes:
            return text
        return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
