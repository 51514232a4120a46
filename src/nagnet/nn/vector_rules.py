"""Residual rules that keep the stream as one vector and have no parameters. N is the RMS norm without affine part."""

from __future__ import annotations

import torch
from torch import Tensor

from nagnet import ops
from nagnet.nn.stream import ResidualStream, ResidualUpdate, VectorState
from nagnet.ops import reference


def _added(state: VectorState, branch: Tensor) -> VectorState:
    return VectorState(state.stream + branch.to(state.stream.dtype))


class NoResidual(ResidualUpdate):
    """No skip connection: ``x' = F(N(x))``. What depth does to a plain stack."""

    def read(self, state: VectorState) -> Tensor:
        return reference.rms_norm(state.stream)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return VectorState(branch.to(state.stream.dtype))


class PostNormResidual(ResidualUpdate):
    """``x' = N(x + F(x))`` (Vaswani et al. 2017)."""

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return VectorState(reference.rms_norm(_added(state, branch).stream))


class PreNormResidual(ResidualUpdate):
    """``x' = x + F(N(x))``: the rule of the baseline."""

    def read(self, state: VectorState) -> Tensor:
        return reference.rms_norm(state.stream)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return _added(state, branch)

    def advance(
        self, state: VectorState, branch: Tensor, gain: Tensor | None, following: ResidualUpdate | None
    ) -> tuple[VectorState, Tensor | None, Tensor | None]:
        """Adds the branch and norms the sum for the following update in one pass."""
        if not isinstance(following, PreNormResidual):
            return super().advance(state, branch, gain, following)
        stream, reading = ops.add_norm(state.stream, branch)
        return VectorState(stream), reading, None


class LayerNormScalingResidual(ResidualUpdate):
    """``x' = x + F(N(x) / sqrt(k))`` in block k, counted from 1 (arXiv 2502.05795): later branches start smaller."""

    def __init__(self, d_model: int, update_index: int):
        super().__init__(d_model, update_index)
        self.scale: Tensor
        # A tensor and not a number, so that all layers share one compiled block.
        self.register_buffer("scale", torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """There are none; fills the scale, where it was left empty."""
        self.scale.fill_(((self.update_index + 1) // 2) ** -0.5)

    def read(self, state: VectorState) -> Tensor:
        reading = reference.rms_norm(state.stream)
        return reading * self.scale.to(reading.dtype)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return _added(state, branch)


class SandwichResidual(ResidualUpdate):
    """``x' = x + N(F(N(x)))``: the branch has RMS 1 whatever the sublayer says (peri-norm, arXiv 2502.02732)."""

    def read(self, state: VectorState) -> Tensor:
        return reference.rms_norm(state.stream)

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        return _added(state, reference.rms_norm(branch))


class NoResidualStream(ResidualStream):
    update_class = NoResidual
    zero_init_projections = False


class PostNormStream(ResidualStream):
    update_class = PostNormResidual
    has_norm_lane = False


class PreNormStream(ResidualStream):
    update_class = PreNormResidual


class LayerNormScalingStream(ResidualStream):
    update_class = LayerNormScalingResidual


class SandwichStream(ResidualStream):
    update_class = SandwichResidual
    zero_init_projections = False
