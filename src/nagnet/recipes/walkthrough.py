"""The runs of the public walkthrough (docs/recipes.md says what is assumed and what is not reproduced)."""

from __future__ import annotations

import math

from nagnet.models.config import ModelConfig
from nagnet.models.flops import counted_parameters
from nagnet.models.presets import PRESETS
from nagnet.training.config import RunConfig
from nagnet.training.optimizer import OptimizerConfig
from nagnet.training.schedule import ScheduleConfig

CLIMBMIX = "hf:climbmix"
SEQ_LEN = 2048
DEVICE_BATCH_SIZE = 16
REFERENCE_BATCH_TOKENS = 2**19  # the batch at which the walkthrough's rates were tuned
REFERENCE_BLOCKS = 12  # the depth at which its weight decay was
REFERENCE_WIDTH = 768  # the width at which its rates of embedding and readout were
REFERENCE_DECAY = 0.28
INJECTION_WARMUP_TOKENS = 600 * REFERENCE_BATCH_TOKENS


def walkthrough_decay(model: ModelConfig, batch_tokens: int) -> float:
    """Weight decay of the matrices: ``0.28 sqrt(B / 2^19) D_12 / D``.

    D is a compute-optimal number of tokens and so proportional to parameters; D_12 is that of the same model with 12
    blocks. Both arms get the value of the pre-norm twin.
    """
    twin = model.replace(residual="pre_norm")
    depth_ratio = counted_parameters(twin.replace(n_layers=REFERENCE_BLOCKS)) / counted_parameters(twin)
    return REFERENCE_DECAY * math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS) * depth_ratio


def walkthrough_optimizer(matrix_weight_decay: float, gate_lr: float = 1e-3) -> OptimizerConfig:
    """The walkthrough's rates, decays and averages by role, before they are scaled with batch and width."""
    return OptimizerConfig(
        matrix_lr=0.012,
        matrix_momentum=0.97,
        matrix_weight_decay=matrix_weight_decay,
        embedding_lr=0.18,
        embedding_betas=(0.8, 0.995),
        embedding_weight_decay=0.001,
        free_head_lr=0.006,
        unit_head_lr=0.006,
        head_betas=(0.8, 0.96),
        head_weight_decay=0.01,
        gate_lr=gate_lr,
        gate_betas=(0.8, 0.95),
        scalar_lr=0.005,
        scalar_betas=(0.8, 0.95),
        eps=1e-10,
        lr_reference_batch_tokens=REFERENCE_BATCH_TOKENS,
        lr_reference_width=REFERENCE_WIDTH,
    )


def _walkthrough(preset: str, flops: float, batch_tokens: int) -> RunConfig:
    model = PRESETS[preset]
    return RunConfig(
        model=model,
        flops=flops,
        convention="full",
        batch_size=batch_tokens // SEQ_LEN,
        seq_len=SEQ_LEN,
        device_batch_size=DEVICE_BATCH_SIZE,
        optimizer=walkthrough_optimizer(walkthrough_decay(model, batch_tokens)),
        schedule=ScheduleConfig(
            warmup_steps=40,
            warmdown=0.65,
            final_lr=0.05,
            injection_warmup_tokens=INJECTION_WARMUP_TOKENS,
            momentum_start=0.85,
            momentum_warmup_steps=400,
            momentum_end=0.90,
            weight_decay="cosine",
        ),
        dtype="bfloat16",
        data=CLIMBMIX,
        eval_bytes=50_000_000,
        health_interval=100,
        eval_interval=250,
        checkpoint_interval=500,
    )


def walkthrough_64x640() -> RunConfig:
    """The walkthrough's main pair: 64 blocks x 640 on ClimbMix, 3e19 FLOPs an arm, eight H100 for hours."""
    return _walkthrough("walkthrough-64x640", 3e19, 2**20)


def walkthrough_26_1e18() -> RunConfig:
    """The walkthrough's small pair: 26 blocks x 640 on ClimbMix, 1e18 FLOPs an arm."""
    return _walkthrough("walkthrough-26x640", 1e18, 2**19)


def walkthrough_26_3e18() -> RunConfig:
    """The walkthrough's middle pair: 26 blocks x 640 on ClimbMix, 3e18 FLOPs an arm."""
    return _walkthrough("walkthrough-26x640", 3e18, 2**19)
