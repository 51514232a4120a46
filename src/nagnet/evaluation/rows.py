"""Rows of tokens of which a part is scored: the batches they make, and the loss of that part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import Past
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
    """No gradients; a model compiled for training runs uncompiled, as every batch has a shape of its own."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all rows share."""
    length = 0
    for tokens in zip(*rows, strict=False):
        if any(token != tokens[0] for token in tokens):
            break
        length += 1
    return length


class _Line(NamedTuple):
    """What one line of a batch holds: a row, or all rows of a group behind the tokens that they share.

    Attributes:
        tokens: the model's input. targets: what each should predict, -100 where nothing is scored.
        positions: of the tokens in their rows. branches: 0 for tokens that all see, else the number of their row.
        places: (group, row) of what is scored, in the order of the targets, and how many each has.
    """

    tokens: list[int]
    targets: list[int]
    positions: list[int]
    branches: list[int]
    places: list[tuple[int, int, int]]


class RowScorer:
    """Scores rows by one model, those of similar length together.

    Of a `Decoder`, rows of a group share the tokens that they all begin with: these are run once, and what follows in
    each row sees them and itself.

    Args:
        model: from ids, int64 [B, T], to logits [B, T, V], causal. A module is given ids on the device of its
            parameters.
        pad_id: fills lines up on the right; never scored.
        batch_tokens: most tokens of one call of the model, padding included (but at least one line); default: 4,096 on
            a CPU, 32,768 elsewhere.
        batch_rows: most lines of one call; default: as many as fit.
        compiled: compile the blocks of a `Decoder`, in place, for batches of any shape. That takes half a minute, in
            later processes some seconds; where no compiler works, a warning says why. Other models run as they are.
    """

    def __init__(
        self,
        model: LogitsModel,
        pad_id: int,
        batch_tokens: int | None = None,
        batch_rows: int | None = None,
        compiled: bool = False,
    ):
        self.model, self.pad_id, self.batch_rows = model, pad_id, batch_rows
        self._compiled = compiled and isinstance(model, Decoder) and ops.compiler_works()
        if self._compiled:
            model.compile_blocks(dynamic=True)
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.batch_tokens = batch_tokens or (BATCH_TOKENS_CPU if self.device.type == "cpu" else BATCH_TOKENS)

    def scores(self, groups: Sequence[Sequence[Row]]) -> Iterator[dict[int, list[RowScore]]]:
        """Scores of all rows of a group by its place, as groups are done, long ones first.

        Args:
            groups: rows that may begin alike, at least one in each.

        Raises:
            UserError: for losses that are NaN.
        """
        lines = [line for number, rows in enumerate(groups) for line in self._lines(number, rows)]
        lines.sort(key=lambda line: -len(line.tokens))
        found: dict[int, dict[int, RowScore]] = {number: {} for number in range(len(groups))}
        start = 0
        while start < len(lines):
            n_lines = max(1, self.batch_tokens // len(lines[start].tokens))
            batch = lines[start : start + min(n_lines, self.batch_rows or n_lines)]
            start += len(batch)
            for group, row, score in self._score(batch):
                found[group][row] = score
            seen = sorted({group for line in batch for group, *_ in line.places})
            done = [group for group in seen if len(found[group]) == len(groups[group])]
            if done:
                yield {group: [score for _, score in sorted(found.pop(group).items())] for group in done}

    def _lines(self, group: int, rows: Sequence[Row]) -> list[_Line]:
        shared = 0
        if len(rows) > 1 and isinstance(self.model, Decoder):
            # The last shared token may have a target of its own in each row, so it is run there.
            shared = min(common_length([row.ids[:-1] for row in rows]), min(row.start for row in rows) - 1)
        numbered = list(enumerate(rows))
        return [_line(group, part, shared) for part in ([numbered] if shared else [[place] for place in numbered])]

    def _score(self, lines: Sequence[_Line]) -> Iterator[tuple[int, int, RowScore]]:
        """Scores some lines in one call of the model."""

        def padded(rows: Iterable[list[int]], fill: int) -> Tensor:
            tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill).to(self.device)

        inputs = padded((line.tokens for line in lines), self.pad_id)
        targets = padded((line.targets for line in lines), IGNORED_TARGET)
        past = None
        if isinstance(self.model, Decoder) and any(any(line.branches) for line in lines):
            positions = padded((line.positions for line in lines), 0)
            past = branching_past(self.model, positions, padded((line.branches for line in lines), -1))
        # A size of 1 would be compiled by itself.
        compiled = self._compiled and min(inputs.shape) > 1
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            losses, hits = score_targets(self.model, inputs, targets, past)
        if losses.isnan().any():
            raise UserError("the model's losses are NaN, so no answer is better than another; has it diverged?")
        places = [place for line in lines for place in line.places]
        sizes = [size for *_, size in places]
        parts = zip(places, losses.double().cpu().split(sizes), hits.cpu().split(sizes), strict=True)
        return ((group, row, RowScore(*part)) for (group, row, _), *part in parts)


