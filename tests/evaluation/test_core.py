"""Every example is judged as one that is looked at alone, and an interrupted evaluation goes on."""

import importlib.util
import json
import logging
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nagnet.errors import UserError
from nagnet.evaluation import core, rows
from nagnet.evaluation.core import evaluate_core
from nagnet.evaluation.core_journal import AnswerFile
from nagnet.evaluation.core_tasks import read_bundle
from nagnet.evaluation.rows import score_targets
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

SHARED = Path(__file__).parents[3] / "shared" / "data" / "core"


def build(n_layers):
    """A small model without a zero in it, for bytes."""
    config = ModelConfig(d_model=16, n_layers=n_layers, n_heads=2, vocab_size=257, max_seq_len=512, n_directions=3)
    model = Decoder(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.fixture
def decoder():
    return build(n_layers=1)


def test_every_example_of_real_tasks():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not on this machine")
    spec = importlib.util.spec_from_file_location("copycat", SHARED / "copycat.py")
    copycat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copycat)
    expected = json.loads((SHARED / "expected.json").read_text())
    result = evaluate_core(copycat.CopycatModel(), copycat.ByteTokenizer(), SHARED, max_per_task=150)
    for label in expected.keys() - {"core_metric"}:
        assert result[label]["correct"] == expected[label]["correct"], label
    assert result == expected


def alone(model, tokenizer, prompts, suffix=False):
    """Mean loss over what the prompts do not share (or, with ``suffix``, share), each prompt in a call of its own."""
    rows = [[tokenizer.get_bos_token_id(), *tokenizer.encode(prompt)] for prompt in prompts]
    flipped = [row[::-1] for row in rows] if suffix else rows
    shared = next(i for i, tokens in enumerate(zip(*flipped, strict=False)) if len(set(tokens)) > 1)
    means = []
    for row in rows:
        losses = F.cross_entropy(model(torch.tensor([row[:-1]]))[0], torch.tensor(row[1:]), reduction="none")
        means.append(losses[-shared:].mean() if suffix else losses[shared - 1 :].mean())
    return means


def test_answers_of_examples_looked_at_alone(bundle, byte_tokenizer, table_model):
    result = evaluate_core(table_model, byte_tokenizer, bundle)
    choose, pronoun, continued = read_bundle(bundle).tasks
    for index, example in enumerate(choose.examples):
        solved = [f"{shot['query']}\nAnswer: {shot['choices'][shot['gold']]}\n\n" for shot in choose.shots(index)]
        prompts = ["".join(solved) + f"{example['query']}\nAnswer: {choice}" for choice in example["choices"]]
        losses = alone(table_model, byte_tokenizer, prompts)
        assert result["choose"]["correct"][index] == int(losses.index(min(losses)) == example["gold"])
    for index, example in enumerate(pronoun.examples):
        prompts = [f"{context} {example['continuation']}" for context in example["context_options"]]
        losses = alone(table_model, byte_tokenizer, prompts, suffix=True)
        assert result["pronoun"]["correct"][index] == int(losses.index(min(losses)) == example["gold"])
    assert {0, 1} == set(result["choose"]["correct"]) == set(result["pronoun"]["correct"])
    assert set(result["continue"]["correct"]) == {0}  # a table of noise never guesses four bytes
    assert len(result["continue"]["correct"]) == len(continued.examples) == result["continue"]["n"]


def test_language_modelling_is_right_only_if_every_token_is_the_likeliest(make_bundle, byte_tokenizer):
    examples = [{"context": text, "continuation": text} for text in ("aaaa", "aaab", "baaa", "bbbb")]
    entry = [("repeat", "language_modeling", 0, {"continuation_delimiter": ""}, 0)]

    def repeats_the_last(ids):
        return F.one_hot(ids, 257).float()

    folder = make_bundle({"repeat": examples}, entry)
    order = [example["context"] for example in read_bundle(folder).tasks[0].examples]
    result = evaluate_core(repeats_the_last, byte_tokenizer, folder)
    assert dict(zip(order, result["repeat"]["correct"], strict=True)) == {"aaaa": 1, "aaab": 0, "baaa": 0, "bbbb": 1}
    assert result["repeat"]["accuracy"] == result["core_metric"] == 0.5


