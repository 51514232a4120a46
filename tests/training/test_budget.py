"""Budgets of every kind become steps; utilisation and cost."""

import dataclasses

import pytest
import torch

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.flops import training_flops_per_token
from nagnet.models.presets import PRESETS
from nagnet.training.budget import (
    device_peak_flops,
    dollars_to_finish,
    format_mfu,
    mfu,
    resolve_budget,
)
from nagnet.training.config import RunConfig

MODEL = ModelConfig(residual="pre_norm", d_model=64, n_layers=4, n_heads=4, vocab_size=256, max_seq_len=128)
RUN = RunConfig(model=MODEL, steps=10, batch_size=4, seq_len=128)
PER_STEP = 3 * 492_032 * 512  # FLOPs: the published case, trained on 512 tokens
WITHOUT_EMBEDDING = 4 * 12 * 64 * 64 + 256 * 64  # matrices of the blocks, and the readout


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 10}, 10),
        ({"tokens": 5120}, 10),
        ({"tokens": 5120 + 255}, 10),
        ({"tokens": 5120 + 257}, 11),
        ({"tokens": 1}, 1),
        ({"flops": 10 * PER_STEP}, 10),
        ({"flops": 10.4 * PER_STEP}, 10),
        ({"flops": 10.6 * PER_STEP}, 11),
        ({"flops": 1.0}, 1),
        ({"tokens_per_parameter": 20}, round(20 * WITHOUT_EMBEDDING / 512)),
    ],
)
def test_each_kind_becomes_the_nearest_number_of_steps(budget, steps):
    resolved = resolve_budget(RUN.replace(**budget))
    assert resolved.n_steps == steps
    assert resolved.tokens == steps * 512
    assert resolved.flops_per_step == PER_STEP
    assert resolved.flops == steps * PER_STEP


def test_the_convention_of_the_config_counts():
    causal, full = (resolve_budget(RUN.replace(flops=1e10, convention=c)) for c in ("causal", "full"))
    assert (causal.flops_per_token, full.flops_per_token) == (3 * 492_032, 3 * 557_056)
    assert full.n_steps < causal.n_steps
    assert "full" in full.describe() and f"{full.n_steps:,} steps" in full.describe()


def test_a_tied_table_counts_as_the_readout_it_is():
    untied, tied = (
        resolve_budget(RUN.replace(tokens_per_parameter=20, model=MODEL.replace(tie_embeddings=tied)))
        for tied in (False, True)
    )
    assert untied.n_steps == tied.n_steps


def test_each_arm_gets_its_own_steps():
    model = PRESETS["walkthrough-64x640"]
    run = RunConfig(model=model, flops=3e19, convention="full", batch_size=512, seq_len=2048)
    twin = resolve_budget(run, model.replace(residual="pre_norm"))
    assert (resolve_budget(run).n_steps, twin.n_steps) == (9_425, 9_474)
    assert twin.flops_per_token == training_flops_per_token(model.replace(residual="pre_norm"), 2048, "full")
    same = dataclasses.replace(run, flops=None, steps=7)
    assert resolve_budget(same).n_steps == resolve_budget(same, model.replace(residual="pre_norm")).n_steps == 7


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H200", torch.float32, 66.9e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
    ],
)
def test_peak_rates_are_the_dense_ones(name, dtype, peak):
    assert device_peak_flops(name, dtype) == pytest.approx(peak, rel=1e-9)
    assert mfu(0.4 * peak, name, dtype) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla V100-SXM2-32GB", "bfloat16"),  # emulated
        ("NVIDIA H100", "bfloat16"),  # PCIe or SXM?
        ("NVIDIA GH200 480GB", "bfloat16"),
        ("NVIDIA L40", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),
        ("AMD EPYC 7763 64-Core Processor", "float32"),
        ("NVIDIA H200", "float64"),
    ],
)
def test_other_devices_are_unknown(name, dtype):
    assert device_peak_flops(name, dtype) is None
    assert format_mfu(mfu(1e12, name, dtype)) == "unknown"


def test_a_given_peak_takes_the_place_of_the_table():
    assert mfu(2e12, "NVIDIA H200", "bfloat16", peak_flops=8e12) == 0.25
    assert format_mfu(mfu(2e12, "some CPU", "float32", peak_flops=8e12)) == "25.0%"
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="peak_flops"):
            mfu(1.0, "some CPU", "float32", peak_flops=bad)


def test_cost_to_finish():
    assert dollars_to_finish(5400, 24.0) == 36.0
    assert dollars_to_finish(5400, None) is None
    with pytest.raises(UserError, match="dollars_per_hour is -1"):
        dollars_to_finish(1.0, -1.0)
