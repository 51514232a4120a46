"""Geometry of the residual stream by depth, and the health of the norm-agnostic gates.

Needs torch alone. Sublayers are counted from 1: with one attention and one MLP a block, attention has the odd
update indices and the MLP the even ones. Definitions of the figures: docs/mathematics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nagnet.diagnostics.probe import UpdateStep, observe_gains, observe_updates
from nagnet.errors import UserError
from nagnet.nn.modulator import RAW_BETA_FOR_ONE
from nagnet.nn.residual import NormAgnosticResidual
from nagnet.ops import reference

ALARM_RATIO = 0.1  # of the mean gain at initialisation
LEGACY_ON = 0.25
LEGACY_DEAD = 0.05
MODULATION_AT_INIT = 0.5


@dataclass(frozen=True)
class NormByDepth:
    """RMS of the stream, exp(s), before the first update and after each of the N; all float64 [N + 1].

    Attributes:
        mean: over all tokens.
        median: over all tokens, the lower of the two middle values.
        mean_without_first: over the tokens that are not at position 0; NaN for sequences of one token.
        first: over the tokens at position 0, where a model may park a norm outlier.
    """

    mean: Tensor
    median: Tensor
    mean_without_first: Tensor
    first: Tensor


@dataclass(frozen=True)
class RotationByDepth:
    """How far the updates turn the stream; float64 [N], degrees.

    Attributes:
        angle: token mean of the angle between the directions before and after each update.
        cumulative: sum of these up to each update.
    """

    angle: Tensor
    cumulative: Tensor


@dataclass(frozen=True)
class GainByUpdate:
    """Size of the updates of a norm-agnostic model; float64 [N], without the injection scale.

    Attributes:
        update_index: l of each entry, int64; attention odd, MLP even.
        alpha: abs(alpha), the cap on the tangent of the rotation.
        mean_gain: token mean of abs(alpha m).
        initial_alpha: ``l ** -init_exponent``, where alpha started.
    """

    update_index: Tensor
    alpha: Tensor
    mean_gain: Tensor
    initial_alpha: Tensor


@dataclass(frozen=True)
class GateHealth:
    """Whether the updates of a norm-agnostic model still take part; one entry per update, in order of l.

    Gains are abs(alpha m) without the injection scale, so the numbers mean the same during its warm-up. An update
    that did not run has NaN everywhere and is not called collapsed.

    Attributes:
        update_index: l of each entry.
        alpha: abs(alpha), the cap on the tangent of the rotation.
        mean_gain: token mean of abs(alpha m).
        initial_gain: what it is compared with.
        collapsed_updates: the alarm of this project: l of every update with ``mean_gain < 0.1 initial_gain``.
            Call a run collapsed if two measurements in a row name an update.
        legacy_floor_fraction: share of tokens with u <= 1e-6, where the modulator's gradient is clamped away.
        legacy_on_fraction: share of tokens with abs(alpha m) > 0.25.
        legacy_dead: mean_gain < 0.05. True of healthy updates too once alpha = 1/sqrt(l) is small (l > 100).
    """

    update_index: list[int]
    alpha: list[float]
    mean_gain: list[float]
    initial_gain: list[float]
    collapsed_updates: list[int]
    legacy_floor_fraction: list[float]
    legacy_on_fraction: list[float]
    legacy_dead: list[bool]

    @property
    def legacy_quartiles(self) -> dict[str, list[float]]:
        """Means over each quarter of the depth, first to last, of the gain and the legacy numbers.

        NaN for a quarter without updates (models of fewer than four).
        """
        return {
            "mean_gain": by_quarter(self.mean_gain),
            "floor_fraction": by_quarter(self.legacy_floor_fraction),
            "on_fraction": by_quarter(self.legacy_on_fraction),
            "dead_fraction": by_quarter([float(dead) for dead in self.legacy_dead]),
        }


def norm_by_depth(model: Any, tokens: Tensor) -> NormByDepth:
    """Measures the RMS of the stream by depth, for any residual rule.

    Args:
        model: a `nagnet.Decoder`.
        tokens: [B, T] integers.

    Returns:
        Token statistics of exp(s), [N + 1].

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    rows: list[list[float]] = []

    def note(state: Any) -> None:
        norm = _wide(state.split()[1]).exp()
        parts = (norm.mean(), norm.median(), norm[:, 1:].mean(), norm[:, 0].mean())
        rows.append([part.item() for part in parts])

    def observer(step: UpdateStep) -> None:
        if not rows:
            note(step.before)
        note(step.after)

    with observe_updates(model, observer):
        model.trunk(tokens)
    return NormByDepth(*torch.tensor(rows, dtype=torch.float64).unbind(dim=1))


def rotation_by_depth(model: Any, tokens: Tensor) -> RotationByDepth:
    """Measures how far each update turns the stream, for any residual rule.

    Args:
        model: a `nagnet.Decoder`.
        tokens: [B, T] integers.

    Returns:
        Mean angles in degrees, [N].

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    angles: list[float] = []

    def observer(step: UpdateStep) -> None:
        turned = reference.angle(step.before.split()[0], step.after.split()[0])
        angles.append(_wide(turned).mean().rad2deg().item())

    with observe_updates(model, observer):
        model.trunk(tokens)
    angle = torch.tensor(angles, dtype=torch.float64)
    return RotationByDepth(angle, angle.cumsum(dim=0))


def gain_by_update(model: nn.Module, tokens: Tensor) -> GainByUpdate | None:
    """Measures alpha and the mean gain of each update.

    Args:
        model: any module called as ``model(tokens)``.
        tokens: [B, T] integers.

    Returns:
        abs(alpha) and mean abs(alpha m) [N], or None for a model without norm-agnostic updates.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    if not any(isinstance(module, NormAgnosticResidual) for module in model.modules()):
        return None
    updates, totals = _measure_gates(model, tokens)
    return GainByUpdate(
        update_index=torch.tensor([update.update_index for update in updates]),
        alpha=_vector([abs(update.alpha.item()) for update in updates]),
        mean_gain=totals[:, 2] / totals[:, 0],
        initial_alpha=_vector([_initial_alpha(update) for update in updates]),
    )


