"""The processes of one run: joining them, sums over them, and an end to all when one of them dies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nagnet.errors import UserError

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0  # the longest that processes wait for one that tokenises, compiles or writes alone
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # gloo beside nccl: flags and messages need no GPU
# torch raises a plain RuntimeError when a peer is gone; what it says depends on the transport.
_LOST_PEER = re.compile(
    r"gloo|pair closure|NCCL|Connection (closed|reset|refused)|Timed out|Broken pipe", re.IGNORECASE
)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, 0 to size - 1. size: processes in all.
        local_rank: number of this process on its machine, which is that of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files and prints."""
        return self.rank == 0


@contextmanager
def join_world(
    device_name: str | torch.device, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[tuple[World, torch.device]]:
    """Joins the processes that torchrun started, and leaves them at the end; without torchrun there is just one.

    Args:
        device_name: ``cpu``, ``cuda`` (of several processes each takes the GPU of its local rank) or ``mps``.
        timeout_seconds: how long a process waits for the others before it gives up.

    Yields:
        This process's view of the world, and its device.

    Raises:
        UserError: if the environment is not torchrun's, a process has no device, or another process died or stalled
            while this one waited for it.
    """
    world = world_of_environment(os.environ)
    device = _device_of(world, torch.device(device_name))
    if world.size == 1:
        yield world, device
        return
    with _lost_peer_is_user_error(world, timeout_seconds):
        dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=timeout_seconds))
    try:
        with _lost_peer_is_user_error(world, timeout_seconds):
            yield world, device
    except BaseException:
        if device.type == "cpu":  # nccl would wait here for the peer that is gone; the end of the process frees it
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def world_of_environment(environment: Any) -> World:
    """Reads RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them.

    Raises:
        UserError: if some are missing, or one is not a number in its range.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    missing = [name for name in (*names, "MASTER_ADDR") if name not in environment]
    if missing:
        raise UserError(f"WORLD_SIZE is set but {' and '.join(missing)} not; start several processes with torchrun")
    try:
        rank, size, local_rank = (int(environment[name]) for name in names)
    except ValueError:
        values = ", ".join(f"{name}={environment[name]!r}" for name in names)
        raise UserError(f"{values}: these must be whole numbers, as torchrun sets them") from None
    if not (0 <= rank < size and 0 <= local_rank < size):
        raise UserError(f"RANK {rank} and LOCAL_RANK {local_rank} must be 0 or more and below WORLD_SIZE {size}")
    return World(rank, size, local_rank)


def _device_of(world: World, device: torch.device) -> torch.device:
    if world.size > 1 and device.type not in BACKENDS:
        raise UserError(f"{world.size} processes can train on {' or '.join(BACKENDS)}, not on {device.type}")
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    if world.local_rank >= n_gpus:
        raise UserError(
            f"process {world.local_rank + 1} of this machine has no GPU: there are {n_gpus}; start at most so many "
            "with torchrun --nproc-per-node"
        )
    if world.size > 1:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    return device


@contextmanager
def _lost_peer_is_user_error(world: World, timeout_seconds: float) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if not isinstance(error, dist.DistError) and not _LOST_PEER.search(str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"another process of this run died or stalled for {timeout_seconds:g} s, so process {world.rank} of "
            f"{world.size} stops too; look for its message ({reason})"
        ) from error


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Adds a tensor [...] over all processes, in place, and returns it; every process must call this."""
    if _joined():
        dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true in any process, so that all decide alike; every process must call this."""
    if not _joined():
        return flag
    return bool(sum_over_ranks(torch.tensor(int(flag))))


def gather_from_ranks(value: T) -> list[T]:
    """The plain values of all processes, in the order of their ranks; every process must call this."""
    if not _joined():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def on_main(world: World, action: Callable[[], T]) -> T:
    """Runs ``action`` in the main process alone and gives every process its result; every process must call this.

    Args:
        action: returns plain values; what it returns travels between processes.

    Raises:
        UserError: in every process, if ``action`` raised one or an OSError (no space, no permission).
    """
    outcome: list[Any] = [None, None]
    if world.is_main:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = str(error)
        except OSError as error:
            outcome[1] = describe_os_error(error)
    if world.size > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


def describe_os_error(error: OSError) -> str:
    """What the system said, and about which file, in one line."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    # Not isinstance: importing DTensor takes seconds, which a run in one process need not wait for.
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Any) -> Tensor:
    """A sharded tensor gathered from all processes, each of which must call this; any other as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