def test_equal_losses_are_won_by_the_first(make_bundle, byte_tokenizer):
    examples = [{"query": "q", "choices": ["ab", "cd", "ef"], "gold": gold} for gold in (0, 1, 2)]
    folder = make_bundle({"choose": examples}, [("choose", "multiple_choice", 0, {}, 0)])
    result = evaluate_core(lambda ids: torch.zeros(*ids.shape, 257), byte_tokenizer, folder)
    golds = [example["gold"] for example in read_bundle(folder).tasks[0].examples]
    assert result["choose"]["correct"] == [int(gold == 0) for gold in golds]


def test_an_option_without_a_token_of_its_own_never_wins(make_bundle, byte_tokenizer, table_model, caplog):
    examples = [{"query": "q", "choices": ["yes", "yes indeed"], "gold": 1}] * 3
    folder = make_bundle({"choose": examples}, [("choose", "multiple_choice", 0, {}, 0)])
    with caplog.at_level(logging.WARNING):
        result = evaluate_core(table_model, byte_tokenizer, folder)
    assert result["choose"]["correct"] == [1, 1, 1]
    assert "task choose: 3 prompts have no token to score" in caplog.text


def test_a_diverged_model_has_no_answers(bundle, byte_tokenizer):
    with pytest.raises(UserError, match="losses are NaN"):
        evaluate_core(lambda ids: torch.full((*ids.shape, 257), torch.nan), byte_tokenizer, bundle)


def test_an_empty_continuation_is_no_answer(make_bundle, byte_tokenizer, table_model, caplog):
    entry = [("continue", "language_modeling", 0, {"continuation_delimiter": ""}, 0)]
    folder = make_bundle({"continue": [{"context": "a", "continuation": ""}]}, entry)
    assert evaluate_core(table_model, byte_tokenizer, folder)["continue"]["correct"] == [0]


def test_batches_do_not_change_answers(bundle, byte_tokenizer, decoder, table_model):
    for model in (table_model, decoder):
        first, *others = (evaluate_core(model, byte_tokenizer, bundle, batch_tokens=n) for n in (1, 100, 10**6))
        assert others == [first, first]


def test_batches_keep_to_their_size(bundle, byte_tokenizer, table_model):
    shapes = []

    def model(ids):
        shapes.append(tuple(ids.shape))
        return table_model(ids)

    evaluate_core(model, byte_tokenizer, bundle, batch_tokens=200)
    assert max(rows * length for rows, length in shapes if rows > 1) <= 200
    assert max(rows for rows, _ in shapes) > 3
    shapes.clear()
    evaluate_core(model, byte_tokenizer, bundle, batch_tokens=200, max_tokens=20)
    assert max(length for _, length in shapes) == 19


@pytest.mark.parametrize("where", ["attribute", "config"])
def test_the_context_of_the_model_is_kept(where, bundle, byte_tokenizer, decoder, table_model):
    if where == "attribute":
        model, model.max_seq_len = table_model, 20
    else:
        model = Decoder(decoder.config.replace(max_seq_len=20), seed=0)
    seen, hook = [], rows.score_targets

    def watched(model, inputs, targets, past):
        seen.append(inputs.shape[1] if past is None else past.end)
        return hook(model, inputs, targets, past)

    result = evaluate_core(model, byte_tokenizer, bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "score_targets", watched)
        assert evaluate_core(model, byte_tokenizer, bundle, max_tokens=20) == result
        evaluate_core(model, byte_tokenizer, bundle)
    assert max(seen) == 19


