"""Look inside a model: measurements of the residual stream, and the figures that show them.

What is exported here needs torch alone. Beside it the modules ``confidence``, ``calibration`` and ``skipping`` need
numpy, figures and reports the extra ``report``.
"""

from nagnet.diagnostics.geometry import (
    GainByUpdate,
    GateHealth,
    NormByDepth,
    RotationByDepth,
    gain_by_update,
    gate_health,
    norm_by_depth,
    rotation_by_depth,
)
from nagnet.diagnostics.health import StreamHealth, stream_health, update_name
from nagnet.diagnostics.prediction import Confidence
from nagnet.diagnostics.probe import UpdateStep, measuring, observe_gains, observe_updates
from nagnet.diagnostics.sinks import AttentionSinks, attention_sinks
from nagnet.diagnostics.temperature import TemperatureSplit, temperature_split
from nagnet.diagnostics.updates import (
    BlockRemoval,
    ModulationHistogram,
    Outliers,
    PreferredDirections,
    RelativeUpdate,
    block_removal,
    modulation_histogram,
    outliers,
    preferred_directions,
    relative_update,
)

__all__ = [
    "AttentionSinks",
    "BlockRemoval",
    "Confidence",
    "GainByUpdate",
    "GateHealth",
    "ModulationHistogram",
    "NormByDepth",
    "Outliers",
    "PreferredDirections",
    "RelativeUpdate",
    "RotationByDepth",
    "StreamHealth",
    "TemperatureSplit",
    "UpdateStep",
    "attention_sinks",
    "block_removal",
    "gain_by_update",
    "gate_health",
    "measuring",
    "modulation_histogram",
    "norm_by_depth",
    "observe_gains",
    "observe_updates",
    "outliers",
    "preferred_directions",
    "relative_update",
    "rotation_by_depth",
    "stream_health",
    "temperature_split",
    "update_name",
]
