"""What a model made of each token of a text: how well it was predicted, how surely, and what the stream did on the way.

A token's row is about its prediction. Loss, probability and rank compare that with the token that came; entropy, the
likeliest token, confidence, s by depth and the sublayers that ran are the state from which it was made: that of the
position before, which has not seen the token. `token_page` shows it in a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nagnet.data.tokenizer import Tokenizer
from nagnet.diagnostics.probe import UpdateStep, observe_decisions, observe_updates
from nagnet.errors import UserError
from nagnet.nn.skip import Decision

MAX_TOKENS = 2000  # a page of more is slow to read and to open
_POSITIONS_AT_A_TIME = 256  # whose logits exist at the same time


@dataclass(frozen=True)
class TokenView:
    """T tokens of a text, without the BOS before them, in a model of N updates.

    Attributes:
        contents: bytes of each token.
        pieces: text of each token; together the text. A character whose bytes lie in several tokens belongs to the
            first of them, so the others may have none.
        loss: nats. probability: of the token that came.
        rank: int64, 1 where no token was likelier; equally likely ones share the best place.
        entropy: of the prediction, nats. max_probability: of its likeliest token.
        likeliest: bytes of that token, none for BOS: the model expects the next document.
        confidence: exp(s_N), RMS of the stream at the end.
        log_norm: s before the first update and after each of the N, natural log of the stream's RMS, [T, N + 1].
        ran: bool [T, N], whether the token's prediction ran the sublayer.
        window_starts: places in the text at which the context begins anew, the first is 0: longer texts than the
            model takes are scored in windows that see nothing before them but the last token of the one before.
        vocab_size: V, that ranks are out of.
        skip_threshold: the rotation score up to which a sublayer is skipped; None where nothing can be.
        scale_in_logits: whether exp(s_N) multiplies this model's logits; if not, it is measured as a control.
        n_left_out: tokens at the end of the text that are not shown.

    The arrays are float64 and have T entries where nothing else is said.
    """

    contents: tuple[bytes, ...]
    pieces: tuple[str, ...]
    loss: np.ndarray
    probability: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    max_probability: np.ndarray
    likeliest: tuple[bytes, ...]
    confidence: np.ndarray
    log_norm: np.ndarray
    ran: np.ndarray
    window_starts: tuple[int, ...]
    vocab_size: int
    skip_threshold: float | None
    scale_in_logits: bool
    n_left_out: int = 0


def token_view_of_text(
    model: Any, tokenizer: Tokenizer, text: str, seq_len: int | None = None, max_tokens: int = MAX_TOKENS
) -> TokenView:
    """Looks at each token of a text, which is a document of its own.

    Args:
        model: a `nagnet.Decoder`, of any residual rule, compiled or not; left as it was.
        tokenizer: the model's.
        seq_len: most tokens the model sees at a time; default its max_seq_len.
        max_tokens: the text is cut after so many.

    Raises:
        UserError: for an empty text, or as `token_view`.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}; give 1 or more")
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("the text is empty, so there is no token to look at")
    tokens = torch.tensor([tokenizer.bos_id, *ids[:max_tokens]])
    return token_view(model, tokens, tokenizer.contents, seq_len, n_left_out=max(0, len(ids) - max_tokens))


