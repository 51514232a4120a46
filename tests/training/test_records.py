"""Records: the question before the run, small files, a README that is generated around what people wrote."""

import json
import math
import re
import shutil

import pytest
import torch

from nagnet.errors import UserError
from nagnet.training import comparison
from nagnet.training.comparison_report import write_comparison_report
from nagnet.training.experiment import Experiment
from nagnet.training.plan import Plan, Sweep
from nagnet.training.records import (
    BEGIN,
    END,
    begin_record,
    finish_record,
    read_protocol,
    thin,
    write_index,
    write_readme,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "records" / "0003-readout-by-rule"


@pytest.fixture(scope="module")
def made(tiny_plan, tiny_text, tmp_path_factory):
    """A record of two seeds with a sweep, its plan and summary."""
    out = tmp_path_factory.mktemp("made")
    folder = out / "records" / "0003-readout-by-rule"
    sweep = Sweep(None, "optimizer.matrix_lr", ("0.02", "0.01"))
    plan = tiny_plan(n_seeds=2, sweeps=(sweep,), sweep_budget=3e7)
    begin_record(folder, "Does it win?", "interval below 0", plan, "nagnet compare tiny --seeds 2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SAMPLE_TOKENS", 3)
        patch.setattr(comparison, "CONFIDENCE_ROWS", 4)
        experiment = Experiment(plan, tiny_text, out / "run", torch.device("cpu"), echo=lambda line: None)
        summary = experiment.run()
    write_comparison_report(experiment.out, summary, tiny_text, experiment.seed_folder, experiment.device)
    finish_record(folder, experiment.out, summary, experiment.seed_folder)
    return folder, plan, summary


@pytest.fixture
def finished(made, folder):
    """A copy of that record in this test's folder; its plan and summary."""
    source, plan, summary = made
    shutil.copytree(source, folder)
    return plan, summary


def test_the_question_stands_before_the_run(folder, tiny_plan):
    begin_record(folder, "Does it win?", "interval below 0", tiny_plan(n_seeds=3), "nagnet compare tiny")
    page = (folder / "README.md").read_text()
    assert "# 0003: readout by rule" in page and "## What we learned" in page
    assert "**Question.** Does it win?" in page and "interval below 0" in page
    assert "no results yet" in page and "Verdict" not in page
    assert "seeds 0, 1, 2" in page and "model.residual norm_agnostic (pre_norm)" in page
    assert Plan.from_dict(read_protocol(folder)["plan"]) == tiny_plan(n_seeds=3)


def test_a_finished_record_has_all_that_is_needed(finished, folder):
    plan, summary = finished
    stored = json.loads((folder / "summary.json").read_text())
    assert stored["differences"] == summary["differences"]
    for arm in plan.arms:
        for seed in plan.seeds:
            run = folder / "runs" / f"{arm}-seed-{seed}"
            config = json.loads((run / "config.json").read_text())
            assert config["seed"] == seed and config["optimizer"]["matrix_lr"] in (0.02, 0.01)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["step"] == summary["arms"][arm]["steps"]
    assert {path.name for path in (folder / "figures").iterdir()} == {
        "difference.png",
        "loss.png",
        "confidence.png",
        "gain.png",
    }
    assert not list(folder.rglob("*.safetensors"))
    page = (folder / "README.md").read_text()
    (row,) = summary["differences"]
    assert f"| {row['bits_per_byte']:+.4f} | {row['low']:+.4f} to {row['high']:+.4f} |" in page
    assert f"{row['verdict']} at 2 seeds" in page
    assert "--rerun records/0003-readout-by-rule" in page and "nagnet compare tiny --seeds 2" in page
    assert re.search(r"optimizer.matrix_lr \| (\*\*0.02: |0.02: )", page), "trials are listed"
    assert all((folder / link).is_file() for link in re.findall(r"\]\((figures/\w+\.png)\)", page))


def test_regeneration_keeps_what_people_wrote(finished, folder):
    path = folder / "README.md"
    generated = path.read_text()
    written = generated.replace("Not written yet.", "The twin was better tuned.").replace("# 0003: ", "# 3: ")
    path.write_text(written.replace("Does it win?", "spoilt"))
    write_readme(folder)
    assert path.read_text() == written
    path.write_text(written.replace(END, ""))
    with pytest.raises(UserError, match="lacks the marks"):
        write_readme(folder)
    assert BEGIN in path.read_text()


def test_a_record_is_the_same_from_its_own_plan(finished, folder, tiny_experiment, tmp_path):
    _, summary = finished
    again = tiny_experiment(Plan.from_dict(read_protocol(folder)["plan"]), tmp_path / "again").run()
    assert again["differences"] == summary["differences"]
    assert again["sweep"] == summary["sweep"]


def test_question_and_rule_never_change(folder, tiny_plan):
    begin_record(folder, "Does it win?", "interval below 0", tiny_plan(), "nagnet compare tiny")
    begin_record(folder, None, "interval below 0", tiny_plan(n_seeds=2), "nagnet compare tiny --seeds 2")
    assert read_protocol(folder)["question"] == "Does it win?" and read_protocol(folder)["plan"]["seeds"] == [0, 1]
    with pytest.raises(UserError, match="another success rule"):
        begin_record(folder, None, "interval reaches 0", tiny_plan(), "nagnet compare tiny")
    with pytest.raises(UserError, match="another question"):
        begin_record(folder, "Does it lose?", None, tiny_plan(), "nagnet compare tiny")
    assert read_protocol(folder)["success_rule"] == "interval below 0"


@pytest.mark.parametrize(
    ("name", "question", "rule", "message"),
    [
        ("0003-readout", None, "below 0", "--question"),
        ("0003-readout", "Why?", None, "--success-rule"),
        ("readout", "Why?", "below 0", "four digits"),
    ],
)
def test_a_record_without_name_question_or_rule_is_refused(tmp_path, tiny_plan, name, question, rule, message):
    with pytest.raises(UserError, match=message):
        begin_record(tmp_path / name, question, rule, tiny_plan(), "nagnet compare tiny")
    assert not (tmp_path / name).exists()


def test_other_folders_are_left_alone(folder, tiny_plan):
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# 0003: by hand\n")
    with pytest.raises(UserError, match="no record of a comparison"):
        begin_record(folder, "Why?", "below 0", tiny_plan(), "nagnet compare tiny")
    assert (folder / "README.md").read_text() == "# 0003: by hand\n"
    with pytest.raises(UserError, match=r"protocol\.json"):
        read_protocol(folder)


def test_the_index_has_generated_and_hand_written_records(finished, folder):
    by_hand = folder.parent / "0001-by-hand"
    by_hand.mkdir()
    (by_hand / "README.md").write_text(
        "# 0001: x\n\n**Question.** Is a | b\nor c?\n\n**Protocol.** p\n\n**Verdict.** It runs.\nWell.\n\nmore\n"
    )
    (folder.parent / "0002-open").mkdir()
    (folder.parent / "0002-open" / "README.md").write_text("# 0002: y\n\n**Question.** Why?\n\n## Verdicts\n- a\n")
    (folder.parent / "notes").mkdir()
    lines = write_index(folder.parent).read_text().splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert rows[0] == "| [0001-by-hand](0001-by-hand/README.md) | Is a \\| b or c? | It runs. Well. |"
    assert rows[1] == "| [0002-open](0002-open/README.md) | Why? | in the record |"
    assert rows[2].startswith(
        "| [0003-readout-by-rule](0003-readout-by-rule/README.md) | Does it win? | norm_agnostic - pre"
    )
    assert len(rows) == 3


def test_an_index_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no records"):
        write_index(tmp_path)


def metric_row(step, **more):
    row = {"arm": "a", "step": step, "tokens": 100 * step, "flops": 1e6 * step, "loss": float(step), "lr_scale": 1.0}
    return row | {"injection": 1.0, "grad_norm": {"total": 2.0 * step, "head": 1.0}, "seconds": 1.0} | more


def test_metrics_are_thinned_by_averages():
    health = {"quartiles": {"mean_gain": {"q1": 1 / 3}, "norm": {"q1": 2.0}}, "norm": [1.0]}
    rows = [metric_row(step) for step in range(1, 1001)]
    rows[998] |= {"health": health, "alarms": ["update 3"]}
    thinned = thin(rows)
    assert len(thinned) == 200
    assert thinned[0] == {"step": 5, "tokens": 500, "flops": 5e6, "lr_scale": 1.0, "injection": 1.0} | {
        "loss": 3.0,
        "grad_norm": 6.0,
    }
    assert thinned[-1]["step"] == 1000 and thinned[-1]["mean_gain"] == {"q1": 0.333333} and thinned[-1]["alarms"] == 1
    assert math.isclose(sum(row["loss"] for row in thinned) / 200, 500.5)


def test_short_runs_are_not_thinned():
    assert [row["step"] for row in thin([metric_row(step) for step in (1, 2, 3)])] == [1, 2, 3]


def test_rows_of_a_rule_without_gates_have_no_gains():
    row = metric_row(1, health={"quartiles": {"norm": {"q1": 2.0}}})
    assert "mean_gain" not in thin([row])[0]
