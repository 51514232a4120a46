"""The benchmark of a GPU on a CPU, at tiny shapes and with the reference in the place of the kernels."""

import json
from types import SimpleNamespace

import pytest
import torch

from nagnet.benchmarks import gpu, gpu_kernels, training_step
from nagnet.cli.application import run
from nagnet.models.config import ModelConfig
from nagnet.ops import fused, reference

CPU = torch.device("cpu")
TINY = ModelConfig(d_model=64, n_layers=2, n_heads=1, vocab_size=64, n_directions=3)
KERNELS = SimpleNamespace(advance=reference.advance, rotate=reference.rotate, add_norm=reference.add_norm, ROWS=32)
PARTS = [
    "errors",
    "offsets",
    "update 8",
    "update 12",
    "training_step",
    "loss_memory",
    "loss_time",
    "skipping",
    "tiles",
    "training_step without kernels",
]


@pytest.fixture
def shapes(monkeypatch):
    """All parts in a second."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))
    monkeypatch.setitem(training_step.SHAPES, "tiny", (TINY, 2, 8))
    return gpu.Shapes(
        rows=6,
        widths=(8, 12),
        n_directions=3,
        checked=((5, "bfloat16"), (8, "float32")),
        checked_rows=9,
        offset_rows=64,
        step="tiny",
        dtype=torch.float32,
        loss_layers=1,
        compiled=False,
    )


def test_every_part_runs_and_the_targets_are_beside_the_numbers(shapes):
    kept = []
    result = gpu.bench_gpu(KERNELS, CPU, 2, shapes, lambda so_far: kept.append(json.dumps(so_far)))
    assert [name for name in result if name not in ("part_seconds", "targets")] == PARTS
    assert not [part for part in result.values() if isinstance(part, dict) and part.keys() & {"error", "left_out"}]
    assert len(kept) == len(PARTS) and json.loads(kept[-1]).keys() == result.keys()
    names = [row["name"] for row in result["targets"]]
    assert len(names) == 2 * 3 + 2 * 4 + 3
    assert sum("share of copy" in name for name in names) == 4
    met = {row["name"]: row["met"] for row in result["targets"]}
    assert met["error of advance, 8 float32, / reference"] and met["error of write, 5 bfloat16, / reference"]
    assert all(row["same_bits_twice"] and row["ratio"] <= 1.0 for row in result["errors"])
    assert result["offsets"]["equal"]
    assert [row["rows_of_a_tile"] for row in result["tiles"]] == [16, 32, 64] and KERNELS.ROWS == 32
    assert any("training step" in line for line in gpu.summary(result))


def test_a_part_that_fails_is_recorded_and_the_others_run(shapes, monkeypatch):
    monkeypatch.setattr(gpu, "bench_loss_time", lambda *a: 1 / 0)
    result = gpu.bench_gpu(KERNELS, CPU, 2, shapes)
    assert "ZeroDivisionError" in result["loss_time"]["error"] and "alternatives" in result["skipping"]
    assert "  FAILED loss_time: ZeroDivisionError: division by zero" in gpu.summary(result)


def test_no_part_begins_when_the_time_is_up(shapes, monkeypatch):
    monkeypatch.setattr(gpu, "TIME_LIMIT", -1.0)
    result = gpu.bench_gpu(KERNELS, CPU, 2, shapes)
    assert all("left_out" in result[name] for name in PARTS) and result["targets"] == []
    assert len(gpu.summary(result)) == len(PARTS)


def test_an_error_is_seen(shapes):
    class Off:
        """The reference with an update that is off by a thousandth."""

        add_norm = staticmethod(reference.add_norm)

        @staticmethod
        def rotate(direction, log_norm, branch, gain):
            return reference.rotate(direction, log_norm, branch, 1.001 * gain)

        @staticmethod
        def advance(direction, log_norm, branch, gain, parameters):
            return reference.advance(direction, log_norm, branch, 1.001 * gain, parameters)

    rows = gpu_kernels.bench_errors(Off, [(16, "float32")], 20, 3, CPU)
    assert [row["within"] for row in rows] == [False, False, True]


def test_bytes_of_an_update(shapes):
    rows = {row["name"]: row for row in gpu_kernels.bench_update(KERNELS, 6, 8, 3, CPU, 2, compiled=False)}
    size = 6 * 8 * 2
    assert rows["copy"]["bytes"] == 2 * size and rows["copy"]["share_of_copy"] == pytest.approx(1.0)
    assert rows["advance, triton"]["bytes"] == 9 * size and rows["add_norm, triton"]["bytes"] == 8 * size
    assert not rows["copy"]["recorded"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [[], ["--device", "cpu"]])
def test_without_a_gpu_it_says_so_in_one_line(arguments, capsys):
    assert run(["bench", "gpu", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert "needs a CUDA GPU" in error and len(error.splitlines()) == 1
