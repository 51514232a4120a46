"""What skipping costs and saves: loss against executed FLOPs, beside controls that skip as much by other rules.

Every point scores the same text. Controls replace the scores by which tokens are chosen, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import check_tokens
from nagnet.diagnostics.probe import UpdateStep, observe_updates, tokens_that_ran
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores, Score
from nagnet.models.decoder import Decoder
from nagnet.models.flops import Convention, forward_flops_per_token, skip_rates
from nagnet.nn.skip import NOTHING_SKIPPED, Skipping
from nagnet.ops.loss import IGNORED_TARGET

CONTROLS = {
    "random": "tokens drawn at random, as many in every sublayer",
    "random by sublayer": "tokens drawn at random, in each sublayer as many as its scores would skip",
    "lowest gain": "the sublayers with the lowest mean gain, for all tokens",
    "constant score": "the sublayers with the lowest mean score, for all tokens",
}
SCORED = "rotation score"
FULL_DEPTH = "full depth"

Replaced = Callable[[int, torch.Size], Tensor]


@dataclass(frozen=True)
class DepthPoint:
    """A model at one depth.

    Attributes:
        rule: by which tokens skip: ``rotation score``, ``full depth``, or one of ``CONTROLS``.
        threshold: in force; of a control, of its scores.
        bits_per_byte, nats_per_token: of the text.
        flops_per_token: executed in a forward pass, with those of a mean query's scores.
        sublayer_tokens, parameters, flops: the three skip rates (`nagnet.models.flops.SkipRates`).
        run_rates: share of tokens that ran each sublayer, attention and MLP of each block in turn.
    """

    rule: str
    threshold: float
    bits_per_byte: float
    nats_per_token: float
    flops_per_token: int
    sublayer_tokens: float
    parameters: float
    flops: float
    run_rates: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class SkipMap:
    """Which tokens ran which sublayers.

    Attributes:
        run: bool [N, B, T].
        skip_rate: share of tokens that skipped each sublayer, float64 [N].
    """

    run: Tensor
    skip_rate: Tensor


def skip_map(model: Any, tokens: Tensor) -> SkipMap | None:
    """Which of ``tokens`` [B, T] run and which skip, at the threshold in force; None for a model that cannot skip.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    if model.skipping is None:
        return None
    ran: list[Tensor] = []
    with observe_updates(model, lambda step: ran.append(tokens_that_ran(model, step).cpu())):
        model.trunk(tokens)
    run = torch.stack(ran)
    return SkipMap(run, 1.0 - run.double().mean(dim=(1, 2)))


def depth_curve(
    model: Decoder,
    score: Callable[[Score], DocumentScores],
    seq_len: int,
    rates: Sequence[float],
    controls: Sequence[str] = tuple(CONTROLS),
    convention: Convention = "causal",
    progress: Callable[[int, int], None] | None = None,
) -> list[DepthPoint]:
    """Scores a model at its full depth, at thresholds near the wanted skip rates, and under the controls.

    The thresholds are the quantiles of the scores at full depth. What they come to is measured: a stream that skips has
    other scores. Each control is given the rate that the rotation score came to.

    Args:
        model: norm-agnostic, trained with skipping or without; left as it was.
        score: scores the text by a function from tokens and targets [B, T] to losses [B, T].
        seq_len: tokens that a window of the text has, for the FLOPs of attention.
        rates: shares of the sublayer-tokens to skip, in (0, 1). controls: names in ``CONTROLS``.
        progress: called with (points done, points in all).

    Raises:
        UserError: for a rate outside (0, 1), an unknown control, or a rule that cannot skip.
    """
    for rate in rates:
        if not 0.0 < rate < 1.0:
            raise UserError(f"skip rate {rate}: give shares above 0 and below 1")
    for control in controls:
        if control not in CONTROLS:
            raise UserError(f"control {control!r}: choose among {', '.join(CONTROLS)}")
    with _skipping_of(model) as skipping:
        curve = _Curve(model, skipping, score, seq_len, convention)
        total, points = 1 + len(rates) * (1 + len(controls)), []

        def add(point: DepthPoint) -> None:
            points.append(point)
            if progress is not None:
                progress(len(points), total)

        add(curve.full_depth())
        thresholds = [curve.quantile_at_full_depth(rate) for rate in rates]
        for threshold in thresholds:
            scored = curve.at(SCORED, threshold)
            add(scored)
            for control in controls:
                add(curve.control(control, scored))
    return points


@contextmanager
def _skipping_of(model: Decoder) -> Iterator[Skipping]:
    """The model's skipping, with a threshold to be played with; all as before afterwards."""
    before = model.skipping
    threshold = None if before is None else float(before.threshold)
    model.set_skip_threshold(0.0)
    skipping = model.skipping
    assert skipping is not None
    try:
        yield skipping
    finally:
        model.skipping, skipping.replaced = before, None
        if threshold is not None:
            skipping.threshold.fill_(threshold)
        skipping.forget()


