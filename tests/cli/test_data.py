"""nagnet data as a user meets it: what it prints, exit codes, the hub and its absence."""

import json
import os
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nagnet.cli.application import run
from nagnet.cli.data import _Meter
from nagnet.data.manifest import Totals
from nagnet.data.shards import open_shards


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [f"row {i} of a table, the cat sat on the mat {i}" for i in range(60)]
    pq.write_table(pa.table({"text": [*rows, "", None]}), folder / "a.parquet")
    return folder


def prepare(source, out, *options: str) -> int:
    return run(["data", "prepare", str(source), str(out), "--vocab-size", "270", "--workers", "1", *options])


def test_prepare_says_what_it_made(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nagnet.training.progress.LINE_INTERVAL", 0.0)
    assert prepare(source, tmp_path / "out", "--shard-tokens", "500") == 0
    output = capsys.readouterr()
    shards = open_shards(tmp_path / "out", verify=True)
    assert f"{shards.n_tokens:,} tokens" in output.out and f"in {len(shards.manifest.shards)} shards" in output.out
    assert "dropped    1 empty, 1 null" in output.out
    assert shards.content_hash in output.out
    assert "training a tokenizer of 270 ids" in output.err
    assert f"{shards.n_tokens / 1e6:.1f}M tokens" in output.err and "tokens/s" in output.err and "left" in output.err


def test_progress_without_a_known_end_claims_none(capsys, monkeypatch):
    monkeypatch.setattr("nagnet.training.progress.LINE_INTERVAL", 0.0)
    with _Meter("out") as meter:
        for done in (5_000_000, 6_000_000):  # the first five were there before
            meter.update(Totals(bytes=done, tokens=done // 4), None)
    first, second = capsys.readouterr().err.splitlines()
    assert "0.00 MB/s" in first and "0.00 MB/s" not in second
    assert "6.0 MB, 1.5M tokens" in second and "? left" in second


def test_prepare_prints_json_and_nothing_else(source, tmp_path, capsys):
    assert prepare(source, tmp_path / "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    shards = open_shards(tmp_path / "out")
    assert result["tokens"] == shards.n_tokens
    assert result["content_hash"] == shards.content_hash
    assert result["dropped"] == {"empty": 1, "null": 1}
    assert result["seconds"] > 0
    assert prepare(source, tmp_path / "out", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"seconds": 0} == result | {"seconds": 0}


def test_verify_finds_damage(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(source, out)
    capsys.readouterr()
    assert run(["data", "verify", str(out)]) == 0
    assert "every file is as it was written" in capsys.readouterr().out
    assert run(["data", "verify", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True
    shard = out / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 4
    shard.write_bytes(content)
    assert run(["data", "verify", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nagnet: error: ") and error.count("\n") == 1 and "shard-00000.bin is corrupt" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "9000"], "the text supports a vocabulary of"),
        (["--column", "body"], "has no column body; choose one of text with --column"),
        (["--tokenizer", "missing.json"], "exclude each other"),
        (["--shard-tokens", "0"], "--shard-tokens 0"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(source, tmp_path, capsys, options, message):
    assert prepare(source, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("nagnet: error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_output_that_cannot_be_written_is_one_line(source, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert prepare(source, tmp_path / "file" / "out") == 2
    assert f"cannot make folder {tmp_path / 'file' / 'out'}: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["data"], ["data", "prepare"], ["data", "mend"], ["data", "prepare", "a"]])
def test_wrong_words_exit_2(arguments):
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("subcommand", ["prepare", "verify"])
def test_subcommands_have_help(subcommand, capsys):
    with pytest.raises(SystemExit) as caught:
        run(["data", subcommand, "--help"])
    assert caught.value.code == 0
    assert f"usage: nagnet data {subcommand}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_a_hub_out_of_reach_is_one_line_soon(tmp_path, environment):
    command = [sys.executable, "-m", "nagnet", "data", "prepare", "hf:climbmix", str(tmp_path / "out")]
    start = time.monotonic()
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "nagnet: error: cannot reach the Hugging Face hub for karpathy/climbmix-400b-shuffle"
    )
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - start < 60  # two seconds on a machine of its own; retries would take minutes
