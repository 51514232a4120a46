"""What every residual rule has in common: the state of one vector, the update of a sublayer, the stream of a model.

A rule is an object, never an ``if`` in the model. An *update* belongs to one sublayer and offers

    reading = update.read(state)             what the sublayer sees, [..., d]
    gain    = update.gain(state)             size of the coming change, known before the sublayer runs, or None
    state   = update.write(state, branch, gain)
    state, reading, gain = update.advance(state, branch, gain, following)

where ``advance`` is ``write`` followed by the next update's ``read`` and ``gain``: the one method a fused kernel
replaces. A *stream* owns the updates of one model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.nn.precision import Float32Module
from nagnet.nn.readout import SOFTCAP_READOUT, ReadoutConfig
from nagnet.ops import reference
from nagnet.typing import Float


class VectorState(NamedTuple):
    """State of the rules that keep one vector per token: ``stream`` [..., d]."""

    stream: Tensor

    def merge(self) -> Tensor:
        """The residual stream as one vector [..., d]."""
        return self.stream

    def split(self) -> tuple[Tensor, Tensor]:
        """Direction [..., d] (RMS 1, the final norm of a pre-norm model) and log norm [...] (log of the RMS)."""
        return reference.split(self.stream)


class ResidualUpdate(Float32Module):
    """Base of the rules: the stream is a vector and a sublayer reads it as it is.

    Args:
        d_model: width d of the stream.
        update_index: l, 1-based position of the sublayer; attention and MLP each count.

    Raises:
        UserError: if ``d_model`` or ``update_index`` is below 1.
    """

    def __init__(self, d_model: int, update_index: int):
        super().__init__()
        if d_model < 1:
            raise UserError(f"d_model is {d_model}; give the width of the stream, 1 or more")
        if update_index < 1:
            raise UserError(f"update_index is {update_index}; count sublayers from 1")
        self.d_model = d_model
        self.update_index = update_index

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the initial parameters; rules without any have nothing to do."""

    def set_injection(self, scale: float) -> None:
        """Multiplies the gain by ``scale`` from now on; without effect for a rule that has no gain."""

    def begin(self, x: Float[Tensor, "*batch d"]) -> Any:
        """Starts a stream from a vector [..., d]; ``begin(x).merge()`` is x."""
        return VectorState(x)

    def read(self, state: Any) -> Tensor:
        """What the sublayer sees, [..., d]."""
        return state.stream

    def gain(self, state: Any) -> Tensor | None:
        """Size of the coming change [...], or None for a rule that does not fix it beforehand."""
        return None

    def rotation_score(self, gain: Tensor | None) -> Tensor:
        """Share of the largest change that a token will make, from 0 to 1, by which it may skip the sublayer.

        Raises:
            UserError: for a rule that does not fix the size of a change beforehand.
        """
        raise UserError(
            f"{type(self).__name__} has no gain by which a token could skip a sublayer; skip with norm_agnostic"
        )

    def write(self, state: Any, branch: Tensor, gain: Tensor | None = None) -> Any:
        """The stream after the sublayer's output ``branch`` [..., d]. Each rule defines it."""
        raise TypeError(f"{type(self).__name__} does not define write")

    def advance(
        self, state: Any, branch: Tensor, gain: Tensor | None, following: ResidualUpdate | None
    ) -> tuple[Any, Tensor | None, Tensor | None]:
        """Writes this branch, then reads for the following update.

        Returns:
            The new state, and the following update's reading [..., d] and gain [...]; both None at the end.
        """
        state = self.write(state, branch, gain)
        if following is None:
            return state, None, None
        return state, following.read(state), following.gain(state)


class ResidualStream(Float32Module):
    """The residual stream of one model: N updates of one rule, and how an embedding enters.

    Args:
        d_model: width d.
        n_updates: N, one per sublayer.
        options: passed to every update of the rule.

    Attributes:
        update_class: of the updates. option_names: fields of a model config that they take.
        readout: what a model of this rule has by default.
        channel_scales: whether its sublayers learn a scale per channel by default.
        zero_init_projections: whether a branch may start at zero and still train.
        has_norm_lane: whether the norm of the stream can differ between tokens, so that exp(s) says something.
        can_skip: whether the size of a change is known beforehand, so that tokens can skip sublayers by it.
    """

    updates: Any  # nn.ModuleList of ResidualUpdate
    update_class: ClassVar[type[ResidualUpdate]]
    option_names: ClassVar[tuple[str, ...]] = ()
    readout: ClassVar[ReadoutConfig] = SOFTCAP_READOUT
    channel_scales: ClassVar[bool] = False
    zero_init_projections: ClassVar[bool] = True
    has_norm_lane: ClassVar[bool] = True
    can_skip: ClassVar[bool] = False

    def __init__(self, d_model: int, n_updates: int, **options: Any):
        super().__init__()
        self.updates = nn.ModuleList(
            self.update_class(d_model, update_index=index, **options) for index in range(1, n_updates + 1)
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Puts the stream's own parameters, beside those of its updates, to their initial values; here none."""

    def begin(self, embedding: Float[Tensor, "*batch d"]) -> Any:
        """Starts the stream from token embeddings [..., d], brought to RMS 1 first."""
        return self.updates[0].begin(reference.rms_norm(embedding))

    def enter(self, embedding: Float[Tensor, "*batch d"]) -> tuple[Any, Tensor, Tensor | None]:
        """``begin`` followed by the first update's ``read`` and ``gain``.

        Returns:
            The state, the first sublayer's reading [..., d], and its gain [...] or None.
        """
        state, first = self.begin(embedding), self.updates[0]
        return state, first.read(state), first.gain(state)

    def set_injection(self, scale: float) -> None:
        """Multiplies every gain by ``scale`` from now on; without effect for rules that have no gain."""
        set_injection(self, scale)

    def constrain_(self, embedding_weight: Tensor, sublayers: Iterable[nn.Module] = ()) -> None:
        """Brings parameters back to where the rule wants them, after an optimizer step; here they may be anywhere.

        Args:
            embedding_weight: the token table [V, d].
            sublayers: attention and MLP modules, whose matrices read the stream, but for ``out_proj``, which writes.
        """


def set_injection(model: nn.Module, scale: float) -> None:
    """Multiplies the gain of every norm-agnostic update inside ``model`` by ``scale`` (injection warm-up).

    Args:
        scale: 0 (the stream stays as embedded) to 1 (the trained gains); rises over the first steps of training.

    Raises:
        UserError: if ``scale`` is not within [0, 1].
    """
    if not 0.0 <= scale <= 1.0:
        raise UserError(f"injection scale is {scale}; give a number from 0 to 1")
    for module in model.modules():
        if isinstance(module, ResidualUpdate):
            module.set_injection(scale)
