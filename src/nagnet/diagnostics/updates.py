"""What each update does to the stream, and what the model is without it.

Needs torch alone. Definitions of the figures: docs/probe.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nagnet.diagnostics.geometry import check_tokens
from nagnet.diagnostics.probe import UpdateStep, advancing_by, measuring, observe_updates
from nagnet.errors import UserError
from nagnet.nn.residual import NormAgnosticResidual
from nagnet.ops import reference

HISTOGRAM_BINS = 50


@dataclass(frozen=True)
class RelativeUpdate:
    """Size of each update relative to the stream it changes, ``||x' - x|| / ||x||``; float64 [N].

    Attributes:
        mean: over tokens. median: over tokens, the lower of the two middle values.
    """

    mean: Tensor
    median: Tensor


@dataclass(frozen=True)
class ModulationHistogram:
    """How the tokens share out over the modulation m of each update.

    Attributes:
        update_index: l of each row, int64 [N].
        edges: of the bins over [0, 1], float64 [bins + 1].
        share: of the tokens in each bin, float64 [N, bins]; a row sums to 1.
        mean: token mean of m, float64 [N].
    """

    update_index: Tensor
    edges: Tensor
    share: Tensor
    mean: Tensor


@dataclass(frozen=True)
class PreferredDirections:
    """Which directions of the stream each update opens for, compared between updates.

    Attributes:
        update_index: l of each row and column, int64 [N].
        weighted: cosines between the vectors ``sum(m R) / sum(m)`` of the updates, float64 [N, N].
        unweighted: the control, cosines between the plain means of R: what updates share because the stream has a
            mean, whatever their gates do; float64 [N, N].
    """

    update_index: Tensor
    weighted: Tensor
    unweighted: Tensor


@dataclass(frozen=True)
class BlockRemoval:
    """Next-token loss when one block does nothing.

    Attributes:
        loss: nats per token without each block, float64 [blocks].
        full_loss: nats per token of the whole model.
    """

    loss: Tensor
    full_loss: float


@dataclass(frozen=True)
class Outliers:
    """How far from a bell curve weights and activations are.

    Attributes:
        matrix: name of each weight of two or more axes.
        weight_kurtosis: fourth moment over the squared variance, 3 for a normal distribution; float64 [M].
        weight_max_over_rms: largest absolute entry over the RMS, float64 [M].
        stream_kurtosis: of the channels of the stream's direction after each update, token mean, float64 [N].
        stream_max_over_rms: largest channel of the direction over its RMS, token mean, float64 [N].
        branch_max_over_rms: the same of each sublayer's output, token mean, float64 [N]; NaN where it is zero.
    """

    matrix: list[str]
    weight_kurtosis: Tensor
    weight_max_over_rms: Tensor
    stream_kurtosis: Tensor
    stream_max_over_rms: Tensor
    branch_max_over_rms: Tensor


def relative_update(model: Any, tokens: Tensor) -> RelativeUpdate:
    """Measures ``||x' - x|| / ||x||`` of each update, for any residual rule; ``|alpha| m`` for norm-agnostic.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    rows: list[list[float]] = []

    def observer(step: UpdateStep) -> None:
        (before, s), (after, s_after) = step.before.split(), step.after.split()
        grown = (s_after.double() - s.double()).exp().unsqueeze(-1)
        change = (after.double() * grown - before.double()).norm(dim=-1) / before.double().norm(dim=-1)
        rows.append([change.mean().item(), change.median().item()])

    with observe_updates(model, observer):
        model.trunk(tokens)
    return RelativeUpdate(*torch.tensor(rows, dtype=torch.float64).unbind(dim=1))


