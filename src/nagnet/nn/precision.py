"""Modules whose parameters are too fine for 16 bit."""

from __future__ import annotations

import torch
from torch import nn


class Float32Module(nn.Module):
    """A module that keeps its floating parameters and buffers in float32 or wider through ``.to(bfloat16)``.

    Gates, norms and logarithms need it: 1.0 - 1e-3 is 1.0 in bfloat16, so such a parameter would never train.
    Moves between devices and casts to float64 pass through.
    """

    def _apply(self, fn, recurse=True):
        def keep_wide(tensor):
            result = fn(tensor)
            if result.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(keep_wide, recurse)
