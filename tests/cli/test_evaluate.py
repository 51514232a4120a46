"""nagnet evaluate from the command line: models that the other commands wrote, and what is refused."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from nagnet import ops
from nagnet.cli import evaluate_core
from nagnet.cli.application import run
from nagnet.cli.train import recipe_config
from nagnet.data.tokenizer import Tokenizer
from nagnet.models.checkpoint import load_model, save_model
from nagnet.models.decoder import Decoder
from nagnet.nn import attention
from nagnet.nn.norm_agnostic import NormAgnosticState
from nagnet.training import comparison
from nagnet.training.arms import build_arm
from nagnet.training.comparison import Job, run_job
from nagnet.training.text import open_text

SMALL = [
    *("model.d_model=16", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=270", "model.max_seq_len=64"),
    *("model.n_directions=3", "steps=4", "batch_size=4", "seq_len=16", "compile=false", "dtype=float32"),
    *("eval_bytes=4000", "health_interval=0", "eval_interval=0", "checkpoint_interval=2"),
]
EXACT = 1e-12  # relative; sums of float64 in another order


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with text, a trained run, and the two arms of a comparison, by the code that writes them."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        words = " ".join(f"a stream of é 漢 {number * i % 97}" for i in range(6 + number % 9))
        (text / f"{number}.txt").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAGNET_CACHE", str(folder / "cache"))
        patch.setattr(comparison, "SAMPLE_TOKENS", 3)
        patch.setattr(comparison, "CONFIDENCE_ROWS", 4)
        common = ["stdlib-tiny", *SMALL, "--data", str(text), "--device", "cpu"]
        assert run(["train", *common, "--trackers", "none", "--out", str(folder / "run")]) == 0
        config = recipe_config("stdlib-tiny", tuple(SMALL), str(text))
        arms = {name: build_arm(config, name) for name in ("norm_agnostic", "pre_norm")}
        read = open_text(config.data, config.model.vocab_size, config.eval_bytes)
        run_job(Job("arms", folder / "arms", arms), read, echo=lambda line: None)
        yield folder


@pytest.fixture
def result(capsys):
    """Runs ``nagnet evaluate ... --json`` and returns what it printed."""

    def evaluate(*arguments):
        assert run(["evaluate", *map(str, arguments), "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return evaluate


@pytest.fixture
def refused(capsys):
    """Runs ``nagnet evaluate ...``, which must end with exit code 2, and returns its one line."""

    def evaluate(*arguments):
        assert run(["evaluate", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("nagnet: error: ")
        return line

    return evaluate


def test_bpb_is_what_training_measured(made, result):
    summary = json.loads((made / "run" / "summary.json").read_text())
    found = result("bpb", made / "run")
    assert found["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)
    assert found["dtype"] == "float64" and found["seq_len"] == 16
    assert result("bpb", made / "run", "--dtype", "float32")["bits_per_byte"] == summary["bits_per_byte"]


@pytest.mark.parametrize("arm", ["norm_agnostic", "pre_norm"])
def test_bpb_of_an_arm_is_what_the_comparison_measured(arm, made, result):
    measured = json.loads((made / "arms" / arm / "result.json").read_text())
    found = result("bpb", made / "arms" / arm)
    assert found["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], rel=1e-6)
    assert (found["bytes"], found["documents"]) == (measured["evaluated"]["bytes"], measured["evaluated"]["documents"])


@pytest.mark.parametrize("whole", [(), ("--whole",)], ids=["held out", "whole"])
def test_bpb_does_not_depend_on_the_batch(made, result, whole):
    arguments = ("bpb", made / "run", "--data", made / "text", "--max-bytes", 3000, *whole)
    numbers = [result(*arguments, "--batch-size", size)["bits_per_byte"] for size in (1, 3, 8)]
    np.testing.assert_allclose(numbers, numbers[0], rtol=EXACT)


def test_bpb_counts_every_byte_once(made, result):
    """Nats of every token after all tokens before it in its window, over the bytes on the disk."""
    found = result("bpb", made / "run", "--data", made / "text", "--whole", "--seq-len", "1000")
    model, tokenizer = load_model(made / "run" / "model").double(), Tokenizer.load(made / "run" / "tokenizer.json")
    files = sorted((made / "text").iterdir())
    nats = 0.0
    for file in files:
        row = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(file.read_text())]])
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(model(row[:, :-1])[0], row[0, 1:], reduction="sum").item()
    n_bytes = sum(file.stat().st_size for file in files)
    assert found["bytes"] == n_bytes and found["documents"] == len(files)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / n_bytes, rel=1e-10)


def test_bpb_of_some_bytes_and_of_short_windows(made, result):
    default, fewer = result("bpb", made / "run"), result("bpb", made / "run", "--max-bytes", "300")
    assert (
        fewer["documents"] == 1 < default["documents"]
        and default["bytes"] <= 4000
        and fewer["text_hash"] != default["text_hash"]
    )
    assert result("bpb", made / "run", "--seq-len", "2")["bits_per_byte"] > default["bits_per_byte"]


def test_bpb_with_one_scale_for_all_tokens(made, result):
    arguments = ("bpb", made / "run", "--data", made / "text", "--whole", "--seq-len", "1000")
    found = result(*arguments, "--freeze-scale")
    model, tokenizer = load_model(made / "run" / "model").double(), Tokenizer.load(made / "run" / "tokenizer.json")
    rows = [
        torch.tensor([[tokenizer.bos_id, *tokenizer.encode(file.read_text())]]) for file in (made / "text").iterdir()
    ]
    with torch.no_grad():
        states = [NormAgnosticState(*model.trunk(row[:, :-1]).split()) for row in rows]
        mean = torch.cat([state.log_norm[0] for state in states]).mean()
        logits = [model.readout(state.direction, torch.full_like(state.log_norm, mean)) for state in states]
    pairs = zip(logits, rows, strict=True)
    nats = sum(torch.nn.functional.cross_entropy(x[0], row[0, 1:], reduction="sum").item() for x, row in pairs)
    assert found["frozen_log_norm"] == pytest.approx(mean.item(), rel=1e-10)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / found["bytes"], rel=1e-10)
    assert abs(found["bits_per_byte"] / result(*arguments)["bits_per_byte"] - 1) > 1e-6


def test_bpb_in_words(made, capsys):
    assert run(["evaluate", "bpb", str(made / "run"), "--freeze-scale", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out and "held out of" in out and "for every token, instead of its own" in out


def test_bpb_of_checkpoints_and_of_models_without_a_run(made, result, refused, tmp_path):
    steps = [result("bpb", made / "run" / "checkpoints" / f"step-{n:07d}")["bits_per_byte"] for n in (2, 4)]
    default = result("bpb", made / "run")
    assert steps[1] == default["bits_per_byte"] != steps[0]
    own = save_model(load_model(made / "run" / "model"), tmp_path / "own")
    assert "has no tokenizer.json; name that of the model with --tokenizer" in refused("bpb", own)
    tokenizer = ("--tokenizer", made / "run" / "tokenizer.json")
    assert "name text with --data" in refused("bpb", own, *tokenizer)
    text = ("--data", made / "text", "--max-bytes", "4000", "--seq-len", "16")
    assert result("bpb", own, *tokenizer, *text)["bits_per_byte"] == default["bits_per_byte"]


@pytest.mark.parametrize("command", ["bpb", "core"])
def test_a_model_that_sees_the_future_is_not_scored(command, made, refused, monkeypatch, tmp_path):
    def sees_all(q, k, v, window=None, key_mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(attention, "causal_attention", sees_all)
    more = () if command == "bpb" else (write_tiny_bundle(tmp_path / "bundle"), "--out", tmp_path / "out")
    assert "the model is not causal" in refused(command, made / "run", *more)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bpb", "nowhere"), "nowhere is no folder"),
        (("bpb", "arms"), "holds 2 models; name one"),
        (("bpb", "text"), "holds no model"),
        (("bpb", "run", "--seq-len", "0"), "seq_len is 0"),
        (("bpb", "run", "--max-bytes", "0"), "max_bytes is 0"),
        (("bpb", "run", "--batch-size", "0"), "batch_size 0"),
        (("bpb", "run", "--whole"), "--whole scores all of a file or folder of text; name one"),
        (("bpb", "run", "--data", "hf:climbmix"), "must be prepared first"),
        (("bpb", "run", "--data", "nowhere"), "does not exist"),
        (("bpb", "arms/pre_norm", "--freeze-scale"), "this pre_norm model has scale 'none'"),
        (("core", "run", "text"), "core.yaml is missing"),
        (("core", "run", "text", "--resume"), "--resume needs --out"),
        (("core", "run", "text", "--data", "text"), "--data is the text of --freeze-scale"),
        (("core", "run", "text", "--max-tokens", "1"), "--max-tokens 1"),
    ],
)
def test_bad_input_is_one_line(arguments, message, made, refused, monkeypatch):
    monkeypatch.chdir(made)
    assert message in refused(*arguments)
    assert not (made / "runs").exists()


def test_a_damaged_checkpoint_is_one_line(made, refused, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(made / "run", copy)
    weights = copy / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    assert "is damaged" in refused("bpb", copy)
    (copy / "model" / "config.json").write_text("{")
    assert "is damaged" in refused("bpb", copy)


def write_tiny_bundle(folder):
    (folder / "eval_data").mkdir(parents=True)
    examples = {
        "choose": [{"query": f"is {i} é?", "choices": ["it is", "no, not so"], "gold": i % 2} for i in range(12)],
        "say": [{"context": f"a stream of {i}", "continuation": "é 漢"} for i in range(9)],
    }
    kinds = {"choose": "multiple_choice", "say": "language_modeling"}
    tasks = [
        {"label": label, "dataset_uri": f"{label}.jsonl", "num_fewshot": [3], "icl_task_type": kind}
        for label, kind in kinds.items()
    ]
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nchoose,50\nsay,0\n")
    for label, rows in examples.items():
        (folder / "eval_data" / f"{label}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_core_writes_a_table_and_answers(made, tmp_path, capsys):
    bundle, out = write_tiny_bundle(tmp_path / "bundle"), tmp_path / "out"
    arguments = ["evaluate", "core", str(made / "run"), str(bundle), "--out", str(out), "--device", "cpu"]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    for part in ("choose", "multiple choice", "language modeling", "guessing", "CORE ", "mean of 2 centred"):
        assert part in printed.out
    assert "21 of 21 examples" in printed.err
    record = json.loads((out / "core.json").read_text())
    assert record["result"]["choose"]["n"] == 12 and record["frozen_log_norm"] is None
    assert record["max_tokens"] == 64 and (out / "answers.jsonl").exists()
    assert run(arguments) == 2 and "--force" in capsys.readouterr().err
    assert run([*arguments, "--force", "--max-per-task", "3"]) == 2
    assert "a cap of 3 leaves no example beside its 3 shots" in capsys.readouterr().err
    assert (out / "core.json").exists()  # a refused run deletes nothing
    assert run([*arguments, "--force", "--max-per-task", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["choose"]["n"] == 5


def test_core_goes_on_after_an_interrupt(made, tmp_path, capsys, monkeypatch):
    from nagnet.evaluation import rows

    bundle, out, plain, calls = write_tiny_bundle(tmp_path / "bundle"), tmp_path / "out", rows.score_targets, []

    def interrupted(model, inputs, *rest):
        calls.append(len(inputs))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(model, inputs, *rest)

    monkeypatch.setattr(rows, "score_targets", interrupted)
    arguments = ["evaluate", "core", str(made / "run"), str(bundle), "--batch-tokens", "130", "--device", "cpu"]
    assert run([*arguments, "--resume", "--out", str(out)]) == 130
    assert "of 21 answers are in" in capsys.readouterr().err and not (out / "core.json").exists()
    assert run([*arguments, "--resume", "--out", str(out)]) == 0
    assert "answers are there already" in capsys.readouterr().out
    resumed_calls = len(calls) - 4
    assert run([*arguments, "--out", str(tmp_path / "fresh")]) == 0
    assert resumed_calls < len(calls) - 4 - resumed_calls
    fresh, resumed = (json.loads((folder / "core.json").read_text()) for folder in (tmp_path / "fresh", out))
    assert fresh == resumed
    capsys.readouterr()
    assert run([*arguments, "--resume", "--out", str(out), "--freeze-scale"]) == 2
    assert "is of another evaluation: frozen_log_norm differ" in capsys.readouterr().err


def test_core_compiled(made, result, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(ops, "compiler_works", lambda: True)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda model, dynamic: compiled.append(dynamic))
    bundle = write_tiny_bundle(tmp_path / "bundle")
    plain = result("core", made / "run", bundle, "--out", tmp_path / "plain")
    assert not compiled  # too little for it
    found = result("core", made / "run", bundle, "--compile", "always", "--out", tmp_path / "compiled")
    assert compiled == [True] and found["compiled"] and found["result"] == plain["result"]
    # 12 examples of 22 characters (two of them 23) and 9 of 16, each with three shots; 2 blocks x 16.
    monkeypatch.setattr(evaluate_core, "COMPILED_FROM", 4 * (12 * 22 + 2 + 9 * 16) / 4 * 2 * 16)
    assert result("core", made / "run", bundle, "--out", tmp_path / "large")["compiled"]
    assert not result("core", made / "run", bundle, "--out", tmp_path / "less", "--max-per-task", "6")["compiled"]
    assert not result("core", made / "run", bundle, "--out", tmp_path / "off", "--compile", "never")["compiled"]
    skips = ["--skip-threshold", "0.1"]
    assert not result("core", made / "run", bundle, "--out", tmp_path / "skips", *skips)["compiled"]
    assert compiled == [True] * 2
    monkeypatch.setattr(evaluate_core, "COMPILED_FROM", 1e9)
    # Answers of an older version, which could not compile, are gone on with, but never compiled ones.
    answers = tmp_path / "plain" / "answers.jsonl"
    first, *rest = answers.read_text().splitlines()
    identity = json.loads(first)
    del identity["compiled"]
    answers.write_text("\n".join([json.dumps(identity), *rest, ""]))
    arguments = ["evaluate", "core", str(made / "run"), str(bundle), "--device", "cpu", "--resume", "--out"]
    assert run([*arguments, str(tmp_path / "plain")]) == 0
    assert run([*arguments, str(tmp_path / "compiled")]) == 2


def test_core_with_one_scale_for_all_tokens(made, result, tmp_path):
    bundle = write_tiny_bundle(tmp_path / "bundle")
    found = result("core", made / "run", bundle, "--freeze-scale", "--out", tmp_path / "a")
    mean = result("bpb", made / "run", "--freeze-scale")["frozen_log_norm"]
    assert found["frozen_log_norm"] == pytest.approx(mean, abs=1e-4)
    own = result("core", made / "run", bundle, "--out", tmp_path / "b")["result"]
    assert found["result"]["say"] == own["say"]  # the likeliest token is the same at every scale


@pytest.mark.slow
def test_two_processes_find_the_number_of_one(made, result):
    single = result("bpb", made / "run", "--data", made / "text", "--whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "nagnet"]
    command += ["evaluate", "bpb", made / "run", "--data", made / "text", "--whole", "--json", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    both = json.loads(done.stdout)
    assert both["processes"] == 2 and both["text_hash"] == single["text_hash"]
    assert both["bits_per_byte"] == pytest.approx(single["bits_per_byte"], rel=EXACT)
