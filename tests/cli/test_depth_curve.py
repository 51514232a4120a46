"""nagnet depth-curve, and the dial of the other commands, on a small trained run."""

import json

import pytest

from nagnet.cli.application import run


def test_writes_points_and_a_figure(trained, tmp_path, capsys):
    out = tmp_path / "curve"
    arguments = [
        "depth-curve",
        str(trained / "full"),
        "--rates",
        "0.25",
        "0.5",
        "--max-bytes",
        "800",
        "--out",
        str(out),
    ]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert "full depth" in printed and "lowest gain" in printed
    record = json.loads((out / "depth_curve.json").read_text())
    assert len(record["points"]) == 1 + 2 * 5
    assert len((out / "depth_curve.csv").read_text().splitlines()) == 12
    assert {path.suffix for path in out.glob("depth_curve.*")} == {".json", ".csv", ".png", ".svg"}
    assert run(arguments) == 2  # never over an earlier result


def test_evaluate_and_generate_take_the_dial(trained, capsys):
    def result(*arguments):
        assert run([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    full = result("evaluate", "bpb", trained / "full")
    assert full["skip_rates"] is None
    same = result("evaluate", "bpb", trained / "full", "--skip-threshold", "0")
    assert same["bits_per_byte"] == full["bits_per_byte"] and same["skip_rates"]["flops"] == 0
    none = result("evaluate", "bpb", trained / "full", "--skip-threshold", "1")
    assert none["skip_rates"]["sublayer_tokens"] == 1 and none["bits_per_byte"] != full["bits_per_byte"]
    learned = result("evaluate", "bpb", trained / "mod")["skip_rates"]
    assert 0 < learned["sublayer_tokens"] < 0.6
    prompt = ("--prompt", "a stream", "--tokens", "4")
    (text,) = result("generate", trained / "full", *prompt, "--skip-threshold", "1")["completions"]
    assert text["skip_rates"]["decode"]["sublayer_tokens"] == text["skip_rates"]["prefill"]["sublayer_tokens"] == 1
    assert run(["generate", str(trained / "mod"), *prompt]) == 0
    assert "sublayers skipped in prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["depth-curve", "twin"], "has no gain"),
        (["depth-curve", "full", "--rates", "1.5"], "skip rate 1.5"),
        (["evaluate", "bpb", "full", "--skip-threshold", "2"], "skip threshold is 2.0"),
        (["generate", "full", "--prompt", "a", "--skip-threshold", "-1"], "skip threshold is -1.0"),
        (["evaluate", "bpb", "twin", "--skip-threshold", "0.5"], "has no gain"),
        (["train", "stdlib-tiny", "model.skip.target_rate=1", "model.residual=norm_agnostic"], "target_rate is 1.0"),
        (["train", "stdlib-tiny", "model.residual=pre_norm", "model.skip.threshold=0.5"], "pre_norm has no gain"),
    ],
)
def test_bad_input(trained, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    names = {"full", "twin"}
    assert run([str(trained / part) if part in names else part for part in arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not any(tmp_path.iterdir())
