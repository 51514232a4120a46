"""The lm-eval adapter: what it scores, token by token, and what lm-eval makes of it with tasks of its own."""

from types import SimpleNamespace

import pytest
import torch

from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError
from nagnet.generation.engine import generate
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'nagnet[harness]'")

VOCAB, LENGTH = 280, 24


def request(*arguments):
    return SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokens depend on those before, and a tokenizer that merges words."""
    folder = tmp_path_factory.mktemp("harness") / "model"
    model = Decoder(
        ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, n_directions=2), seed=1
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder)
    train_tokenizer(["the answer to the question, the other answer; abcabc abcd"] * 3, VOCAB).save(
        folder / "tokenizer.json"
    )
    return folder


@pytest.fixture(scope="module")
def lm(folder):
    from nagnet.evaluation.harness import NagnetLM

    return NagnetLM(folder, device="cpu")


def scored(lm, ids, start):
    """Log probability of ids[start:] after ids[:start], by one pass over all of them."""
    with torch.no_grad():
        log_probs = torch.log_softmax(lm.model(torch.tensor([ids[:-1]]))[0].double(), dim=-1)
    picked = [log_probs[i - 1, ids[i]].item() for i in range(start, len(ids))]
    greedy = all(log_probs[i - 1].argmax().item() == ids[i] for i in range(start, len(ids)))
    return sum(picked), greedy


def test_a_continuation_is_scored_after_bos_and_its_context(lm):
    pairs = [("the question", " the answer"), ("", "the answer"), ("the", " the other answer; abcd"), ("a", "!")]
    found = lm.loglikelihood([request(*pair) for pair in pairs])
    bos = lm.tokenizer.bos_id
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        ids = [bos, *lm.tokenizer.encode(context + continuation)]
        expected, expected_greedy = scored(lm, ids, 1 + len(lm.tokenizer.encode(context)))
        assert value == pytest.approx(expected, abs=1e-4) and greedy == expected_greedy
        assert ids.count(bos) == 1


def test_a_token_across_the_join_is_scored(lm):
    """ "ab" and "c" make one token: neither part of it may go unscored, nor be scored as if it were alone."""
    encode, bos = lm.tokenizer.encode, lm.tokenizer.bos_id
    whole, context = encode("the abcabc"), encode("the ab")
    same = next(i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b)
    assert same < len(context) and len(whole) <= len(context) + 1
    ((value, _),) = lm.loglikelihood([request("the ab", "cabc")])
    assert value == pytest.approx(scored(lm, [bos, *whole], 1 + same)[0], abs=1e-4)


def test_white_space_at_the_end_of_a_context_is_scored_with_the_continuation(lm):
    spaced, moved = lm.loglikelihood([request("the question  ", "the answer"), request("the question", "  the answer")])
    assert spaced == moved


def test_a_greedy_continuation_is_said_to_be_one(lm):
    prompt = [lm.tokenizer.bos_id, *lm.tokenizer.encode("the")]
    (drawn,) = generate(lm.model, [prompt], 1, temperature=0)
    texts = [lm.tokenizer.decode([i]) for i in range(256)]
    candidates = [text for text in texts if lm.tokenizer.encode("the" + text)[:-1] == lm.tokenizer.encode("the")]
    answers = lm.loglikelihood([request("the", text) for text in candidates])
    right = [text for text, (_, greedy) in zip(candidates, answers, strict=True) if greedy]
    assert right in ([], [lm.tokenizer.decode(drawn.ids)]) and len(candidates) > 100


def test_what_is_too_long_loses_its_beginning_and_no_scored_token(lm):
    context, continuation = "the question, " * 20, "the answer"
    ((value, _),) = lm.loglikelihood([request(context, continuation)])
    whole = lm.tokenizer.encode(context + continuation)
    start = len(lm.tokenizer.encode(context.rstrip()))
    ids = whole[-(LENGTH + 1) :]
    assert len(whole) > LENGTH + 1 and lm.tokenizer.bos_id not in ids
    assert value == pytest.approx(scored(lm, ids, start - (len(whole) - len(ids)))[0], abs=1e-4)


def test_a_continuation_longer_than_the_context_is_scored_whole(lm, caplog):
    continuation = " the answer!?" * 12
    whole = lm.tokenizer.encode("the" + continuation)
    ((value, _),) = lm.loglikelihood([request("the", continuation)])
    assert len(whole) - 1 > LENGTH and "more than max_length" in caplog.text
    start = len(lm.tokenizer.encode("the"))
    assert value == pytest.approx(scored(lm, whole[start - 1 :], 1)[0], abs=1e-3)


@pytest.mark.parametrize("n", [0, 1, LENGTH, LENGTH + 1, 3 * LENGTH + 5])
def test_a_rolling_text_has_every_token_scored_once(n, lm):
    text = "".join(chr(ord("0") + i % 10) + "," for i in range(n))[:n]
    tokens = lm.tokenizer.encode(text)
    (value,) = lm.loglikelihood_rolling([request(text)])
    ids, expected = [lm.tokenizer.bos_id, *tokens], 0.0
    first = min(LENGTH, len(tokens))
    if tokens:
        expected += scored(lm, ids[: first + 1], 1)[0]
    for begin in range(first, len(tokens), LENGTH):  # later windows are full, and score what is new
        end = min(begin + LENGTH, len(tokens))
        expected += scored(lm, ids[end - LENGTH : end + 1], LENGTH - (end - begin) + 1)[0]
    assert value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2, "auto"])
def test_batches_change_nothing(batch_size, lm, folder):
    from nagnet.evaluation.harness import NagnetLM

    other = NagnetLM(folder, batch_size=batch_size, device="cpu")
    pairs = [request("the " * (i % 5), f"answer {i} to the question"[: 4 + i]) for i in range(9)]
    found, expected = other.loglikelihood(pairs), lm.loglikelihood(pairs)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    texts = [request("the " * (i % 4) + "a", {"until": ["e"], "max_gen_toks": 5}) for i in range(5)]
    assert other.generate_until(texts) == lm.generate_until(texts)


def test_texts_go_on_to_a_stop_string_or_their_length(lm):
    prompt = [lm.tokenizer.bos_id, *lm.tokenizer.encode("the question")]
    (drawn,) = generate(lm.model, [prompt], 8, temperature=0, end_token=lm.tokenizer.bos_id)
    text = b"".join(lm.tokenizer.contents[i] for i in drawn.ids).decode("utf-8", "replace")
    until = text[3:5]
    options = [{"until": [], "max_gen_toks": 8}, {"until": until, "max_new_tokens": 8}, {"until": ["\x00never"]}]
    whole, stopped, default = lm.generate_until([request("the question", option) for option in options])
    assert whole == text and stopped == text[: text.index(until)] and default.startswith(whole)
    long, again = lm.generate_until([request("the question, " * 20, {"max_gen_toks": 4}) for _ in range(2)])
    kept = [lm.tokenizer.bos_id, *lm.tokenizer.encode("the question, " * 20)][-(LENGTH - 4) :]
    (drawn,) = generate(lm.model, [kept], 4, temperature=0, end_token=lm.tokenizer.bos_id)
    assert long == again == b"".join(lm.tokenizer.contents[i] for i in drawn.ids).decode("utf-8", "replace")


def test_sampling_follows_the_task(lm):
    options = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 10}
    sampled = [lm.generate_until([request("the", options)])[0] for _ in range(2)]
    assert sampled[0] == sampled[1] != lm.generate_until([request("the", {"max_gen_toks": 10})])[0]
    with pytest.raises(UserError, match="asks for 24 tokens, but the model sees 24"):
        lm.generate_until([request("the", {"max_gen_toks": LENGTH})])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"checkpoint": "nowhere"}, "no folder"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_bad_arguments_are_named(options, message, folder):
    from nagnet.evaluation.harness import NagnetLM

    with pytest.raises(UserError, match=message):
        NagnetLM(**{"checkpoint": folder, "device": "cpu"} | options)


def test_blocks_are_compiled_if_asked_for(folder, lm, monkeypatch):
    from nagnet import ops
    from nagnet.evaluation.harness import NagnetLM
    from nagnet.models.decoder import Decoder

    compiled = []
    monkeypatch.setattr(ops, "compiler_works", lambda: True)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda model, dynamic: compiled.append(dynamic))
    other = NagnetLM(folder, device="cpu", compile=True)
    assert compiled == [True]
    asked = [request("the question", " the answer")]
    assert other.loglikelihood(asked)[0] == pytest.approx(lm.loglikelihood(asked)[0])


def test_a_model_that_sees_the_future_is_refused(folder, monkeypatch):
    from nagnet.evaluation.harness import NagnetLM
    from nagnet.nn import attention

    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: plain(q, k, v, enable_gqa=options.get("enable_gqa", False)),
    )
    with pytest.raises(UserError, match="not causal"):
        NagnetLM(folder, device="cpu")
