"""Parameters by role, and the optimizers that train them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nagnet.errors import UserError
from nagnet.nn.readout import Readout
from nagnet.nn.residual import ResidualUpdate

ROLES = {
    "matrix": "weights of attention and MLP",
    "embedding": "rows looked up by token or position",
    "head": "rows of the readout",
    "gate": "modulators and alpha of the residual rule",
    "scalar": "encode gain, learned scales, norms and biases",
}
UNDECAYED = ("gate", "scalar")
HEAD_NAME = re.compile(r"(^|\.)(lm_?)?(head|unembed\w*|output)(\.|$)")


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Assigns a role of ``ROLES`` to every trainable parameter, in any model.

    Gates are the parameters of residual updates; embeddings those of ``nn.Embedding``; heads those of `Readout`
    and parameters shaped like an embedding's table under a name such as ``lm_head``, ``head``, ``unembed`` or
    ``output``. Of the rest, parameters of two or more dimensions are matrices and the others scalars. A tied head
    counts as an embedding.

    Returns:
        Parameter name -> role, in the order of ``named_parameters()``.
    """
    role_of: dict[int, str] = {}
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    role_of |= {id(table): "embedding" for table in tables}
    for module in model.modules():
        if isinstance(module, ResidualUpdate):
            role_of |= {id(parameter): "gate" for parameter in module.parameters()}
        elif isinstance(module, Readout):
            role_of.setdefault(id(module.weight), "head")
    table_shapes = {tuple(table.shape) for table in tables}

    def role(name: str, parameter: Tensor) -> str:
        if id(parameter) in role_of:
            return role_of[id(parameter)]
        if parameter.ndim < 2:
            return "scalar"
        # The shape alone would not do: an MLP of width 4d has it wherever the vocabulary is 4d.
        is_head = tuple(parameter.shape) in table_shapes and HEAD_NAME.search(name) is not None
        return "head" if is_head else "matrix"

    return {name: role(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, **options: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups a model's parameters by role, in the form optimizers take.

    Example: ``AdamW(parameter_groups(model, gate={"lr": 1e-3}, head={"lr": 4e-3}), lr=3e-3)``. Gates want a rate of
    their own (1e-3, the walkthrough's cure of gate collapse). Gates and scalars get no weight decay unless asked.

    Args:
        model: any module, with or without norm-agnostic updates.
        options: per role (``matrix``, ``embedding``, ``head``, ``gate``, ``scalar``), a dict merged into its group.

    Returns:
        One dict per role that occurs: ``params``, ``names``, ``role`` and the options.

    Raises:
        UserError: for an unknown role.
    """
    unknown = sorted(set(options) - set(ROLES))
    if unknown:
        raise UserError(f"unknown parameter roles {', '.join(unknown)}; roles are {', '.join(ROLES)}")
    roles = parameter_roles(model)
    parameters = dict(model.named_parameters())
    groups = []
    for role in ROLES:
        names = [name for name, of in roles.items() if of == role]
        if names:
            decay = {"weight_decay": 0.0} if role in UNDECAYED else {}
            params = [parameters[name] for name in names]
            groups.append({"params": params, "names": names, "role": role} | decay | options.get(role, {}))
    return groups


@dataclass(frozen=True)
class OptimizerConfig:
    """Rates and decay by role; one config serves every arm.

    Attributes:
        matrix_lr, matrix_momentum, matrix_weight_decay: of Muon.
        embedding_lr: of embedding rows (AdamW, like all below).
        free_head_lr, unit_head_lr: of readout rows that start at an RMS of 0.001 and are free, or are held at RMS 1.
            A rate must fit the size of what it turns: rows of RMS 1 turn by the rate per step.
        gate_lr: of modulators and alpha. scalar_lr: of the encode gain and learned scales.
        eps: of AdamW.
    """

    matrix_lr: float = 0.02
    matrix_momentum: float = 0.95
    matrix_weight_decay: float = 0.0
    embedding_lr: float = 0.1
    free_head_lr: float = 0.02
    unit_head_lr: float = 0.1
    gate_lr: float = 1e-3
    scalar_lr: float = 5e-3
    eps: float = 1e-10


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of one shape orthogonalised in one batched product, each by itself.

    Newton-Schulz runs in bfloat16 on accelerators, as in the parent, and in float32 on a CPU: without bfloat16
    instructions its matrix product is tens of times slower there (docs/protocol.md).
    """

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
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        for buffer, grad in zip(buffers, grads, strict=True):
            buffer.lerp_(grad, 1 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            updates = [grad.lerp(buffer, group["momentum"]) for grad, buffer in zip(grads, buffers, strict=True)]
        stack = orthogonalize(torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameters[0].shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            lr = group["lr"] * 0.2 * max(rows, columns) ** 0.5
        else:
            lr = group["lr"] * max(1, rows / columns) ** 0.5
        for parameter, update in zip(parameters, stack.to(parameters[0].dtype), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)


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


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """Builds Muon for the matrices and AdamW for all other roles; every group has its peak rate as ``peak_lr``."""
    unit_rows = any(isinstance(module, Readout) and module.config.rows == "unit" for module in model.modules())
    head_lr = config.unit_head_lr if unit_rows else config.free_head_lr
    groups = parameter_groups(
        model,
        matrix={"lr": config.matrix_lr, "weight_decay": config.matrix_weight_decay},
        embedding={"lr": config.embedding_lr, "betas": (0.8, 0.995), "weight_decay": 0.0},
        head={"lr": head_lr, "betas": (0.8, 0.96), "weight_decay": 0.0},
        gate={"lr": config.gate_lr, "betas": (0.8, 0.95)},
        scalar={"lr": config.scalar_lr, "betas": (0.8, 0.95)},
    )
    matrices = [group for group in groups if group["role"] == "matrix"]
    others = [group for group in groups if group["role"] != "matrix"]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, momentum=config.matrix_momentum))
    if others:
        optimizers.append(AdamW(others, eps=config.eps, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def describe_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """One row per group: role, optimizer, tensors, parameters, peak rate, weight decay, an example."""
    return [
        {
            "role": group["role"],
            "optimizer": type(optimizer).__name__,
            "tensors": len(group["params"]),
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            "lr": group["peak_lr"],
            "weight_decay": group["weight_decay"],
            "example": group["names"][0],
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def constrain_after_step(model: Any, *optimizers: Optimizer) -> None:
    """Calls ``model.constrain_()`` after every step of the last optimizer given, so that nobody forgets.

    Args:
        model: any module with a method ``constrain_``. optimizers: in the order in which they step.
    """
    if not optimizers:
        raise UserError("constrain_after_step needs at least one optimizer")
    if not callable(getattr(model, "constrain_", None)):
        raise UserError(
            f"{type(model).__name__} has no constrain_(); write one that calls those of its readout and rows"
        )
    optimizers[-1].register_step_post_hook(lambda *_: model.constrain_())
