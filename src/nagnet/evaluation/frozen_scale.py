"""Take the confidence out of a model: one scale exp(s) for every token instead of each token's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.nn.residual import NormAgnosticState


def check_scale_is_used(model: Decoder) -> None:
    """Raises a UserError for a model whose logits do not depend on the log norm s."""
    config = model.config
    if not config.readout.uses_log_norm:
        raise UserError(
            f"--freeze-scale: the readout of this {config.residual} model has scale {config.readout.scale!r}, so no "
            "token has a scale of its own; leave the option out"
        )


def final_log_norm(model: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from tokens and targets [B, T] to s_N [B, T], of the form that `evaluate_documents` calls."""

    def log_norm(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.trunk(tokens).split()[1]

    return log_norm


@contextmanager
def frozen_scale(model: Decoder, log_norm: float) -> Iterator[None]:
    """Gives every token the same log norm at the readout while the context lasts; the stream runs as before.

    Args:
        log_norm: for all tokens, such as the mean of s_N over a corpus.

    Raises:
        UserError: for a model whose readout does not use the log norm.
    """
    check_scale_is_used(model)
    trunk = model.trunk

    def with_one_scale(*args: Any, **kwargs: Any) -> NormAgnosticState:
        direction, own = trunk(*args, **kwargs).split()
        return NormAgnosticState(direction, torch.full_like(own, log_norm))

    model.trunk = with_one_scale
    try:
        yield
    finally:
        del model.trunk
