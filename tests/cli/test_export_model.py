"""nagnet export from the command line: what it finds, what it writes, what it refuses."""

import json

import pytest
import torch

from nagnet.cli.application import run
from nagnet.data.tokenizer import train_tokenizer
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

CONFIG = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=260, n_directions=2)
FILES = {"config.json", "generation_config.json", "model.safetensors", "modeling_nagnet.py", "README.md"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a word, a word"], 260)


@pytest.fixture
def model_run(tmp_path, tokenizer):
    """A finished training run, as nagnet train leaves it."""
    folder = tmp_path / "run"
    save_model(Decoder(CONFIG, seed=0), folder / "model")
    tokenizer.save(folder / "tokenizer.json")
    tokenizer.save(folder / "model" / "tokenizer.json")
    config = {"model": CONFIG.to_dict(), "seed": 3, "data": "/home/somebody/texts", "seq_len": 32, "batch_size": 8}
    (folder / "run.json").write_text(json.dumps({"recipe": "r", "config": config}))
    summary = {"finished": True, "bits_per_byte": 1.23456, "tokens": 12345, "flops": 2.5e12, "steps": 7}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def refused(capsys):
    def export(*arguments):
        assert run(["export", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return export


def test_a_run_is_exported_with_its_results(model_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["export", "hf", str(model_run), str(out), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["bytes"]
    assert written.keys() >= FILES | TOKENIZER_FILES
    assert all((out / name).stat().st_size == size for name, size in written.items())
    card = (out / "README.md").read_text()
    for shown in (
        "| bits per byte of held-out text | 1.2346 |",
        "| training tokens | 12,345 |",
        "`texts`",
        "| seed | `3`",
    ):
        assert shown in card
    assert "somebody" not in card  # where files lie on a machine is nobody's business


def test_a_second_export_needs_force(model_run, tmp_path, refused):
    out = tmp_path / "out"
    assert run(["export", "hf", str(model_run), str(out)]) == 0
    assert "--force" in refused("hf", model_run, out)
    (out / "left").touch()
    assert run(["export", "hf", str(model_run), str(out), "--force"]) == 0
    assert not (out / "left").exists()


def test_a_model_without_a_tokenizer_is_exported_without_one(tmp_path, capsys):
    save_model(Decoder(CONFIG, seed=0), tmp_path / "alone")
    assert run(["export", "hf", str(tmp_path / "alone"), str(tmp_path / "out")]) == 0
    assert "without a tokenizer" in capsys.readouterr().out
    assert not TOKENIZER_FILES & {file.name for file in (tmp_path / "out").iterdir()}
    assert "bos_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "tokenizer was not at hand" in (tmp_path / "out" / "README.md").read_text()


def test_bad_input_is_one_line_and_writes_nothing(model_run, tmp_path, refused):
    out, other = tmp_path / "out", tmp_path / "other.json"
    train_tokenizer(["a word, a word"], 259).save(other)
    assert "is no folder" in refused("hf", tmp_path / "nowhere", out)
    assert "has 259 ids" in refused("hf", model_run, out, "--tokenizer", other)
    weights = model_run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-20])
    assert "is damaged" in refused("hf", model_run, out)
    torch.save({}, weights)
    assert "is damaged" in refused("hf", model_run, out)
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    assert "holds files that nagnet did not write" in refused("hf", model_run, tmp_path / "full")
