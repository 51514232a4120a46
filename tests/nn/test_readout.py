"""The readout: each combination with each rule, and the constraint on its rows."""

import math

import pytest
import torch

from nagnet.errors import UserError
from nagnet.nn.readout import Readout, ReadoutConfig

ROWS, CAPS = ("free", "unit"), (None, 15.0)
SCALES = ("log_norm", "learned", "learned_log_norm", "per_entry", "none")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("softcap", CAPS, ids=["no-cap", "cap"])
def test_every_combination_with_every_rule(rule_class, generator, rows, scale, softcap):
    x = 2.0 * torch.randn(2, 3, 8, generator=generator)
    direction, log_norm = rule_class(8, update_index=1).begin(x).split()
    readout = Readout(8, 5, ReadoutConfig(rows, scale, softcap))
    if readout.log_scale is not None:
        readout.log_scale.data.fill_(0.7)
    logits = torch.nn.functional.cosine_similarity(direction[..., None, :], readout.weight, dim=-1)
    if rows == "free":
        logits = logits * direction.norm(dim=-1, keepdim=True) * readout.weight.norm(dim=-1)
    rms, entries = x.square().mean(-1, keepdim=True).sqrt(), torch.tensor([1.0, 2.0, 0.5, 3.0, -1.0])
    if readout.entry_scale is not None:
        readout.entry_scale.weight.data.copy_(entries / math.sqrt(8))  # the parameter is stored at 1/sqrt(d)
    factors = {"log_norm": rms, "learned": math.exp(0.7), "learned_log_norm": rms * math.exp(0.7), "none": 1.0}
    logits = logits * (entries if scale == "per_entry" else factors[scale])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(readout(direction, log_norm), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", ["log_norm", "learned_log_norm"])
def test_the_scale_is_not_erased(generator, rows, scale):
    direction, log_norm = torch.randn(2, 8, generator=generator), torch.randn(2, generator=generator)
    readout = Readout(8, 5, ReadoutConfig(rows, scale))
    assert readout.config.uses_log_norm
    torch.testing.assert_close(readout(direction, log_norm + 1.0), math.e * readout(direction, log_norm))


@pytest.mark.parametrize("scale", ["learned", "per_entry", "none"])
def test_other_scales_ignore_the_log_norm(generator, scale):
    direction, log_norm = torch.randn(2, 8, generator=generator), torch.randn(2, generator=generator)
    readout = Readout(8, 5, ReadoutConfig("unit", scale))
    assert not readout.config.uses_log_norm
    assert torch.equal(readout(direction, log_norm + 1.0), readout(direction, log_norm))


@pytest.mark.parametrize("scale", ["learned", "learned_log_norm", "per_entry"])
def test_a_trained_scale_starts_where_the_config_says(generator, scale):
    direction, log_norm = torch.randn(2, 8, generator=generator), torch.zeros(2)
    readout = Readout(8, 5, ReadoutConfig("unit", scale, init_scale=3.0))
    bare = Readout(8, 5, ReadoutConfig("unit", "none"), weight=readout.weight)
    torch.testing.assert_close(readout(direction, log_norm), 3.0 * bare(direction, log_norm))


@pytest.mark.parametrize("scale", SCALES)
def test_loss_by_chunks_has_the_gradients_of_the_logits(generator, scale):
    readout = Readout(8, 5, ReadoutConfig("free", scale, init_scale=2.0))
    direction = torch.randn(6, 8, generator=generator, requires_grad=True)
    log_norm = torch.randn(6, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 4, -100, 2, 2, 1])
    inputs = [direction, *([log_norm] if readout.config.uses_log_norm else []), *readout.parameters()]
    expected = torch.nn.functional.cross_entropy(readout(direction, log_norm), targets, reduction="sum")
    total, _ = readout.summed_loss(direction, log_norm, targets)
    torch.testing.assert_close(total, expected)
    for a, b in zip(torch.autograd.grad(total, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_logits_are_float32_under_autocast(generator, dtype):
    direction, log_norm = torch.randn(4, 64, generator=generator), torch.randn(4, generator=generator)
    readout = Readout(64, 9)
    plain = readout(direction, log_norm)
    with torch.autocast("cpu", dtype):
        assert torch.equal(readout(direction, log_norm), plain)


def test_float32_product_after_a_cast(generator):
    direction = torch.randn(4, 64, generator=generator).bfloat16()
    log_norm = torch.zeros(4)
    readout = Readout(64, 9)
    expected = readout(direction, log_norm)
    logits = readout.to(torch.bfloat16)(direction, log_norm)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)


def test_constraint_centres_and_normalises(generator):
    readout = Readout(16, 7)
    readout.weight.data = torch.randn(7, 16, generator=generator) * 5 + 3
    readout.constrain_()
    weight = readout.weight.detach()
    torch.testing.assert_close(weight.mean(-1), torch.zeros(7), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.square().mean(-1), torch.ones(7))


def test_constraint_changes_nothing_twice(generator):
    readout = Readout(16, 7)
    before = readout.weight.detach().clone()
    readout.constrain_()
    torch.testing.assert_close(readout.weight.detach(), before, rtol=1e-6, atol=1e-6)


def test_constraint_in_bf16(generator):
    weight = torch.nn.Parameter((torch.randn(7, 64, generator=generator) + 1).bfloat16())
    readout = Readout(64, 7, weight=weight)
    assert readout.weight is weight and weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.detach().float().square().mean(-1), torch.ones(7), rtol=0, atol=5e-3)
    assert weight.detach().float().mean(-1).abs().max() < 5e-3


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e4], ids=["zero", "tenth", "third", "large"])
def test_rows_without_direction_become_zero(value):
    """What centring leaves of a constant row is rounding error: not a direction."""
    readout = Readout(24, 3)
    readout.weight.data[1] = value
    readout.constrain_()
    assert not readout.weight[1].any()
    assert readout.weight[[0, 2]].square().mean(-1).tolist() == pytest.approx([1.0, 1.0])


def test_constraint_does_not_hide_nan():
    readout = Readout(8, 3)
    readout.weight.data[1, 2] = math.nan
    readout.constrain_()
    assert readout.weight[1].isnan().all() and readout.weight[[0, 2]].isfinite().all()


def test_free_rows_are_left_alone():
    readout = Readout(8, 3, ReadoutConfig("free"))
    before = readout.weight.detach().clone()
    readout.constrain_()
    assert torch.equal(readout.weight, before)


def test_softcap_bounds_the_logits():
    readout = Readout(8, 3, ReadoutConfig("unit", "log_norm", 15.0))
    assert readout(torch.randn(4, 8), torch.full((4,), 9.0)).abs().max() <= 15.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": "unti"}, "readout rows 'unti': choose free or unit"),
        ({"scale": "norm"}, "readout scale 'norm': choose log_norm, learned, learned_log_norm, per_entry or none"),
        ({"init_scale": 0.0}, "readout init_scale 0.0: give a positive number"),
        ({"init_scale": math.inf}, "readout init_scale inf"),
        ({"softcap": 0.0}, "readout softcap 0.0: give a positive number"),
        ({"softcap": -1.0}, "readout softcap -1.0"),
        ({"softcap": math.inf}, "readout softcap inf"),
        ({"softcap": math.nan}, "readout softcap nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_config_is_named(arguments, message):
    with pytest.raises(UserError, match=message):
        ReadoutConfig(**arguments)
