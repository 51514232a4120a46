"""Residual rules: how a sublayer reads the stream and how its output changes it.

A rule is an object, never an ``if`` in the model. An *update* belongs to one sublayer and offers

    reading = update.read(state)             what the sublayer sees, [..., d]
    gain    = update.gain(state)             size of the coming change, known before the sublayer runs, or None
    state   = update.write(state, branch, gain)
    state, reading, gain = update.advance(state, branch, gain, following)

where ``advance`` is ``write`` followed by the next update's ``read`` and ``gain``: the one method a fused kernel
replaces. A *stream* owns the updates of one model.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.errors import UserError
from nagnet.nn.modulator import Modulator
from nagnet.nn.precision import Float32Module
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


class NormAgnosticState(NamedTuple):
    """State of the norm-agnostic rule: ``direction`` R [..., d] with RMS 1, ``log_norm`` s [...] in float32."""

    direction: Tensor
    log_norm: Tensor

    def merge(self) -> Tensor:
        """The residual stream as one vector ``exp(s) R`` [..., d]."""
        return reference.merge(self.direction, self.log_norm)

    def split(self) -> tuple[Tensor, Tensor]:
        """Direction [..., d] and log norm [...], as they are."""
        return self.direction, self.log_norm


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
        """Draws the initial parameters; these rules have none."""

    def begin(self, x: Float[Tensor, "*batch d"]) -> Any:
        """Starts a stream from a vector [..., d]; ``begin(x).merge()`` is x."""
        return VectorState(x)

    def read(self, state: Any) -> Tensor:
        """What the sublayer sees, [..., d]."""
        return state.stream

    def gain(self, state: Any) -> Tensor | None:
        """Size of the coming change [...], or None for a rule that does not fix it beforehand."""
        return None

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


class NoResidual(ResidualUpdate):
    """No skip connection: ``x' = F(N(x))``, N the RMS norm. What depth does to a plain stack."""

    def read(self, state: VectorState) -> Tensor:
        return reference.rms_norm(state.stream)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return VectorState(branch.to(state.stream.dtype))


class PostNormResidual(ResidualUpdate):
    """``x' = N(x + F(x))``, N the RMS norm (Vaswani et al. 2017, without the affine part)."""

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return VectorState(reference.rms_norm(state.stream + branch.to(state.stream.dtype)))


class PreNormResidual(ResidualUpdate):
    """``x' = x + F(N(x))``, N the RMS norm: the rule of the baseline."""

    def read(self, state: VectorState) -> Tensor:
        return reference.rms_norm(state.stream)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return VectorState(state.stream + branch.to(state.stream.dtype))

    def advance(
        self, state: VectorState, branch: Tensor, gain: Tensor | None, following: ResidualUpdate | None
    ) -> tuple[VectorState, Tensor | None, Tensor | None]:
        """Adds the branch and norms the sum for the following update in one pass."""
        if not isinstance(following, PreNormResidual):
            return super().advance(state, branch, gain, following)
        stream, reading = ops.add_norm(state.stream, branch)
        return VectorState(stream), reading, None


class NormAgnosticResidual(ResidualUpdate):
    """One gated rotation of the stream's direction per sublayer (arXiv 2606.16112, equations 10-17).

    ``R' = (R + alpha m n) / g`` and ``s' = s + 0.5 log(1 + (alpha m)^2 q)``, where n is the sublayer's output,
    centred, made orthogonal to R and normalised. Parameters stay float32 through ``.to(bfloat16)``.

    Args:
        d_model: width d of the stream.
        update_index: l, 1-based position of the sublayer; alpha starts at ``l ** -init_exponent``.
        n_directions: C, directions in the modulator.
        branch_eps: added to the branch's mean square before its inverse root.
        init_exponent: p of the alpha schedule (equations 23-24).
        modulation_floor: smallest modulation before its power beta (docs/mathematics.md).
    """

    def __init__(
        self,
        d_model: int,
        update_index: int,
        n_directions: int = 32,
        branch_eps: float = reference.BRANCH_EPS,
        init_exponent: float = 0.5,
        modulation_floor: float = reference.MODULATION_FLOOR,
    ):
        super().__init__(d_model, update_index)
        if n_directions < 1 or branch_eps < 0:
            raise UserError(f"n_directions={n_directions} must be 1 or more, branch_eps={branch_eps} 0 or more")
        if not 0.0 <= modulation_floor < 1.0:
            raise UserError(f"modulation_floor={modulation_floor} must be 0 or more, below 1")
        self.branch_eps = branch_eps
        self.init_exponent = init_exponent
        self.modulator = Modulator(d_model, n_directions, modulation_floor)
        self.alpha = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.injection: Tensor
        self.register_buffer("injection", torch.ones((), dtype=torch.float32))
        self._reset_alpha()

    @torch.no_grad()
    def _reset_alpha(self) -> None:
        self.alpha.fill_(self.update_index**-self.init_exponent)
        self.injection.fill_(1.0)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """alpha = l^-p, injection 1; the modulator as its own ``reset_parameters`` says."""
        self._reset_alpha()
        self.modulator.reset_parameters(generator)

    def begin(self, x: Float[Tensor, "*batch d"]) -> NormAgnosticState:
        """Splits a vector [..., d] of any scale into direction and log norm (equations 3-5).

        Raises:
            UserError: if ``x`` is not a floating tensor of width d.
        """
        if not x.is_floating_point() or x.shape[-1:] != (self.d_model,):
            raise UserError(f"a stream begins with floats [..., {self.d_model}], not {x.dtype} {tuple(x.shape)}")
        return NormAgnosticState(*reference.split(x))

    def read(self, state: NormAgnosticState) -> Tensor:
        """The direction R [..., d]: a sublayer never sees the norm."""
        return state.direction

    def gain(self, state: NormAgnosticState) -> Float[Tensor, "*batch"]:
        """``alpha m`` times the injection scale [...], float32 or wider: the tangent of the coming rotation."""
        return self.modulator.scaled(state.direction, self.alpha * self.injection)

    def write(self, state: NormAgnosticState, branch: Tensor, gain: Tensor | None = None) -> NormAgnosticState:
        """Rotates the direction toward ``branch`` [..., d] by arctan(gain) and lets the norm lane grow.

        Args:
            gain: [...] as `gain` returned it; None computes it from ``state``.

        Raises:
            UserError: if ``branch`` has another shape than the direction.
        """
        if branch.shape != state.direction.shape:
            raise UserError(
                f"branch {tuple(branch.shape)} must have the shape {tuple(state.direction.shape)} of the stream"
            )
        if gain is None:
            gain = self.gain(state)
        return NormAgnosticState(*ops.rotate(state.direction, state.log_norm, branch, gain, self.branch_eps))