def gate_health(model: nn.Module, tokens: Tensor, initial_gain: Sequence[float] | None = None) -> GateHealth:
    """Finds updates whose gates have shut: a shut sublayer gets no gradient back and stays dead.

    Args:
        model: any module that holds `NormAgnosticResidual` modules and is called as ``model(tokens)``. It runs in
            evaluation mode without gradients and is left as it was.
        tokens: [B, T] integers.
        initial_gain: mean abs(alpha m) of each update at initialisation, in order of l; by default
            ``l ** -init_exponent / 2``, which fits the modulator's own initialisation.

    Returns:
        Gains, the updates that have collapsed, and the numbers earlier work reports.

    Raises:
        UserError: if the model holds no norm-agnostic update, ``tokens`` is not a non-empty [B, T], or
            ``initial_gain`` has another length than the model has updates.
    """
    return summarize_gates(*_measure_gates(model, tokens), initial_gain)


def gate_totals(update: NormAgnosticResidual, direction: Tensor) -> Tensor:
    """Adds up over all tokens what the gate of ``update`` does with ``direction`` [..., d].

    Returns:
        [5], float32 or wider, on the device of ``direction``: tokens, sum of abs(alpha), sum of abs(alpha m) without
        the injection scale, tokens with u <= 1e-6, tokens with abs(alpha m) > 0.25.
    """
    m = update.modulator
    # beta = 1 makes the modulation u itself; u is out of reach of m where u^beta underflows.
    beta_one = torch.full_like(m.raw_beta, RAW_BETA_FOR_ONE)
    u = reference.modulation(direction, m.weight, m.bias, m.mixture, beta_one)
    gain = (update.alpha * m(direction)).abs()
    # A little above the floor: the clamped value went through a logarithm and back.
    alpha = update.alpha.abs().expand_as(gain)
    parts = (torch.ones_like(gain), alpha, gain, u <= reference.MODULATION_FLOOR * 1.001, gain > LEGACY_ON)
    return torch.stack([part.sum(dtype=gain.dtype) for part in parts])


def summarize_gates(
    updates: Sequence[NormAgnosticResidual], totals: Tensor, initial_gain: Sequence[float] | None = None
) -> GateHealth:
    """Turns the sums of `gate_totals` into a verdict on each gate.

    Args:
        updates: in order of l. totals: [N, 5] on the CPU; zeros for an update that did not run.
        initial_gain: as in `gate_health`.

    Raises:
        UserError: if ``initial_gain`` has another length than ``updates``.
    """
    if initial_gain is None:
        initial_gain = [_initial_alpha(update) * MODULATION_AT_INIT for update in updates]
    if len(initial_gain) != len(updates):
        raise UserError(f"initial_gain has {len(initial_gain)} values, but the model has {len(updates)} updates")
    index = [update.update_index for update in updates]
    alpha, mean_gain, floor, on = (totals[:, 1:] / totals[:, :1]).T.tolist()
    return GateHealth(
        update_index=index,
        alpha=alpha,
        mean_gain=mean_gain,
        initial_gain=list(initial_gain),
        collapsed_updates=[
            place for place, now, start in zip(index, mean_gain, initial_gain, strict=True) if now < ALARM_RATIO * start
        ],
        legacy_floor_fraction=floor,
        legacy_on_fraction=on,
        legacy_dead=[gain < LEGACY_DEAD for gain in mean_gain],
    )


def _measure_gates(model: nn.Module, tokens: Tensor) -> tuple[list[NormAgnosticResidual], Tensor]:
    """The norm-agnostic updates of ``model`` in order of l, and their `gate_totals` on ``tokens``, float64 [N, 5]."""
    check_tokens(tokens)
    totals: dict[NormAgnosticResidual, Tensor] = {}

    def observer(update: NormAgnosticResidual, state: Any) -> None:
        now = gate_totals(update, state.direction)
        totals[update] = totals[update] + now if update in totals else now

    with observe_gains(model, observer) as updates:
        model(tokens)
    return updates, torch.stack([_wide(totals.get(update, torch.zeros(5))) for update in updates])


def _initial_alpha(update: NormAgnosticResidual) -> float:
    return update.update_index**-update.init_exponent


def by_quarter(values: Sequence[float]) -> list[float]:
    """Means over each quarter of the depth, first to last; NaN for a quarter without values."""
    quarters: list[list[float]] = [[], [], [], []]
    for place, value in enumerate(values):
        quarters[place * 4 // len(values)].append(value)
    return [sum(part) / len(part) if part else math.nan for part in quarters]


def _wide(values: Tensor) -> Tensor:
    """Float64 on the CPU: exp(s) may pass float32's range, and not every accelerator has float64."""
    return values.cpu().double()


def _vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check_tokens(tokens: Tensor) -> None:
    """Raises a UserError unless ``tokens`` is a non-empty [B, T] of integers."""
    if tokens.is_floating_point():
        raise UserError(f"tokens are {tokens.dtype}; give integers")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise UserError(f"tokens have shape {list(tokens.shape)}; give a non-empty [batch, length]")
