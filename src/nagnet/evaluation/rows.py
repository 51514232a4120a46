"""Rows of tokens of which a part is scored: the batches they make, and the loss of that part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.ops.loss import IGNORED_TARGET

BATCH_TOKENS, BATCH_TOKENS_CPU = 32_768, 4096  # padding included, of one forward pass; caches are small

LogitsModel = Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """Tokens of one prompt, BOS first, of which ``start:stop`` are scored; ``stop`` is the length."""

    ids: list[int]
    start: int

    @property
    def stop(self) -> int:
        return len(self.ids)


class RowScore(NamedTuple):
    """Of each scored token of a row, on the CPU: loss in nats, float64 [n]; whether it is the likeliest, bool [n]."""

    losses: Tensor
    hits: Tensor


@contextmanager
def evaluating() -> Iterator[None]:
    """No gradients; a compiled model runs uncompiled, as every batch has a shape of its own."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


class RowScorer:
    """Scores rows by one model, those of similar length together.

    Args:
        model: from ids, int64 [B, T], to logits [B, T, V], causal. A module is given ids on the device of its
            parameters.
        pad_id: fills rows up on the right; never scored.
        batch_tokens: most tokens of one call of the model, padding included (but at least one row); default: 4,096 on
            a CPU, 32,768 elsewhere.
        batch_rows: most rows of one call; default: as many as fit.
    """

    def __init__(self, model: LogitsModel, pad_id: int, batch_tokens: int | None = None, batch_rows: int | None = None):
        self.model, self.pad_id, self.batch_rows = model, pad_id, batch_rows
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.batch_tokens = batch_tokens or (BATCH_TOKENS_CPU if self.device.type == "cpu" else BATCH_TOKENS)

    def scores(self, rows: Sequence[Row]) -> Iterator[dict[int, RowScore]]:
        """Scores of the rows by their places, as batches of them are done, longest first.

        Raises:
            UserError: for losses that are NaN.
        """
        order = sorted(range(len(rows)), key=lambda place: -rows[place].stop)
        start = 0
        while start < len(order):
            n_rows = max(1, self.batch_tokens // max(1, rows[order[start]].stop - 1))
            places = order[start : start + min(n_rows, self.batch_rows or n_rows)]
            yield dict(zip(places, self._score([rows[place] for place in places]), strict=True))
            start += len(places)

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Scores some rows in one call of the model."""
        # The last token of a row predicts nothing, so the model need not see it.
        length = max(1, max(row.stop for row in rows) - 1)
        inputs = torch.full((len(rows), length), self.pad_id, dtype=torch.int64)
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
        return [RowScore(*part) for part in parts]


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
