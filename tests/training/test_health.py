"""What the trainer watches: shut gates, gradient norms, tensors that are no longer finite."""

import json
import math

import pytest
import torch
from torch import nn

from nagnet.diagnostics.health import stream_health
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.health import (
    HealthMonitor,
    describe_alarms,
    gradient_norms,
    health_tokens,
    nonfinite_tensors,
)
from nagnet.training.optimizer import OptimizerConfig, build_optimizers, parameter_roles

TOKENS = torch.arange(24).reshape(2, 12)


def build(n_layers=6, residual="norm_agnostic") -> Decoder:
    shape = {"d_model": 16, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16, "n_directions": 3}
    return Decoder(ModelConfig(residual=residual, n_layers=n_layers, **shape), seed=0)


def shut(model: Decoder, *indices: int) -> None:
    for index in indices:
        nn.init.constant_(model.stream.updates[index - 1].alpha, 1e-4)


def alarms_after(monitor: HealthMonitor, model: Decoder, intervals: int = 1) -> list[int]:
    for _ in range(intervals):
        _, alarms = monitor.check(stream_health(model, TOKENS))
    return [alarm.update_index for alarm in alarms]


@pytest.mark.parametrize("measured_init", [False, True])
def test_alarm_names_exactly_the_dead_sublayers_after_two_intervals(measured_init):
    model = build()
    gain = stream_health(model, TOKENS).gates.mean_gain
    monitor = HealthMonitor(gain if measured_init else None)
    shut(model, 8, 9, 10, 11)
    assert alarms_after(monitor, model) == []
    row, alarms = monitor.check(stream_health(model, TOKENS))
    assert [alarm.update_index for alarm in alarms] == [8, 9, 10, 11]
    assert row["alarms"] == [
        "update 8 (MLP of block 4)",
        "update 9 (attention of block 5)",
        "update 10 (MLP of block 5)",
        "update 11 (attention of block 6)",
    ]
    assert row["health"]["mean_gain"][7] == alarms[0].mean_gain < 1e-4 < 0.1 * alarms[0].initial_gain


def test_a_deep_healthy_model_raises_no_alarm():
    assert alarms_after(HealthMonitor(), build(n_layers=64), intervals=3) == []


def test_a_gate_that_opens_again_counts_from_the_start():
    model, monitor = build(), HealthMonitor()
    alpha = model.stream.updates[7].alpha.item()
    for value, expected in ((1e-4, []), (alpha, []), (1e-4, []), (1e-4, [8]), (1e-4, [8]), (alpha, [])):
        nn.init.constant_(model.stream.updates[7].alpha, value)
        assert alarms_after(monitor, model) == expected


def test_the_injection_warm_up_does_not_count():
    model, monitor = build(), HealthMonitor()
    shut(model, 8)
    model.set_injection(0.99)
    assert alarms_after(monitor, model, intervals=5) == []
    model.set_injection(1.0)
    assert alarms_after(monitor, model) == []
    assert alarms_after(monitor, model) == [8]


def test_a_small_gain_is_measured_against_its_own_start():
    model = build()
    gain = stream_health(model, TOKENS).gates.mean_gain
    assert alarms_after(HealthMonitor([11 * value for value in gain]), model, intervals=2) == list(range(1, 13))
    assert alarms_after(HealthMonitor([9 * value for value in gain]), model, intervals=2) == []


def test_state_goes_through_json_and_resumes_exactly():
    model, first = build(), HealthMonitor([0.5] * 12)
    shut(model, 3)
    alarms_after(first, model)
    second = HealthMonitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert alarms_after(second, model) == alarms_after(first, model) == [3]
    fresh = HealthMonitor()
    fresh.load_state_dict(json.loads(json.dumps(HealthMonitor().state_dict())))
    assert fresh.state_dict() == HealthMonitor().state_dict()


def test_a_model_of_another_depth_is_refused():
    monitor = HealthMonitor()
    alarms_after(monitor, build())
    with pytest.raises(UserError, match="12 updates.*has 4"):
        alarms_after(monitor, build(n_layers=2))
    with pytest.raises(UserError, match="3 updates.*has 4"):
        alarms_after(HealthMonitor([0.5] * 3), build(n_layers=2))


def test_a_rule_without_gates_has_health_and_no_alarms():
    row, alarms = HealthMonitor().check(stream_health(build(residual="pre_norm"), TOKENS))
    assert alarms == [] and "alarms" not in row and len(row["health"]["norm"]) == 12


def test_line_for_the_user_names_updates_and_remedy():
    model, monitor = build(), HealthMonitor()
    shut(model, *range(6, 13))
    alarms_after(monitor, model)
    alarms = monitor.check(stream_health(model, TOKENS))[1]
    line = describe_alarms(alarms)
    assert "7 updates have shut" in line and "update 9 (attention of block 5): gain " in line and "3 more" in line
    assert "injection warm-up" in line and "\n" not in line
    assert "1 update has shut (update 6 (MLP of block 3)" in describe_alarms(alarms[:1])


def test_health_is_measured_on_few_tokens():
    assert health_tokens(torch.zeros(64, 2048)).numel() <= 300
    assert health_tokens(torch.zeros(2, 10)).shape == (2, 10)


def trained_once(residual="norm_agnostic"):
    model = build(2, residual)
    for name, parameter in model.named_parameters():
        if name.endswith("out_proj.weight"):
            nn.init.normal_(parameter, std=0.1)
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    return model, build_optimizers(model, OptimizerConfig())


@pytest.mark.parametrize("residual", ["norm_agnostic", "pre_norm"])
def test_gradient_norms_are_those_of_the_roles(residual):
    model, optimizers = trained_once(residual)
    norms = gradient_norms(optimizers)
    by_role: dict[str, list] = {}
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        by_role.setdefault(roles[name], []).append(parameter.grad.flatten())
    expected = {role: torch.cat(parts).norm().item() for role, parts in by_role.items()}
    assert norms.by_role == pytest.approx(expected, rel=1e-5)
    assert all(value > 0 for value in norms.by_role.values())
    assert norms.total == pytest.approx(math.sqrt(sum(value**2 for value in expected.values())), rel=1e-6)


def test_gradient_norms_without_gradients_are_zero():
    model, optimizers = trained_once()
    model.blocks.zero_grad()
    norms = gradient_norms(optimizers)
    assert norms.by_role["matrix"] == 0.0 < norms.by_role["gate"]
    model.zero_grad()
    assert gradient_norms(optimizers).total == 0.0
    assert gradient_norms([]) == (0.0, {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_element_shows_in_total_and_role_and_is_named(value):
    model, optimizers = trained_once()
    parameter = model.stream.updates[2].modulator.weight
    parameter.grad[1, 3] = value
    norms = gradient_norms(optimizers)
    assert not math.isfinite(norms.total) and not math.isfinite(norms.by_role["gate"])
    assert math.isfinite(norms.by_role["matrix"])
    found = nonfinite_tensors(model)
    assert found == ([], ["stream.updates.2.modulator.weight"])
    with torch.no_grad():
        model.embedding.weight[3, 0] = value
    assert nonfinite_tensors(model).parameters == ["embedding.weight"]


def test_a_healthy_model_names_nothing():
    model, _ = trained_once()
    assert nonfinite_tensors(model) == ([], [])
    assert nonfinite_tensors(nn.ReLU()) == ([], [])