def token_view(
    model: Any, tokens: Tensor, contents: Sequence[bytes], seq_len: int | None = None, n_left_out: int = 0
) -> TokenView:
    """Looks at each of T tokens, of which none is predicted from more than the ``seq_len`` before it.

    Args:
        model: a `nagnet.Decoder`, of any residual rule, compiled or not; left as it was.
        tokens: [T + 1] integers; the first is BOS, or whatever the second shall be predicted from.
        contents: bytes of each of the V entries of the vocabulary (`Tokenizer.contents`).
        seq_len: most tokens the model sees at a time; default its max_seq_len. Windows as for bits per byte.
        n_left_out: tokens that the caller has cut off, for the view to say.

    Raises:
        UserError: if ``tokens`` is no list of two or more, ``contents`` has not V entries, ``seq_len`` is below 1, or
            the model's output is not finite.
    """
    length = model.config.max_seq_len if seq_len is None else seq_len
    vocab_size = model.config.vocab_size
    if tokens.ndim != 1 or len(tokens) < 2:
        raise UserError(f"tokens have shape {list(tokens.shape)}; give a BOS and at least one token, [T + 1]")
    if len(contents) != vocab_size:
        raise UserError(f"{len(contents)} token contents for a vocabulary of {vocab_size}; use the model's tokenizer")
    if length < 1:
        raise UserError(f"seq_len is {length}; give 1 or more")
    tokens = tokens.to(model.embedding.weight.device)
    starts = range(0, len(tokens) - 1, length)
    windows = [_window(model, tokens[start : start + length + 1], start) for start in starts]
    log_norm, ran, scores = (torch.cat(parts).cpu().numpy() for parts in zip(*windows, strict=True))
    loss, rank, entropy, max_probability, likeliest = scores.T
    text = tuple(contents[token] for token in tokens[1:].tolist())
    threshold = -1.0 if model.skipping is None else float(model.skipping.threshold)
    return TokenView(
        contents=text,
        pieces=tuple(join_pieces(text)),
        loss=loss,
        probability=np.exp(-loss),
        rank=rank.astype(np.int64),
        entropy=entropy,
        max_probability=max_probability,
        likeliest=tuple(contents[int(token)] for token in likeliest),
        confidence=np.exp(log_norm[:, -1]),
        log_norm=log_norm,
        ran=ran,
        window_starts=tuple(starts),
        vocab_size=vocab_size,
        skip_threshold=threshold if threshold >= 0.0 else None,
        scale_in_logits=model.readout.config.uses_log_norm,
        n_left_out=n_left_out,
    )


def _window(model: Any, tokens: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Passes [n + 1] tokens; gives s [n, N + 1], what ran [n, N], and the scores [n, 5] of `_scores`."""
    levels: list[Tensor] = []
    ran: list[Tensor] = []

    def note(step: UpdateStep) -> None:
        if not levels:
            levels.append(step.before.split()[1][0].cpu().double())
        levels.append(step.after.split()[1][0].cpu().double())

    def decide(decisions: list[Decision]) -> None:
        ran.extend(decision.run[0].cpu() for decision in decisions)

    with observe_updates(model, note), observe_decisions(model, decide):
        direction, log_norm = model.trunk(tokens[None, :-1]).split()
        parts = []
        for first in range(0, len(tokens) - 1, _POSITIONS_AT_A_TIME):
            chunk = slice(first, first + _POSITIONS_AT_A_TIME)
            logits = model.readout(direction[:, chunk], log_norm[:, chunk])[0]
            parts.append(_scores(logits, tokens[1:][chunk], start + first))
    n_updates = len(levels) - 1
    run = torch.stack(ran, dim=1) if ran else torch.ones(len(tokens) - 1, n_updates, dtype=torch.bool)
    return torch.stack(levels, dim=1), run, torch.cat(parts)


def _scores(logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """Loss, rank, entropy, largest probability and likeliest token of n predictions, float64 [n, 5] on the CPU.

    Args:
        logits: [n, V]. targets: [n], the tokens that came. start: place of the first of them in the text.
    """
    finite = torch.isfinite(logits).all(dim=-1)
    if not finite.all():
        place = start + int((~finite).nonzero()[0]) + 1
        raise UserError(f"the model's logits for token {place} of the text are not finite; has the model diverged?")
    log_p = torch.log_softmax(logits, dim=-1)
    chosen = targets[:, None]
    best, likeliest = log_p.max(dim=-1)
    parts = (
        -log_p.gather(1, chosen)[:, 0],
        1 + (logits > logits.gather(1, chosen)).sum(dim=-1),
        torch.special.entr(log_p.exp()).sum(dim=-1),
        best.exp(),
        likeliest,
    )
    return torch.stack([part.cpu().double() for part in parts], dim=1)


def join_pieces(contents: Sequence[bytes]) -> list[str]:
    """The text of each token of a text: a character belongs to the token in which its bytes begin.

    Args:
        contents: bytes of each token. What is no UTF-8 when all are put together is written as ``\\xE4``.
    """
    ends = np.cumsum([len(content) for content in contents])
    pieces = [""] * len(contents)
    place = 0
    for character in b"".join(contents).decode("utf-8", "surrogateescape"):
        raw = character.encode("utf-8", "surrogateescape")
        pieces[int(np.searchsorted(ends, place, side="right"))] += raw.decode("utf-8", "backslashreplace")
        place += len(raw)
    return pieces
