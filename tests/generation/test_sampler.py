"""Drawing from distributions small enough to know by heart."""

import collections
import math

import pytest
import torch

from nagnet.errors import UserError
from nagnet.generation.sampler import Sampling, draw, log_probabilities

PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = torch.tensor([PROBABILITIES]).log() + 3.0


def shares(sampling, n=4000, logits=LOGITS):
    """Share of each token among n draws."""
    rows = log_probabilities(logits.expand(n, -1))
    drawn = draw(rows, sampling, sampling.generators([str(i) for i in range(n)]))
    counts = collections.Counter(drawn.tolist())
    return [counts[token] / n for token in range(logits.shape[1])]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_temperature_0_is_argmax_whatever_the_seed_and_the_limits(seed):
    assert shares(Sampling(0, top_k=3, top_p=0.5, min_p=0.1, seed=seed), n=8) == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("top_k", [0, None, 99, 5])
def test_no_limit_draws_from_the_whole_vocabulary(top_k):
    assert shares(Sampling(top_k=top_k)) == pytest.approx(PROBABILITIES, abs=0.03)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(temperature):
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    assert shares(Sampling(temperature)) == pytest.approx([p / sum(powers) for p in powers], abs=0.03)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),  # the token that passes the limit is in
        ({"top_p": 0.7}, [1, 3, 4]),
        ({"min_p": 0.49}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # 0.7 of the 0.85 that are left
        ({"top_k": 4, "min_p": 0.3}, [1, 3, 4]),
    ],
    ids=str,
)
def test_limits(limits, kept):
    total = sum(PROBABILITIES[token] for token in kept)
    expected = [p / total if token in kept else 0 for token, p in enumerate(PROBABILITIES)]
    found = shares(Sampling(**limits))
    assert [share > 0 for share in found] == [share > 0 for share in expected]
    assert found == pytest.approx(expected, abs=0.03)


def test_equal_tokens_are_cut_to_top_k():
    assert sum(share > 0 for share in shares(Sampling(top_k=2), logits=torch.zeros(1, 5))) == 2


def test_a_sequence_draws_the_same_in_any_batch():
    rows = log_probabilities(torch.zeros(6, 50))
    sampling = Sampling(seed=3)
    names = ["a", "b", "c", "d", "e", "f"]
    together = draw(rows, sampling, sampling.generators(names))
    alone = [int(draw(rows[:1], sampling, sampling.generators([name]))) for name in names]
    assert together.tolist() == alone and len(set(alone)) > 1
    assert draw(rows, sampling, Sampling(seed=4).generators(names)).tolist() != alone


def test_excluded_tokens_have_no_probability():
    logits = LOGITS.clone()
    logits[0, 2] += 50
    excluded = torch.tensor([False, False, True, False, False])
    log_probs = log_probabilities(logits, excluded)
    assert log_probs[0, 2] == -math.inf
    assert log_probs.exp().sum() == pytest.approx(1.0)
    assert log_probs[0, 1].exp() == pytest.approx(0.4 / 0.95)
    assert draw(log_probs, Sampling(0), []).item() == 1
    drawn = draw(log_probs.expand(500, -1), Sampling(), Sampling().generators([str(i) for i in range(500)]))
    assert 2 not in drawn


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_must_be_finite(value):
    logits = LOGITS.clone()
    logits[0, 3] = value
    with pytest.raises(UserError, match="not finite"):
        log_probabilities(logits)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
    ],
    ids=str,
)
def test_values_outside_their_range(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))} is"):
        Sampling(**wrong)
