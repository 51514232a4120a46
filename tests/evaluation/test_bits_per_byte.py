"""What is counted in bits per byte, and that batching does not change it."""

import math

import numpy as np
import pytest
import torch

from nagnet.data.corpus import Document
from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores, bits_per_byte, evaluate_documents

DOCUMENTS = [
    Document(f"{i}.txt", text)
    for i, text in enumerate(["ab", "", "é", "hello <|endoftext|> world " * 9, "漢字🙂\0", "x" * 70, "the end"])
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["hello hello"], 258)


def constant_score(value: float, ignored: float = 0.0):
    def score(tokens, targets):
        return torch.where(targets >= 0, value, ignored)

    return score


def hashed_score(tokens, targets):
    """A loss that depends on the position, the token and the target, and is rubbish where ignored."""
    position = torch.arange(tokens.shape[1])
    loss = ((tokens * 31 + targets * 17 + position * 7) % 101) / 13
    return torch.where(targets >= 0, loss, math.nan).float()


def test_two_byte_tokens_of_ln2_are_one_bit_per_byte():
    tokenizer = train_tokenizer(["plain"], 257)
    scores = evaluate_documents(constant_score(math.log(2)), [Document("e", "é")], tokenizer, 8, 1)
    assert scores.n_bytes.tolist() == [2]
    assert scores.n_tokens.tolist() == [2]
    assert scores.bits_per_byte == pytest.approx(1.0, abs=1e-6)


def test_the_denominator_is_bytes_of_text_not_tokens(tokenizer):
    scores = evaluate_documents(constant_score(1.0), DOCUMENTS, tokenizer, 8, 3)
    assert scores.n_bytes.tolist() == [len(d.text.encode()) for d in DOCUMENTS]
    assert scores.n_tokens.tolist() == [len(tokenizer.encode(d.text)) for d in DOCUMENTS]
    assert scores.n_tokens.sum() != scores.n_bytes.sum()
    np.testing.assert_allclose(scores.nats, scores.n_tokens, rtol=1e-12)
    assert scores.bits_per_byte == pytest.approx(scores.n_tokens.sum() / math.log(2) / scores.n_bytes.sum())


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_ends_and_padding_are_never_counted(tokenizer, batch_size):
    score = constant_score(math.log(2), ignored=5.0)
    documents = [Document("a", "ab"), Document("b", "abcd"), Document("c", "c")]
    scores = evaluate_documents(score, documents, tokenizer, 16, batch_size)
    np.testing.assert_allclose(scores.nats / math.log(2), [2, 4, 1], rtol=1e-6)
    assert scores.bits_per_byte == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seq_len", [1, 5, 16, 1000])
def test_batch_size_does_not_matter(tokenizer, seq_len):
    reference = evaluate_documents(hashed_score, DOCUMENTS, tokenizer, seq_len, 1)
    assert np.isfinite(reference.nats).all()
    for batch_size in (3, 8, 1000):
        other = evaluate_documents(hashed_score, DOCUMENTS, tokenizer, seq_len, batch_size)
        np.testing.assert_allclose(other.nats, reference.nats, rtol=1e-6)
        assert other.bits_per_byte == pytest.approx(reference.bits_per_byte, abs=1e-6)
        assert other.names == reference.names == tuple(d.name for d in DOCUMENTS)


def test_two_processes_agree_with_one(tokenizer):
    one = evaluate_documents(hashed_score, DOCUMENTS, tokenizer, 5, 3)
    parts = [evaluate_documents(hashed_score, DOCUMENTS[rank::2], tokenizer, 5, 3) for rank in (0, 1)]
    both = DocumentScores.concatenate(parts)
    assert both.names == one.names
    assert both.n_bytes.tolist() == one.n_bytes.tolist()
    assert both.n_tokens.tolist() == one.n_tokens.tolist()
    np.testing.assert_allclose(both.nats, one.nats, rtol=1e-6)


