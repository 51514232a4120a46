"""Initial parameters: shared between arms to the bit, and the same for the same seed."""

import math

import pytest
import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.residual import RESIDUAL_STREAMS


def drawn(config: ModelConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    """Parameters after `initialize_` and before `constrain_`."""
    model = Decoder(config)
    model.initialize_(seed)
    return dict(model.named_parameters())


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_arms_share_every_common_parameter_to_the_bit(small, residual, tie_embeddings):
    reference, arm = (drawn(small(name, tie_embeddings=tie_embeddings)) for name in ("norm_agnostic", residual))
    zero = RESIDUAL_STREAMS[residual].zero_init_projections
    own = set() if zero else {name for name in arm if "out_proj" in name}
    common = set(reference) & set(arm) - own
    assert common >= {name for name in reference if not name.startswith("stream.")} - own
    for name in common:
        assert torch.equal(reference[name], arm[name]), name


@pytest.mark.parametrize("rule", ["none", "sandwich", "ngpt"])
def test_a_rule_that_cannot_start_from_zero_draws_its_projections(small, rule):
    for name, parameter in drawn(small(rule)).items():
        if "out_proj" in name:
            assert parameter.std().item() == pytest.approx(parameter.shape[1] ** -0.5, rel=0.15)


@pytest.mark.parametrize("rule", ["norm_agnostic", "pre_norm"])
def test_projections_start_as_the_config_says(small, rule):
    uniform, orthogonal = (drawn(small(rule, projection_init=how)) for how in ("uniform", "orthogonal"))
    for name in uniform:
        if "out_proj" not in name:
            assert torch.equal(uniform[name], orthogonal[name]), name
            continue
        fan_in = uniform[name].shape[1]
        assert uniform[name].abs().max() <= math.sqrt(3.0 / fan_in)
        assert uniform[name].std().item() == pytest.approx(fan_in**-0.5, rel=0.15)
        rows = orthogonal[name]
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)


def test_arms_share_projections_that_are_drawn(small):
    arms = [drawn(small(rule, projection_init="uniform")) for rule in ("pre_norm", "sandwich")]
    assert all(torch.equal(arms[0][name], arms[1][name]) for name in arms[0])


def test_output_projections_start_at_zero(small):
    assert not any(p.any() for name, p in drawn(small()).items() if "out_proj" in name)


def test_standard_deviations(small):
    parameters = drawn(small(d_model=64, vocab_size=512))
    for name, std in {
        "embedding.weight": 0.8,
        "readout.weight": 0.001,
        "blocks.1.attention.q_proj.weight": 1 / 8,
        "blocks.1.attention.k_proj.weight": 1 / 8,
        "blocks.1.attention.v_proj.weight": 1 / 8,
        "blocks.1.mlp.up_proj.weight": 0.4 / 8,
    }.items():
        assert parameters[name].std().item() == pytest.approx(std, rel=0.03), name


def test_no_two_parameters_share_a_draw(small):
    parameters = drawn(small(n_layers=3, mlp="swiglu"))
    first = [tuple(p.flatten()[:8].tolist()) for n, p in parameters.items() if p.dim() == 2 and "out_proj" not in n]
    assert len(set(first)) == len(first)


def test_matching_the_seed_matches_the_model(small, residual):
    a, b, c = (dict(Decoder(small(residual), seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embedding.weight"], c["embedding.weight"])


def test_without_a_seed_the_global_generator_decides(small):
    models = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        models.append(Decoder(small()).embedding.weight)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])


def test_a_seed_leaves_the_draws_of_initialize_to_it(small):
    """Whatever the global generator did before."""
    torch.rand(17)
    a = Decoder(small(), seed=1)
    torch.rand(5)
    b = Decoder(small(), seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("readout_scale", ["log_norm", "learned", "per_entry"])
def test_meta_device_then_memory_then_values(small, residual, readout_scale):
    """Storage that held anything becomes the same model, buffers and all."""
    from nagnet.nn.readout import ReadoutConfig

    config = small(residual, sliding_windows=(3, 0), init_encode_gain=2.0, readout=ReadoutConfig(scale=readout_scale))
    assert_meta_becomes_the_same(config)


def test_meta_device_of_variants(small, variant):
    assert_meta_becomes_the_same(small(**variant))


def assert_meta_becomes_the_same(config):
    with torch.device("meta"):
        model = Decoder(config, seed=1)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    model.initialize_(1)
    model.constrain_()
    expected = Decoder(config, seed=1)
    for kind in ("named_parameters", "named_buffers"):
        actual = dict(getattr(model, kind)())
        for name, tensor in getattr(expected, kind)():
            assert torch.equal(actual[name], tensor), name


def test_initialize_puts_the_injection_back(small):
    model = Decoder(small())
    model.set_injection(0.1)
    model.initialize_(0)
    assert model.stream.updates[3].injection.item() == 1.0


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_first_loss_is_that_of_a_guess(small, residual, tie_embeddings):
    """No arm starts handicapped: the embedding's scale must not reach a tied head with free rows."""
    config = small(residual, d_model=64, vocab_size=256, tie_embeddings=tie_embeddings)
    tokens = torch.randint(256, (4, 17))
    loss = Decoder(config, seed=0).loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.4)
