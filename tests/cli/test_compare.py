"""compare and demo: what they write and print, and bad input, which is one line, exit code 2 and nothing written."""

import json
import os
import shlex
import signal
import sysconfig
from pathlib import Path

import pytest

from nagnet.cli.application import run
from nagnet.training import comparison, comparison_report
from nagnet.training.loop import Trainer

TINY = ["model.d_model=16", "model.n_layers=2", "model.vocab_size=320", "seq_len=32", "batch_size=2", "steps=6"]
TINY += ["eval_bytes=20000", "dtype=float32", "compile=false"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(comparison, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(comparison, "CONFIDENCE_ROWS", 4)


@pytest.fixture
def few_figures(monkeypatch):
    """Loss and differences alone, as drawing takes longer than training here."""
    monkeypatch.setattr(comparison_report, "_inside", lambda *_: [])


@pytest.fixture
def text(tmp_path):
    return _text(tmp_path)


def _text(folder):
    (folder / "text").mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        (folder / "text" / path.name).write_bytes(path.read_bytes())
    return folder / "text"


def _small(folder):
    (folder / "small.txt").write_text("One short line.\n\n" * 4000)
    return folder / "small.txt"


def _binary(folder):
    (folder / "data.bin").write_bytes(bytes(range(256)) * 10)
    return folder / "data.bin"


def _empty(folder):
    (folder / "empty.txt").write_text("")
    return folder / "empty.txt"


def _five_files(folder):
    """Enough text to train on, and one document held out: no interval could be given."""
    (folder / "five").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse", "ast", "calendar", "configparser", "dataclasses"):
        (folder / "five" / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder / "five"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda folder: ["compare", "stdlib-tyny"], "stdlib-tiny"),
        (lambda folder: ["demo", "--data", folder / "missing"], "missing"),
        (lambda folder: ["demo", "--data", _binary(folder)], "data.bin"),
        (lambda folder: ["demo", "--data", _empty(folder)], "empty.txt"),
        (lambda folder: ["demo", "--data", _small(folder)], "vocabulary"),
        (lambda folder: ["compare", "--arms", "pre_norm"], "two or more"),
        (lambda folder: ["compare", "--arms", "pre_norm,nagg"], "nagg"),
        (lambda folder: ["demo", "--budget", "-1"], "flops"),
        (lambda folder: ["demo", "--budget", "inf"], "flops"),
        (lambda folder: ["demo", "--seed", "-1"], "seed"),
        (lambda folder: ["demo", "--seed", str(10**22)], "seed"),
        (lambda folder: ["demo", "--data", _five_files(folder)], "held-out"),
        (lambda folder: ["compare", "--seeds", "0"], "1 or more"),
        (lambda folder: ["compare", "stdlib-tiny", "optimizer.matrix=1"], "optimizer.matrix_lr"),
        (lambda folder: ["compare", "--sweep", "pre_norm:optimizer.free_head_lr=1,2"], "unequal numbers of trials"),
        (lambda folder: ["compare", "--rerun", folder / "none"], "protocol.json"),
        (lambda folder: ["compare", "--rerun", folder, "--seeds", "3"], "leave out seeds"),
        (lambda folder: ["compare", "--record", folder / "9999-x", "--data", _text(folder)], "--question"),
        (lambda folder: ["compare", "--index", folder], "holds no records"),
        (lambda folder: ["compare", "--jobs", "0", "--data", _text(folder)], "jobs 0"),
    ],
    ids=[
        "recipe",
        "missing",
        "binary",
        "empty",
        "vocabulary",
        "one arm",
        "unknown arm",
        "budget",
        "infinite",
        "seed",
        "huge seed",
        "few files",
        "no seeds",
        "unknown field",
        "unequal trials",
        "no record",
        "rerun of something else",
        "no question",
        "no records",
        "no jobs",
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, arguments, message):
    code = run([*map(str, arguments(tmp_path)), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_compare_writes_a_run_and_refuses_to_overwrite_it(tmp_path, text, capsys):
    out = tmp_path / "out"
    arguments = ["compare", "stdlib-tiny", *TINY, "--data", str(text), "--budget", "1e8", "--eager", "--json"]
    arguments += ["--out", str(out)]
    assert run(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary["arms"]) == {"norm_agnostic", "pre_norm"}
    assert "one seed: interval over held-out documents" in (out / "report.html").read_text()
    assert not (out / "figures" / "difference.png").exists()
    before = (out / "summary.json").read_bytes()
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "summary.json").read_bytes() == before


def test_undeclared_differences_are_printed_and_refused(tmp_path, text, capsys):
    out = tmp_path / "out"
    arguments = ["compare", "stdlib-tiny", *TINY, "--data", str(text), "--out", str(out)]
    arguments += ["--arms", "pre_norm,low=norm_agnostic", "--change", "low:optimizer.gate_lr=0.0001"]
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert "optimizer.gate_lr: pre_norm 0.001, low 0.0001" in printed.out
    assert "optimizer.gate_lr" in printed.err and not out.exists()


def test_a_record_is_made_and_run_again_by_one_command(tmp_path, text, capsys, few_figures):
    record = tmp_path / "records" / "0004-tiny"
    arguments = ["compare", "stdlib-tiny", *TINY, "--data", str(text), "--arms", "pre_norm,norm_agnostic+softcap"]
    asked = ["--seeds", "2", "--record", str(record), "--question", "Does it's run?", "--success-rule", "it does"]
    assert run([*arguments, *asked, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "mean of 2 seeds" in printed and "at 2 seeds" in printed and "AUROC of exp(s_N)" in printed
    page = (record / "README.md").read_text()
    assert "Does it's run?" in page and "**Verdict.**" in page
    command = json.loads((record / "protocol.json").read_text())["command"]
    assert shlex.split(command) == ["nagnet", *arguments[:-4], "--data", str(text), *arguments[-2:], *asked]
    assert "0004-tiny" in (record.parent / "INDEX.md").read_text()
    assert run(["compare", "--rerun", str(record), "--out", str(tmp_path / "again")]) == 0
    again = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("norm_agnostic+softcap - pre_norm")]
    assert line in again.splitlines() and f"recorded: {line}" in again
    (record.parent / "INDEX.md").unlink()
    assert run(["compare", "--index", str(record.parent)]) == 0
    assert "0004-tiny" in (record.parent / "INDEX.md").read_text()


def test_an_interrupted_comparison_says_how_to_go_on(tmp_path, text, capsys, monkeypatch, few_figures):
    out = tmp_path / "out"
    arguments = ["compare", "stdlib-tiny", *TINY, "--data", str(text), "--out", str(out), "--seeds", "2"]
    original = Trainer.step

    def interrupt(trainer):
        if trainer.config.seed == 1 and trainer.n_done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupt)
        assert run(arguments) == 130
    error = capsys.readouterr().err
    assert "norm_agnostic 6 steps of seed 0" in error and "--resume goes on" in error
    assert json.loads((out / "summary.json").read_text())["interrupted"]
    assert run(arguments) == 2, "not without --resume"
    assert "--force" in capsys.readouterr().err
    assert run([*arguments, "--resume"]) == 0
    assert "1 of 2 runs are there already" in capsys.readouterr().out
    assert (out / "report.html").is_file()
    assert run([*arguments[:-2], "--resume"]) == 2
    assert "another comparison" in capsys.readouterr().err


def test_resume_needs_a_folder(capsys):
    assert run(["compare", "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_arms_are_listed(capsys):
    assert run(["compare", "--list-arms"]) == 0
    printed = capsys.readouterr().out
    assert "pre_norm: x + F(N(x))" in printed and "norm_agnostic+softcap: " in printed


def test_recipes_lists_each_with_its_size(capsys):
    assert run(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["stdlib-tiny"]["parameters"] == 1_057_089
    assert rows["stdlib-tiny"]["training_flops"] > 0
