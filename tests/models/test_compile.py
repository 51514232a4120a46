"""One compiled block serves every layer."""

import shutil

import pytest
import torch

from nagnet.models.decoder import Decoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


@pytest.fixture(autouse=True)
def _clean_dynamo():
    torch._dynamo.reset()
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
