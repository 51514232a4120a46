"""Tokens from a model, one step at a time: a batch of sequences, each as it would be alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nagnet import ops
from nagnet.errors import UserError
from nagnet.generation.cache import KeyValueCache, prefill
from nagnet.generation.decoding import Decoding, decode, decode_compiled
from nagnet.generation.sampler import Sampling, draw, log_probabilities
from nagnet.models.decoder import Decoder
from nagnet.models.flops import SkipRates, skip_rates
from nagnet.nn.skip import run_rates

Finish = Literal["length", "context", "end", "stopped"]


@dataclass(frozen=True)
class DrawnToken:
    """A token and what the model said of it.

    Attributes:
        token: its id.
        log_probability: of the model (at temperature 1, without limits), nats.
        confidence: exp(s_N) where it was predicted: for a norm-agnostic model the inverse temperature of its logits,
            for others the RMS of the stream at the end.
    """

    token: int
    log_probability: float
    confidence: float


@dataclass
class Completion:
    """What was drawn after one prompt.

    Attributes:
        tokens: in order.
        finish: ``length`` (as many as asked for), ``context`` (the model's context is full), ``end`` (the end token was
            drawn; it is not among the tokens) or ``stopped`` (by the caller).
    """

    tokens: list[DrawnToken] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids alone."""
        return [drawn.token for drawn in self.tokens]


