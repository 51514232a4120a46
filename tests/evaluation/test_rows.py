"""Rows are scored as each would be alone, in whatever batches."""

import copy
import shutil

import pytest
import torch

from nagnet import ops
from nagnet.evaluation import rows as module
from nagnet.evaluation.rows import Row, RowScorer, evaluating
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.skip import SkipPolicy


def alone(model, row):
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([row.ids]))[0].double(), dim=-1)
    scored = range(row.start, row.stop)
    losses = torch.stack([-log_probs[i - 1, row.ids[i]] for i in scored]) if scored else torch.zeros(0)
    return losses, torch.tensor([bool(log_probs[i - 1].argmax() == row.ids[i]) for i in scored], dtype=torch.bool)


def check(found, rows, model):
    for score, row in zip(found, rows, strict=True):
        losses, hits = alone(model, row)
        torch.testing.assert_close(score.losses, losses.double(), rtol=1e-5, atol=1e-6)
        assert torch.equal(score.hits, hits)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    lengths = [(9, 4), (3, 1), (17, 16), (2, 1), (12, 12), (9, 1), (1, 1)]
    return [Row(torch.randint(256, (n,), generator=generator).tolist(), start) for n, start in lengths]


@pytest.mark.parametrize("limits", [{}, {"batch_tokens": 20}, {"batch_rows": 2}, {"batch_rows": 1}], ids=str)
def test_a_row_is_scored_as_it_is_alone(limits, rows, table_model):
    found, sizes = {}, []
    with evaluating():
        for scores in RowScorer(table_model, 256, **limits).scores([[row] for row in rows]):
            found |= scores
            sizes.append(len(scores))
    assert sorted(found) == list(range(len(rows)))
    assert max(sizes) <= limits.get("batch_rows", len(rows))
    check([found[place][0] for place in range(len(rows))], rows, table_model)


SHAPE = {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 257, "max_seq_len": 64, "n_directions": 3}
MODELS = {
    "norm-agnostic": {},
    "windows and grouped heads": {"sliding_windows": (3, 0, 7), "n_kv_heads": 2},
    "pre-norm": {"residual": "pre_norm"},
    "skipping": {"skip": SkipPolicy(threshold=0.5), "sliding_windows": (3, 0, 7)},
}
# Lengths of what rows share, and (length of the rest, scored tokens of it) of each row.
GROUPS = {
    "options": (12, [(5, 5), (9, 9), (1, 1)]),
    "an option without a token of its own": (7, [(0, 0), (4, 4)]),
    "scored tokens behind others": (6, [(8, 3), (5, 2)]),
    "scored tokens that are shared": (9, [(3, 7), (4, 9)]),
    "nothing shared but BOS": (1, [(6, 6), (2, 2)]),
    "one row": (5, [(4, 4)]),
    "all scored": (4, [(3, 6), (2, 5)]),
}


def group_of(shared, parts, generator):
    common = [256, *torch.randint(256, (shared - 1,), generator=generator).tolist()]
    rows = []
    for number, (rest, scored) in enumerate(parts):
        own = torch.randint(256, (rest,), generator=generator).tolist()
        own[:1] = [number] * len(own[:1])  # rows differ from their first own token on
        rows.append(Row(common + own, shared + rest - scored))
    return rows


def randomised(name, generator):
    model = Decoder(ModelConfig(**SHAPE | MODELS[name]), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
@pytest.mark.parametrize("name", list(MODELS))
def test_rows_that_begin_alike_are_scored_as_each_alone(name, batch_tokens, generator):
    model = randomised(name, generator)
    groups, found = [group_of(*group, generator) for group in GROUPS.values()], {}
    with evaluating():
        for scores in RowScorer(model, 256, batch_tokens).scores(groups):
            assert not found.keys() & scores.keys()
            found |= scores
    if model.skipping is not None:
        assert min(model.skipping.run_rates()) < 0.9
    for place, group in enumerate(groups):
        check(found[place], group, model)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", list(MODELS))
def test_compiled_blocks_score_the_same_and_one_graph_serves_all_shapes(name, generator):
    assert ops.compiler_works()  # which compiles a function of its own
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stats = torch._dynamo.utils.counters["stats"]
    model = randomised(name, generator).double()
    plain = copy.deepcopy(model)
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own: models raise it
        scorers = [RowScorer(model, 256, tokens, compiled=True) for tokens in (40, 100, 4096)]
        graphs = []
        for scorer in scorers:
            groups, found = [group_of(*group, generator) for group in GROUPS.values()], {}
            with evaluating():
                for scores in scorer.scores(groups + [[row] for row in groups[0]]):
                    found |= scores
            for place, group in enumerate(groups):
                for score, row in zip(found[place], group, strict=True):
                    losses, hits = alone(plain, row)
                    torch.testing.assert_close(score.losses, losses.double(), rtol=1e-11, atol=1e-11)
                    assert torch.equal(score.hits, hits)
            graphs.append(stats["unique_graphs"])
    if model.skipping is None:  # of each kind of batch one inside the model and one at its end
        assert 0 < graphs[0] <= graphs[-1] <= 4
    torch._dynamo.reset()


def test_without_a_compiler_rows_are_scored_uncompiled(generator, monkeypatch):
    model = randomised("norm-agnostic", generator)
    monkeypatch.setattr(ops, "compiler_works", lambda: False)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda *arguments, **options: pytest.fail("compiled"))
    group = group_of(*GROUPS["options"], generator)
    with evaluating():
        (found,) = RowScorer(model, 256, compiled=True).scores([group])
    check(found[0], group, model)


def test_what_rows_share_is_run_once(generator, monkeypatch):
    seen, plain = [], module.score_targets
    monkeypatch.setattr(module, "score_targets", lambda *rest: seen.append(rest[1].shape) or plain(*rest))
    group = group_of(30, [(4, 4), (3, 3), (5, 5), (2, 2)], generator)
    with evaluating():
        list(RowScorer(Decoder(ModelConfig(**SHAPE), seed=0), 256).scores([group]))
    assert seen == [(1, 29 + 4 + 3 + 5 + 2)]  # the last token of each row predicts nothing; token 30 is run in each row
