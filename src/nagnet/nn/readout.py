"""The readout: from the end of the stream to logits, independent of the residual rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.errors import UserError
from nagnet.nn.precision import Float32Module
from nagnet.nn.scale import LearnedScale
from nagnet.ops import loss, reference
from nagnet.typing import Float, Int


@dataclass(frozen=True)
class ReadoutConfig:
    """How logits are formed from direction R [..., d] and log norm s [...]; every combination works with every rule.

    Attributes:
        rows: ``unit`` keeps the rows of the weight at zero mean and RMS 1, so that logits are cosines in [-1, 1]
            before scaling; ``free`` leaves them alone.
        scale: ``log_norm`` multiplies logits by exp(s) of each token (equation 18), ``learned`` by one trained
            number, ``learned_log_norm`` by both (for a stream without a G_encode of its own), ``per_entry`` by a
            trained number for each entry of the vocabulary, ``none`` by 1.
        softcap: c of ``c tanh(logit / c)``, or None.
        init_scale: where trained numbers start.
    """

    rows: Literal["free", "unit"] = "unit"
    scale: Literal["log_norm", "learned", "learned_log_norm", "per_entry", "none"] = "log_norm"
    softcap: float | None = None
    init_scale: float = 1.0

    def __post_init__(self):
        if self.rows not in ("free", "unit"):
            raise UserError(f"readout rows {self.rows!r}: choose free or unit")
        if self.scale not in SCALES:
            raise UserError(f"readout scale {self.scale!r}: choose {', '.join(SCALES[:-1])} or {SCALES[-1]}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UserError(f"readout softcap {self.softcap}: give a positive number or none")
        if not 0 < self.init_scale < math.inf:
            raise UserError(f"readout init_scale {self.init_scale}: give a positive number")

    @property
    def uses_log_norm(self) -> bool:
        """Whether each token's exp(s) reaches its logits."""
        return self.scale in ("log_norm", "learned_log_norm")

    @property
    def learns_scale(self) -> bool:
        """Whether a part of the scale is trained here, from ``init_scale``."""
        return self.scale in ("learned", "learned_log_norm", "per_entry")


SCALES = ("log_norm", "learned", "learned_log_norm", "per_entry", "none")
CONFIDENCE_READOUT = ReadoutConfig(rows="unit", scale="log_norm")
SOFTCAP_READOUT = ReadoutConfig(rows="free", scale="none", softcap=15.0)
ENTRY_SCALE_READOUT = ReadoutConfig(rows="unit", scale="per_entry")


class Readout(Float32Module):
    """Logits ``scale x <R, U_v>`` (rows free) or ``scale x cos(R, U_v)`` (rows of RMS 1), in float32.

    The stream's direction has RMS 1 already; nothing here normalises it or the norm lane, since a norm before the
    head would erase the confidence exp(s). The forward pass normalises no weights either: `constrain_` does, after
    every optimizer step. The product runs in float32 under autocast too: a bfloat16 cosine loses three digits.

    Args:
        d_model: width d. vocab_size: V.
        config: which readout.
        weight: a parameter [V, d] to share (tied embeddings); by default a new one.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        config: ReadoutConfig = CONFIDENCE_READOUT,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        self.config = config
        if weight is None:
            weight = nn.Parameter(torch.empty(vocab_size, d_model, dtype=torch.float32))
            nn.init.normal_(weight, std=0.02)
        self.weight = weight
        learned, per_entry = config.scale in ("learned", "learned_log_norm"), config.scale == "per_entry"
        self.log_scale = nn.Parameter(torch.empty((), dtype=torch.float32)) if learned else None
        self.entry_scale = LearnedScale(vocab_size, config.init_scale, d_model**-0.5) if per_entry else None
        self.reset_scale()
        self.constrain_()

    @torch.no_grad()
    def reset_scale(self) -> None:
        """Puts what is learned of the scale to its initial value."""
        if self.log_scale is not None:
            self.log_scale.fill_(math.log(self.config.init_scale))
        if self.entry_scale is not None:
            self.entry_scale.reset_parameters()

    def forward(
        self, direction: Float[Tensor, "*batch d"], log_norm: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch v"]:
        """Returns logits [..., V], float32 or wider."""
        hidden = self.scaled(direction, log_norm)
        with reference.without_autocast(direction.device.type):
            logits = ops.project(hidden, self.weight.to(hidden.dtype))
        if self.entry_scale is not None:  # on V logits and not on V x d rows
            logits = logits * self.entry_scale().to(logits.dtype)
        return loss.capped(logits, self.config.softcap)

    def scaled(
        self, direction: Float[Tensor, "*batch d"], log_norm: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch d"]:
        """The direction times every scale of its own: its product with the rows is the logits before a softcap.

        Returns:
            [..., d], float32 or wider.
        """
        dtype = reference.compute_dtype(direction, self.weight)
        scaled = direction.to(dtype)
        if self.config.uses_log_norm:
            scaled = scaled * torch.exp(log_norm.to(dtype)).unsqueeze(-1)
        if self.log_scale is not None:
            scaled = scaled * torch.exp(self.log_scale.to(dtype))
        return scaled / direction.shape[-1] if self.config.rows == "unit" else scaled

    def _rows(self, dtype: torch.dtype) -> Tensor:
        """The rows [V, d] times every scale of theirs."""
        rows = self.weight.to(dtype)
        return rows if self.entry_scale is None else rows * self.entry_scale().to(dtype).unsqueeze(-1)

    def summed_loss(
        self, direction: Float[Tensor, "*batch d"], log_norm: Float[Tensor, "*batch"], targets: Int[Tensor, "*batch"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "*batch"]]:
        """Cross entropy without ever holding all logits.

        Args:
            targets: [...] integers, -100 where ignored.

        Returns:
            Sum over the targets in nats, and each target's loss [...] without gradient (0 where ignored).
        """
        total, losses = self._by_chunks(loss.summed_cross_entropy, direction, log_norm, targets)
        return total, losses.view(targets.shape)

    def score(
        self, direction: Float[Tensor, "*batch d"], log_norm: Float[Tensor, "*batch"], targets: Int[Tensor, "*batch"]
    ) -> tuple[Float[Tensor, "*batch"], Tensor]:
        """Loss of each target in nats (0 where ignored) and whether it is the likeliest token; no gradients."""
        losses, correct = self._by_chunks(loss.score_targets, direction, log_norm, targets)
        return losses.view(targets.shape), correct.view(targets.shape)

    def _by_chunks(self, function: Callable, direction: Tensor, log_norm: Tensor, targets: Tensor) -> Any:
        hidden = self.scaled(direction, log_norm)
        with reference.without_autocast(direction.device.type):
            return function(hidden.flatten(0, -2), self._rows(hidden.dtype), targets.flatten(), self.config.softcap)

    @torch.no_grad()
    def constrain_(self) -> None:
        """Brings unit rows to zero mean and RMS 1, in place; leaves free rows alone. Constant rows become zero."""
        if self.config.rows != "unit":
            return
        wide = self.weight.to(reference.compute_dtype(self.weight))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        norm = centred.norm(dim=-1, keepdim=True)
        constant = norm <= 1e-6 * wide.norm(dim=-1, keepdim=True)  # what is left of it is rounding error
        self.weight.copy_(torch.where(constant, 0.0, centred * (math.sqrt(wide.shape[-1]) / norm)))