def modulation_histogram(model: Any, tokens: Tensor, bins: int = HISTOGRAM_BINS) -> ModulationHistogram | None:
    """Counts the modulation m of all tokens in each update; None for a rule without modulators.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers. bins: over [0, 1], of equal width.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T], or m is NaN.
    """
    check_tokens(tokens)
    index, counts, means = [], [], []

    def observer(step: UpdateStep) -> None:
        if isinstance(step.update, NormAgnosticResidual):
            m = step.update.modulator(step.before.split()[0]).double().flatten()
            if m.isnan().any():
                raise UserError(f"the modulation of update {step.index} is NaN; has the model diverged?")
            index.append(step.index)
            counts.append((m * bins).long().clamp(0, bins - 1).bincount(minlength=bins) / m.numel())
            means.append(m.mean())

    with observe_updates(model, observer):
        model.trunk(tokens)
    if not index:
        return None
    edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64)
    return ModulationHistogram(torch.tensor(index), edges, _float64(counts), _float64(means))


def preferred_directions(model: Any, tokens: Tensor) -> PreferredDirections | None:
    """Compares what the gates of the updates open for; None for a rule without modulators.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    index, weighted, plain = [], [], []

    def observer(step: UpdateStep) -> None:
        if isinstance(step.update, NormAgnosticResidual):
            direction = step.before.split()[0]
            m = step.update.modulator(direction).double().flatten()
            rows = direction.double().flatten(0, 1)
            index.append(step.index)
            weighted.append(m @ rows / m.sum())
            plain.append(rows.mean(dim=0))

    with observe_updates(model, observer):
        model.trunk(tokens)
    if not index:
        return None
    return PreferredDirections(torch.tensor(index), _cosines(weighted), _cosines(plain))


def block_removal(model: Any, tokens: Tensor) -> BlockRemoval:
    """Measures the loss when the two updates of one block leave the stream as it is, block by block.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers with T >= 2; each predicts the next.

    Raises:
        UserError: if there is nothing to predict.
    """
    check_tokens(tokens)
    if tokens.shape[1] < 2:
        raise UserError("the loss without a block needs sequences of 2 tokens or more")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with measuring(model):
        full = model.score(inputs, targets)[0].double().mean().item()
    losses = []
    for block in range(len(model.blocks)):
        with _without_updates(model, (2 * block, 2 * block + 1)):
            losses.append(model.score(inputs, targets)[0].double().mean().item())
    return BlockRemoval(torch.tensor(losses, dtype=torch.float64), full)


def outliers(model: Any, tokens: Tensor) -> Outliers:
    """Measures kurtosis and largest entries of all matrices, and of the activations at each update.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    matrices = {
        name: weight.detach().flatten().double() for name, weight in model.named_parameters() if weight.dim() > 1
    }
    rows: list[list[float]] = []

    def observer(step: UpdateStep) -> None:
        after, branch = step.after.split()[0].double(), step.branch.double()
        size = _max_over_rms(branch)
        rows.append([part.item() for part in (_kurtosis(after).mean(), _max_over_rms(after).mean(), size.nanmean())])

    with observe_updates(model, observer):
        model.trunk(tokens)
    return Outliers(
        list(matrices),
        _float64([_kurtosis(weight) for weight in matrices.values()]),
        _float64([_max_over_rms(weight) for weight in matrices.values()]),
        *torch.tensor(rows, dtype=torch.float64).unbind(dim=1),
    )


@contextmanager
def _without_updates(model: Any, places: tuple[int, ...]) -> Iterator[None]:
    """Lets the updates at these places of ``model.stream.updates`` leave the stream as it is, `measuring` included."""

    def stay(update: nn.Module, state: Any, branch: Tensor, gain: Tensor | None, following: Any) -> Any:
        if following is None:
            return state, None, None
        return state, following.read(state), following.gain(state)

    with measuring(model), advancing_by([model.stream.updates[place] for place in places], stay):
        yield


def _kurtosis(x: Tensor) -> Tensor:
    """Over the last axis; NaN for a constant one."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred.pow(4).mean(dim=-1) / centred.square().mean(dim=-1).square()


def _max_over_rms(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1) / reference.mean_square(x).squeeze(-1).sqrt()


def _cosines(vectors: list[Tensor]) -> Tensor:
    unit = nn.functional.normalize(torch.stack(vectors), dim=-1)
    return (unit @ unit.T).cpu()


def _float64(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().cpu()
