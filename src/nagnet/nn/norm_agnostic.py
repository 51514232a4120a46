"""The norm-agnostic residual rule (arXiv 2606.16112), whole or without one of its components."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.errors import UserError
from nagnet.nn.modulator import MODULATOR_TENSORS, Modulator
from nagnet.nn.readout import CONFIDENCE_READOUT
from nagnet.nn.skip import rotation_score
from nagnet.nn.stream import ResidualStream, ResidualUpdate
from nagnet.ops import ablation, reference
from nagnet.typing import Float

COMPONENTS = {
    "output_norm": "n is the branch as it is, not brought to RMS 1",
    "orthogonal": "the branch keeps its part along the stream",
    "modulator": "m = 1/2 for every token",
    "centring": "neither branches nor embedding rows are centred",
    "beta": "the power beta of the modulation stays 1",
}


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


class NormAgnosticResidual(ResidualUpdate):
    """One gated rotation of the stream's direction per sublayer (arXiv 2606.16112, equations 10-17).

    ``R' = (R + alpha m n) / g`` and ``s' = s + 0.5 log(1 + (alpha m)^2 q)``, where n is the sublayer's output,
    centred, made orthogonal to R and normalised. Parameters stay float32 through ``.to(bfloat16)``.

    Args:
        d_model: width d of the stream.
        update_index: l, 1-based position of the sublayer; alpha starts at ``l ** -init_exponent``.
        n_directions: C, directions in the modulator.
        branch_eps: added to the branch's mean square before its inverse root. Near 0 every write has full size; at 1
            a write grows with its branch, which helps what Muon trains from projections of zero (docs/findings.md).
        init_exponent: p of the alpha schedule (equations 23-24).
        modulation_floor: smallest modulation before its power beta (docs/mathematics.md).
        without: names of ``COMPONENTS`` to leave out, for ablations. What a component would have learned is then a
            buffer: a parameter without effect does not exist.
        skip_vector: whether a learned vector X [d], zero at the start, is added to every branch. A token that skips the
            sublayer has a branch of zero, so it turns toward X (`nagnet.nn.skip`).
    """

    def __init__(
        self,
        d_model: int,
        update_index: int,
        n_directions: int = 32,
        branch_eps: float = reference.BRANCH_EPS,
        init_exponent: float = 0.5,
        modulation_floor: float = reference.MODULATION_FLOOR,
        without: Collection[str] = (),
        skip_vector: bool = False,
    ):
        super().__init__(d_model, update_index)
        if n_directions < 1 or branch_eps < 0:
            raise UserError(f"n_directions={n_directions} must be 1 or more, branch_eps={branch_eps} 0 or more")
        if not 0.0 <= modulation_floor < 1.0:
            raise UserError(f"modulation_floor={modulation_floor} must be 0 or more, below 1")
        check_components(without)
        self.branch_eps = branch_eps
        self.init_exponent = init_exponent
        kept = ablation.Kept(**{part: part not in without for part in ablation.Kept._fields})
        self.kept = None if all(kept) else kept
        if "modulator" in without:
            self.modulator = Modulator(d_model, 1, modulation_floor, fixed=MODULATOR_TENSORS)
        else:
            fixed = ("raw_beta",) if "beta" in without else ()
            self.modulator = Modulator(d_model, n_directions, modulation_floor, fixed)
        self.alpha = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.injection: Tensor
        self.register_buffer("injection", torch.ones((), dtype=torch.float32))
        self.skip_vector = nn.Parameter(torch.empty(d_model, dtype=torch.float32)) if skip_vector else None
        self._reset_own()

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.alpha.fill_(self.update_index**-self.init_exponent)
        self.injection.fill_(1.0)
        if self.skip_vector is not None:
            self.skip_vector.zero_()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """alpha = l^-p, injection 1, X = 0; the modulator as its own ``reset_parameters`` says."""
        self._reset_own()
        self.modulator.reset_parameters(generator)

    def set_injection(self, scale: float) -> None:
        """Multiplies the gain by ``scale`` from now on."""
        self.injection.fill_(scale)

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

    def rotation_score(self, gain: Tensor | None) -> Float[Tensor, "*batch"]:
        """Share r of the largest rotation that a token will make, ``arctan |gain| / arctan |alpha|`` in [0, 1].

        Args:
            gain: [...] as `gain` returned it.

        Returns:
            r [...] in the type of ``gain``; where alpha goes to 0 it goes to m (`nagnet.nn.skip.rotation_score`).
        """
        assert gain is not None
        return rotation_score(gain, self.alpha * self.injection)

    def write(self, state: NormAgnosticState, branch: Tensor, gain: Tensor | None = None) -> NormAgnosticState:
        """Rotates the direction toward ``branch`` [..., d] by arctan(gain) and lets the norm lane grow.

        Args:
            gain: [...] as `gain` returned it; None computes it from ``state``.

        Raises:
            UserError: if ``branch`` has another shape than the direction.
        """
        branch, gain = self._ready(state, branch, gain)
        if self.kept is None:
            return NormAgnosticState(*ops.rotate(*state, branch, gain, self.branch_eps))
        return NormAgnosticState(*ablation.rotate(*state, branch, gain, self.branch_eps, self.kept))

    def _ready(self, state: NormAgnosticState, branch: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
        """The branch with X added, and the gain."""
        if branch.shape != state.direction.shape:
            raise UserError(
                f"branch {tuple(branch.shape)} must have the shape {tuple(state.direction.shape)} of the stream"
            )
        if gain is None:
            gain = self.gain(state)
        if self.skip_vector is not None:
            branch = branch + self.skip_vector.to(branch.dtype)
        return branch, gain

    def advance(
        self, state: NormAgnosticState, branch: Tensor, gain: Tensor | None, following: ResidualUpdate | None
    ) -> tuple[NormAgnosticState, Tensor | None, Tensor | None]:
        """Rotates, and forms the following update's gain in the same pass over the new direction."""
        if self.kept is not None or not isinstance(following, NormAgnosticResidual):
            return super().advance(state, branch, gain, following)
        branch, gain = self._ready(state, branch, gain)
        modulator = following.modulator
        parameters = (*modulator.parameters_in_order(), following.alpha * following.injection)
        *new, next_gain = ops.advance(*state, branch, gain, parameters, self.branch_eps, modulator.floor)
        state = NormAgnosticState(*new)
        return state, following.read(state), next_gain


