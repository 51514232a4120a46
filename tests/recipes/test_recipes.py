"""Every recipe builds, at the size and for the budget it says."""

import dataclasses
import json

import pytest
import torch

from nagnet.cli.application import run
from nagnet.models.decoder import Decoder
from nagnet.models.flops import parameter_counts, training_flops_per_token
from nagnet.recipes import RECIPES
from nagnet.recipes.walkthrough import walkthrough_decay, walkthrough_optimizer
from nagnet.training.budget import resolve_budget
from nagnet.training.config import RunConfig
from nagnet.training.optimizer import build_optimizers, describe_groups, scale_rates
from nagnet.training.schedule import apply_schedule

# recipe: parameters, training FLOPs per token, steps; of the norm-agnostic arm and of its pre-norm twin. By hand: P is
# 2 V d + 12 d^2 L, with gates 2 L (C d + 2 C + 2) + 1 more; FLOPs are 6 (P - V d) + 12 L d x mean context.
EXPECTED = {
    "stdlib-tiny": ((1_057_089, 7_135_110, 493), (1_048_576, 7_084_032, 496)),
    "stdlib-small": ((3_066_337, 20_771_142, 470), (3_047_424, 20_657_664, 473)),
    "stdlib-deep": ((2_646_977, 19_832_454, 492), (2_621_440, 19_679_232, 496)),
    "ladder-40": ((2_801_785, 15_968_358, 245), (2_785_024, 15_867_792, 246)),
    "ladder-20": ((2_596_865, 15_588_102, 251), (2_580_480, 15_489_792, 252)),
    "ladder-10": ((2_582_737, 16_242_342, 240), (2_565_120, 16_136_640, 242)),
    "ladder-5": ((2_401_585, 15_894_438, 246), (2_383_872, 15_788_160, 247)),
    "ladder-2": ((2_304_641, 16_495_878, 237), (2_285_568, 16_381_440, 238)),
    "ladder-1": ((2_286_777, 17_695_542, 221), (2_261_504, 17_543_904, 223)),
    "fineweb-edu-24x512": ((109_841_505, 709_454_406, 6_990), (109_051_904, 704_716_800, 7_037)),
    "walkthrough-26-1e18": ((170_806_633, 1_307_955_318, 1_458), (169_738_240, 1_301_544_960, 1_465)),
    "walkthrough-26-3e18": ((170_806_633, 1_307_955_318, 4_375), (169_738_240, 1_301_544_960, 4_396)),
    "walkthrough-64x640": ((359_145_729, 3_035_678_214, 9_425), (356_515_840, 3_019_898_880, 9_474)),
    "walkthrough-nan": ((1_467_233, 9_205_830, 212), (1_441_792, 9_053_184, 216)),
    "walkthrough-collapse": ((1_467_233, 9_205_830, 212), (1_441_792, 9_053_184, 216)),
    "walkthrough-cure": ((1_467_233, 9_205_830, 212), (1_441_792, 9_053_184, 216)),
}


def test_every_recipe_has_numbers_here():
    assert set(EXPECTED) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("arm", ["norm_agnostic", "pre_norm"])
def test_parameters_flops_and_steps(name, arm):
    config = RECIPES[name]()
    model = config.model.replace(residual=arm)
    parameters, flops_per_token, steps = EXPECTED[name][arm == "pre_norm"]
    assert parameter_counts(model)["total"] == parameters
    assert training_flops_per_token(model, config.seq_len, config.convention) == flops_per_token
    budget = resolve_budget(config, model)
    assert budget.n_steps == steps
    assert config.flops is not None and abs(budget.flops - config.flops) <= budget.flops_per_step / 2


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_build_and_survive_json(name):
    config = RECIPES[name]()
    with torch.device("meta"):
        model = Decoder(config.model)
    optimizers = build_optimizers(model, config.optimizer, config.tokens_per_step)
    rows = describe_groups(optimizers)
    assert sum(row["parameters"] for row in rows) == EXPECTED[name][0][0]
    values = apply_schedule(optimizers, config.schedule, 0, resolve_budget(config).n_steps, config.tokens_per_step)
    assert 0.0 < values["lr_scale"] < 1.0 and 0.0 < values["injection"] <= 1.0
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.model.n_layers >= 16 or name.startswith("ladder-")
    assert config.seq_len <= config.model.max_seq_len
    assert RECIPES[name].__doc__, "nagnet recipes prints it"


LADDER = {"ladder-40": 40, "ladder-20": 20, "ladder-10": 10, "ladder-5": 5, "ladder-2": 2, "ladder-1": 1}


