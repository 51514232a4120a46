"""FLOPs and parameters on published and hand-counted integers."""

import pytest

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import (
    counted_parameters,
    forward_flops_per_token,
    mean_context,
    parameter_counts,
    training_flops_per_token,
)
from nagnet.models.presets import PRESETS

CASE = ModelConfig(residual="pre_norm", d_model=64, n_layers=4, n_heads=4, vocab_size=256, max_seq_len=128)
WALKTHROUGH = PRESETS["walkthrough-64x640"]
TWIN = WALKTHROUGH.replace(residual="pre_norm")


@pytest.mark.parametrize(("convention", "flops"), [("causal", 492_032), ("full", 557_056)])
def test_forward_on_the_published_case(convention, flops):
    assert forward_flops_per_token(CASE, 128, convention) == flops
    assert training_flops_per_token(CASE, 128, convention) == 3 * flops


def test_causal_is_the_default():
    assert forward_flops_per_token(CASE, 128) == 492_032


def test_walkthrough_parameters():
    counts = parameter_counts(TWIN)
    assert counts["total"] == 356_515_840 and counts["residual"] == 0


def test_walkthrough_norm_agnostic_parameters():
    counts = parameter_counts(WALKTHROUGH)
    assert counts["residual"] == 2_629_888 + 1
    assert counts["total"] == 356_515_840 + 2_629_888 + 1


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_counts_are_those_of_the_model(small, residual, tie_embeddings):
    config = small(residual, tie_embeddings=tie_embeddings, mlp="swiglu", n_kv_heads=1)
    counts = parameter_counts(config)
    assert counts["total"] == sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert counts["total"] == sum(value for name, value in counts.items() if name != "total")


def test_counts_of_variants_are_those_of_the_model(small, variant):
    config = small(**variant)
    counts = parameter_counts(config)
    assert counts["total"] == sum(parameter.numel() for parameter in Decoder(config).parameters())


@pytest.mark.parametrize("mlp", ["relu_squared", "swiglu"])
def test_a_taper_costs_nothing(small, mlp):
    even, tapered = (small("pre_norm", n_layers=5, mlp=mlp, mlp_taper=taper) for taper in (0.0, 0.5))
    assert parameter_counts(tapered) == parameter_counts(even)
    assert forward_flops_per_token(tapered, 8) == forward_flops_per_token(even, 8)


def test_ablations_save_what_they_take_away(small):
    whole = parameter_counts(small())
    assert whole["residual"] - parameter_counts(small(without=("beta",)))["residual"] == 4
    without_modulator = parameter_counts(small(without=("modulator",)))
    assert without_modulator["residual"] == 4 + 1  # alpha of each update, and G_encode


def test_ngpt_parameters(small):
    twin, ngpt = parameter_counts(small("pre_norm")), parameter_counts(small("ngpt"))
    assert ngpt["residual"] == 4 * 16
    assert ngpt["blocks"] - twin["blocks"] == 2 * (16 + 64)  # queries and keys; hidden channels
    assert ngpt["readout"] - twin["readout"] == 32


def test_counted_are_the_parameters_of_products():
    assert counted_parameters(TWIN) == 356_515_840 - 32_768 * 640
    assert counted_parameters(TWIN.replace(tie_embeddings=True)) == counted_parameters(TWIN)
    assert forward_flops_per_token(TWIN, 1) == 2 * counted_parameters(TWIN) + 64 * 4 * 640  # each query has one key


def test_counts_cannot_be_changed_from_outside():
    parameter_counts(CASE)["total"] = 0
    assert parameter_counts(CASE)["total"] > 0


def test_tied_and_untied_heads_cost_the_same(small):
    assert forward_flops_per_token(small(tie_embeddings=True), 8) == forward_flops_per_token(small(), 8)


def test_kv_heads_save_projections_but_no_scores(small):
    wide, narrow = small(d_model=32, n_heads=4), small(d_model=32, n_heads=4, n_kv_heads=1)
    saved = forward_flops_per_token(wide, 8) - forward_flops_per_token(narrow, 8)
    assert saved == 2 * wide.n_layers * 2 * 32 * 24


@pytest.mark.parametrize("seq_len", [1, 5, 16])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_causal_context_by_counting(seq_len, window):
    seen = [sum(t - j >= 0 and (window == 0 or t - j < window) for j in range(seq_len)) for t in range(seq_len)]
    assert mean_context(seq_len, window, "causal") == pytest.approx(sum(seen) / seq_len)


def test_windows_cycle_over_layers(small):
    attention = [forward_flops_per_token(small(n_layers=3, sliding_windows=w), 8) for w in [(2, 0), (0,), (2,)]]
    mixed, none, all_windowed = attention
    assert mixed - all_windowed == pytest.approx((none - all_windowed) / 3, abs=1)
