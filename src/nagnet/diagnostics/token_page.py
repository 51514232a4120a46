"""Token views in a browser: a fragment for a report, and a page of its own."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nagnet.diagnostics import page
from nagnet.diagnostics.token_view import TokenView
from nagnet.errors import UserError
from nagnet.files import write_atomically

SPLIT_MARK = "·"  # a token that only goes on with a character that an earlier one began
BOS_MARK = "⟨bos⟩"
_TAIL = 2.0  # percent of the tokens beyond either end of a colour scale
_CONSTANT = 1e-3  # relative spread below which a scale is rounding noise

CAPTION = (
    "Each piece is a token, predicted from those before it, the first from the begin-of-document token (bos). "
    "Probability, rank (1 is the likeliest) and loss compare the prediction with the token that came. Entropy, "
    "likeliest token, confidence, s by depth and the sublayers that ran are those of the same prediction: of the "
    "stream one position earlier, which had not seen the token. exp(s_N) is the RMS of the stream after the last of "
    f"N updates, s its natural log. A colour scale ends where {_TAIL:g}% of the tokens lie beyond; loss and entropy "
    "have one scale for all models shown. A character in several tokens is shown in the first of them, and the "
    f"others as {SPLIT_MARK}."
)
_MULTIPLIES = "exp(s_N) multiplies this model's logits: it is the inverse temperature of its prediction."
_CONTROL = "exp(s_N) does not reach this model's logits; it is measured the same way, as a control."


def render_token_views(views: Mapping[str, TokenView]) -> str:
    """An HTML fragment with one or several models on one text, side by side.

    It brings its own styles, data and script, and may stand in a page more than once. A token chosen in one model
    chooses in each other the token that holds its first byte.

    Args:
        views: by the name shown, a residual rule's for its colour; of one text, though some may show less of it.

    Raises:
        UserError: if there is no view, they are of different texts, or jinja2 is not installed.
    """
    return page.render("token_view.html", **_values(views))


def write_token_view(path: Path, title: str, views: Mapping[str, TokenView]) -> None:
    """Writes a page with what `render_token_views` gives; it appears whole or not at all.

    Raises:
        UserError: as `render_token_views`, or if the file cannot be written.
    """
    content = page.render("token_view_page.html", title=title, **_values(views))
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def visible(text: str) -> str:
    """Text with all that would not show: line ends and tabs marked and kept, other controls as symbols or numbers."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return {"\n": "↵\n", "\t": "→\t"}[character]
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
    return f"⟨U+{code:04X}⟩" if hidden else character


def _values(views: Mapping[str, TokenView]) -> dict[str, Any]:
    """What the templates name."""
    if not views:
        raise UserError("there is no token view to show; give at least one model")
    texts = sorted((b"".join(view.contents) for view in views.values()), key=len)
    if not all(texts[-1].startswith(text) for text in texts):
        raise UserError("the token views are of different texts; show models on one text")
    from nagnet.diagnostics.style import arm_styles  # brings matplotlib, which looking at arrays does without

    looks = arm_styles(views)
    common = {
        mode: [0.0, _significant(max(_end(getattr(view, mode)) for view in views.values()))]
        for mode in ("loss", "entropy")
    }
    models = [
        {"name": looks[name]["label"], "color": looks[name]["color"], "note": _note(view)} | _data(view, common)
        for name, view in views.items()
    ]
    return {"models": models, "caption": CAPTION}


def _data(view: TokenView, common_scales: Mapping[str, list[float]]) -> dict[str, Any]:
    """One model's part of the data: numbers have three significant digits, s three decimals."""
    lengths = [len(content) for content in view.contents]
    low, high = np.percentile(view.confidence, [_TAIL, 100.0 - _TAIL])
    constant = high - low <= _CONSTANT * abs(high)
    numbers = ("loss", "probability", "entropy", "max_probability", "confidence")
    return {name: _rounded(getattr(view, name)) for name in numbers} | {
        "text": _shown(view),
        "starts": np.cumsum([0, *lengths[:-1]]).tolist(),
        "end": sum(lengths),
        "split": _split(view),
        "rank": view.rank.tolist(),
        "vocab_size": view.vocab_size,
        "likeliest": [_alone(content) for content in view.likeliest],
        "log_norm": view.log_norm.round(3).tolist(),
        "mean_log_norm": view.log_norm.mean(axis=0).round(3).tolist(),
        "log_norm_range": np.percentile(view.log_norm, [1.0, 99.0]).round(3).tolist(),
        "ran": None if view.skip_threshold is None else ["".join("01"[int(run)] for run in row) for row in view.ran],
        "skip_threshold": view.skip_threshold,
        "scale_in_logits": view.scale_in_logits,
        "window_starts": list(view.window_starts),
        "scales": {"confidence": _rounded([low, low if constant else high])} | dict(common_scales),
    }


def _end(values: np.ndarray) -> float:
    return float(np.percentile(values, 100.0 - _TAIL))


def _significant(value: float) -> float:
    return float(f"{value:.3g}")


def _rounded(values: np.ndarray | Sequence[float]) -> list[float]:
    return [_significant(value) for value in values]


def _shown(view: TokenView) -> list[str]:
    """What stands for each token in the text."""
    pairs = zip(view.pieces, view.contents, strict=True)
    return [visible(piece) or (SPLIT_MARK if content else BOS_MARK) for piece, content in pairs]


def _split(view: TokenView) -> dict[str, str]:
    """Bytes in hexadecimal of the tokens that end or begin inside a character, by their place."""
    pairs = enumerate(zip(view.pieces, view.contents, strict=True))
    return {str(place): content.hex(" ").upper() for place, (piece, content) in pairs if piece.encode() != content}


def _alone(content: bytes) -> str:
    """A token outside a text: bytes that are no character are written as ``\\xE4``."""
    return visible(content.decode("utf-8", "backslashreplace")) or BOS_MARK


def _note(view: TokenView) -> str:
    """What is particular to one model."""
    parts = [_MULTIPLIES if view.scale_in_logits else _CONTROL]
    if view.skip_threshold is not None:
        parts.append("A token skips the sublayers in which its rotation score is not above the threshold.")
    if len(view.window_starts) > 1:
        longest = max(np.diff([*view.window_starts, len(view.contents)]))
        parts.append(
            f"The text is read in windows of {longest:,} tokens: at each double line the context begins anew, with the "
            "token before it."
        )
    if view.n_left_out:
        parts.append(f"Shown are the first {len(view.contents):,} tokens; {view.n_left_out:,} more are left out.")
    return " ".join(parts)
