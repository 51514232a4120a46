"""generate: every folder the project writes, what is printed, and bad input, which is one line and exit code 2."""

import io
import json

import pytest
import torch

from nagnet.cli.application import run
from nagnet.cli.shades import BACKGROUNDS, Shades, shows_colour
from nagnet.data.tokenizer import train_tokenizer
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.checkpoint import Checkpoints

VOCAB_SIZE = 270


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["plain words and more words, words and words"] * 3, VOCAB_SIZE)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB_SIZE, max_seq_len=40, n_directions=2)
    return Decoder(config, seed=0)


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    """A finished run, with one checkpoint."""
    run_folder = tmp_path / "run"
    save_model(model, run_folder / "model")
    Checkpoints(run_folder / "checkpoints").save(3, model, [], {})
    Checkpoints(run_folder / "checkpoints").save(12, model, [], {})
    tokenizer.save(run_folder / "tokenizer.json")
    tokenizer.save(run_folder / "model" / "tokenizer.json")
    (run_folder / "run.json").write_text('{"config": {}}')
    return run_folder


def generated(capsys, *arguments):
    assert run(["generate", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert run(["generate", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_text_follows_the_prompt(folder, capsys):
    out = generated(capsys, folder, "--prompt", "plain words", "--tokens", 9)
    assert out.startswith("plain words") and len(out) > len("plain words\n") and out.endswith("\n")
    assert "\x1b" not in out
    assert generated(capsys, folder, "--prompt", "plain words", "--tokens", 9) == out
    assert generated(capsys, folder, "--prompt", "plain words", "--tokens", 9, "--seed", 1) != out


@pytest.mark.parametrize("place", ["", "checkpoints/step-0000003", "checkpoints/step-0000012"])
def test_every_folder_of_a_run(folder, capsys, place):
    result = json.loads(generated(capsys, folder / place, "--prompt", "and", "--tokens", 3, "--json"))
    assert result["model"] == str(folder / (place or "model"))


def test_another_tokenizer(folder, tokenizer, tmp_path, capsys):
    tokenizer.save(tmp_path / "mine.json")
    (folder / "model" / "tokenizer.json").unlink()
    assert "--tokenizer" in refused(capsys, folder, "--prompt", "and")
    out = generated(capsys, folder, "--prompt", "and", "--tokens", 2, "--tokenizer", tmp_path / "mine.json")
    assert out.startswith("and")


def test_json_is_all_it_prints(folder, model, tokenizer, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("plain\n\nwords and\n")
    result = json.loads(
        generated(capsys, folder, "--prompts", tmp_path / "prompts.txt", "--samples", 3, "--tokens", 8, "--json")
    )
    rows = result["completions"]
    assert [(row["prompt"], row["prompt_index"], row["sample"]) for row in rows] == [
        (prompt, index, sample) for index, prompt in enumerate(["plain", "words and"]) for sample in range(3)
    ]
    assert len({row["text"] for row in rows}) == 6
    for row in rows:
        ids = [token["id"] for token in row["tokens"]]
        assert row["text"] == tokenizer.decode(ids)
        context = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(row["prompt"]), *ids]])
        with torch.no_grad():
            direction, log_norm = model.trunk(context).split()
            logits = model.readout(direction, log_norm)[0, -len(ids) - 1 : -1, :VOCAB_SIZE]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        assert [token["log_probability"] for token in row["tokens"]] == pytest.approx(expected.tolist(), abs=1e-4)
        confidences = log_norm[0, -len(ids) - 1 : -1].exp().tolist()
        assert [token["confidence"] for token in row["tokens"]] == pytest.approx(confidences, rel=1e-4)


def test_batches_change_nothing(folder, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "plain\\nwords"}\n{"prompt": "and"}\n')
    arguments = [folder, "--prompts", tmp_path / "prompts.jsonl", "--samples", 2, "--tokens", 6]
    one = generated(capsys, *arguments, "--batch-size", 1)
    assert one == generated(capsys, *arguments, "--batch-size", 3)
    assert one.count("--- prompt") == 4 and "--- prompt 1, sample 2\nplain\nwords" in one


def test_stop_strings_and_limits(folder, capsys):
    arguments = [folder, "--prompt", "and", "--tokens", 30, "--past-the-end", "--json"]
    (free,) = json.loads(generated(capsys, *arguments))["completions"]
    stop = free["text"][5:7]
    (row,) = json.loads(generated(capsys, *arguments, "--stop", "never said", stop))["completions"]
    assert row["finish"] == "stopped" and row["text"] == free["text"].partition(stop)[0]
    for limits in (["--temperature", 0], ["--top-k", 1], ["--top-p", 1e-9], ["--min-p", 1]):
        likeliest = {generated(capsys, *arguments, *limits, "--seed", seed) for seed in (0, 1)}
        assert len(likeliest) == 1, limits


def test_a_longer_context(folder, capsys):
    arguments = [folder, "--prompt", "and", "--tokens", 60, "--past-the-end", "--json"]
    (row,) = json.loads(generated(capsys, *arguments))["completions"]
    assert row["finish"] == "context" and len(row["tokens"]) < 40
    (row,) = json.loads(generated(capsys, *arguments, "--context", 100))["completions"]
    assert row["finish"] == "length" and len(row["tokens"]) == 60


def test_bfloat16(folder, capsys):
    assert generated(capsys, folder, "--prompt", "and", "--tokens", 4, "--dtype", "bfloat16").startswith("and")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "word " * 50], "and the context is 40"),
        (["--prompt", "and", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "and", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "and", "--top-k", "-1"], "top_k is -1"),
        (["--prompt", "and", "--top-p", "0"], "top_p is 0.0"),
        (["--prompt", "and", "--min-p", "2"], "min_p is 2.0"),
        (["--prompt", "and", "--tokens", "0"], "--tokens is 0"),
        (["--prompt", "and", "--samples", "0"], "--samples is 0"),
        (["--prompt", "and", "--batch-size", "0"], "--batch-size is 0"),
        (["--prompt", "and", "--stop", ""], "stop string is empty"),
        ([], "give either --prompt TEXT or --prompts FILE"),
        (["--prompt", "and", "--prompts", "x"], "give either"),
        (["--prompts", "no such file"], "cannot read prompts"),
    ],
    ids=str,
)
def test_bad_input(folder, capsys, arguments, message):
    assert message in refused(capsys, folder, *arguments)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_prompt_in_the_file(folder, tmp_path, capsys, content):
    (tmp_path / "prompts.txt").write_text(content)
    assert "holds no prompt" in refused(capsys, folder, "--prompts", tmp_path / "prompts.txt")


