import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from nagnet.diagnostics.geometry import gain_by_update, gate_health, norm_by_depth, rotation_by_depth
from nagnet.errors import UserError
from nagnet.nn.residual import RESIDUAL_STREAMS, NormAgnosticResidual

RULES = list(RESIDUAL_STREAMS)


@pytest.mark.parametrize(("modulation", "growth"), [(1.0, 8.06), (0.5, 1.77)])
def test_norm_grows_by_the_closed_form(build_model, fix_modulation, tokens, modulation, growth):
    model = build_model(n_layers=32, branch_eps=0.0)
    fix_modulation(model, modulation)
    norm = norm_by_depth(model, tokens)
    gains = [1 + modulation**2 / index for index in range(1, 65)]
    expected = torch.tensor([1.0, *gains], dtype=torch.float64).cumprod(0).sqrt()
    for values in (norm.mean / norm.mean[0], norm.first / norm.first[0]):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=0)
    assert (norm.mean[-1] / norm.mean[0]).item() == pytest.approx(growth, abs=0.005)
    if modulation == 1.0:
        assert expected[-1].item() == pytest.approx(math.sqrt(65))


def test_rotations_sum_to_413_degrees(build_model, fix_modulation, tokens):
    model = build_model(n_layers=32, branch_eps=0.0)
    fix_modulation(model, 0.5)
    rotation = rotation_by_depth(model, tokens)
    expected = [math.degrees(math.atan(0.5 / math.sqrt(index))) for index in range(1, 65)]
    torch.testing.assert_close(rotation.angle, torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=0)
    assert rotation.cumulative[-1].item() == pytest.approx(413, abs=0.5)


def test_norm_statistics_are_those_of_the_tokens(build_model, tokens):
    model = build_model("pre_norm")
    norm = norm_by_depth(model, tokens)
    rms = model.trunk(tokens).stream.detach().double().square().mean(-1).sqrt()
    for got, wanted in (
        (norm.mean, rms.mean()),
        (norm.median, rms.median()),
        (norm.mean_without_first, rms[:, 1:].mean()),
        (norm.first, rms[:, 0].mean()),
    ):
        assert got.shape == (5,)
        assert got[-1].item() == pytest.approx(wanted.item(), rel=1e-5)
    assert len({norm.mean[-1].item(), norm.mean_without_first[-1].item(), norm.first[-1].item()}) == 3


def test_pre_norm_with_zero_branches_neither_grows_nor_turns(build_model, tokens):
    model = build_model("pre_norm")
    for block in model.blocks:
        nn.init.zeros_(block.attention.out_proj.weight)
        nn.init.zeros_(block.mlp.out_proj.weight)
    assert torch.equal(norm_by_depth(model, tokens).mean, torch.ones(5).double() * norm_by_depth(model, tokens).mean[0])
    assert rotation_by_depth(model, tokens).cumulative.abs().max() < 1e-6


@pytest.mark.parametrize("residual", RULES)
def test_one_token_of_one_document(build_model, residual):
    model, token = build_model(residual), torch.tensor([[5]])
    norm = norm_by_depth(model, token)
    assert norm.mean_without_first.isnan().all()
    torch.testing.assert_close(norm.mean, norm.first, rtol=0, atol=0)
    assert norm.mean.isfinite().all() and rotation_by_depth(model, token).angle.isfinite().all()


def test_norms_beyond_float32_and_nan_stay_visible(build_model, fix_modulation, tokens):
    model = build_model(init_encode_gain=1e38)
    fix_modulation(model, 1.0)
    nn.init.constant_(model.stream.updates[2].alpha, 1e3)
    assert 1e40 < norm_by_depth(model, tokens).mean[-1].item() < math.inf
    nn.init.constant_(model.stream.updates[2].alpha, math.nan)
    assert norm_by_depth(model, tokens).mean.isnan().tolist() == [False, False, False, True, True]
    health = gate_health(model, tokens)
    assert math.isnan(health.mean_gain[2]) and 3 not in health.collapsed_updates


def test_gains_are_alpha_times_the_modulation(build_model, fix_modulation, tokens):
    model = build_model(n_layers=3)
    fix_modulation(model, 0.5)
    nn.init.constant_(model.stream.updates[3].alpha, -0.8)
    model.set_injection(0.25)
    gain = gain_by_update(model, tokens)
    start = torch.arange(1, 7, dtype=torch.float64).rsqrt()
    now = start.clone()
    now[3] = 0.8
    torch.testing.assert_close(gain.initial_alpha, start)
    torch.testing.assert_close(gain.alpha, now, rtol=1e-6, atol=0)
    torch.testing.assert_close(gain.mean_gain, now / 2, rtol=1e-6, atol=0)
    assert gain.update_index.tolist() == [1, 2, 3, 4, 5, 6]
    assert gain_by_update(build_model("pre_norm"), tokens) is None


def test_alarm_names_exactly_the_collapsed_updates(build_model, tokens):
    model = build_model(n_layers=6)
    for update in model.stream.updates[7:11]:
        nn.init.constant_(update.alpha, 1e-4)
    assert gate_health(model, tokens).collapsed_updates == [8, 9, 10, 11]


