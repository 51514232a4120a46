"""Text from tokens: characters whole, stop strings out, nothing lost."""

import itertools

import pytest

from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError
from nagnet.generation.engine import DrawnToken
from nagnet.generation.sampler import Sampling
from nagnet.generation.text import TextStream, complete_texts

TEXTS = [
    "plain words, and more words",
    "e-acute \u00e9 \u00e9, a house \u5bb6, \U0001f600 and \u0000 in a\u0301 row\n\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["plain words and more words, words and words"] * 3, 270)


def stream_text(tokenizer, ids, stop=()):
    """Text, the pieces it came in, and the stream."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for place, token in enumerate(ids):
        pieces += stream.push(DrawnToken(token, -1.0, float(place)))
        if stream.stopped:
            break
    pieces += stream.close()
    assert "".join(piece.text for piece in pieces) == stream.text
    return stream.text, pieces, stream


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_in_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) > 5
    found, pieces, _ = stream_text(tokenizer, ids)
    assert found == text
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_a_piece_has_the_confidence_of_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("\u00e9a")
    assert len(ids) == 3
    _, pieces, _ = stream_text(tokenizer, ids)
    assert pieces == [("\u00e9", 1.0), ("a", 2.0)]


@pytest.mark.parametrize("broken", [b"a\xff\xfeb", b"\xe5\xae", b"\xc3(", b"\xf0\x9f\x98a"])
def test_broken_bytes_are_what_the_tokenizer_makes_of_them(tokenizer, broken):
    by_content = {content: token for token, content in enumerate(tokenizer.contents) if len(content) == 1}
    ids = [by_content[bytes([byte])] for byte in broken]
    assert stream_text(tokenizer, ids)[0] == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["e"], "on"),
        ("one tw", ["two"], "one tw"),
        ("aaab", ["aab"], "a"),
        ("abababac", ["abac"], "abab"),
        ("one", ["four"], "one"),
        ("line\n\nnext", ["\n\n"], "line"),
    ],
)
def test_stop_strings(tokenizer, text, stop, expected):
    for ids in (tokenizer.encode(text), [tokenizer.encode(character)[0] for character in text]):
        found, _, stream = stream_text(tokenizer, ids, stop)
        assert found == expected and stream.stopped == (found != text)


def test_only_a_possible_stop_string_is_held_back(tokenizer):
    stream = TextStream(tokenizer, ["stop"])
    released = [
        "".join(piece.text for piece in stream.push(DrawnToken(tokenizer.encode(c)[0], 0.0, 1.0))) for c in "is sto-st"
    ]
    assert released == ["i", "", "s ", "", "", "", "sto-", "", ""]
    assert "".join(piece.text for piece in stream.close()) == "st"


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(UserError, match="stop string is empty"):
        TextStream(tokenizer, ["a", ""])


@pytest.fixture
def padded(build, tokenizer):
    """A model with more ids than the tokenizer, one of them by far the likeliest."""
    model = build(vocab_size=tokenizer.vocab_size + 20, max_seq_len=64, residual="pre_norm")

    def favour(module, inputs, logits):
        logits[..., tokenizer.vocab_size + 10] += 50

    model.readout.register_forward_hook(favour)
    return model


def test_padded_ids_are_never_drawn(padded, tokenizer):
    prompts = ["plain words", "and"] * 6
    results = complete_texts(padded, tokenizer, prompts, 20, Sampling(3.0))
    ids = list(itertools.chain.from_iterable(result.completion.ids for result in results))
    assert len(ids) > 60 and max(ids) < tokenizer.vocab_size and tokenizer.bos_id not in ids
    finishes = {result.completion.finish for result in results}
    assert "end" in finishes  # the token that begins a document ends a text
    on = complete_texts(padded, tokenizer, prompts, 20, Sampling(3.0), past_the_end=True)
    assert {result.completion.finish for result in on} == {"length"}
    for result in results + on:
        assert result.text == tokenizer.decode(result.completion.ids)


def test_stop_strings_end_a_sequence_of_a_batch(padded, tokenizer):
    prompts = ["plain", "words and", "more"]
    free = complete_texts(padded, tokenizer, prompts, 20, Sampling(), past_the_end=True)
    stop = free[1].text[2:4]
    pieces = {0: "", 1: "", 2: ""}

    def collect(index, piece):
        pieces[index] += piece.text

    stopped = complete_texts(padded, tokenizer, prompts, 20, Sampling(), [stop], True, on_piece=collect)
    for index, (a, b) in enumerate(zip(free, stopped, strict=True)):
        assert b.text == a.text.partition(stop)[0] == pieces[index]
        assert b.completion.finish == ("stopped" if stop in a.text else "length")
        assert b.completion.ids == a.completion.ids[: len(b.completion.ids)]
    assert len(stopped[1].completion.ids) < 20


def test_empty_prompt_is_refused(padded, tokenizer):
    with pytest.raises(UserError, match="prompt is empty"):
        complete_texts(padded, tokenizer, ["a", ""], 3)


def test_a_tokenizer_too_large_is_refused(build, tokenizer):
    with pytest.raises(UserError, match="the tokenizer has 270 ids and the model 32"):
        complete_texts(build(), tokenizer, ["a"], 3)
