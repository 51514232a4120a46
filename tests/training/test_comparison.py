"""Arms of one seed: same batches, same FLOPs, everything written, and stopped or diverged without harm."""

import json
import math
import os
import shutil
import signal

import pytest
import torch

from nagnet.diagnostics.confidence import ConfidenceSummary
from nagnet.models.checkpoint import load_model
from nagnet.recipes import RECIPES
from nagnet.training import comparison as module
from nagnet.training.arms import build_arm
from nagnet.training.budget import resolve_budget
from nagnet.training.comparison import Comparison, Job, read_result, run_job
from nagnet.training.loop import NonFiniteLoss, Trainer
from nagnet.training.metrics import read_metrics

ARMS = ("norm_agnostic", "pre_norm")


@pytest.fixture
def job(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(module, "CONFIDENCE_ROWS", 4)
    return Job("seed 0", tmp_path / "seed", {arm: build_arm(tiny_config, arm) for arm in ARMS})


def run(job, text):
    run_job(job, text, echo=lambda line: None)


def spy_on_steps(monkeypatch, before):
    """Calls ``before(trainer)`` ahead of every step of any trainer."""
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda trainer: (before(trainer), original(trainer))[1])


def test_arms_spend_the_same_flops_on_the_same_batches(job, tiny_text, tiny_config, monkeypatch):
    seen, order = {arm: {} for arm in ARMS}, []
    original = Trainer.batch

    def batch(trainer, step):
        result = original(trainer, step)
        seen[trainer.name][step] = result[0]
        return result

    spy_on_steps(monkeypatch, lambda trainer: order.append(trainer.name))
    monkeypatch.setattr(Trainer, "batch", batch)
    run(job, tiny_text)
    shared = seen[ARMS[0]].keys() & seen[ARMS[1]].keys()
    assert len(shared) > 8
    for step in shared:
        assert torch.equal(seen[ARMS[0]][step], seen[ARMS[1]][step])
    for arm in ARMS:
        result = read_result(job.folder, arm)
        assert result["steps"] == len([name for name in order if name == arm]) > 8
        assert abs(result["flops"] - tiny_config.flops) <= result["flops"] / result["steps"] / 2
    assert {*order[:2]} == {*order[2:4]} == {*ARMS}, "interleaved"


def test_sequential_arms_train_one_after_another_with_the_same_result(job, tiny_text, tmp_path, monkeypatch):
    run(job, tiny_text)
    order = []
    spy_on_steps(monkeypatch, lambda trainer: order.append(trainer.name))
    other = Job(job.label, tmp_path / "other", job.arms, sequential=True)
    run(other, tiny_text)
    assert order == sorted(order, key=ARMS.index)
    for arm in ARMS:
        assert read_result(job.folder, arm)["documents"] == read_result(other.folder, arm)["documents"]


@pytest.mark.parametrize("name", list(RECIPES))
def test_arms_of_every_recipe_agree_within_half_a_percent_of_flops(name):
    config = RECIPES[name]()
    spent = [resolve_budget(build_arm(config, arm)).flops for arm in ARMS]
    assert abs(spent[0] / spent[1] - 1) < 0.005


def test_a_finished_job_leaves_results_metrics_and_models(job, tiny_text):
    run(job, tiny_text)
    rows = read_metrics(job.folder / "metrics.jsonl")
    assert (job.folder / "tokenizer.json").is_file()
    for arm in ARMS:
        result = read_result(job.folder, arm)
        own = [row for row in rows if row["arm"] == arm]
        assert len(own) == result["steps"] and result["finished"] and result["diverged"] is None
        assert sum("health" in row for row in own) == math.ceil(result["steps"] / 4)
        assert 1.0 < result["bits_per_byte"] < 8.0
        assert result["tokens"] == result["steps"] * 128
        assert result["peak_memory_bytes"] > 0 and result["median_step_seconds"] > 0
        assert result["sample"].startswith("def ") and result["versions"]["torch"].startswith("2.")
        confidence = ConfidenceSummary.from_dict(result["confidence"])
        assert 0 < confidence.negative_entropy.auroc < 1 and confidence.n_tokens == 4 * 64
        model = load_model(job.folder / arm)
        assert model.config == job.arms[arm].model
    health = read_result(job.folder, "norm_agnostic")["health"]
    assert health["updates"] == 4 and health["dead_updates"] == [] and len(health["mean_gain"]) == 4
    assert read_result(job.folder, "pre_norm")["health"] is None


