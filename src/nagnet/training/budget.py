"""How long a run is, what share of the hardware it uses, and what is left to pay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.flops import Convention, counted_parameters, training_flops_per_token
from nagnet.training.config import RunConfig


@dataclass(frozen=True)
class Budget:
    """A budget as the training loop needs it.

    Attributes:
        n_steps: optimizer steps. tokens_per_step: over all processes.
        flops_per_token: training FLOPs (3 x forward) per token. convention: how they are counted.
    """

    n_steps: int
    tokens_per_step: int
    flops_per_token: int
    convention: Convention

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.n_steps * self.tokens_per_step

    @property
    def flops_per_step(self) -> int:
        """Training FLOPs of one optimizer step, over all processes."""
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops(self) -> int:
        """Training FLOPs of the whole run."""
        return self.n_steps * self.flops_per_step

    def describe(self) -> str:
        """One line for the user."""
        return (
            f"{self.n_steps:,} steps of {self.tokens_per_step:,} tokens, {self.tokens:,} tokens, "
            f"{self.flops:.4g} training FLOPs ({self.convention})"
        )


def resolve_budget(config: RunConfig, model: ModelConfig | None = None) -> Budget:
    """Turns the budget of ``config``, whatever its kind, into the nearest number of steps, at least 1.

    Args:
        config: the run.
        model: of the arm; default: the config's own. Arms of one config differ in FLOPs per token and in parameters, so
            a budget in FLOPs or in tokens per parameter gives each its own number of steps.
    """
    model = config.model if model is None else model
    flops_per_token = training_flops_per_token(model, config.seq_len, config.convention)
    if config.steps is not None:
        n_steps = config.steps
    else:
        if config.flops is not None:
            tokens = config.flops / flops_per_token
        elif config.tokens is not None:
            tokens = config.tokens
        else:
            assert config.tokens_per_parameter is not None  # RunConfig has exactly one budget
            tokens = config.tokens_per_parameter * counted_parameters(model)
        n_steps = max(1, round(tokens / config.tokens_per_step))
    return Budget(n_steps, config.tokens_per_step, flops_per_token, config.convention)


@dataclass(frozen=True)
class _Device:
    """Peak rates of a device in 1e12 FLOP/s, dense (without structured sparsity, whose rates are twice these).

    Attributes:
        name: pattern that the name the driver reports must contain, and nothing that says otherwise follows.
        half: bfloat16 and float16 with float32 accumulation. float32: without TF32, as torch multiplies by default.
        tf32: where the device has it. bfloat16: whether it does.
    """

    name: str
    half: float
    float32: float
    tf32: float | None = None
    bfloat16: bool = True


# Vendors quote tensor rates with sparsity; the dense half stands here.
DEVICES = (
    # NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-1758950): PCIe and SXM alike.
    _Device(r"\bA100\b", 312.0, 19.5, tf32=156.0),
    # NVIDIA H100 Tensor Core GPU data sheet (resources.nvidia.com/en-us-tensor-core). SXM reports "H100 80GB HBM3".
    _Device(r"\bH100 (SXM|\d+GB HBM3\b)", 989.4, 66.9, tf32=494.7),
    _Device(r"\bH100 (PCIe|\d+GB HBM2e)", 756.0, 51.2, tf32=378.0),
    _Device(r"\bH100 NVL\b", 835.5, 60.0, tf32=417.5),
    # NVIDIA H200 Tensor Core GPU data sheet: the SXM card reports "H200".
    _Device(r"\bH200 NVL\b", 835.5, 60.0, tf32=417.5),
    _Device(r"\bH200\b", 989.4, 66.9, tf32=494.7),
    # NVIDIA Blackwell Architecture Technical Brief, HGX B200.
    _Device(r"\bB200\b", 2250.0, 80.0, tf32=1100.0),
    # NVIDIA L40S data sheet.
    _Device(r"\bL40S\b", 362.05, 91.6, tf32=183.0),
    # NVIDIA Ada GPU Architecture white paper, appendix A (half with float32 accumulation).
    _Device(r"\bRTX 4090\b(?! (D|Laptop))", 165.2, 82.6, tf32=82.6),
    # NVIDIA V100 data sheet; no bfloat16.
    _Device(r"\bV100-SXM", 125.0, 15.7, bfloat16=False),
    _Device(r"\bV100-PCIE", 112.0, 14.0, bfloat16=False),
    # AMD Instinct MI300X data sheet.
    _Device(r"\bMI300X\b", 1307.4, 163.4, tf32=653.7),
)
PARTITION = re.compile(r"\bMIG\b")  # a part of a device, whose rates its name does not tell


def device_peak_flops(device_name: str, dtype: Any) -> float | None:
    """Peak dense FLOP/s of a device, or None where the table has none.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` reports it.
        dtype: of the products: ``float32``, ``tf32``, ``bfloat16`` or ``float16``, or a torch dtype.
    """
    kind = str(dtype).removeprefix("torch.")
    device = next((device for device in DEVICES if re.search(device.name, device_name, re.IGNORECASE)), None)
    if device is None or PARTITION.search(device_name):
        return None
    half_types = ("bfloat16", "float16") if device.bfloat16 else ("float16",)
    rates = {"float32": device.float32, "tf32": device.tf32} | dict.fromkeys(half_types, device.half)
    rate = rates.get(kind)
    return None if rate is None else rate * 1e12


def mfu(flops_per_second: float, device_name: str, dtype: Any, peak_flops: float | None = None) -> float | None:
    """Model FLOPs utilisation: the share of a device's peak rate that the model's own FLOPs take.

    Args:
        flops_per_second: training FLOPs per second and device, in the convention of the run. ``full`` counts scores
            that causal attention does not need, so its value is higher for the same work.
        device_name, dtype: as in `device_peak_flops`.
        peak_flops: FLOP/s of one device, in place of the table's.

    Returns:
        0 to 1, or None where the peak is not known.

    Raises:
        UserError: if ``peak_flops`` is not above 0.
    """
    if peak_flops is not None and not peak_flops > 0:
        raise UserError(f"peak_flops is {peak_flops}; give the FLOP/s of one device, above 0")
    peak = device_peak_flops(device_name, dtype) if peak_flops is None else peak_flops
    return None if peak is None else flops_per_second / peak


def format_mfu(value: float | None) -> str:
    """``41.2%``, or ``unknown``."""
    return "unknown" if value is None else f"{value:.1%}"


def dollars_to_finish(seconds_left: float, dollars_per_hour: float | None) -> float | None:
    """What the rest of a run costs, or None where no price is given.

    Args:
        dollars_per_hour: price of all devices of the run together.

    Raises:
        UserError: if the price is negative.
    """
    if dollars_per_hour is None:
        return None
    if not dollars_per_hour >= 0:
        raise UserError(f"dollars_per_hour is {dollars_per_hour}; give the price of all devices, 0 or more")
    return seconds_left / 3600.0 * dollars_per_hour
