"""Skipping sublayers by the rotation that they were going to make (Mixture-of-Depths, arXiv 2606.16112 section 5).

A token runs a sublayer if its rotation score is above one threshold for the whole model. The score is known before the
sublayer runs and depends on that token's own stream alone, so nothing looks ahead and no batch changes a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.nn.precision import Float32Module
from nagnet.typing import Bool, Float, Int

NOTHING_SKIPPED = -1.0  # a threshold below every score
SCORE_BINS = 2**14  # of the histogram from which the controller takes its quantile


@dataclass(frozen=True)
class SkipPolicy:
    """Which tokens skip a sublayer: those whose rotation score is not above a threshold.

    Give a threshold or a target rate, or neither: then all tokens run all sublayers. A model that can skip has a
    learned vector X per sublayer, which starts at zero, is added to the branch of a token that runs, and stands in for
    that of a token that skips.

    Attributes:
        threshold: p_thres in [0, 1], fixed.
        target_rate: share of all tokens' sublayers to skip, in [0, 1). Training steers the threshold to it by an
            average of the quantiles of earlier batches; evaluation and generation keep the last. 0: nothing is ever
            skipped, and X is there all the same, which makes a fair control.
        start_step: optimizer steps before which nothing is skipped. None: training starts after its injection warm-up.
        averaging: weight in [0, 1) of the threshold so far against the quantile of the last batch.
    """

    threshold: float | None = None
    target_rate: float | None = None
    start_step: int | None = None
    averaging: float = 0.9

    def __post_init__(self):
        if self.threshold is not None and self.target_rate is not None:
            raise UserError("a skip policy has a threshold or a target_rate; give one of the two")
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.target_rate is not None and not 0.0 <= self.target_rate < 1.0:
            raise UserError(f"skip target_rate is {self.target_rate}; give a share from 0 to below 1")
        if self.start_step is not None and self.start_step < 0:
            raise UserError(f"skip start_step is {self.start_step}; give 0 or more")
        if not 0.0 <= self.averaging < 1.0:
            raise UserError(f"skip averaging is {self.averaging}; give a number from 0 to below 1")

    @property
    def on(self) -> bool:
        """Whether the model can skip, and has vectors X."""
        return self.threshold is not None or self.target_rate is not None


def check_threshold(threshold: float) -> None:
    """Raises a UserError unless the threshold is within [0, 1]."""
    if not 0.0 <= threshold <= 1.0:
        raise UserError(f"skip threshold is {threshold}; give a number from 0 to 1")


def rotation_score(gain: Float[Tensor, "*batch"], cap: Float[Tensor, ""]) -> Float[Tensor, "*batch"]:
    """Share of the largest rotation that a token will make, ``arctan |gain| / arctan |cap|`` in [0, 1].

    Args:
        gain: alpha m times the injection scale [...], float32 or wider. cap: alpha times the injection scale, a scalar.

    Returns:
        r [...], monotone in |gain|; its limit m where the cap goes to 0. A cap of exactly 0 turns nothing: r is 0.
    """
    largest = torch.atan(cap.to(gain.dtype).abs())
    nothing = largest == 0
    return torch.where(nothing, 0.0, torch.atan(gain.abs()) / torch.where(nothing, 1.0, largest)).clamp(max=1.0)


Function = TypeVar("Function", bound=Callable[..., Any])
Execution = Literal["packed", "whole", "masked", "branched"]


class Decision(NamedTuple):
    """What the tokens of a pass do in one sublayer.

    Attributes:
        scores: r [B, T]. run: bool [B, T], whether a token runs the sublayer.
        execution: ``packed``: the tokens that run are computed, and no others. ``whole``: all of them run, so nothing
            is packed. ``masked``, the reference: all are computed, and what is not asked for is dropped. ``branched``:
            masked if any token runs, and nothing computed if none does, within one graph; for a compiled pass of one
            token.
    """

    scores: Tensor
    run: Tensor
    execution: Execution


class SkipsInForce(NamedTuple):
    """What a block needs to decide.

    Attributes:
        threshold: scalar. execution: as in `Decision`.
        replaced: [2, B, T], scores in place of those of attention and MLP; None for the rotation scores.
    """

    threshold: Tensor
    execution: Execution
    replaced: Tensor | None = None

    def decide(self, scores: Tensor, sublayer: int) -> Decision:
        """Which tokens run sublayer 0 (attention) or 1 (MLP), given their rotation scores [B, T]."""
        scores = scores.detach() if self.replaced is None else self.replaced[sublayer]
        return Decision(scores, scores > self.threshold, self.execution)


def run_tokens(sublayer: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"], decision: Decision | None) -> Tensor:
    """The branch [B, T, d] of a sublayer that treats every token alone; zero for a token that skips it."""
    if decision is None or decision.execution == "whole":
        return sublayer(x)
    if decision.execution == "packed":
        return _run_packed(sublayer, x, decision.run)
    if decision.execution == "branched":
        return run_if_any(sublayer, x, decision.run)
    return drop_skipped(sublayer(x), decision.run)


def drop_skipped(branch: Float[Tensor, "b t d"], run: Tensor) -> Float[Tensor, "b t d"]:
    """A branch that was computed for all tokens, zero where a token skips."""
    return branch.masked_fill(~run.unsqueeze(-1), 0.0)


def run_if_any(sublayer: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"], run: Tensor) -> Float[Tensor, "b t d"]:
    """The branch where any token runs, decided inside a compiled graph; zero for a token that skips."""
    return drop_skipped(torch.cond(run.any(), sublayer, torch.zeros_like, (x,)), run)


def between_graphs(function: Function) -> Function:
    """Keeps a function out of compiled graphs, which end before it and go on after it."""
    return cast(Function, torch.compiler.disable(function))


@between_graphs
def _run_packed(sublayer: Callable[[Tensor], Tensor], x: Tensor, run: Tensor) -> Tensor:
    n_running = int(run.sum())
    if n_running == run.numel():
        return sublayer(x)
    if nobody_needs(n_running):
        return torch.zeros_like(x)
    rows = running_rows(run)
    return spread(sublayer(take(x, rows)), rows, x)


def nobody_needs(n_running: int) -> bool:
    """Whether a sublayer can be left out altogether. Where there are gradients it runs on nothing: with several
    processes each must touch the same parameters."""
    return n_running == 0 and not torch.is_grad_enabled()


def running_rows(run: Tensor) -> Tensor:
    """Places [n] of the tokens that run in [B, T] laid out as one row, in order."""
    return run.flatten().nonzero().squeeze(1)


def take(x: Float[Tensor, "b t d"], rows: Tensor) -> Float[Tensor, "n d"]:
    """The tokens of `running_rows`."""
    return x.flatten(0, 1).index_select(0, rows)


def spread(branch: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Puts ``branch`` [n, d] to its ``rows`` among zeros of the shape of ``like`` [B, T, d]."""
    return branch.new_zeros(like.shape[0] * like.shape[1], branch.shape[1]).index_copy(0, rows, branch).view(like.shape)


