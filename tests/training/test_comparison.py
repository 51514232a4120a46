"""A matched pair from text to summary: same batches, same FLOPs, everything written."""

import dataclasses
import json
import os
import signal
import sysconfig
from pathlib import Path

import pytest
import torch

from nagnet.data.corpus import read_corpus
from nagnet.errors import UserError
from nagnet.models.checkpoint import load_model
from nagnet.models.config import ModelConfig
from nagnet.recipes import RECIPES
from nagnet.training import comparison as module
from nagnet.training.budget import resolve_budget
from nagnet.training.comparison import Comparison, build_arms, undeclared_differences
from nagnet.training.comparison_report import write_comparison_report
from nagnet.training.config import RunConfig

MODEL = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=320, max_seq_len=64, n_directions=3)
RUN = RunConfig(model=MODEL, flops=1.5e8, batch_size=2, seq_len=64, compile=False, eval_bytes=20_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("[a-d]*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return read_corpus(folder)


@pytest.fixture
def comparison(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 5)
    out = tmp_path / "run"
    out.mkdir()
    arms = build_arms(MODEL, ["norm_agnostic", "pre_norm"])
    return Comparison("tiny", RUN, arms, corpus, out, torch.device("cpu"), echo=lambda line: None)


def test_arms_spend_the_same_flops_on_the_same_batches(comparison):
    seen = {name: [] for name in comparison.trainers}
    for name, trainer in comparison.trainers.items():
        original = trainer.batch
        trainer.batch = lambda step, name=name, original=original: (
            seen[name].append(original(step)[0].clone()),
            original(step),
        )[1]
    comparison.train()
    a, b = comparison.trainers.values()
    assert a.finished and b.finished
    for trainer in (a, b):
        assert abs(trainer.flops - RUN.flops) <= trainer.flops_per_step / 2
    for first, second in zip(*seen.values(), strict=False):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", list(RECIPES))
def test_arms_of_every_recipe_agree_within_half_a_percent_of_flops(name):
    run = RECIPES[name]()
    spent = []
    for model in build_arms(run.model, ["norm_agnostic", "pre_norm"]).values():
        spent.append(resolve_budget(run, model).flops)
    assert abs(spent[0] / spent[1] - 1) < 0.005


def test_a_finished_run_leaves_summary_report_metrics_and_models(comparison):
    comparison.train()
    scores = comparison.evaluate()
    summary = comparison.summary(scores)
    comparison.write_summary(summary)
    report = write_comparison_report(comparison, summary)
    stored = json.loads((comparison.out / "summary.json").read_text())
    for name, arm in stored["arms"].items():
        assert 1.0 < arm["bits_per_byte"] < 8.0
        assert arm["tokens"] == arm["steps"] * RUN.tokens_per_step
        assert arm["peak_memory_bytes"] > 0 and arm["median_step_seconds"] > 0
        assert arm["sample"].startswith("def ")
        model = load_model(comparison.out / name)
        tokens = torch.arange(40).view(1, 40)
        assert torch.equal(model(tokens), comparison.trainers[name].model(tokens))
    (difference,) = stored["differences"]
    assert difference["low"] <= difference["bits_per_byte"] <= difference["high"]
    arms = stored["arms"]
    expected = arms["norm_agnostic"]["bits_per_byte"] - arms["pre_norm"]["bits_per_byte"]
    assert difference["bits_per_byte"] == pytest.approx(expected, abs=1e-9)
    assert stored["corpus"]["hash"] == comparison.corpus.content_hash
    assert stored["versions"]["torch"].startswith("2.")
    rows = [json.loads(line) for line in (comparison.out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == sum(arm["steps"] for arm in arms.values())
    assert "<svg" in report.read_text() or "data:image" in report.read_text()
    assert {path.stem for path in (comparison.out / "figures").glob("*.png")} == {
        "loss",
        "norm_by_depth",
        "rotation",
        "gain",
        "confidence",
    }


def test_interrupt_leaves_loadable_models_at_equal_flops(comparison):
    trainer = comparison.trainers["pre_norm"]
    original = trainer.step

    def step():
        if trainer.n_done == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original()

    trainer.step = step
    comparison.train()
    assert comparison.interrupted
    done = [t.n_done for t in comparison.trainers.values()]
    assert max(done) - min(done) <= 1 and 3 <= min(done) < trainer.n_steps
    for name in comparison.trainers:
        load_model(comparison.out / name)
    summary = comparison.summary({})
    assert summary["interrupted"] and summary["differences"] == []


def test_undeclared_differences_are_named_and_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path))
    arms = build_arms(MODEL, ["norm_agnostic", "pre_norm"])
    assert undeclared_differences(arms) == []
    arms["pre_norm"] = dataclasses.replace(arms["pre_norm"], qk_gain=1.0)
    lines = []
    with pytest.raises(UserError, match="qk_gain"):
        Comparison("tiny", RUN, arms, corpus, tmp_path, torch.device("cpu"), echo=lines.append)
    assert lines == ["arms differ in qk_gain: norm_agnostic 1.2, pre_norm 1.0"]
    Comparison("tiny", RUN, arms, corpus, tmp_path, torch.device("cpu"), echo=lines.append, allow_differences=True)


@pytest.mark.parametrize("names", [["pre_norm"], ["pre_norm", "pre_norm"], []])
def test_a_comparison_needs_two_different_arms(names):
    with pytest.raises(UserError, match="two or more"):
        build_arms(MODEL, names)
