"""Bad input to compare and demo: one line, exit code 2, nothing written."""

import json
import sysconfig
from pathlib import Path

import pytest

from nagnet.cli.application import run


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


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
    arguments = ["compare", "--data", str(text), "--budget", "1e10", "--eager", "--json", "--out", str(out)]
    assert run(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary["arms"]) == {"norm_agnostic", "pre_norm"}
    assert (out / "report.html").is_file()
    before = (out / "summary.json").read_bytes()
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "summary.json").read_bytes() == before


def test_recipes_lists_each_with_its_size(capsys):
    assert run(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["stdlib-tiny"]["parameters"] == 1_057_089
    assert rows["stdlib-tiny"]["training_flops"] > 0
