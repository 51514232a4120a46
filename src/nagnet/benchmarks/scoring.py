"""How much faster examples in context are scored in batches (`nagnet evaluate core`) than one at a time."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nagnet.benchmarks.timing import interleave
from nagnet.evaluation.rows import Row, RowScorer, evaluating
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.presets import PRESETS

N_EXAMPLES = 64
ALL_LOGITS, SCORED_LOGITS, BATCHES, COMPILED = "one at a time", "logits where scored", "in batches", "compiled"


class Prompts(NamedTuple):
    """What the prompts of a task are like.

    Attributes:
        options: rows of an example. shared: tokens that all of them begin with, a quarter more or less. own: tokens of
            each behind those, half more or less, all of them scored.
    """

    options: int
    shared: int
    own: int


TASKS = {
    "two options, 24 tokens": Prompts(2, 18, 6),
    "four options, 40 tokens": Prompts(4, 30, 10),
    "four options, 236 tokens": Prompts(4, 226, 10),
    "two options, 255 tokens": Prompts(2, 245, 10),
    "one continuation, 400 tokens": Prompts(1, 396, 4),
}


class _AllLogits(nn.Module):
    """A model that is no `Decoder` to those who ask: called with ids alone, it gives logits [B, T, V]."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def bench_core(
    device: torch.device, repeats: int, config: ModelConfig = PRESETS["stdlib-tiny"], n_examples: int = N_EXAMPLES
) -> list[dict[str, Any]]:
    """Times the scoring of the examples of a task, which are tokens already.

    One at a time is a call of the model for each example: its options are the rows of a batch, and nothing is shared.
    All logits [B, T, V] are formed, or those of scored tokens alone. In batches is how `evaluate_core` does it, with
    uncompiled blocks and with compiled ones (the time of compiling left out).

    Returns:
        For each task, and for all together, its ``name``, ``seconds`` of each alternative, and ``speedup`` of both
        kinds of batches over one at a time, by their names and that of the alternative.
    """
    model, other = (Decoder(config, seed=0).to(device) for _ in range(2))
    whole, lean = RowScorer(_AllLogits(model), pad_id=0), RowScorer(model, pad_id=0)
    compiled = RowScorer(other, pad_id=0, compiled=True)
    results = []
    for name, prompts in TASKS.items():
        examples = _examples(prompts, config.vocab_size, n_examples)

        def one_at_a_time(scorer: RowScorer, examples: list[list[Row]] = examples) -> None:
            for rows in examples:  # rows of groups of their own share nothing
                _run(scorer, [[row] for row in rows])

        calls = {
            ALL_LOGITS: lambda call=one_at_a_time: call(whole),
            SCORED_LOGITS: lambda call=one_at_a_time: call(lean),
            BATCHES: lambda examples=examples: _run(lean, examples),
            COMPILED: lambda examples=examples: _run(compiled, examples),
        }
        timings = interleave(calls, repeats, warm_up=1)
        seconds = {alternative: timing.to_dict() for alternative, timing in timings.items()}
        results.append({"name": name, "seconds": seconds})
    together = {
        name: {key: sum(row["seconds"][name][key] for row in results) for key in ("median", "low", "high")}
        for name in (ALL_LOGITS, SCORED_LOGITS, BATCHES, COMPILED)
    }
    results.append({"name": "all together", "seconds": together})
    return [row | {"speedup": _speedup(row["seconds"])} for row in results]


def _speedup(seconds: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        batches: {alone: seconds[alone]["median"] / seconds[batches]["median"] for alone in (ALL_LOGITS, SCORED_LOGITS)}
        for batches in (BATCHES, COMPILED)
    }


def _run(scorer: RowScorer, groups: list[list[Row]]) -> None:
    with evaluating():
        for _ in scorer.scores(groups):
            pass


def _examples(prompts: Prompts, vocab_size: int, n_examples: int) -> list[list[Row]]:
    """Random tokens in the shape of a task's prompts: the rows of each example."""
    draw = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(draw.randint(low, high))]

    examples = []
    for _ in range(n_examples):
        shared = tokens(prompts.shared * 3 // 4, prompts.shared * 5 // 4)
        options = [tokens(prompts.own // 2, prompts.own * 3 // 2) for _ in range(prompts.options)]
        examples.append([Row([*shared, *own], len(shared)) for own in options])
    return examples
