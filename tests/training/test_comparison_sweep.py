"""Tuning: every arm gets its trials, the best of each is taken, and all are reported."""

import dataclasses

import pytest

from nagnet.errors import UserError
from nagnet.training.plan import Sweep
from nagnet.training.sweep import TrialScore, trial_flops, tune


def runner(score, ran=None):
    def run_trials(configs):
        if ran is not None:
            ran.extend(configs)
        return {config: score(config) for config in configs}

    return run_trials


def by_distance(config) -> TrialScore:
    """Best at matrix rate 0.02 and gate rate 0.004."""
    rate = config.optimizer.matrix_lr or 0.01  # None: the rule's own
    return TrialScore(1 + abs(rate - 0.02) + abs(config.optimizer.gate_lr - 0.004))


def test_each_arm_gets_its_best_values_one_sweep_after_another(tiny_plan):
    sweeps = (
        Sweep(None, "optimizer.matrix_lr", ("0.01", "0.02", "0.04")),
        Sweep("norm_agnostic", "optimizer.gate_lr", ("0.001", "0.004")),
        Sweep("pre_norm", "model.readout.softcap", ("10", "30")),
    )
    ran = []
    plan = tiny_plan(sweeps=sweeps, n_seeds=3, sweep_budget=5e7)
    tuned, rows = tune(plan, runner(by_distance, ran))
    assert {arm: config.optimizer.matrix_lr for arm, config in tuned.arms.items()} == dict.fromkeys(plan.arms, 0.02)
    assert tuned.arms["norm_agnostic"].optimizer.gate_lr == 0.004
    assert tuned.arms["pre_norm"].model.readout.softcap == 10, "the first of equals"
    assert tuned.arms["norm_agnostic"].flops == plan.arms["norm_agnostic"].flops
    assert {(config.flops, config.seed) for config in ran} == {(5e7, 0)}
    assert [row["chosen"] for row in rows if row["arm"] == "norm_agnostic"] == [False, True, False, False, True]
    assert [row["at_edge"] for row in rows if row["arm"] == "norm_agnostic"] == [False, False, False, False, True]
    assert [config.optimizer.matrix_lr for config in ran[6:]] == [0.02] * len(ran[6:]), "from the best so far"
    assert len(rows) == 10 and trial_flops(plan) == 5e7
    assert dataclasses.replace(tuned, arms=plan.arms) == plan


def test_a_config_that_ran_is_not_run_again(tiny_plan):
    standard = tiny_plan().config.optimizer.gate_lr
    sweeps = (
        Sweep(None, "optimizer.matrix_lr", ("0.01", "0.02")),
        Sweep(None, "optimizer.gate_lr", (str(standard), "0.1")),
    )
    ran = []
    _, rows = tune(tiny_plan(sweeps=sweeps), runner(by_distance, ran))
    assert len(rows) == 8 and len(ran) == len(set(ran)) == 6


def test_a_trial_that_diverged_loses(tiny_plan):
    def score(config):
        diverged = config.optimizer.matrix_lr > 0.03
        return TrialScore(None, "the loss is nan") if diverged else by_distance(config)

    sweep = Sweep(None, "optimizer.matrix_lr", ("0.1", "0.01"))
    tuned, rows = tune(tiny_plan(sweeps=(sweep,)), runner(score))
    assert tuned.arms["pre_norm"].optimizer.matrix_lr == 0.01
    assert rows[0]["diverged"] == "the loss is nan" and rows[0]["bits_per_byte"] is None
    with pytest.raises(UserError, match="every trial of norm_agnostic"):
        tune(tiny_plan(sweeps=(dataclasses.replace(sweep, values=("0.1", "0.2")),)), runner(score))


def test_trials_have_the_whole_budget_by_default(tiny_plan, tiny_config):
    sweep = (Sweep(None, "optimizer.matrix_lr", ("0.1", "0.01")),)
    ran = []
    tune(tiny_plan(sweeps=sweep, match="time"), runner(by_distance, ran))
    assert {config.flops for config in ran} == {tiny_config.flops} == {trial_flops(tiny_plan(sweeps=sweep))}


def test_words_have_no_edge(tiny_plan):
    _, rows = tune(tiny_plan(sweeps=(Sweep(None, "model.mlp", ("swiglu", "relu_squared")),)), runner(by_distance))
    assert not any(row["at_edge"] for row in rows)
