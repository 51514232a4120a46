"""Several processes for one test, and comparisons of seconds."""

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nagnet.models.config import ModelConfig
from nagnet.training import comparison
from nagnet.training.config import RunConfig
from nagnet.training.experiment import Experiment
from nagnet.training.plan import make_plan, parse_arms
from nagnet.training.text import open_text


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Runs ``python SCRIPT ARGUMENTS`` in several processes that find each other as torchrun's do.

    The function waits for all of them and returns (exit code, output) of each; what still runs after ``timeout``
    seconds is killed.
    """

    def run(script: str, *arguments: str, size: int = 2, timeout: float = 240.0) -> list[tuple[int, str]]:
        # The store lives here, as torchrun's does in its agent: so its port needs no guess.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        environment = os.environ | {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        folder = tmp_path_factory.mktemp("processes")
        outputs = [folder / f"rank-{rank}.txt" for rank in range(size)]  # a pipe would fill, and end with its process
        with contextlib.ExitStack() as stack:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-W", "error", script, *arguments],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stack.enter_context(output.open("w")),
                    stderr=subprocess.STDOUT,
                )
                for rank, output in enumerate(outputs)
            ]
        deadline = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
        return [(process.wait(), output.read_text()) for process, output in zip(processes, outputs, strict=True)]

    return run


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Text of a few files, and a cache for what is made of it."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder):
    """A run of a dozen steps."""
    model = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=320, max_seq_len=64, n_directions=3)
    return RunConfig(
        model=model,
        flops=1.2e8,
        batch_size=2,
        seq_len=64,
        compile=False,
        dtype="float32",
        eval_bytes=20_000,
        health_interval=4,
        data=str(tiny_folder),
    )


@pytest.fixture(scope="session")
def tiny_text(tiny_config, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAGNET_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_text(tiny_config.data, tiny_config.model.vocab_size, tiny_config.eval_bytes)


@pytest.fixture(scope="session")
def tiny_plan(tiny_config):
    """Builds plans of tiny arms: ``tiny_plan("pre_norm,norm_agnostic", n_seeds=2)``."""

    def build(arms="norm_agnostic,pre_norm", changes=(), config=tiny_config, **options):
        return make_plan("tiny", config, parse_arms(arms), changes, **options)

    return build


@pytest.fixture
def tiny_experiment(tiny_text, tmp_path, monkeypatch):
    """Builds experiments of a plan, in one folder of this test."""
    monkeypatch.setattr(comparison, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(comparison, "CONFIDENCE_ROWS", 4)
    monkeypatch.setenv("NAGNET_CACHE", str(tmp_path / "cache"))

    def build(plan, out=tmp_path / "out", **options):
        return Experiment(plan, tiny_text, out, torch.device("cpu"), echo=lambda line: None, **options)

    return build
