"""Skipping with a cache: the decisions and logits of the whole pass, and keys and values of every token."""

import shutil

import pytest
import torch

from nagnet import SkipPolicy
from nagnet.generation.cache import KeyValueCache, extend, prefill
from nagnet.generation.decoding import decode, decode_compiled
from nagnet.generation.engine import generate, generate_stream

TIGHT = {"rtol": 1e-10, "atol": 1e-12}  # float64
THRESHOLDS = (0.4, 0.5, 1.0)


@pytest.fixture
def skipping(build, generator):
    def make(threshold=0.5, **changes):
        model = build(skip=SkipPolicy(threshold=threshold), **changes)
        with torch.no_grad():
            for update in model.stream.updates:
                update.modulator.bias.normal_(generator=generator)
                update.skip_vector.normal_(generator=generator)
        return model

    return make


@pytest.mark.parametrize(
    "options", [{}, {"sliding_windows": (3, 0), "n_kv_heads": 2}], ids=["plain", "windows, groups"]
)
@pytest.mark.parametrize("threshold", THRESHOLDS)
@torch.no_grad()
def test_chunks_equal_one_pass(skipping, tokens, options, threshold):
    model = skipping(threshold, **options)
    full = model(tokens)
    for chunks in ([5, 3, 1, 4], [1] * 13):
        cache = KeyValueCache(model, 2, 13)
        parts = [model.readout(*extend(model, cache, part).split()) for part in tokens.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), full, **TIGHT)


@torch.no_grad()
def test_ragged_batch_is_each_sequence_alone(skipping):
    model = skipping()
    rows = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8]]
    cache = KeyValueCache(model, 3, 20)
    prefill(model, cache, rows, chunk=4)
    model.skipping.forget()
    for token in range(4):
        logits, _ = decode(model, cache, torch.full((3, 1), token), [1, 1, 1])
        rows = [[*row, token] for row in rows]
        for found, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(found, model(torch.tensor([row]))[0, -1], **TIGHT)


@torch.no_grad()
def test_every_token_has_keys_and_values(build):
    """Four blocks, the first skipped by tokens 2 and 5: the cache has what the full pass computes for them."""
    model = build(n_layers=4)
    model.set_skip_threshold(0.5)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])

    def replaced(block, shape):
        scores = torch.ones(2, *shape)
        if block == 0:
            scores[:, :, [2, 5]] = 0.0
        return scores

    model.skipping.replaced = replaced
    readings = []
    for block in model.blocks:
        block.attention.k_proj.register_forward_hook(lambda module, inputs, output: readings.append(inputs[0]))
    cache = KeyValueCache(model, 1, 8)
    extend(model, cache, tokens)
    assert cache.lengths == [8]
    cos, sin = model.rotary(8)
    layers = cache.past([0], 1).layers
    for block, reading, layer in zip(model.blocks, list(readings), layers, strict=True):
        for kept, wanted in zip(layer.seen(), block.attention.keys_and_values(reading, cos, sin), strict=True):
            torch.testing.assert_close(kept, wanted, **TIGHT)
    cache.reset()
    first = extend(model, cache, tokens[:, 2:]).merge()
    fresh = extend(model, KeyValueCache(model, 1, 8), tokens[:, 2:]).merge()
    assert torch.equal(first, fresh)


@torch.no_grad()
def test_a_skipped_token_costs_keys_and_values_alone(skipping):
    model = skipping(1.0)
    cache = KeyValueCache(model, 1, 8)
    prefill(model, cache, [[1, 2, 3]])
    calls = []
    for block in model.blocks:
        for name, module in block.named_modules():
            module.register_forward_hook(lambda m, i, o, name=name: calls.append(name))
    decode(model, cache, torch.tensor([[4]]), [1])
    assert set(calls) == {"attention.k_proj", "attention.v_proj", "attention", ""} and len(calls) == 4 * 3


def test_generation_counts_prefill_and_decode_apart(skipping):
    model = skipping(0.5)
    stream = generate_stream(model, [[1, 2, 3, 4], [5]], 6, temperature=0)
    for _ in stream:
        pass
    rates = stream.skip_rates()
    assert stream.skip_counts["prefill"][0].tolist() == [5] * 6  # padding is no token
    assert stream.skip_counts["decode"][0].tolist() == [10] * 6
    assert 0 < rates["prefill"].sublayer_tokens < 1 and 0 < rates["decode"].flops < 1
    model.set_skip_threshold(None)
    assert all(rates.flops == 0 for rates in _rates(generate_stream(model, [[1, 2]], 3)))


def _rates(stream):
    for _ in stream:
        pass
    return stream.skip_rates().values()


def compiled(test):
    """Marks a test that compiles."""
    has_compiler = shutil.which("c++") is not None or shutil.which("g++") is not None
    test = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")(test)
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))  # the compiler's own warnings


@compiled
@torch.no_grad()
def test_one_block_compiled_for_training(skipping):
    """The only block's attention is also the next one's: a graph gets modules twice, and leaves them as they were."""
    model = skipping(0.5, dtype=torch.float32, n_layers=1)
    model.compile_blocks()
    caches = [KeyValueCache(model, 1, 16) for _ in range(2)]
    with torch.compiler.set_stance("force_eager"):
        for cache in caches:
            prefill(model, cache, [[3, 1, 4]])
    for step in range(5):
        tokens = torch.tensor([[step]])
        expected = decode(model, caches[0], tokens, [1])
        torch.testing.assert_close(decode_compiled(model, caches[1], tokens, [1]), expected, rtol=1e-4, atol=1e-4)


@compiled
@torch.no_grad()
def test_compiled_steps(skipping, compilations):
    """64 tokens with varying counts of skips: three graphs, and the step as it is."""
    torch._dynamo.reset()
    model = skipping(0.5, dtype=torch.float32, max_seq_len=80)
    caches = [KeyValueCache(model, 1, 80) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, [[3, 1, 4]])
    ran = set()
    for step in range(64):
        tokens = torch.tensor([[step % 32]])
        model.skipping.forget()
        expected = decode(model, caches[0], tokens, [1])
        counts = model.skipping.counts.clone()
        ran.add(int(counts[1].sum()))
        torch.testing.assert_close(decode_compiled(model, caches[1], tokens, [1]), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model.skipping.counts, 2 * counts)
    assert len(ran) > 1
    assert compilations == ["_enter_and_remember", "_run_and_remember", "_read_out_and_count"]
    expected = generate(model, [[1, 2, 3], [4]], 20, temperature=0)
    found = generate(model, [[1, 2, 3], [4]], 20, temperature=0, compiled=True)
    assert [completion.ids[:5] for completion in found] == [completion.ids[:5] for completion in expected]
    torch._dynamo.reset()