class NormAgnosticStream(ResidualStream):
    """The norm-agnostic stream: embeddings are split, and one learned scale G_encode enters the norm lane.

    Args:
        encode_gain: initial G_encode, or None for none (for a readout that does not use the norm lane).
        without: names of ``COMPONENTS`` to leave out.
    """

    update_class = NormAgnosticResidual
    option_names = ("n_directions", "branch_eps", "init_exponent", "modulation_floor", "without", "skip_vector")
    readout = CONFIDENCE_READOUT
    can_skip = True

    def __init__(
        self,
        d_model: int,
        n_updates: int,
        encode_gain: float | None = 1.0,
        without: Collection[str] = (),
        **options: Any,
    ):
        super().__init__(d_model, n_updates, without=without, **options)
        self.encode_gain = encode_gain
        self.centring = "centring" not in without
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

    def constrain_(self, embedding_weight: Tensor, sublayers: Iterable[nn.Module] = ()) -> None:
        """Centres the embedding rows: with zero-mean rows every later direction has zero mean."""
        if self.centring:
            centre_rows_(embedding_weight)


@torch.no_grad()
def centre_rows_(weight: Tensor) -> Tensor:
    """Subtracts each row's mean from ``weight`` [V, d] in place, in float32 or wider."""
    wide = weight.to(reference.compute_dtype(weight))
    return weight.copy_(wide - wide.mean(dim=-1, keepdim=True))


def check_components(names: Collection[str]) -> None:
    """Raises a UserError unless every name is one of ``COMPONENTS``."""
    for name in names:
        if name not in COMPONENTS:
            raise UserError(f"norm-agnostic component {name!r}: choose among {', '.join(COMPONENTS)}")
