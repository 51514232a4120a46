"""Rows are scored as each would be alone, in whatever batches."""

import pytest
import torch

from nagnet.evaluation.rows import Row, RowScorer, evaluating


def alone(model, row):
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([row.ids]))[0].double(), dim=-1)
    scored = range(row.start, row.stop)
    losses = torch.stack([-log_probs[i - 1, row.ids[i]] for i in scored]) if scored else torch.zeros(0)
    return losses, torch.tensor([bool(log_probs[i - 1].argmax() == row.ids[i]) for i in scored], dtype=torch.bool)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    lengths = [(9, 4), (3, 1), (17, 16), (2, 1), (12, 12), (9, 1)]
    return [Row(torch.randint(256, (n,), generator=generator).tolist(), start) for n, start in lengths]


@pytest.mark.parametrize("limits", [{}, {"batch_tokens": 20}, {"batch_rows": 2}, {"batch_rows": 1}], ids=str)
def test_a_row_is_scored_as_it_is_alone(limits, rows, table_model):
    found, sizes = {}, []
    with evaluating():
        for scores in RowScorer(table_model, 256, **limits).scores(rows):
            found |= scores
            sizes.append(len(scores))
    assert sorted(found) == list(range(len(rows)))
    assert max(sizes) <= limits.get("batch_rows", len(rows))
    for place, row in enumerate(rows):
        losses, hits = alone(table_model, row)
        torch.testing.assert_close(found[place].losses, losses.double(), rtol=1e-5, atol=1e-6)
        assert torch.equal(found[place].hits, hits)
