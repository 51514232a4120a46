"""Cross entropy by chunks equals cross entropy of all logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from nagnet.errors import UserError
from nagnet.ops import loss


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 4000)
    monkeypatch.setattr(loss, "MIN_CHUNK_ROWS", 3)  # three or four rows at a time: several chunks in each test


def _inputs(vocab_size, d, n=23, dtype=torch.float64):
    hidden = torch.randn(n, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab_size, (n,))
    targets[[2, 4]] = -100
    return hidden, weight, targets


def _full(hidden, weight, targets, softcap):
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits, targets, reduction="none"), logits


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("vocab_size", "d"), [(1000, 8), (1003, 7), (5, 1)], ids=str)
def test_sum_losses_and_gradients(vocab_size, d, softcap):
    hidden, weight, targets = _inputs(vocab_size, d)
    expected, _ = _full(hidden, weight, targets, softcap)
    gradients = torch.autograd.grad(0.7 * expected.sum(), (hidden, weight))
    total, losses = loss.summed_cross_entropy(hidden, weight, targets, softcap)
    torch.testing.assert_close(total, expected.sum())
    torch.testing.assert_close(losses, expected)
    for a, b in zip(torch.autograd.grad(0.7 * total, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    hidden, weight, targets = _inputs(50, 4, n=6)
    assert torch.autograd.gradcheck(lambda h, w: loss.summed_cross_entropy(h, w, targets, 3.0)[0], (hidden, weight))


def test_ignored_targets_have_no_loss_and_no_gradient():
    hidden, weight, targets = _inputs(1000, 8)
    total, losses = loss.summed_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    total.backward()
    assert total == 0 and losses.abs().max() == 0
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_float32_error_is_at_most_twice_that_of_all_logits_at_once():
    hidden, weight, targets = _inputs(1003, 65, n=200)
    truth = torch.autograd.grad(_full(hidden, weight, targets, None)[0].sum(), (hidden, weight))
    narrow = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    full = torch.autograd.grad(_full(*narrow, targets, None)[0].sum(), narrow)
    chunked = torch.autograd.grad(loss.summed_cross_entropy(*narrow, targets)[0], narrow)
    for a, b, c in zip(chunked, full, truth, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_targets_outside_the_vocabulary_are_refused(wrong):
    hidden, weight, targets = _inputs(1000, 8)
    targets[5] = wrong
    for function in (loss.summed_cross_entropy, loss.score_targets):
        with pytest.raises(UserError, match=f"target {wrong} .*-100"):
            function(hidden, weight, targets)


def test_score_tells_losses_and_hits_without_a_graph():
    hidden, weight, targets = _inputs(1000, 8)
    expected, logits = _full(hidden, weight, targets, None)
    targets[0] = logits[0].argmax()
    losses, correct = loss.score_targets(hidden, weight, targets)
    torch.testing.assert_close(losses[1:], expected.detach()[1:])
    assert torch.equal(correct, logits.argmax(dim=-1) == targets)
    assert not losses.requires_grad


def test_no_tensor_of_all_logits_exists():
    hidden, weight, targets = _inputs(1000, 8, n=64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    with Watch():
        loss.summed_cross_entropy(hidden, weight, targets)[0].backward()
    assert largest <= max(loss.CHUNK_LOGITS, weight.numel())
