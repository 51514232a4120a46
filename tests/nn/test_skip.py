"""Rotation scores, policies, and the threshold that training steers."""

import math

import pytest
import torch

from nagnet import NormAgnosticResidual, PreNormResidual, SkipPolicy
from nagnet.errors import UserError
from nagnet.nn.skip import NOTHING_SKIPPED, Decision, Skipping, run_tokens


def rule_with(alpha: float) -> NormAgnosticResidual:
    rule = NormAgnosticResidual(16, update_index=3, n_directions=4).double()
    with torch.no_grad():
        rule.alpha.fill_(alpha)
        rule.modulator.weight.normal_()
    return rule


def states(rule):
    return rule.begin(torch.randn(200, 16, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.7, -0.7, 3.0])
def test_score_is_the_share_of_the_largest_angle(alpha):
    rule = rule_with(alpha)
    state = states(rule)
    gain = rule.gain(state)
    expected = torch.atan(abs(alpha) * rule.modulator(state.direction)) / math.atan(abs(alpha))
    score = rule.rotation_score(gain)
    torch.testing.assert_close(score, expected)
    assert score.min() >= 0 and score.max() <= 1
    order = gain.abs().argsort()
    assert (score[order].diff() >= 0).all()


def test_score_goes_to_the_modulation_as_alpha_goes_to_zero():
    rule = rule_with(1e-30)
    state = states(rule)
    torch.testing.assert_close(rule.rotation_score(rule.gain(state)), rule.modulator(state.direction))


def test_score_where_nothing_turns_is_zero():
    rule = rule_with(0.0)
    assert (rule.rotation_score(rule.gain(states(rule))) == 0).all()


def test_score_does_not_change_during_the_injection_warm_up():
    rule = rule_with(1e-3)  # so small that arctan is its argument
    state = states(rule)
    before = rule.rotation_score(rule.gain(state))
    rule.set_injection(0.25)
    torch.testing.assert_close(rule.rotation_score(rule.gain(state)), before, rtol=1e-5, atol=0)


def test_a_rule_without_a_gain_has_no_score():
    with pytest.raises(UserError, match="PreNormResidual has no gain"):
        PreNormResidual(16, update_index=1).rotation_score(None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"target_rate": 1.0}, "target_rate is 1.0"),
        ({"target_rate": -0.2}, "target_rate is -0.2"),
        ({"threshold": 0.1, "target_rate": 0.1}, "give one of the two"),
        ({"target_rate": 0.1, "start_step": -1}, "start_step is -1"),
        ({"target_rate": 0.1, "averaging": 1.0}, "averaging is 1.0"),
    ],
)
def test_bad_policies(values, message):
    with pytest.raises(UserError, match=message):
        SkipPolicy(**values)


def test_a_skipped_token_turns_toward_x():
    rule = NormAgnosticResidual(16, update_index=1, n_directions=4, skip_vector=True).double()
    state, gain = states(rule), torch.full((200,), 0.5, dtype=torch.float64)
    branch = torch.zeros(200, 16, dtype=torch.float64)
    same = rule.write(state, branch, gain)
    assert torch.equal(same.direction, state.direction) and torch.equal(same.log_norm, state.log_norm)
    with torch.no_grad():
        rule.skip_vector.normal_()
    turned = rule.write(state, branch, gain)
    expected = NormAgnosticResidual(16, update_index=1).double().write(state, branch + rule.skip_vector, gain)
    torch.testing.assert_close(turned.direction, expected.direction)
    assert (turned.log_norm > state.log_norm).all()