class _Curve:
    """A model whose depth is played with."""

    def __init__(
        self,
        model: Decoder,
        skipping: Skipping,
        score: Callable[[Score], DocumentScores],
        seq_len: int,
        convention: Convention,
    ):
        self.model, self.skipping, self._score = model, skipping, score
        self.seq_len = seq_len
        self.convention: Convention = convention
        self.mean_gain: list[float] = []
        self.mean_score: list[float] = []
        self._histogram = torch.zeros(0)

    def full_depth(self) -> DepthPoint:
        """The point at which nothing is skipped; also measures gains and scores."""
        n_updates = len(self.model.stream.updates)
        sums = torch.zeros(2, n_updates, dtype=torch.float64)
        count = 0

        def losses(tokens: Tensor, targets: Tensor) -> Tensor:
            nonlocal count
            kept = targets != IGNORED_TARGET
            count += int(kept.sum())

            def add(step: UpdateStep) -> None:
                assert step.gain is not None
                sums[0, step.index - 1] += float(step.gain[kept].abs().double().sum())
                sums[1, step.index - 1] += float(step.update.rotation_score(step.gain)[kept].double().sum())

            with observe_updates(self.model, add):
                return self._losses(tokens, targets)

        point = self._point(FULL_DEPTH, NOTHING_SKIPPED, losses)
        self.mean_gain, self.mean_score = (sums / count).tolist()
        self._histogram = self.skipping.histogram.clone()
        return point

    def quantile_at_full_depth(self, rate: float) -> float:
        """The threshold below which this share of the scores lay at full depth."""
        self.skipping.histogram.copy_(self._histogram)
        return self.skipping.quantile(rate)

    def at(self, rule: str, threshold: float, replaced: Replaced | None = None) -> DepthPoint:
        """The point of a threshold, for the rotation scores or others."""
        self.skipping.replaced = replaced
        try:
            return self._point(rule, threshold, self._losses)
        finally:
            self.skipping.replaced = None

    def control(self, name: str, scored: DepthPoint) -> DepthPoint:
        """The point of a control that skips as much as the scored one did."""
        if name.startswith("random"):
            skipped = [scored.sublayer_tokens] * len(scored.run_rates)
            if name == "random by sublayer":
                skipped = [1.0 - rate for rate in scored.run_rates]
            return self.at(name, 0.0, self._random(skipped))
        order = self.mean_gain if name == "lowest gain" else self.mean_score
        n_skipped = round(scored.sublayer_tokens * len(order))
        out = set(sorted(range(len(order)), key=order.__getitem__)[:n_skipped])
        scores = torch.tensor([float(index not in out) for index in range(len(order))])
        return self.at(name, 0.0, lambda block, shape: self._pair(scores, block).expand(2, *shape))

    def _pair(self, values: Tensor, block: int) -> Tensor:
        device = self.skipping.threshold.device
        return values[2 * block : 2 * block + 2, None, None].to(device)

    def _random(self, skipped: Sequence[float]) -> Replaced:
        """Scores above 0 for all but the wanted shares of tokens."""
        generator = torch.Generator().manual_seed(0)
        shares = torch.tensor(skipped)

        def replaced(block: int, shape: torch.Size) -> Tensor:
            drawn = torch.rand(2, *shape, generator=generator).to(self.skipping.threshold.device)
            return drawn - self._pair(shares, block)

        return replaced

    def _losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.score(tokens, targets)[0]

    def _point(self, rule: str, threshold: float, losses: Score) -> DepthPoint:
        self.skipping.threshold.fill_(threshold)
        self.skipping.forget()
        scores = self._score(losses)
        rates = self.skipping.run_rates()
        return DepthPoint(
            rule,
            threshold,
            scores.bits_per_byte,
            float(scores.nats.sum() / scores.n_tokens.sum()),
            forward_flops_per_token(self.model.config, self.seq_len, self.convention, rates),
            *skip_rates(self.model.config, rates, self.seq_len, self.convention),
            rates,
        )


def draw_depth_curve(points: Sequence[DepthPoint], folder: Path) -> list[Path]:
    """Draws bits per byte against executed FLOPs: ``depth_curve.png`` and ``.svg``."""
    from nagnet.diagnostics import style

    fig, (axes,) = style.figure(1000, 600)
    full = points[0]
    rules = [SCORED, *CONTROLS]
    looks = style.arm_styles(["norm_agnostic", *CONTROLS])
    for rule, look in zip(rules, looks.values(), strict=True):
        chosen = [full, *(point for point in points if point.rule == rule)]
        if len(chosen) > 1:
            shares = [100.0 * (1.0 - point.flops) for point in chosen]
            values = [point.bits_per_byte for point in chosen]
            (line,) = axes.plot(shares, values, **look, marker="o", markersize=4)
            line.set_label(rule)
    axes.invert_xaxis()
    title = "What is left when sublayers are skipped"
    style.set_text(axes, title, "executed forward FLOPs, % of the full depth", "bits per byte, held-out text")
    axes.legend(frameon=False, labelcolor=style.INK)
    return style.save_figure(fig, folder, "depth_curve")
