"""The depth curve on a small random model: what a point says, and that controls skip as much."""

import math

import numpy as np
import pytest
import torch

from nagnet.diagnostics.skipping import CONTROLS, FULL_DEPTH, SCORED, depth_curve, draw_depth_curve
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores
from nagnet.models.flops import forward_flops_per_token

RATES = (0.2, 0.5)


@pytest.fixture
def scored(build_model, generator):
    """A random model of spread scores, and a function that scores some text by a loss function."""
    model = build_model(n_layers=3)
    with torch.no_grad():
        for update in model.stream.updates:
            update.modulator.bias.normal_(std=0.3, generator=generator)
            update.modulator.weight.normal_(generator=generator)
    tokens = torch.randint(32, (4, 65), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 40:] = -100  # padding

    def score(losses):
        with torch.no_grad():
            nats = losses(tokens[:, :-1], targets).masked_fill(targets == -100, 0).double().sum(1)
        n_tokens = (targets != -100).sum(1).numpy()
        return DocumentScores(("a", "b", "c", "d"), nats.numpy(), 3 * n_tokens, n_tokens)

    return model, score


def test_points(scored):
    model, score = scored
    expected = score(lambda tokens, targets: model.score(tokens, targets)[0])
    points = depth_curve(model, score, 64, RATES)
    assert [point.rule for point in points] == [FULL_DEPTH, *(2 * [SCORED, *CONTROLS])]
    full = points[0]
    assert full.bits_per_byte == expected.bits_per_byte and full.run_rates == [1.0] * 6
    assert full.nats_per_token == pytest.approx(full.bits_per_byte * math.log(2) * 3)
    for index, rate in enumerate(RATES):
        ours, *others = points[1 + 5 * index : 6 + 5 * index]
        assert ours.sublayer_tokens == pytest.approx(rate, abs=0.1)
        for point in (ours, *others):
            assert point.sublayer_tokens == pytest.approx(1 - np.mean(point.run_rates))
            assert point.flops_per_token == forward_flops_per_token(model.config, 64, run_rates=point.run_rates)
            assert point.sublayer_tokens == pytest.approx(ours.sublayer_tokens, abs=1 / 12 + 0.02)
        random, by_sublayer, gain, constant = others
        assert random.run_rates == pytest.approx([1 - ours.sublayer_tokens] * 6, abs=0.1)
        assert by_sublayer.run_rates == pytest.approx(ours.run_rates, abs=0.1)
        assert set(gain.run_rates) | set(constant.run_rates) <= {0.0, 1.0}
    assert model.skipping is None  # as it was


def test_sublayers_of_lowest_gain(scored, fix_modulation):
    """alpha falls with depth and m is 1/2: the last sublayers have the lowest gain, and all scores are near 1/2."""
    model, score = scored
    fix_modulation(model, 0.5)
    points = depth_curve(model, score, 64, (0.5,), ("lowest gain",))
    n_skipped = round(6 * points[1].sublayer_tokens)
    assert points[2].run_rates == [1.0] * (6 - n_skipped) + [0.0] * n_skipped


def test_the_models_own_threshold_survives(scored):
    model, score = scored
    model.set_skip_threshold(0.4)
    depth_curve(model, score, 64, (0.3,), ())
    assert float(model.skipping.threshold) == pytest.approx(0.4) and model.skipping.replaced is None


@pytest.mark.parametrize(
    ("rates", "controls", "message"),
    [((0.0,), (), "skip rate 0.0"), ((1.0,), (), "skip rate 1.0"), ((0.5,), ("luck",), "control 'luck'")],
)
def test_bad_input(scored, rates, controls, message):
    with pytest.raises(UserError, match=message):
        depth_curve(*scored, 64, rates, controls)


def test_a_rule_without_a_gain(build_model):
    with pytest.raises(UserError, match="has no gain"):
        depth_curve(build_model("pre_norm"), lambda losses: None, 64, RATES)


def test_figure(scored, tmp_path):
    points = depth_curve(*scored, 64, RATES)
    assert [path.name for path in draw_depth_curve(points, tmp_path)] == ["depth_curve.png", "depth_curve.svg"]
