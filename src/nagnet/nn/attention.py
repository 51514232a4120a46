"""Causal self-attention: rotary positions, normalised queries and keys, grouped KV heads, sliding windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nagnet.nn.rotary import apply_rotary
from nagnet.nn.scale import LearnedScale
from nagnet.ops import reference
from nagnet.typing import Float


def causal_attention(
    q: Float[Tensor, "b h t k"],
    k: Float[Tensor, "b g t k"],
    v: Float[Tensor, "b g t k"],
    window: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Float[Tensor, "b h t k"]:
    """Softmax attention of each position to itself and the past.

    Args:
        q: queries [B, H, T, k]; ``k``, ``v`` [B, G, T, k], G dividing H.
        window: int scalar tensor; a query sees this many latest positions, itself included. None or <= 0: all.
        key_mask: bool [B, T]; False hides a position from every query, whatever its K and V hold (1e30, NaN).

    Returns:
        [B, H, T, k]; zero for a query that sees no key.
    """
    grouped = q.shape[1] != k.shape[1]
    attention = nn.functional.scaled_dot_product_attention
    if window is None and key_mask is None:
        return attention(q, k, v, is_causal=True, enable_gqa=grouped)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position.unsqueeze(1) - position
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & ((distance < window) | (window <= 0))
    allowed = allowed[None, None]
    if key_mask is None:
        return attention(q, k, v, attn_mask=allowed, enable_gqa=grouped)
    hidden = ~key_mask[:, None, :, None]
    k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    allowed = allowed & key_mask[:, None, None, :]
    alive = allowed.any(dim=-1, keepdim=True)  # a row without keys would be 0/0: let it see all, then drop it
    mixed = attention(q, k, v, attn_mask=allowed | ~alive, enable_gqa=grouped)
    return mixed.masked_fill(~alive, 0.0)


class Attention(nn.Module):
    """Causal multi-head attention without biases; queries and keys have RMS ``qk_gain`` per head.

    Args:
        d_model: width d. n_heads: H. n_kv_heads: G, dividing H. head_dim: k.
        qk_gain: RMS of queries and keys after their norm.
        window: latest positions a query sees, 0 for all; None when no layer of the model has a window.
        channel_scales: whether ``qk_gain`` is only where a learned scale per channel starts, one [k] for each key
            head and the queries of its group (s_qk of arXiv 2410.01131).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        qk_gain: float,
        window: int | None = None,
        channel_scales: bool = False,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.qk_gain = qk_gain
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.out_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)
        self.qk_scale = LearnedScale(n_kv_heads * head_dim, qk_gain, d_model**-0.5) if channel_scales else None
        self.window: Tensor | None
        # A tensor and not a number, so that layers with different windows share one compiled block.
        self.register_buffer("window", None if window is None else torch.tensor(window), persistent=False)
        self._window_length = window

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Writes the window anew, where it was left empty."""
        if self.window is not None and self._window_length is not None:
            self.window.fill_(self._window_length)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _normalise(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = reference.rms_norm(apply_rotary(self._heads(x), cos, sin))
        if self.qk_scale is None:
            return heads * self.qk_gain
        gain = self._heads(self.qk_scale().to(heads.dtype))
        return heads * gain.repeat_interleave(heads.shape[-2] // gain.shape[0], dim=0)

    def forward(
        self, x: Float[Tensor, "b t d"], cos: Tensor, sin: Tensor, key_mask: Tensor | None = None
    ) -> Float[Tensor, "b t d"]:
        """Returns the branch [B, T, d] for readings ``x`` [B, T, d] and rotary tables ``cos``, ``sin`` [T, k/2]."""
        q = self._normalise(self.q_proj(x), cos, sin)
        k = self._normalise(self.k_proj(x), cos, sin)
        v = self._heads(self.v_proj(x))
        mixed = causal_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).to(q.dtype), self.window, key_mask
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))
