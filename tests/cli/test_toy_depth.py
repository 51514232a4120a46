import json

import pytest

from nagnet.cli import application


def test_writes_the_figure_and_prints_the_decades(tmp_path, capsys):
    out = tmp_path / "toy"
    assert application.run(["toy-depth", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "-18.06 decades" in output and str(out / "toy_depth.png") in output
    assert (out / "toy_depth.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (out / "toy_depth.svg").read_bytes()
    assert json.loads((out / "summary.json").read_text())["plain_decades"] == pytest.approx(-18.0618, abs=1e-4)


def test_json_is_all_it_prints(tmp_path, capsys):
    arguments = ["toy-depth", "--out", str(tmp_path), "--depth", "3", "--d-model", "8", "--json"]
    assert application.run(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["depth"] == 3 and len(printed["plain_norm_ratio"]) == 4
    assert printed == json.loads((tmp_path / "summary.json").read_text())


def test_bad_depth_leaves_nothing_behind(tmp_path, capsys):
    out = tmp_path / "toy"
    assert application.run(["toy-depth", "--out", str(out), "--depth", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_second_run_needs_force(tmp_path, capsys):
    arguments = ["toy-depth", "--out", str(tmp_path), "--depth", "2", "--d-model", "4"]
    assert application.run(arguments) == 0
    assert application.run(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert application.run([*arguments, "--force"]) == 0
