"""ModelConfig: defaults, copies, dictionaries, and one clear line for what is wrong."""

import json
import math

import pytest

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.presets import PRESETS
from nagnet.nn.readout import CONFIDENCE_READOUT, ENTRY_SCALE_READOUT, SOFTCAP_READOUT, ReadoutConfig


def test_defaults_follow_from_other_fields():
    config = ModelConfig(d_model=48, n_heads=6)
    assert (config.n_kv_heads, config.head_dim, config.d_ff) == (6, 8, 192)
    assert config.readout == CONFIDENCE_READOUT


def test_each_rule_brings_its_readout(residual):
    own = {"norm_agnostic": CONFIDENCE_READOUT, "ngpt": ENTRY_SCALE_READOUT}
    assert ModelConfig(residual=residual).readout == own.get(residual, SOFTCAP_READOUT)


def test_each_rule_brings_what_its_sublayers_need(residual):
    config = ModelConfig(residual=residual)
    assert config.projection_init == ("uniform" if residual in ("none", "sandwich", "ngpt") else "zero")
    assert config.channel_scales == (residual == "ngpt")


def test_components_are_kept_in_one_order():
    assert ModelConfig(without=["beta", "orthogonal", "beta"]).without == ("orthogonal", "beta")


@pytest.mark.parametrize("n_layers", [2, 3, 4, 7, 24, 64])
@pytest.mark.parametrize("taper", [0.5, 0.9, -0.5])
def test_tapered_widths_keep_the_total(n_layers, taper):
    widths = ModelConfig(d_model=64, n_layers=n_layers, mlp_taper=taper).mlp_widths
    assert len(widths) == n_layers and sum(widths) == n_layers * 256
    for layer, width in enumerate(widths):
        assert width == pytest.approx(256 * (1 + taper * math.cos(math.pi * layer / (n_layers - 1))), abs=4)
    assert all(width % 8 == 0 for width in widths)


def test_without_taper_every_block_has_the_same_width():
    assert ModelConfig(n_layers=3, d_ff=77).mlp_widths == (77, 77, 77)
    assert ModelConfig(n_layers=1).mlp_widths == (1024,)


