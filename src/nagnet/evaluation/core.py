"""The CORE metric (DCLM, arXiv 2406.11794): accuracy of a base model on tasks in context, guessing at 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.evaluation.core_tasks import Bundle, Row, Task, TokenizerLike, read_bundle, rows_of
from nagnet.models.decoder import Decoder
from nagnet.ops.loss import IGNORED_TARGET

logger = logging.getLogger(__name__)

BATCH_TOKENS, BATCH_TOKENS_CPU = 32_768, 4096  # padding included, of one forward pass; caches are small
EXAMPLES_AT_A_TIME = 256  # tokenized together, then sorted by length

LogitsModel = Callable[[Tensor], Tensor]
Progress = Callable[[int, int, str], None]


class Journal(Protocol):
    """Remembers answers, so that an interrupted evaluation can go on."""

    def known(self, label: str) -> dict[int, bool]:
        """Correctness of the examples of a task that are answered already, by index."""
        ...

    def add(self, label: str, correct: dict[int, bool]) -> None:
        """Remembers some more."""
        ...


class _Scored(NamedTuple):
    """Of one row: mean loss of its scored tokens in nats (infinite for none), and whether all were the likeliest."""

    loss: float
    hit: bool


def evaluate_core(
    model: LogitsModel,
    tokenizer: TokenizerLike,
    bundle: str | Path | Bundle,
    max_per_task: int | None = None,
    *,
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> dict[str, Any]:
    """Answers every example of every task.

    A multiple-choice answer is the option whose tokens have the lowest mean loss (the first of equal ones; an option
    without a token of its own counts as infinite), a schema answer the context under which the common continuation has
    it, and a language-modelling answer is right if every token of the continuation is the likeliest.

    Args:
        model: from ids, int64 [B, T], to logits [B, T, V], causal. A module is given ids on the device of its
            parameters, and runs in the mode (training or evaluation) it is in. Rows are padded on the right, and
            padding is never scored.
        tokenizer: has ``encode(text) -> list[int]`` and ``get_bos_token_id()``.
        bundle: a folder, or what `read_bundle` returned for it (then ``max_per_task`` is its business).
        max_per_task: most examples of each task, the first after shuffling; None for all.
        max_tokens: longest row; default: ``model.max_seq_len``, or that of ``model.config``, if there is one.
        batch_tokens: most tokens of one call of the model, padding included (but at least one row); default: 4,096 on
            a CPU, 32,768 elsewhere.
        progress: called with (examples done, examples in all, label) after each batch.
        journal: answers it knows are not computed again.

    Returns:
        For each task its label -> ``n`` (examples), ``accuracy`` and ``centered`` (shares), ``correct`` (1 or 0 of each
        example in the shuffled order); and ``core_metric``, the mean of ``centered``.

    Raises:
        UserError: for a bundle that `read_bundle` refuses, or losses that are NaN.
    """
    if not isinstance(bundle, Bundle):
        bundle = read_bundle(bundle, max_per_task)
    evaluation = _Evaluation(model, tokenizer, max_tokens or _context_of(model), batch_tokens)
    total, done = sum(len(task.examples) for task in bundle.tasks), 0
    result: dict[str, Any] = {}
    with _evaluating():
        for task in bundle.tasks:
            correct = {} if journal is None else dict(journal.known(task.label))
            waiting = [index for index in range(len(task.examples)) if index not in correct]
            done += len(correct)
            for answers in evaluation.answers(task, waiting):
                correct |= answers
                done += len(answers)
                if journal is not None:
                    journal.add(task.label, answers)
                if progress is not None:
                    progress(done, total, task.label)
            result[task.label] = _summary(task, correct)
    centred = [result[task.label]["centered"] for task in bundle.tasks]
    return result | {"core_metric": sum(centred) / len(centred)}


def _summary(task: Task, correct: dict[int, bool]) -> dict[str, Any]:
    right = [int(correct[index]) for index in range(len(task.examples))]
    accuracy = sum(right) / len(right)
    return {"n": len(right), "accuracy": accuracy, "centered": task.centred(accuracy), "correct": right}


def _context_of(model: Any) -> int | None:
    """The longest input of a model that says so."""
    return getattr(model, "max_seq_len", None) or getattr(getattr(model, "config", None), "max_seq_len", None)


@contextmanager
def _evaluating() -> Iterator[None]:
    """No gradients; a compiled model runs uncompiled, as every batch has a shape of its own."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


