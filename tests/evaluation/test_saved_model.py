"""Which model, tokenizer and config a path means, in every form that a run leaves behind."""

import json
import os

import pytest
import torch

from nagnet.data.tokenizer import train_tokenizer
from nagnet.errors import UserError
from nagnet.evaluation.saved_model import find_model
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a word, a word"], 260)


@pytest.fixture
def model():
    return Decoder(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=260, n_directions=2), seed=0)


@pytest.fixture
def run(tmp_path, model, tokenizer):
    """A training run that was stopped, as nagnet train leaves it."""
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=3)
    for step in (2, 4):
        checkpoints.save(step, model, [], {})
    (folder / "run.json").write_text(json.dumps({"recipe": "r", "config": {"seq_len": 7}}))
    tokenizer.save(folder / "tokenizer.json")
    return folder


def test_a_run_means_its_last_checkpoint_until_it_has_a_model(run, model, tokenizer):
    found = find_model(run)
    assert found.folder == run / "checkpoints" / "step-0000004"
    assert found.tokenizer_file == run / "tokenizer.json" and found.run_config == {"seq_len": 7}
    save_model(model, run / "model")
    tokenizer.save(run / "model" / "tokenizer.json")
    for path in (run, run / "model"):
        found = find_model(path)
        assert found.folder == run / "model" and found.run_config == {"seq_len": 7}
        assert found.tokenizer_file == run / "model" / "tokenizer.json"
    assert find_model(run / "checkpoints" / "step-0000002").folder.name == "step-0000002"


def test_paths_relative_to_the_folder_inside(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints" / "step-0000002")
    found = find_model(".")
    assert found.run_config == {"seq_len": 7} and os.path.samefile(found.tokenizer_file, run / "tokenizer.json")


def test_an_arm_of_a_comparison(tmp_path, model, tokenizer):
    for arm in ("one", "two"):
        save_model(model, tmp_path / "c" / arm)
        (tmp_path / "c" / arm / "result.json").write_text(json.dumps({"config": {"seq_len": 9}}))
    tokenizer.save(tmp_path / "c" / "tokenizer.json")
    found = find_model(tmp_path / "c" / "two")
    assert found.tokenizer_file == tmp_path / "c" / "tokenizer.json" and found.run_config == {"seq_len": 9}
    with pytest.raises(UserError, match="holds 2 models; name one of them, such as .*one"):
        find_model(tmp_path / "c")


def test_a_model_of_ones_own_has_no_tokenizer(tmp_path, model, tokenizer):
    save_model(model, tmp_path / "outer" / "mine")
    tokenizer.save(tmp_path / "outer" / "tokenizer.json")  # somebody else's
    found = find_model(tmp_path / "outer" / "mine")
    assert found.tokenizer_file is None and found.run_config is None
    with pytest.raises(UserError, match="has no tokenizer.json; name that of the model with --tokenizer"):
        found.tokenizer(260)
    assert found.tokenizer(260, tmp_path / "outer" / "tokenizer.json").vocab_size == 260
    with pytest.raises(UserError, match="has 260 ids, but the model .* 300"):
        found.tokenizer(300, tmp_path / "outer" / "tokenizer.json")


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_named(name, run):
    flip(run / "checkpoints" / "step-0000004" / name)
    with pytest.raises(UserError, match=f"step-0000004/{name} is damaged"):
        find_model(run)
    assert find_model(run / "checkpoints" / "step-0000002")


def test_records_that_are_damaged(run):
    (run / "checkpoints" / "step-0000004" / "checkpoint.json").write_text("{}")
    with pytest.raises(UserError, match="checkpoint.json is damaged"):
        find_model(run)
    (run / "run.json").write_text("[]")
    with pytest.raises(UserError, match="run.json is damaged"):
        find_model(run / "checkpoints" / "step-0000002")


def test_paths_without_a_model(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        find_model(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no model"):
        find_model(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="neither a model nor a checkpoint yet"):
        find_model(tmp_path)


def test_the_hash_is_that_of_the_weights(tmp_path, model):
    first = find_model(save_model(model, tmp_path / "a")).content_hash()
    assert find_model(save_model(model, tmp_path / "b")).content_hash() == first
    with torch.no_grad():
        model.stream.updates[0].alpha.add_(1e-6)
    assert find_model(save_model(model, tmp_path / "c")).content_hash() != first
