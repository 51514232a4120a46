"""The command reads pairs from the command line and from summaries, and refuses what is neither."""

import json

import pytest

from nagnet.cli.application import run


def _summary(folder, budget, values):
    row = {"arm_a": "norm_agnostic", "arm_b": "pre_norm", "by_seed": values}
    folder.mkdir()
    content = {"recipe": "ladder-5", "budget": {"flops": budget}, "differences": [row]}
    (folder / "summary.json").write_text(json.dumps(content))
    return str(folder)


def test_the_walkthroughs_pairs(capsys):
    assert run(["extrapolate", "--pair", "1e18:0.038", "3e18:0.016", "--budget", "3e19"]) == 0
    printed = capsys.readouterr().out
    assert "predicted gap +0.0026" in printed and "power law" in printed
    assert "Two budgets" in printed


def test_summaries_and_pairs_together(tmp_path, capsys):
    folders = [_summary(tmp_path / "a", 1e12, [0.08, 0.09]), _summary(tmp_path / "b", 1e13, [0.04, 0.041])]
    assert run(["extrapolate", *folders, "--pair", "1e14:0.02:0.001", "--budget", "1e15", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 3 and result["pairs"][0]["n_seeds"] == 2
    assert result["interval"][0] < result["gap"] < result["interval"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "1e18=0.038", "3e18:0.016"], "1e18=0.038"),
        (["--pair", "1e18:0.038:1:2", "3e18:0.016"], "FLOPS:GAP"),
        (["--pair", "1e18:0.038"], "two or more budgets"),
        (["missing.json"], "missing.json"),
        (["BROKEN"], "no summary"),
        (["OLD"], "--seeds 3"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "broken.json").write_text("[1, 2")
    (tmp_path / "old.json").write_text('{"recipe": "x", "budget": {"flops": 1}, "differences": [{"arm_a": "a"}]}')
    names = {"BROKEN": str(tmp_path / "broken.json"), "OLD": str(tmp_path / "old.json")}
    words = [names.get(word) or word for word in arguments]
    code = run(["extrapolate", *words, "--budget", "3e19"])
    printed = capsys.readouterr()
    assert code == 2 and message in printed.err and len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
