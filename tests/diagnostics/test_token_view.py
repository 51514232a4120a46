"""The token view on small models: each number against its definition, and what a page says of it."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from nagnet.data.corpus import Document
from nagnet.data.tokenizer import train_tokenizer
from nagnet.diagnostics.token_page import CAPTION, render_token_views, visible, write_token_view
from nagnet.diagnostics.token_view import TokenView, join_pieces, token_view, token_view_of_text
from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import evaluate_documents
from nagnet.nn.residual import RESIDUAL_STREAMS
from nagnet.nn.skip import SkipPolicy

RULES = list(RESIDUAL_STREAMS)
CONTENTS = [bytes([97 + number]) for number in range(31)] + [b""]  # the last is BOS
TEXT = "def naïve(x):\n\treturn 'you' if x else 'me'  # 你好 🙂\n" * 4


@pytest.fixture
def row(generator) -> torch.Tensor:
    """BOS and 12 tokens."""
    return torch.cat([torch.tensor([31]), torch.randint(31, (12,), generator=generator)])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def naive(x):\n\treturn 'you' if x else 'me'\n" * 20], 280)


@pytest.mark.parametrize("residual", RULES)
def test_each_token_is_compared_with_the_prediction_before_it(build_model, row, residual):
    model = build_model(residual).train()
    view = token_view(model, row, CONTENTS)
    p = model(row[None])[0].detach().double().softmax(-1).numpy()
    for place in range(12):
        prediction, came = p[place], int(row[place + 1])  # position 0 is BOS, which predicts the first token
        assert view.contents[place] == CONTENTS[came]
        assert view.probability[place] == pytest.approx(prediction[came], rel=1e-4)
        assert view.loss[place] == pytest.approx(-math.log(prediction[came]), rel=1e-4)
        assert view.rank[place] == 1 + (prediction > prediction[came]).sum()
        assert view.entropy[place] == pytest.approx(-(prediction * np.log(prediction)).sum(), rel=1e-4)
        assert view.max_probability[place] == pytest.approx(prediction.max(), rel=1e-4)
        assert view.likeliest[place] == CONTENTS[prediction.argmax()]
    assert (len(view.loss), view.vocab_size, view.window_starts) == (12, 32, (0,))
    assert view.scale_in_logits == model.readout.config.uses_log_norm
    assert model.training


@pytest.mark.parametrize("residual", RULES)
def test_s_by_depth_is_that_of_the_stream(build_model, row, residual):
    model = build_model(residual, n_layers=3)
    view = token_view(model, row, CONTENTS)
    assert view.log_norm.shape == (12, 7) and view.ran.shape == (12, 6) and view.ran.all()
    with torch.no_grad():
        embedded = model.stream.begin(model.embedding(row[None, :-1])).split()[1][0]
        for n_blocks in range(1, 4):
            last = model.blocks[n_blocks:]
            model.blocks = model.blocks[:n_blocks]  # a shorter model has the same stream up to its end
            log_norm = model.trunk(row[None, :-1]).split()[1][0]
            np.testing.assert_allclose(view.log_norm[:, 2 * n_blocks], log_norm, rtol=1e-4, atol=1e-6)
            model.blocks.extend(last)
    np.testing.assert_allclose(view.log_norm[:, 0], embedded, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(view.confidence, np.exp(view.log_norm[:, -1]))


def test_gains_that_are_known_give_known_norms(build_model, row, fix_modulation):
    model = build_model(n_layers=8, branch_eps=0.0)
    fix_modulation(model, 1.0)
    view = token_view(model, row, CONTENTS)
    grown = np.sqrt(np.arange(1, 18))  # alpha = 1/sqrt(l) and m = 1: the product of the gains is sqrt(l + 1)
    np.testing.assert_allclose(np.exp(view.log_norm - view.log_norm[:, :1]), np.tile(grown, (12, 1)), rtol=1e-3)


def test_a_blank_model_and_ties(build_model, row):
    model = build_model("pre_norm")
    nn.init.zeros_(model.readout.weight)
    view = token_view(model, row, CONTENTS)
    np.testing.assert_allclose(view.loss, math.log(32), rtol=1e-6)
    np.testing.assert_allclose(view.entropy, math.log(32), rtol=1e-6)
    assert (view.rank == 1).all()  # equally likely tokens share the best place


def test_a_token_cannot_see_itself(build_model, row):
    model = build_model()
    other = row.clone()
    other[5] = (row[5] + 1) % 31
    before, after = token_view(model, row, CONTENTS), token_view(model, other, CONTENTS)
    for name in ("entropy", "confidence", "max_probability", "log_norm"):
        changed = np.asarray(getattr(before, name) != getattr(after, name)).reshape(12, -1).any(axis=1)
        assert changed.tolist() == [False] * 5 + [True] + changed.tolist()[6:], name  # row 4 predicts the token
    assert before.loss[4] != after.loss[4] and (before.loss[:4] == after.loss[:4]).all()


def test_what_ran_is_what_was_decided(build_model, row, generator):
    model = build_model(n_layers=3, skip=SkipPolicy(threshold=0.5))
    with torch.no_grad():
        for update in model.stream.updates:
            update.modulator.weight.normal_(generator=generator)
            update.skip_vector.normal_(generator=generator)
    model.skipping.counts.fill_(7)
    view = token_view(model, row, CONTENTS)
    assert (model.skipping.counts == 7).all()  # looking is not scoring
    assert view.skip_threshold == 0.5
    model.skipping.forget()
    model.trunk(row[None, :-1])
    assert 0.2 < view.ran.mean() < 0.8
    np.testing.assert_array_equal(view.ran.sum(axis=0), model.skipping.counts[1])
    for place in (0, 5):  # a prefix decides the same
        shorter = token_view(model, row[: place + 2], CONTENTS)
        np.testing.assert_array_equal(shorter.ran, view.ran[: place + 1])
    model.set_skip_threshold(None)
    everything = token_view(model, row, CONTENTS)
    assert everything.ran.all() and everything.skip_threshold is None


def test_a_dial_on_a_model_trained_without_skipping(build_model, row):
    model = build_model()
    model.set_skip_threshold(1.0)
    view = token_view(model, row, CONTENTS)
    assert not view.ran.any() and view.skip_threshold == 1.0
    assert (view.log_norm == view.log_norm[:, :1]).all()


def test_a_model_in_use_under_compile(build_model, row):
    model = build_model()
    expected = token_view(model, row, CONTENTS)
    entered = []

    def backend(graph, inputs):
        def run(*arguments):
            entered.append(graph)
            return graph(*arguments)

        return run

    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        model(row[None])
    compiled = len(entered)
    assert compiled
    view = token_view(model, row, CONTENTS)
    np.testing.assert_allclose(view.log_norm, expected.log_norm, rtol=1e-5, atol=1e-6)
    assert len(entered) == compiled


def test_a_long_text_is_scored_in_the_windows_of_bits_per_byte(build_model, tokenizer):
    model = build_model(vocab_size=280)
    view = token_view_of_text(model, tokenizer, TEXT)
    assert view.window_starts == tuple(range(0, len(view.loss), 16)) and len(view.window_starts) > 3
    scores = evaluate_documents(
        lambda tokens, targets: model.score(tokens, targets)[0], [Document("text", TEXT)], tokenizer, 16, 4
    )
    assert view.loss.sum() == pytest.approx(scores.nats[0], rel=1e-5) and len(view.loss) == scores.n_tokens[0]
    again = token_view_of_text(model, tokenizer, TEXT, seq_len=7)
    assert again.window_starts[:3] == (0, 7, 14)
    ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(TEXT)])
    later = token_view(model, ids[14:22], tokenizer.contents)
    np.testing.assert_allclose(again.loss[14:21], later.loss, rtol=1e-5)


def test_many_positions_of_one_window(build_model, generator):
    """The readout takes a few hundred at a time: their losses are those of the whole."""
    model = build_model(max_seq_len=600)
    row = torch.randint(31, (601,), generator=generator)
    losses, _ = model.score(row[None, :-1], row[None, 1:])
    np.testing.assert_allclose(token_view(model, row, CONTENTS).loss, losses[0], rtol=1e-4, atol=1e-5)


def test_pieces_make_the_text_and_contents_its_bytes(build_model, tokenizer):
    view = token_view_of_text(build_model(vocab_size=280), tokenizer, TEXT)
    assert "".join(view.pieces) == TEXT and b"".join(view.contents) == TEXT.encode()
    cut = token_view_of_text(build_model(vocab_size=280), tokenizer, TEXT, max_tokens=20)
    assert (len(cut.loss), cut.n_left_out) == (20, len(view.loss) - 20)
    np.testing.assert_allclose(cut.loss, view.loss[:20], rtol=1e-5)


def test_a_split_character_belongs_to_the_token_that_begins_it():
    smile = "🙂".encode()
    assert join_pieces([b"a" + smile[:1], smile[1:3], smile[3:] + b"b"]) == ["a🙂", "", "b"]
    assert join_pieces(["你".encode()[:2], "你".encode()[2:] + "好".encode()[:1], "好".encode()[1:]]) == [
        "你",
        "好",
        "",
    ]
    assert join_pieces([b"a", b"\xe4", b"b", smile[:2]]) == ["a", "\\xe4", "b", "\\xf0\\x9f"]  # never complete
    assert join_pieces([b"", b"x", b""]) == ["", "x", ""]
    assert join_pieces([]) == []


def test_one_token(build_model, tmp_path):
    for residual in RULES:
        view = token_view(build_model(residual), torch.tensor([31, 3]), CONTENTS)
        assert view.loss.shape == (1,) and view.log_norm.shape == (1, 5)
        write_token_view(tmp_path / "one.html", "one", {residual: view})


@pytest.mark.parametrize("tokens", [torch.tensor([31]), torch.tensor([[31, 2]]), torch.zeros(0, dtype=torch.int64)])
def test_tokens_of_a_wrong_shape(build_model, tokens):
    with pytest.raises(UserError, match="BOS"):
        token_view(build_model(), tokens, CONTENTS)


def test_wrong_input_is_named(build_model, tokenizer, row):
    model = build_model(vocab_size=280)
    with pytest.raises(UserError, match="empty"):
        token_view_of_text(model, tokenizer, "")
    with pytest.raises(UserError, match="max_tokens"):
        token_view_of_text(model, tokenizer, "abc", max_tokens=0)
    with pytest.raises(UserError, match="seq_len"):
        token_view_of_text(model, tokenizer, "abc", seq_len=0)
    with pytest.raises(UserError, match="tokenizer"):
        token_view(model, row, CONTENTS)
    with pytest.raises(UserError, match="lone surrogate"):
        token_view_of_text(model, tokenizer, "\ud800")


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_a_diverged_model_is_named(build_model, row, damage):
    model = build_model()
    with torch.no_grad():
        model.embedding.weight[row[20 % 12]] = damage
    with pytest.raises(UserError, match=r"logits for token \d+ of the text are not finite"):
        token_view(model, row, CONTENTS)


def data_of(fragment: str) -> list:
    """What a fragment gives its script."""
    (data,) = re.findall(r'<script type="application/json" class="data">(.*?)</script>', fragment, re.DOTALL)
    return json.loads(data)


def of_contents(view: TokenView, *contents: bytes) -> TokenView:
    """A view of so many first tokens, with other bytes."""
    n = len(contents)
    parts = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    arrays = {name: value[:n] for name, value in parts.items() if isinstance(value, tuple | np.ndarray)}
    arrays |= {"contents": contents, "pieces": tuple(join_pieces(contents)), "window_starts": (0,)}
    return dataclasses.replace(view, **arrays)


@pytest.fixture
def view(build_model, row) -> TokenView:
    return token_view(build_model(), row, CONTENTS)


def test_no_text_becomes_markup(view, tmp_path):
    attack = b"</script><b>x</b>", b'"><img src=x onerror=alert(1)>', b"<!--", b"{{ 7 * 7 }}", b"&amp;"
    view = dataclasses.replace(of_contents(view, *attack), likeliest=attack)
    write_token_view(tmp_path / "page.html", "</title><b>", {"<i>arm</i>": view})
    page = (tmp_path / "page.html").read_text()
    for markup in ("<b>", "<img", "<!--", "<i>", "alert(1)>"):
        assert markup not in page
    assert page.count("</script>") == 2  # the data's and the script's own
    (model,) = data_of(page)
    assert model["text"] == [content.decode() for content in attack] == model["likeliest"]
    assert model["name"] == "<i>arm</i>"


def test_what_would_not_show_is_marked(view):
    assert visible("a\n\tb") == "a↵\n→\tb"
    assert visible("\x00\x1b\r\x7f") == "␀␛␍␡"
    assert visible("\u202e\u200b\x85\u2028\ufeff") == "⟨U+202E⟩⟨U+200B⟩⟨U+0085⟩⟨U+2028⟩⟨U+FEFF⟩"
    assert visible("é 你\u00a0🙂") == "é 你\u00a0🙂"
    shown = of_contents(view, b"\x07", b"\xf0\x9f", b"\x99\x82", b"", b"\xe4", b"\xe2\x80\xae")
    (model,) = data_of(render_token_views({"a": shown}))
    assert model["text"] == ["␇", "🙂", "·", "⟨bos⟩", "\\xe4", "⟨U+202E⟩"]
    assert model["split"] == {"1": "F0 9F", "2": "99 82", "4": "E4"}
    assert model["starts"] == [0, 1, 3, 5, 5, 6] and model["end"] == 9


def test_the_page_has_the_numbers(build_model, view, row):
    other = token_view(build_model("pre_norm"), row, CONTENTS)
    fragment = render_token_views({"norm_agnostic": view, "pre_norm": other})
    ours, twin = data_of(fragment)
    for model, source in ((ours, view), (twin, other)):
        for name in ("loss", "probability", "entropy", "max_probability", "confidence"):
            np.testing.assert_allclose(model[name], getattr(source, name), rtol=5.1e-3)
        np.testing.assert_allclose(model["log_norm"], source.log_norm, atol=5.1e-4)
        np.testing.assert_allclose(model["mean_log_norm"], source.log_norm.mean(0), atol=5.1e-4)
        assert model["rank"] == source.rank.tolist() and model["ran"] is None
    assert ours["scales"]["loss"] == twin["scales"]["loss"]
    assert (ours["name"], ours["color"]) == ("norm-agnostic", "#0072B2")
    assert "it is the inverse temperature" in ours["note"] and "as a control" in twin["note"]
    assert CAPTION.split(".")[0] in fragment
    assert "http" not in fragment.replace("http://www.w3.org/2000/svg", "")


def test_windows_skips_and_a_cut_are_stated(build_model, row):
    model = build_model()
    model.set_skip_threshold(0.5)
    view = token_view(model, row, CONTENTS, seq_len=5, n_left_out=1234)
    (data,) = data_of(render_token_views({"a": view}))
    assert "windows of 5 tokens" in data["note"] and "first 12 tokens; 1,234 more" in data["note"]
    assert data["window_starts"] == [0, 5, 10]
    assert data["ran"] == ["".join("01"[run] for run in line) for line in view.ran.astype(int)]


def test_a_constant_confidence_has_one_colour(build_model, row):
    (data,) = data_of(render_token_views({"a": token_view(build_model("post_norm"), row, CONTENTS)}))
    low, high = data["scales"]["confidence"]
    assert low == high == pytest.approx(1.0, rel=1e-3)  # what rounding leaves is no difference


def test_views_of_one_text_only(view):
    shorter = of_contents(view, b"".join(view.contents[:2]), *view.contents[2:5])
    assert len(data_of(render_token_views({"a": view, "b": shorter}))) == 2
    with pytest.raises(UserError, match="different texts"):
        render_token_views({"a": view, "b": of_contents(view, b"zzz")})
    with pytest.raises(UserError, match="no token view"):
        render_token_views({})


def test_a_page_that_cannot_be_written(view, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_token_view(tmp_path / "file" / "page.html", "title", {"a": view})


def test_a_long_page_stays_small(view, tmp_path):
    n, n_updates = 1000, 128
    rng = np.random.default_rng(0)
    parts = {name: rng.random(n) for name in ("loss", "probability", "entropy", "max_probability", "confidence")}
    contents = tuple(itertools.islice(itertools.cycle(CONTENTS[:26]), n))
    large = dataclasses.replace(
        of_contents(view, *contents),
        **parts,
        rank=np.arange(n),
        likeliest=contents,
        log_norm=rng.random((n, n_updates + 1)) * 4 - 2,
        ran=rng.random((n, n_updates)) > 0.5,
        skip_threshold=0.5,
    )
    write_token_view(tmp_path / "page.html", "title", {"norm_agnostic": large})
    assert (tmp_path / "page.html").stat().st_size < 1.2e6
