"""A whole run: exact after stops and kills, honest about what changed, and nothing lost when it fails."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from nagnet.errors import UserError
from nagnet.models.checkpoint import load_model
from nagnet.models.config import ModelConfig
from nagnet.nn.skip import SkipPolicy
from nagnet.training.config import RunConfig
from nagnet.training.loop import NonFiniteLoss, Trainer
from nagnet.training.metrics import read_metrics
from nagnet.training.run import Run
from nagnet.training.text import open_text

CPU = torch.device("cpu")
TIMES = ("seconds", "pass_seconds", "optimizer_seconds", "tokens_per_second", "mfu")


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = ("norm", "stream", "grows", "with", "depth", "rotation", "keeps", "where", "it", "was", "token", "layer")
    draw = random.Random(0)
    for number in range(40):
        text = " ".join(draw.choice(words) for _ in range(60))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def config(text_folder, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("NAGNET_CACHE", str(text_folder.parent / "cache"))
    return RunConfig(
        model=ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=270, max_seq_len=16, n_directions=3),
        steps=20,
        batch_size=32,
        seq_len=16,
        compile=False,
        dtype="float32",
        data=str(text_folder),
        eval_bytes=600,
        log_interval=3,
        health_interval=4,
        eval_interval=7,
        checkpoint_interval=4,
    )


def _open(config, out, resume=False):
    text = open_text(config.data, config.model.vocab_size, config.eval_bytes)
    run = Run("test", config, text, out, CPU, torch.float32, trackers=(), echo=lambda line: None)
    assert not resume or run.resume()
    return run


def _stop_after(monkeypatch, run, step):
    """Sends this process SIGTERM during the step of that number."""
    plain = run.trainer.step

    def stepping():
        row = plain()
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(run.trainer, "step", stepping)


def _rows(out):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(out)]


def _optimizer_state(run):
    states = [optimizer.state_dict()["state"] for optimizer in run.trainer.optimizers]
    return [state[number] for state in states for number in sorted(state)]


def _assert_same(run, other):
    for (name, a), b in zip(run.trainer.model.state_dict().items(), other.trainer.model.state_dict().values()):  # noqa: B905
        assert torch.equal(a, b), name
    for a, b in zip(_optimizer_state(run), _optimizer_state(other), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert _rows(run.out) == _rows(other.out)


def test_two_stops_change_nothing(config, tmp_path, monkeypatch):
    whole = _open(config, tmp_path / "whole")
    assert whole.train()["finished"] and whole.stopped_by is None
    assert whole.trainer.loader.epoch_of(19) > whole.trainer.loader.epoch_of(0)  # across an epoch
    out = tmp_path / "stopped"
    for stop, resume in ((5, False), (13, True)):
        run = _open(config, out, resume)
        _stop_after(monkeypatch, run, stop)
        summary = run.train()
        assert not summary["finished"] and summary["steps"] == stop and run.stopped_by == signal.SIGTERM
    last = _open(config, out, resume=True)
    assert last.trainer.n_done == 13
    summary = last.train()
    assert summary["finished"] and summary["bits_per_byte"] == whole.bits_per_byte
    _assert_same(last, whole)
    exported = load_model(out / "model")
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), whole.trainer.model.parameters(), strict=True))


def test_a_signal_in_the_last_step_stops_nothing(config, tmp_path, monkeypatch):
    run = _open(config, tmp_path / "run")
    _stop_after(monkeypatch, run, run.trainer.n_steps)
    assert run.train()["finished"] and run.stopped_by is None


def test_a_finished_run_resumes_to_nothing(config, tmp_path):
    _open(config, tmp_path / "run").train()
    rows = _rows(tmp_path / "run")
    assert _open(config, tmp_path / "run", resume=True).train()["finished"]
    assert _rows(tmp_path / "run") == rows


def test_rows_say_what_happened(config, tmp_path):
    run = _open(config, tmp_path / "run")
    summary = run.train()
    rows = read_metrics(run.out)
    assert [row["step"] for row in rows] == [3, 4, 6, 7, 8, 9, 12, 14, 15, 16, 18, 20]
    assert [row["step"] for row in rows if "health" in row] == [4, 8, 12, 16, 20]
    assert [row["step"] for row in rows if "bits_per_byte" in row] == [7, 14, 20]
    assert rows[-1]["bits_per_byte"] == summary["bits_per_byte"]
    assert rows[0]["loss"] > rows[-1]["loss"] and rows[-1]["grad_norm"]["total"] > 0
    assert json.loads((run.out / "summary.json").read_text())["tokens"] == 20 * 32 * 16
    assert len(run.checkpoints.steps()) <= 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer.gate_lr": 0.5}, "optimizer.gate_lr"),
        ({"steps": 30}, "steps"),
        ({"model.n_layers": 3}, "n_layers"),
    ],
    ids=lambda value: str(value),
)
def test_resume_names_what_changed(config, tmp_path, changes, named):
    from nagnet.training.overrides import override

    run = _open(config.replace(steps=4), tmp_path / "run")
    run.train()
    changed = override(config.replace(steps=4), [f"{key}={value}" for key, value in changes.items()])
    with pytest.raises(UserError, match=named):
        _open(changed, tmp_path / "run", resume=True)


def test_resume_refuses_other_text(config, tmp_path):
    _open(config.replace(steps=4), tmp_path / "run").train()
    other = tmp_path / "text"
    other.mkdir()
    for number in range(20):
        (other / f"{number}.txt").write_text("another text altogether, much longer than it was " * 9)
    with pytest.raises(UserError, match="text"):
        _open(config.replace(steps=4, data=str(other)), tmp_path / "run", resume=True)


def test_what_may_change_may_change(config, tmp_path):
    _open(config.replace(steps=4), tmp_path / "run").train()
    changed = config.replace(steps=4, log_interval=1, micro_batches=2, keep_checkpoints=1)
    assert _open(changed, tmp_path / "run", resume=True).trainer.finished


def test_a_loss_that_is_not_finite_leaves_a_post_mortem_and_the_checkpoint(config, tmp_path, monkeypatch):
    run = _open(config, tmp_path / "run")
    plain = Trainer.batch

    def poisoned(trainer, step):
        if step == 6:
            with torch.no_grad():
                trainer.model.blocks[1].mlp.out_proj.weight.fill_(torch.inf)
        return plain(trainer, step)

    monkeypatch.setattr(Trainer, "batch", poisoned)
    with pytest.raises(NonFiniteLoss, match="block 2") as error:
        run.train()
    assert "post-mortem" in str(error.value)
    report = json.loads((run.out / "post-mortem" / "report.json").read_text())
    assert report["step"] == 6 and report["last_rows"][-1]["step"] == 6
    assert run.checkpoints.steps() == [4]


def _train_in_child(config, out, resume):
    torch.set_num_threads(1)
    _open(config, out, resume).train()


@pytest.mark.slow
def test_killed_twenty_times_at_random_nothing_is_lost(config, tmp_path):
    """The steps since the last checkpoint are done again; the end is that of a run that was never killed."""
    config = config.replace(steps=120, checkpoint_interval=3, log_interval=1, eval_interval=0)
    whole = _open(config, tmp_path / "whole")
    whole.train()
    out, context, draw = tmp_path / "killed", multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["nagnet.training.run"])  # torch is imported once, not twenty times
    kills = 0
    for _ in range(200):
        resume = _open(config, out).checkpoints.latest() is not None
        if not resume:
            for leftover in ("metrics.jsonl", "run.json"):
                (out / leftover).unlink(missing_ok=True)
        before = _open(config, out).checkpoints.steps()
        child = context.Process(target=_train_in_child, args=(config, out, resume))
        child.start()
        if kills < 20:
            deadline = time.monotonic() + 120
            while child.is_alive() and time.monotonic() < deadline:  # until it trains; then for a random while
                if (out / "metrics.jsonl").exists() and _open(config, out).checkpoints.steps() != before:
                    break
                time.sleep(0.01)
            time.sleep(draw.random() * 0.1)
            if child.is_alive():
                child.kill()
                kills += 1
        child.join()
        after = _open(config, out).checkpoints.steps()
        assert not before or after[-1] >= before[-1]
        if child.exitcode == 0:
            break
    assert kills == 20
    last = _open(config, out, resume=True)
    assert last.trainer.finished
    _assert_same(last, whole)


@pytest.fixture
def skipping(config):
    return config.replace(model=config.model.replace(skip=SkipPolicy(target_rate=0.2)))


def test_two_stops_change_nothing_of_what_is_skipped(skipping, tmp_path, monkeypatch):
    whole = _open(skipping, tmp_path / "whole")
    whole.train()
    for step in (7, 13):
        run = _open(skipping, tmp_path / "stopped", resume=step > 7)
        _stop_after(monkeypatch, run, step)
        run.train()
    run = _open(skipping, tmp_path / "stopped", resume=True)
    run.train()
    _assert_same(run, whole)
    row = _rows(whole.out)[-1]
    assert row["skip_rate"] > 0 and len(row["run_rates"]) == 4


def test_a_model_of_the_full_depth_is_trained_on_with_skipping(config, skipping, tmp_path):
    first = _open(config, tmp_path / "first")
    first.train()
    second = _open(skipping.replace(init_from=str(tmp_path / "first")), tmp_path / "second")
    found, expected = second.trainer.model.state_dict(), first.trainer.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(not tensor.any() for name, tensor in found.items() if name.endswith("skip_vector"))
    assert second.train()["finished"]
    with pytest.raises(UserError, match="do not fit"):
        _open(
            skipping.replace(init_from=str(tmp_path / "first"), model=skipping.model.replace(d_ff=32)), tmp_path / "x"
        )
    with pytest.raises(UserError, match="no folder"):
        _open(config.replace(init_from=str(tmp_path / "nowhere")), tmp_path / "x")


def test_a_checkpoint_from_before_there_was_skipping_resumes(config, tmp_path, monkeypatch):
    run = _open(config, tmp_path)
    _stop_after(monkeypatch, run, 7)
    run.train()
    path = run.checkpoints.latest()
    for file, keys in ((path / "config.json", ()), (path / "checkpoint.json", ("config", "model"))):
        values = inner = json.loads(file.read_text())
        for key in keys:
            inner = inner[key]
        del inner["skip"]
        if keys:
            del values["values"]["trainer"]["flops"]
            content = (path / "config.json").read_bytes()
            values["files"]["config.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        file.write_text(json.dumps(values))
    resumed = _open(config, tmp_path, resume=True)
    assert resumed.trainer.flops == 7 * resumed.trainer.flops_per_step
    assert resumed.train()["finished"]
