"""Mathematics of the residual stream without parameters, and the choice of who computes it.

Backends: ``reference`` (plain PyTorch), ``fused`` (derived backward, compiled loops), ``triton`` (kernels for GPUs),
``auto``. ``auto`` is triton on a GPU where that package is installed; else fused inside a compiled block, and for
tensors of a million elements or more where a compiler works; a small eager call is not worth compiling for. Set it per
call, with `set_backend`, or with the environment variable NAGNET_BACKEND.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.ops import fused, reference
from nagnet.ops.matvec import is_one_row, matvec

Backend = Literal["auto", "reference", "fused", "triton"]
ENVIRONMENT_VARIABLE = "NAGNET_BACKEND"
MIN_FUSED_ELEMENTS = 2**20  # below, an eager call is too short to repay the seconds of its first compilation


_modules: dict[str, ModuleType] = {"reference": reference, "fused": fused}


def _load_triton() -> None:
    # By name, and not as an import statement: exported modelling code has the files that those lead to, and no kernels.
    _modules["triton"] = importlib.import_module("nagnet.ops.triton")


def _checked(name: str, source: str) -> str:
    if name not in get_args(Backend):
        raise UserError(f"{source} is {name!r}; choose {', '.join(get_args(Backend))}")
    if name == "triton" and name not in _modules:
        if importlib.util.find_spec("triton") is None:
            raise UserError(f"{source} is 'triton', a package that is not installed: pip install triton")
        _load_triton()
    return name


if __name__ == "nagnet.ops" and torch.version.cuda is not None and importlib.util.find_spec("triton") is not None:
    _load_triton()
_backend = _checked(os.environ.get(ENVIRONMENT_VARIABLE, "auto"), ENVIRONMENT_VARIABLE)


def set_backend(name: Backend) -> None:
    """Chooses the backend of all calls from now on that do not name one.

    Raises:
        UserError: for an unknown name, or ``triton`` where that is not installed.
    """
    global _backend
    _backend = _checked(name, "backend")


def get_backend() -> str:
    """The backend in force: ``auto``, ``reference``, ``fused`` or ``triton``."""
    return _backend


def triton_kernels() -> ModuleType:
    """The module of the Triton kernels.

    Raises:
        UserError: where Triton is not installed.
    """
    return _modules[_checked("triton", "backend")]


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


def _module(backend: str | None, x: Tensor) -> ModuleType:
    """The module that computes an operation on ``x``."""
    name = _backend if backend is None else _checked(backend, "backend")
    if name == "auto":
        if x.is_cuda and "triton" in _modules:
            name = "triton"
        elif torch.compiler.is_compiling() or (x.numel() >= MIN_FUSED_ELEMENTS and compiler_works()):
            name = "fused"
        else:
            name = "reference"
    # Neither an empty tensor nor float64 is for kernels that compute in float32.
    if name == "triton" and (x.numel() == 0 or reference.compute_dtype(x) != torch.float32):
        name = "reference"
    return _modules[name]


def rotate(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain: Tensor,
    branch_eps: float = reference.BRANCH_EPS,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm-agnostic update by the backend in force; arguments and returns as `reference.rotate`."""
    return _module(backend, direction).rotate(direction, log_norm, branch, gain, branch_eps)


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
    return _module(backend, direction).gain(direction, weight, bias, mixture, raw_beta, scale, floor)


def advance(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain_now: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    branch_eps: float = reference.BRANCH_EPS,
    floor: float = reference.MODULATION_FLOOR,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The update and the following one's gain by the backend in force; arguments and returns as `reference.advance`."""
    module = _module(backend, direction)
    return module.advance(direction, log_norm, branch, gain_now, parameters, branch_eps, floor)


def add_norm(stream: Tensor, branch: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Pre-norm's update and next reading by the backend in force; arguments and returns as `reference.add_norm`."""
    return _module(backend, stream).add_norm(stream, branch)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T``, [..., i] and [o, i] -> [..., o]: by `matvec` for one row in a block compiled for a CPU."""
    if is_one_row(x):
        return matvec(x, weight)
    return torch.nn.functional.linear(x, weight)
