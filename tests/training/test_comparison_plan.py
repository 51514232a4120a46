"""What a comparison will do is settled, and refused where it is not fair, before anything runs."""

import json

import pytest

from nagnet.errors import UserError
from nagnet.training.budget import resolve_budget
from nagnet.training.plan import Plan, Sweep, differences, make_plan, matched_configs, parse_arms, undeclared


def test_arms_have_labels_or_their_own_names():
    assert parse_arms(" pre_norm , low=norm_agnostic,") == {"pre_norm": "pre_norm", "low": "norm_agnostic"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("pre_norm,pre_norm", "named twice"), ("a/b=pre_norm", "a label has"), ("=pre_norm", "a label has")],
)
def test_labels_name_folders(text, message):
    with pytest.raises(UserError, match=message):
        parse_arms(text)


def test_sweeps_are_read_from_text():
    assert Sweep.parse("optimizer.matrix_lr=0.01, 0.02") == Sweep(None, "optimizer.matrix_lr", ("0.01", "0.02"))
    assert Sweep.parse("pre_norm:model.readout.softcap=15") == Sweep("pre_norm", "model.readout.softcap", ("15",))


@pytest.mark.parametrize("text", ["optimizer.matrix_lr", "optimizer.matrix_lr=", "=1", ":x=1", "x=1,1"])
def test_other_text_is_no_sweep(text):
    with pytest.raises(UserError, match="sweep"):
        Sweep.parse(text)


def test_a_plan_survives_json(tiny_plan):
    plan = tiny_plan(
        "pre_norm,low=norm_agnostic",
        ["low:optimizer.gate_lr=0.002"],
        n_seeds=3,
        sweeps=(Sweep(None, "optimizer.matrix_lr", ("0.01", "0.02")),),
        sweep_budget=1e8,
        match="tokens",
        allow_differences=True,
    )
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.seeds == (0, 1, 2) and plan.others() == ["low"]


@pytest.mark.parametrize(
    ("arms", "baseline"),
    [("norm_agnostic,pre_norm", "pre_norm"), ("pre_norm,norm_agnostic", "pre_norm"), ("post_norm,none", "post_norm")],
)
def test_the_baseline_is_pre_norm_where_there_is_one(tiny_plan, arms, baseline):
    assert tiny_plan(arms).baseline == baseline


def test_declared_differences_are_allowed_and_others_named(tiny_plan):
    assert undeclared(tiny_plan()) == []
    changed = tiny_plan(changes=["norm_agnostic:model.qk_gain=1.0"])
    assert undeclared(changed) == ["model.qk_gain: norm_agnostic 1.0, pre_norm 1.2"]
    names = [name for name, _, _ in differences(changed, "norm_agnostic")]
    assert "model.residual" in names and "model.qk_gain" in names and "flops" not in names


def test_what_a_sweep_tunes_is_declared(tiny_plan):
    sweeps = tuple(Sweep(arm, "optimizer.gate_lr", ("0.001",)) for arm in ("norm_agnostic", "pre_norm"))
    assert undeclared(tiny_plan(changes=["pre_norm:optimizer.gate_lr=0.01"])) != []
    assert undeclared(tiny_plan(changes=["pre_norm:optimizer.gate_lr=0.01"], sweeps=sweeps)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": "pre_norm"}, "two or more"),
        ({"arms": ""}, "two or more"),
        ({"arms": "pre_norm,nagg"}, "nagg"),
        ({"baseline": "post_norm"}, "none of the arms"),
        ({"n_seeds": 0}, "1 or more"),
        ({"match": "steps"}, "flops, tokens, time"),
        ({"changes": ["optimizer.gate_lr=1"]}, "ARM:KEY=VALUE"),
        ({"changes": ["post_norm:optimizer.gate_lr=1"]}, "ARM:KEY=VALUE"),
        ({"changes": ["pre_norm:optimizer.gate=1"]}, "optimizer.gate_lr"),
        ({"changes": ["pre_norm:seq_len=32"], "allow_differences": True}, "same text"),
        ({"sweeps": (Sweep("pre_norm", "optimizer.gate_lr", ("1", "2")),)}, "norm_agnostic 0, pre_norm 2"),
        ({"sweeps": (Sweep("post_norm", "optimizer.gate_lr", ("1", "2")),)}, "post_norm"),
        ({"sweeps": (Sweep(None, "optimizer.gate_lr", ("fast",)),)}, "fast"),
        ({"sweeps": (Sweep(None, "optimizer.gate_lr", ("1",)),), "sweep_budget": -1.0}, "sweep budget"),
    ],
)
def test_an_unfair_or_impossible_plan_is_refused(tiny_plan, options, message):
    with pytest.raises(UserError, match=message):
        tiny_plan(**options)


def test_unequal_trials_can_be_allowed(tiny_plan):
    sweep = Sweep("pre_norm", "optimizer.gate_lr", ("1", "2"))
    assert tiny_plan(sweeps=(sweep,), allow_differences=True).sweeps_of("norm_agnostic") == []


def test_arms_are_matched_by_flops_tokens_or_time(tiny_plan, tiny_config):
    def steps(configs):
        return {arm: resolve_budget(config).n_steps for arm, config in configs.items()}

    config = tiny_config.replace(flops=1e10)
    flops = {arm: resolve_budget(run).flops for arm, run in matched_configs(tiny_plan(config=config)).items()}
    assert flops["pre_norm"] == pytest.approx(1e10, rel=1e-3) == pytest.approx(flops["norm_agnostic"], rel=1e-3)
    tokens = steps(matched_configs(tiny_plan(config=config, match="tokens")))
    assert tokens["pre_norm"] == tokens["norm_agnostic"]
    assert tokens["pre_norm"] == resolve_budget(config, config.model.replace(residual="pre_norm")).n_steps
    timed = matched_configs(tiny_plan(config=config, match="time"), {"pre_norm": 0.1, "norm_agnostic": 0.125})
    assert steps(timed)["pre_norm"] == tokens["pre_norm"]
    assert steps(timed)["norm_agnostic"] == round(tokens["pre_norm"] * 0.8)


def test_a_budget_in_tokens_becomes_flops_for_arms_matched_by_flops(tiny_plan, tiny_config):
    plan = tiny_plan(config=tiny_config.replace(tokens=128 * 500))
    assert plan.match == "flops"
    base = resolve_budget(plan.arms["pre_norm"])
    matched = matched_configs(plan)
    assert base.n_steps == 500 == resolve_budget(matched["pre_norm"]).n_steps
    assert resolve_budget(matched["norm_agnostic"]).n_steps < 500
    assert matched["norm_agnostic"].flops == base.flops


def test_seeds_must_fit(tiny_config):
    with pytest.raises(UserError, match="2\\^63"):
        make_plan("tiny", tiny_config.replace(seed=2**63 - 1), parse_arms("pre_norm,norm_agnostic"), n_seeds=2)
