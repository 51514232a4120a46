"""The health of every sublayer in one forward pass: stream norm, rotation, alignment, and the gates.

One pass over a few hundred tokens is enough and cheap enough to repeat during training. What the numbers mean:
docs/health.md. Needs torch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import GateHealth, by_quarter, check_tokens, gate_totals, summarize_gates
from nagnet.diagnostics.probe import UpdateStep, observe_updates
from nagnet.nn.residual import NormAgnosticResidual
from nagnet.ops import reference

Sublayer = Literal["attention", "mlp"]


def sublayer_of(update_index: int) -> Sublayer:
    """Which sublayer the update l (from 1) belongs to: attention has the odd indices, the MLP the even ones."""
    return "attention" if update_index % 2 else "mlp"


def update_name(update_index: int) -> str:
    """``update 17 (attention of block 9)``: updates and blocks are counted from 1."""
    word = {"attention": "attention", "mlp": "MLP"}[sublayer_of(update_index)]
    return f"update {update_index} ({word} of block {(update_index + 1) // 2})"


@dataclass(frozen=True)
class StreamHealth:
    """What each update did to the stream; one entry per update, in order of l.

    Attributes:
        update_index: l of each entry, from 1; `sublayer_of` tells attention from MLP.
        norm: token mean of the stream's RMS, exp(s), after the update.
        rotation: token mean of the angle by which the update turned the stream, degrees.
        alignment: token mean of the cosine between the sublayer's output F(R) and the direction R before it; 0
            where the output is zero.
        injected_gain: token mean of abs(alpha m) times the injection scale, as it ran. None for a rule without gains.
        injection: injection scale in force, 0 to 1. None for a rule without injection.
        gates: gains without the injection scale, and the state of the gates. None for a rule without gates.
    """

    update_index: list[int]
    norm: list[float]
    rotation: list[float]
    alignment: list[float]
    injected_gain: list[float] | None
    injection: float | None
    gates: GateHealth | None

    def quartiles(self, sublayer: Sublayer | None = None) -> dict[str, list[float]]:
        """Means over each quarter of the depth, first to last; NaN for a quarter without updates.

        Args:
            sublayer: of these alone, or of attention and MLP together.

        Returns:
            norm, rotation, alignment, and for a rule with gates alpha, mean_gain, injected_gain, legacy_floor_fraction,
            legacy_on_fraction and legacy_dead (share of the updates), each with four values.
        """
        kept = [place for place, index in enumerate(self.update_index) if sublayer in (None, sublayer_of(index))]
        return {name: by_quarter([float(values[place]) for place in kept]) for name, values in self._columns().items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON row: a list for each quantity, and ``quartiles`` with the keys ``q1`` to ``q4``.

        What the rule does not have is absent.
        """
        row: dict[str, Any] = {"update": self.update_index} | self._columns()
        if self.injection is not None:
            row["injection"] = self.injection
        quartiles = {
            name: {f"q{quarter}": mean for quarter, mean in enumerate(means, start=1)}
            for name, means in self.quartiles().items()
        }
        return row | {"quartiles": quartiles}

    def _columns(self) -> dict[str, list]:
        columns: dict[str, list] = {"norm": self.norm, "rotation": self.rotation, "alignment": self.alignment}
        if self.injected_gain is not None:
            columns["injected_gain"] = self.injected_gain
        if self.gates is not None:
            columns["alpha"] = self.gates.alpha
            columns["mean_gain"] = self.gates.mean_gain
            columns["legacy_floor_fraction"] = self.gates.legacy_floor_fraction
            columns["legacy_on_fraction"] = self.gates.legacy_on_fraction
            columns["legacy_dead"] = self.gates.legacy_dead
        return columns


class StreamObserver:
    """Collects the statistics of the updates it is shown: give it to `observe_updates`, then ask for `health`.

    Only a few numbers per update are kept, on the device of the model until `health` fetches all of them at once.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, NormAgnosticResidual | None, bool]] = []
        self._rows: list[Tensor] = []

    def __call__(self, step: UpdateStep) -> None:
        gated = step.update if isinstance(step.update, NormAgnosticResidual) else None
        self._steps.append((step.index, gated, step.gain is not None))
        self._rows.append(_measure(step, gated))

    def health(self) -> StreamHealth:
        """What has been collected so far; empty lists before the first update."""
        rows = torch.stack(self._rows).cpu().double() if self._rows else torch.zeros(0, N_COLUMNS, dtype=torch.float64)
        log_norm, rotation, alignment, gain, injection = rows[:, :5].unbind(dim=1)
        gated = [place for place, (_, update, _) in enumerate(self._steps) if update is not None]
        updates = [update for _, update, _ in self._steps if update is not None]
        return StreamHealth(
            update_index=[index for index, _, _ in self._steps],
            norm=log_norm.exp().tolist(),
            rotation=rotation.rad2deg().tolist(),
            alignment=alignment.tolist(),
            injected_gain=gain.tolist() if any(has_gain for *_, has_gain in self._steps) else None,
            injection=injection[gated[0]].item() if gated else None,
            gates=summarize_gates(updates, rows[gated, 5:]) if gated else None,
        )


N_COLUMNS = 10  # of `_measure`


def _measure(step: UpdateStep, gated: NormAgnosticResidual | None) -> Tensor:
    """Log of the mean norm, rotation (radians), alignment, gain, injection scale, and the five of `gate_totals`.

    What the rule does not have is NaN. The logarithm keeps exp(s) in range of float32.
    """
    direction, (turned, log_norm) = step.before.split()[0], step.after.split()
    dtype = reference.compute_dtype(direction, log_norm)
    absent = log_norm.new_tensor(math.nan, dtype=dtype)
    parts = [
        log_norm.to(dtype).flatten().logsumexp(dim=0) - math.log(log_norm.numel()),
        reference.angle(direction, turned).mean(),
        torch.cosine_similarity(step.branch.to(dtype), direction.to(dtype), dim=-1).mean(),
        absent if step.gain is None else step.gain.abs().mean(),
        absent if gated is None else gated.injection,
    ]
    totals = absent.expand(5) if gated is None else gate_totals(gated, direction)
    return torch.cat([torch.stack([part.to(dtype) for part in parts]), totals.to(dtype)])


def stream_health(model: Any, tokens: Tensor) -> StreamHealth:
    """Measures the health of every sublayer in one forward pass, for any residual rule.

    Gains come with and without the injection scale, so they can be read during its warm-up too.

    Args:
        model: a `nagnet.Decoder`; it runs in evaluation mode without gradients and is left as it was. A sharded one
            must have its method ``trunk`` registered as a forward method, and every process must call this.
        tokens: [B, T] integers; a few hundred are enough.

    Returns:
        One entry per update.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T], or the model has no stream of updates.
    """
    check_tokens(tokens)
    observer = StreamObserver()
    with observe_updates(model, observer):
        model.trunk(tokens)
    return observer.health()
