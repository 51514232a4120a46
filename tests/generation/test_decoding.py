"""The compiled step is the step."""

import random
import shutil

import pytest
import torch

from nagnet.generation import graph
from nagnet.generation.cache import KeyValueCache, prefill
from nagnet.generation.decoding import decode, decode_compiled
from nagnet.generation.engine import generate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]
RAGGED = [[3, 1, 4], [2, 7, 1, 8, 2], [8]]
CASES = {
    "norm_agnostic": ({}, [[3, 1, 4]]),
    "norm_agnostic, ragged": ({}, RAGGED),
    "pre_norm, ragged": ({"residual": "pre_norm"}, RAGGED),
    "windows and groups": ({"sliding_windows": (3, 0), "n_kv_heads": 2}, [[3, 1, 4]]),
    "ngpt": ({"residual": "ngpt"}, [[3, 1, 4]]),
    "a window of one slot": ({"sliding_windows": (1, 0)}, [[3]]),
}


@pytest.fixture(autouse=True)
def _clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def two_caches(model, prompts, capacity=16):
    """Caches that hold the prompts, for the step as it is and for the compiled one."""
    caches = [KeyValueCache(model, len(prompts), capacity) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, prompts)
    return caches


@torch.no_grad()
@pytest.mark.parametrize(("options", "prompts"), CASES.values(), ids=CASES)
def test_equals_the_step_as_it_is(build, options, prompts, compilations):
    model = build(torch.float32, max_seq_len=64, **options)
    caches = two_caches(model, prompts, 64)
    for step in range(40):
        counts = [1] * len(prompts) if step != 20 else [1] + [0] * (len(prompts) - 1)
        tokens = torch.full((len(prompts), 1), step % 32)
        expected = decode(model, caches[0], tokens, counts)
        found = decode_compiled(model, caches[1], tokens, counts)
        for index, count in enumerate(counts):
            if count:
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a[index], b[index], rtol=1e-4, atol=1e-4)
    assert caches[0].lengths == caches[1].lengths
    assert compilations == ["_enter", "_run_block", "read_out"]


@torch.no_grad()
def test_graphs_without_a_hash_are_not_mixed_up(build):
    """Torch names a graph with a switch of autocast by Python's random numbers, and takes one of the same name."""
    model = build(torch.bfloat16, max_seq_len=66)
    caches = two_caches(model, [[3, 1, 4], [1]])  # of one sequence the gain has no such switch
    with torch.autocast("cpu", torch.bfloat16):
        random.seed(0)
        before = random.getstate()
        for token in range(3):
            tokens = torch.full((2, 1), token)
            found = decode_compiled(model, caches[1], tokens, [1, 1])
            torch.testing.assert_close(found, decode(model, caches[0], tokens, [1, 1]), rtol=0.05, atol=0.05)
        assert random.getstate() == before


@torch.no_grad()
def test_autocast_is_not_given_a_graph_of_another_type(build):
    """Nothing is checked when a graph is called: in a wrong type it would read beyond its arguments."""
    model = build(torch.float32, max_seq_len=67)
    caches = two_caches(model, [[3, 1, 4]])
    for token in range(4):
        tokens = torch.tensor([[token]])
        expected = decode(model, caches[0], tokens, [1])
        with torch.autocast("cpu", torch.bfloat16, enabled=token >= 2):
            found = decode_compiled(model, caches[1], tokens, [1])
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_bfloat16(build):
    model = build(torch.bfloat16)
    caches = two_caches(model, [[3, 1, 4]])
    for token in range(5):
        tokens = torch.tensor([[token]])
        expected, found = decode(model, caches[0], tokens, [1]), decode_compiled(model, caches[1], tokens, [1])
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_compilations_of_64_tokens(build, compilations):
    """Ragged prompts, of which one ends early, with windows."""
    model = build(torch.float32, max_seq_len=80, sliding_windows=(5, 0))
    prompts = [[1, 2, 3], [4], [5] * 30]
    expected = generate(model, prompts, 64, temperature=0)
    found = generate(model, prompts, 64, temperature=0, compiled=True)
    assert compilations == ["_enter", "_run_block", "read_out"]
    assert [completion.finish for completion in found] == ["length", "length", "context"]
    assert [completion.ids[:5] for completion in found] == [completion.ids[:5] for completion in expected]


@torch.no_grad()
def test_a_torch_that_hides_its_kernels(build, monkeypatch):
    """Where what calls the kernels is not found inside of what torch returns, that is called itself."""
    monkeypatch.setattr(graph, "_kernels_of", lambda compiled: None)
    model = build(n_layers=2, d_model=8, n_heads=2, dtype=torch.float32)
    caches = [KeyValueCache(model, 1, 16) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, [[3, 1, 4]])
    tokens = torch.tensor([[5]])
    found = decode_compiled(model, caches[1], tokens, [1])
    torch.testing.assert_close(found, decode(model, caches[0], tokens, [1]), rtol=1e-4, atol=1e-4)
