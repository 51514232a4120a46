"""Exactness of the tokenizer: round trips, byte counts, special tokens, determinism, caching."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nagnet.data.corpus import Document, split_documents
from nagnet.data.tokenizer import BOS_NAME, Tokenizer, cached_tokenizer, train_tokenizer
from nagnet.errors import UserError

TEXTS = [
    "the cat sat on the mat, the dog did not. <|endoftext|> <| bos |>\n" * 3,
    "don't 1234 été 漢字漢字 🙂🙂",
] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


def check_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
    assert tokenizer.bos_id not in ids


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_round_trips_and_its_bytes_add_up(tokenizer, text):
    check_exact(tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading and trailing  ",
        "🙂👩‍👩‍👧‍👦",
        "漢字仮名交じり文",
        "a\0b",
        "e\u0301 decomposed, \u00e9 composed",
        "hi<|endoftext|>x",
        "hi<|bos|>x",
        BOS_NAME,
        f"x{BOS_NAME}y <s> [CLS] <|im_start|>",
        "\ufeffbom \ufffd replacement \u2028 separator",
        "tab\tcrlf\r\n\r\n\n  \n end",
    ],
)
def test_hard_texts(tokenizer, text):
    check_exact(tokenizer, text)


def test_runs_longer_than_any_word_are_exact_and_quick(tokenizer):
    for run in ("a", " ", "\n", "!", "漢"):
        check_exact(tokenizer, run * 20_000 + "x")


def test_training_survives_a_line_of_one_megabyte():
    assert train_tokenizer(["a" * 1_000_000, *TEXTS], 280).vocab_size == 280


def test_lone_surrogates_are_refused_with_a_remedy(tokenizer):
    with pytest.raises(UserError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_special_ids(tokenizer):
    assert tokenizer.vocab_size == 300
    assert tokenizer.bos_id == tokenizer.get_bos_token_id() == 299
    assert tokenizer.token_bytes.shape == (300,)
    assert tokenizer.token_bytes.dtype == np.int64
    assert tokenizer.token_bytes[299] == 0
    assert (tokenizer.token_bytes[:299] > 0).all()
    assert tokenizer.decode([299, *tokenizer.encode("hi"), 299]) == "hi"


def test_a_letter_outside_the_training_text_is_two_byte_tokens():
    tokenizer = train_tokenizer(["plain ascii"], 257)
    ids = tokenizer.encode("é")
    assert list(tokenizer.token_bytes[ids]) == [1, 1]
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_words_are_split_as_stated(tokenizer):
    pieces = [tokenizer.decode([i]) for i in train_tokenizer(TEXTS, 257).encode("12345")]
    assert pieces == list("12345")
    assert [len(tokenizer.decode([i])) for i in tokenizer.encode("1234" * 3)] <= [2] * 12


@pytest.mark.parametrize("token", [-1, 300, 310])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, token):
    with pytest.raises(UserError, match=f"{token} is outside the vocabulary of 300"):
        tokenizer.decode([token])


def test_batches_equal_single_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(TEXTS, 300)
    assert again.content_hash == tokenizer.content_hash
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert train_tokenizer(TEXTS, 299).content_hash != tokenizer.content_hash


def test_tokenizer_json_alone_restores_everything(tokenizer, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.bos_id == tokenizer.bos_id
    assert loaded.content_hash == tokenizer.content_hash
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]


def test_damaged_missing_and_foreign_files_are_refused(tokenizer, tmp_path):
    from tokenizers import Tokenizer as Backend

    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="cannot read"):
        Tokenizer.load(path)
    tokenizer.save(path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged"):
        Tokenizer.load(path)
    backend = Backend.from_str(whole)
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path))
    with pytest.raises(UserError, match="not a nagnet tokenizer"):
        Tokenizer.load(path)
    path.write_text(whole.replace('"Ā":', '"ĀĀ":'))
    with pytest.raises(UserError, match="256 byte symbols"):
        Tokenizer.load(path)


@pytest.mark.parametrize("vocab_size", [0, 256])
def test_vocabularies_without_room_for_all_bytes_are_refused(vocab_size):
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer(TEXTS, vocab_size)


def test_too_little_text_names_the_size_that_it_supports():
    with pytest.raises(UserError, match=r"supports a vocabulary of (\d+) tokens, not 5000") as caught:
        train_tokenizer(TEXTS, 5000)
    reached = int(str(caught.value).split("vocabulary of ")[1].split()[0])
    assert train_tokenizer(TEXTS, reached).vocab_size == reached


@pytest.fixture
def corpus():
    return split_documents([Document(f"{i}.txt", TEXTS[0] + str(i)) for i in range(20)], "test")


def test_cache_is_used_and_repaired(corpus, tmp_path, monkeypatch, caplog):
    first = cached_tokenizer(corpus, 280, tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("nagnet.data.tokenizer.train_tokenizer", lambda *_: pytest.fail("trained again"))
        assert cached_tokenizer(corpus, 280, tmp_path).content_hash == first.content_hash
    whole = file.read_bytes()
    # Still a tokenizer of the right size, but two tokens have changed places.
    swapped = whole.replace(b'"t":', b'"?":', 1).replace(b'"h":', b'"t":', 1).replace(b'"?":', b'"h":', 1)
    assert swapped != whole
    for damage in (b"", b"{", whole[:-100], b"\xff\xfe", swapped):
        file.write_bytes(damage)
        assert cached_tokenizer(corpus, 280, tmp_path).content_hash == first.content_hash
        assert file.read_bytes() == whole
    assert caplog.text.count("training it again") == 5


def test_cache_distinguishes_sizes_and_training_texts_only(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path))
    cached_tokenizer(corpus, 280)
    cached_tokenizer(corpus, 270)
    assert len(list(tmp_path.iterdir())) == 2
    changed = [Document(d.name, d.text + "!") for d in corpus.held_out]
    cached_tokenizer(split_documents([*corpus.train, *changed], "test"), 280)
    assert len(list(tmp_path.iterdir())) == 2
    changed = [Document(d.name, d.text + "!") for d in corpus.train]
    cached_tokenizer(split_documents([*changed, *corpus.held_out], "test"), 280)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_only_a_warning(corpus, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert cached_tokenizer(corpus, 280, tmp_path / "file").vocab_size == 280
    assert "not cached" in caplog.text


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'nagnet\[train\]'"):
        train_tokenizer(TEXTS, 300)


@pytest.mark.parametrize("text", ["words and words", "\u00e9\u5bb6\U0001f600\x00\xad\u0301\n"])
def test_contents_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.contents[token] for token in ids) == text.encode()
    assert tokenizer.contents[tokenizer.bos_id] == b""
    assert [len(content) for content in tokenizer.contents] == tokenizer.token_bytes.tolist()
    assert {content for content in tokenizer.contents if len(content) == 1} == {bytes([b]) for b in range(256)}
