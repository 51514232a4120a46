"""nagnet evaluate harness, and lm-eval's own program with the name nagnet."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from nagnet.cli.application import run
from nagnet.data.tokenizer import train_tokenizer
from nagnet.models.checkpoint import save_model
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'nagnet[harness]'")

TASKS = ("tiny_choice", "tiny_rolling", "tiny_generate")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness") / "model"
    decoder = Decoder(
        ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=270, max_seq_len=48, n_directions=2), seed=0
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_model(decoder, folder)
    train_tokenizer(["the question, the answer"] * 2, 270).save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def program(tmp_path):
    """Runs a program with caches of its own and without a network; returns its standard output."""

    def call(*command):
        environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", *map(str, command)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_tasks_of_a_folder(model, program, harness_tasks, tmp_path):
    """Each kind of request, as the adapter answers it alone."""
    from nagnet.evaluation.harness import NagnetLM

    arguments = ["evaluate", "harness", model, "--tasks", *TASKS, "--include-path", harness_tasks, "--device", "cpu"]
    record = json.loads(program("nagnet", *arguments, "--json", "--out", tmp_path / "out"))
    assert record == json.loads((tmp_path / "out" / "harness.json").read_text())
    lm = NagnetLM(model, device="cpu")
    rows = [json.loads(line) for line in (harness_tasks / "rows.jsonl").read_text().splitlines()]

    def answers(row):
        requests = [SimpleRequest(row["question"], option) for option in row["options"]]
        return [value for value, _ in lm.loglikelihood(requests)]

    right = [max(range(3), key=answers(row).__getitem__) == row["gold"] for row in rows]
    assert record["results"]["tiny_choice"]["acc,none"] == pytest.approx(sum(right) / 6)
    nats = lm.loglikelihood_rolling([SimpleRequest(row["question"]) for row in rows])
    n_bytes = sum(len(row["question"]) for row in rows)
    bits = -sum(nats) / n_bytes / torch.log(torch.tensor(2.0)).item()
    assert record["results"]["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert record["results"]["tiny_generate"]["exact_match,none"] == 0


class SimpleRequest:
    def __init__(self, *arguments):
        self.args = arguments


@pytest.mark.slow
def test_the_program_of_lm_eval_knows_the_name(model, program, harness_tasks):
    arguments = ["--tasks", ",".join(TASKS), "--include_path", harness_tasks, "--device", "cpu", "--limit", "4"]
    shown = program("nagnet.evaluation.harness", "--model", "nagnet", "--model_args", f"checkpoint={model}", *arguments)
    assert "acc_norm" in shown and "bits_per_byte" in shown and f"checkpoint': '{model}'" in shown


@pytest.mark.slow
def test_the_program_of_lm_eval_scores_an_export(model, program, harness_tasks, tmp_path):
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'nagnet[hf]'")
    assert run(["export", "hf", str(model), str(tmp_path / "export")]) == 0
    arguments = ["--tasks", "tiny_choice", "--include_path", harness_tasks, "--device", "cpu", "--trust_remote_code"]
    shown = program("lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path / 'export'}", *arguments)
    assert "acc_norm" in shown


def test_bad_input_is_one_line(model, harness_tasks, tmp_path, capsys):
    def refused(*arguments):
        assert run(["evaluate", "harness", str(model), "--device", "cpu", *map(str, arguments)]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("nagnet: error: ")
        return line

    include = ("--include-path", harness_tasks)
    assert "is no folder" in refused("--tasks", "tiny_choice", "--include-path", tmp_path / "nowhere")
    assert "--limit is 0" in refused("--tasks", "tiny_choice", *include, "--limit", "0")
    broken = tmp_path / "broken"
    broken.mkdir()
    task = json.loads((harness_tasks / "tiny_choice.yaml").read_text())
    (broken / "odd.yaml").write_text(json.dumps(task | {"task": "odd", "doc_to_txt": "{{question}}"}))
    assert "cannot load odd" in refused("--tasks", "odd", "--include-path", broken)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    assert "nagnet did not write" in refused("--tasks", "tiny_choice", *include, "--out", tmp_path / "full")


@pytest.mark.slow
def test_an_unknown_task_is_named(model, tmp_path, capsys):
    arguments = ["--tasks", "no_such_task", "--include-path", str(tmp_path), "--device", "cpu"]
    assert run(["evaluate", "harness", str(model), *arguments]) == 2
    assert "unknown task no_such_task" in capsys.readouterr().err.strip().splitlines()[-1]
