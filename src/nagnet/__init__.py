"""Norm-agnostic residual streams: the rule, models that differ in it alone, and the tools to compare them.

Public names are imported on first use, so that ``nagnet --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nagnet.diagnostics.geometry import gate_health as gate_health
    from nagnet.diagnostics.prediction import confidence as confidence
    from nagnet.generation.engine import generate as generate
    from nagnet.generation.engine import generate_stream as generate_stream
    from nagnet.models.checkpoint import load_model as load_model
    from nagnet.models.checkpoint import save_model as save_model
    from nagnet.models.config import ModelConfig as ModelConfig
    from nagnet.models.decoder import Decoder as Decoder
    from nagnet.nn.readout import Readout as Readout
    from nagnet.nn.readout import ReadoutConfig as ReadoutConfig
    from nagnet.nn.residual import NormAgnosticResidual as NormAgnosticResidual
    from nagnet.nn.residual import PostNormResidual as PostNormResidual
    from nagnet.nn.residual import PreNormResidual as PreNormResidual
    from nagnet.nn.residual import centre_rows_ as centre_rows_
    from nagnet.nn.residual import set_injection as set_injection
    from nagnet.nn.skip import SkipPolicy as SkipPolicy
    from nagnet.training.optimizer import constrain_after_step as constrain_after_step
    from nagnet.training.optimizer import parameter_groups as parameter_groups

_MODULES = {
    "Decoder": "nagnet.models.decoder",
    "ModelConfig": "nagnet.models.config",
    "NormAgnosticResidual": "nagnet.nn.residual",
    "PostNormResidual": "nagnet.nn.residual",
    "PreNormResidual": "nagnet.nn.residual",
    "Readout": "nagnet.nn.readout",
    "ReadoutConfig": "nagnet.nn.readout",
    "centre_rows_": "nagnet.nn.residual",
    "confidence": "nagnet.diagnostics.prediction",
    "SkipPolicy": "nagnet.nn.skip",
    "constrain_after_step": "nagnet.training.optimizer",
    "gate_health": "nagnet.diagnostics.geometry",
    "generate": "nagnet.generation.engine",
    "generate_stream": "nagnet.generation.engine",
    "load_model": "nagnet.models.checkpoint",
    "parameter_groups": "nagnet.training.optimizer",
    "save_model": "nagnet.models.checkpoint",
    "set_injection": "nagnet.nn.residual",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nagnet' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
