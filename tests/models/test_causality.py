"""No position sees the future: the prefix's logits stay the same to the bit whatever follows."""

import pytest
import torch

CHANGE_AFTER = (1, 3, 7, 15, 31, 32, 63)


@pytest.mark.parametrize("windows", [(), (5, 0)], ids=["full", "windows"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_prefix(small, residual, randomised, generator, windows, training, n_kv_heads):
    model = randomised(small(residual, sliding_windows=windows, n_kv_heads=n_kv_heads, max_seq_len=64)).train(training)
    tokens = torch.randint(32, (2, 64), generator=generator)
    with torch.set_grad_enabled(training):
        logits = model(tokens)
        for prefix in CHANGE_AFTER:
            changed = tokens.clone()
            changed[:, prefix:] = (changed[:, prefix:] + 1 + torch.randint(30, (2, 64 - prefix))) % 32
            new = model(changed)
            assert torch.equal(new[:, :prefix], logits[:, :prefix]), prefix
            assert not torch.equal(new[:, prefix], logits[:, prefix]), prefix


def test_prefix_of_variants(small, variant, randomised, generator):
    model = randomised(small(**variant))
    tokens = torch.randint(32, (1, 16), generator=generator)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 32
    logits, new = model(tokens), model(changed)
    assert torch.equal(new[:, :5], logits[:, :5]) and not torch.equal(new[:, 5], logits[:, 5])


def test_prefix_has_no_gradient_from_the_future(small, residual, randomised, generator):
    model = randomised(small(residual, sliding_windows=(4, 0)))
    embedded = []
    model.embedding.register_forward_hook(
        lambda module, inputs, output: embedded.append(output) or output.retain_grad()
    )
    model(torch.randint(32, (1, 12), generator=generator))[0, 5].sum().backward()
    reached = embedded[0].grad[0].abs().sum(-1) > 0
    assert not reached[6:].any() and reached[:6].all()


def test_a_sequence_does_not_depend_on_its_batch(small, residual, randomised, generator):
    model = randomised(small(residual))
    tokens = torch.randint(32, (4, 9), generator=generator)
    torch.testing.assert_close(model(tokens)[2:3], model(tokens[2:3]), rtol=1e-5, atol=1e-5)
