"""Bad input to compare and demo: one line, exit code 2, nothing written."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def _nagnet(*arguments, cwd, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "nagnet", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"NAGNET_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"} | environment,
    )


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _small(folder):
    (folder / "small.txt").write_text("One short line.\n\n" * 40)
    return folder / "small.txt"


def _binary(folder):
    (folder / "data.bin").write_bytes(bytes(range(256)) * 10)
    return folder / "data.bin"


def _empty(folder):
    (folder / "empty.txt").write_text("")
    return folder / "empty.txt"


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
        (lambda folder: ["demo", "--seed", "-1"], "seed"),
    ],
    ids=["recipe", "missing", "binary", "empty", "vocabulary", "one arm", "unknown arm", "budget", "seed"],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, message):
    run = _nagnet(*arguments(tmp_path), "--out", tmp_path / "out", cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""
    assert not (tmp_path / "out").exists()


def test_compare_writes_a_run_and_refuses_to_overwrite_it(tmp_path, text):
    out = tmp_path / "out"
    arguments = ["compare", "--data", text, "--budget", "1e10", "--eager", "--json", "--out", out]
    run = _nagnet(*arguments, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert set(summary["arms"]) == {"norm_agnostic", "pre_norm"}
    assert (out / "report.html").is_file()
    before = (out / "summary.json").read_bytes()
    again = _nagnet(*arguments, cwd=tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr
    assert (out / "summary.json").read_bytes() == before