@pytest.mark.parametrize("seq_len", [1, 3, 7, 500])
def test_every_text_token_is_scored_once_after_its_predecessor(tokenizer, seq_len):
    pairs = []

    def score(tokens, targets):
        assert tokens.shape == targets.shape
        assert tokens.shape[1] <= seq_len
        assert tokens.shape[0] <= 2
        kept = targets >= 0
        assert (kept[:, 1:] <= kept[:, :-1]).all(), "padding must be on the right"
        pairs.extend(zip(tokens[kept].tolist(), targets[kept].tolist(), strict=True))
        return torch.zeros(targets.shape)

    evaluate_documents(score, DOCUMENTS, tokenizer, seq_len, 2)
    expected = []
    for document in DOCUMENTS:
        ids = tokenizer.encode(document.text)
        expected += zip([tokenizer.bos_id, *ids], ids, strict=False)
    assert sorted(pairs) == sorted(expected)


def test_max_bytes_picks_documents_by_name_whatever_their_order(tokenizer):
    documents = [Document(f"{i}.txt", "x" * 10) for i in range(50)]

    def names(documents, max_bytes):
        return evaluate_documents(constant_score(1.0), documents, tokenizer, 16, 8, max_bytes=max_bytes).names

    chosen = names(documents, 105)
    assert len(chosen) == 10
    assert set(chosen) == set(names(documents[::-1], 105))
    assert set(chosen) < set(names(documents, 200))
    assert list(chosen) == [d.name for d in documents if d.name in chosen]
    assert chosen != tuple(d.name for d in documents[:10])
    assert len(names(documents, 1)) == 1
    assert len(names(documents, 10**9)) == 50


def test_progress_runs_to_the_total(tokenizer):
    calls = []
    evaluate_documents(
        constant_score(1.0),
        DOCUMENTS,
        tokenizer,
        8,
        4,
        progress=lambda done, total: calls.append((done, total)),
    )
    total = sum(-(-len(tokenizer.encode(d.text)) // 8) for d in DOCUMENTS)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == [*range(4, total, 4), total]


def test_gradients_are_off_and_half_precision_is_summed_exactly(tokenizer):
    def score(tokens, targets):
        assert not torch.is_grad_enabled()
        return torch.full(targets.shape, 2.5, dtype=torch.bfloat16)

    scores = evaluate_documents(score, [Document("x", "x" * 3001)], tokenizer, 4096, 1)
    assert scores.nats.tolist() == [3001 * 2.5]


def test_bad_input_is_refused(tokenizer):
    with pytest.raises(UserError, match="no text"):
        evaluate_documents(constant_score(1.0), [], tokenizer, 8, 1)
    with pytest.raises(UserError, match="no text"):
        evaluate_documents(constant_score(1.0), [Document("a", "")], tokenizer, 8, 1)
    with pytest.raises(UserError, match="seq_len 0"):
        evaluate_documents(constant_score(1.0), DOCUMENTS, tokenizer, 0, 1)
    with pytest.raises(UserError, match="one loss per target"):
        evaluate_documents(lambda tokens, targets: torch.zeros(()), DOCUMENTS, tokenizer, 8, 1)


def test_tokens_that_leave_out_text_are_refused(tokenizer, monkeypatch):
    plain = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [ids[:-1] for ids in plain(texts)])
    with pytest.raises(UserError, match="tokens of a.txt stand for 2 bytes of its 3"):
        evaluate_documents(constant_score(1.0), [Document("a.txt", "abc")], tokenizer, 8, 1)


def test_bits_per_byte_of_a_batch_ignores_specials_and_ignored_targets():
    token_bytes = np.array([1, 1, 3, 0])
    targets = torch.tensor([[0, 1, 3], [2, -100, 3]])
    losses = torch.tensor([[1.0, 2.0, 5.0], [2.0, math.nan, 5.0]], requires_grad=True)
    assert bits_per_byte(losses, targets, token_bytes) == pytest.approx(5 / (math.log(2) * 5))
    assert math.isnan(bits_per_byte(losses[:, 2], targets[:, 2], token_bytes))
