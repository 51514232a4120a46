"""Arms by name: each is what it says, differs in nothing else, and has no parameter without effect."""

import dataclasses
import math

import pytest
import torch

from nagnet.diagnostics.health import stream_health
from nagnet.errors import UserError
from nagnet.models.checkpoint import load_model, save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import forward_flops_per_token, parameter_counts
from nagnet.nn.readout import CONFIDENCE_READOUT, SOFTCAP_READOUT, ReadoutConfig
from nagnet.nn.residual import COMPONENTS, RESIDUAL_STREAMS
from nagnet.training.arms import ARMS, READOUTS, RULES, build_arm, declared, describe, undeclared_differences
from nagnet.training.config import RunConfig
from nagnet.training.optimizer import build_optimizers

SHAPE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16, "n_directions": 3}
RECIPE = RunConfig(model=ModelConfig(**SHAPE, init_encode_gain=8.0), steps=3, batch_size=2, seq_len=8)


@pytest.fixture(params=ARMS)
def arm(request):
    """The name of each arm."""
    return request.param


@pytest.fixture
def randomised(arm, generator):
    """The arm's model, every parameter random."""
    model = Decoder(build_arm(RECIPE, arm).model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / max(parameter.shape[-1], 4) ** 0.5 if parameter.dim() == 2 else 0.5 * noise)
    model.constrain_()
    return model


@pytest.fixture
def tokens(generator):
    return torch.randint(32, (2, 9), generator=generator)


def test_every_rule_and_combination_has_a_name():
    assert set(RULES) == set(RESIDUAL_STREAMS)
    expected = {
        *RULES,
        *(f"norm_agnostic-{name}" for name in (*COMPONENTS, "directions")),
        "tapered",
        "mod_0",
        "mod_20",
        "mod_25",
    }
    expected |= {f"{rule}+{readout}" for rule in RULES for readout in READOUTS}
    # exp(s) is 1 where every vector is normalised
    expected -= {f"{rule}+{readout}" for rule in ("post_norm", "ngpt") for readout in ("cosine", "free")}
    assert set(ARMS) == expected


def test_no_parameter_is_inert(randomised, tokens):
    """Perturbed by 0.1 (1 + |p|) each tensor moves the logits, and each has a gradient."""
    randomised.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    logits = randomised(tokens).detach()
    for name, parameter in randomised.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.1 * (1 + parameter.abs())
            assert (randomised(tokens) - logits).abs().max() > 1e-6, name
            parameter.copy_(before)


def test_no_entry_of_the_residual_rule_is_inert(randomised, tokens):
    randomised.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in randomised.stream.named_parameters():
        assert (parameter.grad != 0).all(), name


def test_every_parameter_is_trained_by_its_role(arm):
    model = Decoder(build_arm(RECIPE, arm).model, seed=0)
    groups = [group for optimizer in build_optimizers(model, RECIPE.optimizer) for group in optimizer.param_groups]
    role_of = {name: group["role"] for group in groups for name in group["names"]}
    assert sum(len(group["names"]) for group in groups) == len(role_of)
    assert set(role_of) == {name for name, _ in model.named_parameters()}
    for name, role in role_of.items():
        assert (role == "matrix") == ("_proj." in name), name
        assert (role == "gate") == name.startswith("stream.updates."), name


def test_health_is_measured_and_the_model_saved(arm, randomised, tokens, tmp_path):
    health = stream_health(randomised, tokens)
    assert len(health.rotation) == 4 and all(map(math.isfinite, health.rotation + health.norm))
    assert (health.gates is not None) == arm.startswith(("norm_agnostic", "mod_"))
    assert torch.equal(load_model(save_model(randomised, tmp_path))(tokens), randomised(tokens))


def test_three_steps_bring_the_loss_down(arm, tokens):
    config = build_arm(RECIPE, arm)
    model = Decoder(config.model, seed=0)
    optimizers = build_optimizers(model, config.optimizer)
    losses = []
    for _ in range(4):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.constrain_()
    assert losses[-1] < losses[0]


def test_an_arm_differs_in_what_it_declares_alone(arm):
    arms = {"recipe": RECIPE, arm: build_arm(RECIPE, arm)}
    assert not undeclared_differences(arms, declared(arm))
    if arm not in ("norm_agnostic", "norm_agnostic+cosine"):
        assert undeclared_differences(arms, ())


def test_no_two_arms_are_the_same_but_rules_with_their_default_readout_named():
    seen = {}
    for name in ARMS:
        seen.setdefault(build_arm(RECIPE, name).model, []).append(name)
    same = {tuple(names) for names in seen.values() if len(names) > 1}
    softcapped = ("pre_norm", "post_norm", "none", "layernorm_scaling", "sandwich")
    assert same == {("norm_agnostic", "norm_agnostic+cosine"), *((rule, f"{rule}+softcap") for rule in softcapped)}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_brings_its_default_readout(rule):
    model = RECIPE.model.replace(residual=rule)
    if rule == "ngpt":  # whose scale per entry starts at the recipe's temperature, as learned scales of other arms do
        model = model.replace(readout=ReadoutConfig("unit", "per_entry", init_scale=8.0))
    assert build_arm(RECIPE, rule).model == model


