"""One compiled block serves every layer."""

import functools
import shutil

import pytest
import torch

from nagnet.benchmarks.timing import kept_bytes
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.residual import COMPONENTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


@pytest.fixture(autouse=True)
def _clean_dynamo():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own: models raise it
        yield
    torch._dynamo.reset()


def graphs(config) -> int:
    """Graphs compiled by two forward and backward passes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Decoder(config, seed=0)
    model.compile_blocks()
    tokens = torch.randint(32, (2, 8))
    for _ in range(2):
        model.loss(tokens, tokens).backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_depth_adds_no_graph(small, residual):
    shallow, deep = (graphs(small(residual, n_layers=n)) for n in (6, 12))
    assert 1 <= shallow == deep <= 2


def test_windows_of_different_length_share_a_graph(small):
    assert graphs(small(n_layers=6, sliding_windows=(3, 5, 0))) <= 2


def test_compiled_blocks_compute_the_same(small, residual, randomised, tokens, targets):
    model = randomised(small(residual))
    expected = model.loss(tokens, targets)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    names = list(model.state_dict())
    model.compile_blocks()
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "changes",
    [
        {"without": tuple(COMPONENTS)},  # each alone leaves out a part of what this leaves out
        {"mlp_taper": 0.5},
        {"channel_scales": True},
        {"readout": ReadoutConfig("free", "per_entry")},
    ],
    ids=["without-all", "tapered", "channel-scales", "per-entry"],
)
def test_compiled_variants_compute_the_same(small, changes, randomised, tokens, targets):
    model = randomised(small(**changes))
    expected = model.loss(tokens, targets)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    model.compile_blocks()
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"without": tuple(COMPONENTS)}, {"channel_scales": True}], ids=str)
def test_variants_add_no_graph_with_depth(small, changes):
    assert graphs(small(n_layers=6, **changes)) <= 2


def test_more_widths_than_torch_compiles_by_default(small):
    config = small("pre_norm", n_layers=10, mlp_taper=0.75, d_ff=128)
    assert len(set(config.mlp_widths)) == 10  # torch's limit is 8
    assert graphs(config) <= 1 + len(set(config.mlp_widths))


def test_models_of_one_process_share_no_limit(small, tokens, targets, monkeypatch):
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compile_module, backend="eager"))
    models = [Decoder(small(without=(component,), n_layers=3), seed=0) for component in COMPONENTS]
    others = ("pre_norm", "sandwich", "post_norm", "none")
    models += [Decoder(small(residual, n_layers=3), seed=0) for residual in others]
    for model in models:
        model.compile_blocks()
    for _ in range(2):
        for model in models:
            model.loss(tokens, targets).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norm_agnostic_blocks_keep_as_little_for_backward_as_pre_norm(dtype):
    kept = {}
    for residual in ("norm_agnostic", "pre_norm"):
        torch._dynamo.reset()
        config = ModelConfig(residual, d_model=64, n_layers=2, n_heads=2, vocab_size=64, n_directions=16)
        model, tokens = Decoder(config, seed=0), torch.randint(64, (1, 256))
        model.compile_blocks()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model.trunk(tokens)
            kept[residual] = kept_bytes(lambda: model.trunk(tokens), model)  # noqa: B023
    assert kept["norm_agnostic"] <= 1.05 * kept["pre_norm"]
