"""Feed-forward sublayers."""

from __future__ import annotations

from torch import Tensor, nn

from nagnet.nn.projection import Projection
from nagnet.nn.scale import LearnedScale, scaled
from nagnet.typing import Float


def _channel_scale(d_ff: int, learned: bool) -> LearnedScale | None:
    """nGPT's s_uv: trained at the scale at which it acts."""
    return LearnedScale(d_ff, initial=1.0, stored=1.0) if learned else None


class SquaredReLU(nn.Module):
    """``W_down relu(s_up W_up x)^2`` without biases (arXiv 2109.08668).

    Args:
        d_model: width d. d_ff: hidden width.
        channel_scales: whether s_up [d_ff] is learned, from 1; else it is 1.
    """

    n_matrices = 2

    def __init__(self, d_model: int, d_ff: int, channel_scales: bool = False):
        super().__init__()
        self.up_proj = Projection(d_model, d_ff)
        self.out_proj = Projection(d_ff, d_model)
        self.up_scale = _channel_scale(d_ff, channel_scales)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.out_proj(nn.functional.relu(scaled(self.up_proj(x), self.up_scale)).square())


class SwiGLU(nn.Module):
    """``W_down (silu(s_gate W_gate x) * s_up W_up x)`` without biases (arXiv 2002.05202).

    Args:
        d_model: width d. d_ff: hidden width.
        channel_scales: whether s_gate and s_up [d_ff] are learned, from 1; else they are 1.
    """

    n_matrices = 3

    def __init__(self, d_model: int, d_ff: int, channel_scales: bool = False):
        super().__init__()
        self.up_proj = Projection(d_model, d_ff)
        self.gate_proj = Projection(d_model, d_ff)
        self.out_proj = Projection(d_ff, d_model)
        self.up_scale = _channel_scale(d_ff, channel_scales)
        self.gate_scale = _channel_scale(d_ff, channel_scales)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        gate = nn.functional.silu(scaled(self.gate_proj(x), self.gate_scale))
        return self.out_proj(gate * scaled(self.up_proj(x), self.up_scale))


MLPS: dict[str, type[SquaredReLU] | type[SwiGLU]] = {"relu_squared": SquaredReLU, "swiglu": SwiGLU}
