"""Text after a prompt: whole characters as soon as they are known, stop strings, confidence of every piece."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nagnet.data.tokenizer import Tokenizer
from nagnet.errors import UserError
from nagnet.generation.engine import Completion, DrawnToken, TokenStream
from nagnet.generation.sampler import Sampling
from nagnet.models.decoder import Decoder
from nagnet.models.flops import SkipRates


class Piece(NamedTuple):
    """Characters that a token completed, and the token's confidence exp(s_N)."""

    text: str
    confidence: float


class TextStream:
    """Turns the tokens of one sequence into text. What may yet become a stop string is held back.

    Args:
        tokenizer: that of the model. stop: strings that end the text, which leaves them out.

    Attributes:
        text: released so far. stopped: whether a stop string was found.

    Raises:
        UserError: for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if not all(stop):
            raise UserError("a stop string is empty; leave it out")
        self._contents = tokenizer.contents
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self.text = ""
        self.stopped = False

    def push(self, drawn: DrawnToken) -> list[Piece]:
        """Takes the next token; returns what is certain now."""
        return self._take(Piece(self._decoder.decode(self._contents[drawn.token]), drawn.confidence))

    def close(self) -> list[Piece]:
        """Returns what was held back; an unfinished character becomes U+FFFD."""
        if self.stopped:
            return []
        confidence = self._held[-1].confidence if self._held else 0.0
        return self._take(Piece(self._decoder.decode(b"", final=True), confidence), final=True)

    def _take(self, piece: Piece, final: bool = False) -> list[Piece]:
        if piece.text:
            self._held.append(piece)
        held = "".join(piece.text for piece in self._held)
        found = [position for stop in self._stop if (position := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(held) if final else len(held) - self._possible_stop(held))

    def _possible_stop(self, held: str) -> int:
        """Length of the longest end of ``held`` with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, n_characters: int) -> list[Piece]:
        released = []
        while n_characters > 0:
            piece = self._held.pop(0)
            if len(piece.text) > n_characters:
                self._held.insert(0, Piece(piece.text[n_characters:], piece.confidence))
                piece = Piece(piece.text[:n_characters], piece.confidence)
            n_characters -= len(piece.text)
            released.append(piece)
        self.text += "".join(piece.text for piece in released)
        return released


@dataclass(frozen=True)
class TextCompletion:
    """A prompt and what followed.

    Attributes:
        prompt: as given. text: what followed, without a stop string.
        completion: the tokens, of a stop string too, and why they ended.
    """

    prompt: str
    text: str
    completion: Completion


def complete_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    past_the_end: bool = False,
    names: Sequence[str] | None = None,
    compiled: bool = False,
    context: int | None = None,
    on_piece: Callable[[int, Piece], None] | None = None,
    on_prompt: Callable[[list[list[float]]], None] | None = None,
    on_skips: Callable[[dict[str, SkipRates]], None] | None = None,
) -> list[TextCompletion]:
    """Continues texts, each as the beginning of a document.

    Args:
        model: of the tokenizer's vocabulary or a padded one, whose further ids are never drawn.
        prompts: one sequence each. max_new_tokens, sampling, names, compiled, context: as in `TokenStream`.
        stop: strings that end a text.
        past_the_end: the token that begins documents is never drawn, rather than ending the text.
        on_piece: called with a sequence's place and each piece of its text as soon as it is certain.
        on_prompt: called once, with the confidences of each prompt's tokens, before the first piece.
        on_skips: called at the end for a model that skips, with what it skipped in ``prefill`` and ``decode``.

    Returns:
        One completion a prompt.

    Raises:
        UserError: for an empty prompt, one too long for the context, or a tokenizer that does not fit.
    """
    _check(model, tokenizer, prompts)
    bos = tokenizer.bos_id
    excluded = [*range(tokenizer.vocab_size, model.config.vocab_size), *([bos] if past_the_end else [])]
    ids = [[bos, *encoded] for encoded in tokenizer.encode_batch(list(prompts))]
    stream = TokenStream(model, ids, max_new_tokens, sampling, bos, excluded, names, compiled, context)
    texts = [TextStream(tokenizer, stop) for _ in prompts]

    def report(index: int, pieces: list[Piece]) -> None:
        if on_piece is not None:
            for piece in pieces:
                on_piece(index, piece)

    for step, drawn_tokens in enumerate(stream):
        if step == 0 and on_prompt is not None:
            on_prompt(stream.prompt_confidences)
        for index, (drawn, text) in enumerate(zip(drawn_tokens, texts, strict=True)):
            if drawn is not None:
                report(index, text.push(drawn))
                if text.stopped:
                    stream.stop(index)
    for index, text in enumerate(texts):
        report(index, text.close())
    if on_skips is not None and stream.skip_counts:
        on_skips(stream.skip_rates())
    return [
        TextCompletion(prompt, text.text, completion)
        for prompt, text, completion in zip(prompts, texts, stream.completions, strict=True)
    ]


def _check(model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    if not all(prompts):
        raise UserError("the prompt is empty; give some text")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {model.config.vocab_size}; "
            "use the tokenizer it was trained with"
        )
