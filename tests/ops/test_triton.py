"""The Triton kernels on a machine without a GPU: runs their tests in processes of their own, and tests their choice."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nagnet import ops
from nagnet.errors import UserError

FOLDER = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_tests(name, folder, *options, **variables):
    """Runs the tests of a file, which must all pass."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)} | variables
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", str(FOLDER / f"{name}.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


@needs_triton
def test_kernels_by_the_interpreter(tmp_path):
    chosen = "chunks_of_a_gpu or to_the_bit or contiguous or either_backend"
    run_tests("triton_interpreted", tmp_path, "-k", chosen, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", ["not slow", "slow"])
def test_kernels_by_the_interpreter_at_length(part, tmp_path):
    run_tests("triton_interpreted", tmp_path, "-m", part, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", ["not slow", "slow"], ids=["operators", "compiled for GPUs"])
def test_operators_and_kernels_as_a_compiler_sees_them(part, tmp_path):
    run_tests("triton_traced", tmp_path, "-m", part)


def test_without_triton_the_backend_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(ops, "_modules", {name: ops._modules[name] for name in ("reference", "fused")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install triton"):
        ops.set_backend("triton")
    assert ops.get_backend() == "auto"