def test_a_decoder_is_scored_as_its_logits_are(decoder):
    inputs = torch.randint(257, (3, 20))
    targets = torch.where(torch.rand(3, 20) < 0.4, torch.randint(257, (3, 20)), -100)
    with torch.no_grad():
        targets[0, :5] = decoder(inputs)[0, :5].argmax(-1)
        losses, hits = score_targets(decoder, inputs, targets)
        expected, expected_hits = score_targets(lambda ids: decoder(ids), inputs, targets)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, expected_hits) and hits[:5].all() and len(hits) == (targets >= 0).sum()


def test_batches_of_examples_are_four_times_as_fast(make_bundle, byte_tokenizer, monkeypatch):
    examples = [{"query": f"number {i} is", "choices": ["odd it is", "even so"], "gold": i % 2} for i in range(40)]
    folder = make_bundle({"choose": examples}, [("choose", "multiple_choice", 0, {}, 50)])
    decoder = build(n_layers=4)

    def seconds():
        start = time.process_time()  # not the clock on the wall, which other programs slow down
        return evaluate_core(decoder, byte_tokenizer, folder), time.process_time() - start

    decoder(torch.zeros(1, 9, dtype=torch.int64))  # what the first call sets up is no part of it
    together, fast = seconds()
    monkeypatch.setattr(core, "EXAMPLES_AT_A_TIME", 1)
    one_by_one, slow = seconds()
    assert together == one_by_one
    assert slow > 4 * fast, f"{slow:.2f} s one at a time, {fast:.2f} s together"


class Interrupting:
    """A model that is interrupted in its n-th call."""

    def __init__(self, model, calls):
        self.model, self.left = model, calls

    def __call__(self, ids):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.model(ids)


def test_an_interrupted_evaluation_goes_on(bundle, byte_tokenizer, table_model, tmp_path):
    def evaluate(model, **more):
        return evaluate_core(model, byte_tokenizer, bundle, batch_tokens=300, **more)

    file, identity = tmp_path / "answers.jsonl", {"model": "a", "cap": None}
    expected = evaluate(table_model)
    calls = table_model.calls
    for stop in (4, 4):
        with pytest.raises(KeyboardInterrupt):
            evaluate(Interrupting(table_model, stop), journal=AnswerFile(file, identity))
    with open(file, "a") as lines:
        lines.write('{"task": "choose", "corr')  # a process killed while it wrote
    before, progress = AnswerFile(file, identity), []
    known = len(before)
    assert 0 < known < sum(part["n"] for part in expected.values() if isinstance(part, dict))
    table_model.calls = 0
    assert evaluate(table_model, journal=before, progress=lambda *state: progress.append(state)) == expected
    assert 0 < table_model.calls < calls
    assert progress[0][0] > known and progress[-1][:2] == (28, 28)
    table_model.calls = 0
    assert evaluate(table_model, journal=AnswerFile(file, identity)) == expected
    assert table_model.calls == 0


def test_answers_of_something_else_are_refused(tmp_path):
    file = tmp_path / "answers.jsonl"
    AnswerFile(file, {"model": "a", "cap": 3}).add("choose", {0: True})
    with pytest.raises(UserError, match="is of another evaluation: model differ"):
        AnswerFile(file, {"model": "b", "cap": 3})
    assert AnswerFile(file, {"model": "a", "cap": 3}).known("choose") == {0: True}
    file.write_text("not JSON\n")
    with pytest.raises(UserError, match="answers.jsonl is damaged"):
        AnswerFile(file, {"model": "a", "cap": 3})


def test_progress_runs_to_the_total(bundle, byte_tokenizer, table_model):
    seen = []
    evaluate_core(table_model, byte_tokenizer, bundle, 5, batch_tokens=150, progress=lambda *state: seen.append(state))
    done = [state[0] for state in seen]
    assert done == sorted(set(done)) and seen[-1] == (15, 15, "continue") and {state[1] for state in seen} == {15}