@pytest.mark.parametrize(
    ("run", "rows"), [([0, 0, 0, 0, 0, 0], []), ([1] * 6, range(6)), ([0, 1, 1, 0, 0, 1], [1, 2, 5])]
)
def test_only_running_tokens_enter_a_packed_sublayer(run, rows):
    entered = []
    x = torch.randn(2, 3, 4, requires_grad=True)

    def sublayer(tokens):
        entered.append(tokens.reshape(-1, 4).clone())
        return 2 * tokens

    mask = torch.tensor(run, dtype=torch.bool).view(2, 3)
    branch = run_tokens(sublayer, x, Decision(torch.zeros(2, 3), mask, "packed"))
    assert torch.equal(entered[0], x.reshape(6, 4)[list(rows)])
    assert torch.equal(branch, torch.where(mask.unsqueeze(-1), 2 * x, 0.0))
    branch.sum().backward()
    assert torch.equal(x.grad, torch.where(mask.unsqueeze(-1), 2.0, 0.0).expand_as(x))
    entered.clear()
    with torch.no_grad():
        run_tokens(sublayer, x, Decision(torch.zeros(2, 3), mask, "packed"))
    assert bool(entered) == any(run)  # without gradients nothing is called for nobody


def observed(scores, policy=None) -> Skipping:
    skipping = Skipping(1, policy)
    scores = torch.as_tensor(scores, dtype=torch.float32).view(1, -1)
    skipping.observe([Decision(scores, scores > skipping.threshold, "masked")])
    return skipping


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_quantile(rate):
    scores = torch.rand(20_000)
    skipping = observed(scores)
    assert skipping.quantile(rate) == pytest.approx(float(scores.quantile(rate)), abs=2e-4)
    assert float((scores <= skipping.quantile(rate)).float().mean()) == pytest.approx(rate, abs=2e-3)


def test_counts_leave_padding_out():
    skipping = Skipping(2)
    skipping.set_threshold(0.5)
    scores = torch.tensor([[0.2, 0.6, 0.9]])
    decisions = [Decision(scores, scores > 0.5, "masked"), Decision(scores, scores > 0.8, "masked")]
    skipping.observe(decisions, torch.tensor([[True, True, False]]))
    assert skipping.counts.tolist() == [[2, 2], [1, 0]]
    with skipping.counting(torch.tensor([[False, False, True]])):
        skipping.observe(decisions)
    assert skipping.run_rates() == [2 / 3, 1 / 3]
    assert int(skipping.histogram.sum()) == 6
    skipping.forget()
    assert skipping.run_rates() == [1.0, 1.0]


def test_threshold_is_an_average_of_quantiles_of_earlier_batches():
    policy = SkipPolicy(target_rate=0.5, averaging=0.75)
    skipping = observed(torch.linspace(0, 1, 1001), policy)
    skipping.steer(started=False)
    assert float(skipping.threshold) == NOTHING_SKIPPED
    skipping.steer(started=True)
    assert float(skipping.threshold) == pytest.approx(0.5, abs=1e-3)
    skipping.forget()
    skipping.observe([Decision(torch.full((1, 9), 0.1), torch.ones(1, 9, dtype=torch.bool), "masked")])
    skipping.steer(started=True)
    assert float(skipping.threshold) == pytest.approx(0.75 * 0.5 + 0.25 * 0.1, abs=1e-3)


def test_a_fixed_threshold_and_a_rate_of_zero():
    fixed = observed([0.5], SkipPolicy(threshold=0.3))
    assert float(fixed.threshold) == pytest.approx(0.3)
    fixed.steer(started=False)
    assert float(fixed.threshold) == NOTHING_SKIPPED
    fixed.steer(started=True)
    assert float(fixed.threshold) == pytest.approx(0.3)
    none = observed([0.5], SkipPolicy(target_rate=0.0))
    none.steer(started=True)
    assert float(none.threshold) == NOTHING_SKIPPED


def test_the_threshold_stays_float32_and_is_saved_with_a_policy_alone():
    for policy, saved in ((SkipPolicy(target_rate=0.2), ["threshold"]), (None, [])):
        skipping = Skipping(3, policy).to(torch.bfloat16)
        assert skipping.threshold.dtype == torch.float32 and skipping.counts.dtype == torch.int64
        assert list(skipping.state_dict()) == saved
