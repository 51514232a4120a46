"""The ``--device`` option of every command that computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nagnet.errors import UserError

if TYPE_CHECKING:
    import torch

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def resolve_device(name: DeviceName) -> torch.device:
    """The device a command computes on.

    Args:
        name: ``"auto"`` takes the first of cuda, mps and cpu that this machine has.

    Returns:
        The device.

    Raises:
        UserError: If the named device is not there.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [device for device, there in present.items() if there]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        raise UserError(f"--device {name}: this machine has {' and '.join(available)} only")
    return torch.device(name)
