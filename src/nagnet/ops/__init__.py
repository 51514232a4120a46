"""Mathematics of the residual stream without parameters, and the choice of who computes it.

Backends: ``reference`` (plain PyTorch), ``fused`` (derived backward, compiled loops), ``auto``. ``auto`` is fused
inside a compiled block, and for tensors of a million elements or more where a compiler works; a small eager call
is not worth compiling for. Set it per call, with `set_backend`, or with the environment variable NAGNET_BACKEND.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.ops import fused, reference
from nagnet.ops.matvec import is_one_row, matvec

Backend = Literal["auto", "reference", "fused"]
ENVIRONMENT_VARIABLE = "NAGNET_BACKEND"
MIN_FUSED_ELEMENTS = 2**20  # below, an eager call is too short to repay the seconds of its first compilation


def _checked(name: str, source: str) -> str:
    if name not in get_args(Backend):
        raise UserError(f"{source} is {name!r}; choose {', '.join(get_args(Backend))}")
    return name


_backend = _checked(os.environ.get(ENVIRONMENT_VARIABLE, "auto"), ENVIRONMENT_VARIABLE)


def set_backend(name: Backend) -> None:
    """Chooses the backend of all calls from now on that do not name one.

    Raises:
        UserError: for an unknown name.
    """
    global _backend
    _backend = _checked(name, "backend")


def get_backend() -> str:
    """The backend in force: ``auto``, ``reference`` or ``fused``."""
    return _backend


@functools.cache
def compiler_works() -> bool:
    """Whether torch.compile produces code here, tried once on a small function; says so where it does not."""
    try:
        torch.compile(lambda x: x * 2.0 + 1.0)(torch.zeros(8))
    except Exception as error:  # whatever a missing or broken compiler raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"torch.compile does not work here, running uncompiled (slower): {reason}", stacklevel=3)
        return False
    return True


def _fused(backend: str | None, size: int) -> bool:
    name = _backend if backend is None else _checked(backend, "backend")
    if name != "auto":
        return name == "fused"
    return torch.compiler.is_compiling() or (size >= MIN_FUSED_ELEMENTS and compiler_works())


def rotate(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain: Tensor,
    branch_eps: float = reference.BRANCH_EPS,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm-agnostic update by the backend in force; arguments and returns as `reference.rotate`."""
    module = fused if _fused(backend, direction.numel()) else reference
    return module.rotate(direction, log_norm, branch, gain, branch_eps)


def gain(
    direction: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    floor: float = reference.MODULATION_FLOOR,
    backend: str | None = None,
) -> Tensor:
    """Size of the coming rotation by the backend in force; arguments and returns as `reference.gain`."""
    module = fused if _fused(backend, direction.numel()) else reference
    return module.gain(direction, weight, bias, mixture, raw_beta, scale, floor)


def add_norm(stream: Tensor, branch: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Pre-norm's update and next reading by the backend in force; arguments and returns as `reference.add_norm`."""
    module = fused if _fused(backend, stream.numel()) else reference
    return module.add_norm(stream, branch)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T``, [..., i] and [o, i] -> [..., o]: by `matvec` for one row in a block compiled for a CPU."""
    if is_one_row(x):
        return matvec(x, weight)
    return torch.nn.functional.linear(x, weight)
