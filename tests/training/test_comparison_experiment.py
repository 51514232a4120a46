"""Whole comparisons: seeds, processes, going on after a stop, matching by time, tuning, the report."""

import json
import os
import signal

import pytest
import torch

from nagnet.diagnostics.probed import probe_tokens
from nagnet.errors import UserError
from nagnet.training import comparison
from nagnet.training import experiment as module
from nagnet.training.budget import resolve_budget
from nagnet.training.comparison import pack_held_out, read_result
from nagnet.training.comparison_report import mean_metrics, write_comparison_report
from nagnet.training.loop import Trainer
from nagnet.training.metrics import read_metrics
from nagnet.training.plan import Sweep

TIMES = ("seconds", "median_step_seconds", "step_seconds_quartiles", "peak_memory_bytes")


@pytest.fixture(scope="module")
def finished(tiny_plan, tiny_text, tmp_path_factory):
    """Two seeds, and their summary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SAMPLE_TOKENS", 3)
        out = tmp_path_factory.mktemp("finished")
        options = {"threads": 1, "echo": lambda line: None}
        experiment = module.Experiment(tiny_plan(n_seeds=2), tiny_text, out, torch.device("cpu"), **options)
        return experiment, experiment.run()


def apart_from_times(result):
    return {key: value for key, value in result.items() if key not in (*TIMES, "sample")}


def count_steps(monkeypatch):
    """(arm, seed) -> steps taken from now on, in this process."""
    steps: dict = {}
    original = Trainer.step

    def step(trainer):
        key = trainer.name, trainer.config.seed
        steps[key] = steps.get(key, 0) + 1
        return original(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    return steps


def test_seeds_are_paired_and_reported(finished, tiny_text):
    experiment, summary = finished
    assert json.loads((experiment.out / "summary.json").read_text()) == json.loads(json.dumps(summary))
    (row,) = summary["differences"]
    for seed, difference in enumerate(row["by_seed"]):
        a, b = (read_result(experiment.out / f"seed-{seed}", arm) for arm in ("norm_agnostic", "pre_norm"))
        assert difference == a["bits_per_byte"] - b["bits_per_byte"]
        assert a["seed"] == b["seed"] == seed
    assert row["by_seed"][0] != row["by_seed"][1]
    assert row["low"] < row["bits_per_byte"] < row["high"]
    assert summary["corpus"]["hash"] == tiny_text.tokens.content_hash
    report = write_comparison_report(experiment.out, summary, tiny_text, experiment.seed_folder, experiment.device)
    page = report.read_text()
    assert "Student&#39;s t over 2 seeds" in page and "AUROC" in page and "0, 0 of 4" in page
    figures = {path.stem for path in (experiment.out / "figures").glob("*.png")}
    assert figures == {"loss", "difference", "norm_by_depth", "rotation", "gain", "confidence"}


def test_losses_are_averaged_over_seeds(finished):
    experiment, summary = finished
    means = mean_metrics(summary, experiment.seed_folder)
    rows = [read_metrics(experiment.seed_folder(seed)) for seed in (0, 1)]
    first = [next(row["loss"] for row in of_seed if row["arm"] == "pre_norm") for of_seed in rows]
    assert means["pre_norm"][0]["loss"] == pytest.approx(sum(first) / 2)
    assert means["pre_norm"][-1]["tokens"] == rows[0][-1]["tokens"]


def test_one_seed_lies_in_the_folder_itself(tiny_plan, tiny_experiment):
    experiment = tiny_experiment(tiny_plan())
    summary = experiment.run()
    assert (experiment.out / "norm_agnostic" / "model.safetensors").is_file()
    assert (experiment.out / "metrics.jsonl").is_file()
    assert summary["differences"][0]["basis"] == "documents"


def test_an_interrupted_comparison_goes_on_with_what_is_missing(tiny_plan, tiny_experiment, monkeypatch):
    plan = tiny_plan(n_seeds=3)
    steps = count_steps(monkeypatch)
    whole = Trainer.step

    def interrupt(trainer):
        if trainer.config.seed == 1 and trainer.n_done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(trainer)

    monkeypatch.setattr(Trainer, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny_experiment(plan).run()
    stopped = json.loads((tiny_experiment(plan).out / "summary.json").read_text())
    assert stopped["interrupted"] and stopped["differences"] == []
    assert {seed for _, seed in steps} == {0, 1}
    steps.clear()
    monkeypatch.setattr(Trainer, "step", whole)
    summary = tiny_experiment(plan).run()
    assert {seed for _, seed in steps} == {1, 2}, "the finished seed is kept"
    assert not summary["interrupted"] and len(summary["differences"][0]["by_seed"]) == 3


def test_another_plan_does_not_go_on_in_the_folder(tiny_plan, tiny_experiment):
    tiny_experiment(tiny_plan()).run()
    with pytest.raises(UserError, match="another comparison: it differs in seeds"):
        tiny_experiment(tiny_plan(n_seeds=2)).run()


def test_processes_give_the_same_results(finished, tiny_plan, tiny_experiment, tmp_path):
    alone, _ = finished
    beside = tiny_experiment(tiny_plan(n_seeds=2), tmp_path / "beside", n_jobs=2, threads=1)
    beside.run()
    for key, result in alone.results().items():
        assert apart_from_times(beside.results()[key]) == apart_from_times(result)
    log = (tmp_path / "beside" / "seed-1" / "log.txt").read_text()
    assert "pre_norm" in log and "100%" in log


def test_arms_matched_by_time_get_steps_by_measured_times(tiny_plan, tiny_experiment, monkeypatch):
    seconds = {"norm_agnostic": 0.2, "pre_norm": 0.1}
    measured = []
    monkeypatch.setattr(module, "measure_step_seconds", lambda *_: measured.append(1) or seconds)
    experiment = tiny_experiment(tiny_plan(match="time", n_seeds=2))
    summary = experiment.run()
    base = resolve_budget(experiment.plan.arms["pre_norm"]).n_steps
    steps = {arm: facts["steps"] for arm, facts in summary["arms"].items()}
    assert steps == {"pre_norm": base, "norm_agnostic": round(base / 2)}
    assert summary["budget"]["match"] == "time"
    tiny_experiment(tiny_plan(match="time", n_seeds=2)).run()
    assert measured == [1], "measured once and kept"


def test_step_times_are_measured_interleaved(tiny_plan, tiny_text, tiny_experiment, monkeypatch):
    experiment = tiny_experiment(tiny_plan())
    order = []
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda trainer: (order.append(trainer.name), original(trainer))[1])
    seconds = module.measure_step_seconds(experiment.plan.arms, tiny_text, experiment.device, experiment.dtype)
    assert order[:4] == ["norm_agnostic", "pre_norm"] * 2
    assert all(0 < value < 10 for value in seconds.values())


def test_a_sweep_tunes_before_the_seeds(tiny_plan, tiny_experiment, monkeypatch):
    sweep = Sweep(None, "optimizer.matrix_lr", ("0.02", "1e-9"))
    plan = tiny_plan(sweeps=(sweep,), n_seeds=2, sweep_budget=6e7)
    steps = count_steps(monkeypatch)
    experiment = tiny_experiment(plan)
    summary = experiment.run()
    assert [row["chosen"] for row in summary["sweep"]["trials"]] == [True, False] * 2
    assert summary["sweep"]["flops"] == 6e7 and len(summary["sweep"]["trials"]) == 4
    assert {name for name, _ in steps} == {"arm", "norm_agnostic", "pre_norm"}
    assert steps["arm", 0] < 2 * steps["pre_norm", 0] + 4
    assert read_result(experiment.out / "seed-1", "pre_norm")["config"]["optimizer"]["matrix_lr"] == 0.02
    steps.clear()
    assert tiny_experiment(plan).run()["sweep"] == summary["sweep"]
    assert steps == {}


def test_undeclared_differences_are_named_and_refused(tiny_plan, tiny_experiment):
    plan = tiny_plan(changes=["pre_norm:model.qk_gain=1.0"])
    with pytest.raises(UserError, match="qk_gain"):
        tiny_experiment(plan)
    tiny_experiment(tiny_plan(changes=["pre_norm:model.qk_gain=1.0"], allow_differences=True))


def test_probe_documents_begin_with_bos(tiny_text):
    packed = pack_held_out(tiny_text)
    tokens = probe_tokens(packed, rows=5, length=16)
    assert tokens.shape == (5, 16) and set(tokens[:, 0].tolist()) == {packed.bos_id}
    firsts = packed.offsets[:2]
    assert tokens[:2, 1:].tolist() == [packed.tokens[first + 1 : first + 16].tolist() for first in firsts]
    assert tokens[2, 1:].tolist() == packed.tokens[firsts[0] + 16 : firsts[0] + 31].tolist()  # then the next parts
