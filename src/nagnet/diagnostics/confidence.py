"""Does the norm of the stream say how sure the model is? Confidence per token, in deciles, and as a ranking.

A norm-agnostic model multiplies its logits by exp(s_N), so exp(s_N) is its own inverse temperature. A pre-norm
model normalises the stream before its head: there exp(s_N) is the RMS of the stream before the final norm, which
the logits never see. It is measured the same way, as the control.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nagnet.diagnostics.prediction import read_confidence
from nagnet.diagnostics.probe import measuring
from nagnet.errors import UserError
from nagnet.evaluation.statistics import area_under_roc, spearman
from nagnet.ops.loss import IGNORED_TARGET

N_DECILES = 10


@dataclass(frozen=True)
class Predictions:
    """What a model predicted for each scored token; float64 [n] but where said.

    Attributes:
        scale: exp(s_N). entropy: nats. max_probability: of the likeliest token.
        loss: of the token that came, nats. correct: bool [n], whether the likeliest token came.
        row: int64 [n], the sequence that each token belongs to, from 0: tokens of one are not independent.
        scale_in_logits: whether the model multiplies its logits by exp(s_N); if not, exp(s_N) is a control.
    """

    scale: np.ndarray
    entropy: np.ndarray
    max_probability: np.ndarray
    loss: np.ndarray
    correct: np.ndarray
    row: np.ndarray
    scale_in_logits: bool

    @property
    def signals(self) -> dict[str, np.ndarray]:
        """Signs of a right answer, larger meaning surer: ``scale``, ``negative_entropy``, ``max_probability``."""
        return {
            "scale": self.scale,
            "negative_entropy": -self.entropy,
            "max_probability": self.max_probability,
        }


@dataclass(frozen=True)
class ConfidenceDeciles:
    """Means over ten groups of tokens, least confident first; float64 [10], NaN for a group without tokens.

    Attributes:
        entropy: nats. loss: next-token loss, nats. accuracy: share of top-1 hits, 0 to 1.
        n_tokens: int64 [10], equal but for the remainder.
    """

    entropy: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray
    n_tokens: np.ndarray


@dataclass(frozen=True)
class SignalQuality:
    """How well one signal ranks tokens.

    Attributes:
        deciles: of the tokens sorted by the signal.
        auroc: area under ROC against top-1 correctness: 0.5 is chance, 1 perfect; NaN where every token is right
            or every token wrong.
        spearman_loss: rank correlation with the next-token loss, negative for a good signal; NaN where the signal
            is constant.
    """

    deciles: ConfidenceDeciles
    auroc: float
    spearman_loss: float


@dataclass(frozen=True)
class ConfidenceSummary:
    """Both confidence signals of one model on the same tokens.

    Attributes:
        scale: sorted by exp(s_N); for a pre-norm model the RMS of the stream before the final norm.
        negative_entropy: sorted by minus the entropy of the prediction.
        spearman_scale_entropy: rank correlation of exp(s_N) with the entropy.
        n_tokens: tokens scored.
        scale_in_logits: whether the model multiplies its logits by exp(s_N); if not, exp(s_N) is a control.
    """

    scale: SignalQuality
    negative_entropy: SignalQuality
    spearman_scale_entropy: float
    n_tokens: int
    scale_in_logits: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN; `from_dict` takes them back."""
        return _without_nan(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConfidenceSummary:
        """The summary that `to_dict` was made of."""

        def quality(stored: Mapping[str, Any]) -> SignalQuality:
            of = stored["deciles"]
            means = {name: np.array(of[name], dtype=np.float64) for name in ("entropy", "loss", "accuracy")}
            deciles = ConfidenceDeciles(**means, n_tokens=np.array(of["n_tokens"]))
            return SignalQuality(deciles, _or_nan(stored["auroc"]), _or_nan(stored["spearman_loss"]))

        return cls(
            scale=quality(values["scale"]),
            negative_entropy=quality(values["negative_entropy"]),
            spearman_scale_entropy=_or_nan(values["spearman_scale_entropy"]),
            n_tokens=values["n_tokens"],
            scale_in_logits=values["scale_in_logits"],
        )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return [_without_nan(part) for part in value.tolist()]
    return None if isinstance(value, float) and math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def confidence_deciles(signal: ArrayLike, entropy: ArrayLike, loss: ArrayLike, correct: ArrayLike) -> ConfidenceDeciles:
    """Sorts tokens by ``signal`` into ten groups of equal count and averages what came of them.

    Args:
        signal: [n], larger means surer. Equal values keep their order, so an all-equal signal gives consecutive
            groups.
        entropy: [n], nats. loss: [n], nats. correct: [n], true where the likeliest token was right.

    Returns:
        Means by decile.

    Raises:
        UserError: if the lengths differ or are 0, or the signal holds a NaN, which has no rank.
    """
    values = [np.asarray(part, dtype=np.float64).ravel() for part in (signal, entropy, loss, correct)]
    keys = values[0]
    if len({len(part) for part in values}) > 1 or len(keys) == 0:
        raise UserError(f"deciles need lists of one length above 0, not {[len(part) for part in values]}")
    if np.isnan(keys).any():
        raise UserError("the confidence signal holds NaN, so its tokens have no order; has the model diverged?")
    groups = np.array_split(np.argsort(keys, kind="stable"), N_DECILES)
    means = [np.array([part[group].mean() if len(group) else np.nan for group in groups]) for part in values[1:]]
    return ConfidenceDeciles(*means, n_tokens=np.array([len(group) for group in groups]))


def collect_predictions(model: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Predictions:
    """Predicts every token of all batches. Keeps six numbers per token; logits of a few hundred tokens exist at a time.

    Args:
        model: a `nagnet.Decoder`.
        batches: pairs of tokens and targets [B, T]; targets of -100 are left out.

    Raises:
        UserError: if no target is left.
    """
    parts: list[Tensor] = []
    n_rows = 0
    for tokens, targets in batches:
        with measuring(model):
            direction, log_norm = model.trunk(tokens).split()
            targets = targets.to(direction.device)
            predicted = read_confidence(model.readout, direction, log_norm)
            loss, correct = model.readout.score(direction, log_norm, targets)
        kept = targets != IGNORED_TARGET
        row = torch.arange(n_rows, n_rows + len(targets), device=targets.device).unsqueeze(1).expand_as(targets)
        n_rows += len(targets)
        columns = (predicted.scale, predicted.entropy, predicted.max_probability, loss, correct, row)
        parts.append(torch.stack([column[kept].double().cpu() for column in columns]))
    if not sum(part.shape[1] for part in parts):
        raise UserError("no token to score: there are no batches, or all their targets are -100")
    scale, entropy, max_probability, losses, hits, rows = torch.cat(parts, dim=1).numpy()
    in_logits = model.readout.config.uses_log_norm
    return Predictions(scale, entropy, max_probability, losses, hits.astype(bool), rows.astype(np.int64), in_logits)


def collect_confidence(model: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> ConfidenceSummary:
    """Compares exp(s_N) and minus the entropy as signs of a right answer; arguments as `collect_predictions`.

    Raises:
        UserError: if no target is left, or the model's outputs are NaN.
    """
    return summarize_confidence(collect_predictions(model, batches))


def summarize_confidence(predictions: Predictions) -> ConfidenceSummary:
    """Deciles and ranking quality of exp(s_N) and of minus the entropy.

    Raises:
        UserError: if a signal is NaN.
    """
    scale, entropy = predictions.scale, predictions.entropy
    loss, correct = predictions.loss, predictions.correct

    def quality(signal: np.ndarray) -> SignalQuality:
        deciles = confidence_deciles(signal, entropy, loss, correct)
        return SignalQuality(deciles, area_under_roc(signal, correct), spearman(signal, loss))

    return ConfidenceSummary(
        scale=quality(scale),
        negative_entropy=quality(-entropy),
        spearman_scale_entropy=spearman(scale, entropy),
        n_tokens=len(scale),
        scale_in_logits=predictions.scale_in_logits,
    )