def test_a_trial_keeps_its_score_and_no_model(job, tiny_text, tmp_path):
    trial = Job("trial", tmp_path / "trial", {"arm": job.arms["pre_norm"]}, trial=True)
    run(trial, tiny_text)
    run(job, tiny_text)
    result = read_result(trial.folder, "arm")
    assert result["bits_per_byte"] == read_result(job.folder, "pre_norm")["bits_per_byte"]
    assert "confidence" not in result and not (trial.folder / "arm" / "model.safetensors").exists()


def test_jobs_survive_json_and_know_what_is_missing(job, tiny_text):
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert job.missing() == list(ARMS)
    run(job, tiny_text)
    assert job.missing() == []
    other = Job(job.label, job.folder, {arm: config.replace(seed=1) for arm, config in job.arms.items()})
    assert other.missing() == list(ARMS), "results of another config are no results of this"


def test_what_is_missing_is_trained_again_from_its_start(job, tiny_text, monkeypatch):
    run(job, tiny_text)
    before = (job.folder / "norm_agnostic" / "result.json").read_bytes()
    complete = read_result(job.folder, "pre_norm")
    result = job.folder / "pre_norm" / "result.json"
    result.write_text(json.dumps(complete | {"finished": False, "trained": False}))
    trained = set()
    spy_on_steps(monkeypatch, lambda trainer: trained.add(trainer.name))
    run(job, tiny_text)
    assert trained == {"pre_norm"}
    assert (job.folder / "norm_agnostic" / "result.json").read_bytes() == before
    assert read_result(job.folder, "pre_norm")["documents"] == complete["documents"]
    rows = read_metrics(job.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["arm"] == "pre_norm"] == list(range(1, complete["steps"] + 1))


def test_what_is_trained_but_not_scored_is_scored_alone(job, tiny_text, monkeypatch):
    run(job, tiny_text)
    complete = read_result(job.folder, "pre_norm")

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    for arm in ARMS:
        shutil.rmtree(job.folder / arm)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "score_documents", interrupt)
        run(job, tiny_text)
    assert job.missing() == list(ARMS)
    spy_on_steps(monkeypatch, lambda trainer: pytest.fail("trained again"))
    run(job, tiny_text)
    assert job.missing() == []
    again = read_result(job.folder, "pre_norm")
    for name in ("documents", "bits_per_byte", "confidence", "sample", "tokens", "steps"):
        assert again[name] == complete[name]


def test_interrupt_leaves_loadable_models_at_equal_shares(job, tiny_text, monkeypatch):
    def interrupt(trainer):
        if trainer.name == "pre_norm" and trainer.n_done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    spy_on_steps(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(job, tiny_text)
    steps = [read_result(job.folder, arm)["steps"] for arm in ARMS]
    assert max(steps) - min(steps) <= 1 and 3 <= min(steps) < 8
    for arm in ARMS:
        load_model(job.folder / arm)
        assert not read_result(job.folder, arm)["finished"]
    assert job.missing() == list(ARMS)


def test_an_arm_that_diverges_does_not_stop_the_others(job, tiny_text, monkeypatch):
    def diverge(trainer):
        if trainer.name == "norm_agnostic" and trainer.n_done == 3:
            raise NonFiniteLoss("norm_agnostic: the loss is nan at step 3", 3, math.nan, None)

    spy_on_steps(monkeypatch, diverge)
    run(job, tiny_text)
    diverged, other = (read_result(job.folder, arm) for arm in ARMS)
    assert diverged["finished"] and diverged["bits_per_byte"] is None and "nan at step 3" in diverged["diverged"]
    assert diverged["steps"] == 3
    assert other["bits_per_byte"] > 1 and other["diverged"] is None
    assert job.missing() == []


def test_the_alarm_is_counted(job, tiny_text, monkeypatch):
    comparison = Comparison(job, ["norm_agnostic"], tiny_text, echo=lambda line: None)
    update = next(module for module in comparison.arms["norm_agnostic"].trainer.model.stream.updates)
    spy_on_steps(monkeypatch, lambda trainer: update.alpha.data.zero_())
    comparison.train()
    health = comparison.arms["norm_agnostic"].result()["health"]
    assert health["dead_updates"] == [1]
    assert health["alarms"] == health["alarms_ever"] == ["update 1 (attention of block 1)"]