def _line(group: int, rows: Sequence[tuple[int, Row]], shared: int) -> _Line:
    """Puts rows (with their numbers) side by side behind their first ``shared`` tokens, or one row alone."""
    line = _Line([], [], [], [], [])

    def add(row: Row, inputs: range, branch: int) -> None:
        line.tokens.extend(row.ids[i] for i in inputs)
        line.targets.extend(row.ids[i + 1] if i + 1 >= row.start else IGNORED_TARGET for i in inputs)
        line.positions.extend(inputs)
        line.branches.extend([branch] * len(inputs))

    add(rows[0][1], range(shared), 0)
    for branch, (number, row) in enumerate(rows, 1 if shared else 0):
        # The last token of a row predicts nothing, so the model need not see it.
        add(row, range(shared, row.stop - 1), branch)
        line.places.append((group, number, row.stop - row.start))
    if not line.tokens:  # a row of one token, of which nothing is scored
        add(Row(rows[0][1].ids * 2, 2), range(1), 0)
    return line


class _Branches:
    """What a layer is given as its past (`LayerPast`) where rows stand side by side: who sees whom."""

    written = False

    def __init__(self, allowed: Tensor):
        self.allowed = allowed
        self._seen: tuple[Tensor, Tensor] | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values [B, G, T, k] of this pass."""
        self._seen = k, v

    def seen(self) -> tuple[Tensor, Tensor]:
        """What was written."""
        assert self._seen is not None
        return self._seen


def branching_past(model: Decoder, positions: Tensor, branches: Tensor) -> Past:
    """Lets tokens of a line see those before them of branch 0 and of their own.

    Args:
        positions: int64 [B, T], of each token in its row. branches: int64 [B, T], negative for padding.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    key, query = branches.unsqueeze(1), branches.unsqueeze(2)
    seen = ((key == 0) | (key == query)) & (index <= index.unsqueeze(1))
    distance = positions.unsqueeze(2) - positions.unsqueeze(1)
    windows = model.config.sliding_windows or (0,)
    # Padding stands at position 0: it sees itself in any window.
    by_window = {w: (seen & (distance < w) if w else seen).unsqueeze(1) for w in set(windows)}
    layers: list[Any] = [_Branches(by_window[windows[layer % len(windows)]]) for layer in range(model.config.n_layers)]
    return Past(positions, int(positions.max()) + 1, layers, branches >= 0)


def score_targets(
    model: LogitsModel, inputs: Tensor, targets: Tensor, past: Past | None = None
) -> tuple[Tensor, Tensor]:
    """Scores the targets that are not -100, row after row.

    Args:
        model: from ids [B, T] to logits; of a `Decoder` only the logits at targets are formed.
        inputs: int64 [B, T]. targets: int64 [B, T].
        past: of a `Decoder`, as in `Decoder.trunk`.

    Returns:
        Loss in nats [n], float32 or wider, and whether the target is the likeliest token, bool [n].
    """
    kept = targets != IGNORED_TARGET
    if isinstance(model, Decoder):
        direction, log_norm = model.trunk(inputs, past=past).split()
        return model.readout.score(direction[kept], log_norm[kept], targets[kept])
    logits = model(inputs)
    logits = logits[kept].to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, targets[kept], reduction="none"), logits.argmax(-1) == targets[kept]
