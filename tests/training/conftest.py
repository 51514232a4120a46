"""Several processes for one test."""

import contextlib
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist


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
