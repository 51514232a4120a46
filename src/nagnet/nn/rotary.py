"""Rotary position embedding on half-split pairs (arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.nn.precision import Float32Module
from nagnet.typing import Float, Int


class RotaryTable(Float32Module):
    """Cosines and sines of ``position x base^(-2i / head_dim)``, grown on demand and kept in float32.

    Args:
        head_dim: width of one head, even.
        base: the slowest wavelength is 2 pi base^(1 - 2 / head_dim) positions.
        length: positions prepared at the start.
    """

    def __init__(self, head_dim: int, base: float, length: int):
        super().__init__()
        if head_dim % 2:
            raise UserError(f"head_dim is {head_dim}; rotary embedding turns pairs, so choose an even head_dim")
        self.head_dim = head_dim
        self.base = base
        self.cos: Tensor
        self.sin: Tensor
        self._build(length, torch.get_default_device())

    def reset_buffers(self) -> None:
        """Computes the tables anew, where they were left empty."""
        self._build(self.cos.shape[0], self.cos.device)

    # A table that grows in inference mode must still serve training.
    @torch.inference_mode(False)
    def _build(self, length: int, device: torch.device) -> None:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), self.base**-pairs)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Cosine and sine [length, head_dim / 2] of positions ``start .. start + length - 1``."""
        end = start + length
        self.reserve(end)
        return self.cos[start:end], self.sin[start:end]

    def at(self, positions: Int[Tensor, "b t"]) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, T, head_dim / 2] of ``positions`` [B, T], for which there must be room (`reserve`)."""
        return self.cos[positions], self.sin[positions]

    def reserve(self, length: int) -> None:
        """Makes the tables serve at least this many positions."""
        if length > self.cos.shape[0]:
            self._build(max(length, 2 * self.cos.shape[0]), self.cos.device)


def apply_rotary(
    x: Float[Tensor, "*batch t h k"], cos: Float[Tensor, "*rows t p"], sin: Float[Tensor, "*rows t p"]
) -> Tensor:
    """Turns each pair (x_i, x_{i + k/2}) of ``x`` [..., T, heads, k] by its angle: (x1 cos + x2 sin, x2 cos - x1 sin).

    Args:
        cos, sin: [T, k/2], or [B, T, k/2] where sequences stand at different positions.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