def test_alarm_is_silent_on_a_deep_healthy_model(build_model, tokens):
    health = gate_health(build_model(n_layers=64), tokens)
    assert health.update_index == list(range(1, 129))
    assert health.collapsed_updates == []
    assert sum(health.legacy_dead) > 20, "the older criterion fires on it, which is why there is another"


def test_alarm_does_not_mistake_the_injection_warm_up_for_a_collapse(build_model, tokens):
    model = build_model()
    model.set_injection(0.0)
    assert gate_health(model, tokens).collapsed_updates == []


def test_health_numbers(build_model, fix_modulation, tokens):
    model = build_model(n_layers=4)
    fix_modulation(model, 0.5)
    shut = model.stream.updates[4].modulator
    nn.init.constant_(shut.bias, -30.0)
    health = gate_health(model, tokens)
    assert health.legacy_floor_fraction == [0, 0, 0, 0, 1, 0, 0, 0]
    assert health.legacy_on_fraction == [1, 1, 1, 0, 0, 0, 0, 0]  # 0.5 / sqrt(4) is exactly 0.25, not above
    assert health.legacy_dead == [False, False, False, False, True, False, False, False]
    assert health.collapsed_updates == [5]
    assert health.legacy_quartiles["on_fraction"] == [1, 0.5, 0, 0]
    assert health.legacy_quartiles["dead_fraction"] == [0, 0, 0.5, 0]
    assert health.initial_gain == pytest.approx([0.5 / math.sqrt(index) for index in range(1, 9)])
    nn.init.constant_(shut.raw_beta, -20.0)  # u is at its floor, yet u^beta is nearly 1
    assert gate_health(model, tokens).legacy_floor_fraction[4] == 1


def test_initial_gain_can_be_given(build_model, tokens):
    model = build_model()
    measured = gate_health(model, tokens).mean_gain
    assert gate_health(model, tokens, initial_gain=[11 * gain for gain in measured]).collapsed_updates == [1, 2, 3, 4]
    assert gate_health(model, tokens, initial_gain=[9 * gain for gain in measured]).collapsed_updates == []
    with pytest.raises(UserError, match="3 values"):
        gate_health(model, tokens, initial_gain=[0.1] * 3)


class ForeignModel(nn.Module):
    """A model of somebody else, with updates in an order of its own and ``write`` computing the gain."""

    def __init__(self, give_gain: bool):
        super().__init__()
        self.give_gain = give_gain
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rules = nn.ModuleList(NormAgnosticResidual(16, update_index=index) for index in (3, 1, 2))

    def forward(self, tokens):
        state = self.rules[1].begin(self.embedding(tokens))
        for layer, rule in zip(self.layers, self.rules, strict=True):
            gain = rule.gain(state) if self.give_gain else None
            state = rule.write(state, layer(rule.read(state)), gain)
        return state.merge()


@pytest.mark.parametrize("give_gain", [True, False])
def test_gate_health_of_a_foreign_model(tokens, give_gain):
    model = ForeignModel(give_gain)
    nn.init.constant_(model.rules[0].alpha, 1e-4)
    health = gate_health(model, tokens)
    assert health.update_index == [1, 2, 3]
    assert health.collapsed_updates == [3]
    assert model.training


def test_an_update_that_runs_twice_is_averaged_over_both(tokens):
    model = ForeignModel(True)
    both, alone = gate_health(model, tokens), [gate_health(model, tokens[row : row + 1]).mean_gain for row in range(3)]
    forward = model.forward
    model.forward = lambda tokens: [forward(tokens[:1]), forward(tokens[1:])]
    twice = gate_health(model, tokens)
    assert twice.mean_gain == pytest.approx(both.mean_gain, rel=1e-6)
    assert both.mean_gain == pytest.approx([sum(gains) / 3 for gains in zip(*alone, strict=True)], rel=1e-6)
    assert alone[0] != pytest.approx(alone[1], rel=1e-4)


def test_an_update_that_does_not_run_is_not_called_collapsed(tokens):
    model = ForeignModel(True)
    model.spare = NormAgnosticResidual(16, update_index=4)
    health = gate_health(model, tokens)
    assert math.isnan(health.mean_gain[3]) and health.collapsed_updates == []


@pytest.mark.parametrize("measure", [norm_by_depth, rotation_by_depth, gain_by_update, gate_health])
@pytest.mark.parametrize("shape", [(6,), (0, 6), (3, 0)])
def test_tokens_of_a_wrong_shape(build_model, measure, shape):
    with pytest.raises(UserError, match="tokens"):
        measure(build_model(), torch.zeros(shape, dtype=torch.long))


def test_geometry_needs_torch_alone():
    program = """
import sys
sys.modules.update(dict.fromkeys(("numpy", "matplotlib", "jinja2")))  # importing one of these now fails
import nagnet.diagnostics.geometry
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_tokens_are_integers(build_model):
    with pytest.raises(UserError, match="give integers"):
        norm_by_depth(build_model(), torch.rand(2, 3))
