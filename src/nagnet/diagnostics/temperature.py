"""Where the temperature of a token's logits comes from: its embedding, G_encode, and the way through the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import check_tokens
from nagnet.diagnostics.probe import UpdateStep, observe_updates
from nagnet.errors import UserError

FREQUENCY_STEP = 4  # from one group of tokens to the next


@dataclass(frozen=True)
class TemperatureSplit:
    """Mean log of the factors of ``exp(s_N) = G_embedding G_encode G_travel = 1 / T_eff``, by token frequency.

    Attributes:
        least: smallest number of occurrences in a group, int64 [groups]; the largest is below ``FREQUENCY_STEP``
            times it.
        n_tokens: positions in each group, int64 [groups].
        embedding: mean log of the RMS of the token's embedding, float64 [groups]. 0 for a rule that normalises it.
        encode: log G_encode, the same for all; 0 for a model without.
        travel: mean of s_N - s_0, what the updates add, float64 [groups].
        total: mean of s_N, the sum of the three, float64 [groups].
        in_logits: whether the logits are multiplied by exp(s_N).
    """

    least: Tensor
    n_tokens: Tensor
    embedding: Tensor
    encode: float
    travel: Tensor
    total: Tensor
    in_logits: bool


def temperature_split(model: Any, tokens: Tensor, occurrences: Tensor) -> TemperatureSplit:
    """Splits s_N into what embedding, G_encode and updates add, for groups of tokens of like frequency.

    Position 0 is left out: it holds the begin-of-text token of every sequence.

    Args:
        model: a `nagnet.Decoder` of any rule.
        tokens: [B, T] integers, T >= 2.
        occurrences: how often each id occurs in a text, integers [V]; ids that do not occur count as 1.

    Raises:
        UserError: if ``tokens`` has fewer than two positions, or ``occurrences`` is not one number per id.
    """
    check_tokens(tokens)
    if tokens.shape[1] < 2:
        raise UserError("the temperature by token needs sequences of 2 tokens or more")
    if occurrences.shape != (model.config.vocab_size,):
        raise UserError(
            f"occurrences have shape {tuple(occurrences.shape)}; give one per id, {model.config.vocab_size}"
        )
    lanes: list[Tensor] = []

    def observer(step: UpdateStep) -> None:
        if not lanes:
            lanes.append(step.before.split()[1])
        lanes[1:] = [step.after.split()[1]]

    with observe_updates(model, observer):
        model.trunk(tokens)
    start, end = (lane[:, 1:].double().flatten().cpu() for lane in lanes)
    log_gain = getattr(model.stream, "log_encode_gain", None)
    encode = 0.0 if log_gain is None else log_gain.detach().item()
    count = occurrences.cpu().clamp(min=1)[tokens[:, 1:].flatten().cpu()]
    group = (count.double().log() / math.log(FREQUENCY_STEP) + 1e-9).floor().long()
    present = group.unique()

    def mean(values: Tensor) -> Tensor:
        return torch.stack([values[group == which].mean() for which in present])

    return TemperatureSplit(
        least=FREQUENCY_STEP**present,
        n_tokens=torch.stack([(group == which).sum() for which in present]),
        embedding=mean(start) - encode,
        encode=encode,
        travel=mean(end - start),
        total=mean(end),
        in_logits=model.readout.config.uses_log_norm,
    )
