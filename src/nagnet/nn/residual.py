"""The residual rules by name. How a rule is made: `nagnet.nn.stream`."""

from __future__ import annotations

from nagnet.nn.ngpt import NGPTResidual, NGPTStream
from nagnet.nn.norm_agnostic import (
    COMPONENTS,
    NormAgnosticResidual,
    NormAgnosticState,
    NormAgnosticStream,
    centre_rows_,
)
from nagnet.nn.stream import ResidualStream, ResidualUpdate, VectorState, set_injection
from nagnet.nn.vector_rules import (
    LayerNormScalingResidual,
    LayerNormScalingStream,
    NoResidual,
    NoResidualStream,
    PostNormResidual,
    PostNormStream,
    PreNormResidual,
    PreNormStream,
    SandwichResidual,
    SandwichStream,
)

__all__ = [
    "COMPONENTS",
    "RESIDUAL_STREAMS",
    "LayerNormScalingResidual",
    "LayerNormScalingStream",
    "NGPTResidual",
    "NGPTStream",
    "NoResidual",
    "NoResidualStream",
    "NormAgnosticResidual",
    "NormAgnosticState",
    "NormAgnosticStream",
    "PostNormResidual",
    "PostNormStream",
    "PreNormResidual",
    "PreNormStream",
    "ResidualStream",
    "ResidualUpdate",
    "SandwichResidual",
    "SandwichStream",
    "VectorState",
    "centre_rows_",
    "set_injection",
]

RESIDUAL_STREAMS: dict[str, type[ResidualStream]] = {
    "norm_agnostic": NormAgnosticStream,
    "pre_norm": PreNormStream,
    "post_norm": PostNormStream,
    "none": NoResidualStream,
    "layernorm_scaling": LayerNormScalingStream,
    "sandwich": SandwichStream,
    "ngpt": NGPTStream,
}
