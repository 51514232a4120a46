import math

import pytest
import torch

from nagnet.diagnostics.temperature import temperature_split
from nagnet.errors import UserError


def test_parts_are_those_of_the_embedding_the_gain_and_the_updates(build_model, fix_modulation):
    model = build_model(n_layers=4, branch_eps=0.0, init_encode_gain=3.0)
    fix_modulation(model, 0.5)
    with torch.no_grad():
        rows = model.embedding.weight
        rows.div_(rows.square().mean(dim=-1, keepdim=True).sqrt())
        rows[1].mul_(2.0)
    tokens = torch.tensor([[0, 1, 2, 1, 3]])
    occurrences = torch.ones(32, dtype=torch.long)
    occurrences[1] = 20
    split = temperature_split(model, tokens, occurrences)
    assert split.least.tolist() == [1, 16]
    assert split.n_tokens.tolist() == [2, 2]  # position 0 is left out
    assert split.encode == pytest.approx(math.log(3.0))
    assert split.embedding.tolist() == pytest.approx([0.0, math.log(2.0)], abs=1e-6)
    travel = 0.5 * sum(math.log1p(0.25 / index) for index in range(1, 9))
    assert split.travel.tolist() == pytest.approx([travel, travel], rel=1e-4)
    torch.testing.assert_close(split.total, split.embedding + split.encode + split.travel)
    assert split.in_logits


def test_pre_norm_has_travel_alone(build_model, tokens):
    split = temperature_split(build_model("pre_norm"), tokens, torch.ones(32, dtype=torch.long))
    assert split.encode == 0.0
    assert split.embedding.abs().max() < 1e-5
    assert not split.in_logits


def test_groups_have_exact_bounds(build_model):
    occurrences = torch.ones(32, dtype=torch.long)
    occurrences[1:7] = torch.tensor([3, 4, 15, 16, 64, 63])
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])
    split = temperature_split(build_model(), tokens, occurrences)
    assert split.least.tolist() == [1, 4, 16, 64]
    assert split.n_tokens.tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("shape", "n_ids", "message"), [((2, 1), 32, "2 tokens or more"), ((2, 3), 31, "one per id, 32")]
)
def test_wrong_input_is_named(build_model, shape, n_ids, message):
    with pytest.raises(UserError, match=message):
        temperature_split(build_model(), torch.zeros(shape, dtype=torch.long), torch.ones(n_ids, dtype=torch.long))
