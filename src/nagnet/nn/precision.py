"""Types of products, and modules whose parameters are too fine for 16 bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def product_dtype(weight: Tensor) -> torch.dtype:
    """Type of a product with a matrix: that of the matrix, or of autocast where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


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

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Widens 16-bit entries first: ``load_state_dict(assign=True)`` would take their type over."""
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            value = state_dict.get(prefix + name)
            if own is not None and value is not None and value.dtype in (torch.bfloat16, torch.float16):
                state_dict[prefix + name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Float32Embedding(Float32Module, nn.Embedding):
    """A token table that stays float32, so that a readout may share it and its rows can be centred exactly."""

    weight: nn.Parameter
