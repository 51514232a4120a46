"""Attention against a softmax written out in float64."""

import math

import pytest
import torch

from nagnet.nn.attention import Attention, causal_attention, one_query_attention
from nagnet.nn.rotary import RotaryTable, apply_rotary


def naive_attention(q, k, v, window=0, key_mask=None):
    """One query at a time, in float64: softmax of q.k / sqrt(head width) over the keys it may see."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        group = h * k.shape[1] // q.shape[1]
        keys = [
            j for j in range(t + 1) if (window <= 0 or t - j < window) and (key_mask is None or bool(key_mask[b, j]))
        ]
        if keys:
            scores = k[b, group, keys] @ q[b, h, t] / math.sqrt(q.shape[-1])
            out[b, h, t] = torch.softmax(scores, dim=0) @ v[b, group, keys]
    return out


@pytest.fixture
def qkv(generator):
    def make(n_heads=4, n_kv_heads=4, length=9, dtype=torch.float32):
        shapes = (2, n_heads, length, 6), (2, n_kv_heads, length, 6), (2, n_kv_heads, length, 6)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    return make


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 0, 1, 3, 9, 100])
def test_equals_naive_softmax(qkv, n_kv_heads, window):
    q, k, v = qkv(n_kv_heads=n_kv_heads)
    mixed = causal_attention(q, k, v, None if window is None else torch.tensor(window))
    torch.testing.assert_close(mixed.double(), naive_attention(q, k, v, window or 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_naive_softmax_with_hidden_keys(qkv, n_kv_heads, window):
    q, k, v = qkv(n_kv_heads=n_kv_heads)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, :2] = key_mask[1, 3:7] = False
    mixed = causal_attention(q, k, v, None if window is None else torch.tensor(window), key_mask)
    expected = naive_attention(q, k, v, window or 0, key_mask)
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences(qkv, length):
    q, k, v = qkv(length=length)
    torch.testing.assert_close(causal_attention(q, k, v), v if length else torch.zeros_like(v))
    torch.testing.assert_close(causal_attention(q, k, v, torch.tensor(2)), v if length else torch.zeros_like(v))


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("window", [None, 2])
def test_hidden_keys_may_hold_anything(qkv, poison, window):
    q, k, v = qkv()
    window = None if window is None else torch.tensor(window)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, :4] = False
    clean = causal_attention(q, k, v, window, key_mask)
    k[0, :, :4] = v[0, :, :4] = poison
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    mixed = causal_attention(*inputs, window, key_mask)
    assert torch.equal(mixed, clean)
    assert not mixed[0, :, :4].any()  # these queries see no key at all
    mixed.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


def test_a_row_without_keys_leaves_live_rows_to_the_bit(qkv):
    q, k, v = qkv()
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    all_live = causal_attention(q, k, v, None, key_mask)
    key_mask[0] = False
    some_dead = causal_attention(q, k, v, None, key_mask)
    assert torch.equal(some_dead[1], all_live[1]) and not some_dead[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit(qkv, dtype):
    q, k, v = qkv(dtype=dtype)
    for window in (None, torch.tensor(3)):
        mixed = causal_attention(q, k, v, window)
        assert mixed.dtype == dtype
        expected = naive_attention(q, k, v, 0 if window is None else 3)
        torch.testing.assert_close(mixed.double(), expected, rtol=0.02, atol=0.02)


def test_strides_do_not_matter(qkv):
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv(n_kv_heads=2))
    assert not q.is_contiguous()
    torch.testing.assert_close(causal_attention(q, k, v).double(), naive_attention(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
def test_one_query_equals_naive_softmax(qkv, n_kv_heads, window, dtype, tolerance):
    q, k, v = qkv(n_kv_heads=n_kv_heads, dtype=dtype)
    allowed = None if window is None else (torch.arange(9) >= 9 - window).expand(2, 1, 1, 9)
    mixed = one_query_attention(q[:, :, -1:], k, v, allowed)
    assert mixed.dtype == dtype
    expected = naive_attention(q, k, v, window or 0)[:, :, -1:]
    torch.testing.assert_close(mixed.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def module_and_tables():
    module = Attention(12, n_heads=4, n_kv_heads=2, head_dim=6, qk_gain=1.2)
    return module, RotaryTable(6, 1e4, 9)(9)


def test_module_by_hand(module_and_tables, generator):
    """Projections, rotary turn, norm times 1.2, grouped attention, output projection."""
    module, (cos, sin) = module_and_tables
    x = torch.randn(2, 9, 12, generator=generator)

    def turned(projection):
        heads = projection(x).view(2, 9, -1, 6)
        pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.complex(cos, -sin)[:, None]
        heads = torch.cat((pairs.real, pairs.imag), -1).transpose(1, 2)
        return 1.2 * heads / heads.square().mean(-1, keepdim=True).sqrt()

    v = module.v_proj(x).view(2, 9, 2, 6).transpose(1, 2)
    mixed = naive_attention(turned(module.q_proj), turned(module.k_proj), v)
    expected = module.out_proj(mixed.float().transpose(1, 2).reshape(2, 9, 24))
    torch.testing.assert_close(module(x, cos, sin), expected, rtol=1e-4, atol=1e-5)


def test_channel_scales(module_and_tables, generator):
    """One learned factor per channel of a key head and of the queries of its group; it starts at the gain."""
    plain, (cos, sin) = module_and_tables
    scaled = Attention(12, n_heads=4, n_kv_heads=2, head_dim=6, qk_gain=1.2, channel_scales=True)
    scaled.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(scaled.qk_scale.weight, torch.full((12,), 12**-0.5))
    x = torch.randn(2, 9, 12, generator=generator)
    torch.testing.assert_close(scaled(x, cos, sin), plain(x, cos, sin))
    factor = torch.rand(2, 6, generator=generator)
    scaled.qk_scale.weight.data = (factor.flatten() / 1.2) * 12**-0.5

    def normalised(projection):
        heads = apply_rotary(projection(x).unflatten(-1, (-1, 6)), cos, sin)
        return heads / heads.square().mean(-1, keepdim=True).sqrt()

    q = normalised(plain.q_proj) * factor[[0, 0, 1, 1]]
    k = normalised(plain.k_proj) * factor
    v = plain.v_proj(x).unflatten(-1, (-1, 6))
    mixed = naive_attention(*(part.transpose(1, 2) for part in (q, k, v))).float()
    expected = plain.out_proj(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(scaled(x, cos, sin), expected, rtol=1e-4, atol=1e-5)


def test_module_ignores_the_scale_of_queries_and_keys(module_and_tables, generator):
    module, (cos, sin) = module_and_tables
    x = torch.randn(2, 9, 12, generator=generator)
    before = module(x, cos, sin)
    with torch.no_grad():
        module.q_proj.weight.mul_(100)
        module.k_proj.weight.mul_(10)
    torch.testing.assert_close(module(x, cos, sin), before, rtol=1e-4, atol=1e-5)


def test_module_under_autocast(module_and_tables, generator):
    module, (cos, sin) = module_and_tables
    x = torch.randn(2, 9, 12, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(x, cos, sin)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), module(x, cos, sin), rtol=0.05, atol=0.02)
