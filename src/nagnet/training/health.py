"""Watching a run: gates that shut, gradient norms, and tensors that are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nagnet.diagnostics.geometry import ALARM_RATIO
from nagnet.diagnostics.health import StreamHealth, update_name
from nagnet.errors import UserError
from nagnet.training.distributed import is_sharded, whole_tensor

ALARM_INTERVALS = 2  # in a row
HEALTH_ROWS, HEALTH_LENGTH = 4, 64  # 256 tokens: a mean gain is then known to a few per cent
NAMED_ALARMS = 4  # in a line for the user


def health_tokens(inputs: Tensor) -> Tensor:
    """The part of a batch [B, T] on which health is measured: at most 4 rows of 64 tokens, so that it costs little."""
    return inputs[:HEALTH_ROWS, :HEALTH_LENGTH]


@dataclass(frozen=True)
class GateAlarm:
    """An update whose gate has shut.

    Attributes:
        update_index: l, from 1.
        mean_gain: token mean of abs(alpha m) now, without the injection scale; ``initial_gain``: at initialisation.
        intervals: measurements in a row, up to now, in which the gain was too small.
    """

    update_index: int
    mean_gain: float
    initial_gain: float
    intervals: int

    def __str__(self) -> str:
        return f"{update_name(self.update_index)}: gain {self.mean_gain:.1e}, at init {self.initial_gain:.1e}"


def describe_alarms(alarms: Sequence[GateAlarm]) -> str:
    """One line for the user that names the shut updates (the first few of many) and the remedy."""
    named = "; ".join(str(alarm) for alarm in alarms[:NAMED_ALARMS])
    rest = f"; and {len(alarms) - NAMED_ALARMS} more" if len(alarms) > NAMED_ALARMS else ""
    count = "1 update has" if len(alarms) == 1 else f"{len(alarms)} updates have"
    return (
        f"gate collapse: {count} shut ({named}{rest}); a shut sublayer gets no gradient back. "
        "Start again with a lower gate rate or a longer injection warm-up"
    )


class HealthMonitor:
    """Turns the measurements of a run into rows and alarms.

    The alarm: mean abs(alpha m) below 0.1 x its value at initialisation, in two measurements in a row. Measurements
    during the injection warm-up do not count, as gates may still be closed and open again there.

    Args:
        initial_gain: mean abs(alpha m) of each update at initialisation, in order of l (``gates.mean_gain`` of a
            measurement before the first step); None takes what the modulator's own initialisation gives.
    """

    def __init__(self, initial_gain: Sequence[float] | None = None):
        self.initial_gain = None if initial_gain is None else list(initial_gain)
        self._low_intervals: list[int] = []

    def check(self, health: StreamHealth) -> tuple[dict[str, Any], list[GateAlarm]]:
        """Takes in one measurement.

        Args:
            health: of `stream_health`, once per interval.

        Returns:
            The entries ``health`` and, for a rule with gates, ``alarms`` (names of updates) of a metrics row; and the
            alarms that now stand, in order of l. A rule without gates never has one.

        Raises:
            UserError: if the model has another number of updates than before.
        """
        row: dict[str, Any] = {"health": health.to_dict()}
        gates = health.gates
        if gates is None:
            return row, []
        initial_gain = gates.initial_gain if self.initial_gain is None else self.initial_gain
        self._low_intervals = self._low_intervals or [0] * len(initial_gain)
        if not len(gates.mean_gain) == len(initial_gain) == len(self._low_intervals):
            raise UserError(
                f"the health monitor follows {len(self._low_intervals)} updates, but the model has "
                f"{len(gates.mean_gain)}; resume with the model the run began with"
            )
        if health.injection == 1.0:
            self._low_intervals = [
                count + 1 if now < ALARM_RATIO * start else 0
                for count, now, start in zip(self._low_intervals, gates.mean_gain, initial_gain, strict=True)
            ]
        alarms = [
            GateAlarm(*entry)
            for entry in zip(gates.update_index, gates.mean_gain, initial_gain, self._low_intervals, strict=True)
            if entry[-1] >= ALARM_INTERVALS
        ]
        row["alarms"] = [update_name(alarm.update_index) for alarm in alarms]
        return row, alarms

    def state_dict(self) -> dict[str, Any]:
        """All that later alarms depend on, as plain JSON values."""
        return {"initial_gain": self.initial_gain, "low_intervals": list(self._low_intervals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.initial_gain = state["initial_gain"]
        self._low_intervals = list(state["low_intervals"])


class GradientNorms(NamedTuple):
    """Euclidean norms of gradients.

    Attributes:
        total: over all parameters of the optimizers. by_role: over those of each role; 0 where none has a gradient.
    """

    total: float
    by_role: dict[str, float]


def gradient_norms(optimizers: Iterable[Optimizer]) -> GradientNorms:
    """Measures the gradients of each role, with one transfer from the device in all.

    Args:
        optimizers: whose groups have a ``role``. Parameters may be sharded: then every process must call this, and
            all get the norms of the whole gradients.

    Returns:
        Norms; NaN or infinite if and only if a gradient is, or the square of one leaves the range of its type.
    """
    gradients: dict[str, list[Tensor]] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        found = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        gradients.setdefault(group["role"], []).extend(found)
    norms = {role: _norm(part) for role, part in gradients.items() if part}
    by_role = dict.fromkeys(gradients, 0.0)
    if norms:
        by_role |= zip(norms, torch.stack(list(norms.values())).tolist(), strict=True)
    return GradientNorms(math.sqrt(sum(norm * norm for norm in by_role.values())), by_role)


def _norm(tensors: list[Tensor]) -> Tensor:
    """Norm of all tensors as one vector; whole and sharded ones do not go into one foreach call."""
    kinds = ([t for t in tensors if not is_sharded(t)], [t for t in tensors if is_sharded(t)])
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    return torch.stack([whole_tensor(norm) for norm in norms]).norm()


class NonFiniteTensors(NamedTuple):
    """Names of what holds a NaN or an infinity.

    Attributes:
        parameters: names of parameters. gradients: names of the parameters whose gradients are not finite.
    """

    parameters: list[str]
    gradients: list[str]


def nonfinite_tensors(model: nn.Module) -> NonFiniteTensors:
    """Names every parameter and gradient that is not finite; reads all of them, so ask only after a bad norm or loss.

    Of a sharded tensor only the part on this process is looked at.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return NonFiniteTensors(_nonfinite(parameters), _nonfinite(gradients))


@torch.no_grad()
def _nonfinite(tensors: dict[str, Tensor]) -> list[str]:
    if not tensors:
        return []
    local: list[Any] = list(tensors.values())
    local = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in local]
    finite = torch.stack([tensor.isfinite().all() for tensor in local]).tolist()
    return [name for name, good in zip(tensors, finite, strict=True) if not good]
