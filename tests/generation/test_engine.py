"""Tokens drawn one after the other, with what the model said of them."""

import pytest
import torch

import nagnet
from nagnet import ops
from nagnet.errors import UserError
from nagnet.generation import graph
from nagnet.generation.engine import TokenStream, generate, generate_stream
from nagnet.generation.sampler import Sampling

PROMPTS = [[3, 1, 4, 1], [2], [7, 1, 8, 2, 8, 1]]


def followed(model, prompt, n, excluded=()):
    """The likeliest continuation by whole passes: tokens, log probabilities, confidences."""
    ids, found = list(prompt), []
    for _ in range(n):
        direction, log_norm = model.trunk(torch.tensor([ids])).split()
        logits = model.readout(direction, log_norm)[0, -1]
        logits[list(excluded)] = -torch.inf
        log_probs = logits.log_softmax(0)
        ids.append(int(log_probs.argmax()))
        found.append((ids[-1], float(log_probs[ids[-1]]), float(log_norm[0, -1].exp())))
    return found


@torch.no_grad()
@pytest.mark.parametrize("residual", ["norm_agnostic", "pre_norm"])
def test_greedy_equals_whole_passes(build, residual):
    model = build(residual=residual)
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, 7, temperature=0), strict=True):
        assert completion.finish == "length"
        for drawn, (token, log_probability, confidence) in zip(
            completion.tokens, followed(model, prompt, 7), strict=True
        ):
            assert drawn.token == token
            assert drawn.log_probability == pytest.approx(log_probability, rel=1e-10)
            assert drawn.confidence == pytest.approx(confidence, rel=1e-10)


def test_tensors_lists_and_one_prompt_are_the_same(build):
    model = build()
    expected = [completion.ids for completion in generate(model, [[1, 2, 3]], 5, seed=1)]
    for prompts in ([1, 2, 3], torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]])):
        assert [completion.ids for completion in nagnet.generate(model, prompts, 5, seed=1)] == expected


def test_the_iterator_gives_the_same_step_by_step(build):
    model = build()
    stream = nagnet.generate_stream(model, PROMPTS, 4, seed=5)
    columns = list(stream)
    whole = generate(model, PROMPTS, 4, seed=5)
    assert [list(row) for row in zip(*columns, strict=True)] == [completion.tokens for completion in whole]
    assert stream.completions == whole
    assert next(stream, "no more") == "no more"


