"""Look inside a model: measurements of the residual stream, and the figures that show them.

What is exported here needs torch alone; ``confidence`` needs numpy, ``figures`` and ``report`` the extra ``report``.
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
from nagnet.diagnostics.probe import UpdateStep, measuring, observe_gains, observe_updates

__all__ = [
    "GainByUpdate",
    "GateHealth",
    "NormByDepth",
    "RotationByDepth",
    "StreamHealth",
    "UpdateStep",
    "gain_by_update",
    "gate_health",
    "measuring",
    "norm_by_depth",
    "observe_gains",
    "observe_updates",
    "rotation_by_depth",
    "stream_health",
    "update_name",
]
