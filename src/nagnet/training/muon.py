"""Muon: momentum whose every matrix is orthogonalised before it is applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nagnet.errors import UserError
from nagnet.training.distributed import whole_tensor

MATRIX_DIMS = (2, 3)  # one matrix, or a stack of them [n, rows, columns]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of one shape orthogonalised in one batched product, each by itself.

    Takes stacks of matrices [n, rows, columns] too, and orthogonalises each of the n by itself. Newton-Schulz runs in
    bfloat16 on accelerators, as in the parent, and in float32 on a CPU: without bfloat16 instructions its matrix
    product is tens of times slower there (docs/protocol.md). Sharded parameters (DTensor) keep a sharded momentum;
    each process gathers the whole update to orthogonalise it.

    Args:
        params: parameters or groups of two or three dimensions. options: those of the parent.
    """

    def __init__(self, params: Iterable[Any], **options: Any):
        super().__init__([torch.empty(0, 0)], **options)  # checks the options; the parent refuses stacks
        self.param_groups.clear()
        params = list(params)
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of matrices and stacks of matrices.

        Raises:
            UserError: for a parameter of another number of dimensions.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim not in MATRIX_DIMS:
                shape = list(parameter.shape)
                raise UserError(f"Muon got a parameter of shape {shape}; give matrices, or stacks [n, rows, columns]")

    @torch.no_grad()
    def step(self, closure=None):
        """One step over all groups; parameters without a gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = (parameter.shape, parameter.dtype, parameter.device)
                    by_shape.setdefault(key, []).append(parameter)
            for parameters in by_shape.values():
                self._step_stack(parameters, group)
        return loss

    def _step_stack(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        for buffer, grad in zip(buffers, grads, strict=True):
            buffer.lerp_(grad, 1 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            updates = [grad.lerp(buffer, group["momentum"]) for grad, buffer in zip(grads, buffers, strict=True)]
        shape = parameters[0].shape
        rows, columns = shape[-2:]
        stack = torch.cat([whole_tensor(update).reshape(-1, rows, columns) for update in updates])
        stack = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if group["adjust_lr_fn"] == "match_rms_adamw":
            lr = group["lr"] * 0.2 * max(rows, columns) ** 0.5
        else:
            lr = group["lr"] * max(1, rows / columns) ** 0.5
        whole_updates = stack.to(parameters[0].dtype).reshape(-1, *shape)
        for parameter, update in zip(parameters, whole_updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(_sharded_like(parameter, update), alpha=-lr)


def _sharded_like(parameter: Any, whole: Tensor) -> Tensor:
    """This process's part of a tensor that every process has, sharded as ``parameter`` is."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def orthogonalize(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Moves the singular values of each matrix in ``stack`` [n, rows, columns] near 1 (Newton-Schulz, Muon).

    Returns:
        [n, rows, columns]: bfloat16 on accelerators, float32 on a CPU. A zero matrix stays zero.
    """
    x = stack.float() if stack.device.type == "cpu" else stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