def count_(counts: Int[Tensor, "two n"], run: Bool[Tensor, "n b t"], counted: Bool[Tensor, "b t"] | None) -> None:
    """Adds tokens that came to each sublayer, and that ran it, to the counts; of those counted alone, None: all."""
    if counted is not None:
        run = run & counted
    counts[0] += run[0].numel() if counted is None else counted.sum()
    counts[1] += run.sum(dim=(1, 2))


def run_rates(counts: Tensor) -> list[float]:
    """Share of tokens that ran each sublayer, of counts [2, N]: those that came to it, and those that ran it."""
    seen, run = counts.tolist()
    return [ran / of if of else 1.0 for ran, of in zip(run, seen, strict=True)]


class Skipping(Float32Module):
    """Skipping in one model: the threshold in force, and counts of what was skipped.

    Args:
        n_updates: N, sublayers of the model.
        policy: with a policy the threshold belongs to the model and is saved with it; without, it is a dial that
            somebody turned on a model trained without skipping.

    Attributes:
        threshold: float32 scalar; below 0 nothing is skipped.
        counts: int64 [2, N], tokens that came to each sublayer, and that ran it. histogram: of the scores of passes
            without a cache.
        execution: as in `Decision`.
        replaced: called with the index of a block and [B, T], gives scores [2, B, T] in place of the rotation scores;
            for controls.
    """

    def __init__(self, n_updates: int, policy: SkipPolicy | None = None):
        super().__init__()
        self.policy = policy
        self.execution: Execution = "packed"
        self.replaced: Callable[[int, torch.Size], Tensor] | None = None
        self._counted: Tensor | None = None
        self.threshold: Tensor
        self.counts: Tensor
        self.histogram: Tensor
        self.register_buffer("threshold", torch.tensor(NOTHING_SKIPPED), persistent=policy is not None)
        self.register_buffer("counts", torch.zeros(2, n_updates, dtype=torch.int64), persistent=False)
        self.register_buffer("histogram", torch.zeros(SCORE_BINS, dtype=torch.int64), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """The policy's own threshold, or nothing skipped; all counts at 0."""
        fixed = None if self.policy is None else self.policy.threshold
        self.threshold.fill_(NOTHING_SKIPPED if fixed is None else fixed)
        self.forget()

    def set_threshold(self, threshold: float | None) -> None:
        """Puts p_thres in force, within [0, 1]; None: nothing is skipped."""
        if threshold is not None:
            check_threshold(threshold)
        self.threshold.fill_(NOTHING_SKIPPED if threshold is None else threshold)

    def in_force(self, block: int, shape: torch.Size) -> SkipsInForce:
        """What a block needs to decide for tokens [B, T]."""
        return SkipsInForce(
            self.threshold, self.execution, None if self.replaced is None else self.replaced(block, shape)
        )

    def execution_now(self) -> Execution:
        """``execution``, but ``whole`` for ``packed`` while the threshold is below every rotation score: a control that
        never skips, and a run before its first skip, have the blocks of the full depth."""
        packed = self.execution == "packed" and self.replaced is None and not torch.compiler.is_compiling()
        return "whole" if packed and float(self.threshold) < 0.0 else self.execution

    @contextmanager
    def counting(self, counted: Tensor) -> Iterator[None]:
        """Counts only these tokens, bool [B, T], of the passes inside."""
        self._counted = counted
        try:
            yield
        finally:
            self._counted = None

    @torch.no_grad()
    def observe(self, decisions: list[Decision], counted: Tensor | None = None, with_scores: bool = True) -> None:
        """Adds the decisions of all sublayers to the counts.

        Args:
            counted: bool [B, T], False for padding; None: all are tokens.
            with_scores: whether to add the scores to the histogram too.
        """
        counted = counted if self._counted is None else self._counted
        count_(self.counts, torch.stack([decision.run for decision in decisions]), counted)
        if not with_scores:
            return
        scores = torch.stack([decision.scores for decision in decisions]).flatten(1)
        if counted is not None:
            scores = scores[:, counted.flatten()]
        bins = (scores.flatten() * SCORE_BINS).long().clamp(0, SCORE_BINS - 1)
        self.histogram += torch.bincount(bins, minlength=SCORE_BINS)

    def forget(self) -> None:
        """Sets all counts to 0."""
        self.counts.zero_()
        self.histogram.zero_()

    def reset_buffers(self) -> None:
        """Sets what no checkpoint holds to its initial value, where it was left empty."""
        self.forget()

    def run_rates(self) -> list[float]:
        """Share of tokens that ran each sublayer since the counts were at 0; 1 where there were none."""
        return run_rates(self.counts)

    def quantile(self, rate: float) -> float:
        """The score below which this share of the counted scores lies, to 1 / SCORE_BINS, interpolated."""
        total = self.histogram.cumsum(0).double()
        wanted = rate * float(total[-1])
        bin_ = min(int((total < wanted).sum()), SCORE_BINS - 1)
        below = float(total[bin_ - 1]) if bin_ else 0.0
        inside = float(total[bin_]) - below
        return (bin_ + ((wanted - below) / inside if inside else 0.0)) / SCORE_BINS

    def steer(self, started: bool) -> None:
        """After an optimizer step: the threshold of the next, from the scores counted during this one.

        Args:
            started: whether the next step may skip.
        """
        policy = self.policy
        if policy is None or not policy.on:
            return
        if not started or policy.target_rate == 0.0:
            self.set_threshold(None)
        elif policy.threshold is not None:
            self.set_threshold(policy.threshold)
        else:
            assert policy.target_rate is not None
            found, present = self.quantile(policy.target_rate), float(self.threshold)
            if present >= 0.0:
                found = policy.averaging * present + (1.0 - policy.averaging) * found
            self.set_threshold(min(1.0, found))