class ResidualStream(Float32Module):
    """The residual stream of one model: N updates of one rule, and how an embedding enters.

    Args:
        d_model: width d.
        n_updates: N, one per sublayer.
        options: passed to every update of the rule.
    """

    updates: Any  # nn.ModuleList of ResidualUpdate
    update_class: ClassVar[type[ResidualUpdate]]
    option_names: ClassVar[tuple[str, ...]] = ()  # fields of a model config that the updates take
    zero_init_projections: ClassVar[bool] = True  # whether a branch may start at zero and still train

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

    def set_injection(self, scale: float) -> None:
        """Multiplies every gain by ``scale`` from now on; without effect for rules that have no gain."""
        set_injection(self, scale)

    def constrain_(self, embedding_weight: Tensor) -> None:
        """Brings parameters back to where the rule wants them, after an optimizer step; here there are none."""


class NoResidualStream(ResidualStream):
    update_class = NoResidual
    zero_init_projections = False


class PostNormStream(ResidualStream):
    update_class = PostNormResidual


class PreNormStream(ResidualStream):
    update_class = PreNormResidual


class NormAgnosticStream(ResidualStream):
    """The norm-agnostic stream: embeddings are split, and one learned scale G_encode enters the norm lane.

    Args:
        encode_gain: initial G_encode, or None for none (for a readout that does not use the norm lane).
    """

    update_class = NormAgnosticResidual
    option_names = ("n_directions", "branch_eps", "init_exponent", "modulation_floor")

    def __init__(self, d_model: int, n_updates: int, encode_gain: float | None = 1.0, **options: Any):
        super().__init__(d_model, n_updates, **options)
        self.encode_gain = encode_gain
        self.log_encode_gain = None if encode_gain is None else nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Puts G_encode to its initial value."""
        if self.log_encode_gain is not None and self.encode_gain is not None:
            self.log_encode_gain.fill_(math.log(self.encode_gain))

    def begin(self, embedding: Float[Tensor, "*batch d"]) -> NormAgnosticState:
        """Splits token embeddings [..., d]; ``s_0 = log rho + log G_encode``."""
        state = self.updates[0].begin(embedding)
        if self.log_encode_gain is None:
            return state
        return state._replace(log_norm=state.log_norm + self.log_encode_gain.to(state.log_norm.dtype))

    def constrain_(self, embedding_weight: Tensor) -> None:
        """Centres the embedding rows: with zero-mean rows every later direction has zero mean."""
        centre_rows_(embedding_weight)


RESIDUAL_STREAMS: dict[str, type[ResidualStream]] = {
    "norm_agnostic": NormAgnosticStream,
    "pre_norm": PreNormStream,
    "post_norm": PostNormStream,
    "none": NoResidualStream,
}


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
        if isinstance(module, NormAgnosticResidual):
            module.injection.fill_(scale)


@torch.no_grad()
def centre_rows_(weight: Tensor) -> Tensor:
    """Subtracts each row's mean from ``weight`` [V, d] in place, in float32 or wider."""
    wide = weight.to(reference.compute_dtype(weight))
    return weight.copy_(wide - wide.mean(dim=-1, keepdim=True))
