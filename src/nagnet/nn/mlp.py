"""Feed-forward sublayers."""

from __future__ import annotations

from torch import Tensor, nn

from nagnet.typing import Float


class SquaredReLU(nn.Module):
    """``W_down relu(W_up x)^2`` without biases (arXiv 2109.08668)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.out_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.out_proj(nn.functional.relu(self.up_proj(x)).square())


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)`` without biases (arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.out_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.out_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


MLPS: dict[str, type[SquaredReLU] | type[SwiGLU]] = {"relu_squared": SquaredReLU, "swiglu": SwiGLU}