@pytest.mark.parametrize("name", LADDER)
def test_rungs_of_the_ladder_differ_in_depth_alone(name):
    config = RECIPES[name]()
    model = config.model
    assert model.d_model / model.n_layers == pytest.approx(LADDER[name], rel=0.13)
    assert parameter_counts(model.replace(residual="pre_norm"))["blocks"] == pytest.approx(2e6, rel=0.04)
    assert model.n_directions == max(4, round(model.d_model / 20))
    assert model.n_heads * model.head_dim == model.d_model
    widest = RECIPES["ladder-40"]()
    same = {key: getattr(widest.model, key) for key in ("d_model", "n_layers", "n_heads", "n_kv_heads")}
    same |= {key: getattr(widest.model, key) for key in ("head_dim", "d_ff", "n_directions")}
    assert config.schedule.injection_warmup == (0.3 if name == "ladder-1" else 0.05)  # which the twin does not feel
    schedule = dataclasses.replace(config.schedule, injection_warmup=0.05)
    assert dataclasses.replace(config, model=dataclasses.replace(model, **same), schedule=schedule) == widest


def test_the_walkthroughs_figures():
    config = RECIPES["walkthrough-64x640"]()
    model = config.model
    shape = (model.n_layers, model.d_model, model.n_heads, model.head_dim, model.vocab_size, model.n_directions)
    assert shape == (64, 640, 5, 128, 32_768, 32)
    assert not model.tie_embeddings and model.qk_gain == 1.2 and model.rope_base == 1e5 and model.mlp == "relu_squared"
    assert (config.tokens_per_step, config.seq_len, config.device_batch_size) == (2**20, 2048, 16)
    assert config.accumulation_steps(8) == 4 and config.accumulation_steps(1) == 32
    assert resolve_budget(config).tokens == 9_882_828_800
    optimizer, lines = scale_rates(config.optimizer, config.tokens_per_step, model.d_model)
    root_two, narrow = 2**0.5, (640 / 768) ** -0.5
    assert optimizer.matrix_lr == pytest.approx(0.012 * root_two)
    assert optimizer.gate_lr == pytest.approx(1e-3 * root_two)
    assert optimizer.scalar_lr == pytest.approx(0.005 * root_two)
    assert optimizer.embedding_lr == pytest.approx(0.18 * root_two * narrow)
    assert optimizer.unit_head_lr == optimizer.free_head_lr == pytest.approx(0.006 * root_two * narrow)
    assert optimizer.matrix_weight_decay == pytest.approx(0.094, abs=5e-4)
    assert (optimizer.embedding_weight_decay, optimizer.head_weight_decay) == (0.001, 0.01)
    assert (optimizer.embedding_betas, optimizer.head_betas, optimizer.gate_betas, optimizer.eps) == (
        (0.8, 0.995),
        (0.8, 0.96),
        (0.8, 0.95),
        1e-10,
    )
    assert len(lines) == 2
    schedule, n = config.schedule, resolve_budget(config).n_steps
    assert schedule.lr_scale(39, n) == 1.0 and schedule.lr_scale(38, n) < 1.0
    assert schedule.injection(299, n, 2**20) == 1.0 and schedule.injection(298, n, 2**20) < 1.0
    assert [schedule.momentum(step, n, optimizer.matrix_momentum) for step in (0, 400)] == [0.85, 0.97]
    assert schedule.momentum(n - 1, n, optimizer.matrix_momentum) == pytest.approx(0.90, abs=1e-4)
    assert schedule.decay_scale(n - 1, n) < 1e-6


def test_the_decay_of_a_shallower_run_is_larger_and_that_of_the_reference_its_own():
    deep, shallow = (RECIPES[name]().model for name in ("walkthrough-64x640", "walkthrough-26-1e18"))
    assert walkthrough_decay(shallow, 2**19) == pytest.approx(0.28 * 79_953_920 / 148_766_720)
    assert walkthrough_decay(deep.replace(n_layers=12), 2**19) == pytest.approx(0.28)


def test_the_cure_differs_from_the_collapse_in_gate_rate_and_warm_up_alone():
    collapse, cure, nan = (RECIPES[f"walkthrough-{name}"]() for name in ("collapse", "cure", "nan"))
    assert collapse.optimizer.gate_lr == collapse.optimizer.matrix_lr
    assert cure.optimizer.gate_lr == pytest.approx(1e-3 * 2**0.5)
    assert collapse.schedule.injection(0, 212) == 1.0 and cure.schedule.injection(0, 212) < 0.05
    same = dataclasses.replace(
        cure,
        optimizer=dataclasses.replace(cure.optimizer, gate_lr=collapse.optimizer.gate_lr),
        schedule=collapse.schedule,
    )
    assert same == collapse
    assert nan.model == collapse.model.replace(modulation_floor=0.0)


def test_scaled_rates_of_the_small_walkthrough_are_those_of_the_large_one():
    large = RECIPES["walkthrough-64x640"]()
    small = RECIPES["walkthrough-cure"]()
    assert small.optimizer == scale_rates(large.optimizer, large.tokens_per_step, 640)[0]
    assert walkthrough_optimizer(0.1).lr_reference_batch_tokens == 2**19


def test_the_command_lists_them(capsys):
    assert run(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in RECIPES)
    assert "9,425 steps" in printed and "359,145,729 parameters" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert run(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["walkthrough-64x640"]["budget"] == {"flops": 3e19}
    assert rows["walkthrough-64x640"]["steps"] == 9_425
    assert RunConfig.from_dict(rows["walkthrough-cure"]["config"]) == RECIPES["walkthrough-cure"]()
