"""Parameters by role, and the optimizers that train them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import AdamW, Optimizer

from nagnet.errors import UserError
from nagnet.nn.readout import Readout
from nagnet.nn.residual import NormAgnosticResidual, ResidualUpdate
from nagnet.training.muon import MATRIX_DIMS, Muon
from nagnet.training.overrides import coerce_fields

ROLES = {
    "matrix": "weights of attention and MLP",
    "embedding": "rows looked up by token or position",
    "head": "rows of the readout",
    "gate": "modulators and alpha of the residual rule",
    "scalar": "encode gain, learned scales, norms, biases and convolution kernels",
}
# Of Muon. Best of 0.01, 0.02, 0.04 for each at 24 blocks (records/0004-tuned-pair), and better than half of it at 16
# blocks (records/0009-demo). A stream of norm 1 does not mind how large a branch has grown. Pre-norm wants less
# than 0.01 in short runs of deep models (docs/findings.md).
MATRIX_RATES = {"norm_agnostic": 0.04, "others": 0.01}
UNDECAYED = ("gate", "scalar")
WIDTH_SCALED_RATES = ("embedding_lr", "free_head_lr", "unit_head_lr")
RATES = ("matrix_lr", *WIDTH_SCALED_RATES, "gate_lr", "scalar_lr")
HEAD_NAME = re.compile(r"(^|\.)(lm_?)?(head|unembed\w*|output)(\.|$)")


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Assigns a role of ``ROLES`` to every trainable parameter, in any model.

    Gates are the parameters of residual updates; embeddings those of ``nn.Embedding``; heads those of `Readout`
    and parameters shaped like an embedding's table under a name such as ``lm_head``, ``head``, ``unembed`` or
    ``output``. Of the rest, parameters of two or three dimensions (a matrix, or a stack of them such as the experts
    of one layer) are matrices, and the others scalars, as are the kernels of convolutions. A tied head counts as an
    embedding.

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
        elif isinstance(module, _ConvNd):
            role_of |= {id(parameter): "scalar" for parameter in module.parameters()}
    table_shapes = {tuple(table.shape) for table in tables}

    def role(name: str, parameter: Tensor) -> str:
        if id(parameter) in role_of:
            return role_of[id(parameter)]
        if parameter.ndim not in MATRIX_DIMS:
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
    """Rates, decay and averages by role; one config serves every arm. Gates, norms and scalars are never decayed.

    The default rates are those of records/0004-tuned-pair (24 blocks, batches of 1,024 tokens).

    Attributes:
        matrix_lr, matrix_momentum, matrix_weight_decay: of Muon. A rate of None is that of ``MATRIX_RATES`` for the
            residual rule: each rule's own best, as each kind of readout rows has its own.
        embedding_lr, embedding_betas, embedding_weight_decay: of embedding rows (AdamW, like all below).
        free_head_lr, unit_head_lr: of readout rows that start at an RMS of 0.001 and are free, or are held at RMS 1.
            A rate must fit the size of what it turns: rows of RMS 1 turn by the rate per step.
        head_betas, head_weight_decay: of readout rows.
        gate_lr, gate_betas: of modulators and alpha. scalar_lr, scalar_betas: of the encode gain and learned scales.
        eps: of AdamW.
        lr_reference_batch_tokens: the batch the rates are meant for; every rate is multiplied by
            sqrt(tokens per step / this). None: rates are used as they are.
        lr_reference_width: the width the rates of embedding and readout are meant for; these are multiplied by
            sqrt(this / d_model). None: they are used as they are.
    """

    matrix_lr: float | None = None
    matrix_momentum: float = 0.95
    matrix_weight_decay: float = 0.0
    embedding_lr: float = 0.2
    embedding_betas: tuple[float, float] = (0.8, 0.995)
    embedding_weight_decay: float = 0.0
    free_head_lr: float = 0.02
    unit_head_lr: float = 0.2
    head_betas: tuple[float, float] = (0.8, 0.96)
    head_weight_decay: float = 0.0
    gate_lr: float = 1e-3
    gate_betas: tuple[float, float] = (0.8, 0.95)
    scalar_lr: float = 5e-3
    scalar_betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    lr_reference_batch_tokens: int | None = None
    lr_reference_width: int | None = None

    def __post_init__(self):
        coerce_fields(self, "optimizer ")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("betas") or field.name == "matrix_momentum":
                averages = value if isinstance(value, tuple) else (value,)
                if not all(0.0 <= beta < 1.0 for beta in averages):
                    raise UserError(f"optimizer {field.name} is {value}; give numbers from 0 to below 1")
            elif field.name.startswith("lr_reference") and value is not None and value < 1:
                raise UserError(f"optimizer {field.name} is {value}; give 1 or more")
            elif value is not None and value < 0:
                raise UserError(f"optimizer {field.name} is {value}; give 0 or more")


def scale_rates(
    config: OptimizerConfig, tokens_per_step: int | None, d_model: int
) -> tuple[OptimizerConfig, list[str]]:
    """Applies the scaling of rates that ``config`` asks for.

    Args:
        tokens_per_step: of the run, over all processes; needed with ``lr_reference_batch_tokens``.
        d_model: width of the embedding rows.

    Returns:
        The config with the rates in force and no scaling left, and one line for each scaling, to be printed.

    Raises:
        UserError: if the batch matters and is not given.
    """
    lines = []
    if (batch := config.lr_reference_batch_tokens) is not None:
        if tokens_per_step is None:
            raise UserError("lr_reference_batch_tokens scales rates with the batch; give tokens_per_step as well")
        factor = math.sqrt(tokens_per_step / batch)
        config = _multiply_rates(config, RATES, factor)
        lines.append(f"all rates x {factor:.4g}: sqrt of {tokens_per_step:,} tokens per step / {batch:,}")
    if (width := config.lr_reference_width) is not None:
        factor = math.sqrt(width / d_model)
        config = _multiply_rates(config, WIDTH_SCALED_RATES, factor)
        lines.append(f"rates of embedding and head x {factor:.4g}: sqrt of width {width} / {d_model}")
    return dataclasses.replace(config, lr_reference_batch_tokens=None, lr_reference_width=None), lines


def _multiply_rates(config: OptimizerConfig, names: Iterable[str], factor: float) -> OptimizerConfig:
    rates = {name: rate * factor for name in names if (rate := getattr(config, name)) is not None}
    return dataclasses.replace(config, **rates)


def build_optimizers(model: nn.Module, config: OptimizerConfig, tokens_per_step: int | None = None) -> list[Optimizer]:
    """Builds Muon for the matrices and AdamW for all other roles, with rates scaled as the config asks.

    Every group keeps what a schedule multiplies: its peak rate as ``peak_lr``, and for matrices ``peak_momentum``
    and ``peak_weight_decay``.

    Args:
        model: any module; its width is that of its first ``nn.Embedding``.
        tokens_per_step: of the run, over all processes; needed where rates are scaled with the batch.
    """
    if config.matrix_lr is None:
        config = dataclasses.replace(config, matrix_lr=default_matrix_lr(model))
    if config.lr_reference_batch_tokens is not None or config.lr_reference_width is not None:
        config, _ = scale_rates(config, tokens_per_step, _embedding_width(model))
    unit_rows = any(isinstance(module, Readout) and module.config.rows == "unit" for module in model.modules())
    embedding_decay, head_decay = config.embedding_weight_decay, config.head_weight_decay
    groups = parameter_groups(
        model,
        matrix={"lr": config.matrix_lr, "weight_decay": config.matrix_weight_decay},
        embedding={"lr": config.embedding_lr, "betas": config.embedding_betas, "weight_decay": embedding_decay},
        head={
            "lr": config.unit_head_lr if unit_rows else config.free_head_lr,
            "betas": config.head_betas,
            "weight_decay": head_decay,
        },
        gate={"lr": config.gate_lr, "betas": config.gate_betas},
        scalar={"lr": config.scalar_lr, "betas": config.scalar_betas},
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
            if group["role"] == "matrix":
                group |= {"peak_momentum": group["momentum"], "peak_weight_decay": group["weight_decay"]}
    return optimizers


def default_matrix_lr(model: nn.Module) -> float:
    """The rate of Muon for a model's residual rule where the config has none."""
    rotates = any(isinstance(module, NormAgnosticResidual) for module in model.modules())
    return MATRIX_RATES["norm_agnostic" if rotates else "others"]


def _embedding_width(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.embedding_dim
    raise UserError("lr_reference_width scales rates with the width of the embedding, but the model has none")


def describe_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """One row per group: role, optimizer, tensors, parameters, peak rate, weight decay, averages, an example.

    ``averages`` is the momentum of Muon, the betas of AdamW.
    """
    return [
        {
            "role": group["role"],
            "optimizer": type(optimizer).__name__,
            "tensors": len(group["params"]),
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            "lr": group["peak_lr"],
            "weight_decay": group.get("peak_weight_decay", group["weight_decay"]),
            "averages": [group["peak_momentum"]] if "peak_momentum" in group else list(group["betas"]),
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