@pytest.mark.parametrize(
    ("changes", "thing", "remedy"),
    [
        ({"residual": "prenorm"}, "residual rule 'prenorm'", "norm_agnostic, pre_norm, post_norm, none"),
        ({"mlp": "gelu"}, "mlp 'gelu'", "relu_squared, swiglu"),
        ({"d_model": 30, "n_heads": 4}, "d_model 30 .* n_heads 4", "change one or set head_dim"),
        ({"d_model": 12, "n_heads": 4}, "head_dim is 3", "must be even"),
        ({"head_dim": 7}, "head_dim is 7", "must be even"),
        ({"head_dim": 0}, "head_dim is 0", "must be even"),
        ({"n_kv_heads": 3}, "n_kv_heads 3 does not divide n_heads 4", "choose a divisor"),
        ({"n_kv_heads": 0}, "n_kv_heads 0", "choose a divisor"),
        ({"n_kv_heads": 8}, "n_kv_heads 8", "choose a divisor"),
        ({"d_model": 0}, "d_model is 0", "1 or more"),
        ({"n_layers": 0}, "n_layers is 0", "1 or more"),
        ({"n_heads": 0}, "n_heads is 0", "1 or more"),
        ({"vocab_size": 0}, "vocab_size is 0", "1 or more"),
        ({"max_seq_len": 0}, "max_seq_len is 0", "1 or more"),
        ({"n_directions": 0}, "n_directions is 0", "1 or more"),
        ({"d_ff": 0}, "d_ff is 0", "1 or more"),
        ({"sliding_windows": (4, -1)}, r"sliding_windows \(4, -1\)", "0 for all"),
        ({"rope_base": 0.0}, "rope_base is 0.0", "positive"),
        ({"qk_gain": math.nan}, "qk_gain is nan", "positive"),
        ({"init_encode_gain": -1.0}, "init_encode_gain is -1.0", "positive"),
        ({"branch_eps": -1e-6}, "branch_eps is -1e-06", "0 or a positive number"),
        ({"mlp_taper": 1.0}, "mlp_taper is 1.0", "below 1"),
        ({"mlp_taper": math.nan}, "mlp_taper is nan", "below 1"),
        ({"mlp_taper": 0.5, "n_layers": 1}, "mlp_taper 0.5 cannot taper 1 blocks", "more blocks"),
        ({"mlp_taper": 0.5, "d_ff": 4}, "mlp_taper 0.5 cannot taper .* d_ff 4", "larger d_ff"),
        ({"mlp_taper": 0.9, "d_ff": 8}, "mlp_taper 0.9 cannot taper .* d_ff 8", "larger d_ff"),
        ({"without": ("beta", "gate")}, "component 'gate'", "output_norm, orthogonal, modulator, centring, beta"),
        ({"projection_init": "random"}, "projection_init 'random'", "zero, uniform, orthogonal"),
        ({"projection_init": "zero", "residual": "none"}, "projection_init zero .* rule none", "uniform or orthogonal"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_thing_and_the_remedy(changes, thing, remedy):
    with pytest.raises(UserError, match=f"{thing}.*{remedy}") as caught:
        ModelConfig(**changes)
    assert "\n" not in str(caught.value)


def test_round_trip_through_json(residual):
    config = ModelConfig(
        residual=residual, n_kv_heads=2, sliding_windows=(8, 0), readout=ReadoutConfig("free", "learned")
    ).replace(without=("beta",), mlp_taper=0.5, projection_init="orthogonal", channel_scales=True)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name):
    assert ModelConfig.from_dict(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_modle": 8, "n_layers": 2}, "unknown model config keys d_modle; known are .*d_model"),
        ({"readout": {"row": "unit"}}, "unknown readout keys row; known are init_scale, rows, scale, softcap"),
    ],
    ids=["model", "readout"],
)
def test_unknown_keys_are_named(values, message):
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(values)


def test_from_dict_leaves_its_argument_alone():
    values = ModelConfig().to_dict()
    before = json.dumps(values)
    ModelConfig.from_dict(values)
    assert json.dumps(values) == before


def test_replace_brings_the_readout_of_the_new_rule():
    twin = ModelConfig().replace(residual="pre_norm")
    assert twin == ModelConfig(residual="pre_norm")
    assert twin.replace(residual="norm_agnostic") == ModelConfig()


def test_a_config_from_before_these_fields_is_the_default():
    values = ModelConfig().to_dict()
    for field in ("mlp_taper", "projection_init", "channel_scales", "without"):
        del values[field]
    del values["readout"]["init_scale"]
    assert ModelConfig.from_dict(values) == ModelConfig()


def test_replace_keeps_an_explicit_start_of_the_projections():
    assert ModelConfig(projection_init="orthogonal").replace(residual="ngpt").projection_init == "orthogonal"


def test_replace_keeps_a_readout_of_ones_own():
    readout = ReadoutConfig("free", "log_norm")
    assert ModelConfig(readout=readout).replace(residual="pre_norm").readout == readout


def test_replace_lets_widths_follow():
    assert ModelConfig(d_model=64).replace(d_model=128) == ModelConfig(d_model=128)
    assert ModelConfig(n_heads=4).replace(n_heads=8) == ModelConfig(n_heads=8)
    assert ModelConfig(d_model=64, d_ff=100).replace(d_model=128).d_ff == 100


def test_replace_obeys_explicit_values():
    assert ModelConfig(d_model=64).replace(d_model=128, d_ff=256).d_ff == 256


def test_replace_without_changes_is_equal(residual):
    config = ModelConfig(residual=residual, n_kv_heads=2, d_ff=77)
    assert config.replace() == config
