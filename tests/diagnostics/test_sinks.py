import pytest
import torch

from nagnet.diagnostics.sinks import attention_sinks
from nagnet.nn.residual import RESIDUAL_STREAMS


def test_without_preference_attention_is_uniform(build_model, tokens):
    model = build_model()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.q_proj.weight)
    found = attention_sinks(model, tokens)
    rows = range(2, 7)  # queries 1..5 see 2..6 keys
    uniform = sum(1 / keys for keys in rows) / 5
    four = sum(min(4, keys) / keys for keys in rows) / 5
    for layer in range(2):
        assert found.first_key[layer].item() == pytest.approx(uniform)
        assert found.first_four[layer].item() == pytest.approx(four)
        assert found.diagonal[layer].item() == pytest.approx(uniform)
    torch.testing.assert_close(found.maps.sum(dim=-1), torch.ones(2, 6))
    assert found.maps.triu(1).count_nonzero() == 0
    assert found.layers_above_half == 0


def test_a_planted_sink_takes_the_mass(build_model, tokens, monkeypatch):
    model = build_model(n_layers=4, qk_gain=4.0)
    attention = model.blocks[3].attention

    def keys(x, cos, sin):
        k, v = type(attention).keys_and_values(attention, x, cos, sin)
        q = attention.queries(x, cos, sin)
        k = torch.zeros_like(k)
        k[:, :, 0] = 100.0 * q.mean(dim=2)  # every query points to key 0
        return k, v

    def queries(x, cos, sin):
        q = type(attention).queries(attention, x, cos, sin)
        return q.mean(dim=2, keepdim=True).expand_as(q)

    monkeypatch.setattr(attention, "keys_and_values", keys)
    monkeypatch.setattr(attention, "queries", queries)
    found = attention_sinks(model, tokens)
    assert found.first_key[3].item() == pytest.approx(1.0, abs=1e-4)
    assert found.layers_above_half == int((found.first_key > 0.5).sum()) >= 1
    assert found.quartiles["first_key"][3] == found.first_key[3].item()


@pytest.mark.parametrize("rule", list(RESIDUAL_STREAMS))
@pytest.mark.parametrize("heads", [{"n_kv_heads": 1}, {"sliding_windows": (2, 0)}])
def test_probabilities_are_those_that_the_model_uses(build_model, tokens, rule, heads):
    model = build_model(rule, **heads)
    mixed = []
    for block in model.blocks:
        block.attention.out_proj.register_forward_pre_hook(lambda _, inputs: mixed.append(inputs[0]))
    values = []
    for block in model.blocks:  # values of 1 for one key at a time would need a pass each: use the key's position
        own = block.attention.keys_and_values

        def marked(x, cos, sin, own=own):
            k, v = own(x, cos, sin)
            place = torch.nn.functional.one_hot(torch.arange(v.shape[2]), v.shape[3]).to(v.dtype)
            values.append(v)
            return k, place.expand_as(v)

        block.attention.keys_and_values = marked
    found = attention_sinks(model, tokens)
    for layer, vectors in enumerate(mixed):
        by_head = vectors.unflatten(-1, (2, -1))[..., :6]  # [B, T, H, keys]
        torch.testing.assert_close(found.maps[layer], by_head.mean(dim=(0, 2)), rtol=1e-4, atol=1e-6)


def test_tokens_that_skip_ask_nothing(build_model, tokens):
    model = build_model(n_layers=2)
    model.set_skip_threshold(1.0)  # nobody runs
    found = attention_sinks(model, tokens)
    assert found.first_key.isnan().all()
    model.set_skip_threshold(0.0)
    assert found.maps.shape == (2, 6, 6)
    assert attention_sinks(model, tokens).first_key.isfinite().all()


def test_one_token_has_no_query_to_speak_of(build_model):
    found = attention_sinks(build_model(), torch.zeros(2, 1, dtype=torch.long))
    assert found.first_key.isnan().all() and found.diagonal.isnan().all()
    assert found.maps.tolist() == [[[1.0]], [[1.0]]]


def test_works_on_a_model_in_use_under_compile(build_model, tokens):
    model = build_model()
    plain = attention_sinks(model, tokens).first_key
    model.compile_blocks()
    assert torch.equal(attention_sinks(model, tokens).first_key, plain)
