"""Models that skip: packed is masked, nothing looks ahead, a batch changes no decision."""

import shutil

import pytest
import torch

from nagnet import SkipPolicy, load_model, save_model
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import (
    forward_flops_per_token,
    skip_rates,
    skippable_flops_per_token,
    training_flops_per_token,
)
from nagnet.nn import attention, skip

SHAPES = {
    "plain": {},
    "groups": {"n_heads": 4, "n_kv_heads": 2},
    "windows": {"sliding_windows": (5, 0)},
    "swiglu, tied": {"mlp": "swiglu", "tie_embeddings": True},
    "ablated": {"without": ("output_norm",)},
}
THRESHOLDS = (0.0, 0.3, 0.5, 0.6, 1.0)


@pytest.fixture
def skipping(small, randomised, generator):
    """Builds a random model with a policy, whose scores are spread; without a threshold it never skips."""

    def make(threshold=0.5, **changes):
        policy = SkipPolicy(target_rate=0.0) if threshold is None else SkipPolicy(threshold=threshold)
        model = randomised(small(skip=policy, max_seq_len=160, **changes))
        with torch.no_grad():
            for update in model.stream.updates:
                update.modulator.bias.normal_(generator=generator)
        return model

    return make


def with_gradients(model, tokens, execution, key_mask=None):
    """Logits, all gradients, and counts of a pass."""
    model.zero_grad()
    model.skipping.execution = execution
    model.skipping.forget()
    logits = model(tokens, key_mask)
    logits.logsumexp(-1).sum().backward()
    return logits, {name: p.grad.clone() for name, p in model.named_parameters()}, model.skipping.counts.clone()