@pytest.mark.parametrize("line", ["not json", "[1]", '{"text": "a"}', '{"prompt": 3}'])
def test_a_line_that_is_no_prompt(folder, tmp_path, capsys, line):
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "and"}}\n{line}\n')
    assert "line 2 is not an object" in refused(capsys, folder, "--prompts", tmp_path / "prompts.jsonl")


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut weights": ("model", lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 100)),
    "no weights": ("model", lambda f: (f / "model.safetensors").unlink()),
    "config cut": ("model", lambda f: (f / "config.json").write_text('{"d_model": 16')),
    "config is a list": ("model", lambda f: (f / "config.json").write_text("[1, 2]")),
    "config has a wrong type": ("model", lambda f: (f / "config.json").write_text('{"d_ff": "wide"}')),
    "config of another model": ("model", lambda f: (f / "config.json").write_text('{"d_model": 32}')),
    "a flipped bit": ("checkpoints/step-0000012", lambda f: _flip_a_bit(f / "model.safetensors")),
    "a record cut": ("checkpoints/step-0000012", lambda f: (f / "checkpoint.json").write_text("{")),
    "tokenizer cut": ("model", lambda f: (f / "tokenizer.json").write_text("{")),
    "no tokenizer": ("model", lambda f: (f / "tokenizer.json").unlink()),
}


@pytest.mark.parametrize(("place", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoints(folder, capsys, place, damage):
    damage(folder / place)
    refused(capsys, folder / place, "--prompt", "and")


def test_a_model_that_diverged(tmp_path, model, tokenizer, capsys):
    broken = Decoder(model.config, seed=0)
    with torch.no_grad():
        broken.blocks[0].mlp.out_proj.weight.fill_(torch.nan)
    save_model(broken, tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert "logits are not finite" in refused(capsys, tmp_path, "--prompt", "and")


def test_a_folder_without_a_model(tmp_path, capsys):
    assert "holds no model" in refused(capsys, tmp_path, "--prompt", "and")
    assert "is no folder" in refused(capsys, tmp_path / "absent", "--prompt", "and")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_shades_rank_confidence():
    terminal = Terminal()
    shades = Shades(terminal, shaded=True)
    shades.begin("prompt ", [1.0, 2.0, 3.0])
    shades.write("low", 0.5)
    shades.write("high\nest", 9.0)
    shades.end()

    def shaded(text, background):
        return f"\x1b[38;5;16;48;5;{background}m{text}\x1b[0m"

    lowest, highest = BACKGROUNDS[0], BACKGROUNDS[-1]
    expected = f"prompt {shaded('low', lowest)}{shaded('high', highest)}\n{shaded('est', highest)}\n"
    assert terminal.getvalue() == expected


def test_a_model_cannot_command_the_terminal():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        Shades(stream, shaded=False).write("a\x1b[2Jb\x07\tc\n", 1.0)
    assert terminal.getvalue() == "a\ufffd[2Jb\ufffd\tc\n"
    assert file.getvalue() == "a\x1b[2Jb\x07\tc\n"


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert shows_colour(Terminal()) and not shows_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_colour(Terminal())
