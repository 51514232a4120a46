"""nagnet train and preflight from the command line: what they print, write and refuse."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from nagnet.cli.application import run
from nagnet.models.checkpoint import load_model
from nagnet.recipes import RECIPES
from nagnet.training.metrics import read_metrics

SMALL = [
    *("model.d_model=16", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=270", "model.max_seq_len=16"),
    *("model.n_directions=3", "steps=6", "batch_size=4", "seq_len=16", "compile=false", "dtype=float32"),
    *("eval_bytes=600", "health_interval=2", "eval_interval=3", "checkpoint_interval=2", "log_interval=1"),
]


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"a stream of {number} words that turns and turns again " * 12)
    return folder


def _train(text, out, *more, changes=()):
    arguments = ["train", "stdlib-tiny", *SMALL, *changes, "--data", str(text), "--device", "cpu", "--out", str(out)]
    return run([*arguments, *more])


def test_trains_and_says_what_it_did(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert _train(text, out) == 0
    printed = capsys.readouterr()
    assert "norm_agnostic: " in printed.out and " parameters, 6 steps of 64 tokens" in printed.out
    for role, optimizer in (("matrix", "Muon"), ("gate", "AdamW"), ("head", "AdamW")):
        assert any(role in line and optimizer in line for line in printed.out.splitlines())
    assert "finished: 6 steps, 384 tokens" in printed.out and "MFU unknown" in printed.out
    assert "left" in printed.err
    assert {"run.json", "metrics.jsonl", "tensorboard", "checkpoints", "model", "summary.json", "tokenizer.json"} <= {
        entry.name for entry in out.iterdir()
    }
    assert load_model(out / "model").config.n_layers == 2


def test_changes_may_stand_between_options(text, tmp_path, capsys):
    assert _train(text, tmp_path / "run", "model.residual=pre_norm", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["model"]["residual"] == "pre_norm"


def test_json_is_alone_on_standard_output(text, tmp_path, capsys):
    arguments = ("--json", "--trackers", "none", "--peak-flops", "1e9", "--dollars-per-hour", "2")
    assert _train(text, tmp_path / "run", *arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] and 0 < summary["mfu"] < 10
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_stop_by_signal_is_resumed_by_the_same_command(text, tmp_path, capsys, monkeypatch):
    from nagnet.training.loop import Trainer

    out, plain = tmp_path / "run", Trainer.step

    def stopped(trainer):
        if trainer.n_done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "step", stopped)
    assert _train(text, out, "--resume") == 130
    assert "--resume goes on" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "step", plain)
    assert _train(text, out, "--resume") == 0
    assert "3 of 6 steps done" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ((), ("optimizer.gate_rl=1",), "did you mean 'optimizer.gate_lr'"),
        ((), ("flops=1e9",), "2 budgets"),
        ((), ("batch_size=5", "micro_batches=2"), "micro_batches 2 does not divide batch_size 5"),
        ((), ("model.vocab_size=300000",), "vocab"),
        (("--trackers", "tensorbord"), (), "unknown tracker tensorbord"),
        (("--peak-flops", "-1"), (), "peak_flops is -1"),
    ],
    ids=["unknown key", "two budgets", "micro-batches", "vocabulary", "tracker", "peak"],
)
def test_bad_input_is_one_line_and_writes_nothing(text, tmp_path, capsys, more, changes, message):
    assert _train(text, tmp_path / "run", *more, changes=changes) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nagnet: error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_folder(text, capsys):
    assert run(["train", "stdlib-tiny", *SMALL, "--data", str(text), "--resume"]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_folder_with_a_run_is_not_overwritten(text, tmp_path, capsys):
    assert _train(text, tmp_path / "run") == 0
    assert _train(text, tmp_path / "run") == 2
    assert "another run" in capsys.readouterr().err


def test_data_that_must_be_prepared(tmp_path, capsys):
    assert run(["train", "walkthrough-64x640", "--out", str(tmp_path / "run")]) == 2
    assert "nagnet data prepare hf:climbmix" in capsys.readouterr().err


def test_prepared_shards_train_alike(text, tmp_path, capsys):
    prepared = tmp_path / "prepared"
    assert run(["data", "prepare", str(text), str(prepared), "--vocab-size", "270", "--held-out-bytes", "2000"]) == 0
    assert _train(prepared, tmp_path / "run") == 0
    assert "finished: 6 steps" in capsys.readouterr().out


@pytest.fixture
def tiny_recipe(monkeypatch, text):
    from nagnet.training.overrides import override

    config = override(RECIPES["stdlib-tiny"](), [*SMALL, f"data={text}"])
    monkeypatch.setitem(RECIPES, "test-tiny", lambda: config)


def test_preflight_of_a_healthy_recipe(tiny_recipe, capsys):
    arguments = ("--steps", "1", "--device", "cpu", "--dollars-per-hour", "3", "--peak-flops", "1e9")
    assert run(["preflight", "test-tiny", *arguments]) == 0
    out = capsys.readouterr().out
    for part in ("peak memory", "tokens/s", "MFU", "$", "mean gain by quarter", "nothing is wrong"):
        assert part in out


def test_preflight_finds_shut_gates(tiny_recipe, capsys, monkeypatch):
    from nagnet.nn.residual import NormAgnosticResidual

    plain = NormAgnosticResidual.reset_parameters

    def shut(update, generator=None):
        plain(update, generator)
        if update.update_index == 3:
            with torch.no_grad():
                update.alpha.fill_(1e-4)

    monkeypatch.setattr(NormAgnosticResidual, "reset_parameters", shut)
    arguments = ("--steps", "0", "--device", "cpu", "--json")
    changes = ("steps=40", "optimizer.gate_lr=0", "health_interval=1")
    assert run(["preflight", "test-tiny", *changes, *arguments]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["healthy"] and result["scaled_down"]["alarms_ever"] == ["update 3 (attention of block 2)"]


def test_preflight_stops_at_what_is_not_finite(tiny_recipe, capsys):
    arguments = ("--steps", "0", "--device", "cpu")
    changes = ("optimizer.embedding_lr=1e38", "optimizer.unit_head_lr=1e38", "steps=20")
    assert run(["preflight", "test-tiny", *changes, *arguments]) == 1
    printed = capsys.readouterr().out
    assert "preflight: loss is" in printed or "preflight: gradient norm is" in printed
    assert "--out FOLDER keeps its post-mortem" in printed


def test_preflight_says_what_does_not_fit(tiny_recipe, capsys, monkeypatch):
    from nagnet.training.loop import Trainer

    def full(trainer):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(Trainer, "step", full)
    assert run(["preflight", "test-tiny", "--scaled-steps", "0", "--device", "cpu"]) == 1
    assert "does not fit (CUDA out of memory); lower device_batch_size" in capsys.readouterr().out


def test_preflight_that_is_stopped_says_so(tiny_recipe, capsys, monkeypatch):
    from nagnet.training.loop import Trainer

    plain = Trainer.step

    def stopped(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "step", stopped)
    assert run(["preflight", "test-tiny", "--steps", "0", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")


def _torchrun(n, text, out, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--standalone"]
    if n == 1:
        command = [sys.executable]
    arguments = ["-m", "nagnet", "train", "stdlib-tiny", *SMALL, "--data", str(text), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments, "--out", str(out), *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(text, tmp_path, strategy):
    outs = {n: tmp_path / f"{n}" for n in (1, 2)}
    for n, out in outs.items():
        process = _torchrun(n, text, out, f"strategy={strategy}")
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        assert printed.count("finished: 6 steps") == 1
    one, two = (read_metrics(out) for out in outs.values())
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-5)
    assert one[-1]["bits_per_byte"] == pytest.approx(two[-1]["bits_per_byte"], rel=1e-5)
    # What two processes saved, one goes on with.
    process = _torchrun(1, text, outs[2], f"strategy={strategy}", "--resume")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "6 of 6 steps done" in printed


@pytest.mark.slow
def test_a_process_that_dies_stops_the_others(text, tmp_path):
    out = tmp_path / "run"
    process = _torchrun(2, text, out, "--timeout", "20", "steps=100000")
    deadline = time.monotonic() + 200
    while not (out / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (out / "checkpoints").exists()
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(workers.split()[-1]), signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "another process of this run died" in printed or "SIGKILL" in printed


def test_help_is_quick_to_read(capsys):
    for command in ("train", "preflight"):
        with pytest.raises(SystemExit):
            run([command, "--help"])
        assert "KEY=VALUE" in capsys.readouterr().out