@pytest.mark.parametrize("masked_keys", [False, True], ids=["", "key mask"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed_is_masked(skipping, generator, shape, masked_keys):
    model = skipping(**shape)
    tokens = torch.randint(32, (3, 150), generator=generator)  # more than one chunk of queries
    key_mask = None
    if masked_keys:
        key_mask = torch.ones(3, 150, dtype=torch.bool)
        key_mask[0, :4], key_mask[2, 140:] = False, False
    rates = []
    for threshold in THRESHOLDS:
        model.set_skip_threshold(threshold)
        expected, found = (with_gradients(model, tokens, how, key_mask) for how in ("masked", "packed"))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        for name, gradient in expected[1].items():
            atol = 1e-5 * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=atol, msg=name)
        assert torch.equal(found[2], expected[2])
        rates.append(sum(model.skipping.run_rates()) / 4)
    assert rates[0] == 1.0 and rates[-1] == 0.0 and sorted(rates, reverse=True) == rates and 0.2 < rates[2] < 0.9


def test_paid_work(skipping, generator):
    """All, none, and some: rows that enter each sublayer."""
    model = skipping()
    tokens = torch.randint(32, (2, 20), generator=generator)
    rows = {}
    for index, block in enumerate(model.blocks):
        for number, module in enumerate((block.attention.out_proj, block.mlp)):
            place = 2 * index + number
            module.register_forward_hook(lambda m, i, o, p=place: rows.__setitem__(p, i[0].numel() // i[0].shape[-1]))
    for threshold in THRESHOLDS:
        rows.clear()
        rows.update(dict.fromkeys(range(4), 0))
        model.set_skip_threshold(threshold)
        model.skipping.forget()
        with torch.no_grad():
            model(tokens)
        assert [rows[place] for place in range(4)] == model.skipping.counts[1].tolist(), threshold
    assert rows == dict.fromkeys(range(4), 0)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("execution", ["masked", "packed"])
def test_prefix(skipping, generator, training, execution):
    """Neither logits nor decisions of a prefix depend on what follows."""
    model = skipping().train(training)
    model.skipping.execution = execution
    seen = []
    model.skipping.observe = lambda decisions, *counted, **options: seen.append(torch.stack([d.run for d in decisions]))
    tokens = torch.randint(32, (2, 64), generator=generator)
    with torch.set_grad_enabled(training):
        logits = model(tokens)
        for prefix in (1, 3, 7, 15, 31, 32, 63):
            changed = tokens.clone()
            changed[:, prefix:] = (changed[:, prefix:] + 1 + torch.randint(30, (2, 64 - prefix))) % 32
            new = model(changed)
            torch.testing.assert_close(new[:, :prefix], logits[:, :prefix], rtol=1e-5, atol=1e-5)
            assert torch.equal(seen[-1][..., :prefix], seen[0][..., :prefix])
            assert not torch.equal(new[:, prefix], logits[:, prefix])
    assert not seen[0].all() and seen[0].any()


def test_a_batch_changes_no_decision(skipping, generator):
    model = skipping()
    tokens = torch.randint(32, (4, 40), generator=generator)
    alone = torch.cat([model(row.unsqueeze(0)) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_policy_takes_the_dial(small, randomised, generator):
    model = randomised(small())
    tokens = torch.randint(32, (2, 12), generator=generator)
    full = model(tokens)
    assert model.skipping is None
    model.set_skip_threshold(0.0)
    assert torch.equal(model(tokens), full)
    model.set_skip_threshold(1.0)
    state = model.trunk(tokens)
    embedded = model.stream.begin(model.embedding(tokens))
    assert torch.equal(state.direction, embedded.direction) and torch.equal(state.log_norm, embedded.log_norm)
    model.set_skip_threshold(None)
    assert torch.equal(model(tokens), full)
    assert not any("skip" in name for name in model.state_dict())


def test_vectors_of_zero_change_nothing(small, randomised, generator):
    """A policy at 0% is the full depth, with one more vector a sublayer."""
    tokens = torch.randint(32, (2, 12), generator=generator)
    plain = Decoder(small(projection_init="uniform"), seed=0)
    control = Decoder(small(projection_init="uniform", skip=SkipPolicy(target_rate=0.0)), seed=0)
    assert torch.equal(plain(tokens), control(tokens))
    names = {name for name, _ in control.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert names == {f"stream.updates.{index}.skip_vector" for index in range(4)}
    control.loss(tokens, tokens).backward()
    assert all(update.skip_vector.grad.abs().sum() > 0 for update in control.stream.updates)


def test_saved_with_its_threshold(skipping, tmp_path, generator):
    model = skipping(0.3)
    model.set_skip_threshold(0.55)
    tokens = torch.randint(32, (2, 12), generator=generator)
    loaded = load_model(save_model(model, tmp_path))
    assert float(loaded.skipping.threshold) == pytest.approx(0.55)
    assert torch.equal(loaded(tokens), model(tokens))


def test_bad_input(small):
    with pytest.raises(UserError, match="pre_norm has no gain"):
        ModelConfig(residual="pre_norm", skip=SkipPolicy(threshold=0.5))
    with pytest.raises(UserError, match="PreNormResidual has no gain"):
        Decoder(small("pre_norm")).set_skip_threshold(0.5)
    with pytest.raises(UserError, match="skip threshold is 2"):
        Decoder(small()).set_skip_threshold(2.0)
    with pytest.raises(UserError, match="unknown skip keys rate"):
        ModelConfig.from_dict({"skip": {"rate": 0.5}})


def test_flops_of_what_runs():
    """d = 64, 4 blocks, T = 128, MLP x 4: 2 x 2 x 64^2 + 4 x 64 x 64.5 of attention, 2 x 8 x 64^2 of the MLP."""
    config = ModelConfig(d_model=64, n_layers=4, n_heads=2, vocab_size=256)
    attention, mlp = 2 * 2 * 64 * 64 + 4 * 64 * 64.5, 2 * 8 * 64 * 64
    assert skippable_flops_per_token(config, 128) == [attention, mlp] * 4
    whole = forward_flops_per_token(config, 128)
    assert forward_flops_per_token(config, 128, run_rates=[1.0] * 8) == whole
    rates = [0.5, 1.0] + [1.0] * 5 + [0.25]
    assert forward_flops_per_token(config, 128, run_rates=rates) == round(whole - 0.5 * attention - 0.75 * mlp)
    assert training_flops_per_token(config, 128, run_rates=rates) == 3 * round(whole - 0.5 * attention - 0.75 * mlp)
    shares = skip_rates(config, rates, 128)
    assert shares.sublayer_tokens == pytest.approx(1.25 / 8)
    assert shares.parameters == pytest.approx((0.5 * 2 + 0.75 * 8) / (4 * 12))
    assert shares.flops == pytest.approx((0.5 * attention + 0.75 * mlp) / whole, rel=1e-4)


def test_scoring_counts_what_is_scored(skipping, generator):
    model = skipping()
    tokens = torch.randint(32, (2, 12), generator=generator)
    targets = tokens.clone()
    targets[1, 5:] = -100
    model.skipping.forget()
    model.score(tokens, targets)
    assert model.skipping.counts[0].tolist() == [17] * 4
    model(tokens)
    assert model.skipping.counts[0].tolist() == [41] * 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_training(skipping, generator):
    """Steps with any number of running tokens: one more graph at most, and the uncompiled gradients."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = skipping()
    compiled = Decoder(plain.config, seed=0)
    compiled.load_state_dict(plain.state_dict())
    compiled.compile_blocks()
    tokens = torch.randint(32, (2, 40), generator=generator)
    graphs = []
    for threshold in (0.5, 0.45, 0.0, 0.55, 0.5, 0.4, 0.6, 0.48):
        gradients = []
        for model in (plain, compiled):
            model.set_skip_threshold(threshold)
            model.zero_grad()
            model.loss(tokens, tokens).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        for name, expected in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] <= graphs[0] + 1, graphs  # the MLP of packed rows, and of all tokens
    torch._dynamo.reset()


def test_while_nothing_is_skipped_nothing_is_packed(skipping, generator, monkeypatch):
    """A control that never skips runs the blocks of the full depth, decides, counts; and packs when a skip comes."""
    model = skipping(None)
    tokens = torch.randint(32, (2, 9), generator=generator)
    expected, packed = with_gradients(model, tokens, "masked"), []
    monkeypatch.setattr(attention.Attention, "_packed", lambda *arguments: packed.append(arguments))
    monkeypatch.setattr(skip, "_run_packed", lambda *arguments: packed.append(arguments))
    torch.testing.assert_close(with_gradients(model, tokens, "packed"), expected, rtol=0, atol=0)
    assert not packed and model.skipping.run_rates() == [1.0] * len(model.stream.updates)
    assert int(model.skipping.histogram.sum()) == 2 * 9 * len(model.stream.updates)
    model.set_skip_threshold(0.5)
    with pytest.raises(AttributeError):  # what was put in place of packing returns nothing
        model(tokens)
    assert packed
