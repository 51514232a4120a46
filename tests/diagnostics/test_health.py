"""One pass says what every sublayer does, with the same numbers as the figures."""

import json
import math

import pytest
import torch
from torch import nn

from nagnet.diagnostics.geometry import gate_health, norm_by_depth, rotation_by_depth
from nagnet.diagnostics.health import stream_health, sublayer_of, update_name
from nagnet.diagnostics.probe import observe_updates
from nagnet.errors import UserError
from nagnet.nn.residual import RESIDUAL_STREAMS

RULES = list(RESIDUAL_STREAMS)


@pytest.mark.parametrize("residual", RULES)
def test_numbers_are_those_of_the_figures(build_model, tokens, residual):
    model = build_model(residual, n_layers=3)
    model.set_injection(0.4)
    health = stream_health(model, tokens)
    assert health.update_index == [1, 2, 3, 4, 5, 6]
    assert health.norm == pytest.approx(norm_by_depth(model, tokens).mean[1:].tolist(), rel=1e-5)
    assert health.rotation == pytest.approx(rotation_by_depth(model, tokens).angle.tolist(), rel=1e-5)
    if residual == "norm_agnostic":
        assert health.gates == gate_health(model, tokens)
    else:
        assert health.gates is health.injected_gain is health.injection is None


@pytest.mark.parametrize("residual", RULES)
def test_alignment_is_the_cosine_of_the_branch_with_the_direction(build_model, tokens, residual):
    model = build_model(residual)
    expected = []

    def observer(step):
        x, f = step.before.merge().double(), step.branch.double()
        expected.append(((x * f).sum(-1) / (x.norm(dim=-1) * f.norm(dim=-1))).mean().item())

    with observe_updates(model, observer):
        model.trunk(tokens)
    assert max(map(abs, expected)) > 0.05
    assert stream_health(model, tokens).alignment == pytest.approx(expected, abs=1e-5)


def test_a_zero_branch_is_aligned_with_nothing(build_model, tokens):
    model = build_model()
    nn.init.zeros_(model.blocks[1].mlp.out_proj.weight)
    health = stream_health(model, tokens)
    assert health.alignment[3] == 0.0 and health.rotation[3] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("injection", [0.0, 0.25, 1.0])
def test_gain_comes_with_and_without_the_injection_scale(build_model, fix_modulation, tokens, injection):
    model = build_model()
    fix_modulation(model, 0.5)
    nn.init.constant_(model.stream.updates[2].alpha, -0.8)
    model.set_injection(injection)
    health = stream_health(model, tokens)
    gain = [0.5, 0.5 / math.sqrt(2), 0.4, 0.25]
    assert health.injection == injection
    assert health.gates.alpha == pytest.approx([1.0, 1 / math.sqrt(2), 0.8, 0.5], rel=1e-6)
    assert health.gates.mean_gain == pytest.approx(gain, rel=1e-6)
    assert health.injected_gain == pytest.approx([injection * value for value in gain], rel=1e-6)


@pytest.mark.parametrize("residual", RULES)
def test_row_is_plain_json_without_what_the_rule_lacks(build_model, tokens, residual):
    row = stream_health(build_model(residual, n_layers=4), tokens).to_dict()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    gated = {"alpha", "mean_gain", "injected_gain", "legacy_floor_fraction", "legacy_on_fraction", "legacy_dead"}
    lists = {"norm", "rotation", "alignment"} | (gated if residual == "norm_agnostic" else set())
    assert set(row["quartiles"]) == lists
    assert set(row) - {"injection"} == lists | {"update", "quartiles"}
    assert ("injection" in row) == (residual == "norm_agnostic")
    assert all(len(row[name]) == 8 for name in lists)


def test_quartiles_are_means_by_depth_of_all_or_one_kind_of_sublayer(build_model, fix_modulation, tokens):
    model = build_model(n_layers=4)
    fix_modulation(model, 0.5)
    health = stream_health(model, tokens)
    gain = health.gates.mean_gain
    for kept, got in (
        (gain, health.quartiles()["mean_gain"]),
        (gain[0::2], health.quartiles("attention")["mean_gain"]),
        (gain[1::2], health.quartiles("mlp")["mean_gain"]),
    ):
        size = len(kept) // 4
        assert got == pytest.approx([sum(kept[q * size : (q + 1) * size]) / size for q in range(4)])
    shallow = stream_health(build_model(n_layers=1), tokens)
    assert sum(math.isnan(value) for value in shallow.quartiles()["norm"]) == 2


def test_updates_are_named_by_sublayer_and_block():
    assert update_name(17) == "update 17 (attention of block 9)"
    assert update_name(18) == "update 18 (MLP of block 9)"
    assert update_name(1) == "update 1 (attention of block 1)"
    assert [sublayer_of(index) for index in (1, 2, 3)] == ["attention", "mlp", "attention"]


def test_norms_beyond_float32_and_nan_stay_visible(build_model, fix_modulation, tokens):
    model = build_model(init_encode_gain=1e38)
    fix_modulation(model, 1.0)
    nn.init.constant_(model.stream.updates[2].alpha, 1e3)
    assert 1e40 < stream_health(model, tokens).norm[-1] < math.inf
    nn.init.constant_(model.stream.updates[2].alpha, math.nan)
    health = stream_health(model, tokens)
    assert [math.isnan(value) for value in health.norm] == [False, False, True, True]
    assert [math.isnan(value) for value in health.gates.mean_gain] == [False, False, True, True]


@pytest.mark.parametrize("residual", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_give_the_same_numbers(build_model, tokens, residual, dtype):
    expected = stream_health(build_model(residual), tokens)
    health = stream_health(build_model(residual).to(dtype), tokens)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert health.norm == pytest.approx(expected.norm, rel=tolerance)
    assert health.alignment == pytest.approx(expected.alignment, abs=tolerance)


def test_model_is_left_as_it_was(build_model, tokens):
    model = build_model().train()
    before = model(tokens)
    stream_health(model, tokens)
    assert model.training and all("advance" not in vars(update) for update in model.stream.updates)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (3, 0)])
def test_tokens_of_a_wrong_shape(build_model, shape):
    with pytest.raises(UserError, match="tokens"):
        stream_health(build_model(), torch.zeros(shape, dtype=torch.long))


def test_one_token(build_model):
    assert all(map(math.isfinite, stream_health(build_model(), torch.tensor([[5]])).norm))
