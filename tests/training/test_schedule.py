"""What is in force at a step, and that the optimizers get it."""

import math

import pytest
import torch

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.optimizer import OptimizerConfig, build_optimizers
from nagnet.training.schedule import ScheduleConfig, apply_schedule

TINY = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=16, n_directions=3)
WALKTHROUGH = ScheduleConfig(
    warmup_steps=40,
    warmdown=0.65,
    final_lr=0.05,
    injection_warmup_tokens=314_572_800,
    momentum_start=0.85,
    momentum_warmup_steps=400,
    momentum_end=0.90,
    weight_decay="cosine",
)
N, TOKENS = 9_425, 2**20


def test_rates_of_the_walkthrough():
    rates = [WALKTHROUGH.lr_scale(step, N) for step in range(N)]
    assert rates[0] == 1 / 40 and rates[38] == 39 / 40 and rates[39] == 1.0
    first_below = next(step for step in range(40, N) if rates[step] < 1.0)
    assert first_below == N - math.floor(0.65 * N)
    assert rates[-1] == pytest.approx(0.05 + 0.95 / (0.65 * N))
    assert all(a > b for a, b in zip(rates[first_below:-1], rates[first_below + 1 :], strict=True))


def test_injection_of_the_walkthrough_is_anchored_in_tokens():
    at = [WALKTHROUGH.injection(step, N, TOKENS) for step in range(N)]
    assert at[0] == 1 / 300 and at[299] == 1.0 and at[298] < 1.0  # 314,572,800 tokens are 300 steps of 2^20
    assert WALKTHROUGH.injection(299, N, TOKENS // 2) == 0.5
    assert WALKTHROUGH.injection(299, 10 * N, TOKENS) == 1.0
    with pytest.raises(ValueError, match="tokens_per_step"):
        WALKTHROUGH.injection(0, N)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, [1.0, 1.0, 1.0]), (0.5, [0.2, 0.4, 0.6]), (1.0, [0.1, 0.2, 0.3])]
)
def test_injection_by_share(share, expected):
    schedule = ScheduleConfig(injection_warmup=share)
    assert [schedule.injection(step, 10) for step in range(3)] == pytest.approx(expected)


def test_momentum_of_the_walkthrough():
    def momentum(step):
        return WALKTHROUGH.momentum(step, N, 0.97)

    assert momentum(0) == 0.85
    assert momentum(200) == pytest.approx(0.91)
    assert momentum(400) == momentum(3000) == 0.97
    start = N * (1 - 0.65)
    assert momentum(N - 1) == pytest.approx(0.90, abs=1e-4)
    assert momentum(round(start + 0.65 * N / 2)) == pytest.approx(0.935, abs=1e-4)


def test_momentum_stays_by_default():
    assert {ScheduleConfig().momentum(step, 10, 0.95) for step in range(10)} == {0.95}
    assert ScheduleConfig(warmdown=0.0, momentum_end=0.5).momentum(9, 10, 0.95) == 0.95


def test_weight_decay_falls_as_half_a_cosine():
    assert WALKTHROUGH.decay_scale(0, 100) == 1.0
    assert WALKTHROUGH.decay_scale(50, 100) == pytest.approx(0.5)
    assert 0.0 < WALKTHROUGH.decay_scale(99, 100) < 0.001
    assert ScheduleConfig().decay_scale(99, 100) == 1.0


def test_apply_schedule_puts_a_steps_values_into_the_groups():
    config = OptimizerConfig(
        matrix_lr=0.02, matrix_momentum=0.97, matrix_weight_decay=0.1, gate_lr=1e-3, head_weight_decay=0.01
    )
    optimizers = build_optimizers(Decoder(TINY, seed=0), config)
    for _ in range(2):  # values follow from peaks, not from each other
        values = apply_schedule(optimizers, WALKTHROUGH, 19, 100, TOKENS)
    assert values == {
        "lr_scale": 0.5,
        "injection": 20 / 300,
        "momentum": WALKTHROUGH.momentum(19, 100, 0.97),
        "weight_decay": 0.1 * WALKTHROUGH.decay_scale(19, 100),
    }
    groups = {group["role"]: group for optimizer in optimizers for group in optimizer.param_groups}
    assert groups["matrix"]["lr"] == 0.01
    assert groups["matrix"]["momentum"] == values["momentum"]
    assert groups["matrix"]["weight_decay"] == values["weight_decay"]
    assert groups["gate"]["lr"] == 5e-4 and groups["gate"]["weight_decay"] == 0.0
    assert groups["head"]["weight_decay"] == 0.01 and groups["head"]["betas"] == (0.8, 0.96)


def test_decay_in_force_shrinks_the_matrices():
    model = Decoder(TINY, seed=0)
    optimizers = build_optimizers(model, OptimizerConfig(matrix_lr=0.1, matrix_weight_decay=0.5))
    apply_schedule(optimizers, ScheduleConfig(warmup=0.0, weight_decay="cosine", warmdown=0.0), 50, 100, 1)
    weight = model.blocks[0].attention.q_proj.weight
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizers[0].step()
    torch.testing.assert_close(weight.detach(), before * (1 - 0.1 * 0.5 * 0.5))


def test_a_model_without_matrices_has_no_momentum_to_report():
    optimizers = build_optimizers(torch.nn.Embedding(4, 2), OptimizerConfig())
    assert set(apply_schedule(optimizers, ScheduleConfig(), 0, 10, 1)) == {"lr_scale", "injection"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 1.5}, "warmup is 1.5; give a share"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"injection_warmup_tokens": -5}, "injection_warmup_tokens is -5"),
        ({"momentum_start": 1.0}, "momentum_start is 1.0"),
        ({"momentum_end": -0.1}, "momentum_end is -0.1"),
        ({"weight_decay": "linear"}, "schedule weight_decay is 'linear'; choose constant, cosine"),
        ({"warmdown": "long"}, "schedule warmdown is 'long'; give a finite number"),
    ],
)
def test_bad_schedules_name_the_field(changes, message):
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**changes)


@pytest.mark.parametrize("steps", [1, 2])
def test_schedules_hold_in_runs_of_a_step(steps):
    for step in range(steps):
        assert 0.0 < WALKTHROUGH.lr_scale(step, steps) <= 1.0
        assert WALKTHROUGH.momentum(step, steps, 0.97) < 1.0
        assert 0.0 < WALKTHROUGH.injection(step, steps, 1) <= 1.0