class TokenStream(Iterator[list[DrawnToken | None]]):
    """Draws a token for every sequence at each step; None for a sequence that is finished.

    Args:
        model: runs as it is, uncompiled unless ``compiled``.
        prompts: B prompts, token ids of any lengths: lists, or int64 [B, T] or [T].
        max_new_tokens: steps at most.
        context: positions at most, prompt included, at which a sequence ends. None: the model's ``max_seq_len``; more
            extends the rotary table.
        sampling: how to draw.
        end_token: ends a sequence when it is drawn.
        excluded: tokens that are never drawn and have probability 0.
        names: of the sequences, each of which has random numbers of its own by name; default: their places.
        compiled: compile the step of one token per sequence on first use (some twenty seconds). Where no compiler
            works, a warning says why, and the step is run as it is.

    Attributes:
        completions: what was drawn so far, one a sequence.
        prompt_confidences: exp(s_N) at every token of each prompt; filled by the first step.
        skip_counts: of a model that skips, tokens that came to each sublayer and that ran it, [2, N]; those of
            ``prefill`` and ``decode`` apart.

    Raises:
        UserError: for an empty prompt, one that leaves no room in the context, a token outside the vocabulary, and, at
            a step, for logits that are not finite.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Tensor | Sequence[Sequence[int]] | Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        end_token: int | None = None,
        excluded: Collection[int] = (),
        names: Sequence[str] | None = None,
        compiled: bool = False,
        context: int | None = None,
    ):
        self.prompts = _as_lists(prompts)
        self._context = model.config.max_seq_len if context is None else context
        _check_request(self.prompts, max_new_tokens, self._context)
        _check_ids(model.config.vocab_size, self.prompts, excluded, end_token)
        self._model = model
        self._sampling = Sampling() if sampling is None else sampling
        self._max_new_tokens = max_new_tokens
        self._end_token = end_token
        self._decoding: Decoding = decode_compiled if compiled else decode
        self._excluded: Tensor | None = None
        if excluded:
            self._excluded = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            self._excluded[list(excluded)] = True
        n = len(self.prompts)
        self._generators = self._sampling.generators([str(i) for i in range(n)] if names is None else names)
        self.completions = [Completion() for _ in range(n)]
        self.prompt_confidences: list[list[float]] = []
        self.skip_counts: dict[str, Tensor] = {}
        self._cache: KeyValueCache | None = None
        self._last: list[int] = []

    def __next__(self) -> list[DrawnToken | None]:
        if all(completion.finish for completion in self.completions):
            self._cache = None
            raise StopIteration
        with torch.no_grad():
            phase = "prefill" if self._cache is None else "decode"
            if self._model.skipping is not None:
                self._model.skipping.forget()
            logits, log_norm = self._prefill() if self._cache is None else self._step(self._cache)
            if self._model.skipping is not None:
                self.skip_counts[phase] = self.skip_counts.get(phase, 0) + self._model.skipping.counts.cpu()
            log_probs = log_probabilities(logits, self._excluded)
            drawn = draw(log_probs, self._sampling, self._generators)
        self._last = drawn.tolist()
        chosen = log_probs.gather(1, drawn.unsqueeze(1)).squeeze(1).tolist()
        confidences = log_norm.double().exp().tolist()
        return [
            self._take(completion, DrawnToken(*values), len(prompt))
            for completion, prompt, *values in zip(
                self.completions, self.prompts, self._last, chosen, confidences, strict=True
            )
        ]

    def skip_rates(self) -> dict[str, SkipRates]:
        """What was skipped in prefill and decode so far; empty for a model that does not skip."""
        length = max(len(p) + len(c.tokens) for p, c in zip(self.prompts, self.completions, strict=True))
        return {
            phase: skip_rates(self._model.config, run_rates(counts), length)
            for phase, counts in self.skip_counts.items()
        }

    def stop(self, index: int) -> None:
        """Ends a sequence after its present token."""
        self.completions[index].finish = "stopped"

    def _take(self, completion: Completion, drawn: DrawnToken, n_prompt: int) -> DrawnToken | None:
        if completion.finish is not None:
            return None
        if drawn.token == self._end_token:
            completion.finish = "end"
            return None
        completion.tokens.append(drawn)
        if len(completion.tokens) == self._max_new_tokens:
            completion.finish = "length"
        elif n_prompt + len(completion.tokens) == self._context:
            completion.finish = "context"
        return drawn

    def _prefill(self) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in self.prompts)
        capacity = min(longest + self._max_new_tokens, self._context)
        self._cache = KeyValueCache(self._model, len(self.prompts), capacity)
        with torch.compiler.set_stance("force_eager"):
            prompted = prefill(self._model, self._cache, self.prompts)
        confidences = prompted.log_norms.double().exp().tolist()
        self.prompt_confidences = [row[: len(prompt)] for row, prompt in zip(confidences, self.prompts, strict=True)]
        return self._model.readout(prompted.direction, prompted.log_norm), prompted.log_norm

    def _step(self, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
        counts = [int(completion.finish is None) for completion in self.completions]
        tokens = torch.tensor(self._last, device=cache.device).unsqueeze(1)
        try:
            return self._decoding(self._model, cache, tokens, counts)
        except Exception:
            if self._decoding is decode or ops.compiler_works():
                raise
        self._decoding = decode  # nothing was written yet, and `compiler_works` has given the reason
        return decode(self._model, cache, tokens, counts)


def generate(
    model: Decoder,
    tokens: Tensor | Sequence[Sequence[int]] | Sequence[int],
    max_new_tokens: int = 128,
    **options: Any,
) -> list[Completion]:
    """Continues prompts. `generate_stream` is the same step by step, and has the options.

    Args:
        model: in any state; nothing of it is changed.
        tokens: prompts as token ids, of any lengths: lists, or int64 [B, T] or [T].
        max_new_tokens: for each prompt.

    Returns:
        One completion a prompt: tokens with log probability and confidence, and why it ended.

    Raises:
        UserError: for bad input, or a model whose logits are not finite.
    """
    stream = generate_stream(model, tokens, max_new_tokens, **options)
    for _ in stream:
        pass
    return stream.completions


def generate_stream(
    model: Decoder,
    tokens: Tensor | Sequence[Sequence[int]] | Sequence[int],
    max_new_tokens: int = 128,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    end_token: int | None = None,
    excluded: Collection[int] = (),
    compiled: bool = False,
    context: int | None = None,
) -> TokenStream:
    """An iterator over the steps of `generate`: a list with each sequence's next token, None where it has ended.

    Args:
        temperature, top_k, top_p, min_p, seed: as in `Sampling`.
        end_token, excluded, compiled, context: as in `TokenStream`, as all else.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    return TokenStream(model, tokens, max_new_tokens, sampling, end_token, excluded, None, compiled, context)


def _as_lists(prompts: Tensor | Sequence[Sequence[int]] | Sequence[int]) -> list[list[int]]:
    rows: list[Any] = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    if rows and isinstance(rows[0], int):
        rows = [rows]
    return [[int(token) for token in row] for row in rows]


def _check_request(prompts: list[list[int]], max_new_tokens: int, context: int) -> None:
    if not prompts or not all(prompts):
        raise UserError("a prompt is empty; give at least one token, such as the one that begins a document")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    longest = max(map(len, prompts))
    if longest >= context:
        raise UserError(
            f"a prompt has {longest} tokens and the context is {context}, so none can follow; shorten the prompt to "
            f"{context - 1} tokens, or set a longer context"
        )


def _check_ids(vocab_size: int, prompts: list[list[int]], excluded: Collection[int], end_token: int | None) -> None:
    named = (
        {token for prompt in prompts for token in prompt}
        | set(excluded)
        | ({end_token} if end_token is not None else set())
    )
    for token in (min(named), max(named)):
        if not 0 <= token < vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary 0..{vocab_size - 1}")
    if len(set(excluded)) == vocab_size:
        raise UserError("every token is excluded; leave one that can be drawn")
