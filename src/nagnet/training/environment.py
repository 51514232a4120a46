"""Where a result was made: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nagnet import ops
from nagnet.training.compute import device_name


def describe_environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Plain values: device, dtype, backend, threads, machine, versions, git_commit."""
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": ops.get_backend(),
        "threads": torch.get_num_threads(),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "processor": processor_name() if device.type == "cpu" else device_name(device),
        },
        "versions": {name: version(name) for name in ("nagnet", "torch")} | {"python": platform.python_version()},
        "git_commit": git_commit(),
    }


def processor_name() -> str:
    """What the system calls its CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of the source this runs from, with ``-dirty`` where it was changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may lie in another checkout
        return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
