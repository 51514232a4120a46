"""The residual rule of nGPT (arXiv 2410.01131): the stream stays on a sphere and moves along it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nagnet.nn.readout import ENTRY_SCALE_READOUT
from nagnet.nn.scale import LearnedScale
from nagnet.nn.stream import ResidualStream, ResidualUpdate, VectorState
from nagnet.ops import reference

INITIAL_STEP = 0.05


class NGPTResidual(ResidualUpdate):
    """``h' = N(N(h) + |a| (N(F(h)) - N(h)))``, with a learned step size a for each channel.

    N brings vectors to RMS 1, where the paper has unit length: a factor sqrt(d) in the stream and in nothing else,
    since readings of RMS 1 are also what its MLP multiplies by sqrt(d) to get.
    """

    def __init__(self, d_model: int, update_index: int):
        super().__init__(d_model, update_index)
        self.step_size = LearnedScale(d_model, initial=INITIAL_STEP, stored=d_model**-0.5)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """a = 0.05 in every channel."""
        self.step_size.reset_parameters()

    def write(self, state: VectorState, branch: Tensor, gain: Tensor | None = None) -> VectorState:
        step = self.step_size().abs()
        dtype = reference.compute_dtype(state.stream, branch, step)
        stream, target = reference.rms_norm(state.stream.to(dtype)), reference.rms_norm(branch.to(dtype))
        moved = reference.rms_norm(stream + step.to(dtype) * (target - stream))
        return VectorState(moved.to(state.stream.dtype))


class NGPTStream(ResidualStream):
    """The stream of nGPT. After every step each matrix has unit length along the axis of the stream."""

    update_class = NGPTResidual
    readout = ENTRY_SCALE_READOUT
    channel_scales = True
    zero_init_projections = False
    has_norm_lane = False

    def constrain_(self, embedding_weight: Tensor, sublayers: Iterable[nn.Module] = ()) -> None:
        """Rows that read the stream and columns that write it get length 1, embedding rows RMS 1; zeros stay zero."""
        set_length_(embedding_weight, 1, math.sqrt(embedding_weight.shape[1]))
        for sublayer in sublayers:
            for name, layer in sublayer.named_children():
                if isinstance(layer, nn.Linear):
                    set_length_(layer.weight, 0 if name == "out_proj" else 1, 1.0)


@torch.no_grad()
def set_length_(weight: Tensor, axis: int, length: float) -> None:
    """Brings the vectors of ``weight`` along ``axis`` to ``length`` in place, in float32 or wider; zeros stay zero."""
    wide = weight.to(reference.compute_dtype(weight))
    norm = torch.linalg.vector_norm(wide, dim=axis, keepdim=True)
    weight.copy_(torch.where(norm == 0, wide, wide * (length / norm)))