def test_a_recipe_keeps_a_readout_of_its_own_unless_the_arm_names_one():
    readout = ReadoutConfig("free", "log_norm")
    recipe = RECIPE.replace(model=RECIPE.model.replace(readout=readout))
    assert build_arm(recipe, "pre_norm").model.readout == readout
    assert build_arm(recipe, "norm_agnostic-beta").model.readout == readout
    assert build_arm(recipe, "pre_norm+softcap").model.readout == SOFTCAP_READOUT
    assert build_arm(recipe, "norm_agnostic+cosine").model.readout == CONFIDENCE_READOUT


@pytest.mark.parametrize("readout", READOUTS)
def test_readouts_are_what_they_say(readout):
    for rule in ("norm_agnostic", "pre_norm"):
        config = build_arm(RECIPE, f"{rule}+{readout}").model.readout
        assert config.rows == ("unit" if readout in ("cosine", "constant") else "free")
        assert config.uses_log_norm == (readout in ("cosine", "free"))
        assert config.softcap == (15.0 if readout == "softcap" else None)
        start = build_arm(RECIPE, f"{rule}+{readout}").model.init_encode_gain
        assert start == (1.0 if readout == "free" else 8.0)


@pytest.mark.parametrize("readout", ["cosine", "free", "constant"])
def test_every_rule_starts_at_the_same_temperature(readout, tokens):
    """The same direction and log norm give the same logits at the start, G_encode included."""
    logits = []
    for rule in ("norm_agnostic", "pre_norm", "sandwich"):
        model = Decoder(build_arm(RECIPE, f"{rule}+{readout}").model, seed=0)
        direction, log_norm = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(3)
        gain = getattr(model.stream, "log_encode_gain", None)
        logits.append(model.readout(direction, log_norm if gain is None else log_norm + gain))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_cosine_reads_the_log_of_the_streams_rms(tokens):
    model = Decoder(build_arm(RECIPE, "pre_norm+cosine").model.replace(projection_init="uniform"), seed=0)
    stream = model.trunk(tokens).merge()
    cosine = torch.nn.functional.cosine_similarity(stream.unsqueeze(-2), model.readout.weight, dim=-1)
    rms = stream.square().mean(-1, keepdim=True).sqrt()
    assert rms.std() > 0.01
    torch.testing.assert_close(model(tokens), 8.0 * rms * cosine, rtol=1e-4, atol=1e-5)


def test_ablations_take_one_component_away():
    for component in COMPONENTS:
        assert build_arm(RECIPE, f"norm_agnostic-{component}").model.without == (component,)
    assert build_arm(RECIPE, "norm_agnostic-directions").model.n_directions == 1


def test_a_taper_costs_nothing():
    tapered, even = (build_arm(RECIPE, name).model for name in ("tapered", "pre_norm"))
    assert tapered.mlp_widths == (96, 32)
    assert parameter_counts(tapered) == parameter_counts(even)
    assert forward_flops_per_token(tapered, 8) == forward_flops_per_token(even, 8)


def test_a_config_of_an_arm_comes_back_from_plain_values(arm):
    config = build_arm(RECIPE, arm)
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("prenorm", "pre_norm"),
        ("pre_norm+cosin", "pre_norm+cosine"),
        ("norm_agnostic-orthogonl", "norm_agnostic-orthogonal"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    for call in (declared, lambda name: build_arm(RECIPE, name)):
        with pytest.raises(UserError) as caught:
            call(name)
        assert str(caught.value) == f"unknown arm {name!r}; did you mean {nearest!r}?"


def test_each_arm_is_described_in_one_line_of_its_own():
    lines = describe()
    assert list(lines) == list(ARMS)
    assert len(set(lines.values())) == len(lines)
    assert all(line and "\n" not in line and len(line) < 130 for line in lines.values())


def test_undeclared_differences_name_the_field_and_the_values():
    twin = build_arm(RECIPE, "pre_norm")
    changed = twin.replace(
        model=twin.model.replace(qk_gain=1.0), optimizer=dataclasses.replace(twin.optimizer, matrix_lr=0.5), seed=1
    )
    arms = {"a": RECIPE, "b": changed}
    assert undeclared_differences(arms, declared("pre_norm")) == [
        "model.qk_gain: a 1.2, b 1.0",
        f"optimizer.matrix_lr: a {RECIPE.optimizer.matrix_lr}, b 0.5",
        "seed: a 0, b 1",
    ]
    assert undeclared_differences(arms, (*declared("pre_norm"), "model.qk_gain", "optimizer")) == ["seed: a 0, b 1"]


def test_a_declared_name_stands_for_its_field_and_not_for_its_prefix():
    arms = {"a": RECIPE, "b": RECIPE.replace(model=RECIPE.model.replace(mlp_taper=0.5))}
    assert undeclared_differences(arms, ("model.mlp",)) == ["model.mlp_taper: a 0.0, b 0.5"]
    assert not undeclared_differences(arms, ("model.mlp_taper",))
