"""Passes with a cache against the one pass without, which is the specification."""

import pytest
import torch

from nagnet.errors import UserError
from nagnet.generation.cache import KeyValueCache, extend, prefill
from nagnet.nn.residual import RESIDUAL_STREAMS

TIGHT = {"rtol": 1e-10, "atol": 1e-12}  # float64
MODELS = {name: {"residual": name} for name in RESIDUAL_STREAMS} | {
    "two groups": {"n_kv_heads": 2},
    "one group": {"n_kv_heads": 1},
    "windows": {"sliding_windows": (3, 0)},
    "a window of one": {"sliding_windows": (1,)},
    "windows and groups": {"sliding_windows": (2, 5, 0), "n_kv_heads": 2},
    "channel scales": {"channel_scales": True, "n_kv_heads": 2},
    "swiglu, tapered, tied": {"mlp": "swiglu", "mlp_taper": 0.3, "tie_embeddings": True},
    "table of 4 positions": {"max_seq_len": 4},
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def cached_logits(model, tokens, chunks, capacity=None):
    """Logits [B, T, V] formed in chunks of the given lengths."""
    cache = KeyValueCache(model, tokens.shape[0], capacity or tokens.shape[1])
    parts = [model.readout(*extend(model, cache, part).split()) for part in tokens.split(chunks, dim=1)]
    return torch.cat(parts, dim=1)


@every_model
@torch.no_grad()
def test_chunks_equal_one_pass(build, tokens, options):
    model = build(**options)
    full = model(tokens)
    assert full.std() > 0.1
    torch.testing.assert_close(cached_logits(model, tokens, [5, 3, 1, 4]), full, **TIGHT)
    torch.testing.assert_close(cached_logits(model, tokens, [1] * 13, capacity=40), full, **TIGHT)


@torch.no_grad()
def test_chunks_in_float32(build, tokens):
    model = build(torch.float32)
    torch.testing.assert_close(cached_logits(model, tokens, [5, 3, 1, 4]), model(tokens), rtol=0, atol=1e-5)


@torch.no_grad()
def test_chunks_in_bfloat16(build, tokens):
    model = build(torch.bfloat16)
    torch.testing.assert_close(cached_logits(model, tokens, [5, 3, 1, 4]), model(tokens), rtol=0.05, atol=0.05)


@every_model
@pytest.mark.parametrize("chunk", [2, 3, 512])
@torch.no_grad()
def test_ragged_batch_is_each_sequence_alone(build, options, chunk):
    """Prompts of 6, 1 and 9 tokens; then four steps in which some sequences have ended."""
    model = build(**options)
    rows = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8]]
    cache = KeyValueCache(model, 3, 20)
    prompted = prefill(model, cache, rows, chunk)
    logits = model.readout(prompted.direction, prompted.log_norm)
    for index, row in enumerate(rows):
        direction, log_norm = model.trunk(torch.tensor([row])).split()
        torch.testing.assert_close(logits[index], model.readout(direction, log_norm)[0, -1], **TIGHT)
        torch.testing.assert_close(prompted.log_norms[index, : len(row)], log_norm[0], **TIGHT)
    for counts in ([1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 0, 1]):
        following = [5, 11, 23]
        logits = model.readout(*extend(model, cache, torch.tensor(following).unsqueeze(1), counts).split())
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                row.append(following[index])
                torch.testing.assert_close(logits[index, 0], model(torch.tensor([row]))[0, -1], **TIGHT)
        assert cache.lengths == [len(row) for row in rows]


@torch.no_grad()
def test_padding_changes_nothing(build):
    model = build(sliding_windows=(3, 0))
    rows = torch.tensor([[4, 2, 0, 0, 0], [1, 2, 3, 4, 5]])
    results = []
    for filler in (0, 17):
        rows[0, 2:] = filler
        cache = KeyValueCache(model, 2, 9)
        first = extend(model, cache, rows, [2, 5]).merge()
        second = extend(model, cache, torch.tensor([[6], [7]])).merge()
        results.append((first[0, :2], first[1], second))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_a_broken_sequence_leaves_the_others_alone(build):
    """NaN in the embedding of one token reaches that token's sequence and no other."""
    model = build()
    model.embedding.weight[9] = torch.nan
    cache = KeyValueCache(model, 2, 6)
    prefill(model, cache, [[9, 9, 9], [1, 2]])
    logits = model.readout(*extend(model, cache, torch.tensor([[3], [3]])).split())
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1, 0], model(torch.tensor([[1, 2, 3]]))[0, -1], **TIGHT)


@torch.no_grad()
def test_reset_equals_a_fresh_cache(build):
    model = build()
    model.embedding.weight[9] = torch.nan
    cache = KeyValueCache(model, 2, 8)
    prefill(model, cache, [[1, 2], [9, 9, 9, 9, 9, 9]])
    cache.reset()
    used = prefill(model, cache, [[1, 2, 3], [4]])
    fresh = prefill(model, KeyValueCache(model, 2, 8), [[1, 2, 3], [4]])
    assert cache.lengths == [3, 1]
    assert torch.equal(used.direction, fresh.direction) and torch.equal(used.log_norm, fresh.log_norm)


@torch.no_grad()
def test_every_layer_keeps_every_position(build, tokens):
    model = build(n_kv_heads=2)
    cache = KeyValueCache(model, 2, 13)
    past = cache.past([13, 13], 13)
    model.trunk(tokens, past=past)
    assert past.positions.tolist() == [list(range(13))] * 2
    for layer in past.layers:
        assert layer.keys.shape == (2, 2, 14, 4)
        assert (layer.keys[:, :, :13].abs().amax(-1) > 0).all() and (layer.values[:, :, :13].abs().amax(-1) > 0).all()
        assert not layer.keys[:, :, 13].any()


@torch.no_grad()
def test_keys_and_values_alone_are_enough_for_later_tokens(build, tokens):
    """A token whose keys and values are written, and of which nothing else is computed, is seen by those after it."""
    attention = build().blocks[0].attention
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    model = build()
    cos, sin = model.rotary(5)
    expected = attention(x, cos, sin)
    cache = KeyValueCache(model, 1, 5)
    before = cache.past([4], 4)
    before.layers[0].write(*attention.keys_and_values(x[:, :4], cos[:4], sin[:4]))
    cache.advance([4])
    last = attention(x[:, 4:], cos[4:], sin[4:], past=cache.past([1], 1).layers[0])
    torch.testing.assert_close(last, expected[:, 4:], **TIGHT)


@torch.no_grad()
def test_a_window_reads_its_positions_alone(build):
    model = build(sliding_windows=(3, 0))
    cache = KeyValueCache(model, 1, 12)
    prefill(model, cache, [[1] * 9])
    sizes = [layer.seen()[0].shape[2] for layer in cache.past([1], 1).layers]
    assert sizes == [3, 10, 3]
    assert cache.bytes_read() == (3 + 10 + 3) * 16 * 2 * 8


def test_full_cache_is_refused(build, tokens):
    model = build()
    cache = KeyValueCache(model, 2, 8)
    with pytest.raises(UserError, match="13 tokens do not fit a cache of 8"):
        extend(model, cache, tokens)
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize(("batch_size", "capacity"), [(0, 4), (2, 0)])
def test_cache_without_room_is_refused(build, batch_size, capacity):
    with pytest.raises(UserError, match="must be 1 or more"):
        KeyValueCache(build(), batch_size, capacity)
