"""The CORE metric (DCLM, arXiv 2406.11794): accuracy of a base model on tasks in context, guessing at 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nagnet.evaluation.core_tasks import Bundle, Task, TokenizerLike, read_bundle, rows_of
from nagnet.evaluation.rows import LogitsModel, Row, RowScore, RowScorer, evaluating

logger = logging.getLogger(__name__)

EXAMPLES_AT_A_TIME = 256  # tokenized together, then sorted by length

Progress = Callable[[int, int, str], None]


class Journal(Protocol):
    """Remembers answers, so that an interrupted evaluation can go on."""

    def known(self, label: str) -> dict[int, bool]:
        """Correctness of the examples of a task that are answered already, by index."""
        ...

    def add(self, label: str, correct: dict[int, bool]) -> None:
        """Remembers some more."""
        ...


def evaluate_core(
    model: LogitsModel,
    tokenizer: TokenizerLike,
    bundle: str | Path | Bundle,
    max_per_task: int | None = None,
    *,
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    compiled: bool = False,
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
        compiled: compile the blocks of a `Decoder`, in place (`RowScorer`).
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
    scorer = RowScorer(model, tokenizer.get_bos_token_id(), batch_tokens, compiled=compiled)
    evaluation = _Evaluation(scorer, tokenizer, max_tokens or _context_of(model))
    total, done = sum(len(task.examples) for task in bundle.tasks), 0
    result: dict[str, Any] = {}
    with evaluating():
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


class _Evaluation:
    """A model under evaluation."""

    def __init__(self, scorer: RowScorer, tokenizer: TokenizerLike, max_tokens: int | None):
        self.scorer, self.tokenizer, self.max_tokens = scorer, tokenizer, max_tokens

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
        """Scores the rows of all examples together."""
        indices = list(rows)
        for scores in self.scorer.scores([rows[index] for index in indices]):
            answers = {indices[place]: found for place, found in scores.items()}
            yield {index: _is_correct(task, index, answers[index]) for index in sorted(answers)}


def _is_correct(task: Task, index: int, scored: Sequence[RowScore]) -> bool:
    if task.kind == "language_modeling":
        return len(scored[0].hits) > 0 and bool(scored[0].hits.all())
    losses = [_mean_loss(score) for score in scored]
    return losses.index(min(losses)) == task.examples[index]["gold"]


def _mean_loss(score: RowScore) -> float:
    """Mean loss of the scored tokens in nats, infinite where there are none."""
    return score.losses.mean().item() if len(score.losses) else math.inf