class _Evaluation:
    """A model under evaluation."""

    def __init__(self, model: LogitsModel, tokenizer: TokenizerLike, max_tokens: int | None, batch_tokens: int | None):
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.batch_tokens = batch_tokens or (BATCH_TOKENS_CPU if self.device.type == "cpu" else BATCH_TOKENS)

    def answers(self, task: Task, indices: Sequence[int]) -> Iterator[dict[int, bool]]:
        """Correctness of these examples, by index, as batches of them are done."""
        empty = 0
        for first in range(0, len(indices), EXAMPLES_AT_A_TIME):
            part = indices[first : first + EXAMPLES_AT_A_TIME]
            rows = {index: rows_of(task, index, self.tokenizer, self.max_tokens) for index in part}
            empty += sum(row.start >= row.stop for options in rows.values() for row in options)
            yield from self._answer(task, rows)
        if empty:
            logger.warning(
                "task %s: %d prompts have no token to score and count as the worst answer", task.label, empty
            )

    def _answer(self, task: Task, rows: dict[int, list[Row]]) -> Iterator[dict[int, bool]]:
        """Scores rows of similar length together; an example is answered with the last of its rows."""
        order = [(index, option) for index, options in rows.items() for option in range(len(options))]
        order.sort(key=lambda place: -rows[place[0]][place[1]].stop)
        scored: dict[int, dict[int, _Scored]] = {index: {} for index in rows}
        for places in self._batches(order, rows):
            scores = self._score([rows[index][option] for index, option in places])
            for (index, option), score in zip(places, scores, strict=True):
                scored[index][option] = score
            complete = {index for index, _ in places if len(scored[index]) == len(rows[index])}
            if complete:
                yield {index: _is_correct(task, index, scored[index]) for index in sorted(complete)}

    def _batches(self, order: list[tuple[int, int]], rows: dict[int, list[Row]]) -> Iterator[list[tuple[int, int]]]:
        """Cuts an order, longest row first, into batches of at most ``batch_tokens``."""
        start = 0
        while start < len(order):
            index, option = order[start]
            n_rows = max(1, self.batch_tokens // max(1, rows[index][option].stop - 1))
            yield order[start : start + n_rows]
            start += n_rows

    def _score(self, rows: Sequence[Row]) -> list[_Scored]:
        """Scores some rows in one call of the model."""
        # The last token of a row predicts nothing, so the model need not see it.
        length = max(1, max(row.stop for row in rows) - 1)
        inputs = torch.full((len(rows), length), self.tokenizer.get_bos_token_id(), dtype=torch.int64)
        targets = torch.full((len(rows), length), IGNORED_TARGET, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids = torch.tensor(row.ids, dtype=torch.int64)
            inputs[number, : row.stop - 1] = ids[:-1]
            targets[number, row.start - 1 : row.stop - 1] = ids[row.start :]
        losses, hits = score_targets(self.model, inputs.to(self.device), targets.to(self.device))
        if losses.isnan().any():
            raise UserError("the model's losses are NaN, so no answer is better than another; has it diverged?")
        sizes = [max(0, row.stop - row.start) for row in rows]
        parts = zip(losses.double().cpu().split(sizes), hits.cpu().split(sizes), strict=True)
        return [
            _Scored(loss.mean().item() if len(loss) else math.inf, bool(hit.all()) and len(hit) > 0)
            for loss, hit in parts
        ]


def score_targets(model: LogitsModel, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores the targets that are not -100, row after row.

    Args:
        model: from ids [B, T] to logits; of a `Decoder` only the logits at targets are formed.
        inputs: int64 [B, T]. targets: int64 [B, T].

    Returns:
        Loss in nats [n], float32 or wider, and whether the target is the likeliest token, bool [n].
    """
    kept = targets != IGNORED_TARGET
    if isinstance(model, Decoder):
        direction, log_norm = model.trunk(inputs).split()
        return model.readout.score(direction[kept], log_norm[kept], targets[kept])
    logits = model(inputs)
    logits = logits[kept].to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, targets[kept], reduction="none"), logits.argmax(-1) == targets[kept]


def _is_correct(task: Task, index: int, scored: dict[int, _Scored]) -> bool:
    if task.kind == "language_modeling":
        return scored[0].hit
    losses = [scored[option].loss for option in range(len(scored))]
    return losses.index(min(losses)) == task.examples[index]["gold"]