def test_seeds(build):
    model = build(torch.float32)
    first, again, other = (
        [completion.ids for completion in generate(model, [[1]] * 64, 5, seed=seed)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len({ids[0] for ids in first}) > 5


def test_a_sequence_draws_the_same_whatever_is_beside_it(build):
    model = build()
    names = ["a", "b", "c"]
    together = TokenStream(model, PROMPTS, 6, Sampling(), names=names)
    list(together)
    for prompt, name, expected in zip(PROMPTS, names, together.completions, strict=True):
        alone = TokenStream(model, [prompt], 6, Sampling(), names=[name])
        list(alone)
        assert alone.completions[0].ids == expected.ids


@torch.no_grad()
def test_confidences_of_the_prompt(build):
    model = build()
    stream = generate_stream(model, PROMPTS, 1)
    next(stream)
    for prompt, confidences in zip(PROMPTS, stream.prompt_confidences, strict=True):
        assert confidences == pytest.approx(model.trunk(torch.tensor([prompt])).log_norm[0].exp().tolist())


@torch.no_grad()
def test_a_sequence_ends_at_the_end_token_and_the_others_go_on(build):
    model = build()
    end = followed(model, PROMPTS[0], 3)[2][0]
    completions = generate(model, PROMPTS, 8, temperature=0, end_token=end)
    assert completions[0].finish == "end"
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = [token for token, *_ in followed(model, prompt, 8)]
        if end in expected:
            expected = expected[: expected.index(end)]
        assert completion.ids == expected
        assert completion.finish == ("end" if len(expected) < 8 else "length")


@torch.no_grad()
def test_excluded_tokens_are_never_drawn(build):
    model = build()
    excluded = {token for token, *_ in followed(model, PROMPTS[0], 1)} | {0, 31}
    (completion,) = generate(model, PROMPTS[0], 6, temperature=0, excluded=excluded)
    expected = followed(model, PROMPTS[0], 6, excluded)
    assert completion.ids == [token for token, *_ in expected] and not excluded & set(completion.ids)
    assert [drawn.log_probability for drawn in completion.tokens] == pytest.approx([row[1] for row in expected])


def test_the_context_is_the_end(build):
    completions = generate(build(max_seq_len=9), PROMPTS, 100, end_token=None)
    assert [len(completion.ids) for completion in completions] == [5, 8, 3]
    assert {completion.finish for completion in completions} == {"context"}


@torch.no_grad()
def test_a_longer_context_extends_the_rotary_table(build):
    model = build(max_seq_len=9)
    (completion,) = generate(model, PROMPTS[0], 16, temperature=0, context=30)
    assert completion.ids == [token for token, *_ in followed(build_like(model, 40), PROMPTS[0], 16)]
    assert completion.finish == "length"


def build_like(model, max_seq_len):
    """The same parameters with a longer table."""
    longer = nagnet.Decoder(model.config.replace(max_seq_len=max_seq_len), seed=0).double()
    longer.load_state_dict(model.state_dict())
    return longer


def test_stopped_by_the_caller(build):
    stream = generate_stream(build(), PROMPTS, 6)
    next(stream)
    stream.stop(1)
    later = list(stream)
    assert [row[1] for row in later] == [None] * 5
    assert [len(completion.ids) for completion in stream.completions] == [6, 1, 6]
    assert stream.completions[1].finish == "stopped"


def test_a_model_compiled_for_training_is_run_as_it_is(build):
    model = build()
    expected = generate(model, PROMPTS, 4)
    model.compile_blocks()
    torch._dynamo.utils.counters.clear()
    assert generate(model, PROMPTS, 4) == expected
    assert not torch._dynamo.utils.counters["stats"]


def test_without_a_compiler_the_step_is_run_as_it_is(build, monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler")

    model = build()
    expected = generate(model, PROMPTS, 4)
    monkeypatch.setattr(graph.Graph, "compile", fail)
    monkeypatch.setattr(ops, "compiler_works", lambda: False)
    assert generate(model, PROMPTS, 4, compiled=True) == expected
    monkeypatch.setattr(ops, "compiler_works", lambda: True)  # an error that has another reason is not hidden
    with pytest.raises(RuntimeError, match="no compiler"):
        generate(model, PROMPTS, 4, compiled=True)


def test_nothing_of_the_model_changes(build):
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generate(model, PROMPTS, 3)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4), "a prompt is empty"),
        (([[1], []], 4), "a prompt is empty"),
        ((torch.zeros(1, 0, dtype=torch.long), 4), "a prompt is empty"),
        (([[1] * 16], 4), "a prompt has 16 tokens and the context is 16"),
        (([[1, 32]], 4), "token id 32 is outside the vocabulary 0..31"),
        (([[-1, 2]], 4), "token id -1 is outside"),
        (([[1]], 0), "max_new_tokens is 0"),
    ],
)
def test_bad_requests(build, arguments, message):
    with pytest.raises(UserError, match=message):
        generate(build(), *arguments)


def test_bad_options(build):
    model = build()
    for options in ({"temperature": -1}, {"excluded": range(32)}, {"excluded": [32]}, {"end_token": 99}):
        with pytest.raises(UserError):
            generate(model, [[1]], 2, **options)


@torch.no_grad()
def test_logits_that_are_not_numbers(build):
    model = build()
    model.readout.weight[5] = torch.nan
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, [[1]], 2)
