"""A saved model as a model of lm-eval, EleutherAI's evaluation harness, which knows it as ``nagnet``.

Importing this module registers the name. lm-eval's own program looks for models in its own package alone, so it has to
be started from here, with all its options: ``python -m nagnet.evaluation.harness --model nagnet --model_args
checkpoint=runs/a --tasks ...``. ``nagnet evaluate harness`` is the short form.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nagnet.errors import UserError
from nagnet.evaluation.causality import check_causality
from nagnet.evaluation.rows import Row, RowScore, RowScorer, common_length, evaluating
from nagnet.evaluation.saved_model import find_model
from nagnet.generation.engine import TokenStream
from nagnet.generation.sampler import Sampling
from nagnet.generation.text import TextStream
from nagnet.models.checkpoint import load_model

logger = logging.getLogger(__name__)

NAME = "nagnet"
GATE_TOKENS = 1024  # longest sequence on which causality is tested
GENERATION_ROWS = 16  # texts continued at a time, unless a batch size says otherwise
GENERATED_TOKENS = 256  # as lm-eval's own models, where a task does not say how many
_LENGTHS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names that tasks use for one thing
_SAMPLING = ("top_k", "top_p", "min_p")


class NagnetLM(LM):
    """What lm-eval asks of a model, for a model of this package. Every text has BOS in front, once.

    Args:
        checkpoint: as for `find_model`.
        tokenizer: tokenizer.json of the model, where it is not beside it.
        batch_size: rows of a forward pass, at most; ``auto`` or None: as many as make 4,096 tokens on a CPU, 32,768
            elsewhere.
        max_batch_size: with ``auto``, rows at most.
        device: as torch names it; default: a GPU if there is one.
        max_length: most tokens the model is shown at a time; default: its ``max_seq_len``.
        max_gen_toks: tokens to generate where a task does not say; default: 256, or half of ``max_length`` if less.
        dtype: of the matrices in the blocks.
        compile: compile the blocks for the scoring of many requests (`RowScorer`).
        seed: of draws, where a task wants samples.

    Raises:
        UserError: for a model that cannot be loaded, is not causal, or has no tokenizer.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        tokenizer: str | Path | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int | None = None,
        dtype: str = "float32",
        compile: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        saved = find_model(checkpoint)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = load_model(saved.folder).to(self._device, _dtype(dtype)).eval()
        vocab_size = self.model.config.vocab_size
        self.tokenizer = saved.tokenizer(vocab_size, None if tokenizer is None else Path(tokenizer))
        self.max_length = _count(max_length, "max_length") or self.model.config.max_seq_len
        self.max_gen_toks = _count(max_gen_toks, "max_gen_toks") or min(GENERATED_TOKENS, self.max_length // 2)
        rows = max_batch_size if batch_size in (None, "auto") else batch_size
        self.batch_rows = _count(rows, "batch_size")
        self.seed = int(seed)
        self._scorer = RowScorer(self.model, self.tokenizer.bos_id, batch_rows=self.batch_rows, compiled=bool(compile))
        with evaluating():
            check_causality(self.model, vocab_size, min(self.max_length, GATE_TOKENS), self._device)

    @property
    def tokenizer_name(self) -> str:
        """Tells stored requests of different tokenizers apart."""
        return f"{NAME}-{self.tokenizer.content_hash}"

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log probability (nats) of each continuation after its context, and whether it is the greedy one."""
        # Continuations of one context stand together: the model runs it once.
        groups = [list(group) for _, group in groupby(requests, key=lambda request: request.args[0])]
        scores = self._scores([[self._row(*request.args) for request in group] for group in groups])
        answers = [(-score.losses.sum().item(), bool(score.hits.all())) for score in scores]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability (nats) of each text, every token scored once, in windows of ``max_length``."""
        rows = [list(self._windows(*request.args)) for request in requests]
        scores = iter(self._scores([[row] for windows in rows for row in windows]))
        totals = [-sum(next(scores).losses.sum().item() for _ in windows) for windows in rows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a stop string, the end of the document, or the tokens asked for."""
        texts: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda i: (_key(requests[i]), -len(requests[i].args[0])))
        for _, group in groupby(order, key=lambda i: _key(requests[i])):
            places = list(group)
            rows = self.batch_rows or GENERATION_ROWS
            for start in range(0, len(places), rows):
                batch = places[start : start + rows]
                contexts = [requests[place].args[0] for place in batch]
                options = dict(requests[batch[0]].args[1])
                for place, text in zip(batch, self._continue(contexts, options, batch), strict=True):
                    texts[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return [texts[place] for place in range(len(requests))]

    def _row(self, context: str, continuation: str) -> Row:
        """The tokens of both together, scored from where they depart from those of the context alone.

        White space at the end of a context belongs to the continuation, as in lm-eval's own models.
        """
        kept = len(context.rstrip())
        whole = self.tokenizer.encode(context + continuation)
        same = common_length([whole, self.tokenizer.encode(context[:kept])])
        return self._cropped([self.tokenizer.bos_id, *whole], 1 + same)

    def _cropped(self, ids: list[int], start: int) -> Row:
        """Leaves out the first tokens of what is too long, but never one that is scored."""
        excess = max(0, len(ids) - 1 - self.max_length)  # the last token is predicted and not seen
        if excess >= start:
            logger.warning(
                "a continuation has %d tokens, more than max_length %d; the model is shown all of them",
                len(ids) - start,
                self.max_length,
            )
            excess = start - 1
        return Row(ids[excess:], start - excess)

    def _windows(self, text: str) -> Iterator[Row]:
        tokens = self.tokenizer.encode(text)
        for window in get_rolling_token_windows(tokens, self.tokenizer.bos_id, self.max_length, context_len=1):
            seen, scored = make_disjoint_window(window)
            yield Row([*seen, *scored], len(seen))

    def _scores(self, groups: Sequence[Sequence[Row]]) -> list[RowScore]:
        """Scores of all rows, group after group."""
        found: dict[int, list[RowScore]] = {}
        with evaluating():
            for scores in self._scorer.scores(groups):
                found |= scores
        return [score for place in range(len(groups)) for score in found[place]]

    def _continue(self, contexts: Sequence[str], options: dict[str, Any], names: Sequence[int]) -> list[str]:
        stop, n_tokens, sampling = self._generation(options)
        room = self.max_length - n_tokens
        if room < 1:
            raise UserError(
                f"a task asks for {n_tokens} tokens, but the model sees {self.max_length} at a time; set max_gen_toks "
                "in the task's generation_kwargs"
            )
        ids = [[self.tokenizer.bos_id, *encoded][-room:] for encoded in self.tokenizer.encode_batch(list(contexts))]
        bos = self.tokenizer.bos_id
        stream = TokenStream(
            self.model, ids, n_tokens, sampling, bos, names=[str(name) for name in names], context=self.max_length
        )
        texts = [TextStream(self.tokenizer, stop) for _ in ids]
        for drawn_tokens in stream:
            for index, (drawn, text) in enumerate(zip(drawn_tokens, texts, strict=True)):
                if drawn is not None:
                    text.push(drawn)
                    if text.stopped:
                        stream.stop(index)
        for text in texts:
            text.close()
        return [text.text for text in texts]

    def _generation(self, options: dict[str, Any]) -> tuple[list[str], int, Sampling]:
        """Stop strings, number of tokens and sampling of a task's generation_kwargs."""
        until = options.pop("until", None) or []
        stop = [until] if isinstance(until, str) else [string for string in until if string]
        lengths = [options.pop(name) for name in _LENGTHS if options.get(name) is not None]
        temperature = float(options.pop("temperature", 1.0 if options.get("do_sample") else 0.0))
        samples = options.pop("do_sample", temperature > 0)
        limits = {name: options.pop(name) for name in _SAMPLING if options.get(name) is not None}
        if options:
            logger.warning("generation_kwargs without effect here: %s", ", ".join(sorted(options)))
        sampling = Sampling(temperature if samples else 0.0, seed=self.seed, **limits)
        return stop, int(lengths[0]) if lengths else self.max_gen_toks, sampling


register_model(NAME)(NagnetLM)  # as a decorator it would hide the class from type checkers


def _key(request: Any) -> str:
    """Equal for requests that are generated alike."""
    return json.dumps(request.args[1], sort_keys=True, default=str)


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise UserError(f"dtype {name!r}: choose {', '.join(dtypes)}")
    return dtypes[name]


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not str(value).isdecimal() or int(value) < 1:
        raise UserError(f"{name} is {value!r}; give a whole number, 1 or more")
    return int(value)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
